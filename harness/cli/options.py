"""Defines the options that several commands share, and reads their text."""

import os
import re
from pathlib import Path
from typing import Annotated

import typer

from .. import api, extras
from ..console import terminal

RUNS = Path("runs")


def _use_mirrors(text: str | None) -> str | None:
    """Let these mirrors follow what this command and its workers record; `mlflow=URI` also names the server."""
    split = re.split(r",(?=\s*[\w-]*\s*(?:[=,]|$))", text or "")  # at no comma of an address, which may have a password
    words = [word.strip().partition("=") for word in split]
    if wrong := [name for name, equals, _ in words if equals and name != "mlflow"]:
        raise typer.BadParameter(f"only mlflow takes an address (mlflow=http://HOST:PORT), got one for '{wrong[0]}'")
    os.environ["COHORT_MIRROR"] = ",".join(name for name, _, _ in words)
    for _, _, uri in words:
        os.environ |= {"COHORT_TRACKING_URI": uri} if uri else {}
    return text


def _warn_of_password(context: typer.Context, option: typer.CallbackParam, url: str | None) -> str | None:
    """The same URL; warns on stderr if it has a password, because every user can see the arguments of this process."""
    source = context.get_parameter_source(str(option.name))
    if url and source is not None and source.name == "COMMANDLINE" and api.hides(url):
        danger = f"other users of this machine can read a password in {option.opts[0]} (with ps)"
        terminal.say(f"Warning: {danger}; give it in {option.envvar} or ~/.pgpass", stderr=True)
    return url


Runs = Annotated[
    Path, typer.Option("--runs", envvar="COHORT_RUNS", metavar="DIR", help="Folder of results, caches, MLflow's store.")
]
Mirror = Annotated[
    str | None,
    typer.Option(
        envvar="COHORT_MIRROR",
        metavar="A,B,...",
        callback=_use_mirrors,
        help="Where results are shown: mlflow (or a server: mlflow=http://HOST:PORT), wandb, tensorboard, none.",
    ),
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="PATH=VALUE", help="Override a setting (steps=20), or all of an @FILE; repeatable."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Seeds = Annotated[str | None, typer.Option(metavar="0,1,2", help="Seeds of each arm, such as 0,1,2.")]
Name = Annotated[str | None, typer.Option(metavar="NAME", help="Keep the results under another name.")]
Workers = Annotated[str, typer.Option(metavar="N|auto", help="Trials at a time; auto: by GPUs, or cores and memory.")]
Started = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a study in the runs folder.")]
Arm = Annotated[str, typer.Argument(metavar="ARM", help="Label of an arm, as `cohort study status` shows it.")]
Storage = Annotated[
    str | None,
    typer.Option(
        envvar="COHORT_STORAGE",
        metavar="URL",
        callback=_warn_of_password,
        help="; ".join(["Where the queue is, by default in files", *extras.told("storage").values()]),
    ),
]
Model = Annotated[str, typer.Argument(metavar="MODEL", help="'tiny', a Hub id, a model folder, a checkpoint or a run.")]
Task = Annotated[str, typer.Option(help="Task by name.")]
Split = Annotated[str, typer.Option(help="train, validation or test.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and estimate only; run and write nothing.")]
Study = Annotated[str, typer.Argument(metavar="STUDY", help="Name of a shipped study, or a study file.")]


def num_workers(text: str) -> int | None:
    """The number of --workers; None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"--workers must be a number of at least 1, or auto, got '{text}'")
    return int(text)


def words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",")] if text else []


def integers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be integers separated by commas, such as 0,1,2, got '{text}'") from None
