"""What a command chooses for a model other than the built-in one: said, written out in full, and overruled by --set."""

import io
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from chats import chat_folder
from cohort.harness.api import runs as api_runs
from cohort.harness.api import settings as api_settings
from cohort.harness.api.settings import scale_settings
from cohort.harness.api.study import comparison, load_study
from cohort.harness.console.views import show_dry_run
from cohort.harness.policy.tiny import tiny_model
from cohort.harness.study.runner import dry_run
from factories import make_study

MODEL = "Qwen/Qwen2.5-0.5B"


def runs_of(sets):
    return [
        arm.spec for arm in comparison(["ppo", "grpo"], ["gsm8k"], MODEL, seeds=[0], settings=sets).spec.design_arms()
    ]


@pytest.fixture
def gpu(monkeypatch):
    """A machine with a GPU and vLLM, as far as a command asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    vllm = ModuleType("vllm")
    vllm.__spec__ = ModuleSpec("vllm", None)
    monkeypatch.setitem(sys.modules, "vllm", vllm)


def test_a_large_model_gets_rates_of_its_size_in_one_line_and_the_built_in_one_stays(capsys):
    assert scale_settings("tiny", []) == []
    assert capsys.readouterr().err == ""
    found = scale_settings(MODEL, [])
    said = " ".join(capsys.readouterr().err.split())
    assert "optimizer.learning_rate=1e-06" in said
    assert MODEL in said
    for spec in runs_of(found):
        assert (spec.optimizer.learning_rate, spec.optimizer.critic_learning_rate) == (1e-6, 1e-5)


@pytest.mark.parametrize(("algorithms", "has_critic"), [(["grpo", "rloo"], False), (["grpo", "ppo"], True)])
def test_a_comparison_names_only_rates_that_one_of_its_algorithms_has(algorithms, has_critic, capsys):
    study = comparison(algorithms, ["arithmetic"], MODEL)
    assert ("critic_learning_rate" in capsys.readouterr().err) == has_critic
    assert {arm.spec.optimizer.learning_rate for arm in study.spec.design_arms()} == {1e-6}


@pytest.mark.parametrize(
    ("given", "rate"), [("lora.rank=16", 1e-5), ("lora=null", 1e-6), ("optimizer.learning_rate=3e-6", 3e-6)]
)
def test_an_adapter_learns_ten_times_as_fast_and_a_given_rate_wins(given, rate):
    (spec, _) = runs_of([given, *scale_settings(MODEL, [given])])
    assert spec.optimizer.learning_rate == rate


def test_a_run_and_a_study_of_a_large_model_get_its_rates_unless_their_files_name_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(api_runs, "_in_its_group", lambda run, command: seen.append(run) or sys.exit())
    seen, file = [], tmp_path / "one.yaml"
    base = f"model: {MODEL}\ntask: arithmetic\nalgorithm: grpo\ndevice: cpu\n"
    for text, sets in ((base, []), (f"{base}optimizer: {{learning_rate: 3.0e-5}}\n", []), (base, ["model=tiny"])):
        file.write_text(text)
        with pytest.raises(SystemExit):
            api_runs.train(file, sets)
    assert [run.optimizer.learning_rate for run in seen] == [1e-6, 3e-5, 1e-4]
    assert capsys.readouterr().err.count("optimizer.learning_rate=1e-06") == 1
    study = "question: Q?\nseeds: [0]\nrun: {{{}, task: arithmetic, algorithm: grpo}}\nfactors: {{{}: [1, 2]}}"
    for run, factor, rate in (
        (f"model: {MODEL}", "algorithm.kl_beta", 1e-6),
        (f"model: {MODEL}", "optimizer.learning_rate", 1.0),
        ("steps: 3", "algorithm.kl_beta", 1e-4),
    ):
        file.write_text(study.format(run, factor))
        assert load_study(file).spec.design_arms()[0].spec.optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ("run", "sets", "typed", "rate", "told"),
    [
        ({}, [], "y", 1e-6, 1),
        ({}, [], "n", 2e-4, 1),
        ({}, [], None, 2e-4, 1),  # no terminal
        ({}, ["optimizer.learning_rate=5e-4"], "y", 5e-4, 0),  # the user's own word
        ({"lora": {}}, [], "y", 2e-4, 0),
        ({"optimizer": {"learning_rate": 3e-5}}, [], "y", 3e-5, 0),
        ({}, ["model=tiny"], "y", 2e-4, 0),
    ],
)
def test_who_leaves_the_rate_of_the_built_in_model_to_another_one_is_asked_once(
    run, sets, typed, rate, told, tmp_path, monkeypatch, capsys
):
    api_settings._takes.cache_clear()
    for name, answer in (("stdin", f"{typed}\n"), ("stderr", None)):
        stream = io.StringIO(answer) if answer else getattr(sys, name)
        monkeypatch.setattr(stream, "isatty", lambda: typed is not None, raising=False)
        monkeypatch.setattr(sys, name, stream)
    settings = {"model": MODEL, "task": "arithmetic", "algorithm": "grpo", "device": "cpu", "steps": 3}
    settings |= {"optimizer": {"learning_rate": 2e-4}, **run}
    study = {"question": "Q?", "seeds": [0, 1], "run": settings, "factors": {"algorithm.kl_beta": [0.0, 0.1]}}
    (tmp_path / "study.yaml").write_text(json.dumps(study))
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    loaded = load_study(tmp_path / "study.yaml", sets).spec.design_arms()
    assert {arm.spec.optimizer.learning_rate for arm in loaded} == {rate}
    seen = []
    monkeypatch.setattr(api_runs, "_in_its_group", lambda run, command: seen.append(run) or sys.exit())
    with pytest.raises(SystemExit):
        api_runs.train(tmp_path / "run.yaml", sets)
    assert [one.optimizer.learning_rate for one in seen] == [rate]
    assert capsys.readouterr().err.count("0.0002 suits tiny; for Qwen/Qwen2.5-0.5B 1e-06 is usual") == told


@pytest.mark.slow
def test_a_dry_run_names_the_likeliest_causes_of_a_weak_start(tmp_path, capsys):
    model = str(chat_folder(tmp_path))
    for name, told in (("tiny", []), (model, ["cut at 29 tokens (sampling.max_tokens", "mark no answer (task.shots"])):
        study = make_study(**{"run.model": name, "run.steps": 1, "run.sampling": {"max_tokens": 29}})
        show_dry_run("s", "Q?", dry_run(study, tmp_path / "runs", workers=1))
        out = capsys.readouterr().out
        assert ("If few answers of" in out) == bool(told) and [words for words in told if words not in out] == []


def test_a_gpu_brings_autocast_and_vllm_to_a_large_model_and_the_command_keeps_them(tmp_path, gpu, monkeypatch):
    tiny_model(0).save_pretrained(tmp_path)
    assert scale_settings(str(tmp_path), [], trains=False) == []
    spec = runs_of(scale_settings(MODEL, []))[0]
    assert (spec.autocast, spec.engine.name) == (True, "vllm")
    assert scale_settings(MODEL, [], trains=False) == ["autocast=true", 'engine.name="vllm"']
    sets = scale_settings(MODEL, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    again = [*sets, *scale_settings(MODEL, sets)]
    assert [spec.digest() for spec in runs_of(again)] == [spec.digest() for spec in runs_of(sets)]


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["engine.name=transformers", "engine.max_batch_rows=32"], (True, "transformers")),
        (["sampling.stop=[x]"], (True, "transformers")),  # which vLLM cannot do here
        (["engine=transformers", "autocast=false"], (False, "transformers")),
        (["dtype=bfloat16"], (False, "vllm")),
        (["device=cpu"], (False, "transformers")),
    ],
)
def test_what_is_set_wins_on_a_gpu_too(given, kept, gpu):
    spec = runs_of([*given, *scale_settings(MODEL, given)])[0]
    assert (spec.autocast, spec.engine.name) == kept
