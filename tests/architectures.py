"""Small random models of many architectures, each with whatever it does to its logits, masks and positions on."""

from pathlib import Path

import torch
from cohort.harness.data import Prompt
from cohort.harness.engines.transformers import TransformersEngine
from cohort.harness.policy.library import import_generation
from cohort.harness.run.build import Run
from cohort.harness.run.guards.agreement import own_logprobs
from cohort.harness.run.learner import Learner
from cohort.harness.run.rollout import collate
from cohort.harness.settings.run import parse_run
from fakes import tiny_codec

_ENDS = {"vocab_size": 100, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0}
_PLAIN = {
    **_ENDS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
_LLAMA = {**_PLAIN, "head_dim": 8}
_GPT = {**_ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_WINDOW = {"sliding_window": 6}
_LATENT = {
    **_PLAIN, **_EXPERTS, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
    "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "first_k_dense_replace": 1,
}  # fmt: skip
_SSM = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_d_state": 8, "mamba_n_groups": 1,
        "mamba_chunk_size": 8}  # fmt: skip
_LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
           "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip


def _rope(kind, **settings):
    return {**_LLAMA, "rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


DYNAMIC = _rope("dynamic", factor=4.0)
LONGROPE = _rope("longrope", short_factor=[1.0, 1.1, 1.2, 1.3], long_factor=[2.0, 3.0, 4.0, 5.0],
                 original_max_position_embeddings=32) | {"original_max_position_embeddings": 32}  # fmt: skip

# A model type, after a slash what is special. The models of `REREAD` keep no cache of keys and values alone, those of
# `WHOLE` do not share prompts: they have windows, or count distances in columns of the cache.
SETTINGS = {
    "llama": {**_LLAMA, "attention_bias": True, "mlp_bias": True},
    "llama/tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama/dynamic": DYNAMIC,
    "llama/yarn": _rope("yarn", factor=4.0, original_max_position_embeddings=16),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": {**_LLAMA, **_EXPERTS},
    "gemma": _LLAMA,
    "phi": {**_PLAIN, "partial_rotary_factor": 0.5},
    "phi3/longrope": LONGROPE,
    "phimoe": {**_LLAMA, **_EXPERTS, "lm_head_bias": True},
    "granite": {**_LLAMA, "logits_scaling": 8.0, "embedding_multiplier": 6.0, "attention_multiplier": 0.1},
    "granitemoe": {**_LLAMA, **_EXPERTS, "logits_scaling": 8.0, "embedding_multiplier": 6.0},
    "cohere": {**_LLAMA, "logit_scale": 0.25},
    "minicpm3": {**_LATENT, "dim_model_base": 8},
    "nanochat": {**_LLAMA, "final_logit_softcapping": 2.0},
    "olmo2": _LLAMA,
    "stablelm": {**_PLAIN, "partial_rotary_factor": 0.5, "use_parallel_residual": True},
    "smollm3": {**_LLAMA, "no_rope_layers": [1, 0]},
    "glm4": {**_LLAMA, "attention_bias": True},
    "nemotron": _LLAMA,
    "mixtral": {**_LLAMA, **_EXPERTS},
    "deepseek_v3": _LATENT,
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neox": _LLAMA,
    "opt": {**_PLAIN, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "biogpt": _PLAIN,
    "bloom": {**_ENDS, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "falcon": _PLAIN,
    "falcon/alibi": {**_PLAIN, "alibi": True},
}
WHOLE = {
    "mistral": {**_LLAMA, **_WINDOW},
    "starcoder2": {**_LLAMA, **_WINDOW},
    "gemma2": {**_LLAMA, **_WINDOW, "final_logit_softcapping": 2.0, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**_LLAMA, **_WINDOW, "final_logit_softcapping": 3.0},
    "cohere2": {**_LLAMA, **_WINDOW, "logit_scale": 0.25},
    "olmo3": {**_LLAMA, **_WINDOW},
    "gpt_oss": {**_LLAMA, **_EXPERTS, **_WINDOW},
    "llama4_text": {**_LLAMA, **_EXPERTS, "intermediate_size_mlp": 48, "attention_chunk_size": 6,
                    "no_rope_layers": [1, 0], "interleave_moe_layer_step": 2},
    "gpt_neo": {**_ENDS, "hidden_size": 32, "num_layers": 2, "attention_types": [[["global", "local"], 1]],
                "num_heads": 4, "window_size": 6, "max_position_embeddings": 64},
    "mpt": {**_ENDS, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2},
}  # fmt: skip
REREAD = {
    "mamba": {**_ENDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8},
    "mamba2": {**_ENDS, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4, "head_dim": 16,
               "n_groups": 1, "chunk_size": 8},
    "falcon_h1": {**_LLAMA, **_SSM, "mamba_d_ssm": 32, "mamba_d_head": 8, "lm_head_multiplier": 0.3},
    "qwen3_next": {**_LLAMA, **_EXPERTS, **_LINEAR, "shared_expert_intermediate_size": 16},
    "jamba": {**_PLAIN, "num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1,
              "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "bamba": {**_PLAIN, **_SSM, "attn_layer_indices": [1]},
    "lfm2": {**_LLAMA, "layer_types": ["conv", "full_attention"], "conv_L_cache": 3},
    "minimax": {**_LLAMA, **_EXPERTS},
    "recurrent_gemma": {**_LLAMA, "num_hidden_layers": 3, "logits_soft_cap": 2.0, "attention_window_size": 6,
                        "lru_width": 32},
    "rwkv": {**_ENDS, "hidden_size": 32, "num_hidden_layers": 2, "context_length": 64},
    "openai-gpt": {**_ENDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}  # fmt: skip
SETTINGS |= WHOLE | REREAD
PROMPTS = [Prompt("a", "1+2=", "3"), Prompt("b", "12+345-6=", "351"), Prompt("c", "7*8", "56")]


def build_config(name, **changes):
    import_generation()
    from transformers import AutoConfig

    return AutoConfig.for_model(name.partition("/")[0], **{**SETTINGS[name], **changes})


def build_model(name, **changes):
    """A model with weights far enough from zero that every part of it matters."""
    config = build_config(name, **changes)
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.dim() > 1 else 0.06))
    return model


def small_run(model, **changes):
    """A run in progress on this model."""
    sampling = {"max_tokens": 12, "temperature": 0.8}
    raw = {"task": "arithmetic", "algorithm": "grpo", "sampling": sampling, "device": "cpu", **changes}
    spec = parse_run(raw, "test")
    engine = TransformersEngine(TransformersEngine.Settings(), model, tiny_codec())
    return Run(spec, engine, Learner(spec, model), None, Path(), tiny_codec())  # pyright: ignore


@torch.no_grad()
def differences(model):
    """Nats between the model's own forward pass and (engine, learner, learner with shared prompts); the last may be
    NaN: nothing was shared."""
    run = small_run(model)
    sampling = run.spec.sampling
    batch = collate(run.engine.generate(PROMPTS, 3, sampling, seed=0, step=0))
    own = own_logprobs(model, batch, sampling.temperature)
    shared = run.learner.logprobs(model, batch)
    was_shared = run.learner._prompt_states(model, batch) is not None
    run.learner.shares_prompts = False
    found = [batch.sampler_logprobs_BT, run.learner.logprobs(model, batch), shared]
    engine, learner, shared = (float((x - own).abs().max()) for x in found)
    return engine, learner, shared if was_shared else float("nan")
