"""Runs a trial in this process, or in one process per device, which the parent starts, logs and ends.

Every process (rank) runs the one training loop. Rank 0 makes all decisions and calls the parent's log, and asks the
parent whether to stop. The first result, or the first error of any rank, ends them all; a rank that dies ends the
attempt, and the next one continues from the last checkpoint. Ranks find each other through a file, which all hosts
share if there are several (`hosts.py`).
"""

import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..checks.preflight import run_inputs
from ..devices import ranks
from ..devices.device import resolve_device
from ..devices.hosts import (
    INTERFACES,
    Guest,
    Share,
    gpu_environments,
    how_it_ended,
    interfaces,
    open_door,
    start_rank,
    watch_parent,
)
from ..ground.inputs import Inputs, all_expected, expecting
from ..ground.machine import hosts
from ..interfaces import RunLogger
from ..record.finished import CHECKPOINTS
from ..spec.errors import SpecError
from ..spec.run import RunSpec, parse_run
from . import loop
from .state import OWN_MODELS, Models, RunResult

POLL_SECONDS = 0.5
PATIENCE = timedelta(days=7)  # of a rank waiting for the others: the parent notices dead ranks earlier


@dataclass(frozen=True)
class Job:
    """A rank's part of a trial: arguments of `harness.run.loop.train`, its rank, and where the ranks meet."""

    spec: dict[str, Any]
    directory: Path
    cache: Path
    inputs: Inputs  # that the parent has been told to find
    rank: int
    world_size: int
    meeting: Path  # a file


def train(
    spec: RunSpec,
    directory: Path,
    log: RunLogger,
    *,
    cache: Path,
    should_stop: Callable[[], bool] = lambda: False,
    models: Models = OWN_MODELS,
) -> RunResult:
    """Like `harness.run.loop.train`, on `spec.devices` devices. ChildProcessError if one of the processes dies."""
    if spec.devices == 1:
        return loop.train(spec, directory, log, cache=cache, should_stop=should_stop, models=models)
    calls = {"should_stop": should_stop}
    with _gathered(spec, directory, cache, should_stop) as (folder, environments, guests):
        if guests is None:
            return RunResult("stopped", None, {})
        job = partial(
            Job, spec.model_dump(mode="json"), directory.resolve(), cache.resolve(), all_expected(),
            world_size=spec.devices, meeting=folder / "meeting",
        )  # fmt: skip
        with _Ranks([job(rank=rank) for rank in range(spec.devices)], environments, guests) as together:
            return together.result(lambda name, *given: (calls.get(name) or getattr(log, name))(*given))


@contextmanager
def _gathered(
    spec: RunSpec, directory: Path, cache: Path, should_stop: Callable[[], bool]
) -> Iterator[tuple[Path, list[dict[str, str]], list[Guest] | None]]:
    """The folder where the ranks meet, the changed environment variables of each rank that starts here, and the other
    hosts (None if asked to stop before they joined)."""
    place, kind = hosts(), resolve_device(spec.device).type
    here, *elsewhere = shares = place.shares(spec.devices)
    common = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // max(shares)))}
    network = interfaces(place.address) if elsewhere else {variable: loopback() for variable in INTERFACES}
    environments = [common | network | gpu for gpu in gpu_environments(kind, here)]
    if not elsewhere:
        with tempfile.TemporaryDirectory(prefix="cohort-") as folder:
            yield Path(folder), environments, []
        return
    ranks_of = [range(sum(shares[:host]), sum(shares[: host + 1])) for host in range(1, len(shares))]
    wanted = [Share(ranks, kind, common, str(Path.cwd())) for ranks in ranks_of]
    with open_door(place, cache, directory) as door:
        guests = door.wait(wanted, should_stop)
        try:
            yield door.folder, environments, guests
        finally:
            for guest in guests or ():
                guest.close()


