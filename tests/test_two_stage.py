"""The first seeds decide, once, how many a study takes; what is said after that holds as with a fixed number."""

import csv
import dataclasses
import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from cohort.harness.console.views import show_dry_run
from cohort.harness.record.study import StudyRecord
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec, TwoStage, parse_study
from cohort.harness.study import two_stage
from cohort.harness.study.attempts import Attempts
from cohort.harness.study.estimates import budget
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Outcome, Queue
from cohort.harness.study.two_stage import decide
from cohort.reports import statistics
from cohort.reports.anova import anova
from cohort.reports.prose.notes import notes
from cohort.reports.render import analysed, results_csv
from fake_study import fake_study, three_algorithms, with_trials
from fake_trials import a_study
from queues import METRIC, a_queue, claimed
from scipy import stats
from stein_coverage import SPREADS, fixed_seeds, simulate

pytestmark = pytest.mark.usefixtures("plugins")
STAGE = {"first": 4, "half_width": 0.02, "at_most": 16}
ARMS = ("group_size=2", "group_size=4", "group_size=8")

# Differences 0.01, 0.03, 0.02, 0.04 have the mean 0.025 and the variance (0.015^2 + 0.005^2 + 0.005^2 + 0.015^2) / 3
# = 0.0005 / 3, so s = 0.0129099. t of 3 degrees of freedom at 97.5 % is 3.182446 (any table).
# n = (3.182446 x 0.0129099 / 0.02)^2 = 2.054253^2 = 4.219956, so 5 seeds.
DIFFERENCES = (0.01, 0.03, 0.02, 0.04)
DEVIATION = 0.0129099


def staged(**changes: Any) -> StudySpec:
    """Three arms of fakes, the first is the baseline."""
    return a_study(**{"factors": {"algorithm.group_size": [2, 4, 8]}, "seeds": STAGE, **changes})


def scores(**arms: Sequence[float | None]) -> dict[tuple[str, int], dict[str, float]]:
    """(arm, seed) -> metrics; `two=(0.5, None)` has no result of seed 1 (of the arm with group size 2)."""
    names = dict(zip(("two", "four", "eight"), ARMS, strict=True))
    return {
        (names[arm], seed): {METRIC: value}
        for arm, values in arms.items()
        for seed, value in enumerate(values)
        if value is not None
    }


BASE = (0.5, 0.55, 0.45, 0.52)
FOUR = tuple(base + difference for base, difference in zip(BASE, DIFFERENCES, strict=True))
EIGHT = tuple(base + 2 * difference for base, difference in zip(BASE, DIFFERENCES, strict=True))


def test_the_number_of_seeds_follows_steins_rule():
    found = decide(staged(), scores(two=BASE, four=FOUR, eight=BASE))
    first, second = found["comparisons"]
    assert (first["arm"], first["seeds"], first["asks"]) == ("group_size=4", [0, 1, 2, 3], 5)
    assert first["deviation"] == pytest.approx(DEVIATION, abs=1e-7)
    assert two_stage.seeds_asked(DEVIATION, 4, 0.02) == pytest.approx(4.21996, abs=1e-4)
    assert (second["deviation"], second["asks"]) == (pytest.approx(0.0, abs=1e-12), 4)  # no spread: enough
    assert (found["metric"], found["asked"], found["seeds"]) == (METRIC, 5, [0, 1, 2, 3, 4])
    assert two_stage.LEVEL == statistics.LEVEL


def test_all_arms_run_as_many_seeds_as_the_most_spread_comparison_asks_for_but_no_more_than_allowed():
    # twice the spread asks for 4 x 4.219956 = 16.88, so 17 seeds, and 16 are allowed
    found = decide(staged(), scores(two=BASE, four=FOUR, eight=EIGHT))
    assert [one["asks"] for one in found["comparisons"]] == [5, 17]
    assert (found["asked"], found["seeds"]) == (17, list(range(16)))


def test_a_comparison_is_judged_by_the_first_seeds_that_both_arms_completed():
    # 0.01, 0.03 and 0.04 have the deviation 0.0152753; t of 2 degrees of freedom is 4.302653: n = 10.799, so 11
    values = scores(two=(BASE[0], BASE[1], None, BASE[3]), four=FOUR, eight=(0.5, None, 0.5, None))
    found = decide(staged(), values)
    assert [one["seeds"] for one in found["comparisons"]] == [[0, 1, 3], [0]]
    assert [one["asks"] for one in found["comparisons"]] == [11, None]
    assert found["asked"] == 11
    assert decide(staged(), {})["asked"] == 4  # every arm broke: no more of that


