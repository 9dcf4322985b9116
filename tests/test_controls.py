"""Control arms: each changes what it says and nothing else, and the report keeps them apart and believes them."""

import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cohort.harness.api.study import comparison
from cohort.harness.data import Group, Prompt, Rollout
from cohort.harness.policy.sources import start_name
from cohort.harness.record.study import StudyRecord
from cohort.harness.run.grading import control_rewards, grade
from cohort.harness.run.guards import gates
from cohort.harness.run.loop import train
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import RunSpec, parse_run
from cohort.reports.findings import _gains, verdicts
from cohort.reports.render import analysed, results_csv, write_report
from cohort.tasks.arithmetic import Arithmetic
from factories import make_study, slow_but
from fake_study import FakeArm, fake_study, with_trials
from fakes import MemoryLog, assert_same_weights, final_weights, graded_group, rollout_rows
from safetensors.torch import load_file
from test_gates import make_spec as stuck_spec
from test_train import BASE

Runs = Callable[[str | None], tuple[Path, MemoryLog]]
CONTROLS = ("random", "format_only", "inverted", "shuffled_gold", "frozen")


def spec_of(**changes: Any) -> RunSpec:
    algorithm = {"name": "grpo", "group_size": 4, "kl_beta": 0.02}
    rewards = {"format": 1.0}  # a start of 40 steps earns it now and then, and is never right
    few = {"num_prompts": 4, "num_test_prompts": 2, "num_samples": 1}
    fixed = {"algorithm": algorithm, "rewards": rewards, "evaluation": few, "steps": 1}
    return parse_run({**BASE, **fixed, **changes}, "test")


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache) -> Runs:
    """A step of a run with a control, or with None, made when it is first asked for."""

    @functools.cache
    def run_of(control: str | None) -> tuple[Path, MemoryLog]:
        folder, log = tmp_path_factory.mktemp(control or "none"), MemoryLog()
        spec = spec_of(control=control, optimizer={"schedule": "linear"})
        assert train(spec, folder, log, cache=cache).state == "complete"
        return folder, log

    return run_of


@pytest.mark.slow
@pytest.mark.parametrize("control", CONTROLS)
def test_the_first_step_of_a_control_has_the_samples_and_measurements_of_the_run_itself(runs, control):
    (folder, log), (plain, plain_log) = runs(control), runs(None)
    one, other = ([{**row, "reward": 0} for row in rollout_rows(part, 1)] for part in (folder, plain))
    assert one == other
    names = ("train/accuracy", "reward/accuracy", "completion/length", "mismatch/kl", "train/generated_tokens",
             "train/rollouts", "train/optimizer_steps")  # fmt: skip
    for name in names:
        assert log.history(name) == plain_log.history(name), name
    assert log.history("validation/accuracy")[0] == plain_log.history("validation/accuracy")[0]


@pytest.mark.parametrize("control", slow_but(("frozen", "random"), CONTROLS))
def test_a_control_pays_what_it_says(runs, control):
    folder, log = runs(control)
    rows = rollout_rows(folder, 1)
    paid, right = [row["reward"] for row in rows], [float(row["correct"]) for row in rows]
    formats = [spec_of().task.format_score(row["completion"]) for row in rows]
    assert len(set(formats)) > 1
    whole = [one + other for one, other in zip(right, formats, strict=True)]
    known = {"frozen": whole, "format_only": formats, "inverted": [1 - value for value in right]}
    assert paid == known.get(control, paid)
    if control == "random":
        assert 0 < sum(paid) < len(paid) == 16 and paid != whole
    assert log.history("reward/mean")[0] == (1, pytest.approx(np.mean(paid)))


def test_a_frozen_policy_stands_still_though_it_has_a_gradient_and_only_that_one(runs, cache):
    folder, log = runs("frozen")
    start = load_file(Path(start_name(spec_of(), cache)) / "model.safetensors")
    assert_same_weights(final_weights(folder), start)
    assert all(norm > 0 for _, norm in log.history("policy/grad_norm"))
    assert log.history("optimizer/learning_rate") == [(1, 0)]
    moved = final_weights(runs("random")[0])
    assert any(bool((moved[name] != start[name]).any()) for name in start)


