"""What is left of a run that has ended, what disk a run needs before, and that a kill between loses nothing."""

import os
import re
import shutil
from collections import namedtuple
from contextlib import suppress
from pathlib import Path

import fake_trials
import pytest
import torch
from cohort.harness.base.files import write_json
from cohort.harness.checks import disk
from cohort.harness.checks.disk import check_disk, estimate_disk
from cohort.harness.policy.lora import add_adapter
from cohort.harness.policy.sources import Base, start_name
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.record.run import drop_checkpoints, model_folder
from cohort.harness.run.checkpoint import Snapshot, save_checkpoint
from cohort.harness.run.learner import Learner
from cohort.harness.run.standalone import train_once
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.load import load_study
from cohort.harness.settings.run import Checkpoints, parse_run
from cohort.harness.study.runner import dry_run, run_study
from cohort.harness.study.worker import worker_main
from fake_trials import a_study
from fakes import Killed
from queues import METRIC, a_queue, completions, executions
from test_learner import make_batch

RUN = {"task": "arithmetic", "algorithm": {"name": "grpo", "group_size": 2}, "rollouts_per_step": 8,
       "gates": {"stuck_groups": None}}  # fmt: skip
Usage = namedtuple("Usage", "total used free")


def checkpoints(directory: Path) -> Path:
    """The folder of two whole checkpoints and of one that its writer never finished."""
    for step in ("step-00000002", "step-00000010", ".partial-step-00000020"):
        folder = directory / "checkpoints" / step
        (folder / "policy").mkdir(parents=True)
        for file in ("policy/config.json", "policy/model.safetensors", "learner.pt", "state.json"):
            (folder / file).write_text(step)
    return directory / "checkpoints"


def files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


WEIGHTS = ["step-00000010/policy/config.json", "step-00000010/policy/model.safetensors"]


class DiesAtDeletion:
    """Deletes like the system until the n-th time, when its process dies."""

    def __init__(self, n, monkeypatch):
        self.left = n
        for name in ("unlink", "rmdir"):
            monkeypatch.setattr(os, name, self.dying(getattr(os, name)))

    def dying(self, operation):
        def delete(*args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise Killed.Death
            return operation(*args, **kwargs)

        return delete


@pytest.mark.parametrize(("keep", "left"), [("nothing", []), ("weights", WEIGHTS)])
@pytest.mark.attack("A kill at every deletion of a finished run's checkpoints")
def test_a_kill_while_checkpoints_are_dropped_is_made_up_for(keep, left, tmp_path, monkeypatch, record_property):
    tried = 0
    while True:
        folder = checkpoints(tmp_path / str(tried))
        with monkeypatch.context() as patch:
            deaths = DiesAtDeletion(tried, patch)
            with suppress(Killed.Death):
                drop_checkpoints(folder.parent, keep)
            survived = deaths.left >= 0
        if keep == "weights":  # at every moment
            assert all((folder / file).is_file() for file in WEIGHTS)
        drop_checkpoints(folder.parent, keep)
        assert files(folder) == left and folder.exists() == bool(left)
        tried += 1
        if survived:
            break
    assert tried == (20 if keep == "nothing" else 15)  # each deletion, and none
    record_property("tried", tried)


def started(runs: Path, **settings):
    """The queue of a study of one trial, and the folder of that trial's checkpoints."""
    study = a_study(factors={}, seeds=[0], run=fake_trials.run_settings(**settings))
    queue = a_queue(study, runs)
    write_json(queue.plan.folder / "study.json", {"digest": study.digest(), **study.model_dump(mode="json")})
    return queue, checkpoints(queue.plan.directory(queue.plan.keys[0]))


@pytest.mark.usefixtures("plugins")
@pytest.mark.parametrize(("finished", "left"), [(None, []), ("weights", WEIGHTS)])
def test_a_trial_keeps_what_its_study_says_and_by_default_nothing(finished, left, runs):
    queue, folder = started(runs, checkpoints={"finished": finished})
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE) == 0
    assert completions(queue) == {("base", 0): 1}
    assert files(folder) == left


