"""The claims of the run-book (`cohort gpu`): the limit of time and the bounds of each, and their reason."""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import torch

from ... import plugins
from ...checks.memory import estimate_run, peak_bytes
from ...data import Prompt
from ...devices.device import GIB, mixed_precision
from ...devices.sharding import copied
from ...policy.lora import adapter_weights
from ...policy.model import empty_model, model_config, saved_weights
from ...record.events import RunHistory
from ...run.checkpoint import Snapshot, save_checkpoint
from ...run.guards.agreement import own_logprobs
from ...run.guards.sync import BOUNDS, precision, spot_check
from ...run.learner import Learner
from ...run.rollout import collate
from ...settings.run import RunSpec
from .backend import Backend
from .raising import WORDS

CLOCKS = ("seconds/", "throughput/", "memory/", "system/")  # metrics that no two runs share
LIBRARIES = GIB / 4  # of a process without a GPU, that a run loads
SMALL = 1e-3
LORA = {"lora": {"rank": 16}}


class Skipped(Exception):
    """The claim says nothing about this machine, for this reason."""


@dataclass(frozen=True)
class Number:
    """One value that a claim's check found. It holds if it is text, or finite and within its bounds."""

    name: str
    value: float | str
    unit: str = ""
    least: float = -math.inf
    most: float = math.inf

    @property
    def holds(self) -> bool:
        return isinstance(self.value, str) or (math.isfinite(self.value) and self.least <= self.value <= self.most)

    def __str__(self) -> str:
        value = f"{self.value:.4g}" if isinstance(self.value, float) else str(self.value)
        bounds = {"at least": self.least, "at most": self.most}
        told = ", ".join(f"{words} {bound:.3g}" for words, bound in bounds.items() if math.isfinite(bound))
        return " ".join(filter(None, [self.name, value, self.unit, f"({told})" if told else ""]))


NEEDS: Mapping[str, tuple[Callable[[Backend], bool], str]] = {
    "vllm": (lambda backend: backend.engine == "vllm", "vLLM is not installed: pip install 'cohort-rl[vllm]'"),
    "gpu": (lambda backend: backend.on_gpu, "no GPU here"),
    "two": (lambda backend: backend.num_devices >= 2, "one device alone here"),
}


@dataclass(frozen=True)
class GPUClaim:
    """`check` measures it, in a process of its own that has `limit` seconds, on a machine that meets its `needs`; `why`
    gives the reason of its bounds."""

    name: str
    says: str
    limit: float
    why: str
    check: Callable[[Backend], list[Number]]
    needs: Sequence[str] = ()

    def lacks(self, backend: Backend) -> str:
        """What the claim needs and this machine lacks, in words; empty if it has all."""
        return next((words for has, words in map(NEEDS.__getitem__, self.needs) if not has(backend)), "")


def machine(backend: Backend) -> list[Number]:
    found = backend.checks()
    if bad := [f"{one.name}: {one.value}; {one.advice}" for one in found if one.state != "ok"]:
        raise RuntimeError("\n".join(bad))
    return [Number(one.name, one.value) for one in found]


def free_memory(backend: Backend) -> list[Number]:
    needed, reason = estimate_run(backend.spec(**{"algorithm.name": "ppo", "gradient_checkpointing": False}))
    if needed is None:
        raise Skipped(f"the model cannot be counted: {reason}")
    return [Number("free", backend.free_bytes() / GIB, "GiB", least=peak_bytes(needed) / GIB)]


def starts(backend: Backend, seconds: float) -> list[Number]:
    """vLLM starts within so many seconds."""
    spec = backend.spec()
    policy, codec = backend.policy(spec)
    parts, _ = estimate_run(spec)
    begin, before = backend.now(), backend.held_bytes()
    engine: Any = backend.start(spec, policy, codec)
    seconds_taken, taken = backend.now() - begin, backend.held_bytes() - before
    runner, cache = backend.cache_of(engine)
    found = [Number("start", seconds_taken, "s", most=seconds), Number("runner", runner)]
    found += [Number("cache", cache / GIB, "GiB"), Number("taken", taken / GIB, "GiB")]
    if parts is not None and backend.on_gpu:
        found.append(Number("taken / estimate", taken / (parts["kv_cache"] + parts["engine"]), least=0.5, most=1.1))
    return found


