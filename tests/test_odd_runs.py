"""Plugins that give what no plugin should: a run ends with an error or INVALID, or as if undisturbed.

The exceptions are choices that nobody can tell from an honest plugin's; `CHOICES` names them. A plugin that hangs is
not stopped: nothing bounds its time but the user and the scheduler.
"""

import os
from pathlib import Path
from typing import Any

import odd_plugins
import pytest
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import EVENTS, read_events
from cohort.harness.record.run import RunLog
from cohort.harness.run.loop import train
from cohort.harness.settings.run import RunSpec, parse_run
from factories import FEW
from odd_plugins import ODD

CHOICES = {
    "advantages of prompts": "another credit", "advantages whole": "another credit",
    "loss weights doubled": "other weights", "loss weights zero": "no weight is another weight",
    "loss detached": "no gradient is another gradient",
    "another text": "its tokens are not decoded again", "another end": "a stop text may end a completion",
    "another prompt's tokens": "a prompt is not encoded again", "log-probs moved": "bounded by gates.mismatch_kl",
}  # fmt: skip
SHORT = {("reward", "nan"), ("reward", "float16"), ("steps", "inf"), ("task", "raise"), ("algorithm", "advantages nan"),
         ("algorithm", "advantages other tokens"), ("algorithm", "seed"), ("reward", "change folder"),
         ("engine", "groups in another order"), ("engine", "log-prob nan"), ("engine", "too few groups"),
         ("engine", "log-prob of text"), ("engine", "too long")}  # fmt: skip


def spec_of(kind: str, odd: str) -> RunSpec:
    rewards: dict[str, Any] = {"odd": {"weight": 1.0, "odd": odd if kind == "reward" else ""}}
    if kind == "steps":
        rewards = {"odd_steps": {"odd": odd}}
    if kind == "task":
        rewards["format"] = 0.5
    parts = {part: {**FEW.get(part, {}), "name": "odd", **({"odd": odd} if kind == part else {})}
             for part in ("task", "algorithm", "engine")}  # fmt: skip
    return parse_run({**FEW, **parts, "cold_start": {"steps": 0}, "rewards": rewards}, "test")


def ended(kind: str, odd: str, root: Path) -> tuple[str, list[Any]]:
    """How the run ended, and what it logged but costs."""
    odd_plugins.reset()
    folder, state = root / f"{kind} {odd}".replace("/", "-"), "raised"
    with odd_plugins.process_kept():
        try:
            spec = spec_of(kind, odd)
            with RunLog(root, folder, spec, experiment="train", run_name="odd") as log:
                state = train(spec, folder, log, cache=root / "cache").state
        except (Exception, SystemExit):
            pass
    events = read_events(folder / EVENTS) if (folder / EVENTS).exists() else []
    values = [(e["step"], {k: v for k, v in e["values"].items() if k.partition("/")[0] not in COST_AREAS})
              for e in events if e["type"] == "metrics"]  # fmt: skip
    return state, values


UNDISTURBED: dict[str, tuple[str, list[Any]]] = {}  # settings of a run -> how it ends; several kinds share them


@pytest.mark.slow
@pytest.mark.attack("A plugin that gives what none should")
@pytest.mark.parametrize("kind", ODD)
def test_an_odd_plugin_ends_a_run_or_changes_nothing(kind, tmp_path, monkeypatch, record_property):
    odd_plugins.install(tmp_path / "plugins", monkeypatch)
    settings = spec_of(kind, "").model_dump_json()
    undisturbed = UNDISTURBED.get(settings) or UNDISTURBED.setdefault(settings, ended(kind, "", tmp_path))
    assert undisturbed[0] == "complete"
    tried = [odd for odd in ODD[kind] if os.environ.get("COHORT_CHAOS") or (kind, odd) in SHORT]
    slipped = []
    for odd in tried:
        found = ended(kind, odd, tmp_path)
        if found[0] == "complete" and found != undisturbed and odd not in CHOICES:
            slipped.append(odd)
    assert not slipped
    record_property("tried", len(tried))


@pytest.mark.attack("A plugin that gives what none should")
def test_a_copy_of_a_runs_process_logs_nothing(tmp_path):
    folder = tmp_path / "run"
    with RunLog(tmp_path, folder, parse_run(dict(FEW), "test"), experiment="train", run_name="odd") as log:
        log.metrics(1, {"train/loss": 0.5})
        before = (folder / EVENTS).read_bytes()
        if (child := os.fork()) == 0:  # as a plugin may do
            try:
                log.metrics(2, {"train/loss": 0.25})
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        assert (folder / EVENTS).read_bytes() == before
