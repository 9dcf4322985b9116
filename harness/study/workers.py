"""Runs the worker processes of a study: starts them with their share of the cores, replaces dead ones, stops all."""

import itertools
import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..base.disk import EXIT_STATUS, UNFIT, full
from ..base.machine import SHARED_GPU, WORKER, allocator, python_path, usable_cores, usable_gpus
from ..base.stop import StopRequest, stop_on_signals
from ..settings.errors import SpecError

MODULE = "cohort.harness.study.worker"
POLL_SECONDS = 0.5
MAX_CRASHES, MAX_KILLS = 3, 20  # number of workers that may die, or find no fit machine, before any claims a trial
log = logging.getLogger(__name__)


def start_worker(
    options: Mapping[str, Any], devices: int, environment: Mapping[str, str], log_file: Path
) -> subprocess.Popen[bytes]:
    """Start a worker process, which stops after its step if this process dies; its output goes to `log_file`."""
    command = [sys.executable, "-P", "-m", MODULE, json.dumps({**options, "devices": devices, "parent": os.getpid()})]
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("ab") as output:
        return subprocess.Popen(
            command, env={**WORKER, **allocator(), **os.environ, **environment}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip


def last_words(log_file: Path) -> str:
    """The last lines of a worker's output."""
    return "\n".join(log_file.read_text(errors="replace").splitlines()[-20:])


class WorkersCrash(ChildProcessError, RuntimeError):
    """Workers end before they can start a trial; the message has the last output of one."""


class WorkerPool:
    """At most `size` workers of a study on this machine, each with `devices` GPUs and a log file whose name begins with
    `prefix`: a signal stops all of them, and too many crashes end the study.

    `options` go to `worker_main`; the `environment` has values that must not stand among a process's arguments.
    """

    prefix = "worker"

    def __init__(
        self, options: Mapping[str, Any], size: int, logs: Path, environment: Mapping[str, str] = {}, devices: int = 1
    ) -> None:
        self.options, self.size, self.logs, self.devices = options, size, logs, devices
        self.environment = {**environment, "PYTHONPATH": python_path()}
        self.alive: dict[int, subprocess.Popen[bytes]] = {}  # by number
        self.stop = StopRequest()
        self._claims = 0
        self._ended_early: Counter[str] = Counter()

    def fill(self, wanted: int, waiting: int = 0) -> None:
        """Start as many workers as fit and as `wanted` trials need, of which some are `waiting` for a worker."""
        missing = min(self.size, wanted) - len(self.alive)
        if missing > 0 and not self.stop.is_set():
            self._start(missing)

    def collect(self, claims: int | None) -> int:
        """Number of living workers. WorkersCrash if they keep dying before they claim a trial, DiskFull if one met a
        full disk, SpecError if no machine that was tried can run the study.

        `claims` is the number of attempts so far, None if the storage does not answer.
        """
        if claims is not None and claims != self._claims:
            self._claims = claims
            self._ended_early.clear()
        for name, worker in list(self.alive.items()):
            end = self._end_of(name, worker)
            if end is not None:
                del self.alive[name]
                self._note_end(*end)
        return len(self.alive)

    @contextmanager
    def running(self, *, scheduled: bool = False) -> Iterator[StopRequest]:
        """Stop on SIGINT and SIGTERM (at once on a second one; see `stop_on_signals`), and always leave no worker
        behind."""
        try:
            with stop_on_signals(self._ask_to_stop, scheduled=scheduled) as self.stop:
                yield self.stop
        finally:
            self._kill()

    def rest(self, seconds: float) -> None:
        """Wait for `seconds` (at least POLL_SECONDS), or until a signal asks to stop."""
        time.sleep(POLL_SECONDS)
        self.stop.wait(seconds - POLL_SECONDS)

    def _note_end(self, worker: str, code: int, words: str) -> None:
        """Count a worker that ended badly. DiskFull, WorkersCrash and SpecError: see `collect`."""
        if not code:
            return
        if code == EXIT_STATUS:
            raise full(self.logs)
        if code == UNFIT:
            self.size -= 1
            self._ended_early["unfit"] += 1
            reason = words.rpartition("Error: ")[2].partition("\n")[0]
            if not self.size or (not self._claims and self._ended_early["unfit"] >= MAX_CRASHES):
                raise SpecError(reason)
            log.warning("%s cannot run the study on its machine, one worker fewer: %s", worker, reason)
            return
        how = f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"
        log.warning("%s %s:\n%s", worker, how, words)
        self._ended_early["killed" if code < 0 else "crashed"] += 1
        most_kills = MAX_KILLS + self.size  # a host that dies ends all its workers
        if self._ended_early["crashed"] >= MAX_CRASHES or self._ended_early["killed"] >= most_kills:
            words = f"workers end before they can start a trial; the last one {how}:\n{words}\n({worker})"
            raise WorkersCrash(words)

    def _ask_to_stop(self) -> None:
        for process in self.alive.values():
            process.terminate()

    def _kill(self) -> None:
        for process in self.alive.values():
            process.kill()
            process.wait()

    def _start(self, count: int) -> None:
        # A worker's threads depend only on `size`, so that a continued trial sums in the same order.
        environment = {**self.environment, "OMP_NUM_THREADS": str(max(1, usable_cores() // self.size))}
        gpus = usable_gpus()
        free = (slot for slot in itertools.count() if slot not in self.alive)
        for slot in itertools.islice(free, count):
            if gpus:
                groups = max(1, len(gpus) // self.devices)
                first = slot % groups * self.devices
                environment |= {SHARED_GPU: "1"} if self.size > groups else {}
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first : first + self.devices])
            self.alive[slot] = start_worker(self.options, self.devices, environment, self._log_file(slot))

    def _end_of(self, name: int, worker: subprocess.Popen[bytes]) -> tuple[str, int, str] | None:
        code, file = worker.poll(), self._log_file(name)
        return None if code is None else (f"worker {name} (its full output is in {file})", code, last_words(file))

    def _log_file(self, slot: int) -> Path:
        return self.logs / f"{self.prefix}-{slot}.log"
