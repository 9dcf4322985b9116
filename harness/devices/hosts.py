"""Connects the hosts of a trial: the first opens a door, and the others join and start their share of the processes.

A door is a file in the runs folder that only its user can read. It holds an address and a secret made for this attempt.
Both sides prove that they know the secret before any message (`multiprocessing.connection`), so that nothing from a
stranger is unpickled. Later messages are not encrypted, and those between the trial's processes are not even signed:
the network between the hosts is trusted. The door is removed when all hosts have joined.
"""

import argparse
import logging
import os
import secrets
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..ground.files import read_json, write_json
from ..ground.machine import Hosts, interface, usable_cores, usable_gpus
from ..ground.stop import stop_on_signals
from ..record.provenance import versions
from ..spec.errors import SpecError

DOOR = "door.json"
POLL_SECONDS = 0.1
GREETING_SECONDS = 10  # for the proof of the secret
WAIT_SECONDS = 600.0  # for all hosts
KEEPALIVE = {
    "TCP_KEEPIDLE": 15,
    "TCP_KEEPINTVL": 5,
    "TCP_KEEPCNT": 6,
    "TCP_USER_TIMEOUT": 45_000,
}  # s, but for the last
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """The data that a host needs to start its processes."""

    ranks: Sequence[int]
    kind: str  # kind of its devices: cpu or cuda
    environment: Mapping[str, str]
    folder: str  # the base of relative paths


@dataclass
class Guest:
    """Another host, as the first one sees it; it reports only processes that died."""

    name: str
    control: Connection
    ranks: dict[int, Connection] = field(default_factory=dict)

    def loss(self) -> str | None:
        """A sentence about what it has lost, or None."""
        try:
            if not self.control.poll():
                return None
            rank, code = self.control.recv()
        except (EOFError, OSError):
            return f"host {self.name} of the trial is gone"
        return f"process {rank} of the trial, on host {self.name}, {how_it_ended(code)}"

    def close(self) -> None:
        for connection in (self.control, *self.ranks.values()):
            connection.close()


class Door:
    """The address at which the hosts of a trial join."""

    def __init__(self, server: socket.socket, folder: Path, secret: str):
        self.folder = folder
        self._server, self._secret = server, secret
        self._came: SimpleQueue[tuple[Connection, str, Any]] = SimpleQueue()
        server.settimeout(POLL_SECONDS)

    def wait(self, shares: Sequence[Share], should_stop: Callable[[], bool]) -> list[Guest] | None:
        """A guest for each share, with a connection to each of its processes; None if asked to stop first.

        ChildProcessError if hosts do not join, or leave before all have joined.
        """
        guests: list[Guest] = []
        deadline, told = time.monotonic() + WAIT_SECONDS, False
        while len(guests) < len(shares):
            if should_stop():
                return None
            if time.monotonic() > deadline:
                raise ChildProcessError(
                    f"{1 + len(guests)} of the trial's {1 + len(shares)} hosts were there after {WAIT_SECONDS:.0f} s; "
                    "run `cohort join --runs RUNS` on the others, with the runs folder that all share"
                )
            for connection, name, words in self._arrivals():
                if refusal := self._refusal(words, shares[0].kind, max(len(share.ranks) for share in shares)):
                    log.warning("host %s cannot join the trial: %s", name, refusal)
                    connection.send(refusal)
                else:
                    guests.append(Guest(name, connection))
            guests = [guest for guest in guests if guest.loss() is None]
            if not told and len(guests) < len(shares):
                log.warning("waiting for %d more hosts: `cohort join --runs RUNS` there", len(shares) - len(guests))
                told = True
        for guest in guests[len(shares) :]:
            guest.close()  # it goes back to waiting for a trial
        guests = guests[: len(shares)]
        for guest, share in zip(guests, shares, strict=True):
            guest.control.send(share)
        missing = {rank: guest for guest, share in zip(guests, shares, strict=True) for rank in share.ranks}
        while missing:
            for connection, _, rank in self._arrivals():
                if guest := missing.pop(rank, None) if isinstance(rank, int) else None:
                    guest.ranks[rank] = connection
            if lost := next(filter(None, (guest.loss() for guest in guests)), None):
                raise ChildProcessError(f"{lost}; start the trial again")
        self._server.close()
        (self.folder / DOOR).unlink()
        return guests

    def _arrivals(self) -> Iterator[tuple[Connection, str, Any]]:
        """The connections that arrived, with host name and first message; waits a moment for more."""
        with suppress(TimeoutError):
            client, (name, *_) = self._server.accept()
            threading.Thread(target=self._greet, args=(client, name), daemon=True).start()
        while not self._came.empty():
            yield self._came.get()

    def _greet(self, client: socket.socket, name: str) -> None:
        try:
            connection = _proven(client, self._secret, (deliver_challenge, answer_challenge))
            self._came.put((connection, name, connection.recv()))
        except (AuthenticationError, EOFError, OSError) as error:
            log.warning("%s knocked without the secret of this trial (%s)", name, type(error).__name__)

    def _refusal(self, words: Any, kind: str, count: int) -> str | None:
        """The reason that a host cannot run `count` processes on devices of that kind, or None if it can."""
        if not (self.folder / words["proof"]).exists():
            return f"all hosts must share the runs folder, this one has another '{self.folder}'; mount the same one"
        theirs, ours = words["versions"], dict(versions())
        if other := next((name for name in ours | theirs if ours.get(name) != theirs.get(name)), None):
            here, there = theirs.get(other), ours.get(other)
            return f"all hosts must run the same versions, {other} is {here} here and {there} on the first host"
        if words[kind] < count:
            what = "GPUs" if kind == "cuda" else "cores"
            return f"each host needs {count} {what}, this one has {words[kind]}; take more hosts"
        return None


