"""The built-in model and tokenizer, and clear errors for folders that are no model."""

import json
from functools import partial
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import torch
from architectures import build_model
from cohort.harness.base.inputs import Unreachable, hub_answers
from cohort.harness.checks.preflight import check_runs
from cohort.harness.data import Prompt, PromptFormat
from cohort.harness.policy.model import check_model, load_policy, load_tokenizer, save_model
from cohort.harness.policy.sources import model_sources
from cohort.harness.policy.text import as_groups, load_codec
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.run.standalone import evaluate_once
from cohort.tasks.gsm8k import GSM8K
from factories import make_spec
from queues import python
from safetensors.torch import load_file, save_file


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path, tiny_model(0), tiny_tokenizer())
    return tmp_path


def test_tiny_weights_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = tiny_model(0).lm_head.weight
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first, tiny_model(0).lm_head.weight)
    assert not torch.equal(first, tiny_model(1).lm_head.weight)


def test_every_printable_character_survives_the_round_trip_and_others_become_their_ascii_spelling_or_unknown():
    text = "".join(map(chr, range(32, 127))) + "\n\tx"
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids
    assert tokenizer.decode(tokenizer("caf\u00e9 \u201cx\u201d 2\u00d73 \u2026")["input_ids"]) == 'cafe "x" 2*3 ...'
    assert tokenizer("\u6570")["input_ids"] == [tokenizer.unk_token_id]


def test_a_saved_folder_loads_back_with_settings_that_transformers_refuses_to_save(folder, tmp_path):
    check_model(str(folder))
    assert torch.equal(load_policy(str(folder), seed=0).lm_head.weight, tiny_model(0).lm_head.weight)
    assert load_tokenizer(str(folder)).eos_token_id == tiny_tokenizer().eos_token_id
    (folder / "manifest.json").unlink()
    edit(folder, generation_config__temperature=0.6, generation_config__top_p=0.9, config__max_length=30)
    save_model(tmp_path / "again", load_policy(str(folder), seed=0), tiny_tokenizer())
    saved = json.loads((tmp_path / "again/generation_config.json").read_text())
    assert (saved["temperature"], saved["top_p"]) == (0.6, 0.9)
    assert load_policy(str(tmp_path / "again"), seed=0).generation_config.temperature == 0.6


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer", "has no tokenizer"), ("config.json", r"has no config\.json"),
        ("model.safetensors", "no .*safetensors"), (None, "cannot be read"),
    ],
)  # fmt: skip
@pytest.mark.attack("A torn or incomplete model folder")
def test_a_folder_with_a_part_missing_or_torn_is_named_with_the_fix(folder, missing, message):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    for file in folder.glob(f"{missing}*"):
        file.unlink()
    with pytest.raises(ValueError, match=message) as error:
        check_model(str(folder))
    assert str(folder) in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("./nowhere", "is no folder"), ("/no/such/folder", "is no folder"), ("a/b/c", "is no folder"),
     ("tinny", "did you mean 'tiny'")],
)  # fmt: skip
def test_a_name_that_can_be_no_model_is_refused_and_a_hub_id_is_left_to_the_loader(name, message):
    with pytest.raises(ValueError, match=message):
        check_model(name)
    check_model("Qwen/Qwen2.5-0.5B-Instruct")


def edit(folder, **changes):
    """Changes settings of JSON files: `file__setting=value`."""
    for path, value in changes.items():
        name, key = path.split("__")
        file = folder / f"{name}.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))


