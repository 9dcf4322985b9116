"""The settings of a study: the question, its arms and seeds, and the design that turns factors into arms."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from ..base.arms import GREY, PALETTE, component_arm, short_path
from ..base.inputs import digest
from ..base.words import quoted
from ..data import Section
from .claim import Claim, Listed, Weights
from .effect import identical, inert
from .errors import SpecError, did_you_mean, parsed
from .raw import with_overrides
from .run import Control, RunSpec, Scalar, get_path, parse_run
from .search import Search, Seed

MAX_ARMS = 10_000
REFERENCE = {"leave_one_out": "all", "add_one_in": "none", "ladder": "none"}  # design -> label of its baseline


@dataclass(frozen=True)
class Arm:
    """One arm of a comparison: a readable label, its dotted overrides, and its level of each factor.

    `spec` is its validated run, whose seed is ignored. Only final arms enter the comparison: "tuning" arms choose
    settings, and an "exploratory" arm is a clone of another arm, made while the study ran.
    """

    label: str
    overrides: Mapping[str, Any]
    levels: Mapping[str, Scalar]
    spec: RunSpec = field(repr=False)
    phase: Literal["final", "tuning", "exploratory"] = "final"

    @cached_property
    def digest(self) -> str:
        """A hash of `spec`: arms of one study with equal digests are the same run."""
        return self.spec.digest()

    def run_spec(self, seed: int) -> RunSpec:
        """The complete run of one trial. The study has already validated its seeds."""
        return self.spec.model_copy(update={"seed": seed})


@dataclass(frozen=True)
class SearchPlan:
    """One search of a study: its name ("" for the only one), base, space, and the seeds of every arm.

    The best arm also runs with the `final_seeds`, if there are any, as the final arm called `name`.
    """

    name: str
    base: Arm
    search: Search
    seeds: tuple[int, ...]
    final_seeds: tuple[int, ...] = ()


class CompareDesign(Section):
    """Algorithms x tasks; each is a name, or a mapping of a name and settings, which override the run's settings."""

    algorithms: list[str | dict[str, Any]] = Field(min_length=1, description="names, or mappings of name and settings")
    tasks: list[str | dict[str, Any]] = Field(min_length=1, description="names, or mappings of a name and settings")
    controls: list[Control] = Field(
        default_factory=list, description="control arms of the first algorithm on each task, beside the comparison"
    )

    @model_validator(mode="after")
    def _named(self) -> Self:
        for kind in ("algorithms", "tasks", "controls"):
            names = [item if isinstance(item, str) else item.get("name") for item in getattr(self, kind)]
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"compare.{kind} must be names, or mappings with a 'name', got {getattr(self, kind)}")
            if len(set(names)) != len(names):
                raise ValueError(f"compare.{kind} must be distinct, got {', '.join(names)}")
        return self


