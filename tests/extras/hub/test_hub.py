"""`cohort publish`: the card says what the record says; a server that speaks as the Hub gets it."""

import base64
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from cohort.harness.base.files import sha256
from cohort.harness.cli import app
from cohort.harness.extras.hub.publish import model_card
from cohort.harness.record.events import EVENTS
from cohort.harness.record.run import RunLog
from cohort.harness.run.loop import train
from factories import FEW, make_spec

HOSTILE = "a|b`c <script>alert(1)</script>"


class Hub(BaseHTTPRequestHandler):
    """What of the Hub's protocol an upload of small files needs: every file is sent within its commit."""

    files: dict[str, bytes]
    refuse: bool

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refuse:  # pyright: ignore
            return self._say({"error": "Invalid token"}, 401)
        if self.path == "/api/validate-yaml":
            return self._say({"errors": [], "warnings": []})
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))  # pyright: ignore
            return self._say({"url": f"{self.server.address}/me/policy"})  # pyright: ignore
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self._say({"files": files})
        if "/commit/" in self.path:
            for line in body.decode().splitlines():
                part = json.loads(line)
                if part["key"] == "file":
                    self.server.files[part["value"]["path"]] = base64.b64decode(part["value"]["content"])  # pyright: ignore
            return self._say({"commitUrl": f"{self.server.address}/me/policy/commit/0", "commitOid": "0" * 40})  # pyright: ignore
        return self._say({"error": self.path}, 404)

    def do_GET(self) -> None:
        self._say({"id": "me/policy", "sha": "0" * 40, "siblings": []})

    def _say(self, answer: Any, status: int = 200) -> None:
        text = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub(monkeypatch) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.created, server.refuse = {}, [], False
    server.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("HF_ENDPOINT", server.address)
    monkeypatch.setenv("HF_TOKEN", "hf_of_nobody")
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def ended(tmp_path_factory) -> Path:
    """The folder of a run that has ended, with another test and an objective that is hostile text."""
    runs = tmp_path_factory.mktemp("runs")
    tests = [{"name": "math500", "path": str(Path(__file__).parents[2] / "fixtures" / "math500")}]
    spec = make_spec(**{**FEW, "steps": 1, "evaluation.tests": tests, "evaluation.num_samples": 2})
    folder = runs / "train" / "a|run"
    with RunLog(runs, folder, spec, experiment="train", run_name="one") as log:
        log._info.objective["advantage"] = HOSTILE
        result = train(spec, folder, log, cache=runs / "cache")
        log.finish(result.state, result.reason, result.summary)
    return folder


def test_a_card_says_what_the_record_says_and_text_of_others_is_text(ended):
    _, head, body = model_card(ended).split("---\n", 2)
    data = yaml.safe_load(head)
    assert data["tags"] == ["cohort", "rlvr", "grpo"] and data["library_name"] == "transformers"
    assert "base_model" not in data  # `tiny` is on no Hub
    events = [json.loads(line) for line in (ended / EVENTS).read_text().splitlines()]
    logged = {key: value for event in events for key, value in event.get("values", {}).items()}
    found = {
        r["dataset"]["name"]: r["metrics"][0]["value"]
        for r in data["model-index"][0]["results"]
        if r["metrics"][0]["type"] == "accuracy"
    }
    assert found == {name: round(100 * logged[f"{area}/accuracy"], 2)
                     for name, area in (("arithmetic", "test"), ("math500", "test_math500"))}  # fmt: skip
    assert "| arithmetic | mean of 2 | 4 |" in body and "| math500 | greedy | 4 |" in body
    assert f"`{sha256(ended / EVENTS)}`" in body
    assert "fixtures" not in head + body  # a path of this machine
    assert "a\\|b\\`c &lt;script&gt;" in body and "<script>" not in body and body.lstrip().startswith("# a\\|run")


def registered(run: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, because the Hub's library reads the server's address once."""
    command = [sys.executable, "-P", "-m", "cohort", "publish", str(run), "me/policy"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_hub_gets_the_policy_and_its_card_in_a_private_repository(ended, hub):
    done = registered(ended)
    assert (done.returncode, done.stdout) == (0, f"me/policy: {hub.address}/me/policy\n"), done.stderr
    assert (hub.created[0]["visibility"], hub.created[0]["name"]) == ("private", "policy")
    policy = next(ended.glob("checkpoints/*/policy"))
    assert hub.files.pop("README.md").decode() == model_card(ended)
    assert hub.files == {f.name: f.read_bytes() for f in policy.iterdir() if f.is_file()}


def test_a_name_that_is_none_is_refused(ended, capsys):
    with pytest.raises(SystemExit, match="2"):
        app.main(["publish", str(ended), "policy"])
    said = " ".join(capsys.readouterr().err.split())
    assert "must be the name of a user and a repository, got 'policy'" in said
