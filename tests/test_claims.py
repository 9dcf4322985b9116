"""The verdicts on registered claims: each takes a region that is shown by the error of any comparison."""

import dataclasses
import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cohort.harness.record.study import StudyRecord, TrialRecord, keep_document, read_folder, study_document
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study, shipped_studies
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.preflight import check_claimed, check_study, check_unchanged
from cohort.harness.study.worker import EXECUTE
from cohort.reports import statistics
from cohort.reports.analysis import analysed
from cohort.reports.claims import JudgedClaim, _verdict, check_claims
from cohort.reports.render import write_report
from factories import make_study
from fake_study import FakeArm, arms_of, fake_study, with_claims, with_trials
from scipy import stats


def checked(record: StudyRecord, **claim: Any) -> JudgedClaim:
    (found,) = check_claims(analysed(with_claims(record, claim)))
    return found


PAIR = {"contrast": {"b": 1, "a": -1}}


def apart(differences: list[float], num_problems: int = 0) -> StudyRecord:
    """Arms a and b with these differences of a validation accuracy over the seeds."""

    def curve(trial: TrialRecord) -> dict[str, Any]:
        value = 0.5 + (differences[trial.seed] if trial.arm == "b" else 0.0)
        history = {"validation/accuracy": [(0, 0.1), (10, value)]}
        history |= {"validation/num_prompts": [(10, float(num_problems))]} if num_problems else {}
        return {"history": history, "summary": {}, "per_problem": {}}

    record = fake_study(arms_of(0.5, 0.5), seeds=range(len(differences)), num_problems=2, num_steps=10)
    return with_trials(record, curve)


def scored(differences: list[float], num_problems: int = 0, **claim: Any) -> JudgedClaim:
    return checked(apart(differences, num_problems), **PAIR, **claim)


def measured(history: Callable[[TrialRecord], list[float]], metric: str, **claim: Any) -> str:
    """What a claim says of a metric with this history."""
    record = with_trials(
        fake_study(arms_of(0.7, 0.7), num_steps=10),
        lambda trial: {"history": {**trial.history, metric: list(enumerate(history(trial)))}},
    )
    return checked(record, **PAIR, metric=metric, **claim).measured


# four seeds with mean 2 points and deviation 0.8165: error 0.40825, t(3) = 3.182446, so 2 +- 1.299 points
NEAR = [0.01, 0.02, 0.02, 0.03]


@pytest.mark.parametrize(("predicts", "margin", "verdict"), [
    ("above", 0.0, "supported"), ("above", 0.005, "supported"), ("above", 0.02, "undecided"),
    ("above", 0.034, "contradicted"), ("below", 0.0, "contradicted"), ("not_below", 0.0, "supported"),
    ("equivalent", 0.034, "supported"), ("equivalent", 0.032, "undecided"), ("equivalent", 0.006, "contradicted"),
    ("equivalent", 0.008, "undecided"), ("not_above", 0.034, "supported"), ("not_above", 0.006, "contradicted"),
])  # fmt: skip
def test_a_verdict_is_on_which_side_of_the_margin_the_interval_lies(predicts, margin, verdict):
    found = scored(NEAR, predicts=predicts, margin=margin)
    assert found.verdict == verdict
    assert "+2.0 [+0.7, +3.3] points (4 seeds)." in found.measured


def test_the_p_of_a_region_is_that_of_two_one_sided_tests():
    interval = statistics.t_interval(NEAR)
    error = np.std(NEAR, ddof=1) / 2
    inside, outside = statistics.region_test([interval], -0.03, 0.03)
    # the nearer end, 1 point away, decides: p is twice the tail, as for a difference
    assert inside == pytest.approx(2 * stats.t.sf(0.01 / error, 3))
    assert outside == 1.0
    inside, outside = statistics.region_test([interval], 0.03, math.inf)
    assert (inside, outside) == (1.0, pytest.approx(2 * stats.t.sf(0.01 / error, 3)))
    inside, outside = statistics.region_test([interval], 0.0, math.inf)
    assert inside == pytest.approx(float(stats.ttest_1samp(NEAR, 0).pvalue))
    wider = dataclasses.replace(interval, error=2 * interval.error)  # of several tests the largest p counts
    assert statistics.region_test([interval, wider], 0.0, math.inf)[0] == pytest.approx(2 * stats.t.sf(0.01 / error, 3))
    assert all(map(math.isnan, statistics.region_test([], 0.0, 1.0)))


