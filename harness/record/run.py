"""A run's files: `run.json` (what it is), `events.jsonl` (what happened), `progress.json`, `result.json` (its end).

They are the only truth about the run; mirrors that show it elsewhere, such as MLflow, follow them.
"""

import dataclasses
import logging
import math
import os
import platform
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Self

import psutil

from ..base.files import read_json, sync, write_json, write_text
from ..base.inputs import digest
from ..base.machine import hardware
from ..data import FINAL, SampleRow, TrialState
from ..settings.errors import SpecError
from ..settings.run import RunSpec
from .events import EVENTS, event_line, is_torn, read_events, read_history, summed
from .provenance import versions, write_diff

INFO, RESULT, PROGRESS = "run.json", "result.json", "progress.json"
SYSTEM = "system/"  # the area of the metrics of the machine, which are no results
CHECKPOINTS = "checkpoints"  # of a run's folder
STATE, LEARNER = "state.json", "learner.pt"  # what a checkpoint has beside its policy
LEARNERS = "*learner.pt"  # the parts of all processes, each in its file
PROGRESS_SECONDS = 0.25
SYSTEM_SECONDS = 10.0
Finished = Literal["nothing", "weights"]  # what stays of a run's checkpoints
log = logging.getLogger(__name__)


@dataclass
class RunInfo:
    """`run.json`: the run's settings, what it reads, and the names and tags under which it is shown.

    experiment  the study, or `train`, `evaluate` or `probe`
    tags        of a trial: `cohort.arm`, `cohort.seed`, `cohort.factors` (JSON), `cohort.phase` and others
    prompt      the first one, as the policy reads it
    sizes       what `study.estimates.passes` counts with: see `checks.memory.run_sizes`
    """

    experiment: str
    name: str
    tags: dict[str, str] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    inputs: dict[str, Any] = field(default_factory=dict)
    prompt: str = ""
    sizes: dict[str, float] = field(default_factory=dict)
    objective: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, directory: Path) -> Self | None:
        file = directory / INFO
        if not file.exists():
            return None
        try:
            return cls(**read_json(file))
        except TypeError as error:
            raise ValueError(f"{file} describes no run ({error}); restore it from a copy, or move its folder away: the "
                             "run then starts again from the beginning") from None  # fmt: skip

    def identity(self) -> dict[str, Any]:
        """The facts by which each `start` tells runs apart: study, trial, arm, seed, and a digest of the settings."""
        known = {key: self.tags.get(f"cohort.{key}", "") for key in ("study", "trial", "arm", "seed")}
        return {**known, "settings": digest(self.spec)}


def final_result(directory: Path) -> dict[str, Any] | None:
    """`read_result` of a run that has ended for good; None for one that may continue."""
    ended = read_result(directory)
    return ended if ended is not None and ended["state"] in FINAL else None


def read_result(directory: Path) -> dict[str, Any] | None:
    """`result.json` of an ended run (state, reason, summary, metrics: the last value of each), or None.

    ValueError if a run cannot have written the file.
    """
    file = directory / RESULT
    if not file.exists():
        return None
    result = read_json(file)
    try:
        numbers = {name: {k: float(v) for k, v in result[name].items()} for name in ("summary", "metrics")}
        return {"state": str(result["state"]), "reason": result["reason"], **numbers}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file} holds no result of a run ({error!r}); restore it from a copy, or delete it: the run "
                         "then continues from its last checkpoint") from None  # fmt: skip


def read_progress(directory: Path) -> dict[str, Any]:
    """`progress.json`: phase, done, total, step, accuracy, tokens_per_second, seconds.

    Empty before the start, and for an unreadable file, because only progress views read it.
    """
    shown: dict[str, Any] = {}
    with suppress(FileNotFoundError, NotADirectoryError, ValueError):
        shown = read_json(directory / PROGRESS)
    whole = all(isinstance(value, str if key == "phase" else int | float) for key, value in shown.items())
    return shown if whole else {}


