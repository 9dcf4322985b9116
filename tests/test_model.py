"""The built-in model and tokenizer, and clear errors for folders that are no model."""

import pytest
import torch
from cohort.harness.devices.device import resolve_device
from cohort.harness.policy.model import check_model, load_policy, load_tokenizer, save_model
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from queues import python


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
        (None, "cannot be read"),
    ],
)
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_is_refused_where_there_is_none():
    with pytest.raises(ValueError, match="device=cpu"):
        resolve_device("cuda")


@pytest.mark.slow
def test_a_model_needs_no_scikit_learn_which_stays_available():
    code = "from cohort.harness.settings.run import parse_run; from cohort.harness.checks.memory import estimate_run;"
    code += "estimate_run(parse_run({'task': 'arithmetic', 'algorithm': 'grpo'}, ''))"
    code += "; from cohort.harness.policy.tiny import tiny_model; tiny_model(0)"
    code += "; import sys; assert 'transformers.models.llama.modeling_llama' in sys.modules"
    code += "; assert 'sklearn' not in sys.modules"
    code += "; from transformers.utils import is_sklearn_available; assert is_sklearn_available()"
    python(code, check=True)
