"""The settings of a training run as a validated, frozen, serialisable value; every setting is defined in one place.

A plugin's settings (algorithm, task, engine, reward) are fields of its own class, so a file is checked against the
classes that it names.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, SerializeAsAny, ValidationError, ValidationInfo, field_validator, model_validator

from .. import plugins
from ..base.inputs import digest
from ..data import PromptFormat, Sampling, Section
from ..interfaces import Algorithm, Reward, RolloutEngine, Sampler, Task
from .errors import parsed
from .plugged import implied_rewards, plugin_settings, reward_settings
from .raw import MAX_INTEGER
from .stages import Stage, completed, staged

Scalar = bool | int | float | str | None
PROMPTS_AT_ONCE = 64  # in an evaluation, for an engine that holds a whole batch in memory
PART_WEIGHTS = 5e11  # weights that an evaluation on a CPU reads before it looks whether to stop: tens of seconds
Control = Literal["random", "format_only", "inverted", "shuffled_gold", "frozen"]


class ColdStart(Section):
    """Supervised warm start on the task's worked solutions, shared by every arm and seed (AdamW, constant rate)."""

    batch_size: ClassVar[int] = 32  # worked solutions per optimiser step
    seed: ClassVar[int] = 0  # of data order and of `tiny`'s initial weights

    steps: int = Field(default=0, ge=0, description="optimiser steps; 0: no cold start")
    learning_rate: float = Field(default=3e-3, gt=0, description="learning rate of AdamW, constant")


class Optimizer(Section):
    """AdamW for the policy (and separately for the critic), and the number of updates per batch."""

    learning_rate: float = Field(default=1e-4, gt=0, description="learning rate of the policy")
    critic_learning_rate: float = Field(default=3e-4, gt=0, description="learning rate of the critic, if there is one")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="course of both learning rates after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(default=0, ge=0, description="training steps over which the rates rise linearly")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled weight decay (AdamW)")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of the squared gradients")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient clipping by global norm")
    num_inner_epochs: int = Field(default=1, ge=1, description="mu: passes over each batch of rollouts")
    num_minibatches: int = Field(default=1, ge=1, description="optimiser steps per pass; divides rollouts_per_step")
    tokens_per_microbatch: int | None = Field(
        default=None,
        ge=1,
        description="padded tokens in a forward pass; by default 8192 on a GPU, else 1024 or 256 MiB of logits",
    )


class CriticStart(Section):
    """How the critic learns before the policy does."""

    warmup_steps: int = Field(
        default=0, ge=0, description="first training steps, which cost as any, that train the critic alone (VC-PPO)"
    )
    head: Literal["zero", "fitted"] = Field(
        default="zero",
        description="fitted: to the first step's returns, on the states of the policy as it starts (ridge regression)",
    )


class KLControl(Section):
    """The course of `algorithm.kl_beta` and of the reference over a run."""

    schedule: Literal["constant", "cosine", "adaptive"] = Field(
        default="constant",
        description="course of algorithm.kl_beta; cosine: falls to 0 between 10 % and 80 % of the steps; "
        "adaptive: follows a target KL",
    )
    target: float | None = Field(default=None, gt=0, description="adaptive: target KL to the reference, nats per token")
    refresh_reference_every: int = Field(default=0, ge=0, description="steps between copies of the policy; 0: never")
    reference: str | None = Field(
        default=None,
        min_length=1,
        description="model of the reference, such as a teacher: a Hub id or a folder, with the model's own tokenizer; "
        "by default the policy as it starts",
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.schedule == "adaptive") != (self.target is not None):
            raise ValueError(f"kl.target belongs to kl.schedule=adaptive, got {self.target} with {self.schedule}")
        if self.reference is not None and self.refresh_reference_every:
            raise ValueError(
                f"kl.refresh_reference_every must be 0 with kl.reference, got {self.refresh_reference_every}: copies "
                "of the policy would take its place"
            )
        return self


class Mismatch(Section):
    """The correction for differences between the engine's and the learner's probabilities."""

    correction: Literal["none", "truncated", "masked"] = Field(
        default="none", description="importance weights: cut at the bound, or 0 outside [1 / bound, bound]"
    )
    level: Literal["token", "sequence"] = Field(default="token", description="one weight per token, or per completion")
    bound: float = Field(default=2.0, gt=1, description="bound of the importance weights")


