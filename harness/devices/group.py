"""The group of processes in which a trial with several devices runs: their start, and the trials that rank 0 tells.

torch's elastic agent starts them, and ends all when one dies: on one host the process that calls `launch`, on several
`torchrun`. Rank 0 decides, logs and claims trials; the others run the trials that it tells them, each in a process
group of its own. They talk through torch's TCPStore, which lets in whoever reaches it (on one host the loopback
interface alone): so both sides prove that they know a secret before any trial is told, and what rank 0 tells is signed
with it. The messages of a trial itself (gloo, NCCL) are neither signed nor encrypted.

The first error of any rank ends the trial on all of them, and rank 0 raises it. Who waits for that rank in NCCL hears
of no error, nor over gloo once a model is sharded, for torch's caches of sharded tensors keep the connections open: so
it is told through the store, where a thread of each rank reads it. Over gloo the group lives on if all leave the trial
in seconds. Else, and with NCCL, which ends a group only together, nothing waits for it: all processes end once rank 0
has recorded the error. A rank that dies ends the group too; who started the agent starts it again, and the trial goes
on from its checkpoint.
"""

import atexit
import gc
import hmac
import json
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from ..base import stop
from ..base.inputs import InputsChanged, all_expected, expecting
from ..base.machine import SECRET, in_group, interface, usable_gpus
from ..data import InvalidRun
from ..record.provenance import versions
from ..record.run import RunLog
from ..settings.errors import SpecError
from ..settings.run import RunSpec, parse_run
from . import ranks
from .device import resolve_device

STORE = "COHORT_STORE"  # ADDRESS:PORT of a group on one host
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
PATIENCE = timedelta(minutes=30)  # of a rank in a message to others
STOP_SECONDS = 1800  # for a step and its checkpoint
LEAVE_SECONDS = 20.0  # for living ranks to leave a trial that failed, or the group
STUCK_SECONDS = 5.0  # the same for the others, once rank 0 has left it
ENDS_ALONE = "gloo"  # the backend that a rank can end while others wait in it
BACKENDS = {"cpu": ENDS_ALONE, "cuda": "cpu:gloo,cuda:nccl"}
POLL_SECONDS = 0.1
OF_THE_AGENT = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", STORE, SECRET,
}  # fmt: skip
KINDS = {kind.__name__: kind for kind in (SpecError, InputsChanged, InvalidRun, ValueError)}
_own: "RankGroup | None" = None
log = logging.getLogger(__name__)


