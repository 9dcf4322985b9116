"""Padding, whitening and KL estimators; algorithms import it where their settings are read without torch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ROUNDING = 1e-6  # differences of rewards, and of log-probs times a KL weight, that float32 cannot tell from none


def pad_right(rows: Sequence[Sequence[Any]], dtype: torch.dtype) -> Tensor:
    """[B, T] with each row from column 0 and zeros after it; T is the longest row."""
    import torch

    lengths = torch.tensor([len(row) for row in rows])
    result = torch.zeros(len(rows), max(map(len, rows)), dtype=dtype)
    result[torch.arange(result.shape[1]) < lengths[:, None]] = torch.tensor(list(itertools.chain(*rows)), dtype=dtype)
    return result


def num_shared(rows: Sequence[Sequence[int]]) -> int:
    """The number of first values that all rows begin with."""
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*rows, strict=False)))


def pad_left(rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """([B, T] tokens with each row ending in the last column, [B, T] bool mask that is False for padding)."""
    import torch

    tokens = pad_right([row[::-1] for row in rows], torch.int64).flip(1)
    return tokens, pad_right([[1] * len(row) for row in rows], torch.bool).flip(1)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """`values` shifted and scaled to mean 0 and variance 1 (population) over `mask`, 0 outside it.

    In float64, and exact zeros for values that differ by `ROUNDING` at most (times the largest, if that is above 1):
    their rounding would be scaled up to advantages.
    """
    exact, count = values.double(), mask.sum().clamp(min=1)
    centred = exact - (exact * mask).sum() / count
    variance = (centred**2 * mask).sum() / count
    lowest, highest = values.masked_fill(~mask, math.inf).amin(), values.masked_fill(~mask, -math.inf).amax()
    varies = highest - lowest > ROUNDING * highest.abs().clamp(min=1)
    return (centred * (variance + 1e-8).rsqrt()).where(varies & mask, 0.0).to(values.dtype)


def checksum(values: Tensor) -> Tensor:
    """int64, without axes: a number of the bits of all values, whatever their order and shape; zeros add nothing.

    So a fused or padded tensor has the same, and the numbers of a tensor's parts have the whole's as their sum. Two
    different sets of values agree with a chance of about 2^-64.
    """
    import torch

    width = {2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    for part in values.detach().contiguous().view(width).flatten().split(2**24):
        mixed = part.long() * -0x61C8864680B583EB  # odd constants spread every bit; products wrap around
        mixed = (mixed ^ (mixed >> 29)) * -0x40A7B892E31B1A47
        total += (mixed ^ (mixed >> 32)).sum()
    return total


def rounded_on_average(values: Tensor) -> Tensor:
    """float32 values in bfloat16, each up or down so that its mean is the value (stochastic rounding): a value that
    bfloat16 holds stays, and moves smaller than its steps arrive on average. All values together seed the noise, so
    equal tensors are rounded alike on one kind of device."""
    import torch

    noise = torch.Generator(values.device).manual_seed(int(checksum(values)))
    bits = torch.randint(2**16, values.shape, generator=noise, dtype=torch.int32, device=values.device)
    bits += values.detach().contiguous().view(torch.int32)
    return bits.bitwise_and_(-(2**16)).view(torch.float32).bfloat16()


def kl_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """log p - log q: unbiased per token for KL(p || q) under samples of p, high variance (Schulman 2020, k1)."""
    return logprobs - ref_logprobs


def kl_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased for KL(p || q) under samples of p, never negative (Schulman 2020, k3).

    The log-ratio is clamped to [-20, 20] so that the exponential stays finite.
    """
    log_ratio = (ref_logprobs - logprobs).clamp(-20, 20)
    return log_ratio.exp() - 1 - log_ratio
