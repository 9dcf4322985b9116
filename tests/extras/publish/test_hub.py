"""`cohort publish` to the Hub: the card says what the record says; the Hub gets it with the policy."""

import json
from pathlib import Path

import pytest
import yaml
from cohort.harness.base.files import sha256
from cohort.harness.extras.publish import hub
from cohort.harness.record.events import EVENTS
from cohort.harness.record.run import RunLog
from cohort.harness.run.loop import train
from factories import FEW, make_spec
from huggingface_hub.errors import LocalTokenNotFoundError

HOSTILE = "a|b`c <script>alert(1)</script>"


class Hub:
    """What an upload asks of the Hub's library."""

    refuses = False

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.created: list[tuple[str, bool]] = []

    def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
        if self.refuses:
            raise LocalTokenNotFoundError("Token is required\nmore words")
        assert exist_ok
        self.created.append((name, private))
        return f"https://hub/{name}"

    def upload_file(self, *, path_or_fileobj: bytes, path_in_repo: str, repo_id: str) -> None:
        self.files[path_in_repo] = path_or_fileobj

    def upload_folder(self, *, folder_path: str, repo_id: str, ignore_patterns: list[str]) -> None:
        assert ignore_patterns == ["README.md"]
        self.files |= {file.name: file.read_bytes() for file in Path(folder_path).iterdir() if file.is_file()}


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
    _, head, body = hub.model_card(ended).split("---\n", 2)
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


def test_the_hub_gets_the_policy_and_its_card_in_a_private_repository_of_a_name_that_is_one(ended, monkeypatch, cohort):
    there = Hub()
    monkeypatch.setattr(hub, "HfApi", lambda: there)
    assert cohort("publish", ended, "me/policy") == 0
    assert cohort.out == "me/policy: https://hub/me/policy\n"
    assert there.created == [("me/policy", True)]
    policy = next(ended.glob("checkpoints/*/policy"))
    assert there.files.pop("README.md").decode() == hub.model_card(ended)
    assert there.files == {f.name: f.read_bytes() for f in policy.iterdir() if f.is_file()}
    there.refuses = True
    with pytest.raises(ValueError, match=r"does not take 'me/policy' \(Token is required\); log in with"):
        hub.publish(ended, "me/policy")
    assert cohort("publish", ended, "me/her/policy") == 2
    assert "must be the name of a user and a repository, got 'me/her/policy'" in cohort.said
