"""The verdicts on published claims: support takes a significant difference, and what was not varied is not tested."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.reports.claims import Claim, check_claims
from cohort.reports.render import analysed
from fake_study import FakeArm, factor_grid, fake_study, with_trials
from scipy import stats

MEMORY, TIME, ACCURACY, GROUP_SIZE, KL_WEIGHT, HARD_TASKS = range(6)


def claims(record: StudyRecord) -> list[Claim]:
    return check_claims(analysed(record))


def ppo_and_grpo(ppo: float, grpo: float, **settings: Any) -> list[FakeArm]:
    """Two arms of a model that is not the built-in one."""
    settings = {"model": "other", "autocast": True, **settings}
    return [
        FakeArm(name, name, accuracy, {"algorithm.name": name, **settings}, {"algorithm.name": name})
        for name, accuracy in (("ppo", ppo), ("grpo", grpo))
    ]


def with_history(record: StudyRecord, metric: str, value: Callable[[TrialRecord], list[float]]) -> StudyRecord:
    return with_trials(record, lambda t: {"history": {**t.history, metric: list(enumerate(value(t)))}})


def test_a_difference_in_the_claimed_direction_that_is_not_significant_is_no_support() -> None:
    verdicts = []
    for rng_seed in range(6):
        claim = claims(fake_study(ppo_and_grpo(0.70, 0.71), rng_seed=rng_seed, num_steps=10))[ACCURACY]
        assert (claim.verdict == "undecided") == (claim.p_adjusted >= 0.05)
        verdicts.append(claim.verdict)
    assert verdicts.count("undecided") >= 5


def test_one_seed_one_algorithm_or_no_complete_trial_tests_nothing() -> None:
    single = claims(fake_study(ppo_and_grpo(0.5, 0.8), seeds=[0]))
    assert single[ACCURACY].measured.endswith("with one shared seed no test is possible.")
    alone = claims(fake_study(ppo_and_grpo(0.5, 0.8)[:1]))
    broken = claims(fake_study(ppo_and_grpo(0.5, 0.8), states={("grpo", seed): "invalid" for seed in range(3)}))
    states = {(arm, seed): "running" for arm in ("ppo", "grpo") for seed in range(3)}
    unfinished = claims(fake_study(ppo_and_grpo(0.7, 0.7), states=states))
    for found in (single, alone, broken, unfinished):
        assert {claim.verdict for claim in found} == {"not tested"}
        assert all(math.isnan(claim.p_adjusted) for claim in found)


@pytest.mark.parametrize(("ratio", "verdict"), [(1.8, "supported"), (1.3, "contradicted"), (1.7, "undecided")])
def test_the_ratio_of_peaks_is_held_against_1_7(ratio: float, verdict: str) -> None:
    def peak(trial: TrialRecord) -> Mapping[str, Any]:
        noise = {0: 0.99, 1: 1.01, 2: 1.0}[trial.seed] if trial.arm == "ppo" else 1.0
        return {"summary": {**trial.summary, "peak_memory_bytes": (ratio if trial.arm == "ppo" else 1.0) * 1e9 * noise}}

    claim = claims(with_trials(fake_study(ppo_and_grpo(0.7, 0.7)), peak))[MEMORY]
    assert claim.verdict == verdict
    assert f"{ratio:.2f} [" in claim.measured


@pytest.mark.parametrize(("seconds", "verdict"), [(0.5, "supported"), (0.9, "contradicted"), (0.65, "undecided")])
def test_the_time_of_a_step_is_held_against_35_percent_less(seconds: float, verdict: str) -> None:
    record = fake_study(ppo_and_grpo(0.7, 0.7), seeds=range(4))
    noise = np.random.default_rng(0).normal(1, 0.02, (2, 4))

    def steps(trial: TrialRecord) -> list[float]:
        grpo = trial.arm == "grpo"
        return [99.0] + [(seconds if grpo else 1.0) * noise[int(grpo), trial.seed]] * 5  # the first step is left out

    claim = claims(with_history(record, "seconds/step", steps))[TIME]
    assert claim.verdict == verdict
    # mean over seeds of log(grpo / ppo), with Student's interval
    logs = np.log(seconds * noise[1] / noise[0])
    low, high = np.exp(stats.t.interval(0.95, 3, logs.mean(), stats.sem(logs)))
    assert f"takes {np.exp(logs.mean()):.2f} [{low:.2f}, {high:.2f}] times as long" in claim.measured


def test_p_values_are_corrected_over_the_claims_tested() -> None:
    record = fake_study(ppo_and_grpo(0.70, 0.71), seeds=range(4))

    def steps(trial: TrialRecord) -> list[float]:  # grpo takes half the time, within 0.1 %
        return [0.5 * (1 + trial.seed / 4000) if trial.arm == "grpo" else 1.0] * 5

    found = claims(with_history(record, "seconds/step", steps))
    tested = [claim for claim in found if claim.verdict != "not tested"]
    assert [claim.statement for claim in tested] == [found[TIME].statement, found[ACCURACY].statement]
    # times with so little spread have the smaller p, so accuracy is the larger of two and keeps its own p
    analysis = analysed(record)
    assert found[ACCURACY].p_adjusted == pytest.approx(analysis.comparisons[0].p, rel=1e-9)
    # log seconds of grpo minus ppo against log 0.65, twice over
    logs = np.log([0.5 * (1 + seed / 4000) for seed in range(4)]) - math.log(0.65)
    assert found[TIME].p_adjusted == pytest.approx(2 * float(stats.ttest_1samp(logs, 0).pvalue), rel=1e-9)


def group_sizes(ends: Mapping[int, float]) -> StudyRecord:
    """One arm per group size whose runs end that far below their best of 0.8, give or take 1 point per seed."""
    record = fake_study(factor_grid({"algorithm.group_size": list(ends)}), num_steps=10)

    def curve(trial: TrialRecord) -> list[float]:
        size = trial.factors["algorithm.group_size"]
        return [0.4, 0.8, 0.8 - ends[size] - 0.01 * (trial.seed if size >= 8 else 0)]

    return with_history(record, "validation/accuracy", curve)


def test_an_invalid_run_with_a_large_group_forbids_calling_it_stable() -> None:
    record = group_sizes({4: 0.3, 8: 0.02})
    broken = dataclasses.replace(record.trials[-1], state="invalid", seed=9, trial="broken")
    claim = claims(dataclasses.replace(record, trials=[*record.trials, broken]))[GROUP_SIZE]
    assert (claim.verdict, "1 run with G >= 8 became invalid" in claim.measured) == ("undecided", True)


def betas(accuracies: Mapping[float, float], seeds: int = 5) -> StudyRecord:
    arms = [
        FakeArm(f"beta={beta}", "grpo", accuracy, {"algorithm.kl_beta": beta}, {"algorithm.kl_beta": beta})
        for beta, accuracy in accuracies.items()
    ]
    return fake_study(arms, seeds=range(seeds), num_steps=10)


OTHER_RATE = [
    dataclasses.replace(arm, settings={**arm.settings, "optimizer.learning_rate": rate})
    for arm, rate in zip(ppo_and_grpo(0.5, 0.8), (0.1, 0.2), strict=True)
]


@pytest.mark.parametrize(
    ("record", "claim", "verdict", "words"),
    [
        (fake_study(ppo_and_grpo(0.5, 0.8), range(5)), ACCURACY, "supported", " above PPO (5 seeds)."),
        (fake_study(ppo_and_grpo(0.8, 0.5), range(5)), ACCURACY, "contradicted", " below PPO (5 seeds)."),
        (fake_study(OTHER_RATE, range(5)), ACCURACY, "not tested", "No arms of PPO and GRPO"),
        # 6.1e8 / 4.2e8 = 1.45, most of which is the libraries'
        (fake_study(ppo_and_grpo(0.7, 0.7, model="tiny")), MEMORY, "not tested", "1.45 ["),
        # falls of 2, 3, 4 points with G = 8 against 30 with G = 4: 27 points with a deviation of 1
        (group_sizes({4: 0.3, 8: 0.02}), GROUP_SIZE, "supported", "27.0 points ["),
        (group_sizes({4: 0.02, 8: 0.3}), GROUP_SIZE, "contradicted", "further below"),
        (group_sizes({4: 0.02, 8: 0.01}), GROUP_SIZE, "undecided", "0.0 points [-2.5, 2.5]"),
        (group_sizes({8: 0.02, 16: 0.3}), GROUP_SIZE, "not tested", "No arms with group sizes on both sides"),
        # the range of beta must beat every other beta, and one that beats it contradicts
        (betas({0.0: 0.5, 0.04: 0.8, 0.1: 0.55}), KL_WEIGHT, "supported", "above beta = 0.1"),
        (betas({0.0: 0.5, 0.04: 0.7, 0.1: 0.9}), KL_WEIGHT, "contradicted", "below beta = 0.1"),
        (betas({0.0: 0.3, 0.04: 0.701, 0.1: 0.69}), KL_WEIGHT, "undecided", "above beta = 0;"),
        (betas({0.0: 0.5, 0.1: 0.9}), KL_WEIGHT, "not tested", "No arms with beta inside and outside"),
    ],
)
def test_a_claim_is_decided_by_a_detectable_difference_of_arms_that_differ_in_its_subject_alone(
    record: StudyRecord, claim: int, verdict: str, words: str
) -> None:
    found = claims(record)[claim]
    assert found.verdict == verdict
    assert words in found.measured
    assert verdict not in ("supported", "contradicted") or found.p_adjusted < 0.05


def test_larger_groups_for_harder_tasks_is_a_difference_of_differences() -> None:
    record = fake_study(factor_grid({"algorithm.group_size": [4, 16]}), num_steps=10)

    def tagged(gain: float, arm_by_problem: float = 0.0) -> StudyRecord:
        """The first 64 of 128 problems are of level 1. A large group gains on level 2, one seed more than another."""
        own = np.random.default_rng(0).choice([-arm_by_problem, arm_by_problem], 128)

        def measured(trial: TrialRecord) -> Mapping[str, Any]:
            is_large = trial.factors["algorithm.group_size"] == 16
            gains = [0.001 * trial.seed, gain + 0.002 * trial.seed] if is_large else [0, 0]
            cells = np.repeat([0.6 + gains[0], 0.4 + gains[1]], 64) + is_large * own
            levels = {f"test/accuracy_level_{n}": [(10, float(cells[64 * n - 64 : 64 * n].mean()))] for n in (1, 2)}
            return {
                "history": {**trial.history, **levels},
                "summary": {**trial.summary, "test_accuracy": float(cells.mean())},
                "per_problem": dict(zip(trial.per_problem, cells.tolist(), strict=True)),
            }

        return with_trials(record, measured)

    # large minus small: 20 + 0.2 s points on level 2, 0.1 s on level 1: 20 + 0.1 (mean of s = 0, 1, 2) = 20.1
    claim = claims(tagged(0.2))[HARD_TASKS]
    assert claim.verdict == "supported"
    assert "accuracy on level 2 changes by 20.1 points [" in claim.measured
    assert claims(tagged(-0.1))[HARD_TASKS].verdict == "contradicted"
    # if arms differ by 0.6 either way on single problems, the gain may be the luck of 64: error 0.6 sqrt(2 / 64) = 0.11
    assert claims(tagged(0.2, arm_by_problem=0.6))[HARD_TASKS].verdict == "undecided"
    untagged = with_trials(record, lambda t: {"history": {k: v for k, v in t.history.items() if "level" not in k}})
    assert claims(untagged)[HARD_TASKS].measured == "The task has no difficulty tags."
    overlapping = with_history(tagged(0.2), "test/accuracy_level_2", lambda t: [0.1 + 0.01 * t.seed])
    assert "to tell how many problems are hard" in claims(overlapping)[HARD_TASKS].measured
    # both tags alike in every trial: any shares fit, so none is known
    alike = with_trials(tagged(0.2), lambda t: {
        "history": {**t.history, "test/accuracy_level_2": t.history["test/accuracy_level_1"]},
        "summary": {**t.summary, "test_accuracy": t.history["test/accuracy_level_1"][-1][1]},
    })  # fmt: skip
    assert "to tell how many problems are hard" in claims(alike)[HARD_TASKS].measured

    # no two shares give the whole in every trial, or one of them would be negative
    for seed, weights in ((0.01, (0.5, 0.5)), (0.0, (1.5, -0.5))):

        def whole(trial: TrialRecord, seed: float = seed, weights: tuple[float, float] = weights) -> Mapping[str, Any]:
            levels = [trial.history[f"test/accuracy_level_{n}"][-1][1] for n in (1, 2)]
            score = weights[0] * levels[0] + weights[1] * levels[1] + seed * (trial.seed - 1)
            return {"summary": {**trial.summary, "test_accuracy": score}}

        assert "to tell how many problems are hard" in claims(with_trials(tagged(0.2), whole))[HARD_TASKS].measured


def test_a_single_evaluation_is_no_learning_curve() -> None:
    record = with_history(group_sizes({4: 0.3, 8: 0.02}), "validation/accuracy", lambda t: [0.5])
    assert claims(record)[GROUP_SIZE].measured == "No seed shared by such arms has a learning curve."
