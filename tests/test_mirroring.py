"""Mirrors that are plugins get every event of a run; one that raises, hangs or dies costs a warning."""

import signal
import subprocess
import sys
from pathlib import Path

import fake_mirrors
import fake_trials
import pytest
import typer
from cohort.harness import plugins
from cohort.harness.base.files import file_lock
from cohort.harness.cli import options
from cohort.harness.mirror import others
from cohort.harness.mirror.address import MIRROR, mirrors, remote_uri
from cohort.harness.mirror.follow import mirrored
from cohort.harness.mirror.others import _Copy
from cohort.harness.mirror.studies import forget_study
from cohort.harness.record.events import EVENTS, read_events
from cohort.harness.record.run import RunLog, read_result
from factories import make_spec
from fake_mirrors import kept
from queues import wait_for

COLUMN = "validation/accuracy"


@pytest.fixture(autouse=True)
def fakes(tmp_path, monkeypatch):
    fake_mirrors.install(tmp_path / "mirror plugins", monkeypatch)


@pytest.fixture
def runs(tmp_path) -> Path:
    return tmp_path / "runs"


def open_log(runs: Path, seed: int = 0, directory: str = "train/run", **tags: str) -> RunLog:
    spec, named = make_spec(seed=seed), {f"cohort.{key}": value for key, value in tags.items()}
    return RunLog(runs, runs / directory, spec, experiment="train", run_name=f"seed {seed}", tags=named)


def log_run(runs: Path, seed: int = 0, directory: str = "train/run", **tags: str) -> RunLog:
    log = open_log(runs, seed, directory, **tags)
    log.metrics(0, {COLUMN: 0.25})
    log.metrics(1, {COLUMN: 0.5, "policy/loss": float("nan")})
    log.samples([fake_trials.sample(1)])
    log.finish("complete", None, {"test_accuracy": 0.75})
    return log


def place_of(runs: Path, mirror: str = "keeps", run: str = "train/run/run") -> Path:
    return runs / "mirrors" / mirror / run


def a_copy(runs: Path, mirror: str = "keeps") -> _Copy:
    return _Copy(plugins.load("mirror", mirror), place_of(runs, mirror), runs / "train/run", 60)


def test_a_mirror_gets_the_events_of_each_run_while_it_grows_and_the_rest_at_the_end(runs, monkeypatch, caplog):
    monkeypatch.setenv(MIRROR, "keeps")
    with mirrored(runs, runs / "studies/sizes"):
        first = log_run(runs, 0, "studies/sizes/trials/a")
        second = open_log(runs, 1, "studies/sizes/trials/b")
        second.metrics(0, {COLUMN: 0.25})
        places = [place_of(runs, run=f"studies/sizes/trials/{name}") for name in "ab"]
        wait_for(lambda: "closed" in kept(places[0]) and len(kept(places[1])) == 3)  # facts, start, metrics
        second.finish("complete", None, {})
    for seed, (log, place) in enumerate(zip((first, second), places, strict=True)):
        facts, *events, closed = kept(place)
        assert facts == {"id": facts["id"], "experiment": "train", "name": f"seed {seed}", "seed": seed}
        assert facts["id"].isalnum()
        assert events == read_events(log.directory / EVENTS)
        assert closed == "closed"
    assert kept(places[0])[0]["id"] != kept(places[1])[0]["id"]
    assert not (runs / "mlflow.db").exists()  # which was not named
    assert not caplog.messages


@pytest.mark.parametrize(
    ("mirror", "words"), [("raises", r"to the door\x1b[31m"), ("hangs", "a call took more than 2 s"), ("dies", "''")]
)
@pytest.mark.attack("A mirror that raises, hangs or dies")
def test_a_mirror_that_fails_costs_a_warning(mirror, words, runs, monkeypatch, caplog):
    monkeypatch.setattr(others, "CALL_SECONDS", 2.0)  # more than `keeps` takes on a busy machine
    monkeypatch.setenv(MIRROR, f"{mirror},keeps")
    with mirrored(runs, runs / "train/run"):
        log = log_run(runs)
    (warning,) = caplog.messages
    assert warning.startswith(f"the mirror {mirror} lacks some of 'run' (")
    assert words in warning
    assert (read_result(log.directory) or {})["state"] == "complete"
    assert kept(place_of(runs))[1:-1] == read_events(log.directory / EVENTS)  # the other mirror has all
    if mirror == "hangs":
        assert "fake_mirrors.py" in (runs / "mirrors/hangs/train/run/mirror.log").read_text()  # says where


@pytest.mark.attack("A mirror that raises, hangs or dies")
def test_a_mirror_that_hangs_is_waited_for_no_longer_than_the_end_may_take(runs, monkeypatch, caplog):
    monkeypatch.setattr(others, "CALL_SECONDS", 3600.0)
    monkeypatch.setattr(others, "DRAIN_SECONDS", 0.2)
    monkeypatch.setenv(MIRROR, "hangs")
    with mirrored(runs, runs / "train/run"):
        log_run(runs)
        wait_for(lambda: kept(place_of(runs, "hangs")))
    assert "the mirror hangs lacks some of 'run'" in caplog.text


