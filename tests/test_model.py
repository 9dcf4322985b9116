"""The built-in model and tokenizer, and clear errors for folders that are no model."""

import subprocess
import sys

import pytest
import torch
from cohort.harness.devices.device import resolve_device
from cohort.harness.policy.model import check_model, load_policy, load_tokenizer, save_model
from cohort.harness.policy.text import TextCodec
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path, tiny_model(0), tiny_tokenizer())
    return tmp_path


def test_tiny_has_about_167_thousand_parameters():
    # embedding 100 * 64, per layer 4 * 64 * 64 + 3 * 64 * 192 + 2 * 64, final norm 64; the head is the embedding
    assert sum(p.numel() for p in tiny_model(0).parameters()) == 100 * 64 + 3 * (4 * 64**2 + 3 * 64 * 192 + 128) + 64


def test_tiny_weights_depend_on_the_seed_and_on_nothing_else():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = tiny_model(0).lm_head.weight
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(first, tiny_model(0).lm_head.weight)
    assert not torch.equal(first, tiny_model(1).lm_head.weight)


def test_every_printable_character_survives_the_round_trip():
    text = "".join(map(chr, range(32, 127))) + "\n\tx"
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_other_characters_become_their_ascii_spelling_or_unknown():
    tokenizer = tiny_tokenizer()
    assert tokenizer.decode(tokenizer("caf\u00e9 \u201cx\u201d 2\u00d73 \u2026")["input_ids"]) == 'cafe "x" 2*3 ...'
    assert tokenizer("\u6570")["input_ids"] == [tokenizer.unk_token_id]


def test_completions_end_with_end_of_sequence_and_prompts_do_not():
    codec = TextCodec(tiny_tokenizer())
    assert codec.encode_completion("12")[-1] == codec.tokenizer.eos_token_id
    assert len(codec.encode("12")) == 2


def test_a_saved_folder_passes_the_check_and_loads_back(folder):
    check_model(str(folder))
    assert torch.equal(load_policy(str(folder), seed=0).lm_head.weight, tiny_model(0).lm_head.weight)
    assert load_tokenizer(str(folder)).eos_token_id == tiny_tokenizer().eos_token_id


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("tokenizer", "has no tokenizer"),
        ("config.json", r"has no config\.json"),
        ("model.safetensors", "no .*safetensors"),
    ],
)
@pytest.mark.attack("A torn or incomplete model folder")
def test_a_folder_with_a_part_missing_is_named_with_the_fix(folder, missing, message):
    for file in folder.glob(f"{missing}*"):
        file.unlink()
    with pytest.raises(ValueError, match=message) as error:
        check_model(str(folder))
    assert str(folder) in str(error.value)


@pytest.mark.attack("A torn or incomplete model folder")
def test_torn_weights_are_found_without_loading_them(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        check_model(str(folder))


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_path_that_does_not_exist_is_refused(name):
    with pytest.raises(ValueError, match="is no folder"):
        check_model(name)


def test_a_misspelt_builtin_gets_a_hint():
    with pytest.raises(ValueError, match="did you mean 'tiny'"):
        check_model("tinny")


def test_a_hub_id_is_left_to_the_loader():
    check_model("Qwen/Qwen2.5-0.5B-Instruct")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="device=cpu"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    "code",
    [
        "from cohort.harness.policy.tiny import tiny_model; tiny_model(0)",
        "from cohort.harness.spec.run import parse_run; from cohort.harness.checks.memory import estimate_run;"
        "estimate_run(parse_run({'task': 'arithmetic', 'algorithm': 'grpo'}, ''))",
    ],
    ids=["made", "estimated"],
)
def test_a_model_needs_no_scikit_learn_which_stays_available(code):
    code += "; import sys; assert 'transformers.models.llama.modeling_llama' in sys.modules"
    code += "; assert 'sklearn' not in sys.modules"
    code += "; from transformers.utils import is_sklearn_available; assert is_sklearn_available()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