class RunLog(AbstractContextManager["RunLog", None]):
    """Receives the reports of a training run. Each event is flushed at once."""

    def __init__(
        self,
        runs: Path,
        directory: Path,
        spec: RunSpec,
        *,
        experiment: str,
        run_name: str,
        tags: Mapping[str, str] = {},
        on_progress: Callable[[Mapping[str, Any]], None] = lambda progress: None,
    ) -> None:
        """The log of a new run, or of a continued run, which keeps its folder.

        `on_progress` gets the content of `progress.json` at every change.
        """
        directory.mkdir(parents=True, exist_ok=True)
        for folder in directory.parents:  # a power cut loses a folder whose name is not on disk
            if folder.is_relative_to(runs):
                sync(folder)
        before = RunInfo.load(directory)  # an unreadable one is left for the user to see
        (directory / RESULT).unlink(missing_ok=True)
        if "cohort.study" not in tags:  # a study keeps it for all its trials
            write_diff(directory)
        self.directory, self._on_progress = directory, on_progress
        read = before.inputs if before is not None else {}  # kept, or a kill before `about` would let them change
        self._info = RunInfo(experiment, run_name, dict(tags), spec.model_dump(mode="json"), inputs=read)
        self._path = directory / EVENTS
        self._file: IO[str] | None = None
        self.latest: dict[str, float] = {}  # the last value of every metric of this run
        self._progress: dict[str, Any] = {"phase": "", "done": 0, "total": 0, "step": 0}
        self._progress_written = -math.inf
        self._process, self._sampled = psutil.Process(), time.monotonic()
        system_load(self._process)  # percentages are means since the call before
        self._num_events = 0  # number of events of steps in the file
        self.resumed_at = 0  # training step from which this attempt continues
        self._closed = False
        self.about(objective=dict(spec.algorithm.objective), versions={**versions(), **hardware()})

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def step(self) -> int:
        """The last training step that was logged."""
        return self._progress["step"]

    def about(self, **facts: Any) -> None:
        """Record fields of the run's `RunInfo`, such as what it reads; call before `resume`."""
        self._info = dataclasses.replace(self._info, **facts)
        write_json(self.directory / INFO, dataclasses.asdict(self._info))

    def resume(self, step: int, threads: Sequence[int] = ()) -> None:
        """Keep the events up to `step` (none for -1) and continue from there; call before logging anything.

        `threads` has the number of each of the run's processes, by default what this one's environment says.
        """
        assert self._file is None, "resume() comes before the first event"
        events = read_events(self._path)
        if is_torn(self._path):
            log.warning("%s: truncated last line ignored, %d whole lines kept", self._path, len(events))
        kept = [e for e in events if e["type"] == "start" or e.get("step", math.inf) <= step]
        write_text(self._path, "".join(event_line(event) for event in kept))
        self._file = self._path.open("a", encoding="utf-8")
        self._num_events = sum("step" in event for event in kept)
        counts = "+".join(map(str, threads)) or os.environ.get("OMP_NUM_THREADS", "")
        attempt = {"host": platform.node(), "pid": os.getpid(), "threads": counts}
        self._append({"type": "start", **self._info.identity(), **attempt})
        latest = read_history(self._path).latest()
        self.latest = {key: value for key, value in latest.items() if not key.startswith(SYSTEM)}
        self._note_progress(self.latest, step)
        self.resumed_at = self.step

    def sync(self) -> int:
        """Write everything logged to disk; returns its amount, for `holds`. Call it before a step's checkpoint."""
        assert self._file is not None, "sync() comes after resume()"
        os.fsync(self._file.fileno())
        sync(self.directory)
        return self._num_events

    def holds(self, step: int, num_events: int) -> bool:
        """Whether everything that `sync` had counted at `step` is still there; if not, no run continues from there."""
        return sum(event.get("step", math.inf) <= step for event in read_events(self._path)) >= num_events

    def progress(self, phase: str, done: int, total: int) -> None:
        """Report the progress of a phase ("cold start", "train", "validation", "test")."""
        self._progress |= {"phase": phase, "done": done, "total": total}
        self._write_progress(now=done >= total)
        self._on_progress(self._progress)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Record metrics (`area/quantity`, finite or NaN) of a training step."""
        numbers, system = {key: float(value) for key, value in values.items()}, {}
        if time.monotonic() - self._sampled >= SYSTEM_SECONDS:
            system, self._sampled = system_load(self._process), time.monotonic()
        self._append({"type": "metrics", "step": step, "values": numbers | system})
        self.latest |= numbers
        self._note_progress(numbers, step)
        self._write_progress()
        self._on_progress(self._progress)

    def samples(self, rows: Sequence[SampleRow]) -> None:
        if rows:
            dicts = [dataclasses.asdict(row) for row in rows]
            self._append({"type": "samples", "step": max(row.step for row in rows), "rows": dicts})

    def per_problem(self, fractions: Mapping[str, float], area: str = "test", families: Mapping[str, str] = {}) -> None:
        """Record the fraction of correct samples of every test problem in an evaluation; `start`: before training."""
        known: dict[str, Any] = {"families": dict(families)} if families else {}
        step = self._progress["step"]
        self._append({"type": "per_problem", "step": step, "area": area, "fractions": dict(fractions), **known})

    def kept(self, step: int, file: str, digest: str) -> None:
        """Record that the run has kept a file in its folder (`folder/name`), and the file's SHA-256."""
        self._append({"type": "kept", "step": step, "file": file, "sha256": digest})

    def finish(self, state: TrialState, reason: str | None, summary: Mapping[str, float]) -> None:
        """Record how the run ended, and close."""
        end = {"state": state, "reason": reason, "summary": {key: float(value) for key, value in summary.items()}}
        try:
            self._append({"type": "finish", **end})
            self._closed = True
            self.sync()  # the events must be on disk before the result
            write_json(self.directory / RESULT, {**end, "metrics": self.latest})
            sync(self.directory)
            self._write_progress(now=True)
        finally:
            if self._file is not None:
                self._file.close()

    def close(self) -> None:
        """Close the log; without `finish` the run counts as stopped, without `resume` it stays as it was."""
        if not self._closed and self._file is not None:
            self.finish("stopped", "ended by an error or an interrupt", {})

    def _append(self, event: dict[str, Any]) -> None:
        if self._file is None:
            self.resume(-1)
        assert self._file is not None
        if os.getpid() != self._process.pid:  # or this process would write the run's events a second time
            print("a plugin forked the process of a run, and its copy ends here", file=sys.stderr, flush=True)
            os._exit(1)
        event["time"] = time.time_ns() // 1_000_000
        self._closed = True  # cleared only after the write: nothing may follow half a line
        self._file.write(event_line(summed(event)))
        self._file.flush()
        self._closed = False
        self._num_events += "step" in event

    def _note_progress(self, values: Mapping[str, float], step: int) -> None:
        self._progress["step"] = max(step, 0)
        shown = ("validation/accuracy", "throughput/tokens_per_second", "seconds/total")
        for name, key in zip(("accuracy", "tokens_per_second", "seconds"), shown, strict=True):
            if math.isfinite(values.get(key, math.nan)):
                self._progress[name] = values[key]

    def _write_progress(self, now: bool = False) -> None:
        if now or time.monotonic() - self._progress_written >= PROGRESS_SECONDS:
            self._progress_written = time.monotonic()
            write_json(self.directory / PROGRESS, self._progress, sync=False)