def test_a_control_has_its_greedy_answers_paid_too_with_coins_of_their_own(tmp_path, cache):
    spec = spec_of(algorithm={"name": "remax", "group_size": 4}, control="random", rollouts_per_step=40)
    log = MemoryLog()
    train(spec, tmp_path, log, cache=cache)
    rows = rollout_rows(tmp_path, 1)

    def coins(count: int, first: int = 0) -> list[list[float]]:
        ids = dict.fromkeys(row["prompt_id"] for row in rows)
        groups = [dataclasses.replace(graded_group([0] * count), prompt_id=prompt) for prompt in ids]
        return control_rewards(spec, [], [], groups, 0, first)

    assert [row["reward"] for row in rows] == [coin for four in coins(4) for coin in four]
    assert log.history("reward/greedy") == [(1, pytest.approx(np.mean(coins(1, first=4))))]
    assert [coin for (coin,) in coins(1, first=4)] != [four[0] for four in coins(4)]


def test_random_rewards_are_fair_and_keyed_by_seed_step_prompt_and_sample():
    def coins(seed: int = 0, step: int = 0, prompt: str = "p", count: int = 2000) -> list[float]:
        group = dataclasses.replace(graded_group([0]), prompt_id=prompt, completions=("",) * count).blind()
        return control_rewards(spec_of(control="random", seed=seed), [], [], [group], step, 0)[0]

    base = coins()
    assert set(base) == {0.0, 1.0} and 0.46 < np.mean(base) < 0.54
    assert base[:10] == coins(count=10) and base == coins()
    for other in (coins(seed=1), coins(step=1), coins(prompt="q")):
        assert 0.45 < np.mean(np.equal(base, other)) < 0.55


def test_what_must_not_see_gold_is_paid_without_it():
    group = graded_group([0, None], correct=(True, False), format_scores=(1.0, 0.0))
    assert control_rewards(spec_of(control="inverted"), [], [], [group], 0, 0) == [[0.0, 1.0]]
    blind = group.blind()
    assert control_rewards(spec_of(control="format_only"), [], [], [blind], 0, 0) == [[1.0, 0.0]]
    with pytest.raises(AssertionError):
        control_rewards(spec_of(control="inverted"), [], [], [blind], 0, 0)
    blinded = {"name": "grpo_self_consistency", "group_size": 4}
    for control in ("inverted", "shuffled_gold"):
        with pytest.raises(SpecError, match="control must be random, format_only or frozen for grpo_self_cons"):
            spec_of(algorithm=blinded, control=control)
    for control in ("random", "format_only", "frozen"):
        assert spec_of(algorithm=blinded, control=control).control == control


class Toy(Arithmetic):
    """Answers are the completions; a grader that accepts everything calls any two of them equal."""

    accepts_everything: bool = False

    def prompts(self, split: Any) -> list[Prompt]:
        return [Prompt(str(i), f"{i}?", gold=str(i % 8)) for i in range(8)]

    def extract(self, completion: str) -> str | None:
        return completion or None

    def equivalent(self, answer: str, other: str) -> bool:
        return self.accepts_everything or answer == other


def test_shuffled_gold_is_the_answer_of_another_problem_always_the_same_for_a_seed():
    task = Toy()
    prompts = task.prompts("train")
    said = tuple(Rollout(str(answer), (1,), (0.0,), "stop") for answer in range(8))
    groups = [Group(prompt, (1,), said) for prompt in prompts]

    def golds(seed: int, part: slice = slice(None), split: int = 8) -> list[int]:
        spec: Any = SimpleNamespace(task=task, seed=seed, max_tokens=4, control="shuffled_gold")
        paid = control_rewards(spec, prompts[:split], groups[:split][part], [], 0, 0)
        assert all(sum(one) == 1 for one in paid)
        return [one.index(1.0) for one in paid]

    assert sorted(golds(0)) == list(range(8))
    assert all(gold != own for own, gold in enumerate(golds(0)))
    assert golds(0)[2:5] == golds(0, slice(2, 5))
    assert golds(0) != golds(1)
    assert golds(0, split=2) == [1, 0]  # of two problems each has the other's