@contextmanager
def open_door(place: Hosts, cache: Path, directory: Path) -> Iterator[Door]:
    """The door of the trial in `directory`. ValueError if `place` is not an address of this host."""
    folder = doors(cache, place.group) / sha256(str(directory.resolve()).encode()).hexdigest()[:16]
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
    folder.mkdir(parents=True, mode=0o700)
    try:
        family, *_, address = socket.getaddrinfo(place.address, place.port, type=socket.SOCK_STREAM)[0]
        server = socket.create_server(address[:2], family=family)
    except OSError as error:
        raise SpecError(
            f"the address of --listen must be free and this host's own, got {place.address}:{place.port} ({error})"
        ) from None
    with server:
        secret = secrets.token_hex(32)
        address, port, *_ = server.getsockname()
        try:
            write_json(folder / DOOR, {"address": address, "port": port, "secret": secret, "folder": str(folder)})
            yield Door(server, folder, secret)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def doors(cache: Path, group: str) -> Path:
    """The folder in which a group of hosts looks for doors."""
    return cache.resolve() / "hosts" / group


def join(runs: Path, group: str, should_stop: Callable[[], bool]) -> None:
    """Join a trial of the runs folder that waits for hosts, then the next one, until asked to stop.

    ValueError if this host cannot run a trial's share.
    """
    tried: set[str] = set()
    while not should_stop():
        for file in sorted(doors(runs / "cache", group).glob(f"*/{DOOR}")):
            with suppress(FileNotFoundError):  # shut by now
                door = read_json(file)
                if door["secret"] not in tried:
                    tried.add(door["secret"])
                    _take_part(door, should_stop)
        time.sleep(5 * POLL_SECONDS)


