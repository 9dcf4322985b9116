"""Notices reach a webhook or a command, a failure costs a warning, and the address stays a secret."""

import functools
import json
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import fake_trials
import pytest
from cohort.harness.api import reporting, study
from cohort.harness.extras.live.pages import LiveStudy
from cohort.harness.extras.notices import notices
from cohort.harness.mirror.address import MIRROR
from cohort.harness.study import runner
from fake_trials import a_study


@pytest.fixture
def hook() -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """A webhook's address, and what it was sent: path and document. `/moved` sends on, `/silent` never answers."""
    got, never = [], threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            if self.path == "/silent":
                never.wait()
            self.send_response(302 if self.path == "/moved" else 200)
            self.send_header("Location", "/secret")
            self.end_headers()

        def do_GET(self) -> None:
            got.append((self.path, None))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", got
    never.set()
    server.shutdown()
    thread.join()


def test_a_command_gets_each_notice_on_its_standard_input(tmp_path, monkeypatch):
    keep = tmp_path / "keep.py"
    keep.write_text("import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + '\\n'); print('x' * 10**6)")
    monkeypatch.setenv(notices.NOTIFY, f"'{sys.executable}' '{keep}' '{tmp_path / 'a $(b).txt'}'")
    with notices.notices("sizes") as notify:
        notify("trial failed", "one", seed=1)
        notify("study ended", "two")
    found = [json.loads(line) for line in (tmp_path / "a $(b).txt").read_text().splitlines()]
    assert found == [
        {"study": "sizes", "event": "trial failed", "text": "one", "seed": 1},
        {"study": "sizes", "event": "study ended", "text": "two"},
    ]


@pytest.mark.parametrize(
    ("where", "words"),
    [
        ("{hook}/silent", "COHORT_NOTIFY did not accept all notices"),
        ("{hook}/moved", "did not reach what COHORT_NOTIFY names (HTTPError)"),
        ("http://127.0.0.1:1/s3cret", "did not reach what COHORT_NOTIFY names (URLError)"),
        ("http://[s3cret/", "did not reach what COHORT_NOTIFY names"),
        ("false s3cret", "did not reach what COHORT_NOTIFY names (1)"),
        ("{python} -c 'import signal; signal.pause()' s3cret", "what COHORT_NOTIFY names (TimeoutExpired)"),
    ],
)  # fmt: skip
@pytest.mark.attack("A webhook or command of notices that fails")
def test_a_notice_that_fails_costs_a_warning_without_the_address(where, words, hook, monkeypatch, caplog):
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0.1 if "pause" in where else 60.0)
    monkeypatch.setenv(notices.NOTIFY, where.replace("{hook}", hook[0]).replace("{python}", sys.executable))
    with notices.notices("sizes") as notify:
        notify("study ended", "two")
        while "pause" in where and not caplog.text:
            time.sleep(0.01)
        while "silent" in where and not hook[1]:  # until it is asked, and waited for 60 s
            time.sleep(0.01)
        if "silent" in where:
            monkeypatch.setattr(notices, "NOTICE_SECONDS", 0.1)  # for what is left at the end
    assert words in caplog.text
    assert "s3cret" not in caplog.text
    assert "/secret" not in [path for path, _ in hook[1]]  # nothing is sent on


def test_a_study_that_an_error_ends_is_told_and_bad_input_is_not(hook, monkeypatch):
    monkeypatch.setenv(notices.NOTIFY, hook[0])
    for error in (ValueError("steps must be at least 1"), RuntimeError("workers crash")):
        with pytest.raises(type(error)), notices.notices("sizes"):
            raise error
    text = "sizes ended by an error: workers crash"
    assert hook[1] == [("/", {"study": "sizes", "event": "study ended", "text": text, "error": "RuntimeError"})]


@pytest.mark.parametrize("where", ["no-such-command --x", "ftp://host/x", "https:/host", "'open"])
def test_what_is_neither_a_url_nor_a_command_is_refused(where, monkeypatch):
    monkeypatch.setenv(notices.NOTIFY, where)
    with pytest.raises(ValueError, match="COHORT_NOTIFY must be"), notices.notices("sizes"):
        pass


