"""The built-in task: what its problems look like, and how many there are."""

import re
from collections import Counter

import pytest
from cohort.harness.settings.errors import SpecError
from cohort.tasks.arithmetic import Arithmetic
from factories import make_spec

SMALL = Arithmetic(num_train=40)


def test_a_prompt_and_its_solution_read_as_documented():
    texts = {d.prompt: d.completion for d in Arithmetic().demonstrations()}
    for prompt, completion in list(texts.items())[:2000]:
        assert re.fullmatch(r"[1-9]([+-][1-9]){2,4}=", prompt)
        steps, _, answer = completion.partition("#### ")
        total = int(prompt[0])
        for step, signed in zip(steps.split(";"), re.findall(r"[+-]\d", prompt), strict=True):
            assert step == f"{total}{signed}={total + int(signed)}"
            total += int(signed)
            assert total >= 0
        assert answer == str(total)


def test_the_splits_have_the_documented_sizes_and_a_cap_changes_no_problem():
    task = Arithmetic()
    texts = [[d.prompt for d in task.demonstrations()]]
    texts += [[p.text for p in task.prompts(split)] for split in ("train", "validation", "test")]
    assert [*map(len, texts)] == [20_000, 8192, 512, 1024]
    assert len(set().union(*texts)) == sum(map(len, texts))  # none occurs twice
    # What is drawn, and which split it falls into, does not depend on a cap.
    assert SMALL.prompts("train") == task.prompts("train")[:40] and SMALL.prompts("test") == task.prompts("test")


def test_gold_is_the_value_of_the_chain_and_the_number_of_operands_a_tag():
    for prompt in SMALL.prompts("test"):
        # 4+4-6= is the sum of +4, +4 and -6.
        operands = re.findall(r"[+-]?\d+", prompt.text)
        assert int(prompt.gold) == sum(map(int, operands))
        assert prompt.tags == (("operands", str(len(operands))),)


def test_lengths_are_even_as_far_as_problems_exist():
    lengths = Counter(prompt.text.count("+") + prompt.text.count("-") + 1 for prompt in Arithmetic().prompts("train"))
    # All splits hold about 1,860 chains of three operands, nearly all that exist; a quarter of them train.
    assert 400 <= lengths[3] <= 600
    assert abs(lengths[4] - lengths[5]) < 0.05 * lengths[5]


def test_the_token_limit_is_that_of_the_longest_solution():
    # 9+9=18;18+9=27;27+9=36;36+9=45 has 30 characters, then come marker and answer, the end and 4 more.
    limits = {name: Arithmetic(answer_format=name).max_completion_tokens for name in ("hash", "boxed", "think_answer")}
    assert limits == {"hash": 30 + 7 + 5, "boxed": 30 + 10 + 5, "think_answer": 30 + 15 + 19 + 5}


def test_the_fewest_problems_fill_every_split_and_fewer_are_an_error_of_the_spec():
    task = Arithmetic(min_operands=2, max_operands=2)  # 126 chains are all there is
    assert all(task.prompts(split) for split in ("train", "validation", "test")) and task.demonstrations()
    with pytest.raises(SpecError, match=r"min_operands must not exceed max_operands \(5\), got 6"):
        make_spec(task={"name": "arithmetic", "min_operands": 6})
