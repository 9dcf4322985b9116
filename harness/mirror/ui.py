"""Serves the MLflow pages of a runs folder on this machine only."""

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import IO, Self

from .address import health, tracking_uri
from .store import TRAINING_PAGES, check_runs_folder, connect, own_store

log = logging.getLogger(__name__)
APP = "cohort"  # the entry point of `page.py`
START_SECONDS = 120.0  # how long a server may take to start


@dataclass(frozen=True)
class UIServer:
    """A running `mlflow server`; closing it ends its processes."""

    address: str
    process: subprocess.Popen[bytes]
    scratch: tempfile.TemporaryDirectory[str] | None = None  # deleted with the server

    @property
    def url(self) -> str:
        """The page that lists the experiments."""
        return f"{self.address}/#/experiments?{TRAINING_PAGES}"

    def wait(self, should_stop: Callable[[], bool]) -> int | None:
        """Block until the server ends (its exit status) or `should_stop()` turns true (None)."""
        while (status := self.process.poll()) is None and not should_stop():
            time.sleep(0.2)
        return status

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self.scratch is not None:
            self.scratch.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_ui(runs: Path, port: int, should_stop: Callable[[], bool] = lambda: False) -> UIServer:
    """A server of the MLflow pages of `runs` on 127.0.0.1, once it answers; creates an empty store if needed.

    For a copied or moved runs folder it shows the store as it is now. ValueError if the port is in use, RuntimeError
    with the end of the server's output if it does not start, KeyboardInterrupt if `should_stop()` turns true first.
    """
    check_port(port)
    check_runs_folder(runs, only_read=True)
    connect(runs)
    scratch = tempfile.TemporaryDirectory(prefix="cohort-ui-")
    uri = own_store(runs, Path(scratch.name))
    if uri != tracking_uri(runs):
        log.warning("'%s' is a copy: its pages show it as it is now, and changes made there are lost", runs)
    return replace(start_server(uri, runs / "mlartifacts", port, should_stop, views=True), scratch=scratch)


def start_server(
    uri: str,
    artifacts: Path,
    port: int,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    proxied: bool = False,
    views: bool = False,
) -> UIServer:
    """An `mlflow server` for the database at `uri`, on 127.0.0.1, once it answers; same errors as `serve_ui`.

    With `proxied`, artifacts are written and read through the server, as from another machine. With `views`, the pages
    show studies as described in `page.py`.
    """
    place = artifacts.resolve().as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--default-artifact-root", "mlflow-artifacts:/" if proxied else place, "--artifacts-destination", place]
    if views and entry_points(group="mlflow.app", name=APP):  # an editable install may predate the entry point
        command += ["--app-name", APP]
    environment = {
        **os.environ,
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_BACKEND_STORE_URI": uri,  # in the environment, because other users can read the arguments of a process
    }
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        server = UIServer(f"http://127.0.0.1:{port}", process)
        try:
            _wait_until_up(server, output, time.monotonic() + START_SECONDS, should_stop)
        except BaseException:
            server.close()
            raise
    return server


def _wait_until_up(server: UIServer, output: IO[bytes], deadline: float, should_stop: Callable[[], bool]) -> None:
    while health(server.address, 2) is not None:
        if should_stop():
            raise KeyboardInterrupt
        if server.process.poll() is not None or time.monotonic() > deadline:
            output.seek(0)
            raise RuntimeError(f"the MLflow server did not start:\n{output.read().decode(errors='replace')[-2000:]}")
        time.sleep(0.2)


def check_port(port: int) -> None:
    """ValueError if a server cannot listen on 127.0.0.1:port."""
    with closing(socket.socket(socket.AF_INET, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise ValueError(
                f"port {port} on 127.0.0.1 cannot be used ({error.strerror}); choose another with --port"
            ) from None
