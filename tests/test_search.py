"""A search finds good arms, judges them by all seeds, loses nothing when workers die, and says what it found."""

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import fake_trials
import optuna
import pytest
from cohort.harness.base.files import write_json
from cohort.harness.record.study import SEARCH, STATUS, read_folder, read_study
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import ClaimedTrial, Queue, TrialOutcome
from cohort.harness.study.search import MIN_FOR_IMPORTANCE
from factories import make_study
from optuna.trial import TrialState
from queues import METRIC, a_queue, claimed, die, run

BETA = {"low": 1e-3, "high": 1.0, "log": True}
SPACE = {"algorithm.kl_beta": BETA, "algorithm.group_size": {"choices": [2, 4, 8]}}


pytestmark = pytest.mark.usefixtures("plugins")


def a_search(seeds: tuple[int, ...] = (0, 1), run: Mapping[str, Any] | None = None, **changes: Any) -> StudySpec:
    search = {"space": SPACE, "trials": 12, **changes}
    settings = fake_trials.run_settings(**{"evaluation": {"every": 1}, **(run or {})})
    return make_study(name="s", run=settings, seeds=list(seeds), design="search", search=search)


def accuracy(levels: Mapping[str, Any], seed: int) -> float:
    """Best at kl_beta = 0.01, whatever the group size; a hundredth better with each seed."""
    return 0.9 - (math.log10(levels["algorithm.kl_beta"]) + 2) ** 2 / 10 + seed / 100


def complete(queue: Queue, claim: ClaimedTrial) -> None:
    levels = queue.plan.arms[claim.key[0]].levels
    tokens = float(levels.get("algorithm.group_size", 0))
    values = {METRIC: accuracy(levels, claim.key[1]), "train/generated_tokens": tokens}
    queue.finish(claim, TrialOutcome("complete", metrics=values))


def drive(queue: Queue, end: Callable[[Queue, ClaimedTrial], None] = complete) -> list[tuple[str, int]]:
    """Be the only worker until nothing is left; what was claimed, in order."""
    claimed = []
    while queue.unfinished():
        claim = queue.claim()
        if claim is None:  # the search refused the last points that were left
            assert not queue.unfinished()
            break
        claimed.append(claim.key)
        end(queue, claim)
    return claimed


def searched(queue: Queue, name: str = "s/search") -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=name, storage=queue.storage.optuna).trials


@pytest.mark.parametrize("sampler", ["tpe", pytest.param("gp", marks=pytest.mark.slow)])
def test_a_sampler_runs_each_arm_with_every_seed_and_judges_it_by_the_mean(tmp_path, sampler):
    queue = a_queue(a_search(sampler=sampler), tmp_path)
    claimed = drive(queue)
    assert Counter(Counter(arm for arm, _ in claimed).values()) == {2: 12}
    assert set(Counter(claimed).values()) == {1}
    status = queue.status()
    assert (status.counts(), status.to_come, status.finished) == ({"complete": 24}, 0, True)
    for trial in searched(queue):
        assert trial.values == [pytest.approx(accuracy(trial.params, 0) + 0.005, abs=1e-9)]  # (0 + 0.01) / 2
    record = queue.search_record()
    best = max(record["arms"], key=lambda arm: arm["values"][METRIC])
    assert record["best"] == best["label"]
    assert best["values"][METRIC] == pytest.approx(sum(s[METRIC] for s in best["seeds"].values()) / 2)
    assert 1 / 3 < best["parameters"]["algorithm.kl_beta"] / 0.01 < 3
    assert record["importances"]["method"] == "fANOVA"
    assert sum(record["importances"]["values"].values()) == pytest.approx(1.0)
    assert record["importances"]["values"]["algorithm.kl_beta"] > 0.8  # the other setting has no effect


def test_samplers_learn_from_the_arms_before_though_each_is_made_afresh(tmp_path):
    def trials(sampler: str) -> list[optuna.trial.FrozenTrial]:
        space = {"algorithm.kl_beta": BETA}
        queue = a_queue(a_search(sampler=sampler, space=space, trials=9, seeds=(0,)), tmp_path / sampler)
        drive(queue)
        return searched(queue)

    # |log10(kl_beta) + 2| is the distance to the best; after five random arms a Gaussian process all but knows it.
    found = {s: trials(s) for s in ("random", "tpe", "gp")}
    far = {s: [abs(math.log10(t.params["algorithm.kl_beta"]) + 2) for t in ts] for s, ts in found.items()}
    assert far["tpe"][:5] == far["gp"][:5] == far["random"][:5]
    assert min(far["gp"][5:]) < 0.05 < min(far["random"][:5])
    assert far["tpe"][5:] != far["random"][5:]