def agrees(backend: Backend, size: int | None = None, **settings: Any) -> list[Number]:
    """The engine's log-probs agree with the model's own forward pass, with these settings; a `size` stands for two
    prompts with so many completions of `long_tokens`."""
    spec, found = backend.spec(**settings, **({"sampling.max_tokens": backend.long_tokens} if size else {})), []
    engine, policy, prompts = _engine(backend, spec)
    each, bound = size or spec.algorithm.group_size, _bound(spec, engine, policy)
    chosen, wanted = prompts[: max(1, backend.num_rows // each)], backend.num_tokens
    if size:  # random weights end next to no row
        chosen, wanted = prompts[:2], int(1.5 * size * backend.long_tokens)
    for step in count():
        found += _off(backend, spec, engine, policy, chosen, each, step)
        if len(found) >= wanted or size:
            break
    return [
        Number("mean", float(np.mean(found)), "nats", most=bound / 10),
        Number("99.9 %", float(np.quantile(found, 0.999)), "nats", most=bound / 2),
        Number("largest", float(np.max(found)), "nats", most=bound),
        Number("tokens", len(found), least=wanted),
    ]


def _bound(spec: RunSpec, engine: Any, policy: Any) -> float:
    own = "bfloat16" if spec.autocast else precision(policy)
    return max(BOUNDS[own], BOUNDS[engine.precision or own])


@torch.no_grad()
def _off(
    backend: Backend, spec: RunSpec, engine: Any, policy: Any, prompts: Sequence[Prompt], size: int, step: int
) -> list[float]:
    """How far the engine's log-probs of tokens that it samples are from the policy's own (nats)."""
    with mixed_precision(backend.device, spec.autocast):
        groups = engine.generate(prompts, size, spec.sampling_with_limit(), seed=0, step=step)
        batch = collate(groups).to(backend.device)
        off = (batch.sampler_logprobs_BT - own_logprobs(policy, batch, 1.0)).abs()
    return off[batch.completion_mask_BT].tolist()


def batches(backend: Backend, least: float = 0.5, **settings: Any) -> list[Number]:
    spec = backend.spec(**settings)
    engine, _, prompts = _engine(backend, spec)
    prompts = prompts[: backend.num_rows]
    draw = partial(engine.generate, group_size=1, sampling=spec.sampling_with_limit(), seed=0, step=0)
    with mixed_precision(backend.device, spec.autocast):
        many = draw(prompts)
        alone = [draw([prompt])[0] for prompt in prompts[:16]]
    rows = [[group.rollouts[0].token_ids for group in groups] for groups in (alone, many[:16])]
    return [Number("equal tokens", _equal(*rows), least=least), Number("batches of 1 and", len(prompts))]


invariant = partial(batches, least=1.0, **{"engine.batch_invariant": True})


def reloads(backend: Backend) -> list[Number]:
    spec, returned, seconds, off, found = backend.spec(), [], [], [], 0
    policy, codec = backend.policy(spec)
    before = backend.held_bytes()
    engine: Any = backend.start(spec, policy, codec)
    if not engine.verifies_weights:
        why = "shares the learner's weights" if backend.engine != "vllm" else "packs its weights, on this machine"
        raise Skipped(f"the engine {why}: there is nothing to compare")
    held = awake = backend.held_bytes()
    for cycle in range(backend.num_cycles):
        with torch.no_grad():
            for parameter in policy.parameters():  # so far that old weights show in what is sampled
                parameter += 0.3 * parameter.std() * torch.randn_like(parameter)
        engine.sleep()
        returned.append((awake - backend.held_bytes()) / max(1, held - before))
        begin = backend.now()
        engine.load_weights(policy.state_dict(), cycle + 1)  # InvalidRun if one of them does not arrive
        seconds.append(backend.now() - begin)
        off.append(np.mean(_off(backend, spec, engine, policy, spec.task.prompts("train")[:4], 1, cycle)))
        awake = backend.held_bytes()
        found += backend.is_change_found(engine, cycle)
    return [
        Number("exact loads", len(seconds), f"of {backend.num_cycles}"),
        Number("changes found", found, f"of {backend.num_cycles}", least=backend.num_cycles),
        Number("samples after a load", float(max(off)), "nats", most=_bound(spec, engine, policy) / 10),
        Number("memory returned", min(returned), least=0.7 if backend.on_gpu else -math.inf),
        Number("memory lost", (awake - held) / GIB, "GiB", most=0.25),
        Number("a load", float(np.median(seconds)), "s", most=10),
    ]


def peaks(name: str, settings: Mapping[str, Any], backend: Backend) -> list[Number]:
    """A run with these settings needs the memory that was estimated for it."""
    told = backend.train(name, backend.settings(**settings)).latest()
    parts, reason = estimate_run(backend.spec(**settings))
    if parts is None:
        raise Skipped(f"the model cannot be counted: {reason}")
    estimate = peak_bytes(parts)
    peak = told["memory/peak_bytes"] - (told["memory/estimate_bytes"] - estimate)  # less what was there before
    most = 1.1 if backend.on_gpu else 1.6 + LIBRARIES / estimate
    return [
        Number("estimate", estimate / GIB, "GiB"),
        Number("peak", peak / GIB, "GiB"),
        Number("peak / estimate", peak / estimate, least=0.8 if backend.on_gpu else 0.5, most=most),
    ]


def phases(backend: Backend) -> list[Number]:
    spec, run = backend.spec(gradient_checkpointing=False), backend.settings(gradient_checkpointing=False)
    history = backend.train("grpo", run).history
    if "flops/learning" not in history:
        raise Skipped("the operations of the model cannot be counted")
    dtype = torch.bfloat16 if spec.autocast else torch.float32
    operations, copied = backend.rates(dtype)

    def last(name: str) -> float:
        return history[name][spec.steps][0] if name in history else 0.0

    def worked(name: str) -> float:
        """Seconds of the operations of the last step, at the rate of a product."""
        return (last(f"flops/{name}") - history[f"flops/{name}"][spec.steps - 1][0]) / operations

    weights = dtype.itemsize * sum(p.numel() for p in empty_model(model_config(spec.model)).parameters())
    ideal = {
        "generate": worked("sampling") + spec.max_tokens * weights / copied,  # each token reads all weights
        "annotate": worked("scoring"), "grade": 0.0, "update": worked("learning"), "sync": 2 * weights / copied,
    }  # fmt: skip
    found = [Number(f"{phase} (arithmetic {ideal[phase]:.2g})", last(f"seconds/{phase}"), "s") for phase in ideal]
    return [
        *found,
        Number("product", operations / 1e12, "TFLOP/s"),
        Number("copy", copied / 1e9, "GB/s"),
        Number("update / arithmetic", last("seconds/update") / ideal["update"], most=10),
        Number("grading's share", last("seconds/grade") / last("seconds/step"), most=0.1),
    ]


def algorithms(backend: Backend) -> list[Number]:
    """The first two steps of each algorithm that learns from rewards, in float32 on the GPU and on the CPU."""
    shared = {"model": "tiny", "engine": {"name": "transformers"}, "steps": 2, "rollouts_per_step": 32}
    values, off = ("policy/loss", "policy/grad_norm", "policy/entropy"), dict[str, float]()
    for name in plugins.names("algorithm"):
        algorithm: Any = plugins.load("algorithm", name)
        if not algorithm.learns_from_rewards:
            continue
        own = {"algorithm": {"name": name, "group_size": 4}, "autocast": False, "sampling.max_tokens": 12}
        gpu, cpu = (
            backend.train_here(f"{name}-{where}", backend.settings(**shared | own, device=device)).history
            for where, device in (("gpu", backend.device.type), ("cpu", "cpu"))
        )
        off[name] = max(_relative(gpu[value][step][0], cpu[value][step][0]) for value in values for step in (1, 2))
    worst = max(off, key=lambda name: off[name])
    return [Number("algorithms", len(off)), Number(f"furthest from the CPU's ({worst})", off[worst], most=SMALL)]


def adapter_moves(backend: Backend) -> list[Number]:
    spec = backend.spec(**LORA)
    engine, policy, prompts = _engine(backend, spec)
    with mixed_precision(backend.device, spec.autocast):
        groups = engine.generate(prompts[:4], 1, spec.sampling_with_limit(), seed=0, step=0)
    before = spot_check(engine, policy, groups)
    if before is None:
        raise Skipped("the engine shares the learner's weights, adapters too")
    noise = torch.Generator().manual_seed(0)
    for name, weight in adapter_weights(policy).items():
        if ".lora_B." in name:
            weight.copy_(0.02 * torch.randn(weight.shape, generator=noise))
    engine.load_weights(policy.state_dict(), 1)
    after = spot_check(engine, policy, groups)
    assert after is not None
    ours, theirs = after.learner - before.learner, after.engine - before.engine
    return [
        Number("engine's move / learner's", float(theirs @ ours / (ours @ ours)), least=0.8, most=1.25),
        Number("learner's move", float(np.sqrt(np.mean(ours**2))), "nats a token"),
    ]


def resumes(backend: Backend) -> list[Number]:
    own = {**APART, "autocast": False, "checkpoints.every": 2}  # rounding flips next to no token
    run = backend.settings(steps=4, **own)
    whole = backend.train("whole", run)
    again = _difference(whole, backend.train("again", run))
    backend.train("killed", run, kill_after=3)
    resumed = backend.train("killed", run)
    return [
        Number("attempts", len(resumed.attempts), least=2),
        Number("two whole runs differ by", again, most=0.05),
        Number("the resumed run differs by", _difference(whole, resumed), most=max(10 * again, SMALL)),
    ]


def checkpoints(backend: Backend) -> list[Number]:
    spec = backend.spec()
    policy, codec = backend.policy(spec)
    learner, begin = Learner(spec, policy), backend.now()
    weights, state = copied([saved_weights(policy), learner.state()])
    first = backend.now() - begin
    del weights, state
    begin = backend.now()
    weights, state = copied([saved_weights(policy), learner.state()])  # into the memory of the first
    made = backend.now()
    save_checkpoint(backend.folder / "written", Snapshot(1, policy, codec.tokenizer, state, {}, weights), keep=1)
    seconds = backend.now() - made
    gib = sum(file.stat().st_size for file in (backend.folder / "written").rglob("*.*")) / GIB
    return [
        Number("size", gib, "GiB"),
        Number("seconds per GiB", seconds / gib),
        Number("writing", seconds, "s", most=1 + 5 * gib),
        Number("copying", first, "s", most=1 + gib),
        Number("copying again", made - begin, "s", most=0.1 + gib / 4 if backend.on_gpu else 1 + gib),
    ]


def waits(backend: Backend) -> list[Number]:
    """A run that writes a checkpoint after each step, against one that writes none."""
    runs = (backend.train(f"every-{n}", backend.settings(steps=4, **{"checkpoints.every": n})) for n in (100, 1))
    plain, saving = (history.latest()["seconds/total"] / 4 for history in runs)
    return [Number("a step", plain, "s"), Number("a checkpoint adds", saving - plain, "s", most=1 + plain)]


def together(backend: Backend) -> list[Number]:
    """Two runs that share the device end as one does alone."""
    run = backend.settings(**APART, autocast=False, steps=2)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda name: backend.train(name, run), ("one", "other")))
    off = max(_difference(backend.train("alone", run), one) for one in both)
    return [Number("runs differ by", off, most=0.05), Number("a step", both[0].latest()["seconds/step"], "s")]


