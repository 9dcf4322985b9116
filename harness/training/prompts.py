"""Which prompts a training step samples: a function of (seed, step), so that arms which share a seed draw the same."""

from collections.abc import Sequence

import numpy as np

from harness.types import Prompt


def step_prompts(prompts: Sequence[Prompt], seed: int, step: int, count: int) -> list[Prompt]:
    """The prompts of a training step: consecutive parts of an endless stream that is reshuffled on every pass."""
    result: list[Prompt] = []
    while len(result) < count:
        epoch, offset = divmod(step * count + len(result), len(prompts))
        order = np.random.default_rng([seed, epoch]).permutation(len(prompts))
        result += [prompts[i] for i in order[offset : offset + count - len(result)]]
    return result


def further_prompts(
    prompts: Sequence[Prompt], seed: int, step: int, attempt: int, count: int, drawn: Sequence[str]
) -> list[Prompt]:
    """At most `count` prompts whose ids are not among `drawn`, in an order keyed by (seed, step, attempt >= 1).

    A prompt that was drawn in this step would get the same completions again, whose noise its id decides.
    """
    assert attempt >= 1, "the generator's key would be that of step_prompts"
    order, before = np.random.default_rng([seed, step, attempt]).permutation(len(prompts)), set(drawn)
    return [prompts[i] for i in order if prompts[i].id not in before][:count]
