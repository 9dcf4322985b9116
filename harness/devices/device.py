"""Decides the device of a run and bfloat16 autocast on it, and counts its memory: in use, at the peak, available."""

import contextlib
import ctypes
import gc
import resource
import sys
from pathlib import Path

import psutil
import torch

GIB = 2**30
RESERVE = 2 * GIB  # bytes of a GPU for the CUDA context, CUDA graphs and fragments, which no estimate has


def resolve_device(device: str) -> torch.device:
    """The device of a run; ValueError if the spec asks for CUDA and there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device must be available, got 'cuda' on a machine without CUDA; use device=cpu or device=auto, or see "
            "what `cohort doctor` says of the driver"
        )
    return torch.device(device)


def mixed_precision(device: torch.device, enabled: bool) -> torch.autocast:
    """A context in which matrix products run in bfloat16, if enabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


class Unmapped:
    """Bytes that torch's CUDA allocator counts although a sleeping vLLM, which allocates through a pool of it, has
    unmapped them, and the peak of the bytes that are mapped."""

    count = 0
    _peak = 0  # until `count` last changed

    def peak(self) -> int:
        """Bytes at the peak since `reset_peak`."""
        return max(self._peak, torch.cuda.max_memory_allocated() - self.count)

    def reset_peak(self) -> None:
        self._peak = 0
        torch.cuda.reset_peak_memory_stats()

    def set(self, count: int) -> None:
        """Set the number of unmapped bytes."""
        if torch.cuda.is_available():
            self._peak = self.peak()
            torch.cuda.reset_peak_memory_stats()
            self.count = count


UNMAPPED = Unmapped()  # of this process


def device_bytes(device: torch.device) -> int:
    """Bytes that a run may use: the part of a GPU that other processes leave, less RESERVE, or the free RAM of the
    machine (or the container)."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by the allocator, for a use
        return max(0, torch.cuda.mem_get_info(device)[0] + held - RESERVE)
    free = psutil.virtual_memory().available
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no limit, or a machine without cgroups
        free = min(free, int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0, free)


def resident_bytes() -> int:
    """Bytes in use now, counted as `peak_memory` counts them."""
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
    """Reset the peak, so that a run does not inherit the peak of an earlier run of its worker."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    else:
        for name in ("malloc_trim", "MallocExtension_ReleaseFreeMemory"):  # glibc and tcmalloc keep it
            with contextlib.suppress(AttributeError):
                getattr(ctypes.CDLL(None), name)(0)
    forget_peak_memory()


def forget_peak_memory() -> None:
    """Let the peak begin anew at what is in use now, where the machine can."""
    if torch.cuda.is_available():
        UNMAPPED.reset_peak()
    elif (control := Path("/proc/self/clear_refs")).exists():
        control.write_text("5")
