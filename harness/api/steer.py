"""A request to an arm of a started study, as a word of `cohort study` or a button of its live page, and its answer."""

import shlex
from collections.abc import Sequence
from pathlib import Path

from ..spec.errors import SpecError
from ..spec.raw import parse_overrides
from ..study.steering import clone_arm, drop_arm, resume_arm, stop_arm


def steer(
    verb: str, study: str, runs: Path, arm: str, *, sets: Sequence[str] = (), warm: bool = False,
    storage: str | None = None,
) -> str:  # fmt: skip
    """What a request did, in words; asked again it does nothing more. ValueError for one that cannot be.

    `sets` (PATH=VALUE) and `warm` are of a clone.
    """
    if verb == "clone":
        clone = clone_arm(study, runs, arm, parse_overrides(sets), warm=warm, storage=storage)
        steps = ", ".join(f"seed {seed} from step {step}" for seed, step in zip(clone.seeds, clone.steps, strict=True))
        return (f"New arm: {clone.label}{f' ({steps})' if warm else ''}\n"
                "It runs as soon as a worker is free. If the study has ended, run its command again.")  # fmt: skip
    if verb == "stop":
        new = stop_arm(study, runs, arm, storage)
        words = "stops: its trials finish their step and write a checkpoint." if new else "is already stopped."
        return f"{arm} {words} To continue it: cohort study resume {shlex.quote(study)} {shlex.quote(arm)}"
    if verb == "resume":
        new = resume_arm(study, runs, arm, storage)
        words = "continues as soon as a worker is free" if new else "was not stopped, so nothing changed"
        return f"{arm} {words}. If the study has ended, run its command again."
    if verb == "drop":
        new = drop_arm(study, runs, arm, storage)
        return f"{arm} {'is taken back: none of its trials will run.' if new else 'was already taken back.'}"
    raise SpecError(f"a request to an arm must be stop, resume, clone, drop, got '{verb}'")
