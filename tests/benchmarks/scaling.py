"""How a step's cost grows with group size, completion length and batch, each doubled twice: it must stay linear.

    python tests/benchmarks/scaling.py [--rounds 3] [--steps 3]

The built-in `tiny` shape with texts that never end, GRPO with a reference; every point runs in turn, `--rounds` times.
Prints seconds per step and per token beside the first point's, and writes `results/scaling.json` beside.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _sides import make_run
from _workload import Setting, write_model
from cohort.harness.run.step import train_step

FACTORS = (1, 2, 4)


@dataclass
class Point:
    """One size of one axis, with the seconds (wall, user) and tokens of its measured steps."""

    axis: str
    size: int
    run: Any
    prompts: Any
    steps: list[tuple[float, float, float]]
    done: int = 0

    def measure(self, steps: int) -> None:
        for number in range(steps + 1):
            wall, user = time.perf_counter(), _user_seconds()
            metrics, _ = train_step(self.run, self.prompts, self.done)
            self.done += 1
            if number:  # the first step of a turn finds the caches filled by another point
                tokens = metrics["completion/length"] * self.run.spec.rollouts_per_step
                self.steps.append((time.perf_counter() - wall, _user_seconds() - user, tokens))


def points(folder: Path) -> list[Point]:
    """Group size at a fixed number of prompts, completion length, and prompts per step."""
    made: list[Point] = []
    for axis, base in (("group size", 4), ("completion tokens", 24), ("prompts per step", 4)):
        for factor in FACTORS:
            sizes = {"group size": 8, "completion tokens": 24, "prompts per step": 8} | {axis: base * factor}
            setting = Setting(
                f"{axis} {base * factor}", "168k", sizes["prompts per step"], 12, sizes["completion tokens"], False
            )
            model = folder / "model"
            if not model.is_dir():
                write_model(setting, model)
            run, prompts = make_run(setting, model, group_size=sizes["group size"])
            made.append(Point(axis, base * factor, run, prompts, []))
    return made


def _user_seconds() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "scaling.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        made = points(Path(folder))
        for _ in range(options.rounds):
            for point in made:
                point.measure(options.steps)
    rows: list[dict[str, Any]] = []
    print("axis               size  s/step  user s  tokens  user us/token  against the first")
    for point in made:
        wall, user, tokens = (statistics.median(column) for column in zip(*point.steps, strict=True))
        row = {"axis": point.axis, "size": point.size, "seconds": wall, "user_seconds": user, "tokens": tokens}
        row["user_seconds_per_token"] = user / tokens
        first = next((r for r in rows if r["axis"] == point.axis), row)
        row["relative"] = row["user_seconds_per_token"] / first["user_seconds_per_token"]
        rows.append(row)
        print(
            f"{point.axis:<18} {point.size:4d} {wall:7.3f} {user:7.3f} {tokens:7.0f} {1e6 * user / tokens:14.1f}"
            f" {row['relative']:18.2f}"
        )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"load": os.getloadavg()[0], "points": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
