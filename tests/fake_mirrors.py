"""Mirrors that tests install as a package would: one keeps what it gets in files, the others fail in their own ways."""

import json
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.harness.interfaces import Mirror, MirroredRun
from entry_points import declare

KEPT = "kept.jsonl"


class Keeps(Mirror):
    """Keeps facts, events and the end of each run in its place."""

    def open(self, run: MirroredRun) -> None:
        self.run, self.file = run, run.place / KEPT
        self._write({"id": run.id, "experiment": run.experiment, "name": run.name, "seed": run.spec["seed"]})

    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        for event in events:
            self._write(event)

    def close(self) -> None:
        self._write("closed")

    def _write(self, what: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(what) + "\n")


class Raises(Keeps):
    def open(self, run: MirroredRun) -> None:
        print("hello from a library")
        raise RuntimeError("no key\nto the door\x1b[31m")


class RaisesForOne(Keeps):
    """Fails for seed 1 alone."""

    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        if self.run.spec["seed"] == 1:
            raise OSError("no room for seed 1")
        super().add(events)


class Hangs(Keeps):
    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        threading.Event().wait()


class Dies(Keeps):
    def add(self, events: Sequence[Mapping[str, Any]]) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Missing(Keeps):
    package = "no_such_package"


def install(folder: Path, monkeypatch: Any) -> None:
    """Make them plugins of this process and of its children: `keeps`, `raises` and so on."""
    named = {"keeps": Keeps, "raises": Raises, "raises_for_one": RaisesForOne, "hangs": Hangs, "dies": Dies,
             "missing": Missing}  # fmt: skip
    places = {name: f"fake_mirrors:{cls.__name__}" for name, cls in named.items()}
    declare(folder, monkeypatch, "fake-mirrors", {"mirrors": places})


def kept(place: Path) -> list[Any]:
    """What `Keeps` has written of a run."""
    file = place / KEPT
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
