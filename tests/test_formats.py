"""Where a completion states its answer, how well it keeps the format, and how it is written and taken apart."""

import time
from itertools import product
from typing import get_args

import pytest
from cohort.tasks import _answers
from cohort.tasks._answers import AnswerFormat
from cohort.tasks.arithmetic import Arithmetic
from real_data import golden

FORMATS = get_args(AnswerFormat)
TASKS = {name: Arithmetic(answer_format=name) for name in FORMATS}

FLOODS = [
    "<think>" * 30_000, "<answer>" * 10_000, "</answer>" * 10_000, "<answer>" * 10_000 + "</answer>",
    "<answer>" + "</answer>" * 10_000, "<answer></answer>" * 6_000,
    "<answer>\\boxed{" * 6_000 + "}" * 6_000 + "</answer>", "<think>" + "x" * 20_000,
    "<think>" + "</think" * 20_000, "<" * 10**5, "the answer is " * 8_000, "= " * 50_000,
    "answer" + " " * 10**5 + "is 5", "$" * 10**5, "$x" * 50_000, "1," * 50_000, "1/" * 50_000, "-" * 10**5,
]  # fmt: skip

CASES = golden("formats")


def stated(completion: str, answer_format: AnswerFormat) -> list[str]:
    return list(_answers.stated(completion, answer_format))


@pytest.mark.parametrize(("completion", "answer_format", "texts"), CASES["stated"])
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


@pytest.mark.parametrize(("answer_format", "completion", "score"), CASES["scores"])
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
