"""What every task must keep; tasks are found by name, so that a new one is tested without a word here.

The task that docs/data.md shows is one of them.
"""

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from functools import cache
from itertools import islice, product
from pathlib import Path
from typing import get_args

import pytest
from cohort.harness import plugins
from cohort.harness.api.catalog import describe_task
from cohort.harness.interfaces import Task
from cohort.tasks._answers import AnswerFormat
from cohort.tasks._answers import write as written
from cohort.tasks._data import DatasetTask
from factories import slow_but

TESTS = Path(__file__).resolve().parents[1]

DOCUMENTED = "my_problems"
NEEDS = {"reasoning_gym": "reasoning_gym", "gsm_symbolic": "multilingual_gsm_symbolic"}
NEEDS["gsm_symbolic_abroad"] = NEEDS["gsm_symbolic"]
INSTALLED = [name for name in plugins.names("task") if importlib.util.find_spec(NEEDS.get(name, "cohort"))]
TASKS = [*INSTALLED, DOCUMENTED]
FORMATS = get_args(AnswerFormat)
SPLITS = ("train", "validation", "test")


@cache
def load(name: str) -> type[Task]:
    """The class of a task, or that of the example in docs/data.md."""
    if name != DOCUMENTED:
        return plugins.load("task", name)
    blocks = re.findall(r"```python\n(.*?)```", (TESTS.parent / "docs" / "data.md").read_text("utf-8"), re.S)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{name}.py"
        file.write_text("\n".join(blocks))
        spec = importlib.util.spec_from_file_location(f"documented_{name}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return plugins._only_plugin(module, "task")


@cache
def make(name: str, answer_format: str | None = None) -> Task:
    """The task with few problems, or on its rows in a folder of fixtures where it reads data."""
    cls = load(name)
    fields = {}
    if "path" in cls.model_fields:
        fields = {"path": str(next(TESTS.rglob(f"fixtures/{name}"))), "validation_fraction": 0.25}
    if "train_path" in cls.model_fields:
        fields["train_path"] = str(TESTS / "fixtures" / "math")
    sizes = {"num_train", "num_demonstrations", "num_validation", "num_test"} & cls.model_fields.keys()
    fields |= dict.fromkeys(sizes, 60)
    return cls(**fields) if answer_format is None else cls(**fields, answer_format=answer_format)


def fingerprint(task: Task) -> str:
    """A hash of all problems and worked solutions of the task, in order."""
    everything = [[(p.id, p.text, p.gold, p.tags) for p in task.prompts(split)] for split in SPLITS]
    everything += [[(d.prompt, d.completion) for d in task.demonstrations()]]
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()


@pytest.fixture(params=TASKS)
def name(request):
    return request.param


@pytest.fixture
def task(name):
    return make(name)


every_format = pytest.mark.parametrize(("name", "answer_format"), list(product(TASKS, FORMATS)))


@pytest.mark.parametrize("name", slow_but({*INSTALLED} - NEEDS.keys(), INSTALLED))
def test_a_task_is_shown_with_its_first_problems_and_its_first_worked_solution(name):
    task = make(name)
    found = describe_task(name, {f"task.{key}": value for key, value in task.model_dump(exclude={"name"}).items()})
    first = next(iter(task.demonstrations()), None)
    assert [problem["id"] for problem in found["problems"]] == [prompt.id for prompt in task.prompts("test")[:3]]
    assert found["worked_solution"] == (None if first is None else asdict(first))


def test_a_task_has_its_own_name_and_tags_tell_some_problems_apart(name, task):
    assert isinstance(task, Task) and task.name == name
    tags = [prompt.tags for split in SPLITS for prompt in task.prompts(split)]
    assert name == DOCUMENTED or len(set(tags)) > 1 or not tags[0]


@every_format
def test_the_format_changes_neither_the_problems_nor_their_answers(name, answer_format):
    for split in SPLITS:
        assert [(p.id, p.gold, p.tags) for p in make(name, answer_format).prompts(split)] == [
            (p.id, p.gold, p.tags) for p in make(name).prompts(split)
        ]


@every_format
def test_demonstrations_state_their_gold_answer_in_the_format_and_within_the_token_limit(name, answer_format):
    task = make(name, answer_format)
    gold = {prompt.text: prompt.gold for prompt in task.prompts("train")}
    for demonstration in islice(task.demonstrations(), 500):
        assert len(demonstration.completion) < task.max_completion_tokens  # of a character, and one ends it
        stated = task.extract(demonstration.completion)
        assert task.format_score(demonstration.completion) == 1.0
        assert demonstration.prompt not in gold or task.equivalent(stated, gold[demonstration.prompt])


def test_an_answer_in_any_format_is_read_whatever_the_configured_one_and_scores_below_it(name):
    for gold in [prompt.gold for prompt in make(name).prompts("test")][:3]:
        completions = (f"so\n#### {gold}", rf"so \boxed{{{gold}}}", f"<think>so</think><answer>{gold}</answer>")
        for answer_format, completion in product(FORMATS, completions):
            task = make(name, answer_format)
            stated = task.extract(completion)
            assert stated is not None
            assert task.equivalent(stated, gold)
            is_own = completion == completions[FORMATS.index(answer_format)]
            assert task.format_score(completion) == float(is_own)


@pytest.mark.slow
def test_problems_are_the_same_in_another_process_with_another_hash_seed():
    program = "import test_tasks as t\nprint(*(t.fingerprint(t.make(name)) for name in t.TASKS))"
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": f"{Path(__file__).parent}{os.pathsep}{TESTS}"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, cwd=TESTS.parent
    )
    assert done.stdout.split() == [fingerprint(make(name)) for name in TASKS], done.stderr


def test_a_last_sentence_without_a_marker_states_no_answer_and_equality_overlooks_spaces(task):
    assert all(task.extract(f"The answer is ${prompt.gold}$.") is None for prompt in task.prompts("test")[:3])
    assert all(task.equivalent(gold, f" {gold} ") for gold in sorted({p.gold for p in task.prompts("test")})[:8])


@pytest.mark.parametrize("name", [name for name in TASKS if issubclass(load(name), DatasetTask)])
def test_worked_examples_come_from_train_and_never_show_the_problem_itself(name):
    plain = make(name)
    worked = {d.prompt: d.completion for d in plain.demonstrations()}
    # rows of bare answers state these alone
    worked = worked or {p.text: written(plain.answer_format, "", p.gold).strip() for p in plain.prompts("train")}
    task = type(plain)(**{**plain.model_dump(), "shots": 2})
    for split in SPLITS:
        for bare, prompt in zip(plain.prompts(split), task.prompts(split), strict=True):
            assert (prompt.id, prompt.gold, prompt.tags) == (bare.id, bare.gold, bare.tags)
            shown = [f"{text}{completion}" for text, completion in worked.items() if text != bare.text][:2]
            assert prompt.text == "\n\n".join([*shown, bare.text])
    gold = {p.text: p.gold for p in task.prompts("train")}
    assert {d.prompt for d in task.demonstrations()} <= set(gold)