class RankGroup:
    """This process as one of `size`, with `size_here` on this host; rank 0 leads and the others follow."""

    def __init__(self, store: Any, rank: int, size: int, size_here: int, secret: str):
        self.rank, self.size, self.size_here = rank, size, size_here
        self._store, self._secret, self._trials = store, secret.encode(), 0
        self.is_broken = False  # after an error that no rank survives

    def meet(self) -> None:
        """Wait for all; SpecError if one has another secret or other versions."""
        ours = dict(versions())
        if self.rank == 0:
            for key in ("refused", *(f"hello-{rank}" for rank in range(1, self.size))):
                self._store.delete_key(key)  # of a group that ended before; who lives says it again
            hellos = [self._heard(f"hello-{rank}") for rank in range(1, self.size)]
            refusal = next(filter(None, (_refusal(hello, ours) for hello in hellos)), None)
            attempt = secrets.token_hex(8)
            self._say("welcome", {"attempt": attempt, "to": [h and h["nonce"] for h in hellos], "refusal": refusal})
        else:
            attempt, refusal = self._welcomed(ours)
        if refusal:
            self._gone("refused")
            raise SpecError(refusal)
        self._attempt, self._store = attempt, dist.PrefixStore(attempt, self._store)  # pyright: ignore

    def _welcomed(self, ours: Mapping[str, str]) -> tuple[str, str | None]:
        """(name of this attempt, reason that there is none), as rank 0 tells this process."""
        nonce = secrets.token_hex(8)
        while True:
            self._say(f"hello-{self.rank}", {"nonce": nonce, "host": socket.gethostname(), "versions": ours})
            if self._store.check(["welcome"]):
                if (told := self._heard("welcome")) is None:
                    return "", f"{SECRET} must be the same on all hosts, got one here that the first process has not"
                if nonce in told["to"]:
                    return told["attempt"], told["refusal"]
            time.sleep(POLL_SECONDS)

    def follow(self, execute: Callable[..., Any]) -> None:
        """Take part in the trials that rank 0 tells, until it ends. SystemExit if it is gone."""

        def run(job: Mapping[str, Any]) -> Any:  # logs nothing and never asks to stop
            spec, cache = parse_run(job["spec"], "a trial's own settings"), Path(job["cache"])
            return execute(spec, Path(job["directory"]), _Silent(), cache=cache, should_stop=lambda: False)

        try:
            while job := self._told():
                if self.rank < job["spec"]["devices"]:
                    try:
                        self.run(job, partial(run, job))
                    except Exception as error:  # rank 0 has heard of it
                        log.warning("%s: %s", type(error).__name__, error)
                        traceback.clear_frames(error.__traceback__)
            self._gone("ended")
            if self.is_broken:
                os._exit(1)
        except dist.DistNetworkError:
            raise SystemExit("the first process of the group is gone") from None

    def end(self) -> None:
        """Let the others go; a broken group ends with this process."""
        self.tell({})
        self._gone("ended")
        if self.is_broken:  # an orderly exit would wait for the others
            sys.stdout.flush()
            os._exit(1)

    def tell(self, job: Mapping[str, Any]) -> None:
        """Tell the others the next trial; an empty one is the end."""
        self._trials += 1
        self._say(f"trial-{self._trials}", job)

    def _told(self) -> Any:
        """The next trial, empty if there is none; SpecError if another process than rank 0 told it."""
        self._trials += 1
        job = self._heard(f"trial-{self._trials}")
        if job is None:
            raise SpecError("a trial was told by someone who does not know the secret of this group")
        return job

    def run(self, job: Mapping[str, Any], run: Callable[[], Any], when_stuck: Callable[..., Any] = id) -> Any:
        """The result of this rank's part of a trial; on rank 0 also the first error of any, and ChildProcessError if
        one of them is gone. `when_stuck` is as `lead` has it."""
        store: Any = dist.PrefixStore(f"{self._trials}/", self._store)  # pyright: ignore
        size, backend, left = job["spec"]["devices"], ENDS_ALONE, Event()

        def note(error: BaseException) -> bool:
            words = json.dumps([self.rank, type(error).__name__, str(error)])
            store.compare_set("error", "", words)  # the first counts
            return backend == ENDS_ALONE

        stuck = partial(when_stuck, lambda *_, **__: _end_of(store.clone(), size))
        watch = Thread(target=self._watch, args=(store.clone(), left, stuck), name="trial", daemon=True)
        watch.start()
        try:
            backend = BACKENDS[resolve_device(job["spec"]["device"]).type]
            with ranks.telling(note):
                own = store.clone()  # a rank that waits in a store keeps its other threads from it
                dist.init_process_group(backend, store=own, rank=self.rank, world_size=size, timeout=PATIENCE)
                with expecting(job["inputs"]):
                    end = run()
            if self.rank and end.state == "invalid":
                raise InvalidRun(end.reason)
        except BaseException as error:
            end, self.is_broken = error, not note(error) and not isinstance(error, InvalidRun)
            if not self.is_broken:
                traceback.clear_frames(error.__traceback__)  # they hold what holds the connections to the others
                gc.collect()
        if dist.is_initialized() and not self.is_broken:
            dist.destroy_process_group()  # over gloo whoever waits for this rank fails now, unless a model was sharded
        left.set()
        watch.join()
        store.add("left", 1)
        if self.rank == 0 and store.check(["error"]) and not self.is_broken:
            self.is_broken = _counted(store, "left", size, STUCK_SECONDS) < size
        if not isinstance(end, BaseException):
            return end
        if self.rank or not isinstance(end, Exception):
            raise end
        return _end_of(store, size, end)

    def _watch(self, store: Any, left: Event, when_stuck: Callable[[], Any]) -> None:
        """Wait until the trial `left` this rank or an error is told. Then rank 0 has LEAVE_SECONDS to leave; if it is
        stuck it records the error. A stuck follower lets it, and ends when rank 0 does or tells another trial."""
        with suppress(dist.DistNetworkError):
            while not left.wait(POLL_SECONDS) and not store.check(["error"]):
                pass
            store.add("here", 1)
            if self.rank == 0:
                if left.wait(LEAVE_SECONDS):
                    return
                self.is_broken = True
                try:
                    when_stuck()
                except BaseException as error:
                    print(f"{type(error).__name__}: {error}", file=sys.stderr)
                self.end()
            later, polls = f"trial-{self._trials + 1}", 0  # in which the first would wait for this one
            while not left.wait(POLL_SECONDS) and not self._store.check(["ended"]):
                polls += self._store.check([later])
                if polls * POLL_SECONDS > LEAVE_SECONDS:
                    break
            if left.is_set():
                return
            self._gone("ended")
        if not left.is_set():
            os._exit(1)

    def _gone(self, why: str) -> None:
        """Say that this process ends; rank 0, which may hold the store, then waits for the others."""
        self._store.add(why, 1)
        if self.rank == 0:
            _counted(self._store, why, self.size)

    def _say(self, key: str, value: Any) -> None:
        body = json.dumps(value)
        self._store.set(key, json.dumps([self._signature(key, body), body]))

    def _heard(self, key: str) -> Any:
        """The message of this key, for which it waits; None if the sender does not know the secret."""
        while not self._store.check([key]):
            time.sleep(POLL_SECONDS)
        signature, body = json.loads(self._store.get(key))
        return json.loads(body) if hmac.compare_digest(signature, self._signature(key, body)) else None

    def _signature(self, key: str, body: str) -> str:
        attempt = getattr(self, "_attempt", "") if key.startswith("trial") else ""
        return hmac.digest(self._secret, f"{attempt} {key} {body}".encode(), "sha256").hex()