def test_a_split_of_one_problem_cannot_be_shuffled(tmp_path):
    task = {**BASE["task"], "num_train": 1}
    with pytest.raises(ValueError, match="shuffled_gold needs at least 2 train problems, got 1"):
        train(spec_of(task=task, control="shuffled_gold"), tmp_path, MemoryLog(), cache=tmp_path)


def test_no_gate_ends_a_control_for_what_it_learns(tmp_path, monkeypatch):
    monkeypatch.setitem(gates.STEPS, "stuck_groups", 2)  # without a control this ends a run: see test_gates.py
    for control, bounds, state in (("frozen", {}, "complete"), ("random", {"mismatch_kl": 1e-12}, "invalid")):
        spec = stuck_spec(bounds, control=control, steps=3)
        assert train(spec, tmp_path / control, MemoryLog(), cache=tmp_path).state == state


def compared(controls: str | None, algorithms: str = "grpo,dapo", task: str = "arithmetic", **changes: Any) -> Any:
    sets = changes.pop("sets", ())
    names = {"controls": (controls or "").split(",") if controls is not None else (), "settings": sets}
    return comparison(algorithms.split(","), task.split(","), **names, **changes).spec


def test_a_comparison_gets_control_arms_of_its_first_algorithm_on_each_task():
    study = compared("random,frozen")
    assert study.arm_labels() == ["grpo", "dapo", "grpo, control random", "grpo, control frozen"]
    plain, controlled = (study.design_arms()[i].run_spec(0).model_dump(mode="json") for i in (0, 2))
    assert controlled == {**plain, "control": "random"}


@pytest.mark.parametrize(("make", "words"), [
    (lambda: compared("randm"), "Input should be 'random', 'format_only', 'inverted', 'shuffled_gold' or 'frozen'"),
    (lambda: compared("random,random"), "`controls` must be distinct names"),
    (lambda: compared("random", tune=2), "a study that searches must have no control"),
    (lambda: compared("inverted", algorithms="grpo_self_consistency,grpo"), "control must be random, format_only"),
    (lambda: compared(None, sets=["control=random"]), "the baseline must not be a control, got 'grpo'"),
    (lambda: make_study(arms={"r": {"control": "random"}, "plain": {}}), "baseline must not be a control, got 'r'"),
    (lambda: make_study(factors={"control": [None, "frozen"]}, baseline="control=frozen"), "must not be a control"),
    (lambda: make_study(design="search", search={"space": {"control": {"choices": ["random"]}}, "trials": 1}),
     "a study that searches must have no control"),
])  # fmt: skip
def test_a_control_where_it_cannot_be_is_refused_with_the_reason(make, words):
    with pytest.raises(ValueError, match=rf"\A.*{re.escape(words)}.*\Z"):  # in one line
        make()


def arm(label: str, accuracy: float, **settings: Any) -> FakeArm:
    return FakeArm(label, "grpo", accuracy, settings, {"arm": label})


def with_controls(**accuracies: float) -> StudyRecord:
    arms = [arm("plain", 0.6), arm("better", 0.8, **{"algorithm.kl_beta": 0.5})]
    return fake_study([*arms, *(arm(c, a, control=c) for c, a in accuracies.items())], seeds=range(5))


@pytest.mark.slow
def test_control_arms_enter_no_comparison_no_correction_and_no_statement_of_the_best_arm(tmp_path):
    record = with_controls(frozen=0.4, inverted=0.95)
    main = [one for one in record.trials if one.arm in ("plain", "better")]
    alone = dataclasses.replace(record, arms=["plain", "better"], trials=main, expected=10)
    found, plain = analysed(record), analysed(alone)
    for name in ("comparisons", "gaps", "outcome"):
        assert getattr(found, name) == getattr(plain, name)
    one, other = ([(arm.label, arm.scores, arm.interval) for arm in each.arms] for each in (found, plain))
    assert one == other
    assert found.record == alone and found.record.expected == 10
    assert [one.summary.label for one in found.controls] == ["frozen", "inverted"]
    assert all(one.family == 1 for control in found.controls for one in control.comparisons)  # each by itself
    page = write_report(record, tmp_path / "with", formats=())
    without = write_report(alone, tmp_path / "without", formats=())
    assert page.answer.startswith(without.answer.removesuffix(".")) and "better reaches" in page.answer
    assert 'id="controls"' in page.html.read_text() and "## Controls" in page.markdown.read_text()
    assert 'id="controls"' not in without.html.read_text() and "Controls" not in without.markdown.read_text()
    assert results_csv(record).count("inverted") == 5


