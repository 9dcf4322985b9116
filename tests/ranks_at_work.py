"""Runs in one process and in a group of two, side by side: `python ranks_at_work.py FOLDER CASES`, CASES as JSON.

A case is a name and what differs from `RUN`. FOLDER/1 and FOLDER/2 have a folder for each case with what the run left,
and `log.json`: how it ended, and all that it logged but clocks. Each group starts once for all its cases.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RUN = {
    "task": "arithmetic",
    "algorithm": {"name": "grpo", "group_size": 4},
    "rewards": {"repetition": {"weight": 1.0, "ngram": 1}},  # differs between completions of a weak policy
    "sampling": {"max_tokens": 12},
    "rollouts_per_step": 16,
    "steps": 2,
    "evaluation": {"num_prompts": 5, "num_test_prompts": 5, "num_samples": 2},  # 5: no even shares
    "checkpoints": {"rollouts_every": 1},
}


def run(folder: Path, cases: dict[str, dict[str, Any]], is_first: bool = True) -> None:
    from fakes import MemoryLog

    from harness.spec.run import parse_run
    from harness.training.loop import train

    for name, changes in cases.items():
        log = MemoryLog()
        result = train(parse_run({**RUN, **changes}, name), folder / name, log, cache=folder / "cache")
        if is_first:
            document = {"state": result.state, "reason": result.reason, "events": log.without_clocks()}
            (folder / name / "log.json").write_text(json.dumps(document))


def run_rank(rank: int, folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    run(folder / "2", cases, is_first=rank == 0)


def main(folder: Path, cases: dict[str, dict[str, Any]]) -> None:
    for part in ("1", "2"):
        (folder / part).mkdir()
    both = mp.spawn(run_rank, (folder, cases), nprocs=2, join=False)
    torch.set_num_threads(1)
    run(folder / "1", cases)
    while not both.join():
        pass


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