def test_a_search_that_was_killed_goes_on_as_if_it_had_not_been(tmp_path):
    whole = drive(a_queue(a_search(), tmp_path / "whole"))
    queue = a_queue(a_search(), tmp_path / "killed")
    for count in range(7):
        claim = claimed(queue)
        if count in (0, 3):
            die(claim, queue)  # its worker is gone; the next claim gets the same (arm, seed)
            queue = Queue(queue.plan)
        else:
            complete(queue, claim)
    assert whole[5:] == drive(Queue(Plan(a_search(), tmp_path / "killed")))
    assert len(searched(queue)) == 12


def test_an_arm_whose_worker_died_while_handing_it_out_is_neither_lost_nor_counted(tmp_path):
    queue = a_queue(a_search(trials=3), tmp_path)
    study = optuna.load_study(study_name="s/search", storage=queue.storage.optuna)
    study.ask()  # asked, and not yet given a label
    claim = claimed(queue)
    complete(queue, claim)
    label = "002: by hand"
    told = study.ask({"algorithm.kl_beta": optuna.distributions.FloatDistribution(1e-3, 1.0, log=True),
                      "algorithm.group_size": optuna.distributions.CategoricalDistribution([2, 4, 8])})  # fmt: skip
    told.set_user_attr("seeds", [0, 1])
    told.set_user_attr("arm", label)  # labelled, and its seeds not yet queued
    keys = [claim.key, *drive(queue)]
    assert Counter(Counter(arm for arm, _ in keys).values()) == {2: 3}
    assert [trial.state for trial in searched(queue)] == [TrialState.FAIL] + [TrialState.COMPLETE] * 3
    assert (label, 0) in keys


def test_several_workers_never_share_an_arm_and_seed_and_leave_none_out(tmp_path):
    first = a_queue(a_search(trials=5, seeds=(0, 1, 2)), tmp_path)
    workers = [first, Queue(Plan(first.plan.study, tmp_path)), Queue(Plan(first.plan.study, tmp_path))]
    claimed: list[tuple[str, int]] = []
    while first.unfinished():
        held = [(worker, claim) for worker in workers if (claim := worker.claim()) is not None]
        claimed += [claim.key for _, claim in held]
        for worker, claim in reversed(held):
            complete(worker, claim)
    assert (len(claimed), len(set(claimed))) == (15, 15)
    assert len({arm for arm, _ in claimed}) == 5


def test_an_invalid_seed_fails_its_arm_and_a_crashed_one_leaves_it_open_until_the_next_start(tmp_path):
    queue = a_queue(a_search(trials=3), tmp_path)
    ends = iter([TrialOutcome("invalid", "loss is NaN"), None, TrialOutcome("failed", "no memory"), None, None, None])

    def end(queue: Queue, claim: ClaimedTrial) -> None:
        outcome = next(ends)
        complete(queue, claim) if outcome is None else queue.finish(claim, outcome)

    drive(queue, end)
    assert queue.status().finished
    states = [TrialState.FAIL, TrialState.RUNNING, TrialState.COMPLETE]
    assert [trial.state for trial in searched(queue)] == states
    record = queue.search_record()
    arms = {arm["label"][:3]: arm for arm in record["arms"]}
    assert [(arms[n]["state"], arms[n]["reason"]) for n in ("001", "002", "003")] == [
        ("invalid", "seed 0: loss is NaN"), ("failed", "no memory"), ("complete", None)
    ]  # fmt: skip
    assert arms["001"]["values"] == {}
    assert record["importances"]["method"] is None
    assert f"needs {MIN_FOR_IMPORTANCE} complete arms, there are 1" in record["importances"]["reason"]
    queue.retry_failed()
    assert drive(queue, complete) == [(arms["002"]["label"], 0)]
    assert searched(queue)[1].state == TrialState.COMPLETE


def test_a_repeated_run_and_a_combination_that_is_none_are_refused_with_the_reason_and_count_for_nothing(tmp_path):
    space = {"algorithm.kl_beta": {"choices": [0.01, 0.1]}, "algorithm.group_size": {"choices": [2, 4, 8]}}
    queue = a_queue(a_search(space=space, trials=6, seeds=(0,)), tmp_path)
    drive(queue)
    record = queue.search_record()
    points = {tuple(arm["parameters"].values()) for arm in record["arms"]}
    assert points == {(beta, size) for beta in (0.01, 0.1) for size in (2, 4, 8)}
    assert all(r["reason"].startswith("the same run as arm '00") for r in record["refused"])
    # A group of 64 does not divide 32 rollouts; each value alone is fine with the base run (64 rollouts, group 8).
    space = {"algorithm.group_size": {"choices": [2, 64]}, "rollouts_per_step": {"choices": [64, 32]}}
    queue = a_queue(a_search(space=space, trials=4, seeds=(0,), sampler="random"), tmp_path / "other")
    drive(queue, lambda queue, claim: queue.finish(claim, TrialOutcome("complete", metrics={METRIC: 0.5})))
    record = queue.search_record()
    assert len(record["arms"]) == 3
    invalid = [refused for refused in record["refused"] if "must divide rollouts_per_step (32)" in refused["reason"]]
    assert invalid
    assert all(r["parameters"] == {"algorithm.group_size": 64, "rollouts_per_step": 32} for r in invalid)
    assert queue.status().finished


