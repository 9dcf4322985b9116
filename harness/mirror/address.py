"""Finds the address of the MLflow store, and waits for a store that does not answer.

By default the store is a file in the runs folder. `use` or COHORT_TRACKING_URI (`use` wins) names another one:
`http(s)://host:port` of an `mlflow server`, or `postgresql://user@host/database`. Worker processes inherit the
variable.
"""

import logging
import os
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar
from urllib.parse import unquote, urlsplit

from tenacity import RetryCallState, retry, retry_if_exception, stop_before_delay, wait_exponential

from ..ground.addresses import shown, split_url

TRACKING_URI = "COHORT_TRACKING_URI"
PATIENCE_SECONDS = 300.0  # how long a command waits for a remote store to come back
FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 1.0, 20.0
ANSWER_SECONDS = 10.0
SILENT_SECONDS = 2.0  # after which a command says what it waits for
_DRIVERS = {"postgresql": "psycopg2", "postgresql+psycopg2": "psycopg2", "postgresql+psycopg": "psycopg"}
P = ParamSpec("P")
R = TypeVar("R")
_chosen: str | None = None
log = logging.getLogger(__name__)


def use(uri: str | None) -> None:
    """Make `uri` the store of this process; None leaves the choice to COHORT_TRACKING_URI."""
    global _chosen
    _chosen = uri


def tracking_uri(runs: Path) -> str:
    """The address of the MLflow store of a runs folder. ValueError if the address or the folder's path is unusable."""
    if uri := remote_uri():
        return uri
    check_spelling(runs)
    return f"sqlite:///{runs.resolve() / 'mlflow.db'}"


def check_spelling(runs: Path) -> None:
    """ValueError if MLflow would write elsewhere: it turns paths into URLs, and some paths do not survive that."""
    store = runs.resolve() / "mlflow.db"
    as_database = unquote(str(store).partition("?")[0])  # as SQLAlchemy reads its URL
    if as_database != str(store) or unquote(urlsplit(store.as_uri()).path) != str(store):
        raise ValueError(
            "the path of the runs folder must not have '?', '%' before two hexadecimal digits or bytes that are not "
            f"UTF-8, for MLflow reads it as a URL, got '{ascii(str(runs))[1:-1]}'; choose another with --runs or "
            "COHORT_RUNS"
        )