class _Silent:
    """The `RunLog` of ranks other than 0."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *given, **named: None


def launch(command: Sequence[str], processes: int, when_stopped: int = 130) -> int:
    """The exit status of a group that runs `python COMMAND` in so many processes of this host: 0 if all ended well,
    `when_stopped` after SIGINT, SIGTERM, SIGUSR1 or SIGUSR2 (a second SIGINT does not wait for the step), else the
    status of the first that failed."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    asked = []
    logging.disable(logging.ERROR)  # what counts is said below
    os.environ["OMP_NUM_THREADS"] = str(max(1, torch.get_num_threads() // processes))

    def leave(number: int, _: object) -> None:
        if not asked:  # a scheduler may repeat it
            asked.append(number)
            signal.raise_signal(signal.SIGINT)  # what torch passes on; its SIGTERM is for processes that lost another

    for number in (signal.SIGTERM, *stop.LEAVE):
        signal.signal(number, leave)
    with tempfile.TemporaryDirectory(prefix="cohort-") as folder:
        server = socket.create_server(("127.0.0.1", 0))
        port = server.getsockname()[1]
        store: Any = dist.TCPStore(  # pyright: ignore
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=server.detach()
        )
        os.environ |= {
            STORE: f"127.0.0.1:{port}", SECRET: secrets.token_hex(32), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }  # fmt: skip
        config = api.LaunchConfig(
            1, 1, processes, DefaultLogsSpecs(log_dir=folder), "cohort", rdzv_endpoint=str(Path(folder) / "meeting"),
            rdzv_backend="c10d", rdzv_configs={"store_type": "file"}, max_restarts=0, signals_to_handle="SIGINT",
            local_addr="127.0.0.1", shutdown_timeout=STOP_SECONDS,
        )  # fmt: skip
        try:
            api.elastic_launch(config, sys.executable)(*command)
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


def enter() -> RankGroup | None:
    """The group in which an agent of torch started this process, which ends with the agent; None if none did. SpecError
    if a process of the group may not be in it."""
    global _own
    if not in_group():
        return _own
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in places)
    secret = os.environ.get(SECRET, "")
    if local_size < size and not secret:
        raise SpecError(f"a group of several hosts needs {SECRET}; set it to the same long random text on all of them")
    agent = os.getppid()

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(5 * POLL_SECONDS)
        os._exit(4)

    Thread(target=watch, name="agent", daemon=True).start()
    if STORE in os.environ:
        host, _, port = os.environ[STORE].partition(":")
        store: Any = dist.TCPStore(host, int(port), is_master=False, timeout=PATIENCE)  # pyright: ignore
    else:
        store, *_ = next(dist.rendezvous("env://", timeout=PATIENCE))  # pyright: ignore
    own = loopback()
    if local_size < size:
        server = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        with socket.create_connection(server, timeout=PATIENCE.total_seconds()) as connection:
            own = interface(connection.getsockname()[0])
    for variable in INTERFACES:
        if own is not None and (local_size == size or variable not in os.environ):
            os.environ[variable] = own
    if local_rank < len(gpus := usable_gpus()):
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[local_rank]
        usable_gpus.cache_clear()
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC_") or n in OF_THE_AGENT]:
        del os.environ[name]  # processes that this one starts are in no group, and libraries look at these too
    stop.ORDERLY.discard(signal.SIGTERM)  # with it the agent ends a group that has lost a process
    for number in (signal.SIGINT, *stop.LEAVE) if rank else ():
        signal.signal(number, signal.SIG_IGN)  # rank 0 decides when to stop
    _own = RankGroup(store, rank, size, local_size, secret)
    _own.meet()
    if rank == 0:
        atexit.register(_own.end)
    return _own


def lead(
    execute: Callable[..., Any],
    spec: RunSpec,
    directory: Path,
    log: RunLog,
    *,
    when_stuck: Callable[[Callable[..., Any]], Any] = lambda tell: tell(),
    **how: Any,
) -> Any:
    """The result of `execute(spec, directory, log, **how)` on `spec.devices` processes of the group that this one
    leads; errors as `RankGroup.run`. If it waits in vain for a rank that failed, a thread calls `when_stuck` with a
    function that returns or raises how the trial ended; then this process ends with status 1."""
    if spec.devices == 1:
        return execute(spec, directory, log, **how)
    if _own is None or _own.size < spec.devices:
        raise SpecError(
            f"a run with devices={spec.devices} needs a group of as many processes, this is one of {size()}; start it "
            f"with `cohort train`, or with `torchrun --nproc-per-node {spec.devices} -m cohort train`"
        )
    job = {
        "spec": spec.model_dump(mode="json"), "directory": str(directory.resolve()),
        "cache": str(how["cache"].resolve()), "inputs": all_expected(),
    }  # fmt: skip
    _own.tell(job)
    return _own.run(job, lambda: execute(spec, directory, log, **how), when_stuck)


def size() -> int:
    """The processes of the group that this one is in."""
    return 1 if _own is None else _own.size


def size_here() -> int:
    """The processes of the group on this host."""
    return 1 if _own is None else _own.size_here


def loopback() -> str:
    """The interface over which the processes of one host reach each other, closed to other machines."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _refusal(hello: Any, ours: Mapping[str, str]) -> str | None:
    """The reason that a process may not be in the group of this one, or None if it may."""
    if hello is None:
        return f"{SECRET} must be the same on all hosts, got another value in one process than in the first"
    theirs = hello["versions"]
    if other := next((name for name in ours | theirs if ours.get(name) != theirs.get(name)), None):
        return (
            f"all hosts must run the same versions, {other} is {theirs.get(other)} on {hello['host']} and "
            f"{ours.get(other)} on {socket.gethostname()}"
        )
    return None


def _end_of(store: Any, size: int, own: Exception | None = None) -> Any:
    """How a trial with a told error ended; `own` is raised if it is rank 0's, ChildProcessError if one of `size`
    processes is gone."""
    if (here := _counted(store, "here", size)) < size:
        raise ChildProcessError(
            f"only {here} of the trial's {size} processes answer; the trial continues from its last checkpoint when it "
            "is started again"
        )
    rank, kind, words = json.loads(store.get("error"))
    if rank == 0 and own is not None:
        raise own
    if kind == InvalidRun.__name__:
        return SimpleNamespace(state="invalid", reason=words, summary={})
    raise KINDS.get(kind, RuntimeError)(words if kind in KINDS else f"process {rank}: {kind}: {words}")


def _counted(store: Any, key: str, wanted: int, seconds: float | None = None) -> int:
    """How many have counted themselves, once that is as many as wanted or the seconds (LEAVE_SECONDS) have passed."""
    deadline = time.monotonic() + (LEAVE_SECONDS if seconds is None else seconds)
    while (count := store.add(key, 0)) < wanted and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return count
