"""An adapter that peft saved is a model: merged into the base that it names."""

import json
from functools import partial

import pytest
import torch
from cohort.harness.policy.model import check_model, load_policy, load_tokenizer, save_model
from cohort.harness.policy.sources import model_sources
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model

IDS = torch.arange(5, 25)[None]
load = partial(load_policy, seed=0)


@pytest.fixture
def saved(tmp_path, monkeypatch):
    """A function that saves an adapter of random weights on a base of its own, and gives its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_model(tmp_path / "base", tiny_model(3), tiny_tokenizer())

    def save(config):
        adapter = get_peft_model(load_policy(str(tmp_path / "base"), seed=0), config)
        for name, parameter in adapter.named_parameters():
            if any(part in name for part in ("lora_", "ia3_", "modules_to_save")):
                torch.nn.init.normal_(parameter, std=0.3)
        adapter.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
        adapter.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return save


@pytest.mark.parametrize(
    "config",
    [LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "up_proj"], use_rslora=True, alpha_pattern={"q_proj": 2}),
     LoraConfig(r=2, target_modules=["up_proj"], use_dora=True, modules_to_save=["norm"]),
     IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])],
    ids=["rslora", "dora", "ia3"],
)  # fmt: skip
def test_an_adapter_that_peft_saved_is_its_base_with_the_adapter_merged(saved, tmp_path, config):
    folder = saved(config)
    check_model(str(folder))
    ours, theirs = load_policy(str(folder), seed=0), PeftModel.from_pretrained(tiny_model(3).eval(), folder)
    with torch.no_grad():
        expected = theirs(input_ids=IDS).logits
        assert (expected - tiny_model(3)(IDS).logits).abs().max() > 0.1
        assert torch.allclose(ours(IDS).logits, expected, atol=2e-4)
    assert all(parameter.requires_grad for parameter in ours.parameters())
    assert load_tokenizer(str(folder)).get_vocab() == tiny_tokenizer().get_vocab()  # the base's
    assert model_sources(str(folder)).keys() == {f"model {folder}", f"model {tmp_path / 'base'}"}


@pytest.mark.parametrize(
    ("refuse", "target", "change", "message"),
    [(check_model, "q_proj", {"base_model_name_or_path": None}, "set base_model_name_or_path"),
     (check_model, "q_proj", {"base_model_name_or_path": "/none"}, "needs the model that it changes: .*is no folder"),
     (check_model, "q_proj", {"peft_type": "PREFIX_TUNING"}, "to be merged"),
     (load, "q_proj", {"target_modules": ["v_proj"]}, "in one of the two only"),
     (load, "lm_head", {}, "without an embedding's weight, got lm_head")],
)  # fmt: skip
def test_an_adapter_that_cannot_be_merged_is_refused(saved, refuse, target, change, message):
    folder = saved(LoraConfig(target_modules=[target]))
    file = folder / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=message):
        refuse(str(folder))
