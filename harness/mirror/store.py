"""Checks the MLflow store of a runs folder, connects to it and finds its runs.

Only this room imports mlflow, inside functions because the import takes seconds.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote, unquote, urlsplit

from ..base.disk import chain
from ..base.files import file_lock
from ..base.inputs import short
from ..data import TrialState
from ..record.provenance import versions
from .address import check_artifacts, health, mirrors, remote_uri, traces_per_split, tracking_uri

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run


MAX_PARAM = 6000  # characters of a parameter
WHOLE_SECONDS = 60.0  # until when a server must have answered a command in full
LOCK_SECONDS = 20.0  # how long a command waits at its start for another process to unlock the store
NOTE = "mlflow.note.content"
SUMMARY = "summary/"
_STATUS: Mapping[TrialState, str] = {
    "running": "RUNNING", "complete": "FINISHED", "invalid": "FAILED", "failed": "FAILED", "stopped": "KILLED",
    "pruned": "KILLED",
}  # fmt: skip
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # what copies a record tries again; MLflow's own 7 tries block for minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
log = logging.getLogger(__name__)
T = TypeVar("T")
_PLACES = (  # tables and columns of the store that may name a file of the runs folder
    ("experiments", "artifact_location"), ("runs", "artifact_uri"), ("trace_tags", "value"),
    ("model_versions", "source"), ("model_versions", "storage_location"), ("logged_models", "artifact_location"),
)  # fmt: skip
LEASE_SECONDS = 60.0  # after which the lease of a worker that is at work was renewed
_DAMAGED = ("file is not a database", "database disk image is malformed")
_KEY = re.compile(r"[\w.:/ -]+", re.ASCII)  # names of parameters


def check_runs_folder(runs: Path) -> None:
    """Raise ValueError if results cannot be written to `runs`, or if another version wrote there.

    Leaves nothing behind; the folder need not exist yet.
    """
    tracking_uri(runs)
    folder = next(one for one in (runs.resolve(), *runs.resolve().parents) if one.exists())
    if not folder.is_dir():
        raise ValueError(f"the runs folder must be a folder, but '{folder}' is a file; choose another with `runs`")
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        rule = f"the runs folder must be writable, but writing to '{folder}' fails ({error.strerror})"
        raise ValueError(f"{rule}; choose another with `runs` or COHORT_RUNS") from None
    traces_per_split()
    mirrors()
    check_server()
    _adopt_file(runs)


def check_server() -> None:
    """ValueError if an MLflow server is named that does not answer now, or lets nobody in."""
    if (uri := remote_uri()) is None:
        return
    import_mlflow()
    try:
        answered(lambda: connect(Path()).search_experiments(max_results=1), WHOLE_SECONDS)
    except Exception as error:  # of MLflow or a library below it: the server cannot be used either way
        reason = " ".join(str(error).split())[:200]
        rule = f"the tracking URI must name a server that can be used, but {uri} cannot ({reason})"
        raise ValueError(f"{rule}; start it, or leave it out to keep results in the runs folder") from None


def answered(ask: Callable[[], T], seconds: float | None) -> T:
    """What `ask` returns. ConnectionError if it has not ended after so many seconds, when its thread is left alone: a
    server that sends a byte now and then keeps the limits of all that MLflow waits for."""
    answer = Future[T]()
    Thread(target=_settled, args=(answer, ask), daemon=True).start()
    try:
        return answer.result(seconds)
    except TimeoutError:
        if answer.done():
            raise
        words = f"the MLflow store at {remote_uri()} answers too slowly (not all within {seconds:.1f} s)"
        raise ConnectionError(words) from None


def _settled(answer: Future[T], ask: Callable[[], T]) -> Future[T]:
    try:
        answer.set_result(ask())
    except BaseException as error:
        answer.set_exception(error)
    return answer


def import_mlflow() -> None:
    """Load MLflow, without its telemetry and without the messages that it prints when it creates a store."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # its errors are raised too
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # it warns of every retry in an outage
    logging.getLogger("alembic").setLevel(logging.WARNING)
    import mlflow  # noqa: F401


def damaged_store(error: BaseException, runs: Path) -> ValueError | None:
    """The error to raise instead if this one, or one that it came from, tells of a damaged SQLite file."""
    told = next((words for one in chain(error) for words in _DAMAGED if words in str(one)), None)
    if told is None:
        return None
    return ValueError(
        f"{runs / 'mlflow.db'} is damaged ({told}); nothing was changed. Restore it from a backup; what each trial has "
        f"logged is safe in {runs / 'studies'}"
    )


