"""Dr. GRPO, and right answers of earlier steps once more (Re:Dr): see `..replay` for source and departures."""

from typing import Literal

from .....algorithms.dr_grpo import DrGRPO
from ..replay import Replay


class DrGRPOReplay(Replay, DrGRPO):
    """Dr. GRPO with replay of verified completions (Re:Dr)."""

    name: Literal["dr_grpo_replay"] = "dr_grpo_replay"
