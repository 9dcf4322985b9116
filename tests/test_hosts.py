"""A trial on several hosts is the trial on one; strangers and hosts with other versions stay out; none that dies takes
it along. The hosts are processes of this machine, which torch's agent starts."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cohort.harness.devices import group
from cohort.harness.devices.group import Group
from cohort.harness.record.events import read_events
from cohort.harness.record.status import StudyStatus
from cohort.harness.run.loop import train
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.run import parse_run
from cohort.harness.spec.study import parse_study
from cohort.harness.study.launchers.ray import Cluster
from cohort.harness.study.runner import run_study, start_study, study_status
from fakes import MemoryLog, StopAfter
from ranks_at_work import RUN
from test_chaos import needs_ray, two_ray_nodes, values
from torch.distributed import HashStore

TRIAL = {**RUN, "device": "cpu", "devices": 2, "steps": 5, "checkpoints": {"every": 1}}
SECRET = {"COHORT_SECRET": "of two hosts"}
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # else torch's agent does not tell it to a host that is new


@contextmanager
def host(port: int, runs: Path, log: Path, **environment: str) -> Iterator[psutil.Process]:
    """A host whose agent starts one process of the worker; it ends with the test."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
               "--max-restarts", "3", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
               "--local-addr", "127.0.0.1", "-m", "cohort", "study", "work", "two", "--runs", str(runs)]  # fmt: skip
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **FRESH_STORE, **environment}, stdout=output, stderr=output
        )
    found = psutil.Process(process.pid)
    try:
        yield found
    finally:
        kill(found)
        process.wait()


def kill(one: psutil.Process) -> None:
    """All processes of a host at once."""
    with one.oneshot():
        everything = [*one.children(recursive=True), one] if one.is_running() else []
    for process in everything:
        process.kill()


def until(condition: Callable[[], object], *alive: psutil.Process) -> None:
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline and all(one.status() != psutil.STATUS_ZOMBIE for one in alive)
        time.sleep(0.05)


