"""Serves the MLflow pages of a runs folder on this machine only, to who knows the secret in the printed address."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import extras
from ..base.stop import stop_on_signals
from .address import health, remote_uri, tracking_uri
from .follow import catch_up
from .store import WHOLE_SECONDS, answered, check_runs_folder, connect, search_runs

APP = "cohort"  # the entry point of `page.py`
SECRET = "COHORT_PAGES_SECRET"  # which the server gets in its environment, which other users cannot read
TRAINING_PAGES = "workflowType=machine_learning"  # MLflow has others, for chat agents
START_SECONDS = 120.0  # how long a server may take to start
STOPPING = "Stopping the server; Ctrl-C again stops at once."


def browse(runs: Path, port: int, show: Callable[[dict[str, str]], None]) -> str | None:
    """Serve the MLflow pages of a runs folder until Ctrl-C, with all that its records have.

    `show` gets the page of each study, the newest last, or else the one of `MLflow`. An MLflow server serves its own
    pages, so that nothing else happens then. Returns why the pages ended by themselves, or None.
    """

    def told(address: str, query: str = "") -> None:
        catch_up(runs)
        own = extras.told("pages") if remote_uri() is None else {}
        pages = {words: f"{address}/{name}{query}" for name, words in own.items()}
        bare = {"MLflow": f"{address}/{query}#/experiments?{TRAINING_PAGES}"}
        seconds = None if remote_uri() is None else WHOLE_SECONDS
        show(pages | (answered(lambda: study_pages(runs, f"{address}/{query}"), seconds) or bare))

    status, secret = None, secrets.token_urlsafe(24)
    with stop_on_signals(words=STOPPING) as should_stop:  # an exception of a handler is lost in a library's callback
        if (address := remote_uri()) is not None:
            return told(address)
        try:
            with serve_ui(runs, port, secret, should_stop) as server:
                told(f"http://127.0.0.1:{port}", f"?token={secret}")
                while (status := server.poll()) is None and not should_stop():
                    time.sleep(0.2)
        except KeyboardInterrupt:
            return None
        except RuntimeError as error:
            return str(error)
        return None if should_stop() else f"the MLflow server ended by itself with status {status}"


@contextmanager
def serve_ui(
    runs: Path, port: int, secret: str, should_stop: Callable[[], bool] = lambda: False
) -> Iterator[subprocess.Popen[bytes]]:
    """A server of the MLflow pages of `runs` on 127.0.0.1, for who knows `secret`, once it answers; creates an empty
    store if needed.

    ValueError if the port is in use, RuntimeError with the end of the server's output if it does not start,
    KeyboardInterrupt if `should_stop()` turns true first.
    """
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise ValueError(f"port {port} on 127.0.0.1 cannot be used ({reason}); choose another `port`") from None
    check_runs_folder(runs)
    connect(runs)
    place = (runs / "mlartifacts").resolve().as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    command += ["--default-artifact-root", place, "--artifacts-destination", place]
    command += ["--app-name", APP, "--uvicorn-opts", "--timeout-graceful-shutdown 1"]  # an extra's page may never end
    environment = {**os.environ, "COHORT_RUNS": str(runs.resolve()), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment |= {"MLFLOW_BACKEND_STORE_URI": tracking_uri(runs), SECRET: secret}
    with tempfile.TemporaryFile() as output:
        deadline = time.monotonic() + START_SECONDS
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while health(f"http://127.0.0.1:{port}", 2) is not None:
                if should_stop():
                    raise KeyboardInterrupt
                if process.poll() is not None or time.monotonic() > deadline:
                    output.seek(0)
                    said = output.read().decode(errors="replace")[-2000:]
                    raise RuntimeError(f"the MLflow server did not start:\n{said}")
                time.sleep(0.2)
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def study_pages(runs: Path, address: str) -> dict[str, str]:
    """The page of each study's trials at `address`, MLflow's start page, the newest last."""
    client = connect(runs)
    names = {one.experiment_id: one.name for one in client.search_experiments()}
    studies = reversed(search_runs(client, [*names], "tags.`cohort.kind` = 'study'"))
    numbers = dict.fromkeys(run.info.experiment_id for run in studies)
    return {names[number]: f"{address}#/experiments/{number}/runs?{TRAINING_PAGES}" for number in numbers}
