"""Runs the worker processes of a study: starts them with their share of the cores, replaces dead ones, stops all
together."""

import itertools
import logging
import os
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ...ground.disk import EXIT_STATUS, full
from ...ground.machine import usable_cores, usable_gpus
from ...ground.stop import StopRequest, stop_on_signals

MODULE = "cohort.harness.study.worker"
POLL_SECONDS = 0.5
MAX_CRASHES, MAX_KILLS = 3, 20  # number of workers that may die before any claims a trial
HOME = str(Path(__file__).absolute().parents[3])  # a worker imports this code from any working directory
log = logging.getLogger(__name__)


def start_worker(
    arguments: Sequence[str], devices: int, environment: Mapping[str, str], log_file: Path
) -> subprocess.Popen[bytes]:
    """Start a worker process, which stops after its step if this process dies; its output goes to `log_file`."""
    command = [sys.executable, "-P", "-m", MODULE, *arguments, "--parent", str(os.getpid())]
    command += ["--devices", str(devices)] if devices > 1 else []
    defaults = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command, env={**defaults, **os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=output, start_new_session=True,
        )  # fmt: skip


def last_words(log_file: Path) -> str:
    """The last lines of a worker's output."""
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])


class WorkersCrash(ChildProcessError, RuntimeError):
    """Workers end before they can start a trial; the message has the last output of one."""


class Pool(ABC):
    """The workers of a study on any machine: a signal stops all of them, and too many crashes end the study."""

    size: int

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self._stop = StopRequest()
        self._claims = 0
        self._ended_early: Counter[str] = Counter()

    @abstractmethod
    def fill(self, wanted: int, waiting: int = 0) -> None:
        """Start as many workers as fit and are needed; `waiting` of the `left` trials wait."""

    @abstractmethod
    def collect(self, claims: int | None) -> int:
        """Number of living workers. WorkersCrash if they keep dying before they claim a trial, DiskFull if one met a
        full disk.

        `claims` is the number of attempts so far, None if the storage does not answer.
        """

    @abstractmethod
    def _ask_to_stop(self) -> None: ...

    @abstractmethod
    def _kill(self) -> None: ...

    @contextmanager
    def signals(self, *, scheduled: bool = False) -> Iterator[StopRequest]:
        """Stop on SIGINT and SIGTERM (at once on a second one; see `stop_on_signals`), and always leave no worker
        behind."""
        try:
            with stop_on_signals(self._ask_to_stop, scheduled=scheduled) as self._stop:
                yield self._stop
        finally:
            self._kill()

    @property
    def stopping(self) -> bool:
        return self._stop.is_set()

    def rest(self, seconds: float) -> None:
        """Wait for `seconds` (at least POLL_SECONDS), or until a signal asks to stop."""
        time.sleep(POLL_SECONDS)
        if not self.stopping:
            self._stop.wait(seconds - POLL_SECONDS)

    def _note_end(self, worker: str, code: int, words: str) -> None:
        """Record a worker's exit status (negative for a signal) and last output.

        DiskFull if it met a full disk, WorkersCrash if too many ended before any claimed a trial.
        """
        if not code:
            return
        if code == EXIT_STATUS:
            raise full(self.logs)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        log.warning("%s %s:\n%s", worker, how, words)
        self._ended_early["killed" if code < 0 else "crashed"] += 1
        most_kills = MAX_KILLS + self.size  # a host that dies ends all its workers
        if self._ended_early["crashed"] >= MAX_CRASHES or self._ended_early["killed"] >= most_kills:
            words = f"workers end before they can start a trial; the last one {how}:\n{words}\n({worker})"
            raise WorkersCrash(words)

    def _note_claims(self, claims: int | None) -> None:
        if claims is not None and claims != self._claims:
            self._claims = claims
            self._ended_early.clear()


class WorkerPool(Pool):
    """At most `size` worker processes of this machine, each with `devices` GPUs and a log file in `logs` that begins
    with `name`."""

    def __init__(
        self,
        arguments: Sequence[str],
        size: int,
        logs: Path,
        environment: Mapping[str, str] = {},
        devices: int = 1,
        name: str = "worker",
    ) -> None:
        super().__init__(logs)
        self.size, self._name = size, name
        self._arguments, self._environment, self._devices = arguments, environment, devices
        self._alive: dict[int, subprocess.Popen[bytes]] = {}

    def _ask_to_stop(self) -> None:
        for process in self._alive.values():
            process.terminate()

    def _kill(self) -> None:
        for process in self._alive.values():
            process.kill()
            process.wait()

    def fill(self, wanted: int, waiting: int = 0) -> None:
        # A worker's threads depend only on `size`, so that a continued trial sums in the same order.
        threads = str(max(1, usable_cores() // self.size))
        paths = os.pathsep.join(filter(None, [HOME, os.environ.get("PYTHONPATH")]))
        gpus = usable_gpus()
        while len(self._alive) < min(self.size, wanted) and not self.stopping:
            slot = next(slot for slot in itertools.count() if slot not in self._alive)
            environment = {**self._environment, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths}
            if gpus:
                first = slot % max(1, len(gpus) // self._devices) * self._devices
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + self._devices])
            self._alive[slot] = start_worker(self._arguments, self._devices, environment, self._log_file(slot))

    def collect(self, claims: int | None) -> int:
        self._note_claims(claims)
        for slot, process in list(self._alive.items()):
            code = process.poll()
            if code is not None:
                del self._alive[slot]
                file = self._log_file(slot)
                self._note_end(f"worker {slot} (its full output is in {file})", code, last_words(file))
        return len(self._alive)

    def _log_file(self, slot: int) -> Path:
        return self.logs / f"{self._name}-{slot}.log"


def default_workers(devices: int = 1) -> int:
    """One worker per GPU, or else per core; with several devices per trial, one per that many."""
    return max(1, (len(usable_gpus()) or usable_cores()) // devices)
