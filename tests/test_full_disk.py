"""A full disk ends a command in one sentence, fails no arm, and the same command goes on once there is space."""

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fake_trials
import psutil
import pytest
from cohort.harness.base.disk import DiskFull, disk_full
from cohort.harness.study.queue import study_status
from fake_trials import a_study
from queues import check_as_undisturbed, once_at_work, open_queue, python, run, workers_of

SIZE = 130_000_000  # bytes; a start asks for 100 MB

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def disk(tmp_path) -> Iterator[Path]:
    """A small file system of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE}", "tmpfs", str(folder)]
    try:
        made = subprocess.run(mount, capture_output=True, text=True, check=False)
    except OSError as error:
        pytest.skip(f"no file system can be mounted here: {error}")
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all the space there is."""
    file = disk / "filler"
    with file.open("wb", buffering=0) as stream:
        for size in (1 << 20, 1):
            with suppress(OSError):
                while True:
                    stream.write(bytes(size))
    return file


@pytest.mark.long
@pytest.mark.attack("Disk full in the middle of a study")
def test_a_disk_that_fills_up_stops_a_study_and_the_same_command_finishes_it(disk, tmp_path_factory, monkeypatch):
    runs, study = disk / "runs", a_study(seeds=[0])
    runs.mkdir()
    shutil.copy(fake_trials.empty_store(tmp_path_factory), runs / "mlflow.db")
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0.15")
    fillers: list[Path] = []

    with pytest.raises(DiskFull, match=rf"^a disk is full.* \('{disk}.*' has [\d,]+ bytes free\).*the same command"):
        run(study, runs, once_at_work(lambda: fillers.append(fill(disk))))
    assert not workers_of(psutil.Process())
    assert {trial.state for trial in study_status("sizes", runs).trials} <= {"stopped", "waiting", "complete"}
    fillers[0].unlink()
    monkeypatch.setenv("FAKE_STEP_SECONDS", "0")
    assert run(study, runs).counts() == {"complete": 2}
    check_as_undisturbed(study, runs)
    attempts = open_queue(study, runs)._read().by_key.values()
    ends = {trial.user_attrs.get("result", {}).get("state") for tried in attempts for trial in tried}
    assert ends <= {"complete", "stopped", "lost"}


def loses_its_disk(spec: Any, directory: Path, log: Any, **how: Any) -> Any:
    """As the fake run, whose disk turns read-only at step 4 and stays so while the file `lost` lies in its cache."""
    progress = log.progress

    def told(phase: str, step: int, steps: int) -> None:
        if step == 4 and (how["cache"].parent / "lost").exists():
            raise OSError(errno.EROFS, "Read-only file system", str(directory / "events.jsonl"))
        progress(phase, step, steps)

    log.progress = told
    return fake_trials.train(spec, directory, log, **how)


@pytest.mark.slow
@pytest.mark.attack("A disk that turns read-only in the middle of a study")
def test_a_disk_that_turns_read_only_fails_no_arm(runs, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{os.environ.get('PYTHONPATH', '')}{os.pathsep}{Path(__file__).parent}")
    (runs / "lost").touch()
    with pytest.raises(DiskFull, match="read-only or away"):
        run(a_study(), runs, execute="test_full_disk:loses_its_disk")
    states = [trial.state for trial in study_status("sizes", runs).trials]
    assert {*states} <= {"stopped", "waiting"} and "stopped" in states
    (runs / "lost").unlink()
    assert run(a_study(), runs).counts() == {"complete": 4}
    check_as_undisturbed(a_study(), runs)


FULL = OSError(errno.ENOSPC, "No space left on device", "/nowhere/at/all")
ERRORS = [
    FULL,
    KeyError("x"),  # raised from the first
    OSError(errno.EDQUOT, "Disk quota exceeded"),
    RuntimeError("[enforce fail at inline_container.cc] PytorchStreamWriter failed writing file data/0: file write"),
    RuntimeError("(sqlite3.OperationalError) database or disk is full"),
    RuntimeError("I/O error: No space left on device (os error 28)"),
    OSError(errno.EROFS, "Read-only file system"),
    OSError(errno.ESTALE, "Stale file handle"),
]


@pytest.mark.attack("Disk full at any write of a command")
@pytest.mark.parametrize("error", ERRORS, ids=range(len(ERRORS)))
def test_every_words_for_a_full_disk_become_one_sentence(error, tmp_path, monkeypatch, cohort):
    def refuse(*_: object, **__: object) -> None:
        raise error from (FULL if isinstance(error, KeyError) else None)

    monkeypatch.setattr("cohort.harness.study.queue.open_queue", refuse)
    assert cohort("study", "status", "any", "--runs", tmp_path) == 1
    assert cohort.err.startswith("Error: a disk is full")
    assert len(cohort.err.splitlines()) == 1
    assert "bytes free" in cohort.err
    assert disk_full(OSError(errno.EACCES, "Permission denied"), tmp_path) is None
    assert disk_full(ValueError("28"), tmp_path) is None


@pytest.mark.attack("A full disk")
def test_a_limit_of_a_files_size_is_named(tmp_path):
    """In a process of its own, whose limit of 10,000 bytes ends with it."""
    code = """if True:
        import resource, sys
        from pathlib import Path
        from cohort.harness.base.disk import disk_full
        from cohort.harness.base.files import write_text
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
        try:
            write_text(Path("file"), "x" * 20_000)
        except OSError as error:
            print(disk_full(error, Path()))"""
    ended = python(code, path=Path(__file__).resolve().parents[1], cwd=tmp_path)
    assert "a file has at most 10,000 bytes by `ulimit -f`" in ended.stdout, ended.stderr
