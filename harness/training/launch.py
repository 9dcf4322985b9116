"""Runs a trial in this process, or in one process per device, whose parent starts them, keeps the log and ends them.

Every process (rank) runs the one training loop. Rank 0 makes all decisions and calls the parent's log, and asks the
parent whether to stop. The first result, or the first error of any rank, ends them all; a rank that dies ends the
attempt, and the next one goes on from the last checkpoint. Ranks have one host and find each other by a file.
"""

import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.inputs import all_expected, expecting
from harness.interfaces import RunLogger
from harness.machine import usable_gpus
from harness.policy.device import resolve_device
from harness.spec.run import RunSpec, parse_run
from harness.training import loop
from harness.training.run import OWN_MODELS, Models, RunResult
from harness.types import Inputs

POLL_SECONDS = 0.5
PATIENCE = timedelta(days=7)  # of a rank with the others: a dead one is the parent's to notice


@dataclass(frozen=True)
class Job:
    """A rank's part of a trial: arguments of `harness.training.loop.train`, its place, and where all meet."""

    spec: dict[str, Any]
    directory: Path
    cache: Path
    inputs: Inputs  # that the parent has been told to find
    rank: int
    world_size: int
    meeting: str  # file


def train(
    spec: RunSpec,
    directory: Path,
    log: RunLogger,
    *,
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
    models: Models = OWN_MODELS,
) -> RunResult:
    """As `harness.training.loop.train`, on `spec.devices` devices. ChildProcessError if a process of them dies."""
    if spec.devices == 1:
        return loop.train(spec, directory, log, cache=cache, should_stop=should_stop, models=models)
    calls = {"should_stop": should_stop}
    with tempfile.TemporaryDirectory(prefix="cohort-") as folder:
        job = partial(
            Job, spec.model_dump(mode="json"), directory, cache, all_expected(), world_size=spec.devices,
            meeting=f"{folder}/meeting",
        )  # fmt: skip
        with _Ranks([job(rank=rank) for rank in range(spec.devices)], _environments(spec)) as ranks:
            return ranks.result(lambda name, *given: (calls.get(name) or getattr(log, name))(*given))


def _environments(spec: RunSpec) -> list[dict[str, str]]:
    """What differs from this process's environment, for each rank: one GPU, its share of the cores."""
    threads = max(1, torch.get_num_threads() // spec.devices)
    common = {"OMP_NUM_THREADS": str(threads), "GLOO_SOCKET_IFNAME": loopback(), "NCCL_SOCKET_IFNAME": loopback()}
    if resolve_device(spec.device).type != "cuda":
        return [common] * spec.devices
    return [{**common, "CUDA_VISIBLE_DEVICES": gpu} for gpu in usable_gpus()[: spec.devices]]


def _command(descriptor: int) -> list[str]:
    """The command of a rank, which has its end of a pipe under that descriptor."""
    return [sys.executable, "-P", "-m", __name__, str(descriptor), str(os.getpid())]


def loopback() -> str:
    """The interface by which the processes of one host reach each other and nobody else does."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


class _Ranks:
    """The processes of a trial, as seen by their parent; a context that leaves none behind.

    They may be killed once rank 0 has told its result: what the trial keeps is on disk by then.
    """

    def __init__(self, jobs: Sequence[Job], environments: Sequence[dict[str, str]]):
        self.processes: dict[Connection, subprocess.Popen[bytes]] = {}
        for job, environment in zip(jobs, environments, strict=True):
            ours, theirs = Pipe()
            self.processes[ours] = subprocess.Popen(
                _command(theirs.fileno()),
                env={**os.environ, **environment},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            theirs.close()
            ours.send(job)

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def result(self, call: Callable[..., Any]) -> RunResult:
        """The result that decides; `call` answers (name, *arguments) for rank 0. Raises what a rank raised."""
        first, *_ = at_work = list(self.processes)
        while True:
            for connection in wait(at_work):
                assert isinstance(connection, Connection)
                try:
                    kind, said = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise self._loss() or ChildProcessError("a process of the trial went silent") from None
                if kind == "call":
                    connection.send(call(*said))
                elif isinstance(said, Exception):
                    raise self._loss() or said  # it may have come from losing sight of the dead
                elif connection is first or said.state == "invalid":
                    return said
                else:
                    at_work.remove(connection)

    def _loss(self) -> ChildProcessError | None:
        """The death of a rank, if one has died: a rank that could say how it ended, ends with status 0."""
        time.sleep(POLL_SECONDS)  # the dead are seen by the others before they are by the system
        codes = [process.poll() for process in self.processes.values()]
        for rank, code in enumerate(codes):
            if code:
                how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
                return ChildProcessError(
                    f"process {rank} of the trial's {len(codes)} {how}; the trial goes on from its last checkpoint "
                    "when it is started again"
                )
        return None


class _Caller:
    """A `RunLogger` whose calls the parent answers. On ranks other than 0 nothing is said."""

    def __init__(self, connection: Connection, is_first: bool):
        self._connection, self._is_first = connection, is_first

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._call, name)

    def _call(self, *call: Any) -> Any:
        if not self._is_first:
            return None
        self._connection.send(("call", call))
        return self._connection.recv()


def run_rank(connection: Connection) -> None:
    """Run a job, and tell the parent its result or its error."""
    job: Job = connection.recv()
    spec = parse_run(job.spec, "a trial's own settings")
    backend = "cpu:gloo,cuda:nccl" if resolve_device(spec.device).type == "cuda" else "gloo"
    dist.init_process_group(
        backend, f"file://{job.meeting}", rank=job.rank, world_size=job.world_size, timeout=PATIENCE
    )
    caller: Any = _Caller(connection, job.rank == 0)
    try:
        with expecting(job.inputs):
            end: Any = loop.train(spec, job.directory, caller, cache=job.cache, should_stop=caller.should_stop)
    except Exception as error:
        traceback.print_exc()
        end = error
    try:
        connection.send(("end", end))
    except Exception:  # an error of a library that cannot be sent
        connection.send(("end", RuntimeError(f"{type(end).__name__}: {end}")))


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(4)


if __name__ == "__main__":
    from harness.training import launch  # what is sent belongs to the module by its name

    threading.Thread(target=_watch_parent, args=(int(sys.argv[2]),), daemon=True).start()
    launch.run_rank(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # other ranks may be gone: nobody waits for the end of the group