def test_a_contrast_of_several_arms_says_which_are_taken_from_which():
    record = fake_study(arms_of(*[0.5] * 4), seeds=range(3))
    for contrast, words in (
        ({"a": 1, "b": -1, "c": -1, "d": 1}, "('a' + 'd') - ('b' + 'c')"),
        ({"a": 1, "b": 1, "c": -2, "d": 0}, "('a' + 'b') - 2 x c"),
        ({"a": 0.5, "b": 0.5, "c": -1}, "mean of 'a' and 'b' - c"),
    ):
        assert checked(record, contrast=contrast).found[0][0] == words


def test_seeds_that_would_decide_follow_from_the_distance_to_the_nearest_end():
    found = scored(NEAR, predicts="equivalent", margin=0.028)
    variance = statistics.CrossedVariance(float(np.var(NEAR, ddof=1)), 0.0, 0.0)
    needed = statistics.seeds_needed(0.008, variance, 1)  # 2.8 - 2.0 points
    assert needed is not None and needed > 4
    told = f" {needed} seeds would decide it in 4 of 5 studies, were the true value the measured one."
    assert found.measured.startswith("Validation accuracy: b - a ") and found.measured.endswith(told)
    assert "More than 200 seeds" in scored(NEAR, predicts="equivalent", margin=0.0201).measured
    assert "would decide" not in scored(NEAR).measured
    # scores of 2 problems stand on a grid that is far coarser than their spread: more seeds than there are, at least
    flat = scored([0.02, 0.0201, 0.0199, 0.02], predicts="above", num_problems=2)
    assert flat.verdict == "undecided" and " 5 seeds would decide it" in flat.measured
    assert flat.found[0][1].resolution == 1 / 2


def test_p_values_are_corrected_over_the_claims_of_a_study():
    record = fake_study(arms_of(0.6, 0.64, 0.7), seeds=range(5))
    pair = {"contrast": {"b": 1, "a": -1}}, {"contrast": {"c": 1, "a": -1}}
    single = [checked(record, **claim).p_adjusted for claim in pair]
    both = [claim.p_adjusted for claim in check_claims(analysed(with_claims(record, *pair)))]
    assert both == pytest.approx(statistics.holm(single))
    assert both[1] == pytest.approx(2 * single[1])
    found = check_claims(analysed(with_claims(record, {**pair[0], "margin": 0.06}, pair[1])))[0]
    (_, contrast), *_ = found.found
    assert contrast.variance is not None
    apart, problems = abs(contrast.estimate - 0.06), contrast.num_problems
    needed = statistics.seeds_needed(apart, contrast.variance, problems, alpha=0.05 / 2)
    assert needed is not None and f" {needed} seeds would decide it" in found.measured
    # a contrast of the outcome has the p and the interval of the comparison
    comparison = analysed(record).comparisons[0]
    assert single[0] == pytest.approx(comparison.p)
    assert f"{100 * comparison.interval.low:+.1f}" in checked(record, **pair[0]).measured


def test_all_contrasts_of_a_claim_must_hold_and_one_that_does_not_contradicts():
    def verdict(*accuracies: float, **claim: Any) -> str:
        return checked(fake_study(arms_of(*accuracies), seeds=range(5)), **claim).verdict

    best = {"contrast": [{"b": 1, "a": -1}, {"b": 1, "c": -1}]}
    assert verdict(0.5, 0.8, 0.6, **best) == "supported"
    assert verdict(0.5, 0.8, 0.8, **best) == "undecided"
    assert verdict(0.5, 0.7, 0.9, **best) == "contradicted"
    order = {"predicts": "ordered", "order": ["a", "b", "c"]}
    assert verdict(0.5, 0.65, 0.8, **order) == "supported"
    assert verdict(0.5, 0.8, 0.65, **order) == "contradicted"
    mean = {"contrast": {"a": 0.5, "b": 0.5, "c": -1}, "predicts": "below"}
    assert verdict(0.5, 0.5, 0.8, **mean) == "supported"


