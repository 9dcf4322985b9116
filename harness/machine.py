"""The cores and GPUs that this process may use."""

import os
import shutil
import subprocess
from functools import lru_cache


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@lru_cache(maxsize=1)
def usable_gpus() -> tuple[str, ...]:
    """Names of the CUDA devices that this process may use, as CUDA_VISIBLE_DEVICES takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(name.strip() for name in visible.split(",") if name.strip() not in ("", "-1"))
    if shutil.which("nvidia-smi") is None:
        return ()
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    gpus = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(i) for i, _ in enumerate(gpus))
