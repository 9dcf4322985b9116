"""The queue keeps its promises wherever it lives: in files or in a storage of an extra. A trial belongs to the worker
that lives, whatever machines call themselves and whatever time their clocks show."""

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import fake_trials
import pytest
from cohort.harness.base.files import read_json, write_json
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.study import StudySpec
from cohort.harness.study.plan import Plan
from cohort.harness.study.queue import MAX_LOST, Queue, TrialOutcome, open_storage, study_status
from cohort.harness.study.storage.base import Lease, host_id, is_alive, this_process
from cohort.harness.study.storage.files import GRACE_SECONDS, LOOK_SECONDS, FileLease, LocalStorage
from fake_trials import a_study
from queues import DONE, a_queue, claimed, die, gone, open_queue, run

pytestmark = pytest.mark.usefixtures("plugins")


def one_trial() -> StudySpec:
    return a_study(factors={"algorithm.group_size": [2]}, seeds=[0])


def test_each_trial_is_claimed_once_and_its_end_is_seen_by_all(tmp_path, url):
    queue = a_queue(a_study(), tmp_path, url)
    other = open_queue(a_study(), tmp_path, url)
    claims = [claimed(queue), claimed(other), claimed(other), claimed(queue)]
    assert [claim.key for claim in claims] == queue.plan.keys
    assert queue.claim() is None and other.claim() is None
    assert queue.status().counts() == {"running": 4}
    queue.finish(claims[0], DONE)
    other.finish(claims[1], TrialOutcome("invalid", "policy/loss is NaN"))
    other.finish(claims[2], TrialOutcome("stopped"))
    status = open_queue(a_study(), tmp_path, url).status()
    assert [(t.state, t.reason) for t in status.trials] == [
        ("complete", None), ("invalid", "policy/loss is NaN"), ("stopped", None), ("running", None)
    ]  # fmt: skip
    first = status.trials[0]
    assert (first.accuracy, first.seconds, first.generated_tokens) == (0.5, 8.0, 100.0)
    other.retry_failed()  # the study is started again
    assert claimed(queue).key == claims[2].key  # what was stopped comes again, and nothing else
    assert queue.claim() is None and other.claim() is None
    assert queue.num_claims() == other.num_claims() == 5


def test_claims_of_many_threads_at_once_never_meet(tmp_path, url):
    study = a_study(factors={"algorithm.group_size": [1, 2, 4, 8, 16, 32]}, seeds=[0, 1])
    a_queue(study, tmp_path, url)
    keys: list[object] = []

    def work() -> None:
        queue = open_queue(study, tmp_path, url)
        while (claim := queue.claim()) is not None:
            queue.finish(claim, DONE)
            keys.append(claim.key)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    queue = open_queue(study, tmp_path, url)
    assert sorted(keys, key=str) == sorted(queue.plan.keys, key=str)  # 6 arms x 2 seeds, none twice
    assert queue.num_claims() == 12


@pytest.mark.attack("A worker that dies with a trial")
def test_a_dead_workers_trial_is_handed_on_and_its_late_result_dropped(tmp_path, url):
    queue = a_queue(one_trial(), tmp_path, url)
    claim = claimed(queue)
    assert queue.claim() is None
    die(claim, queue)
    assert queue.status().counts() == {"stopped": 1}
    again = claimed(open_queue(one_trial(), tmp_path, url))
    assert (again.key, again.number) == (claim.key, 1)
    queue.finish(again, DONE)
    queue.finish(claim, TrialOutcome("failed", "too late"))
    assert queue.status().counts() == {"complete": 1}


@pytest.mark.attack("A trial that kills every worker")
def test_a_trial_that_keeps_killing_its_worker_fails_with_a_reason(tmp_path, url):
    queue = a_queue(one_trial(), tmp_path, url)
    progress = queue.plan.directory(queue.plan.keys[0]) / "progress.json"
    progress.parent.mkdir(parents=True)
    for attempt in range(MAX_LOST + 3):
        claim = claimed(queue)
        write_json(progress, {"step": min(attempt, 3)})  # the first three attempts get further each time
        die(claim, queue)
    assert queue.claim() is None
    (trial,) = queue.status().trials
    reason = "the worker died 10 times at step 3, the last time without an error"
    assert (trial.state, trial.reason) == ("failed", reason)
    queue.retry_failed()  # the study is started again
    assert claimed(queue).number == MAX_LOST + 3


HOLDER = """
import sys, time
from pathlib import Path
from cohort.harness.study.queue import open_storage
from cohort.harness.study.storage import files
from cohort.harness import extras
for one in (files, *extras.modules("storage").values()):
    one.BEAT_SECONDS = 0.05
storage = open_storage(Path(sys.argv[1]), "sizes", sys.argv[2])
storage.write_document({})
assert storage.take_lease(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


def test_a_worker_ends_at_once_when_another_has_its_lease(tmp_path, url):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), url or ""], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    storage = open_storage(tmp_path, "sizes", url)
    assert storage.held([tmp_path]) == {tmp_path}
    if url is None:
        write_json(tmp_path / "lease", {**read_json(tmp_path / "lease"), "token": "another"})
    else:
        storage._rows("UPDATE cohort_leases SET token = 'another'")  # pyright: ignore
    assert process.wait(240) == 3


def test_another_spec_under_the_same_name_is_refused(tmp_path, url, new_runs):
    here, there = new_runs(tmp_path / "here"), new_runs(tmp_path / "there")
    a_queue(a_study(), here, url)
    second = here if url is None else there  # another host knows of it by the database alone
    words = r"(?s)a started study cannot change.*run.steps: then 7, now 8\n.*restore the settings.*`name`"
    with pytest.raises(SpecError, match=words):
        run(a_study(run=fake_trials.run_settings(steps=8)), second, storage=url)
    assert study_status("sizes", second, url).counts() == {"waiting": 4}


@pytest.mark.parametrize("torn", [b"", b"{", b"\xff\x00", b'{"format": 1, "step": "two"}'])
@pytest.mark.attack("A torn progress or lease file")
def test_a_lease_whose_file_was_torn_is_kept_and_progress_that_cannot_be_read_is_none(tmp_path, torn):
    lease = FileLease(tmp_path)
    for name in ("lease", "progress.json"):
        (tmp_path / name).write_bytes(torn[:1] if name == "lease" else torn)
    assert LocalStorage(tmp_path).progress([tmp_path]) == {tmp_path: {}}
    assert lease._renew()
    lease.release()
    assert not (tmp_path / "lease").exists()


LOOK = 5.0  # seconds between two looks of a watcher


class Machine:
    """Another machine's view of one study's folder; its clock starts anywhere and is moved by hand."""

    def __init__(self, runs: Path, start: float = 0.0) -> None:
        plan = Plan(one_trial(), runs)
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


CAN_UNSHARE = shutil.which("unshare") is not None and not subprocess.call(
    ["unshare", "--pid", "--fork", "true"], stderr=subprocess.DEVNULL
)


@pytest.mark.attack("Containers with one host name and equal process ids")
@pytest.mark.skipif(not CAN_UNSHARE, reason="needs the right to make a process namespace")
def test_a_process_of_another_container_is_not_looked_up_among_ours(tmp_path):
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", HOLDER]
    with subprocess.Popen([*command, str(tmp_path), ""], stdout=subprocess.PIPE) as process:
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
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path), ""], stdout=subprocess.PIPE)
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
