"""Workers on a Ray cluster: an interrupt reaches them, and their values are those of workers here."""

import importlib.util
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import factories
import pytest
from cohort.harness.api.study import Study, launcher
from cohort.harness.base.files import read_json
from cohort.harness.base.machine import SHARED_GPU
from cohort.harness.extras.ray import launcher as ray
from cohort.harness.extras.ray.launcher import Cluster, import_ray, run_worker
from cohort.harness.settings.errors import SpecError
from cohort.harness.study import worker
from fake_trials import a_study
from queues import once_at_work, run
from test_killed import mixed, values

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs Ray")  # import_ray comes first

pytestmark = pytest.mark.usefixtures("plugins")


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
    interrupt = once_at_work(lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.signal(signal.SIGINT, shell)
    try:
        status = run(a_study(seeds=list(range(6))), runs, interrupt, cluster=Cluster())
    finally:
        signal.signal(signal.SIGINT, before)
    assert not status.finished
    assert status.counts()["stopped"] >= 1
    assert "running" not in status.counts()
    stopped = next(trial for trial in status.trials if trial.state == "stopped")
    assert read_json(stopped.directory / "checkpoint.json")["step"] >= 1


@pytest.mark.long
@needs_ray
def test_real_runs_on_two_nodes_of_ray_equal_those_of_workers_here(tmp_path, new_runs, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    study, here, there = mixed("grid"), new_runs(tmp_path / "here"), new_runs(tmp_path / "ray")
    run(study, here, execute=worker.EXECUTE)
    with two_ray_nodes() as address:
        monkeypatch.setenv("RAY_ADDRESS", address)
        run(study, there, execute=worker.EXECUTE, cluster=Cluster())
    assert len(list((there / "studies/storm/logs").glob("worker-ray-*.log"))) >= 2  # both nodes had a worker
    assert values(there) == values(here)


RTX = {"CPU": 16, "GPU": 1}
HEAD = {"CPU": 64}


@pytest.mark.parametrize(
    ("cluster", "devices", "nodes", "cores", "gpus"),
    [
        (Cluster(), 1, [HEAD, RTX], 8, 1),
        (Cluster(), 4, [HEAD, {"CPU": 128, "GPU": 8}], 32, 4),
        (Cluster(), 1, [RTX, {"CPU": 12, "GPU": 4}], 3, 1),  # all of its GPUs can work
        (Cluster(num_gpus=0.5), 1, [RTX], 4, 0.5),
        (Cluster(2), 4, [{"CPU": 128, "GPU": 8}], 8, 4),
        (Cluster(num_gpus=0), 2, [RTX], 2, 0),
        (Cluster(), 2, [HEAD], 2, 0),
    ],
)
def test_a_worker_on_ray_asks_for_8_cores_for_each_gpu_or_one_for_each_device(cluster, devices, nodes, cores, gpus):
    assert cluster.asked(devices, nodes) == {"CPU": cores, "GPU": gpus}


@pytest.mark.parametrize(("gpus", "shares"), [(0.5, True), (None, False), (0, False)])
def test_a_worker_on_ray_with_a_part_of_a_gpu_knows_that_others_have_the_rest(gpus, shares, tmp_path, monkeypatch):
    class FakeRay:
        def init(self, **settings: Any) -> None:
            pass

        def nodes(self) -> list[dict[str, Any]]:
            return [{"Resources": RTX, "Alive": True}]

        def remote(self, **settings: Any) -> Any:
            return lambda run: run

    monkeypatch.setattr(ray, "import_ray", lambda address: FakeRay())
    pool = ray.RayPool({}, 1, tmp_path, cluster=Cluster(num_gpus=gpus))
    pool._connect()
    assert (SHARED_GPU in pool.environment) == shares


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_settings_of_ray_are_cores_and_gpus_of_a_worker(device):
    study = Study("", (), factories.make_study(**{"run.devices": 2, "run.device": device}))
    assert launcher("ray", study) == Cluster(None, 0 if device == "cpu" else None)
    assert launcher("ray cpus=4 gpus=0.5", study) == Cluster(4, 0.5)
    for bad in ("cpus=-1", "cpus=1 cpus=2", "partition=gpu", "gpus=x"):
        with pytest.raises(SpecError, match="settings of launcher ray must be cpus=N or gpus=N, each once, got"):
            launcher(f"ray {bad}", study)


def test_a_node_of_ray_that_does_not_share_the_runs_folder_says_so(tmp_path):
    assert run_worker({}, 1, {worker.STORAGE: ""}, str(tmp_path / "elsewhere/logs")) == (None, platform.node())
