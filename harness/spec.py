"""What a run and a study are: validated, frozen, serialisable values; every setting is written in one place.

`RunSpec` is one training run, `StudySpec` a question with the arms and seeds that answer it. Settings of a plugin
(algorithm, task, engine) are fields of the plugin's own class, so a spec file is checked against the class it names.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

import yaml
from pydantic import Field, SerializeAsAny, ValidationError, field_validator, model_validator

from harness import plugins
from harness.interfaces import Algorithm, Reward, RolloutEngine, Task
from harness.types import Section, short_path

Scalar = bool | int | float | str | None


class SpecError(ValueError):
    """What a user wrote cannot be run; the message names the file, the key, the rule, the value and a fix."""


class Sampling(Section):
    """How completions are drawn during training."""

    temperature: float = Field(default=1.0, ge=0, description="0 is greedy")
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0, description="0 keeps all tokens")
    max_tokens: int | None = Field(default=None, ge=1, description="completion limit; by default the task's own")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="texts that end a completion, evaluations included; kept in it"
    )


class ColdStart(Section):
    """Supervised warm start on the task's worked solutions, shared by every arm and seed (AdamW, constant rate)."""

    steps: int = Field(default=0, ge=0, description="optimiser steps; 0 starts from the model as it is")
    batch_size: int = Field(default=32, ge=1)
    learning_rate: float = Field(default=3e-3, gt=0)
    seed: int = Field(default=0, ge=0, description="data order and, for `tiny`, initial weights")


class Optimizer(Section):
    """AdamW for the policy (and, separately, the critic) and the number of updates that a batch receives."""

    learning_rate: float = Field(default=1e-4, gt=0)
    critic_learning_rate: float = Field(default=3e-4, gt=0)
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of both learning rates after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(default=0, ge=0, description="training steps over which the rates rise linearly")
    weight_decay: float = Field(default=0.0, ge=0)
    beta1: float = Field(default=0.9, ge=0, lt=1)
    beta2: float = Field(default=0.999, ge=0, lt=1)
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient clipping by global norm")
    num_inner_epochs: int = Field(default=1, ge=1, description="mu: passes over each batch of rollouts")
    num_minibatches: int = Field(default=1, ge=1, description="optimiser steps per pass; divides rollouts_per_step")
    tokens_per_microbatch: int | None = Field(
        default=None, ge=1, description="padded tokens in one forward: memory and speed; by default 1024, 8192 on a GPU"
    )


class DynamicSampling(Section):
    """Replace groups of equal rewards by further prompts' groups (DAPO, arXiv:2503.14476, eq. 11), within a budget; all
    that is generated is charged."""

    max_batches: int = Field(
        default=1, ge=1, description="batches of prompts_per_step prompts that a step may sample; 1: none is replaced"
    )


