"""A trial belongs to the worker that lives, whatever machines call themselves and whatever time their clocks show."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from cohort.harness.base.files import read_json, write_json
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import Queue
from cohort.harness.study.storage.base import Lease, host_id, is_alive, this_process
from cohort.harness.study.storage.files import GRACE_SECONDS, LOOK_SECONDS, FileLease, LocalStorage
from fake_trials import a_study
from queues import gone

LOOK = 5.0  # seconds between two looks of a watcher

pytestmark = pytest.mark.usefixtures("plugins")


class Machine:
    """Another machine's view of one study's folder; its clock starts anywhere and is moved by hand."""

    def __init__(self, runs: Path, start: float = 0.0) -> None:
        plan = Plan(a_study(factors={"algorithm.group_size": [2]}, seeds=[0]), runs)
        self.now = start
        self.queue = Queue(plan, LocalStorage(plan.folder, clock=lambda: self.now))

    def pass_time(self, seconds: float = LOOK) -> None:
        self.now += seconds


def started(runs: Path, **start: float) -> Machine:
    one = Machine(runs, **start)
    one.queue.plan.folder.mkdir(parents=True)
    one.queue.retry_failed()
    return one


def claimed_elsewhere(runs: Path, **holder: object) -> Path:
    """The lease of the study's only trial, claimed by a worker on another machine, whose heartbeats the test writes."""
    claim = started(runs).queue.claim()
    assert claim is not None and isinstance(claim.lease, FileLease)
    claim.lease._released.set()
    write_json(claim.lease._file, {**read_json(claim.lease._file), "host": "elsewhere", **holder})
    return claim.lease._file


@pytest.mark.attack("Hosts whose clocks differ by two minutes or a day")
@pytest.mark.parametrize("ahead", [-86400.0, -120.0, 0.0, 120.0, 86400.0])
def test_a_trial_is_taken_after_the_grace_period_whatever_its_hosts_clock_shows(tmp_path, ahead):
    lease, watcher = claimed_elsewhere(tmp_path), Machine(tmp_path, start=1000.0)
    now = lease.stat().st_mtime
    for beat in range(60):  # five minutes
        os.utime(lease, (now + ahead + beat * LOOK, now + ahead + beat * LOOK))
        assert watcher.queue.claim() is None
        assert watcher.queue.status().counts() == {"running": 1}
        watcher.pass_time()
    silent_since = watcher.now - LOOK
    while watcher.now < silent_since + GRACE_SECONDS:
        assert watcher.queue.claim() is None, watcher.now
        watcher.pass_time()
    again = watcher.queue.claim()
    assert again is not None and again.number == 1
    again.lease.release()


@pytest.mark.attack("A shared disk that does not answer for minutes")
def test_a_watcher_that_slept_or_lost_the_disk_has_watched_nothing(tmp_path):
    claimed_elsewhere(tmp_path)
    watcher = Machine(tmp_path)
    for minutes in (3, 60, 3000):  # the holder could not write either, and has had no time since
        assert watcher.queue.claim() is None
        watcher.pass_time(60.0 * minutes)
    assert GRACE_SECONDS > 3 * LOOK_SECONDS
    assert watcher.queue.claim() is None


@pytest.mark.attack("Containers with one host name and equal process ids")
def test_a_lease_that_names_this_host_and_a_process_that_is_not_here_is_not_taken(tmp_path):
    claimed_elsewhere(tmp_path, host=platform.node(), pid=gone(), started=0.0)
    assert Machine(tmp_path).queue.claim() is None