@pytest.mark.parametrize(("ratio", "verdict"), [(1.8, "supported"), (1.3, "contradicted"), (1.7, "undecided")])
def test_a_ratio_is_held_against_a_factor_on_a_logarithmic_scale(ratio, verdict):
    noise = [0.99, 1.01, 1.0]

    def peak(trial: TrialRecord) -> dict[str, Any]:
        value = 1e9 * (ratio * noise[trial.seed] if trial.arm == "ppo" else 1.0)
        return {"summary": {**trial.summary, "peak_memory_bytes": value}}

    record = with_trials(fake_study([FakeArm(n, n, 0.7) for n in ("ppo", "grpo")]), peak)
    claim = {"contrast": {"ppo": 1, "grpo": -1}, "metric": "peak_memory_bytes", "ratio": True, "margin": 1.7}
    found = checked(record, **claim)
    assert found.verdict == verdict
    logs = np.log(ratio * np.array(noise))
    low, high = np.exp(stats.t.interval(0.95, 2, logs.mean(), stats.sem(logs)))
    assert f"ppo over grpo {np.exp(logs.mean()):.2f} [{low:.2f}, {high:.2f}]" in found.measured
    assert found.predicted == "a ratio above 1.7"
    one_seed = fake_study(arms_of(0.7, 0.7), states={("b", seed): None for seed in (1, 2)})
    alone = checked(one_seed, **PAIR, ratio=True, margin=1.0)
    assert " (1 seed)." in alone.measured and alone.predicted == "a ratio above 1"
    # what is 0 has no logarithm: that seed is left out
    ends = {"a": [0.2, 0.2, 0.2], "b": [0.4, 0.41, 0.0]}
    told = measured(lambda t: [1.0, ends[t.arm][t.seed]], "policy/entropy", ratio=True, margin=1.0)
    assert "Policy entropy: b over a 2.02 [" in told and "(2 seeds)" in told


def test_what_a_single_arm_gains_may_be_claimed():
    record = fake_study(arms_of(0.7), seeds=range(3), num_steps=10)
    found = checked(record, contrast={"a": 1}, value="gain")  # from 40 to 70 %, give or take a seed's luck
    assert (found.verdict, found.predicted) == ("supported", "above 0.0 points")
    assert found.measured.startswith("Validation accuracy: a +")
    with pytest.raises(ValueError, match="weights of a contrast must have sum 0"):
        checked(record, contrast={"a": 1})


@pytest.mark.parametrize(
    ("metric", "value", "expected"),
    [("policy/entropy", "last", "0.3"), ("policy/entropy", "mean", "0.4"), ("policy/entropy", "gain", "0.2"),
     ("policy/entropy", "fall", "0.6"), ("seconds/step", "mean", "0.475")],  # the first step of a timing warms up
)  # fmt: skip
def test_the_value_of_a_metric_is_its_end_mean_gain_or_fall(metric, value, expected):
    rises = [0.1, 0.9, math.nan, 0.6, 0.1, 0.3]
    told = measured(lambda t: [v + 1e-6 * t.seed for v in rises] if t.arm == "b" else [0.0] * 6, metric, value=value)
    assert f"b - a +{expected} [" in told or f"b - a +{expected}0 [" in told
    assert "points" not in told
    if value == "gain":  # from two values on
        assert f"+{expected}" in measured(
            lambda t: [0.1, 0.3 + 1e-6 * t.seed] if t.arm == "b" else [0, 0], metric, value=value
        )


@pytest.mark.parametrize(("change", "words"), [
    ({"states": {("b", 1): None, ("b", 2): None}}, "No test is possible with fewer than two seeds."),
    ({"states": {("b", 2): "running"}}, "No test is possible before all planned seeds have ended."),
    ({"states": {("b", seed): "invalid" for seed in range(3)}}, "b - a n/a (0 seeds)."),
])  # fmt: skip
def test_a_claim_without_a_test_is_not_tested_and_says_why(change, words):
    record = fake_study(arms_of(0.7, 0.7), **change)
    found = checked(record, **PAIR)
    assert found.verdict == "not tested" and math.isnan(found.p_adjusted)
    assert words in found.measured and found.measured.startswith("Test accuracy: b - a ")


def test_a_claim_waits_for_the_seeds_of_each_of_its_contrasts():
    record = fake_study(arms_of(0.7, 0.7, 0.7), states={("c", 2): "running"})
    found = checked(record, contrast=[{"b": 1, "a": -1}, {"c": 1, "a": -1}])
    assert found.verdict == "not tested" and "(2 seeds). No test is possible before all planned seeds" in found.measured