def first_step(folder: Path) -> list[Any]:
    """What the first step logged, its clocks included."""
    return [e["values"] for e in read_events(folder / "events.jsonl") if e["type"] == "metrics" and e["step"] == 1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def listens(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.attack("SIGKILL of a process of a trial on two hosts, or of all on one host")
@pytest.mark.timeout(600)
def test_two_hosts_though_one_is_late_and_then_killed_do_what_one_process_does(tmp_path: Path, runs: Path):
    trial = {**TRIAL, "steps": 24, "checkpoints": {"every": 4}}  # long enough not to end before the kill
    study = parse_study({"name": "two", "question": "?", "run": trial, "arms": {"only": {}}, "seeds": [1]}, "test")
    start_study(study, runs, command="")
    port, logs = free_port(), [tmp_path / name for name in ("first.log", "second.log", "third.log")]
    folder = next(iter(study_status("two", runs).trials)).directory
    with host(port, runs, logs[0], **SECRET) as first:
        until(lambda: listens(port), first)
        assert study_status("two", runs).counts() == {"waiting": 1}  # nothing begins without the other
        with host(port, runs, logs[1], **SECRET) as second:
            until(lambda: list(folder.glob("checkpoints/step-*")), first, second)
            kill(second)
        assert not study_status("two", runs).finished
        began = first_step(folder)
        with host(port, runs, logs[2], **SECRET) as third:
            until(lambda: study_status("two", runs).finished, first, third)
            assert [first.wait(60), third.wait(60)] == [0, 0]
    (ended,) = study_status("two", runs).trials
    assert (ended.state, "No trial of 'two' is left" in logs[0].read_text() + logs[2].read_text()) == ("complete", True)
    assert first_step(folder) == began  # it went on from the checkpoint
    events = list(read_events(folder / "events.jsonl"))

    alone, spec = MemoryLog(), parse_run({**trial, "devices": 1}, "alone")
    train(spec, tmp_path / "alone", alone, cache=tmp_path / "cache", should_stop=StopAfter(8))
    logged = [(event["step"], event["values"]) for event in events if event["type"] == "metrics"]
    assert [step for step, _ in logged if step <= 8] == [step for step, _ in alone.events]
    for (step, ours), (_, theirs) in zip(logged, alone.without_clocks(), strict=False):
        known = {name: value for name, value in theirs.items() if not name.startswith("flops/")}  # rows are read whole
        assert {name: ours[name] for name in known} == pytest.approx(known, abs=1e-4, rel=2e-5, nan_ok=True), step


# Who may be in a group ------------------------------------------------------------------------------------------------


def meet(secrets: list[str], store: Any = None) -> list[Group | Exception]:
    """Who met whom, each with its secret; the first is rank 0."""
    store = store or HashStore()

    def come(rank: int) -> Group | Exception:
        one = Group(store, rank, len(secrets), 1, secrets[rank])
        try:
            one.meet()
        except SpecError as error:
            return error
        return one

    with ThreadPoolExecutor(len(secrets)) as pool:
        return list(pool.map(come, range(len(secrets))))


def test_processes_with_one_secret_meet_though_the_store_has_words_of_an_earlier_group():
    store = HashStore()
    for _ in range(2):
        first, *others = meet(["s"] * 3, store)
        assert isinstance(first, Group) and all(isinstance(one, Group) for one in others)
        with ThreadPoolExecutor(len(others)) as pool:
            heard = [pool.submit(one.follow, lambda: None) for one in others]  # pyright: ignore
            first.end()
            assert [one.result() for one in heard] == [None, None]


@pytest.mark.attack("A host without the secret of a group")
def test_a_wrong_secret_is_refused_on_both_sides_before_any_trial_is_told():
    ends = meet(["right", "wrong"])
    assert all(isinstance(end, SpecError) for end in ends)
    assert all("COHORT_SECRET must be the same on all hosts" in str(end) for end in ends)


@pytest.mark.attack("A host without the secret of a group")
def test_a_trial_that_someone_without_the_secret_tells_is_not_run():
    first, other = meet(["s", "s"])
    assert isinstance(first, Group) and isinstance(other, Group)
    first._secret = b"another"  # pyright: ignore[reportPrivateUsage]
    first._say("trial-1", {"spec": RUN, "directory": "/", "cache": "/", "inputs": {}})  # pyright: ignore
    assert other._heard("trial-1") is None  # pyright: ignore[reportPrivateUsage]


def test_hosts_with_other_versions_are_told_so(monkeypatch: pytest.MonkeyPatch):
    answers = iter([{"torch": "2.0"}, {"torch": "1.0"}])
    lock = threading.Lock()

    def versions() -> dict[str, str]:
        with lock:
            return next(answers)

    monkeypatch.setattr(group, "versions", versions)
    for end in meet(["s", "s"]):
        assert isinstance(end, SpecError) and "all hosts must run the same versions, torch is" in str(end)


@pytest.mark.parametrize(
    ("secrets", "words"),
    [(("", ""), "a group of several hosts needs COHORT_SECRET"), (("a", "b"), "must be the same on all hosts")],
)
@pytest.mark.long
@pytest.mark.attack("A host without the secret of a group")
def test_hosts_without_one_secret_end_with_a_sentence(tmp_path: Path, runs: Path, secrets: tuple[str, str], words: str):
    start_study(parse_study({"name": "two", "question": "?", "run": TRIAL, "arms": {"only": {}}, "seeds": [1]}, "test"),
                runs, command="")  # fmt: skip
    port, logs = free_port(), [tmp_path / "first.log", tmp_path / "second.log"]
    with (
        host(port, runs, logs[0], COHORT_SECRET=secrets[0]) as first,
        host(port, runs, logs[1], COHORT_SECRET=secrets[1]) as second,
    ):
        assert 0 not in (first.wait(240), second.wait(240))
    assert all(words in " ".join(log.read_text().replace("|", " ").split()) for log in logs)
    assert study_status("two", runs).counts() == {"waiting": 1}


# Ray ------------------------------------------------------------------------------------------------------------------


@pytest.mark.long
@needs_ray
@pytest.mark.attack("SIGKILL of a process of a trial on two hosts, or of all on one host")
@pytest.mark.timeout(900)
def test_on_ray_a_trial_that_no_node_can_hold_has_several_and_goes_on_when_one_is_killed(
    tmp_path: Path, runs: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    arms = {"question": "?", "name": "chaos", "factors": {"algorithm.kl_beta": [0.0, 0.1]}, "seeds": [0]}
    study, killed, quiet = parse_study({**arms, "run": {**TRIAL, "steps": 6}}, "test"), [], tmp_path / "quiet"
    quiet.mkdir()
    shutil.copy(empty_store, quiet / "mlflow.db")

    def kill_once(status: StudyStatus) -> None:
        if not killed and any(trial.done >= 2 for trial in status.trials if trial.phase == "train"):
            agents = [one for one in psutil.process_iter(["cmdline"]) if str(runs) in (one.info["cmdline"] or ())]
            killed.append(kill(next(one for one in agents if one.children())))

    with two_ray_nodes() as address:
        status = run_study(study, runs, workers=None, command="", on_status=kill_once, cluster=Cluster(address))
        with pytest.raises(SpecError, match=r"a worker asks for 4 cores and 0 GPUs, the cluster has 2 and 0"):
            run_study(study, runs, workers=None, command="", cluster=Cluster(address, num_cpus=2))
    assert killed
    assert (status.finished, status.all_valid) == (True, True)
    run_study(study, quiet, workers=1, command="")
    assert values(runs) == values(quiet) != {}
