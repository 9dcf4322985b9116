"""`cohort check` names each broken rule of a package's plugins, and goes on after a plugin that fails."""

import re
import sys

import pytest
from cohort.harness.extras.contracts import plugins
from entry_points import declare

BROKEN = """
from cohort.algorithms.grpo import GRPO
from cohort.harness.interfaces import Mirror, Reward
from cohort.tasks.arithmetic import Arithmetic
from cohort.harness.engines.transformers import TransformersEngine
from typing import Literal

class Upside(GRPO):
    objective = {"clip": "none"}
    name: Literal["upside"] = "upside"
    def loss(self, batch, policy):
        loss, metrics = super().loss(batch, policy)
        return -loss, metrics

class Leaky(Reward):
    def score(self, group):
        return [float(i) if group.correct is None else 9.0 for i, _ in enumerate(group.completions)]

class ByPlace(Reward):
    def score(self, group):
        return [float(i) for i, _ in enumerate(group.completions)]

class Loud(Reward):
    def score(self, group):
        return [float(text.index("") if "\\0" not in text else text.index("no")) for text in group.completions]

class Rows(GRPO):
    objective = {"aggregation": "times the number of rows"}
    name: Literal["rows"] = "rows"
    def loss(self, batch, policy):
        loss, metrics = super().loss(batch, policy)
        return loss * len(batch.tokens_BT), metrics

class Alike(Arithmetic):
    name: Literal["alike"] = "alike"
    def equivalent(self, answer, other):
        return True

class Mixed(Arithmetic):
    name: Literal["mixed"] = "mixed"
    def prompts(self, split):
        return super().prompts("train")

class Unkeyed(TransformersEngine):
    class Settings(TransformersEngine.Settings):
        name: Literal["unkeyed"] = "unkeyed"
    def load_weights(self, weights, version):
        pass

class Picky(Mirror):
    def open(self, run):
        self.steps = []
    def add(self, events):
        self.steps += [event["step"] for event in events]
    def close(self):
        pass

class Raises(Reward):
    def __init__(self):
        raise RuntimeError("no settings today")
    def score(self, group):
        return []
"""
POINTS = {
    "algorithms": {"upside": "Upside", "rows": "Rows"},
    "engines": {"unkeyed": "Unkeyed"},
    "mirrors": {"picky": "Picky"},
    "rewards": {"leaky": "Leaky", "by_place": "ByPlace", "loud": "Loud", "raises": "Raises"},
    "tasks": {"mixed": "Mixed", "alike": "Alike"},
}


@pytest.mark.slow
def test_each_broken_rule_is_named_with_what_to_change_and_what_holds_passes(tmp_path, monkeypatch, cohort):
    (tmp_path / "broken_plugins.py").write_text(BROKEN)
    places = {group: {name: f"broken_plugins:{cls}" for name, cls in named.items()} for group, named in POINTS.items()}
    declare(tmp_path, monkeypatch, "broken-plugins", places)
    monkeypatch.delitem(sys.modules, "broken_plugins", raising=False)
    assert cohort("check", "pip") == 2
    assert "no installed package 'pip' declares plugins" in cohort.err
    assert cohort("check", "broken-plugins") == 1
    assert "fix: check the sign of the loss, which is minimised" in cohort.out
    assert "PASS task mixed: Equality is reflexive and symmetric and tells answers apart." in cohort.out
    assert {*re.findall(r"^FAIL \w+ (\w+): (.*)$", cohort.out, re.M)} == {
        ("upside", "A step along the gradient makes the better of two answers likelier."),
        ("leaky", "A reward depends on gold only where it says so."),
        ("by_place", "Scores do not depend on the order of the completions."),
        ("loud", "No completion makes a reward raise, and steps lie inside their completion in order."),
        ("rows", "Loss and metrics of the parts of a batch add up to the whole batch's loss and metrics."),
        ("rows", "A learner's step does not depend on the split into micro-batches."),
        ("alike", "Equality is reflexive and symmetric and tells answers apart."),
        ("alike", "No completion makes grading raise or take long."),
        ("mixed", "Every split has problems with ids of their own; splits are disjoint, demonstrations too."),
        ("unkeyed", "Loaded weights take effect."),
        ("picky", "A run with odd numbers and hostile text is shown, beside another, and after an opening that was cut "
         "off."),
        ("raises", "it loads, and its settings have defaults"),
    }  # fmt: skip


ENDING = """
import os, sys, threading
from cohort.harness.interfaces import Reward

class Ending(Reward):
    def score(self, group):
        print("words of its own")
        {how}
"""
HOW = {
    "sys.exit(0)": "it ended its process, with status 0",
    "threading.Event().wait()": "it has not ended after 4 s",
    "os._exit(0)": "it ended its process, with status 0",
    "os.kill(os.getpid(), 9)": "it ended its process, with status -9",
    "raise KeyboardInterrupt": "it ended its process, with status 1",
}


@pytest.mark.slow
@pytest.mark.attack("A plugin that ends or holds the process of `cohort check`")
@pytest.mark.parametrize("how", [*list(HOW)[:2], *(pytest.param(one, marks=pytest.mark.long) for one in list(HOW)[2:])])
def test_a_check_that_does_not_come_to_its_end_has_failed_and_the_others_run(how, tmp_path, cohort, monkeypatch):
    (tmp_path / "ending_plugins.py").write_text(ENDING.format(how=how))
    declare(tmp_path, monkeypatch, "ending", {"rewards": {"ending": "ending_plugins:Ending"}})
    monkeypatch.setattr(plugins, "CHECK_SECONDS", 4.0 if "wait" in how else 60.0)
    assert cohort("check", "ending", "--json") == 1
    told = cohort.json()
    assert [one["rule"] for one in told["checks"]][1:] == [one.rule for one in plugins.of_kind("reward")]
    scores = [one["found"] for one in told["checks"] if one["found"]]
    assert scores == [HOW[how]] * told["failed"] and told["failed"] > 1
