"""The stages of a run: what each trains or keeps, which settings it changes, and at which steps it begins and ends.

A stage has the settings of a whole run (`settings.run.RunSpec`, which completes its stages with this file, and so lies
above it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from pydantic import Field

from .. import plugins
from ..data import Section
from ..interfaces import RolloutEngine
from .errors import parsed
from .plugged import implied_rewards

RunSpec = Any
Kind = Literal["train", "rejection_sampling", "reward_model"]  # of a stage
_OF_A_FIT = {"steps", "rollouts_per_step", "sampling", "optimizer"}  # settings of a run that a stage may change
_OF_A_STAGE = _OF_A_FIT | {
    "algorithm", "critic", "dynamic_sampling", "gates", "high_entropy_tokens", "kl", "mismatch", "overlong", "rewards",
    "sampler",
}  # fmt: skip
_CHANGED = {"train": _OF_A_STAGE, "rejection_sampling": _OF_A_FIT, "reward_model": set()}


class Rejection(Section):
    """The answers that a stage of rejection sampling fine-tunes on: correct ones, not cut by the token limit."""

    num_prompts: int = Field(default=512, ge=1, description="training problems; all when there are fewer")
    num_samples: int = Field(default=8, ge=1, le=10_000, description="completions of each")
    keep: int = Field(default=1, ge=1, description="distinct correct completions kept of each, the first ones")
    restart: bool = Field(default=False, description="fine-tune the policy that the run started from")
    teacher: str | None = Field(
        default=None, min_length=1, description="model that answers: a Hub id or a folder; by default the policy"
    )


class RewardFit(Section):
    """A Bradley-Terry fit of a reward model on ranked rollouts (AdamW, constant rate)."""

    epochs: int = Field(default=3, ge=1, description="passes over the rollouts")
    prompts_per_batch: int = Field(default=16, ge=1, description="prompts per optimiser step, with all completions")
    learning_rate: float = Field(default=1e-4, gt=0, description="learning rate")
    replay: float = Field(default=0.1, ge=0, le=1, description="share of the older rollouts, which earlier fits had")


_SECTIONS = {"rejection_sampling": ("rejection", Rejection), "reward_model": ("fit", RewardFit)}  # by the stage's kind


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its training steps `start + 1` to `end`, counted over the whole run, and its settings.

    ValueError if its rewards read the model of a stage that is not among those `before` it.
    """

    name: str
    spec: RunSpec
    start: int = 0
    kind: Kind = "train"
    rejection: Rejection | None = None
    fit: RewardFit | None = None
    before: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        self.placed(str)

    @property
    def end(self) -> int:
        return self.start + self.spec.steps

    @property
    def kept(self) -> range:
        """The steps of the run whose rollouts it keeps."""
        every = self.spec.checkpoints.rollouts_every
        if self.kind == "train" and every:
            return range(self.start + 1 + -self.start % every, self.end + 1, every)
        return range(self.start + 1, self.start + 1 + (self.rejection is not None))

    @property
    def sources(self) -> tuple[list[int], list[int]]:
        """The steps whose rollouts a fit takes: all since the fit before it, and older ones."""
        last = max((stage.end for stage in self.before if stage.fit), default=0)
        steps = [step for stage in self.before for step in stage.kept]
        return [step for step in steps if step > last], [step for step in steps if step <= last]

    def placed(self, folder: Callable[[str], str]) -> RunSpec:
        """Its settings with the rewards that it pays, of which some read the models of stages at `folder(name)`."""
        fits = [stage.name for stage in self.before if stage.fit]

        def found(name: str) -> str:
            if name in fits:
                return folder(name)
            rule = f"{self.name and f'stage {self.name!r}: '}rewards must read an earlier stage of kind reward_model"
            raise ValueError(f"{rule} ({', '.join(fits) or 'there is none'}), got '{name}'; add it before")

        rewards = self.spec.rewards if self.kind == "train" else {}
        return self.spec.model_copy(update={"rewards": {key: one.placed(found) for key, one in rewards.items()}})

    @property
    def num_rollouts(self) -> int:
        """Completions that the stage samples, at least."""
        if self.fit is not None:
            return 0
        if self.rejection is not None:
            return self.rejection.num_prompts * self.rejection.num_samples
        greedy = self.spec.prompts_per_step if self.spec.algorithm.needs_greedy else 0
        return self.spec.steps * (self.spec.rollouts_per_step + greedy)


