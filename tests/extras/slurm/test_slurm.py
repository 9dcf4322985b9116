"""Workers as jobs of SLURM, through submitit, on a SLURM of this machine."""

import importlib.util
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import factories
import fake_slurm
import pytest
from cohort.harness.api.study import Study, launcher
from cohort.harness.cli.app import app
from cohort.harness.extras.slurm import launcher as slurm
from cohort.harness.extras.slurm.launcher import Slurm
from cohort.harness.record.status import StudyStatus
from cohort.harness.settings.errors import SpecError
from cohort.harness.study.queue import study_status
from cohort.harness.study.runner import run_study
from fake_trials import a_study
from queues import at_work, check_as_undisturbed, once_at_work, run
from typer.testing import CliRunner

needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit")

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A SLURM of this machine, whose own temporary files are elsewhere."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    return fake_slurm.install(tmp_path / "cluster", monkeypatch)


@pytest.mark.slow
@needs_submitit
def test_jobs_are_submitted_as_an_array_with_what_was_asked_for_and_run_the_study(runs, cluster):
    study = a_study(seeds=[0])
    asked_for = "slurm cpus-per-task=2 gpus-per-node=1 partition=gpu exclusive time=1:30:00"
    what = launcher(asked_for, Study("", (), study))
    status = run(study, runs, workers=2, cluster=what)
    assert (status.finished, status.all_valid) == (True, True)
    check_as_undisturbed(study, runs)
    asked = fake_slurm.script(cluster)
    logs = runs / "studies/sizes/logs/slurm"
    assert set(asked) >= {
        "--partition=gpu", "--time=1:30:00", "--cpus-per-task=2", "--gpus-per-node=1", "--exclusive",
        "--requeue", "--array=0-1%2", "--job-name=cohort-sizes", "--signal=USR2@120",
        f"--output={logs}/%A_%a_0_log.out",
    }  # fmt: skip
    assert "--cpus-per-task=2" in (cluster / "100.sh").read_text().partition("srun ")[2]
    calls = (cluster / "calls.log").read_text().splitlines()
    assert calls[0] == (
        "sbatch --test-only --gpus-per-node=1 --time=1:30:00 --cpus-per-task=2 --partition=gpu --exclusive --wrap=true"
    )
    assert [line.split()[0] for line in calls].count("sbatch") == 2
    assert logs.stat().st_mode & 0o777 == 0o700
    assert not list(logs.glob("*.pkl"))


@needs_submitit
@pytest.mark.long
@pytest.mark.attack("Signals of a scheduler: preemption, a time limit")
def test_preempted_jobs_are_queued_again_and_lose_nothing(runs, cluster, monkeypatch, record_property):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.4")
    study, told = a_study(), []

    def preempt(status: StudyStatus) -> None:
        running = [job for job, now in fake_slurm.states(cluster).items() if now == "RUNNING"]
        if len(told) < 2 and len(running) == 2 and at_work(status) and status.counts().get("stopped", 0) == 0:
            told.append(running[len(told)])
            subprocess.run(["scancel", "--signal=USR2", told[-1]], check=True)

    status = run(study, runs, preempt, workers=2, cluster=Slurm())
    assert (status.finished, status.all_valid, len(told)) == (True, True, 2)
    record_property("tried", len(told))
    check_as_undisturbed(study, runs)
    calls = (cluster / "calls.log").read_text()
    assert all(f"scontrol requeue {job}" in calls for job in told)
    assert len((runs / "executions.log").read_text().splitlines()) > 4


@needs_submitit
@pytest.mark.long
@pytest.mark.attack("SIGKILL of a job, or its cancellation")
def test_a_killed_job_is_replaced_and_a_cancelled_one_is_not(runs, cluster, monkeypatch, record_property):
    monkeypatch.setenv("FAKE_STEP_SECONDS", "1")
    monkeypatch.setattr(slurm, "REFRESH_SECONDS", 2)
    study, told = a_study(), []

    def disturb(status: StudyStatus) -> None:
        if not told and status.counts().get("running") == 2:
            told.append("kill")
            os.kill(int((cluster / "100_0.step").read_text()), signal.SIGKILL)
        elif len(told) == 1 and fake_slurm.states(cluster).get("101") == "RUNNING":
            told.append("cancel")
            subprocess.run(["scancel", "100_1"], check=True)

    status = run(study, runs, disturb, workers=2, cluster=Slurm())
    assert (status.finished, status.all_valid, len(told)) == (True, True, 2)
    record_property("tried", len(told))
    check_as_undisturbed(study, runs)
    assert set(fake_slurm.states(cluster)) == {"100_0", "100_1", "101"}  # nothing in the place of the cancelled one