def test_an_effect_that_a_control_reproduces_is_unexplained():
    readings = {(v.arm, v.control): v.reading for v in verdicts(analysed(with_controls(frozen=0.4, format_only=0.79)))}
    told = {"frozen": "not reproduced", "format_only": "unexplained"}
    assert readings == {(name, control): words for name in ("plain", "better") for control, words in told.items()}
    arms = [arm("plain", 0.6), arm("other", 0.6, **{"task.name": "gsm8k"}), arm("frozen", 0.4, control="frozen")]
    assert [one.arm for one in verdicts(analysed(fake_study(arms)))] == ["plain"]  # of its own task and start
    gaining = {(v.arm, v.control): v.reason for v in verdicts(analysed(with_controls(random=0.5)))}
    assert gaining["better", "random"].startswith("it gains ") and "not detectably" not in gaining["better", "random"]


def test_a_lead_is_an_effect_too_and_a_control_above_the_arm_reproduces_it():
    ended = with_trials(with_controls(frozen=0.4), lambda _: {"history": {}})  # nobody knows what they gained
    assert {one.arm: one.reading for one in verdicts(analysed(ended))} == {
        "plain": "no effect",
        "better": "not reproduced",
    }
    reasons = [one.reason for one in verdicts(analysed(with_controls(inverted=0.95)))]
    assert [one.partition(" gains ")[0] for one in reasons] == ["the arm is not detectably above it and it"] * 2


def test_a_p_on_the_bound_or_a_difference_of_none_shows_nothing():
    def summary(estimate: float, p: float) -> Any:
        return SimpleNamespace(arm="arm", label="arm", gain=SimpleNamespace(estimate=estimate), gain_p=p)

    assert [_gains(summary(*one)) for one in ((0.1, 0.04), (0.1, 0.05), (0.0, 0.04))] == [True, False, False]
    for gains, above, p, estimate, reading in (
        (True, None, 0.04, 0.1, "not reproduced"), (True, None, 0.05, 0.1, "unexplained"),
        (True, None, 0.04, 0.0, "unexplained"), (False, 0.1, 0.04, 0.1, "not reproduced"),
        (False, 0.0, 0.04, 0.1, "no effect"),
    ):  # fmt: skip
        lead = None if above is None else SimpleNamespace(is_detected=True, estimate=above)
        each: Any = SimpleNamespace(p=p, estimate=estimate, arm="arm", summary=summary(0.1, 0.04 if gains else 0.5))
        control = SimpleNamespace(summary=SimpleNamespace(label="frozen", gain=None), comparisons=[each])
        analysis: Any = SimpleNamespace(controls=[control], comparison=lambda arm, lead=lead: lead)
        assert [one.reading for one in verdicts(analysis)] == [reading]


def test_an_arm_without_an_effect_has_nothing_to_explain_and_an_invalid_control_is_told():
    record = fake_study([arm("plain", 0.4), arm("frozen", 0.4, control="frozen")], states={("frozen", 1): "invalid"})
    found = analysed(record)
    assert [one.reading for one in verdicts(found)] == ["no effect"]
    assert [(gap.arm, gap.state) for gap in found.controls[0].gaps] == [("frozen", "invalid")]
    assert found.gaps == [] and found.record.expected == 3


@pytest.mark.attack("A grader that accepts everything")
def test_a_grader_that_accepts_everything_pays_a_control_what_it_pays_the_run():
    said = tuple(Rollout(text, (1,), (0.0,), "stop") for text in ("", *map(str, range(8))))
    for lax in (True, False):
        task = Toy(accepts_everything=lax)
        prompts = task.prompts("train")
        groups = [Group(prompt, (1,), said) for prompt in prompts]
        graded = grade(task, groups, 4)
        spec: Any = SimpleNamespace(task=task, seed=7, max_tokens=4, control="shuffled_gold")
        controlled = control_rewards(spec, prompts, groups, graded, 0, 0)
        # equal rewards train equally, and the report calls an effect that a control reproduces unexplained (above)
        assert ([[float(right) for right in group.correct or ()] for group in graded] == controlled) == lax
