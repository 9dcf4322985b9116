"""A learned reward: the scalar head of any sequence classifier, read after the last token of prompt and completion.

RLHF's reward model (Ouyang et al. 2022, arXiv:2203.02155, section 3.5). `cohort reward-model train` fits one on ranked
rollouts. A process loads the model once, frozen. It reads text through its own tokenizer, with its chat template if it
has one, so it need not share the policy's vocabulary.
"""

from pydantic import Field

from ..data import GradedGroup
from ..ground.inputs import Sources
from ..interfaces import Reward


class RewardModel(Reward):
    """The score of an `AutoModelForSequenceClassification` with one label."""

    path: str = Field(min_length=1, description="Hub id, or a local folder")

    def score(self, group: GradedGroup) -> list[float]:
        from ..policy.bradley_terry import load_scorer

        rows = [(group.prompt, completion) for completion in group.completions]
        return load_scorer(self.path).score(rows)

    def check(self) -> None:
        from ..policy.model import check_model

        check_model(self.path, "rewards.reward_model.path")

    def inputs(self) -> Sources:
        from ..policy.sources import model_sources

        return model_sources(self.path)

    def model_bytes(self) -> int:
        import torch
        from transformers import AutoModelForSequenceClassification

        from ..policy.model import model_config

        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(model_config(self.path))
        return 4 * model.num_parameters()  # it is loaded in float32
