"""Saves and resumes everything a run needs: policy, critic, optimisers, counters and the summary so far.

A checkpoint is a folder `step-<n>`. Its `policy/` loads with transformers, or with peft if it holds an adapter alone. A
checkpoint appears whole or not at all; `state.json` has the hash of every file, and a torn or altered one is skipped
for the one before it. Noise and prompt order are functions of seed, step and pass rates: no random state is saved.
"""

import logging
import math
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedTokenizerBase

from ..base.files import partial_folder, publish_folder, whole_manifest, write_hashed, write_manifest, write_text
from ..base.inputs import all_expected, check_same
from ..devices import ranks
from ..devices.sharding import joined
from ..policy.model import save_model
from ..policy.sources import Base
from ..record.events import EVENTS, event_line, read_events
from ..record.run import CHECKPOINTS, LEARNER, LEARNERS, STATE
from ..settings.run import RunSpec

log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; `progress` is the JSON-like mapping that was saved with it."""

    folder: Path
    step: int
    progress: Mapping[str, Any]

    def learner_state(self) -> dict[str, Any]:
        """The saved state; its tensors are read where they are used."""
        files = sorted(self.folder.glob(LEARNERS))
        return joined([torch.load(file, map_location="cpu", weights_only=True, mmap=True) for file in files])

    def policy_weights(self, policy: nn.Module) -> dict[str, torch.Tensor]:
        """The saved weights under every name that the policy's state has (tied weights are stored once)."""
        saved: dict[str, torch.Tensor] = {}
        for file in sorted((self.folder / "policy").glob("*.safetensors")):
            saved |= load_file(file)
        own = dict(policy.named_parameters(remove_duplicate=False))
        tied = {id(value): saved[name] for name, value in own.items() if name in saved}
        return saved | {name: tied[id(value)] for name, value in own.items()}


class Writer:
    """Writes one checkpoint at a time in a thread of its own. The next call of a method raises the thread's error. On a
    GPU it copies on a stream of its own, after the work that is under way."""

    def __init__(self) -> None:
        self.group = ranks.apart()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.copied = threading.Event()  # nothing of the run's own state is still to be copied
        self.copied.set()
        self._stream = torch.cuda.Stream() if torch.cuda.is_initialized() else None

    def begin(self, copy: Callable[[], T], write: Callable[[T], None]) -> None:
        """Have the thread call `write(copy())`; the values that it copies must not change before `copied` is set."""
        self.check(wait=True)
        self.copied.clear()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

        def run() -> None:
            try:
                with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                    copies = copy()
                self.copied.set()
                write(copies)
            except BaseException as error:
                self._error = error
            finally:
                self.copied.set()

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def check(self, *, wait: bool = False) -> None:
        """Raise the error of the work if it has ended with one; `wait` for its end."""
        if self._thread is None or (self._thread.is_alive() and not wait):
            return
        self._thread.join()
        self._thread, error, self._error = None, self._error, None
        if error is not None:
            raise error


@dataclass(frozen=True)
class Snapshot:
    """The content of a checkpoint: a run at one of its steps.

    weights, base   as `save_model` takes them
    learner         `Learner.state`
    facts           the other keys of `state.json`: spec_digest, inputs, progress, is_last
    """

    step: int
    policy: nn.Module
    tokenizer: PreTrainedTokenizerBase
    learner: Mapping[str, Any]
    facts: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor | None] | None = None
    base: Base | None = None


def save_checkpoint(directory: Path, run: Snapshot, keep: int, group: Any = None) -> None:
    """Write `directory/step-<n>` and delete all but the newest `keep` checkpoints. Processes that `group` together each
    write their parts of weights and state."""
    folder, rank = directory / f"step-{run.step:08d}", 0 if group is None else ranks.rank()
    with publish_folder(folder) if rank == 0 else nullcontext(partial_folder(folder)) as partial:
        ranks.gathered(None, group)  # the folder is there
        name = LEARNER if rank == 0 else f"{rank}-{LEARNER}"
        own = {name: write_hashed(partial / name, lambda stream: torch.save(dict(run.learner), stream))}
        known = {k: digest for one in ranks.gathered(own, group) for k, digest in one.items()}
        saved = save_model(partial / "policy", run.policy, run.tokenizer, run.weights, run.base, group)
        if rank > 0:
            return
        known |= {f"policy/{name}": digest for name, digest in saved.items()}
        write_manifest(partial, STATE, known=known, step=run.step, **run.facts)
    for old in sorted(directory.glob("step-*"))[:-keep]:
        shutil.rmtree(old)