def remote_uri() -> str | None:
    """The store that `use` or COHORT_TRACKING_URI names; None if it is the file of the runs folder."""
    uri = (_chosen or os.environ.get(TRACKING_URI, "")).strip()
    if not uri:
        return None
    parts = split_url(uri)
    scheme = uri.partition("://")[0]
    if parts is None or scheme not in ("http", "https", *_DRIVERS) or not parts.hostname:
        raise ValueError(
            "the tracking URI must be http://HOST:PORT of an MLflow server or postgresql://USER@HOST/DATABASE, got "
            f"'{shown(uri)}'; without --tracking-uri and {TRACKING_URI} results go to a file in the runs folder"
        )
    if is_server(uri) and "@" in uri:
        raise ValueError(
            f"the tracking URI of a server must have no user and password, got '{shown(uri)}'; MLflow reads them from "
            "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    if uri.count("@") > 1:
        raise ValueError(f"the tracking URI must have one '@', got '{shown(uri)}'; write %40 in user and password")
    driver = _DRIVERS.get(scheme)
    if driver is not None and find_spec(driver) is None:
        package = "psycopg2-binary" if driver == "psycopg2" else "psycopg[binary]"
        raise ValueError(f"a {scheme}:// tracking URI needs the package {driver}; pip install {package}")
    return uri.rstrip("/")


def is_server(uri: str | None) -> bool:
    """Whether the store is an `mlflow server`, which then keeps the artifacts too."""
    return uri is not None and uri.startswith("http")


def store_name(runs: Path) -> str:
    """The store's name in messages."""
    uri = remote_uri()
    return f"the MLflow store in '{runs}'" if uri is None else f"the MLflow store at {shown(uri)}"


def check_remote() -> None:
    """ValueError if there is a remote store and it does not answer now."""
    uri = remote_uri()
    if uri is None:
        return
    if is_server(uri) and (urlsplit(uri).query or urlsplit(uri).fragment):
        raise ValueError(
            f"the tracking URI of a server must end with its host, port and path, got {shown(uri)}; leave out what "
            "follows its '?' or '#'"
        )
    reason = (_awaited_health(uri) or _refusal(uri, ANSWER_SECONDS)) if is_server(uri) else _listens(uri)
    if reason is not None:
        raise ValueError(
            f"the tracking URI must name a store that answers, but {shown(uri)} does not ({reason}); start it, or "
            "leave out --tracking-uri to keep results in the runs folder"
        )


def check_answers(*, aloud: bool = True) -> None:
    """ConnectionError if there is an MLflow server and it does not answer now, a minute before MLflow would say so."""
    uri = remote_uri()
    if uri is not None and is_server(uri):
        reason = _awaited_health(uri) if aloud else health(uri, ANSWER_SECONDS)
        if reason is not None:
            raise ConnectionError(reason)


def is_outage(error: BaseException) -> bool:
    """Whether an error means that the store does not answer, not that it refuses the data."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        unreached = str(error).startswith("API request to") and "failed with exception" in str(error)
        return unreached or error.get_http_status_code() in (429, 502, 503, 504)
    return isinstance(error, OSError)  # includes the errors of requests


def patient(function: Callable[P, R]) -> Callable[P, R]:
    """The same function, retried while a remote store does not answer, for at most PATIENCE_SECONDS.

    Then ConnectionError. The function must be safe to call again.
    """
    return retry(
        retry=retry_if_exception(lambda error: remote_uri() is not None and is_outage(error)),
        wait=wait_exponential(FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS),
        stop=stop_before_delay(PATIENCE_SECONDS),
        before_sleep=_say_waiting,
        retry_error_callback=_give_up,
    )(function)


def _say_waiting(call: RetryCallState) -> None:
    wait = call.upcoming_sleep
    log.warning("the MLflow store at %s does not answer; trying again in %.0f s", shown(remote_uri() or ""), wait)


def _give_up(call: RetryCallState) -> NoReturn:
    raise ConnectionError(
        f"the MLflow store at {shown(remote_uri() or '')} did not answer for {PATIENCE_SECONDS:.0f} s; everything is "
        "in the runs folder, and the same command catches up when the store returns"
    ) from (call.outcome.exception() if call.outcome else None)


def health(uri: str, seconds: float) -> str | None:
    """The reason, in words, that rules out the server at `uri` now; None if it answers within `seconds`."""
    return _within(seconds, lambda: _health(uri, seconds))


def _awaited_health(uri: str) -> str | None:
    """The same for a person who waits for the answer."""
    words = f"waiting up to {ANSWER_SECONDS:.0f} s for the MLflow store at {shown(uri)} to answer"
    with said_after(SILENT_SECONDS, words):
        return health(uri, ANSWER_SECONDS)


@contextmanager
def said_after(seconds: float, words: str) -> Iterator[None]:
    """Say them unless what follows ends within so many seconds."""
    timer = threading.Timer(seconds, log.warning, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _health(uri: str, seconds: float) -> str | None:
    place = f"{shown(uri)}/health"
    try:
        with urllib.request.build_opener(_NoRedirect).open(f"{uri}/health", timeout=seconds) as answer:
            words = answer.read(100)
        return None if words.strip() == b"OK" else f"{place} answers {words[:20]!r}: is it an MLflow server?"
    except urllib.error.HTTPError as error:
        if (target := error.headers.get("Location")) is not None:
            return f"{place} sends on to {shown(target)}; name the server itself"
        return f"status {error.code} of {place}: is it an MLflow server that lets you in?"
    except (urllib.error.URLError, OSError, ValueError, HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """MLflow follows redirects too, but a redirected write loses its data."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def _refusal(uri: str, seconds: float) -> str | None:
    """The error, in words, of a server that is up when MLflow lists its experiments; None without an error."""
    from mlflow import MlflowClient

    def ask() -> str | None:
        try:
            MlflowClient(uri).search_experiments(max_results=1)
        except Exception as error:  # of MLflow or a library below it: the store cannot be used either way
            return " ".join(str(error).split())[:200]

    return _within(seconds, ask)


def _within(seconds: float, ask: Callable[[], str | None]) -> str | None:
    """The answer of `ask`, or a message if it takes too long: a server that never ends its answer blocks nobody."""
    answers: list[str | None] = []
    thread = threading.Thread(target=lambda: answers.append(ask()), name="ask", daemon=True)
    thread.start()
    thread.join(seconds + 1)
    return answers[0] if answers else f"no whole answer within {seconds:.0f} s"


def _listens(uri: str) -> str | None:
    parts = urlsplit(uri)
    try:
        socket.create_connection((parts.hostname or "", parts.port or 5432), ANSWER_SECONDS).close()
    except OSError as error:
        return str(error)
    return None
