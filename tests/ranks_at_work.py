"""Runs in one process and in a group of two, side by side: `python ranks_at_work.py FOLDER CASES`, CASES as JSON.

A case is a name and what differs from `RUN`. FOLDER/1 and FOLDER/2 have a folder for each case with what the run left,
and `log.json`: how it ended, and all that it logged but clocks. The run FOLDER/2/RESUMED is stopped after a step by the
two, goes on in the one for another step, and ends in the two; FOLDER/1/RESUMED is the same run undisturbed.
"""

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RUN = {
    "task": "arithmetic",
    "algorithm": {"name": "grpo", "group_size": 4},
    "rewards": {"repetition": {"weight": 1.0, "ngram": 1}},  # differs between completions of a weak policy
    "sampling": {"max_tokens": 8},
    "rollouts_per_step": 16,
    "seed": 1,  # rewards vary in both steps: without, the explained variance is a ratio of rounding errors
    "steps": 2,
    "evaluation": {"num_prompts": 3, "num_test_prompts": 3, "num_samples": 2},  # no even shares
    "checkpoints": {"rollouts_every": 1},
}
RESUMED = "resumed"


def run(folder: Path, name: str, changes: dict[str, Any], should_stop: Callable[[], bool] = lambda: False) -> None:
    from cohort.harness.devices import ranks
    from cohort.harness.run.loop import train
    from cohort.harness.spec.run import parse_run
    from fakes import MemoryLog

    log = MemoryLog()
    log.holds = lambda *_: True  # what another process logged
    spec = parse_run({**RUN, **changes}, name)
    result = train(spec, folder / name, log, cache=folder / "cache", should_stop=should_stop)
    if ranks.rank() == 0:
        document = {"state": result.state, "reason": result.reason, "events": log.without_clocks()}
        (folder / name / "log.json").write_text(json.dumps(document))


def run_rank(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    from fakes import StopAfter

    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    run(folder / "2", RESUMED, {"steps": 3}, StopAfter(1))
    if rank == 0:  # which has written the checkpoint
        (folder / "one's turn").touch()
    for name, changes in cases.items():
        run(folder / "2", name, changes)
    wait_for(folder / "two's turn")
    run(folder / "2", RESUMED, {"steps": 3})


def begin() -> None:
    import cohort.harness.run.loop  # noqa: F401

    torch.set_num_threads(1)
    gc.freeze()  # every run collects, and nothing of a library is garbage


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    from cohort.harness.devices.group import loopback
    from fakes import StopAfter

    for part in ("1", "2"):
        (folder / part).mkdir()
    os.environ["GLOO_SOCKET_IFNAME"] = loopback()
    begin()
    both: Any = mp.start_processes(run_rank, (folder, cases), nprocs=2, join=False, start_method="fork")
    for name, changes in {**cases, RESUMED: {"steps": 3}}.items():
        run(folder / "1", name, changes)
    wait_for(folder / "one's turn")
    run(folder / "2", RESUMED, {"steps": 3}, StopAfter(1))
    (folder / "two's turn").touch()
    while not both.join():
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
