"""Reasoning Gym (Stojanovski et al. 2025, arXiv:2505.24760): procedural problems, each with its own verifier.

The package makes the problems and scores answers from 0 to 1; a score of exactly 1 is correct, and the rest is partial
credit. It runs in a child process (`tasks._child`, which calls `prepare`), and an answer that is not scored within the
limits scores 0. A split is a stream of problems with its own seed; equal prompts count once. All other splits leave out
the prompts of test, and train also leaves out validation's.

A gold answer ends in the split and the number of its problem, such as `(8-6)*4 [test 17]`, so that the verifier finds
the problem again. A completion's answer cannot end like this, because that part is cut off.

Some verifiers evaluate the text of an answer as Python (`eval`, sympy's `parse_expr`). A completion is never evaluated:
if the source of a verifier, or of its imports from the package, could do so, an answer reaches it only if it is plain
arithmetic or a plain list, and a generator whose own answers are more than that is refused.
"""

import ast
import dataclasses
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache, lru_cache
from importlib.util import resolve_name
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue, field_validator

from .....tasks._answers import AnswerFormat, QuestionTask, write
from .....tasks._child import GRACE_SECONDS, Begin, Children
from .....tasks._data import stable_id
from ....base.inputs import Sources, package_source
from ....base.words import did_you_mean
from ....data import Demonstration, Prompt, Split

PACKAGE = "reasoning_gym"
MAX_ANSWER_CHARS = 4000
MAX_PLAIN_CHARS = 200  # of an answer to a verifier that could evaluate it
SCORE_SECONDS = 3.0  # of processor time for one answer
MAKE_SECONDS = 60.0  # the same for problems that are made at once
MAKE_AT_ONCE = 8
PATIENCE = 4.0  # the clock's limit, as a multiple of the limit of processor time

# A generator's problem i follows from seed + i, so the seeds are far apart.
_SEEDS = {"test": 0, "validation": 100_000_000, "train": 200_000_000, "demonstrations": 300_000_000}
_HELD_OUT = ("test", "validation")  # each leaves out the problems before it, other streams leave out both
_KEY = re.compile(r"\{(\w+)\}")
_TAG = re.compile(r"\[(test|validation|train) (\d{1,9})\]\s*$")


# Neither holds a letter, so that there is no name, attribute or call of one; neither a power nor a repeated list.
_PLAIN = re.compile(r"""(?:[-+/(),. \n0-9]|\*(?!\*))*|[-\[\],. \n0-9'"]*""")
_CALLS = {"eval", "exec", "compile", "__import__", "literal_eval", "parse_expr", "sympify", "system"}
_IMPORTS = {"sympy", "subprocess", "pickle"}

Part = tuple[str, str, int, int]  # a stream of problems: generator, its settings as JSON, seed, size


