"""Decodes a batch token by token and draws each token; a separate file, because the engine's settings are read
without torch and transformers.

Ended rows leave the batch. A token's noise is a hash of its position, and does not depend on the batch.
"""

import hashlib
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.generation.stopping_criteria import StopStringCriteria

from ..base.tensors import num_shared, pad_left
from ..data import Group, Prompt, Sampling
from ..policy.forward import SAVED, can_share_prompts, hidden_states, keeps_keys_and_values, output_logits
from ..policy.fused_llama import LeanDecoder, recognised
from ..policy.library import decoding_cache, given_cache, grouped_attention, one_thread
from ..policy.text import TextCodec, as_groups

LOOK_EVERY = 16  # tokens of a row between two looks at how many rows still run: each waits for a GPU
SMALL_STEP = 2**18  # numbers of all rows' hidden states, of which feed-forward parts have some four times as many
BLOCK = 256  # tokens of a vocabulary whose probabilities are summed first
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


@torch.inference_mode()
def sample_batch(
    policy: nn.Module,
    codec: TextCodec,
    end_ids: Sequence[int],
    prompts: Sequence[Prompt],
    sampling: Sampling,
    uniform: np.ndarray,
    note_tokens: Callable[[int], None] = lambda count: None,
    ended_rows: MutableMapping[str, list[int]] | None = None,
    names: Sequence[str] = (),
) -> list[Group]:
    """A group for each prompt, decoded as one batch; `uniform` has the noise of each row's tokens.

    Rows whose `names` are among `ended_rows` are taken from there, with log-probs of 0; others are added as they end.
    """
    device = next(policy.parameters()).device
    encoded = [codec.encode(prompt.text) for prompt in prompts]
    noise = torch.from_numpy(uniform).t().contiguous().to(device)
    limit, rows = noise.shape
    repeats = rows // len(prompts)
    tokens = torch.zeros(limit, rows, dtype=torch.int64, device=device)  # cut at each row's end below
    logprobs = torch.zeros(limit, rows, device=device)
    lengths = torch.full((rows,), limit, device=device)
    stopped = torch.zeros(rows, dtype=torch.bool, device=device)

    kind = LibraryDecoder if keeps_keys_and_values(policy) else RereadingDecoder
    kind = LeanDecoder if recognised(policy) else kind  # not under autocast
    decoder: Any = kind(policy, max(map(len, encoded)) + limit)
    start = decoder.begin(encoded) if kind is LibraryDecoder else 0
    prompt_tokens, mask = (x.to(device) for x in pad_left([ids[start:] for ids in encoded]))
    logits = decoder.prefill(prompt_tokens, mask).repeat_interleave(repeats, dim=0)
    decoder.expand(repeats)
    is_end = torch.zeros(logits.shape[-1], dtype=torch.bool, device=device)
    is_end[[token for token in end_ids if token < len(is_end)]] = True
    is_stopped: Any = StopStringCriteria(codec.tokenizer, list(sampling.stop)) if sampling.stop else None
    for row, ids in [(i, ended_rows[name]) for i, name in enumerate(names) if ended_rows and name in ended_rows]:
        tokens[: len(ids), row] = torch.tensor(ids, device=device)
        lengths[row], stopped[row] = len(ids), True
    active = _fill_holes(~stopped)  # row of each line of the decode batch
    running = torch.ones_like(active, dtype=torch.bool)  # lines not yet ended
    if len(active) < rows:
        decoder.select(active)
        logits = logits[active]
    look_every = LOOK_EVERY if device.type == "cuda" else 1

    for position in range(limit if len(active) else 0):
        chosen, logprob = _draw(logits, sampling, noise[position, active])
        tokens[position, active] = chosen
        logprobs[position, active] = logprob.float()
        ended = running & is_end[chosen]
        if is_stopped is not None:
            ended |= running & is_stopped(tokens[: position + 1, active].t(), None)
        lengths[active] = lengths[active].masked_fill(ended, position + 1)
        stopped[active] |= ended
        if ended_rows is not None:
            for row in map(int, active[ended]):
                ended_rows[names[row]] = tokens[: position + 1, row].tolist()
        running = running & ~ended
        if position + 1 == limit:
            break
        if (position + 1) % look_every == 0:
            num_running = int(running.sum())
            note_tokens(num_running * look_every)
            if num_running == 0:
                break
            if num_running <= 0.9375 * len(running):  # moves about as many lines as have ended
                keep = _fill_holes(running)
                decoder.select(keep)
                active, running, chosen = active[keep], running[keep], chosen[keep]
        logits = decoder.step(chosen)
    ends = lengths.tolist()
    ids = (row[:n] for row, n in zip(tokens.t().tolist(), ends, strict=True))
    nats = (row[:n] for row, n in zip(logprobs.t().tolist(), ends, strict=True))
    found = zip(ids, nats, stopped.tolist(), strict=True)
    return as_groups(prompts, encoded, found, codec)


