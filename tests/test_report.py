"""The report of studies whose truth is known: what it says, what it leaves out, and that nothing in it can run."""

import base64
import csv
import dataclasses
import itertools
import math
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from cohort.harness.record.events import RunHistory
from cohort.harness.record.study import StudyRecord, TrialRecord
from cohort.reports import statistics, trials
from cohort.reports.analysis import (
    Analysis,
    Comparison,
    Contrast,
    contrast,
    held_out_accuracies,
    marginal,
    outcome_contrast,
)
from cohort.reports.anova import Grid, anova
from cohort.reports.capability import capabilities
from cohort.reports.claims import check_claims
from cohort.reports.figures import outcome
from cohort.reports.figures.curves import DYNAMICS, aligned, learning_curves
from cohort.reports.figures.style import GREY, PALETTE, Drawing, color_of, end_label, write_files
from cohort.reports.join import join
from cohort.reports.page import page_drawings
from cohort.reports.prose import wording
from cohort.reports.prose.answer import answer
from cohort.reports.prose.methods import methods
from cohort.reports.prose.notes import interval_method, interval_reading, notes
from cohort.reports.render import COLUMNS, ReportFiles, analysed, results_csv, visible, write_report
from cohort.reports.trials import ArmSummary, Outcome, choose_outcome
from fake_study import (
    HOSTILE_ARM,
    FakeArm,
    arms_of,
    factor_grid,
    fake_study,
    three_algorithms,
    with_claims,
    with_trials,
)
from markdown_it import MarkdownIt
from scipy import stats

pytestmark = pytest.mark.every_figure


def hostile_study(**size: Any) -> StudyRecord:
    arms = three_algorithms()
    settings = {"algorithm.name": "grpo_self_consistency"}
    arms[2] = FakeArm(HOSTILE_ARM, "grpo_self_consistency", 0.35, settings, {"algorithm.name": "=cmd|' /C calc'!A0"})
    return fake_study(arms, states={("ppo", 2): "invalid"}, **size)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory) -> ReportFiles:
    return write_report(hostile_study(), tmp_path_factory.mktemp("hostile"), formats=())


def text_of(files: ReportFiles) -> str:
    """The text that a reader sees on the page, in one line."""
    return " ".join("".join(read_page(files.html.read_text(encoding="utf-8")).text).split())


