"""What a command chooses for a model other than the built-in one: said, written out in full, and overruled by --set."""

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from cohort.harness.api import runs as api_runs
from cohort.harness.api.settings import scale_settings
from cohort.harness.api.study import comparison, load_study
from cohort.harness.policy.tiny import tiny_model

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


def test_a_checkpoint_of_the_built_in_model_is_no_large_model(tmp_path, gpu):
    tiny_model(0).save_pretrained(tmp_path)
    assert scale_settings(str(tmp_path), [], trains=False) == []


def test_a_gpu_brings_autocast_and_vllm_where_it_is_installed(gpu):
    spec = runs_of(scale_settings(MODEL, []))[0]
    assert (spec.autocast, spec.engine.name) == (True, "vllm")
    assert scale_settings(MODEL, [], trains=False) == ["autocast=true", 'engine.name="vllm"']


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


def test_the_command_that_reproduces_a_study_means_the_same_on_a_machine_without_gpu(gpu, monkeypatch):
    sets = scale_settings(MODEL, [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    again = [*sets, *scale_settings(MODEL, sets)]
    assert [spec.digest() for spec in runs_of(again)] == [spec.digest() for spec in runs_of(sets)]
