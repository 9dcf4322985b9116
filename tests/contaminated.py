"""Small models that were fine-tuned on problems of a test split, and clean ones, for the probes of contamination."""

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from cohort.harness.data import Demonstration
from cohort.harness.policy.text import TextCodec
from cohort.harness.run.cold_start import fit_demonstrations
from cohort.harness.run.contamination import knowledge
from cohort.harness.run.probe import scores
from cohort.harness.spec.run import ColdStart, RunSpec
from cohort.reports.contamination import Finding, judge
from torch import nn


def trained_on(
    texts: Sequence[str], start: nn.Module, codec: TextCodec, *, steps: int, rate: float = 3e-3, seed: int = 0
) -> nn.Module:
    """A copy of a model that has learned texts as pre-training does: every token of them."""
    policy = copy.deepcopy(start)
    rows = [Demonstration(text[:1], text[1:]) for text in texts]
    settings = ColdStart(steps=steps, batch_size=min(len(texts), 50), learning_rate=rate, seed=seed)
    fit_demonstrations(policy, codec, rows, settings, device=torch.device("cpu"))
    return policy.eval()


def findings(
    probed: Mapping[str, str], reference: Mapping[str, str], policy: nn.Module, codec: TextCodec, spec: RunSpec
) -> list[Finding]:
    """What the probe says of a policy."""
    known = knowledge({**probed, **reference}, policy, codec, spec)
    one, other = (scores([known[key] for key in side]) for side in (probed, reference))
    return judge(one, other, np.random.default_rng(0))
