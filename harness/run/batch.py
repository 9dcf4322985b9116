"""Turns a step's rollouts into the learner's batch, and computes their metrics."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..data import Batch, GradedGroup, Group
from ..ground.tensors import pad_right
from ..rewards.majority_vote import majority_correct


def collate(
    groups: Sequence[Group],
    rewards: Sequence[Sequence[float]],
    earned: Sequence[Mapping[int, float]] | None = None,
    greedy: Sequence[float] = (),
) -> Batch:
    """The rows of all groups, right-padded to the longest; rewards [P][G].

    `earned` holds {completion token: reward} for each row, if tokens other than the last earn rewards; `greedy` holds
    the reward [P] of each prompt's greedy completion, if one is drawn.
    """
    rows = [(g.prompt_token_ids, r) for g in groups for r in g.rollouts]
    tokens = pad_right([prompt + r.token_ids for prompt, r in rows], torch.int64)
    step_rewards = step_ends = None
    if earned is not None:
        step_rewards, step_ends = torch.zeros(tokens.shape), torch.zeros(tokens.shape, dtype=torch.bool)
        for row, ((prompt, _), values) in enumerate(zip(rows, earned, strict=True)):
            for token, value in values.items():
                step_rewards[row, len(prompt) + token] = value
                step_ends[row, len(prompt) + token] = True
    return Batch(
        step_rewards_BT=step_rewards,
        step_ends_BT=step_ends,
        tokens_BT=tokens,
        completion_mask_BT=pad_right([[0] * len(p) + [1] * len(r.token_ids) for p, r in rows], torch.bool),
        lengths_B=torch.tensor([len(p) + len(r.token_ids) for p, r in rows]),
        sampler_logprobs_BT=pad_right([[0.0] * len(p) + list(r.logprobs) for p, r in rows], torch.float32),
        rewards_B=torch.tensor([value for group in rewards for value in group], dtype=torch.float32),
        group_size=len(groups[0].rollouts),
        greedy_rewards_B=torch.tensor(greedy).repeat_interleave(len(groups[0].rollouts)) if greedy else None,
    )


def rollout_metrics(graded: Sequence[GradedGroup], rewards: Sequence[Sequence[float]]) -> dict[str, float]:
    """Metrics of the sampled completions, including those that need gold: for the reader, not for the algorithm;
    rewards [P][G]."""
    rewards_PG = torch.tensor(rewards, dtype=torch.float32)
    scores = [score for group in graded for score in group.scores or ()]
    return {
        "reward/mean": float(rewards_PG.mean()),
        "reward/std": float(rewards_PG.std()) if rewards_PG.numel() > 1 else 0.0,
        "train/accuracy": float(np.mean([c for g in graded for c in g.correct or ()])),
        **({"train/score": float(np.mean(scores))} if scores else {}),
        "train/answered": float(np.mean([a is not None for g in graded for a in g.answers])),
        "train/majority_accuracy": float(np.mean([majority_correct(g) for g in graded])),
        "train/zero_variance_groups": float((rewards_PG == rewards_PG[:, :1]).all(dim=1).float().mean()),
        "completion/length": float(np.mean([n for g in graded for n in g.num_tokens])),
        "completion/truncated": float(np.mean([t for g in graded for t in g.truncated])),
    }
