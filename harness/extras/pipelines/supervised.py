"""Fine-tuning on given answers as an objective of the learner, for stages of rejection sampling.

Cross-entropy: the mean over all tokens of a minibatch of the negative log-prob, as in the cold start.
"""

from collections.abc import Mapping
from typing import ClassVar

from ...data import Batch, PolicyOutput, Tensor
from ...interfaces import Algorithm
from ...settings.run import CriticStart, KLControl, Mismatch, RunSpec


class Supervised(Algorithm):
    """Every token of every answer gets the same credit."""

    objective: ClassVar[Mapping[str, str]] = {"advantage": "1", "aggregation": "mean over all tokens"}

    name: str = "supervised"
    group_size: int = 1

    def advantages(self, batch: Batch) -> Batch:
        return batch.replace(advantages_BT=batch.completion_mask_BT.float())

    def loss(self, batch: Batch, policy: PolicyOutput) -> tuple[Tensor, dict[str, Tensor]]:
        assert batch.loss_weight_BT is not None
        loss = -(batch.loss_weight_BT * policy.logprobs_BT).sum()
        entropy = (batch.loss_weight_BT * policy.entropy_BT.detach()).sum()
        return loss, {"policy/loss": loss.detach(), "policy/entropy": entropy}

    def loss_weights(self, completion_mask_BT: Tensor) -> Tensor:
        return completion_mask_BT / completion_mask_BT.sum()


def supervised(spec: RunSpec) -> RunSpec:
    """The settings with which a learner fine-tunes on `rollouts_per_step` answers in a step, at temperature 1."""
    off = {"rewards": {}, "overlong": "count", "high_entropy_tokens": 1.0}
    sections = {"critic": CriticStart(), "kl": KLControl(), "mismatch": Mismatch()}
    sampling = spec.sampling.model_copy(update={"temperature": 1.0})
    return spec.model_copy(update={**off, **sections, "algorithm": Supervised(), "sampling": sampling})
