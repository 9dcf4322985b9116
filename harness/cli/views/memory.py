"""Memory and time of training steps on a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from harness.console.terminal import mebibytes, say, show_table


def show_estimates(title: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """What runs will need: bytes by component, and the most at one time."""
    told = [d for d in documents if d["components"] is not None]
    if not told:
        return
    names = [name for name in told[0]["components"] if any(d["components"][name] for d in told)]
    rows = [[d["run"], *(mebibytes(d["components"][n]) for n in names), mebibytes(d["peak_bytes"])] for d in told]
    headers = ["run", *names, "peak"]
    show_table(f"{title}: estimated memory, MiB", headers, rows, numeric=headers[1:])
    size = mebibytes(told[0]["device_bytes"])
    say(f"The device has {size} MiB. Sampling and learning take turns, so the peak is less than the sum.")


def show_measured(title: str, documents: Sequence[Mapping[str, Any]]) -> None:
    """Measured next to estimated memory, the seconds of a step by phase, and ratios to the first algorithm."""
    first = documents[0]["algorithm"]
    headers = ["algorithm", "peak MiB", "estimate MiB", f"memory / {first}", "s per step", f"time / {first}"]
    rows = [
        [
            d["algorithm"], mebibytes(d["peak_bytes"]), mebibytes(d["estimate_bytes"]), f"{d['memory_ratio']:.2f}",
            f"{d['seconds']['step']:.3g}", f"{d['time_ratio']:.2f}",
        ]
        for d in documents
    ]  # fmt: skip
    show_table(title, headers, rows, numeric=headers[1:])
    parts = [name for name in documents[0]["estimate"] if any(d["estimate"][name] for d in documents)]
    rows = [[d["algorithm"], *(mebibytes(d["estimate"][name]) for name in parts)] for d in documents]
    show_table("Estimate by component, MiB", ["algorithm", *parts], rows, numeric=parts)
    phases = [name for name in documents[0]["seconds"] if name != "step"]
    rows = [[d["algorithm"], *(f"{d['seconds'][name]:.3g}" for name in phases)] for d in documents]
    show_table("Seconds by phase", ["algorithm", *phases], rows, numeric=phases)
