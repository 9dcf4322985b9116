"""What a run and a study are: validated, frozen, serialisable values; every setting is written in one place.

`RunSpec` is one training run, `StudySpec` a question with the arms and seeds that answer it. Settings of a plugin
(algorithm, task, engine) are fields of the plugin's own class, so a spec file is checked against the class it names.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import itertools
import json
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
    """One setting under comparison: a readable label, the dotted overrides that make it, its level of each factor."""

    label: str
    overrides: Mapping[str, Any]
    levels: Mapping[str, Scalar]


class StudySpec(Section):
    """A question, the base run, what varies, and the seeds that replicate each arm.

    `factors` maps a dotted RunSpec path to its levels; `arms` maps a label to several overrides at once. `grid` takes
    every combination (of arms and factors), `one_at_a_time` the base run and each level on its own. The run section
    is kept as written; `run_spec` validates it together with an arm's overrides.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80)
    question: str = Field(min_length=1)
    run: dict[str, Any]
    factors: dict[str, list[Any]] = Field(default_factory=dict)
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    seeds: list[int] = Field(default=[0, 1, 2], min_length=1)
    design: Literal["grid", "one_at_a_time"] = "grid"
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

    def design_arms(self) -> list[Arm]:
        """Every arm in order, the baseline among them. SpecError for one that is not a valid run."""
        arms: dict[str, Arm] = {}
        label_of: dict[str, str] = {}
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
        if self.baseline is not None and self.baseline not in arms:
            near = plugins.nearest(self.baseline, list(arms))
            fix = f"did you mean '{near}'?" if near else f"arms: {', '.join(arms)}"
            raise SpecError(f"study '{self.name}': baseline must be an arm's label, got '{self.baseline}'; {fix}")
        return list(arms.values())

    def run_spec(self, arm: Arm, seed: int) -> RunSpec:
        """The complete run of one trial."""
        return self._parse({**arm.overrides, "seed": seed})

    def digest(self) -> str:
        """A stable hash of what every arm runs: it must not change between resumes (seeds may be added)."""
        return digest({arm.label: self.run_spec(arm, 0).model_dump(mode="json") for arm in self.design_arms()})

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
    study.design_arms()
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
            result[path.strip()] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SpecError(f"--set {path.strip()}: the value is not valid YAML: {error}") from None
    return result


def with_overrides(raw: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A deep copy of `raw` with each dotted path set; a plugin given by name alone becomes a mapping.

    A key of a mapping that itself holds dots (`factors` of a study) is matched as a whole; a number for a reward is its
    weight and leaves its other settings as they are.
    """
    result = deepcopy(dict(raw))
    for dotted, value in overrides.items():
        head, _, rest = dotted.partition(".")
        if head in ("factors", "arms") and rest:
            result.setdefault(head, {})[rest] = value
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
    """A YAML (or JSON) file's content; SpecError where it is missing or malformed."""
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: not valid YAML: {error}") from None


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
            message += f"valid keys: {', '.join(known)}"
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
    for key in keys:
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
        if not (isinstance(annotation, type) and issubclass(annotation, Section)):
            return None
        owner = annotation
    return owner


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
