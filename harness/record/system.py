"""Measures the load of a run on its machine: processor, memory and the GPU, if there is one."""

import contextlib
import sys

import psutil

SYSTEM = "system/"  # the area of these metrics, which are no results


class SystemSampler:
    """Measures `system/...` metrics; percentages are means since the last sample. Takes about 0.1 ms without a GPU."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._process.cpu_percent()
        psutil.cpu_percent()

    def sample(self) -> dict[str, float]:
        """Percent of one core (of the process), percent of all cores (of the machine), bytes."""
        found = {
            "system/cpu_percent": self._process.cpu_percent(),
            "system/machine_cpu_percent": psutil.cpu_percent(),
            "system/memory_bytes": float(self._process.memory_info().rss),
            "system/machine_memory_percent": psutil.virtual_memory().percent,
        }
        torch = sys.modules.get("torch")  # never loaded for this: a run without torch uses no GPU
        if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
            free, total = torch.cuda.mem_get_info()  # of the run's device, by all processes
            found["system/gpu_memory_bytes"] = float(total - free)
            with contextlib.suppress(ImportError, RuntimeError):  # without nvidia-ml-py
                found["system/gpu_percent"] = float(torch.cuda.utilization())
        return found