class LibraryDecoder:
    """Decodes one batch with the model's own forward pass and cache, if `keeps_keys_and_values`."""

    def __init__(self, model: nn.Module, capacity: int):
        """`capacity` is the number of tokens, prompt and completion, that a row can have."""
        self.model, self.cache, self.padded = model, decoding_cache(model, capacity), False
        self.given = given_cache(model, self.cache)
        self.width = model.get_input_embeddings().weight.shape[1]  # pyright: ignore
        self.mask = torch.ones(0, 0, dtype=torch.bool, device=next(model.parameters()).device)

    def begin(self, prompts: Sequence[Sequence[int]]) -> int:
        """The number of first tokens that are now read once for all prompts, which share them; 0 if it saves little."""
        shared = min(num_shared(prompts), min(map(len, prompts)) - 1)
        if (len(prompts) - 1) * shared < SAVED or not can_share_prompts(self.model):
            return 0
        ids = torch.tensor([prompts[0][:shared]], device=self.mask.device)
        self._forward(ids, torch.arange(shared, device=ids.device)[None])
        self.cache.batch_repeat_interleave(len(prompts))  # pyright: ignore
        self.mask = self.mask.new_ones(len(prompts), shared)
        return shared

    def prefill(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[P, V] logits after the left-padded prompts, or what follows their beginning, [P, T] with a mask that is
        False for padding."""
        before, self.padded = self.mask.shape[1], not bool(mask.all())
        self.mask = torch.cat([mask.new_ones(len(mask), before), mask], dim=1)
        return self._forward(tokens, before + (mask.cumsum(-1) - 1).clamp(min=0))

    def expand(self, repeats: int) -> None:
        """Replace every row by that many copies."""
        self.cache.batch_repeat_interleave(repeats)  # pyright: ignore
        self.mask = self.mask.repeat_interleave(repeats, dim=0)

    def step(self, tokens: Tensor) -> Tensor:
        """[R, V] logits after one more token of every row."""
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(self.mask), 1)], dim=1)
        is_small = tokens.device.type == "cpu" and len(tokens) * self.width < SMALL_STEP
        with one_thread() if is_small else nullcontext():
            return self._forward(tokens[:, None], self.mask.sum(-1, keepdim=True) - 1)

    def select(self, lines: Tensor) -> None:
        """Keep these lines, as `_fill_holes` orders them."""
        self.cache.batch_select_indices(lines)
        self.mask = self.mask[lines]

    def _forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        with grouped_attention(self.model):
            output = self.model(
                input_ids=tokens,
                attention_mask=self.mask if self.padded else None,
                position_ids=positions,
                use_cache=True,
                logits_to_keep=1,
                **self.given,
            )
        return output.logits[:, -1].float()


class RereadingDecoder:
    """Decodes one batch of any model by reading every row again for each token, which is slow."""

    def __init__(self, model: nn.Module, capacity: int):
        """`capacity` is the number of tokens, prompt and completion, that a row can have."""
        self.model, self.capacity = model, capacity

    def prefill(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """[P, V] logits after the left-padded prompts, [P, T] with a mask that is False for padding."""
        self.lengths = mask.sum(-1)
        self.rows = tokens.new_zeros(len(tokens), self.capacity)  # right-padded, as the learner reads them
        self.rows[torch.arange(self.capacity, device=mask.device) < self.lengths[:, None]] = tokens[mask]
        return self._forward()

    def expand(self, repeats: int) -> None:
        """Replace every row by that many copies."""
        self.rows = self.rows.repeat_interleave(repeats, dim=0)
        self.lengths = self.lengths.repeat_interleave(repeats, dim=0)

    def step(self, tokens: Tensor) -> Tensor:
        """[R, V] logits after one more token of every row."""
        self.rows.scatter_(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        return self._forward()

    def select(self, lines: Tensor) -> None:
        """Keep these lines."""
        self.rows, self.lengths = self.rows[lines], self.lengths[lines]

    def _forward(self) -> Tensor:
        states = hidden_states(self.model, self.rows[:, : int(self.lengths.max())])
        last = states[torch.arange(len(states), device=states.device), self.lengths - 1]
        return output_logits(self.model, last).float()


def uniforms(seed: int, step: int, prompt_ids: list[str], group_size: int, num_positions: int) -> np.ndarray:
    """float64 in [0, 1), shape [P * G, num_positions], keyed by (seed, step, prompt id, sample, position).

    The mixing function is splitmix64 (Steele, Lea and Flood 2014).
    """
    hashes = (hashlib.sha256(name.encode()).digest()[:8] for name in prompt_ids)
    prompts = np.frombuffer(b"".join(hashes), dtype="<u8")
    with np.errstate(over="ignore"):
        run = _mix(_mix(np.uint64(seed) + _GAMMA) + np.uint64(step))
        rows = _mix(_mix(run + prompts)[:, None] + np.arange(group_size, dtype=np.uint64)).reshape(-1)
        bits = _mix(rows[:, None] + _GAMMA * np.arange(1, num_positions + 1, dtype=np.uint64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _draw(logits: Tensor, sampling: Sampling, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(token, log-prob) per line: the first token whose cumulative probability exceeds the line's uniform."""
    if sampling.temperature not in (0, 1):
        logits = logits / sampling.temperature
    logprobs = torch.log_softmax(logits, dim=-1)
    if sampling.temperature == 0:
        chosen = logits.argmax(-1)
    elif sampling.top_p == 1 and logits.shape[-1] > 4 * BLOCK:  # no copy in float64 of all that is there
        probabilities = logprobs.exp()
        blocks = F.pad(probabilities, (0, -logits.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
        block, inside = _inverted(blocks.sum(-1), noise)
        place, _ = _inverted(blocks[torch.arange(len(blocks), device=block.device), block], inside)
        chosen = (block * BLOCK + place).clamp(max=logits.shape[-1] - 1)
    else:
        probabilities = logprobs.exp().double()
        if sampling.top_p < 1:  # outside of the nucleus (Holtzman et al. 2020) it is 0
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            ordered[ordered.cumsum(-1) - ordered >= sampling.top_p] = 0  # keeps the token that crosses top_p
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, ordered)
        chosen, _ = _inverted(probabilities, noise)
    return chosen, logprobs.gather(-1, chosen[:, None])[:, 0]


def _inverted(weights: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """(place, rest) of each row of weights: the first place up to which their sum exceeds `noise` times the whole, and
    the share of that place's own weight at which it does."""
    cumulative = weights.double().cumsum(-1)
    wanted = noise[:, None] * cumulative[:, -1:]
    found = torch.searchsorted(cumulative, wanted, right=True).clamp(max=weights.shape[-1] - 1)
    own = weights.gather(-1, found).double()
    rest = (wanted - cumulative.gather(-1, found) + own) / own
    return found[:, 0], rest[:, 0].clamp(0, 1)


def _fill_holes(running: Tensor) -> Tensor:
    """The lines that still run: lines from the tail fill the places of ended ones, the others stay."""
    lines = running.nonzero()[:, 0]
    count = len(lines)
    keep = torch.arange(count, device=lines.device)
    keep[~running[:count]] = lines[lines >= count]
    return keep


def _mix(x: np.ndarray | np.uint64) -> np.ndarray:
    x = np.asarray(x, dtype=np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
