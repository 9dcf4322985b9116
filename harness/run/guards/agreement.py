"""Checks before the first step that the engine's log-probs and the learner's agree, the learner's with every row read
whole and with shared prompts.

The reference is the model's own forward pass over each row alone, without padding, which includes whatever the model
does to its logits. A few tokens are enough, because a wrong scale, mask or position shows on almost every token.
"""

import logging
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ...data import Batch, InvalidRun, Prompt
from ...devices import ranks
from ...devices.device import mixed_precision, resolve_device
from ...policy.forward import can_share_prompts, recomputes
from ...policy.library import missing
from ..build import Run
from ..rollout import collate
from .sync import BOUNDS, precision

# Nats, in float32 between paths over the same weights, up to this many parameters. Rounding alone reached 7e-6 on small
# models of 52 architectures, 1.4e-5 with 16 layers and 53 million parameters, 5e-5 with 24 layers and 372 million.
BOUND, SMALL = 1e-4, 100_000_000
NUM_PROMPTS, NUM_SAMPLES, MAX_TOKENS = 4, 2, 16
NOISE = 2**32  # added to the step, so that no rollout of a run shares this noise

log = logging.getLogger(__name__)


@torch.no_grad()
def check_agreement(run: Run, prompts: Sequence[Prompt], step: int) -> dict[str, float]:
    """`mismatch/at_start`, the largest difference (nats) of the paths that stay in use; empty for a fake engine.
    InvalidRun if engine or learner differ by more than rounding; shared prompts that do are switched off."""
    spec, engine, learner, policy = run.spec, run.engine, run.learner, run.learner.policy
    if not engine.samples_policy:
        return {}
    own = "bfloat16" if spec.autocast else precision(policy)
    is_small = sum(parameter.numel() for parameter in policy.parameters()) <= SMALL
    bound = BOUND if own == "float32" and is_small else BOUNDS[own]
    sampling = spec.sampling.model_copy(update={"max_tokens": min(MAX_TOKENS, spec.max_tokens)})
    chosen = prompts[:: max(1, len(prompts) // NUM_PROMPTS)][:NUM_PROMPTS]
    device = resolve_device(spec.device)
    with mixed_precision(device, spec.autocast):
        draw = partial(engine.sample, group_size=NUM_SAMPLES, sampling=sampling, seed=spec.seed, step=NOISE + step)
        batch = collate(ranks.shared(chosen, draw, spec.engine.processes)).to(device)
        own_BT = own_logprobs(policy, batch, sampling.temperature)
    policy.train(recomputes(policy))  # as in an update
    shares, learner.shares_prompts = learner.shares_prompts, False
    read_BT = learner.logprobs(policy, batch)
    policy.train(False)
    learner.shares_prompts = shares
    shared_BT = learner.logprobs(policy, batch)

    name, other = spec.engine.name, "vllm" if spec.engine.name == "transformers" else "transformers"
    engine_bound = bound if engine.exact_logprobs else max(BOUNDS[own], BOUNDS[engine.precision or own])
    engine_off = (batch.sampler_logprobs_BT - own_BT).abs()
    _check(f"engine {name}", engine_off, batch, engine_bound, f"use engine={other} or another model")
    learner_off = (read_BT - own_BT).abs()
    _check("the learner", learner_off, batch, bound, "use another model")
    shared = float((shared_BT - own_BT).abs().max())
    learner.shares_prompts &= shared <= bound
    why = "" if can_share_prompts(policy) else f"a {policy.config.model_type} cannot share them"  # pyright: ignore
    why = why if shared <= bound else f"sharing them is {shared:.3g} nats off"
    if shares and why:
        log.warning("prompts are read anew for every completion, which is slower: %s", why)
    if lacking := missing():
        log.warning("transformers lacks %s, so this run may be slower; see docs/install.md", ", ".join(lacking))
    used = [float(engine_off.max()), float(learner_off.max()), *([shared] if learner.shares_prompts else [])]
    return {"mismatch/at_start": max(used)}


def own_logprobs(model: nn.Module, batch: Batch, temperature: float) -> Tensor:
    """[B, T] log-probs (nats) of completion tokens, 0 elsewhere, by the model's own pass over each row alone."""
    result_BT = torch.zeros_like(batch.sampler_logprobs_BT)
    for row, length in enumerate(batch.lengths_B.tolist()):
        tokens_1L, mask_L = batch.tokens_BT[row : row + 1, :length], batch.completion_mask_BT[row, :length]
        logits = model(input_ids=tokens_1L, use_cache=False).logits[0, :-1][mask_L[1:]].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), dim=-1)
        result_BT[row, :length][mask_L] = logprobs.gather(-1, tokens_1L[0, mask_L, None])[:, 0]
    return result_BT


def _check(who: str, off_BT: Tensor, batch: Batch, bound: float, fix: str) -> None:
    """InvalidRun if one of the differences (nats) is above the bound or NaN."""
    if not float(off_BT.max()) <= bound:
        row, column = divmod(int(off_BT.nan_to_num(torch.inf).argmax()), off_BT.shape[1])
        token = column - int(batch.completion_mask_BT[row].int().argmax())
        raise InvalidRun(
            f"{who} and the model's own forward pass differ by {float(off_BT.max()):.3g} nats (at most {bound:g}) "
            f"before the first step, on token {token} of completion {row}; {fix}"
        )
