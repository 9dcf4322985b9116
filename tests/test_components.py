"""Designs over components: n + 1 arms, none that cannot matter, and a rank by what each component adds."""

import dataclasses
import re
from typing import Any

import pytest
from cohort.harness.record.study import StudyRecord, keep_document, read_folder, study_document
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study
from cohort.harness.settings.study import parse_study
from cohort.reports.analysis import analysed
from cohort.reports.findings import ranked_components
from cohort.reports.prose.answer import answer
from cohort.reports.prose.wording import p_equals
from cohort.reports.render import comparison_table, write_report
from fake_study import FakeArm, fake_study

PARTS = {
    "high": {"algorithm.clip_epsilon_high": 0.28},
    "mean": {"algorithm.name": "dapo"},
    "batches": {"dynamic_sampling": 2, "algorithm.clip_epsilon": 0.1},
}
OWN = {"name": "grpo", "kl_beta": 0.0, "clip_epsilon_high": None}
RUN = {"task": "arithmetic", "algorithm": OWN, "rewards": {"overlong": 0}, "optimizer": {"num_minibatches": 2}}


def study(design: str = "leave_one_out", components: Any = PARTS, **changes: Any) -> Any:
    raw = {"name": "toy", "question": "Does it?", "run": RUN, "design": design, "components": components}
    return parse_study({**raw, **changes}, "toy.yaml")


def parts_of(arm: Any) -> set[str]:
    run = arm.run_spec(0)
    on = {"high": run.algorithm.clip_epsilon_high == 0.28, "mean": run.algorithm.name == "dapo"}
    on["batches"] = (run.dynamic_sampling, run.algorithm.clip_epsilon) == (2, 0.1)
    assert on["batches"] or (run.dynamic_sampling, run.algorithm.clip_epsilon) == (1, 0.2)
    return {name for name, is_on in on.items() if is_on}


ALL = {*PARTS}
STEPS = {"none": set(), "+high": {"high"}, "+mean": {"high", "mean"}, "+batches": ALL}


@pytest.mark.parametrize(("design", "arms"), [
    ("leave_one_out", {"all": ALL, **{f"without {name}": ALL - {name} for name in PARTS}}),
    ("add_one_in", {"none": set(), **{f"only {name}": {name} for name in PARTS}}),
    ("ladder", STEPS),  # each step is compared with the one before
])  # fmt: skip
def test_a_design_over_n_components_has_n_plus_1_arms(design, arms):
    assert {arm.label: parts_of(arm) for arm in study(design).design_arms()} == arms
    before = {"+high": "none", "+mean": "+high", "+batches": "+mean"}
    assert study(design).references() == (before if design == "ladder" else {})


LEVELS = {
    "name": "levels", "question": "Does it?", "run": {"task": "arithmetic", "algorithm": "grpo"},
    "arms": {"plain": {}, "warm": {"cold_start.steps": 400}}, "factors": {"algorithm.kl_beta": [0.0, 0.1]},
}  # fmt: skip


@pytest.mark.parametrize(("changes", "references"), [
    ({"baseline": "plain"}, {"warm, kl_beta=0": "plain, kl_beta=0", "warm, kl_beta=0.1": "plain, kl_beta=0.1"}),
    ({"baseline": "kl_beta=0.1"},
     {"plain, kl_beta=0": "plain, kl_beta=0.1", "warm, kl_beta=0": "warm, kl_beta=0.1"}),
    ({"baseline": "plain, kl_beta=0"}, {}),  # one cell is the baseline of all
    ({}, {}),
    ({"design": "compare", "arms": {}, "factors": {}, "baseline": "grpo",
      "compare": {"algorithms": ["grpo", "rloo"], "tasks": ["arithmetic", "gsm8k"]}},
     {"rloo, arithmetic": "grpo, arithmetic", "rloo, gsm8k": "grpo, gsm8k"}),
])  # fmt: skip
def test_a_level_is_the_baseline_within_each_level_of_the_others(changes, references):
    assert parse_study({**LEVELS, **changes}, "toy.yaml").references() == references


@pytest.mark.slow
def test_the_record_and_the_page_compare_each_step_with_the_one_before(tmp_path):
    ladder = study("ladder")
    folder = tmp_path / "study"
    keep_document(folder, study_document(ladder, "cohort study run toy"))
    known = read_folder(folder, {})
    assert (known.baseline, dict(known.references)) == ("none", ladder.references())
    accuracies = {"none": 0.5, "+high": 0.7, "+mean": 0.7, "+batches": 0.55}
    arms = [FakeArm(label, accuracy=accuracy, factors={"arm": label}) for label, accuracy in accuracies.items()]
    record = dataclasses.replace(fake_study(arms, seeds=range(4)), references=known.references)
    analysis = analysed(record)
    assert [one.name for one in analysis.comparisons] == ["+high - none", "+mean - +high", "+batches - +mean"]
    assert {one.family for one in analysis.comparisons} == {3}
    high, mean, batches = analysis.comparisons
    assert (high.is_detected, mean.is_detected, batches.is_detected) == (True, False, True)
    alone = analysed(dataclasses.replace(record, references={}, baseline="+high")).comparison("+mean")
    assert alone is not None and (alone.estimate, alone.p, alone.name) == (mean.estimate, mean.p, "+mean")
    levels = analysed(dataclasses.replace(record, references={"+high": "none", "+batches": "+mean"}))
    assert [arm.label for arm in levels.arms if arm.is_baseline] == ["none", "+mean"]
    text = answer(analysis)
    assert " above none (4 seeds, " in text and " below +mean (4 seeds, " in text
    assert "1 other difference could not be detected" in text
    page = write_report(record, tmp_path / "report", formats=()).html.read_text()
    assert "minus +mean" in page and "Difference to baseline" not in page
    columns, rows = comparison_table(analysis)
    assert [row[columns.index("minus")] for row in rows] == [None, "none", "+high", "+mean"]


