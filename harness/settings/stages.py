"""The stages of a run: what each trains or keeps, which settings it changes, and at which steps it begins and ends.

A stage has the settings of a whole run (`settings.run.RunSpec`, which completes its stages with this file, and so lies
above it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from .. import plugins
from ..interfaces import StageKind
from .errors import parsed
from .plugged import implied_rewards

RunSpec = Any
_MAY_CHANGE = frozenset({  # settings of a run, in a stage that learns from rewards
    "algorithm", "critic", "dynamic_sampling", "gates", "high_entropy_tokens", "kl", "mismatch", "optimizer",
    "overlong", "rewards", "rollouts_per_step", "sampler", "sampling", "steps",
})  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """A stage of a run: its training steps `start + 1` to `end`, counted over the whole run, and its settings.

    It learns from rewards, unless it `does` something else. ValueError if its rewards read the model of a stage that is
    not among those `before` it.
    """

    name: str
    spec: RunSpec
    start: int = 0
    does: StageKind | None = None
    before: tuple[Stage, ...] = ()

    def __post_init__(self) -> None:
        self.placed()

    @property
    def end(self) -> int:
        return self.start + self.spec.steps

    @property
    def kept(self) -> range:
        """The steps of the run whose rollouts it keeps."""
        every = self.spec.checkpoints.rollouts_every
        if self.does is None and every:
            return range(self.start + 1 + -self.start % every, self.end + 1, every)
        return range(self.start + 1, self.start + 1 + (self.does is not None and self.does.keeps_rollouts))

    def placed(self, directory: Path | None = None) -> RunSpec:
        """Its settings with the rewards that it pays in a run's folder, or without one as `Reward.placed` estimates."""
        rewards = self.spec.rewards if self.does is None else {}
        placed = {name: reward.placed(self, directory) for name, reward in rewards.items()}
        return self.spec.model_copy(update={"rewards": placed})

    @property
    def num_rollouts(self) -> int:
        """Completions that the stage samples, at least."""
        if self.does is not None:
            return self.does.num_rollouts()
        greedy = self.spec.prompts_per_step if self.spec.algorithm.needs_greedy else 0
        return self.spec.steps * (self.spec.rollouts_per_step + greedy)


def staged(spec: RunSpec) -> list[Stage]:
    """The stages of a run in order; without any, the run as the only one."""
    found: list[Stage] = []
    for raw in spec.stages:
        found.append(_stage(spec, raw, tuple(found)))
    return found or [Stage("", spec)]


def completed(spec: RunSpec) -> dict[str, Any]:
    """The fields `stages`, with all settings filled in, and `steps`, by default their sum, of a run with stages."""
    names = [str(stage.get("name", "")) for stage in spec.stages]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise ValueError(f"stages must have distinct words as names, got {', '.join(names)}")
    for key, off, why in (
        ("staleness", 0, "whose first rollouts come from the newest weights"),
        ("lora", None, "which train all weights"),
    ):
        if (value := getattr(spec, key)) != off:
            raise ValueError(f"{key} must be left out with stages, {why}, got {value}")
    stages = staged(spec)
    if any(stage.does for stage in stages):
        blind = [s.spec.algorithm.name for s in stages if not s.does and not s.spec.algorithm.sees_gold]
        if blind or spec.control not in (None, "frozen"):
            why = f"{blind[0]} must not see gold answers" if blind else f"control {spec.control} replaces them"
            raise ValueError(f"stages that keep or rank correct answers need them, and {why}; use one of the two")
    total = sum(stage.spec.steps for stage in stages)
    steps = spec.steps if "steps" in spec.model_fields_set else total
    if steps > total:
        raise ValueError(f"steps must be at most the sum over the stages, {total}, got {steps}; leave it out")
    complete = []
    for stage, raw in zip(stages, spec.stages, strict=True):
        whole = stage.spec.model_dump(mode="json")
        own = {key: whole[key] for key in raw if key in whole}
        own |= {stage.does.section: stage.does.model_dump(mode="json")} if stage.does else {}
        complete.append({"name": stage.name, "kind": raw.get("kind", "train"), **own})
    return {"stages": tuple(complete), "steps": steps}


def _stage(run: RunSpec, raw: Mapping[str, Any], before: tuple[Stage, ...]) -> Stage:
    """A stage from its changes to the run; its sections change single settings, its rewards replace the run's."""
    name, kind = str(raw["name"]), raw.get("kind", "train")
    where, start = f"stage '{name}'", before[-1].end if before else 0
    if kind not in (known := ["train", *plugins.names("stage")]):
        raise ValueError(f"{where}: kind must be one of {', '.join(known)}, got {kind!r}")
    does, may_change = None, _MAY_CHANGE
    if kind != "train":
        cls = cast(type[StageKind], plugins.load("stage", kind))
        does, may_change = parsed(cls, raw.get(cls.section, {}), f"{where}: {cls.section}"), cls.may_change
    own = {key: value for key, value in raw.items() if key not in ("name", "kind", does and does.section)}
    for key in own:
        if key in type(run).model_fields and key not in may_change:
            of = f"stages of kind train, got kind {kind}" if key in _MAY_CHANGE else "the whole run; set it there"
            raise ValueError(f"{where}: {key} belongs to {of}")
    own |= {} if "steps" in may_change else {"steps": 1}
    if own.get("steps", 0) == 0:
        raise ValueError(f"{where}: steps must be at least 1, got {own.get('steps', 'none')}")
    common = run.model_dump(mode="json", exclude={"stages"} if does is None else {"stages", "critic"})
    implied = implied_rewards(run.algorithm, run.overlong)  # another algorithm implies others
    given = {key: common["rewards"][key] for key, reward in run.rewards.items() if reward != implied.get(key)}
    for key, value in own.items():
        section = common.get(key)
        if isinstance(value, Mapping) and isinstance(section, Mapping) and key != "rewards":
            is_other = value.get("name") not in (None, section.get("name"))  # plugin, which has settings of its own
            own[key] = value if is_other else {**section, **value}
    spec = parsed(type(run), {**common, "rewards": given, **own}, where)
    stage = Stage(name, spec, start, does, before)
    if does is not None:
        does.check(stage)
    return stage