@pytest.mark.parametrize(("pruner", "sampler"), [("median", "random"), ("hyperband", "tpe")])
def test_arms_that_are_behind_are_given_up_at_a_validation_and_seeds_run_in_order(tmp_path, pruner, sampler):
    """Every run has 7 steps and a validation after each; an arm's accuracy grows evenly to its final one."""
    queue = a_queue(a_search(pruner=pruner, trials=12, sampler=sampler), tmp_path)
    steps: dict[tuple[str, int], int] = {}

    def end(queue: Queue, claim: ClaimedTrial) -> None:
        final = accuracy(queue.plan.arms[claim.key[0]].levels, claim.key[1])
        for step in range(1, 8):
            steps[claim.key] = step
            reason = queue.report(claim.key, step, final * step / 7)
            if reason is not None and step < 7:
                return queue.finish(claim, TrialOutcome("pruned", reason))
        return queue.finish(claim, TrialOutcome("complete", metrics={METRIC: final}))

    claimed = drive(queue, end)
    trials = searched(queue)
    states = Counter(trial.state for trial in trials)
    assert set(states) == {TrialState.COMPLETE, TrialState.PRUNED}
    assert states[TrialState.PRUNED] >= 3
    for trial in trials:
        keys = [key for key in claimed if key[0] == trial.user_attrs["arm"]]
        assert [seed for _, seed in keys] == [0, 1][: len(keys)]
        spent = sum(steps[key] for key in keys)
        assert max(trial.intermediate_values) == spent  # steps are counted on from seed to seed
        if trial.state == TrialState.COMPLETE:
            assert spent == 14
            # At step 7 of the second seed: the mean of two final accuracies.
            assert trial.intermediate_values[14] == pytest.approx(accuracy(trial.params, 0) + 0.005, abs=1e-9)
            assert trial.intermediate_values[9] == pytest.approx((accuracy(trial.params, 0) + 0.005) * 2 / 7, abs=1e-9)
        else:
            assert spent < 14
            assert pruner in trial.user_attrs["reason"]
    best = max(accuracy(trial.params, 0) for trial in trials)
    kept = [accuracy(trial.params, 0) for trial in trials if trial.state == TrialState.COMPLETE]
    assert max(kept) > best - 0.05
    record = queue.search_record()
    assert all(arm["values"] == {} for arm in record["arms"] if arm["state"] == "pruned")
    status = queue.status()
    assert (status.finished, status.all_valid) == (True, True)
    assert len(status.trials) == len(claimed)  # seeds that were never handed out are no trials


def a_tuned_comparison(seeds: list[int], trials: int, tuned_on: list[int]) -> StudySpec:
    rate = {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True}}
    return make_study(
        name="c", run={}, seeds=seeds, design="compare",
        compare={"algorithms": ["grpo", "ppo"], "tasks": ["arithmetic"]},
        search={"space": rate, "trials": trials, "seeds": tuned_on},
    )  # fmt: skip


@pytest.mark.slow
def test_a_tuned_comparison_tunes_each_algorithm_and_runs_the_best_setting_with_the_studys_seeds(tmp_path):
    queue = a_queue(a_tuned_comparison(seeds=[0, 1], trials=4, tuned_on=[7, 8]), tmp_path)

    def end(queue: Queue, claim: ClaimedTrial) -> None:
        spec = queue.plan.spec(claim.key)
        wanted = {"grpo": -3, "ppo": -4}[spec.algorithm.name]
        value = 0.9 - (math.log10(spec.optimizer.learning_rate) - wanted) ** 2 / 100
        queue.finish(claim, TrialOutcome("complete", metrics={METRIC: value}))

    claimed = drive(queue, end)
    phases = {label: arm.phase for label, arm in queue.plan.arms.items()}
    tuning = [key for key in claimed if phases[key[0]] == "tuning"]
    assert (len(tuning), {seed for _, seed in tuning}) == (2 * 4 * 2, {7, 8})
    assert Counter(arm.split()[0] for arm, _ in tuning) == {"grpo": 8, "ppo": 8}
    assert sorted(key for key in claimed if key not in tuning) == [
        ("grpo", 0), ("grpo", 1), ("ppo", 0), ("ppo", 1)
    ]  # fmt: skip
    record = queue.search_record()["tuning"]
    for name in ("grpo", "ppo"):
        best = max(record[name]["arms"], key=lambda arm: arm["values"][METRIC])
        assert record[name]["best"] == best["label"]
        final = queue.plan.spec((name, 0))
        assert final.optimizer.learning_rate == best["parameters"]["optimizer.learning_rate"]
        assert (final.algorithm.name, final.seed) == (name, 0)
    assert queue.status().finished