def shares(backend: Backend) -> list[Number]:
    """A step where vLLM sleeps while the learner works, where both stay, and where two runs share the GPU, whose vLLMs
    sleep, as those of two workers do."""

    def pace(name: str, sleep: bool = True) -> float:
        return backend.train(name, backend.settings(steps=4, **{"engine.sleep": sleep})).latest()["seconds/step"]

    asleep, awake = pace("asleep"), pace("awake", False)
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(pace, ("one-of-two", "other-of-two")))
    return [
        Number("a step, vLLM asleep meanwhile", asleep, "s"),
        Number("awake / asleep", awake / asleep, most=1.05),
        Number("steps of two / of one", 2 * asleep / max(both), least=1.1),
    ]


def raises(backend: Backend) -> list[Number]:
    """An error of either of two processes ends both, and its reason is told."""
    run = backend.settings(devices=2, steps=1, **APART, autocast=False)
    found = [backend.fail_one(run, rank) for rank in (0, 1)]
    ends = [Number(f"both ended after rank {i} raised", seconds, "s", most=180) for i, (seconds, _) in enumerate(found)]
    return [*ends, Number("the reason is told", min(said.count(WORDS) for _, said in found), least=1)]


def real_model(backend: Backend) -> list[Number]:
    """The real chat model learns sums as it does on a CPU."""
    run = backend.real_settings(autocast=backend.on_gpu)
    if run is None:
        raise Skipped("models/smollm2 is not here: `make smollm2` in a checkout makes it")
    history = backend.train("real", run).history
    accuracy, last, off = history["validation/accuracy"], history["seconds/step"], history["mismatch/kl"]
    if backend.engine == "vllm":  # which takes no stop texts
        off = backend.train("real-vllm", run | {"engine": "vllm", "steps": 2, "sampling": {"max_tokens": 12}})
        off = off.history["mismatch/kl"]
    seconds = sorted(name for name in history if name.startswith("seconds/"))
    return [
        Number("accuracy before", accuracy[0][0], least=0.1, most=0.4),
        Number("after ten steps", accuracy[max(accuracy)][0], least=0.4),
        Number("mismatch/kl", max(value for value, _ in off.values()), "nats", most=0.05),
        *(Number(name, history[name][max(last)][0], "s") for name in seconds),
    ]


