"""The command line: help, bad input, exit codes, one JSON document on stdout, progress on stderr, harmless text."""

import dataclasses
import json
import os
import re
import resource
import socket
import subprocess
import sys
import sysconfig
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from cohort.harness.api.machine import _allocator, check_machine
from cohort.harness.api.study import comparison
from cohort.harness.base import machine
from cohort.harness.cli import app
from cohort.harness.console import progress, terminal
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.mirror import address as mlflow_address
from cohort.harness.record.run import read_progress
from cohort.harness.settings.run import Optimizer
from factories import status, trial
from rich.console import Console
from test_docs import COMMANDS
from test_plugins import install

from cohort import evaluate, load_study, open_result, run

# Seconds instead of minutes: an untrained model, few rollouts, few held-out problems.
QUICK = [
    "task.num_train=64", "task.max_operands=3", "sampling.max_tokens=4", "gates.stuck_groups=null",
    "rollouts_per_step=8", "algorithm.group_size=4", "steps=2", "evaluation.num_prompts=4",
    "evaluation.num_test_prompts=4", "evaluation.num_samples=2", "checkpoints.every=1",
]  # fmt: skip
TRAIN = ["train", "--set", "task=arithmetic", "--set", "algorithm=grpo"]
STUDY = ["study", "run", "quickstart"]


