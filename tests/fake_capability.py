"""Studies whose test problems were sampled often, before and after training, with known chances of success."""

from __future__ import annotations

import dataclasses

import numpy as np
from cohort.harness.record.study import StudyRecord, TrialRecord
from fake_study import FakeArm, fake_study


def sharpened(chances_N: np.ndarray, lost_N: np.ndarray) -> np.ndarray:
    """What training makes of problems: some are lost, all others are solved as often as by one of four tries before."""
    return np.where(lost_N, 0.002 * chances_N, 1 - (1 - chances_N) ** 4)


def capability_study(
    num_problems: int = 200, num_samples: int = 256, seeds: tuple[int, ...] = (0, 1, 2), with_start: bool = True
) -> StudyRecord:
    """Arm `sharp` is `sharpened`, arm `mild` as often right as by one of two tries; one start for both."""
    rng = np.random.default_rng(5)
    chances, lost = rng.beta(0.4, 1.2, num_problems), rng.random(num_problems) < 0.25
    after = {"sharp": sharpened(chances, lost), "mild": 1 - (1 - chances) ** 2}
    arms = [FakeArm(label, "grpo", 0.5, {}, {}) for label in after]
    record = fake_study(arms, seeds, num_problems=2, num_steps=20)
    starts = {seed: rng.binomial(num_samples, chances) / num_samples for seed in seeds}

    def sampled(trial: TrialRecord) -> TrialRecord:
        fractions = rng.binomial(num_samples, after[trial.arm]) / num_samples
        history = {
            **trial.history,
            "test/num_samples": [(20, float(num_samples))],
            "start/num_samples": [(0, float(num_samples))],
            "test/accuracy": [(20, float(fractions.mean()))],
            "test/pass_at_2": [(20, 0.5)],
        }
        return dataclasses.replace(
            trial,
            history=history,
            summary={**trial.summary, "test_accuracy": float(fractions.mean())},
            per_problem=_named(fractions),
            start_per_problem=_named(starts[trial.seed]) if with_start else {},
        )

    return dataclasses.replace(record, trials=[sampled(trial) for trial in record.trials])


def _named(fractions_N: np.ndarray) -> dict[str, float]:
    return {f"problem-{i}": float(value) for i, value in enumerate(fractions_N)}