def two_devices(backend: Backend) -> list[Number]:
    own = {"engine": {"name": "transformers"}, "autocast": False, "steps": 2}
    one, two = (backend.train(f"devices-{n}", backend.settings(devices=n, **own)) for n in (1, 2))
    first = [[h.history[name][1][0] for name in ("policy/grad_norm", "policy/entropy")] for h in (one, two)]
    off = max(map(_relative, *first))
    paces = [history.latest()["seconds/step"] for history in (one, two)]
    return [
        Number("first step differs by", off, most=1e-3),
        Number("a step with one", paces[0], "s"),
        Number("with two", paces[1], "s"),
    ]


def splits(backend: Backend) -> list[Number]:
    own = {"devices": 2, "engine.tensor_parallel_size": 2, "steps": 2}
    found = backend.train("tensor-parallel", backend.settings(**own)).latest()["mismatch/at_start"]
    own_dtype = "bfloat16" if backend.on_gpu else "float32"
    return [Number("engine and forward pass differ by", found, "nats", most=BOUNDS[own_dtype])]


def _engine(backend: Backend, spec: RunSpec) -> tuple[Any, Any, Sequence[Prompt]]:
    """The engine, which ends with this process, the policy and the prompts of a run."""
    policy, codec = backend.policy(spec)
    return backend.start(spec, policy, codec), policy, spec.task.prompts("train")


