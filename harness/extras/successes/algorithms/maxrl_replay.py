"""MaxRL, and right answers of earlier steps once more (Re:Max): see `..replay` for source and departures."""

from typing import Literal

from .....algorithms.maxrl import MaxRL
from ..replay import Replay


class MaxRLReplay(Replay, MaxRL):
    """MaxRL with replay of verified completions (Re:Max)."""

    name: Literal["maxrl_replay"] = "maxrl_replay"
