"""Adapters and mixed precision: what is trained, what stays, and that a run resumes."""

import shutil

import numpy as np
import pytest
import torch
from chats import llama
from cohort.harness.base.inputs import InputsChanged
from cohort.harness.checks.memory import estimate
from cohort.harness.policy import lora
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.lora import adapter_off, adapter_weights, add_adapter, base_weights
from cohort.harness.policy.model import check_model, load_policy, save_model
from cohort.harness.policy.sources import Base, model_sources
from cohort.harness.policy.tiny import tiny_model, tiny_tokenizer
from cohort.harness.run.guards.sync import _learner_scores
from cohort.harness.run.learner import Learner
from factories import make_spec
from safetensors.torch import load_file
from test_learner import make_batch
from transformers import AutoConfig, AutoModelForCausalLM

LORA = {"rank": 4, "alpha": 8.0}


def spec_of(algorithm="grpo", **changes):
    fixed = {"rollouts_per_step": 8, "lora": LORA, "optimizer": {"learning_rate": 1e-2}}
    return make_spec({"name": algorithm, "group_size": 2}, **{**fixed, **changes})


def adapted(algorithm="grpo", model=None, **changes):
    """(spec, policy with an adapter, learner)."""
    spec, policy = spec_of(algorithm, **changes), model or tiny_model(0)
    assert spec.lora is not None
    add_adapter(policy, spec.lora, spec.seed)
    return spec, policy, Learner(spec, policy)


def logprobs(policy, batch):
    with torch.no_grad():
        return token_logprobs(policy, batch.tokens_BT, batch.completion_mask_BT, 1.0)[0]


def updated(spec, learner, batch):
    batch = spec.algorithm.advantages(learner.annotate(batch))
    return learner.update(batch, 0)


def test_a_new_adapter_changes_nothing_and_only_it_is_trained():
    batch = make_batch(tiny_model(0))
    spec, policy, learner = adapted()
    assert learner.reference is None  # it is the model without its adapter
    before = logprobs(tiny_model(0), batch)
    assert torch.equal(logprobs(policy, batch), before)
    updated(spec, learner, batch)
    after = logprobs(policy, batch)
    assert (after - before).abs().max() > 1e-3
    with adapter_off(policy):
        assert torch.equal(logprobs(policy, batch), before)
    assert torch.equal(logprobs(policy, batch), after)
    assert torch.allclose(learner.annotate(batch).ref_logprobs_BT, before, atol=1e-6)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    # 7 linear layers (q, k, v, o, gate, up, down) in each of 3 blocks, two matrices each; the head has none
    assert len(trained) == 7 * 3 * 2
    assert trained == adapter_weights(policy).keys()
    assert len(learner.optimizers["policy"].param_groups[0]["params"]) == len(trained)
    _, again, other = adapted(seed=1)
    other.load_state({}, learner.state())
    assert torch.equal(logprobs(again, batch), after)


def test_a_saved_adapter_alone_loads_merged_into_its_base_and_into_peft_and_does_the_same(tmp_path):
    from peft import PeftModel

    batch = make_batch(tiny_model(0))
    spec, policy, learner = adapted()
    updated(spec, learner, batch)
    plain = tiny_model(0).state_dict()
    assert all(torch.equal(value, plain[name]) for name, value in base_weights(policy).items())
    assert base_weights(policy).keys() == plain.keys()
    save_model(tmp_path, policy, tiny_tokenizer(), base=Base.of("tiny", 0))
    loaded = load_policy(str(tmp_path), seed=7)  # the seed of the base is the one that it was trained with
    assert torch.allclose(logprobs(loaded, batch), logprobs(policy, batch), atol=1e-5)
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["adapter_model.safetensors"]
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum(x.numel() for x in saved.values()) == sum(x.numel() for x in adapter_weights(policy).values())
    theirs = PeftModel.from_pretrained(tiny_model(0), tmp_path)
    assert torch.equal(logprobs(theirs.base_model.model, batch), logprobs(policy, batch))


@pytest.mark.attack("A base model replaced under its adapter")
def test_an_adapter_whose_base_was_altered_or_deleted_is_refused(tmp_path):
    save_model(tmp_path / "base", tiny_model(3), tiny_tokenizer())
    _, policy, _ = adapted()
    save_model(tmp_path / "adapter", policy, tiny_tokenizer(), base=Base.of(str(tmp_path / "base"), 0))
    name = str(tmp_path / "adapter")
    assert torch.equal(load_policy(name, seed=0).lm_head.weight, tiny_model(3).lm_head.weight)
    assert "model " + str(tmp_path / "base") in model_sources(name)  # a run on the adapter is bound to both
    save_model(tmp_path / "base", tiny_model(4), tiny_tokenizer())
    with pytest.raises(InputsChanged, match=r"model\.safetensors"):
        load_policy(name, seed=0)
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(ValueError, match="is an adapter and needs the model that it changes"):
        check_model(name)