class ReasoningGym(QuestionTask):
    """A generator of the package, by its name and settings; needs `pip install 'cohort-rl[gym]'`."""

    partial_credit: ClassVar[bool] = True
    templates: ClassVar[Mapping[AnswerFormat, str]] = {
        "hash": "{question}\nReason step by step; end with #### and the answer on one line.\nAnswer:\n",
        "boxed": "{question}\nReason step by step; end with the answer in \\boxed{}.\nAnswer:\n",
        "think_answer": "{question}\nReason step by step in <think>...</think>; then give the answer in "
        "<answer>...</answer>.\nAnswer:\n",
    }

    name: Literal["reasoning_gym"] = "reasoning_gym"
    dataset: str = Field(default="chain_sum", min_length=1, description="the generator's name, such as countdown")
    settings: dict[str, JsonValue] = Field(default_factory=dict, description="the generator's, without seed and size")
    num_demonstrations: int = Field(default=1024, ge=1, le=100_000, description="worked solutions, at most")
    num_train: int = Field(default=2048, ge=1, le=100_000, description="problems for reinforcement learning, at most")
    num_validation: int = Field(default=256, ge=1, le=100_000, description="validation problems, at most")
    num_test: int = Field(default=512, ge=1, le=100_000, description="test problems, at most")
    answer_format: AnswerFormat = Field(default="think_answer", description="how prompts ask for answers")
    template: str = Field(
        default="",
        description="the prompt; {question}, or a generator's own fields, such as {numbers} -> {target}; "
        "by default the answer format's own",
    )

    @field_validator("template")
    @classmethod
    def _has_place(cls, value: str) -> str:
        if not _KEY.search(value):
            raise ValueError(f"template must contain {{question}}, or another part of a problem, got {value!r}")
        return value

    @property
    def max_completion_tokens(self) -> int:
        return 512

    def inputs(self, split: Split) -> Sources:
        """The version of the package, which decides problems and scores."""
        return package_source("reasoning-gym", "gym")

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [
            Prompt(stable_id(f"{split} {index} {question}"), text, f"{answer or ''} [{split} {index}]")
            for index, text, question, answer in self._problems(split)
        ]

    def demonstrations(self) -> Iterator[Demonstration]:
        """The generator's own answers to problems of a further stream; empty if it has no own answers."""
        for _, text, _, answer in self._problems("demonstrations"):
            if answer:
                yield Demonstration(text, write(self.answer_format, "", answer))

    def read(self, text: str) -> str | None:
        """The text without a problem's tag, and without space at its ends and the ends of its lines."""
        if len(text) > MAX_ANSWER_CHARS:
            return None
        text = text.strip()
        while match := _TAG.search(text):
            text = text[: match.start()].rstrip()
        return "\n".join(line.rstrip() for line in text.splitlines()) or None

    def equivalent(self, answer: str, other: str) -> bool:
        """For an answer and a gold answer, whether the verifier's score is 1; otherwise whether the texts agree."""
        if _TAG.search(answer):
            answer, other = other, answer
        return self.score(answer, other) == 1.0

    def score(self, answer: str, gold: str) -> float:
        tag, stated = _TAG.search(gold), self.read(answer)
        if tag is None or stated is None or _TAG.search(answer):
            return float(answer.strip() == gold.strip())
        return gym().ask("score", self._part(tag[1]), int(tag[2]), stated, gym().cpu_seconds).answer or 0.0

    def allow_overruns(self, count: float | None) -> float:
        return gym().allow_overruns(count)

    def _problems(self, split: str) -> Iterator[tuple[int, str, str, str | None]]:
        """(number, prompt, question, own answer) of a stream, without repeated prompts and those that it leaves out."""
        keys = tuple(dict.fromkeys(_KEY.findall(self.template)))
        held_out = _HELD_OUT[: _HELD_OUT.index(split)] if split in _HELD_OUT else _HELD_OUT
        taken = {text for other in held_out for _, text, *_ in self._problems(other)}
        kept = set[str]()
        part = self._part(split)
        for first in range(0, part[-1], MAKE_AT_ONCE):
            last = min(first + MAKE_AT_ONCE, part[-1])
            made = gym().ask("make", part, first, last, keys).answer or (
                f"task.settings must let the generator '{self.dataset}' make {last - first} problems within "
                f"{MAKE_SECONDS:g} s and its share of memory"
            )
            if isinstance(made, str):
                raise ValueError(made)
            for index, (question, answer, fields) in enumerate(made, start=first):
                values = dict(zip(keys, fields, strict=True))
                text = _KEY.sub(lambda match, values=values: values[match[1]], self.template)
                if text not in taken and text not in kept:
                    kept.add(text)
                    yield index, text, question, answer
        if not kept:
            raise ValueError(
                f"task.settings of the generator '{self.dataset}' make too few distinct problems for a {split} split; "
                "widen their ranges, or lower num_test and num_validation"
            )

    def _part(self, split: str) -> Part:
        return self.dataset, json.dumps(self.settings, sort_keys=True), _SEEDS[split], getattr(self, f"num_{split}")


@cache
def gym() -> Children:
    """The child that makes problems and scores answers for this process."""
    package_source("reasoning-gym", "gym")
    wait_seconds = PATIENCE * MAKE_SECONDS + GRACE_SECONDS
    return Children(__name__, cpu_seconds=SCORE_SECONDS, wait_seconds=wait_seconds, memory_bytes=2**31)


def prepare() -> Callable[..., Any]:
    """The function that makes problems and scores answers, in the child process."""
    importlib.import_module(PACKAGE)  # an extra, and slow, so only here

    def answer(begin: Begin, name: str, part: Part, *arguments: Any) -> Any:
        begin(0, MAKE_SECONDS, PATIENCE * MAKE_SECONDS)
        if name == "make":
            return make(part, *arguments)
        index, stated, cpu_seconds = arguments
        if why_evaluated(part[0]) and not is_plain(stated):
            return 0.0
        generator, item = _generator(*part), deepcopy(_item(*part, index))  # a verifier may change it
        begin(0, cpu_seconds, PATIENCE * cpu_seconds)
        try:
            value = float(generator.score_answer(stated, item))
        except MemoryError:
            raise
        except Exception:  # a verifier raises anything on text that is no answer
            return 0.0
        return min(max(value, 0.0), 1.0) if value == value else 0.0

    return answer