class PageReader(HTMLParser):
    """Collects what a browser would act on: elements, attributes, and visible text."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read_page(html: str) -> PageReader:
    reader = PageReader()
    reader.feed(html)
    return reader


@pytest.mark.attack("Hostile text on a page or in a file")
def test_no_text_of_a_model_or_a_user_becomes_markup_in_the_page(hostile):
    page = read_page(hostile.html.read_text(encoding="utf-8"))
    assert not {"script", "img", "iframe", "object", "b "} & set(page.tags)
    assert page.tags.count("b") == 1  # the study's name; the completion's own <b> is text
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    text = "".join(page.text)
    for written in ("<script>alert(1)</script>", *(f"onerror=alert({n})" for n in (2, 5, 6)), HOSTILE_ARM):
        assert written in text


@pytest.mark.attack("Hostile text on a page or in a file")
def test_the_page_loads_nothing_forbids_loading_and_refers_only_to_itself(hostile):
    html = hostile.html.read_text(encoding="utf-8")
    page = read_page(html)
    names = ("src", "href", "xlink:href", "action", "data", "srcset")
    loads = [value for name, value in page.attributes if name in names]
    links = [value for value in loads if not value.startswith("#")]  # downloads: one that the page holds, one beside it
    assert links[0].startswith("data:text/csv;charset=utf-8;base64,")
    assert {*links[1:]} - {"problems.html"} == {"results.csv"} and hostile.csv.is_file()  # the first is an extra's
    assert not {"base", "area", "link"} & set(page.tags)
    ids = [value for name, value in page.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    assert {value[1:] for value in loads if value.startswith("#")} <= set(ids)
    styles = [html.partition("<style>")[2].partition("</style>")[0], *(v for n, v in page.attributes if n == "style")]
    assert not [style for style in styles if "http" in style or "@import" in style]
    assert ("content", "default-src 'none'; style-src 'unsafe-inline'; img-src data:") in page.attributes


@pytest.mark.attack("Hostile text on a page or in a file")
def test_markdown_shows_hostile_text_as_text(hostile):
    renderer = MarkdownIt("commonmark", {"html": True}).enable("table")
    page = read_page(renderer.render(hostile.markdown.read_text(encoding="utf-8")))
    assert "script" not in page.tags
    images = [value for name, value in page.attributes if name == "src"]
    assert images
    assert all(value.startswith("figures/") for value in images)
    assert {value for name, value in page.attributes if name == "href"} <= {"problems.html"}
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    text = "".join(page.text)
    assert "<script>alert(1)</script>" in text
    assert "<script>alert(7)</script>" in text
    assert HOSTILE_ARM in text


@pytest.mark.attack("Hostile text on a page or in a file")
def test_unprintable_characters_are_written_as_escapes():
    assert visible("a\x00b\x1b[31m\u202ec\ud800\td\n") == "a\\x00b\\x1b[31m\\u202ec\\ud800\td\n"


@pytest.mark.slow
@pytest.mark.attack("Hostile text on a page or in a file")
def test_the_same_record_gives_the_same_bytes_and_figures_are_well_formed_with_hostile_labels_as_text(tmp_path):
    first = write_report(hostile_study(), tmp_path / "first").html.parent
    second = write_report(hostile_study(), tmp_path / "second", formats=("svg", "pdf")).html.parent
    names = sorted(file.relative_to(second) for file in second.rglob("*") if file.is_file())
    assert len(names) > 20
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    files = sorted((first / "figures").glob("*.svg"))
    assert len(files) > 10
    for file in files:
        root = ElementTree.parse(file).getroot()
        assert not [node for node in root.iter() if node.tag.rpartition("}")[2] in ("script", "image", "foreignObject")]
        assert file.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
        assert file.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
    final = (first / "figures" / "final.svg").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in final
    assert "$x^{$" in "".join(ElementTree.fromstring(final).itertext()).replace("\n", "")


def test_the_csv_has_exactly_the_promised_columns_and_one_row_per_trial():
    record = fake_study(factor_grid({"algorithm.group_size": [4, 8], "algorithm.kl_beta": [0.0, 0.01]}), seeds=[0, 1])
    rows = list(csv.reader(results_csv(record).splitlines()))
    expected = (
        "study,trial,arm,seed,state,algorithm,task,accuracy_initial,accuracy_final,test_accuracy,rollouts,"
        "generated_tokens,optimizer_steps,seconds,peak_memory_bytes,algorithm.group_size,algorithm.kl_beta"
    )
    assert ",".join(rows[0]) == expected
    assert len(rows) == 1 + 4 * 2
    last = dict(zip(rows[0], rows[-1], strict=True))
    assert (last["algorithm.group_size"], last["algorithm.kl_beta"], last["seed"]) == ("8", "0.01", "1")
    assert float(last["test_accuracy"]) == record.trials[-1].summary["test_accuracy"]
    settings = {"optimizer.learning_rate": 0.5, "rewards.accuracy": 2.0}
    listed = fake_study([FakeArm("a"), FakeArm("b", settings=settings)], seeds=[0])
    listed = dataclasses.replace(listed, spec={"arms": {"a": {}, "b": settings}})
    table = list(csv.DictReader(results_csv(listed).splitlines()))
    assert [row["optimizer.learning_rate"] + " " + row["rewards.accuracy"] for row in table] == ["0.0001 1", "0.5 2"]
    named_alike = fake_study([FakeArm("a", factors={"arm": "a", "steps": 3})], seeds=[0])
    assert results_csv(named_alike).splitlines()[0].split(",") == [*COLUMNS, "steps"]


@pytest.mark.attack("Hostile text on a page or in a file")
def test_the_csv_keeps_an_invalid_trial_without_its_numbers_and_no_cell_runs_in_a_spreadsheet():
    rows = list(csv.DictReader(results_csv(hostile_study()).splitlines()))
    assert [row["state"] for row in rows[1:4]] == ["complete", "invalid", "complete"]
    assert [row["test_accuracy"] == "" for row in rows[1:4]] == [False, True, False]
    assert rows[-1]["algorithm.name"] == "'=cmd|' /C calc'!A0"
    assert not [cell for row in rows for cell in row.values() if cell.startswith(("=", "@", "+"))]


def two_by_two() -> list[FakeArm]:
    return factor_grid({"algorithm.group_size": [4, 8], "algorithm.kl_beta": [0.0, 0.1]})


def by_group_and_beta(*accuracies: float, seeds: Sequence[int] = range(5)) -> StudyRecord:
    """Two by two arms with these accuracies."""
    arms = [dataclasses.replace(arm, accuracy=a) for arm, a in zip(two_by_two(), accuracies, strict=True)]
    return fake_study(arms, seeds, seed_deviation=0.01, num_steps=10)


def test_the_roles_of_many_arms_are_found_once_for_all_marks(monkeypatch):
    asked, mean = [], ArmSummary.mean.fget
    assert mean is not None
    analysis = analysed(
        fake_study(arms_of(*np.linspace(0.1, 0.9, 60), labels=map(str, range(60))), [0], num_problems=4, num_steps=4)
    )
    monkeypatch.setattr(ArmSummary, "mean", property(lambda arm: asked.append(arm.label) or mean(arm)))
    grey = [arm.label for arm in analysis.arms if color_of(analysis, arm.label) == GREY]
    assert 60 - 3 <= len(grey) <= 60 - 2  # without the baseline, the highest and the lowest, which may be one arm
    assert len(asked) == 2 * 60  # once for the highest and once for the lowest


NONE = {(arm.label, seed): None for arm in three_algorithms() for seed in range(3)}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (fake_study(arms_of(0.4, 0.7), range(5)), ("b reaches ", "points [", "above a (5 seeds, Holm-adjusted p ")),
        (fake_study(arms_of(0.7, 0.7)),
         ("No difference to a (70.", "could be detected: b reaches ", "would be found in 4 of 5 such studies")),
        (fake_study(arms_of(0.8, 0.3, 0.5), range(5)),
         ("No arm is detectably above a (", "the closest, c, is ", ", while b is ")),
        (fake_study(arms_of(0.4, 0.7), [0]), ("b reaches ", "no interval or test over seeds is possible")),
        (by_group_and_beta(0.5, 0.7, 0.7, 0.5), ("Over the whole grid no factor matters by itself, and factors "
                                                 "interact: group_size x kl_beta (Holm-adjusted p ",)),
        # accuracy rises by 8 points per level of group_size and does not depend on kl_beta
        (fake_study(factor_grid({"algorithm.group_size": [8, 2, 4], "algorithm.kl_beta": [0.0, 0.1]})),
         ("Over the whole grid group_size matters: ", ", and no interaction of factors is detected; ")),
        (fake_study(states={("ppo", 1): None, ("grpo", 2): "running"}), ("Preliminary (7 of 9 trials complete): ",)),
        (fake_study(states={**NONE, ("ppo", 0): "running"}),
         ("No answer yet: 0 of 9 trials complete (1 running, 8 not started).",)),
    ],
    ids=["best", "equal", "baseline", "one seed", "interaction", "one factor", "preliminary", "none"],
)  # fmt: skip
def test_the_answer_says_what_was_found_and_how_certain_it_is(record, words):
    text = answer(analysed(record))
    for opening in ("Only 'b' ends detectably above the start; ", "Only 'a' and 'c' end detectably above the start; "):
        text = text.removeprefix(opening)
    text = text[0].upper() + text[1:] if text.startswith("no ") else text
    assert text.startswith(words[0])
    assert all(part in text for part in words)
    assert "kl_beta matters" not in text


def test_the_answer_begins_with_the_arms_that_have_learnt():
    # accuracy is 40 % before training
    def opening(*accuracies: float, seeds: Sequence[int] = range(5)) -> str:
        return answer(analysed(fake_study(arms_of(*accuracies), seeds, seed_deviation=0.01)))

    assert opening(0.4, 0.4).startswith("No arm ends detectably above its start; no difference to a (")
    assert opening(0.3, 0.35).startswith("No arm ends detectably above its start; ")
    assert opening(0.4, 0.7, 0.8).startswith("Only 'b' and 'c' end detectably above the start; c reaches ")
    assert opening(0.3).startswith("It does not end detectably above its start; a reaches ")
    for text in (opening(0.6, 0.7), opening(0.4, 0.4, seeds=[0]), opening(0.0, 0.0)):
        assert "above its start" not in text and "above the start" not in text


@pytest.mark.slow
def test_a_gain_counts_after_the_correction_for_the_number_of_arms():
    shown = 0
    for seed in range(60):  # arms that learn nothing: their largest gain has p < 0.05 in about a quarter of studies
        shown += "Only" in answer(analysed(fake_study(arms_of(*[0.4] * 6), range(4), rng_seed=seed, num_problems=8)))
    assert shown <= 6  # of 60 studies at 2.5 %; 7 or more in 1 of 1000


def test_arms_that_cannot_differ_are_identical_by_construction_and_no_test_is_quoted():
    equal = fake_study(arms_of(0.7, 0.7))
    same = dataclasses.replace(equal, identical=[(["a", "b"], "algorithm.clip_epsilon has no effect")])
    text = answer(analysed(same))
    assert text.startswith("'b' is identical by construction to a: ")
    assert "'a' and 'b' are identical by construction (algorithm.clip_epsilon has no effect)" in text
    assert "could be detected" not in text
    assert "would be found" not in text
    third = fake_study(arms_of(0.7, 0.7, 0.7))
    text = answer(analysed(dataclasses.replace(third, identical=same.identical)))
    assert "could be detected: the furthest, b," not in text
    assert "could be detected: c reaches" in text
    assert "'a' and 'b' are identical by construction" in text
    twin, other = analysed(dataclasses.replace(third, identical=same.identical)).comparisons
    assert math.isnan(twin.p) and math.isnan(twin.p_adjusted)  # two arms that cannot differ are no hypothesis,
    assert other.family == 1 and other.p_adjusted == other.p  # so Holm's family is the other comparison alone
    ends = {"a": 0.5, "b": 0.75, "c": 0.5}  # b is 25 points above in each seed, of problems that were not counted
    flat = lambda t: {"per_problem": {}, "summary": {"test_accuracy": ends[t.arm] + 0.1 * t.seed * (t.arm == "c")}}  # noqa: E731
    twin, other = analysed(with_trials(third, flat)).comparisons
    assert twin == dataclasses.replace(twin, summary=other.summary, baseline=other.summary)  # not by all of an arm
    given = {"summary": twin.summary, "baseline": twin.baseline, "outcome": twin.outcome, "rng_seed": 0}
    alone = Comparison({}, None, **given)  # until its study says otherwise
    assert (alone.share, alone.family, alone.is_alone, alone.is_paired) == (1.0, 1, True, True)
    assert math.isnan(twin.p) and (other.family, other.p_adjusted) == (1, other.p)  # nor is one that has no p
    running = dataclasses.replace(third, identical=same.identical, expected=12, seeds=[0, 1, 2, 3])
    assert {one.family for one in analysed(running).comparisons} == {1}  # while seeds are still to come too


def test_accuracies_near_zero_are_reported_as_such_with_an_interval():
    analysis = analysed(fake_study(arms_of(0.0, 0.0), num_problems=100, seed_deviation=0.0))
    assert answer(analysis).startswith("Every arm stays near zero: no difference to a (0.0 % test accuracy")
    # Wilson's for 0 of 100 problems: z^2 / (100 + z^2) = 3.84146 / 103.84146 = 3.70 %
    interval = analysis.arms[0].interval
    assert interval.high == pytest.approx(0.0369935, rel=1e-5)
    assert "b reaches 0.0 % test accuracy [0.0, 3.7]" in answer(analysis)
    # two such arms may differ on as many: Student's t(99) = 1.98422 for z
    assert "level [-3.7, 3.7] with it (3 seeds" in answer(analysis)
    assert analysis.comparisons[0].p == 1.0


def test_the_floor_has_one_interval_for_answer_and_claims_that_never_shrinks_to_nothing():
    def right(count: int, per_problem: bool = True) -> Analysis:
        """Two arms that get the same `count` of 200 problems right, in every seed."""
        record = fake_study(arms_of(0.0, 0.0), num_problems=200, seed_deviation=0.0)
        number = {"test/num_prompts": [(100, 200.0)]}

        def cells(trial: TrialRecord) -> dict[str, Any]:
            found = {problem: float(i < count) for i, problem in enumerate(trial.per_problem)}
            known = {"per_problem": found} if per_problem else {"per_problem": {}, "history": trial.history | number}
            return {**known, "summary": {**trial.summary, "test_accuracy": count / 200}}

        claim = {"contrast": {"b": 1, "a": -1}, "predicts": "equivalent"}
        return analysed(with_claims(with_trials(record, cells), {**claim, "margin": 0.01}, {**claim, "margin": 0.05}))

    arms = [right(count).arms[0].interval for count in range(12)]
    assert all(one.low <= two.low and one.high <= two.high for one, two in itertools.pairwise(arms))
    assert arms[0].high < arms[1].high < arms[2].high
    assert max(one.high - one.low for one in arms) < 0.1 and min(one.high - one.low for one in arms) > 0.018
    for analysis in (right(0), right(1), right(4), right(0, per_problem=False)):
        close, wide = check_claims(analysis)
        interval = close.found[0][1].interval
        assert interval == analysis.comparisons[0].interval and 0.018 < interval.high == -interval.low < 0.03
        assert (close.verdict, wide.verdict) == ("undecided", "supported")


def test_the_answer_names_every_arm_that_no_test_reaches():
    states = {("c", 1): "invalid", ("c", 2): "invalid", **{("d", seed): "invalid" for seed in range(3)}}
    text = answer(analysed(fake_study(arms_of(0.5, 0.5, 0.75, 0.5), states=states)))
    found = re.search(
        r"; no test reaches 2 arms: 'c' \((\d+\.\d) points above a with one shared seed\) and 'd' \(no va", text
    )
    assert found and 15 < float(found[1]) < 35
    assert "no test reaches" not in answer(analysed(fake_study(arms_of(0.5, 0.5, 0.75))))


def test_arms_that_are_identical_by_construction_differ_by_exactly_nothing():
    record = fake_study(arms_of(0.6, 0.6))
    copies = [dataclasses.replace(trial, arm="b") for trial in record.trials[:3]]
    (comparison,) = analysed(dataclasses.replace(record, trials=[*record.trials[:3], *copies])).comparisons
    assert (comparison.interval.low, comparison.interval.high, comparison.p) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("baseline", "arm", "low", "high"), [(0.0, 1.0, 0.9423, 1), (1.0, 0.0, -1, -0.9423), (0.5, 1.0, 0.4423, 0.5577)]
)
def test_the_difference_of_all_right_and_all_wrong_is_as_uncertain_as_its_problems_are_few(baseline, arm, low, high):
    scores = {"ppo": baseline, "grpo": arm}  # of every problem, in every seed

    def alike(trial: TrialRecord) -> dict[str, Any]:
        cells = dict.fromkeys(trial.per_problem, scores[trial.arm])
        return {"summary": {**trial.summary, "test_accuracy": scores[trial.arm]}, "per_problem": cells}

    analysis = analysed(with_trials(fake_study(three_algorithms()[:2], num_problems=64, num_steps=10), alike))
    interval = analysis.comparisons[0].interval
    # z / (64 + z^2) = 1.95996 / 67.84146 = 0.028890, times t(63) = 1.99834
    assert (interval.low, interval.high) == pytest.approx((low, high), abs=1e-4)
    assert interval.estimate == arm - baseline


@pytest.mark.slow
def test_an_invalid_trial_is_listed_with_its_reason_and_never_averaged_in(tmp_path):
    record = fake_study(arms_of(0.4, 0.7), seeds=range(4), states={("b", 3): "invalid"})
    broken = dataclasses.replace(record.trials[-1], summary={"test_accuracy": 0.0}, per_problem={"p": 0.0})
    with_broken = analysed(dataclasses.replace(record, trials=[*record.trials[:-1], broken]))
    without = analysed(dataclasses.replace(record, trials=record.trials[:-1]))
    assert with_broken.arm("b").values == without.arm("b").values
    (one,), (other,) = with_broken.comparisons, without.comparisons
    assert one.differences == other.differences and one.interval is not None and other.interval is not None
    # a trial that is still to come widens the limits, an invalid one not
    assert one.interval.error == other.interval.error
    assert [(gap.arm, gap.seed, gap.state) for gap in with_broken.gaps] == [("b", 3, "invalid")]
    no_value = dataclasses.replace(record.trials[0], summary={"accuracy_final": math.nan}, history={}, per_problem={})
    found = analysed(dataclasses.replace(record, trials=[no_value, *record.trials[1:]])).gaps
    assert [(gap.arm, gap.seed, gap.state) for gap in found] == [("a", 0, "no value"), ("b", 3, "invalid")]
    assert answer(with_broken).endswith("; 1 invalid trial is left out.")
    assert "policy/loss is NaN at step 17" in text_of(write_report(record, tmp_path, formats=()))


def test_differences_are_paired_over_the_seeds_that_both_arms_completed_each_once():
    record = fake_study(arms_of(0.4, 0.7), seeds=range(4), states={("a", 0): "failed", ("b", 3): "failed"})
    (comparison,) = analysed(record).comparisons
    scores = {(trial.arm, trial.seed): trial.summary.get("test_accuracy", math.nan) for trial in record.trials}
    assert list(comparison.differences) == [1, 2]
    assert comparison.estimate == pytest.approx((scores["b", 1] - scores["a", 1] + scores["b", 2] - scores["a", 2]) / 2)
    record = fake_study(seeds=[0])
    with pytest.raises(ValueError, match=r"each \(arm, seed\) must be complete once"):
        analysed(dataclasses.replace(record, trials=[*record.trials, record.trials[0]]))


def test_p_is_below_5_percent_exactly_where_the_stated_interval_leaves_out_zero():
    sides = set()
    for rng_seed in range(12):
        analysis = analysed(fake_study(arms_of(0.6, 0.66), seeds=range(4), rng_seed=rng_seed, num_steps=10))
        (comparison,) = analysis.comparisons
        assert (comparison.p < 0.05) == (not comparison.interval.low <= 0 <= comparison.interval.high)
        sides.add(comparison.p < 0.05)
    assert sides == {True, False}


@pytest.mark.slow
def test_blocks_of_families_stand_for_problems_and_the_page_says_what_it_assumes(tmp_path):
    record = fake_study(arms_of(0.6, 0.6), seeds=range(8), num_problems=64, num_steps=10)
    problems = sorted(record.trials[0].per_problem)

    def related(trial: TrialRecord) -> dict[str, Any]:  # an arm is better in every second family of 8
        gain = 0.5 if trial.arm == "b" else 0.0
        cells = {name: 0.25 + gain * (place // 8 % 2) for place, name in enumerate(problems)}
        cells[problems[trial.seed]] += 0.25
        return {"per_problem": cells, "summary": {"test_accuracy": float(np.mean(list(cells.values())))}}

    def named(**families: str) -> StudyRecord:
        return with_trials(with_trials(record, related), lambda _: {"families": families})

    def text(record: StudyRecord) -> str:
        return interval_reading(analysed(record))

    whole = {name: f"<b>{place // 8}" for place, name in enumerate(problems)}
    (alone,), (known,) = analysed(named()).comparisons, analysed(named(**whole)).comparisons
    assert alone.interval is not None and known.interval is not None and known.cells is not None
    # differences of 0.5 in half of 8 blocks: error sqrt(8 * 0.0625 / 7 / 8) = 0.09449 with 7 degrees of freedom
    assert known.cells.shape == (8, 8)
    assert known.interval.error == pytest.approx(0.5 / math.sqrt(28), abs=1e-3)
    assert alone.p < 0.001 < 0.02 < known.p
    assert "names no families of problems, so problems count as independent" in text(named())
    assert "Families of the 64 test problems: 8. 8 blocks of whole families stand for" in text(named(**whole))
    half = {name: family for name, family in whole.items() if int(family[3:]) < 4}
    assert "Families of the 64 test problems: 4; 32 name none and count as one each. 8 blocks" in text(named(**half))
    two = named(**{name: str(place // 8 % 2) for place, name in enumerate(problems)})

    def lucky(trial: TrialRecord) -> dict[str, Any]:  # seeds differ, so that the two-way test has more than one df
        luck = 0.02 * (trial.seed - 3) * (trial.arm == "b")
        cells = {name: score + luck for name, score in trial.per_problem.items()}
        return {"per_problem": cells, "summary": {"test_accuracy": trial.summary["test_accuracy"] + luck}}

    (one,) = analysed(with_trials(two, lucky)).comparisons
    assert one.interval is not None and (one.interval.df, one.p) == (1, statistics.t_test(one.interval))
    assert len(choose_outcome(named(**{problems[0]: problems[1]})).blocks) == 64  # no problem is a family's name
    most = dict.fromkeys(problems[:33], "one")
    (these,) = analysed(named(**most)).comparisons
    assert these.cells is None and these.interval == these.student
    assert "More than half of the test problems are of one family, so it holds for new seeds" in text(named(**most))
    page = write_report(named(**whole), tmp_path, ()).html.read_text()
    assert "8 blocks of whole families" in page and "the same 64 test problems are" in page
    assert "covers the mean over seeds and families of test" in page
    independent = "covers the mean over seeds and test problems, taken as independent, at 95 %"
    assert independent in interval_method(analysed(named()))


def test_the_page_says_beside_its_intervals_that_seeds_lie_in_two_clusters():
    record = fake_study([FakeArm("a"), FakeArm("b")], range(3), num_steps=10)
    ends = {("a", 0): 0.1, ("a", 1): 0.6, ("a", 2): 0.62, ("b", 0): 0.5, ("b", 1): 0.55, ("b", 2): 0.6}
    only = lambda t: {"per_problem": {}, "summary": {"test_accuracy": ends[t.arm, t.seed]}}  # noqa: E731
    text = interval_method(analysed(with_trials(record, only)))
    assert "The seeds of 'a' lie in two clusters" in text
    assert "clusters" not in interval_method(analysed(record))


def test_the_test_split_decides_only_where_every_complete_trial_has_it():
    record = fake_study()
    assert choose_outcome(record).name == "test/accuracy"
    assert choose_outcome(record).per_problem
    first = dataclasses.replace(record.trials[0], summary={}, history={"validation/accuracy": [(0, 0.1), (5, 0.2)]})
    partial = dataclasses.replace(record, trials=[first, *record.trials[1:]])
    assert choose_outcome(partial).name == "validation/accuracy"
    assert analysed(partial).arm("ppo").scores[0] == 0.2
    other = dataclasses.replace(record.trials[0], per_problem={"p": 0.5})
    named = with_trials(record, lambda trial: {"families": dict.fromkeys(trial.per_problem, "one")})
    for one in (dataclasses.replace(record, trials=[other, *record.trials[1:]]), named):  # other problems, one family
        assert choose_outcome(one) == Outcome("test/accuracy", per_problem=False)


@pytest.mark.parametrize(
    "record",
    [fake_study(states=NONE),
     *(pytest.param(record, marks=pytest.mark.slow) for record in (
         fake_study(states=dict.fromkeys(NONE, "running"), num_steps=10),
         fake_study(states={("ppo", seed): "invalid" for seed in range(3)}, num_steps=10),
         fake_study(arms_of(0.0, 1.0), num_steps=10)))],
    ids=["no trial", "all running", "no baseline", "zero and one"],
)  # fmt: skip
def test_a_partial_study_still_has_a_report(record, tmp_path):
    files = write_report(record, tmp_path, formats=())
    assert files.answer.endswith(".")
    assert record.question in text_of(files)
    assert "nan" not in text_of(files).lower().replace("is nan at step", "")


def test_a_curve_in_percent_is_one_of_a_fraction_and_no_other():
    assert {metric for metric, _, unit in DYNAMICS if unit.startswith("%") != wording.is_fraction(metric)} == set()


def topics(record: StudyRecord) -> dict[str, str]:
    return dict(notes(analysed(record)))


def test_a_note_says_how_good_each_critic_is_when_the_policy_begins_to_learn():
    arms = [dataclasses.replace(arm, algorithm="ppo") for arm in arms_of(0.4, 0.7)]
    record = fake_study(changed(arms, {}, {"critic": {"warmup_steps": 20}}), num_steps=40)
    trials = []
    for trial in record.trials:
        series = [(1, 0.1 * trial.seed + (trial.arm == "b")), (20, 9.0), (21, 0.2 + 0.3 * trial.seed)]
        history = {**trial.history, "critic/explained_variance": series}
        trials.append(dataclasses.replace(trial, history=history))
    text = topics(dataclasses.replace(record, trials=trials))["The critic when the policy begins to learn"]
    # seeds 0, 1, 2: a mean of 0.1 in step 1, and of 0.5 in step 21
    assert text.endswith("'a' 0.10; 'b' 0.50. Steps that train it alone, so that the policy learns in fewer: 'b' 20.")
    assert "The critic when the policy begins to learn" not in topics(fake_study(PLAIN))


def changed(arms: Sequence[FakeArm], *settings: dict[str, Any]) -> list[FakeArm]:
    """The arms with more settings; the last ones given hold for all further arms."""
    each = [*settings, *[settings[-1]] * len(arms)]
    return [dataclasses.replace(arm, settings={**arm.settings, **more}) for arm, more in zip(arms, each, strict=False)]


CLIPS = factor_grid({"algorithm.clip_epsilon": [0.1, 0.2]})
PAID = [{"rewards": {"accuracy": {"weight": 1.0}}},
        {"rewards": {"accuracy": {"weight": 1.0}, "format": {"weight": 0.1}, "overlong": {"weight": 0}}}]  # fmt: skip
PLAIN = [dataclasses.replace(arm, algorithm="rloo") for arm in arms_of(0.4, 0.7)]


@pytest.mark.parametrize(
    ("record", "topic", "words", "absent"),
    [
        (fake_study(CLIPS), "The clip range has no effect",
         "the ratio is exactly 1, so clip_epsilon cannot bind", "Clipping is active"),
        (fake_study(changed(CLIPS, {"optimizer.num_inner_epochs": 4})), "Clipping is active",
         "or receives several optimiser steps", "The clip range has no effect"),
        (fake_study(changed(CLIPS, {"staleness": 4})), "Clipping is active",
         "Each batch is sampled by older weights or", "The clip range has no effect"),
        (fake_study(changed(CLIPS, {}, {"staleness": 4})), "Clipping in some arms only",
         "'clip_epsilon=0.1' gives", ""),
        (fake_study(), "One starting point", "one cold start (400 steps)", "Budgets differ"),
        (fake_study(), "Equal budgets", "All arms draw 128 rollouts per step for 100 steps.", "Equal operations"),
        (fake_study(), "Rewards that are not accuracy", "'grpo_self_consistency' is rewarded for agreement", ""),
        (fake_study(changed(PLAIN, *PAID)), "Different rewards", "'b': 1 accuracy, 0.1 format)", ""),
        (fake_study(changed(PLAIN, {}, {"rollouts_per_step": 64})), "Budgets differ", "rollouts_per_step", ""),
        (fake_study(changed(PLAIN, {}, {"cold_start.steps": 800})), "Arms start from different cold starts", "", ""),
    ],
)  # fmt: skip
def test_notes_tell_what_makes_arms_comparable_or_not(record, topic, words, absent):
    found = topics(record)
    assert words in found[topic]
    assert absent not in found


def test_a_note_names_the_arms_whose_first_steps_had_nothing_to_learn_from():
    dull = {"reward/std": [(1, 0.0), (2, 0.5)], "train/accuracy": [(1, 0.0)], "train/answered": [(1, 0.1)],
            "train/lenient_accuracy": [(1, 0.4)], "completion/truncated": [(1, 0.2)]}  # fmt: skip
    study = fake_study(changed(arms_of(0.4, 0.7), PAID[0]))
    found = with_trials(study, lambda t: {"history": {**t.history, **(dull if t.arm == "b" else {})}})
    text = topics(found)["First steps without a signal"]
    assert text.startswith("'b': no rewards of the first step differ") and "'a'" not in text
    assert "90% mark no answer (40% are right if the last number counts)" in text
    assert "First steps without a signal" not in topics(study)


def test_the_answer_begins_with_the_way_from_start_to_end_where_test_problems_were_scored_before_training_too():
    start = {1: {"p": 0.0, "q": 0.2}, 2: {"p": 0.2, "q": 0.2}}  # means 10 % and 20 %; the ends are 50 % and 50 %
    end = {"p": 1.0, "q": 0.0}
    study = fake_study(arms_of(0.4), seeds=(1, 2))
    told = with_trials(study, lambda t: {"start_per_problem": start[t.seed], "per_problem": end})
    # gains 40 and 30 points: mean 35, Student's interval 35 +- 12.71 * 5
    assert answer(analysed(told)).startswith(
        "Accuracy on the test problems, start to end: 'a' from 15.0 to 50.0 % (35.0 points [-28.5, 98.5])"
    )
    assert "start to end" not in answer(analysed(study))


def test_rollouts_and_operations_that_arms_spent_unequally_are_told():
    study = fake_study()
    more = with_trials(study, lambda t: {"summary": {**t.summary, "rollouts": 14400.0 if t.arm == "ppo" else 12800.0}})
    told = topics(more)["Equal budgets"]
    assert told.endswith("are extra: grpo drew 12.8k completions per run, ppo 14.4k.")
    assert "are extra" not in topics(study)["Equal budgets"]
    assert topics(with_ledger(study, limit=1.5e11))["Equal operations"] == (
        "All arms end with the step in which their training reaches 150 GFLOP. 'ppo' ran out of steps before that "
        "limit: give them more steps."
    )


def equal_grid(seeds: Sequence[int] = (0, 1, 2)) -> Analysis:
    return analysed(by_group_and_beta(0.7, 0.7, 0.7, 0.7, seeds=seeds))


def test_a_grid_without_detected_effects_says_so_with_its_smallest_p():
    analysis = equal_grid()
    least = min(analysis.grid.effects, key=lambda effect: effect.p)
    assert answer(analysis).startswith(
        "Over the whole grid no effect of group_size and kl_beta is detected, alone or together (the smallest p "
        f"belongs to {wording.factor_title(least.factors)}: Holm-adjusted p = {wording.p_value(least.p_adjusted)}); "
    )
    assert "would be found in 4 of 5 such studies" in answer(analysis)


def test_a_heat_map_has_one_colour_until_an_effect_is_detected():
    def num_colours(drawing: Drawing) -> int:
        return len({patch.get_facecolor() for patch in drawing.figure.axes[0].patches})

    (neutral,), (untested,) = outcome.heat_maps(equal_grid()), outcome.heat_maps(equal_grid([0]))
    assert num_colours(neutral) == 1
    assert "no effect of the grid is detected, so all cells have one colour" in neutral.caption
    assert "no test of the grid is possible yet" in untested.caption
    detected = analysed(fake_study(two_by_two(), range(6), seed_deviation=0.005, num_steps=10))
    (drawing,) = outcome.heat_maps(detected)
    assert num_colours(drawing) == 4


def by_depth(depths: Sequence[int]) -> Analysis:
    """Three arms whose test accuracy falls by a point with each depth."""
    tagged = {f"test/accuracy_depth_{n}": [(10, 0.5 - n / 100)] for n in depths}
    return analysed(with_trials(fake_study(num_steps=10), lambda t: {"history": {**t.history, **tagged}}))


@pytest.mark.slow
def test_accuracy_by_depth_is_a_map_with_arms_down_and_numbers_in_their_order_across():
    analysis = by_depth([10, 2])
    drawing = next(one for one in outcome.difficulty_maps(analysis) if one.title == "Test accuracy (%) by depth")
    (axes,) = drawing.figure.axes
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["2", "10"]
    assert [text.get_text() for text in axes.texts] == ["48.0", "40.0"] * len(analysis.finished_arms)
    assert drawing.title in [one.title for one in page_drawings(analysis, None, (), ())["outcome"]]
    tall = next(one for one in outcome.difficulty_maps(by_depth(range(1, 21))) if one.title.endswith("depth"))
    assert [tick.get_text() for tick in tall.figure.axes[0].get_yticklabels()] == [str(n) for n in range(1, 21)]
    assert not any(one.title.endswith("depth") for one in outcome.difficulty_maps(by_depth([3])))


def test_the_mean_at_a_level_is_averaged_over_the_other_factors():
    analysis = analysed(by_group_and_beta(*[0.98] * 4, seeds=[0, 1]))
    for arm in analysis.arms:
        found = marginal(analysis, arm.factors)
        assert (found.estimate, found.interval) == (arm.mean, arm.interval)
    expected = pytest.approx((analysis.arms[1].mean + analysis.arms[3].mean) / 2, rel=1e-12)
    found = marginal(analysis, {"algorithm.kl_beta": 0.1})
    assert found is not None and found.interval is not None and found.estimate == expected
    assert found.interval.low < found.estimate < found.interval.high
    assert marginal(analysis, {"algorithm.kl_beta": 9.0}) is None
    apart = {(one.label, seed): None for one, seed in zip(two_by_two(), (0, 0, 1, 1), strict=True)}
    assert marginal(analysed(fake_study(two_by_two(), (0, 1), states=apart)), {"algorithm.kl_beta": 0.1}) is None


def test_a_contrast_is_the_weighted_sum_of_arms_with_its_interval_its_tests_and_its_spread():
    arms, weights = arms_of(0.6, 0.7, 0.7), {"a": -1.0, "b": 0.75, "c": 0.25}
    record = fake_study(arms, range(4), states={("c", 3): "invalid"}, num_steps=10, seed_deviation=0.0, rng_seed=1)
    analysis = analysed(record)
    found = outcome_contrast(analysis, weights)
    cells = sum(weight * analysis.arm(arm).cells_of(range(3)) for arm, weight in weights.items())
    assert list(found.differences) == [0, 1, 2] and [*found.differences.values()] == pytest.approx(cells.mean(axis=1))
    assert (found.interval, found.num_problems) == (statistics.cautious_interval(cells), 128)
    assert found.variance == statistics.crossed_variance(cells)
    tests = statistics.cautious_intervals(cells)
    assert found.p == pytest.approx(max(statistics.t_test(one, 1 / 128) for one in tests))
    plain = outcome_contrast(analysed(with_trials(record, lambda _: {"per_problem": {}})), weights)
    assert plain.interval == statistics.t_interval([*plain.differences.values()]) != found.interval
    assert len(plain.tests) == plain.num_problems == 1
    spread = np.var(cells.mean(axis=1), ddof=1)
    assert dataclasses.astuple(plain.variance) == (pytest.approx(spread), 0.0, 0.0) and plain.resolution == 0.0
    assert found.resolution == 1 / 128


def right_in(cells: dict[str, list[float]], **changes: Any) -> StudyRecord:
    """Three seeds, in each of which an arm has these scores of the test problems."""

    def scored(trial: TrialRecord) -> dict[str, Any]:
        per_problem = {f"p{place}": value for place, value in enumerate(cells[trial.arm])}
        return {"per_problem": per_problem, "summary": {"test_accuracy": np.mean(cells[trial.arm])}, **changes}

    return with_trials(fake_study(list(map(FakeArm, cells)), num_steps=10), scored)


@pytest.mark.parametrize(("problems", "others", "is_sparse"), [(9, 2, True), (9, 3, False), (40, 5, False)])
def test_arms_that_differ_on_fewer_problems_than_5_and_a_quarter_may_differ_on_more(problems, others, is_sparse):
    record = right_in({"a": [1.0] * problems, "b": [0.0] * others + [1.0] * (problems - others)})
    found = outcome_contrast(analysed(record), {"a": -2.0, "b": 1.0})
    sparse = statistics.sparse_interval(found.estimate, problems, others, 1.0, scale=2.0)
    assert (found.tests[0].error == pytest.approx(sparse.error)) == is_sparse


@pytest.mark.parametrize(("right", "is_sparse"), [(1.0, True), (0.5, False)])
def test_without_scores_of_problems_only_all_right_and_all_wrong_are_known_to_agree(right, is_sparse):
    history = {"test/accuracy": [(10, 0.0)], "test/num_prompts": [(10, 64.0)]}
    (one,) = analysed(right_in({"a": [0.0], "b": [right]}, per_problem={}, history=history)).comparisons
    sparse = statistics.sparse_interval(right, 64, 0, 1.0)
    assert [(test.error, test.df) for test in one.tests] == [(sparse.error, 63)] * is_sparse + [(0.0, 2)]


@pytest.mark.filterwarnings("error")
def test_without_pairs_the_seeds_of_each_arm_are_a_group_and_an_arm_without_any_is_compared_with_none():
    whole = fake_study(arms_of(0.5, 0.6), range(4), states={("b", 3): "invalid"}, num_steps=10)
    record = dataclasses.replace(whole, spec={**whole.spec, "pairing": "none"}, any_time=True)
    weights, values = {"a": -1.0, "b": 1.0}, {"a": {0: 0.1, 1: 0.2}, "b": {5: 0.5, 6: 0.7, 7: 0.9}}
    found = contrast(record, values, weights)
    assert found.differences == {seed: pytest.approx(value - 0.15) for seed, value in values["b"].items()}
    assert found.interval is not None and (found.share, found.interval.share) == (1 / 3, 1 / 3)
    assert contrast(record, {**values, "a": {}}, weights) == Contrast({}, None, share=1 / 3)
    assert found == dataclasses.replace(found, cells=np.zeros((3, 2)))  # tables, which have no truth, are left out
    analysis = analysed(record)
    a, b = (arm.cells for arm in analysis.arms)
    assert a.shape == (4, 128) and b.shape == (3, 128)
    assert outcome_contrast(analysis, weights).variance == statistics.crossed_variance(-a, b)
    none = analysed(dataclasses.replace(record, trials=[trial for trial in record.trials if trial.arm == "b"]))
    assert list(none.comparisons) == [] and math.isnan(none.arm("a").mean)
    assert trials.score(record.trials[0], "test/other") is None


@pytest.mark.parametrize(("curves", "gain", "p"), [
    # gains of 0.5 that were rounded to eighths: error 1 / 8 / sqrt(6 * 3), t = 0.5 * 8 * sqrt(18) = 16.970563
    ([[(0, 0.25), (9, 0.75)]] * 3, (0.5, 0.5, 0.5), 2 * stats.t.sf(16.970563, 2)),
    # -1, 0, 0: error 1 / 3, t(2) = 4.302653, so -1 / 3 +- 1.434, within -1 and 1
    ([[(0, 1.0), (9, 0.0)], [(0, 1.0), (9, 1.0)], [(0, 1.0), (9, 1.0)]], (-1, -1 / 3, 1), 2 * stats.t.sf(1.0, 2)),
    ([[(0, 0.25), (9, 0.75)], [(0, 0.25), (9, 0.5)], [(1, 0.25), (9, 0.75)]], None, math.nan),  # not from the start
    ([[(0, 0.25), (9, 0.75)], [(0, 0.25), (9, 0.5)], [(0, 0.25)]], None, math.nan),  # only the start
])  # fmt: skip
def test_an_arm_gains_from_its_start_to_its_end_where_all_seeds_have_both(curves, gain, p):
    def changed(trial: TrialRecord) -> dict[str, Any]:
        history = {"validation/accuracy": curves[trial.seed], "validation/num_prompts": [(9, 8.0)]}
        return {"history": history, "summary": {"test_accuracy": 0.0}}

    (arm,) = analysed(with_trials(right_in({"a": [0.0] * 4}), changed)).arms
    assert arm.gain_p == pytest.approx(p, rel=1e-6, nan_ok=True)
    found = arm.gain and (arm.gain.low, arm.gain.estimate, arm.gain.high)
    assert found == (None if gain is None else pytest.approx(gain, abs=1e-6))


def test_blocks_stand_for_problems_but_over_these_alone_and_the_memory_of_an_arm_is_its_largest():
    named = right_in({"a": [0.0] * 8, "b": [0.0] * 8}, families={f"p{place}": str(place // 2) for place in range(8)})
    spent = {0: (10.0, 3e8), 1: (20.0, 1e8), 2: (60.0, 2e8)}  # seconds, bytes
    keys = ("seconds", "peak_memory_bytes")
    record = with_trials(named, lambda t: {"summary": {**t.summary, **dict(zip(keys, spent[t.seed], strict=True))}})
    analysis = analysed(record)
    arm = analysis.arms[0]
    assert analysis.comparisons[0].num_problems == 4 and arm.interval is not None and arm.student is not None
    for interval, count in ((arm.interval, 4), (arm.student, 8)):
        assert interval.high == pytest.approx(stats.binomtest(0, count).proportion_ci(0.95, "wilson").high)
    assert (arm.costs["seconds"], arm.costs["peak_memory_bytes"], arm.num_problems) == (30.0, 3e8, 8)
    seeds = [one.rng_seed for part in (analysis.arms, analysis.comparisons) for one in part]
    assert len({*seeds}) == 3 and all(2**8 < seed < 2**32 for seed in seeds)  # of all 32 bits
    unknown = with_trials(record, lambda t: {"per_problem": {}, "summary": {**t.summary, "seconds": math.nan}})
    arm = analysed(unknown).arms[0]
    assert arm.num_problems == 0 and "seconds" not in arm.costs


def test_a_study_wants_the_pairs_it_names_and_an_import_without_pairs_those_it_has():
    record = fake_study(arms_of(0.5, 0.5), range(2), states={("b", 1): None}, num_problems=4, num_steps=4)
    for design, pairing, missing in (("imported", "none", 1), ("imported", "seeds", 0), ("grid", "none", 0)):
        one = dataclasses.replace(record, spec={**record.spec, "design": design, "pairing": pairing})
        assert trials.wanted_pairs(one) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)][: 4 - missing]
    apart = dataclasses.replace(record, name="apart", spec={**record.spec, "pairing": "none"})
    assert trials.is_paired(join([record, apart])) and not trials.is_paired(apart)  # as one of the two is
    waits = [trials.awaits_seeds(dataclasses.replace(record, any_time=any_time), [0]) for any_time in (False, True)]
    assert waits == [True, False]
    first, second, *_ = record.trials
    assert trials.arm_specs([first, dataclasses.replace(second, spec={})]) == {"a": first.spec}


def test_the_comparisons_and_effects_of_a_grid_are_one_holm_family():
    arms = factor_grid({"algorithm.group_size": [8, 2, 4], "algorithm.kl_beta": [0.0, 0.1]})
    analysis = analysed(fake_study(arms, seeds=range(4)))
    stated = [*analysis.comparisons, *analysis.grid.effects]
    assert len(stated) == 5 + 3
    assert [one.p_adjusted for one in stated] == statistics.holm([one.p for one in stated])
    # the smallest p is multiplied by 8
    first = min(stated, key=lambda one: one.p)
    assert first.p_adjusted == pytest.approx(8 * first.p, rel=1e-12)
    assert {comparison.family for comparison in analysis.comparisons} == {8}


def test_the_effects_of_a_grid_are_those_of_the_scores_of_its_arms():
    varied = {"algorithm.group_size": [4, 2], "algorithm.kl_beta": [0.0, 0.1]}
    arms = factor_grid({**varied, "algorithm.clip_epsilon": [0.2]})
    record = fake_study(arms, (0, 1), num_steps=10)
    analysis = analysed(record)
    order = [analysis.arms[i] for i in (2, 3, 0, 1)]  # by group size, then beta
    cells = np.array([arm.cells for arm in order]).reshape(2, 2, 2, 128)

    def same_p(record: StudyRecord, *values: Any, share: float = 1.0) -> None:
        grid = analysed(record).grid
        assert grid is not None and grid.factors == tuple(varied)
        expected = [min(one.p / share, 1.0) for one in anova(values[0], grid.factors, *values[1:])]
        assert [one.p for one in grid.effects] == pytest.approx(expected, nan_ok=True)

    same_p(record, cells.mean(axis=-1), cells, 1 / 128)
    flat = {arm.label: 0.5 + 0.125 * place for place, arm in enumerate(order)}  # in every seed: no error but rounding
    scores = np.repeat([*flat.values()], 2).reshape(2, 2, 2)

    def scored(trial: TrialRecord, *numbers: float) -> dict[str, Any]:
        history = {**trial.history, "test/num_prompts": [(10, numbers[trial.arm == order[0].label])]} if numbers else {}
        return {"summary": {"test_accuracy": flat[trial.arm]}, "history": history, "per_problem": {}}

    same_p(with_trials(record, lambda trial: scored(trial, 16.0, 8.0)), scores, None, 1 / 8)
    same_p(with_trials(record, lambda trial: scored(trial, 8.0, 16.0)), scores, None, 1 / 8)
    same_p(with_trials(record, scored), scores)
    longer = fake_study(arms, (0, 1, 2), num_steps=10, rng_seed=4)
    analysis = analysed(longer)
    cells = np.array([analysis.arm(arm.label).cells for arm in order]).reshape(2, 2, 3, 128)
    same_p(dataclasses.replace(longer, any_time=True), cells.mean(axis=-1), cells, 1 / 128, share=1 / 3)
    for less in (dataclasses.replace(record, any_time=True), fake_study(arms, (0,), num_steps=10)):
        grid = analysed(less).grid
        assert grid is not None and grid.effects == []
    assert analysed(fake_study(arms[:3], (0, 1), num_steps=10)).grid is None


@pytest.mark.parametrize(("factors", "levels"), [
    ({"algorithm.kl_beta": [0.2, 0.0, 0.1]}, ((0.0, 0.1, 0.2),)), ({"algorithm.kl_beta": [0.0, 0.1]}, None),
    ({"algorithm.name": ["b", "a"], "algorithm.kl_beta": [0.1, 0]}, (("b", "a"), (0, 0.1))),
    ({"algorithm.name": ["c", "b", "a"]}, None), ({"algorithm.kl_beta": [0.1, None, 0.2]}, None),
])  # fmt: skip
def test_a_grid_has_two_factors_or_one_of_three_numbers_and_numbers_rise(factors, levels):
    def grid(*more: FakeArm) -> Grid | None:
        return analysed(fake_study([*factor_grid(factors), *more], num_problems=4, num_steps=4)).grid

    assert [None if found is None else found.levels for found in (grid(), grid(FakeArm("plain")))] == [levels] * 2
    assert grid(FakeArm("odd", factors={**factor_grid(factors)[0].factors, "steps": 1})) is None


def test_each_effect_of_a_grid_has_its_degrees_of_freedom_and_its_share_of_the_variance():
    scores = np.random.default_rng(4).normal(size=(2, 3, 4)) + np.array([2.0, 0.0])[:, None, None]
    found = anova(scores, ["a", "b"])
    assert [(one.factors, one.df) for one in found] == [(("a",), 1), (("b",), 2), (("a", "b"), 2)]
    gains = [one.df * (one.f - 1) for one in found]  # Olejnik and Algina 2003: df (F - 1) / (df (F - 1) + N)
    assert [one.partial_omega_squared for one in found] == pytest.approx([max(x / (x + 24), 0) for x in gains])
    assert gains[0] > 0 > min(gains)


@pytest.mark.slow
def test_a_grid_of_two_factors_is_one_heat_map_and_of_three_one_per_level_of_the_shortest():
    arms = factor_grid({"algorithm.group_size": [2, 4, 8], "algorithm.kl_beta": [0.0, 0.1]})
    two = analysed(fake_study(arms, num_steps=10))
    assert [drawing.name for drawing in outcome.heat_maps(two)] == ["heat_0"]
    names = ("algorithm.group_size", "algorithm.clip_epsilon", "algorithm.kl_beta")
    levels = dict(zip(names, ([2, 4, 8], [0.1, 0.2], [0.0, 0.1, 0.2]), strict=True))
    maps = outcome.heat_maps(analysed(fake_study(factor_grid(levels), seeds=[0, 1], num_steps=10)))
    assert [drawing.title for drawing in maps] == [f"Test accuracy (%), clip_epsilon = {level}" for level in (0.1, 0.2)]
    none = analysed(fake_study(num_steps=10))
    assert outcome.heat_maps(none) == outcome.importances(none) == []


def test_figures_of_an_earlier_report_do_not_stay(tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "old.pdf").write_bytes(b"")
    (tmp_path / "figures" / "mine.txt").write_text("kept")
    write_files([], tmp_path / "figures")
    assert [file.name for file in (tmp_path / "figures").iterdir()] == ["mine.txt"]


def search_of(arms: Sequence[tuple[str, dict[str, Any], str, dict[str, float]]], **findings: Any) -> dict[str, Any]:
    """The content of `search.json`: arms are (label, parameters, state, values)."""
    listed = [dict(zip(("label", "parameters", "state", "values"), arm, strict=True)) for arm in arms]
    few = {"method": None, "values": {}, "reason": "few"}
    return {"arms": listed, "importances": few, "best": None, **findings}


def searched() -> StudyRecord:
    """A search of three arms, the last one pruned."""
    arms = factor_grid({"algorithm.kl_beta": [0.0, 0.1, 0.2]})
    record = fake_study(arms, [0, 1], states={(arms[2].label, 0): "stopped", (arms[2].label, 1): None}, num_steps=10)
    values = ({"validation/accuracy": 0.5}, {"validation/accuracy": 0.625}, {})
    ends = zip(arms, ("complete", "complete", "pruned"), values, strict=True)
    importances = {"method": "fANOVA", "values": {"algorithm.kl_beta": 0.75, "steps<script>": 0.25}, "reason": None}
    found = search_of(
        [(arm.label, dict(arm.factors), state, scored) for arm, state, scored in ends],
        importances=importances, best=arms[1].label,
    )  # fmt: skip
    return dataclasses.replace(record, search=found)


@pytest.mark.slow
def test_a_search_opens_with_its_best_setting_shows_importances_and_arms_and_compares_it_with_no_arm(tmp_path):
    record = searched()
    analysis = analysed(record)
    assert {(gap.arm, gap.state) for gap in analysis.gaps} == {("kl_beta=0.2", "pruned")}
    assert analysis.gaps[1].reason == "the search gave this arm up early"  # of the seed that never began
    assert answer(analysis).endswith("1 pruned arm is left out.")
    # 62.5 % is the search's own mean of that arm; the test split, which chose nothing, has an interval
    assert answer(analysis).startswith("The best of 2 complete arms has kl_beta = 0.1: 62.5 % validation accuracy and ")
    assert "importance by fANOVA: kl_beta 75 %" in answer(analysis)
    assert "is overestimated, so run it again with other seeds" in answer(analysis)
    assert not {"above", "below", "Holm"} & set(answer(analysis).replace("-", " ").split())
    assert (analysis.baseline, list(analysis.comparisons), analysis.grid) == (None, [], None)
    files = write_report(record, tmp_path, formats=())
    markdown = files.markdown.read_text(encoding="utf-8")
    assert "Difference to baseline" not in markdown and "best of the search" in markdown
    page, text = read_page(files.html.read_text(encoding="utf-8")), text_of(files)
    assert "Search results" in text
    assert any("Importance by fANOVA" in value for _, value in page.attributes)
    assert "kl_beta=0.1best" in text
    assert "algorithm.kl_beta = 0.162.5complete" in text
    assert "algorithm.kl_beta = 0.2n/apruned" in text
    assert "script" not in page.tags
    (drawing,) = outcome.importances(analysis)
    assert drawing.title == "What validation accuracy depends on"
    unknown = {"method": None, "values": {}, "reason": "needs 4 complete arms, there are 2"}
    one = searched().search
    few = analysed(dataclasses.replace(record, search={**(one or {}), "importances": unknown}))
    assert outcome.importances(few) == []
    assert "the importance of each setting is unknown (needs 4 complete arms, there are 2)" in answer(few)


def test_every_trial_without_a_result_has_a_state_and_a_reason():
    states: dict[tuple[str, int], Any] = {("a", 1): None, ("b", 0): "running", ("b", 1): "invalid", ("c", 1): "failed"}
    record = fake_study(arms_of(0.5, 0.5, 0.5), [0, 1], states=states, num_steps=10)
    reasons = {("b", 1): "the loss is nan", ("c", 1): None}
    record = with_trials(record, lambda trial: {"reason": reasons.get((trial.arm, trial.seed))})
    record = with_trials(
        record, lambda trial: {"summary": {}, "history": {}} if (trial.arm, trial.seed) == ("a", 0) else {}
    )
    record = dataclasses.replace(record, stopped=["b"])
    assert {(gap.arm, gap.seed): (gap.state, gap.reason) for gap in analysed(record).gaps} == {
        ("a", 0): ("no value", "complete, but without a finite outcome"), ("a", 1): ("not started", "no trial yet"),
        ("b", 0): ("stopped", "the arm was stopped on request"), ("b", 1): ("invalid", "the loss is nan"),
        ("c", 1): ("failed", "no reason recorded"),
    }  # fmt: skip


@pytest.mark.slow
def test_a_tuned_comparison_says_what_tuning_chose_and_shows_its_trials(tmp_path):
    tuning = {"tuning": {"ppo": searched().search, "grpo": searched().search}}
    record = dataclasses.replace(fake_study(num_steps=10), search=tuning)
    assert outcome.importances(analysed(record)) == []
    assert "tuning chose the settings of 'ppo' (kl_beta = 0.1) and 'grpo' (kl_beta = 0.1)" in answer(analysed(record))
    files = write_report(record, tmp_path, formats=())
    text = text_of(files)
    assert "Settings chosen by tuning" in text
    assert text.count("kl_beta=0.1chosenalgorithm.kl_beta = 0.162.5complete") == 2
    assert text.count("algorithm.kl_beta = 0.2n/apruned") == 2
    assert "## Settings chosen by tuning" in files.markdown.read_text(encoding="utf-8")


def test_a_slice_per_setting_shows_every_arm_and_the_mean_of_each_level():
    levels = [{"optimizer.learning_rate": 1e-5 * 2**n, "algorithm.group_size": 4 * (1 + n % 2)} for n in range(4)]
    arms = [(f"arm {n}", each, "complete", {"validation/accuracy": n / 10}) for n, each in enumerate(levels)]
    search = search_of(arms)
    drawings = outcome.slices(analysed(dataclasses.replace(fake_study(num_steps=10), search=search)))
    titles = [f"Validation accuracy against {name}" for name in ("learning_rate", "group_size")]
    assert [one.title for one in drawings] == titles
    (dots,), bars = drawings[1].figure.axes[0].collections, drawings[1].figure.axes[0].lines
    # arms 0 and 2 (0 and 20 %) at group size 4, arms 1 and 3 (10 and 30 %) at 8
    assert np.asarray(dots.get_offsets()).tolist() == [pytest.approx(at) for at in ([0, 0], [1, 10], [0, 20], [1, 30])]
    assert drawings[0].figure.axes[0].get_xscale() == "linear"  # 1 to 8 e-5
    assert [np.asarray(bar.get_ydata())[0] for bar in bars] == pytest.approx([10, 20])


def test_the_table_of_the_comparison_is_on_the_page_as_a_file_with_its_numbers_in_full(hostile):
    html = hostile.html.read_text(encoding="utf-8")
    encoded = re.findall(
        r'href="data:text/csv;charset=utf-8;base64,([A-Za-z0-9+/=]+)" download="fake-comparison.csv"', html
    )
    rows = list(csv.DictReader(base64.b64decode(encoded[0]).decode().splitlines()))
    analysis = analysed(visible(hostile_study()))
    assert [row["arm"] for row in rows] == [arm.label for arm in analysis.arms]
    for row, arm in zip(rows, analysis.arms, strict=True):
        assert float(row["test/accuracy"]) == arm.mean
        one = analysis.comparison(arm.label)
        assert row["p_holm"] == ("" if one is None else repr(one.p_adjusted))
    assert [row["complete_seeds"] for row in rows] == ["2", "3", "3"]  # one trial of ppo is invalid


def with_scores(scores: dict[str, list[float]], metric: str = "test/accuracy") -> StudyRecord:
    """A study whose trials have these test scores, seed by seed, and no scores of single problems."""
    record = fake_study(list(map(FakeArm, scores)), range(4), num_steps=10)

    def scored(trial: TrialRecord) -> dict[str, Any]:
        value = scores[trial.arm][trial.seed]
        summary = {**trial.summary, "test_accuracy": value} if metric == "test/accuracy" else trial.summary
        history = {**trial.history, metric: [(10, value)], "test/num_prompts": [(10, 128.0)]}
        return {"summary": summary, "history": history, "per_problem": {}}

    return with_trials(record, scored)


def test_an_arm_that_is_detectably_above_is_named_although_another_has_the_highest_mean():
    scores = {"a": [0.50, 0.51, 0.49, 0.50], "b": [0.60, 0.615, 0.59, 0.602], "c": [0.2, 0.9, 0.95, 0.9]}
    text = answer(analysed(with_scores(scores)))
    assert text.startswith("b reaches 60.2 % test accuracy ")
    assert "; c reaches 73.8 % test accuracy" in text and ", the highest mean, but its difference to a" in text
    assert "is not detected: 23.8 points" in text
    assert "No arm is detectably above" not in text


@pytest.mark.slow
def test_every_test_accuracy_of_every_arm_stands_in_the_report_with_its_interval(tmp_path):
    record = with_scores({"a": [0.5, 0.6, 0.5, 0.6], "b": [1.0] * 4}, metric="test/greedy_accuracy")
    more = {"a": {"test/pass_at_4": [(10, 0.9)], "test/maj_at_4": [(10, 0.99)]}, "b": {}}
    record = with_trials(record, lambda t: {"history": {**t.history, **more[t.arm]}})
    found = held_out_accuracies(analysed(record))
    assert list(found) == ["test/accuracy", "test/greedy_accuracy", "test/pass_at_4", "test/maj_at_4"]
    assert list(found["test/pass_at_4"]) == ["a"]
    mean, interval = found["test/greedy_accuracy"]["a"]
    # standard deviation 0.057735, so the half width is t(3, 0.975) 3.18245 x 0.0288675
    assert (mean, interval.low, interval.high) == pytest.approx((0.55, 0.4581307, 0.6418693), rel=1e-6)
    _, certain = found["test/greedy_accuracy"]["b"]
    assert (certain.low, certain.high) == pytest.approx((128 / (128 + 1.959964**2), 1.0), rel=1e-6)  # Wilson
    files = write_report(record, tmp_path, formats=())
    assert "greedypass@4maj@4" in text_of(files) and "55.0 [45.8, 64.2]" in text_of(files)
    assert "| 55.0 [45.8, 64.2] |" in files.markdown.read_text(encoding="utf-8")
    first = next(csv.DictReader(files.csv.read_text(encoding="utf-8").splitlines()))
    assert (first["test/greedy_accuracy"], first["test/pass_at_4"]) == ("0.5", "0.9")


def test_no_interval_of_a_fraction_leaves_its_range():
    analysis = analysed(with_scores({"a": [0.0, 0.02, 0.0, 0.4], "b": [1.0, 0.3, 0.99, 1.0]}))
    for arm in analysis.arms:
        for interval in (arm.interval, arm.student, arm.bootstrap):
            assert 0 <= interval.low <= interval.high <= 1
    (one,) = analysed(with_scores({"a": [0.0, 1.0, 0.0, 0.0], "b": [1.0, 0.0, 1.0, 1.0]})).comparisons
    between = outcome_contrast(analysed(with_scores({"a": [0, 1, 0, 0], "b": [1, 0, 1, 1]})), {"a": 1.0, "b": -1.0})
    for interval in (one.interval, one.student, one.bootstrap, between.interval):
        assert -1 <= interval.low <= interval.high <= 1


def test_arms_keep_their_colour_and_of_a_crowd_the_baseline_the_highest_and_the_lowest():
    few = analysed(fake_study())
    assert [color_of(few, arm.label) for arm in few.arms] == list(PALETTE[:3])
    scores = {f"arm {i}": [value] * 4 for i, value in enumerate([0.5, 0.3, 0.7, 0.4, 0.7, 0.3, 0.5, 0.6])}
    analysis = analysed(with_scores(scores))
    roles = {
        arm.label: end_label(analysis, arm.label) for arm in analysis.arms if color_of(analysis, arm.label) != GREY
    }
    assert roles == {"arm 0": "baseline", "arm 2": "highest arm", "arm 1": "lowest arm"}
    assert analysed(searched()).roles == {"kl_beta=0.1": "best of the search", "kl_beta=0.0": "lowest arm"}
    assert analysed(fake_study(states=NONE)).roles == {"ppo": "baseline"}


def test_curves_keep_the_steps_or_costs_that_all_seeds_have_and_drop_what_is_not_finite():
    def trial_with(history: dict[str, list[tuple[int, float]]]) -> TrialRecord:
        return dataclasses.replace(fake_study(seeds=[0]).trials[0], history=history)

    first = trial_with({"m": [(0, 1.0), (1, 2.0), (2, math.nan), (3, 4.0)]})
    series = aligned([first, trial_with({"m": [(0, 3.0), (2, 5.0), (3, 8.0)]})], "m", None)
    assert series is not None
    assert [values.tolist() for values in series] == [[0.0, 3.0], [[1.0, 4.0], [3.0, 8.0]]]
    # against tokens: step 0 costs nothing, step 2 comes after 30: linear from (0, 0) to (30, 1), at 15 tokens 0.5
    trial = trial_with({"m": [(0, 0.0), (2, 1.0)], "tokens": [(1, 10.0), (2, 30.0), (3, 60.0)]})
    series = aligned([trial], "m", "tokens")
    assert series is not None
    x_T, values_ST = series
    assert (x_T[0], x_T[-1]) == (0.0, 30.0)
    assert values_ST[0][20] == pytest.approx(0.5)
    assert aligned([trial], "absent", None) is None


def test_an_arm_without_a_complete_trial_has_the_curve_of_its_unfinished_ones_and_one_step_has_one_tick():
    record = fake_study(three_algorithms()[:2], seeds=[0])
    first = {metric: values[:1] for metric, values in record.trials[1].history.items()}
    running = dataclasses.replace(record.trials[1], state="running", history=first)
    for some, names in ((record.trials[:1], {"ppo", "grpo (unfinished)"}), ([], {"grpo (unfinished)"})):
        analysis = analysed(dataclasses.replace(record, trials=[*some, running]))
        axes = learning_curves(analysis, ["steps"])[0].figure.axes[0]
        assert names <= {text.get_text().replace("\n", " ") for text in axes.texts}
    assert axes.get_xticks().tolist() == [0.0]


def test_numbers_read_as_a_reader_expects():
    assert wording.number(0.8123, "test/accuracy") == "81.2"
    assert wording.number(0.0039, "test/accuracy") == "0.39"
    assert wording.number(-0.0001, "test/accuracy", signed=True) == "0.0"
    assert wording.number(0.081, "kl/reference") == "0.081"
    assert [wording.p_value(p) for p in (0.04969, 0.0004, 0.0496)] == ["0.04969", "< 0.001", "0.04960"]
    assert [wording.p_equals(p) for p in (0.0499999, 0.049995, 0.05)] == ["p = 0.04999", "p = 0.04999", "p = 0.050"]
    assert (wording.quantity(812), wording.quantity(12_345), wording.quantity(4.56e6)) == ("812", "12.3k", "4.56M")
    assert (wording.size(611 * 2**20), wording.size(3 * 2**30)) == ("611 MiB", "3.00 GiB")
    apart = [(0.0, "level with"), (0.0004, "0.04 points above"), (-0.051, "5.1 points below")]
    assert [(value, wording.apart(value, "test/accuracy")) for value, _ in apart] == apart
    assert wording.apart(-0.25, "kl/reference") == "0.25 below"
    assert (wording.plural(1, "seed"), wording.plural(2, "seed")) == ("1 seed", "2 seeds")


@pytest.mark.slow
def test_counts_of_one_have_no_plural_and_the_threads_of_trials_stand_beside_the_command(tmp_path):
    record = with_trials(fake_study(arms_of(0.4, 0.7), seeds=[0], num_steps=1), lambda _: {"threads": ("1", "2")})
    files = write_report(record, tmp_path, formats=())
    told = "A trial had 1 or 2 threads (the number of workers changed); with another number its last bits differ."
    assert f"<p>{told}</p>" in files.html.read_text() and told in files.markdown.read_text().replace("\\", "")
    many = r"(?<![\d.\[-])\b1 (?:points|seeds|steps|trials|arms|groups|samples|more arms)"
    assert not [found for file in (files.html, files.markdown) for found in re.findall(many, file.read_text())]


def with_ledger(record: StudyRecord, limit: float | None = None) -> StudyRecord:
    """The record with operations: 1e9 a step for the first arm, 2e9 for the others, and core-hours of an hour."""

    def spent(trial: TrialRecord) -> dict[str, Any]:
        each = 1e9 if trial.arm == record.arms[0] else 2e9
        history = {**trial.history, "flops/train": [(step, each * step) for step in range(1, 101)]}
        summary = {**trial.summary, "flops_train": 100 * each, "flops_evaluation": 5e12, "core_seconds": 3600.0}
        spec = {**trial.spec, **({} if limit is None else {"max_flops": limit})}
        return {"history": history, "summary": summary, "spec": spec}

    return with_trials(record, spent)


@pytest.mark.slow
def test_a_report_says_what_each_arm_has_cost_and_draws_curves_against_operations(hostile, tmp_path):
    files = write_report(with_ledger(fake_study()), tmp_path, formats=())
    table = files.markdown.read_text().partition("## Cost")[2].partition("## ")[0]
    assert "| Arm | Training | Evaluation | Core-hours |" in table
    assert "| ppo | 100 GFLOP | 5 TFLOP | 1 |" in table
    assert "| grpo | 200 GFLOP | 5 TFLOP | 1 |" in table
    page = files.html.read_text()
    assert "against operations of training" in page
    assert 'data-label="Core-hours"' in page
    row = next(csv.DictReader(files.csv.read_text().splitlines()))
    assert (row["flops_train"], row["core_seconds"]) == ("100000000000", "3600")
    assert "gpu_seconds" not in row
    assert "## Cost" not in hostile.markdown.read_text() and "operations" not in hostile.html.read_text()


def test_the_mean_of_the_last_evaluations_counts_and_the_page_says_so():
    def measured(trial: TrialRecord) -> dict[str, Any]:
        spec = {**trial.spec, "evaluation": {"num_samples": 16, "test_last": 3}}
        known = {key: series for key, series in trial.history.items() if not key.startswith("test/")}
        known["test/accuracy"] = [(10, 0.1), (20, 0.3), (30, 0.4), (40, 0.8)]
        known["test/num_samples"] = [(step, 16.0) for step in (20, 30, 40)]
        return {"spec": spec, "history": known, "summary": {}}

    analysis = analysed(with_trials(fake_study(arms_of(0.5, 0.5), seeds=range(2)), measured))
    assert [arm.values for arm in analysis.arms] == [pytest.approx([0.5, 0.5])] * 2  # (0.3 + 0.4 + 0.8) / 3
    told = dict(notes(analysis))["What accuracy means"]
    assert "scored at the last 3 evaluations of each run: the mean counts" in told
    assert dict(methods(analysis))["Which checkpoint counts?"].startswith("The mean over the policies of each run's la")
    assert not capabilities(analysis)  # 16 samples each, but of three policies


def test_a_record_has_the_mean_of_the_evaluations_of_each_test_problem():
    history = RunHistory()
    for step, fractions in ((10, {"p": 0.25, "q": 1.0}), (20, {"p": 0.0, "q": 0.0}), (20, {"p": 0.75, "q": 0.5})):
        history.add({"type": "per_problem", "step": step, "area": "test", "fractions": fractions})
    assert history.scores == {"test": {"p": 0.5, "q": 0.75}}  # step 20 as its later attempt has it