def connect(runs: Path) -> MlflowClient:
    """A client of the runs folder's store; creates the file if there is none.

    ConnectionError for a server that does not answer.
    """
    import_mlflow()
    from mlflow import MlflowClient

    uri, store = tracking_uri(runs), runs.resolve() / "mlflow.db"
    if remote_uri() is not None:
        if (reason := health(uri)) is not None:
            raise ConnectionError(f"the MLflow store at {uri} does not answer ({reason})")
        _check_artifacts()
    elif not store.exists():
        store.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(runs / "mlflow.lock"):
            if not store.exists():  # made under another name, so that a crash cannot leave half a schema
                for leftover in store.parent.glob("mlflow.db.new*"):
                    leftover.unlink()
                new = store.with_name("mlflow.db.new")
                MlflowClient(f"sqlite:///{new}").search_experiments(max_results=1)
                new.rename(store)
    return MlflowClient(uri)


@cache
def _check_artifacts() -> None:
    """Let MLflow's client, in this process, look at each address of files with `check_artifacts` before it is used."""
    from mlflow.store.artifact.artifact_repository_registry import get_registered_artifact_repositories

    in_turn = SimpleNamespace(submit=lambda ask, *about, **more: _settled(Future(), partial(ask, *about, **more)))

    def checked(kind: Any, uri: str, **more: Any) -> Any:
        check_artifacts(uri)
        place = kind(uri, **more)
        place.thread_pool = in_turn  # threads of its own would let no process end before them
        return place

    kinds = get_registered_artifact_repositories()
    kinds |= {scheme: partial(checked, kind) for scheme, kind in kinds.items()}


def source_tags(about: Mapping[str, Any]) -> dict[str, str]:
    """Tags for the code (MLflow's own), the versions and the inputs of a run or a study, cut where a store refuses."""
    versions, inputs = about["versions"], json.dumps(short(about["inputs"]))[:5000]
    tags = {"mlflow.source.name": "cohort", "mlflow.source.type": "LOCAL", "cohort.versions": json.dumps(versions)}
    commit = versions.get("git_commit", "unknown").removesuffix("-dirty")
    tags |= {"mlflow.source.git.commit": commit} if commit != "unknown" else {}
    return tags | ({"cohort.inputs": inputs} if about["inputs"] else {})


def moved_from(runs: Path) -> str | None:
    """The URI of the runs folder in which the store was made, if it is not this one: artifacts would go there."""
    store = runs.resolve() / "mlflow.db"
    return None if remote_uri() is not None or not store.exists() else _look_into(store)[1]


def experiment_of(client: MlflowClient, runs: Path, name: str) -> Experiment:
    from mlflow.exceptions import MlflowException

    if (found := client.get_experiment_by_name(name)) is None:
        folder = None if remote_uri() else (runs.resolve() / "mlartifacts" / name).as_uri()
        try:
            found = client.get_experiment(client.create_experiment(name, folder))
        except MlflowException:  # another process may have been first
            if (found := client.get_experiment_by_name(name)) is None:
                raise
    if found.lifecycle_stage != "active":
        fix = f"restore it with 'mlflow experiments restore --experiment-id {found.experiment_id}'"
        raise ValueError(f"the experiment '{name}' was deleted in MLflow; {fix} or choose another name")
    return found


def active_run(client: MlflowClient, run_id: str) -> Run | None:
    """The run, or None if the store does not have it or it was deleted."""
    from mlflow.exceptions import MlflowException

    if not run_id:
        return None
    try:
        run = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return None
    return run if run.info.lifecycle_stage == "active" else None


def search_runs(client: MlflowClient, experiments: list[str], wanted: str) -> list[Run]:
    """All active runs that match, newest first."""
    from mlflow.utils import get_results_from_paginated_fn

    page = partial(client.search_runs, experiments, wanted, order_by=["attributes.start_time DESC"])
    return get_results_from_paginated_fn(lambda most, token: page(max_results=most, page_token=token), 1000)


def storable(text: str) -> str:
    """The text without lone surrogates and NUL characters, which databases refuse."""
    return text.encode("utf-8", "replace").decode().replace("\x00", "\N{REPLACEMENT CHARACTER}")


def set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    client.log_batch(run_id, tags=[RunTag(key, storable(value)) for key, value in tags.items()])


