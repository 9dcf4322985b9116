"""Says which mirrors follow a record, finds the address of the MLflow store, and why a server cannot be used.

By default the store is a file in the runs folder. COHORT_TRACKING_URI names an `mlflow server` instead:
`http(s)://host:port`. COHORT_MIRROR names the mirrors, `mlflow` by default. Worker processes inherit the variables.
"""

import os
import urllib.error
import urllib.request
from http.client import HTTPException
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from .. import plugins
from ..base.addresses import shown, split_url

TRACKING_URI, MIRROR, TRACES = "COHORT_TRACKING_URI", "COHORT_MIRROR", "COHORT_TRACES"
ARTIFACTS = "COHORT_ARTIFACTS"  # where a server may send files beside itself
MLFLOW = "mlflow"
ANSWER_SECONDS = 10.0  # after which a server counts as silent


def tracking_uri(runs: Path) -> str:
    """The address of the MLflow store of a runs folder.

    ValueError if it is unusable, or if MLflow would write elsewhere: not every path survives as the URL that it makes.
    """
    if uri := remote_uri():
        return uri
    store = runs.resolve() / "mlflow.db"
    as_database = unquote(str(store).partition("?")[0])  # as SQLAlchemy reads its URL
    if as_database != str(store) or unquote(urlsplit(store.as_uri()).path) != str(store):
        rule = "'?', '%' before two hexadecimal digits or bytes that are not UTF-8, for MLflow reads it as a URL"
        got, fix = ascii(str(runs))[1:-1], "choose another with `runs` or COHORT_RUNS"
        raise ValueError(f"the path of the runs folder must not have {rule}, got '{got}'; {fix}")
    return f"sqlite:///{store}"


def mirrors() -> list[str]:
    """The mirrors that follow a record, `mlflow` or plugins; none for `none`. ValueError for an unusable one."""
    given = os.environ.get(MIRROR, "").strip() or MLFLOW
    names = [] if given == "none" else list(dict.fromkeys(word.strip() for word in given.split(",")))
    for name in (one for one in names if one != MLFLOW):
        try:
            package = plugins.load("mirror", name).package
        except ValueError as error:
            raise ValueError(f"`mirror` and {MIRROR} name {MLFLOW}, plugins, or none: {error}") from None
        if package and find_spec(package) is None:
            raise ValueError(f"mirror {name} needs {package}; pip install 'cohort-rl[{name}]'")
    return names


def traces_per_split() -> int:
    """The number of rollouts of each step and split that become traces: COHORT_TRACES, by default 4; 0 for none.

    ValueError for anything but a whole number.
    """
    text = os.environ.get(TRACES, "4")
    if not text.isdecimal():
        raise ValueError(f"{TRACES} must be a whole number of traces for each step and split, 0 or more, got '{text}'")
    return int(text)


def remote_uri() -> str | None:
    """The MLflow server that COHORT_TRACKING_URI names, which keeps artifacts too; None: a file of the runs folder."""
    uri = os.environ.get(TRACKING_URI, "").strip()
    if not uri:
        return None
    parts = split_url(uri)
    if parts is None or not uri.startswith(("http://", "https://")) or not parts.hostname:
        rule, fix = "http://HOST:PORT of an MLflow server", "without it results go to a file in the runs folder"
        raise ValueError(f"the tracking URI must be {rule}, got '{shown(uri)}'; {fix}")
    if "@" in uri or parts.query or parts.fragment:
        fix = "leave out what follows its '?' or '#', and give user and password in MLFLOW_TRACKING_USERNAME and "
        rule = f"the tracking URI must have nothing but host, port and path, got '{shown(uri)}'"
        raise ValueError(f"{rule}; {fix}MLFLOW_TRACKING_PASSWORD")
    return uri.rstrip("/")


def check_artifacts(uri: str) -> None:
    """ValueError if the MLflow server wants files elsewhere than behind itself or where COHORT_ARTIFACTS allows."""
    server, allowed, parts = remote_uri(), os.environ.get(ARTIFACTS, "").strip().rstrip("/"), split_url(uri)
    if server is None or (allowed and f"{uri}/".startswith(f"{allowed}/") and ".." not in unquote(uri).split("/")):
        return
    own = ("", urlsplit(server).netloc)
    if parts is None or parts.scheme not in ("mlflow-artifacts", "runs", "models") or parts.netloc not in own:
        rule = f"the MLflow server must keep files behind itself, and says to put them at {shown(uri)!r:.200}"
        raise ValueError(f"{rule}; if that is right, set {ARTIFACTS} to the beginning of that address")


def store_name(runs: Path) -> str:
    """The store's name in messages."""
    uri = remote_uri()
    return f"the MLflow store in '{runs}'" if uri is None else f"the MLflow store at {uri}"


def is_outage(error: BaseException) -> bool:
    """Whether an error means that the store does not answer, not that it refuses the data."""
    from mlflow.exceptions import MlflowException

    if isinstance(error, MlflowException):
        unreached = str(error).startswith("API request to") and "failed with exception" in str(error)
        return unreached or error.get_http_status_code() in (429, 502, 503, 504)
    return isinstance(error, OSError)  # includes the errors of requests


def health(uri: str, seconds: float | None = None) -> str | None:
    """The reason, in words, that rules out the server at `uri` now; None if it answers in time."""
    place = f"{uri}/health"
    try:
        with urllib.request.build_opener(NoRedirect).open(place, timeout=seconds or ANSWER_SECONDS) as answer:
            words = answer.read1(100)  # what is there: an answer may never end
        return None if words.strip() == b"OK" else f"{place} answers {words[:20]!r}: is it an MLflow server?"
    except urllib.error.HTTPError as error:
        if (target := error.headers.get("Location")) is not None:
            return f"{place} sends on to {shown(target)}; name the server itself"
        return f"status {error.code} of {place}: is it an MLflow server that lets you in?"
    except (OSError, ValueError, HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """MLflow follows redirects too, but a redirected write loses its data."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None
