"""Workers that a scheduler starts: `cohort study work`, and jobs of SLURM through submitit."""

import importlib.util
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import factories
import fake_slurm
import fake_trials
import pretend_node
import pytest
import typer
import yaml
from cohort.harness.api.study import Study, launcher, study_of
from cohort.harness.base.machine import SHARED_GPU
from cohort.harness.checks import preflight
from cohort.harness.cli.app import app
from cohort.harness.record.events import EVENTS, read_history
from cohort.harness.record.status import StudyStatus
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec
from cohort.harness.study import pool as work
from cohort.harness.study import worker
from cohort.harness.study.launchers import ray, slurm
from cohort.harness.study.launchers.ray import Cluster, run_worker
from cohort.harness.study.launchers.slurm import Slurm, sbatch_parameters
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue, study_status
from cohort.harness.study.runner import run_study, start_study
from cohort.harness.study.worker import worker_main
from fake_trials import a_study
from pretend_cuda import pretend_cuda
from queues import at_work, check_as_undisturbed, run
from typer.testing import CliRunner

needs_submitit = pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs submitit")

pytestmark = pytest.mark.usefixtures("plugins")


def started(study: StudySpec, runs: Path) -> StudySpec:
    start_study(study, runs, command="cmd", execute=fake_trials.EXECUTE)
    return study


# One worker -----------------------------------------------------------------------------------------------------------


@pytest.mark.attack("Signals of a scheduler: preemption, a time limit")
def test_a_worker_that_is_preempted_returns_its_trial_at_once_and_the_next_one_goes_on(runs):
    (runs / "hold").touch()  # else the trial may end before the signal arrives
    study, sent = started(a_study(seeds=[0]), runs), []

    def preempt_once(status: StudyStatus) -> None:
        if not sent and at_work(status):
            sent.append(True)
            os.kill(os.getpid(), signal.SIGTERM)  # as SLURM does it: more than one
            os.kill(os.getpid(), signal.SIGUSR2)

    status, signals = work.work("sizes", runs, execute=fake_trials.EXECUTE, on_status=preempt_once)
    assert set(signals) == {signal.SIGTERM, signal.SIGUSR2}
    assert status.counts() == {"stopped": 1, "waiting": 1}
    stopped = next(trial.directory for trial in status.trials if trial.state == "stopped")
    assert not (stopped / "lease").exists()
    (runs / "hold").unlink()
    assert json.loads((stopped / "checkpoint.json").read_text())["step"] >= 1
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE) == 0
    check_as_undisturbed(study, runs)


def test_a_worker_does_not_wait_for_trials_that_others_run(runs):
    study = started(a_study(seeds=[0]), runs)
    queue = Queue(Plan(study, runs))
    assert queue.claim() is not None and queue.claim() is not None
    before = time.monotonic()
    assert worker_main("sizes", runs, execute=fake_trials.EXECUTE, patience=0.1) == 0
    assert time.monotonic() - before < 240  # it would wait for ever
    assert not (runs / "executions.log").exists()


def test_a_study_that_was_not_started_is_one_sentence_that_says_how(runs):
    shown = CliRunner().invoke(app, ["study", "work", "sizes", "--runs", str(runs)])
    assert shown.exit_code == 2
    assert "cohort study run NAME --workers 0" in " ".join(shown.output.split())
    assert not (runs / "studies").exists()


@pytest.mark.long
@pytest.mark.attack("Several study commands at once on one study")
def test_several_workers_at_once_run_every_trial_once_and_say_how_it_ended(runs, monkeypatch, tmp_path):
    settings = ["--set", "steps=2", "--set", "evaluation.num_prompts=4", "--set", "cold_start.steps=2"]
    start = ["study", "run", "quickstart", *settings, "--seeds", "0,1", "--runs", str(runs), "--workers", "0"]
    shown = CliRunner().invoke(app, start)
    assert shown.exit_code == 0, shown.output
    assert f"cohort study work quickstart --runs {runs}" in " ".join(shown.output.split())
    assert set(study_status("quickstart", runs).counts()) == {"waiting"}
    main = "from cohort.harness.cli.app import main; main()"
    command = [sys.executable, "-c", main, "study", "work", "quickstart", "--runs", str(runs)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], said
    assert all("No trial of 'quickstart' is left" in words for words in said)
    status = study_status("quickstart", runs)
    assert status.finished
    assert len(list((runs / "studies/quickstart/logs").glob("worker-*.log"))) == 3