CLIP = "has an effect only if a batch gets several updates or is older than the policy, otherwise the ratio is 1; raise"


@pytest.mark.parametrize("design", ["leave_one_out", "add_one_in", "ladder"])
@pytest.mark.parametrize(("components", "run", "words"), [
    (PARTS, {"optimizer": {}}, f"component 'high' cannot matter: algorithm.clip_epsilon_high {CLIP}"),
    ({**PARTS, "same": {"steps": 100}}, {}, "component 'same' cannot matter: steps is 100 without the component"),
    ({**PARTS, "both": {"optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.0}}, {},
     "component 'both' cannot matter: optimizer.weight_decay is 0.0 without the component too"),
    ({"more": {"algorithm.clip_epsilon": 0.1, "optimizer.num_inner_epochs": 2}}, {"optimizer": {}}, ""),
    ({"a": {"steps": 5}, "b": {"steps": 6}}, {}, "must not share a setting, got steps in 'a' and in 'b'"),
    ({"a": {"algorithm.kl_beta": 0.1}, "b": {"algorithm": {"name": "grpo"}}}, {},
     "components must not share a setting"),
    ({"a": {}}, {}, "components must set something, got nothing in 'a'"),
    ({"a": {"algorithm.kl_bta": 0.1}}, {}, "did you mean 'kl_beta'?"),
    ({}, {}, "must have a section 'components', got none"),
])  # fmt: skip
def test_components_that_cannot_matter_or_be_told_apart_are_refused_with_the_reason(design, components, run, words):
    if not words:
        assert len(study(design, components, run={**RUN, **run}).design_arms()) == 2
        return
    with pytest.raises(SpecError, match=rf"\A.*{re.escape(words)}.*\Z"):  # in one line
        study(design, components, run={**RUN, **run})


@pytest.mark.parametrize(("changes", "words"), [
    ({"factors": {"steps": [1, 2]}}, "design leave_one_out takes neither factors nor arms"),
    ({"arms": {"a": {}}}, "design leave_one_out takes neither factors nor arms"),
    ({"design": "grid"}, "section 'components' must have design leave_one_out or add_one_in or ladder, got grid"),
    ({"baseline": "without high"}, "baseline of design leave_one_out must be 'all', got 'without high'"),
    ({"components": {"\0": {"steps": 5}}}, "labels of components must be 1 to 100 printable"),
    ({**LEVELS, "design": "grid", "components": {}, "baseline": "kl_beta=0.2"},  # neither an arm nor a level
     "baseline must be an arm's label, got 'kl_beta=0.2'"),
])  # fmt: skip
def test_a_design_over_components_takes_nothing_else(changes, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        study(**{"design": "leave_one_out", **changes})


def test_the_shipped_study_of_dapo_has_five_arms_that_share_all_but_their_part():
    labels = load_study("dapo_parts").arm_labels()
    parts = ("clip_higher", "token_mean", "overlong", "dynamic_sampling")
    assert labels == ["all", *(f"without {part}" for part in parts)]
    with pytest.raises(SpecError, match="component 'clip_higher' cannot matter"):
        load_study("dapo_parts", ["run.optimizer.num_minibatches=1"])


def record_of(design: str, accuracies: dict[str, float]) -> StudyRecord:
    arms = [FakeArm(label, accuracy=accuracy, factors={"arm": label}) for label, accuracy in accuracies.items()]
    record = fake_study(arms, seeds=range(4))
    spec = {**record.spec, "design": design, "components": {"small": {}, "large": {}, "harmful": {}}}
    return StudyRecord(**{**vars(record), "spec": spec})


@pytest.mark.slow
def test_components_are_ranked_by_what_they_add_with_the_statistics_of_the_comparison(tmp_path):
    out = {"all": 0.8, "without small": 0.77, "without large": 0.6, "without harmful": 0.9}
    found = analysed(record_of("leave_one_out", out))
    ranked = ranked_components(found)
    assert [one.name for one in ranked] == ["large", "small", "harmful"]
    for one in ranked:
        comparison = found.comparison(f"without {one.name}")
        assert one.comparison == comparison and one.effect == -comparison.estimate
        assert (one.interval.low, one.interval.high) == (-comparison.interval.high, -comparison.interval.low)
        assert one.interval.low < one.effect == one.interval.estimate < one.interval.high
    alone = {"none": 0.6, "only small": 0.63, "only large": 0.8, "only harmful": 0.5}
    added = ranked_components(analysed(record_of("add_one_in", alone)))
    assert [(one.name, one.effect > 0) for one in added] == [("large", True), ("small", True), ("harmful", False)]
    files = write_report(record_of("leave_one_out", out), tmp_path, formats=())
    ranks = files.answer.partition("components ranked by contribution (points, Holm-adjusted p): ")[2]
    stated = {one.name: one for one in ranked_components(analysed(record_of("leave_one_out", out)))}
    three = (stated[name] for name in ("large", "small", "harmful"))
    words = [f"'{one.name}' {100 * one.effect:+.1f} ({p_equals(one.comparison.p_adjusted)})" for one in three]
    assert ranks == f"{', '.join(words)}."
    page = files.html.read_text().split('<section id="components">')[1].split("</section>")[0]
    assert page.index("large") < page.index("small") < page.index("harmful")
    assert "## Components" in files.markdown.read_text()
    assert ranked_components(analysed(fake_study())) == []  # of another design
