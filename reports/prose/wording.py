"""Decides how single numbers and names are written: units, decimals, signs, lists."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...harness.base.arms import short_path
from ...harness.base.words import listed as listed
from ...harness.base.words import quoted as quoted
from ..statistics import ALPHA, Interval

_FRACTIONS = (
    "accuracy", "answered", "truncated", "clip_fraction", "zero_variance_groups", "vote/margin", "false_positive_rate",
    "masked_tokens", "gradient_tokens",
)  # fmt: skip


def is_fraction(metric: str) -> bool:
    """Whether a metric is a fraction in [0, 1], shown in percent."""
    return metric.endswith(_FRACTIONS) or metric.rpartition("/")[2].startswith(("accuracy_", "pass_at_", "maj_at_"))


def number(value: float | None, metric: str, signed: bool = False) -> str:
    """A value of a metric without unit: percent with one decimal (two below 1 %) for a fraction."""
    sign = "+" if signed else ""
    if value is None or math.isnan(value):
        return "n/a"
    if not is_fraction(metric):
        return f"{value:{sign}.4g}"
    percent = 100 * value
    decimals = 2 if 0 < abs(percent) < 1 and not signed else 1
    text = f"{percent:{sign}.{decimals}f}"
    return text.lstrip("+-") if float(text) == 0 else text


def with_unit(value: float, metric: str) -> str:
    """`81.2 %` for a fraction, the bare number otherwise."""
    return f"{number(value, metric)} %" if is_fraction(metric) else number(value, metric)


def limits(interval: Interval | None, metric: str, signed: bool = False) -> str:
    """`[79.0, 83.4]`, or an empty string without an interval."""
    if interval is None:
        return ""
    return f"[{number(interval.low, metric, signed)}, {number(interval.high, metric, signed)}]"


def with_limits(value: float, interval: Interval | None, metric: str, signed: bool = False) -> str:
    """`81.2 [79.0, 83.4]`, or the number alone without an interval."""
    return f"{number(value, metric, signed)} {limits(interval, metric, signed)}".rstrip()


def points(value: float, metric: str, interval: Interval | None = None) -> str:
    """A difference's size: `5.1 points` for fractions, the bare number otherwise.

    With an interval `5.1 points [0.8, 9.4]`; its limits have the sign of the difference's direction. A difference that
    one decimal would hide has more.
    """
    if is_fraction(metric):
        percent = 100 * abs(value)
        text = f"{percent:.1f} points" if percent >= 0.05 or _is_level(value) else f"{percent:.1g} points"
    else:
        text = f"{abs(value):.4g}"
    if interval is None:
        return text
    sign = 1.0 if value >= 0 else -1.0
    low, high = sorted((sign * interval.low, sign * interval.high))
    return f"{text} {limits(Interval(abs(value), low, high), metric, signed=True).replace('+', '')}"


def apart(value: float, metric: str, interval: Interval | None = None) -> str:
    """A difference with its direction: `5.1 points [0.8, 9.4] above`; if there is none `level [-3.6, 3.6] with`."""
    if _is_level(value):
        return "level with" if interval is None else f"level {limits(interval, metric)} with"
    return f"{points(value, metric, interval)} {'above' if value > 0 else 'below'}"


def _is_level(value: float) -> bool:
    """Whether a difference is only rounding error."""
    return abs(value) < 1e-9


def p_value(p: float) -> str:
    """`0.031`, `< 0.001`, or n/a; never rounded across the threshold of 0.05."""
    if math.isnan(p):
        return "n/a"
    if p < 0.001:
        return "< 0.001"
    text = f"{p:.2f}" if p >= 0.1 else f"{p:.3f}"
    return min(f"{p:.5f}", "0.04999") if (float(text) < ALPHA) != (p < ALPHA) else text


def p_equals(p: float) -> str:
    """`p = 0.031` or `p < 0.001`."""
    text = p_value(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def quantity(count: float | None) -> str:
    """A count with three digits: 812, 12.3k, 4.56M."""
    if count is None or math.isnan(count):
        return "n/a"
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if count >= size:
            return f"{count / (1e3 if suffix == 'k' else size):.3g}{suffix}"
    return f"{count:.0f}"


def cost(value: float | None, key: str) -> str:
    """A cost of an arm: `3.41 TFLOP` for `flops_*`, hours for seconds."""
    if value is None:
        return "n/a"
    return operations(value) if key.startswith("flops") else f"{value / 3600:.3g}"


def operations(count: float) -> str:
    """Floating-point operations: `3.41 TFLOP`."""
    scale, prefix = next(((s, p) for s, p in ((1e18, "E"), (1e15, "P"), (1e12, "T")) if count >= s), (1e9, "G"))
    return f"{count / scale:.3g} {prefix}FLOP"


def size(num_bytes: float | None) -> str:
    """Bytes in MiB or GiB."""
    if num_bytes is None or math.isnan(num_bytes):
        return "n/a"
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"


def plural(count: int, noun: str) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def settings(parameters: Mapping[str, Any], short_names: bool = True) -> str:
    """`kl_beta = 0.1, steps = 30`; dotted paths in full without `short_names`."""
    return ", ".join(f"{short_path(key) if short_names else key} = {short(value)}" for key, value in parameters.items())


def short(value: Any) -> str:
    """A setting's value; a float with at most four digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def shorten(text: str, most: int = 1600) -> str:
    """The text, or its first characters and how many more it has."""
    return text if len(text) <= most else f"{text[:most]} ... ({len(text) - most} more characters)"


def spoken(metric: str) -> str:
    """`test accuracy` for `test/accuracy`."""
    return metric.replace("/", " ").replace("_", " ")


def capitalised(text: str) -> str:
    """The text with a capital first letter; the others stay as they are."""
    return text[:1].upper() + text[1:]


def factor_title(factors: Sequence[str]) -> str:
    """`group_size x kl_beta`."""
    return " x ".join(short_path(factor) for factor in factors)
