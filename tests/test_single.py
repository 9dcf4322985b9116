"""A run or an evaluation outside a study: its folder is its own, and its record says what it is."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from cohort.harness.base.inputs import InputsChanged
from cohort.harness.checks import disk
from cohort.harness.devices import group
from cohort.harness.record.events import read_events
from cohort.harness.record.run import RunInfo, read_result
from cohort.harness.record.status import StudyStatus, TrialStatus
from cohort.harness.run import standalone as single
from cohort.harness.run.build import RunResult, first_prompt
from cohort.harness.run.standalone import evaluate_once, own_folder, recorded_inputs, train_once
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import RunSpec, parse_run
from filelock import FileLock
from test_finished import Usage

FIXTURES = Path(__file__).parent / "fixtures"
FEW = {"num_prompts": 3, "num_test_prompts": 3, "num_samples": 1}
INPUTS = {"data of a task": {"train.jsonl": "0" * 64}}


def a_spec(**changes: Any) -> RunSpec:
    run = {"task": "arithmetic", "algorithm": {"name": "grpo", "group_size": 2}, "rollouts_per_step": 8, "steps": 2}
    return parse_run({**run, "seed": 3, "evaluation": FEW, "sampling": {"max_tokens": 8}, **changes}, "test")


class Loop:
    """Stands for the training loop: notes its call, reports progress and leaves a checkpoint."""

    def __init__(self, state: str = "complete") -> None:
        self.result, self.calls = RunResult(state, "why", {"seconds": 2.0}), []  # pyright: ignore

    def __call__(self, spec: RunSpec, directory: Path, log: Any, **keywords: Any) -> RunResult:
        self.calls.append((spec, directory, keywords))
        log.about(inputs=INPUTS)
        log.progress("", 0, 4)
        log.progress("train", 1, 4)
        log.metrics(1, {"validation/accuracy": 0.5, "throughput/tokens_per_second": 9.0, "seconds/total": 2.0})
        leave_checkpoint(directory)
        return self.result


def leave_checkpoint(directory: Path) -> None:
    folder = directory / "checkpoints" / "step-00000002"
    for file in ("policy/config.json", "learner.pt"):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(file)


def left(directory: Path) -> set[str]:
    return {path.name for path in directory.glob("checkpoints/step-*/*")}


@pytest.fixture(autouse=True)
def no_mirror(monkeypatch):
    monkeypatch.setenv("COHORT_MIRROR", "none")


@pytest.mark.parametrize(
    ("state", "finished", "stays"),
    [("complete", None, {"policy"}), ("complete", "nothing", set()), ("stopped", None, {"policy", "learner.pt"})],
)
def test_a_run_is_shown_while_it_trains_and_recorded_when_it_ends(state, finished, stays, tmp_path, monkeypatch):
    spec, directory, seen = a_spec(checkpoints={"finished": finished}), tmp_path / "train" / "one", []
    loop = Loop(state)
    monkeypatch.setattr(group, "lead", lambda train, *args, **keywords: loop(*args, **keywords))
    monkeypatch.setattr(single, "stop_on_signals", lambda: nullcontext(lambda: True))
    assert recorded_inputs(directory) == {}
    found = train_once(spec, tmp_path, "one", seen.append)
    assert found == loop.result and left(directory) == stays
    ((given, at, keywords),) = loop.calls
    assert (given, at, keywords["cache"], keywords["should_stop"]()) == (spec, directory, tmp_path / "cache", True)

    def shown(phase: str, done: int, *measured: float) -> StudyStatus:
        numbers = measured or (None, None, None)
        step = 1 if measured else 0
        trial = TrialStatus("one", 3, "running", None, phase, done, 4, *numbers, directory, step=step, steps=2)
        return StudyStatus("one", "", (trial,))

    assert seen == [shown("loading", 0), shown("train", 1), shown("train", 1, 0.5, 9.0, 2.0)]
    info, ended = RunInfo.load(directory), read_result(directory)
    assert info is not None and (info.experiment, info.name, info.tags) == ("train", "one", {})
    assert ended is not None and (ended["state"], ended["reason"], ended["summary"]) == (state, "why", {"seconds": 2.0})
    assert recorded_inputs(directory) == INPUTS


def test_a_run_that_waits_in_vain_for_another_process_is_recorded_as_it_ended(tmp_path, monkeypatch):
    ended = RunResult("invalid", "of another process", {})

    def lead(*given: Any, when_stuck: Any, **how: Any) -> None:
        assert when_stuck(lambda: ended) == ended
        raise SystemExit(1)

    monkeypatch.setattr(group, "lead", lead)
    with pytest.raises(SystemExit):
        train_once(a_spec(), tmp_path, "one")
    assert (read_result(tmp_path / "train" / "one") or {})["reason"] == ended.reason


def test_a_run_trains_once_in_a_folder_of_its_own(tmp_path, monkeypatch):
    loop, spec = Loop(), a_spec()
    monkeypatch.setattr(group, "lead", lambda train, *args, **keywords: loop(*args, **keywords))
    with monkeypatch.context() as small:
        small.setattr(disk.shutil, "disk_usage", lambda folder: Usage(10**9, 0, 10**5))
        with pytest.raises(SpecError, match="the run must fit on the disk"):
            train_once(spec, tmp_path, "one")
    with pytest.raises(SpecError, match="devices must be at most"):
        train_once(a_spec(devices=512, rollouts_per_step=512), tmp_path, "one")
    assert not loop.calls and not (tmp_path / "train").exists()
    monkeypatch.setattr(single, "check_disk", check := Mock(side_effect=single.check_disk))
    assert train_once(spec, tmp_path, "one") == loop.result
    directory = tmp_path / "train" / "one"
    check.assert_called_once_with(tmp_path, [(spec, directory)], 1, "weights")
    assert [at for _, at, _ in loop.calls] == [directory] and left(directory) == {"policy"}
    leave_checkpoint(directory)  # as a kill does before the files are deleted
    asked = []
    with monkeypatch.context() as noted:  # an ended run is checked too
        noted.setattr(single, "run_inputs", lambda specs, cache: asked.append((specs, cache)))
        assert train_once(spec, tmp_path, "one") == loop.result
    assert asked == [([spec], tmp_path / "cache")]
    assert len(loop.calls) == 1 and left(directory) == {"policy"}
    with pytest.raises(SpecError, match="holds a run with other settings"), own_folder(directory, a_spec(seed=4)):
        pass
    with own_folder(directory, spec.model_copy(update={"devices": 2})):  # any number of devices may continue it
        pass
    with FileLock(directory / "lock"), pytest.raises(SpecError, match="another process trains in"):
        train_once(spec, tmp_path, "one")


def test_an_evaluation_tells_tokens_per_second_and_the_time_left(monkeypatch):
    told, clock = [], iter([0.0, 0.0, 10.0, 11.0, 11.0, 11.5, 20.0, 20.0, 21.5, 21.5, 23.0, 23.0])
    monkeypatch.setattr(single, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pace = single.Pace(lambda *progress: told.append(progress), k=3, limit=50)
    pace.part_ended(2, 12)  # 2 are from an earlier attempt: 10 * 4 * 50 = 2000 tokens at most
    for count in (20, 20, 20):  # 40 tokens in the second after the first token; within another second nothing is told
        pace.sampled(count)
    pace.part_ended(7, 12)  # 60 tokens in 10 s; they were 3 a completion, so 20 * 3 are left
    pace.sampled(9)  # 69 tokens in 11.5 s; 51 of 120 are left
    pace.sampled(61)  # 130 tokens in 13 s: the last completions are longer than the others
    asked = (2, 12, "10 problems x (1 greedy + 3 sampled) = 40 completions of at most 50 tokens")
    first, part = (2, 12, "40 tokens/s, at most 49 s left"), (7, 12, "6 tokens/s, 10 s left")
    assert told == [asked, first, part, (7, 12, "6 tokens/s, 8.5 s left"), (7, 12, "10 tokens/s, 0 s left")]


@pytest.mark.usefixtures("plugins")
def test_an_evaluation_begins_its_record_anew_and_its_completions_only_without_them(tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(single, "check_length", lambda spec, prompts: checked.append(len(prompts)))
    monkeypatch.setattr(single, "check_memory", lambda spec, *, learns: checked.append(learns))
    data = shutil.copytree(FIXTURES / "math500", tmp_path / "math500")
    tests, seen = [{"name": "math500", "path": str(data)}], []
    # 512 devices: of training, which an evaluation does not do
    few = {**FEW, "num_prompts": 2, "tests": tests}
    spec = a_spec(engine="scripted", devices=512, rollouts_per_step=512, evaluation=few)
    directory = tmp_path / "evaluate" / "one"

    def show(*progress: Any) -> None:
        seen.append(progress)
        first, *later = [event["type"] for event in read_events(directory / "events.jsonl")]
        assert first == "start" and {*later} <= {"start", "metrics"}

    for attempt in range(1, 3):
        found = evaluate_once(spec, "test", tmp_path, "one", show)
        assert [one.metrics["num_prompts"] for one in found.values()] == [3, 3]
        info, ended = RunInfo.load(directory), read_result(directory)
        assert info is not None and (info.experiment, info.name) == ("evaluate", "one")
        assert info.prompt == first_prompt(spec, "test") and len(info.inputs) == 1
        assert ended is not None and (ended["state"], ended["summary"]) == ("complete", {"test_accuracy": 0.0})
        *starts, metrics, other, samples, finish = read_events(directory / "events.jsonl")
        assert [event["type"] for event in starts] == ["start"] * attempt
        assert (metrics["step"], other["step"], finish["type"]) == (0, 0, "finish")
        assert metrics["values"]["test/num_prompts"] == other["values"]["test_math500/num_prompts"] == 3
        assert [(row["step"], row["split"]) for row in samples["rows"]] == [(0, "test")] * 3
    words = "3 problems x (1 greedy + 1 sampled) = 6 completions of at most 8 tokens"
    areas = ("test", "test_math500")  # the second time all completions were there; a script tells no tokens
    assert seen == [(area, *rest) for area in areas for rest in ((0, 3, words), (3, 3, ""))]
    assert list(evaluate_once(spec, "validation", tmp_path, "two")) == ["validation"]
    assert checked == [3 + 3, False, 3 + 3, False, 2, False]  # prompts and memory, of each evaluation
    (file,) = data.iterdir()
    file.write_bytes(file.read_bytes() + b"\n")
    with pytest.raises(InputsChanged, match=file.name):
        evaluate_once(spec, "test", tmp_path, "one")
    (directory / "test.jsonl").unlink()
    evaluate_once(spec, "test", tmp_path, "one")
    with pytest.raises(SpecError, match="has no problems in its validation split"):
        evaluate_once(a_spec(task={"name": "fake", "empty_split": "validation"}), "validation", tmp_path, "none")
    assert not (tmp_path / "evaluate" / "none").exists()
