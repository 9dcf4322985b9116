"""Completions that want the reward without the answer: echoes of the question, hedges, lists. All made up here."""

import os
import re

import pytest
from cohort.harness.data import GradedGroup, Group, Prompt, Rollout
from cohort.harness.rewards.majority_vote import MajorityVote
from cohort.harness.run.grading import grade
from cohort.tasks.gsm8k import GSM8K
from cohort.tasks.math import Math
from cohort.tasks.math500 import Math500
from real_data import golden, real_data

CASES = golden("reward_hacking")
HEDGES = CASES["hedges"]  # over the gold answer 5


def graded(task, question: str, gold: str, *completions: str) -> GradedGroup:
    """The completions as the group of a prompt that asks the question as the task does."""
    prompt = Prompt("p", task.template.replace("{question}", question), task.read(gold))
    rollouts = tuple(Rollout(text, (1,), (0.0,), "stop") for text in completions)
    return grade(task, [Group(prompt, (1,), rollouts)], 8)[0]


def boxed(answers: list[str]) -> list[str]:
    return [rf"Hence \boxed{{{answer}}}" for answer in answers]


@pytest.mark.attack("Completions that restate the question")
@pytest.mark.parametrize("case", CASES["echoes"], ids=lambda case: case["question"][:40])
def test_an_answer_that_restates_the_question_is_wrong(case, record_property):
    gold, echoes = case["gold"], case["answers"]
    group = graded(Math(), case["question"], gold, *boxed([*echoes, gold]))
    assert dict(zip([*echoes, gold], group.correct, strict=True)) == {**dict.fromkeys(echoes, False), gold: True}
    record_property("tried", len(echoes))


@pytest.mark.parametrize("case", CASES["answers"], ids=lambda case: case["question"][:40])
def test_an_answer_in_another_spelling_still_counts(case):
    group = graded(Math(), case["question"], case["gold"], *boxed(case["answers"]))
    assert dict(zip(case["answers"], group.correct, strict=True)) == dict.fromkeys(case["answers"], True)


@pytest.mark.attack("Hedges, lists and abused units for an answer")
@pytest.mark.parametrize("task", [GSM8K(), GSM8K(answer_format="boxed"), Math(), Math(answer_format="hash")])
def test_no_hedge_is_right(task, record_property):
    assert [text for text in HEDGES if graded(task, "How many?", "5", text).correct != (False,)] == []
    record_property("tried", len(HEDGES))


@pytest.mark.attack("Completions that restate the question")
def test_a_majority_of_echoes_is_no_target_and_a_lone_answer_wins():
    echo, other = r"\boxed{213^2-187^2}", r"\boxed{-187^2+213^2}"
    group = graded(Math(), "Compute $213^2-187^2$.", "10400", echo, echo, other, r"\boxed{10400}", r"\boxed{}")
    assert group.classes == (None, None, None, 0, None)
    assert MajorityVote().score(group.blind()) == [-0.1, -0.1, -0.1, 1.0, -0.1]


def test_a_copy_that_leaves_no_work_may_vote_and_equality_itself_does_not_know_the_question():
    copied = graded(Math(), r"Which is larger, $7$ or $\sqrt{53}$?", r"\sqrt{53}", r"\boxed{\sqrt{53}}")
    assert (copied.classes, copied.correct) == ((0,), (True,))
    assert Math().equivalent("513^2-487^2", "26000")
    assert Math().equivalent("(x-2)(x+3)", "x^2+x-6")


LAST_FORMULA = re.compile(r"\$([^$]+)\$(?!.*\$)", re.S)


@pytest.mark.skipif(not os.environ.get("COHORT_CHAOS"), reason="takes half a minute: make chaos")
@pytest.mark.attack("Completions that restate the question")
def test_the_last_formula_of_a_question_of_real_math500_hardly_ever_counts(record_property):
    # Two golds stand in their questions as written; three are the decimals of a fraction there, which is one number.
    task = Math500(path=str(real_data("math500")))
    tried, right = 0, 0
    for prompt in task.prompts("test"):
        formula = LAST_FORMULA.search(prompt.text)
        if formula is not None:
            rollouts = (Rollout(rf"\boxed{{{formula[1]}}}", (1,), (0.0,), "stop"),)
            right += sum(grade(task, [Group(prompt, (1,), rollouts)], 8)[0].correct or ())
            tried += 1
    assert tried > 350
    assert right <= 5
    record_property("tried", tried)
