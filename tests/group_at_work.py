"""A group of two that runs trials which end in several ways: `python group_at_work.py FOLDER` prints how, as JSON."""

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from cohort.harness.data import InvalidRun
from cohort.harness.devices import group, ranks
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.run import parse_run
from ranks_at_work import RUN

ENDS = ("well", "follower fails", "follower fails oddly", "follower is invalid", "first fails", "first stops alone",
        "well", "other files", "follower dies")  # fmt: skip


def execute(spec: Any, directory: Path, log: Any, *, cache: Path, should_stop: Any) -> Any:
    how, first = ENDS[spec.seed], ranks.rank() == 0
    assert ranks.summed(torch.ones(1)) == 2
    if how == "first stops alone" and first:
        return SimpleNamespace(state="stopped")
    if how == "first fails" and first:
        raise KeyError("own")
    if how == "other files":
        ranks.check_same(directory, rank=ranks.rank())
    if not first and how == "follower fails":
        raise SpecError("bad data")
    if not first and how == "follower fails oddly":
        print(1 / 0)
    if not first and how == "follower is invalid":
        return SimpleNamespace(state="invalid", reason="all rewards are equal")
    if not first and how == "follower dies":
        os._exit(9)
    dist.barrier()  # for which the other waits
    return SimpleNamespace(state="complete")


def work(rank: int, folder: Path, port: int) -> None:
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    group._own = one = group.Group(store, rank, 2, 2, "secret")
    group.LEAVE_SECONDS = 3
    os.environ["GLOO_SOCKET_IFNAME"] = group.loopback()
    one.meet()
    if rank:
        return one.follow(execute)
    ends = []
    for seed, how in enumerate(ENDS):
        spec = parse_run({**RUN, "device": "cpu", "devices": 2, "seed": seed}, "test")
        try:
            ends.append([how, group.train(execute, spec, folder, None, cache=folder, should_stop=None).state])
        except (Exception, InvalidRun) as error:
            ends.append([how, type(error).__name__, str(error)])
    print(json.dumps(ends))


if __name__ == "__main__":
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    both: Any = mp.start_processes(work, (Path(sys.argv[1]), store.port), nprocs=2, join=False, start_method="fork")
    both.processes[0].join()