def put(folder, **tensors):
    weights = load_file(folder / "model.safetensors") | {name.replace("__", "."): x for name, x in tensors.items()}
    save_file({k: x for k, x in weights.items() if x is not None}, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [(partial(put, model__layers__2__mlp__down_proj__weight=None), r"got none for model\.layers\.2\.mlp\.down_proj"),
     (partial(put, model__norm__weight=torch.ones(3)), r"shapes of its config\.json, got none for model\.norm\.weight"),
     (lambda folder: tiny_tokenizer(140).save_pretrained(folder), "got 100 embeddings for 140 tokens"),
     (partial(edit, config__quantization_config={"quant_method": "gptq", "bits": 4}), "got quantised ones")],
    ids=["missing", "shape", "tokens", "gptq"],
)  # fmt: skip
def test_an_odd_model_folder_is_refused_before_its_weights_load(folder, tmp_path, monkeypatch, change, message):
    (folder / "manifest.json").unlink()
    change(folder)
    spec = make_spec(model=str(folder))
    with pytest.raises(ValueError, match=message):
        check_runs([spec], tmp_path / "runs")
    if "got none" in message:  # as a model of the Hub is
        with pytest.raises(ValueError, match=message):
            load_policy(str(folder), seed=0)


def test_the_text_that_is_graded_is_the_text_that_was_sampled(folder):
    (folder / "manifest.json").unlink()
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})  # in no text: it needs no embedding
    tokenizer.save_pretrained(folder)
    edit(folder, tokenizer_config__clean_up_tokenization_spaces=True)
    codec = load_codec(str(folder), PromptFormat())
    ids = codec.tokenizer("7 .5 , do n't")["input_ids"]
    (group,) = as_groups([Prompt("a", "1", "1")], [(1,)], [(ids, [0.0] * len(ids), False)], codec)
    assert group.rollouts[0].text == "7 .5 , do n't"


def test_an_evaluation_beyond_the_models_positions_is_refused_before_it_loads(tmp_path):
    save_model(tmp_path / "model", build_model("gpt2", n_positions=16), tiny_tokenizer())
    spec = make_spec(model=str(tmp_path / "model"), steps=0, **{"sampling.max_tokens": 8})
    with pytest.raises(ValueError, match=r"must fit into .* context limit of 16 tokens, got 1\d \+ 8"):
        evaluate_once(spec, "test", tmp_path / "runs", "long")
    assert not (tmp_path / "runs/evaluate").exists()


_http = huggingface_hub.utils._http
httpx = getattr(_http, "httpx2", None) or _http.httpx  # which huggingface-hub 2 uses under another name


class NoNetwork(httpx.BaseTransport):
    asked = 0

    def handle_request(self, request):
        self.asked += 1
        raise httpx.ConnectError("no network")


def test_a_hub_that_cannot_be_reached_is_asked_once_and_not_again_for_each_file(monkeypatch):
    network = NoNetwork()
    hooks = {"request": [huggingface_hub.utils._http.hf_request_event_hook]}
    huggingface_hub.set_client_factory(lambda: httpx.Client(transport=network, event_hooks=hooks))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    hub_answers.cache_clear()
    try:
        assert model_sources("no/model") == {}
        with pytest.raises(ValueError, match="model 'no/model' must be here, as the Hub cannot be reached"):
            check_runs([make_spec(model="no/model")], Path("runs"))
        with pytest.raises(Unreachable, match="the Hub cannot be reached"):
            GSM8K(path="no/data").prompts("test")
        assert network.asked == 1
    finally:
        huggingface_hub.set_client_factory(huggingface_hub.utils._http.default_client_factory)
        hub_answers.cache_clear()


@pytest.mark.slow
def test_a_model_needs_no_scikit_learn_which_stays_available():
    code = "from cohort.harness.settings.run import parse_run; from cohort.harness.checks.memory import estimate_run;"
    code += "estimate_run(parse_run({'task': 'arithmetic', 'algorithm': 'grpo'}, ''))"
    code += "; from cohort.harness.policy.tiny import tiny_model; tiny_model(0)"
    code += "; import sys; assert 'transformers.models.llama.modeling_llama' in sys.modules"
    code += "; assert 'sklearn' not in sys.modules"
    code += "; from transformers.utils import is_sklearn_available; assert is_sklearn_available()"
    python(code, check=True)
