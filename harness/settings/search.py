"""The settings of a search: which values it may try, how many arms, and which of Optuna's samplers and pruners."""

import math
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ..data import Section
from .raw import MAX_INTEGER
from .run import Scalar

Seed = Annotated[int, Field(ge=0, le=MAX_INTEGER)]


class Dimension(Section):
    """The values that a search may give to one setting: choices, or a range (of integers if both ends are)."""

    low: int | float | None = None
    high: int | float | None = None
    log: bool = Field(default=False, description="sample the range on a logarithmic scale")
    choices: list[Scalar] | None = Field(default=None, min_length=1)

    @model_validator(mode="after")
    def _one_kind(self) -> Self:
        if self.choices is not None:
            if {self.low, self.high} != {None} or self.log:
                raise ValueError("choices cannot be combined with low, high or log")
            if any(choice in self.choices[:i] for i, choice in enumerate(self.choices)):
                raise ValueError(f"choices must be distinct, got {self.choices}")
            return self
        if self.low is None or self.high is None:
            raise ValueError("a dimension must have low and high, or choices")
        if self.low >= self.high:
            raise ValueError(f"low must be below high, got {self.low} and {self.high}")
        if self.log and self.low <= 0:
            raise ValueError(f"log must have low above 0, got {self.low}")
        return self

    @property
    def whole(self) -> bool:
        return isinstance(self.low, int) and isinstance(self.high, int)

    @property
    def size(self) -> float:
        """The number of values; infinite for a range of floats."""
        if self.choices is not None:
            return len(self.choices)
        assert self.low is not None and self.high is not None
        return self.high - self.low + 1 if self.whole else math.inf

    def probes(self) -> list[Scalar]:
        """The values that are checked before a study starts: all choices, a short range whole, else both its ends."""
        if self.choices is not None:
            return list(self.choices)
        assert self.low is not None
        return [self.low + i for i in range(int(self.size))] if self.size <= 64 else [self.low, self.high]


Space = Annotated[dict[str, Dimension], Field(description="full path of a setting -> range or choices")]


class Search(Section):
    """A search over settings by one of Optuna's samplers; the value of an arm is the metric's mean over all seeds.

    In a comparison, every algorithm has the same search on every task, on `seeds` of its own; the best arm of each then
    runs with the study's seeds.
    """

    space: Space = Field(default_factory=dict)
    spaces: dict[str, Space] = Field(default_factory=dict, description="comparison: algorithm -> further dimensions")
    trials: int = Field(ge=1, description="number of arms; each runs with every seed; a search alone may gain more")
    seeds: list[Seed] = Field(
        default_factory=list, description="comparison: seeds of the searched arms; must differ from the study's seeds"
    )
    sampler: Literal["tpe", "gp", "random"] = Field(default="tpe", description="Optuna sampler")
    pruner: Literal["none", "median", "hyperband"] = Field(
        default="none", description="stops arms that fall behind; the seeds of an arm then run in order"
    )

    @model_validator(mode="after")
    def _searchable(self) -> Self:
        paths = {*self.space, *(path for space in self.spaces.values() for path in space)}
        if "seed" in paths:
            raise ValueError("'seed' cannot be searched, because seeds are replicates; list seeds under 'seeds'")
        if self.pruner != "none" and (fixed := paths & {"steps", "evaluation.every"}):
            raise ValueError(f"search.pruner compares arms at equal steps; take '{min(fixed)}' out of search.space")
        return self

    def of(self, algorithm: str) -> Self:
        """The search for one algorithm. ValueError if it searches nothing, or too few points."""
        space = {**self.space, **self.spaces.get(algorithm, {})}
        if not space:
            raise ValueError(f"search.space must have a setting to search{f' for {algorithm}' if algorithm else ''}")
        size = math.prod(dimension.size for dimension in space.values())
        if self.trials > size:
            raise ValueError(f"search.trials must be at most the points of the space ({size:g}), got {self.trials}")
        return self.model_copy(update={"space": space, "spaces": {}})
