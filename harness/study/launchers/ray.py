"""Runs the workers of a study as Ray tasks, each with its share of a cluster's cores and GPUs.

A task starts the same worker process as the local launcher, so trials run the same under both. Ray only places workers:
the queue decides which trial runs where, and the leases return the trials of a node that dies. A worker has its devices
on one node. Ray is imported only for a study that uses it.
"""

import os
import signal
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ground.machine import usable_cores, usable_gpus
from ...spec.errors import SpecError
from .local import HOME, POLL_SECONDS, Pool, last_words, start_worker

PROBE_SECONDS = 60.0


def import_ray(address: str) -> Any:
    """The module `ray`, kept on the loopback interface if `address` is "local".

    Ray replaces 127.0.0.1 by the address of a network interface, unless a variable turns off clusters of several
    machines before its import. The variable is named after the systems where they are off by default.
    """
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    return ray


@dataclass(frozen=True)
class Cluster:
    """What each worker asks for: `num_cpus` for each device of its trials, and `num_gpus`, by default one for each if
    the cluster has GPUs. The cluster is that of RAY_ADDRESS, or else one on this machine while the study runs."""

    num_cpus: float = 1
    num_gpus: float | None = None


class RayPool(Pool):
    """At most `size` workers on a cluster, placed by Ray."""

    def __init__(
        self,
        arguments: Sequence[str],
        size: int | None,
        logs: Path,
        environment: Mapping[str, str],
        *,
        cluster: Cluster,
        devices: int = 1,
    ) -> None:
        super().__init__(logs)
        self._arguments, self._environment, self._devices = arguments, dict(environment), devices
        self._cluster, self._wanted_size, self.size = cluster, size, size or 0
        self._address = os.environ.get("RAY_ADDRESS") or "local"
        self._ray = import_ray(self._address)
        self._tasks: list[Any] = []

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster and settle the resources of each worker; ValueError if no worker fits."""
        paths = filter(None, [HOME, os.environ.get("PYTHONPATH")])
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        }
        if self._address == "local":  # never on another interface than the loopback
            options |= {"include_dashboard": False, "num_cpus": usable_cores(), "num_gpus": len(usable_gpus())}
        try:
            self._ray.init(address=self._address, **options)
        except (ConnectionError, ValueError) as error:
            raise SpecError(
                f"no Ray cluster answers at '{self._address}' ({str(error).splitlines()[0]}); check RAY_ADDRESS, or "
                "leave it out for a cluster on this machine"
            ) from None
        try:
            self._settle()
            yield
        finally:
            self._ray.shutdown()

    def _settle(self) -> None:
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        cpus, gpus = (sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU"))
        asked_gpus = self._cluster.num_gpus
        if asked_gpus is None:
            asked_gpus = self._devices if gpus else 0
        asked = {"CPU": self._cluster.num_cpus * self._devices, "GPU": asked_gpus}
        room = sum(
            min((int(node.get(name, 0) / count + 1e-9) for name, count in asked.items() if count), default=1)
            for node in nodes
        )
        if not room:
            raise SpecError(
                f"a worker asks for {asked['CPU']:g} cores and {asked_gpus:g} GPUs of one node, and no node of the "
                f"cluster has them (in all it has {cpus:g} and {gpus:g}); lower --cpus or --gpus"
            )
        self.size = self._wanted_size or room
        self._flag = self._ray.remote(num_cpus=0)(StopFlag).remote()
        self._run = self._ray.remote(num_cpus=asked["CPU"], num_gpus=asked_gpus, max_retries=0)(run_worker)

    def check_shared(self, runs: Path) -> None:
        """SpecError if a node of the cluster cannot see the runs folder, because it then needs another storage."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        runs.mkdir(parents=True, exist_ok=True)
        token = runs / f".seen-by-all-{uuid.uuid4().hex}"
        token.touch()
        try:
            probe = self._ray.remote(num_cpus=0, max_retries=0)(os.path.exists)
            nodes = [node["NodeID"] for node in self._ray.nodes() if node["Alive"]]
            answers = [
                probe.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote(str(token))
                for node in nodes
            ]
            blind = self._ray.get(answers, timeout=PROBE_SECONDS).count(False)
        finally:
            token.unlink()
        if blind:
            raise SpecError(
                f"{blind} of the cluster's {len(nodes)} nodes do not share the runs folder '{runs}': give them a "
                "database with --storage postgresql://..., or a folder on a common disk with --runs"
            )

    def _ask_to_stop(self) -> None:
        self._flag.set.remote()

    def _kill(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)

    def fill(self, wanted: int, waiting: int = 0) -> None:
        while len(self._tasks) < min(self.size, wanted) and not self.stopping:
            task = self._run.remote(self._arguments, self._devices, self._environment, str(self.logs), self._flag)
            self._tasks.append(task)

    def collect(self, claims: int | None) -> int:
        self._note_claims(claims)
        if self._tasks:
            ended, self._tasks = self._ray.wait(self._tasks, num_returns=len(self._tasks), timeout=0)
            for task in ended:
                try:
                    code, words = self._ray.get(task)
                except self._ray.exceptions.RayError as error:  # its node died, or Ray killed it
                    code, words = -signal.SIGKILL, str(error).splitlines()[0]
                self._note_end("a worker", code, words)
        return len(self._tasks)


class StopFlag:
    """An actor that holds whether the study was asked to stop."""

    def __init__(self) -> None:
        self._stop = False

    def set(self) -> None:
        self._stop = True

    def is_set(self) -> bool:
        return self._stop


def run_worker(
    arguments: Sequence[str], devices: int, environment: Mapping[str, str], logs: str, flag: Any
) -> tuple[int, str]:
    """Run one worker process on this node to its end; returns its exit status and the last lines of its output.

    It has the GPUs that Ray gave this task (CUDA_VISIBLE_DEVICES), and stops after its step when the flag is set.
    """
    import ray

    file = Path(logs) / f"worker-ray-{os.getpid()}-{uuid.uuid4().hex[:6]}.log"
    process = start_worker(arguments, devices, environment, file)
    asked = False
    try:
        while process.poll() is None:
            if not asked and ray.get(flag.is_set.remote()):
                process.terminate()
                asked = True
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, last_words(file)