def _equal(ones: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> float:
    """The share of places of the longer row that hold the same, over all pairs of rows."""
    pairs = list(zip(ones, others, strict=True))
    same = sum(a == b for one, other in pairs for a, b in zip(one, other, strict=False))
    return same / max(1, sum(max(len(one), len(other)) for one, other in pairs))


def _relative(one: float, other: float) -> float:
    """Their difference relative to the larger one, or to SMALL, below which a value may be all rounding."""
    is_same = one == other or (one != one and other != other)
    return 0.0 if is_same else abs(one - other) / max(abs(one), abs(other), SMALL)


def _difference(one: RunHistory, other: RunHistory) -> float:
    """The largest relative difference of a value that both runs logged; infinite if one lacks a value."""

    def values(run: RunHistory) -> Mapping[tuple[str, int], float]:
        metrics = {name: steps for name, steps in run.history.items() if not name.startswith(CLOCKS)}
        return {(name, step): value for name, steps in metrics.items() for step, (value, _) in steps.items()}

    ours, theirs = values(one), values(other)
    if ours.keys() != theirs.keys():
        return np.inf
    return max((_relative(ours[key], theirs[key]) for key in ours), default=0.0)


SECONDS = "below a tenth of a product's rate the device waits for something else; grading has a thread"
MERGED = "an adapter that is merged into bfloat16 weights loses its small updates"
ROUNDED = "float32 sums in another order; 24 algorithms differed by at most 2.3e-5 on an H200"
REPEATS = "equal settings give equal results; kernels that add in any order leave ten times their difference"
REAL = "on a CPU four seeds went from 25 to 48 to 88 % of 64 sums (docs/results.md), which count to 5 % each"
TELLS = "an error that one process alone knows leaves the others to wait half an hour; loading takes most of it here"
COPIES = "a disk of 200 MB/s; a copy of 1 GB/s, and of 4 from a GPU into memory that is pinned already"
WAITS = "a thread copies and writes while the run samples; a checkpoint must not cost more than the step before it"
SHARES = "a wake and a sleep cost seconds; a model of 0.5B leaves most of a GPU idle, and 1.6 is the aim"
APART = {"engine": {"name": "transformers"}}  # vLLM's share of a GPU would hide what activations take
RECOMPUTED, KEPT = {"gradient_checkpointing": True, **APART}, {"gradient_checkpointing": False, **APART}
FITS = "an estimate below the peak lets a run in that ends out of memory; one of twice the peak refuses runs that fit"
STARTS = "each worker of a study starts its engine once, from graphs that an earlier start compiled"
AGREES = "the bounds of a run's own checks (run/guards/sync.py); a tenth of them for the mean, half for 99.9 %"
NOISE = "other noise would leave next to no token equal; one that rounding flips changes the rest of its row"
SLEEP = "one stale tensor spoils a run; the weights and the cache sleep, which are most of vLLM's memory"
PPO = {"algorithm.name": "ppo"}
PEAKS: Mapping[str, Mapping[str, Any]] = {
    "grpo-memory": KEPT, "grpo-memory-recomputed": RECOMPUTED, "ppo-memory": KEPT | PPO,
    "ppo-memory-recomputed": RECOMPUTED | PPO, "lora-memory": KEPT | LORA,
}  # fmt: skip
# In the order of their value: a call of a few minutes gets the first. The first that starts vLLM starts it cold.
CLAIMS: Sequence[GPUClaim] = (
    GPUClaim("machine", "what `cohort doctor` checks is there", 120, "without it some runs end", machine),
    GPUClaim("free-memory", "the largest run of this list fits", 120, "its estimate", free_memory),
    GPUClaim("cold-start", "vLLM starts with empty caches", 420, STARTS, partial(starts, seconds=300), ["vllm"]),
    GPUClaim("real-model", "a real chat model learns as on a CPU", 420, REAL, real_model, ["gpu"]),
    GPUClaim("sleep", "weights arrive exactly, memory comes back", 240, SLEEP, reloads),
    GPUClaim("bfloat16", "engine and forward pass agree", 240, AGREES, partial(agrees, autocast=True)),
    GPUClaim("lora-move", "the engine moves as far as the learner", 240, MERGED, adapter_moves),
    *(
        GPUClaim(name, "the estimate is near the peak", 180, FITS, partial(peaks, name, own))
        for name, own in PEAKS.items()
    ),
    GPUClaim("seconds", "a step is as long as its products", 180, SECONDS, phases),
    GPUClaim("algorithms", "each learns on the GPU as on the CPU", 240, ROUNDED, algorithms, ["gpu"]),
    GPUClaim("resume", "a killed run ends as a whole one", 420, REPEATS, resumes),
    GPUClaim("together", "two runs share the device", 240, REPEATS, together),
    GPUClaim("batches", "a row is the same in any batch, but for rounding", 180, NOISE, batches),
    GPUClaim("share", "vLLM and learner, and two runs, share a GPU", 420, SHARES, shares, ["vllm", "gpu"]),
    GPUClaim("checkpoint", "weights are written quickly", 120, COPIES, checkpoints),
    GPUClaim("wait", "checkpoints cost a run little", 240, WAITS, waits),
    GPUClaim("long", "engine and forward pass agree after 8,192 tokens", 300, AGREES, partial(agrees, size=1), ["gpu"]),
    GPUClaim("float32", "engine and forward pass agree", 240, AGREES, partial(agrees, autocast=False)),
    GPUClaim("warm-start", "vLLM starts again", 240, STARTS, partial(starts, seconds=120), ["vllm"]),
    GPUClaim("batch-invariant", "a row is the same in any batch", 240, "a promise", invariant, ["vllm", "gpu"]),
    GPUClaim("rank-raises", "an error of one process ends both and is told", 400, TELLS, raises, ["two"]),
    GPUClaim("two-devices", "two learn what one learns", 300, "float32 sums in another order", two_devices, ["two"]),
    GPUClaim("tensor-parallel", "an engine over two devices agrees", 300, AGREES, splits, ["vllm", "two"]),
)
