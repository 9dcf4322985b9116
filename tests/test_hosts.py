"""A trial on several hosts is the trial on one; strangers and hosts with other versions stay out; none that dies takes
it along. The hosts are agents of torch on this machine, forked with their workers from one process."""

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from cohort.harness.devices import group
from cohort.harness.devices.group import RankGroup
from cohort.harness.record.events import EVENTS, read_events, read_history
from cohort.harness.run.loop import train
from cohort.harness.settings.errors import SpecError
from cohort.harness.settings.run import parse_run
from cohort.harness.study.queue import study_status
from cohort.harness.study.runner import start_study
from cohort.harness.study.worker import worker_main
from factories import make_study
from fake_trials import free_port
from fakes import MemoryLog, StopAfter
from ranks_at_work import RUN, begun, ends, torchrun, until
from torch.distributed import HashStore

TRIAL = {**RUN, "device": "cpu", "devices": 2, "steps": 8, "checkpoints": {"every": 1}}
SECRET = {"COHORT_SECRET": "of two hosts"}


def start(runs: Path) -> None:
    arms = {"name": "two", "question": "?", "arms": {"only": {}}, "seeds": [1]}
    start_study(make_study(**arms, run=TRIAL), runs, command="")


@contextmanager
def host(port: int, runs: Path, output: Path, restarts: int = 0, **environment: str) -> Iterator[Any]:
    """A host whose agent starts one process of the worker; it ends with the test."""
    process = begun(torchrun, port, runs, restarts, environment, output=output)
    try:
        yield process
    finally:
        kill(process)


def kill(host: Any) -> None:
    """All processes of a host at once."""
    agent = psutil.Process(host.pid) if host.is_alive() else None
    for process in [*agent.children(recursive=True), agent] if agent is not None else ():
        process.kill()
    host.join()


def first_step(folder: Path) -> list[Any]:
    """What the first step logged, its clocks included."""
    return [e["values"] for e in read_events(folder / "events.jsonl") if e["type"] == "metrics" and e["step"] == 1]


@pytest.mark.slow
@pytest.mark.attack("SIGKILL of a process of a trial on two hosts, or of all on one host")
@pytest.mark.timeout(300)
def test_two_hosts_though_one_is_late_and_then_killed_do_what_one_process_does(tmp_path):
    runs = tmp_path / "runs"
    start(runs)
    port, logs = free_port(), [tmp_path / name for name in ("first.log", "second.log", "third.log")]
    folder = next(iter(study_status("two", runs).trials)).directory
    with host(port, runs, logs[0], 1, **SECRET) as first:
        until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, first)
        assert study_status("two", runs).counts() == {"waiting": 1}  # nothing begins without the other
        with host(port, runs, logs[1], **SECRET) as second:
            until(lambda: list(folder.glob("checkpoints/step-*")), first, second)
            kill(second)
        assert not study_status("two", runs).finished
        began = first_step(folder)
        with host(port, runs, logs[2], **SECRET) as third:
            assert ends(first, third) == [0, 0]
    (ended,) = study_status("two", runs).trials
    assert ended.state == "complete"
    assert first_step(folder) == began  # it went on from the checkpoint
    events = list(read_events(folder / "events.jsonl"))

    alone, spec = MemoryLog(), parse_run({**TRIAL, "devices": 1}, "alone")
    train(spec, tmp_path / "alone", alone, cache=tmp_path / "cache", should_stop=StopAfter(3))
    logged = [(event["step"], event["values"]) for event in events if event["type"] == "metrics"]
    assert [step for step, _ in logged if step <= 3] == [step for step, _ in alone.events]
    for (step, ours), (_, theirs) in zip(logged, alone.without_clocks(), strict=False):
        known = {name: value for name, value in theirs.items() if not name.startswith("flops/")}  # rows are read whole
        assert {name: ours[name] for name in known} == pytest.approx(known, abs=1e-4, rel=2e-5, nan_ok=True), step


