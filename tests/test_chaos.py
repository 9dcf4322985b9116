"""A study whose workers are killed, or lose their database, ends as if nothing had happened.

Short here, with a run that trains nothing and a real store; `make chaos` makes it long, with the real training loop.
"""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_trials
import kill_points
import postgres_server
import psutil
import pytest
from cohort.harness.base.files import read_json
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import read_events
from cohort.harness.record.status import StudyStatus
from cohort.harness.settings.study import StudySpec
from cohort.harness.study import worker
from cohort.harness.study.launchers.ray import Cluster, import_ray
from fake_trials import a_study
from queues import at_work, check_as_undisturbed, check_once_each, open_queue, run, workers_of

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")  # import_ray comes first


pytestmark = pytest.mark.usefixtures("plugins")


def a_grid(**changes: Any) -> StudySpec:
    factors = {"algorithm.group_size": [2, 4, 8, 16], "algorithm.kl_beta": [0.0, 0.01, 0.02]}
    return a_study(**{"name": "chaos", "factors": factors, **changes})


def a_trained_grid() -> StudySpec:
    """The same grid of the real training loop, short runs of the built-in model."""
    run = {
        "task": "arithmetic",
        "algorithm": "grpo",
        "cold_start": {"steps": 40},
        "rollouts_per_step": 16,
        "steps": 6,
        "evaluation": {"every": 3, "num_prompts": 8, "num_test_prompts": 8, "num_samples": 2},
        "checkpoints": {"every": 1},
    }
    return a_grid(run=run)


def values(runs: Path) -> dict[str, dict[str, float]]:
    """Trial folder -> metric and step -> value, as the runs logged them; clocks and memory apart."""
    found: dict[str, dict[str, float]] = {}
    for file in sorted(runs.glob("studies/chaos/trials/*/events.jsonl")):
        found[file.parent.name] = {
            f"{key}@{event['step']}": value
            for event in read_events(file)
            if event["type"] == "metrics"
            for key, value in event["values"].items()
            if not key.startswith(COST_AREAS)
        }
    return found


@pytest.mark.attack("SIGKILL of workers at random moments")
def test_a_grid_under_fire_ends_as_an_undisturbed_one(runs, record_property):
    (runs / "hold").touch()  # else a trial may end before the kill
    study, killed = a_grid(seeds=[0]), set[int]()

    def kill_two(status: StudyStatus) -> None:
        for trial in status.trials:
            if trial.state == "running" and trial.done >= 1 and len(killed) < 2:
                pid = read_json(trial.directory / "lease")["pid"]
                if pid not in killed:
                    os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        if len(killed) == 2:
            (runs / "hold").unlink(missing_ok=True)

    status = run(study, runs, kill_two)
    record_property("tried", len(killed))
    assert (status.finished, status.all_valid) == (True, True)
    assert open_queue(study, runs).num_claims() == 14  # 12 trials, two of them in two parts
    check_as_undisturbed(study, runs)


HOST = """
import os, sys
from pathlib import Path
import test_chaos as t
os.chdir(Path(sys.argv[1]).parent)
t.run(t.a_trained_grid(), Path(sys.argv[1]), storage=sys.argv[2], execute=t.worker.EXECUTE)
"""


# Long -----------------------------------------------------------------------------------------------------------------


def a_small_grid() -> StudySpec:
    """Ten real trials of the grid: two arms, five seeds. Each lets seven workers more die (`kill_points`)."""
    run = a_trained_grid().run
    return a_grid(run=run, factors={"algorithm.group_size": [2, 4]}, seeds=[0, 1, 2, 3, 4])