class StudySpec(Section):
    """A question, the base run, the settings that vary, and the seeds that replicate each arm.

    `factors` maps a dotted RunSpec path to its levels; `arms` maps a label to several overrides at once. `grid` takes
    every combination of arms and factors, `one_at_a_time` the base run and each level alone, `compare` every algorithm
    on every task, `leave_one_out` all `components` and each one left out, `add_one_in` none and each one alone,
    `ladder` none and one after the other added; a `search` finds its arms while it runs. The run section is kept as
    written.

    A study expands itself once, on first use, into arms with their validated runs. `model_copy` would keep these arms,
    so to change a study, change its mapping and parse it again.
    """

    dotted_keys: ClassVar[tuple[str, ...]] = ("factors", "arms", "components", "search.space")  # their keys have dots

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=80, description="by default the file's name")
    question: str = Field(min_length=1, description="the question that the study answers, in one sentence")
    run: dict[str, Any] = Field(description="settings of the run that all arms share; see `cohort list settings`")
    factors: dict[str, list[Any]] = Field(default_factory=dict, description="full path of a setting -> its levels")
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict, description="label -> settings by full path")
    components: dict[str, dict[str, Any]] = Field(default_factory=dict, description="name -> settings by full path")
    seeds: list[Seed] = Field(default=[0, 1, 2], min_length=1, description="seeds of every arm")
    any_time: bool = Field(default=False, description="wider intervals and tests, which hold however seeds are added")
    pairing: Literal["seeds", "none"] = Field(default="seeds", description="arms seed by seed, or as independent runs")
    design: Literal["grid", "one_at_a_time", "leave_one_out", "add_one_in", "ladder", "search", "compare"] = Field(
        default="grid", description="how the arms follow from the other settings: see docs/studies.md"
    )
    search: Search | None = None
    compare: CompareDesign | None = None
    metric: str = Field(default="validation/accuracy", description="metric by which arms are compared")
    baseline: str | None = Field(default=None, description="arm to compare with, by label or level; else the first")
    claim: Annotated[list[Claim], Listed] = Field(default_factory=list, description="predictions fixed at the start")

    @field_validator("factors", mode="before")
    @classmethod
    def _by_full_path(cls, factors: Any) -> Any:
        for path, levels in factors.items() if isinstance(factors, Mapping) else ():
            if isinstance(levels, Mapping) and levels:
                if levels.keys() <= {"low", "high", "log", "step"}:
                    fix = f"list its levels, or search: design: search, search: {{space: {{{path}: {dict(levels)}}}}}"
                    raise ValueError(f"levels of factor '{path}' must be a list, got the range {dict(levels)}; {fix}")
                key, inner = next(iter(levels.items()))
                rule = f"factors must be named by their full path, got '{path}' with nested settings"
                raise ValueError(f"{rule}; write '{path}.{key}: {inner}'")
            if not isinstance(levels, list):
                raise ValueError(f"levels of factor '{path}' must be a list, got {levels!r}; write [{levels}]")
        return factors

    @field_validator("seeds", mode="before")
    @classmethod
    def _listed(cls, seeds: Any) -> Any:
        if isinstance(seeds, int):
            shown = list(range(seeds)) if 0 < seeds <= 20 else [seeds]
            raise ValueError(f"seeds must be a list of seeds, got {seeds}; write seeds: {shown}")
        return seeds

    @model_validator(mode="after")
    def _sections_fit_the_design(self) -> Self:
        owners = {"search": ("search", "compare"), "compare": ("compare",), "components": tuple(REFERENCE)}
        for section, designs in owners.items():
            needed = section == self.design or (section == "components" and self.design in designs)
            if getattr(self, section) and self.design not in designs:
                raise ValueError(f"section '{section}' must have design {' or '.join(designs)}, got {self.design}")
            if needed and not getattr(self, section):
                raise ValueError(f"design {self.design} must have a section '{section}', got none")
        if self.design in ("search", "compare", *REFERENCE) and (self.factors or self.arms):
            raise ValueError(f"design {self.design} takes neither factors nor arms; use grid for them")
        if self.design == "one_at_a_time" and self.arms:
            raise ValueError("design one_at_a_time varies factors around the base run; use grid with 'arms'")
        if self.design in REFERENCE and self.baseline not in (None, reference := REFERENCE[self.design]):
            raise ValueError(f"baseline of design {self.design} must be '{reference}', got '{self.baseline}'")
        if self.design == "search" and (self.baseline is not None or self.claim):
            raise ValueError("a search has no arm names beforehand; leave 'baseline' and 'claim' out")
        return self

    @model_validator(mode="after")
    def _seeds_replicate(self) -> Self:
        if len(set(self.seeds)) != len(self.seeds):
            raise ValueError(f"seeds must be distinct, got {self.seeds}")
        if self.any_time and self.design == "search":
            raise ValueError("any_time must be false in a search, got true; leave it out")
        return self

    @model_validator(mode="after")
    def _searches_what_it_may(self) -> Self:
        if self.search is None:
            return self
        if self.metric.startswith("test/"):
            raise ValueError(f"a search must not see the test split, got {self.metric}; use validation/...")
        if self.compare is None:
            if self.search.spaces or self.search.seeds:
                raise ValueError("search.spaces and search.seeds belong to design compare; leave them out")
            self.search.of("")
            return self
        if not self.search.seeds:
            raise ValueError("search.seeds must list seeds with design compare, got none")
        if both := sorted(set(self.seeds) & set(self.search.seeds)):
            raise ValueError(f"search.seeds must differ from the study's seeds {self.seeds}, got {both} in both")
        names = [item if isinstance(item, str) else item["name"] for item in self.compare.algorithms]
        if unknown := self.search.spaces.keys() - set(names):
            raise ValueError(f"search.spaces must name compared algorithms, got '{min(unknown)}'")
        for name in names:
            self.search.of(name)
        return self

    @model_validator(mode="after")
    def _arms_can_be_told_apart(self) -> Self:
        for kind, labels in (("arms", self.arms), ("components", self.components)):
            for label in labels:
                if not label.isprintable() or " ".join(label.split()) != label or not 0 < len(label) <= 100:
                    rule = f"labels of {kind} must be 1 to 100 printable characters with single spaces"
                    raise ValueError(f"{rule}, got {label!a:.200} ({len(label)}); rename it")
        for (one, mine), (other, theirs) in itertools.combinations(self.components.items(), 2):
            for path, held in itertools.product(mine, theirs):  # with both on, their order would decide its value
                if f"{path}.".startswith(f"{held}.") or held.startswith(f"{path}."):
                    raise ValueError(f"components must not share a setting, got {path} in '{one}' and in '{other}'")
        if empty := [name for name, settings in self.components.items() if not settings]:
            raise ValueError(f"components must set something, got nothing in '{empty[0]}'")
        for path, levels in self.factors.items():
            if path == "seed":
                raise ValueError("'seed' cannot be a factor, because seeds are replicates; list seeds under 'seeds'")
            if not levels:
                raise ValueError(f"factor '{path}' has no levels; list at least one")
            if any(isinstance(level, list | dict) for level in levels):
                raise ValueError(f"levels of factor '{path}' must be plain values; use 'arms' for several settings")
            if any(level in levels[:i] for i, level in enumerate(levels)):
                raise ValueError(f"factor '{path}' names a level twice: {levels}")
        return self

    def design_arms(self) -> list[Arm]:
        """Every arm that is known before the study runs, in order, including the baseline; empty for a search.

        SpecError if an arm is not a valid run.
        """
        return [] if self.search is not None else list(self._known)

    def searches(self) -> list[SearchPlan]:
        """The searches of the study: none, one, or one for each algorithm and task of a tuned comparison."""
        if self.search is None:
            return []
        search, own = self.search, tuple(self.seeds)
        seeds, final = (own, ()) if self.compare is None else (tuple(search.seeds), own)
        found = ((base, search.of(base.overrides.get("algorithm.name", ""))) for base in self._known)
        return [SearchPlan(base.label, base, one, seeds, final) for base, one in found]

    def arm_labels(self) -> list[str]:
        """Labels of the compared arms that are known before the study runs."""
        return [] if self.design == "search" else [arm.label for arm in self._known]

    def claimed(self) -> list[list[Weights]]:
        """The contrasts of each claim. SpecError for one that does not fit the arms other than controls."""
        levels = {arm.label: arm.levels for arm in self.design_arms() if arm.spec.control is None}
        try:
            return [claim.contrasts(levels) for claim in self.claim]
        except ValueError as error:
            raise SpecError(f"study '{self.name}': {error}") from None

    def arm_colors(self) -> dict[str, str]:
        """The colour of each known arm on pages, as in a report without results."""
        labels = self.arm_labels()
        if len(labels) <= len(PALETTE):
            return dict(zip(labels, PALETTE))  # noqa: B905  # there may be more colours than arms
        return dict.fromkeys(labels, GREY) | {self.baseline or labels[0]: PALETTE[0]}

    def checked_arms(self) -> list[Arm]:
        """The arms to validate: the design's arms, and for each search its base and the base with single changes."""
        return list(self._known if self.search is None else self._probes)

    def changed(self, base: Arm, label: str, point: Mapping[str, Any]) -> Arm:
        """An arm with other values. SpecError if the values do not give a valid run."""
        overrides, levels = {**base.overrides, **point}, {**base.levels, **point}
        return replace(base, label=label, overrides=overrides, levels=levels, spec=self._parse(overrides))

    @property
    def devices(self) -> int:
        """The largest number of devices of a trial; every worker has as many."""
        return max(arm.spec.devices for arm in self.checked_arms())

    def digest(self) -> str:
        """A stable hash of the runs of every arm: it must not change between resumes.

        A study may gain seeds. A search may not, because its arms were judged on its seeds, but it may gain trials.
        Claims may not change, nor may `any_time` and `pairing`.
        """
        known: dict[str, Any] = {arm.label: arm.run_spec(0).model_dump(mode="json") for arm in self.design_arms()}
        for plan in self.searches():
            search = plan.search.model_dump(mode="json", exclude=None if plan.final_seeds else {"trials"})
            base = plan.base.run_spec(0).model_dump(mode="json")
            known[f"search/{plan.name}"] = {"base": base, "search": search, "seeds": list(plan.seeds)}
        known |= {"seeds": {"any_time": True}} if self.any_time else {}
        known |= {"pairing": "none"} if self.pairing == "none" else {}
        if self.claim:
            known["claim"] = [claim.model_dump(mode="json") for claim in self.claim]
        return digest(known)

    @cached_property
    def _known(self) -> list[Arm]:
        """The arms of the design, or the base of each search."""
        if self.design == "search":
            return [Arm("", {}, {}, self._parse({}))]
        arms = self._varied() if self.compare is None else self._compared(self.compare)
        labels = [arm.label for arm in arms]
        if self.baseline is not None and self.baseline not in labels and not self._within_levels(arms):
            fix = f"{did_you_mean(self.baseline, labels)}arms: {quoted(labels)}"
            raise SpecError(f"study '{self.name}': baseline must be an arm's label, got '{self.baseline}'; {fix}")
        return arms

    @cached_property
    def _probes(self) -> list[Arm]:
        arms = []
        for plan in self.searches():
            arms.append(replace(plan.base, label=plan.name or "base"))
            for path, dimension in plan.search.space.items():
                for value in dimension.probes():
                    label = ", ".join(filter(None, [plan.name, arm_label({path: value})]))
                    arms.append(self.changed(plan.base, label, {path: value}))
        return arms

    def _varied(self) -> list[Arm]:
        """The arms of a grid, of one_at_a_time or of components."""
        arms: dict[str, Arm] = {}
        label_of: dict[str, str] = {}  # digest -> label
        named, names = self.arms, []
        if self.components:  # the reference and then n arms
            names = list(self.components)
            chosen = {REFERENCE[self.design]: names if self.design == "leave_one_out" else []}
            for place, name in enumerate(names):
                others = [other for other in names if other != name]
                on = {"leave_one_out": others, "add_one_in": [name], "ladder": names[: place + 1]}[self.design]
                chosen[component_arm(self.design, name)] = on
            named = {arm: {k: v for name in on for k, v in self.components[name].items()} for arm, on in chosen.items()}
        if self.design == "one_at_a_time":
            single = [{path: level} for path, levels in self.factors.items() for level in levels]
            points = [("", point) for point in [{}, *single]]
        else:
            num_arms = math.prod(map(len, self.factors.values())) * max(len(named), 1)
            if num_arms > MAX_ARMS:
                rule = f"study '{self.name}': a grid must have at most {MAX_ARMS:,} arms"
                raise SpecError(f"{rule}, got {num_arms:,}; take fewer levels, or design: search")
            grid = [dict(zip(self.factors, c, strict=True)) for c in itertools.product(*self.factors.values())]
            points = [(name, point) for name in (named or [""]) for point in grid]
        for name, point in points:
            overrides = {**named.get(name, {}), **point}
            spec = self._parse(overrides)
            levels: dict[str, Scalar] = {"arm": name} if named else {}
            levels |= {path: get_path(spec, path) for path in self.factors}
            shown = {path: levels[path] for path in point} if self.design == "one_at_a_time" else levels
            label = arm_label(shown) or "base"
            arm = Arm(label, overrides, levels, spec)
            same = label_of.get(arm.digest)
            if same is not None and self.design == "one_at_a_time":
                continue  # the base run has this level
            if (same is not None and not self.components) or label in arms:
                raise SpecError(f"study '{self.name}': arms '{same or label}' and '{label}' are the same; remove one")
            label_of[arm.digest] = label
            arms[label] = arm
        if not self.components:
            self._check_effects(arms)
        before = list(arms.values())
        for place, name in enumerate(names):
            pair = [before[place if self.design == "ladder" else 0].spec, arms[component_arm(self.design, name)].spec]
            on, off = pair if self.design == "leave_one_out" else pair[::-1]
            if reason := _why_inert(self.components[name], on, off):
                raise SpecError(f"study '{self.name}': component '{name}' cannot matter: {reason}")
        return list(arms.values())

    def references(self) -> dict[str, str]:
        """Arm -> the arm that it is compared with, where that is not the baseline for all: in a ladder the step before,
        with a level for a baseline the arm that has this level and is alike otherwise."""
        arms = [arm for arm in self.design_arms() if arm.spec.control is None]
        if self.design == "ladder":
            return {arm.label: before.label for arm, before in zip(arms[1:], arms, strict=False)}
        return {} if self.baseline in [arm.label for arm in arms] else self._within_levels(arms)

    def _within_levels(self, arms: Sequence[Arm]) -> dict[str, str]:
        """The same for a baseline that is a level of a factor, such as `plain` or `kl_beta=0.04`; empty for others."""
        for factor in dict.fromkeys(path for arm in arms for path in arm.levels):
            rest = {arm.label: tuple(level for path, level in arm.levels.items() if path != factor) for arm in arms}
            at = {rest[a.label]: a.label for a in arms if arm_label({factor: a.levels[factor]}) == self.baseline}
            if at and self.design in ("grid", "compare"):
                return {arm: at[place] for arm, place in rest.items() if place in at and at[place] != arm}
        return {}

    def identical_arms(self) -> list[tuple[list[str], str]]:
        """(labels, reason) for each group of arms that are identical by construction, as `effect.identical`."""
        return identical({arm.label: arm.spec.model_dump(mode="json") for arm in self.design_arms()})

    def _check_effects(self, arms: Mapping[str, Arm]) -> None:
        """SpecError for arms that cannot differ: all arms of a factor, or any two where only one thing varies.

        In a grid of several, a level may matter at some levels of the others only: those arms are named elsewhere.
        """
        groups = identical({arm.label: arm.spec.model_dump(mode="json") for arm in arms.values()})
        twin = {label: number for number, (labels, _) in enumerate(groups) for label in labels}
        varied = [path for path in ("arm", *self.factors) if len({arm.levels.get(path) for arm in arms.values()}) > 1]
        for path in varied if len(varied) > 1 and self.design == "grid" else ():
            rest: dict[Any, set[Any]] = defaultdict(set)
            for arm in arms.values():
                place = tuple(level for name, level in arm.levels.items() if name != path)
                rest[place].add(twin.get(arm.label, arm.label))
            if all(len(effects) == 1 for effects in rest.values()):
                raise SpecError(f"study '{self.name}': factor '{path}' cannot matter: {groups[0][1]}")
        if groups and (len(varied) <= 1 or self.design == "one_at_a_time"):
            labels, reason = groups[0]
            raise SpecError(f"study '{self.name}': arms '{labels[0]}' and '{labels[1]}' cannot differ: {reason}")

    def _compared(self, compare: CompareDesign) -> list[Arm]:
        """Every algorithm on every task of a comparison; labels leave out what all arms have in common."""
        several = {"algorithm": len(compare.algorithms) > 1, "task": len(compare.tasks) > 1}
        arms = []
        for pair in itertools.product(compare.algorithms, compare.tasks):
            overrides: dict[str, Any] = {}
            levels: dict[str, Scalar] = {}
            for kind, item in zip(("algorithm", "task"), pair, strict=True):
                settings = {"name": item} if isinstance(item, str) else item
                overrides |= {f"{kind}.{key}": value for key, value in settings.items()}
                if several[kind] or (kind == "algorithm" and not any(several.values())):
                    levels[f"{kind}.name"] = settings["name"]
            arms.append(Arm(arm_label(levels), overrides, levels, self._parse(overrides)))
        for arm, control in itertools.product(arms[: len(compare.tasks)], compare.controls):
            overrides, levels = {**arm.overrides, "control": control}, {**arm.levels, "control": control}
            arms.append(Arm(f"{arm.label}, control {control}", overrides, levels, self._parse(overrides)))
        return arms

    def _parse(self, overrides: Mapping[str, Any]) -> RunSpec:
        seed = {} if self.search is None else {"seed": self.seeds[0]}  # a search ignores the seed of its base run
        return parse_run(with_overrides(self.run, {**overrides, **seed}), where=f"study '{self.name}'")


