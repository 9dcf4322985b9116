"""Answers, equivalence classes and correctness: by the task's own equality, with as few comparisons as possible."""

import math
import threading
from dataclasses import asdict, replace
from fractions import Fraction
from typing import ClassVar

import pytest
import torch
from cohort.algorithms.grpo import GRPO
from cohort.harness.data import Group, InvalidRun, Prompt, Rollout, Score
from cohort.harness.policy.text import as_groups
from cohort.harness.rewards.accuracy import Accuracy
from cohort.harness.run import step
from cohort.harness.run.build import prepare
from cohort.harness.run.evaluate import metric_names, problem_score, sample_metrics
from cohort.harness.run.grading import begin_grading, grade, group_of, sample_rows
from cohort.harness.run.step import rollout_metrics, train_step
from cohort.harness.settings.run import EvaluationSettings
from cohort.tasks.arithmetic import Arithmetic
from cohort.tasks.gsm8k import GSM8K
from cohort.tasks.math import Math
from factories import make_spec
from fakes import MemoryLog, batch_of, tiny_codec
from real_data import golden

asked: list[tuple[str, str]] = []
read: list[str] = []


class FractionTask(Arithmetic):
    """Answers are what follows `=`; equality is that of fractions. It notes what it is asked."""

    def extract(self, completion: str) -> str | None:
        read.append(completion)
        return completion.partition("=")[2] or None

    def equivalent(self, answer: str, other: str) -> bool:
        asked.append((answer, other))
        return Fraction(answer) == Fraction(other)

    def format_score(self, completion: str) -> float:
        return 1.0 if completion.startswith("=") else 0.5


@pytest.fixture(autouse=True)
def _nothing_asked():
    asked.clear()
    read.clear()


def group(gold: str, *completions: str, prompt_id: str = "p") -> Group:
    """A group of completions; one of three characters or fewer came to its end, a longer one to the token limit."""
    rollouts = tuple(
        Rollout(text, tuple(range(len(text) + 1)), (0.0,) * (len(text) + 1), "stop" if len(text) < 4 else "length")
        for text in completions
    )
    return Group(Prompt(prompt_id, f"{prompt_id}?", gold), (1, 2), rollouts)


LATEX = "so $x = \\frac{1}{2}$ in the end"


@pytest.mark.parametrize(("task", "gold", "completion", "strict", "lenient"), [
    (Arithmetic(), "39", "26 + 13 = 39", False, True),
    (Arithmetic(), "39", "It is 39, or 40.", False, False),  # the last one counts
    (Arithmetic(), "39", "It is 39, and not 40.", False, True), (Arithmetic(), "39", "It is not 39.", False, False),
    (Arithmetic(), "39", "It isn't $39$.", False, False), (Arithmetic(), "2", "Q2", False, False),
    (Arithmetic(), "2", r"$\frac{1+\sqrt{5}}{2}$", False, False), (Arithmetic(), "15", r"$\sqrt{225}=15$", False, True),
    (Arithmetic(), "9", r"\( x \approx 9 \)", False, True), (Math(path="x"), "9", r"It is \[ 9 \]", False, True),
    (Arithmetic(), "39", "39 #### 40", False, False),  # a marked answer is the answer
    (Arithmetic(), "39", "40 #### 39", True, True),
    (Arithmetic(), "1200", "That makes $1,200.", False, True),
    (Arithmetic(), "39", "no number", False, False),
    (Math(path="x"), "\\frac{1}{2}", LATEX.replace("x = ", ""), False, True),
    (Math(path="x"), "12", "$x$ is 12", False, True),
    (Math(path="x"), "x", "12 is $x$", False, True), (Math(path="x"), "12", r"\boxed{12}, or $x$", True, True),
])  # fmt: skip
def test_a_lenient_reading_takes_the_last_number_or_expression_if_none_marked(task, gold, completion, strict, lenient):
    (graded,) = grade(task, [group(gold, completion)], 8)
    assert (graded.correct, graded.lenient) == ((strict,), (lenient,))
    assert graded.blind().lenient is None
    metrics = sample_metrics([problem_score(graded, graded)])
    assert (metrics["accuracy"], metrics["lenient_accuracy"]) == (strict, lenient)
    assert metrics["marked_accuracy"] == strict
    (graded,) = grade(task.model_copy(update={"answers": "last"}), [group(gold, completion)], 8)
    assert (graded.correct, graded.lenient, graded.marked) == ((lenient,), (lenient,), (strict,))
    assert graded.blind().marked is None
    found = rollout_metrics([graded], [[0.0]])
    kinds = ("accuracy", "lenient_accuracy", "marked_accuracy")
    assert [found[f"train/{kind}"] for kind in kinds] == [lenient, lenient, strict]


