"""Runs the claims of the run-book, each in a process of its own: a hang, a crash or a full memory ends one claim."""

import faulthandler
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from ...base.files import write_text
from ...base.stop import StopRequest, stop_on_signals
from ...base.words import did_you_mean
from ...policy.model import check_model
from ...settings.errors import SpecError
from .backend import SHAPES, Backend, make_up
from .claims import CLAIMS, GPUClaim, Number, Skipped

SECONDS = 1800  # of all claims
OVER = "the time of all claims is over"
LATER = (OVER, "interrupted")  # reasons of claims that had no turn
KEPT = "gpu.jsonl"
# Of compiled kernels: new ones, so that the first start of vLLM is a cold one.
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
LAST_LINES = 12  # of a claim that failed
WAIT_SECONDS = 0.05
STOPPING = "Stopping: what was found so far follows; Ctrl-C again ends at once."


@dataclass(frozen=True)
class ClaimResult:
    """A claim, its verdict and its numbers. `reason` says why it is not PASS."""

    claim: str
    says: str
    state: Literal["PASS", "FAIL", "SKIPPED"]
    numbers: Sequence[Number]
    reason: str
    seconds: float
    limit: float
    why: str

    def __str__(self) -> str:
        return "; ".join(filter(None, [self.reason, *map(str, self.numbers)]))


OnFound = Callable[[ClaimResult], object]


def run_book(
    runs: Path, model: str | None, only: Sequence[str], on_found: OnFound, minutes: float | None = None
) -> tuple[list[ClaimResult], bool]:
    """The findings about this machine, and whether all claims had their turn; what the claims write is deleted.

    `model` is a Hub id or a folder, or None for one of made-up weights; `only` names claims, by default all. A call
    that has so many `minutes` keeps what it finds in RUNS/gpu.jsonl, where the next such call goes on.
    """
    names = [claim.name for claim in CLAIMS]
    for name in only:
        if name not in names:
            hint = did_you_mean(name, names)
            raise SpecError(f"`only` must name claims ({', '.join(names)}), got '{name}'{hint and f'; {hint}'}")
    if model is not None:
        check_model(model)
    claims = [claim for claim in CLAIMS if not only or claim.name in only]
    runs.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="doctor-", dir=runs, ignore_cleanup_errors=True) as name:
        folder = Path(name).resolve()
        backend = Backend(folder, model or str(folder / "model"), "vllm" if find_spec("vllm") else "transformers")
        if model is None:
            make_up(folder / "model", SHAPES["cuda" if torch.cuda.device_count() else "cpu"])
        if minutes is None:
            return measure_claims(claims, backend, on_found)
        kept = runs / KEPT
        earlier = [] if not kept.exists() else list(map(_result, kept.read_text(encoding="utf-8").splitlines()))

        def keep(one: ClaimResult) -> None:
            if one.reason not in LATER:
                with kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
            on_found(one)

        left = [claim for claim in claims if claim.name not in {one.claim for one in earlier}]
        found, is_whole = measure_claims(left, backend, keep, 60 * minutes)
        if all(one.reason not in LATER for one in found):
            kept.unlink(missing_ok=True)
        return earlier + found, is_whole


def _result(line: str) -> ClaimResult:
    told = json.loads(line)
    return ClaimResult(**{**told, "numbers": [Number(**number) for number in told["numbers"]]})


def measure_claims(
    claims: Sequence[GPUClaim], backend: Backend, on_found: OnFound, seconds: float = SECONDS, start: str = "spawn"
) -> tuple[list[ClaimResult], bool]:
    """The findings of the claims, in order, and whether no signal came. Claims that a signal or the end of the
    `seconds` leaves out are SKIPPED. `start` is how multiprocessing starts a process."""
    end, found = time.monotonic() + seconds, []
    with stop_on_signals(words=STOPPING) as stop:
        for claim in claims:
            found.append(_checked(claim, backend, end, stop, start))
            on_found(found[-1])
        return found, not stop.is_set()


def _checked(claim: GPUClaim, backend: Backend, end: float, stop: StopRequest, start: str) -> ClaimResult:
    begin = time.monotonic()
    limit = min(claim.limit, end - begin)

    def judged(state: Any, reason: str = "", numbers: Sequence[Number] = ()) -> ClaimResult:
        return ClaimResult(
            claim.name, claim.says, state, numbers, reason, time.monotonic() - begin, claim.limit, claim.why
        )

    if stop.is_set() or limit <= 0:
        return judged("SKIPPED", "interrupted" if stop.is_set() else OVER)
    if lacks := claim.lacks(backend):  # here, because a process takes seconds to start
        return judged("SKIPPED", lacks)
    place = backend.folder / claim.name
    result, log = place.with_suffix(".json"), place.with_suffix(".log")
    processes: Any = multiprocessing.get_context(start)
    process = processes.Process(target=_work, args=(claim, backend, result, log))
    process.start()
    try:
        while process.is_alive() and time.monotonic() < begin + limit and not stop.is_set():
            process.join(WAIT_SECONDS)
        is_late = process.is_alive()
    finally:
        with suppress(ProcessLookupError):  # whatever it started dies with it
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    if not result.exists():
        if stop.is_set() or (is_late and limit < claim.limit):
            return judged("SKIPPED", "interrupted" if stop.is_set() else OVER)
        code = process.exitcode
        how = f"not ended after {claim.limit:g} s" if is_late else f"signal {-code}" if code < 0 else f"status {code}"
        said = log.read_text(errors="replace") if log.exists() else ""
        return judged("FAIL", "\n".join([how, *said.splitlines()[-LAST_LINES:]]))
    told = json.loads(result.read_text(encoding="utf-8"))
    if "skipped" in told:
        return judged("SKIPPED", told["skipped"])
    numbers = [Number(**number) for number in told["numbers"]]
    broken = ", ".join(number.name for number in numbers if not number.holds)
    return judged("FAIL" if broken else "PASS", broken and f"out of bounds: {broken}", numbers)


def _work(claim: GPUClaim, backend: Backend, result: Path, log: Path) -> None:
    """Check the claim in this process, which leads a group of its own and dies with the one that started it."""
    os.setsid()
    sys.stdout = sys.stderr = log.open("w", buffering=1)
    for number in (1, 2):
        os.dup2(sys.stderr.fileno(), number)
    faulthandler.enable()
    os.environ.update({name: str(backend.folder / name.lower()) for name in CACHES})
    parent: Any = multiprocessing.parent_process()

    def follow() -> None:
        parent.join()
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=follow, daemon=True).start()
    try:
        told: dict[str, Any] = {"numbers": [asdict(number) for number in claim.check(backend)]}
    except Skipped as skipped:
        told = {"skipped": str(skipped)}
    except Exception:
        traceback.print_exc(limit=-1)
        os._exit(1)
    write_text(result, json.dumps(told))
    os._exit(0)  # a library that hangs as it ends says nothing about the claim
