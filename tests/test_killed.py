"""A study that is killed, interrupted or disturbed at any moment ends with the values of an undisturbed one.

What is killed: workers, the command, a notebook, a database. Where: at random moments, and before and after every place
that writes. Which study: of fakes, with stages, adapters, clones.
"""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_trials
import kill_points
import psutil
import pytest
from cohort.harness.base.files import read_json
from cohort.harness.base.stop import StopRequest
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import read_events
from cohort.harness.record.run import CHECKPOINTS
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import read_study
from cohort.harness.run import loop
from cohort.harness.settings.study import StudySpec
from cohort.harness.study import runner, steering, worker
from cohort.harness.study.queue import study_status
from factories import FEW, make_study
from fake_trials import a_study
from queues import a_queue, at_work, check_as_undisturbed, completions, once_at_work, open_queue, run, wait_for

pytestmark = pytest.mark.usefixtures("plugins")


def workers_killed(runs: Path, _: Any) -> None:
    killed = set[int]()

    def kill_two(status: StudyStatus) -> None:
        for trial in status.trials:
            if trial.state == "running" and trial.done >= 1 and len(killed) < 2:
                pid = read_json(trial.directory / "lease")["pid"]
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if len(killed) == 2:
            (runs / "hold").unlink(missing_ok=True)

    status = run(a_study(), runs, kill_two)
    assert (status.finished, status.all_valid) == (True, True)


def interrupted(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = signal.getsignal(signal.SIGINT)
    status = run(a_study(), runs, once_at_work(lambda: os.kill(os.getpid(), signal.SIGINT), 2))
    assert signal.getsignal(signal.SIGINT) is before
    assert "Stopping: each run finishes its step and writes a checkpoint; Ctrl-C again" in capsys.readouterr().err
    assert (status.finished, status.counts()) == (False, {"stopped": 2, "waiting": 2})
    stopped = next(trial for trial in status.trials if trial.state == "stopped")
    assert read_json(stopped.directory / "checkpoint.json")["step"] == 1
    assert {t.state for t in read_study(runs, "sizes").trials} == {"stopped"}
    (runs / "hold").unlink()
    assert run(a_study(), runs).counts() == {"complete": 4}


KERNEL = """
import sys, cohort
from cohort.harness.study import runner, worker
worker.EXECUTE = runner.EXECUTE = "fake_trials:train"
runner.run_study.__kwdefaults__["execute"] = "fake_trials:train"
from fake_trials import a_study
from cohort.harness.api.study import Study
print(cohort.run(Study("sizes", (), a_study()), workers=2, runs=sys.argv[1]))
"""


def kernel_ended(runs: Path, number: int) -> None:
    command = [sys.executable, "-c", KERNEL, str(runs)]
    kernel = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    while not (runs / "studies/sizes/study.json").exists() or at_work(study_status("sizes", runs)) < 2:
        assert kernel.poll() is None, kernel.communicate()
        time.sleep(0.1)
    workers = psutil.Process(kernel.pid).children()
    kernel.send_signal(number)
    said, _ = kernel.communicate(timeout=300)
    if number == signal.SIGINT:
        assert said.strip().endswith("KeyboardInterrupt: the same call continues where the study stopped"), said
    assert len(workers) == 2 and not psutil.wait_procs(workers, timeout=600)[1]  # orphans end after their step
    assert study_status("sizes", runs).counts()["stopped"] == 2
    (runs / "hold").unlink()
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"4 of 4 trials", done.stdout), done


@pytest.mark.parametrize(("disturb", "detail"), [
    pytest.param(workers_killed, None, marks=[
        pytest.mark.attack("SIGKILL of workers at random moments"), pytest.mark.slow]),
    pytest.param(interrupted, None, marks=pytest.mark.slow),
    *(pytest.param(kernel_ended, number, marks=[
        pytest.mark.attack("Ctrl-C and a killed kernel through the Python API"),
        pytest.mark.long if number == signal.SIGINT else pytest.mark.slow,
    ]) for number in (signal.SIGKILL, signal.SIGINT)),
])  # fmt: skip
def test_a_study_that_is_killed_or_interrupted_ends_as_an_undisturbed_one(disturb, detail, runs, capsys):
    (runs / "hold").touch()
    disturb(runs, detail or capsys)
    assert open_queue(a_study(), runs).num_claims() == 6  # four trials, two of them in two parts
    check_as_undisturbed(a_study(), runs)