def latest_checkpoint(
    directory: Path, spec_digest: str, holds: Callable[[int, int], bool] = lambda step, num_events: True
) -> Checkpoint | None:
    """The newest intact checkpoint whose events the run's log `holds`, or None; a warning names each that is passed
    over. ValueError if it belongs to another run or to other inputs than expected."""
    passed: list[str] = []
    for folder, state in _intact(directory, passed):
        if state["spec_digest"] != spec_digest:
            raise ValueError(f"'{folder}' is of a run with other settings; delete '{directory}' or take another folder")
        check_same(state["inputs"], all_expected())
        checkpoint = Checkpoint(folder, state["step"], state["progress"])
        if holds(checkpoint.step, checkpoint.progress["num_events"]):
            say_passed(passed, f"continues from step {checkpoint.step}")
            return checkpoint
        passed.append(f"{EVENTS} lacks events of '{folder}'")
    say_passed(passed, "starts again from the beginning")
    return None


def _intact(directory: Path, passed: list[str]) -> Iterator[tuple[Path, dict[str, Any]]]:
    """The intact checkpoints in a folder and their states, newest first; `passed` gets the faults of others."""
    for folder in sorted(directory.glob("step-*"), reverse=True):
        try:
            state = whole_manifest(folder, STATE)
        except ValueError as error:
            if folder.exists():  # a run may delete its oldest one meanwhile
                passed.append(str(error))
        else:
            yield folder, state


def say_passed(reasons: Sequence[str], instead: str) -> None:
    """Warn, if there are reasons, that checkpoints are passed over for them and what the run does instead."""
    if reasons:
        log.warning("a checkpoint must be as it was saved, but %s; the run %s", " and ".join(reasons), instead)


def fork_run(source: Path, target: Path, spec: RunSpec, parent: RunSpec) -> tuple[int, list[str]]:
    """(step, reasons): the newest intact checkpoint of the run in `source`, or 0, and why newer ones were passed over.
    `spec` now continues from it in `target`, with a copy of the log so far; the other run may continue meanwhile."""
    passed: list[str] = []
    for _ in range(10):  # it deletes its oldest checkpoint whenever it has written a new one
        passed.clear()
        for folder, state in _intact(source / CHECKPOINTS, passed):
            if state.get("is_last"):  # without optimisers
                continue
            progress = dict(state["progress"])
            if spec.algorithm.kl_beta != parent.algorithm.kl_beta:
                progress["kl_beta"] = spec.algorithm.kl_beta
            try:
                with publish_folder(target / CHECKPOINTS / folder.name) as copy:
                    shutil.copytree(folder, copy, dirs_exist_ok=True)
                    facts = {"step": state["step"], "inputs": state["inputs"], "progress": progress}
                    write_manifest(copy, STATE, known=state["files"], spec_digest=spec.digest(), **facts)
            except OSError:
                if folder.exists():  # not the fault of the run in `source`
                    raise
                continue
            kept = [e for e in read_events(source / EVENTS) if e.get("step", math.inf) <= state["step"]]
            for name in [event["file"] for event in kept if event["type"] == "kept"]:
                (target / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(source / name, target / name)
            for folder in (source / CHECKPOINTS).glob("*-model-*"):  # that its stages have fitted
                with publish_folder(target / CHECKPOINTS / folder.name) as copy:
                    shutil.copytree(folder, copy, dirs_exist_ok=True)
            write_text(target / EVENTS, "".join(map(event_line, kept)))
            return state["step"], passed
    return 0, passed
