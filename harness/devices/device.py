"""Decides the device of a run, bfloat16 autocast on it, and how much of its memory is really in use."""

import torch


def resolve_device(device: str) -> torch.device:
    """The device of a run; ValueError if the spec asks for CUDA and there is none."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "device must be available, got 'cuda' on a machine without CUDA; use device=cpu or device=auto"
        )
    return torch.device(device)


def mixed_precision(device: torch.device, enabled: bool) -> torch.autocast:
    """A context in which matrix products run in bfloat16, if enabled."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled)


class Unmapped:
    """Bytes that torch's CUDA allocator counts although they are unmapped, and the peak of the bytes that are mapped.

    vLLM allocates through a memory pool of torch's allocator. When it sleeps it unmaps the memory of its tensors, but
    torch does not see that and still counts them.
    """

    def __init__(self) -> None:
        self.count = 0
        self._peak = 0  # until `count` last changed

    def peak(self) -> int:
        """Bytes at the peak since `reset_peak`."""
        return max(self._peak, torch.cuda.max_memory_allocated() - self.count)

    def reset_peak(self) -> None:
        self._peak = 0
        torch.cuda.reset_peak_memory_stats()

    def set(self, count: int) -> None:
        """Set the number of unmapped bytes."""
        if not torch.cuda.is_available():
            return
        self._peak = self.peak()
        torch.cuda.reset_peak_memory_stats()
        self.count = count


UNMAPPED = Unmapped()  # of this process
