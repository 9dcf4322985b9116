"""Groups from the flat rows that an engine samples."""

from collections.abc import Iterable, Sequence
from typing import Any

from harness.types import Group, Prompt, Rollout

Row = tuple[Sequence[int], Sequence[float], bool]  # token ids, their log-probs (nats), whether the text ended


def as_groups(
    prompts: Sequence[Prompt], encoded: Sequence[tuple[int, ...]], rows: Iterable[Row], tokenizer: Any
) -> list[Group]:
    """One group per prompt of its equal share of `rows`, in order; `encoded` are the prompts' token ids."""
    rows = list(rows)
    texts = tokenizer.batch_decode([list(ids) for ids, _, _ in rows], skip_special_tokens=True)
    rollouts = [
        Rollout(text, tuple(ids), tuple(nats), "stop" if ended else "length")
        for text, (ids, nats, ended) in zip(texts, rows, strict=True)
    ]
    size = len(rollouts) // len(prompts)
    return [Group(p, encoded[i], tuple(rollouts[i * size : (i + 1) * size])) for i, p in enumerate(prompts)]
