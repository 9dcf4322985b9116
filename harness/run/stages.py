"""Reads a file of stages; each is a separate run that starts from the policy of the stage before."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from ..data import Section
from ..spec.errors import SpecError, parsed
from ..spec.raw import parse_overrides, read_yaml, with_overrides
from ..spec.run import ColdStart, RunSpec, parse_run

Kind = Literal["train", "rejection_sampling"]


class Rejection(Section):
    """Decides which of its own answers a policy is fine-tuned on."""

    num_prompts: int = Field(default=512, ge=1, description="training problems; all when there are fewer")
    num_samples: int = Field(default=8, ge=1, description="completions of each")
    keep: int = Field(default=1, ge=1, description="distinct correct completions kept of each, the first ones")
    restart: bool = Field(default=False, description="fine-tune the policy that the pipeline started from")


@dataclass(frozen=True)
class Stage:
    """One stage; the model of `spec` is the pipeline's until the stage runs."""

    name: str
    kind: Kind
    spec: RunSpec
    rejection: Rejection = field(default_factory=Rejection)
    fit: ColdStart = field(default_factory=ColdStart)

    def document(self) -> dict[str, Any]:
        result = {"name": self.name, "kind": self.kind, "spec": self.spec.model_dump(mode="json")}
        if self.kind == "rejection_sampling":
            result |= {"rejection": self.rejection.model_dump(mode="json"), "fit": self.fit.model_dump(mode="json")}
        return result


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> list[Stage]:
    """The stages of a file, each validated; otherwise SpecError.

    `overrides` are `path=value`, of all stages, or of one as `stages.<name>.<path>=value`.
    """
    raw = read_yaml(path)
    common, own = {}, {}
    for dotted, value in parse_overrides(overrides).items():
        (own if dotted.startswith("stages.") else common)[dotted] = value
    base = {key: value for key, value in raw.items() if key != "stages"}
    stages = raw["stages"]
    if not isinstance(stages, list) or not stages or not all(isinstance(s, dict) and s.get("name") for s in stages):
        raise SpecError(f"{path}: stages must be a list of mappings with a name, got {stages!r:.80}")
    names = [str(stage["name"]) for stage in stages]
    if len(set(names)) != len(names) or not all(name.isidentifier() for name in names):
        raise SpecError(f"{path}: names of stages must be distinct words, got {', '.join(names)}")
    for dotted, value in own.items():
        name, _, rest = dotted.removeprefix("stages.").partition(".")
        if name not in names or not rest:
            raise SpecError(f"--set {dotted}: must be stages.<name>.<path> with a name of {', '.join(names)}")
        place = names.index(name)
        stages[place] = with_overrides(stages[place], {rest: value})
    base = with_overrides(base, common)
    return [_stage(base, stage, place, f"{path}, stage '{stage['name']}'") for place, stage in enumerate(stages)]


def policy_folder(stage: Stage, folder: Path) -> Path:
    """The folder of a complete stage's policy."""
    if stage.kind == "rejection_sampling":
        return folder / "policy"
    return folder / "checkpoints" / f"step-{stage.spec.steps:08d}" / "policy"


def _stage(base: Mapping[str, Any], raw: Mapping[str, Any], place: int, where: str) -> Stage:
    """One stage from the file's common settings and its own; SpecError if it is not a valid run."""
    kind = raw.get("kind", "train")
    if kind not in get_args(Kind):
        raise SpecError(f"{where}: kind must be one of {', '.join(get_args(Kind))}, got {kind!r}")
    own = {key: value for key, value in raw.items() if key not in ("name", "kind", "rejection", "fit")}
    if place and "cold_start" not in own:
        own["cold_start"] = {"steps": 0}  # the common one is the first stage's
    spec = parse_run(_merged(base, own), where)
    if kind == "train":
        extra = [key for key in ("rejection", "fit") if key in raw]
        if extra:
            raise SpecError(f"{where}: '{extra[0]}' belongs to kind: rejection_sampling, got kind: train")
        if spec.steps < 1:
            raise SpecError(f"{where}: steps must be at least 1, got {spec.steps}; a cold start is part of a stage")
        if spec.checkpoints.finished == "nothing":
            raise SpecError(
                f"{where}: checkpoints.finished must be weights, from which the next stage starts, got nothing"
            )
        return Stage(str(raw["name"]), kind, spec)
    fit = parsed(ColdStart, raw.get("fit", {}), f"{where}: fit")
    if fit.steps < 1:
        raise SpecError(f"{where}: fit.steps must be at least 1, got {fit.steps}")
    rejection = parsed(Rejection, raw.get("rejection", {}), f"{where}: rejection")
    return Stage(str(raw["name"]), kind, spec, rejection, fit)


def _merged(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of a stage change single settings of the common ones; its rewards replace the common ones."""
    dotted: dict[str, Any] = {}
    for key, value in own.items():
        if isinstance(value, Mapping) and key != "rewards":
            dotted |= {f"{key}.{inner}": item for inner, item in value.items()}
        else:
            dotted[key] = value
    return with_overrides(base, dotted)