def test_another_baseline_is_compared_with_and_a_single_arm_is_judged_by_itself():
    found = decide(staged(baseline="group_size=8"), scores(two=BASE, four=FOUR, eight=EIGHT))
    assert [one["arm"] for one in found["comparisons"]] == ["group_size=2", "group_size=4"]
    alone = a_study(factors={"algorithm.group_size": [4]}, seeds=STAGE)
    found = decide(alone, scores(four=DIFFERENCES))
    assert [(one["arm"], one["asks"]) for one in found["comparisons"]] == [("group_size=4", 5)]


def test_the_score_is_that_of_the_test_split_if_every_trial_has_it():
    values = scores(two=BASE, four=BASE, eight=BASE)
    tested = {key: {**found, "test/accuracy": found[METRIC]} for key, found in values.items()}
    for seed, difference in enumerate(DIFFERENCES):
        tested[ARMS[1], seed]["test/accuracy"] += difference
    found = decide(staged(), tested)
    assert (found["metric"], found["asked"]) == ("test/accuracy", 5)
    del tested[ARMS[2], 0]["test/accuracy"]
    found = decide(staged(), tested)
    assert (found["metric"], found["asked"]) == (METRIC, 4)


SPACE = {"space": {"optimizer.learning_rate": {"low": 1e-5, "high": 1e-3}}, "trials": 2}
COMPARED = {"algorithms": ["fake"], "tasks": ["fake"]}


@pytest.mark.parametrize(
    ("seeds", "changes", "message"),
    [
        ({**STAGE, "half_width": 0}, {}, "seeds.half_width: Input should be greater than 0, got 0"),
        ({**STAGE, "half_width": math.nan}, {}, "seeds.half_width: Input should be a finite number, got nan"),
        ({**STAGE, "half_width": 2}, {}, "seeds.half_width of an accuracy must be below 1, got 2; 2 points are 0.02"),
        ({**STAGE, "first": 2}, {}, "seeds.first: Input should be greater than or equal to 3, got 2"),
        ({**STAGE, "at_most": 3}, {}, "seeds.at_most must be at least seeds.first (4), got 3"),
        ({**STAGE, "at_most": 10**9}, {}, "seeds.at_most: Input should be less than or equal to 1000"),
        ({**STAGE, "width": 1}, {}, "seeds.width: unknown key 'width'; did you mean 'half_width'?"),
        ({"first": 4, "at_most": 16}, {}, "seeds.half_width: is required"),
        (4, {}, "seeds must be a list of seeds, got 4; write seeds: [0, 1, 2, 3]"),
        (STAGE, {"design": "search", "search": SPACE}, "seeds must be a list in a study that searches;"),
        (STAGE, {"design": "compare", "compare": COMPARED, "search": {**SPACE, "seeds": [70]}},
         "seeds must be a list in a study that searches;"),
    ],
)  # fmt: skip
def test_seeds_that_cannot_decide_are_refused_in_one_sentence(seeds, changes, message):
    with pytest.raises(SpecError) as caught:
        staged(**{"seeds": seeds, **({"factors": {}} if changes else {}), **changes})
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_study_with_stages_survives_its_own_document_and_a_list_replaces_them():
    study = staged()
    again = parse_study(study.model_dump(mode="json"), "test")
    assert (again.seeds, again.digest()) == (TwoStage(first=4, half_width=0.02, at_most=16), study.digest())
    assert (study.first_seeds, study.most_seeds) == ([0, 1, 2, 3], 16)
    listed = staged(seeds=[5, 6])
    assert (listed.first_seeds, listed.most_seeds) == ([5, 6], 2)
    digests = {one.digest() for one in (study, listed, staged(seeds={**STAGE, "half_width": 0.03}))}
    assert len(digests) == 3


def test_a_budget_names_the_fewest_and_the_most_trials(tmp_path, capsys):
    queue = Queue(Plan(staged(), tmp_path))
    found = budget(queue.plan, queue.status(2), queue.coming())
    # 3 arms x 4 seeds to 3 x 16, of 7 steps of 64 rollouts
    assert (found["trials"], found["at_least"]) == (48, {"trials": 12, "seconds": found["at_least"]["seconds"]})
    assert (found["steps"], found["rollouts"]) == (336, 21504)
    show_dry_run("sizes", "?", {**found, "memory": {}, "disk": None, "not_checked": [], "together": []})
    shown = " ".join(capsys.readouterr().out.split())
    assert "12 to 48 trials, for the first 4 seeds decide on up to 16: at most 336 steps, 21,504 rollouts" in shown


# The queue.