def test_answers_fall_into_classes_by_the_equality_of_the_task():
    (graded,) = grade(FractionTask(), [group("0.5", "=1/2", "=3", "none", "=2/4", "=0.5", "=6/2")], 8)
    assert graded.answers == ("1/2", "3", None, "2/4", "0.5", "6/2")
    # 1/2 = 2/4 = 0.5 is class 0, 3 = 6/2 class 1; without an answer there is no class.
    assert graded.classes == (0, 1, None, 0, 0, 1)
    assert graded.correct == (True, False, False, True, True, False)


def test_each_completion_is_read_once_equal_strings_are_never_compared_and_each_class_once_with_gold():
    grade(FractionTask(), [group("1", "=1", "=1", "=1", "=1")], 8)
    assert (read, asked) == (["=1"] * 4, [])
    grade(FractionTask(), [group("4", "=2/1", "=3", "=2", "=3", "=6/3")], 8)
    # Within the group: 3 with 2/1; 2 with 2/1; 6/3 with 2/1. With gold: one of each of the two classes.
    assert asked == [("3", "2/1"), ("2", "2/1"), ("6/3", "2/1"), ("2/1", "4"), ("3", "4")]


def test_groups_without_any_answer_and_empty_groups_are_graded_and_the_rest_of_a_rollout_is_carried_over():
    nothing, empty = grade(FractionTask(), [group("1", "a", "b123"), group("1")], 8)
    assert (nothing.classes, nothing.correct) == ((None, None), (False, False))
    assert (nothing.prompt_id, nothing.completions) == ("p", ("a", "b123"))
    assert (nothing.num_tokens, nothing.truncated) == ((2, 5), (False, True))
    assert (empty.answers, empty.classes, empty.correct) == ((), (), ())
    assert asked == []


def test_samples_show_the_first_rollout_of_each_prompt_before_the_second_of_any():
    groups = [group("1", "=1", "=2", prompt_id="a"), group("5", "=5555", "x", prompt_id="b")]
    graded = grade(FractionTask(), groups, 8)
    parts = ({"format": [1.0, 2.0]}, {"format": [3.0, 4.0]})
    scores = [Score([1.0, 0.0], None, None, parts[0]), Score([0.5, 0.25], None, None, parts[1])]
    rows = sample_rows(groups, graded, scores, step=7, split="train", limit=3)
    found = [(r.prompt_id, r.completion, r.reward, r.gold, r.answer, r.correct, r.num_tokens) for r in rows]
    assert found == [
        ("a", "=1", 1.0, "1", "1", True, 3),
        ("b", "=5555", 0.5, "5", "5555", False, 6),
        ("a", "=2", 0.0, "1", "2", False, 3),
    ]
    assert [row.finish_reason for row in rows] == ["stop", "length", "stop"]
    assert [row.rewards for row in rows] == [{"format": 1.0}, {"format": 3.0}, {"format": 2.0}]
    assert {(row.step, row.split) for row in rows} == {(7, "train")}
    assert rows[1].prompt == "b?"

    evaluated = sample_rows(groups, graded, step=0, split="test", limit=10)
    assert [(row.completion, row.reward) for row in evaluated] == [(text, None) for text in ("=1", "=5555", "=2", "x")]


@pytest.mark.parametrize(("equal", "format_score", "told"), [
    (True, 0.0, ""), (False, 1.0, ""), (None, 1.0, "got None"), (2, 1.0, "got 2"), (True, 1.01, "got 1.01"),
    (True, -0.01, "got -0.01"), (True, float("nan"), "got nan"),
])  # fmt: skip
def test_a_grader_that_gives_no_verdict_or_no_share_is_named_with_its_problem(equal, format_score, told):
    class Odd(FractionTask):
        def equivalent(self, answer, other):
            return equal

        def format_score(self, completion):
            return format_score

    if told:
        with pytest.raises(InvalidRun, match=rf"^Odd\.equivalent must .*, {told} for problem 'p'$"):
            grade(Odd(), [group("1", "=2")], 8)
    else:
        assert grade(Odd(), [group("1", "=2")], 8)[0].correct == (equal,)


def test_one_thread_grades_at_a_time():
    threads, goes_on = [], threading.Event()

    class Waiting(FractionTask):
        def extract(self, completion):
            threads.append(threading.get_ident())
            assert goes_on.wait(60)

    both = [begin_grading(Waiting(), [group("1", "=1")], 8) for _ in range(2)]
    goes_on.set()
    assert [one.result()[0].correct for one in both] == [(False,)] * 2
    assert len(threads) == 2 and len({*threads, threading.get_ident()}) == 2


