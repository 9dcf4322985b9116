"""Decides which imported runs are invalid: their training log shows what would have ended a run of ours.

Names are TRL's and verl's (its `file` logger writes NaN as null). Bounds of our gates on quantities that neither logs
(answers, changed weights) have the nearest fact that both do: a gradient, or learning rate, of 0 throughout.
"""

import math
from collections.abc import Mapping

from ...settings.run import Gates

NUM_STEPS, ENTROPY = 20, 1e-4  # of the end of the log; nats per token, below which 1,000 tokens hold a tenth of a nat
FINITE = ("loss", "grad_norm", "reward", "actor/pg_loss", "actor/loss", "actor/grad_norm", "critic/score/mean",
          "critic/rewards/mean")  # fmt: skip
_ZERO = {
    "no rewards of a step ever differ, so nothing is learnt": ("reward_std", "score spread"),
    "the gradient is 0 throughout, so weights do not move": ("grad_norm", "actor/grad_norm"),
    "the learning rate is 0 throughout, so weights do not move": ("learning_rate", "actor/lr"),
}
_ENTROPY, _MISMATCH, _ENDS = ("entropy", "actor/entropy"), "rollout_corr/kl", ("critic/score/max", "critic/score/min")
READ = {*FINITE, *(name for names in _ZERO.values() for name in names), *_ENTROPY, _MISMATCH, *_ENDS}


def fault(log: Mapping[int, Mapping[str, float]]) -> str | None:
    """The reason that a run is invalid, from step -> metric of `READ` -> value; None if the log shows none."""
    series: dict[str, list[float]] = {}
    for step, row in sorted(log.items()):
        if broken := next((name for name in FINITE if not math.isfinite(row.get(name, 0.0))), None):
            return f"its log has {broken} = {row[broken]:g} at step {step}"
        if (bound := Gates().mismatch_kl or math.inf) < row.get(_MISMATCH, 0.0):
            return f"its log has {_MISMATCH} = {row[_MISMATCH]:.3g} at step {step}, above {bound:g}"
        spread = {"score spread": row[_ENDS[0]] - row[_ENDS[1]]} if row.keys() >= {*_ENDS} else {}
        for name, value in {**row, **spread}.items():
            series.setdefault(name, []).append(value)
    for reason, names in _ZERO.items():
        if any(name in series and not any(series[name]) for name in names):
            return f"its log shows that {reason}"
    last = next((series[name][-NUM_STEPS:] for name in _ENTROPY if name in series), [])
    if len(last) == NUM_STEPS and max(last) <= ENTROPY:
        return f"its log has an entropy of {max(last):.2g} nats per token at most in its last {NUM_STEPS} steps"
    return None