@pytest.mark.slow
def test_a_study_tells_of_invalid_trials_decided_claims_and_its_end(runs, plugins, hook, monkeypatch):
    secret = uuid.uuid4().hex  # in no text that a record could quote
    monkeypatch.setenv(notices.NOTIFY, f"{hook[0]}/{secret}")
    monkeypatch.setenv(MIRROR, "none")
    files = SimpleNamespace(answer="An answer.", claims=[("A is better.", "supported"), ("B is.", "undecided")])
    monkeypatch.setattr(reporting, "write_report", lambda *_: (None, files))
    monkeypatch.setattr(runner, "run_study", functools.partial(runner.run_study, execute=fake_trials.EXECUTE))
    spec = a_study(seeds=[0], factors={"optimizer.weight_decay": [0.0, 0.1]})
    again = study.Study("sizes", (), spec, "cohort study run sizes")
    study.run_to_report(again, runs, 1)
    assert {path for path, _ in hook[1]} == {f"/{secret}"}
    failed, claim, end = [document for _, document in hook[1]]
    assert (failed["event"], failed["seed"], failed["state"]) == ("trial failed", 0, "invalid")
    assert failed["text"] == f"sizes: {failed['arm']} | seed 0 is invalid: policy/loss is NaN at step 2"
    assert (runs / "studies/sizes/trials" / failed["trial"]).is_dir()
    assert (claim["event"], claim["claim"], claim["verdict"]) == ("claim decided", "A is better.", "supported")
    assert (end["event"], end["counts"]) == ("study ended", {"complete": 1, "invalid": 1})
    assert (end["text"], end["answer"]) == ("sizes: An answer.", "An answer.")
    written = [file for file in runs.rglob("*") if file.is_file()]
    assert len(written) > 10
    assert not [file for file in written if secret.encode() in file.read_bytes()]
    study.run_to_report(again, runs, 1)  # the invalid trial was told then
    assert [document["event"] for _, document in hook[1]][3:] == ["claim decided", "study ended"]


SECRETS = ("COHORT_SECRET", "COHORT_NOTIFY", "MLFLOW_TRACKING_PASSWORD", "MLFLOW_TRACKING_TOKEN", "HF_TOKEN",
           "WANDB_API_KEY", "PGPASSWORD")  # fmt: skip


@pytest.mark.slow
@pytest.mark.attack("A secret in the environment of a study")
def test_no_secret_of_the_environment_is_in_a_log_record_tag_or_page(
    runs, plugins, monkeypatch, caplog, capfd, record_property
):
    planted = {name: uuid.uuid4().hex for name in SECRETS}
    for name, secret in planted.items():
        monkeypatch.setenv(name, secret)
    command = f"{sys.executable} -c 'import signal; signal.pause()' {planted['COHORT_NOTIFY']}"
    monkeypatch.setenv(notices.NOTIFY, command)
    monkeypatch.setattr(notices, "NOTICE_SECONDS", 0.1)
    monkeypatch.setenv("COHORT_RUNS", str(runs))
    monkeypatch.setattr(runner, "run_study", functools.partial(runner.run_study, execute=fake_trials.EXECUTE))
    (runs / "crash").touch()
    spec = a_study(seeds=[0, 1], factors={"optimizer.weight_decay": [0.0, 0.1, 0.2]})
    with caplog.at_level("DEBUG", "cohort"):
        study.run_to_report(study.Study("sizes", (), spec, "cohort study run sizes"), runs, 2)
        page = repr(LiveStudy("sizes").shown())
    written = {str(file): file.read_bytes() for file in runs.rglob("*") if file.is_file()}
    assert {"mlflow.db", "index.html", "run.json", "worker-0.log"} <= {name.rpartition("/")[2] for name in written}
    said = {"page": page, "log": caplog.text, "output": "".join(capfd.readouterr())}
    assert "TimeoutExpired" in said["log"] and "no memory left" in page
    places = written | {name: text.encode() for name, text in said.items()}
    assert [(where, name) for where, text in places.items() for name in planted if planted[name].encode() in text] == []
    record_property("tried", len(SECRETS))
