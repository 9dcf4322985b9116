"""A run that lost power at any write ends with the values of an undisturbed one, every one of them, bit for bit.

A file's content is safe once the file was flushed (fsync), a name once its folder was. What was not flushed may be
there, may be lost, may be half there, or may be zeros where a file kept its length; names may be lost apart from that.
"""

import hashlib
import os
import shutil
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_trials
import pytest
from cohort.harness.base.files import sync, write_text
from cohort.harness.data import FINAL
from cohort.harness.mirror.writer import COST_AREAS
from cohort.harness.record.events import EVENTS, read_history
from cohort.harness.record.run import RunLog, read_result
from cohort.harness.settings.run import RunSpec, parse_run
from fake_trials import a_spec

Image = dict[str, bytes | None]  # path -> content, None for a folder
OPERATIONS = ("rename", "replace", "unlink", "rmdir", "mkdir")
Cut = Callable[[], None]


class Disk:
    """Follows what happens in a folder and collects all that a power cut might have left of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images: dict[str, Image] = {}  # by digest
        self._held: dict[int, int] = {}  # inode -> a descriptor: an inode that is held is not given out again
        self._contents: dict[int, bytes] = {}  # that are safe
        self._names: dict[int, dict[str, int]] = {}
        self._lock = threading.RLock()  # checkpoints are written while the run goes on
        for path in (root, *root.rglob("*")):
            self._note_flush(self._hold(path))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Inside, every flush, rename, removal and new folder of this process is a place for a power cut."""
        genuine = {name: getattr(os, name) for name in (*OPERATIONS, "fsync")}

        def cut_around(operation: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                with self._lock:
                    self.cut()
                    result = operation(*args, **kwargs)
                    self.cut()
                return result

            return run

        def flush(descriptor: int) -> None:
            self._hold_all()
            self._note_flush(os.fstat(descriptor).st_ino)

        try:
            for name in OPERATIONS:
                setattr(os, name, cut_around(genuine[name]))
            os.fsync = cut_around(flush)
            yield
        finally:
            for name, operation in genuine.items():
                setattr(os, name, operation)
            for descriptor in self._held.values():
                os.close(descriptor)

    def cut(self) -> None:
        """Keep what the disk may hold if the power goes now."""
        with self._lock:
            self._hold_all()
            for names_safe in (False, True):
                for fate in ("kept", "lost", "half", "zeros"):
                    image: Image = {}
                    self._look(self.root.stat().st_ino, "", names_safe, fate, image)
                    digest = hashlib.sha256(repr(sorted(image.items())).encode()).hexdigest()
                    self.images.setdefault(digest, image)

    def _look(self, inode: int, path: str, names_safe: bool, fate: str, image: Image) -> None:
        for name, child in (self._names.get(inode, {}) if names_safe else self._listed(inode)).items():
            if child not in self._held:  # another thread has just opened it
                continue
            if stat.S_ISDIR(os.fstat(self._held[child]).st_mode):
                image[f"{path}{name}"] = None
                self._look(child, f"{path}{name}/", names_safe, fate, image)
            else:
                image[f"{path}{name}"] = self._content(child, fate)

    def _content(self, inode: int, fate: str) -> bytes:
        now, safe = self._read(inode), self._contents.get(inode, b"")
        if fate == "kept" or now == safe:
            return now
        if not now.startswith(safe):  # written over, not appended to
            safe = b""
        half = now[len(safe) : (len(safe) + len(now)) // 2]
        return safe + {"lost": b"", "half": half, "zeros": bytes(len(now) - len(safe))}[fate]

    def _note_flush(self, inode: int) -> None:
        if inode in self._held and stat.S_ISDIR(os.fstat(self._held[inode]).st_mode):
            self._names[inode] = self._listed(inode)
        elif inode in self._held:
            self._contents[inode] = self._read(inode)

    def _hold_all(self) -> None:
        for path in (self.root, *self.root.rglob("*")):
            self._hold(path)

    def _hold(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self._held:
            self._held[inode] = os.open(path, os.O_RDONLY)
        return inode

    def _listed(self, inode: int) -> dict[str, int]:
        with os.scandir(self._held[inode]) as entries:
            return {entry.name: entry.inode() for entry in entries}

    def _read(self, inode: int) -> bytes:
        return os.pread(self._held[inode], os.fstat(self._held[inode]).st_size, 0)


def restore(image: Image, folder: Path) -> Path:
    folder.mkdir()
    for name, content in sorted(image.items()):
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def plugins(tmp_path, monkeypatch):
    fake_trials.install(tmp_path / "plugins", monkeypatch)
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the power stays on: `Disk` says what would be left


def work(runs: Path, spec: RunSpec, train: Callable[..., Any], cache: Path, cut: Cut = lambda: None) -> None:
    """What a worker does with a trial: run it, or continue it, and record in another file that it has ended."""

    class Log(RunLog):
        def _append(self, event: dict[str, Any]) -> None:
            super()._append(event)
            cut()

    trial = runs / "trials" / "one"
    if (runs / "recorded").exists():
        return
    ended = read_result(trial)
    if ended is None or ended["state"] not in FINAL:
        with Log(runs, trial, spec, experiment="e", run_name="one") as log:
            result = train(spec, trial, log, cache=cache, should_stop=lambda: False)
            log.finish(result.state, result.reason, result.summary)
    write_text(runs / "recorded", "complete")
    sync(runs)


def logged(runs: Path) -> tuple[Any, ...]:
    """All that the trial's event file says, clocks and memory apart, and how often."""
    history = read_history(runs / "trials" / "one" / EVENTS)
    values = {
        key: {step: value.hex() for step, (value, _) in steps.items()}
        for key, steps in history.history.items()
        if not key.startswith(COST_AREAS)
    }
    costs = {key: sorted(steps) for key, steps in history.history.items() if not key.startswith("system/")}
    return values, costs, history.rows(), history.scores, [end["state"] for end in history.finish]


def images_of(runs: Path, *work_on: Any) -> list[Image]:
    disk = Disk(runs)
    with disk.recorded():
        work(runs, *work_on, cut=disk.cut)
    return list(disk.images.values())


@pytest.mark.attack("A power cut at every write, with all, half or nothing of what was not flushed")
def test_a_run_that_loses_power_at_any_write_ends_as_an_undisturbed_one(tmp_path, record_property):
    (tmp_path / "whole").mkdir()
    how = (a_spec(), fake_trials.train, tmp_path / "cache")
    images = images_of(tmp_path / "whole", *how)
    want = logged(tmp_path / "whole")
    assert len(want[0]["validation/accuracy"]) == 8 and want[-1] == ["complete"]
    assert len(images) > 100
    begun = [i for i in images if "trials/one/checkpoint.json" in i and "trials/one/result.json" not in i]
    again = images_of(restore(begun[len(begun) // 2], tmp_path / "begun"), *how)  # a second cut, in a continued run
    assert len(again) > 50
    check(images + again, want, tmp_path, *how)
    record_property("tried", len(images) + len(again))


@pytest.mark.long
@pytest.mark.attack("A power cut at every write, with all, half or nothing of what was not flushed")
@pytest.mark.parametrize(
    "stages",
    [[], [{"name": "a", "steps": 1}, {"name": "b", "steps": 1, "algorithm": {"name": "ppo"}}]],
    ids=["one", "two"],
)
def test_real_training_that_loses_power_at_any_write_ends_as_one_undisturbed(
    stages, tmp_path, monkeypatch, record_property
):
    from cohort.harness.run.loop import train

    monkeypatch.setenv("COHORT_TRACES", "0")
    run = {
        "task": "arithmetic", "algorithm": "grpo", "cold_start": {"steps": 40}, "rollouts_per_step": 16, "steps": 2,
        "evaluation": {"every": 1, "num_prompts": 4, "num_test_prompts": 4, "num_samples": 2},
        "checkpoints": {"every": 1}, "stages": stages,
    }  # fmt: skip
    (tmp_path / "warm").mkdir()
    (tmp_path / "whole").mkdir()
    how = (parse_run(run, "test"), train, tmp_path / "cache")
    work(tmp_path / "warm", *how)  # fills the cache of cold starts
    images = images_of(tmp_path / "whole", *how)[:: 3 if stages else 1]
    want = logged(tmp_path / "whole")
    assert logged(tmp_path / "warm") == want and len(images) > 60
    check(images, want, tmp_path, *how)
    record_property("tried", len(images))


def check(images: list[Image], want: tuple[Any, ...], folder: Path, *how: Any) -> None:
    for number, image in enumerate(images):
        runs = restore(image, folder / str(number))
        work(runs, *how)
        assert logged(runs) == want, sorted(image)
        shutil.rmtree(runs)


@pytest.mark.attack("Events that a power cut took")
def test_a_run_log_knows_whether_all_that_a_checkpoint_relies_on_is_there(tmp_path):
    work(tmp_path, a_spec(), fake_trials.train, tmp_path / "cache")
    file = tmp_path / "trials" / "one" / EVENTS
    lines = file.read_bytes().splitlines(keepends=True)
    log = RunLog(tmp_path, file.parent, a_spec(), experiment="e", run_name="one")
    # A start, step 0, then metrics and samples of each step: 5 events up to step 2.
    assert log.holds(2, 5) and not log.holds(2, 6)
    for left in (b"".join(lines[:5]), b"".join(lines)[: len(b"".join(lines[:6])) - 1], b"".join(lines[:5]) + bytes(99)):
        file.write_bytes(left)
        assert log.holds(1, 3) and not log.holds(2, 5)
    file.unlink()
    assert log.holds(-1, 0) and not log.holds(0, 1)