def test_differences_without_spread_test_nothing_and_invalid_trials_are_named():
    assert "without any spread over seeds" in scored([0.25, 0.25, 0.25]).measured
    record = fake_study(arms_of(0.7, 0.7, 0.7), range(4), states={("b", 3): "invalid", ("c", 0): "invalid"})
    none = {"history": {}, "summary": {}, "per_problem": {}}  # complete, and without a value
    empty = with_trials(record, lambda t: none if (t.arm, t.seed) == ("a", 3) else {})
    for one, told in ((record, " 1 invalid trial left out."), (empty, " 2 invalid trials left out.")):
        measured = checked(one, **PAIR, predicts="below").measured
        assert re.match("(Test|Validation) accuracy: b - a ", measured) and measured.endswith(told)


def test_a_claim_says_its_region_and_when_it_was_registered():
    record = with_claims(fake_study(arms_of(0.7, 0.7)), {**PAIR, "predicts": "below"})
    later = dataclasses.replace(record, claims=[{**record.claims[0], "time": 86_400_000}])  # milliseconds
    (found,) = check_claims(analysed(later))
    assert (found.region, found.predicted) == ((-math.inf, 0.0), "below 0.0 points")
    assert found.registered == "registered 1970-01-02 00:00 UTC, digest 0a1b"
    assert scored(NEAR, predicts="equivalent", margin=0.05).predicted == "between -5.0 and +5.0 points"


def test_a_p_on_the_bound_decides_nothing():
    found = [_verdict(ps, max(ps)) for ps in ((0.05, 0.04), (0.049, 0.04), (0.04, 0.049))]
    assert found == ["undecided", "contradicted", "supported"]


def test_a_verdict_that_holds_for_these_problems_alone_is_named_as_such():
    # b gains 1 on half of the problems and loses 0.8 on the others: 10 points in every seed, but perhaps not on others
    record = fake_study(arms_of(0.7, 0.7), range(4), num_problems=16)

    def cells(trial: TrialRecord) -> dict[str, Any]:
        own = np.tile([1.0, 0.0], 8) if trial.arm == "b" else np.tile([0.0, 0.8], 8)
        own = own - 1e-3 * trial.seed * (trial.arm == "b")
        found = dict(zip(trial.per_problem, own.tolist(), strict=True))
        return {"per_problem": found, "summary": {**trial.summary, "test_accuracy": float(own.mean())}}

    found = checked(with_trials(record, cells), **PAIR)
    assert found.verdict == "undecided"
    assert found.measured.startswith("Test accuracy: b - a ")
    assert "For these test problems alone it would be supported." in found.measured
    assert "alone" not in checked(with_trials(record, cells), **PAIR, margin=0.09).measured  # undecided either way
    # These p are a Holm family of their own. t(3) = (0.0985 - 0.0526) / (1 / 16 / sqrt(24)) = 3.60, p = 0.037; for a
    # margin of 0 p = 0.0046. Beside a surer claim 0.037 counts once, beside one like it twice.
    near = {**PAIR, "margin": 0.0526}
    for other, is_named in (({**near, "margin": 0.0}, True), ({**near, "margin": 0.0527}, False)):
        named = check_claims(analysed(with_claims(with_trials(record, cells), near, other)))
        assert ["alone it would be supported" in one.measured for one in named] == [is_named] * 2


def test_a_claim_over_seeds_alone_has_one_verdict():
    pair = [{**PAIR, "margin": margin} for margin in (0.0, 0.005)]
    found = check_claims(analysed(with_claims(apart(NEAR), *pair)))  # p = 0.016 and 0.035
    assert [(one.verdict, "alone" in one.measured) for one in found] == [("supported", False)] * 2


# In a study file ---------------------------------------------------------------------------------------------------

CLAIM = {
    "sentence": "Larger groups help.", "source": "a paper, table 1", "predicts": "above",
    "contrast": {"group_size=4": 1, "group_size=2": -1},
}  # fmt: skip


def sizes(**changes: Any) -> StudySpec:
    return make_study(**{"factors": {"algorithm.group_size": [2, 4]}, **changes})


@pytest.mark.parametrize(("claim", "words"), [
    ({"contrast": {"group_size=8": 1, "group_size=2": -1}}, "must name arms of the study, got 'group_size=8'"),
    ({"contrast": {"group_size=4": 1, "group_size=2": 1}}, "weights of a contrast must have sum 0"),
    ({"contrast": []}, "a claim must have one of contrast and order"),
    ({"predicts": "ordered"}, "predicts: ordered must have 'order'"),
    ({"predicts": "equivalent"}, "equivalent must have a margin"),
    ({"ratio": True, "margin": 0.5}, "the margin of a ratio must be a factor of at least 1, got 0.5"),
    ({"predicts": "equal"}, "predicts"),
    ({"sentence": ""}, "sentence"),
])  # fmt: skip
def test_a_claim_that_cannot_be_decided_is_refused(claim, words):
    with pytest.raises(SpecError, match=re.escape(words)):
        sizes(claim={**CLAIM, **claim})


