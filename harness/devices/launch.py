"""Starts a group of processes, one per device of a trial, under torch's elastic agent.

The process that calls `start` becomes the agent, and each process of the group runs a command (`group.py` says what
they are to each other). The agent ends all of them when one dies; who started the agent starts it again, and the trial
goes on from its checkpoint. Nothing listens but on the loopback interface. `torchrun` starts a group too, on one
host or several.
"""

import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportAttributeAccessIssue, reportPrivateImportUsage]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..ground.machine import SECRET
from ..ground.stop import LEAVE
from .group import STORE

STOP_SECONDS = 1800  # for a step and its checkpoint


def start(command: Sequence[str], processes: int, when_stopped: int = 130) -> int:
    """The exit status of a group that runs `python COMMAND` in so many processes of this host: 0 if all ended well,
    `when_stopped` after SIGINT, SIGTERM, SIGUSR1 or SIGUSR2, else that of the first that failed.

    A signal lets the group end its step; a second SIGINT ends it at once.
    """
    asked = []
    logging.disable(logging.ERROR)  # what counts is said below
    os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))

    def stop(number: int, _: object) -> None:
        if not asked:  # a scheduler may repeat it
            asked.append(number)
            signal.raise_signal(signal.SIGINT)  # what torch passes on; its SIGTERM is for processes that lost another

    for number in (signal.SIGTERM, *LEAVE):
        signal.signal(number, stop)
    with tempfile.TemporaryDirectory(prefix="cohort-") as folder:
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        store = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
        os.environ |= {
            STORE: f"127.0.0.1:{port}", SECRET: secrets.token_hex(32), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        config = LaunchConfig(
            1, 1, processes, DefaultLogsSpecs(log_dir=folder), "cohort", rdzv_endpoint=str(Path(folder) / "meeting"),
            rdzv_backend="c10d", rdzv_configs={"store_type": "file"}, max_restarts=0, signals_to_handle="SIGINT",
            local_addr="127.0.0.1", shutdown_timeout=STOP_SECONDS,
        )  # fmt: skip
        try:
            elastic_launch(config, sys.executable)(*command)
        except (SignalException, KeyboardInterrupt):
            return when_stopped
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            if failure.exitcode > 0:
                return failure.exitcode
            print(
                f"process {rank} of the trial was killed by signal {-failure.exitcode}; the trial continues from its "
                "last checkpoint when it is started again",
                file=sys.stderr,
            )
            return 128 - failure.exitcode
        finally:
            del store  # it closes
    return 0
