"""Where a completion states its answer, how well it keeps the format, and how it is written and taken apart."""

import time
from itertools import product
from typing import get_args

import pytest
from cohort.tasks import _answers
from cohort.tasks._answers import AnswerFormat
from cohort.tasks.arithmetic import Arithmetic

FORMATS = get_args(AnswerFormat)
TASKS = {name: Arithmetic(answer_format=name) for name in FORMATS}

FLOODS = [
    "<think>" * 30_000, "<answer>" * 10_000, "</answer>" * 10_000, "<answer>" * 10_000 + "</answer>",
    "<answer>" + "</answer>" * 10_000, "<answer></answer>" * 6_000,
    "<answer>\\boxed{" * 6_000 + "}" * 6_000 + "</answer>", "<think>" + "x" * 20_000,
    "<think>" + "</think" * 20_000, "<" * 10**5, "the answer is " * 8_000, "= " * 50_000,
    "answer" + " " * 10**5 + "is 5", "$" * 10**5, "$x" * 50_000, "1," * 50_000, "1/" * 50_000, "-" * 10**5,
]  # fmt: skip

TAGS = [
    ("<think>a</think><answer>1</answer>", 1.0),
    (" \n<think>a</think>\n\n<answer>1</answer>\n", 1.0),
    ("<think></think><answer>1</answer>", 1.0),
    # Both pairs are there, but not as they should be.
    ("so <think>a</think><answer>1</answer>", 0.5),
    ("<think>a</think> so <answer>1</answer>", 0.5),
    ("<think>a</think><answer>1</answer> done", 0.5),
    ("<answer>1</answer><think>a</think>", 0.5),
    ("<think>a<answer>1</answer></think>", 0.5),
    ("<think>a<answer>1</think></answer>", 0.5),
    # One pair is.
    ("<think>a</think>1", 0.5),
    ("<answer>1</answer>", 0.5),
    ("<think>a</think><answer> </answer>", 0.5),
    ("<think>a</think><answer>1</answer><answer>2</answer>", 0.5),
    ("<think>a<think></think><answer>1</answer>", 0.5),
    ("<think>a<answer>1</answer>", 0.5),
    ("a</think><answer>1</answer>", 0.5),
    # None is.
    ("</think>a<think> </answer>1<answer>", 0.0),
    ("<think>a", 0.0),
    ("#### 1", 0.0),
    ("", 0.0),
]


def stated(completion: str, answer_format: AnswerFormat) -> list[str]:
    return list(_answers.stated(completion, answer_format))


@pytest.mark.parametrize(("completion", "answer_format", "texts"), [
    (r"<answer>1</answer> \boxed{2} #### 3", "hash", ["3", "2", "1"]),
    (r"<answer>1</answer> \boxed{2} #### 3", "boxed", ["2", "1", "3"]),
    (r"<answer>1</answer> \boxed{2} #### 3", "think_answer", ["1", "2", "3"]),
    ("no marker: 5", "hash", []),
    (r"\boxed{} #### ", "boxed", []),
    ("<answer> \n </answer>", "think_answer", []),
    # The last complete pair counts, whatever is left open or closed around it.
    ("<answer>1</answer> no: <answer>2</answer>", "think_answer", ["2"]),
    ("<answer>1</answer> no: <answer>2", "think_answer", ["1"]),
    ("<answer>1</answer> 2</answer>", "think_answer", ["1"]),
    ("<answer><answer>1</answer></answer>", "think_answer", ["1"]),
    ("</answer>1<answer>", "think_answer", []),
    ("1</answer>", "think_answer", []),
    ("<Answer>1</Answer>", "think_answer", []),
    # A box inside the tags is the answer; a marker inside them is no part of it.
    (r"<answer>It is $\boxed{\frac{1}{2}}$.</answer>", "think_answer", [r"\frac{1}{2}", r"\frac{1}{2}"]),
    ("<answer>#### 4</answer>", "hash", ["4", "#### 4"]),
    # The first line with text after the last marker.
    ("#### 5\n#### 18\nthe end", "hash", ["18"]),
    ("so it is\n####\n\n 18 \nmore", "hash", ["18"]),
    ("##### 18", "hash", ["18"]),
    ("18 ####  \n ", "hash", []),
])  # fmt: skip
def test_the_configured_marker_comes_first_and_then_the_others(completion, answer_format, texts):
    assert stated(completion, answer_format) == texts


@pytest.mark.parametrize(("answer_format", "separator", "completion"), [
    ("hash", "\n", "1+1=2\n#### 2"),
    ("boxed", "\n", "1+1=2\n\\boxed{2}"),
    ("think_answer", "\n", "<think>\n1+1=2\n</think>\n<answer>2</answer>"),
    ("hash", "", "1+1=2#### 2"),
    ("boxed", "", r"1+1=2\boxed{2}"),
    ("think_answer", "", "<think>1+1=2</think><answer>2</answer>"),
])  # fmt: skip
def test_what_is_written_is_read_back_and_scores_one(answer_format, separator, completion):
    assert _answers.write(answer_format, "1+1=2", "2", separator=separator) == completion
    assert stated(completion, answer_format) == ["2"]
    assert TASKS[answer_format].format_score(completion) == 1.0


@pytest.mark.parametrize(("answer_format", "completion", "score"), [
    *((("think_answer", *row)) for row in TAGS),
    ("hash", "so #### 4", 1.0),
    ("hash", "so #### \n", 0.0),
    ("hash", r"\boxed{4}", 0.0),
    ("hash", "4", 0.0),
    ("boxed", r"so \boxed{4}.", 1.0),
    ("boxed", r"\boxed{}", 0.0),
    ("boxed", r"\boxed{4", 0.0),
    ("boxed", "#### 4", 0.0),
])  # fmt: skip
def test_a_marker_scores_one_with_something_at_it_and_tags_half_for_a_pair(answer_format, completion, score):
    assert TASKS[answer_format].format_score(completion) == score


@pytest.mark.parametrize("answer_format", FORMATS)
def test_no_text_makes_a_format_raise_or_take_long(answer_format):
    for completion in FLOODS:  # hostile.py is for the contract of all tasks
        start = time.process_time()
        texts = stated(completion, answer_format)
        score, last = TASKS[answer_format].format_score(completion), TASKS[answer_format].last(completion)
        assert last is None or last
        assert time.process_time() - start < 2.0, completion[:40]
        assert all(isinstance(text, str) and text for text in texts)
        assert score in (0.0, 0.5, 1.0)


@pytest.mark.parametrize(("answer_format", "separator"), list(product(FORMATS, ["", "\n"])))
def test_a_cut_completion_never_scores_as_whole(answer_format, separator):
    whole = _answers.write(answer_format, "1+1=2", "24", separator=separator)
    marker = {"hash": "#### ", "boxed": r"\boxed{24", "think_answer": "<answer>24</answer"}[answer_format]
    for end in range(whole.index(marker) + len(marker) + 1):
        assert TASKS[answer_format].format_score(whole[:end]) < 1.0 or whole[:end].rstrip() == whole
        if answer_format == "hash" and whole[:end].endswith("#### "):
            break
