"""The final policy of a run as a version of a model in MLflow's registry.

The version names the run's own files: a policy may have gigabytes. Only a server, which can't read them, gets a copy.
Its folder has the policy as `policy`, and for `mlflow.transformers.load_model` a file `MLmodel` and the tokenizer.
"""

from pathlib import Path

from mlflow.models import Model
from mlflow.transformers.flavor_config import build_flavor_config_from_local_checkpoint
from transformers import AutoTokenizer

from ...api.runs import checked_name
from ...mirror.address import remote_uri, store_name
from ...mirror.follow import catch_up
from ...mirror.store import active_run, check_runs_folder, connect
from ...mirror.writer import MirrorState
from ...record.run import RunInfo, final_result, model_folder

_TAGS = ("cohort.study", "cohort.arm", "cohort.seed", "cohort.state")
_METRICS = ("validation/accuracy", "summary/test_accuracy")


def register(directory: Path, name: str, runs: Path) -> tuple[int, Path]:
    """The version of the registered model `name` that is the final policy of the run in `directory`, and its folder.

    A registered run keeps its version. ValueError for a run that has not ended, or that the store does not have.
    """
    name = checked_name(name)
    check_runs_folder(runs)
    if RunInfo.load(directory) is None or final_result(directory) is None:
        rule = "RUN must be its folder, as RUNS/train/NAME or RUNS/studies/NAME/trials/TRIAL"
        raise ValueError(f"only a run that has ended can be registered: {rule}, got '{directory}'")
    refusal = ValueError(f"{store_name(runs)} must have the run of '{directory}'; name its runs folder with `runs`")
    if not directory.resolve().is_relative_to(runs.resolve()):
        raise refusal
    policy = Path(model_folder(str(directory)))
    catch_up(runs, runs.joinpath(*directory.resolve().relative_to(runs.resolve()).parts[:2]))  # RUNS/train/NAME
    client = connect(runs)
    run = active_run(client, MirrorState.load(directory).run_id)
    if run is None:
        raise refusal
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    run_id, folder = run.info.run_id, policy.resolve().parent
    for known in client.search_model_versions(f"name = '{name}' and run_id = '{run_id}'"):
        return int(known.version), policy
    _describe(policy)
    source = folder.as_uri()
    if remote_uri() is not None:
        client.log_artifacts(run_id, str(folder), "model")
        source = f"{run.info.artifact_uri}/model"
    tags = {key: run.data.tags[key] for key in _TAGS if key in run.data.tags}
    tags |= {key: f"{run.data.metrics[key]:.4g}" for key in _METRICS if key in run.data.metrics}
    return int(client.create_model_version(name, source, run_id, tags).version), policy


def _describe(policy: Path) -> None:
    """Write `MLmodel` and the tokenizer beside a policy; not for an adapter, whose base is a path of this machine."""
    if (policy / "adapter_config.json").is_file():  # as peft calls it
        return
    AutoTokenizer.from_pretrained(policy).save_pretrained(str(policy.parent / "components" / "tokenizer"))
    config = build_flavor_config_from_local_checkpoint(str(policy), "text-generation")
    model = Model()
    model.add_flavor("transformers", **config | {"model_binary": policy.name, "source_model_name": policy.name})
    model.save(str(policy.parent / "MLmodel"))