# SLURM ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Path:
    """A SLURM of this machine, whose own temporary files are elsewhere."""
    (tmp_path / "own").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "own"))
    return fake_slurm.install(tmp_path / "cluster", monkeypatch)


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
    study, pressed = a_study(), []

    def interrupt_once(status: StudyStatus) -> None:
        if not pressed and at_work(status):
            pressed.append(True)
            os.kill(os.getpid(), signal.SIGINT)

    status = run(study, runs, interrupt_once, workers=3, cluster=Slurm())
    assert status.counts() == {"stopped": 1, "waiting": 3}
    while "RUNNING" in fake_slurm.states(cluster).values():  # its process ends
        time.sleep(0.1)
    assert sorted(fake_slurm.states(cluster).values()) == ["CANCELLED by 1000", "CANCELLED by 1000", "COMPLETED"]
    (cluster / "slots").write_text("2")
    (runs / "hold").unlink()
    assert run(study, runs, workers=2, cluster=Slurm()).finished
    check_as_undisturbed(study, runs)


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["Account=lab", "--account=lab", "account=lab\n#SBATCH --x", "output=here", "array=1-9"]
)
def test_a_parameter_that_sbatch_does_not_know_or_that_is_ours_is_one_sentence(text):
    with pytest.raises(SpecError, match=r"launcher slurm (takes|must leave)"):
        sbatch_parameters([text])


SLURM = ["--launcher", "slurm", "--workers", "2"]


@needs_submitit
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--launcher", "slurm partition=nowhere", "--workers", "2"], "invalid partition specified: nowhere"),
        (["--launcher", "slurm"], "needs --workers N"),
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


@pytest.fixture
def endless_disk(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=10**15))


@pytest.mark.slow
@pytest.mark.usefixtures("endless_disk")
@pytest.mark.parametrize("name", factories.SHAPES)
def test_a_login_node_without_a_gpu_sets_a_study_up_and_a_worker_is_refused_where_there_is_none(
    name, tmp_path, monkeypatch
):
    study, runs = factories.real_scale(name, tmp_path).spec, tmp_path / "runs"
    start_study(study, runs, command="cmd")
    with pytest.raises(ValueError, match="device must be available, got 'cuda' on a machine without CUDA"):
        worker_main(name, runs)
    assert set(study_status(name, runs).counts()) == {"waiting"}
    specs = [arm.spec for arm in study.checked_arms()]
    monkeypatch.setattr("cohort.harness.checks.preflight.usable_gpus", lambda: ("0",))
    with pretend_cuda():
        with pytest.raises(ValueError, match="engine vllm must be installed"):
            preflight.check_machine(specs, specs)
        monkeypatch.setattr("cohort.harness.engines.vllm.find_spec", lambda package: package)
        monkeypatch.setattr("cohort.harness.engines.vllm.compiler", lambda: None)
        with pytest.raises(ValueError, match="engine vllm must have a C compiler"):
            preflight.check_machine(specs, specs)
        monkeypatch.setattr("cohort.harness.engines.vllm.compiler", lambda: "/usr/bin/cc")
        for size, fits in ((80, True), (16, False)):  # GiB
            monkeypatch.setattr("cohort.harness.checks.memory.device_bytes", lambda *_, size=size: size * 2**30)
            with nullcontext() if fits else pytest.raises(SpecError, match=r"must (fit in memory|leave vLLM room)"):
                preflight.check_machine(specs, specs)


@pytest.mark.slow
@needs_submitit
@pytest.mark.usefixtures("endless_disk")
def test_jobs_whose_nodes_cannot_run_the_study_end_it_with_the_reason(tmp_path, cluster):
    study, runs = factories.real_scale("gsm8k_qwen", tmp_path), tmp_path / "runs"
    what = launcher("slurm", study)
    with pytest.raises(
        SpecError, match=r"^device must be available, got 'cuda' on a machine without CUDA; use dev[^\n]*$"
    ):
        run_study(study.spec, runs, workers=2, command="cmd", cluster=what)
    assert {"--cpus-per-task=8", "--gpus-per-node=1", "--array=0-1%2"} <= set(fake_slurm.script(cluster))
    calls = (cluster / "calls.log").read_text().splitlines()
    assert [line.split()[0] for line in calls].count("sbatch") == 2  # the question and the jobs, and no others
    assert set(study_status("gsm8k_qwen", runs).counts()) == {"waiting"}


