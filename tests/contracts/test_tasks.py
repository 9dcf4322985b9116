"""What every task must keep; tasks are found by name, so that a new one is tested without a word here."""

import hashlib
import json
import os
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest

from harness import plugins
from harness.interfaces import Task

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
import hostile  # noqa: E402

TASKS = plugins.names("task")
SPLITS = ("train", "validation", "test")


@cache
def make(name: str) -> Task:
    """The task with its defaults, or on its rows in tests/fixtures where it reads data."""
    cls = plugins.load("task", name)
    fields = {"path": str(TESTS / "fixtures" / name), "validation_fraction": 0.25} if "path" in cls.model_fields else {}
    return cls(**fields)


def fingerprint(task: Task) -> str:
    """A hash of all problems and worked solutions of the task, in order."""
    everything = [[(p.id, p.text, p.gold) for p in task.prompts(split)] for split in SPLITS]
    everything += [[(d.prompt, d.completion) for d in task.demonstrations()]]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()


@pytest.mark.parametrize("name", TASKS)
def test_the_plugin_is_a_task_of_its_own_name(name):
    task = make(name)
    assert isinstance(task, Task)
    assert task.name == name


@pytest.mark.parametrize("name", TASKS)
def test_the_settings_survive_json_and_refuse_unknown_keys(name):
    task = make(name)
    assert type(task).model_validate(json.loads(task.model_dump_json())) == task
    with pytest.raises(ValueError, match="no_such_field"):
        type(task).model_validate({"no_such_field": 1})


@pytest.mark.parametrize("name", TASKS)
def test_every_split_has_problems_with_ids_of_their_own(name):
    for split in SPLITS:
        prompts = make(name).prompts(split)
        assert prompts
        assert len({p.id for p in prompts}) == len(prompts)
        assert all(p.id and p.text and p.gold for p in prompts)


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_disjoint_and_demonstrations_avoid_the_held_out_ones(name):
    task = make(name)
    train, validation, test = ({p.text for p in task.prompts(split)} for split in SPLITS)
    assert not train & validation
    assert not train & test
    assert not validation & test
    assert not {d.prompt for d in task.demonstrations()} & (validation | test)


@pytest.mark.parametrize("name", TASKS)
def test_demonstrations_state_an_answer_within_the_token_limit(name):
    task = make(name)
    assert task.max_completion_tokens > 0
    for demonstration in task.demonstrations()[:500]:
        # One token per character is the built-in tokenizer, the longest there is; one more ends the sequence.
        assert len(demonstration.completion) + 1 <= task.max_completion_tokens
        assert task.extract(demonstration.completion) is not None


@pytest.mark.parametrize("name", TASKS)
def test_a_demonstration_of_a_training_problem_states_its_gold_answer(name):
    task = make(name)
    gold = {p.text: p.gold for p in task.prompts("train")}
    for demonstration in task.demonstrations()[:500]:
        if demonstration.prompt in gold:
            stated = task.extract(demonstration.completion)
            assert stated is not None
            assert task.equivalent(stated, gold[demonstration.prompt])


@pytest.mark.parametrize("name", TASKS)
def test_equality_is_reflexive_and_symmetric_and_tells_answers_apart(name):
    task = make(name)
    golds = sorted({p.gold for p in task.prompts("test")})[:8]
    assert all(task.equivalent(gold, gold) for gold in golds)
    pairs = [(a, b) for a in golds for b in golds if a < b]
    assert all(task.equivalent(a, b) == task.equivalent(b, a) for a, b in pairs)
    assert any(not task.equivalent(a, b) for a, b in pairs)


def test_problems_are_the_same_in_another_process_with_another_hash_seed():
    program = "import test_tasks as t\nprint(*(t.fingerprint(t.make(name)) for name in t.TASKS))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(Path(__file__).parent)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=TESTS.parent
    )
    assert done.stdout.split() == [fingerprint(make(name)) for name in TASKS], done.stderr


@pytest.mark.parametrize("name", TASKS)
def test_no_completion_makes_extraction_raise_or_take_long(name):
    task = make(name)
    for completion in hostile.COMPLETIONS:
        start = time.process_time()
        answer = task.extract(completion)
        assert time.process_time() - start < 1.0, completion[:60]
        assert answer is None or (isinstance(answer, str) and answer)


@pytest.mark.parametrize("name", TASKS)
def test_space_around_an_answer_does_not_change_it(name):
    task = make(name)
    assert all(task.equivalent(gold, f" {gold} ") for gold in [p.gold for p in task.prompts("test")][:20])


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize(
    "text", ["", "\0", "9" * 10**6, "{" * 10**5, "9^{9^9}", r"\frac{1}{0}", "__import__('os')", "\ud800"]
)
def test_no_answer_makes_a_comparison_raise_or_take_long(name, text):
    task = make(name)
    gold = task.prompts("test")[0].gold
    start = time.monotonic()
    assert not task.equivalent(text, gold)
    assert not task.equivalent(gold, text)
    assert time.monotonic() - start < 60.0
