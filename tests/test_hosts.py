"""A trial on several hosts is the trial on one; strangers and hosts with other files stay out; none that dies takes it
along. The hosts are processes of this machine.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from cohort.harness.checks import preflight
from cohort.harness.cli.app import main
from cohort.harness.devices import hosts
from cohort.harness.devices.hosts import DOOR, Share, doors, open_door
from cohort.harness.ground.machine import HOSTS, Hosts
from cohort.harness.record.status import StudyStatus
from cohort.harness.run import launch
from cohort.harness.run.launch import train
from cohort.harness.run.single import train_once
from cohort.harness.spec.errors import SpecError
from cohort.harness.spec.run import RunSpec, parse_run
from cohort.harness.spec.study import parse_study
from cohort.harness.study.launchers.ray import Cluster
from cohort.harness.study.runner import run_study
from fakes import MemoryLog, StopAfter, assert_same_weights, final_weights
from ranks_at_work import RUN
from test_chaos import needs_ray, two_ray_nodes, values

HERE = Hosts(2, "127.0.0.1")


@pytest.fixture
def two_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in HERE.environment().items():
        monkeypatch.setenv(name, value)


@contextmanager
def other_host(runs: Path, **environment: str) -> Iterator[psutil.Process]:
    """A host that joins trials of the runs folder."""
    command = [sys.executable, "-P", "-m", hosts.__name__, str(runs), "--parent", str(os.getpid())]
    process = subprocess.Popen(command, env={**os.environ, **environment})
    try:
        yield psutil.Process(process.pid)
    finally:
        process.kill()
        process.wait()


def spec_of(**changes: Any) -> RunSpec:
    return parse_run({**RUN, "devices": 2, **changes}, "test")


def ranks(of: psutil.Process) -> list[psutil.Process]:
    alive = [child for child in of.children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in alive if launch.__name__ in child.cmdline()]


@pytest.mark.usefixtures("two_hosts")
def test_two_hosts_do_what_one_process_does(tmp_path: Path):
    with other_host(tmp_path):
        both, alone = MemoryLog(), MemoryLog()
        train(spec_of(), tmp_path / "both", both, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").rglob(DOOR))
    train(spec_of(devices=1), tmp_path / "alone", alone, cache=tmp_path / "cache")
    for (step, logged), (_, others) in zip(both.without_clocks(), alone.without_clocks(), strict=True):
        assert logged.keys() == others.keys()
        known = {
            key: value for key, value in others.items() if not key.startswith("flops/")
        }  # rows are read whole here
        assert {key: logged[key] for key in known} == pytest.approx(known, abs=1e-4, rel=2e-5, nan_ok=True), step
    for step in (1, 2):
        file = f"rollouts/step-{step:06d}.jsonl"
        assert (tmp_path / "both" / file).read_text() == (tmp_path / "alone" / file).read_text()
    ours, theirs = final_weights(tmp_path / "both"), final_weights(tmp_path / "alone")
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) <= 1e-5


@pytest.mark.long
@pytest.mark.usefixtures("two_hosts")
@pytest.mark.attack("SIGKILL of a process of a trial on two hosts, or of all on one host")
def test_two_hosts_do_what_one_does_though_a_process_is_killed_and_then_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
):
    """Bit for bit: one host has two processes, two have one each."""
    runs, log = tmp_path / "runs", MemoryLog()
    spec = spec_of(steps=6, checkpoints={"every": 1, "rollouts_every": 1})
    log.holds = lambda *_: True
    with other_host(runs) as north, other_host(runs) as south:

        def victim(kill_host: bool) -> psutil.Process:
            """The host that works for the trial, or its process."""
            host = next(host for host in (north, south) if host.status() != psutil.STATUS_ZOMBIE and ranks(host))
            return host if kill_host else ranks(host)[0]

        for kill_host, words in ((False, "process 1 of the trial"), (True, "host 127.0.0.1 of the trial is gone")):
            step = len(log.resumed_at) + 1

            def kill(kill_host: bool = kill_host, step: int = step) -> None:
                while not (runs / f"run/checkpoints/step-{step:08d}").exists():
                    time.sleep(0.005)
                victim(kill_host).kill()

            threading.Thread(target=kill, daemon=True).start()
            with pytest.raises(ChildProcessError, match=rf"{words}.*; the trial continues from its last checkpoint"):
                train(spec, runs / "run", log, cache=runs / "cache")
            assert ranks(psutil.Process()) == []
        result = train(spec, runs / "run", log, cache=runs / "cache")
    assert result.state == "complete"
    assert log.resumed_at[0] == -1 < 1 <= log.resumed_at[1] < log.resumed_at[2]
    assert not list((runs / "cache").rglob(DOOR))
    record_property("tried", 2)

    monkeypatch.delenv(HOSTS)
    train(spec, runs / "alone", alone := MemoryLog(), cache=runs / "cache")
    assert log.without_clocks() == alone.without_clocks()
    assert_same_weights(final_weights(runs / "run"), final_weights(runs / "alone"))


def door_of(cache: Path) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while not (found := list(doors(cache, "").glob(f"*/{DOOR}"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    return {**json.loads(found[0].read_text()), "file": found[0]}


@contextmanager
def waiting(cache: Path, kind: str = "cpu", num: int = 1) -> Iterator[dict[str, Any]]:
    """The door of a trial that waits for a host, with `said`, what its wait has come to."""
    end, said = threading.Event(), {}

    def wait() -> None:
        with open_door(HERE, cache, cache / "run") as door:
            said["guests"] = door.wait([Share(range(1, 1 + num), kind, {}, "/")], end.is_set)

    thread = threading.Thread(target=wait)
    thread.start()
    try:
        yield {**door_of(cache), "said": said}
    finally:
        end.set()
        thread.join()


def knock(door: dict[str, Any], **changes: Any) -> None:
    hosts._take_part({**door, **changes}, lambda: False)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.attack("A stranger at the door of a trial on several hosts")
def test_whoever_does_not_know_the_secret_is_not_let_in_and_nothing_of_it_is_unpickled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, record_property: Callable[[str, object], None]
):
    harm = tmp_path / "harm"

    class Harm:
        def __reduce__(self) -> Any:
            return Path.touch, (harm,)

    with waiting(tmp_path) as door:
        assert door["file"].parent.stat().st_mode & 0o077 == 0
        place = (door["address"], door["port"])
        with socket.create_connection(place) as silent, socket.create_connection(place) as loud:
            loud.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            for objects in (1, 3):  # instead of an answer to the challenge, and of its own
                stranger = Connection(socket.create_connection(place).detach())
                for _ in range(objects):
                    stranger.send(Harm())
            knock(door, secret="0" * 64)  # what this host cannot prove
            while caplog.text.count("knocked without the secret") < 4:
                time.sleep(0.02)
            assert silent.fileno() > 0
            with pytest.raises(SpecError):  # one that knows it is heard all the same
                knock(door, folder=str(tmp_path))
        assert door["said"] == {}
    assert door["said"] == {"guests": None}
    assert not harm.exists()
    record_property("tried", 5)


def test_a_host_with_other_files_versions_or_too_few_devices_is_told_why_it_cannot_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with waiting(tmp_path, num=3) as door:
        with pytest.raises(SpecError, match=r"all hosts must share the runs folder, this one has another '.*mount"):
            knock(door, folder=str(tmp_path))
        with pytest.raises(SpecError, match=r"all hosts must have the runs folder in the same place, '.*' is not here"):
            knock(door, folder="/nowhere")
        monkeypatch.setattr(hosts, "usable_cores", lambda: 2)
        with pytest.raises(SpecError, match=r"each host needs 3 cores, this one has 2; take more hosts"):
            knock(door)
        told = dict(hosts.versions())
        answers = iter([{**told, "torch": "1.0"}, told])  # of the host that joins, then of the first one
        monkeypatch.setattr(hosts, "versions", lambda: next(answers))
        with pytest.raises(SpecError, match=r"the same versions, torch is 1.0 here and 2\..* on the first host"):
            knock(door)
        assert door["said"] == {}


@pytest.mark.usefixtures("two_hosts")
def test_a_trial_that_waits_for_hosts_stops_when_it_is_asked_to_and_gives_up_after_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert train(spec_of(), tmp_path, MemoryLog(), cache=tmp_path, should_stop=StopAfter(2)).state == "stopped"
    monkeypatch.setattr(hosts, "WAIT_SECONDS", 0.1)
    with pytest.raises(ChildProcessError, match=r"1 of the trial's 2 hosts were there after 0 s; run `cohort join"):
        train(spec_of(), tmp_path, MemoryLog(), cache=tmp_path)


@pytest.mark.long
@pytest.mark.usefixtures("two_hosts")
def test_a_host_that_sees_other_checkpoints_ends_the_trial_in_one_sentence(tmp_path: Path):
    """As with a shared folder whose copy on another host is old: here its process is told of another folder."""
    train(spec_of(steps=1, devices=1), tmp_path / "run", MemoryLog(), cache=tmp_path / "cache")
    code = (
        "import sys, dataclasses\nfrom pathlib import Path\nfrom multiprocessing.connection import Connection\n"
        "from cohort.harness.devices import hosts\nfrom cohort.harness.run import launch\n"
        "class Elsewhere(Connection):\n"
        "    def recv(self):\n"
        "        job = super().recv()\n"
        "        return dataclasses.replace(job, directory=Path('/nowhere'))\n"
        "launch.run_rank(Elsewhere(int(sys.argv[1])))\n"
    )
    (tmp_path / "elsewhere.py").write_text(code)
    host = (
        "import sys\nfrom pathlib import Path\nfrom cohort.harness.devices import hosts\n"
        f"hosts.rank_command = lambda fd: [sys.executable, {str(tmp_path / 'elsewhere.py')!r}, str(fd)]\n"
        f"hosts.join(Path({str(tmp_path)!r}), '', lambda: False)"
    )
    process = subprocess.Popen([sys.executable, "-c", host])
    try:
        with pytest.raises(
            SpecError, match="all hosts of a trial must see the same checkpoints, process 1 sees others"
        ):
            train(spec_of(steps=1), tmp_path / "run", MemoryLog(), cache=tmp_path / "cache")
    finally:
        process.kill()
        process.wait()


def test_devices_are_shared_evenly_and_what_hosts_lack_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert [Hosts(count).shares(devices) for count, devices in ((1, 8), (2, 8), (3, 8), (4, 2), (2, 1))] == [
        [8], [4, 4], [2, 3, 3], [1, 1], [1]
    ]  # fmt: skip
    monkeypatch.setattr(preflight, "usable_cores", lambda: 2)
    monkeypatch.setenv(HOSTS, Hosts(2, "127.0.0.1").environment()[HOSTS])
    eight = parse_run({**RUN, "devices": 8, "device": "cpu"}, "bad")
    with pytest.raises(SpecError, match=r"devices must be at most 4, the cores of 2 machines such as this one, got 8"):
        train_once(eight, tmp_path, "run")
    monkeypatch.setenv(HOSTS, Hosts(2, "192.0.2.1").environment()[HOSTS])
    with pytest.raises(
        SpecError, match=r"--listen must be an address of this host .* got '192.0.2.1'; it has 127.0.0.1"
    ):
        train_once(spec_of(device="cpu"), tmp_path, "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
@needs_ray
@pytest.mark.attack("SIGKILL of a process of a trial on two hosts, or of all on one host")
@pytest.mark.timeout(900)
def test_on_ray_a_trial_that_no_node_can_hold_has_several_and_goes_on_when_one_is_killed(
    tmp_path: Path, runs: Path, empty_store: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run = {**RUN, "device": "cpu", "devices": 2, "steps": 6, "checkpoints": {"every": 1}}
    arms = {"question": "?", "name": "chaos", "factors": {"algorithm.kl_beta": [0.0, 0.1]}, "seeds": [0]}
    study, killed, quiet = parse_study({**arms, "run": run}, "test"), [], tmp_path / "quiet"
    quiet.mkdir()
    shutil.copy(empty_store, quiet / "mlflow.db")

    def kill_once(status: StudyStatus) -> None:
        if not killed and any(trial.done >= 2 for trial in status.trials if trial.phase == "train"):
            for process in psutil.process_iter(["cmdline"]):
                if hosts.__name__ in (words := process.info["cmdline"] or ()) and str(runs) in words:
                    killed.append(process.kill())

    with two_ray_nodes() as address:
        status = run_study(study, runs, workers=None, command="", on_status=kill_once, cluster=Cluster(address))
        with pytest.raises(SpecError, match=r"a worker asks for 4 cores and 0 GPUs, the cluster has 2 and 0"):
            run_study(study, runs, workers=None, command="", cluster=Cluster(address, num_cpus=2))
    assert killed
    assert (status.finished, status.all_valid) == (True, True)
    run_study(study, quiet, workers=1, command="")
    assert values(runs) == values(quiet) != {}


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["train", "--hosts", "2"], "--hosts N (at least 2) and --listen ADDRESS belong together"),
        (["train", "--listen", "127.0.0.1"], "--hosts N (at least 2) and --listen ADDRESS belong together"),
        (["train", "--hosts", "2", "--listen", ":1"], "--listen must be ADDRESS or ADDRESS:PORT, got ':1'"),
        (["study", "run", "quickstart", "--hosts", "2", "--listen", "127.0.0.1", "--launcher", "ray"], "leave it out"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    words: list[str], refusal: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    monkeypatch.setenv(HOSTS, Hosts().environment()[HOSTS])  # and put back after the test
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert refusal in " ".join(capfd.readouterr().err.split())
