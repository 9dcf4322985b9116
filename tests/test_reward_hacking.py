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
from real_data import real_data

# fmt: off
# Question, gold, and answers that equal it and do not answer.
ECHOES = [
    ("Compute $213^2-187^2$.", "10400", ["213^2-187^2", "x=213^2-187^2", "(213-187)(213+187)", "-187^2+213^2",
                                         "26\\cdot 400", "213^2-187^2+0", "10399+1", "5200\\cdot 2"]),
    (r"What is $\binom{17}{14}$?", "680", [r"\binom{17}{14}", r"\binom{17}{3}", r"\dbinom{17}{14}+0",
                                           r"\frac{17!}{14!3!}"]),
    ("Expand $(x+4)(x-9)$.", "x^2-5x-36", ["(x+4)(x-9)", "(x-9)(x+4)", "x(x-9)+4(x-9)", "x^2-9x+4x-36"]),
    ("Factor $ab+3b+7a+21$.", "(a+3)(b+7)", ["ab+3b+7a+21", "7a+21+ab+3b", "a(b+7)+3(b+7)"]),
    ("Simplify $(5-2k)+(6k-1)$.", "4k+4", ["(5-2k)+(6k-1)", "5-2k+6k-1", "6k-2k+4"]),
    (r"Simplify $\frac{(6r^2)(3r^5)}{9r^3}$.", "2r^4", [r"\frac{(6r^2)(3r^5)}{9r^3}", r"\frac{18r^7}{9r^3}"]),
    (r"Simplify $\sqrt{1100}$.", r"10\sqrt{11}", [r"\sqrt{1100}", r"x=\sqrt{1100}", r"1\cdot\sqrt{1100}"]),
    (r"Evaluate $\log_3 243$.", "5", [r"\log_3 243", r"\log_{3}(243)"]),
    (r"Find $\tan 45^\circ+\sin 30^\circ$.", r"\frac32", [r"\tan 45^\circ+\sin 30^\circ", r"1+\frac12"]),
    (r"Compute $\lceil\sqrt{30}\rceil^2$.", "36", [r"\lceil\sqrt{30}\rceil^2", "6^2"]),
    (r"Compute $|2-9|+4$.", "11", ["|2-9|+4", "7+4"]),
    (r"Write $\frac{2+i}{1-i}$ in the form $a+bi$.", r"\frac12+\frac32 i", [r"\frac{2+i}{1-i}"]),
    (r"Solve $\frac{1}{x-7}>0$.", r"(7,\infty)", [r"\frac{1}{x-7}>0", r"\frac{1}{x-7}>0."]),
    ("Solve $x^2-2x-3<0$.", "(-1,3)", ["x^2-2x-3<0", "(x-3)(x+1)<0"]),
    (r"Express $\frac{\sec y}{\sin y}-\frac{\sin y}{\cos y}$ as one function.", r"\cot y",
     [r"\frac{\sec y}{\sin y}-\frac{\sin y}{\cos y}", r"-\frac{\sin y}{\cos y}+\frac{\sec y}{\sin y}"]),
]

# Question, gold, and answers that are answers, however they are written.
ANSWERS = [
    ("Compute $213^2-187^2$.", "10400", ["10400", "10,400", "x=10400", r"\frac{20800}{2}", r"1.04\times 10^4"]),
    ("Which is larger, $7$ or $\\sqrt{53}$?", r"\sqrt{53}", [r"\sqrt{53}", r"x=\sqrt{53}"]),
    ("Expand $2(k+3)$.", "2k+6", ["2k+6", "6+2k", "k\\cdot 2+6"]),
    ("What is the sum?", r"\frac{n(n+1)}{2}", [r"\frac{n^2+n}{2}", r"\frac12 n(n+1)", r"\frac{n^2}{2}+\frac n2"]),
    ("Find the length.", r"5\sqrt2", [r"\sqrt{50}", r"\frac{10}{\sqrt2}", r"5 \cdot \sqrt{2}"]),
    ("How many?", "2^{30}", ["2^{30}", "1073741824"]),
    ("How many?", r"\binom{9}{4}", [r"\binom94", "126"]),
    ("Solve.", "[2,9]", [r"2\le x\le 9", r"x\in[2,9]", r"[\frac42,9]"]),
    ("Factor.", "(x-2)(x+3)", ["(x+3)(x-2)", "(3+x)(x-2)"]),
    ("Which line?", "y=3x-2", ["3x-2", "y=-2+3x", "3x-y=2"]),
    ("What sum?", r"\frac{2x}{x^2-1}", [r"\frac{2x}{(x-1)(x+1)}"]),
    ("Which day?", r"\text{Friday}", ["Friday", r"\textbf{Friday}"]),
    ("Roots?", r"2\pm\sqrt7", [r"2+\sqrt7, 2-\sqrt7"]),
    ("How many?", "6", [r"\sqrt{36}", r"\sqrt[3]{216}", r"\frac{6\sqrt{5}}{\sqrt5}", "6 = 6", "6 = 2*3", "2*3 = 6",
                        r"6 = 2\cdot3", "6 (not 7)", r"6^{\circ}\text{F}", r"6\%", "D. 6", r"\text{(D) }6"]),
    ("By how much does it fall?", "-6", [r"-\sqrt{36}"]),
    ("What part?", r"\frac17", [r"\frac{\sqrt3}{7\sqrt3}", r"\frac{\pi}{7\pi}"]),
    ("Which?", r"\text{(D)}", ["D", "(D)", "D. 6", r"\text{(D) }6", r"(D)\ \frac12"]),
    ("In what ratio?", "7:4", [r"\frac74", "7/4", "1.75", "14:8", "7{:}4"]),
]