def finish(queue: Queue, ends: Mapping[tuple[str, int], float | str]) -> list[tuple[str, int]]:
    """Claim and end trials until none waits: with an accuracy, or badly with a state; the keys in their order."""
    done = []
    while (claim := queue.claim()) is not None:
        end = ends.get(claim.key, 0.5)
        outcome = Outcome("complete", metrics={METRIC: end}) if isinstance(end, float) else Outcome(end, "broken")  # pyright: ignore[reportArgumentType]
        queue.finish(claim, outcome)
        done.append(claim.key)
    return done


def ends(values: Mapping[tuple[str, int], Mapping[str, float]]) -> dict[tuple[str, int], float | str]:
    return {key: found[METRIC] for key, found in values.items()}


def test_the_further_seeds_join_the_plan_when_the_first_have_ended(runs):
    queue = a_queue(staged(), runs)
    assert (queue.seeds_record(), queue.status().to_come) == (None, 36)  # 3 arms x 12 further seeds at most
    done = finish(queue, ends(scores(two=BASE, four=FOUR, eight=BASE)))
    assert done == [(arm, seed) for seed in range(5) for arm in ARMS]
    other = Queue(Plan(staged(), runs))  # as another process has it
    record = other.seeds_record()
    assert record is not None and record["seeds"] == [0, 1, 2, 3, 4]
    assert (other.status().counts(), other.status().to_come, other.status().finished) == ({"complete": 15}, 0, True)
    assert not other.unfinished() and (ARMS[0], 4) in other.plan.keys and (ARMS[0], 5) not in other.plan.keys


class NoSecondDecision(Queue):
    """A queue that must not decide again."""

    def _undecided(self, attempts: Attempts) -> dict[tuple[str, int], str]:
        found = super()._undecided(attempts)
        assert not found, "the number of seeds is decided twice"
        return found


def test_the_decision_is_never_made_again_whatever_comes_later(runs):
    queue = a_queue(staged(), runs)
    values = ends(scores(two=BASE, four=FOUR, eight=BASE))
    while queue.seeds_record() is None:
        claim = claimed(queue)
        queue.finish(claim, Outcome("complete", metrics={METRIC: values[claim.key]}))  # pyright: ignore[reportArgumentType]
    before = queue.seeds_record()
    later = NoSecondDecision(Plan(staged(), runs))
    assert finish(later, {(ARMS[1], 4): 0.99, (ARMS[2], 4): "invalid"}) == [(arm, 4) for arm in ARMS]
    later.retry_failed()
    assert finish(later, {}) == []
    assert later.seeds_record() == before


def test_an_invalid_trial_is_not_replaced_and_a_failed_one_delays_the_decision_until_it_has_ended(runs):
    queue = a_queue(staged(), runs)
    values = ends(scores(two=BASE, four=FOUR, eight=BASE))
    broken: dict[tuple[str, int], float | str] = {**values, (ARMS[2], 1): "invalid", (ARMS[1], 0): "failed"}
    assert len(finish(queue, broken)) == 12
    assert (queue.seeds_record(), queue.unfinished(), queue.status().finished) == (None, False, True)
    queue.retry_failed()  # the next start
    assert queue.unfinished() and queue.status().to_come == 36
    assert finish(queue, values) == [(ARMS[1], 0), *[(arm, 4) for arm in ARMS]]
    record = queue.seeds_record()
    assert [one["seeds"] for one in record["comparisons"]] == [[0, 1, 2, 3], [0, 2, 3]]


class DiesBeforeDeciding(Queue):
    """A queue whose process is killed when the last of the first trials is recorded and nothing is decided."""

    def _advance(self, attempts: Attempts) -> None:
        states = self._undecided(attempts)
        if states and set(states.values()) == {"complete"}:
            raise SystemExit
        super()._advance(attempts)


@pytest.mark.attack("Kill between the first seeds and the decision on more")
def test_a_process_that_dies_between_the_stages_leaves_the_decision_to_the_next(runs):
    a_queue(staged(), runs)
    queue = DiesBeforeDeciding(Plan(staged(), runs))
    values = ends(scores(two=BASE, four=FOUR, eight=BASE))
    with pytest.raises(SystemExit):
        finish(queue, values)
    after = Queue(Plan(staged(), runs))
    assert (after.status().counts(), after.status().finished) == ({"complete": 12}, False)
    assert after.unfinished() and after.seeds_record() is None
    assert finish(after, {}) == [(arm, 4) for arm in ARMS]


# The report.


