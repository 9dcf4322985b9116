"""Samples with any `AutoModelForCausalLM`, in the learner's own process and on its own weights.

A prompt is prefilled once and its key-value cache expanded to the group; finished rows leave the decode batch. A
token is drawn by inverting the cumulative distribution at a uniform that is a hash of the token's place, so a row
depends on the batch that it is in only through floating-point rounding, a resumed run repeats itself, and arms of a
study that share a seed share their noise (common random numbers).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field

from ..data import Call, Group, Sampling
from ..interfaces import RolloutEngine

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..policy.lora import AdapterRows
    from ..policy.text import TextCodec

log = logging.getLogger(__name__)


class TransformersEngine(RolloutEngine):
    """In-process sampling with transformers; shares the learner's weights, so nothing is copied after an update."""

    exact_logprobs: ClassVar[bool] = True
    serves_adapters: ClassVar[bool] = True
    adapters: AdapterRows | None = None

    class Settings(RolloutEngine.Settings):
        name: Literal["transformers"] = "transformers"
        max_batch_rows: int = Field(
            default=512, ge=1, description="completions decoded at once; affects only memory and speed"
        )

    def __init__(self, settings: Settings, policy: nn.Module, codec: TextCodec):
        from ..policy.forward import keeps_keys_and_values

        self.settings, self.policy, self.codec, self.end_ids = settings, policy, codec, codec.end_ids(policy)
        if not keeps_keys_and_values(policy):
            kind = policy.config.model_type  # pyright: ignore
            log.warning(
                "engine transformers reads the whole row again for every token of a %s; engine=vllm is faster", kind
            )

    @classmethod
    def on_base(cls, settings: Settings, base: nn.Module, codec: TextCodec, policies: Sequence[nn.Module]) -> Self:
        from ..policy.lora import AdapterRows

        adapters = AdapterRows(base, policies)
        engine = cls(settings, adapters.model, codec)
        engine.adapters = adapters
        return engine

    def generate_each(self, calls: Sequence[Call], sampling: Sampling) -> list[list[Group]]:
        from ..devices.sharding import whole
        from ._decoding import sample

        groups: list[list[Group]] = [[] for _ in calls]
        places = [(number, prompt) for number, call in enumerate(calls) for prompt in call.prompts]
        with whole(self.policy):
            while places:  # cut so that a batch has `max_batch_rows` rows or one prompt at most
                rows = accumulate(calls[number].group_size for number, _ in places)
                count = max(1, sum(end <= self.settings.max_batch_rows for end in rows))
                few = {n: [p for _, p in part] for n, part in groupby(places[:count], key=lambda place: place[0])}
                parts = [replace(calls[number], prompts=prompts) for number, prompts in few.items()]
                found = sample(self.policy, self.codec, self.end_ids, parts, sampling, self.adapters)
                for number, drawn in zip(few, found, strict=True):
                    groups[number] += drawn
                places = places[count:]
        return groups

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        import torch

        own = self.policy.state_dict()
        with torch.no_grad():
            for name, value in weights.items():
                if own[name].data_ptr() != value.data_ptr():
                    own[name].copy_(value)
