"""Results that go to a real MLflow server arrive whole: through HTTP alone, and over an outage in the middle of a run.

COHORT_OUTAGE_SECONDS (by default 3) says for how long the server stays away; `COHORT_OUTAGE_SECONDS=120 pytest
tests/test_tracking_server.py -k killed` is the two-minute version.
"""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures.thread import _threads_queues
from contextlib import ExitStack, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import fake_trials
import pytest
from cohort.harness.mirror import address as mlflow_address
from cohort.harness.mirror import follow, store, studies, ui
from cohort.harness.mirror.follow import mirrored
from cohort.harness.mirror.store import check_runs_folder, connect
from cohort.harness.mirror.studies import fetch_study
from cohort.harness.mirror.ui import study_pages
from cohort.harness.mirror.writer import MirrorState
from cohort.harness.record.events import EVENTS
from cohort.harness.record.evidence import write_evidence
from cohort.harness.record.run import RunLog
from cohort.harness.record.study import read_study
from fake_trials import a_study, begin_study, free_port, in_mlflow
from mlflow import MlflowClient
from test_tracking import COLUMN, in_file, in_store, log_trial, open_log, traces_of, wait_for

OUTAGE_SECONDS = float(os.environ.get("COHORT_OUTAGE_SECONDS", "3"))


