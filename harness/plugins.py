"""Finds plugins by name: a file's name is the plugin's name, and installed packages add theirs by entry points.

`algorithms/x.py`, `tasks/x.py` and the `x.py` of `rewards`, `samplers` and `engines` in `harness/` each hold one public
class, and so do the files of such folders, and of `mirrors` and `stages`, in an extra. A third party declares the same
under the entry-point groups `cohort.algorithms`, `cohort.tasks`, `cohort.rewards`, `cohort.samplers`, `cohort.engines`,
`cohort.mirrors` and `cohort.stages`. Two classes of one name are an error, because a study would not say which of them
it ran.
"""

import importlib
import pkgutil
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from types import ModuleType
from typing import Any, Literal, TypeVar, get_args

from . import extras, interfaces
from .base.words import did_you_mean
from .data import Section
from .interfaces import Algorithm, Mirror, Reward, RolloutEngine, Sampler, StageKind, Task

Kind = Literal["algorithm", "task", "reward", "sampler", "engine", "mirror", "stage"]
T = TypeVar("T")

_BASE: dict[str, type] = {
    "algorithm": Algorithm, "task": Task, "reward": Reward, "sampler": Sampler, "engine": RolloutEngine,
    "mirror": Mirror, "stage": StageKind,
}  # fmt: skip
_files_loaded: dict[str, tuple[str, bool]] = {}  # file of a plugin -> its name in words, whether it is from a package


def names(kind: Kind) -> list[str]:
    """Names of all plugins of a kind, sorted, without importing them."""
    return sorted({*_files(kind), *(point.name for point in _external(kind))})


@cache
def load(kind: Kind, name: str) -> type:
    """The plugin's class. ValueError for a wrong class or name, with the nearest name for an unknown one."""
    files, points = _files(kind), [point for point in _external(kind) if point.name == name]
    if name not in files and not points:
        hint = did_you_mean(name, known := names(kind), cutoff=0.6)
        raise ValueError(f"unknown {kind} '{name}'; {hint}available: {', '.join(known)}")
    built_in = ["Cohort itself"] if name in files else []
    owners = [*built_in, *sorted(_package(point) for point in points)]
    if len(owners) > 1:
        raise ValueError(
            f"{kind} '{name}' is declared by {' and '.join(owners)}; a name means one {kind}, so rename the entry "
            f"point under cohort.{kind}s or uninstall its package"
        )
    if points:
        cls, words = _installed_plugin(points[0], kind), f"{kind} '{name}' of {_package(points[0])}"
    else:
        words = f"{kind} '{name}'"
        module = _loaded(lambda: importlib.import_module(files[name]), words, "mend it")
        cls = _only_plugin(module, kind)
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ""
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        what = f"{', '.join(missing)}, as each {_BASE[kind].__name__} does"
        raise ValueError(f"{words}: {cls.__name__} must define {what}; add it in {file}")
    _files_loaded[file] = (words, bool(points))
    return cls


def of_package(package: str) -> list[tuple[Kind, str]]:
    """Kind and name of each plugin that an installed package declares; ValueError if it declares none."""
    groups: dict[Kind, str] = {kind: f"cohort.{kind}s" for kind in get_args(Kind)}
    found: list[tuple[Kind, str]] = []
    with suppress(PackageNotFoundError, ValueError):  # ValueError of an empty name
        declared = distribution(package).entry_points
        found = [(kind, point.name) for kind, group in groups.items() for point in declared.select(group=group)]
    if not found:
        owners = sorted({point.dist.name for kind in groups for point in _external(kind) if point.dist})
        raise ValueError(
            f"no installed package '{package}' declares plugins (entry points {', '.join(groups.values())}); install "
            f"it first (pip install -e .); packages that do: {', '.join(owners) or 'none'}"
        )
    return found


def raised_by(error: BaseException) -> str | None:
    """A sentence with plugin, file, line and error, if a plugin raised it; otherwise None.

    Also None for an error of a plugin of Cohort itself that tells a user the fault.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename in _files_loaded:
            words, is_installed = _files_loaded[frame.filename]
            if is_installed or not isinstance(error, ValueError | OSError | ImportError):
                return f"{words} failed ({frame.filename}, line {frame.lineno}): {_in_words(error)}"
    return None


def settings_class(kind: Kind, name: str) -> type[Section]:
    """The class with the plugin's settings as fields: its own, or the `Settings` of an engine. Errors as `load`."""
    cls = load(kind, name)
    return cls.Settings if issubclass(cls, RolloutEngine) else cls  # pyright: ignore[reportReturnType]


def _files(kind: Kind) -> dict[str, str]:
    """Name of each plugin that is a file -> its module."""
    above = "" if kind in ("algorithm", "task") else "harness."
    own = [] if kind in ("mirror", "stage") else [f"cohort.{above}{kind}s"]
    folders = {folder: importlib.import_module(folder).__path__ for folder in (*own, *extras.packages(f"{kind}s"))}
    found = ((f"{folder}.{m.name}", m.name) for folder, path in folders.items() for m in pkgutil.iter_modules(path))
    return {name: module for module, name in found if not name.startswith("_")}


def _external(kind: Kind) -> list[EntryPoint]:
    return [point for point in _installed(tuple(sys.path)) if point.group == f"cohort.{kind}s"]


@cache  # reading the metadata of all installed packages takes long
def _installed(_path: tuple[str, ...]) -> list[EntryPoint]:
    found: Any = entry_points()
    return [point for kind in _BASE for point in found.select(group=f"cohort.{kind}s")]


def _package(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else point.value


def _installed_plugin(point: EntryPoint, kind: Kind) -> type:
    """The class of an entry point, which must follow the rules for a plugin file of that name."""
    where = f"{kind} '{point.name}' of {_package(point)} ({point.value})"
    cls = _loaded(point.load, where, "install it again, or uninstall it")
    if not (isinstance(cls, type) and issubclass(cls, _BASE[kind])):
        raise ValueError(f"{where} must be a class that inherits from cohort.harness.interfaces.{_BASE[kind].__name__}")
    settings = cls.Settings if issubclass(cls, RolloutEngine) else cls
    field = getattr(settings, "model_fields", {}).get("name")
    nameless = kind in ("reward", "mirror", "stage")  # a spec or an option names them
    if not nameless and (field is None or field.default != point.name):
        declared = None if field is None else field.default
        raise ValueError(f"{where} must declare name: Literal['{point.name}'] with that default, got {declared!r}")
    return cls


def _loaded(load: Callable[[], T], where: str, fix: str) -> T:
    """The result of `load`; ValueError, with the file and line of the plugin, if its code does not run."""
    try:
        return load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{where} cannot be loaded: {error}; {fix}") from error
    except Exception as error:
        own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith("<frozen")]
        if own[-1].filename == interfaces.__file__:
            raise  # a rule for all plugins, in its own words
        at = error if isinstance(error, SyntaxError) else own[-1]
        place = f"{at.filename}, line {at.lineno}"
        raise ValueError(f"{where} cannot be loaded ({place}): {_in_words(error)}; {fix}") from error


def _in_words(error: BaseException) -> str:
    return " ".join(traceback.format_exception_only(error)[-1].split())


def _only_plugin(module: ModuleType, kind: Kind) -> type:
    base = _BASE[kind]
    own = {k: v for k, v in vars(module).items() if isinstance(v, type) and v.__module__ == module.__name__}
    found = [value for name, value in own.items() if issubclass(value, base) and not name.startswith("_")]
    if len(found) != 1:
        raise ValueError(f"{module.__name__} must define exactly one public {base.__name__} class, found {len(found)}")
    return found[0]