def show_state(
    client: MlflowClient, run_id: str, state: TrialState, ended: int | None = None, tags: Mapping[str, str] = {}
) -> None:
    """Show a run's state, with more tags; `ended` (milliseconds since 1970) is its end, by default now."""
    set_tags(client, run_id, {"cohort.state": state, **tags})
    if state == "running":
        client.update_run(run_id, status="RUNNING")
    else:
        client.set_terminated(run_id, _STATUS[state], end_time=ended)


def log_params(client: MlflowClient, run_id: str, settings: Mapping[str, Any], known: Mapping[str, str] = {}) -> None:
    """Log nested settings as parameters; skips `known` ones, because MLflow refuses changes."""
    from mlflow.entities import Param

    params = [Param(key, storable(str(value))[:MAX_PARAM]) for key, value in _flatten(settings) if key not in known]
    for start in range(0, len(params), 100):  # MLflow's limit per request
        client.log_batch(run_id, params=params[start : start + 100])


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping) and all(_KEY.fullmatch(str(inner)) for inner in value):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def as_stored(value: float) -> float:
    """A metric as MLflow keeps it: infinities become the largest double."""
    return math.copysign(sys.float_info.max, value) if math.isinf(value) else value


def _adopt_file(runs: Path) -> None:
    """Let the store of a runs folder that was moved or copied name the files here.

    ValueError if mlflow.db is not a store or has another schema, or while a worker is at work in a folder that was
    moved, perhaps on a host that has it under the path before.
    """
    store = runs.resolve() / "mlflow.db"
    if remote_uri() is not None or not store.exists():
        return
    try:
        revision, moved = _look_into(store)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            by = "by another process, such as another cohort or a database viewer; end that and start again"
            raise ValueError(f"{store} was locked for {LOCK_SECONDS:.0f} s {by}") from None
        fix = "nothing was changed: restore it from a copy, or use another folder with `runs`"
        raise ValueError(f"{store} is not an MLflow store, or it is damaged ({error}); {fix}") from None
    if revision != (head := _schema_version()):
        rule = f"{store} must have schema {head} of MLflow {versions()['mlflow']}, got {revision}"
        fix = f"upgrade it with 'mlflow db upgrade {tracking_uri(runs)}', or use another folder with `runs`"
        raise ValueError(f"{rule}; another version wrote it; {fix}")
    if moved is None:
        return
    leases = store.parent.glob("studies/*/trials/*/lease")
    if any(time.time() - lease.stat().st_mtime < LEASE_SECONDS for lease in leases):
        rule = f"{store} was made in '{moved}', and a worker is at work in this folder or was when it was copied"
        raise ValueError(f"{rule}; use one path of the folder on all hosts, or wait {LEASE_SECONDS:.0f} s after a copy")
    here = store.parent.as_uri()
    with closing(sqlite3.connect(store, timeout=LOCK_SECONDS)) as database, database:
        for table, column in _PLACES:
            move = f"UPDATE {table} SET {column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
            database.execute(move, (here, len(moved) + 1, len(moved) + 1, f"{moved}/"))
    log.warning("this runs folder was moved or copied from %s; its MLflow store now names the files here", moved)


def _look_into(store: Path) -> tuple[str, str | None]:
    """The schema revision of a store, and the URI of the runs folder in which it was made if that is another one.

    sqlite3.DatabaseError for a file that is not a store, or is still locked after LOCK_SECONDS.
    """
    # opened for writing: the first reader rolls back a transaction that a kill left half done
    with closing(sqlite3.connect(f"file:{quote(str(store))}?mode=rw", timeout=LOCK_SECONDS, uri=True)) as database:
        revisions = [row[0] for row in database.execute("SELECT version_num FROM alembic_version")]
        places = [row[0] for row in database.execute("SELECT artifact_location FROM experiments")]
    folders = [place.rpartition("/mlartifacts/")[0] for place in places if "/mlartifacts/" in place]
    others = [one for one in folders if Path(unquote(urlsplit(one).path)) != store.parent]
    return ", ".join(revisions) or "none", next(iter(others), None)


def _schema_version() -> str:
    """The schema revision of the installed MLflow, read from the text of its migrations."""
    spec = find_spec("mlflow")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "store" / "db_migrations" / "versions"
    found: dict[str, set[str]] = {"revision": set(), "down_revision": set()}
    for file in folder.glob("*.py"):
        text = file.read_text("utf-8")  # not imported: that takes seconds
        for name, value in re.findall(r"^(revision|down_revision)\b[^=\n]*=(.*)$", text, re.MULTILINE):
            found[name] |= set(re.findall(r"[0-9a-f]{12}", value))
    (head,) = found["revision"] - found["down_revision"]
    return head
