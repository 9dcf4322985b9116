"""Builds or resumes a run in progress: its models, costs and accuracies."""

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from .. import plugins
from ..base.files import sha256, sync, write_text
from ..base.inputs import Inputs
from ..checks.memory import decided, estimate_run, longest, peak_bytes, read_prompts
from ..data import Demonstration, Prompt, Split, TrialState
from ..devices import ranks
from ..devices.device import forget_peak_memory, peak_memory, reset_peak_memory, resident_bytes, resolve_device
from ..devices.sharding import assembled, copied
from ..interfaces import RolloutEngine
from ..policy import flops
from ..policy.forward import recomputes
from ..policy.lora import add_adapter, hold_scorer
from ..policy.model import load_policy, saved_weights
from ..policy.sources import Base, start_name
from ..policy.text import TextCodec, codec_of
from ..record.run import CHECKPOINTS, RunLog
from ..settings.run import RunSpec
from ..settings.stages import Stage
from .checkpoint import Snapshot, Writer, latest_checkpoint, save_checkpoint
from .cold_start import start_policy
from .guards.gates import GateState
from .guards.sync import SpotCheck
from .learner import Learner

DEMONSTRATIONS = 512  # sample size for the mean length


@dataclass(frozen=True)
class RunResult:
    """The end of a run: state, reason, and in `summary` the columns of results.csv that the run reached."""

    state: TrialState
    reason: str | None
    summary: dict[str, float]


@dataclass
class Totals:
    """Cumulative costs of a run, over all its resumes."""

    rollouts: int = 0
    generated_tokens: int = 0
    optimizer_steps: int = 0
    seconds: float = 0.0
    peak_memory_bytes: int = 0
    learner_peak_bytes: int = 0


