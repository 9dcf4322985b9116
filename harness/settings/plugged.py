"""Reads the settings of plugins, which a file gives as a name, a mapping with a name, or the weight of a reward."""

from collections.abc import Mapping
from typing import Any, cast

from .. import plugins
from ..data import Section
from ..interfaces import Algorithm, Reward
from .errors import parsed
from .raw import is_number


def plugin_settings(kind: plugins.Kind, value: Any) -> Any:
    """A plugin's settings from a name or a mapping with a name; settings objects pass unchanged."""
    if isinstance(value, Section):
        return value
    fields = {"name": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ValueError(f"{kind} must be a name or a mapping with a 'name', got {value!r}")
    return plugins.settings_class(kind, str(fields["name"])).model_validate(dict(fields))


def reward_settings(name: str, settings: Any) -> Reward:
    """A reward from its weight or a mapping of its settings; reward objects pass unchanged."""
    if isinstance(settings, Reward):
        return settings
    cls = cast(type[Reward], plugins.load("reward", name))
    if is_number(settings):
        settings = {"weight": settings}
    if not isinstance(settings, Mapping):
        raise ValueError(f"rewards.{name} must be a weight or a mapping of settings, got {settings!r}")
    return parsed(cls, dict(settings), f"rewards.{name}")


def implied_rewards(algorithm: Algorithm | None, overlong: str | None) -> dict[str, Reward]:
    """The rewards that are paid although nobody names them."""
    weights = {} if algorithm is None else {n: reward_settings(n, w) for n, w in algorithm.default_rewards.items()}
    return weights | ({"overlong": reward_settings("overlong", {})} if overlong == "penalise" else {})
