"""Checks that the engine took over the learner's weights: both score a few tokens before and after an update.

For an engine that compares the weights themselves (`verifies_weights`) the difference of the scores is a metric alone.
For another one two signs of stale weights make a run INVALID: the scores differ by more than a bound; or the learner's
moved and the engine's did not, which shows even smaller updates. The learner scores without autocast and TF32, whose
rounding would hide that move. An engine of lower precision hides a small update in its rounding, but a few weights that
round the other way change all its scores; with the old weights it repeats them to the bit.

Where an update moves no token by `SEEN`, the check continues over further steps. docs/bounds.md ("Is a stale vLLM
noticed") measures how soon a stale vLLM is noticed in each precision.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from ...base.tensors import pad_right
from ...data import Group, InvalidRun
from ...devices.device import mixed_precision
from ...interfaces import Precision, RolloutEngine
from ...policy.forward import token_logprobs

# Nats, by the coarser precision of engine and learner. float32: 50 times the largest difference of an engine in step;
# tf32 and bfloat16: 9 and 7 times, as GPUs and larger models were not measured; float16: a fifth of bfloat16's, as its
# differences are. If a run's first check differs by more than a tenth of the bound, its bound is TIMES_USUAL times that
# difference.
BOUNDS: dict[Precision, float] = {"float32": 1e-3, "tf32": 0.1, "float16": 0.2, "bfloat16": 1.0}
TIMES_USUAL = 10
# Where the learner moved by more than SEEN (nats, by its precision) on a token, an engine in step moved at least 0.67
# times as far (root of the sum of squares over the tokens), a stale one 0 times.
SEEN: dict[Precision, float] = {"float32": 1e-4, "tf32": 1e-4, "bfloat16": 0.1}
LEAST_MOVE = 0.1
NUM_ROWS, MAX_TOKENS = 4, 32  # of a spot check, and of each completion in it
Row = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class SpotCheck:
    """Rows (token ids, tokens of the prompt) and the log-probs of their completion tokens, engine's and learner's.

    `usual` is the largest difference (nats) between the two at the run's first check: their rounding.
    """

    rows: tuple[Row, ...]
    engine: np.ndarray
    learner: np.ndarray
    usual: float


def spot_check(
    engine: RolloutEngine, policy: nn.Module, groups: Sequence[Group], last: SpotCheck | None = None
) -> SpotCheck | None:
    """The scores of engine and learner before an update, for the first tokens of a few completions; None for an engine
    that shares the learner's weights. The `last` check stays while the learner has not moved far enough to show more.
    """
    if last is not None and not _has_moved(policy, last.learner, _learner_scores(policy, last.rows)):
        return last
    count = min(NUM_ROWS, len(groups))
    chosen = [groups[i * len(groups) // count] for i in range(count)]
    rows = tuple((g.prompt_token_ids + g.rollouts[0].token_ids[:MAX_TOKENS], len(g.prompt_token_ids)) for g in chosen)
    scores = engine.score(rows)
    if scores is None:
        return None
    theirs, ours = np.concatenate(scores), _learner_scores(policy, rows)
    return SpotCheck(rows, theirs, ours, float(np.abs(theirs - ours).max()) if last is None else last.usual)


def precision(policy: nn.Module) -> Precision:
    """The precision of the policy's matrix products without autocast."""
    weight = next(policy.parameters())
    if weight.dtype == torch.bfloat16:
        return "bfloat16"
    return "tf32" if weight.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"


def check_sync(engine: RolloutEngine, policy: nn.Module, before: SpotCheck) -> float:
    """The largest difference (nats) between engine and learner on the rows of `before`, after the engine got new
    weights. InvalidRun if an engine that cannot compare weights has stale ones: the difference is above the bound of
    the coarser precision and TIMES_USUAL times the usual one, or the engine has not moved with the learner."""
    scores = engine.score(before.rows)
    assert scores is not None, "it gave scores before"
    own = precision(policy)
    bound = max(BOUNDS[own], BOUNDS[engine.precision or own], TIMES_USUAL * before.usual)
    ours, theirs = _learner_scores(policy, before.rows), np.concatenate(scores)
    difference = float(np.abs(theirs - ours).max())
    if engine.verifies_weights:
        return difference
    if not difference <= bound:
        raise InvalidRun(
            f"stale weights: after they were loaded, engine and learner differ by {difference:.3g} nats on a token "
            f"(at most {bound:g})"
        )
    learner_move, engine_move = (float(np.linalg.norm(x)) for x in (ours - before.learner, theirs - before.engine))
    if _has_moved(policy, before.learner, ours) and engine_move < LEAST_MOVE * learner_move:
        raise InvalidRun(
            f"stale weights: the update moved the learner's log-probs by {learner_move:.3g} nats on {len(ours)} tokens "
            f"(root of the sum of squares), the engine's by {engine_move:.3g}"
        )
    return difference


def _has_moved(policy: nn.Module, before: np.ndarray, now: np.ndarray) -> bool:
    """Whether the learner's scores moved so far that the scores of an engine in step must have moved too."""
    return bool(np.abs(now - before).max() > SEEN[precision(policy)])


@torch.no_grad()
def _learner_scores(policy: nn.Module, rows: Sequence[Row]) -> np.ndarray:
    device = next(policy.parameters()).device
    tokens = pad_right([ids for ids, _ in rows], torch.int64).to(device)
    mask = pad_right([[False] * n + [True] * (len(ids) - n) for ids, n in rows], torch.bool).to(device)
    frozen = {p.dtype for p in policy.parameters() if not p.requires_grad}  # two, of products that are held apart
    casts, matmul = len(frozen) > 1 or getattr(policy, "needs_autocast", False), torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "ieee"
    try:
        with mixed_precision(device, casts):
            logprobs = token_logprobs(policy, tokens, mask, 1.0)[0]
    finally:
        matmul.fp32_precision = before
    return logprobs[mask].double().cpu().numpy()