class KLControl(Section):
    """How `algorithm.kl_beta` and the reference change over a run."""

    schedule: Literal["constant", "cosine", "adaptive"] = Field(
        default="constant", description="cosine: from kl_beta down; adaptive: towards a target KL"
    )
    hold: float = Field(default=0.1, ge=0, lt=1, description="cosine: share of the steps before it falls")
    end: float = Field(default=0.8, gt=0, le=1, description="cosine: share of the steps after which it stays")
    final_scale: float = Field(default=0.0, ge=0, description="cosine: share of kl_beta that is left at the end")
    target: float | None = Field(default=None, gt=0, description="adaptive: KL to the reference in nats per token")
    refresh_reference_every: int = Field(
        default=0, ge=0, description="training steps after which the policy becomes the reference; 0: never"
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.end <= self.hold:
            raise ValueError(f"kl.end must exceed kl.hold ({self.hold}), got {self.end}")
        if (self.schedule == "adaptive") != (self.target is not None):
            raise ValueError(f"kl.target belongs to kl.schedule=adaptive, got {self.target} with {self.schedule}")
        return self


class Mismatch(Section):
    """What is done where the engine's probabilities differ from the learner's; nothing is with the learner's own."""

    correction: Literal["none", "truncated", "masked"] = Field(
        default="none", description="importance weights, cut at the bound, or 0 outside [1 / bound, bound]"
    )
    level: Literal["token", "sequence"] = Field(default="token", description="one weight per token, or per completion")
    bound: float = Field(default=2.0, gt=1)


class LoRA(Section):
    """Train low-rank adapters instead of all weights (arXiv:2106.09685); the reference is the model without them."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0, description="the update is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(default=(), description="names of layers; by default all linear ones but the head")


class Evaluation(Section):
    """Held-out accuracy during training (validation split) and once at the end (test split)."""

    every: int = Field(
        default=20, ge=1, description="training steps between evaluations; the first and last always happen"
    )
    num_prompts: int = Field(default=256, ge=1, description="validation problems; all when the split has fewer")
    num_test_prompts: int = Field(default=512, ge=1, description="test problems; all when the split has fewer")
    num_samples: int = Field(default=4, ge=1, description="k samples per problem for accuracy, pass@k and maj@k")
    temperature: float = Field(default=1.0, gt=0)


class Checkpoints(Section):
    """What a run keeps on disk: enough to resume, and whole batches of rollouts to read, regrade or rank."""

    every: int = Field(default=20, ge=1, description="training steps between checkpoints")
    keep: int = Field(default=2, ge=1)
    rollouts_every: int = Field(
        default=20, ge=0, description="training steps between batches kept in rollouts/; the first is; 0: none"
    )


class Gates(Section):
    """Bounds on what every step measures, beyond which the run ends INVALID; null turns one off. A non-finite loss or
    gradient ends a run in any case."""

    mismatch_kl: float | None = Field(
        default=0.1, gt=0, description="nats per token between engine and learner, in any step"
    )
    stuck_groups: float | None = Field(
        default=0.98, ge=0, lt=1, description="share of groups without any advantage that do not earn the best reward"
    )
    stuck_groups_steps: int = Field(default=20, ge=1, description="steps in a row with more of them")
    weights_changed: float | None = Field(
        default=0.001, gt=0, le=1, description="share of the weights that an update with a gradient changes at all"
    )
    weights_changed_steps: int = Field(default=5, ge=1, description="such steps in a row that change fewer")
    entropy: float | None = Field(
        default=None, ge=0, description="nats per token; off, because a task that is solved has little entropy left"
    )
    entropy_steps: int = Field(default=20, ge=1, description="steps in a row with less")
    answered: float | None = Field(
        default=0.25, ge=0, le=1, description="answered completions, as a share of those of the first step"
    )
    answered_steps: int = Field(default=20, ge=1, description="steps in a row with fewer")


def _plugin(kind: plugins.Kind, value: Any) -> Any:
    """A plugin's settings from a name, from a mapping with a name, or as they are."""
    if isinstance(value, Section):
        return value
    fields = {"name": value} if isinstance(value, str) else value
    if not isinstance(fields, Mapping) or "name" not in fields:
        raise ValueError(f"{kind} must be a name or a mapping with a 'name', got {value!r}")
    cls = plugins.load(kind, str(fields["name"]))
    return _settings_class(kind, cls).model_validate(dict(fields))


def _reward(name: str, settings: Any) -> Reward:
    """A reward from its weight, from a mapping of its settings, or as it is."""
    if isinstance(settings, Reward):
        return settings
    cls = plugins.load("reward", name)
    if isinstance(settings, int | float) and not isinstance(settings, bool):
        settings = {"weight": settings}
    if not isinstance(settings, Mapping):
        raise ValueError(f"rewards.{name} must be a weight or a mapping of settings, got {settings!r}")
    try:
        return cls.model_validate(dict(settings))  # pyright: ignore[reportAttributeAccessIssue]
    except ValidationError as error:
        raise ValueError(explain(error, cls, settings, f"rewards.{name}")) from None


def _settings_class(kind: plugins.Kind, cls: type) -> type[Section]:
    return cls.Settings if kind == "engine" else cls  # pyright: ignore[reportAttributeAccessIssue]


class RunSpec(Section):
    """One training run, complete: two runs with equal specs give equal results on one machine."""

    model: str = Field(default="tiny", min_length=1, description="'tiny', a Hub id or a local folder")
    task: SerializeAsAny[Task]
    algorithm: SerializeAsAny[Algorithm]
    rewards: dict[str, SerializeAsAny[Reward]] = Field(
        default_factory=dict, description="name -> weight, or settings; added to the algorithm's own reward"
    )
    engine: SerializeAsAny[RolloutEngine.Settings] = Field(default="transformers")  # pyright: ignore
    sampling: Sampling = Sampling()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    cold_start: ColdStart = ColdStart()
    optimizer: Optimizer = Optimizer()
    kl: KLControl = KLControl()
    mismatch: Mismatch = Mismatch()
    lora: LoRA | None = Field(default=None, description="low-rank adapters; none by default")
    evaluation: Evaluation = Evaluation()
    checkpoints: Checkpoints = Checkpoints()
    gates: Gates = Gates()
    rollouts_per_step: int = Field(default=128, ge=1)
    steps: int = Field(default=100, ge=0)
    seed: int = Field(default=0, ge=0)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights and optimiser too: bfloat16 saves memory and loses small updates"
    )
    autocast: bool = Field(default=False, description="forward passes in bfloat16 over float32 weights and optimiser")
    gradient_checkpointing: bool = Field(default=False, description="less memory for a second forward pass")

    plugin_fields: ClassVar[tuple[plugins.Kind, ...]] = ("task", "algorithm", "engine")

    @field_validator("task", mode="before")
    @classmethod
    def _task(cls, value: Any) -> Any:
        return _plugin("task", value)

    @field_validator("algorithm", mode="before")
    @classmethod
    def _algorithm(cls, value: Any) -> Any:
        return _plugin("algorithm", value)

    @field_validator("engine", mode="before")
    @classmethod
    def _engine(cls, value: Any) -> Any:
        return _plugin("engine", value)

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"rewards must be a mapping of names to weights or settings, got {value!r}")
        return {str(name): _reward(str(name), settings) for name, settings in value.items()}

    @model_validator(mode="after")
    def _complete_rewards(self) -> Self:
        """The algorithm's own reward is one of the run's, unless the spec gives it another weight."""
        default = {name: _reward(name, weight) for name, weight in self.algorithm.default_rewards.items()}
        object.__setattr__(self, "rewards", dict(sorted({**default, **self.rewards}.items())))
        for name, reward in self.rewards.items():
            if reward.sees_gold and reward.weight and not self.algorithm.sees_gold:
                raise ValueError(
                    f"rewards.{name} sees gold answers, and {self.algorithm.name} must not; got weight "
                    f"{reward.weight}; remove it, or set rewards.{name}=0 to measure it only"
                )
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError(f"rewards must have a weight other than 0, got 0 for {', '.join(self.rewards)}")
        return self

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> Self:
        if self.kl.schedule != "constant" and not getattr(self.algorithm, "kl_beta", 0):
            raise ValueError(
                f"kl.schedule must be constant for {self.algorithm.name} without kl_beta, got {self.kl.schedule}"
            )
        if self.mismatch.correction != "none" and not self.algorithm.linear_in_advantages:
            raise ValueError(
                f"mismatch.correction must be none for {self.algorithm.name}, got {self.mismatch.correction}: "
                "its loss is not linear in its advantages"
            )
        if self.dynamic_sampling.max_batches > 1 and self.algorithm.group_size == 1:
            raise ValueError(
                "dynamic_sampling.max_batches must be 1 with algorithm.group_size=1, whose groups never differ, got "
                f"{self.dynamic_sampling.max_batches}"
            )
        if self.kl.refresh_reference_every and self.lora is not None:
            raise ValueError(
                "kl.refresh_reference_every must be 0 with lora, whose reference is the model without adapter"
            )
        return self

    @model_validator(mode="after")
    def _counts_divide(self) -> Self:
        group, rollouts = self.algorithm.group_size, self.rollouts_per_step
        if group < self.algorithm.min_group_size:
            raise ValueError(
                f"algorithm.group_size must be at least {self.algorithm.min_group_size} for {self.algorithm.name}, "
                f"got {group}"
            )
        _must_divide("algorithm.group_size", group, rollouts)
        _must_divide("optimizer.num_minibatches", self.optimizer.num_minibatches, rollouts)
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.rollouts_per_step // self.algorithm.group_size

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps that each batch of rollouts receives."""
        return self.optimizer.num_inner_epochs * self.optimizer.num_minibatches

    def sampling_with_limit(self) -> Sampling:
        """The sampling settings with `max_tokens` filled in from the task."""
        limit = self.sampling.max_tokens or self.task.max_completion_tokens
        return self.sampling.model_copy(update={"max_tokens": limit})

    def digest(self) -> str:
        """A stable hash (16 hex digits) of every setting."""
        return digest(self.model_dump(mode="json"))


def _must_divide(name: str, value: int, rollouts: int) -> None:
    if rollouts % value:
        divisors = [d for d in range(1, rollouts + 1) if rollouts % d == 0]
        near = [*[d for d in divisors if d < value][-1:], *[d for d in divisors if d > value][:1]]
        fix = " or ".join(map(str, near))
        raise ValueError(f"{name} must divide rollouts_per_step ({rollouts}), got {value}; use {fix}")


@dataclass(frozen=True)
class Arm:
    """One setting under comparison: a readable label, the dotted overrides that make it, its level of each factor.

    Arms of phase "tuning" only choose the settings of final arms and never enter the comparison.
    """

    label: str
    overrides: Mapping[str, Any]
    levels: Mapping[str, Scalar]
    phase: Literal["final", "tuning"] = "final"


class Dimension(Section):
    """The values that a search may give to one setting: a range (whole numbers where both ends are), or choices."""

    low: int | float | None = None
    high: int | float | None = None
    log: bool = Field(default=False, description="equal ratios are equally likely, not equal differences")
    step: int | float | None = Field(default=None, gt=0, description="distance between the values of a range")
    choices: list[Scalar] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.choices is not None:
            if {self.low, self.high, self.step} != {None} or self.log:
                raise ValueError("choices must stand alone, without low, high, log and step")
            if any(choice in self.choices[:i] for i, choice in enumerate(self.choices)):
                raise ValueError(f"choices must be distinct, got {self.choices}")
            return self
        if self.low is None or self.high is None:
            raise ValueError("a dimension must have low and high, or choices")
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and (self.low <= 0 or self.step is not None):
            raise ValueError(f"log must have low above 0 and no step, got low {self.low} and step {self.step}")
        if self.step is not None:
            count = (self.high - self.low) / self.step
            if self.whole and not isinstance(self.step, int):
                raise ValueError(f"step must be whole between whole ends, got {self.step}; write low as {self.low}.0")
            if not math.isclose(count, round(count), abs_tol=1e-9) or round(count) < 1:
                last = self.low + max(math.floor(count + 1e-9), 1) * self.step
                raise ValueError(f"step must lead from low to high, got {self.step} for {self.high}; use high {last:g}")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    def points(self) -> list[Scalar] | None:
        """Every value; None where there is no end of them."""
        if self.choices is not None:
            return list(self.choices)
        assert self.low is not None
        assert self.high is not None
        if self.step is None and not self.whole:
            return None
        step = self.step or 1
        return [self.low + i * step for i in range(round((self.high - self.low) / step) + 1)]

    def probes(self) -> list[Scalar]:
        """The values that are checked before a study starts: all of them where they are few, else both ends."""
        points = self.points()
        return points if points is not None and len(points) <= 64 else [self.low, self.high]


Space = Annotated[dict[str, Dimension], Field(description="dotted RunSpec path -> range or choices")]
SamplerName = Literal["tpe", "gp", "nsga2", "random"]
PrunerName = Literal["none", "median", "hyperband"]


class Search(Section):
    """A search over settings by one of Optuna's samplers; the value of an arm is its mean over all seeds."""

    space: Space = Field(min_length=1)
    trials: int = Field(ge=1, description="arms; each is run with every seed; may be raised later")
    sampler: SamplerName = "tpe"
    pruner: PrunerName = Field(default="none", description="stops arms that are behind; seeds of an arm run in order")
    objectives: dict[str, Literal["maximize", "minimize"]] = Field(
        default_factory=dict, description="metric -> direction; by default the study's metric, maximised"
    )
    startup: int = Field(default=5, ge=1, description="arms drawn at random before the sampler learns from results")
    population: int = Field(default=8, ge=2, description="nsga2: arms of a generation")

    @model_validator(mode="after")
    def _searchable(self) -> Self:
        _check_space(self.space, self.trials, "search")
        if self.pruner != "none" and len(self.objectives) > 1:
            raise ValueError(f"search.pruner must be none with several objectives, got {self.pruner}")
        fixed = [path for path in ("steps", "evaluation.every") if path in self.space]
        if self.pruner != "none" and fixed:
            raise ValueError(f"search.pruner compares arms at equal steps; take '{fixed[0]}' out of search.space")
        return self