def parse_study(raw: Mapping[str, Any], where: str) -> StudySpec:
    """The study that a mapping describes, with every arm validated; otherwise SpecError."""
    if raw.get("design") == "imported":
        raise SpecError(f"{where}: a study must have settings to run, got imported scores; use cohort report")
    study = parsed(StudySpec, raw, where)
    controlled = [arm for arm in study.checked_arms() if arm.spec.control is not None]
    if controlled and study.search is not None:
        raise SpecError(f"{where}: a study that searches must have no control; leave controls out")
    study.claimed()
    for arm in controlled:
        if arm.label == (study.baseline or study.arm_labels()[0]) or arm.label in study.references().values():
            got, fix = f"'{arm.label}' ({arm.spec.control})", "name another arm with baseline"
            raise SpecError(f"{where}: the baseline must not be a control, got {got}; {fix}")
    return study


def _why_inert(component: Mapping[str, Any], on: RunSpec, off: RunSpec) -> str:
    """The reason that a component's setting cannot change a run; empty if it can.

    Such a component is refused: its effect is 0 by construction, and a rank among others would hide that.
    """
    with_it, without = on.model_dump(mode="json"), off.model_dump(mode="json")
    reasons, others = inert(with_it), inert(without)
    for path in component:
        value = get_path(with_it, path)
        if value == get_path(without, path):
            return f"{path} is {value} without the component too"
        if path in reasons and path in others:
            return f"{path} {reasons[path]}"
    return ""


def arm_label(levels: Mapping[str, Scalar], digits: int = 0) -> str:
    """The one label of an arm at these levels, in files, tables, figures and errors: `ppo, group_size=2, kl_beta=0.04`.

    A number has as many digits as tell it from others, or `digits`.
    """
    named = ("arm", "algorithm.name", "task.name")
    told = {path: _value(level, digits) for path, level in levels.items()}
    return ", ".join(text if path in named else f"{short_path(path)}={text}" for path, text in told.items())


def _value(level: Scalar, digits: int) -> str:
    if isinstance(level, float):
        text = f"{level:.{digits or 6}g}"
        return text if digits or float(text) == level else repr(level)
    text = str(level)
    return text if text.isprintable() else repr(text)[1:-1]