def staged(spec: RunSpec) -> list[Stage]:
    """The stages of a run in order; without any, the run as the only one."""
    found: list[Stage] = []
    for raw in spec.stages:
        found.append(_stage(spec, raw, tuple(found)))
    return found or [Stage("", spec)]


def completed(spec: RunSpec) -> dict[str, Any]:
    """The fields `stages`, with what they leave out, and `steps`, by default their sum, of a run with stages."""
    names = [str(stage.get("name", "")) for stage in spec.stages]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise ValueError(f"stages must have distinct words as names, got {', '.join(names)}")
    for key, off in (("devices", 1), ("staleness", 0), ("lora", None)):
        if (value := getattr(spec, key)) != off:
            rule = f"{key} must be left out with stages, which train all weights in one process"
            raise ValueError(f"{rule}, got {value}")
    stages = staged(spec)
    if any(stage.kind != "train" for stage in stages):
        blind = [s.spec.algorithm.name for s in stages if s.kind == "train" and not s.spec.algorithm.sees_gold]
        if blind or spec.control not in (None, "frozen"):
            why = f"{blind[0]} must not see gold answers" if blind else f"control {spec.control} replaces them"
            raise ValueError(f"stages that keep or rank correct answers need them, and {why}; use one of the two")
    total = sum(stage.spec.steps for stage in stages)
    steps = spec.steps if "steps" in spec.model_fields_set else total
    if steps > total:
        raise ValueError(f"steps must be at most those of the stages, {total}, got {steps}; leave it out")
    complete = []
    for stage, raw in zip(stages, spec.stages, strict=True):
        whole = stage.spec.model_dump(mode="json")
        own = {key: whole[key] for key in raw if key in whole}
        own |= {key: v.model_dump(mode="json") for key, _ in _SECTIONS.values() if (v := getattr(stage, key))}
        complete.append({"name": stage.name, "kind": stage.kind, **own})
    return {"stages": tuple(complete), "steps": steps}


def _stage(run: RunSpec, raw: Mapping[str, Any], before: tuple[Stage, ...]) -> Stage:
    """A stage from what it changes; its sections change single settings, and its rewards take the others' place."""
    name, kind = str(raw["name"]), raw.get("kind", "train")
    where, start = f"stage '{name}'", before[-1].end if before else 0
    if kind not in get_args(Kind):
        raise ValueError(f"{where}: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    own = {key: value for key, value in raw.items() if key not in ("name", "kind", "rejection", "fit")}
    for key in own:
        if key in type(run).model_fields and key not in _CHANGED[kind]:
            of = f"stages of kind train, got kind {kind}" if key in _OF_A_STAGE else "the whole run; set it there"
            raise ValueError(f"{where}: {key} belongs to {of}")
    for of, (key, _) in _SECTIONS.items():
        if key in raw and kind != of:
            raise ValueError(f"{where}: {key} belongs to kind {of}, got kind {kind}")
    own |= {"steps": 1} if kind == "reward_model" else {}
    if own.get("steps", 0) == 0:
        raise ValueError(f"{where}: steps must be at least 1, got {own.get('steps', 'none')}")
    common = run.model_dump(mode="json", exclude={"stages"} if kind == "train" else {"stages", "critic"})
    implied = implied_rewards(run.algorithm, run.overlong)  # those of another algorithm are others
    given = {key: common["rewards"][key] for key, reward in run.rewards.items() if reward != implied.get(key)}
    for key, value in own.items():
        section = common.get(key)
        if isinstance(value, Mapping) and isinstance(section, Mapping) and key != "rewards":
            is_other = value.get("name") not in (None, section.get("name"))  # plugin, which has settings of its own
            own[key] = value if is_other else {**section, **value}
    spec = parsed(type(run), {**common, "rewards": given, **own}, where)
    key, section = _SECTIONS.get(kind, ("", None))
    settings: Any = {key: parsed(section, raw.get(key, {}), f"{where}: {key}")} if section else {}
    stage = Stage(name, spec, start, kind, before=before, **settings)
    if stage.fit and not stage.sources[0]:
        rule = f"{where} must have rollouts to fit, which the stages since the last fit keep"
        every = run.checkpoints.rollouts_every
        raise ValueError(f"{rule}, got none with checkpoints.rollouts_every={every}; set it to 1")
    teacher = stage.rejection and stage.rejection.teacher
    if teacher and not cast(type[RolloutEngine], plugins.load("engine", run.engine.name)).exact_logprobs:
        rule = f"{where}: rejection.teacher must be left out with engine={run.engine.name}"
        raise ValueError(f"{rule}, which keeps its weights, got {teacher}; use engine=transformers")
    return stage