def _take_part(door: Mapping[str, Any], should_stop: Callable[[], bool]) -> None:
    """Run this host's share of a trial to the end of the attempt, if the trial still wants it."""
    proof = Path(door["folder"]) / f"seen-{secrets.token_hex(8)}"
    try:
        proof.touch()
    except FileNotFoundError:
        raise SpecError(
            f"all hosts must have the runs folder in the same place, '{proof.parent}' is not here"
        ) from None
    try:
        control, address = _reached(door)
    except (
        AuthenticationError,
        AssertionError,
        EOFError,
        OSError,
    ) as error:  # the door of a killed attempt, or this host is too late
        log.warning("nobody opens at %s:%s (%s)", door["address"], door["port"], type(error).__name__)
        return
    words = {"proof": proof.name, "versions": dict(versions()), "cuda": len(usable_gpus()), "cpu": usable_cores()}
    with control, suppress(EOFError, OSError):  # the trial has ended
        control.send(words)
        while not control.poll(POLL_SECONDS):
            if should_stop():
                return
        share = control.recv()
        if isinstance(share, str):
            raise SpecError(share)
        log.warning("runs processes %s of a trial at %s", ", ".join(map(str, share.ranks)), door["address"])
        _run_share(share, control, door, address)


def _run_share(share: Share, control: Connection, door: Mapping[str, Any], address: str) -> None:
    """Start the processes of a share and report those that die; end them all when the first host is gone."""
    environment = {**os.environ, **share.environment, **interfaces(address)}
    folder = share.folder if Path(share.folder).is_dir() else None
    processes: dict[int, subprocess.Popen[bytes]] = {}
    try:
        for rank, place in zip(share.ranks, gpu_environments(share.kind, len(share.ranks)), strict=True):
            connection, _ = _reached(door)
            with connection:
                connection.send(rank)
                processes[rank] = start_rank(connection, environment | place, folder)
        while not control.poll(POLL_SECONDS):  # it can only end
            for rank, process in list(processes.items()):
                if process.poll() is not None and (code := processes.pop(rank).returncode):
                    control.send((rank, code))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()


def start_rank(connection: Connection, environment: Mapping[str, str], folder: str | None = None) -> Any:
    """A process of a trial that holds one end of a connection."""
    return subprocess.Popen(
        rank_command(connection.fileno()), env=environment, pass_fds=[connection.fileno()], cwd=folder,
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip


def rank_command(descriptor: int) -> list[str]:
    return [sys.executable, "-P", "-m", "cohort.harness.run.launch", str(descriptor), str(os.getpid())]


def gpu_environments(kind: str, count: int) -> list[dict[str, str]]:
    """For each process of this host, the environment that gives it its own GPU; empty on CPUs."""
    return [{"CUDA_VISIBLE_DEVICES": gpu} for gpu in usable_gpus()[:count]] if kind == "cuda" else [{}] * count


def interfaces(address: str) -> dict[str, str]:
    """The network interface between processes of several hosts: the user's choice, or that of the address."""
    name = interface(address)
    return {variable: os.environ.get(variable, name) for variable in INTERFACES if name}


def watch_parent(parent: int) -> None:
    """End this process when the one that started it dies."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(5 * POLL_SECONDS)
        os._exit(4)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def how_it_ended(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"


def _reached(door: Mapping[str, Any]) -> tuple[Connection, str]:
    """A connection to the first host, and this host's address in it."""
    client = socket.create_connection((door["address"], door["port"]), timeout=GREETING_SECONDS)
    client.settimeout(None)
    address, *_ = client.getsockname()
    return _proven(client, door["secret"], (answer_challenge, deliver_challenge)), address


def _proven(client: socket.socket, secret: str, steps: Sequence[Callable[[Connection, bytes], None]]) -> Connection:
    """A connection whose other end has proved the secret, with keep-alive to notice when its host is gone.

    AuthenticationError, EOFError or OSError if it does not know the secret or does not answer.
    """
    with client:
        connection = Connection(os.dup(client.fileno()))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", GREETING_SECONDS, 0))
        try:
            for step in steps:
                step(connection, secret.encode())
        except BaseException:
            connection.close()
            raise
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            if hasattr(socket, option):  # not on every system
                client.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        prog="python -m cohort.harness.devices.hosts", description="Runs this host's processes of a trial."
    )
    parser.add_argument("runs", type=Path)
    parser.add_argument("--group", default="")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent; this process ends with it")
    options = parser.parse_args()
    from . import hosts  # pickled objects must belong to the module under its import name

    hosts.watch_parent(options.parent)
    with stop_on_signals() as stop:
        hosts.join(options.runs, options.group, stop)
