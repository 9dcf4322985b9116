"""Tells a webhook or a command of the user's when a trial fails, a claim is decided or a study ends.

COHORT_NOTIFY names it; no option does, for the address of a webhook is a secret. It gets one JSON document for each: as
the body of a POST, or on the standard input of the command, which no shell reads. One that fails costs a warning.
"""

import json
import logging
import os
import queue
import shlex
import shutil
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPException
from typing import Any

from ...mirror.address import NoRedirect

NOTIFY = "COHORT_NOTIFY"
NOTICE_SECONDS = 10.0  # for one of them, and for those that are left at the end
log = logging.getLogger(__name__)


@contextmanager
def notices(study: str) -> Iterator[Callable[..., None]]:
    """A function that sends a notice (event, text, other facts) in the order of its calls, and returns at once.

    ValueError if COHORT_NOTIFY names neither a URL nor a command of this machine.
    """
    where, waiting = os.environ.get(NOTIFY, "").strip(), queue.SimpleQueue[dict[str, Any] | None]()
    is_url, words = where.startswith(("http://", "https://")), []
    with suppress(ValueError):  # of an open quotation
        words = shlex.split(where)
    if where and not is_url and not (words and shutil.which(words[0])):
        raise ValueError(f"{NOTIFY} must be http(s)://... or a command that is installed")

    def send() -> None:
        for document in iter(waiting.get, None):
            body = json.dumps({"study": study, **document}).encode()
            try:
                if is_url:
                    request = urllib.request.Request(where, body, {"Content-Type": "application/json"})
                    urllib.request.build_opener(NoRedirect).open(request, timeout=NOTICE_SECONDS).close()
                else:
                    subprocess.run(
                        words, input=body, timeout=NOTICE_SECONDS, check=True,
                        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                    )  # fmt: skip
            except (OSError, ValueError, HTTPException, subprocess.SubprocessError) as error:
                reason = getattr(error, "returncode", type(error).__name__)  # its words may hold the secret
                log.warning("the notice '%s' did not reach what %s names (%s)", document["event"], NOTIFY, reason)

    (thread := threading.Thread(target=send, daemon=True)).start()

    def tell(event: str, text: str, **facts: Any) -> None:
        if where:
            waiting.put({"event": event, "text": text, **facts})

    try:
        yield tell
    except Exception as error:
        if not isinstance(error, ValueError):  # of bad input, before it began
            tell("study ended", f"{study} ended by an error: {error}", error=type(error).__name__)
        raise
    finally:
        waiting.put(None)
        thread.join(NOTICE_SECONDS)
        if thread.is_alive():
            log.warning("%s did not accept all notices after %.0f s", NOTIFY, NOTICE_SECONDS)
