"""How long claiming, finishing, status and resuming take as a study grows, on each storage.

Runs no trial: it claims every (arm, seed) of a grid and finishes it at once. `python tests/benchmarks/claims.py --arms
100 500 2000`; with --storage URL on a PostgreSQL database that exists. A row for each size: median milliseconds of
the first and the last 50 claims, finishes and looks whether anything is left; seconds of a status (the first of a new
process, then again), of a new process's first claim with half of the study done, and how many bytes the journal has.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from cohort.harness.spec.study import StudySpec, parse_study
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Outcome, Queue, open_storage

METRIC = "validation/accuracy"


def a_study(num_arms: int, name: str) -> StudySpec:
    """A grid with that many arms (a multiple of 20) and one seed."""
    return parse_study(
        {
            "name": name,
            "question": "How long does a claim take?",
            "run": {"task": "arithmetic", "algorithm": "grpo", "rollouts_per_step": 64, "steps": 10},
            "factors": {
                "algorithm.group_size": [2, 4, 8, 16],
                "algorithm.kl_beta": [0.0, 0.01, 0.02, 0.03, 0.04],
                "optimizer.learning_rate": [round(1e-6 * (i + 1), 9) for i in range(num_arms // 20)],
            },
            "seeds": [0],
        },
        "benchmark",
    )


def timed(operation: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = operation()
    return time.perf_counter() - began, result


def new_queue(study: StudySpec, runs: Path, url: str | None) -> Queue:
    """A queue as a process that just started has it."""
    plan = Plan(study, runs)
    return Queue(plan, open_storage(plan.folder, study.name, url))


def measure(num_arms: int, url: str | None, runs: Path) -> dict[str, float]:
    study = a_study(num_arms, f"claims-{num_arms}-{time.time_ns()}")
    queue = new_queue(study, runs, url)
    with queue.storage.lock():
        queue.storage.write_document({"digest": "", **study.model_dump(mode="json")})
        queue.retry_failed()
    times: dict[str, list[float]] = {"claim": [], "finish": [], "unfinished": []}
    resume = 0.0
    for number in range(num_arms):
        if number == num_arms // 2:
            fresh = new_queue(study, runs, url)
            resume, claim = timed(fresh.claim)
            fresh.finish(claim, Outcome("complete", summary={"seconds": 1.0}, metrics={METRIC: 0.5}))
            continue
        took, claim = timed(queue.claim)
        times["claim"].append(took)
        outcome = Outcome("complete", summary={"seconds": 1.0}, metrics={METRIC: 0.5})
        times["finish"].append(timed(lambda claim=claim, outcome=outcome: queue.finish(claim, outcome))[0])
        times["unfinished"].append(timed(queue.unfinished)[0])
    fresh = new_queue(study, runs, url)
    first, status = timed(fresh.status)
    again, _ = timed(fresh.status)
    assert status.counts() == {"complete": num_arms}
    row: dict[str, float] = {"arms": num_arms}
    for name, values in times.items():
        row |= {
            f"{name}, first 50 [ms]": 1e3 * median(values[:50]),
            f"{name}, last 50 [ms]": 1e3 * median(values[-50:]),
        }
    row |= {"resume [s]": resume, "status, new process [s]": first, "status, again [s]": again}
    journal = queue.plan.folder / "optuna.journal"
    return {**row, "journal [MB]": journal.stat().st_size / 1e6 if journal.exists() else float("nan")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arms", type=int, nargs="+", default=[100, 500, 2000])
    parser.add_argument("--storage", help="postgresql://...; else Optuna's journal file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for num_arms in arguments.arms:
            row = measure(num_arms, arguments.storage, Path(folder))
            print(" | ".join(f"{key} {value:.4g}" for key, value in row.items()), flush=True)


if __name__ == "__main__":
    main()