class Server:
    """An MLflow server over a store of its own, on a port that it keeps over a restart."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.running = folder, ExitStack()
        self.port = free_port()
        self.uri = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"]
        command += ["--default-artifact-root", "mlflow-artifacts:/"]
        command += ["--artifacts-destination", (self.folder / "mlartifacts").as_uri()]
        environment = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        self.running.callback(process.wait)
        self.running.callback(os.killpg, process.pid, signal.SIGKILL)
        wait_for(lambda: mlflow_address.health(self.uri, 2) is None)


@pytest.fixture(scope="module")
def running(tmp_path_factory, new_runs) -> Iterator[Server]:
    result = Server(new_runs(tmp_path_factory.mktemp("server")))
    with result.running:
        result.start()
        yield result


pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def server(running, monkeypatch) -> Server:
    """The server, where the results of the test go."""
    monkeypatch.setenv(mlflow_address.TRACKING_URI, running.uri)
    return running


@pytest.mark.slow
def test_a_study_is_written_and_read_through_a_server_alone(server, tmp_path, capsys):
    runs = tmp_path / "runs"
    check_runs_folder(runs)
    folder = begin_study(runs, a_study())
    log = log_trial(runs, "group_size=4", 0, "complete")
    (log.directory / "completions").mkdir()
    (log.directory / "completions" / "test-000001.jsonl").write_text("{}\n")
    (folder / "report").mkdir()
    (folder / "report" / "index.html").write_text("<p>yes")
    before = read_study(runs, "sizes")
    write_evidence(folder, before, "Yes.")
    run_id, parent = in_mlflow(runs, log.directory), in_mlflow(runs, folder)
    finite = [item for item in in_store(runs, run_id) if not math.isnan(item[2])]
    assert finite == [("kl/old", 1, sys.float_info.max), (COLUMN, 0, 0.25), (COLUMN, 1, 0.5)]
    assert capsys.readouterr().out == ""  # MLflow's client likes to print addresses, and stdout may be JSON
    shutil.rmtree(runs)
    assert study_pages(runs, f"{server.uri}/")["sizes"].startswith(f"{server.uri}/#/experiments/")
    assert not runs.exists()  # nothing was read from, or written to, a file beside the server
    note = MlflowClient(server.uri).get_run(parent).data.tags["mlflow.note.content"]
    assert note == "Do larger groups help?\n\nYes."
    fetch_study(runs, "sizes")  # as `cohort report` on a host that shares only the server
    assert repr(read_study(runs, "sizes")) == repr(before)  # text: NaN is not equal to itself
    assert (log.directory / "completions" / "test-000001.jsonl").read_text() == "{}\n"
    written = {file: file.stat().st_mtime_ns for file in runs.rglob("*") if file.suffix in (".json", ".jsonl")}
    fetch_study(runs, "sizes")
    assert in_mlflow(runs, log.directory) == run_id  # and what was fetched is not sent back
    assert all(file.stat().st_mtime_ns == time for file, time in written.items() if file.name != "mlflow.json")


def act(client: MlflowClient, run_id: str, change: dict[str, str] | tuple[str, Callable[[str], str]]) -> None:
    """Sets tags of a run, named without their prefix, or deletes those that are to be empty; or changes a file."""
    if isinstance(change, tuple):
        text = Path(client.download_artifacts(run_id, f"record/{change[0]}")).read_text()
        client.log_text(run_id, change[1](text), f"record/{change[0]}")
    for key, value in change.items() if isinstance(change, dict) else ():
        client.set_tag(run_id, f"cohort.{key}", value) if value else client.delete_tag(run_id, f"cohort.{key}")


OURS = "group_size=4-1"  # in progress on this host, and ended in MLflow
FOREIGN: dict[str, Any] = {
    **{f"the trial {name!r}": {"trial": name} for name in ("", ".", "..", "../../..", "a/b", ".hidden", "\\", "\n")},
    "a trial of another name": {"trial": "group_size=4-9"}, "another trial's name": {"trial": "group_size=2-0"},
    "no arm": {"arm": ""}, "no seed": {"seed": ""}, "a seed that is none": {"seed": "../1"},
    "another seed": {"seed": "3"}, "another study": ("run.json", lambda text: text.replace("foreign", "other")),
    "a changed number": (EVENTS, lambda text: text.replace("0.25", "0.35")),
    "no events": (EVENTS, lambda _: ""), "no JSON": ("result.json", lambda _: "{"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.attack("A run on a shared MLflow server that is no trial of the study")
def test_no_run_on_a_shared_server_costs_a_file_of_this_host(server, tmp_path, caplog, record_property):
    runs, theirs, name = tmp_path / "runs", tmp_path / "theirs", "foreign"
    study = a_study(name=name, seeds=[0, 1])
    for place in (runs, theirs):
        folder = begin_study(place, study)
        log_trial(place, "group_size=2", 0, "complete", study=name)
    shutil.copy(folder / "study.json", runs / "studies" / name)
    log_trial(theirs, "group_size=4", 1, "complete", study=name)
    (own := log_trial(runs, "group_size=4", 1, "stopped", study=name).directory / "checkpoint").write_text("ours")
    in_mlflow(theirs, folder)
    client = MlflowClient(server.uri)
    run_id = MirrorState.load(folder / "trials" / OURS).run_id

    def files() -> dict[str, bytes]:
        return {str(file.relative_to(tmp_path)): file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    for words, change in FOREIGN.items():
        known = client.get_run(run_id).data.tags
        kept = {one: Path(client.download_artifacts(run_id, f"record/{one}")).read_text()
                for one in ("run.json", EVENTS, "result.json")}  # fmt: skip
        before = files()
        act(client, run_id, change)
        caplog.clear()
        fetch_study(runs, name)
        assert files() == before, words
        said = f"run '{run_id}' in MLflow is no trial of '" in caplog.text
        assert said or words == "another trial's name", words  # that one has ended here, and nothing is fetched
        for key, value in known.items():
            client.set_tag(run_id, key, value)
        for file, text in kept.items():
            client.log_text(run_id, text, f"record/{file}")
    fetch_study(runs, name)
    assert {t.trial: t.state for t in read_study(runs, name).trials}[OURS] == "complete"
    assert own.parent.is_dir() and not own.exists()  # what was ours lies beside it, whole
    assert next(own.parent.parent.glob(f".{OURS}.*/checkpoint")).read_text() == "ours"
    record_property("tried", len(FOREIGN))


PLACES = ["file:///tmp/x", "/tmp/x", "x", "../x", "http://other/x", "s3://b/x", "mlflow-artifacts://other/x", "dbfs:/x"]


@pytest.mark.attack("An MLflow server that says where else to put files")
@pytest.mark.parametrize(
    "place", [*PLACES, "file:///allowed/../home", "file:///allowed/%2e%2e/home", "file:///allowedx"]
)
def test_a_server_chooses_no_place_for_files_but_itself_unless_the_user_allows_it(place, tmp_path, monkeypatch):
    run = {"info": {"run_id": "r", "artifact_uri": place}, "data": {}}
    wrong = ("/api", 200, {}, json.dumps({"run": run}).encode(), "")
    handler = type("Handler", (WrongServer,), {"wrong": wrong})
    (file := tmp_path / "file").write_text("secret")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COHORT_ARTIFACTS", "file:///allowed/")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as away:
        Thread(target=away.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv(mlflow_address.TRACKING_URI, f"http://127.0.0.1:{away.server_port}")
        client = connect(tmp_path)
        with pytest.raises(ValueError, match="must keep files behind itself, and says to put them at"):
            client.log_artifact(uuid.uuid4().hex, str(file))
        away.shutdown()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "plugins"]


def test_places_that_a_server_may_name(monkeypatch):
    monkeypatch.setenv(mlflow_address.TRACKING_URI, "http://server:5000/base")
    monkeypatch.setenv("COHORT_ARTIFACTS", "s3://bucket/ours")
    for place in ("mlflow-artifacts:/1/a", "mlflow-artifacts://server:5000/1", "runs:/1/a", "s3://bucket/ours/1/a"):
        mlflow_address.check_artifacts(place)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.attack("Loss of the MLflow server")
def test_a_server_that_is_killed_in_the_middle_of_a_run_loses_nothing(server, tmp_path):
    with mirrored(tmp_path, tmp_path / "train" / "run"):
        log = open_log(tmp_path)
        log_batch(log, 0, 10)
        run_id = lambda: str(MirrorState.load(log.directory).run_id)  # noqa: E731
        wait_for(lambda: run_id() not in ("", "None") and len(in_store(tmp_path, run_id())) >= 22)
        server.running.close()
        began, step = time.monotonic(), 10
        while time.monotonic() - began < OUTAGE_SECONDS:
            step += 1
            log_batch(log, step, step)
            time.sleep(min(0.1, OUTAGE_SECONDS / 30))
        server.start()
        log_batch(log, step + 1, step + 5)
        log.finish("complete", None, {})
    assert in_store(tmp_path, run_id()) == in_file(log.directory)
    assert len([key for key, *_ in in_file(log.directory) if not key.startswith("system/")]) == 2 * (step + 6)
    assert len(traces_of(tmp_path, run_id())) == 2  # of steps 0 and 10, once each


def log_batch(log: RunLog, first: int, last: int) -> None:
    for step in range(first, last + 1):
        log.metrics(step, {COLUMN: step / 1000, "seconds/step": 0.5 + step})
        if step in (0, 10):
            log.samples([fake_trials.sample(step)])


@pytest.mark.attack("Tracking address with a query")
@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("ftp://host/x", "must be http://HOST:PORT of an MLflow server, got 'ftp://host/x'"),
        ("postgresql://me@host/db", "got 'postgresql://me@host/db'"),
        ("runs/mlflow.db", "got 'runs/mlflow.db'"),
        ("http://:5000", "got 'http://:5000'"),
        ("http://host:port", "got 'http://...'"),
        ("http://host?nonsense=1", r"nothing but host, port and path, got .*; leave out what follows its '\?'"),
        ("http://host#s3cret", "nothing but host, port and path"),
        ("http://host/?password=s3cret", "nothing but host, port and path"),
        ("http://me:s3cret@host", r"got 'http://me:\*\*\*@host'; .* in MLFLOW_TRACKING_USERNAME and MLFLOW_TR"),
        ("http://127.0.0.1:9", r"server that can be used, but http://127.0.0.1:9 cannot \(.*refused\)\); start it"),
    ],
)
def test_an_address_that_is_no_store_is_refused_before_anything_runs(uri, message, tmp_path, monkeypatch):
    monkeypatch.setenv(mlflow_address.TRACKING_URI, uri)
    with pytest.raises(ValueError, match=message) as caught:
        check_runs_folder(tmp_path)
    assert "s3cret" not in str(caught.value)


# What a server may answer: the path that it answers wrongly, status, headers and body.
ANSWERS = {
    "a refusal": ("/health", 403, {}, b"Forbidden", "status 403 of"),
    "an unknown page": ("/health", 404, {}, b"<html>", "status 404 of"),
    "an error of the server": ("/health", 500, {}, b"", "status 500 of"),
    "a page for people": ("/health", 200, {}, b"<!doctype html><p>Welcome", "answers b'<!doctype html><p>We'"),
    "a redirect": ("/health", 302, {"Location": "https://me:secret@login"}, b"", r"on to https://me:\*\*\*@login"),
    "an endless answer": ("/health", 200, {"Content-Length": "99999999"}, b"O", "answers b'O'"),
    "a refusal of the API": ("/api", 403, {}, b"<html>no</html>", "error code 403"),
    "a page for the API": ("/api", 200, {}, b"<html>login</html>", "not in a valid JSON format"),
    "JSON of another program": ("/api", 200, {}, b"[1, 2]", "."),
    "an endless answer of the API": (
        "/api",
        200,
        {"Content-Length": "99999999"},
        b"{",
        r"answers too slowly \(not all",
    ),
}


class WrongServer(BaseHTTPRequestHandler):
    """Answers as MLflow does, but for the paths that begin with `wrong[0]`."""

    wrong: tuple[str, int, dict[str, str], bytes, str]

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path, status, headers, body, _ = self.wrong
        if not self.path.startswith(path):
            status, headers, body = 200, {}, b"OK"
        self.send_response(status)
        for name, value in {"Content-Type": "text/html", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body)
            while "Content-Length" in headers:  # never sent whole
                time.sleep(0.05)
                self.wfile.write(b" ")

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@pytest.mark.attack("Tracking server that answers nonsense")
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_server_that_is_none_of_mlflows_is_refused_before_anything_is_written(answer, tmp_path, monkeypatch):
    handler = type("Handler", (WrongServer,), {"wrong": ANSWERS[answer]})
    monkeypatch.setattr(store, "WHOLE_SECONDS", 3.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as wrong:
        wrong.daemon_threads = True
        Thread(target=wrong.serve_forever, args=(0.02,), daemon=True).start()
        uri = f"http://127.0.0.1:{wrong.server_port}"
        monkeypatch.setenv(mlflow_address.TRACKING_URI, uri)
        with pytest.raises(ValueError, match=f"that can be used, but {uri} cannot .*({ANSWERS[answer][4]})") as e:
            check_runs_folder(tmp_path / "runs")
        wrong.shutdown()
    assert "secret" not in str(e.value)
    assert len(str(e.value).splitlines()) == 1
    assert not (tmp_path / "runs").exists()


TAGS = {"arm": "group_size=2", "seed": "0", "trial": "group_size=2-0", "state": "complete"}
FOUND = {
    "info": {"run_id": "a" * 32, "lifecycle_stage": "active",
             "experiment_id": "1", "artifact_uri": "mlflow-artifacts:/1"},
    "data": {"tags": [{"key": f"cohort.{key}", "value": value} for key, value in TAGS.items()]},
}  # fmt: skip
API, PLACE = "/api/2.0/mlflow/runs", "/api/2.0/mlflow-artifacts/artifacts"
EXPERIMENTS = "/api/2.0/mlflow/experiments/"
RECORD = {"path": "record", "is_dir": True}
WHOLE = {f"{API}/get": {"run": FOUND}, f"{API}/search": {"runs": [FOUND]}, PLACE: {"files": [RECORD]}}


class Dripping(WrongServer):
    """A server with an ended trial, whose answers below `place` come by the byte and never to their end."""

    place: str
    asked: Event
    over: Event

    def _answer(self) -> None:
        path, _, query = self.path.partition("?")
        known = (
            WHOLE.get(path) if not query.endswith("record") else {"files": [{"path": "events.jsonl", "is_dir": False}]}
        )
        body = b"OK" if known is None else json.dumps(known).encode()
        drips = path.startswith(self.place)
        self.send_response(200)
        self.send_header("Content-Length", "99999999" if drips else str(len(body)))
        self.end_headers()
        with suppress(OSError):
            self.wfile.write(body[: 1 if drips else None])
            while drips and not self.over.wait(0.05):
                self.asked.set()
                self.wfile.write(b" ")


def at_exit() -> set[Thread]:
    """The threads for which the end of the process waits."""
    return {one for one in threading.enumerate() if not one.daemon or one in _threads_queues}


@pytest.mark.attack("Tracking server whose answers drip and never end")
@pytest.mark.parametrize("place", [*list(WHOLE)[:2], f"{PLACE}/", EXPERIMENTS])
def test_a_server_that_drips_is_left_after_a_time_and_what_is_here_is_kept(place, tmp_path, monkeypatch, caplog):
    folder = begin_study(tmp_path, a_study())
    log_trial(tmp_path, "group_size=2", 0, "stopped")
    MirrorState("token", "a" * 32).save(folder)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    asked, over, before_it = Event(), Event(), at_exit()
    handler = type("Handler", (Dripping,), {"place": place, "asked": asked, "over": over})
    store.import_mlflow()
    monkeypatch.setattr(studies, "FETCH_SECONDS", 2.0)
    monkeypatch.setattr(follow, "DRAIN_SECONDS", 0.5)
    monkeypatch.setattr(ui, "WHOLE_SECONDS", 1.0)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as slow:
        slow.daemon_threads = True
        Thread(target=slow.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv(mlflow_address.TRACKING_URI, f"http://127.0.0.1:{slow.server_port}")
        if place == EXPERIMENTS:  # where its pages are; what they lack is copied there first
            with pytest.raises(ConnectionError, match=r"answers too slowly \(not all within 1.0 s\)"):
                ui.browse(tmp_path, 1, lambda pages: pytest.fail(f"it told {pages}"))
            said = "lacks some of 'sizes'"
        else:
            fetch_study(tmp_path, "sizes")
            said = "answers too slowly (not all within 2.0 s); 'sizes' is read from the runs folder alone"
        left = at_exit() - before_it
        over.set()
        slow.shutdown()
    assert asked.is_set() and not left
    assert said in caplog.text
    now = [file for file in tmp_path.rglob("*") if file.is_file() and file.name != "mlflow.lock"]
    assert {file: file.read_bytes() for file in now} == before


@pytest.fixture
def silent(monkeypatch) -> Iterator[str]:
    """The address of a server that takes calls and never answers; patience is short."""
    monkeypatch.setattr(mlflow_address, "ANSWER_SECONDS", 0.4)
    monkeypatch.setattr(follow, "SILENT_SECONDS", 0.1)
    monkeypatch.setattr(follow, "DRAIN_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as place:
        uri = f"http://127.0.0.1:{place.getsockname()[1]}"
        monkeypatch.setenv(mlflow_address.TRACKING_URI, uri)
        yield uri


@pytest.mark.slow
@pytest.mark.attack("Tracking server that takes calls and never answers")
def test_a_silent_server_is_refused_and_a_run_that_has_begun_goes_on_says_so_once_and_loses_nothing(
    silent, tmp_path, new_runs, caplog, monkeypatch
):
    with pytest.raises(ValueError, match=rf"a server that can be used, but {silent} cannot .*\(timed out\)"):
        check_runs_folder(tmp_path / "runs")
    assert not (tmp_path / "runs").exists()
    new_runs(tmp_path)
    with mirrored(tmp_path, tmp_path / "train" / "run"), open_log(tmp_path) as log:
        log_batch(log, 0, 5)
        wait_for(lambda: "'run' goes on" in caplog.text)
        log_batch(log, 6, 39)
    wait_for(lambda: "mlflow" not in [thread.name for thread in follow.threading.enumerate()])
    store = f"the MLflow store at {silent}"
    said = [r.message for r in caplog.records if "'run' goes on" in r.message]  # those of other tests may still copy
    assert said == [
        f"{store} does not answer (timed out); 'run' goes on, and what the store misses is copied when it returns"
    ]
    with caplog.at_level("WARNING"):
        fetch_study(tmp_path, "sizes")  # as the report at a study's end, which does without
    assert "(timed out); 'sizes' is read from the runs folder alone" in caplog.text
    assert f"waiting up to 1 s for {store} to take all of" in caplog.text
    assert "everything is in" in caplog.text and "`cohort ui` copies it later" in caplog.text
    monkeypatch.delenv(mlflow_address.TRACKING_URI)
    assert in_store(tmp_path, in_mlflow(tmp_path, log.directory)) == in_file(log.directory)
    assert len([key for key, *_ in in_file(log.directory) if not key.startswith("system/")]) == 2 * 40
