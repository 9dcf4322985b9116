"""Word problems: their stories say what their worked solutions compute, and their splits share no calculation."""

import hashlib
import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache, lru_cache
from itertools import islice

import pytest
from cohort.harness.extras.word_problems.tasks._stories import FAMILIES
from cohort.harness.extras.word_problems.tasks.word_problems import WordProblems, draw
from cohort.harness.settings.errors import SpecError
from cohort.tasks._data import Problem
from factories import make_spec

SPLITS = ("train", "validation", "test")
SMALL = {"num_train": 300}
ANY_DEPTH = WordProblems(min_depth=1, max_depth=20, fractions=True, shuffled=True, **SMALL)
PARTS = {"half": 2, "a third": 3, "a quarter": 4, "a fifth": 5}
LINE = re.compile(r"(\w+): (\w+)([-+*/])(\w+)((?:=[-\w+*/.]+)+)")


@dataclass
class Followed:
    """What the steps of a worked solution come to: a value and a digest for each name, and the operands used."""

    values: dict[str, Fraction] = field(default_factory=dict)
    digests: dict[str, bytes] = field(default_factory=dict)
    operands: list[str] = field(default_factory=list)
    steps: list[str] = field(default_factory=list)


def follow(solution: str) -> Followed:
    """The steps, worked out again: every operand is a number, a result before or a fact, and every `=` holds."""
    found = Followed()
    for line in solution.splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        name, left, symbol, right, rest = match.groups()
        sides = rest[1:].split("=")
        for operand, place in ((left, r"^\d+"), (right, r"\d+$")):
            if operand.isdigit():
                told = operand
            elif operand not in found.values:  # a fact, which the figures tell
                told = re.search(place, sides[0])[0]
            else:
                continue
            found.values[operand], found.digests[operand] = Fraction(told), told.encode()
        a, b = found.values[left], found.values[right]
        result = {"+": a.__add__, "-": a.__sub__, "*": a.__mul__, "/": a.__truediv__}[symbol](b)
        assert {value(side) for side in sides} == {result}, line
        parts = [found.digests[left], found.digests[right]]
        assert name not in found.values
        found.values[name] = result
        found.digests[name] = hashlib.blake2b(
            symbol.encode().join(sorted(parts) if symbol in "+*" else parts), digest_size=12
        ).digest()
        found.operands += [left, right]
        found.steps.append(name)
    return found


@lru_cache(maxsize=100_000)
def value(figures: str) -> Fraction:
    """The value of `7/3+5` or `19.75`, by Python's own rules; of figures and signs alone."""
    assert re.fullmatch(r"[\d.+*/-]+", figures), figures
    return eval(re.sub(r"\d+(?:\.\d+)?", lambda number: f"Fraction('{number[0]}')", figures))


WORDS = {"n": r"\d+", "m": r"\d+", "times": r"twice|\d+ times", "part": "|".join(PARTS)}


def readers(family: str) -> dict[str, re.Pattern[str]]:
    """A pattern for every sentence of a family: what it tells, asks or adds."""
    row = FAMILIES[family]
    words = {**WORDS, "things": "|".join(row.things)}
    asked = {f"ask {kind}": text for kind, text in row.asked.items()}
    asides = {f"aside {i}": text for i, text in enumerate(row.asides)}

    def pattern(text: str) -> re.Pattern[str]:
        place = re.compile(r"\\\{(\w+)\\\}")  # of the escaped text
        return re.compile(place.sub(lambda at: f"(?P<{at[1]}>{words.get(at[1], '[A-Za-z]+')})", re.escape(text)))

    return {kind: pattern(text) for kind, text in {**row.told, **asked, **asides}.items()}


READERS = {family: readers(family) for family in FAMILIES}
MEANINGS = {
    "fact": lambda n, **_: n, "packs": lambda m, n, **_: m * n, "more": lambda y, n, **_: y + n,
    "less": lambda y, n, **_: y - n, "times": lambda y, times, **_: y * times, "part": lambda y, part, **_: y / part,
    "both": lambda y, z, **_: y + z, "gap": lambda y, z, **_: y - z,
}  # fmt: skip


def sentences_of(problem: Problem) -> list[str]:
    return re.split(r"(?<=[.?]) ", problem.question)


def solve(problem: Problem) -> Fraction:
    """The answer by the sentences alone; each must have one meaning, and a name is told once."""
    told, asked = {}, None
    patterns = READERS[dict(problem.tags)["family"]]
    for sentence in sentences_of(problem):
        found = {kind: match for kind, pattern in patterns.items() if (match := pattern.fullmatch(sentence))}
        assert len(found) == 1, (sentence, found)
        ((kind, match),) = found.items()
        if kind.startswith("ask"):
            asked = kind, match.groupdict()
        elif not kind.startswith("aside"):
            name = match["x"]
            assert name not in told
            told[name] = kind, match.groupdict()
    assert asked is not None

    def meaning(kind: str, words: dict[str, str]) -> Fraction:
        numbers = {key: Fraction(words[key]) for key in ("n", "m") if key in words}
        if "times" in words:
            numbers["times"] = Fraction(words["times"].replace("twice", "2").removesuffix(" times"))
        if "part" in words:
            numbers["part"] = Fraction(PARTS[words["part"]])
        return MEANINGS[kind](**numbers, **{key: known(words[key]) for key in ("y", "z") if key in words})

    @cache
    def known(name: str) -> Fraction:
        return meaning(*told[name])

    kind, words = asked
    return known(words["x"]) if kind == "ask one" else meaning(kind.removeprefix("ask "), words)