def meet(secrets: list[str], store: Any = None) -> list[RankGroup | Exception]:
    """Who met whom, each with its secret; the first is rank 0."""
    store = store or HashStore()

    def come(rank: int) -> RankGroup | Exception:
        one = RankGroup(store, rank, len(secrets), 1, secrets[rank])
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
        assert isinstance(first, RankGroup) and all(isinstance(one, RankGroup) for one in others)
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
    assert isinstance(first, RankGroup) and isinstance(other, RankGroup)
    first._secret = b"another"  # pyright: ignore[reportPrivateUsage]
    first._say("trial-1", {"spec": RUN, "directory": "/", "cache": "/", "inputs": {}})  # pyright: ignore
    assert other._heard("trial-1") is None  # pyright: ignore[reportPrivateUsage]


def test_a_process_that_is_stuck_in_a_failed_trial_ends_before_the_first_would_wait_for_it_in_the_next(monkeypatch):
    first, other = meet(["s", "s"])
    assert isinstance(first, RankGroup) and isinstance(other, RankGroup)
    monkeypatch.setattr(group, "LEAVE_SECONDS", 0.0)
    ended, left = threading.Event(), threading.Event()
    monkeypatch.setattr(group.os, "_exit", lambda status: ended.set())
    for number in (1, 2):
        first.tell({"number": number})
        if number == 1:
            assert other._told() == {"number": 1}  # pyright: ignore[reportPrivateUsage]
            store = HashStore()
            store.set("error", "of the first process")
            watch = threading.Thread(target=other._watch, args=(store, left, id), daemon=True)  # pyright: ignore
            watch.start()
            assert not ended.wait(0.3)
    assert ended.wait(20)
    left.set()
    watch.join()


def test_hosts_with_other_versions_are_told_so(monkeypatch):
    answers = iter([{"torch": "2.0"}, {"torch": "1.0"}])
    lock = threading.Lock()

    def versions() -> dict[str, str]:
        with lock:
            return next(answers)

    monkeypatch.setattr(group, "versions", versions)
    for end in meet(["s", "s"]):
        assert isinstance(end, SpecError) and "all hosts must run the same versions, torch is" in str(end)


def test_a_stuck_first_process_records_the_error_of_another_before_it_ends(tmp_path, monkeypatch):
    def lead(execute: Any, spec: Any, directory: Path, log: Any, *, when_stuck: Any, **how: Any) -> None:
        def tell(*_: Any, **__: Any) -> None:
            raise RuntimeError("process 1: OutOfMemoryError: too long")

        log.resume(-1)
        log.metrics(1, {"policy/loss": 0.5})
        thread = threading.Thread(target=when_stuck, args=(tell,))
        thread.start()
        thread.join()
        raise SystemExit(1)  # where RankGroup ends the process

    start(tmp_path)
    monkeypatch.setattr(group, "lead", lead)
    with pytest.raises(SystemExit):
        worker_main("two", tmp_path, checked=True)
    (trial,) = study_status("two", tmp_path).trials
    assert (trial.state, trial.reason) == ("failed", "RuntimeError: process 1: OutOfMemoryError: too long")
    history = read_history(trial.directory / EVENTS).history  # which the process had open
    assert history["policy/loss"] == {1: (0.5, history["policy/loss"][1][1])}


@pytest.mark.slow
@pytest.mark.attack("A host without the secret of a group")
def test_hosts_without_one_secret_end_with_a_sentence(tmp_path, monkeypatch):
    runs, port, logs = tmp_path / "runs", free_port(), [tmp_path / "first.log", tmp_path / "second.log"]
    start(runs)
    with host(port, runs, logs[0], COHORT_SECRET="a") as one, host(port, runs, logs[1], COHORT_SECRET="b") as other:
        assert 0 not in ends(one, other)
    assert all("must be the same on all hosts" in log.read_text() for log in logs)
    assert study_status("two", runs).counts() == {"waiting": 1}
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(group, "in_group", lambda: True)
    with pytest.raises(SpecError, match="a group of several hosts needs COHORT_SECRET"):
        group.enter()
