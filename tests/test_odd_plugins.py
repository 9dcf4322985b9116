"""Plugins that return nonsense or misbehave: a run says so, or its numbers do not change."""

import math
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cohort.harness.data import Group, InvalidRun, Prompt, Rollout
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.interfaces import Reward
from cohort.harness.run.grading import MOST_PAID, grade, score
from cohort.harness.run.loop import train
from cohort.harness.settings.run import parse_run
from cohort.tasks.arithmetic import Arithmetic
from fakes import MemoryLog, graded_group

pytestmark = pytest.mark.attack("A plugin that returns nonsense or misbehaves")
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(("weight", "value"), [(0.0, 1.01 * MOST_PAID), (10.0, 0.11 * MOST_PAID), (-10.0, 1e30)])
def test_a_value_whose_square_may_overflow_float32_is_refused(weight, value):
    class Large(Reward):
        def score(self, group):
            return [value, 0.0]

    with pytest.raises(InvalidRun, match="reward 'large' must give"):
        score({"large": Large(weight=weight)}, [graded_group([0, 1], [True, False])])


def test_the_largest_value_is_paid():
    class Largest(Reward):
        def score(self, group):
            return [MOST_PAID, -MOST_PAID]

    (found,) = score({"largest": Largest(weight=1.0)}, [graded_group([0, 1], [True, False])])
    assert found.totals == [1e12, -1e12]


def run_with(reward: Reward, folder: Path, cache: Path, algorithm: str = "grpo"):
    settings = {
        "task": {"name": "arithmetic", "min_operands": 2, "max_operands": 2}, "cold_start": {"steps": 2}, "steps": 2,
        "evaluation": {"every": 5, "num_prompts": 2, "num_test_prompts": 2, "num_samples": 1}, "rollouts_per_step": 4,
        "algorithm": {"name": algorithm, "group_size": 2},
    }  # fmt: skip
    spec, log = parse_run(settings, "test").model_copy(update={"rewards": {"odd": reward}}), MemoryLog()
    return train(spec, folder, log, cache=cache), log


class Calm(Reward):
    def score(self, group):
        return [float(len(text) % 3) for text in group.completions]


class Misbehaving(Calm):
    """Prints, seeds, forks, changes a signal and the working folder; its values are those of `Calm`."""

    def score(self, group):
        print("\x1b[2J nonsense")
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.rand(3)
        if (child := os.fork()) == 0:
            os._exit(3)
        os.waitpid(child, 0)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        os.chdir("/")
        return super().score(group)


@pytest.mark.slow
def test_a_reward_that_prints_seeds_forks_and_moves_changes_no_number(tmp_path, cache, monkeypatch):
    monkeypatch.chdir(tmp_path)  # put back at the end, as the handler is
    handler = signal.getsignal(signal.SIGUSR2)
    try:
        (tmp_path / "calm").mkdir()
        (tmp_path / "odd").mkdir()
        calm, calm_log = run_with(Calm(), tmp_path / "calm", cache)
        odd, odd_log = run_with(Misbehaving(), tmp_path / "odd", cache)
    finally:
        signal.signal(signal.SIGUSR2, handler)
    assert (calm.state, odd.state) == ("complete", "complete")
    assert odd_log.without_clocks() == calm_log.without_clocks()


class Raising(Calm):
    def score(self, group):
        raise KeyError("gone")


def test_a_reward_that_raises_ends_the_run_with_its_error(tmp_path, cache):
    with pytest.raises(KeyError, match="gone"):
        run_with(Raising(), tmp_path, cache)


def rollouts_with(change):
    return lambda groups: [replace(g, rollouts=tuple(change(r) for r in g.rollouts)) for g in groups]


ODD_ENGINES = {
    "NaN": rollouts_with(lambda r: replace(r, logprobs=(NAN,) * len(r.logprobs))),
    "infinities": rollouts_with(lambda r: replace(r, logprobs=(-INF,) * len(r.logprobs))),
    "too few log-probs": rollouts_with(lambda r: replace(r, logprobs=r.logprobs[1:])),
    "text": rollouts_with(lambda r: replace(r, logprobs=("0",) * len(r.logprobs))),
    "no group": lambda groups: [], "a group too few": lambda groups: groups[:-1],
    "a rollout too few": lambda groups: [replace(g, rollouts=g.rollouts[:-1]) for g in groups],
    "None": lambda groups: None,
}  # fmt: skip


@pytest.mark.parametrize("change", ODD_ENGINES.values(), ids=ODD_ENGINES)
def test_an_engine_that_returns_nonsense_never_ends_complete(change, tmp_path, cache, monkeypatch):
    honest = TransformersEngine.generate
    monkeypatch.setattr(TransformersEngine, "generate", lambda *given, **how: change(honest(*given, **how)))
    try:
        result, _ = run_with(Calm(), tmp_path, cache)
    except (IndexError, KeyError, TypeError, ValueError, ZeroDivisionError):
        return  # the attempt failed
    assert result.state == "invalid"


ODD_TASKS = [
    ("format_score", NAN),
    ("format_score", INF),
    ("equivalent", NAN),
    ("equivalent", "yes"),
    ("equivalent", None),
]


@pytest.mark.parametrize(("method", "value"), ODD_TASKS)
def test_a_task_whose_verdict_is_none_names_it_with_the_problem(method, value, monkeypatch):
    task, prompt = Arithmetic(), Prompt("p", "1+1=", "2")
    monkeypatch.setattr(Arithmetic, method, lambda self, *given: value)
    group = Group(prompt, (1,), (Rollout("1+1=3#### 3", (1,), (0.0,), "stop"),))
    assert task.extract("1+1=3#### 3") == "3"
    with pytest.raises(InvalidRun, match=r"Arithmetic.equivalent must return a bool .* for problem 'p'"):
        grade(task, [group], 8)
