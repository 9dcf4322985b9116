"""An engine that answers each prompt from a script instead of a model; conftest adds its folder to the engines."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Literal

from cohort.harness.data import Group, Prompt, Rollout, Sampling
from cohort.harness.interfaces import RolloutEngine
from cohort.harness.policy.text import TextCodec
from torch import Tensor, nn


class ScriptedEngine(RolloutEngine):
    """Completions come from `script(prompt, sample)`, by default the text after `;;` in the prompt, or nothing.

    Log-probs are those of a uniform distribution over the tokenizer's vocabulary; completions past
    `sampling.max_tokens` are cut, as a real engine would.
    """

    samples_policy: ClassVar[bool] = False

    class Settings(RolloutEngine.Settings):
        name: Literal["scripted"] = "scripted"

    def __init__(self, settings: Settings, policy: nn.Module, codec: TextCodec):
        self.settings = settings
        self.codec = codec
        self.script: Callable[[Prompt, int], str] = lambda prompt, sample: prompt.text.partition(";;")[2]

    def generate(
        self, prompts: Sequence[Prompt], group_size: int, sampling: Sampling, *, seed: int, step: int
    ) -> list[Group]:
        limit = sampling.max_tokens
        assert limit is not None
        return [
            Group(
                prompt,
                self.codec.encode(prompt.text),
                tuple(self._rollout(self.script(prompt, i), limit) for i in range(group_size)),
            )
            for prompt in prompts
        ]

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Nothing to do: a script has no weights."""

    def _rollout(self, text: str, limit: int) -> Rollout:
        ids = self.codec.encode_completion(text)
        kept, nats = ids[:limit], -math.log(len(self.codec.tokenizer))
        cut = str(self.codec.tokenizer.decode(kept, skip_special_tokens=True))
        return Rollout(cut, tuple(kept), (nats,) * len(kept), "stop" if len(ids) <= limit else "length")