def test_a_run_that_a_mirror_refuses_costs_no_other_run(runs, monkeypatch, caplog):
    monkeypatch.setenv(MIRROR, "raises_for_one")
    with mirrored(runs, runs / "studies/sizes"):
        for seed in range(3):
            log_run(runs, seed, f"studies/sizes/trials/{seed}")
    found = [kept(place_of(runs, "raises_for_one", f"studies/sizes/trials/{seed}"))[-1] for seed in range(3)]
    assert [found[0], found[2]] == ["closed", "closed"]
    assert found[1]["name"] == "seed 1"  # opened, and nothing more
    assert "1: OSError: no room for seed 1" in caplog.text


def test_a_whole_copy_is_not_made_again_and_one_of_a_rewritten_file_or_that_was_cut_off_begins_anew(runs):
    log, killed = open_log(runs), a_copy(runs)
    log.metrics(0, {COLUMN: 0.25})
    log.metrics(1, {COLUMN: 0.5})
    killed.copy()
    first = kept(place_of(runs))
    assert len(first) == 1 + 3
    log.close()
    again = open_log(runs)
    again.resume(0)
    again.metrics(1, {COLUMN: 0.75})
    killed.copy()  # before its process is
    assert kept(place_of(runs))[1:] == read_events(log.directory / EVENTS)
    one = a_copy(runs)
    one.copy()
    again.finish("complete", None, {})
    one.copy()
    found = kept(place_of(runs))
    assert found[0] == first[0]  # the same id, so that a service shows one run
    assert found[1:-1] == read_events(log.directory / EVENTS)
    assert [event["type"] for event in found[1:-1]] == ["start", "metrics", "start", "metrics", "finish"]
    written = (place_of(runs) / fake_mirrors.KEPT).stat().st_mtime_ns
    a_copy(runs).copy()
    assert (place_of(runs) / fake_mirrors.KEPT).stat().st_mtime_ns == written


def test_one_process_at_a_time_copies_a_record(runs, monkeypatch):
    monkeypatch.setenv(MIRROR, "keeps")
    lock = file_lock(place_of(runs).parent / "lock").acquire()
    with mirrored(runs, runs / "train/run"):
        log = log_run(runs)
    assert not kept(place_of(runs))
    with mirrored(runs, log.directory):
        lock.lock.release()
    assert kept(place_of(runs))[1:-1] == read_events(log.directory / EVENTS)


@pytest.mark.slow
@pytest.mark.attack("A kill in the middle of a run")
def test_the_mirrors_of_a_killed_command_copy_what_it_left_and_end(runs, monkeypatch):
    monkeypatch.setenv(MIRROR, "keeps")
    code = """
import os, signal, sys
from pathlib import Path
from test_mirroring import *
runs = Path(sys.argv[1])
with mirrored(runs, runs / "train/run"):
    log = open_log(runs)
    log.metrics(0, {COLUMN: 0.25})
    wait_for(lambda: kept(place_of(runs)))
    log.metrics(1, {COLUMN: 0.5})
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.Popen([sys.executable, "-c", code, str(runs)]).wait(120) == -signal.SIGKILL
    wait_for(lambda: "closed" in kept(place_of(runs)))
    assert kept(place_of(runs))[1:-1] == read_events(runs / "train/run" / EVENTS)
    with file_lock(place_of(runs).parent / "lock").acquire(timeout=60):  # it has ended
        pass


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("keep", "did you mean 'keeps'"), ("mlflow,", "unknown mirror ''"), ("mlflow,none", "unknown mirror 'none'"),
        ("missing", "mirror missing needs no_such_package; pip install"),
    ],
)  # fmt: skip
def test_a_mirror_that_cannot_be_used_is_refused(given, words, monkeypatch):
    monkeypatch.setenv(MIRROR, given)
    with pytest.raises(ValueError, match=words):
        mirrors()


def test_the_option_names_mirrors_and_the_server_of_mlflow_which_is_the_default(monkeypatch):
    assert mirrors() == ["mlflow"]
    for given, found in (("none", []), ("keeps, mlflow,keeps", ["keeps", "mlflow"])):
        monkeypatch.setenv(MIRROR, given)
        assert mirrors() == found
    options._use_mirrors("keeps, mlflow=http://here:5000/")
    assert (mirrors(), remote_uri()) == (["keeps", "mlflow"], "http://here:5000")
    options._use_mirrors("mlflow=http://me:se,cret@here,keeps")
    assert mirrors() == ["mlflow", "keeps"]
    with pytest.raises(ValueError, match=r"got 'http://me:\*\*\*@here'") as refused:
        remote_uri()
    assert "cret" not in str(refused.value)
    with pytest.raises(typer.BadParameter, match=r"only mlflow takes an address \(.*\), got one for 'keeps'"):
        options._use_mirrors("keeps=http://here")


def test_a_deleted_study_takes_the_files_of_its_mirrors_with_it(runs):
    folders = [runs / "mirrors/keeps/studies" / name for name in ("sizes", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
    forget_study(runs, runs / "studies/sizes")
    assert [folder.exists() for folder in folders] == [False, True]