@needs_submitit
@pytest.mark.long
@pytest.mark.usefixtures("endless_disk")
@pytest.mark.parametrize("name", factories.SHAPES)
def test_a_study_at_scale_trains_in_jobs_on_nodes_with_a_gpu_though_the_login_node_has_none(
    name, tmp_path, cluster, monkeypatch
):
    sets, runs = [*factories.small_sets(name, tmp_path), "seeds=[0]", "steps=2"], tmp_path / "runs"
    pretend_node.install(tmp_path / "plugins", monkeypatch)
    study = study_of(name, sets, runs)
    status = run_study(study.spec, runs, workers=2, command="cmd", cluster=launcher("slurm", study))
    assert (status.finished, status.all_valid) == (True, True), list(status.trials)
    assert len(status.trials) == {"gsm8k_qwen": 3, "math_7b": 2}[name]
    for trial in status.trials:
        told = read_history(trial.directory / EVENTS).latest()
        assert told["memory/recomputes"] == 0 and told["train/optimizer_steps"] == 2
        assert told["mismatch/after_sync"] < 0.5  # nats: of the engine, which has weights of its own
    assert "--gpus-per-node=1" in fake_slurm.script(cluster)


RTX = {"CPU": 16, "GPU": 1}
HEAD = {"CPU": 64}


@pytest.mark.parametrize(
    ("cluster", "devices", "nodes", "cores", "gpus"),
    [
        (Cluster(), 1, [HEAD, RTX], 8, 1),
        (Cluster(), 4, [HEAD, {"CPU": 128, "GPU": 8}], 32, 4),
        (Cluster(), 1, [RTX, {"CPU": 12, "GPU": 4}], 3, 1),  # all of its GPUs can work
        (Cluster(num_gpus=0.5), 1, [RTX], 4, 0.5),
        (Cluster(2), 4, [{"CPU": 128, "GPU": 8}], 8, 4),
        (Cluster(num_gpus=0), 2, [RTX], 2, 0),
        (Cluster(), 2, [HEAD], 2, 0),
    ],
)
def test_a_worker_on_ray_asks_for_8_cores_for_each_gpu_or_one_for_each_device_without(
    cluster, devices, nodes, cores, gpus
):
    assert cluster.asked(devices, nodes) == {"CPU": cores, "GPU": gpus}


@pytest.mark.parametrize(("gpus", "shares"), [(0.5, True), (None, False), (0, False)])
def test_a_worker_on_ray_with_a_part_of_a_gpu_knows_that_others_have_the_rest(gpus, shares, tmp_path, monkeypatch):
    class FakeRay:
        def init(self, **settings: Any) -> None:
            pass

        def nodes(self) -> list[dict[str, Any]]:
            return [{"Resources": RTX, "Alive": True}]

        def remote(self, **settings: Any) -> Any:
            return lambda run: run

    monkeypatch.setattr(ray, "import_ray", lambda address: FakeRay())
    pool = ray.RayPool({}, 1, tmp_path, cluster=Cluster(num_gpus=gpus))
    pool._connect()
    assert (SHARED_GPU in pool.environment) == shares


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
    assert launcher("ray", study) == Cluster(None, 0 if device == "cpu" else None)
    assert launcher("ray cpus=4 gpus=0.5", study) == Cluster(4, 0.5)
    for bad in ("cpus=-1", "cpus=1 cpus=2", "partition=gpu", "gpus=x"):
        with pytest.raises(SpecError, match="settings of launcher ray must be cpus=N or gpus=N, each once, got"):
            launcher(f"ray {bad}", study)


def test_a_node_of_ray_that_does_not_share_the_runs_folder_says_so(tmp_path):
    assert run_worker({}, 1, {worker.STORAGE: ""}, str(tmp_path / "elsewhere/logs")) == (None, platform.node())


# Documents ------------------------------------------------------------------------------------------------------------

EXAMPLES = Path(__file__).resolve().parents[1] / "docs/examples"


def test_the_job_file_of_slurm_is_bash_that_runs_a_worker_and_asks_for_the_signal_it_handles():
    subprocess.run(["bash", "-n", EXAMPLES / "slurm-array.sh"], check=True)
    text = (EXAMPLES / "slurm-array.sh").read_text()
    assert "#SBATCH --signal=USR2@" in text
    (words,) = re.findall(r"^srun cohort study work (.*)$", text, re.MULTILINE)
    work = typer.main.get_command(app).commands["study"].commands["work"]  # pyright: ignore[reportAttributeAccessIssue]
    known = {option for parameter in work.params for option in parameter.opts}
    assert {word for word in shlex.split(words) if word.startswith("--")} <= known


def test_the_job_file_of_kubernetes_runs_a_worker():
    job = yaml.safe_load((EXAMPLES / "kubernetes-job.yaml").read_text())
    assert (job["kind"], "completions" in job["spec"]) == ("Job", False)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["command"][:3] == ["cohort", "study", "work"]
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in job["spec"]["template"]["spec"]["volumes"]}