def train_back(spec: Any, directory: Path, log: Any, **more: Any) -> Any:
    """As the fake run, but the clock of the host jumps back an hour at each step."""
    nanoseconds, seconds, metrics = time.time_ns, time.time, log.metrics

    def jump(step: int, values: Any) -> None:
        metrics(step, values)
        time.time_ns, time.time = (lambda: nanoseconds() - step * 3600 * 10**9), (lambda: seconds() - step * 3600)

    log.metrics = jump
    try:
        return fake_trials.train(spec, directory, log, **more)
    finally:
        time.time_ns, time.time = nanoseconds, seconds


@pytest.mark.slow
@pytest.mark.attack("A clock that jumps back an hour")
def test_a_clock_that_jumps_back_changes_nothing(runs):
    study = a_study(seeds=[0])
    run(study, runs, execute="test_killed:train_back", workers=1)
    check_as_undisturbed(study, runs)
    for file in runs.glob("studies/sizes/trials/*/events.jsonl"):
        times = [event["time"] for event in read_events(file) if event["type"] == "metrics"]
        assert min(b - a for a, b in itertools.pairwise(times)) < -3_000_000


@pytest.mark.attack("A queue on a disk that answers after seconds")
def test_a_run_waits_for_a_queue_that_answers_late_a_twentieth_of_its_time(runs, monkeypatch):
    log = worker._TrialLog(a_queue(a_study(), runs), ("group_size=2", 0), StopRequest())
    now = [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def answers(after: float) -> int:
        """How often it is asked in 200 steps of a second, where an answer takes so many seconds."""
        asked = []
        for _ in range(200):
            now[0] += 1.0
            assert not log._asks(lambda: bool(asked.append(now.__setitem__(0, now[0] + after))))
        return len(asked)

    assert answers(0.01) == 200
    assert answers(0.5) == 200 // 10 and answers(5.0) == 200 // 95 + 1  # 19 times as long passes between two


@pytest.mark.long
@pytest.mark.attack("30 workers at their first claim")
@pytest.mark.usefixtures("alone")
def test_30_workers_that_claim_at_once_take_a_trial_each(runs, record_property):
    (runs / "hold").touch()
    most = [0]

    def release(status: StudyStatus) -> None:
        most[0] = max(most[0], at_work(status))
        if most[0] == 30:
            (runs / "hold").unlink(missing_ok=True)

    study = a_study(seeds=list(range(15)))
    run(study, runs, release, workers=30)
    assert open_queue(study, runs).num_claims() == 30  # none twice
    check_as_undisturbed(study, runs)
    record_property("tried", 30)


# Every place that writes ---------------------------------------------------------------------------------------------

RUN = {
    **FEW, "algorithm": {"name": "grpo", "group_size": 4}, "cold_start": {"steps": 30}, "sampling": {"max_tokens": 12},
    "evaluation": {**FEW["evaluation"], "every": 3}, "checkpoints": {"every": 1, "rollouts_every": 2}, "steps": 8,
    "rewards": {"accuracy": 1.0, "format": 1.0},
}  # fmt: skip
LORA = {**RUN, "lora": {"rank": 4, "alpha": 8.0}}
# Reinforcement learning with a reference, with a critic and with a reference again.
STAGES = [
    {"name": "reason", "steps": 4},
    {"name": "value", "steps": 4, "algorithm": {"name": "ppo"}},
    {"name": "polish", "steps": 3, "kl": {"schedule": "adaptive", "target": 1e-4}},
]  # fmt: skip
STAGED = {**RUN, "algorithm": {"name": "grpo", "group_size": 4, "kl_beta": 0.02}, "cold_start": {"steps": 100},
          "steps": 11, "checkpoints": {"every": 3}}  # fmt: skip
TWO, FOUR = {"algorithm.kl_beta": [0.0, 0.1]}, {"algorithm.kl_beta": [0.0, 0.1, 0.2, 0.3]}
SIZES = {"algorithm.group_size": [2, 4, 8]}
MIXED: dict[str, dict[str, Any]] = {  # settings of a study
    "fakes": {"factors": SIZES, "seeds": [0, 1, 2, 3]},
    "grid": {"run": RUN, "factors": SIZES, "seeds": [0, 1, 2]},
    "three stages": {"run": STAGED, "arms": {"three stages": {"stages": STAGES}, "one": {}}, "seeds": [0, 1]},
    "clones": {"run": RUN, "factors": FOUR, "seeds": [0]},
    "adapters": {"run": LORA, "factors": TWO, "seeds": [0, 1, 2, 3]},
}  # fmt: skip
COSTS = ("peak", "learner", "core")  # of a summary, beside the areas of metrics that are costs
PARENT, LEAVES = "kl_beta=0", 3


def train(spec: Any, directory: Path, log: Any, *, cache: Path, should_stop: Callable[[], bool], **more: Any) -> Any:
    """As the real loop, but the arm that is to be cloned is stopped after the step at which the clone leaves it."""
    runs = cache.parent

    def asked() -> bool:
        if log.step == LEAVES and not (runs / "cloned").exists() and directory.name.startswith(f"{PARENT}-seed"):
            steering.hold_arm("storm", runs, PARENT, True)
        return should_stop()

    return loop.train(spec, directory, log, cache=cache, should_stop=asked, **more)


def clone(runs: Path, status: StudyStatus) -> None:
    """Clone the stopped arm, warm, once all its trials are at the step at which the clone leaves; until then let it go
    on, because a kill may have come between the request and the checkpoint."""
    trials = [trial for trial in status.trials if trial.arm == PARENT]
    if (runs / "cloned").exists() or any(trial.state == "running" for trial in trials) or not trials[0].held:
        return
    if all((trial.directory / CHECKPOINTS / f"step-{LEAVES:08d}").exists() for trial in trials):
        steering.clone_arm("storm", runs, PARENT, {"optimizer.learning_rate": 0.01}, warm=True)
        (runs / "cloned").touch()
    steering.hold_arm("storm", runs, PARENT, False)


def mixed(kind: str) -> StudySpec:
    """The study of a row of `MIXED`."""
    return (a_study if kind == "fakes" else make_study)(**{"name": "storm", **MIXED[kind]})


def values(runs: Path) -> dict[str, Any]:
    """Trial -> everything that its record has, without clocks and memory. What a later attempt logs again in the same
    words counts once: a kill between the test and the end leaves the test's events behind."""
    found: dict[str, Any] = {}
    for file in sorted(runs.glob("studies/storm/trials/*/events.jsonl")):
        logged: list[Any] = []
        for event in read_events(file):
            if event["type"] == "metrics":
                numbers = event["values"].items()
                event["values"] = {k: v for k, v in numbers if not k.startswith(COST_AREAS)}
            if event["type"] != "start":
                ends = event.get("summary", {}).items()
                event["summary"] = {k: v for k, v in ends if k.partition("_")[0] not in COST_AREAS + COSTS}
                said = {k: v for k, v in event.items() if k not in ("time", "sum")}
                if said not in logged:
                    logged.append(said)
        found[file.parent.name] = logged
    return found


@pytest.fixture
def alone(monkeypatch) -> None:
    """Workers of one thread, which know the files of the tests, and no mirror."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{Path(__file__).parent}")
    monkeypatch.setattr(runner, "mirrored", lambda *_: contextlib.nullcontext())


def ended(kind: str, runs: Path, execute: str | None = None) -> dict[str, Any]:
    """The values of a study of this kind that was run to its end."""
    runs.mkdir(exist_ok=True)
    study = mixed(kind)
    act = (lambda status: clone(runs, status)) if "clones" in kind else None
    own = {"fakes": fake_trials.EXECUTE}.get(kind, "test_killed:train" if "clones" in kind else worker.EXECUTE)
    left = True
    while left:  # a fast machine ends the other arms before the clone is there: the same command goes on with it
        status = run(study, runs, act, execute=execute or own)
        assert status.finished and status.all_valid, [trial.reason for trial in status.trials]
        left = any(trial.is_open or trial.held for trial in open_queue(study, runs).status().trials)
    assert set(completions(open_queue(study, runs)).values()) == {1}
    record = read_study(runs, "storm")
    assert not record.strange and len(record.exploratory) == ("clones" in kind)
    return values(runs)


@pytest.mark.long
@pytest.mark.attack("SIGKILL before and after every place that flushes, renames, deletes or locks")
@pytest.mark.parametrize("kind", list(MIXED))
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("alone")
def test_workers_that_die_at_each_place_that_writes_change_no_value(tmp_path, kind, monkeypatch, record_property):
    want, kills = ended(kind, tmp_path / "quiet"), tmp_path / "kills"
    kills.mkdir()
    monkeypatch.setenv(kill_points.KILLS, str(kills))
    deadly = {"fakes": "fake", "clones": "steered"}.get(kind, "real")
    found = ended(kind, tmp_path / "runs", f"kill_points:{deadly}")
    places = {file.name for file in kills.iterdir() if not file.name.startswith("ended ")}
    print(f"{kind}: {len(places)} places", flush=True)
    assert len(places) >= 16
    assert {"before fsync", "after fsync", "before replace", "after lock"} <= {one.split(" in ")[0] for one in places}
    assert kind != "grid" or "after rename in files.publish_folder" in places
    assert found.keys() == want.keys()
    assert [name for name in want if found[name] != want[name]] == []
    record_property("tried", len(places))


SEEDS, LEVELS, BOTH = {"seeds": [0, 1, 2]}, {"factors": SIZES}, "a level and a seed"
ARMS: dict[str, Any] = {"a": {"algorithm.group_size": 2}, "b": {"algorithm.group_size": 4}}
AMENDED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # settings at the start, and what is added
    "a level": ({}, LEVELS),
    "a seed": ({}, SEEDS),
    "an arm": ({"factors": {}, "arms": ARMS}, {"arms": {**ARMS, "c": {"algorithm.group_size": 8}}}),
    BOTH: ({}, {**LEVELS, **SEEDS}),
}


@pytest.mark.slow
@pytest.mark.attack("An arm or a seed added in the middle of a trial whose workers are killed")
@pytest.mark.parametrize("kind", [*(pytest.param(one, marks=pytest.mark.long) for one in list(AMENDED)[:3]), BOTH])
@pytest.mark.usefixtures("alone")
def test_what_is_added_in_the_middle_of_trials_costs_none_of_them(kind, runs, tmp_path, monkeypatch, record_property):
    before, added = AMENDED[kind]
    (kills := tmp_path / "kills").mkdir()
    monkeypatch.setenv(kill_points.KILLS, str(kills))
    (runs / "hold").touch()
    stop = once_at_work(lambda: os.kill(os.getpid(), signal.SIGINT), 2)
    run(a_study(**before), runs, stop, execute="kill_points:fake")
    in_progress = {trial.trial for trial in read_study(runs, "sizes").trials}
    (runs / "hold").unlink()
    runs = runs.rename(tmp_path / "moved")
    study = a_study(**{**before, **added})
    run(study, runs, execute="kill_points:fake")
    check_as_undisturbed(study, runs)
    record = read_study(runs, "sizes")
    assert not record.strange and len(record.amendments) == 1 and len(in_progress) >= 2
    record_property("tried", sum(not file.name.startswith("ended ") for file in kills.iterdir()))


HOST = """
import json, sys
from pathlib import Path
from fake_trials import a_study
from queues import run
added, runs, url = sys.argv[1:]
run(a_study(**json.loads(added)), Path(runs), storage=url or None, execute="kill_points:fake")
"""


@pytest.mark.slow
@pytest.mark.attack("Hosts that add an arm and a seed to a study at work, whose workers are killed")
@pytest.mark.usefixtures("alone")
def test_hosts_that_add_to_a_study_at_work_cost_no_trial(url, runs, tmp_path, monkeypatch, record_property):
    (kills := tmp_path / "kills").mkdir()
    monkeypatch.setenv(kill_points.KILLS, str(kills))
    monkeypatch.setenv("COHORT_MIRROR", "none")
    (runs / "hold").touch()
    hosts = []
    for added in ({}, LEVELS, {**LEVELS, **SEEDS}):
        command = [sys.executable, "-c", HOST, json.dumps(added), str(runs), url or ""]
        hosts.append(subprocess.Popen(command))
        queue = wait_for(lambda added=added: (runs / "studies/sizes/study.json").exists()
                         and open_queue(a_study(**added), runs, url))  # fmt: skip
        wait_for(lambda queue=queue: at_work(queue.status()) >= 2 * len(hosts), "work of each host")
    (runs / "hold").unlink()
    assert [host.wait(900) for host in hosts] == [0, 0, 0]
    check_as_undisturbed(a_study(**{**LEVELS, **SEEDS}), runs, url)
    record = read_study(runs, "sizes")
    assert not record.strange and len(record.amendments) == 2
    record_property("tried", sum(not file.name.startswith("ended ") for file in kills.iterdir()))
