"""`cohort ui`."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ..console import terminal
from .commands import app, command
from .options import RUNS, Runs, TrackingUri, use_store

STOPPING = "Stopping the server; Ctrl-C again stops at once."


@command(app, "ui", "cohort ui", "cohort ui --port 5001 --open")
def ui(
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open the newest study's page in a browser.")] = False,
    runs: Runs = RUNS,
    tracking_uri: TrackingUri = None,
) -> None:
    """Serve the MLflow pages of the runs folder on 127.0.0.1 until Ctrl-C, with all that its records have.

    With the --tracking-uri of an MLflow server, print the addresses of its pages instead.
    """
    from ..ground.stop import stop_on_signals

    use_store(tracking_uri)
    # A flag, because an exception from a signal handler is lost in a library's callback.
    with stop_on_signals(words=STOPPING) as should_stop:
        ending = _serve_pages(runs, port, browser, should_stop)
    if ending is not None and not should_stop():
        terminal.fail(ending)
        raise typer.Exit(1)


def _serve_pages(runs: Path, port: int, browser: bool, should_stop: Callable[[], bool]) -> str | None:
    """Serve the pages until `should_stop()`; returns why they ended earlier, or None."""
    from ..mirror.address import is_server, remote_uri
    from ..mirror.follow import catch_up, caught_up
    from ..mirror.store import TRAINING_PAGES
    from ..mirror.ui import serve_ui

    address = remote_uri()
    if address is not None and is_server(address):  # which serves its own pages
        catch_up(runs)
        _show_pages(runs, address, browser, lambda: False, f"{address}/#/experiments?{TRAINING_PAGES}")
        return None
    try:
        with serve_ui(runs, port, should_stop=should_stop) as server, caught_up(runs):
            _show_pages(runs, server.address, browser, should_stop, server.url)
            terminal.say("MLflow serves these pages until Ctrl-C.")
            return f"the MLflow server ended by itself with status {server.wait(should_stop)}"
    except KeyboardInterrupt:
        return None
    except RuntimeError as error:
        return str(error)


def _show_pages(runs: Path, address: str, browser: bool, should_stop: Callable[[], bool], page: str) -> None:
    """Print the address of every study's page, the newest last, and open the newest (without studies: `page`)."""
    from ..mirror.studies import list_studies, study_url

    names = list_studies(runs, by="start")
    if not names:
        terminal.say(f"MLflow: {page}")
    for name in names:
        if should_stop():
            return
        page = study_url(runs, name, address)
        terminal.say(f"{name}: {page}")
    if browser:
        typer.launch(page)
