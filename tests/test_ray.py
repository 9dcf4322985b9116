"""Workers on a Ray cluster: an interrupt reaches them, and their values are those of workers here."""

import importlib.util
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cohort.harness.base.files import read_json
from cohort.harness.record.status import StudyStatus
from cohort.harness.study import worker
from cohort.harness.study.launchers.ray import Cluster, import_ray
from fake_trials import a_study
from queues import at_work, run
from test_killed import check_same_values, mixed, values

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")  # import_ray comes first

pytestmark = [pytest.mark.long, needs_ray, pytest.mark.usefixtures("plugins")]


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


@pytest.mark.attack("Ctrl-C")
@pytest.mark.parametrize("shell", [signal.default_int_handler, signal.SIG_IGN], ids=["terminal", "background"])
def test_an_interrupt_on_ray_lets_the_step_end(runs, shell):
    """A script starts a command in the background with SIGINT ignored, and what Ray starts inherits that."""
    (runs / "hold").touch()
    pressed = []

    def interrupt_once(status: StudyStatus) -> None:
        if not pressed and at_work(status):
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, shell)
    try:
        status = run(a_study(seeds=list(range(6))), runs, interrupt_once, cluster=Cluster())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not status.finished
    assert status.counts()["stopped"] >= 1
    assert "running" not in status.counts()
    stopped = next(trial for trial in status.trials if trial.state == "stopped")
    assert read_json(stopped.directory / "checkpoint.json")["step"] >= 1


def test_real_runs_on_two_nodes_of_ray_equal_those_of_workers_here(tmp_path, new_runs, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, here, there = mixed("grid")[0], new_runs(tmp_path / "here"), new_runs(tmp_path / "ray")
    run(study, here, execute=worker.EXECUTE)
    with two_ray_nodes() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        run(study, there, execute=worker.EXECUTE, cluster=Cluster())
    assert len(list((there / "studies/storm/logs").glob("worker-ray-*.log"))) >= 2  # both nodes had a worker
    check_same_values(values(there), values(here))