def sets(*items: str) -> list[str]:
    return [word for item in items for word in ("--set", item)]


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("COHORT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("COHORT_TRACEBACK", raising=False)
    return tmp_path / "runs"


@pytest.fixture
def store(runs, new_runs):
    """An empty store in the runs folder; making one takes seconds, and two tests here do."""
    new_runs(runs)


def cohort_process(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "from cohort.harness.cli.app import main; main()", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(command, cohort):
    assert cohort(*command.split()[1:], "--help") == 0
    assert command in cohort.out.split("Examples")[1]


@pytest.mark.parametrize(("arguments", "words"), [
    ([*TRAIN, *sets("stepps=3")], "unknown key 'stepps'; did you mean 'steps'?"),
    ([*TRAIN, *sets("algorithm.group_size=12")], "must divide rollouts_per_step (128), got 12; use 8 or 16"),
    ([*TRAIN, "--name", "../up"], "--name must be letters, digits"),
    ([*TRAIN, *sets("model=./nowhere")], "'./nowhere', which is no folder"),
    (["train", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
    (["compare", "--algorithms", "ppo,grpoo", "--task", "arithmetic"], "did you mean 'grpo'?"),
    (["compare", "--algorithms", "ppo,ppo", "--task", "arithmetic"], "--algorithms must be distinct names, got"),
    (["compare", "--algorithms", "ppo", "--task", "arithmetic", "--seeds", "0,x"], "--seeds must be integers"),
    (["evaluate", "tiny", "--task", "arithmetic", "--split", "tset"], "--split must be one of train, validation"),
    (["study", "run", "quickstrat"], "unknown study 'quickstrat'"),
    ([*STUDY, "--workers", "-1"], "--workers must be a number of at least 1, or auto"),
    ([*STUDY, "--storage", "mysql://me:s3cret@db/x"], "--storage must be a URL as "),
    (["study", "show", "nowhere.yaml"], "nowhere.yaml: no such study file"),
    (["report", "nowhere"], "has no study 'nowhere'"),
    (["list", "settings", "optimzer"], "did you mean 'optimizer'?"),
])  # fmt: skip
def test_bad_input_is_a_message_and_exit_code_2_and_writes_nothing(arguments, words, cohort, runs):
    assert cohort(*arguments) == 2
    assert cohort.out == ""
    assert "Error: " in cohort.err and words in cohort.said
    assert "Traceback" not in cohort.err and "s3cret" not in cohort.err
    assert not runs.exists()


@pytest.mark.parametrize("command", [[*TRAIN], ["report", "quickstart"], ["ui"]], ids=lambda command: command[0])
def test_the_option_names_the_store_before_the_environment_does(command, cohort, runs, monkeypatch):
    monkeypatch.setenv(mlflow_address.TRACKING_URI, "ftp://environment")
    assert cohort(*command) == 2
    assert "got 'ftp://environment'" in cohort.err
    assert cohort(*command, "--mirror", "mlflow=ftp://option") == 2
    assert "got 'ftp://option'" in cohort.err
    assert not runs.exists()


def test_a_port_in_use_is_refused(cohort, runs):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cohort("ui", "--port", str(port)) == 2
    assert f"port {port} on 127.0.0.1 cannot be used" in cohort.err
    assert not runs.exists()


def test_a_traceback_is_shown_on_request(cohort, monkeypatch):
    monkeypatch.setenv("COHORT_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown key 'stepps'"):
        app.main([*TRAIN, *sets("stepps=3")])


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_plugin_that_raises_is_named_without_a_traceback(tmp_path, cohort, monkeypatch):
    source = "from cohort.harness.interfaces import Reward\nclass Boom(Reward):\n    def score(self, group):\n"
    install(tmp_path, monkeypatch, "explodes", source + "        1 / 0\n", "Boom", kind="reward")
    assert cohort(*TRAIN, *sets(*QUICK, "rewards.explodes=1")) == 1
    place = f"{tmp_path / 'plugin_explodes.py'}, line 4"
    assert f"Error: reward 'explodes' of package plugin_explodes failed ({place}): ZeroDivisionError" in cohort.err
    assert "Traceback" not in cohort.err


@pytest.mark.usefixtures("store")
def test_an_invalid_run_says_why_and_ends_with_exit_code_1(cohort):
    assert cohort(*TRAIN, *sets(*QUICK, "engine=scripted", "gates.mismatch_kl=1e-12"), "--json") == 1
    assert cohort.json()["state"] == "invalid" and "mismatch/kl was above 1e-12" in cohort.json()["reason"]


def test_a_bar_of_phases_is_lines_where_no_one_looks_at_a_terminal(capsys):
    with progress.phase_bar("tiny on arithmetic") as show:
        for done in (1, 2, 3):
            show("cold start", done, 3)
        show("test", 64, 512)
    lines = ["loading", "cold start 1/3", "test 64/512"]
    assert capsys.readouterr().err.splitlines() == [f"tiny on arithmetic: {line}" for line in lines]


def test_what_is_said_at_the_start_of_a_phase_stands_whole_above_the_bar(capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with progress.phase_bar("tiny") as show:
        show("first look", 0, 0, words := ", ".join(["half is cut"] * 12))
    assert f"\x1b[2Ktiny: first look, {words}\n" in capsys.readouterr().err


def test_algorithms_are_listed_with_facts_defaults_and_ranges(cohort):
    assert cohort("list", "algorithms", "--json") == 0
    found = {item["name"]: item for item in cohort.json()}
    facts = {name: (item["needs_critic"], item["sees_gold"]) for name, item in found.items()}
    told = [facts[name] for name in ("ppo", "grpo", "grpo_self_consistency")]
    assert told == [(True, True), (False, True), (False, False)]
    settings = {item["name"]: item for item in found["ppo"]["settings"]}
    assert (settings["gae_lambda"]["default"], settings["gae_lambda"]["range"]) == (1.0, ">= 0, <= 1")
    assert cohort("list", "algorithms") == 0
    assert [name for name, item in found.items() if name not in cohort.out or not item["summary"]] == []
    assert cohort("list", "algorithms", "opo") == 0  # in full, with its source
    assert "arXiv:2505.23585" in cohort.out and "gae_lambda" not in cohort.out
    assert cohort("list", "models") == 2
    kinds = "studies, algorithms, tasks, rewards, samplers, engines, stages, mirrors or settings"
    assert f"cohort list takes {kinds}, got 'models'" in cohort.err


def test_settings_are_listed_by_section_and_by_full_path(cohort):
    assert cohort("list", "settings", "optimizer", "--json") == 0
    found = {item["name"]: item for item in cohort.json()}
    assert set(found) == {f"optimizer.{key}" for key in Optimizer.model_fields}
    assert found["optimizer.weight_decay"]["range"] == ">= 0"
    assert cohort("list", "settings", "optimizer.weight_decay", "--json") == 0
    assert [item["name"] for item in cohort.json()] == ["optimizer.weight_decay"]
    assert cohort("list", "settings") == 0
    assert "rollouts_per_step" in cohort.out and "cohort list algorithms" in cohort.out
    assert cohort("list", "settings", "study", "--json") == 0
    assert {"factors", "seeds", "metric"} <= {item["name"] for item in cohort.json()}


def test_a_study_is_shown_with_its_budget(tmp_path, cohort):
    file = tmp_path / "sizes.yaml"
    file.write_text(
        "question: Do larger groups help?\nrun: {task: arithmetic, algorithm: grpo, rollouts_per_step: 32}\n"
        "factors: {algorithm.group_size: [4, 8], steps: [10, 20]}\nseeds: [0, 1, 2]\n"
    )
    assert cohort("study", "show", str(file), "--json") == 0
    # 4 arms x 3 seeds; 32 rollouts x (10 + 20 + 10 + 20) steps x 3 seeds
    assert cohort.json()["budget"] == {"trials": 12, "rollouts": 32 * 60 * 3}
    assert cohort("study", "show", str(file), "--set", "seeds=[0]", "--set", "rollouts_per_step=64") == 0
    assert "sizes: Do larger groups help?" in cohort.out
    assert "arms x seeds = 4 x 1 = 4 trials; 3,840 training rollouts" in cohort.out  # 64 x 60
    assert "group_size=4, steps=10" in cohort.out
    assert "The run of arm 'group_size=4, steps=10', with every setting:" in cohort.out
    assert "  num_inner_epochs: 1\n" in cohort.out  # a default


def test_doctor_finds_this_machine_sound(cohort, runs):
    assert cohort("doctor", "--json") == 0
    found = {check["name"]: check for check in cohort.json()}
    assert {"torch", "transformers", "mlflow", "optuna", "device", "cores", "runs folder", "disk", "vllm"} <= set(found)
    assert not runs.exists()


@pytest.mark.parametrize(("code", "state", "words"), [
    ("current_platform = SimpleNamespace(device_type='cuda')", "ok", "0.32.0; engine=vllm can run here, on cuda"),
    ("current_platform = SimpleNamespace(device_type='')", "advice", "0.32.0, without a device here"),
    ("raise ImportError('libcudart.so.13')", "advice", "does not import: libcudart.so.13"),
])  # fmt: skip
def test_doctor_says_whether_the_vllm_engine_can_run_here(code, state, words, tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.32.0'")
    (tmp_path / "vllm" / "platforms.py").write_text(f"from types import SimpleNamespace\n{code}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    for name in ("vllm", "vllm.platforms"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    (found,) = [check for check in check_machine(tmp_path) if check.name == "vllm"]
    assert (found.state, found.value) == (state, words)
    for name in ("vllm", "vllm.platforms"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(("platform", "gpus", "library", "state", "preloaded"), [
    ("linux", (), "libtcmalloc_minimal.so.4", "ok", {"LD_PRELOAD": "libtcmalloc_minimal.so.4"}),
    ("linux", (), None, "advice", {}),
    ("linux", ("0",), "libtcmalloc_minimal.so.4", "ok", {}),
    ("darwin", (), "libtcmalloc_minimal.so.4", "ok", {}),
])  # fmt: skip
def test_workers_on_a_cpu_get_tcmalloc_where_it_is_installed_and_doctor_says_so(
    platform, gpus, library, state, preloaded, monkeypatch
):
    monkeypatch.setattr(machine, "find_library", lambda name: library)
    monkeypatch.setattr(machine, "usable_gpus", lambda: gpus)
    monkeypatch.setattr(sys, "platform", platform)
    machine.allocator.cache_clear()
    try:
        assert machine.allocator() == preloaded
        assert _allocator().state == state
    finally:
        machine.allocator.cache_clear()


def test_doctor_finds_what_a_gpu_lacks(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 470.82.01\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setattr(machine, "usable_gpus", lambda: ("0",))
    monkeypatch.setattr(machine, "shared_memory_bytes", lambda: 64 * 2**20)  # Docker's own
    too_old = "The NVIDIA driver on your system is too old (found version 11040). Please update"
    monkeypatch.setattr(torch.cuda, "init", Mock(side_effect=RuntimeError(too_old)))
    found = {check.name: check for check in check_machine(tmp_path)}
    assert [found[name].state for name in ("driver", "compiler", "shared memory")] == ["problem", "advice", "advice"]
    assert "470.82.01" in found["driver"].value and "(found version 11040)" in found["driver"].value
    assert "CC" in str(found["compiler"].advice) and "--ipc=host" in str(found["shared memory"].advice)
    monkeypatch.delenv("CC")
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert machine.compiler() is None
    (tmp_path / "Python.h").touch()
    (tmp_path / "gcc").symlink_to("/bin/true")
    assert machine.compiler() == str(tmp_path / "gcc")


@pytest.mark.usefixtures("store")
def test_a_run_is_trained_shown_and_resumed_by_the_same_command_and_evaluated(cohort, runs):
    command = [*TRAIN, *sets(*QUICK), "--name", "one", "--json"]
    assert cohort(*command) == 0
    first = cohort.json()
    assert (first["state"], first["summary"]["rollouts"]) == ("complete", 16)  # 2 steps x 8 rollouts
    assert Path(first["directory"]) == runs / "train" / "one"
    assert "one | seed 0" in cohort.err
    assert re.search(r"(?m)^one: about .+, by arithmetic, for no such run ran here; about .+iB of memory$", cohort.err)
    assert read_progress(runs / "train" / "one")["phase"] == "test"
    assert cohort(*command) == 0
    assert cohort.json() == first
    assert "running" not in cohort.err  # it had ended: nothing is trained or evaluated twice
    assert cohort(*[*TRAIN, *sets(*QUICK, "seed=1"), "--name", "one"]) == 2
    assert "other settings" in cohort.err
    folder = runs / "train" / "one"
    for model in (folder, folder / "checkpoints" / "step-00000002"):
        assert cohort("evaluate", str(model), "--task", "arithmetic", *sets(*QUICK), "--json") == 0
        assert cohort.json()["spec"]["model"] == str(folder / "checkpoints" / "step-00000002" / "policy")


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_an_evaluation_keeps_its_metrics_with_intervals_and_every_completion(cohort, runs):
    from cohort.harness.mirror.store import connect

    quick = [item for item in QUICK if "num_test_prompts" not in item]
    command = ["evaluate", "tiny", "--task", "arithmetic", "--samples", "3", "--limit", "4", "--name", "kept"]
    command += sets(*quick)
    assert cohort(*command, "--json") == 0
    found = cohort.json()
    assert found["breakdown"]["operands"]["3"]["num_prompts"] == 4
    client = connect(runs)
    (experiment,) = [e for e in client.search_experiments() if e.name == "evaluate"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.metrics["test/accuracy_operands_3"] == 0
    assert run.data.metrics["test/pass_at_2"] == 0
    artifacts = Path(run.info.artifact_uri.removeprefix("file://"))
    kept = (runs / "evaluate" / "kept" / "test.jsonl").read_text().splitlines()
    assert [len(json.loads(line)["samples"]) for line in kept] == [3] * 4
    first = json.loads((runs / "evaluate" / "kept" / "run.json").read_text())["prompt"]
    assert first == (artifacts / "prompt.txt").read_text()
    settings = {path: json.loads(value) for path, _, value in (item.partition("=") for item in quick)}
    again = evaluate("tiny", "arithmetic", samples=3, limit=4, name="kept", settings=settings)
    metrics = again.metrics.set_index("metric")
    assert metrics.value.to_dict() == found["metrics"]
    assert metrics.loc["accuracy", ["low", "high"]].tolist() == found["intervals"]["accuracy"]
    assert dict(again.problems.values.tolist()) == {key: n / 3 for key, n in found["correct_counts"].items()}
    assert again.folder == runs / "evaluate" / "kept"
    assert len(client.search_runs([experiment.experiment_id])) == 1
    # An untrained model solves 0 of 4 problems; Wilson's upper end is z^2 / (n + z^2) = 3.8415 / 7.8415.
    assert found["intervals"]["accuracy"] == pytest.approx([0, 0.489891], abs=1e-5)
    assert cohort(*command) == 0
    assert all(words in cohort.out for words in ("4 problems", "mean@3", "0.0 % to 49.0 %", "operands"))


def test_a_task_is_shown_as_the_policy_and_a_chat_model_read_it(cohort, tmp_path):
    from chats import chat_folder

    assert cohort("task", "show", "arithmetic", "-n", "2", "--json") == 0
    plain = cohort.json()
    assert plain["sizes"] == {"train": 8192, "validation": 512, "test": 1024}
    assert [set(problem) for problem in plain["problems"]] == [{"id", "prompt", "gold", "tags"}] * 2
    assert cohort("task", "show", "arithmetic", "-n", "1", "--model", "tiny") == 0
    assert f"{len(plain['problems'][0]['prompt'])} tokens" in cohort.out
    command = ["task", "show", "arithmetic", "-n", "1", "--model", chat_folder(tmp_path), "--json"]
    assert cohort(*command, "--set", "prompt.system=Be brief.") == 0
    chat = cohort.json()

    def in_words(sum_: str) -> str:
        return f"Compute {sum_.removesuffix('=')}. End with #### and the number."

    head, tail = "<|im_start|>system:Be brief.<|im_end|><|im_start|>user:", "<|im_end|><|im_start|>assistant:"
    assert chat["problems"][0]["prompt"] == head + in_words(plain["problems"][0]["prompt"]) + tail
    assert chat["worked_solution"] == {
        "prompt": head + in_words(plain["worked_solution"]["prompt"]) + tail,
        "completion": plain["worked_solution"]["completion"] + "<|im_end|>",
    }
    assert cohort(*command[:-1], "--set", "prompt.format=plain") == 0
    assert "A completion ends at <eos> or <|im_end|>" in cohort.out
    assert cohort("task", "show", "arithmetic", "--model", "tiny", "--set", "prompt.format=chat") == 2
    assert "need a chat template, which the tokenizer of 'tiny' lacks" in cohort.err


@pytest.mark.slow
@pytest.mark.usefixtures("store")
def test_a_study_with_an_invalid_trial_goes_on_is_reported_and_ends_with_exit_code_1(cohort, tmp_path, runs, capsys):
    file = tmp_path / "rates.yaml"
    file.write_text(
        "question: Which learning rate?\nrun: {task: arithmetic, algorithm: grpo, cold_start: {steps: 3}}\n"
        "factors: {cold_start.learning_rate: [1.0e+30, 0.001]}\n"
    )
    command = ["study", "run", str(file), "--seeds", "0", *sets(*QUICK), "--workers", "1"]
    assert cohort(*command, "--json") == 1
    found = cohort.json()
    ended = [("cold_start.learning_rate=1e+30", 0, "invalid"), ("cold_start.learning_rate=0.001", 0, "complete")]
    assert [(trial["arm"], trial["seed"], trial["state"]) for trial in found["trials"]] == ended
    assert "cold_start.learning_rate" in found["trials"][0]["reason"]
    assert Path(found["report"]) == runs / "studies" / "rates" / "report" / "index.html"
    assert Path(found["report"]).stat().st_size > 1000
    assert "learning_rate=0.001 | seed 0: complete" in cohort.err

    assert cohort("study", "status", "rates", "--json") == 1
    assert cohort.json()["counts"] == {"invalid": 1, "complete": 1}
    assert cohort("study", "status", "rates") == 1
    assert "1 invalid" in cohort.out
    assert cohort("study", "status", "rates", "--watch") == 0 and "2/2 trials have ended" in cohort.out
    assert cohort("list", "studies", "--json") == 0
    assert {"name": "rates", "where": "in the runs folder", "question": "Which learning rate?"} in cohort.json()
    assert cohort("study", "show", "rates", "--json") == 0
    assert cohort.json()["budget"] == {"trials": 2, "rollouts": 32}  # 2 arms x 2 steps x 8

    assert cohort("study", "run", "rates") == 1  # as it was started, wherever its file is; nothing is left to do
    assert "Continuing 'rates'" in cohort.err
    assert found["answer"] in cohort.out
    assert "learning_rate=1e+30 | seed 0: invalid (" in cohort.out
    assert f"Reproduce: cohort study run {file} --set task.num_train=64" in cohort.out
    assert f"--set {QUICK[-1]} --set 'seeds=[0]'" in cohort.out

    Path(found["report"]).unlink()
    settings = {path: json.loads(value) for path, _, value in (item.partition("=") for item in QUICK)}
    result = run(load_study(file).with_set(seeds=[0], **settings), workers=1)  # from Python it is the same study
    assert "learning_rate=1e+30 | seed 0: invalid (" in capsys.readouterr().out
    assert open_result("rates").trials.equals(result.trials)
    assert Path(found["report"]).exists()

    assert cohort(*command, *sets("steps=3")) == 2  # another study under the same name


def test_an_interrupted_study_ends_with_exit_code_130(cohort, monkeypatch):
    monkeypatch.setattr("cohort.harness.study.runner.run_study", lambda *_, **__: status(trial("a", "stopped")))
    assert cohort("compare", "--algorithms", "grpo", "--task", "arithmetic", "--workers", "1") == 130
    assert (cohort.out, cohort.err) == ("", "Interrupted. The same command continues where it stopped.\n")


@pytest.mark.parametrize(
    ("die_at", "told"), [(0, "No completion is kept yet."), (1, "0 problems and 1 "), (2, "2 problems and 0 ")]
)
@pytest.mark.usefixtures("store")
def test_an_interrupted_evaluation_says_what_is_kept(die_at, told, cohort, runs, monkeypatch):
    generate, calls = TransformersEngine.generate, iter(range(9))

    def interrupted(*arguments, **keywords):
        if next(calls) == die_at:
            raise KeyboardInterrupt
        return generate(*arguments, **keywords)

    monkeypatch.setattr(TransformersEngine, "generate", interrupted)
    monkeypatch.setattr("cohort.harness.run.evaluate.PROMPTS_AT_ONCE", 2)
    assert cohort("evaluate", "tiny", "--task", "arithmetic", "--limit", "4", "--samples", "1", "--name", "one") == 130
    kept = f"completions of others are kept in {runs / 'evaluate' / 'one'}; the same command continues there."
    assert cohort.err.splitlines()[-1] == f"Interrupted. {told}{kept if die_at else ''}"


@pytest.mark.attack("Hostile text in a terminal")
def test_foreign_text_reaches_the_terminal_harmless(capsys):
    hostile = terminal.plain("[bold red]x[/]\x1b[31m\x07 a\nb\u202etxt \u200b\x9b2J \ud800end")
    assert (hostile.plain, hostile.spans) == ("[bold red]x[/][31m a btxt 2J end", [])
    terminal.show_table("", ["completion"], [["[link=http://x]4[/link]\x1b]0;owned\x07"]])
    terminal.fail("first [red]\n  second \x1b[2J")
    out, err = capsys.readouterr()
    assert "[link=http://x]4[/link]]0;owned" in out and not {"\x1b", "\x07"} & {*out}
    assert err == "Error: first [red]\n  second [2J\n"
    terminal.print_json({"a": float("nan"), "b": (1, float("inf")), "c": Path("x"), 3: None})  # no number JSON lacks
    assert json.loads(capsys.readouterr().out) == {"a": None, "b": [1, None], "c": "x", "3": None}


@pytest.mark.parametrize(("seconds", "text"), [
    (None, "-"), (float("inf"), "-"), (0.0, "0 s"), (4.12, "4.1 s"), (9.98, "10 s"), (59.4, "59 s"),
    (59.6, "1 min 00 s"), (185, "3 min 05 s"), (7800, "2 h 10 min"),
])  # fmt: skip
def test_durations_read_as_a_person_says_them(seconds, text):
    assert terminal.duration(seconds) == text


def test_without_a_terminal_a_study_prints_changes_and_rare_heartbeats(capsys):
    clock = SimpleNamespace(now=0.0)
    view = progress.LineView(lambda: clock.now)

    def printed() -> list[str]:
        return capsys.readouterr().err.splitlines()

    view.update(status(trial("a", "waiting"), trial("b", "waiting")))
    assert printed() == []
    view.update(status(trial("a", "running", "train", 0, 10, steps=10), trial("b", "waiting")))
    assert printed() == ["a | seed 0: running; 0/2 trials done"]
    for clock.now in range(1, 30):
        view.update(status(trial("a", "running", "train", 1, 10, step=1, steps=10), trial("b", "waiting")))
    assert printed() == []
    clock.now = 30
    more = {"step": 5, "steps": 10, "left": 36.2, "accuracy": 0.25, "tokens_per_second": 1234.5}
    half = status(trial("a", "running", "train", 5, 10, **more), trial("b", "waiting"))
    view.update(dataclasses.replace(half, left=109.0))
    assert printed() == [
        "0/2 trials done, 1 min 49 s left",
        "  a | seed 0: train 5/10, 36 s left, accuracy 25.0 %, 1,234 tokens/s",
    ]
    evaluating = trial("a", "running", "validation", 3, 8, step=5, steps=10)
    clock.now = 70
    view.update(status(evaluating, trial("b", "waiting")))
    assert "train 5/10, validation 3/8" in printed()[1]
    view.update(status(trial("a", "invalid", reason="the loss is nan\x1b[2J"), trial("b", "running")))
    assert printed() == [
        "a | seed 0: invalid (the loss is nan[2J); 1/2 trials done, 1 invalid",
        "b | seed 0: running; 1/2 trials done, 1 invalid",
    ]


def test_on_a_terminal_a_study_is_a_page_with_a_line_for_each_arm(monkeypatch):
    out = StringIO()
    screen = Console(file=out, force_terminal=True, width=140, color_system=None)
    monkeypatch.setattr(progress, "console", lambda stderr: screen)
    with progress.study_view() as view:
        waits = trial("new", "running", "waiting for the shared cold start")
        view(status(trial("[b]arm", "running", "cold start", 30, 400), trial("old", "complete"), waits))
    assert "1 running, cold start 30/400" in out.getvalue() and "1/3 trials have ended, - left" in out.getvalue()
    assert "[b]arm" in out.getvalue() and "for the shared cold start " in out.getvalue() and "0/0" not in out.getvalue()


@pytest.mark.slow
@pytest.mark.attack("Output that is no file or cannot hold the text")
def test_text_that_the_terminal_cannot_show_is_escaped_and_a_full_output_is_said_in_one_sentence(tmp_path):
    (tmp_path / "greek.yaml").write_text("question: \u03a0\u03bf?\nrun: {task: arithmetic, algorithm: grpo}\n", "utf-8")
    code = "from cohort.harness.cli.app import main; main()"
    command = [sys.executable, "-c", code, "study", "show", str(tmp_path / "greek.yaml")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert r"\u03a0\u03bf" in shown.stdout
    if Path("/dev/full").exists():
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1)
        assert ended.stderr.startswith("Error: a disk is full")


def test_an_error_names_the_arguments_of_a_function_and_the_options_of_a_command(cohort):
    """The option `--split` is among the bad input above."""
    with pytest.raises(ValueError, match="`split` must be one of train, validation, test, got 'dev'"):
        evaluate("tiny", "arithmetic", split="dev")
    with pytest.raises(ValueError, match="`tasks` must be distinct names, got 'a,a'"):
        comparison(["grpo"], ["a", "a"])
    assert cohort("compare", "--algorithms", "grpo", "--task", "a,a") == 2
    assert "--task must be distinct names, got 'a,a'" in cohort.err


# Ends in the middle of the imports of a command, before it has a graceful way to stop.
EARLY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with SIGINT ignored
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from cohort.harness.cli.app import main
main(sys.argv[2:])
"""


@pytest.mark.attack("Ctrl-C at the start of a command")
@pytest.mark.parametrize("module", ["typer", "torch"])
def test_an_interrupt_during_the_imports_ends_without_a_traceback(module, tmp_path):
    arguments = ["train", "--set", "task=arithmetic", "--set", "algorithm=grpo", "--runs", os.fspath(tmp_path)]
    command = [sys.executable, "-c", EARLY, module, *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 130, ended.stderr
    assert "Traceback" not in ended.stderr
    assert not any(os.scandir(tmp_path))


@pytest.mark.attack("A process in which no command can run")
@pytest.mark.parametrize(
    ("change", "optimize", "words"),
    [
        (None, "2", "PYTHONOPTIMIZE must be below 2, got 2"),
        (lambda: os.rmdir(os.getcwd()), "", "the working folder does not exist any more"),
        (lambda: resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30)), "",
         "the address space (`ulimit -v`) must be at least 1310720 KiB, got 1048576"),
    ],
)  # fmt: skip
def test_a_process_in_which_no_command_can_run_is_refused_in_one_sentence(change, optimize, words, tmp_path):
    here = os.fspath(Path(__file__).resolve().parents[1])
    (folder := tmp_path / "here").mkdir()
    environment = {**os.environ, "PYTHONOPTIMIZE": optimize, "PYTHONPATH": here}
    ended = subprocess.run(
        [sys.executable, "-m", "cohort", "list", "studies"],
        capture_output=True, text=True, check=False, cwd=folder, preexec_fn=change, env=environment,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"Error: {words}")
    assert len(ended.stderr.splitlines()) == 1
