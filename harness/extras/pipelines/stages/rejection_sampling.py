"""Rejection sampling: a model answers training problems, and the policy learns the correct answers.

The model is the policy as the stage starts (DeepSeek-R1, arXiv:2501.12948, section 2.3.3) or a teacher. Departures: the
task decides which answers are correct, and no model filters them; the fine-tuning starts from the sampling policy, or
with `restart` from the run's first one, as in the paper.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, cast

from pydantic import Field

from .... import plugins
from ....data import Prompt
from ....interfaces import RolloutEngine, StageKind


class RejectionSampling(StageKind):
    """The answers that the stage fine-tunes on: correct ones, not cut by the token limit."""

    section: ClassVar[str] = "rejection"
    may_change: ClassVar[frozenset[str]] = frozenset({"steps", "rollouts_per_step", "sampling", "optimizer"})
    keeps_rollouts: ClassVar[bool] = True

    num_prompts: int = Field(default=512, ge=1, description="training problems; all when there are fewer")
    num_samples: int = Field(default=8, ge=1, le=10_000, description="completions of each")
    keep: int = Field(default=1, ge=1, description="distinct correct completions kept of each, the first ones")
    restart: bool = Field(default=False, description="fine-tune the policy that the run started from")
    teacher: str | None = Field(
        default=None, min_length=1, description="model that answers: a Hub id or a folder; by default the policy"
    )

    @property
    def samplers(self) -> Mapping[str, str]:
        return {} if self.teacher is None else {"rejection.teacher": self.teacher}

    def check(self, stage: Any) -> None:
        engine = stage.spec.engine.name
        if self.teacher and not cast(type[RolloutEngine], plugins.load("engine", engine)).exact_logprobs:
            rule = f"stage '{stage.name}': rejection.teacher must be left out with engine={engine}"
            raise ValueError(f"{rule}, which keeps its weights, got {self.teacher}; use engine=transformers")

    def num_rollouts(self) -> int:
        return self.num_prompts * self.num_samples

    def passes(self, stage: Any, done: int) -> float:
        spec = stage.spec
        return 2 * self.num_rollouts() + 3 * done * spec.rollouts_per_step * spec.optimizer.num_inner_epochs

    def learner_spec(self, spec: Any) -> Any:
        from ..supervised import supervised

        return supervised(spec)

    def step(self, run: Any, prompts: Sequence[Prompt], step: int, should_stop: Callable[[], bool]) -> tuple[Any, Any]:
        from ..fine_tuning import fine_tuning_step

        return fine_tuning_step(self, run, prompts, step, should_stop)
