"""`cohort evaluate` outside a study: precision as the spec says, and an engine that is closed whatever happens."""

import pytest
import torch
from cohort.harness import plugins
from cohort.harness.engines.scripted import ScriptedEngine
from cohort.harness.run.single import evaluate_once
from factories import make_spec


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


FEW = {"num_prompts": 2, "num_test_prompts": 2, "num_samples": 1}
SPECS = {
    autocast: make_spec(engine="scripted", device="cpu", evaluation=FEW, autocast=autocast, sampling={"max_tokens": 8})
    for autocast in (True, False)
}


@pytest.fixture(autouse=True)
def recording(monkeypatch):
    load = plugins.load
    monkeypatch.setattr(plugins, "load", lambda kind, name: RecordingEngine if kind == "engine" else load(kind, name))


@pytest.mark.parametrize("autocast", [True, False])
def test_an_evaluation_samples_in_the_precision_of_the_spec_and_closes_its_engine(autocast, tmp_path):
    result = evaluate_once(SPECS[autocast], "validation", tmp_path, "one")
    assert result.metrics["num_prompts"] == 2
    assert RecordingEngine.precisions == [autocast, autocast]  # samples, and greedy
    assert RecordingEngine.closed == 1


def test_an_evaluation_that_fails_closes_its_engine_too(tmp_path, monkeypatch):
    monkeypatch.setattr(RecordingEngine, "generate", failing)
    with pytest.raises(RuntimeError, match="out of order"):
        evaluate_once(SPECS[False], "validation", tmp_path, "one")
    assert RecordingEngine.closed == 1


def failing(*_, **__):
    raise RuntimeError("out of order")
