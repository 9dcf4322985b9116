"""A Bradley-Terry fit of a reward model on the rollouts that the run has kept, ranked by correctness, as one step."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ....data import Prompt
from ....interfaces import StageKind
from ....record.run import CHECKPOINTS


class RewardFit(StageKind):
    """The fit (AdamW, constant rate)."""

    section: ClassVar[str] = "fit"
    fits_scorer: ClassVar[bool] = True

    epochs: int = Field(default=3, ge=1, description="passes over the rollouts")
    prompts_per_batch: int = Field(default=16, ge=1, description="prompts per optimiser step, with all completions")
    learning_rate: float = Field(default=1e-4, gt=0, description="learning rate")
    replay: float = Field(default=0.1, ge=0, le=1, description="share of the older rollouts, which earlier fits had")

    def check(self, stage: Any) -> None:
        if not sources(stage)[0]:
            rule = f"stage '{stage.name}' must have rollouts to fit, which the stages since the last fit keep"
            every = stage.spec.checkpoints.rollouts_every
            raise ValueError(f"{rule}, got none with checkpoints.rollouts_every={every}; set it to 1")

    def passes(self, stage: Any, done: int) -> float:
        new, older = map(len, sources(stage))
        return 3 * self.epochs * stage.spec.rollouts_per_step * (new + self.replay * older)

    def learner_spec(self, spec: Any) -> Any:
        from ..supervised import supervised

        return supervised(spec)

    def step(self, run: Any, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]) -> tuple[Any, Any]:
        from ..reward_fit import reward_fit_step

        kept = [list(map(run.rollouts, steps)) for steps in sources(run.stage)]
        models = [reward_model_folder(run.directory, name) for name in (*fits(run.stage), run.stage.name)]
        return reward_fit_step(self, run, kept, models, should_stop)


def fits(stage: Any) -> list[str]:
    """The names of the stages before it that fit a reward model."""
    return [one.name for one in stage.before if isinstance(one.does, RewardFit)]


def reward_model_folder(directory: Path, name: str) -> Path:
    """Folder of a stage's reward model, inside the run's folder."""
    return directory / CHECKPOINTS / f"reward-model-{name}"


def sources(stage: Any) -> tuple[list[int], list[int]]:
    """The steps whose rollouts a fit takes: all since the fit before it, and older ones."""
    last = max((one.end for one in stage.before if isinstance(one.does, RewardFit)), default=0)
    steps = [step for one in stage.before for step in one.kept]
    return [step for step in steps if step > last], [step for step in steps if step <= last]
