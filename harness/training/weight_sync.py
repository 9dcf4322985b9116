"""Whether the engine took over the learner's weights: a few tokens scored by both, before and after an update.

Two signs of stale weights, each INVALID. The scores disagree over a bound; or the learner's scores moved and the
engine's did not move with them, which shows even an update that is smaller than the bound.

Measured with vLLM 0.32 on a CPU, `tiny` after its cold start, 10 GRPO steps of 128 rollouts at each learning rate,
4 rows of at most 32 tokens; largest difference in nats, from the best to the worst step:

| precision | rate | in step       | one update behind | steps behind that were noticed |
| float32   | 1e-4 | 1e-6 to 1e-5  | 0.05 to 1.4       | 10 of 10                       |
| float32   | 1e-6 | 3e-6 to 2e-5  | 7e-4 to 0.03      | 10 of 10, one by its move only |
| bfloat16  | 1e-4 | 0.04 to 0.08  | 0.03 to 0.6       | 3 of 10, all by their moves    |
| bfloat16  | 1e-6 | 0.06 to 0.14  | 0.06 to 0.14      | none: the update is below rounding |

No step that was in step was called stale. Weights that stay behind drift away, so that a later probe notices.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from harness.interfaces import RolloutEngine
from harness.policy.forward import token_logprobs
from harness.tensors import pad_right
from harness.training.learner import Learner
from harness.types import Group, InvalidRun

# Nats. float32: 50 times the largest difference of an engine in step; bfloat16: 7 times, as GPUs and larger models were
# not measured. Where the learner moved by more than a tenth of the bound on a token, an engine in step moved 0.84 to
# 1.05 times as far (root of the sum of squares over the tokens), a stale one 0 times.
BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 1.0}
LEAST_MOVE = 0.1
Row = tuple[tuple[int, ...], int]


@dataclass(frozen=True)
class Probe:
    """Rows (token ids, tokens of the prompt) and the log-probs of their completion tokens, engine's and learner's."""

    rows: tuple[Row, ...]
    engine: np.ndarray
    learner: np.ndarray


def probe(
    engine: RolloutEngine, policy: nn.Module, groups: Sequence[Group], *, num_rows: int = 4, max_tokens: int = 32
) -> Probe | None:
    """The scores of engine and learner, before an update, for the first tokens of a few of the step's completions.

    None for an engine that shares the learner's weights.
    """
    count = min(num_rows, len(groups))
    chosen = [groups[i * len(groups) // count] for i in range(count)]
    rows = tuple((g.prompt_token_ids + g.rollouts[0].token_ids[:max_tokens], len(g.prompt_token_ids)) for g in chosen)
    scores = engine.score(rows)
    return None if scores is None else Probe(rows, _flat(scores), _learner_scores(policy, rows))


def load_weights(engine: RolloutEngine, learner: Learner, version: int, before: Probe | None) -> dict[str, float]:
    """Wake the engine and give it the learner's weights; `mismatch/after_sync` where it has weights of its own."""
    engine.wake()
    engine.load_weights(learner.weights(merged=not engine.exact_logprobs), version)
    return {} if before is None else {"mismatch/after_sync": check_sync(engine, learner.policy, before)}


def check_sync(engine: RolloutEngine, policy: nn.Module, before: Probe, *, bound: float | None = None) -> float:
    """The largest difference (nats) between engine and learner on the rows of `before`, now that the engine was given
    new weights. InvalidRun where the engine's weights are stale.

    `bound` is by default that of the policy's precision.
    """
    scores = engine.score(before.rows)
    assert scores is not None, "it gave scores before"
    bound = BOUNDS[next(policy.parameters()).dtype] if bound is None else bound
    ours, theirs = _learner_scores(policy, before.rows), _flat(scores)
    difference = float(np.abs(theirs - ours).max())
    if not difference <= bound:
        raise InvalidRun(
            f"stale weights: after they were loaded, engine and learner differ by {difference:.3g} nats on a token "
            f"(at most {bound:g})"
        )
    learner_move, engine_move = (float(np.linalg.norm(x)) for x in (ours - before.learner, theirs - before.engine))
    if np.abs(ours - before.learner).max() > bound / 10 and engine_move < LEAST_MOVE * learner_move:
        raise InvalidRun(
            f"stale weights: the update moved the learner's log-probs by {learner_move:.3g} nats on {len(ours)} tokens "
            f"(root of the sum of squares), the engine's by {engine_move:.3g}"
        )
    return difference


@torch.no_grad()
def _learner_scores(policy: nn.Module, rows: Sequence[Row]) -> np.ndarray:
    device = next(policy.parameters()).device
    tokens = pad_right([ids for ids, _ in rows], torch.int64).to(device)
    mask = pad_right([[0] * n + [1] * (len(ids) - n) for ids, n in rows], torch.bool).to(device)
    logprobs = token_logprobs(policy, tokens, mask, 1.0)[0]
    return logprobs[mask].double().cpu().numpy()


def _flat(rows: Sequence[Sequence[float]]) -> np.ndarray:
    return np.array([value for row in rows for value in row])