@pytest.mark.usefixtures("plugins")
@pytest.mark.attack("A worker killed between a trial's result and the end of its checkpoints")
def test_checkpoints_of_a_worker_that_died_after_the_result_are_dropped_by_the_next_one(runs):
    queue, folder = started(runs)
    result = {"state": "complete", "reason": None, "summary": {"accuracy_final": 0.5}, "metrics": {METRIC: 0.5}}
    write_json(folder.parent / "result.json", result)
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE) == 0
    assert executions(runs) == [] and completions(queue) == {("base", 0): 1}
    assert not folder.exists()


@pytest.mark.usefixtures("plugins")
def test_a_trial_that_can_still_go_on_keeps_all_of_it(runs):
    (runs / "crash").touch()
    queue, folder = started(runs, optimizer={"weight_decay": 0.2})
    before = files(folder)
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE) == 0
    assert completions(queue) == {} and files(folder) == before


@pytest.mark.slow
def test_a_single_run_keeps_its_policy_and_a_killed_one_is_cleaned_up_later(runs):
    few = {"every": 9, "num_prompts": 2, "num_test_prompts": 2, "num_samples": 1}
    spec = parse_run({**RUN, "steps": 2, "evaluation": few, "checkpoints": {"every": 1}}, "test")
    result = train_once(spec, runs, "one")
    directory = runs / "train" / "one"
    policy = directory / "checkpoints" / "step-00000002" / "policy"
    assert result.state == "complete"
    assert {file.parent for file in (directory / "checkpoints").rglob("*") if file.is_file()} == {policy}
    assert model_folder(str(directory)) == str(policy)
    (policy.parent / "learner.pt").write_text("of a killed process")
    assert train_once(spec, runs, "one").summary == result.summary
    assert [file.name for file in policy.parent.iterdir()] == ["policy"]
    shutil.rmtree(directory / "checkpoints")
    with pytest.raises(SpecError, match="kept no weights; a trial of a study keeps them with"):
        model_folder(str(directory))


@pytest.mark.parametrize(("algorithm", "changes"), [
    ({"name": "ppo"}, {}),
    ({"name": "ppo"}, {"lora": {"rank": 64}}),
    ({"name": "grpo"}, {"dtype": "bfloat16"}),
    ({"name": "grpo", "kl_beta": 0.1}, {"kl": {"refresh_reference_every": 1}}),
])  # fmt: skip
def test_a_checkpoint_has_the_size_that_was_estimated(algorithm, changes, tmp_path):
    algorithm = {**RUN["algorithm"], **algorithm}
    spec = parse_run({**RUN, **changes, "algorithm": algorithm, "checkpoints": {"every": 100}}, "test")
    policy = tiny_model(0).to(getattr(torch, spec.dtype))
    if spec.lora is not None:
        add_adapter(policy, spec.lora, 0)
    learner = Learner(spec, policy)
    batch = learner.annotate(make_batch())
    learner.update(spec.algorithm.advantages(batch), 0)
    run = Snapshot(1, policy, tiny_tokenizer(), learner.state(), {}, base=Base.of("tiny", 0))
    save_checkpoint(tmp_path, run, keep=1)
    size = sum(file.stat().st_size for file in tmp_path.rglob("*") if file.is_file())
    found = estimate_disk(spec, "weights")
    # The rest is names: of tensors in two files, of settings and characters.
    assert 0.93 * size < found.checkpoint < size
    weights = sum(file.stat().st_size for file in tmp_path.rglob("*.safetensors"))
    assert 0.97 * weights < found.kept < weights