@dataclass
class Run:
    """One run in progress: its models, its costs and its accuracies so far, over all its resumes.

    `spent` holds `flops_*`, and `core_seconds` or `gpu_seconds`.
    """

    spec: RunSpec
    engine: RolloutEngine
    learner: Learner
    log: RunLog
    directory: Path
    codec: TextCodec
    now: Callable[[], float] = time.perf_counter  # seconds, from an arbitrary zero
    memory_before: int = 0  # bytes in use before the models were loaded
    inputs: Inputs = field(default_factory=dict)  # the files it reads, which its checkpoints name
    base: Base | None = None  # seed of its adapter
    spot_check: SpotCheck | None = None  # of the engine's weights in the last step
    totals: Totals = field(default_factory=Totals)
    accuracies: dict[str, float] = field(default_factory=dict)
    gates: GateState = field(default_factory=GateState)
    spent: dict[str, float] = field(default_factory=dict)
    costs: flops.Costs | None = None  # None where operations are not counted
    answers: list[Demonstration] | None = None
    pass_rates: dict[str, float] = field(default_factory=dict)  # the history of its prompts, for its sampler
    kept: dict[str, list[list[int]]] = field(default_factory=dict)  # by prompt, the completions to replay
    writer: Writer = field(default_factory=Writer)  # of checkpoints
    cache: Path = Path()
    whole: RunSpec = None  # pyright: ignore  # by default its only stage's
    stage: Stage = None  # pyright: ignore

    def __post_init__(self) -> None:
        self.tokenizer = deepcopy(self.codec.tokenizer)  # to be saved while the other one encodes
        self.whole, self.stage = self.whole or self.spec, self.stage or Stage("", self.spec)
        self._count()

    def begin(self, stage: Stage) -> None:
        """Let a stage begin with the policy as it is: a new learner, whose reference is that policy, and new gates."""
        self.writer.check(wait=True)  # a checkpoint may still copy what the last learner has
        policy, shares_prompts = self.learner.policy, self.learner.shares_prompts
        del self.learner  # its moments and models are not needed beside the next ones
        origin = policy
        if ranks.world_size() > 1:  # a copy as `prepare` has it before it is sharded: the first process has the weights
            weights = assembled(copied(policy.state_dict(), on_first=True), self.writer.group)

            def first() -> nn.Module:
                model = placed(start_policy(self.whole, self.cache)[0], self.whole)
                model.load_state_dict(weights)
                return model

            origin = recomputing(ranks.from_first(first), recomputes(policy))
        self.stage, self.answers, self.gates = stage, None, GateState()
        self.learner = learner_of(stage, policy, self.directory, origin)
        self.learner.shares_prompts = shares_prompts
        self.spec = self.learner.spec
        self._count()

    def _count(self) -> None:
        """Note a completion's tokens, the operations of the models, and whether the engine's log-probs are exact."""
        does, self.costs, self.max_tokens = self.stage.does, None, self.spec.max_tokens
        with suppress(Exception):  # counting fails in many ways for an unusual model, which may still train well
            costs = flops.Costs.of(self.learner.policy)
            if self.spec.kl.reference is not None and self.learner.reference is not None:
                costs = replace(costs, reference=flops.Costs.of(self.learner.reference))
            for sampler in does.samplers.values() if does else ():
                costs = replace(costs, sampler=flops.Costs.named(sampler))
            scorers = [reward.scorer for reward in self.spec.rewards.values() if reward.scorer]
            self.costs = replace(costs, scorers=tuple(map(flops.Costs.named, scorers)))
        is_corrected = self.spec.staleness and self.spec.mismatch.correction != "none"  # from older weights
        self.learner.sampler_is_exact = self.engine.exact_logprobs and not is_corrected and does is None

    def save(self, step: int, *, is_last: bool = False, waits: bool = False) -> None:
        """Begin to write a checkpoint of training step `step`, from which any number of devices can continue; if it
        `is_last`, without optimisers. It is copied while the run samples, and `annotated` waits for the copies; a run
        that `waits` for the whole checkpoint needs no memory for them."""
        progress = {
            "totals": vars(self.totals),
            "accuracies": self.accuracies,
            "kl_beta": self.learner.kl_beta,
            "recomputes": recomputes(self.learner.policy),
            "gates": vars(self.gates),
            "ledger": self.spent,
            "pass_rates": self.pass_rates,
            "kept": self.kept,
            "num_events": self.log.sync(),  # must be on disk before the checkpoint that relies on them
        }
        facts = {"spec_digest": self.whole.digest(), "inputs": self.inputs, "progress": deepcopy(progress)}
        facts["is_last"] = is_last
        policy, directory, keep = self.learner.policy, self.directory / CHECKPOINTS, self.spec.checkpoints.keep
        weights, state = saved_weights(policy), self.learner.state(to_train=not is_last)
        group, on_first, base, tokenizer = self.writer.group, self.spec.lora is not None, self.base, self.tokenizer

        def write(copies: Any) -> None:
            own, learner = (assembled(copy, group) for copy in copies)
            save_checkpoint(directory, Snapshot(step, policy, tokenizer, learner, facts, own, base), keep, group)

        anew = not waits
        self.writer.begin(lambda: (copied(weights, on_first=on_first, anew=anew), copied(state, anew=anew)), write)
        if waits:
            self.writer.check(wait=True)

    def close(self) -> None:
        """Wait for the last checkpoint, unless a user ends the process at once, and end the engine."""
        try:
            if not isinstance(sys.exception(), KeyboardInterrupt):
                self.writer.check(wait=True)
        finally:
            self.engine.close()

    def rollouts(self, step: int) -> Path:
        """The file of a step's rollouts, one a line."""
        return self.directory / f"rollouts/step-{step:06d}.jsonl"

    def keep(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a step's rollouts to their file, and log its hash."""
        file = self.rollouts(step)
        file.parent.mkdir(exist_ok=True)
        write_text(file, "".join(f"{json.dumps(row)}\n" for row in rows))
        sync(file.parent)  # on disk before the event with its hash
        self.log.kept(step, file.relative_to(self.directory).as_posix(), sha256(file))

    def note_peak(self) -> int:
        """Bytes at the peak since the last call, or since the run began."""
        peak = peak_memory()
        self.totals.peak_memory_bytes = max(self.totals.peak_memory_bytes, peak)
        forget_peak_memory()
        return peak

    def charge(self, seconds: float) -> None:
        """Add time of the run, on all its devices."""
        self.totals.seconds += seconds
        on_gpu = resolve_device(self.spec.device).type == "cuda"
        units = self.spec.devices * (1 if on_gpu else torch.get_num_threads())
        unit = "gpu_seconds" if on_gpu else "core_seconds"
        self.spent[unit] = self.spent.get(unit, 0.0) + units * seconds

    def charge_flops(self, operations: Callable[[flops.Costs], Mapping[str, float]]) -> dict[str, float]:
        """Add operations by purpose, if they are counted: all so far as `flops/<purpose>`, and `flops/train` without
        evaluations and the cold start."""
        for name, count in {} if self.costs is None else operations(self.costs).items():
            self.spent[f"flops_{name}"] = self.spent.get(f"flops_{name}", 0.0) + count
        return {k.replace("_", "/", 1): v for k, v in self._costs().items() if k.startswith("flops_")}

    @property
    def flops_train(self) -> float:
        """Operations of training so far."""
        return sum(self.spent.get(f"flops_{name}", 0.0) for name in ("sampling", "scoring", "learning"))

    @property
    def is_spent(self) -> bool:
        return self.spec.max_flops is not None and self.flops_train >= self.spec.max_flops

    def _costs(self) -> dict[str, float]:
        return self.spent | ({"flops_train": self.flops_train} if "flops_learning" in self.spent else {})

    def summary(self) -> dict[str, float]:
        totals = {k: float(v) for k, v in vars(self.totals).items() if v or k != "learner_peak_bytes"}
        return {**self.accuracies, **totals, **self._costs()}


def first_prompt(spec: RunSpec, split: Split) -> str:
    """The first prompt of a split exactly as the policy reads it. Reads no weights."""
    codec = codec_of(spec)
    return codec.decode(codec.encode(spec.task.prompts(split)[0].text))


class StoppedEarly(Exception):
    """Asked to stop during work that has no checkpoints: a cold start, an evaluation, sampling or fine-tuning."""


def note_progress(log: RunLog, should_stop: Callable[[], bool], phase: str, done: int, total: int) -> None:
    """Report the progress of such work; StoppedEarly if asked to stop."""
    log.progress(phase, done, total)
    if should_stop():
        raise StoppedEarly


def build_engine(
    spec: RunSpec, policy: nn.Module, codec: TextCodec, prompts: Sequence[Prompt] | None = None
) -> RolloutEngine:
    """The engine that the spec names, over this policy, for completions of these prompts, by default all of the run."""
    engine_class = cast(type[RolloutEngine], plugins.load("engine", spec.engine.name))
    return engine_class(engine_settings(spec, codec, prompts), policy, codec)


def engine_settings(spec: RunSpec, codec: TextCodec, prompts: Sequence[Prompt] | None = None) -> Any:
    """The settings of the run's engine, complete."""

    def row_tokens() -> int:
        most = max(stage.spec.max_tokens for stage in spec.staged())
        return longest(codec, read_prompts(spec) if prompts is None else prompts) + max(spec.max_tokens, most)

    return spec.engine.for_run(spec.dtype, spec.autocast, row_tokens, spec.rollouts_per_step // spec.devices)


def learner_of(stage: Stage, policy: nn.Module, directory: Path, origin: nn.Module | None = None) -> Learner:
    """The learner of a stage that begins with this policy; of a sharded one `origin` is the whole copy. ValueError if a
    model that a reward reads is torn."""
    spec = stage.placed(directory)
    for reward in spec.rewards.values():
        reward.check()
        reward.inputs()
    spec = spec if stage.does is None else stage.does.learner_spec(spec)
    name = spec.kl.reference
    reference = None if name is None else ranks.from_first(lambda: placed(load_policy(name, seed=0), spec, scores=True))
    learner = Learner(spec, policy, reference, origin)
    learner.start = stage.start
    return learner


def placed(policy: nn.Module, spec: RunSpec, *, scores: bool = False) -> nn.Module:
    """The policy, or a model that only `scores`, on the run's device and in its precision; each tensor is rounded
    before it moves."""
    device = resolve_device(spec.device) if ranks.world_size() == 1 else None  # else the learner moves it, in parts
    dtype = getattr(torch, spec.dtype)
    return hold_scorer(policy.to(dtype=dtype), spec.autocast).to(device) if scores else policy.to(device, dtype)


def recomputing(policy: nn.Module, enabled: bool) -> nn.Module:
    """The policy itself, whose backward pass computes activations again, if `enabled`."""
    if enabled:
        enable = "activation_checkpointing_enable"  # from transformers 5.24 on
        getattr(policy, enable, policy.gradient_checkpointing_enable)()  # pyright: ignore
    return policy


def prepare(
    spec: RunSpec,
    directory: Path,
    log: RunLog,
    cache: Path,
    should_stop: Callable[[], bool],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[Run, int]:
    """The run with its models loaded, and the number of finished training steps."""
    reset_peak_memory()
    memory_before = resident_bytes()
    checkpoint = ranks.same(lambda: latest_checkpoint(directory / CHECKPOINTS, spec.digest(), log.holds))
    log.resume(checkpoint.step if checkpoint else -1, ranks.of_all(torch.get_num_threads()))

    settled = decided(spec)
    recompute = settled.gradient_checkpointing is True
    if spec.gradient_checkpointing == "auto" and checkpoint is not None:  # as before, unless that no longer fits
        recompute |= checkpoint.progress["recomputes"]
    recompute = any(ranks.of_all(recompute))

    def start() -> nn.Module:
        policy = placed(start_policy(spec, cache, partial(note_progress, log, should_stop))[0], spec)
        return policy if spec.lora is None else add_adapter(policy, spec.lora, spec.seed)

    policy, codec = recomputing(ranks.from_first(start), recompute), codec_of(spec)
    stage = next(stage for stage in spec.staged() if (checkpoint.step if checkpoint else 0) <= stage.end)
    learner = learner_of(stage, policy, directory)
    engine = build_engine(settled, policy, codec)
    base = Base.of(start_name(spec, cache), spec.cold_start.seed) if spec.lora is not None else None
    run = Run(
        learner.spec, engine, learner, log, directory, codec, now, memory_before, base=base, cache=cache, whole=spec,
        stage=stage,
    )  # fmt: skip
    if checkpoint is None:
        return run, 0

    def saved() -> tuple[Mapping[str, torch.Tensor], Mapping[str, Any]]:
        weights = {} if spec.lora else checkpoint.policy_weights(policy)  # an adapter is in the learner's state
        return weights, checkpoint.learner_state()

    learner.load_state(*ranks.from_first(saved))
    engine.load_weights(learner.weights(), checkpoint.step)
    progress, learner.kl_beta = checkpoint.progress, checkpoint.progress["kl_beta"]
    run.totals, run.gates = Totals(**progress["totals"]), GateState(**progress["gates"])
    run.accuracies, run.spent, run.pass_rates = (dict(progress[key]) for key in ("accuracies", "ledger", "pass_rates"))
    run.kept = dict(progress.get("kept", {}))
    return run, checkpoint.step


def run_facts(run: Run) -> dict[str, float]:
    """Metrics known before the first step, and the operations of the cold start, which are charged here.

    Compare `memory/estimate_bytes` with the measured `memory/peak_bytes`: both include the bytes in use before the run.
    `memory/recomputes` is the decision of a GPU under `gradient_checkpointing=auto`, `memory/sleeps` vLLM's there.
    """
    spec, codec, start = run.spec, run.codec, run.spec.cold_start

    def cold_start(costs: flops.Costs) -> dict[str, float]:
        few = list(islice(spec.task.demonstrations(), DEMONSTRATIONS))
        rows = [(len(codec.encode(d.prompt)), [len(codec.encode_completion(d.completion))]) for d in few]
        return {"cold_start": start.steps * start.batch_size * flops.fitted(costs, rows) / len(rows)}

    facts = run.charge_flops(cold_start) if start.steps else {}
    recompute = recomputes(run.learner.policy)
    ran, engine = run.whole.model_copy(update={"gradient_checkpointing": recompute}), cast(Any, run.engine)
    if resolve_device(spec.device).type == "cuda":
        if spec.gradient_checkpointing == "auto":
            facts["memory/recomputes"] = float(recompute)
        if spec.engine.name == "vllm":
            facts["memory/sleeps"] = float(engine.settings.sleep)
            ran = ran.model_copy(update={"engine": engine.settings})
    needed, _ = estimate_run(ran) if spec.steps else (None, None)
    if needed is not None:
        facts["memory/estimate_bytes"] = float(peak_bytes({**needed, "process": run.memory_before}))
    return facts
