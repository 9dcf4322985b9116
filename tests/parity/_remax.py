"""The rows of remax-rl: its replay of verified answers, and the advantages that its Re:Max gives fresh ones.

Its own method makes loss and gradient from scores that it is handed; they are means of our log-probs, in float32.
"""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from _cases import Case, Numbers, cases, our_advantages
from _table import Row
from cohort.algorithms.maxrl import MaxRL
from cohort.harness.data import Prompt
from cohort.harness.extras.successes.algorithms.dr_grpo_replay import DrGRPOReplay
from cohort.harness.run.rollout import Rollouts, replayed
from remax.core.bank_types import VerifiedCanonicalReplayGroup
from remax.core.objectives import binary_maxrl_advantages
from remax.core.scoring import materialize_canonical_replay_batch
from remax.integrations.oat.replay import OatReplayMixin
from torch import Tensor

COEFFICIENT = 0.3


def binary() -> Iterator[Case]:
    return (case for case in cases() if case.batch.rewards_B.unique().tolist() in ([0.0], [1.0], [0.0, 1.0]))


def maxrl(case: Case) -> Numbers:
    return Numbers(binary_maxrl_advantages(case.batch.rewards_PG).flatten()[:, None] * case.mask)


def kept(case: Case) -> list[list[list[int]]]:
    """Token ids of the answers that the bank has of each prompt: one of the first, two of the second, ..."""
    rows = [[5] * int(count) for count in case.mask.sum(dim=1)]
    size = case.batch.group_size
    return [rows[p * size : p * size + 1 + p % size] for p in range(len(rows) // size)]


def leaf(case: Case) -> Tensor:
    """[B, R], the log-probs of all rows; those of rows that no bank has stay without gradient."""
    return case.completion(case.logprobs_BT).clone().requires_grad_()


def of_the_bank(case: Case, logprobs_BR: Tensor) -> list[Tensor]:
    """The log-probs [its tokens] of each kept answer."""
    size, sizes = case.batch.group_size, case.mask.sum(dim=1)
    places = [p * size + i for p, answers in enumerate(kept(case)) for i in range(len(answers))]
    return [logprobs_BR[row, : int(sizes[row])] for row in places]


def ours(case: Case) -> Numbers:
    answers, logprobs_BR = kept(case), leaf(case)
    prompts = [Prompt(str(p), "1+1=", "2") for p in range(len(answers))]
    algorithm = DrGRPOReplay(group_size=case.batch.group_size, replay_coefficient=COEFFICIENT)
    run: Any = SimpleNamespace(
        spec=SimpleNamespace(algorithm=algorithm, prompts_per_step=len(prompts), device="cpu"),
        kept={str(p): own for p, own in enumerate(answers)}, codec=SimpleNamespace(encode=lambda text: (7, 7)),
        learner=SimpleNamespace(),
    )  # fmt: skip
    batch = replayed(run, prompts, Rollouts(), 0)
    assert batch is not None and batch.loss_weight_BT is not None
    weights = batch.loss_weight_BT[batch.completion_mask_BT]  # row after row, as the answers
    loss = -(weights * torch.cat(of_the_bank(case, logprobs_BR))).sum()
    loss.backward()
    assert logprobs_BR.grad is not None
    return Numbers(loss.detach(), logprobs_BR.grad)


class Theirs(OatReplayMixin):
    """Their method around our log-probs: what stands in for a model, its scoring and its optimizer."""

    def __init__(self, scores: Tensor):
        self.scores, self.model, self.optimizer = scores, torch.nn.Identity(), None
        self.strategy = SimpleNamespace(grad_acc_step=1, backward=lambda loss, *_: loss.backward(retain_graph=True))

    def _materialize_canonical_replay(self, groups: Any, device: Any) -> Any:
        return materialize_canonical_replay_batch(groups, pad_token_id=0, device=device)

    def _score_canonical_replay_rows(self, replay: Any, *, start: int, stop: int, **_: Any) -> Tensor:
        return self.scores[start:stop]


def theirs(case: Case) -> Numbers:
    groups = [
        VerifiedCanonicalReplayGroup((7, 7), tuple(map(str, range(len(own)))), tuple(map(tuple, own)))
        for own in kept(case)
    ]
    logprobs_BR = leaf(case)
    scores = torch.stack([row.mean() for row in of_the_bank(case, logprobs_BR)])
    args = SimpleNamespace(
        train_batch_size_per_device=3, num_samples=case.batch.group_size, online_canonical_replay_alpha=COEFFICIENT,
        online_canonical_replay_objective="verified_likelihood_per_rollout",
    )  # fmt: skip
    with patch("remax.integrations.oat.replay.record_replay_metrics") as record:
        Theirs(scores)._backward_verified_replay(
            args=args, canonical_replay_groups=groups, fresh_advantage_fingerprint=None, infos={}, stats={},
            input_ids=torch.zeros(1, dtype=torch.int64), policy_vocab_upper_bound=10,
        )  # fmt: skip
    assert logprobs_BR.grad is not None
    return Numbers(record.call_args.kwargs["replay_applied_weighted_loss"].double(), logprobs_BR.grad)


def rows() -> list[Row]:
    method = "OatReplayMixin._backward_verified_replay"
    return [
        Row("maxrl: advantage of right and wrong", "binary_maxrl_advantages", binary, partial(our_advantages, MaxRL()),
            maxrl),
        Row("dr_grpo_replay, maxrl_replay: loss of replay", method, cases, ours, theirs),
    ]  # fmt: skip
