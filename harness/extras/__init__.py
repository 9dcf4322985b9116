"""The wing: finds the features that are built on top of the three jobs, a folder for each.

The core imports this file alone and names no extra; an extra imports the core and no other extra. The parts of `NAME/`
are found by the name of their file or folder:

    __init__.py   says in its docstring what the extra is for; `API`: its public functions, each with its module
    commands.py   registers its commands
    section.py    `section(analysis)`: its section of a report, or None
    record.py     `kept(runs, trials, inputs)`: the plain data that a study's record has of it, or nothing
    storage.py    `FORM`, of the URLs that it serves; `open_storage(study, url)`: a study's storage, or None
    models.py     a format of models: `reads(path)`; `check(path)`, which raises ValueError; `sources(path)`, the files
                  that are read; `convert(path, folder)`, which saves the model as transformers reads it
    pages.py      `ROUTES`: pages that `cohort ui` serves below /NAME; the extra's docstring is their title
    tasks/, rewards/, mirrors/, ...   its plugins
    studies/      studies that need it, as files

A product without the folder lacks what the extra brings and nothing else.
"""

import importlib
import pkgutil
from functools import cache
from pathlib import Path
from types import ModuleType


@cache
def names() -> list[str]:
    """Names of all extras, sorted."""
    return sorted(one.name for one in pkgutil.iter_modules(__path__) if one.ispkg)


@cache
def packages(part: str) -> list[str]:
    """Full names of the modules or packages called `part` that extras have, in the order of their extras."""
    homes = {f"{__name__}.{name}": importlib.import_module(f"{__name__}.{name}").__path__ for name in names()}
    return [f"{home}.{part}" for home, path in homes.items() if part in {m.name for m in pkgutil.iter_modules(path)}]


def folders(name: str) -> list[Path]:
    """The folders of that name that extras have."""
    return sorted(Path(__path__[0]).glob(f"*/{name}"))


def modules(part: str) -> dict[str, ModuleType]:
    """Name of each extra that has a file or folder `part` -> that module, loaded."""
    return {full.split(".")[-2]: importlib.import_module(full) for full in packages(part)}


def told(part: str) -> dict[str, str]:
    """Name of each extra that has a file or folder `part` -> its docstring."""
    homes = [full.rpartition(".")[0] for full in packages(part)]
    return {home.rpartition(".")[2]: (importlib.import_module(home).__doc__ or "").strip() for home in homes}


def public() -> dict[str, str]:
    """Name of each public function that an extra brings -> the full name of its module."""
    homes = {name: getattr(importlib.import_module(f"{__name__}.{name}"), "API", {}) for name in names()}
    return {function: f"{__name__}.{name}.{home}" for name, api in homes.items() for function, home in api.items()}
