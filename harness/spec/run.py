"""The settings of a training run: a validated, frozen, serialisable value; every setting is written in one place.

Settings of a plugin (algorithm, task, engine, reward) are fields of the plugin's own class, so a file is checked
against the classes that it names.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import (
    Field,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from cohort.harness import plugins
from cohort.harness.inputs import digest
from cohort.harness.interfaces import Algorithm, Reward, RolloutEngine, Task
from cohort.harness.spec.errors import explain, parsed
from cohort.harness.spec.raw import MAX_INTEGER, is_number
from cohort.harness.types import PromptFormat, Sampling, Section

Scalar = bool | int | float | str | None
Control = Literal["random", "format_only", "inverted", "shuffled_gold", "frozen"]


class ColdStart(Section):
    """Supervised warm start on the task's worked solutions, shared by every arm and seed (AdamW, constant rate)."""

    steps: int = Field(default=0, ge=0, description="optimiser steps; 0 starts from the model as it is")
    batch_size: int = Field(default=32, ge=1, description="worked solutions of each step")
    learning_rate: float = Field(default=3e-3, gt=0, description="of AdamW, constant")
    seed: int = Field(default=0, ge=0, le=MAX_INTEGER, description="data order and, for `tiny`, initial weights")


class Optimizer(Section):
    """AdamW for the policy (and, separately, the critic) and the number of updates that a batch receives."""

    learning_rate: float = Field(default=1e-4, gt=0, description="of the policy")
    critic_learning_rate: float = Field(default=3e-4, gt=0, description="of the critic, where the algorithm has one")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant", description="of both learning rates after the warm-up; linear and cosine end at 0"
    )
    warmup_steps: int = Field(default=0, ge=0, description="training steps over which the rates rise linearly")
    weight_decay: float = Field(default=0.0, ge=0, description="decoupled from the gradient (AdamW)")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="decay of the mean of gradients")
    beta2: float = Field(default=0.999, ge=0, lt=1, description="decay of the mean of their squares")
    max_grad_norm: float = Field(default=1.0, gt=0, description="gradient clipping by global norm")
    num_inner_epochs: int = Field(default=1, ge=1, description="mu: passes over each batch of rollouts")
    num_minibatches: int = Field(default=1, ge=1, description="optimiser steps per pass; divides rollouts_per_step")
    tokens_per_microbatch: int | None = Field(
        default=None, ge=1, description="padded tokens in one forward: memory and speed; by default 1024, 8192 on a GPU"
    )


class DynamicSampling(Section):
    """Replace groups of equal rewards by groups of further prompts, within a budget (DAPO, arXiv:2503.14476, eq. 11);
    replaced groups are charged like all others."""

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
    """The correction where the engine's probabilities differ from the learner's."""

    correction: Literal["none", "truncated", "masked"] = Field(
        default="none", description="importance weights, cut at the bound, or 0 outside [1 / bound, bound]"
    )
    level: Literal["token", "sequence"] = Field(default="token", description="one weight per token, or per completion")
    bound: float = Field(default=2.0, gt=1, description="of the weights")


class LoRA(Section):
    """Train low-rank adapters instead of all weights (arXiv:2106.09685); the reference is the model without them."""

    rank: int = Field(default=16, ge=1, description="of each adapter's two matrices")
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
    num_test_samples: int | None = Field(
        default=None,
        ge=1,
        exclude_if=lambda value: value is None,  # runs from before the setting keep their digest
        description="the same for test problems, if it differs",
    )
    test_at_start: bool = Field(
        default=False,
        exclude_if=lambda value: not value,  # likewise
        description="score the test problems before training too, for curves of pass@k before and after",
    )
    temperature: float = Field(default=1.0, gt=0, description="of the k samples; the greedy one has none")

    def samples_of(self, split: str) -> int:
        """Samples of each problem of a split."""
        return self.num_test_samples or self.num_samples if split == "test" else self.num_samples


class Checkpoints(Section):
    """The files that a run keeps: enough to resume, and whole batches of rollouts to read, regrade or rank."""

    every: int = Field(default=20, ge=1, description="training steps between checkpoints")
    keep: int = Field(default=2, ge=1, description="newest checkpoints that stay while the run lasts")
    finished: Literal["nothing", "weights"] | None = Field(
        default=None,
        description="what stays when the run has ended; by default nothing of a study's trial, else the weights",
    )
    rollouts_every: int = Field(
        default=20, ge=0, description="training steps between batches kept in rollouts/; the first is; 0: none"
    )


