"""Designs over components: n + 1 arms, none that cannot matter, and a rank by what each component adds."""

from pathlib import Path
from typing import Any

import pytest
from cohort.harness.record.study import StudyRecord
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.load import load_study
from cohort.harness.spec.study import parse_study
from cohort.reports.analysis import analysed
from cohort.reports.findings import ranked_components
from cohort.reports.prose.wording import p_equals
from cohort.reports.render import write_report
from fake_study import FakeArm, fake_study

PARTS = {
    "high": {"algorithm.clip_epsilon_high": 0.28},
    "mean": {"algorithm.name": "dapo"},
    "batches": {"dynamic_sampling": 2, "algorithm.std_floor": 1e-3},
}
OWN = {"name": "grpo", "kl_beta": 0.0, "clip_epsilon_high": None}
RUN = {"task": "arithmetic", "algorithm": OWN, "rewards": {"overlong": 0}, "optimizer": {"num_minibatches": 2}}


def study(design: str = "leave_one_out", components: Any = PARTS, **changes: Any) -> Any:
    raw = {"name": "toy", "question": "Does it?", "run": RUN, "design": design, "components": components}
    return parse_study({**raw, **changes}, "toy.yaml")


def parts_of(arm: Any) -> set[str]:
    run = arm.run_spec(0)
    on = {"high": run.algorithm.clip_epsilon_high == 0.28, "mean": run.algorithm.name == "dapo"}
    on["batches"] = (run.dynamic_sampling, run.algorithm.std_floor) == (2, 1e-3)
    assert on["batches"] or (run.dynamic_sampling, run.algorithm.std_floor) == (1, 1e-4)
    return {name for name, is_on in on.items() if is_on}


def test_leave_one_out_and_add_one_in_have_n_plus_1_arms():
    assert {arm.label: parts_of(arm) for arm in study().design_arms()} == {
        "all": {"high", "mean", "batches"},
        "without high": {"mean", "batches"},
        "without mean": {"high", "batches"},
        "without batches": {"high", "mean"},
    }
    alone = {f"only {name}": {name} for name in ("high", "mean", "batches")}
    assert {arm.label: parts_of(arm) for arm in study("add_one_in").design_arms()} == {"none": set(), **alone}


CLIP = "has an effect only if a batch gets several updates or is older than the policy, otherwise the ratio is 1; raise"


@pytest.mark.parametrize("design", ["leave_one_out", "add_one_in"])
@pytest.mark.parametrize(
    ("components", "run", "words"),
    [
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
    ],
)  # fmt: skip
def test_components_that_cannot_matter_or_be_told_apart_are_refused_with_the_reason(
    design: str, components: Any, run: dict[str, Any], words: str
):
    if not words:
        assert len(study(design, components, run={**RUN, **run}).design_arms()) == 2
        return
    with pytest.raises(SpecError) as caught:
        study(design, components, run={**RUN, **run})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"factors": {"steps": [1, 2]}}, "design leave_one_out takes neither factors nor arms"),
        ({"arms": {"a": {}}}, "design leave_one_out takes neither factors nor arms"),
        ({"design": "grid"}, "section 'components' must have design leave_one_out or add_one_in, got grid"),
        ({"baseline": "without high"}, "baseline of design leave_one_out must be 'all', got 'without high'"),
        ({"components": {"\0": {"steps": 5}}}, "labels of components must be Unicode without NUL"),
    ],
)
def test_a_design_over_components_takes_nothing_else(changes: dict[str, Any], words: str):
    with pytest.raises(SpecError) as caught:
        study(**{"design": "leave_one_out", **changes})
    assert words in str(caught.value)


def test_the_shipped_study_of_dapo_has_five_arms_that_share_all_but_their_part():
    labels = load_study("dapo_parts").arm_labels()
    assert labels == [
        "all",
        *(f"without {part}" for part in ("clip_higher", "token_mean", "overlong", "dynamic_sampling")),
    ]
    with pytest.raises(SpecError, match="component 'clip_higher' cannot matter"):
        load_study("dapo_parts", ["run.optimizer.num_minibatches=1"])


def record_of(design: str, accuracies: dict[str, float]) -> StudyRecord:
    arms = [FakeArm(label, "grpo", accuracy, {}, {"arm": label}) for label, accuracy in accuracies.items()]
    record = fake_study(arms, seeds=range(4))
    spec = {**record.spec, "design": design, "components": {"small": {}, "large": {}, "harmful": {}}}
    return StudyRecord(**{**vars(record), "spec": spec})


def test_components_are_ranked_by_what_they_add_with_the_statistics_of_the_comparison(tmp_path: Path):
    out = {"all": 0.8, "without small": 0.77, "without large": 0.6, "without harmful": 0.9}
    found = analysed(record_of("leave_one_out", out))
    ranked = ranked_components(found)
    assert [one.name for one in ranked] == ["large", "small", "harmful"]
    for one in ranked:
        comparison = found.comparison(f"without {one.name}")
        assert comparison is not None and comparison.interval is not None and one.interval is not None
        assert one.comparison == comparison and one.effect == -comparison.estimate
        assert (one.interval.low, one.interval.high) == (-comparison.interval.high, -comparison.interval.low)
        assert one.interval.low < one.effect < one.interval.high
    alone = {"none": 0.6, "only small": 0.63, "only large": 0.8, "only harmful": 0.5}
    added = ranked_components(analysed(record_of("add_one_in", alone)))
    assert [(one.name, one.effect > 0) for one in added] == [("large", True), ("small", True), ("harmful", False)]
    files = write_report(record_of("leave_one_out", out), tmp_path, formats=())
    ranks = files.answer.partition("components ranked by contribution (points, Holm-adjusted p): ")[2]
    stated = {one.name: one for one in ranked_components(analysed(record_of("leave_one_out", out)))}
    assert (
        ranks
        == ", ".join(
            f"{name} {100 * stated[name].effect:+.1f} ({p_equals(stated[name].comparison.p_adjusted)})"
            for name in ("large", "small", "harmful")
        )
        + "."
    )
    page = files.html.read_text().split('<section id="components">')[1].split("</section>")[0]
    assert page.index("large") < page.index("small") < page.index("harmful")
    assert "## Components" in files.markdown.read_text()
    assert ranked_components(analysed(fake_study())) == []  # of another design
