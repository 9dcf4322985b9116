"""A learned reward: the scalar head of any sequence classifier, read after the last token of prompt and completion.

RLHF's reward model (Ouyang et al. 2022, arXiv:2203.02155, section 3.5). `cohort reward-model` fits one on ranked
rollouts; `path: stage:NAME` is the one that an earlier stage of the run fits. A process loads it once, frozen. It reads
text through its own tokenizer, with its chat template if it has one, so it need not share the policy's
vocabulary.
"""

from pathlib import Path
from typing import Any, Self

from pydantic import Field

from ....base.inputs import Sources
from ....data import GradedGroup
from ....interfaces import Reward
from ..stages.reward_model import fits, reward_model_folder

STAGE = "stage:"


class RewardModel(Reward):
    """The score of an `AutoModelForSequenceClassification` with one label."""

    path: str = Field(min_length=1, description="Hub id, a local folder, or stage:NAME of an earlier stage")

    def score(self, group: GradedGroup) -> list[float]:
        from ..bradley_terry import load_scorer

        return load_scorer(self.path).score([(group.prompt, completion) for completion in group.completions])

    def check(self) -> None:
        from ....policy.model import check_model

        if not self.path.startswith(STAGE):
            check_model(self.path, "rewards.reward_model.path")

    def inputs(self) -> Sources:
        from ....policy.sources import model_sources

        return {} if self.path.startswith(STAGE) else model_sources(self.path)

    def placed(self, stage: Any, directory: Path | None) -> Self:
        if not self.path.startswith(STAGE):
            return self
        name, known = self.path.removeprefix(STAGE), fits(stage)
        if name not in known:
            where = f"stage '{stage.name}': " if stage.name else ""
            rule = f"{where}rewards must read an earlier stage of kind reward_model"
            raise ValueError(f"{rule} ({', '.join(known) or 'there is none'}), got '{name}'; add it before")
        path = stage.spec.model if directory is None else str(reward_model_folder(directory, name))
        return self.model_copy(update={"path": path})

    @property
    def scorer(self) -> str:
        return self.path
