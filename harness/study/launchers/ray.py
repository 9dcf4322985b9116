"""Runs the workers of a study as Ray tasks, each with its share of a cluster's cores and GPUs.

A task starts the same worker process as the local launcher, so trials run the same under both. Ray only places workers:
the queue decides which trial runs where, and the leases return the trials of a node that dies. If no single node has
the devices of a trial, its worker gets a placement group: a bundle for each host of
its group of processes (`devices/launch.py`). Ray is imported only for a study that uses it.
"""

import importlib.util
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...ground.machine import HOSTS, SECRET, usable_cores, usable_gpus
from ...spec.errors import SpecError
from .local import HOME, POLL_SECONDS, Pool, with_parent, worker_command

PROBE_SECONDS = 60.0


def check_ray() -> None:
    """SpecError if Ray is not installed; imports nothing."""
    if importlib.util.find_spec("ray") is None:
        raise SpecError("--launcher ray needs Ray; pip install 'cohort-rl[ray]'")


def import_ray(address: str) -> Any:
    """The module `ray`, kept on the loopback interface if `address` is "local".

    Ray replaces 127.0.0.1 by the address of a network interface, unless a variable turns off clusters of several
    machines before its import. The variable is named after the systems where they are off by default.
    """
    check_ray()
    if address == "local":
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    import ray

    return ray


@dataclass(frozen=True)
class Cluster:
    """The cluster that runs the workers, and the resources of each worker.

    Without `address` it is the running cluster of RAY_ADDRESS, or else one on this machine for as long as the study
    runs. A worker asks for `num_cpus` for each device of its trials, and for `num_gpus`, by default one for each if the
    cluster has GPUs.
    """

    address: str | None = None
    num_cpus: float = 1
    num_gpus: float | None = None