def test_a_cell_of_a_comparison_without_a_valid_setting_ends_without_a_final_arm(tmp_path):
    queue = a_queue(a_tuned_comparison(seeds=[0], trials=2, tuned_on=[7]), tmp_path)

    def end(queue: Queue, claim: ClaimedTrial) -> None:
        valid = queue.plan.spec(claim.key).algorithm.name == "grpo"
        ended = TrialOutcome("complete", metrics={METRIC: 0.5}) if valid else TrialOutcome("invalid", "NaN")
        queue.finish(claim, ended)

    claimed = drive(queue, end)
    assert [key for key in claimed if queue.plan.arms[key[0]].phase == "final"] == [("grpo", 0)]
    assert queue.search_record()["tuning"]["ppo"]["best"] is None
    assert queue.status().finished


@pytest.mark.slow
def test_a_search_with_pruning_runs_resumes_and_is_recorded_with_its_pruned_trials(runs):
    # The fake's accuracy is (group size + seed / 10 + step / 100) / 100: smaller groups are behind at every step.
    space = {"algorithm.group_size": {"choices": [1, 2, 4, 8, 16, 32]}, "algorithm.kl_beta": {"choices": [0.1, 0.2]}}
    study = a_search(space=space, trials=12, pruner="median", sampler="random")
    status = run(study, runs, workers=1)
    counts = status.counts()
    assert (status.finished, status.all_valid) == (True, True)
    assert set(counts) == {"complete", "pruned"}
    record = read_study(runs, "s")
    assert (len(record.trials), record.expected) == (len(status.trials), len(status.trials))
    found = json.loads((runs / "studies" / "s" / "search.json").read_text())
    assert found["arms"] == record.search["arms"]
    assert "group_size=32" in found["best"]
    kept = {arm["label"] for arm in found["arms"] if arm["state"] == "complete"}
    assert {trial.arm for trial in record.trials if trial.state == "complete"} == kept
    assert list(record.arms) == [arm["label"] for arm in found["arms"]]
    for trial in record.trials:
        if trial.state == "pruned":
            assert trial.reason is not None
            assert "behind the other arms with validation/accuracy" in trial.reason
            assert trial.arm not in kept
    assert run(study, runs, workers=1) == status


def test_an_arm_at_its_very_end_is_not_given_up_though_it_is_the_worst(tmp_path):
    queue = a_queue(a_search(pruner="median", trials=4, sampler="random"), tmp_path)
    reasons = []
    for arm in range(4):
        for seed in (0, 1):
            claim = claimed(queue)
            assert claim.key[1] == seed
            final = 0.9 - 0.1 * arm
            for step in range(1, 8):  # each arm is worse than all before it, as its last validation alone shows
                value = final if (seed, step) == (1, 7) else 0.5
                reasons.append(queue.report(claim.key, step, value))
            queue.finish(claim, TrialOutcome("complete", metrics={METRIC: final}))
    assert reasons == [None] * 4 * 14
    assert [trial.state for trial in searched(queue)] == [TrialState.COMPLETE] * 4


def reading_seconds(runs: Path, arms: int) -> float:
    """Processor time for the record of a search whose arms were all given up, with two seeds each."""
    study = a_search()
    folder = fake_trials.begin_study(runs / str(arms), study)
    labels = [f"arm {number}" for number in range(arms)]
    write_json(folder / SEARCH, {"arms": [{"label": one, "state": "pruned", "reason": "behind"} for one in labels]})
    one = {"trial": "none", "factors": {}, "reason": "no memory"}
    failed = [{**one, "arm": label, "seed": seed} for label in labels for seed in (0, 1)]
    write_json(folder / STATUS, {"state": "complete", "stopped": [], "failed": failed})
    took = []
    for _ in range(3):
        began = time.process_time()
        assert len(read_folder(folder, {}).trials) == 2 * arms
        took.append(time.process_time() - began)
    return min(took)


@pytest.mark.long
def test_the_record_of_ten_thousand_trials_is_read_in_linear_time(tmp_path):
    few, many = reading_seconds(tmp_path, 1000), reading_seconds(tmp_path, 5000)
    assert many < 12 * few + 0.05  # five times as many: 5 where it is linear, 25 where it is quadratic
