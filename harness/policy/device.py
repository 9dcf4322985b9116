"""The device of a run, and bfloat16 autocast on it."""

import torch


def resolve_device(device: str) -> torch.device:
    """The device of a run; ValueError if CUDA is asked for and absent."""
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