def make(part: Part, first: int, last: int, keys: list[str]) -> list[list[Any]] | str:
    """The items of a part from `first` to before `last`, each [question, own answer or None, values of `keys`]; or a
    sentence with the reason that there are none."""
    dataset, registered = part[0], _registered()
    if dataset not in registered:
        hint = did_you_mean(dataset, registered)
        return f"unknown task.dataset '{dataset}'; {hint}available: {', '.join(sorted(registered))}"
    try:
        items = [_item(*part, index) for index in range(first, last)]
    except MemoryError:
        raise
    except Exception as error:  # whatever its checks and its code raise about settings
        names = [field.name for field in dataclasses.fields(registered[dataset][1])]
        known = ", ".join(name for name in names if name not in ("seed", "size"))
        says = " ".join(str(error).split()) or type(error).__name__
        return (
            f"task.settings must let the generator '{dataset}' make problems, it says: {says}; its settings are {known}"
        )
    rows: list[list[Any]] = []
    for item in items:
        fields = {"question": item["question"], **item.get("metadata", {})}
        if missing := [key for key in keys if key not in fields]:
            return (
                f"task.template must name parts of a problem of '{dataset}', got {{{missing[0]}}}; "
                f"it has {', '.join(fields)}"
            )
        answer = None if item["answer"] is None else str(item["answer"])
        if (why := why_evaluated(dataset)) and (answer is None or not is_plain(answer)):
            return (
                f"task.dataset must be a generator whose verifier could run nothing of a completion, got '{dataset}': "
                f"{why}, which may evaluate an answer as code, and its own answers are more than plain arithmetic, "
                f"such as {repr(answer)[:60]}; take another generator"
            )
        values = (fields[key] for key in keys)
        told = [" ".join(map(str, value)) if isinstance(value, list | tuple) else str(value) for value in values]
        rows.append([item["question"], answer, told])
    return rows


def is_plain(answer: str) -> bool:
    """Whether nothing but numbers, arithmetic and brackets can come of evaluating an answer."""
    return len(answer) <= MAX_PLAIN_CHARS and bool(_PLAIN.fullmatch(answer))


@cache
def why_evaluated(dataset: str) -> str:
    """The name in the source of a generator that could evaluate an answer; empty if there is none.

    Every function of sympy evaluates text, so importing it is enough.
    """
    waiting, seen = [_registered()[dataset][0].__module__], set[str]()
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        with open(str(sys.modules[module].__file__), encoding="utf-8") as file:
            nodes = list(ast.walk(ast.parse(file.read())))
        names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        for node in nodes:
            if isinstance(node, ast.ImportFrom):  # what it names may be modules or attributes of one
                base = resolve_name("." * node.level + (node.module or ""), sys.modules[module].__package__)
                names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        used = {node.id for node in nodes if isinstance(node, ast.Name)} & _CALLS
        # `re.compile` is no `compile`, and the built-in one is no attribute.
        used |= {node.attr for node in nodes if isinstance(node, ast.Attribute)} & (_CALLS - {"compile"})
        if used := sorted(used) + sorted({name.partition(".")[0] for name in names} & _IMPORTS):
            return f"{module} uses {used[0]}"
        waiting += [name for name in names if name.startswith(f"{PACKAGE}.") and name in sys.modules]
    return ""


def _registered() -> dict[str, Any]:
    """Name -> (class, settings class) of every generator except `composite`, which makes others by name."""
    found = importlib.import_module(f"{PACKAGE}.factory").DATASETS
    return {name: classes for name, classes in found.items() if name != "composite"}


@lru_cache(maxsize=16)
def _generator(dataset: str, settings: str, seed: int, size: int) -> Any:
    create = importlib.import_module(f"{PACKAGE}.factory").create_dataset
    return create(dataset, **json.loads(settings), seed=seed, size=size)


@lru_cache(maxsize=1024)
def _item(dataset: str, settings: str, seed: int, size: int, index: int) -> Any:
    return _generator(dataset, settings, seed, size)[index]
