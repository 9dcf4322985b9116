"""Decides how learning rate and KL weight change over a run: functions of the step, and the adaptive KL weight, which
alone needs state in a checkpoint."""

import math

from ..settings.run import KLControl, Optimizer

MAX_ERROR = 0.2  # of the adaptive controller, relative to its target
GAIN = 0.1
HOLD, END = 0.1, 0.8  # of the steps: between them a cosine takes the KL weight to 0


def learning_rate_factor(settings: Optimizer, step: int, num_steps: int) -> float:
    """The factor of the learning rate in training step `step` (from 0) of `num_steps`: it rises linearly over the
    `warmup_steps` (the last has the full rate), then stays, or falls linearly or as half a cosine to 0 after the last.
    """
    if step < settings.warmup_steps:
        return (step + 1) / settings.warmup_steps
    progress = (step - settings.warmup_steps) / max(1, num_steps - settings.warmup_steps)
    if settings.schedule == "linear":
        return 1 - progress
    return 0.5 * (1 + math.cos(math.pi * progress)) if settings.schedule == "cosine" else 1.0


def kl_beta_factor(step: int, num_steps: int) -> float:
    """The cosine factor of the KL weight: 1 for the first tenth of the steps, then half a cosine down to 0 at 80 %."""
    progress = (step / num_steps - HOLD) / (END - HOLD)
    return 0.5 * (1 + math.cos(math.pi * min(max(progress, 0.0), 1.0)))


def adapted_kl_beta(settings: KLControl, beta: float, kl: float) -> float:
    """The KL weight after a step whose policy was `kl` nats per token from the reference.

    The proportional controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2): the weight grows by 0.1 times
    the relative error to the target, clipped to +-0.2.
    """
    assert settings.target is not None
    error = min(max(kl / settings.target - 1, -MAX_ERROR), MAX_ERROR)
    return beta * (1 + GAIN * error)
