"""`gsm_symbolic` by a second name and in another language, because a run names each of its tests once."""

from typing import Literal

from pydantic import Field

from .gsm_symbolic import GsmSymbolic


class GsmSymbolicAbroad(GsmSymbolic):
    """In German, unless `language` says otherwise."""

    name: Literal["gsm_symbolic_abroad"] = "gsm_symbolic_abroad"  # pyright: ignore[reportIncompatibleVariableOverride]
    language: str = Field(default="deu", pattern=r"^[a-z_]{3,20}$", description="the package's code of a language")