def loopback() -> str:
    """The interface over which the processes of one host reach each other, closed to other machines."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


class _Ranks:
    """The processes of a trial, as seen by their parent; a context manager that ends them all.

    They may be killed once rank 0 has sent its result: all that the trial keeps is on disk by then.
    """

    def __init__(self, jobs: Sequence[Job], environments: Sequence[dict[str, str]], guests: Sequence[Guest] = ()):
        self.processes: dict[Connection, subprocess.Popen[bytes]] = {}
        self.guests = guests
        for environment in environments:
            ours, theirs = Pipe()
            self.processes[ours] = start_rank(theirs, {**os.environ, **environment})
            theirs.close()
        elsewhere = [connection for guest in guests for connection in guest.ranks.values()]
        self._ranks: list[Connection] = [*self.processes, *elsewhere]
        for connection, job in zip(self._ranks, jobs, strict=True):
            connection.send(job)

    def __enter__(self) -> "_Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()

    def result(self, call: Callable[..., Any]) -> RunResult:
        """The first result; `call` answers (name, *arguments) for rank 0. Raises the first error of any rank."""
        first, *_ = at_work = list(self._ranks)
        controls = [guest.control for guest in self.guests]
        while True:
            for connection in wait([*at_work, *controls]):
                assert isinstance(connection, Connection)
                if connection in controls:
                    raise self._loss() or ChildProcessError("a host of the trial went silent")
                try:
                    kind, said = connection.recv()
                except (EOFError, OSError):
                    raise self._loss() or ChildProcessError("a process of the trial went silent") from None
                if kind == "call":
                    connection.send(call(*said))
                elif isinstance(said, Exception):
                    raise self._loss() or said  # the error may follow from the death of another rank
                elif connection is first or said.state == "invalid":
                    return said
                else:
                    at_work.remove(connection)

    def _loss(self) -> ChildProcessError | None:
        """The error for a rank that died, or None: a rank that reported its own end exits with status 0."""
        time.sleep(POLL_SECONDS)  # other ranks notice a death before the system reports it
        codes = [process.poll() for process in self.processes.values()]
        all_ranks = f"of the trial's {len(self._ranks)}"
        lost = [f"process {rank} {all_ranks} {how_it_ended(code)}" for rank, code in enumerate(codes) if code]
        lost += filter(None, [guest.loss() for guest in self.guests])
        if not lost:
            return None
        return ChildProcessError(f"{lost[0]}; the trial continues from its last checkpoint when it is started again")


class _Caller:
    """A `RunLogger` whose calls the parent answers. Ranks other than 0 send nothing."""

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
    """Run a job, and send the parent its result or its error."""
    job: Job = connection.recv()
    spec = parse_run(job.spec, "a trial's own settings")
    backend = "cpu:gloo,cuda:nccl" if resolve_device(spec.device).type == "cuda" else "gloo"
    meeting = dist.FileStore(str(job.meeting), job.world_size)  # pyright: ignore[reportPrivateImportUsage]
    dist.init_process_group(backend, store=meeting, rank=job.rank, world_size=job.world_size, timeout=PATIENCE)
    caller: Any = _Caller(connection, job.rank == 0)
    try:
        with expecting(job.inputs):
            _check_same_sight(spec, job)
            end: Any = loop.train(spec, job.directory, caller, cache=job.cache, should_stop=caller.should_stop)
    except Exception as error:
        traceback.print_exc()
        end = error
    try:
        connection.send(("end", end))
    except Exception:  # a library's error that cannot be pickled
        connection.send(("end", RuntimeError(f"{type(end).__name__}: {end}")))


def _check_same_sight(spec: RunSpec, job: Job) -> None:
    """SpecError if ranks do not see the same checkpoints, models and data, because their hosts have different files."""
    checkpoints = sorted(folder.name for folder in (job.directory / CHECKPOINTS).glob("step-*"))
    seen = {"checkpoints": checkpoints, "inputs": run_inputs([spec], job.cache)}
    first = ranks.same(lambda: seen)
    for what, own in seen.items():
        alike: list[bool] = [True] * job.world_size
        dist.all_gather_object(alike, own == first[what])
        if not all(alike):
            raise SpecError(
                f"all hosts of a trial must see the same {what}, process {alike.index(False)} sees others than process "
                f"0; give all the same files (the run is in '{job.directory}')"
            )


if __name__ == "__main__":
    from . import launch  # pickled objects must belong to the module under its import name

    watch_parent(int(sys.argv[2]))
    launch.run_rank(Connection(int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # other ranks may be gone: nobody waits for the end of the group