@pytest.mark.long
@pytest.mark.attack("SIGKILL before and after every place that flushes, renames, deletes or locks")
@pytest.mark.parametrize("kind", ["fake", "real"])
def test_a_worker_that_dies_at_each_place_that_writes_leaves_a_study_that_ends_as_an_undisturbed_one(
    tmp_path, kind, new_runs, monkeypatch, record_property
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, execute = (a_small_grid(), worker.EXECUTE) if kind == "real" else (a_grid(), fake_trials.EXECUTE)
    quiet, runs, kills = new_runs(tmp_path / "quiet"), new_runs(tmp_path / "runs"), tmp_path / "kills"
    run(study, quiet, execute=execute)
    kills.mkdir()
    monkeypatch.setenv(kill_points.KILLS, str(kills))
    status = run(study, runs, execute=f"kill_points:{kind}")
    assert (status.finished, status.all_valid) == (True, True)
    places = sorted(file.name for file in kills.iterdir() if not file.name.startswith("ended "))
    record_property("tried", len(places))
    assert len(places) >= 16
    assert {place.split(" in ")[0] for place in places} >= {
        "before fsync", "after fsync", "before replace", "after lock",
    }  # fmt: skip
    if kind == "real":
        assert "after rename in files.publish_folder" in places
    assert values(runs) == values(quiet)


def a_study_of_stages() -> StudySpec:
    """The real training loop: reinforcement learning with a reference, answers, a critic and a reference again, against
    one that has no stages. Three seeds, 15 steps each."""
    answers = {"kind": "rejection_sampling", "steps": 4, "rejection": {"num_prompts": 64, "num_samples": 4, "keep": 2}}
    stages = [
        {"name": "reason", "steps": 4},
        {"name": "distil", **answers, "optimizer": {"learning_rate": 1e-3, "schedule": "linear"}},
        {"name": "value", "steps": 4, "algorithm": {"name": "ppo"}},
        {"name": "polish", "steps": 3, "kl": {"schedule": "adaptive", "target": 1e-4}},
    ]
    run = {
        **a_trained_grid().run, "algorithm": {"name": "grpo", "kl_beta": 0.02}, "cold_start": {"steps": 100},
        "steps": 15, "checkpoints": {"every": 3}, "evaluation": {**a_trained_grid().run["evaluation"], "every": 5},
    }  # fmt: skip
    arms = {"four stages": {"stages": stages}, "one": {}}
    return a_study(name="chaos", run=run, factors={}, arms=arms, seeds=[0, 1, 2])


@pytest.mark.long
@pytest.mark.attack("A kill in every stage of a run")
def test_a_study_with_an_arm_of_four_stages_that_is_killed_twenty_times_ends_as_an_undisturbed_one(
    tmp_path, new_runs, monkeypatch, record_property
):
    """Bit for bit, as the runs above. A trial of stages is killed when it is seen at or after each of its steps."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, quiet, runs = a_study_of_stages(), new_runs(tmp_path / "quiet"), new_runs(tmp_path / "runs")
    run(study, quiet, workers=1, execute=worker.EXECUTE)
    draw, killed = random.Random(0), set[int]()
    due = {seed: sorted(draw.sample(range(13), 8)) for seed in (0, 1, 2)}  # one near the end may come too late

    def kill(status: StudyStatus) -> None:
        for trial in status.trials:
            if trial.arm == "four stages" and trial.state == "running" and due[trial.seed]:
                lease, late = trial.directory / "lease", trial.phase in ("train", "sample", "validation")
                pid = read_json(lease)["pid"] if late and lease.exists() else None
                if pid is not None and pid not in killed and trial.step >= due[trial.seed][0]:
                    due[trial.seed].pop(0)
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)

    status = run(study, runs, kill, workers=1, execute=worker.EXECUTE)
    record_property("tried", len(killed))
    assert (status.finished, status.all_valid) == (True, True)
    assert len(killed) >= 20
    check_once_each(open_queue(study, runs))
    assert values(runs) == values(quiet)


@pytest.mark.long
@postgres_server.needed
@pytest.mark.attack("Crash of the PostgreSQL server")
def test_a_database_that_crashes_twice_delays_a_grid_and_loses_nothing(
    tmp_path, server, new_runs, monkeypatch, record_property
):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.1")
    study, runs, url, crashes = a_grid(), new_runs(tmp_path / "runs"), server.new_database(), []

    def crash(status: StudyStatus) -> None:
        if len(crashes) < 2 and status.counts().get("complete", 0) > 4 * (len(crashes) + 1):
            crashes.append(server.crash())
            server.start()

    status = run(study, runs, crash, storage=url)
    assert (status.finished, status.all_valid, len(crashes)) == (True, True, 2)
    record_property("tried", len(crashes))
    check_once_each(open_queue(study, runs, url))


@contextmanager
def two_ray_nodes() -> Iterator[str]:
    """The address of a Ray cluster of two nodes on this machine, with one core each."""
    import_ray("local")
    from ray.cluster_utils import Cluster as RayCluster

    cluster = RayCluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        assert cluster.address.startswith("127.0.0.1:")
        cluster.add_node(num_cpus=1)
        yield cluster.address
    finally:
        cluster.shutdown()


@pytest.mark.long
@needs_ray
@pytest.mark.attack("Ctrl-C")
@pytest.mark.parametrize("shell", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_an_interrupt_on_ray_lets_the_step_end(runs, shell):
    """A script starts a command in the background with SIGINT ignored, and what Ray starts inherits that."""
    (runs / "hold").touch()
    study, pressed = a_grid(), []

    def interrupt_once(status: StudyStatus) -> None:
        if not pressed and at_work(status):
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, shell)
    try:
        status = run(study, runs, interrupt_once, cluster=Cluster())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not status.finished
    assert status.counts()["stopped"] >= 1
    assert "running" not in status.counts()
    stopped = next(trial for trial in status.trials if trial.state == "stopped")
    assert json.loads((stopped.directory / "checkpoint.json").read_text())["step"] >= 1


@pytest.mark.long
@needs_ray
@pytest.mark.attack("SIGKILL of workers at random moments")
def test_real_runs_under_fire_on_hosts_and_on_ray_equal_undisturbed_ones(
    tmp_path, new_runs, monkeypatch, record_property
):
    """Bit for bit: every logged value but clocks and memory, of every step of every trial.

    Two workers everywhere: the number of threads of a worker follows from it, and with it the order of sums.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, quiet = a_trained_grid(), new_runs(tmp_path / "quiet")
    run(study, quiet, execute=worker.EXECUTE)
    want = values(quiet)
    assert len(want) == 24

    runs, draw, killed = new_runs(tmp_path / "fire"), random.Random(0), []

    def kill_one(status: StudyStatus) -> None:
        workers, counts = workers_of(psutil.Process()), status.counts()
        due = len(killed) < 8 and counts.get("complete", 0) >= 2 * len(killed)
        if due and workers and counts.get("running"):
            killed.append(draw.choice(workers))
            killed[-1].send_signal(signal.SIGKILL)

    run(study, runs, kill_one, workers=3, execute=worker.EXECUTE)
    assert len(killed) >= 3
    record_property("tried", len(killed))
    check_once_each(open_queue(study, runs))
    assert values(runs) == want

    if postgres_server.missing() is None:
        with postgres_server.server() as server:  # two hosts with folders of their own share only a database
            url, places = server.new_database(), [new_runs(tmp_path / name / "runs") for name in ("north", "south")]
            processes = [subprocess.Popen([sys.executable, "-c", HOST, str(place), url]) for place in places]
            assert [process.wait(1800) for process in processes] == [0, 0]
            check_once_each(open_queue(study, places[0], url))
            north, south = (values(place) for place in places)
            assert north and south and not north.keys() & south.keys()
            assert {**north, **south} == want

    runs = new_runs(tmp_path / "ray")
    with two_ray_nodes() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        run(study, runs, execute=worker.EXECUTE, cluster=Cluster())
    assert len(list((runs / "studies/chaos/logs").glob("worker-ray-*.log"))) >= 2  # both nodes had a worker
    assert values(runs) == want