DIFFERENCES = {
    "things": ("as many as P has more than Q", "N fewer than P"),
    "prices": ("the difference between the P and the cheaper Q", "N T cheaper than the P"),
    "animals": ("as many X as there are P in excess of Q", "N fewer X than P"),
    "cooking": ("what the P dish takes beyond the Q dish", "N T less than the P dish"),
    "trips": ("as long as the P trip goes on after the end of the Q trip", "N T shorter than the P trip"),
}


def test_differences_are_told_as_they_are_meant():
    # P - Q and P - N: what the places of a template mean, its words have to mean too.
    assert DIFFERENCES.keys() == FAMILIES.keys()
    for family, phrases in DIFFERENCES.items():
        for kind, phrase in zip(("gap", "less"), phrases, strict=True):
            assert phrase in FAMILIES[family].told[kind].format(x="X", y="P", z="Q", n="N", things="T")


@pytest.mark.parametrize("split", SPLITS)
def test_the_sentences_of_a_story_alone_give_its_gold_answer(split):
    for problem in islice(draw(ANY_DEPTH, split), 100):
        assert solve(problem) == Fraction(problem.answer), problem.question


def test_gold_follows_from_the_worked_steps_and_every_step_is_needed_some_of_them_twice():
    num_graphs = 0
    for problem in islice(draw(ANY_DEPTH, "train"), 500):
        found = follow(problem.solution)
        assert found.values[found.steps[-1]] == Fraction(problem.answer)
        assert len(found.steps) == int(dict(problem.tags)["depth"])
        assert set(found.steps[:-1]) <= set(found.operands)
        assert all(0 < number <= ANY_DEPTH.max_value for number in found.values.values())
        num_graphs += any(found.operands.count(step) > 1 for step in found.steps)
    assert num_graphs > 125  # problems that use a result twice, so that they are no trees


def test_the_stated_facts_of_no_use_are_there_and_no_others():
    task = WordProblems(min_depth=1, max_distractors=8)
    for problem in islice(draw(task, "train"), 200):
        needed = [name for name in follow(problem.solution).values if not name.isdigit() and name != "Answer"]
        sentences = [re.sub(r"\d+", "n", sentence) for sentence in sentences_of(problem)]
        assert len(sentences) - 1 - len(needed) == int(dict(problem.tags)["distractors"])
        assert len(set(sentences)) == len(sentences)  # nothing is told twice, with two numbers


def test_no_two_splits_share_a_calculation_with_its_numbers():
    # So small that two tasks draw the same calculations again and again: luck cannot keep the splits apart.
    small = {"min_depth": 1, "max_depth": 2, "max_number": 9}
    seen = {}
    for task in (WordProblems(**small), WordProblems(**small, families=["trips"])):
        for split in SPLITS:
            found = [follow(problem.solution) for problem in islice(draw(task, split), 100)]
            calculations = {one.digests[one.steps[-1]] for one in found}
            assert len(calculations) == 100  # and a split holds none twice
            assert all(seen.setdefault(one, split) == split for one in calculations)
    assert len(seen) < 0.9 * 600


def test_the_test_split_may_be_deeper():
    task = WordProblems(
        min_depth=2, max_depth=4, test_min_depth=6, test_max_depth=7, families=("things", "trips"), **SMALL
    )
    tags = {split: [dict(prompt.tags) for prompt in task.prompts(split)] for split in SPLITS}
    for split in ("train", "validation"):
        assert {one["depth"] for one in tags[split]} == {"2", "3", "4"}
        assert {one["family"] for one in tags[split]} == {"things", "trips"}
    assert {one["depth"] for one in tags["test"]} == {"6", "7"}


def test_depths_are_even_and_a_cap_shortens_a_split_without_changing_its_problems():
    task = WordProblems(**{**SMALL, "num_train": 2000})
    depths = Counter(dict(prompt.tags)["depth"] for prompt in task.prompts("train"))
    assert all(abs(count - 2000 / 7) < 60 for count in depths.values())
    assert WordProblems(**SMALL).prompts("train") == task.prompts("train")[:300]


def test_the_longest_solutions_stay_within_the_token_limit():
    for fractions in (False, True):
        task = WordProblems(min_depth=20, max_depth=20, max_value=100_000, fractions=fractions, **SMALL)
        assert max(len(d.completion) for d in task.demonstrations()) < task.max_completion_tokens < 1500


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_depth": 9}, r"min_depth must not exceed max_depth \(8\), got 9; set max_depth to 9 or more"),
        ({"test_max_depth": 1}, r"test_min_depth must not exceed test_max_depth \(1\), got 2"),
        ({"max_value": 10}, r"max_number must not exceed max_value \(10\), got 20"),
        ({"families": []}, "families"),
        ({"families": ["thing"]}, "things"),
        ({"template": "Solve it."}, "template must contain {question}"),
    ],
)
def test_an_empty_range_is_an_error_of_the_spec_in_one_sentence(settings, message):
    with pytest.raises(SpecError, match=message):
        make_spec(task={"name": "word_problems", **settings})


def test_settings_with_too_few_problems_say_so():
    # 2*2, 2*3, 2*4, 2*5 and 2+2 are all there is below 11: one split gets none of them.
    task = WordProblems(min_depth=1, max_depth=1, max_number=2, max_value=4, **SMALL)
    with pytest.raises(ValueError, match=r"too few distinct problems for a .* split; raise task.max_number or"):
        [task.prompts(split) for split in SPLITS]
