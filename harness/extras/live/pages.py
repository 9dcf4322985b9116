"""A live page for each study, from its record, beside MLflow's pages.

The buttons of a page do what the words of `cohort study` do (`study/steering.py`). Besides the checks of
`mirror/page.py`, a request of a button names this server's token, which only its own pages have. Text of models and
errors is escaped, and the content security policy lets no script run but the page's own.
"""

import asyncio
import hmac
import json
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, FileSystemLoader
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from ....reports.analysis import analysed
from ....reports.claims import check_claims
from ....reports.figures import curves, outcome
from ....reports.page import sampled_rollouts
from ....reports.prose.answer import answer
from ....reports.render import html_environment, visible
from ...api.settings import runs_folder
from ...api.study import list_studies
from ...base.words import duration
from ...record.status import StudyStatus, TrialStatus
from ...record.study import STATUS, STUDY, StudyRecord, keep_look, read_study
from ...study.queue import Queue, open_queue
from ...study.steering import steer

REFRESH_SECONDS = 2.0  # of a page; a tenth of the time is spent on reading at most
MAX_BODY = 65_536  # bytes of a request
TOKEN = secrets.token_urlsafe(32)
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; script-src 'nonce-{}'"
)
_reading = threading.Lock()  # matplotlib's settings are global, and a queue is one thread's
_asking = threading.Lock()


class LiveStudy:
    """What the page of a study shows now, read once for all its browsers."""

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, runs_folder(None).resolve()
        self._queue: Queue | None = None
        self._stamps: dict[str, Any] = {}  # of the files when they were last read
        self._parts: dict[str, str] = {}
        self._due = {"progress": 0.0, "record": 0.0}

    def parts(self) -> dict[str, str]:
        """Part of the page -> its HTML."""
        with _reading:
            for what, read in (("progress", self._read_progress), ("record", self._read_record)):
                if (began := time.monotonic()) < self._due[what]:
                    continue
                try:
                    self._parts |= {"problem": "", **read()}
                except (ValueError, OSError) as error:
                    self._parts["problem"] = live_part("problem", words=str(error))
                now = time.monotonic()
                self._due[what] = now + max(REFRESH_SECONDS / 2, 9 * (now - began))
            return dict(self._parts)

    def ask(self, asked: Mapping[str, Any]) -> str:
        """Do what a button asks for; the answer in words."""
        verb, arm, sets, warm = (asked.get(key) for key in ("verb", "arm", "sets", "warm"))
        if not isinstance(verb, str) or not isinstance(arm, str) or not isinstance(sets, list):
            raise ValueError("a request must have a verb, an arm and a list of settings")
        storage, sets = os.environ.get("COHORT_STORAGE"), [str(one) for one in sets]
        with _asking:
            words = steer(verb, self.name, self.runs, arm, sets=sets, warm=bool(warm), storage=storage)
            self._due["progress"] = 0.0
        return words

    def _read_progress(self) -> dict[str, str]:
        if self._is_new("queue", [self.runs / "studies" / self.name / STUDY]) or self._queue is None:
            self._queue = open_queue(self.name, self.runs, os.environ.get("COHORT_STORAGE"))
        status, queue = self._queue.status(), self._queue
        ended = sum(not trial.is_open for trial in status.trials)
        workers = f"{status.workers} worker{'s' * (status.workers > 1)}"
        left = "" if status.finished else f"; {duration(status.left)} left with {workers}"
        failures = [[t.arm, t.seed, t.state, t.reason] for t in status.trials if t.reason and not t.held]
        return {"progress": live_part(
            "progress", rows=_rows(status, queue), failures=failures, can_steer=not queue.plan.study.searches(),
            words=f"{ended} of {len(status.trials) + status.to_come} trials have ended{left}.",
        )}  # fmt: skip

    def _read_record(self) -> dict[str, str]:
        folder = self.runs / "studies" / self.name
        if not self._is_new("record", [folder / STUDY, folder / STATUS, *folder.glob("trials/*/events.jsonl")]):
            return {}
        record = read_study(self.runs, self.name)
        keep_look(folder, record)  # whoever sees the page may choose by it, as by a report
        return record_parts(record)

    def _is_new(self, what: str, files: list[Path]) -> bool:
        stats = {str(file): file.stat() for file in files if file.exists()}
        stamps = {file: (stat.st_size, stat.st_mtime_ns) for file, stat in stats.items()}
        before, self._stamps[what] = self._stamps.get(what), stamps
        return stamps != before


