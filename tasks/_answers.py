"""A task whose completions state their answers in a format: it finds, scores and compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from harness.interfaces import Task
from tasks import _formats, _numbers, _symbolic

LIBRARY_CHARS = 20_000  # math-verify's patterns are slow on more, and the end of a completion states its answer
FOUND = "(found by math-verify)"  # the library gives its verdict only


class AnswerTask(Task):
    """Answers are numbers; a subclass with others overrides `read`, `read_unmarked` and `equivalent`."""

    if TYPE_CHECKING:
        answer_format: _formats.AnswerFormat  # a subclass declares the field, at its place among the settings

    def read(self, text: str) -> str | None:
        """The answer that a text at a marker states, in canonical spelling, or None."""
        return _numbers.canonical(text)

    def read_unmarked(self, completion: str) -> Iterator[str]:
        """Guesses at the answer of a completion without a marker, the best first."""
        return _formats.last_resort(completion)

    def extract(self, completion: str) -> str | None:
        """The answer at the marker of the configured format, or else at that of another."""
        return _formats.first_readable(_formats.stated(self._own(completion), self.answer_format), self.read)

    def extract_lenient(self, completion: str) -> str | None:
        answer = self.extract(completion)
        if answer is None:
            answer = _formats.first_readable(self.read_unmarked(self._own(completion)), self.read)
        return answer

    def format_score(self, completion: str) -> float:
        return _formats.score(self._own(completion), self.answer_format)

    def reasoning(self, completion: str) -> str:
        return _formats.reasoning(self._own(completion), self.answer_format)

    def equivalent(self, answer: str, other: str) -> bool:
        return answer == other or _numbers.equal(answer, other)

    def use_processes(self, count: int) -> None:
        _symbolic.set_num_children(count)

    def allow_overruns(self, count: float | None) -> float:
        return _symbolic.checker().allow_overruns(count)

    def peer_graders(self) -> Mapping[str, Callable[[str, str], tuple[str | None, bool]]]:
        return {"math_verify": math_verify}

    def _own(self, completion: str) -> str:
        """The part of a completion that is about its problem."""
        return completion


def math_verify(completion: str, gold: str) -> tuple[str | None, bool]:
    """math-verify alone, for comparison and never for a reward: (FOUND or None, whether the answer is right).

    The library (version 0.9.0) finds the answer itself, reads LaTeX and plain numbers with its defaults, and compares
    one way, as its users do. Departure: it does not read expressions without LaTeX, such as `2*(3+4)`, because it would
    evaluate their text as Python. A text that exceeds the limits of `tasks._symbolic` counts as unanswered.
    """
    verdict = _symbolic.library().compare(gold, completion[-LIBRARY_CHARS:])
    return (None if verdict == "unparsable" else FOUND), verdict == "equal"