@needs_submitit
@pytest.mark.long
@pytest.mark.attack("Ctrl-C")
def test_an_interrupt_cancels_waiting_jobs_and_lets_those_at_work_end_their_step(runs, cluster):
    (runs / "hold").touch()
    (cluster / "slots").write_text("1")
    study = a_study()
    status = run(study, runs, once_at_work(lambda: os.kill(os.getpid(), signal.SIGINT)), workers=3, cluster=Slurm())
    assert status.counts() == {"stopped": 1, "waiting": 3}
    while "RUNNING" in fake_slurm.states(cluster).values():  # its process ends
        time.sleep(0.1)
    assert sorted(fake_slurm.states(cluster).values()) == ["CANCELLED by 1000", "CANCELLED by 1000", "COMPLETED"]
    (cluster / "slots").write_text("2")
    (runs / "hold").unlink()
    assert run(study, runs, workers=2, cluster=Slurm()).finished
    check_as_undisturbed(study, runs)


@pytest.mark.parametrize(
    "text", ["Account=lab", "--account=lab", "account=lab\n#SBATCH --x", "output=here", "array=1-9"]
)
def test_a_parameter_that_sbatch_does_not_know_or_that_is_ours_is_one_sentence(text):
    with pytest.raises(SpecError, match=r"launcher slurm (takes|must leave)"):
        slurm.place([text], 0)


SLURM = ["--launcher", "slurm", "--workers", "2"]


@needs_submitit
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--launcher", "slurm partition=nowhere", "--workers", "2"], "invalid partition specified: nowhere"),
        (["--launcher", "slurm"], "needs --workers, the number of jobs"),
        ([*SLURM, "--workers", "0"], "leave one of them out"),
    ],
)
def test_bad_options_of_slurm_are_one_sentence_before_anything_is_written(runs, cluster, arguments, words):
    refused(runs, arguments, words)


def refused(runs: Path, arguments: list[str], words: str) -> None:
    before = sorted(runs.rglob("*"))
    shown = CliRunner().invoke(app, ["study", "run", "quickstart", "--runs", str(runs), *arguments])
    assert shown.exit_code == 2
    assert words in " ".join(shown.output.split())
    assert sorted(file for file in runs.rglob("*") if "cache" not in file.parts) == before


@needs_submitit
def test_a_place_that_cannot_reach_slurm_or_its_nodes_is_refused(runs, cluster, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(runs.parent))
    refused(runs, SLURM, "name one on a common disk with --runs")
    monkeypatch.setenv("PATH", str(runs))
    refused(runs, SLURM, "'sbatch' is not on PATH")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "submitit" else find(name, *a))
    refused(runs, SLURM, "pip install 'cohort-rl[slurm]'")


@pytest.mark.slow
@needs_submitit
@pytest.mark.usefixtures("endless_disk")
def test_jobs_whose_nodes_cannot_run_the_study_end_it_with_the_reason(tmp_path, cluster):
    study, runs = factories.real_scale("gsm8k_qwen", tmp_path), tmp_path / "runs"
    what = launcher("slurm", study)
    words = r"^device must be available, got 'cuda' on a machine without CUDA; use dev[^\n]*$"
    with pytest.raises(SpecError, match=words):
        run_study(study.spec, runs, workers=2, command="cmd", cluster=what)
    assert {"--cpus-per-task=8", "--gpus-per-node=1", "--array=0-1%2"} <= set(fake_slurm.script(cluster))
    calls = (cluster / "calls.log").read_text().splitlines()
    assert [line.split()[0] for line in calls].count("sbatch") == 2  # the question and the jobs, and no others
    assert set(study_status("gsm8k_qwen", runs).counts()) == {"waiting"}


@pytest.mark.parametrize(
    ("device", "given", "asked"),
    [
        ("auto", [], {"cpus-per-task": "16", "gpus-per-node": "2"}),
        ("auto", ["cpus-per-gpu=6"], {"cpus-per-gpu": "6", "gpus-per-node": "2"}),
        ("auto", ["gpus-per-node=a100:1"], {"cpus-per-task": "8", "gpus-per-node": "a100:1"}),
        ("auto", ["gpus-per-node=0"], {}),
        ("cpu", [], {}),
    ],
)
def test_a_job_of_slurm_asks_for_8_cores_for_each_gpu(device, given, asked):
    study = Study("", (), factories.make_study(**{"run.devices": 2, "run.device": device}))
    what = launcher(" ".join(["slurm", *given]), study)
    assert isinstance(what, Slurm) and what.parameters == {**asked, "time": "4:00:00"}
