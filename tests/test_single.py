"""`cohort evaluate` outside a study: precision as the spec says, and an engine that is closed whatever happens."""

import pytest
import torch
from cohort.harness import plugins
from cohort.harness.engines.scripted import ScriptedEngine
from cohort.harness.run import single
from cohort.harness.spec.run import parse_run


class RecordingEngine(ScriptedEngine):
    """Remembers the precision in which it was asked, and whether it was closed."""

    precisions: list[bool]
    closed: int

    def __init__(self, settings, policy, codec):
        super().__init__(settings, policy, codec)
        RecordingEngine.precisions, RecordingEngine.closed = [], 0

    def generate(self, *arguments, **keywords):
        RecordingEngine.precisions.append(torch.is_autocast_enabled("cpu"))
        return super().generate(*arguments, **keywords)

    def close(self):
        RecordingEngine.closed += 1


def make_spec(autocast):
    few = {"num_prompts": 2, "num_samples": 1}
    raw = {"task": "arithmetic", "algorithm": "grpo", "engine": "scripted", "device": "cpu", "evaluation": few}
    return parse_run({**raw, "autocast": autocast}, "test")


SPECS = {autocast: make_spec(autocast) for autocast in (True, False)}


@pytest.fixture(autouse=True)
def recording(monkeypatch):
    monkeypatch.setattr(plugins, "load", lambda kind, name: RecordingEngine)


@pytest.mark.parametrize("autocast", [True, False])
def test_an_evaluation_samples_in_the_precision_of_the_spec_and_closes_its_engine(autocast, tmp_path):
    result = single._evaluate(SPECS[autocast], "validation", tmp_path)
    assert result.metrics["num_prompts"] == 2
    assert RecordingEngine.precisions == [autocast, autocast]  # samples, and greedy
    assert RecordingEngine.closed == 1


def test_an_evaluation_that_fails_closes_its_engine_too(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordingEngine, "generate", failing)
    with pytest.raises(RuntimeError, match="out of order"):
        single._evaluate(SPECS[False], "validation", tmp_path)
    assert RecordingEngine.closed == 1


def failing(*_, **__):
    raise RuntimeError("out of order")
