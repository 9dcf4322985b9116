"""`cohort publish` into MLflow's registry: one version a run, with its files or a server's copy of them."""

import shutil
from pathlib import Path
from typing import Any

import mlflow
import pytest
import test_tracking
import test_tracking_server
from cohort.harness.extras.publish.registry import register
from cohort.harness.mirror.address import tracking_uri
from cohort.harness.mirror.writer import MirrorState
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.record.run import drop_checkpoints
from fake_trials import a_study, begin_study
from mlflow import MlflowClient
from test_tracking import COLUMN, log_trial, open_log

pytestmark = pytest.mark.usefixtures("plugins")
runs, running, server = test_tracking.runs, test_tracking_server.running, test_tracking_server.server


def kept_policy(directory: Path) -> Path:
    """The built-in model as the policy that a run has kept."""
    policy = directory / "checkpoints" / "step-00000001" / "policy"
    save_model(policy, tiny_model(3), tiny_tokenizer())
    return policy


@pytest.mark.slow
def test_a_kept_policy_is_registered_once_with_arm_and_accuracy_and_mlflow_loads_it(runs, cohort, caplog, monkeypatch):
    begin_study(runs, a_study())
    log = log_trial(runs, "group_size=2", 0, "complete", checkpoints={"finished": "weights"})
    publish = ["publish", log.directory, "sizes", "--runs", runs]
    assert cohort(*publish) == 2
    assert "a trial of a study keeps them with checkpoints.finished=weights" in cohort.err
    policy = kept_policy(log.directory)
    for _ in range(2):
        assert cohort(*publish) == 0
        assert cohort.out == f"sizes, version 1: {policy}\n"
    drop_checkpoints(log.directory, "weights")  # as the next `cohort train` of a run that has ended
    assert {file.name for file in policy.parent.iterdir()} == {"policy", "components", "MLmodel"}
    assert not [record for record in caplog.records if record.name.startswith("cohort")]
    (found,) = MlflowClient(tracking_uri(runs)).search_model_versions("name = 'sizes'")
    tags = {"cohort.study": "sizes", "cohort.arm": "group_size=2", "cohort.seed": "0", "cohort.state": "complete"}
    run_id = str(MirrorState.load(log.directory).run_id)
    where = MlflowClient(tracking_uri(runs)).get_run(run_id).data.tags["cohort.policy"]
    assert where == policy.relative_to(runs).as_posix()
    assert (found.source, found.run_id, found.tags) == (policy.parent.as_uri(), run_id, tags | {COLUMN: "0.5"})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking_uri(runs))
    pipeline: Any = mlflow.transformers.load_model("models:/sizes/1")
    assert all(bool((ours == pipeline.model.state_dict()[k]).all()) for k, ours in tiny_model(3).state_dict().items())
    assert pipeline.tokenizer("1+1=")["input_ids"] == tiny_tokenizer()("1+1=")["input_ids"]
    (policy / "adapter_config.json").write_text("{}")  # MLflow would look for an adapter's base under its path
    shutil.rmtree(policy.parent / "components")
    (policy.parent / "MLmodel").unlink()
    assert register(log.directory, "adapter", runs) == (1, policy)
    assert not (policy.parent / "MLmodel").exists() and not (policy.parent / "components").exists()


def test_a_run_that_goes_on_or_is_of_another_runs_folder_is_not_registered(runs, tmp_path):
    with open_log(runs) as log:
        log.metrics(1, {COLUMN: 0.5})
    for directory in (log.directory, tmp_path):  # a stopped run, and none
        with pytest.raises(ValueError, match="only a run that has ended"):
            register(directory, "a", runs)
    ended = log_trial(runs, "group_size=2", 0, "complete").directory
    with pytest.raises(ValueError, match=r"must have the run of .*; name its runs folder with `runs`"):
        register(ended, "a", tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_policy_is_registered_with_a_copy_that_the_server_keeps(server, tmp_path):
    begin_study(tmp_path, a_study())
    log = log_trial(tmp_path, "group_size=4", 0, "complete")
    policy = kept_policy(log.directory)
    config = (policy / "config.json").read_text()
    assert register(log.directory, "sizes", tmp_path) == (1, policy)
    run_id = str(MirrorState.load(log.directory).run_id)
    shutil.rmtree(log.directory)
    client = MlflowClient(server.uri)
    assert client.get_model_version("sizes", "1").source.endswith(f"{run_id}/artifacts/model")
    model = Path(client.download_artifacts(run_id, "model", str(tmp_path)))
    assert (model / "policy" / "config.json").read_text() == config and (model / "MLmodel").is_file()
