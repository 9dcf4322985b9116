"""Graders besides a task's own: `lenient` also reads an answer that is not marked as final, `math_verify` is a library.

Reading takes time linear in the text.
"""

import re
from collections.abc import Iterator
from functools import cache

from ....tasks._answers import FORMULA, NUMBER, TAIL_CHARS, AnswerTask, after_thought, first_readable
from ....tasks._latex import Checker
from ...interfaces import Task

LIBRARY_CHARS = 20_000  # math-verify's patterns are slow on more, and the end of a completion states its answer
FOUND = "(found by math-verify)"  # the library gives its verdict only


def lenient(task: Task, completion: str) -> str | None:
    """The answer that the task extracts, or else a guess at an unmarked one."""
    answer = task.extract(completion)
    if answer is not None or not isinstance(task, AnswerTask):
        return answer
    unmarked = unmarked_number if task.read("x") is None else unmarked_latex
    return first_readable(unmarked(after_thought(task.own_part(completion))), task.read)


def unmarked_number(completion: str) -> Iterator[str]:
    """Texts that may state an unmarked number, the best first: the rest of the sentence after the last "answer is",
    the same after the last "= ", and the last number."""
    tail = completion[-TAIL_CHARS:]
    for phrase in (_ANSWER_IS, _EQUALS):
        sentence = _SENTENCE_END.split(_after_last(phrase, tail), maxsplit=1)[0]
        yield from [sentence, *NUMBER.findall(sentence)[:1]] if sentence else ()
    yield from NUMBER.findall(tail)[-1:]


def unmarked_latex(completion: str) -> Iterator[str]:
    """Texts that may state unmarked mathematics, the best first: the rest of the sentence after the last "answer is",
    the last `$...$`, and the last number."""
    tail = completion[-TAIL_CHARS:]
    rest = _after_last(_ANSWER_IS, tail)
    formula = FORMULA.match(rest)
    if text := formula[1] if formula else _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" $*."):
        yield text
    yield from FORMULA.findall(tail)[-1:]
    yield from NUMBER.findall(tail)[-1:]


def math_verify(completion: str, gold: str) -> tuple[str | None, bool]:
    """math-verify alone, for comparison and never for a reward: (FOUND or None, whether the answer is right).

    The library (version 0.9.0) finds the answer itself, reads LaTeX and plain numbers with its defaults, and compares
    one way, as its users do. Departure: it does not read expressions without LaTeX, such as `2*(3+4)`, because it would
    evaluate their text as Python. A text that exceeds the limits of a checker counts as unanswered.
    """
    verdict = _library().verdict("compare", gold, completion[-LIBRARY_CHARS:])
    return (None if verdict == "unparsable" else FOUND), verdict == "equal"


@cache
def _library() -> Checker:
    return Checker(f"{__package__}.library")


# The Chinese words are "the answer is" and "answer:".
_ANSWER_IS = re.compile(r"\banswer(?:\s{1,9}is\b|\s{0,9}:)|\u7b54\u6848?(?:\u662f|\u4e3a|[:\uff1a])", re.I)
_EQUALS = re.compile(r"=\s")
_SENTENCE_END = re.compile(r"\.(?=\s)|[\n\u3002]")


def _after_last(phrase: re.Pattern[str], text: str) -> str:
    """The text after the last match of the phrase, without space, colons and stars between; empty without a match."""
    end = max((match.end() for match in phrase.finditer(text)), default=None)
    return "" if end is None else text[end:].lstrip(" \t\n:*")