def test_a_claim_is_registered_at_the_first_start_and_stays_as_it_was(tmp_path):
    study = sizes(claim=CLAIM)
    document = study_document(study, "cohort study run sizes")
    again = study_document(study, "cohort study run sizes", known=document)
    assert again["registered"] == document["registered"]
    assert document["registered"]["time"] > 1.7e12
    keep_document(tmp_path, document)
    (claim,) = read_folder(tmp_path, {}).claims
    assert (claim["sentence"], claim["contrasts"]) == (CLAIM["sentence"], [CLAIM["contrast"]])
    assert (claim["region"], len(claim["digest"])) == ([0.0, None], 16)
    assert sizes(claim={**CLAIM, "margin": 0.01}).digest() != study.digest() != sizes().digest()
    started = SimpleNamespace(read_document=lambda: {**document, "inputs": {}}, document_place="study.json")
    more = {"factors": {"algorithm.group_size": [2, 4, 8]}}  # arms may be added, and a claim stays
    assert check_unchanged(sizes(claim=CLAIM, **more), started) == {}  # pyright: ignore
    with pytest.raises(SpecError, match="a started study cannot change"):
        check_unchanged(sizes(claim={**CLAIM, "margin": 0.01}, **more), started)  # pyright: ignore
    keep_document(tmp_path, {**document, "claim": [{**document["claim"][0], "margin": 0.3}]})
    with pytest.raises(ValueError, match="its claims differ from the ones that it was started with"):
        read_folder(tmp_path, {})


@pytest.mark.parametrize(("metric", "words"), [
    ("policy/entrpy", "got 'policy/entrpy'; did you mean 'policy/entropy'?"),
    ("validation/pass_at_16", "did you mean 'validation/pass_at_4'?"),  # evaluations draw four samples
    ("length", "did you mean 'completion/length'?"), ("zzz", "'zzz'; others are policy/entropy, seconds/step"),
])  # fmt: skip
def test_a_claim_on_a_metric_that_no_run_logs_is_refused_before_the_start(tmp_path, metric, words):
    study = sizes(claim={**CLAIM, "metric": metric})
    with pytest.raises(SpecError, match="the metric of a claim must be one that runs log") as refused:
        check_study(study, tmp_path, 1, EXECUTE)
    assert words in str(refused.value)


def test_a_claim_may_be_on_any_test_its_samples_the_problems_with_one_tag_and_what_a_step_logs():
    run = {"task": "arithmetic", "algorithm": "grpo", "evaluation": {"num_test_samples": 16, "tests": ["math500"]}}
    logged = ("critic/grad_norm", "seconds/generate", "mismatch/kl", "flops/learning", "flops_train")
    for metric in ("test/pass_at_16", "test_math500/maj_at_16", "validation/accuracy_operands_3", *logged):
        study = sizes(run=run, claim={**CLAIM, "metric": metric})
        check_claimed(study, [arm.spec for arm in study.design_arms()])


def test_claims_of_shipped_studies_are_on_metrics_that_runs_log():
    for name in shipped_studies():
        study = load_study(name)
        check_claimed(study, [arm.spec for arm in study.checked_arms()])


@pytest.mark.slow
def test_the_page_states_claims_with_prediction_and_verdict_and_draws_them(tmp_path):
    record = with_claims(
        fake_study(arms_of(0.6, 0.8), seeds=range(5)),
        {"contrast": {"b": 1, "a": -1}, "predicts": "equivalent", "margin": 0.05, "sentence": "b <matches> a."},
    )
    files = write_report(record, tmp_path, formats=("svg",))
    page, text = files.html.read_text(), files.markdown.read_text()
    assert "b &lt;matches&gt; a." in page and ">contradicted</span>" in page
    assert "between -5.0 and +5.0 points" in page.replace("\u2212", "-") and "between -5.0 and +5.0 points" in text
    assert (tmp_path / "figures" / "claims_0.svg").exists()
    assert 'id="claims"' not in write_report(fake_study(), tmp_path, formats=()).html.read_text()
