"""A live page for each study, from its record, beside MLflow's pages.

A page only shows; the words of `cohort study` steer a study. `mirror/page.py` says who sees it. Text of models is
escaped, and the content security policy lets no script run but the page's own.
"""

import hashlib
import os
import secrets
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
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
from ...data import SampleRow
from ...record.status import TrialStatus
from ...record.study import STATUS, STUDY, TrialRecord, keep_look, read_study
from ...study.queue import open_queue

REFRESH_SECONDS = 2.0  # of a page; a tenth of the time is spent on reading at most
_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; img-src data:; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; script-src 'nonce-{}'"
)
_reading = threading.Lock()  # matplotlib's settings are global


class LiveStudy:
    """The present content of a study's page, read once for all its browsers."""

    def __init__(self, name: str) -> None:
        self.name, self.runs = name, runs_folder(None).resolve()
        self.trials: Sequence[TrialRecord] = ()
        self._files: dict[Path, tuple[int, int]] = {}  # size and time of those that were last read
        self._shown: dict[str, Any] = {}
        self._due = 0.0

    def shown(self) -> dict[str, Any]:
        """The values of the template `study`."""
        with _reading:
            if (began := time.monotonic()) >= self._due:
                self._shown["problem"] = ""
                try:
                    self._shown |= self.progress()
                    self._shown |= self._results()
                except (ValueError, OSError):  # whose words name files
                    self._shown["problem"] = f"This cannot be read now; `cohort study status {self.name}` says why."
                now = time.monotonic()
                self._due = now + max(REFRESH_SECONDS / 2, 9 * (now - began))
            return dict(self._shown)

    def progress(self) -> dict[str, Any]:
        """How far the arms are, the failures, and the time left in words."""
        queue = open_queue(self.name, self.runs, os.environ.get("COHORT_STORAGE"))
        status, arms = queue.status(), dict[str, list[TrialStatus]]()
        for trial in status.trials:
            arms.setdefault(trial.arm, []).append(trial)
        ended = sum(not trial.is_open for trial in status.trials)
        workers = f"{status.workers} worker{'s' * (status.workers > 1)}"
        left = "" if status.finished else f"; {duration(status.left)} left with {workers}"
        return {
            "words": f"{ended} of {len(status.trials) + status.to_come} trials have ended{left}.",
            "rows": [_row(trials) | {"is_clone": arm in queue.plan.clones} for arm, trials in arms.items()],
            "failures": [[t.arm, t.seed, t.state, t.reason] for t in status.trials if t.reason and not t.held],
        }

    def _results(self) -> dict[str, Any]:
        """Figures, words and rollouts of a report, from a study that may still run; nothing if no file has changed."""
        folder = self.runs / "studies" / self.name
        files = [folder / STUDY, folder / STATUS, *folder.glob("trials/*/events.jsonl")]
        stats = {file: file.stat() for file in files if file.exists()}
        before, self._files = self._files, {file: (s.st_size, s.st_mtime_ns) for file, s in stats.items()}
        if self._files == before:
            return {}
        record = read_study(self.runs, self.name)
        keep_look(folder, record)  # whoever sees the page may choose by it, as by a report
        analysis = analysed(visible(record))
        self.trials, rollouts = analysis.record.trials, sampled_rollouts(analysis)
        for side in (side for group in rollouts["groups"] for side in group["answers"] if side["row"]):
            side["link"] = f"/live/{self.name}/{_key(side['label'], side['row'])}"
        return {
            "answer": answer(analysis, check_claims(analysis)),
            "drawings": [*outcome.estimates(analysis), *curves.learning_curves(analysis, ["steps"])],
            "rollouts": rollouts,
        }


def _key(arm: str, row: SampleRow) -> str:
    """The name of a sample in its address: of an arm's equal samples the same."""
    return hashlib.sha256(f"{arm} {row}".encode()).hexdigest()[:16]


def _row(trials: list[TrialStatus]) -> dict[str, Any]:
    """An arm's progress."""
    known = [trial.accuracy for trial in trials if trial.accuracy is not None]
    done = [1.0 if not t.is_open and not t.held else t.step / max(t.steps, 1) for t in trials]
    counts = Counter(trial.state for trial in trials)
    return {
        "arm": trials[0].arm,
        "done": sum(done) / len(done),
        "accuracy": f"{100 * sum(known) / len(known):.1f} %" if known else "",
        "states": ", ".join(f"{count} {state}" for state, count in counts.items()),
    }


def _page(request: Request, part: str, **values: Any) -> Response:
    """A macro of `live.html` as a page, or 304 if the browser has it; text in `values` is escaped."""
    pages, nonce = html_environment(Path(__file__).parent), secrets.token_urlsafe(16)
    macro = getattr(pages.get_template("live.html").module, part)
    text = macro(nonce, **{key: visible(value) for key, value in values.items()})
    tag = f'"{hashlib.sha256(text.replace(nonce, "").encode()).hexdigest()}"'
    headers = {
        "Content-Security-Policy": _POLICY.format(nonce), "Cache-Control": "no-store", "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff", "ETag": tag,
    }  # fmt: skip
    is_known = request.headers.get("if-none-match") == tag
    return Response(status_code=304, headers=headers) if is_known else HTMLResponse(text, headers=headers)


def _list(request: Request) -> Response:
    return _page(request, "list", studies=[one for one in list_studies() if "runs folder" in one["where"]])


_studies: dict[str, LiveStudy] = {}


def _show(request: Request) -> Response:
    """The page of a study, or of one of its samples, whose address stays when later samples take its place."""
    name, key = request.path_params["name"], request.path_params.get("key")
    here = {one["name"]: one["question"] for one in list_studies() if "runs folder" in one["where"]}
    if name not in here:
        return PlainTextResponse("The runs folder has no such study.\n", 404)
    study = _studies.setdefault(name, LiveStudy(name))
    shown = study.shown()
    if key is None:
        return _page(request, "study", name=name, question=here[name], seconds=REFRESH_SECONDS, **shown)
    for trial in study.trials:
        for row in trial.samples:
            if _key(trial.arm, row) == key:
                return _page(request, "sample", name=name, arm=trial.arm, seed=trial.seed, row=row)
    return PlainTextResponse("The study has no such sample.\n", 404)


ROUTES = [Route("/live", _list), Route("/live/{name}", _show), Route("/live/{name}/{key}", _show)]