class Tuning(Section):
    """The same search for every algorithm and task of a comparison, on seeds that the comparison does not use."""

    space: Space = Field(default_factory=dict)
    spaces: dict[str, Space] = Field(
        default_factory=dict, description="algorithm -> what is searched for it beside 'space'"
    )
    trials: int = Field(ge=1, description="arms of each search")
    seeds: list[int] = Field(min_length=1, description="must differ from the study's seeds")
    sampler: SamplerName = "tpe"
    pruner: PrunerName = "none"
    startup: int = Field(default=5, ge=1)
    population: int = Field(default=8, ge=2)

    def search(self, algorithm: str) -> Search:
        """The search for one algorithm. ValueError for an empty space."""
        space = {**self.space, **self.spaces.get(algorithm, {})}
        if not space:
            raise ValueError(f"compare.tuning must search something for {algorithm}; fill 'space' or 'spaces'")
        fields = {key: getattr(self, key) for key in ("trials", "sampler", "pruner", "startup", "population")}
        return Search(space=space, **fields)


class Comparison(Section):
    """Algorithms x tasks; each is a name, or a mapping of a name and settings, on top of the run's own."""

    algorithms: list[str | dict[str, Any]] = Field(min_length=1)
    tasks: list[str | dict[str, Any]] = Field(min_length=1)
    tuning: Tuning | None = None

    @model_validator(mode="after")
    def _named(self) -> Self:
        for kind in ("algorithms", "tasks"):
            names = [_plugin_name(item, f"compare.{kind}") for item in getattr(self, kind)]
            if len(set(names)) != len(names):
                raise ValueError(f"compare.{kind} must be distinct, got {', '.join(names)}")
        names = [_plugin_name(item, "") for item in self.algorithms]
        if self.tuning is not None:
            for name in self.tuning.spaces:
                if name not in names:
                    raise ValueError(f"compare.tuning.spaces must name compared algorithms, got '{name}'")
            for name in names:
                self.tuning.search(name)
        return self