class LoRA(Section):
    """Train low-rank adapters instead of all weights (arXiv:2106.09685); the reference is the model without
    adapters."""

    rank: int = Field(default=16, ge=1, description="rank of each adapter's two matrices")
    alpha: float = Field(default=32.0, gt=0, description="the update is scaled by alpha / rank")
    targets: tuple[str, ...] = Field(default=(), description="layers to adapt; by default all linear ones but the head")


class EvaluationSettings(Section):
    """Held-out accuracy during training (validation split) and at the end (test split, and other tests)."""

    every: int = Field(default=20, ge=1, description="steps between evaluations; the first and last always happen")
    num_prompts: int = Field(default=256, ge=1, description="validation problems; all when the split has fewer")
    num_test_prompts: int = Field(default=512, ge=1, description="test problems; all when the split has fewer")
    num_samples: int = Field(default=4, ge=1, le=10_000, description="samples (k) per problem, of accuracy and pass@k")
    num_test_samples: int | None = Field(default=None, ge=1, le=10_000, description="per test problem, or num_samples")
    test_at_start: bool = Field(default=False, description="also evaluate the test problems before training")
    test_last: int = Field(
        default=1,
        ge=1,
        description="evaluations, up to the last one, that measure the test problems too; arms are compared by their "
        "mean, which is the accuracy over the end of training and not the last policy's alone",
    )
    tests: tuple[SerializeAsAny[Task], ...] = Field(
        default=(),
        description="other tests for the end: tasks, of which only the test split is read, each its name, or a mapping "
        "of name and settings",
    )
    temperature: float = Field(default=1.0, gt=0, description="temperature of the k samples; the greedy one has none")

    @field_validator("tests", mode="before")
    @classmethod
    def _named_once(cls, value: Any) -> Any:
        """Tasks from names or mappings; one name stands for the metrics of one test."""
        given = [value] if isinstance(value, str | Mapping) else value
        if not isinstance(given, list | tuple):
            raise ValueError(f"evaluation.tests must be a list of tasks, got {value!r}")
        tasks = [plugin_settings("task", one) for one in given]
        if twice := [name for name, count in Counter(task.name for task in tasks).items() if count > 1]:
            raise ValueError(f"evaluation.tests must name each task once, got '{twice[0]}' twice; remove one")
        return tasks

    def test_steps(self, steps: int) -> list[int]:
        """The steps of a run of so many steps whose policies are measured on the test problems, the last one included.

        Fewer than `test_last` if the run has no more evaluations after its first step.
        """
        before = max(0, (steps - 1) // self.every)  # evaluations between the start and the end
        return [*(self.every * k for k in range(max(1, before - self.test_last + 2), before + 1)), steps]

    def samples_of(self, split: str) -> int:
        """Samples per problem of a split."""
        return self.num_test_samples or self.num_samples if split == "test" else self.num_samples


class Checkpoints(Section):
    """The files that a run keeps: checkpoints to resume from, and whole batches of rollouts to read, regrade or
    rank."""

    keep: ClassVar[int] = 2  # the newest checkpoints, while the run goes on
    minutes: ClassVar[float] = 10.0  # after so many without one, a step ends with one

    every: int = Field(default=20, ge=1, description="training steps between checkpoints; or after 10 minutes")
    finished: Literal["nothing", "weights"] | None = Field(
        default=None, description="what is kept of an ended run; by default nothing in a study, else the weights"
    )
    rollouts_every: int = Field(default=20, ge=0, description="steps between batches kept in rollouts/; 0: none")


class Gates(Section):
    """Bounds on the metrics of every step: a run that breaks a bound ends INVALID; null turns a bound off. A non-finite
    loss or gradient always ends a run."""

    mismatch_kl: float | None = Field(default=0.1, gt=0, description="highest KL(engine || learner), nats per token")
    stuck_groups: float | None = Field(
        default=0.98, ge=0, lt=1, description="highest share of groups of equal, not best rewards, 20 steps in a row"
    )
    weights_changed: float | None = Field(
        default=0.001,
        gt=0,
        le=1,
        description="lowest share of weights that an update with gradient changes, 5 in a row",
    )
    answered: float | None = Field(
        default=0.25, ge=0, le=1, description="lowest share of answers, relative to the first step's, 20 steps in a row"
    )


class RunSpec(Section):
    """All settings of one training run: runs with equal specs give equal results on one machine."""

    model: str = Field(default="tiny", min_length=1, description="'tiny', a Hub id or a local folder")
    task: SerializeAsAny[Task] = Field(description="task: its name, or a mapping of name and settings")
    algorithm: SerializeAsAny[Algorithm] = Field(description="algorithm: its name, or a mapping of name and settings")
    overlong: Literal["count", "mask", "penalise"] = Field(
        default="count",
        description="completions cut by the token limit; mask: leave the loss (DAPO); penalise: reward overlong",
    )
    high_entropy_tokens: float = Field(
        default=1.0, gt=0, le=1, description="share of a batch's tokens, of highest entropy, that alone carry gradient"
    )
    rewards: dict[str, SerializeAsAny[Reward]] = Field(
        default_factory=dict, description="name -> weight or settings; added to the algorithm's own reward"
    )
    engine: SerializeAsAny[RolloutEngine.Settings] = Field(
        default="transformers",  # pyright: ignore
        description="rollout engine: its name, or a mapping of name and settings",
    )
    sampler: SerializeAsAny[Sampler] = Field(
        default="uniform",  # pyright: ignore
        description="prompt sampler: its name, or a mapping of name and settings",
    )
    prompt: PromptFormat = PromptFormat()
    sampling: Sampling = Sampling()
    dynamic_sampling: int = Field(
        default=1,
        ge=1,
        description="most batches of prompts that a step may sample to replace groups of equal rewards, which cost "
        "too (DAPO, arXiv:2503.14476, eq. 11); 1: no group is replaced",
    )
    cold_start: ColdStart = ColdStart()
    optimizer: Optimizer = Optimizer()
    critic: CriticStart = CriticStart()
    kl: KLControl = KLControl()
    mismatch: Mismatch = Mismatch()
    lora: LoRA | None = Field(default=None, description="low-rank adapters; by default none: all weights are trained")
    evaluation: EvaluationSettings = EvaluationSettings()
    checkpoints: Checkpoints = Checkpoints()
    gates: Gates = Gates()
    control: Control | None = Field(
        default=None,
        description="control arm: rewards that replace the run's own, which are then only measured (random, "
        "format_only, inverted, shuffled_gold), or a policy that does not learn (frozen); by default no control",
    )
    rollouts_per_step: int = Field(
        default=128, ge=1, le=1_000_000, description="completions per training step; algorithm.group_size divides it"
    )
    staleness: int = Field(
        default=0,
        ge=0,
        description="training steps by which the sampling weights lag; old log-probs are "
        "the sampler's, or the learner's with a mismatch.correction",
    )
    steps: int = Field(
        default=100, ge=0, description="training steps; 0: only evaluate; by default the sum over stages"
    )
    stages: tuple[dict[str, Any], ...] = Field(
        default=(),
        exclude_if=lambda stages: not stages,  # so that a run without any has the digest that it always had
        description="stages that the run goes through: name, kind, steps and what each changes (docs/pipelines.md)",
    )
    max_flops: float | None = Field(
        default=None, gt=0, description="training operations, without evaluations and cold start, that end the run"
    )
    seed: int = Field(default=0, ge=0, le=MAX_INTEGER, description="seed of all randomness; a study sets it")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda if available, otherwise cpu")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="precision of weights and optimiser; bfloat16 loses small updates"
    )
    autocast: bool = Field(default=False, description="forward passes in bfloat16 over float32 weights and optimiser")
    gradient_checkpointing: bool | Literal["auto"] = Field(
        default="auto",
        description="recompute activations: less memory, more time; auto: on a GPU, unless the run is alone there and "
        "fits without, or has max_flops",
    )
    devices: int = Field(default=1, ge=1, description="GPUs (on a CPU: processes) that share its weights and rows")

    @field_validator("dtype", mode="before")
    @classmethod
    def _usual_names(cls, value: Any) -> Any:
        """The precision by the short name that other libraries take."""
        return {"bf16": "bfloat16", "fp32": "float32"}.get(value, value) if isinstance(value, str) else value

    plugin_fields: ClassVar[tuple[plugins.Kind, ...]] = ("task", "algorithm", "sampler", "engine")

    @field_validator(*plugin_fields, mode="before")
    @classmethod
    def _plugins(cls, value: Any, info: ValidationInfo) -> Any:
        """A plugin's settings from a name or a mapping."""
        return plugin_settings(cast(plugins.Kind, info.field_name), value)

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards(cls, value: Any, info: ValidationInfo) -> Any:
        """The given rewards, plus the algorithm's own unless it is among them, ordered by name.

        `algorithm` is declared before `rewards`, so it is validated by now; it is absent if it was refused.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"rewards must be a mapping of names to weights or settings, got {value!r}")
        given = {str(name): reward_settings(str(name), settings) for name, settings in value.items()}
        return dict(sorted({**implied_rewards(info.data.get("algorithm"), info.data.get("overlong")), **given}.items()))

    @model_validator(mode="after")
    def _settings_agree(self) -> Self:
        algorithm = self.algorithm.name
        for name, reward in self.rewards.items():
            if reward.sees_gold and reward.weight and not self.algorithm.sees_gold:
                fix = f"remove it, or set rewards.{name}=0 to measure it only"
                rule = f"rewards.{name} sees gold answers, and {algorithm} must not"
                raise ValueError(f"{rule}; got weight {reward.weight}; {fix}")
            if reward.needs_partial_credit and not self.task.partial_credit:
                rule = f"rewards.{name}.partial must be false for {self.task.name}, whose answers are right or wrong"
                raise ValueError(f"{rule}, got true; remove it")
        if self.overlong == "penalise" and not self.rewards["overlong"].weight:
            rule = "rewards.overlong must have a weight other than 0 with overlong=penalise"
            raise ValueError(f"{rule}, got {self.rewards['overlong'].weight:g}; remove one of the two")
        weighed = [name for name, reward in self.rewards.items() if reward.weight]
        if not self.algorithm.learns_from_rewards:
            if weighed:
                rule = f"rewards must have weight 0 for {algorithm}, which learns from kl.reference alone"
                raise ValueError(f"{rule}; got {self.rewards[weighed[0]].weight} for {weighed[0]}")
            key = "dynamic_sampling" if self.dynamic_sampling > 1 else "control"
            if (value := getattr(self, key)) not in (1, None, "frozen"):
                raise ValueError(f"{key}={value} reads rewards, and {algorithm} learns from none; leave it out")
        elif not weighed:
            raise ValueError(f"rewards must have a weight other than 0, got 0 for {', '.join(self.rewards)}")
        if self.control in ("inverted", "shuffled_gold") and not self.algorithm.sees_gold:
            rule = f"control must be random, format_only or frozen for {algorithm}, which must not see gold answers"
            raise ValueError(f"{rule}, got {self.control}")
        if self.sampler.sees_gold and not self.algorithm.sees_gold:
            rule = f"sampler must not see gold answers with {algorithm}, which must not"
            raise ValueError(f"{rule}, got {self.sampler.name}; use uniform")
        if (last := self.evaluation.test_last) > 1 and (self.max_flops is not None or self.stages):
            why = "stages" if self.stages else "max_flops, whose last step is not known"
            raise ValueError(f"evaluation.test_last must be 1 with {why}, got {last}")
        if last > (most := 1 + max(0, self.steps - 1) // self.evaluation.every):
            rule = f"evaluation.test_last must be at most the number of evaluations after the first step ({most})"
            raise ValueError(f"{rule}, got {last}; lower it or evaluation.every")
        warmup = self.critic.warmup_steps
        for name, value in self.critic.model_dump().items():
            if not self.algorithm.needs_critic and value != (off := CriticStart.model_fields[name].default):
                rule = f"critic.{name} must be {off} for {algorithm}, which has no critic"
                raise ValueError(f"{rule}, got {value}; use ppo")
        if 0 < self.steps <= warmup:
            rule = f"critic.warmup_steps must be less than steps ({self.steps}), or the policy never learns"
            raise ValueError(f"{rule}, got {warmup}; lower it or raise steps")
        if self.kl.reference is not None and not self.algorithm.needs_reference:
            raise ValueError(f"kl.reference belongs to algorithm.kl_beta above 0, got {algorithm} without; remove it")
        if self.kl.schedule != "constant" and not self.algorithm.kl_beta:
            raise ValueError(f"kl.schedule must be constant for {algorithm} without kl_beta, got {self.kl.schedule}")
        if self.kl.schedule == "cosine":
            try:
                type(self.algorithm).model_validate({**self.algorithm.model_dump(), "kl_beta": 0.0})
            except ValidationError:
                rule = f"kl.schedule must not be cosine for {algorithm}, whose kl_beta must not fall to 0"
                raise ValueError(rule) from None
        if self.mismatch.correction != "none" and not self.algorithm.linear_in_advantages:
            rule = f"mismatch.correction must be none for {algorithm}, whose loss is not linear in its advantages"
            raise ValueError(f"{rule}, got {self.mismatch.correction}")
        if self.overlong == "mask" and self.algorithm.pairs_rows:
            rule = f"overlong must not be mask for {algorithm}, whose loss needs both completions of a pair"
            raise ValueError(f"{rule}; use count or penalise")
        if self.dynamic_sampling > 1 and self.algorithm.group_size == 1:
            rule = "dynamic_sampling must be 1 with algorithm.group_size=1, whose groups never differ"
            raise ValueError(f"{rule}, got {self.dynamic_sampling}")
        if self.kl.refresh_reference_every and self.lora is not None:
            raise ValueError("kl.refresh_reference_every must be 0 with lora, whose reference has no adapter")
        if self.staleness and not cast(type[RolloutEngine], plugins.load("engine", self.engine.name)).exact_logprobs:
            rule = f"staleness must be 0 with engine={self.engine.name}, which keeps separate weights"
            raise ValueError(f"{rule}, got {self.staleness}; use engine=transformers")
        group, least, rollouts = self.algorithm.group_size, self.algorithm.min_group_size, self.rollouts_per_step
        if group < least:
            raise ValueError(f"algorithm.group_size must be at least {least} for {algorithm}, got {group}")
        _must_divide("algorithm.group_size", group, rollouts)
        _must_divide("optimizer.num_minibatches", self.optimizer.num_minibatches, rollouts)
        _must_divide("devices", self.devices, rollouts // self.optimizer.num_minibatches, "rollouts of a minibatch")
        _must_divide("engine.tensor_parallel_size", self.engine.processes, self.devices, "devices")
        return self

    @model_validator(mode="after")
    def _stages_agree(self) -> Self:
        """Fills in all settings that `stages` leave out, and `steps` by their sum."""
        for name, value in (completed(self) if self.stages else {}).items():
            object.__setattr__(self, name, value)
        return self

    def staged(self) -> list[Stage]:
        """The stages in order; without any, the run as the only one."""
        return staged(self)

    @property
    def num_rollouts(self) -> int:
        """Completions that training samples, at least."""
        return sum(stage.num_rollouts for stage in self.staged())

    @property
    def prompts_per_step(self) -> int:
        return self.rollouts_per_step // self.algorithm.group_size

    @property
    def max_tokens(self) -> int:
        """The completion limit in tokens: of the sampling section, or else of the task."""
        return self.sampling.max_tokens or self.task.max_completion_tokens

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps that each batch of rollouts receives."""
        return self.optimizer.num_inner_epochs * self.optimizer.num_minibatches

    def sampling_with_limit(self) -> Sampling:
        """The sampling settings with `max_tokens` filled in from the task."""
        return self.sampling.model_copy(update={"max_tokens": self.max_tokens})

    @property
    def tests(self) -> dict[str, Self]:
        """Name -> these settings with another test for their task; completions keep their limit."""
        limited = self.model_copy(update={"sampling": self.sampling_with_limit()})
        return {task.name: limited.model_copy(update={"task": task}) for task in self.evaluation.tests}

    def digest(self) -> str:
        """A stable hash (16 hex digits) of every setting except the number of devices, which a resumed run may
        change."""
        return digest(self.model_dump(mode="json", exclude={"devices"}))


def _must_divide(name: str, value: int, rollouts: int, of: str = "rollouts_per_step") -> None:
    if rollouts % value:
        divisors = [d for d in range(1, rollouts + 1) if rollouts % d == 0]
        near = [*[d for d in divisors if d < value][-1:], *[d for d in divisors if d > value][:1]]
        raise ValueError(f"{name} must divide {of} ({rollouts}), got {value}; use {' or '.join(map(str, near))}")


def parse_run(raw: Mapping[str, Any], where: str) -> RunSpec:
    """The run that a mapping describes; otherwise SpecError with `where`, key, rule and value."""
    return parsed(RunSpec, raw, where)


def get_path(spec: Section | Mapping[str, Any], dotted: str) -> Scalar:
    """The value at a dotted path of a RunSpec or its JSON (a reward's weight for a reward); None if there is none."""
    value: Any = spec
    for key in dotted.split("."):
        if isinstance(value, list | tuple):  # of stages, by their names
            value = next((item for item in value if get_path(item, "name") == key), None)
        else:
            value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    if isinstance(value, Reward):
        return value.weight
    return value.name if isinstance(value, Section) and hasattr(value, "name") else value  # pyright: ignore
