"""The cores, GPUs, compiler and network interfaces of this machine, and whether this process is one of a group."""

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from ctypes.util import find_library
from functools import lru_cache
from pathlib import Path

import psutil

SECRET = "COHORT_SECRET"  # environment variable, the same for all hosts of a group
SHARED_BYTES = 2**30  # of /dev/shm: what NCCL's documentation asks for
WORKER = {  # environment of a worker; oneDNN keeps kernels, half a megabyte each, and lengths that differ need others
    "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64", "LRU_CACHE_CAPACITY": "64",
}  # fmt: skip
SHARED_GPU = "COHORT_SHARED_GPU"  # environment variable, set where a worker's GPUs have other workers too


def in_group() -> bool:
    """Whether torch's elastic agent started this process as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def interface(address: str) -> str | None:
    """The network interface of this host that has the address."""
    found = ((name, own.address) for name, owned in psutil.net_if_addrs().items() for own in owned)
    return next((name for name, own in found if own == address), None)


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def allocator() -> dict[str, str]:
    """What to add to a worker's environment so that tcmalloc gives it its memory, where it is installed and no GPU
    computes: the C library's own leaves holes among tensors of many sizes, 0.4 GB of 4, and takes 5 % more time."""
    found = (find_library(name) for name in ("tcmalloc_minimal", "tcmalloc")) if sys.platform == "linux" else ()
    path = None if usable_gpus() else next(filter(None, found), None)
    return {} if path is None else {"LD_PRELOAD": path}


def compute_as_a_worker() -> None:
    """Let torch, unless it has been imported, use as many threads as in a study's only worker: threads that wait for
    others give their core away, which on a busy core was six times faster."""
    if "torch" not in sys.modules:
        for name, value in {**WORKER, "OMP_NUM_THREADS": str(usable_cores())}.items():
            os.environ.setdefault(name, value)


@lru_cache(maxsize=1)
def usable_gpus() -> tuple[str, ...]:
    """Names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return ()
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return tuple(map(str, range(sum(line.startswith("GPU ") for line in found.stdout.splitlines()))))


def default_workers(devices: int = 1) -> int:
    """One worker per GPU, or else per core; with several devices per trial, one per that many."""
    return max(1, (len(usable_gpus()) or usable_cores()) // devices)


@lru_cache(maxsize=1)
def hardware() -> dict[str, str]:
    """Names of the processor, and of the kinds of GPU that this process may use."""
    about, asked = Path("/proc/cpuinfo"), ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    lines = about.read_text(encoding="utf-8").splitlines() if about.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    found = {"processor": (named or [platform.processor() or platform.machine()])[0]}
    if usable_gpus() and shutil.which("nvidia-smi"):
        said = subprocess.run(asked, capture_output=True, text=True, check=False)
        found["gpu"] = ", ".join(sorted({*said.stdout.splitlines()} - {""}))
    return found


def compiler() -> str | None:
    """Path of the C compiler that Triton takes to launch kernels: CC's, or else gcc or clang. None without one, or
    without Python's headers, which it reads."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    return next(filter(None, map(shutil.which, names)), None) if headers else None


def shared_memory_bytes() -> int | None:
    """Free bytes of /dev/shm, through which the processes of a GPU's engine and of NCCL talk; None if there is none.

    A container has 64 MiB unless it is started with --ipc=host or --shm-size.
    """
    return shutil.disk_usage("/dev/shm").free if Path("/dev/shm").exists() else None


def python_path() -> str:
    """The PYTHONPATH of a child, which imports this code from any working directory."""
    home = str(Path(__file__).absolute().parents[2])
    return os.pathsep.join(filter(None, [home, os.environ.get("PYTHONPATH")]))