class Gates(Section):
    """Bounds on the measurements of every step: a run beyond one ends INVALID; null turns one off. A non-finite loss or
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
    return plugins.settings_class(kind, str(fields["name"])).model_validate(dict(fields))


def _reward(name: str, settings: Any) -> Reward:
    """A reward from its weight, from a mapping of its settings, or as it is."""
    if isinstance(settings, Reward):
        return settings
    cls = plugins.load("reward", name)
    if is_number(settings):
        settings = {"weight": settings}
    if not isinstance(settings, Mapping):
        raise ValueError(f"rewards.{name} must be a weight or a mapping of settings, got {settings!r}")
    try:
        return cls.model_validate(dict(settings))  # pyright: ignore[reportAttributeAccessIssue]
    except ValidationError as error:
        raise ValueError(explain(error, cls, settings, f"rewards.{name}")) from None


class RunSpec(Section):
    """One training run, complete: two runs with equal specs give equal results on one machine."""

    model: str = Field(default="tiny", min_length=1, description="'tiny', a Hub id or a local folder")
    task: SerializeAsAny[Task] = Field(description="its name, or a mapping of name and settings")
    algorithm: SerializeAsAny[Algorithm] = Field(description="its name, or a mapping of name and settings")
    rewards: dict[str, SerializeAsAny[Reward]] = Field(
        default_factory=dict, description="name -> weight, or settings; added to the algorithm's own reward"
    )
    engine: SerializeAsAny[RolloutEngine.Settings] = Field(
        default="transformers",  # pyright: ignore
        description="what samples: its name, or a mapping of name and settings",
    )
    prompt: PromptFormat = PromptFormat()
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
    control: Control | None = Field(
        default=None,
        exclude_if=lambda value: value is None,  # runs from before the setting keep their digest
        description="what completions earn instead of the rewards, which are measured only (random, format_only, "
        "inverted, shuffled_gold), or a policy that stands still (frozen); none by default",
    )
    rollouts_per_step: int = Field(
        default=128, ge=1, le=1_000_000, description="completions sampled in a step; algorithm.group_size divides it"
    )
    staleness: int = Field(
        default=0,
        ge=0,
        exclude_if=lambda value: not value,  # likewise
        description="training steps by which the weights that sample are behind those that learn; old log-probs are "
        "the sampler's, or the learner's with a mismatch.correction",
    )
    steps: int = Field(default=100, ge=0, description="training steps; 0 evaluates the start alone")
    max_flops: float | None = Field(
        default=None,
        gt=0,
        exclude_if=lambda value: value is None,  # likewise
        description="operations of training after which the run ends, if `steps` have not ended it before; those of "
        "evaluations and of the cold start do not count",
    )
    seed: int = Field(
        default=0, ge=0, le=MAX_INTEGER, description="of all noise; in a study its `seeds` take the place of this"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda where there is one")
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="of weights and optimiser too: bfloat16 saves memory and loses small updates"
    )
    autocast: bool = Field(default=False, description="forward passes in bfloat16 over float32 weights and optimiser")
    gradient_checkpointing: bool = Field(default=False, description="less memory for a second forward pass")
    devices: int = Field(
        default=1, ge=1, description="GPUs (on a CPU: processes) that share the run: weights are spread over them"
    )

    plugin_fields: ClassVar[tuple[plugins.Kind, ...]] = ("task", "algorithm", "engine")

    @field_validator(*plugin_fields, mode="before")
    @classmethod
    def _plugins(cls, value: Any, info: ValidationInfo) -> Any:
        return _plugin(info.field_name, value)  # pyright: ignore[reportArgumentType]

    @field_validator("rewards", mode="before")
    @classmethod
    def _rewards(cls, value: Any, info: ValidationInfo) -> Any:
        """The rewards that are given and the algorithm's own, unless it is given too, in the order of their names.

        `algorithm` is declared before `rewards`, so it has been validated; it is absent if it was refused.
        """
        if not isinstance(value, Mapping):
            raise ValueError(f"rewards must be a mapping of names to weights or settings, got {value!r}")
        given = {str(name): _reward(str(name), settings) for name, settings in value.items()}
        weights = info.data["algorithm"].default_rewards if "algorithm" in info.data else {}
        own = {name: _reward(name, weight) for name, weight in weights.items()}
        return dict(sorted({**own, **given}.items()))

    @model_validator(mode="after")
    def _may_use_its_rewards(self) -> Self:
        for name, reward in self.rewards.items():
            if reward.sees_gold and reward.weight and not self.algorithm.sees_gold:
                raise ValueError(
                    f"rewards.{name} sees gold answers, and {self.algorithm.name} must not; got weight "
                    f"{reward.weight}; remove it, or set rewards.{name}=0 to measure it only"
                )
            if reward.needs_partial_credit and not self.task.partial_credit:
                raise ValueError(
                    f"rewards.{name}.partial must be false for {self.task.name}, whose answers are right or wrong, "
                    "got true; remove it"
                )
        if not any(reward.weight for reward in self.rewards.values()):
            raise ValueError(f"rewards must have a weight other than 0, got 0 for {', '.join(self.rewards)}")
        if self.control in ("inverted", "shuffled_gold") and not self.algorithm.sees_gold:
            raise ValueError(
                f"control must be random, format_only or frozen for {self.algorithm.name}, which must not see gold "
                f"answers, got {self.control}"
            )
        return self

    @model_validator(mode="after")
    def _fits_the_algorithm(self) -> Self:
        if self.kl.schedule != "constant" and not self.algorithm.kl_beta:
            raise ValueError(
                f"kl.schedule must be constant for {self.algorithm.name} without kl_beta, got {self.kl.schedule}"
            )
        if self.kl.schedule == "cosine":
            _must_accept(self.algorithm, kl_beta=self.kl.final_scale * self.algorithm.kl_beta)
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
    def _can_be_stale(self) -> Self:
        if self.staleness and self.devices > 1:
            raise ValueError(f"staleness must be 0 with several devices, got {self.staleness}; set devices=1")
        if self.staleness and not cast(type[RolloutEngine], plugins.load("engine", self.engine.name)).exact_logprobs:
            raise ValueError(
                f"staleness must be 0 with engine={self.engine.name}, which has weights of its own, got "
                f"{self.staleness}; use engine=transformers"
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
        _must_divide("devices", self.devices, rollouts // self.optimizer.num_minibatches, "rollouts of a minibatch")
        return self

    @property
    def prompts_per_step(self) -> int:
        return self.rollouts_per_step // self.algorithm.group_size

    @property
    def max_tokens(self) -> int:
        """The completion limit: the sampling's own, or else the task's."""
        return self.sampling.max_tokens or self.task.max_completion_tokens

    @property
    def updates_per_step(self) -> int:
        """Optimiser steps that each batch of rollouts receives."""
        return self.optimizer.num_inner_epochs * self.optimizer.num_minibatches

    def sampling_with_limit(self) -> Sampling:
        """The sampling settings with `max_tokens` filled in from the task."""
        return self.sampling.model_copy(update={"max_tokens": self.max_tokens})

    def digest(self) -> str:
        """A stable hash (16 hex digits) of every setting but the number of devices, which a resumed run may change."""
        return digest(self.model_dump(mode="json", exclude={"devices"}))


def _must_accept(algorithm: Algorithm, *, kl_beta: float) -> None:
    """ValueError if the KL weight at which a schedule ends is out of the algorithm's own range."""
    try:
        type(algorithm).model_validate({**algorithm.model_dump(), "kl_beta": kl_beta})
    except ValidationError as error:
        raise ValueError(
            f"kl.final_scale * algorithm.kl_beta must be a kl_beta of {algorithm.name}, got {kl_beta:g}: "
            f"{error.errors()[0]['msg'].lower()}; change kl.final_scale, or set kl.schedule=constant"
        ) from None


def _must_divide(name: str, value: int, rollouts: int, of: str = "rollouts_per_step") -> None:
    if rollouts % value:
        divisors = [d for d in range(1, rollouts + 1) if rollouts % d == 0]
        near = [*[d for d in divisors if d < value][-1:], *[d for d in divisors if d > value][:1]]
        fix = " or ".join(map(str, near))
        raise ValueError(f"{name} must divide {of} ({rollouts}), got {value}; use {fix}")


def parse_run(raw: Mapping[str, Any], where: str) -> RunSpec:
    """The run that a mapping describes; SpecError naming `where`, key, rule and value otherwise."""
    return parsed(RunSpec, raw, where)


def get_path(spec: Section | Mapping[str, Any], dotted: str) -> Scalar:
    """The value of a dotted path of a RunSpec or its JSON, of a reward its weight; None without such a setting."""
    value: Any = spec
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, Mapping) else getattr(value, key, None)
    if isinstance(value, Reward):
        return value.weight
    return value.name if isinstance(value, Section) and hasattr(value, "name") else value  # pyright: ignore