def reported(num_seeds: int = 7, *, at_most: int = 16, half_width: float = 0.02, **changes: Any) -> StudyRecord:
    """Three algorithms after two stages, the first of 4 seeds."""
    record = fake_study(seeds=range(num_seeds), num_steps=10, **changes)
    stage = {"first": 4, "half_width": half_width, "at_most": at_most}
    values = {
        (trial.arm, trial.seed): {METRIC: 0.0, "test/accuracy": trial.summary["test_accuracy"]}
        for trial in record.trials
        if trial.seed < 4 and trial.state == "complete"
    }
    arms = {arm.label: {"optimizer.learning_rate": 1e-5 * (i + 1)} for i, arm in enumerate(three_algorithms())}
    study = a_study(factors={}, arms=arms, seeds=stage)
    decided = {**decide(study, values), "seeds": list(range(num_seeds))}
    return dataclasses.replace(record, two_stage={**stage, **decided})


def test_an_interval_has_the_mean_of_all_seeds_and_the_larger_spread_with_the_first_ones_degrees_of_freedom():
    # a fifth seed of 0.025: the spread of all is sqrt(0.0005 / 4) = 0.01118, less than that of the first;
    # mean 0.025, half width 3.182446 x 0.0129099 / sqrt(5) = 0.0183735
    found = statistics.t_interval((*DIFFERENCES, 0.025), first=4)
    assert (found.estimate, found.df) == (pytest.approx(0.025), 3)
    assert (found.high - found.estimate, found.estimate - found.low) == pytest.approx([0.0183735, 0.0183735], abs=1e-6)
    # t = 0.025 x sqrt(5) / 0.0129099 = 4.330127
    assert statistics.t_test(found) == pytest.approx(2 * stats.t.sf(4.330127, 3), abs=1e-6)
    # a fifth seed of -0.1, which collapsed: 0.1, 0.3, 0.2, 0.4, -1 have the mean 0 and the sum of squares 1.3, so the
    # spread of all is 0.1 x sqrt(1.3 / 4) = 0.0570088 and the half width 3.182446 x 0.0570088 / sqrt(5) = 0.0811365
    found = statistics.t_interval((*DIFFERENCES, -0.1), first=4)
    assert found is not None and found.df == 3
    assert (found.low, found.high) == pytest.approx((-0.0811365, 0.0811365), abs=1e-6)
    assert statistics.t_interval((0.1, 0.2, 0.3), first=1) is None


def test_every_interval_and_p_of_a_comparison_is_that_of_the_larger_spread():
    analysis = analysed(with_trials(reported(), lambda _: {"per_problem": {}}))
    for one in analysis.comparisons:
        differences = np.array(list(one.differences.values()))
        error = max(differences[:4].std(ddof=1), differences.std(ddof=1)) / math.sqrt(7)
        half = stats.t.ppf(0.975, 3) * error
        assert (one.interval.low, one.interval.high) == pytest.approx(
            (differences.mean() - half, differences.mean() + half)
        )
        assert one.p == pytest.approx(2 * stats.t.sf(abs(differences.mean()) / error, 3))
    arm = analysis.arms[1]
    values = np.array(list(arm.scores.values()))
    assert arm.interval.error == pytest.approx(max(values[:4].std(ddof=1), values.std(ddof=1)) / math.sqrt(7))


def test_the_stated_interval_takes_the_spread_over_problems_from_all_seeds_and_the_larger_one_over_seeds():
    rng = np.random.default_rng(5)
    cells = rng.normal(0, 1, (9, 1)) + rng.normal(0, 3, (1, 40)) + rng.normal(0, 1, (9, 40))
    cells[:4] += 3 * np.arange(4)[:, None]  # the first seeds are the more spread ones
    found, whole = statistics.crossed_interval(cells, first=4), statistics.crossed_interval(cells)
    deviations = cells - cells.mean(axis=1, keepdims=True) - cells.mean(axis=0, keepdims=True) + cells.mean()
    rest = (deviations**2).sum() / (8 * 39)
    problem = 9 * cells.mean(axis=0).var(ddof=1)
    seed = 40 * cells[:4].mean(axis=1).var(ddof=1)
    assert seed > 40 * cells.mean(axis=1).var(ddof=1)
    total = seed + problem - rest
    assert found.error == pytest.approx(math.sqrt(total / cells.size))
    assert found.df == pytest.approx(total**2 / (seed**2 / 3 + problem**2 / 39 + rest**2 / (8 * 39)))
    assert found.error != pytest.approx(whole.error)
    assert statistics.crossed_interval(cells, first=9) == whole
    calm = statistics.crossed_interval(cells[::-1], first=4)
    assert calm is not None and calm.error == pytest.approx(whole.error)


