"""Bytes in use now, at the peak, and available, as the system counts them."""

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import psutil
import torch

from .device import UNMAPPED

GIB = 2**30


def device_bytes(device: torch.device) -> int:
    """Bytes of a GPU, or those of the machine's RAM (or the container's) that are free."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit, or a machine without cgroups
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


def resident_bytes() -> int:
    """Bytes in use now, counted as `harness.devices.memory.peak_memory` counts them."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated() - UNMAPPED.count
    return psutil.Process().memory_info().rss


def peak_memory() -> int:
    """Bytes at the peak since the run began: of the CUDA allocator, or else resident memory of the process."""
    if torch.cuda.is_available():
        return UNMAPPED.peak()
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(x.split()[1]) * 1024 for x in status.read_text().splitlines() if x.startswith("VmHWM:"))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak_memory() -> None:
    """Reset the peak, so that a run does not inherit that of an earlier run of its worker."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        UNMAPPED.reset_peak()
        return
    control = Path("/proc/self/clear_refs")
    if control.exists():
        give_back_freed_memory()
        control.write_text("5")


def give_back_freed_memory() -> None:
    """Return freed memory to the system, which glibc would keep, fragmented. Without glibc it does nothing."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def use_one_heap() -> None:
    """Have all threads that begin from now on allocate from one heap. With glibc each has its own, and keeps what it
    has freed from the others: runs that take turns would need the memory of all of them."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).mallopt(-8, 1)  # M_ARENA_MAX