def system_load(process: psutil.Process) -> dict[str, float]:
    """Percent of one core (process) or of all (machine), means since the last call; bytes. 0.1 ms without a GPU."""
    found = {
        "system/cpu_percent": process.cpu_percent(),
        "system/machine_cpu_percent": psutil.cpu_percent(),
        "system/memory_bytes": float(process.memory_info().rss),
        "system/machine_memory_percent": psutil.virtual_memory().percent,
    }
    torch = sys.modules.get("torch")  # never loaded for this: a run without torch uses no GPU
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()  # of the run's device, by all processes
        found["system/gpu_memory_bytes"] = float(total - free)
        with suppress(ImportError, RuntimeError):  # without nvidia-ml-py
            found["system/gpu_percent"] = float(torch.cuda.utilization())
    return found


def drop_checkpoints(directory: Path, keep: Finished) -> None:
    """Delete the checkpoints in a run's folder, except the newest policy if the weights are kept.

    Call it when the final result is on disk. A kill in between leaves unused files, which the next call deletes.
    """
    folder = directory / CHECKPOINTS
    if not folder.is_dir():
        return
    newest = max(folder.glob("step-*"), default=None) if keep == "weights" else None
    try:
        for item in folder.iterdir():
            if item != newest:
                shutil.rmtree(item)
        if newest is None:
            folder.rmdir()
        else:
            for file in (newest / STATE, *newest.glob(LEARNERS)):
                file.unlink(missing_ok=True)
    except OSError as error:  # the result is valid without it
        log.warning("checkpoints that are no longer needed stay in '%s': %s", folder, error)


def model_folder(model: str) -> str:
    """The policy's folder, if `model` is a checkpoint or the folder of a run; else `model`.

    SpecError for a run that has kept no weights.
    """
    for folder in (Path(model), *sorted((Path(model) / CHECKPOINTS).glob("step-*"), reverse=True)):
        if (folder / "policy" / "config.json").is_file():
            return str(folder / "policy")
    if (Path(model) / "run.json").is_file():
        raise SpecError(f"'{model}' kept no weights; a trial of a study keeps them with checkpoints.finished=weights")
    return model
