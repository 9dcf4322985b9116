"""Runs the workers of a study as Ray tasks, each with its share of a cluster's cores and GPUs.

A task starts the same worker process as the local launcher, so trials run the same under both. Ray only places workers:
the queue decides which trial runs where, and the leases return the trials of a node that dies. A worker has its devices
on one node. Ray is imported only for a study that uses it.
"""

import os
import platform
import re
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...base.machine import SHARED_GPU, usable_cores, usable_gpus
from ...settings.errors import SpecError
from ...study.launchers.local import CORES_PER_GPU, POLL_SECONDS, Launcher, Pool, last_words, start_worker
from ...study.worker import STORAGE

NEEDS = "ray"


def place(given: Sequence[str], wanted: int) -> "Cluster":
    """The cluster of workers with the settings cpus=N and gpus=N; without GPUs by default if none is `wanted`."""
    counts = dict(re.findall(r"^(cpus|gpus)=(\d+\.?\d*)$", "\n".join(given), re.MULTILINE))
    if len(counts) != len(given):
        raise SpecError(f"settings of launcher ray must be cpus=N or gpus=N, each once, got '{' '.join(given)}'")
    cpus, gpus = (float(counts[key]) if key in counts else None for key in ("cpus", "gpus"))
    return Cluster(cpus, 0 if gpus is None and not wanted else gpus)


def import_ray(address: str) -> Any:
    """The module `ray`, kept on the loopback interface if `address` is "local".

    Ray replaces 127.0.0.1 by the address of a network interface, unless a variable turns off clusters of several
    machines before its import. The variable is named after the systems where they are off by default.
    """
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    return ray


class RayPool(Pool):
    """Workers on a cluster, placed by Ray."""

    def _connect(self) -> None:
        address = os.environ.get("RAY_ADDRESS") or "local"
        self._ray = import_ray(address)
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": self.environment["PYTHONPATH"]}},
        }
        if address == "local":  # never on another interface than the loopback
            options |= {"include_dashboard": False, "num_cpus": usable_cores(), "num_gpus": len(usable_gpus())}
        try:
            self._ray.init(address=address, **options)
        except (ConnectionError, ValueError) as error:
            fix = "check RAY_ADDRESS, or leave it out for a cluster on this machine"
            words = str(error).splitlines()[0]
            raise SpecError(f"no Ray cluster answers at '{address}' ({words}); {fix}") from None
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cpus, gpus = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU"))
        asked = self.cluster.asked(self.devices, nodes)
        if 0 < asked["GPU"] < self.devices:
            self.environment[SHARED_GPU] = "1"
        room = sum(
            min((int(node.get(name, 0) / count + 1e-9) for name, count in asked.items() if count), default=1)
            for node in nodes
        )
        if not room:
            raise SpecError(
                f"a worker asks for {asked['CPU']:g} cores and {asked['GPU']:g} GPUs of one node, and no node of the "
                f"cluster has them (in all it has {cpus:g} and {gpus:g}); lower cpus or gpus of `launcher`"
            )
        self.size = self.size or room
        self._run = self._ray.remote(num_cpus=asked["CPU"], num_gpus=asked["GPU"], max_retries=0)(run_worker)

    def _ask_to_stop(self) -> None:
        for task in self.alive:
            self._ray.cancel(task)

    def _kill(self) -> None:
        for task in self.alive:
            self._ray.cancel(task, force=True)
        self._ray.shutdown()

    def _start(self, count: int) -> None:
        for _ in range(count):
            task = self._run.remote(self.options, self.devices, self.environment, str(self.logs))
            self.alive[task] = task

    def _end_of(self, name: Any, worker: Any) -> tuple[str, int, str] | None:
        if not self._ray.wait([worker], timeout=0)[0]:
            return None
        try:
            code, words = self._ray.get(worker)
        except self._ray.exceptions.TaskCancelledError:  # before it began
            return "a worker", 0, ""
        except self._ray.exceptions.RayError as error:  # its node died, or Ray killed it
            return "a worker", -signal.SIGKILL, str(error).splitlines()[0]
        if code is None:
            raise SpecError(
                f"the node '{words}' of the cluster does not share the runs folder '{self.options['runs']}': give "
                "the nodes a database with `storage`, or a folder on a common disk with `runs`"
            )
        return "a worker", code, words


@dataclass(frozen=True)
class Cluster(Launcher):
    """The resources of each worker: `num_gpus`, by default one for each device of its trials if the cluster has GPUs,
    and `num_cpus` for each device, by default CORES_PER_GPU for each GPU, or as many as every node has for each. The
    cluster is at RAY_ADDRESS, or else one on this machine while the study runs."""

    pool = RayPool
    num_cpus: float | None = None
    num_gpus: float | None = None

    def asked(self, devices: int, nodes: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """The cores and GPUs of one worker on a cluster whose nodes have these."""
        there = [node.get("CPU", 0) / node["GPU"] for node in nodes if node.get("GPU")]
        gpus = self.num_gpus if self.num_gpus is not None else devices if there else 0
        cores = max(devices, int(gpus * min([CORES_PER_GPU, *there])))
        return {"CPU": cores if self.num_cpus is None else self.num_cpus * devices, "GPU": gpus}


def run_worker(
    options: Mapping[str, Any], devices: int, environment: Mapping[str, str], logs: str
) -> tuple[int | None, str]:
    """Run one worker process on this node to its end; returns its exit status and the last lines of its output, or None
    and the name of a node that cannot see the study.

    It has the GPUs that Ray gave this task (CUDA_VISIBLE_DEVICES), and stops after its step when the task is cancelled.
    """
    if not environment[STORAGE] and not Path(logs).parent.exists():
        return None, platform.node()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background, where `cancel` does nothing
    file = Path(logs) / f"worker-ray-{os.getpid()}-{uuid.uuid4().hex[:6]}.log"
    process = start_worker(options, devices, environment, file)
    try:
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:  # what Ray makes of `cancel`
        process.terminate()
        process.wait()
    finally:
        process.kill()
        process.wait()
    return process.returncode, last_words(file)