class StrictTask(FractionTask):
    """An answer with a `+` restates the question."""

    def equivalent(self, answer: str, other: str) -> bool:
        return total(answer) == total(other)

    def is_answered(self, answer: str, question: str, gold: str | None) -> bool:
        return "+" not in answer or answer == gold


def total(text: str) -> Fraction:
    return sum(map(Fraction, text.split("+")), Fraction(0))


def test_an_answer_that_restates_the_question_is_wrong_and_has_no_class():
    (graded,) = grade(StrictTask(), [group("3", "=1+2", "=3", "=6/2", "=2+1", "=5")], 8)
    assert graded.answers == ("1+2", "3", "6/2", "2+1", "5")
    assert graded.correct == (False, True, True, False, False)
    assert graded.classes == (None, 0, 0, None, 1)
    (graded,) = grade(StrictTask(), [group("1+2", "=1+2", "=3")], 8)  # the text of the gold answer, whatever its form
    assert graded.correct == (True, True)


CASES = golden("grading")


@pytest.mark.parametrize(("form", "gold", "completion", "is_right", "runs_on"), CASES["ends"])
def test_the_answer_stands_after_the_last_thought_and_before_a_new_question(form, gold, completion, is_right, runs_on):
    (graded,) = grade(GSM8K(answer_format=form), [group(gold, completion)], 8)
    assert (graded.correct, graded.run_on) == ((is_right,), (runs_on,))
    assert rollout_metrics([graded], [[0.0]])["completion/run_on"] == float(runs_on)


def test_a_prompt_that_opens_the_thought_itself_is_understood():
    prompt = Prompt("p", "How many?\n<think>\n", "7")
    texts = ("#### 7, or is it", "3+4</think>#### 7", "3+4</think><answer>7</answer>")
    (graded,) = grade(GSM8K(answer_format="think_answer"), [replace(group("7", *texts), prompt=prompt)], 8)
    assert graded.correct == (False, True, True)
    assert graded.format_scores == (0.0, 0.5, 1.0)
    codec, row = tiny_codec(), [((1,), (0.0,), True)]
    codec.opens_thought = True
    assert as_groups([replace(prompt, text="How many?")], [(1,)], row, codec)[0].prompt.text == "How many?\n<think>"


@pytest.mark.parametrize(("gold", "answer", "is_right"), CASES["spellings"])
def test_another_spelling_is_also_an_answer(gold, answer, is_right):
    (graded,) = grade(Math(), [group(gold, rf"\boxed{{{answer}}}")], 8)
    assert graded.correct == (is_right,)


class CreditTask(FractionTask):
    """An answer is worth the smaller of it and gold as a share of the larger one."""

    partial_credit = True

    def score(self, answer: str, gold: str) -> float:
        low, high = sorted((Fraction(answer), Fraction(gold)))
        return float(low / high)


def test_partial_credit_grades_every_answer_and_a_blind_group_has_none():
    completions = ("=4", "=8/2", "=2", "none")
    graded = grade(CreditTask(), [group("4", *completions)], max_tokens=8)[0]
    assert graded.scores == (1.0, 1.0, 0.5, 0.0)
    assert graded.correct == (True, True, False, False)
    assert (graded.blind().scores, graded.blind().correct) == (None, None)
    assert grade(FractionTask(), [group("4", *completions)], max_tokens=8)[0].scores is None
    # paid only where it is asked for
    assert [Accuracy(partial=own).score(graded) for own in (False, True)] == [[1, 1, 0, 0], [1, 1, 0.5, 0]]
    with pytest.raises(AssertionError):
        Accuracy(partial=True).score(graded.blind())


def test_metrics_have_the_mean_score_where_there_is_partial_credit():
    graded = grade(CreditTask(), [group("4", "=4", "=2"), group("1", "=1", "none")], max_tokens=8)
    metrics = sample_metrics([problem_score(group, group) for group in graded])
    assert (metrics["score"], metrics["accuracy"]) == (2.5 / 4, 2 / 4)
    assert rollout_metrics(graded, [[1.0, 0.0]] * 2)["train/score"] == 2.5 / 4
    assert "score" in metric_names(EvaluationSettings(), partial_credit=True)
    plain = grade(FractionTask(), [group("4", "=4", "=2")], max_tokens=8)
    assert "score" not in sample_metrics([problem_score(group, group) for group in plain])
    assert "train/score" not in rollout_metrics(plain, [[1.0, 0.0]])
    assert "score" not in metric_names(EvaluationSettings())