@dataclass(frozen=True)
class SearchPlan:
    """One search of a study: its name ("" where there is one alone), base, space, and the seeds of every arm.

    Where `final_seeds` are given, the best arm is run with these too, as the final arm called `name`.
    """

    name: str
    base: Arm
    search: Search
    seeds: tuple[int, ...]
    final_seeds: tuple[int, ...] = ()


def _check_space(space: Mapping[str, Dimension], trials: int, where: str) -> None:
    if "seed" in space:
        raise ValueError("'seed' is a replicate, never searched; list seeds under 'seeds'")
    counts = [dimension.points() for dimension in space.values()]
    size = math.prod(math.inf if points is None else len(points) for points in counts)
    if trials > size:
        raise ValueError(f"{where}.trials must be at most the points of the space ({size:g}), got {trials}")


def _plugin_name(item: str | Mapping[str, Any], where: str) -> str:
    if isinstance(item, str):
        return item
    if not isinstance(item.get("name"), str):
        raise ValueError(f"{where} must be names, or mappings with a 'name', got {item!r}")
    return item["name"]


class StudySpec(Section):
    """A question, the base run, what varies, and the seeds that replicate each arm.

    `factors` maps a dotted RunSpec path to its levels; `arms` maps a label to several overrides at once. `grid` takes
    every combination (of arms and factors), `one_at_a_time` the base run and each level on its own, `compare` every
    algorithm on every task; the arms of a `search` are found while it runs. The run section is kept as written;
    `run_spec` validates it together with an arm's overrides.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    question: str = Field(min_length=1)
    run: dict[str, Any]
    factors: dict[str, list[Any]] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    design: Literal["grid", "one_at_a_time", "search", "compare"] = "grid"
    search: Search | None = None
    compare: Comparison | None = None
    metric: str = "validation/accuracy"
    baseline: str | None = Field(
        default=None, description="arm label that the others are compared with; the first by default"
    )

    @model_validator(mode="after")
    def _designed(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds must be distinct and >= 0, got {self.seeds}")
        if self.design == "one_at_a_time" and self.arms:
            raise ValueError("design one_at_a_time varies factors around the base run; use grid with 'arms'")
        for section in ("search", "compare"):
            if (self.design == section) != (getattr(self, section) is not None):
                raise ValueError(f"design {section} and section '{section}' must come together, got one of the two")
        if self.design in ("search", "compare") and (self.factors or self.arms):
            raise ValueError(f"design {self.design} takes neither factors nor arms; use grid for them")
        if self.design == "search" and self.baseline is not None:
            raise ValueError("the arms of a search have no names beforehand; leave 'baseline' out")
        if self.search is not None and self.metric not in self.objectives():
            raise ValueError(f"search.objectives must contain the study's metric, {self.metric}")
        if self.search is not None or (self.compare is not None and self.compare.tuning is not None):
            for metric in self.objectives():
                if metric.startswith("test/"):
                    raise ValueError(f"a search must not see the test split, got {metric}; use validation/...")
        if self.compare is not None and self.compare.tuning is not None:
            both = sorted(set(self.seeds) & set(self.compare.tuning.seeds))
            if both:
                raise ValueError(
                    f"compare.tuning.seeds must differ from the study's seeds {self.seeds}, got {both} in both"
                )
        for path, levels in self.factors.items():
            if path == "seed":
                raise ValueError("'seed' is a replicate, never a factor; list seeds under 'seeds'")
            if not levels:
                raise ValueError(f"factor '{path}' has no levels; list at least one")
            if any(isinstance(level, list | dict) for level in levels):
                raise ValueError(
                    f"levels of factor '{path}' must be plain values; use 'arms' for several settings at once"
                )
            if any(level in levels[:i] for i, level in enumerate(levels)):
                raise ValueError(f"factor '{path}' names a level twice: {levels}")
        return self

    def objectives(self) -> dict[str, Literal["maximize", "minimize"]]:
        """Metric -> direction of what decides between arms: for most studies the metric, maximised."""
        return (self.search.objectives if self.search else {}) or {self.metric: "maximize"}

    def searches(self) -> list[SearchPlan]:
        """The searches that the study makes: one, one for each algorithm and task of a tuned comparison, or none."""
        if self.search is not None:
            return [SearchPlan("", Arm("", {}, {}), self.search, tuple(self.seeds))]
        if self.compare is None or self.compare.tuning is None:
            return []
        tuning, seeds = self.compare.tuning, tuple(self.seeds)
        return [
            SearchPlan(cell.label, cell, tuning.search(cell.overrides["algorithm.name"]), tuple(tuning.seeds), seeds)
            for cell in self._cells()
        ]

    def arm_labels(self) -> list[str]:
        """Labels of the arms that are compared in the end, as far as they are known before the study runs."""
        arms = [plan.base for plan in self.searches()] if self.compare else self.design_arms()
        return [arm.label for arm in arms or self.design_arms()]

    def checked_arms(self) -> list[Arm]:
        """The arms whose validity stands for all: every one that is known, or the base and the values of each
        dimension of a search, one at a time."""
        arms = self.design_arms()
        for plan in self.searches():
            probes = [{path: value} for path, found in plan.search.space.items() for value in found.probes()]
            for point in [{}, *probes]:
                label = ", ".join(filter(None, [plan.name, *(_describe(*item) for item in point.items())]))
                arms.append(Arm(label or "base", {**plan.base.overrides, **point}, {**plan.base.levels, **point}))
        for arm in arms:
            self.run_spec(arm, self.seeds[0])
        return arms

    def design_arms(self) -> list[Arm]:
        """Every arm that is known before the study runs, in order, the baseline among them; none of a search.

        SpecError for one that is not a valid run.
        """
        if self.design == "search" or self.searches():
            self._check_baseline([plan.name for plan in self.searches()])
            return []
        arms: dict[str, Arm] = {}
        label_of: dict[str, str] = {}
        if self.compare is not None:
            arms = {arm.label: arm for arm in self._cells()}
            for arm in arms.values():
                self._parse(arm.overrides)
            self._check_baseline(list(arms))
            return list(arms.values())
        for name, point in self._points():
            overrides = {**self.arms.get(name, {}), **point}
            spec = self._parse(overrides)
            levels: dict[str, Scalar] = {"arm": name} if self.arms else {}
            levels |= {path: get_path(spec, path) for path in self.factors}
            shown = levels if self.design == "grid" else {path: levels[path] for path in point}
            label = ", ".join(_describe(path, level) for path, level in shown.items()) or "base"
            same = label_of.get(spec.digest())
            if same is not None and self.design == "one_at_a_time":
                continue  # this level is the base run's own
            if same is not None or label in arms:
                raise SpecError(f"study '{self.name}': arms '{same or label}' and '{label}' are the same; remove one")
            label_of[spec.digest()] = label
            arms[label] = Arm(label, overrides, levels)
        self._check_baseline(list(arms))
        return list(arms.values())

    def run_spec(self, arm: Arm, seed: int) -> RunSpec:
        """The complete run of one trial."""
        return self._parse({**arm.overrides, "seed": seed})

    def digest(self) -> str:
        """A stable hash of what every arm runs: it must not change between resumes.

        Seeds may be added, but not to a search, whose arms were judged by the ones there were; that may gain trials.
        """
        known = {arm.label: self.run_spec(arm, 0).model_dump(mode="json") for arm in self.design_arms()}
        for plan in self.searches():
            search = plan.search.model_dump(mode="json", exclude=None if plan.final_seeds else {"trials"})
            base = self.run_spec(plan.base, 0).model_dump(mode="json")
            known[f"search/{plan.name}"] = {"base": base, "search": search, "seeds": list(plan.seeds)}
        return digest(known)

    def _check_baseline(self, labels: Sequence[str]) -> None:
        if self.baseline is not None and self.baseline not in labels:
            near = plugins.nearest(self.baseline, list(labels))
            fix = f"did you mean '{near}'?" if near else f"arms: {', '.join(labels)}"
            raise SpecError(f"study '{self.name}': baseline must be an arm's label, got '{self.baseline}'; {fix}")

    def _cells(self) -> list[Arm]:
        """Every algorithm on every task of a comparison; what all have in common is no part of a label."""
        assert self.compare is not None
        several = {"algorithm": len(self.compare.algorithms) > 1, "task": len(self.compare.tasks) > 1}
        cells = []
        for pair in itertools.product(self.compare.algorithms, self.compare.tasks):
            overrides: dict[str, Any] = {}
            levels: dict[str, Scalar] = {}
            for kind, item in zip(("algorithm", "task"), pair, strict=True):
                settings = {"name": item} if isinstance(item, str) else item
                overrides |= {f"{kind}.{key}": value for key, value in settings.items()}
                if several[kind] or (kind == "algorithm" and not any(several.values())):
                    levels[f"{kind}.name"] = settings["name"]
            label = ", ".join(_describe(path, level) for path, level in levels.items())
            cells.append(Arm(label, overrides, levels))
        return cells

    def _points(self) -> list[tuple[str, dict[str, Any]]]:
        if self.design == "one_at_a_time":
            single = [{path: level} for path, levels in self.factors.items() for level in levels]
            return [("", point) for point in [{}, *single]]
        combinations = [dict(zip(self.factors, c, strict=True)) for c in itertools.product(*self.factors.values())]
        return [(name, point) for name in (self.arms or [""]) for point in combinations]

    def _parse(self, overrides: Mapping[str, Any]) -> RunSpec:
        return parse_run(with_overrides(self.run, overrides), where=f"study '{self.name}'")


def parse_run(raw: Mapping[str, Any], where: str) -> RunSpec:
    """The run that a mapping describes; SpecError naming `where`, key, rule and value otherwise."""
    try:
        return RunSpec.model_validate(raw)
    except ValidationError as error:
        raise SpecError(explain(error, RunSpec, raw, where)) from None


def parse_study(raw: Mapping[str, Any], where: str) -> StudySpec:
    """The study that a mapping describes, every arm of it validated; SpecError otherwise."""
    try:
        study = StudySpec.model_validate(raw)
    except ValidationError as error:
        raise SpecError(explain(error, StudySpec, raw, where)) from None
    study.checked_arms()
    return study


def load_study(name_or_path: str, overrides: Sequence[str] = ()) -> StudySpec:
    """A study by shipped name or file path, with `path=value` overrides applied.

    An override whose first word is a field of StudySpec (`seeds=[0,1]`, `metric=...`) changes the study, any other
    the base run (`steps=20`, `task.path=...`).
    """
    path = _study_file(name_or_path)
    raw = read_yaml(path)
    if not isinstance(raw, dict):
        raise SpecError(f"{path}: a study file must be a mapping, got {type(raw).__name__}")
    raw.setdefault("name", path.stem)
    run: dict[str, Any] = {}
    for dotted, value in parse_overrides(overrides).items():
        if dotted.partition(".")[0] in StudySpec.model_fields:
            raw = with_overrides(raw, {dotted: value})
        else:
            run[dotted] = value
    if run and isinstance(raw.get("run"), dict):
        raw["run"] = with_overrides(raw["run"], run)
        searched = (raw.get("search") or {}).get("space") or {} if isinstance(raw.get("search"), dict) else {}
        fixed = [dotted for dotted in run if dotted in searched]
        if fixed:
            raise SpecError(
                f"--set {fixed[0]}: the study searches it; change the range: --set 'search.space.{fixed[0]}="
                "{low: ..., high: ...}'"
            )
        fixed = [dotted for dotted in run if dotted in raw.get("factors", {})]
        if fixed:
            raise SpecError(
                f"--set {fixed[0]}: the study varies it; override the levels: --set 'factors.{fixed[0]}=[...]'"
            )
    return parse_study(raw, where=str(path))


def load_run(path: str | None, overrides: Sequence[str] = (), defaults: Mapping[str, Any] | None = None) -> RunSpec:
    """A run from a YAML or JSON file (or from `defaults` alone), with `path=value` overrides applied."""
    raw: Any = dict(defaults or {})
    if path is not None:
        read = read_yaml(Path(path))
        if not isinstance(read, dict):
            raise SpecError(f"{path}: a run file must be a mapping, got {type(read).__name__}")
        raw |= read
    return parse_run(with_overrides(raw, parse_overrides(overrides)), where=path or "command line")


def shipped_studies() -> dict[str, Path]:
    """Name -> file of every study that Cohort ships."""
    folder = Path(str(importlib.resources.files("studies")))
    return {file.stem: file for file in sorted(folder.glob("*.yaml"))}


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """`path=value` strings as a mapping; values are read as YAML (`true`, `0.1`, `[1, 2]`, text)."""
    result: dict[str, Any] = {}
    for item in items:
        path, equals, value = item.partition("=")
        if not equals or not path.strip():
            raise SpecError(f"--set takes path=value, got '{item}'; for example --set algorithm.kl_beta=0.01")
        try:
            result[path.strip()] = _parse_yaml(value)
        except yaml.YAMLError as error:
            raise SpecError(f"--set {path.strip()}: the value is not valid YAML: {error}") from None
    return result


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `raw` with each dotted path set; a plugin given by name alone becomes a mapping.

    A key of a mapping that itself holds dots (`factors`, `search.space`) is matched as a whole; a number for a reward
    is its weight and leaves its other settings as they are.
    """
    result = deepcopy(dict(raw))
    for dotted, value in overrides.items():
        head, _, rest = dotted.partition(".")
        if head in ("factors", "arms") and rest:
            result.setdefault(head, {})[rest] = value
            continue
        if dotted.startswith("search.space."):
            result.setdefault("search", {}).setdefault("space", {})[rest.removeprefix("space.")] = value
            continue
        node: dict[str, Any] = result
        keys = dotted.split(".")
        for depth, key in enumerate(keys[:-1]):
            child = node.get(key)
            if child is None:
                child = {}
            elif isinstance(child, str):
                child = {"name": child}
            elif keys[0] == "rewards" and depth == 1 and isinstance(child, int | float):
                child = {"weight": child}
            elif not isinstance(child, dict):
                raise SpecError(f"'{dotted}': '{'.'.join(keys[: depth + 1])}' is {child!r}, which has no keys")
            node[key] = child
            node = child
        old = node.get(keys[-1])
        if keys[0] == "rewards" and len(keys) == 2 and isinstance(old, dict) and isinstance(value, int | float):
            value = {**old, "weight": value}
        node[keys[-1]] = value
    return result


