"""A study whose workers are killed, frozen, or lose their stores ends as if nothing had happened.

Short here, with a run that trains nothing and a real store; `make chaos` makes it long, with the real training loop.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_trials
import kill_points
import postgres_server
import psutil
import pytest
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import read_events
from cohort.harness.record.status import StudyStatus
from cohort.harness.record.study import read_study
from cohort.harness.spec.study import StudySpec, parse_study
from cohort.harness.study import worker
from cohort.harness.study.launchers.ray import Cluster, import_ray
from cohort.harness.study.queue import Queue, study_status
from cohort.harness.study.runner import run_study
from cohort.harness.study.storage.files import GRACE_SECONDS
from queues import METRIC, open_queue, workers_of

LONG = bool(os.environ.get("COHORT_CHAOS"))
ROOT = Path(__file__).resolve().parents[1]
GROUP_SIZES, WEIGHTS, SEEDS = [2, 4, 8, 16], [0.0, 0.01, 0.02], [0, 1]  # 12 arms x 2 seeds

needs_postgres = pytest.mark.skipif(postgres_server.missing() is not None, reason=str(postgres_server.missing()))
needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")  # import_ray comes first


pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture(scope="module")
def server() -> Iterator[postgres_server.Server]:
    with postgres_server.server() as one:
        yield one


@pytest.fixture(
    params=[
        "files",
        pytest.param("postgres", marks=[needs_postgres, pytest.mark.long]),
    ]
)
def url(request: pytest.FixtureRequest) -> str | None:
    return request.getfixturevalue("server").new_database() if request.param == "postgres" else None


@pytest.fixture(scope="session")
def new_runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], Path]:
    """Makes a runs folder with an empty store."""
    store = fake_trials.empty_store(tmp_path_factory)

    def make(folder: Path) -> Path:
        folder.mkdir(parents=True)
        shutil.copy(store, folder / "mlflow.db")
        return folder

    return make


def a_grid(**changes: Any) -> StudySpec:
    raw = {
        "name": "chaos",
        "question": "Does anything get lost?",
        "run": fake_trials.run_settings(),
        "factors": {"algorithm.group_size": GROUP_SIZES, "algorithm.kl_beta": WEIGHTS},
        "seeds": SEEDS,
        **changes,
    }
    return parse_study(raw, "test")


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


class Chaos:
    """Kills a random worker whenever `every` more trials are complete, `kills` times, and takes the MLflow store away
    twice."""

    def __init__(self, runs: Path, kills: int, every: int, seed: int = 0) -> None:
        self.store, self.every = runs / "mlflow.db", every
        self.kills_left, self.outages_left = kills, 2
        self.num_killed = self.num_outages = 0
        self._random, self._back = random.Random(seed), 0.0

    def __call__(self, status: StudyStatus) -> None:
        now = time.monotonic()
        away = self.store.with_suffix(".away")
        if away.exists():
            if now > self._back:
                self._give_back(away)
        elif self.outages_left and self.num_killed > self.num_outages:
            self.store.rename(away)  # who connects now finds nothing, and must not make a new store
            self.store.mkdir()
            self.outages_left, self.num_outages, self._back = self.outages_left - 1, self.num_outages + 1, now + 1.0
        workers = workers_of(psutil.Process())
        due = status.counts().get("complete", 0) >= self.every * self.num_killed
        if self.kills_left and due and workers and status.counts().get("running"):
            self._random.choice(workers).send_signal(signal.SIGKILL)
            self.kills_left, self.num_killed = self.kills_left - 1, self.num_killed + 1

    def _give_back(self, away: Path) -> None:
        self.store.rmdir()
        away.rename(self.store)

    def end(self) -> None:
        away = self.store.with_suffix(".away")
        if away.exists():
            self._give_back(away)


def finals(queue: Queue) -> dict[tuple[str, int], tuple[str, Any]]:
    """(arm, seed) -> how it ended and what it reached, as the queue has it: what every host can see."""
    return {(t.arm, t.seed): (t.state, t.accuracy) for t in queue.status().trials}


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


def check_once_each(study: StudySpec, queue: Queue) -> None:
    """Every (arm, seed) has exactly one attempt that is complete."""
    status = queue.status()
    assert status.counts() == {"complete": len(queue.plan.keys)}
    attempts = queue._read().by_key
    complete = Counter(key for key, tried in attempts.items() for t in tried if t.state.name == "COMPLETE")
    assert complete == Counter((arm.label, seed) for arm in study.design_arms() for seed in study.seeds)


@pytest.mark.attack("SIGKILL of workers at random moments")
def test_a_grid_under_fire_ends_as_an_undisturbed_one(
    tmp_path: Path,
    url: str | None,
    new_runs: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.05")
    study, runs = a_grid(), new_runs(tmp_path / "runs")
    chaos = Chaos(runs, kills=3, every=4)
    try:
        status = run_study(study, runs, workers=3, command="", on_status=chaos,
                           execute=fake_trials.EXECUTE, storage=url)  # fmt: skip
    finally:
        chaos.end()
    assert chaos.num_killed >= 1  # a busy machine may not look often enough for all three
    record_property("tried", chaos.num_killed)
    assert (status.finished, status.all_valid) == (True, True)
    queue = open_queue(study, runs, url)
    check_once_each(study, queue)
    assert queue.num_claims() > 24  # something was lost on the way
    # What an undisturbed run logs is known: the fake's accuracy is a function of spec and step.
    for arm in study.design_arms():
        for seed in study.seeds:
            spec = arm.run_spec(seed)
            want = {f"{METRIC}@{step}": fake_trials.accuracy(spec, step) for step in range(spec.steps + 1)}
            assert values(runs)[queue.plan.directory((arm.label, seed)).name] == want
    record = read_study(runs, "chaos")
    assert Counter((t.arm, t.seed, t.state) for t in record.trials) == Counter(
        (*key, "complete") for key in queue.plan.keys
    )
    assert {(t.arm, t.seed): t.history[METRIC][-1][1] for t in record.trials} == {
        (arm.label, seed): fake_trials.accuracy(arm.run_spec(seed), 7)
        for arm in study.design_arms()
        for seed in study.seeds
    }


HOST = """
import os, sys
from pathlib import Path
import test_chaos as t
os.chdir(Path(sys.argv[1]).parent)
study = t.a_trained_grid() if sys.argv[3] == "trained" else t.a_grid()
options = {"workers": 2} if sys.argv[3] == "trained" else {"workers": 1, "execute": t.fake_trials.EXECUTE}
t.run_study(study, Path(sys.argv[1]), command="", storage=sys.argv[2] or None, **options)
"""


def two_hosts(folder: Path, url: str, kind: str, new_runs: Callable[[Path], Path]) -> list[Path]:
    """The runs folders of two study processes with separate working and runs folders, once both have ended."""
    places = [new_runs(folder / name / "runs") for name in ("north", "south")]
    processes = [subprocess.Popen([sys.executable, "-c", HOST, str(runs), url, kind]) for runs in places]
    assert [process.wait(1800) for process in processes] == [0, 0]
    return places


@pytest.mark.long
@needs_postgres
@pytest.mark.attack("Several study commands at once on one study")
def test_two_hosts_that_share_only_a_database_share_the_work(
    tmp_path: Path, server: postgres_server.Server, new_runs: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.05")
    url = server.new_database()
    places = two_hosts(tmp_path, url, "fake", new_runs)
    study = a_grid()
    north, south = (values(runs) for runs in places)
    assert north and south and not set(north) & set(south)  # each trial ran on one host, and both had some
    for runs in places:
        check_once_each(study, open_queue(study, runs, url))
        assert finals(open_queue(study, runs, url)) == {
            (arm.label, seed): ("complete", fake_trials.accuracy(arm.run_spec(seed), 7))
            for arm in study.design_arms()
            for seed in study.seeds
        }
        assert json.loads((runs / "studies/chaos/study.json").read_text())["name"] == "chaos"
    (tmp_path / "third").mkdir()
    assert study_status("chaos", tmp_path / "third", url).counts() == {"complete": 24}  # no files there at all


# Long -----------------------------------------------------------------------------------------------------------------


def a_small_grid() -> StudySpec:
    """Ten real trials of the grid: two arms, five seeds. Each lets seven workers more die (`kill_points`)."""
    run = a_trained_grid().run
    return a_grid(run=run, factors={"algorithm.group_size": [2, 4]}, seeds=[0, 1, 2, 3, 4])


@pytest.mark.long
@pytest.mark.attack("SIGKILL before and after every place that flushes, renames, deletes or locks")
@pytest.mark.parametrize("kind", ["fake", "real"])
def test_a_worker_that_dies_at_each_place_that_writes_leaves_a_study_that_ends_as_an_undisturbed_one(
    tmp_path: Path,
    kind: str,
    new_runs: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, execute = (a_small_grid(), worker.EXECUTE) if kind == "real" else (a_grid(), fake_trials.EXECUTE)
    quiet, runs, kills = new_runs(tmp_path / "quiet"), new_runs(tmp_path / "runs"), tmp_path / "kills"
    run_study(study, quiet, workers=2, command="", execute=execute)
    kills.mkdir()
    monkeypatch.setenv(kill_points.KILLS, str(kills))
    status = run_study(study, runs, workers=2, command="", execute=f"kill_points:{kind}")
    assert (status.finished, status.all_valid) == (True, True)
    places = sorted(file.name for file in kills.iterdir() if not file.name.startswith("ended "))
    record_property("tried", len(places))
    assert len(places) >= 16
    assert {place.split(" in ")[0] for place in places} >= {
        "before fsync",
        "after fsync",
        "before replace",
        "after lock",
    }
    if kind == "real":
        assert "after rename in files.publish_folder" in places
    assert values(runs) == values(quiet)


@pytest.mark.long
@pytest.mark.attack("Several study commands at once on one study")
def test_two_commands_in_one_folder_of_which_one_is_killed_run_every_trial_once(
    tmp_path: Path, new_runs: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.2")
    study, runs = a_grid(), new_runs(tmp_path / "runs")
    command = [sys.executable, "-c", HOST, str(runs), "", "fake"]
    first, second = (subprocess.Popen(command) for _ in range(2))
    while study_claims(study, runs) < 6:
        time.sleep(0.2)
    first.kill()  # its worker ends after its step, because its parent is gone
    assert second.wait(600) == 0
    check_once_each(study, open_queue(study, runs, None))
    first.wait()


def study_claims(study: StudySpec, runs: Path) -> int:
    queue = open_queue(study, runs, None)
    return queue.num_claims() if queue.storage.exists() else 0


@pytest.mark.long
@needs_postgres
@pytest.mark.attack("Crash of the PostgreSQL server")
def test_a_database_that_crashes_twice_delays_a_grid_and_loses_nothing(
    tmp_path: Path,
    server: postgres_server.Server,
    new_runs: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.1")
    study, runs, url, crashes = a_grid(), new_runs(tmp_path / "runs"), server.new_database(), []

    def crash(status: StudyStatus) -> None:
        if len(crashes) < 2 and status.counts().get("complete", 0) > 4 * (len(crashes) + 1):
            crashes.append(server.crash())
            server.start()

    status = run_study(study, runs, workers=2, command="", on_status=crash, execute=fake_trials.EXECUTE, storage=url)
    assert (status.finished, status.all_valid, len(crashes)) == (True, True, 2)
    record_property("tried", len(crashes))
    check_once_each(study, open_queue(study, runs, url))


@pytest.mark.long
@pytest.mark.attack("A worker that is frozen for longer than its lease lasts")
def test_a_frozen_worker_loses_nothing_and_ends_nothing(
    tmp_path: Path, url: str | None, new_runs: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
):
    """In files its lease holds, for its process lives; in a database another takes over, and it ends when it wakes."""
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.2")
    study, runs, frozen = a_grid(), new_runs(tmp_path / "runs"), []

    def freeze_once(status: StudyStatus) -> None:
        workers = workers_of(psutil.Process())
        if not frozen and workers and any(trial.done >= 2 for trial in status.trials if trial.state == "running"):
            frozen.append((workers[0], time.monotonic()))
            workers[0].suspend()
        if frozen and time.monotonic() - frozen[0][1] > GRACE_SECONDS + 10 and frozen[0][0].is_running():
            frozen[0][0].resume()

    status = run_study(study, runs, workers=2, command="", on_status=freeze_once,
                       execute=fake_trials.EXECUTE, storage=url)  # fmt: skip
    assert frozen and (status.finished, status.all_valid) == (True, True)
    check_once_each(study, open_queue(study, runs, url))


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
def test_an_interrupt_on_ray_lets_the_step_end(
    tmp_path: Path, new_runs: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.5")
    study, runs, pressed = a_grid(), new_runs(tmp_path / "runs"), []

    def interrupt_once(status: StudyStatus) -> None:
        if not pressed and any(trial.state == "running" and trial.done >= 1 for trial in status.trials):
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    status = run_study(study, runs, workers=2, command="", on_status=interrupt_once,
                       execute=fake_trials.EXECUTE, cluster=Cluster("local"))  # fmt: skip
    assert not status.finished
    assert status.counts()["stopped"] >= 1
    assert "running" not in status.counts()
    stopped = next(trial for trial in status.trials if trial.state == "stopped")
    assert json.loads((stopped.directory / "checkpoint.json").read_text())["step"] >= 1


@pytest.mark.long
@needs_ray
@pytest.mark.attack("SIGKILL of workers at random moments")
def test_real_runs_under_fire_on_hosts_and_on_ray_equal_undisturbed_ones(
    tmp_path: Path,
    new_runs: Callable[[Path], Path],
    monkeypatch: pytest.MonkeyPatch,
    record_property: Callable[[str, object], None],
):
    """Bit for bit: every logged value but clocks and memory, of every step of every trial.

    Two workers everywhere: the number of threads of a worker follows from it, and with it the order of sums.
    """
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, quiet = a_trained_grid(), new_runs(tmp_path / "quiet")
    run_study(study, quiet, workers=2, command="")
    want = values(quiet)
    assert len(want) == 24

    runs = new_runs(tmp_path / "fire")
    chaos = Chaos(runs, kills=8, every=2)
    try:
        run_study(study, runs, workers=3, command="", on_status=chaos)
    finally:
        chaos.end()
    assert chaos.num_killed >= 3
    record_property("tried", chaos.num_killed)
    check_once_each(study, open_queue(study, runs, None))
    assert values(runs) == want

    if postgres_server.missing() is None:
        with postgres_server.server() as server:
            north, south = (values(place) for place in two_hosts(tmp_path, server.new_database(), "trained", new_runs))
            assert north and south
            assert {**north, **south} == want

    runs = new_runs(tmp_path / "ray")
    with two_ray_nodes() as address:
        run_study(study, runs, workers=2, command="", cluster=Cluster(address))
    assert len(list((runs / "studies/chaos/logs").glob("worker-ray-*.log"))) >= 2  # both nodes had a worker
    assert values(runs) == want
