"""Models with a chat template, made on the spot: the built-in one with turns, and one of the shape of Qwen2.5.

As of a base model, their end of sequence is not the end of a turn.
"""

from pathlib import Path

import torch
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_config, tiny_tokenizer
from cohort.harness.settings.run import RunSpec, parse_run
from real_data import real_data
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

SHORT = "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"

VOCABULARY = 151_936  # of the model; the tokenizer has fewer
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FIRST_SPECIAL = 151_643
TEMPLATE = (
    "{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe helpful.<|im_end|>\n' }}{% endif %}"
    "{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def chat_tokenizer(template=SHORT + OPEN, special=True) -> PreTrainedTokenizerFast:
    """The built-in tokenizer with turns of a chat."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<|im_start|>", "<|im_end|>"], special_tokens=special)
    tokenizer.chat_template = template
    return tokenizer


def llama(**changes):
    """The built-in model with another config, drawn with seed 0."""
    config = tiny_config()
    config.update(changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def chat_model(tokenizer):
    return llama(vocab_size=len(tokenizer))


def chat_folder(folder, template=SHORT + OPEN):
    save_model(folder, chat_model(chat_tokenizer()), chat_tokenizer(template))
    return str(folder)


def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, then names that nothing is written with, then the special tokens at Qwen's own ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    filler = [f"filler-{i}" for i in range(len(alphabet), FIRST_SPECIAL)]
    inner = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, *filler])}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    inner.decoder = decoders.ByteLevel()  # pyright: ignore
    inner.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token=SPECIAL[0], pad_token=SPECIAL[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def qwen_folder(folder: Path) -> Path:
    """A model folder, 10 million weights drawn with seed 0; the ids are those of Qwen2.5."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
            intermediate_size=128, tie_word_embeddings=True, bos_token_id=None, eos_token_id=FIRST_SPECIAL,
            max_position_embeddings=4096, initializer_range=0.1,
        )  # fmt: skip
        save_model(folder, Qwen2ForCausalLM(config), qwen_tokenizer())
    return folder


def qwen_run(folder: Path, **engine) -> RunSpec:
    """A run of three steps on GSM8K with a model that is saved in `folder`."""
    raw = {
        "model": str(qwen_folder(folder)), "task": {"name": "gsm8k", "path": str(real_data("gsm8k"))},
        "prompt": {"template_arguments": {"enable_thinking": False}},
        "algorithm": {"name": "grpo", "group_size": 2, "kl_beta": 0.0}, "engine": {"name": "transformers", **engine},
        "sampling": {"max_tokens": 8}, "rollouts_per_step": 4, "steps": 3,
        "evaluation": {"num_prompts": 1, "num_test_prompts": 1, "num_samples": 1}, "gates": {"stuck_groups": None},
    }  # fmt: skip
    return parse_run(raw, "test")
