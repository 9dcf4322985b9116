"""Samples with any `AutoModelForCausalLM`, in the learner's own process and on its own weights.

A prompt is prefilled once and its key-value cache expanded to the group, and a long beginning that all prompts of a
batch share (worked examples, a system prompt) is read once for all; finished rows leave the decode batch. A token is
drawn by inverting the cumulative distribution at a uniform that is a hash of the token's place, so a row depends on
the batch that it is in only through floating-point rounding, a resumed run repeats itself, and arms of a study that
share a seed share their noise (common random numbers).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ..data import Group, Prompt, Sampling
from ..interfaces import RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..policy.text import TextCodec

log = logging.getLogger(__name__)


class TransformersEngine(RolloutEngine):
    """In-process sampling with transformers; shares the learner's weights, so nothing is copied after an update."""

    exact_logprobs: ClassVar[bool] = True

    class Settings(RolloutEngine.Settings):
        name: Literal["transformers"] = "transformers"
        max_batch_rows: int = Field(default=512, ge=1, description="completions decoded at once: for memory and speed")

    def __init__(self, settings: Settings, policy: nn.Module, codec: TextCodec):
        from ..policy.forward import keeps_keys_and_values

        self.settings, self.policy, self.codec, self.end_ids = settings, policy, codec, codec.end_ids(policy)
        if not keeps_keys_and_values(policy):
            kind = policy.config.model_type  # pyright: ignore
            log.warning(
                "engine transformers reads the whole row again for every token of a %s; engine=vllm is faster", kind
            )

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        from ..devices.sharding import whole
        from ..policy.fused_llama import recognised
        from ..policy.library import packed_products
        from ._decoding import sample_batch, uniforms

        assert sampling.max_tokens is not None
        groups: list[Group] = []
        at_once = max(1, self.settings.max_batch_rows // group_size)
        with whole(self.policy), nullcontext() if recognised(self.policy) else packed_products(self.policy):
            for start in range(0, len(prompts), at_once):
                part = prompts[start : start + at_once]
                noise = uniforms(seed, step, [prompt.id for prompt in part], group_size, sampling.max_tokens)
                run = f"{seed} {step} {sampling.temperature}"
                names = [f"{run} {prompt.id} {sample}" for prompt in part for sample in range(group_size)]
                groups += sample_batch(
                    self.policy, self.codec, self.end_ids, part, sampling, noise, self.note_tokens, self.ended, names
                )
        return groups

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        import torch

        own = self.policy.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                if own[name].data_ptr() != value.data_ptr():
                    own[name].copy_(value)