def test_the_same_seed_draws_the_same_adapter_and_no_random_state_is_touched():
    before = torch.random.get_rng_state()
    one, same, other = (adapter_weights(adapted(seed=seed)[1]) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert any(not torch.equal(one[name], other[name]) for name in one)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_critic_shares_the_frozen_weights_and_has_an_adapter_of_its_own():
    spec, policy, learner = adapted("ppo")
    shared = {p.data_ptr() for p in policy.parameters() if not p.requires_grad}
    for name, parameter in learner.critic.named_parameters():
        assert (parameter.data_ptr() in shared) == (not parameter.requires_grad), name
    state = learner.state()["critic_parameters"]
    assert {"head.weight", "head.bias"} < state.keys()
    assert all("lora_" in name or name.startswith("head.") for name in state)
    batch = make_batch(tiny_model(0))
    updated(spec, learner, batch)
    with adapter_off(policy):
        assert torch.equal(logprobs(policy, batch), logprobs(tiny_model(0), batch))


def test_a_bfloat16_model_gets_a_float32_adapter():
    spec, policy, learner = adapted("ppo", tiny_model(0).bfloat16(), dtype="bfloat16")
    assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
    metrics = updated(spec, learner, make_batch().replace(sampler_logprobs_BT=logprobs(policy, make_batch())))
    assert metrics["policy/grad_norm"] > 0
    assert learner.critic.head.weight.dtype == torch.float32


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_autocast_keeps_frozen_products_in_bfloat16_and_computes_the_same(algorithm, monkeypatch):
    def found():
        spec, policy, learner = adapted(algorithm, llama(tie_word_embeddings=False), autocast=True)
        metrics = updated(spec, learner, make_batch())
        with torch.no_grad():
            return policy, metrics, learner.logprobs(policy, make_batch())

    policy, metrics, logprobs = found()
    kinds = {name.rpartition(".")[0].rpartition(".")[2]: p.dtype for name, p in policy.named_parameters()}
    assert (kinds["base_layer"], kinds["lm_head"]) == (torch.bfloat16, torch.bfloat16)
    assert {kinds["norm"], kinds["embed_tokens"], kinds["default"]} == {torch.float32}
    assert np.isfinite(_learner_scores(policy, [((5, 9, 11, 30), 2)])).all()  # outside of the learner
    monkeypatch.setattr(lora, "hold_frozen_products", lambda *_: None)
    policy, others, theirs = found()
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
    assert metrics == others
    assert torch.equal(logprobs, theirs)


REFERENCES = {  # and whether their products alone are read, so that bfloat16 holds what autocast computes
    "llama": ({"num_hidden_layers": 2}, True),
    "qwen2": ({"num_key_value_heads": 2}, True),  # with biases
    "gemma2": ({"head_dim": 16, "final_logit_softcapping": 5.0}, True),
    "mamba": ({"state_size": 4}, False),
}


@pytest.mark.parametrize("kind", REFERENCES)
def test_under_autocast_a_reference_holds_its_products_in_bfloat16_and_scores_the_same(kind):
    own, is_held = REFERENCES[kind]
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "intermediate_size": 96, "num_attention_heads": 4}
    sizes |= {"tie_word_embeddings": False, "vocab_size": 100, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **{**sizes, **own})
    spec = spec_of(lora=None, autocast=True, kl={"refresh_reference_every": 1})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        learner = Learner(spec, AutoModelForCausalLM.from_config(config).eval())
    batch, reference = make_batch(), learner.reference
    dtypes = {name: p.dtype for name, p in reference.named_parameters()}
    assert torch.bfloat16 in dtypes.values() if is_held else {*dtypes.values()} == {torch.float32}
    assert {t for name, t in dtypes.items() if "norm" in name or "embed" in name} == {torch.float32}
    size = sum(p.numel() * p.element_size() for p in reference.parameters())
    assert estimate(spec, config, 8, torch.device("cpu"))["reference"] == size
    for step in (0, 1):  # the second refreshes the reference
        with torch.no_grad():
            scores = [learner.logprobs(model, batch) for model in (learner.policy, reference)]
            # in 1 of 85 draws mamba's `out_proj` gives two copies of equal weights, on equal input, other last digits
            assert torch.equal(*scores) if is_held else torch.allclose(*scores, atol=0.01)
            assert scores[0].any()
            for parameter in learner.policy.parameters():
                parameter.add_(torch.randn(parameter.shape), alpha=0.1)
            assert not torch.equal(learner.logprobs(learner.policy, batch), scores[0])
        learner.begin_step(step + 1)


def test_chosen_layers_get_the_adapter_and_unknown_names_are_refused():
    _, policy, _ = adapted(lora={"targets": ["q_proj", "v_proj"]})
    assert {name.split(".")[-4] for name in adapter_weights(policy)} == {"q_proj", "v_proj"}
    with pytest.raises(ValueError, match=r"lora\.targets must name linear layers of the model \(down_proj, .*query"):
        adapted(lora={"targets": ["query"]})
    for embedding in ("lm_head", "embed_tokens"):  # one weight in this model
        with pytest.raises(ValueError, match=f"lora.targets must .* without an embedding's weight, got .*{embedding}"):
            adapted(lora={"targets": [embedding]})
    adapted(lora={"targets": ["lm_head"]}, model=llama(tie_word_embeddings=False))


def test_mixed_precision_keeps_float32_weights_and_stays_near_the_full_precision():
    batch = make_batch(tiny_model(0))
    spec, policy = spec_of(lora=None, autocast=True), tiny_model(0)
    learner = Learner(spec, policy)
    with torch.no_grad():
        mixed = learner.logprobs(policy, batch)
    assert 0 < (mixed - logprobs(policy, batch)).abs().max() < 0.1
    assert updated(spec, learner, batch.replace(sampler_logprobs_BT=mixed))["mismatch/kl"] < 1e-6
    assert {p.dtype for p in policy.parameters()} == {torch.float32}
