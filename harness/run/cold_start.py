"""Trains the supervised warm start that all arms of a study share: cross-entropy on the completion tokens of worked
solutions.

It is cached under a hash of all that it depends on (content of model and data, task, settings, seed), as a folder that
transformers loads. A second process that needs it waits for the first; a torn or altered folder is made again.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

from ..base.files import file_lock, publish_folder, read_manifest
from ..base.inputs import expecting
from ..base.tensors import pad_right
from ..data import Demonstration, InvalidRun
from ..devices.device import resolve_device
from ..policy.forward import token_logprobs
from ..policy.model import load_policy, save_model
from ..policy.sources import start_inputs, start_name
from ..policy.text import TextCodec, codec_of
from ..settings.run import ColdStart, RunSpec

log = logging.getLogger(__name__)


def start_policy(
    spec: RunSpec, cache: Path, on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None
) -> tuple[nn.Module, TextCodec]:
    """The policy (on the CPU, float32) and codec that the run starts from, warm-started if the spec says so. Warm
    starts are kept under `cache/cold-start`; `on_progress` is told whether this process trains or waits for one."""
    seed, name = spec.cold_start.seed, start_name(spec, cache)
    codec = codec_of(spec)
    if spec.cold_start.steps == 0:
        return load_policy(name, seed=seed), codec
    inputs, folder = start_inputs(spec), Path(name)
    lock = file_lock(folder.with_name(f"{folder.name}.lock"))
    with expecting(inputs), _held(lock, lambda: on_progress("waiting for the shared cold start", 0, 0)):
        if read_manifest(folder) is None:
            if folder.exists():
                log.warning("the cold start in '%s' is torn or altered, so it is made again", folder)
            policy = load_policy(spec.model, seed=seed)
            demonstrations, device = list(spec.task.demonstrations()), resolve_device(spec.device)
            fit_demonstrations(
                policy, codec, demonstrations, spec.cold_start, device=device,
                on_progress=lambda done, total: on_progress("cold start", done, total),
            )  # fmt: skip
            with publish_folder(folder) as partial:
                save_model(partial, policy.cpu(), codec.tokenizer)
    return load_policy(name, seed=seed), codec


def _held(lock: FileLock, on_wait: Callable[[], None]) -> AbstractContextManager[object]:
    """Holds a lock until it is left; `on_wait` is called every second while another process holds it, and may raise."""
    while True:
        try:
            return lock.acquire(timeout=1.0)
        except Timeout:
            on_wait()


def fit_demonstrations(
    policy: nn.Module,
    codec: TextCodec,
    demonstrations: Sequence[Demonstration],
    settings: ColdStart,
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Train `policy` in place: mean cross-entropy over a batch's completion tokens, AdamW, gradient clipping at 1.
    ValueError without demonstrations, InvalidRun on a non-finite loss."""
    if not demonstrations:
        raise ValueError("cold_start.steps must be 0 for a task without worked solutions")
    policy.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    for step, batch in enumerate(_batches(demonstrations, settings)):
        rows = [([*codec.encode(d.prompt)], codec.encode_completion(d.completion)) for d in batch]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        num_tokens = sum(len(completion) for _, completion in rows)
        optimizer.zero_grad()
        loss = 0.0
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):  # short rows are not padded to the longest
            if not half:
                continue
            tokens = pad_right([p + c for p, c in half], torch.int64).to(device)
            mask = pad_right([[False] * len(p) + [True] * len(c) for p, c in half], torch.bool).to(device)
            part = -token_logprobs(policy, tokens, mask, 1.0)[0].sum() / num_tokens
            part.backward()
            loss += float(part.detach())
        if not np.isfinite(loss):
            raise InvalidRun(f"the cold start's loss is {loss} at step {step}; lower cold_start.learning_rate")
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        on_progress(step + 1, settings.steps)


def _batches(demonstrations: Sequence[Demonstration], settings: ColdStart) -> Iterator[list[Demonstration]]:
    """`steps` batches; each pass over the data has a new order, which depends only on the seed."""
    random = np.random.default_rng(settings.seed)  # without a stream name: adding one would change every measured start
    order: list[int] = []
    for _ in range(settings.steps):
        while len(order) < settings.batch_size:
            order += random.permutation(len(demonstrations)).tolist()
        yield [demonstrations[i] for i in order[: settings.batch_size]]
        del order[: settings.batch_size]
