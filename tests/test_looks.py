"""A report that was written before seeds were added is part of the record, and what is said later pays for it."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from cohort.harness.api.reporting import report
from cohort.harness.record.study import (
    LOOKS,
    StudyRecord,
    TrialRecord,
    keep_document,
    keep_look,
    read_folder,
    study_document,
)
from cohort.harness.settings.study import parse_study
from cohort.reports import statistics
from cohort.reports.analysis import Analysis, analysed, outcome_contrast
from cohort.reports.join import join
from cohort.reports.prose.answer import answer
from cohort.reports.prose.notes import notes
from cohort.reports.render import write_report
from cohort.reports.trials import share_of_alpha
from fake_study import FakeArm, arms_of, factor_grid, fake_study, with_trials
from fake_trials import a_study
from scipy import stats


def arms(*accuracies: float) -> list[FakeArm]:
    return arms_of(*accuracies, labels=("arm 0", "arm 1", "arm 2"))


def test_the_shares_of_all_numbers_of_seeds_add_up_to_one():
    # 1 / 3 + 1 / 6 + 1 / 10 + ... = 2 (1 / 2 - 1 / 3 + 1 / 3 - 1 / 4 + ...) = 1 - 2 / N
    shares = [statistics.any_time_share(seeds) for seeds in range(1001)]
    assert shares[:6] == pytest.approx([0, 0, 0, 1 / 3, 1 / 6, 1 / 10])
    assert math.fsum(shares) == pytest.approx(1 - 2 / 1000)
    variance = statistics.CrossedVariance(1e-4, 0.0, 0.0)  # so more seeds are needed, and three at least
    fixed, *free = (
        statistics.seeds_needed(apart, variance, 1, share=of)
        for apart, of in ((0.02, lambda _: 1.0), (0.02, statistics.any_time_share), (9.0, statistics.any_time_share))
    )
    assert fixed is not None and free[0] is not None and free[0] > fixed and free[1] == 3


def test_a_statement_with_a_share_has_the_quantile_and_the_p_of_that_share():
    # 0.01, 0.03, 0.02, 0.04: mean 0.025, error 0.0129099 / 2 = 0.00645497, t = 3.872983 with 3 degrees of freedom
    found = statistics.t_interval((0.01, 0.03, 0.02, 0.04), share=1 / 6)
    half = stats.t.ppf(1 - 0.025 / 6, 3) * 0.00645497
    assert (found.low, found.high) == pytest.approx((0.025 - half, 0.025 + half), abs=1e-6)
    assert statistics.t_test(found) == pytest.approx(6 * 2 * stats.t.sf(3.872983, 3), abs=1e-6)
    assert statistics.t_interval((0.01, 0.03), share=0.0) is None
    ratio = stats.t.ppf(1 - 0.025 / 6, 3) / stats.t.ppf(0.975, 3)
    assert statistics.any_time_width(4) == pytest.approx(ratio)


STATES: dict[tuple[str, int], Any] = {("arm 1", 4): None}
PLANNED = fake_study(arms(0.6, 0.6), range(5), num_steps=10)


@pytest.mark.parametrize(("record", "seeds", "share"), [
    (PLANNED, range(5), 1.0),
    (dataclasses.replace(PLANNED, any_time=True), range(5), 1 / 10),
    (dataclasses.replace(PLANNED, added=[3, 4]), range(5), 1 / 10),
    (dataclasses.replace(PLANNED, added=[3, 4]), range(3), 1.0),  # over the seeds that were planned
    (fake_study(arms(0.6, 0.6), range(5), states=STATES, num_steps=10), range(4), 1 / 6),
    (fake_study(arms(0.6, 0.6), range(5), states=STATES, num_steps=10), range(5), 1.0),  # of another arm
    (fake_study(arms(0.6, 0.6), range(5), states={("arm 1", 4): "invalid"}, num_steps=10), range(4), 1.0),
    (fake_study(arms(0.6, 0.6), range(5), states={("arm 1", 4): "failed"}, num_steps=10), range(4), 1 / 6),
])  # fmt: skip
def test_all_of_alpha_is_for_planned_seeds_that_have_ended(record, seeds, share):
    assert share_of_alpha(record, seeds) == pytest.approx(share)


def test_every_p_and_interval_of_a_page_pays_for_added_seeds():
    record = fake_study(arms(0.5, 0.6), range(5), num_steps=10)
    plain, wide = analysed(record), analysed(dataclasses.replace(record, added=[3, 4], looks=[3]))
    for one, other in zip(plain.comparisons, wide.comparisons, strict=True):
        assert other.p == pytest.approx(min(10 * one.p, 1)) and one.p_adjusted < 0.05
        assert other.interval.high - other.interval.low > 1.9 * (one.interval.high - one.interval.low)
        assert other.detectable > one.detectable
    for one, other in zip(plain.arms, wide.arms, strict=True):
        assert one.interval is not None and other.interval is not None and other.interval.low < one.interval.low
    record = fake_study(factor_grid({"algorithm.group_size": [2, 4, 8]}), range(5), num_steps=10)
    plain, paid = analysed(record).grid, analysed(dataclasses.replace(record, added=[4])).grid
    assert [one.p for one in paid.effects] == pytest.approx([min(10 * one.p, 1) for one in plain.effects])


def test_nothing_is_tested_before_the_planned_seeds_have_ended_and_no_other_arm_gains_from_that():
    record = fake_study(arms(0.5, 0.7, 0.7), range(5), states={("arm 2", 4): None}, num_steps=10)
    analysis = analysed(record)
    ended, waits = analysis.comparisons
    assert ended.p_adjusted == pytest.approx(2 * ended.p) and ended.family == 2  # the other one keeps its place
    assert math.isnan(waits.p) and math.isnan(waits.p_adjusted) and waits.interval is not None
    assert waits.interval.share == pytest.approx(1 / 6)
    alone = analysed(fake_study(arms(0.5, 0.7), range(5), states={("arm 1", 4): None}, num_steps=10))
    assert "(4 seeds, no test possible yet)" in answer(alone) and answer(alone).startswith("Preliminary (9 of 10")
    whole = outcome_contrast(analysis, {"arm 1": 1.0, "arm 0": -1.0})
    part = outcome_contrast(analysis, {"arm 2": 1.0, "arm 0": -1.0})
    assert whole.p < 0.05 and math.isnan(part.p)  # so no claim is tested by it
    assert waits.cells is not None and part.interval == statistics.cautious_interval(waits.cells, share=1 / 6)
    grid = {"algorithm.group_size": [2, 4], "algorithm.kl_beta": [0.0, 0.1]}
    first = factor_grid(grid)[0].label
    assert (found := analysed(fake_study(factor_grid(grid), range(5), num_steps=10)).grid) is not None and found.effects
    open_one = analysed(fake_study(factor_grid(grid), range(5), states={(first, 4): None}, num_steps=10)).grid
    assert open_one is not None and not open_one.effects


def test_what_a_design_can_find_follows_from_its_error_its_family_and_its_share():
    record, one = fake_study(arms(0.5, 0.6, 0.7), range(5), num_steps=10), None
    for added, share, of in (([], 1.0, lambda _: 1.0), ([3, 4], 1 / 10, statistics.any_time_share)):
        for one in analysed(dataclasses.replace(record, added=added)).comparisons:
            assert one.interval is not None and one.cells is not None
            least = statistics.minimum_detectable_difference(one.interval.error, one.interval.df, 0.05 * share / 2)
            assert one.family == 2 and one.detectable == pytest.approx(least)
            variance = statistics.crossed_variance(one.cells)
            needed = {d: statistics.seeds_needed(d, variance, 128, 0.05 / 2, of) for d in (0.01, 0.02, 0.05, 0.1)}
            assert one.seeds_for == needed and len(set(needed.values())) > 1
    variance = statistics.CrossedVariance(float(np.var(one.values, ddof=1)), 0.0, 0.0)
    needed = {d: statistics.seeds_needed(d, variance, 1, 0.05 / 2, statistics.any_time_share) for d in one.seeds_for}
    assert dataclasses.replace(one, variance=variance, num_problems=1).seeds_for == needed
    for interval in (None, statistics.Interval(0.1, 0.1, 0.1, 0.0, 4)):
        still = dataclasses.replace(one, interval=interval)
        assert math.isnan(still.detectable) and still.seeds_for == {}
    assert [dataclasses.replace(one, p_adjusted=p).is_detected for p in (0.049, 0.05)] == [True, False]
    extremes = fake_study(arms(0.5, 0.6), range(2), num_steps=10)  # each arm is right in one seed, wrong in the other

    def only(t: TrialRecord) -> dict[str, Any]:
        return {"per_problem": {}, "summary": {"test_accuracy": float(extremes.arms.index(t.arm) == t.seed)}}

    (wide,) = analysed(with_trials(extremes, only)).comparisons
    assert wide.student is not None and (wide.student.low, wide.student.high) == (-1.0, 1.0)
    assert (over := statistics.t_interval(wide.values, wide.share)) is not None and over.low < -1


def note(analysis: Analysis, start: str) -> str:
    return next(text for topic, text in notes(analysis) if topic.startswith(start))


def test_the_page_says_why_and_what_it_costs():
    record = fake_study(arms(0.5, 0.6), range(5), num_steps=10)
    added = note(analysed(dataclasses.replace(record, added=[3, 4], looks=[3])), "Seeds were added")
    assert "here with 3 complete seeds" in added and "1 / (S (S - 1) / 2) of 5 %" in added
    # t of 4 degrees of freedom: 5.597568 at 0.25 %, 2.776445 at 2.5 %; the ratio is 2.016
    assert "With 5 seeds an interval is 2.0 times as wide" in added and "up to 10 % of studies" in added
    assert "at any time" in note(analysed(dataclasses.replace(record, any_time=True)), "Read at any time")
    waiting = fake_study(arms(0.5, 0.6), range(5), states=STATES, num_steps=10)
    assert "planned" in note(analysed(waiting), "Seeds are still")
    assert not any("eeds" in topic or "Read" in topic for topic, _ in notes(analysed(record)))


@pytest.mark.usefixtures("plugins")
def test_the_record_knows_which_seeds_were_added_after_which_reports(tmp_path):
    def started(*seeds: int) -> StudyRecord:
        keep_document(tmp_path, study_document(a_study(seeds=list(seeds)), "", known=None))
        return dataclasses.replace(read_folder(tmp_path), trials=fake_study(seeds=seeds, num_steps=10).trials)

    keep_look(tmp_path, dataclasses.replace(started(0), trials=fake_study(seeds=[0], num_steps=10).trials))
    first = started(0, 1, 2)  # a report without two complete seeds was no look
    assert (list(first.added), list(first.looks)) == ([], [])
    keep_look(tmp_path, first)
    kept = (tmp_path / LOOKS).read_bytes()
    keep_look(tmp_path, first)  # again, with nothing new
    assert (tmp_path / LOOKS).read_bytes() == kept
    assert list(started(0, 1, 2).added) == []
    more = started(0, 1, 2, 3, 4)
    assert (list(more.added), list(more.looks)) == ([3, 4], [3])
    keep_look(tmp_path, more)
    most = started(0, 1, 2, 3, 4, 5)
    assert (list(most.added), list(most.looks)) == ([3, 4, 5], [3, 5])
    fewer = started(0, 1)  # the two best, perhaps
    assert (sorted(fewer.seeds), list(fewer.added)) == ([0, 1, 2, 3, 4], [3, 4])
    study = a_study(any_time=True)  # which is decided when a study starts
    assert study.digest() != a_study().digest() and parse_study(study.model_dump(mode="json"), "test").any_time
    assert a_study(pairing="none").digest() not in (study.digest(), a_study().digest())


@pytest.mark.parametrize("names", [("a",), ("a", "b")])
def test_a_look_is_kept_before_its_report_is_written(names, tmp_path, plugins):
    for name in names:
        folder = tmp_path / "studies" / name
        keep_document(folder, study_document(a_study(name=name, seeds=[0, 1]), "", known=None))
        (folder / "report").write_text("in the way of the folder of the report", encoding="utf-8")
    (tmp_path / "reports").write_text("in the way too", encoding="utf-8")
    with pytest.raises(OSError):
        report(*names, runs=tmp_path)
    assert all((tmp_path / "studies" / name / LOOKS).is_file() for name in names)


@pytest.mark.slow
def test_joined_studies_keep_what_was_read_of_each_and_how_arms_were_tuned(tmp_path):
    tuned = {"label": "arm 1 001: kl_beta=0.1", "parameters": {"algorithm.kl_beta": 0.1}, "state": "complete"}
    tuned = {**tuned, "values": {"validation/accuracy": 0.6}, "seeds": {}}
    search = {"arms": [tuned], "best": tuned["label"]}
    search["importances"] = {"method": "fANOVA", "values": {}, "reason": "one arm"}
    one = fake_study(arms(0.6, 0.6), range(5), name="a", num_steps=10)
    other = dataclasses.replace(one, name="b", added=[3, 4], looks=[3], search={"tuning": {"arm 1": search}})
    joined = join([one, other])
    assert (list(joined.added), list(joined.looks), joined.any_time) == ([3, 4], [3], False)
    files = write_report(joined, tmp_path, formats=())
    assert "tuning chose the settings of 'b: arm 1' (kl_beta = 0.1)" in files.answer
    assert "| b: arm 1 001: kl\\_beta=0.1 (chosen) |" in files.markdown.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="studies must list their arms to be compared: a search found the arms of 'b'"):
        join([one, dataclasses.replace(other, search=search)])


def test_invalid_trials_are_said_to_be_outcomes_too():
    # of five seeds arm 1 lost one and the baseline another; each counts as 0, or as anything from 0 to 1
    states: dict[tuple[str, int], Any] = {("arm 1", 4): "invalid", ("arm 0", 3): "invalid"}
    analysis = analysed(fake_study(arms(0.6, 0.6), range(5), states=states, num_steps=10))
    apart = sum(analysis.arm("arm 1").values) - sum(analysis.arm("arm 0").values)
    zero, least, most = (f"{100 * (apart + change) / 5:+.1f}" for change in (0, -1, 1))
    assert note(analysis, "Invalid trials are outcomes").endswith(f"arm 1 {zero} ({least} to {most}).")
    assert not any(topic.startswith("Invalid") for topic, _ in notes(analysed(PLANNED)))