CONTAINER = """
import sys, time
from pathlib import Path
from cohort.harness.study.storage import files
lease = files.FileLease(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""
CAN_UNSHARE = shutil.which("unshare") is not None and not subprocess.call(
    ["unshare", "--pid", "--fork", "true"], stderr=subprocess.DEVNULL
)


@pytest.mark.attack("Containers with one host name and equal process ids")
@pytest.mark.skipif(not CAN_UNSHARE, reason="needs the right to make a process namespace")
def test_a_process_of_another_container_is_not_looked_up_among_ours(tmp_path):
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", CONTAINER]
    with subprocess.Popen([*command, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        holder = read_json(tmp_path / "lease")
        assert holder["pid"] < 10 and holder["host"].partition("/")[0] == host_id().partition("/")[0]  # one boot
        assert is_alive(holder["host"], holder["pid"], holder["started"]) is None
        assert LocalStorage(tmp_path).held([tmp_path]) == {tmp_path}
        process.kill()


def test_equal_ids_on_one_machine_are_told_apart_by_the_start_of_the_process():
    here = this_process()
    assert is_alive(**here) is True
    assert is_alive(**{**here, "started": here["started"] - 100}) is None
    assert is_alive(**{**here, "host": "elsewhere"}) is None
    assert is_alive(**{**here, "pid": gone()}) is False


@pytest.mark.attack("A torn progress or lease file")
@pytest.mark.parametrize("torn", [b"", b"{", b"[]", b"\xff\x00", b'{"format": 1}'])
def test_a_lease_that_cannot_be_read_is_held_until_its_heartbeats_have_stopped(tmp_path, torn):
    file, watcher = tmp_path / "lease", Machine(tmp_path)
    storage = watcher.queue.storage
    file.write_bytes(torn)
    for beat in range(20):
        os.utime(file, (beat, beat))
        assert storage.held([tmp_path]) == {tmp_path}
        watcher.pass_time()
    while watcher.now < 20 * LOOK + GRACE_SECONDS - LOOK:
        assert storage.held([tmp_path]) == {tmp_path}
        watcher.pass_time()
    assert storage.held([tmp_path]) == set()
    assert storage.held([tmp_path / "nothing"]) == set()


@pytest.mark.attack("A worker that is frozen for longer than its lease lasts")
def test_a_suspended_worker_keeps_its_trial_here_and_ends_if_another_machine_took_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", CONTAINER, str(tmp_path)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    process.send_signal(signal.SIGSTOP)
    watcher = Machine(tmp_path)
    for _ in range(20):
        assert watcher.queue.storage.held([tmp_path]) == {tmp_path}  # its process is here, and lives
        watcher.pass_time(LOOK_SECONDS)
    write_json(tmp_path / "lease", {**read_json(tmp_path / "lease"), "host": "elsewhere"})  # as another machine sees it
    for _ in range(6):
        held = watcher.queue.storage.held([tmp_path])
        watcher.pass_time(LOOK_SECONDS)
    assert held == set()
    other = FileLease(tmp_path)
    process.send_signal(signal.SIGCONT)
    assert process.wait(240) == 3
    other.release()


@pytest.mark.attack("A shared disk that does not answer for minutes")
def test_a_lease_is_renewed_again_when_its_disk_is_back():
    asked, renewed = [], threading.Event()

    def renew() -> bool:
        asked.append(True)
        if len(asked) == 1:
            raise OSError("stale file handle")
        renewed.set()
        return True

    lease = Lease("a flaky lease", 0.01, renew, lambda: None)
    assert renewed.wait(240)
    lease.release()


@pytest.mark.attack("Files that killed writers left")
def test_what_killed_writers_left_in_a_trials_folder_is_swept_when_it_is_taken(tmp_path):
    one, dead = started(tmp_path), gone()
    directory = one.queue.plan.directory(one.queue.plan.keys[0])
    directory.mkdir(parents=True)
    left = [f".lease.{dead}", f".progress.json.{dead}", f".events.jsonl.{dead}"]
    kept = [f".run.json.{os.getppid()}", ".note", ".note.txt", "events.jsonl"]  # the first by a process that lives
    for name in left + kept:
        (directory / name).touch()
    claim = one.queue.claim()
    assert {file.name for file in directory.iterdir()} == {*kept, "lease"}
    claim.lease.release()