def _rows(status: StudyStatus, queue: Queue) -> list[dict[str, Any]]:
    """An arm's progress, and what can be asked of it."""
    arms: dict[str, list[TrialStatus]] = {}
    for trial in status.trials:
        arms.setdefault(trial.arm, []).append(trial)
    begun, study, rows = queue.begun(), queue.plan.study, []
    for arm, trials in arms.items():
        known = [trial.accuracy for trial in trials if trial.accuracy is not None]
        counts = Counter(trial.state for trial in trials)
        done = [1.0 if not t.is_open and not t.held else t.step / max(t.steps, 1) for t in trials]
        possible = {
            "stop": any(trial.is_open for trial in trials), "resume": any(trial.held for trial in trials),
            "clone": True, "drop": arm not in begun and arm != (study.baseline or study.arm_labels()[0]),
        } if not study.searches() else {}  # fmt: skip
        rows.append({
            "arm": arm, "is_clone": arm in queue.plan.clones, "done": sum(done) / len(done),
            "accuracy": f"{100 * sum(known) / len(known):.1f} %" if known else "",
            "states": ", ".join(f"{count} {state}" for state, count in counts.items()),
            "verbs": [verb for verb, can in possible.items() if can],
        })  # fmt: skip
    return rows


def live_part(part: str, **values: Any) -> str:
    """The HTML of a part of a study's page, a macro of `live.html`; text in `values` is escaped."""
    environment = html_environment()
    loaders = [FileSystemLoader(Path(__file__).parent), environment.loader]
    pages = environment.overlay(loader=ChoiceLoader([one for one in loaders if one is not None]))
    macro = getattr(pages.get_template("live.html").module, part)
    return str(macro(**{key: visible(value) for key, value in values.items()}))


def record_parts(record: StudyRecord) -> dict[str, str]:
    """Part of the page -> its HTML, from a study that may still run: with figures and words of a report."""
    analysis = analysed(visible(record))
    drawings = [*outcome.estimates(analysis), *curves.learning_curves(analysis, ["steps"])]
    return {
        "results": live_part("results", answer=answer(analysis, check_claims(analysis)), drawings=drawings),
        "rollouts": live_part("rollouts", rollouts=sampled_rollouts(analysis)),
    }


_studies: dict[str, LiveStudy] = {}


def _study(request: Request) -> LiveStudy | None:
    """The study that a request names; None for one that is not there."""
    name = request.path_params["name"]
    if name in (".", "..") or not (runs_folder(None) / "studies" / name / STUDY).is_file():
        return None
    return _studies.setdefault(name, LiveStudy(name))


def _page(part: str, **values: Any) -> Response:
    nonce = secrets.token_urlsafe(16)
    headers = {
        "Content-Security-Policy": _POLICY.format(nonce), "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
    }  # fmt: skip
    return HTMLResponse(live_part(part, nonce=nonce, token=TOKEN, **values), headers=headers)


def _list(request: Request) -> Response:
    return _page("list", studies=[one for one in list_studies() if "runs folder" in one["where"]])


def _show(request: Request) -> Response:
    if (study := _study(request)) is None:
        return PlainTextResponse("The runs folder has no such study.\n", 404)
    question = next(one["question"] for one in list_studies() if one["name"] == study.name)
    return _page("study", name=study.name, question=question)


async def _follow(request: Request) -> Response:
    """The parts of a page as server-sent events: each whenever it has changed."""
    if (study := _study(request)) is None:
        return PlainTextResponse("The runs folder has no such study.\n", 404)

    async def stream() -> AsyncIterator[str]:
        sent: dict[str, str] = {}
        while True:
            parts = await run_in_threadpool(study.parts)
            for part, html in parts.items():
                if sent.get(part) != html:
                    yield f"data: {json.dumps({'part': part, 'html': html})}\n\n"
            yield ": alive\n\n"
            sent = parts
            await asyncio.sleep(REFRESH_SECONDS)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


async def _ask(request: Request) -> Response:
    token = request.headers.get("x-cohort-token", "")
    if "origin" not in request.headers or not hmac.compare_digest(token.encode(), TOKEN.encode()):
        return PlainTextResponse("This page is not of the server that runs now; load it again.", 403)
    if (study := _study(request)) is None:
        return PlainTextResponse("The runs folder has no such study.", 404)
    try:
        if int(request.headers.get("content-length", MAX_BODY + 1)) > MAX_BODY:
            raise ValueError(f"a request must have at most {MAX_BODY} bytes")
        asked = json.loads(await request.body())
        return PlainTextResponse(await run_in_threadpool(study.ask, asked if isinstance(asked, dict) else {}))
    except (ValueError, OSError) as error:
        return PlainTextResponse(str(error), 400)


ROUTES = [
    Route("/live", _list),
    Route("/live/{name}", _show),
    Route("/live/{name}/events", _follow),
    Route("/live/{name}/ask", _ask, methods=["POST"]),
]