class RayPool(Pool):
    """At most `size` workers on a cluster, placed by Ray."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        size: int | None,
        logs: Path,
        environment: Mapping[str, str],
        *,
        cluster: Cluster,
        devices: int = 1,
    ) -> None:
        super().__init__(logs)
        self._command = worker_command(module, arguments)
        self._environment = dict(environment)
        self._address = cluster.address or os.environ.get("RAY_ADDRESS") or "local"
        self._ray = import_ray(self._address)
        self._num_cpus, self._num_gpus, self._devices = cluster.num_cpus * devices, cluster.num_gpus, devices
        self._wanted_size, self.size = size, size or 0
        self._tasks: dict[Any, Any] = {}  # with its placement group
        self.hosts = 1  # of each worker

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Connect to the cluster and settle the resources of each worker; ValueError if no worker fits."""
        here = self._address == "local"
        paths = filter(None, [HOME, os.environ.get("PYTHONPATH")])
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "runtime_env": {"env_vars": {"PYTHONPATH": os.pathsep.join(paths)}},
        }
        if here:  # never on another interface than the loopback
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
        if self._num_gpus is None:
            self._num_gpus = self._devices if gpus else 0
        for hosts in range(1, self._devices + 1):  # the fewest on which one worker fits
            share = self._share(hosts)
            fit = [min((int(node.get(name, 0) / asked + 1e-9) for name, asked in share.items()), default=1)
                   for node in nodes]  # fmt: skip
            if room := sum(fit) // hosts:
                break
        else:
            raise SpecError(
                f"a worker asks for {self._num_cpus:g} cores and {self._num_gpus:g} GPUs, the cluster has {cpus:g} and "
                f"{gpus:g}; lower --cpus or --gpus"
            )
        self.hosts, self._asked = hosts, share
        self._shares = [self._devices * (i + 1) // hosts - self._devices * i // hosts for i in range(hosts)]
        self.size = self._wanted_size or room
        flag = self._ray.remote(num_cpus=0)(StopFlag)
        self._flag = flag.remote()
        num_cpus, num_gpus = share.get("CPU", 0), share.get("GPU", 0)
        self._run = self._ray.remote(num_cpus=num_cpus, num_gpus=num_gpus, max_retries=0)(run_worker)

    def _share(self, hosts: int) -> dict[str, float]:
        """The resources that a worker asks for on each host, if it has that many hosts."""
        part = math.ceil(self._devices / hosts) / self._devices
        gpus = (self._num_gpus or 0) * part
        share = {"CPU": self._num_cpus * part, "GPU": math.ceil(gpus) if gpus > 1 else gpus}
        return {name: asked for name, asked in share.items() if asked}

    def check_shared(self, runs: Path) -> None:
        """SpecError if a node of the cluster cannot see the runs folder, because it then needs another storage."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        runs.mkdir(parents=True, exist_ok=True)
        token = runs / f".seen-by-all-{uuid.uuid4().hex}"
        token.touch()
        try:
            probe = self._ray.remote(num_cpus=0, max_retries=0)(sees)
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
                + ("database with --storage postgresql://..., or a " if self.hosts == 1 else "")
                + "folder on a common disk with --runs"
            )

    def _ask_to_stop(self) -> None:
        self._flag.set.remote()

    def _kill(self) -> None:
        for task in self._tasks:
            self._ray.cancel(task, force=True)

    def fill(self, wanted: int, waiting: int = 0) -> None:
        while len(self._tasks) < min(self.size, wanted) and not self.stopping:
            group = self._ray.util.placement_group([self._asked] * self.hosts) if self.hosts > 1 else None
            run = self._run if group is None else placed(self._run, group, 0)
            task = run.remote(self._command, self._environment, str(self.logs), self._flag, group, self._shares)
            self._tasks[task] = group

    def collect(self, claims: int | None) -> int:
        self._note_claims(claims)
        if self._tasks:
            ended, _ = self._ray.wait(list(self._tasks), num_returns=len(self._tasks), timeout=0)
            for task in ended:
                group, end = self._tasks.pop(task), _end(task, self._ray)
                if group is not None:
                    self._ray.util.remove_placement_group(group)  # and with it the other hosts' tasks
                self._note_end("a worker", *end)
        return len(self._tasks)


class StopFlag:
    """An actor that holds whether the study was asked to stop."""

    def __init__(self) -> None:
        self._stop = False

    def set(self) -> None:
        self._stop = True

    def is_set(self) -> bool:
        return self._stop


def sees(file: str) -> bool:
    """Whether this node has the file."""
    return Path(file).exists()


def placed(run: Any, group: Any, bundle: int) -> Any:
    """The remote function on one of the hosts of a placement group."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    return run.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle))


def run_worker(
    command: Sequence[str],
    environment: Mapping[str, str],
    logs: str,
    flag: Any,
    group: Any = None,
    shares: Sequence[int] = (1,),
) -> tuple[int, str]:
    """Run one worker process on this node to its end; returns its exit status and the last lines of its output.

    It has the GPUs that Ray gave this task (CUDA_VISIBLE_DEVICES), and stops after its step when the flag is set. With
    a placement group it has `shares` of processes on its hosts, and ends as soon as one of the others fails.
    """
    import ray

    others = []
    if group is not None:
        with socket.socket() as free:
            free.bind(("", 0))
            place = f"{len(shares)} {ray.util.get_node_ip_address()} {free.getsockname()[1]}"
        environment = {**environment, HOSTS: place, SECRET: secrets.token_hex(32)}
        cpus, gpus = (group.bundle_specs[0].get(name, 0) for name in ("CPU", "GPU"))
        run = ray.remote(max_retries=0, num_cpus=cpus, num_gpus=gpus)(run_worker)
        for bundle in range(1, len(shares)):
            others.append(placed(run, group, bundle).remote(command, environment, logs, flag, None, shares[bundle:]))
    folder = Path(logs)
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / f"worker-ray-{os.getpid()}-{uuid.uuid4().hex[:6]}.log"
    words = [sys.executable, *with_parent(command[1:]), "--devices", str(shares[0])]
    with file.open("ab") as output:
        process = subprocess.Popen(
            words, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
    asked = False
    try:
        while process.poll() is None:
            if not asked and ray.get(flag.is_set.remote()):
                process.send_signal(signal.SIGTERM)
                asked = True
            ended, _ = ray.wait(others, num_returns=len(others), timeout=0) if others else ([], [])
            if failed := next(filter(lambda end: end[0], (_end(task, ray) for task in ended)), None):
                return failed
            time.sleep(POLL_SECONDS)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    return process.returncode, "\n".join(file.read_text(errors="replace").splitlines()[-20:])


def _end(task: Any, ray: Any) -> tuple[int, str]:
    """The exit status and the last lines of a worker that has ended."""
    try:
        return ray.get(task)
    except ray.exceptions.RayError as error:  # its node died, or Ray killed it
        return -signal.SIGKILL, str(error).splitlines()[0]