def test_what_runs_still_need_is_counted_without_what_is_there(tmp_path, monkeypatch):
    settings = {"every": 5, "finished": "weights"}
    spec = parse_run({**RUN, "steps": 100, "cold_start": {"steps": 4}, "checkpoints": settings}, "test")
    one = estimate_disk(spec, "nothing")
    # the two newest and the next one while it is written; weights and two moments are three times the weights
    assert (one.running, one.checkpoint, one.cold_start) == (3 * one.checkpoint, 3 * one.kept, one.kept)
    left = [(spec, tmp_path / name) for name in ("a", "b", "c", "d")]

    def needed(left, at_once=2):
        return check_disk(tmp_path, left, at_once, "nothing")["needed"]

    # two run, two have ended and keep their weights, and one cold start serves all
    assert needed(left) == 2 * one.running + 2 * one.kept + one.cold_start
    assert needed(left, at_once=1) == one.running + 3 * one.kept + one.cold_start
    Path(start_name(spec, tmp_path / "cache")).mkdir(parents=True)
    assert needed(left) == 2 * one.running + 2 * one.kept
    (tmp_path / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "a" / "checkpoints" / "x").write_bytes(bytes(1000))
    assert needed(left) == 2 * one.running + 2 * one.kept - 1000
    short = parse_run({**spec.model_dump(mode="json"), "steps": 5}, "test")  # one checkpoint is all it ever has
    assert needed([(short, tmp_path / "b")]) == one.checkpoint
    assert needed([]) == 0
    monkeypatch.setattr(disk, "model_config", lambda name: 1 / 0)  # a shape that nobody can count is not refused
    assert check_disk(tmp_path, [(parse_run(RUN, "test"), tmp_path / "a")], 1, "weights") is None


@pytest.mark.slow
@pytest.mark.attack("A study or a run on a disk that is too small")
def test_what_does_not_fit_on_the_disk_is_refused_before_it_starts(tmp_path, monkeypatch, record_property):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(10**9, 0, 2**27))
    monkeypatch.setattr(Checkpoints, "keep", 100)
    runs = tmp_path / "new"
    study = load_study("quickstart", ["checkpoints.every=1"])
    # at most 61 checkpoints of 2 to 4 MB in each of two trials
    words = r"12 runs, 2 at a time, must fit on the disk of '.*': it has 0.12 GiB free, and about 0.\d\d GiB is needed"
    with pytest.raises(SpecError, match=words):
        run_study(study, runs, workers=2, command="cmd")
    with pytest.raises(SpecError, match=words):
        dry_run(study, runs, workers=2)
    spec = parse_run({**RUN, "steps": 99, "checkpoints": {"every": 1}}, "test")
    with pytest.raises(SpecError, match="the run must fit on the disk"):
        train_once(spec, runs, "one")
    assert not (runs / "studies").exists() and not (runs / "mlflow.db").exists()
    record_property("tried", 3)


@pytest.mark.slow
def test_doctor_states_the_disk_of_each_arm_and_refuses_what_does_not_fit(cohort, monkeypatch):
    arms = ["--run", "quickstart", "--set", "checkpoints.every=1"]
    assert cohort("doctor", *arms) == 0
    assert re.search(r"Largest disk use of a run's checkpoints, MiB: grpo [\d.]+, ppo \d+, ", cohort.out)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(10**9, 0, 10**6))
    assert cohort("doctor", *arms) == 2
    assert "grpo: the run must fit on the disk of" in cohort.said


def test_a_dry_run_states_the_disk_and_what_is_complete_needs_none(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(10**12, 0, 10**12))
    study = load_study("quickstart", ["checkpoints.every=1", "algorithm.group_size=8"])
    found = dry_run(study, tmp_path / "new", workers=2)["disk"]
    arms = [estimate_disk(arm.spec, "nothing") for arm in study.checked_arms()]
    largest = sorted([arm.running for arm in arms if arm for _ in study.seeds])[-2:]
    assert found == {"needed": sum(largest) + arms[0].cold_start, "free": 10**12}
