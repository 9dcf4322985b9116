"""What both sides of the speed comparison train: model folders made in code, prompts and reward.

The models are untrained Llamas whose chance to end is set by construction: every embedding shares one constant
coordinate that no layer writes to, so the end token's own value there (embeddings are tied) is a bias on its logit. It
is set so that a token ends the text with a probability of 1/25 for natural stops, and never for suppressed ones. With
a learning rate of 1e-6 the lengths stay those of the first step, on both sides.
"""

import json
import os
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from cohort.harness.data import Demonstration, Prompt, Split
from cohort.harness.interfaces import Task
from cohort.harness.policy.model import save_model
from cohort.harness.policy.tiny import tiny_config, tiny_tokenizer

END_PROBABILITY = 1 / 25
LEARNING_RATE = 1e-6
GROUP_SIZE = 8
NUM_PROMPTS = 512  # distinct, read in turn
_CONSTANT = 0.5  # the coordinate that all embeddings share
ROOT = Path(__file__).resolve().parents[2]
CHAT_MODEL = ROOT / "models" / "smollm2"  # `make smollm2`
QUESTIONS = Path(os.environ.get("COHORT_DATA") or ROOT.parent / "shared" / "data") / "gsm8k" / "train.jsonl"
QWEN = {
    "vocab_size": 151_936, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": True,
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """One row of the comparison."""

    name: str
    shape: Literal["168k", "3.4M", "100M", "135M"]
    prompts_per_step: int
    prompt_tokens: int  # 0: questions of GSM8K in the model's own chat template
    max_tokens: int
    natural_stops: bool = True
    kl_beta: float = 0.04
    num_inner_epochs: int = 1
    bfloat16: bool = False  # products in bfloat16 over float32 weights, on both sides
    graded: bool = False  # paid by GSM8K's answer, the last number, not by the digits' sum

    @property
    def rollouts(self) -> int:
        return self.prompts_per_step * GROUP_SIZE


SETTINGS = [
    Setting("a: 168k, natural stops, beta 0.04, mu 1", "168k", 16, 12, 40),
    *(
        Setting(f"b: 3.4M, {stops} stops, beta {beta:g}, mu {mu}", "3.4M", 32, 24, 48, stops == "natural", beta, mu)
        for mu in (1, 4)
        for stops in ("natural", "suppressed")
        for beta in (0.04, 0.0)
    ),
    Setting("c: Qwen's shape, 100M, vocabulary 151,936, beta 0, mu 1", "100M", 2, 128, 64, False, 0.0),
    *(
        Setting(f"{row}: SmolLM2-135M, GSM8K, {prompts} x 8 x 128, {precision}", "135M", prompts, 0, 128,
                kl_beta=0.0, bfloat16=precision == "bfloat16")
        for row, prompts in (("d", 2), ("e", 8))
        for precision in ("float32", "bfloat16")
    ),
    Setting("g: as d, float32, with GSM8K's own reward", "135M", 2, 0, 128, kl_beta=0.0, graded=True),
]  # fmt: skip


class DigitSum(Task):
    """Whether the digits of a completion sum to an even number: cheap, and about half of all texts earn it; `graded`:
    whether its last number is the answer."""

    name: Literal["digit_sum"] = "digit_sum"
    prompt_tokens: int
    max_tokens: int
    graded: bool = False

    @property
    def max_completion_tokens(self) -> int:
        return self.max_tokens

    def prompts(self, split: Split) -> list[Prompt]:
        texts = prompt_texts(self.prompt_tokens) if split == "train" else []
        golds = answers() if self.graded else ["0"] * len(texts)
        return [Prompt(f"{i:04d}", text, gold) for i, (text, gold) in enumerate(zip(texts, golds, strict=False))]

    def demonstrations(self) -> list[Demonstration]:
        return []

    def extract(self, completion: str) -> str:
        return last_number(completion) if self.graded else str(digit_sum(completion) % 2)

    def equivalent(self, answer: str, other: str) -> bool:
        return answer == other


def prompt_texts(num_tokens: int) -> list[str]:
    """Distinct sums of exactly `num_tokens` characters, each of which is one token; 0: questions of GSM8K."""
    if not num_tokens:
        return [json.loads(line)["question"] for line in QUESTIONS.read_text().splitlines()[:NUM_PROMPTS]]
    draw = random.Random(0)
    texts = {"".join(draw.choice("0123456789+-") for _ in range(num_tokens - 1)) + "=" for _ in range(2 * NUM_PROMPTS)}
    return sorted(texts)[:NUM_PROMPTS]


def answers() -> list[str]:
    """The gold answers of GSM8K's questions."""
    return [last_number(json.loads(line)["answer"]) for line in QUESTIONS.read_text().splitlines()[:NUM_PROMPTS]]


def last_number(text: str) -> str:
    found = re.findall(r"\d+", text.replace(",", ""))
    return found[-1] if found else ""


def digit_sum(text: str) -> int:
    return sum(int(c) for c in text if c in "0123456789")


def write_model(setting: Setting, folder: Path) -> None:
    """Save the setting's model with its tokenizer where both sides load it."""
    if setting.shape == "135M":
        return folder.symlink_to(CHAT_MODEL)
    from transformers import LlamaForCausalLM

    tokenizer = tiny_tokenizer()
    config = tiny_config()
    if setting.shape == "100M":
        return _write_qwen(folder, tokenizer)
    if setting.shape == "3.4M":
        config.update(
            {
                "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
                "head_dim": 64, "intermediate_size": 768, "initializer_range": 0.02,
            }
        )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = _CONSTANT
        _set_end_probability(model, END_PROBABILITY if setting.natural_stops else 1e-9)
    save_model(folder, model, tokenizer)


def _write_qwen(folder: Path, tokenizer: Any) -> None:
    """A Qwen2 with the vocabulary of the large ones, whose further tokens are the texts `<103>` and so on. One token in
    151,936 ends a text."""
    from tokenizers import models
    from transformers import Qwen2Config, Qwen2ForCausalLM

    ids = tokenizer.get_vocab()
    ids |= {f"<{number}>": number for number in range(len(ids), QWEN["vocab_size"])}
    tokenizer.backend_tokenizer.model = models.WordLevel(ids, unk_token="<unk>")
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    save_model(folder, Qwen2ForCausalLM(Qwen2Config(**QWEN, **ends)).eval(), tokenizer)


def _set_end_probability(model: torch.nn.Module, wanted: float) -> None:
    """Bisect the end token's value in the constant coordinate until its mean probability on random text is `wanted`."""
    tokens = torch.randint(3, 100, (64, 64), generator=torch.Generator().manual_seed(1))
    hidden = model.model(input_ids=tokens).last_hidden_state  # pyright: ignore
    embedding, end = model.model.embed_tokens.weight, model.config.eos_token_id  # pyright: ignore
    low, high = -20.0, 20.0
    for _ in range(60):
        middle = (low + high) / 2
        embedding[end, 0] = middle
        probability = torch.softmax(hidden @ embedding.T, dim=-1)[..., end].mean()
        low, high = (middle, high) if probability < wanted else (low, middle)