HEDGES = [
    r"\boxed{5\text{ or anything}}", r"\boxed{5 or anything}", r"\boxed{5 \text{ or more}}", r"\boxed{5\text{ or }6}",
    r"\boxed{5\text{ and }6}", r"\boxed{5\text{ is wrong}}", r"\boxed{\text{not }5}", r"\boxed{\text{either }5}",
    r"\boxed{\text{maybe }5}", r"\boxed{\text{any number}}", r"\boxed{\text{5 or 6}}",
    r"\boxed{5\text{ if lucky, else }6}",
    "#### 5k", "#### $5k", "#### 5K", "#### 5M", "#### 5 k", r"\boxed{5\text{k}}", r"\boxed{5\text{ thousand}}",
    r"\boxed{5x}", r"\boxed{5n}", "#### 5 or anything", "#### 5 or so", "#### either 5", "#### any of 5", "#### not 5",
    "#### 5 is wrong", "#### 5 or more", "#### at least 5", "#### more than 5", "#### 5, 6, 7", "#### 5 or 6",
    "#### 5 6", "#### 4-6", "#### 4 to 6", "#### between 4 and 6", "#### 5 +- 3", r"#### 5 \pm 3", "#### >= 5",
    "#### x != 5", "#### 6 = 5", "#### any number", "answer: any number", "#### 5 apples and 6 pears", "#### 5/6",
    "#### 5\n#### 6", "#### \u0665\u0666", "#### 5\u200b6", r"\boxed{5},\boxed{6}", r"\boxed{5} or \boxed{6}",
    r"\boxed{\boxed{5}, \boxed{6}}", r"\boxed{5} no, \boxed{6}", r"\boxed{\boxed{}}", r"\boxed{}", r"\boxed{?}",
    r"\boxed{\{5,6,7\}}", r"\boxed{5,5,6}", r"\boxed{5;6}", r"\boxed{5\quad 6}", r"\boxed{5\\6}", r"\boxed{5 \pm 3}",
    r"\boxed{[4,6]}", r"\boxed{4<x<6}", r"\boxed{x\ge 5}", r"\boxed{>5}", r"\boxed{\ne 5}", r"\boxed{\mathbb{R}}",
    r"\boxed{(-\infty,\infty)}", r"\boxed{\{5\}\cup\{6\}}", r"\boxed{x\in\{5,6\}}", r"\boxed{5\lor 6}",
    r"\boxed{x=5 \text{ or } x=6}", r"\boxed{x=6=5}", r"\boxed{5=6}", r"\boxed{6=5}", r"\boxed{5\ldots}",
    r"\boxed{5,\ldots}", r"\boxed{5_6}", r"\boxed{5:6}", r"\boxed{\frac{5}{0}}", r"\boxed{2+3}", r"\boxed{5+0}",
    r"\boxed{5\cdot 1}", r"\boxed{\min(5,6)}", r"\boxed{\sqrt{20+5}}", r"\boxed{5\sqrt{1}}", r"\boxed{2+\sqrt{9}}",
    r"\boxed{\lfloor 5.3\rfloor}", r"\boxed{x^2=25}", r"\boxed{\sqrt{\sqrt{625}}}", r"\boxed{25^{1/2}\cdot1}",
    r"\boxed{5^1}", r"\boxed{1\sqrt{25}}", r"\boxed{5=2+4}",
    "#### 5 = 2+4", "#### 6 (not 5)", "#### 5 (not sure)", "#### 5 (not 5)",
    "#### 5 = 5, 6", r"\boxed{A. 5, 6}", r"\boxed{A. 5 or B. 6}", r"\boxed{A. 6}", r"\boxed{5:2}",
    "<answer>5</answer><answer>6</answer>", "<answer>5 or 6</answer>", "<answer>\\boxed{5} or \\boxed{6}</answer>",
]
# fmt: on


def graded(task, question: str, gold: str, *completions: str) -> GradedGroup:
    """The completions as the group of a prompt that asks the question as the task does."""
    prompt = Prompt("p", task.template.replace("{question}", question), task.read(gold))
    rollouts = tuple(Rollout(text, (1,), (0.0,), "stop") for text in completions)
    return grade(task, [Group(prompt, (1,), rollouts)], 8)[0]


def boxed(answers: list[str]) -> list[str]:
    return [rf"Hence \boxed{{{answer}}}" for answer in answers]


@pytest.mark.attack("Completions that restate the question")
@pytest.mark.parametrize(("question", "gold", "echoes"), ECHOES, ids=lambda value: str(value)[:40])
def test_an_answer_that_restates_the_question_is_wrong(question, gold, echoes, record_property):
    group = graded(Math(), question, gold, *boxed([*echoes, gold]))
    assert dict(zip([*echoes, gold], group.correct, strict=True)) == {**dict.fromkeys(echoes, False), gold: True}
    record_property("tried", len(echoes))


@pytest.mark.parametrize(("question", "gold", "answers"), ANSWERS, ids=lambda value: str(value)[:40])
def test_an_answer_in_another_spelling_still_counts(question, gold, answers):
    group = graded(Math(), question, gold, *boxed(answers))
    assert dict(zip(answers, group.correct, strict=True)) == dict.fromkeys(answers, True)


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