def get_path(spec: Section, dotted: str) -> Scalar:
    """The value of a dotted RunSpec path, of a reward its weight; None where this run has no such setting."""
    value: Any = spec
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    if isinstance(value, Reward):
        return value.weight
    return value.name if isinstance(value, Section) and hasattr(value, "name") else value  # pyright: ignore


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a value's canonical JSON."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_yaml(path: Path) -> Any:
    """A YAML (or JSON) file's content; SpecError where it is missing, malformed, or has a key twice."""
    try:
        return _parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None


def _parse_yaml(text: str) -> Any:
    loader = _Loader(text)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


class _Loader(yaml.SafeLoader):
    """PyYAML's safe loader, which lets the last of two equal keys win, made to refuse them."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value in lines:
                raise yaml.YAMLError(
                    f"line {line}: key '{key.value}' is already in line {lines[key.value]}; remove one"
                )
            lines[key.value if isinstance(key, yaml.ScalarNode) else ""] = line
        return node


def _study_file(name_or_path: str) -> Path:
    shipped = shipped_studies()
    if name_or_path in shipped:
        return shipped[name_or_path]
    path = Path(name_or_path)
    if path.is_file():
        return path
    if path.suffix in (".yaml", ".yml", ".json") or os.sep in name_or_path:
        raise SpecError(f"{path}: no such study file")
    near = plugins.nearest(name_or_path, list(shipped))
    hint = f"did you mean '{near}'? " if near else ""
    raise SpecError(
        f"unknown study '{name_or_path}'; {hint}shipped: {', '.join(shipped)}, or give a path to a YAML file"
    )


def _describe(path: str, level: Scalar) -> str:
    if path in ("arm", "algorithm.name", "task.name"):
        return str(level)
    return f"{short_path(path)}={level:g}" if isinstance(level, float) else f"{short_path(path)}={level}"


def explain(error: ValidationError, model: type[Section], raw: Mapping[str, Any], where: str) -> str:
    """One line for each thing wrong with `raw`: where, key, rule, value, and the nearest valid key."""
    lines = []
    for item in error.errors():
        keys = [str(key) for key in item["loc"] if not str(key).startswith("function-")]
        path = ".".join(keys)
        value = "" if item["type"] in ("missing", "extra_forbidden") else f", got {_short(item['input'])}"
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] == "extra_forbidden":
            owner = _class_at(model, raw, keys[:-1])
            known = list(owner.model_fields) if owner else []
            near = plugins.nearest(keys[-1], known)
            message = f"unknown key '{keys[-1]}'; " + (f"did you mean '{near}'? " if near else "")
            message += f"valid keys: {', '.join(known)}" if known else ""
            message = message.rstrip("; ")
        elif item["type"] == "missing":
            message = "is required"
        elif item["type"] == "value_error":
            value = ""  # our own messages name the value
        named = f"{path}: " if path and not message.startswith(path) else ""
        lines.append(f"{where}: {named}{message}{value}")
    return "\n".join(lines)


def _class_at(model: type[Section], raw: Mapping[str, Any], keys: Sequence[str]) -> type[Section] | None:
    owner: type[Section] = model
    node: Any = raw
    names = iter(keys)
    for key in names:
        node = node.get(key) if isinstance(node, Mapping) else None
        if key not in owner.model_fields:
            return None
        if key in RunSpec.plugin_fields and owner is RunSpec:
            name = node if isinstance(node, str) else (node or {}).get("name")
            kind: Any = key
            owner = _settings_class(kind, plugins.load(kind, str(name)))
            continue
        annotation = owner.model_fields[key].annotation
        if get_origin(annotation) in (UnionType, Union):  # `LoRA | None`
            annotation = next(kind for kind in get_args(annotation) if kind is not type(None))
        while get_origin(annotation) is dict:  # its next key is a name that the user chose
            annotation = get_args(annotation)[1]
            next(names, None)
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return None
        owner = annotation
    return owner


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
