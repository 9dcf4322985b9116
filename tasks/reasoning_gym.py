"""Reasoning Gym (Stojanovski et al. 2025, arXiv:2505.24760): procedural problems, each with its own verifier.

The package makes the problems and scores answers from 0 to 1; a score of exactly 1 is correct, and the rest is partial
credit. It runs in a child process (`tasks._gym_child`), and an answer that is not scored within the limits scores 0. A
split is a stream of problems with its own seed; equal prompts count once, and those of test are left out of all other
splits, those of validation out of train.

A gold answer ends in the split and the number of its problem, such as `(8-6)*4 [test 17]`, so that the verifier finds
the problem again. A completion's answer cannot end like this, because that part is cut off.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import ClassVar, Literal, NamedTuple

from pydantic import Field, JsonValue, field_validator

from ..harness.data import Demonstration, Prompt, Split
from ..harness.ground.inputs import REVISION, Sources
from ._answers import AnswerFormat, AnswerTask, last_resort_latex, write
from ._child import GRACE_SECONDS, Children
from ._data import stable_id
from ._gym_child import MAKE_SECONDS, PATIENCE

MAX_ANSWER_CHARS = 4000
SCORE_SECONDS = 3.0  # of processor time for one answer
MAKE_AT_ONCE = 8

_TEMPLATES: Mapping[AnswerFormat, str] = {
    "hash": "{question}\nReason step by step; end with #### and the answer on one line.\nAnswer:\n",
    "boxed": "{question}\nReason step by step; end with the answer in \\boxed{}.\nAnswer:\n",
    "think_answer": "{question}\nReason step by step in <think>...</think>; then give the answer in "
    "<answer>...</answer>.\nAnswer:\n",
}
# A generator's problem i follows from seed + i, so the seeds are far apart.
_SEEDS = {"test": 0, "validation": 100_000_000, "train": 200_000_000, "demonstrations": 300_000_000}
_LEAVES_OUT = {
    "test": (),
    "validation": ("test",),
    "train": ("test", "validation"),
    "demonstrations": ("test", "validation"),
}
_KEY = re.compile(r"\{(\w+)\}")
_TAG = re.compile(r"\[(test|validation|train) (\d{1,9})\]$")


class Part(NamedTuple):
    """A stream of problems, made by the generator with this seed."""

    dataset: str
    settings: str  # JSON
    seed: int
    size: int


class Item(NamedTuple):
    """One problem, with the generator's own answer, if any, and the fields that the template names."""

    question: str
    answer: str | None
    fields: tuple[str, ...]


