"""Hosts of a trial as processes of this machine: torch's agents, each with a worker, forked from one warm process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from cohort.harness.devices import group
from cohort.harness.study.worker import worker_main
from ranks_at_work import begun
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch's agent does not tell it to a host that is new
ALIVE = {"keep_alive_interval": 1, "keep_alive_max_attempt": 2}  # seconds; as an option of torchrun: --rdzv-conf


@contextmanager
def host(port: int, runs: Path, output: Path, restarts: int = 0, **environment: str) -> Iterator[Any]:
    """A host whose agent starts one process of the worker; it ends with the test."""
    process = begun(torchrun, port, runs, restarts, environment, output=output)
    try:
        yield process
    finally:
        kill(process)


def torchrun(port: int, runs: Path, restarts: int, environment: dict[str, str]) -> None:
    """What `torchrun --nnodes 2 ... -m cohort study work two` does, with one process of the worker."""
    os.environ |= FRESH_STORE | environment
    config = LaunchConfig(
        2, 2, 1, run_id="two", rdzv_endpoint=f"127.0.0.1:{port}", rdzv_backend="c10d", rdzv_configs=dict(ALIVE),
        local_addr="127.0.0.1", start_method="fork", max_restarts=restarts,
    )  # fmt: skip
    elastic_launch(config, work)(runs)


def work(runs: Path) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a fork would raise an error instead
    group.LEAVE_SECONDS = 2
    worker_main("two", runs)
    own = group.join()
    if own is not None and own.rank == 0:
        own.end()  # else at the exit of a process that is no fork


def kill(host: Any) -> None:
    """All processes of a host at once."""
    agent = psutil.Process(host.pid) if host.is_alive() else None
    for process in [*agent.children(recursive=True), agent] if agent is not None else ():
        process.kill()
    host.join()