def test_the_engine_sleeps_and_the_learner_annotates_during_grading_and_each_phase_is_timed(tmp_path, monkeypatch):
    told, annotated, clock = [], threading.Event(), [9.0]

    class Patient(Arithmetic):
        def num_unparsable(self):
            return 5 + told.count("grade")

        def extract(self, completion):
            told.append("grade" if annotated.wait(60) else "grade, after waiting in vain")
            annotated.set()
            return super().extract(completion)

    algorithm = {"name": "grpo", "group_size": 4, "kl_beta": 0.04}
    own = {"rewards": {"token_entropy": 1.0}, "mismatch": {"correction": "masked"}}
    spec = make_spec(algorithm, rollouts_per_step=8, task=Patient(), **own)
    run, _ = prepare(spec, tmp_path, MemoryLog(), tmp_path, lambda: False)
    learner, engine = run.learner, run.engine

    def annotate(batch, own=learner.annotate):
        batch = own(batch)
        told.append("annotate")
        annotated.set()
        return batch

    def taking(seconds, work):
        def timed(*given):
            clock[0] += seconds
            return work(*given)

        return timed

    run.now = lambda: clock[0]
    engine.sleep, learner.annotate = taking(1, lambda: told.append("sleep")), taking(2, annotate)
    learner.token_means, learner.update = taking(4, learner.token_means), taking(16, learner.update)
    monkeypatch.setattr(step, "rewarded", taking(8, step.rewarded))
    engine.load_weights = taking(32, lambda weights, version: told.append(version))
    run.totals.learner_peak_bytes = 10**15  # of an earlier step
    learner.sampler_is_exact = False
    metrics, drawn = train_step(run, spec.task.prompts("train"), 0)
    assert told == ["sleep", "annotate", *["grade"] * 8, 1]
    assert metrics["memory/learner_peak_bytes"] == 10**15 and metrics["mismatch/weight"] == pytest.approx(1)
    assert all(group.token_means["entropy"] for group in drawn.graded)
    assert metrics["grading/unparsable"] == 8  # 13 - 5
    seconds = {"generate": 1, "annotate": 2 + 8, "grade": 4, "update": 16, "sync": 32, "step": 63}
    assert {name: metrics[f"seconds/{name}"] for name in seconds} == seconds


class Broken(GRPO):
    """Fills in what the test says, or leaves it out."""

    objective: ClassVar = {"advantage": "what the test says"}
    found: ClassVar[torch.Tensor | None] = None

    def advantages(self, batch):
        return batch.replace(advantages_BT=self.found)


NOT_FINITE = torch.tensor([[0.0, math.nan], [1.0, 0.0]])


@pytest.mark.parametrize(("found", "got"), [
    (None, "got none"), (torch.zeros(2), r"got shape \[2\]"), (NOT_FINITE, "got numbers that are not finite"),
])  # fmt: skip
def test_advantages_of_a_wrong_shape_or_not_finite_are_an_error_that_names_the_class(monkeypatch, found, got):
    monkeypatch.setattr(Broken, "found", found)
    rule = r"Broken.advantages must fill advantages_BT with finite numbers of shape \[2, 2\], "
    with pytest.raises(ValueError, match=f"{rule}{got}; correct Broken.advantages in .*test_grading.py"):
        Broken(group_size=2).credited(batch_of([[1, 1], [1, 1]], [1.0, 0.0], 2))
    if found is NOT_FINITE:  # where the batch is not finite itself, it is the loss that refuses
        batch = batch_of([[1, 1], [1, 1]], [math.nan, 0.0], 2)
        assert Broken(group_size=2).credited(batch).advantages_BT is found


def test_a_group_of_one_completion_is_read_from_its_row():
    one = group("2", "=2")
    (row,) = sample_rows([one], grade(FractionTask(), [one], 8), step=1, split="train")
    found = group_of([asdict(row)])
    assert (found.prompt, [r.text for r in found.rollouts]) == (one.prompt, ["=2"])
    assert [(len(r.token_ids), r.finish_reason) for r in found.rollouts] == [(3, "stop")]


def test_rewards_of_a_single_completion_have_no_spread_and_of_two_that_of_a_sample():
    (one,) = grade(FractionTask(), [group("2", "=2")], 8)
    assert rollout_metrics([one], [[1.0]])["reward/std"] == 0.0
    (two,) = grade(FractionTask(), [group("2", "=2", "=3")], 8)
    assert rollout_metrics([two], [[1.0, 0.0]])["reward/std"] == pytest.approx(0.5**0.5)  # (1/4 + 1/4) / 1
