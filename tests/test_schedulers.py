"""Workers that a scheduler starts: `cohort study work`."""

import json
import os
import re
import shlex
import signal
import subprocess
import time
from contextlib import nullcontext
from pathlib import Path

import factories
import fake_trials
import pytest
import typer
import yaml
from cohort.harness.checks import preflight
from cohort.harness.cli.app import app
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec
from cohort.harness.study import pool as work
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue, study_status
from cohort.harness.study.runner import start_study
from cohort.harness.study.worker import worker_main
from fake_trials import a_study
from pretend_cuda import pretend_cuda
from queues import check_as_undisturbed, once_at_work
from test_cli import cohort_process

pytestmark = pytest.mark.usefixtures("plugins")


def started(study: StudySpec, runs: Path) -> StudySpec:
    start_study(study, runs, command="cmd", execute=fake_trials.EXECUTE)
    return study


@pytest.mark.slow
@pytest.mark.attack("Signals of a scheduler: preemption, a time limit")
def test_a_worker_that_is_preempted_returns_its_trial_at_once_and_the_next_one_goes_on(runs):
    (runs / "hold").touch()  # else the trial may end before the signal arrives
    study = started(a_study(seeds=[0]), runs)

    def preempt() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # as SLURM does it: more than one
        os.kill(os.getpid(), signal.SIGUSR2)

    status, signals = work.work("sizes", runs, execute=fake_trials.EXECUTE, on_status=once_at_work(preempt))
    assert set(signals) == {signal.SIGTERM, signal.SIGUSR2}
    assert status.counts() == {"stopped": 1, "waiting": 1}
    stopped = next(trial.directory for trial in status.trials if trial.state == "stopped")
    assert not (stopped / "lease").exists()
    (runs / "hold").unlink()
    assert json.loads((stopped / "checkpoint.json").read_text())["step"] >= 1
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE) == 0
    check_as_undisturbed(study, runs)


def test_a_worker_does_not_wait_for_trials_that_others_run(runs):
    queue = Queue(Plan(started(a_study(seeds=[0]), runs), runs))
    assert queue.claim() is not None and queue.claim() is not None
    before = time.monotonic()
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE, patience=0.1) == 0
    assert time.monotonic() - before < 240  # it would wait for ever
    assert not (runs / "executions.log").exists()


def test_a_study_that_was_not_started_is_one_sentence_that_says_how(runs, cohort):
    assert cohort("study", "work", "sizes", "--runs", runs) == 2
    assert "cohort study run NAME --workers 0" in cohort.said
    assert not (runs / "studies").exists()


@pytest.mark.long
@pytest.mark.attack("Several study commands at once on one study")
def test_several_workers_at_once_run_every_trial_once_and_say_how_it_ended(runs, cohort):
    settings = ["--set", "steps=2", "--set", "evaluation.num_prompts=4", "--set", "cold_start.steps=2"]
    start = ["study", "run", "quickstart", *settings, "--seeds", "0,1", "--runs", runs, "--workers", "0"]
    assert cohort(*start) == 0, cohort.err
    assert f"cohort study work quickstart --runs {runs}" in " ".join((cohort.out + cohort.err).split())
    assert set(study_status("quickstart", runs).counts()) == {"waiting"}
    processes = [cohort_process("study", "work", "quickstart", "--runs", str(runs)) for _ in range(3)]
    said = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert all("No trial of 'quickstart' is left" in words for words in said)
    assert study_status("quickstart", runs).finished
    assert len(list((runs / "studies/quickstart/logs").glob("worker-*.log"))) == 3


@pytest.mark.slow
@pytest.mark.usefixtures("endless_disk")
@pytest.mark.parametrize("name", factories.SHAPES)
def test_a_login_node_without_a_gpu_sets_a_study_up_and_a_worker_there_is_refused(name, tmp_path, monkeypatch):
    study, runs = factories.real_scale(name, tmp_path).spec, tmp_path / "runs"
    start_study(study, runs, command="cmd")
    with pytest.raises(ValueError, match="device must be available, got 'cuda' on a machine without CUDA"):
        worker_main(name, runs)
    assert set(study_status(name, runs).counts()) == {"waiting"}
    specs = [arm.spec for arm in study.checked_arms()]
    monkeypatch.setattr("cohort.harness.checks.preflight.usable_gpus", lambda: ("0",))
    with pretend_cuda():
        with pytest.raises(ValueError, match="engine vllm must be installed"):
            preflight.check_capacity(specs, specs)
        monkeypatch.setattr("cohort.harness.engines.vllm.find_spec", lambda package: package)
        monkeypatch.setattr("cohort.harness.engines.vllm.compiler", lambda: None)
        with pytest.raises(ValueError, match="engine vllm must have a C compiler"):
            preflight.check_capacity(specs, specs)
        monkeypatch.setattr("cohort.harness.engines.vllm.compiler", lambda: "/usr/bin/cc")
        for size, fits in ((80, True), (16, False)):  # GiB
            monkeypatch.setattr("cohort.harness.checks.memory.device_bytes", lambda *_, size=size: size * 2**30)
            with nullcontext() if fits else pytest.raises(SpecError, match=r"must (fit in memory|leave vLLM room)"):
                preflight.check_capacity(specs, specs)


EXAMPLES = Path(__file__).resolve().parents[1] / "docs/examples"


def test_the_job_files_of_slurm_and_kubernetes_run_a_worker_and_ask_for_the_signal_it_handles():
    subprocess.run(["bash", "-n", EXAMPLES / "slurm-array.sh"], check=True)
    text = (EXAMPLES / "slurm-array.sh").read_text()
    assert "#SBATCH --signal=USR2@" in text
    (words,) = re.findall(r"^srun cohort study work (.*)$", text, re.MULTILINE)
    work = typer.main.get_command(app).commands["study"].commands["work"]  # pyright: ignore[reportAttributeAccessIssue]
    known = {option for parameter in work.params for option in parameter.opts}
    assert {word for word in shlex.split(words) if word.startswith("--")} <= known
    job = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())
    assert (job["kind"], "completions" in job["spec"]) == ("Job", False)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["cohort", "study", "work"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