class ReasoningGym(AnswerTask):
    """A generator of the package, by its name and settings; needs `pip install 'cohort-rl[gym]'`."""

    partial_credit: ClassVar[bool] = True

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field("chain_sum", min_length=1, description="the generator's name, such as countdown")
    settings: dict[str, JsonValue] = Field(
        default_factory=dict, description="the generator's own settings, but for seed and size"
    )
    num_demonstrations: int = Field(default=1024, ge=1, le=100_000, description="worked solutions, at most")
    num_train: int = Field(default=2048, ge=1, le=100_000, description="problems for reinforcement learning, at most")
    num_validation: int = Field(default=256, ge=1, le=100_000, description="validation problems, at most")
    num_test: int = Field(default=512, ge=1, le=100_000, description="test problems, at most")
    answer_format: AnswerFormat = Field("think_answer", description="how prompts and demonstrations ask for answers")
    template: str = Field(
        "",
        description="the prompt; {question}, or a generator's own fields, such as {numbers} -> {target}; "
        "by default the answer format's own",
    )

    @field_validator("settings")
    @classmethod
    def _leaves_the_streams_alone(cls, value: dict[str, JsonValue]) -> dict[str, JsonValue]:
        if taken := sorted({"seed", "size"} & value.keys()):
            raise ValueError(f"settings must leave {taken[0]} to the splits; remove it, and set num_train and the like")
        return value

    @field_validator("template")
    @classmethod
    def _has_place(cls, value: str) -> str:
        if value and not _KEY.search(value):
            raise ValueError(f"template must contain {{question}}, or another part of a problem, got {value!r}")
        return value

    @property
    def max_completion_tokens(self) -> int:
        return 512

    def inputs(self, split: Split) -> Sources:
        """The version of the package, which decides problems and scores."""
        return {"package reasoning-gym": {REVISION: gym_version()}}

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [
            Prompt(stable_id(f"{split} {index} {item.question}"), text, f"{item.answer or ''} [{split} {index}]")
            for index, text, item in self._problems(split)
        ]

    def demonstrations(self) -> Iterator[Demonstration]:
        """The generator's own answers to problems of a further stream; empty if it has no own answers."""
        for _, text, item in self._problems("demonstrations"):
            if item.answer:
                yield Demonstration(text, write(self.answer_format, "", item.answer))

    def read(self, text: str) -> str | None:
        """The text without a problem's tag, and without space at its ends and the ends of its lines."""
        if len(text) > MAX_ANSWER_CHARS:
            return None
        text = text.strip()
        while match := _TAG.search(text):
            text = text[: match.start()].rstrip()
        return "\n".join(line.rstrip() for line in text.splitlines()) or None

    def read_unmarked(self, completion: str) -> Iterator[str]:
        return last_resort_latex(completion)

    def equivalent(self, answer: str, other: str) -> bool:
        """For an answer and a gold answer, whether the verifier's score is 1; otherwise whether the texts agree."""
        if _tag(answer):
            answer, other = other, answer
        return self.score(answer, other) == 1.0

    def score(self, answer: str, gold: str) -> float:
        tag, stated = _tag(gold), self.read(answer)
        if tag is None or stated is None or _tag(answer):
            return float(answer.strip() == gold.strip())
        return gym().ask(("score", self._part(tag[1]), int(tag[2]), stated, gym().cpu_seconds)) or 0.0

    def use_processes(self, count: int) -> None:
        """One child scores for all threads."""

    def allow_overruns(self, count: float | None) -> float:
        return gym().allow_overruns(count)

    def peer_graders(self) -> Mapping[str, Callable[[str, str], tuple[str | None, bool]]]:
        return {}

    def _problems(self, part: str) -> Iterator[tuple[int, str, Item]]:
        """(number, prompt, item) of a part, without repeated prompts and those that it must leave out."""
        template = self.template or _TEMPLATES[self.answer_format]
        keys = tuple(dict.fromkeys(_KEY.findall(template)))
        held_out = {text for other in _LEAVES_OUT[part] for _, text, _ in self._problems(other)}
        kept = set[str]()
        part_ = self._part(part)
        for index in range(part_.size):
            first = index // MAKE_AT_ONCE * MAKE_AT_ONCE
            item = _made(part_, first, min(first + MAKE_AT_ONCE, part_.size), keys)[index - first]
            values = dict(zip(keys, item.fields, strict=True))
            text = _KEY.sub(lambda match, values=values: values[match[1]], template)
            if text not in held_out and text not in kept:
                kept.add(text)
                yield index, text, item
        if not kept:
            raise ValueError(
                f"task.settings of the generator '{self.dataset}' make too few distinct problems for a {part} split; "
                "widen their ranges, or lower num_test and num_validation"
            )

    def _part(self, part: str) -> Part:
        return Part(self.dataset, json.dumps(self.settings, sort_keys=True), _SEEDS[part], getattr(self, f"num_{part}"))


def gym_version() -> str:
    """The version of the package. ValueError if it is not installed."""
    try:
        return version("reasoning-gym")
    except PackageNotFoundError:
        raise ValueError("task reasoning_gym needs a package: pip install 'cohort-rl[gym]'") from None


@cache
def gym() -> Children:
    """The child that makes problems and scores answers for this process."""
    gym_version()
    return Children(
        f"{__package__}._gym_child",
        cpu_seconds=SCORE_SECONDS,
        wait_seconds=PATIENCE * MAKE_SECONDS + GRACE_SECONDS,
        memory_bytes=2**31,
    )


@lru_cache(maxsize=100_000)
def _made(part: Part, first: int, last: int, keys: tuple[str, ...]) -> list[Item]:
    """The problems from `first` to before `last`. ValueError for an invalid generator, settings or keys."""
    rows = gym().ask(("make", part, first, last, keys), is_kept=False)
    if rows is None:
        rows = (
            f"task.settings must let the generator '{part.dataset}' make {last - first} problems within "
            f"{MAKE_SECONDS:g} s and its share of memory"
        )
    if isinstance(rows, str):
        raise ValueError(rows)
    return [Item(question, answer, tuple(fields)) for question, answer, fields in rows]


def _tag(text: str) -> re.Match[str] | None:
    return _TAG.search(text[-100:].rstrip())
