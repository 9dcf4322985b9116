"""Trains the supervised warm start that all arms of a study share: cross-entropy on the completion tokens of worked
solutions.

The result is cached under a hash of everything that it depends on (content of model and data, task, settings, seed), as
a folder that transformers loads. A second process that needs the same one waits for the first. A torn or altered folder
is made again.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import nn

from cohort.harness.files import file_lock, publish_folder, read_manifest
from cohort.harness.inputs import digest, digested, expecting
from cohort.harness.policy.device import resolve_device
from cohort.harness.policy.forward import token_logprobs
from cohort.harness.policy.model import load_policy, save_model
from cohort.harness.policy.sources import model_sources
from cohort.harness.policy.text import TextCodec, load_codec
from cohort.harness.policy.tiny import CHARACTERS, TINY, tiny_config
from cohort.harness.spec.run import ColdStart, RunSpec
from cohort.harness.tensors import pad_right
from cohort.harness.types import Demonstration, Inputs, InvalidRun

FORMAT = 4  # part of the cache key: raise it when the training below changes
WAIT_SECONDS = 1.0
log = logging.getLogger(__name__)


def start_policy(
    spec: RunSpec, cache: Path, on_progress: Callable[[str, int, int], None] = lambda phase, done, total: None
) -> tuple[nn.Module, TextCodec]:
    """The policy (on the CPU, float32) and codec that the run starts from, warm-started if the spec says so.

    Warm starts are kept under `cache/cold-start`. `on_progress` is told whether this process trains one or waits for
    another process that does.
    """
    seed = spec.cold_start.seed
    codec = load_codec(spec.model, spec.prompt)
    name = start_name(spec, cache)
    if spec.cold_start.steps == 0:
        return load_policy(name, seed=seed), codec
    inputs, folder = _inputs(spec), Path(name)
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


@contextmanager
def _held(lock: FileLock, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; `on_wait` is called every second while another process holds it, and may raise."""
    while not lock.is_locked:
        try:
            lock.acquire(timeout=WAIT_SECONDS)
        except Timeout:
            on_wait()
    try:
        yield
    finally:
        lock.release()


def start_name(spec: RunSpec, cache: Path) -> str:
    """The name of the model that the run starts from: the spec's own, or the folder of its cold start."""
    return str(cache / "cold-start" / cold_start_key(spec)) if spec.cold_start.steps else spec.model


def cold_start_key(spec: RunSpec) -> str:
    """The cache key: a hash of model and data, their content included, the prompt and cold start settings, FORMAT."""
    return _key(spec, _inputs(spec))


def _key(spec: RunSpec, inputs: Inputs) -> str:
    model = [TINY, tiny_config().to_dict(), CHARACTERS] if spec.model == TINY else spec.model
    task, prompt = spec.task.model_dump(mode="json"), spec.prompt.model_dump()
    return digest([FORMAT, model, task, prompt, spec.cold_start.model_dump(), inputs])


def _inputs(spec: RunSpec) -> Inputs:
    """The inputs of the cold start."""
    return digested({**model_sources(spec.model), **spec.task.inputs("train")})


def fit_demonstrations(
    policy: nn.Module,
    codec: TextCodec,
    demonstrations: Sequence[Demonstration],
    settings: ColdStart,
    *,
    device: torch.device,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    on_loss: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Train `policy` in place: mean cross-entropy over a batch's completion tokens, AdamW, gradient clipping at 1.

    Raises ValueError without demonstrations and InvalidRun on a non-finite loss.
    """
    if not demonstrations:
        raise ValueError("cold_start.steps must be 0 for a task without worked solutions")
    policy.to(device)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0, fused=True)
    for step, batch in enumerate(_batches(demonstrations, settings)):
        rows = [([*codec.encode(d.prompt)], codec.encode_completion(d.completion)) for d in batch]
        rows.sort(key=lambda row: len(row[0]) + len(row[1]))
        num_tokens = sum(len(completion) for _, completion in rows)
        optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):  # short rows are not padded to the longest
            if not half:
                continue
            tokens = pad_right([p + c for p, c in half], torch.int64).to(device)
            mask = pad_right([[0] * len(p) + [1] * len(c) for p, c in half], torch.bool).to(device)
            part = -token_logprobs(policy, tokens, mask, 1.0)[0].sum() / num_tokens
            part.backward()
            loss += float(part.detach())
        if not np.isfinite(loss):
            raise InvalidRun(f"the cold start's loss is {loss} at step {step}; lower cold_start.learning_rate")
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        on_loss(step + 1, loss)
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