def test_an_effect_of_two_levels_has_the_p_of_the_contrast_also_after_two_stages():
    rng = np.random.default_rng(3)
    cells = rng.normal(0, 1, (2, 9, 20)) + rng.normal(0, 1, (2, 9, 1)) + rng.normal(0, 1, (2, 1, 20))
    cells[1] += 0.4
    difference = cells[1] - cells[0]
    student, crossed = statistics.t_interval(difference.mean(axis=1), 4), statistics.crossed_interval(difference, 4)
    assert student is not None and crossed is not None
    (plain,) = anova(cells.mean(axis=2), ["a"], first=4)
    assert plain.p == pytest.approx(statistics.t_test(student))
    (both,) = anova(cells.mean(axis=2), ["a"], cells, first=4)
    assert both.p == pytest.approx(max(statistics.t_test(student), statistics.t_test(crossed)))


def test_the_report_says_why_there_are_so_many_seeds():
    (why,) = [text for topic, text in notes(analysed(reported())) if topic == "Why 7 seeds"]
    assert why.startswith("The first 4 seeds decided how many seeds are needed for a 95 % interval of the difference")
    assert " needs the most: with a standard deviation of " in why and " over 4 seeds it needs " in why
    assert "The width is not reached by " in why  # 7 seeds are fewer than were asked for
    capped = notes(analysed(reported(7, at_most=7)))
    assert "The study allows 7 at most. The width is not reached by " in dict(capped)["Why 7 seeds"]
    wide = dict(notes(analysed(reported(half_width=0.5))))["Why 7 seeds"]
    assert " The width is reached: " in wide and "not reached" not in wide
    assert not any("seeds" in topic for topic, _ in notes(analysed(fake_study())))


def test_an_arm_that_breaks_in_the_first_stage_has_no_interval_and_the_report_says_so():
    states: dict[tuple[str, int], Any] = {("grpo", seed): "invalid" for seed in (0, 1, 2)}
    analysis = analysed(reported(states=states))
    one = analysis.comparison("grpo")
    assert (list(one.differences), one.interval, math.isnan(one.p_adjusted)) == ([3, 4, 5, 6], None, True)
    why = dict(notes(analysis))["Why 7 seeds"]
    assert "'grpo' completed fewer than two of them: no interval, ignored when choosing seeds." in why


def test_a_reader_can_redo_the_number_of_seeds_and_the_intervals_from_the_table():
    record = reported(16)
    rows, analysis = list(csv.DictReader(io.StringIO(results_csv(record)))), analysed(record)
    first = {int(row["seed"]) for row in rows if row["stage"] == "1"}
    width, at_most = float(rows[0]["half_width"]), int(rows[0]["at_most"])
    scores = {(row["arm"], int(row["seed"])): float(row["test_accuracy"]) for row in rows}
    asked = [len(first)]
    for one in analysis.comparisons:
        differences = [scores[one.arm, seed] - scores[record.baseline, seed] for seed in sorted({s for _, s in scores})]
        deviation, overall = (np.std(differences[:count], ddof=1) for count in (len(first), None))
        quantile = stats.t.ppf(0.975, len(first) - 1)
        asked.append(math.ceil((quantile * deviation / width) ** 2))
        half = quantile * max(deviation, overall) / math.sqrt(len(differences))
        assert one.over_seeds.high - one.over_seeds.estimate == pytest.approx(half)
    assert record.two_stage["asked"] == max(asked) > 16
    assert list(record.seeds) == list(range(min(max(asked), at_most)))
    assert "stage" not in results_csv(fake_study()).splitlines()[0]


# Simulated studies.


@pytest.mark.parametrize("spread", [SPREADS[2], SPREADS[-1]])
def test_intervals_hold_whatever_number_of_seeds_was_asked_for(spread):
    # true shares of 95 and 5 % are outside of these in 1 of 1000 tests
    studies = 100
    low, high = (float(stats.binom.ppf(p, studies, q)) / studies for p, q in ((0.001, 0.95), (0.999, 0.05)))
    found = simulate(spread, studies)
    assert found.covered / found.comparisons >= low and found.wrong / found.studies <= high
    assert (found.at_most > 0.7 * studies) == (spread == SPREADS[-1])


@pytest.mark.long
@pytest.mark.parametrize("spread", SPREADS)
def test_in_two_thousand_studies_the_stated_interval_covers_94_to_97_percent(spread):
    found = simulate(spread, 2000)
    assert 0.94 <= found.covered / found.comparisons <= 0.97 and found.wrong / found.studies <= 0.06
    if not found.at_most:
        assert found.seeds / found.studies >= fixed_seeds(spread)  # what is not known beforehand costs seeds
