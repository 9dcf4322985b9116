"""A task whose completions state their answers in a format: it finds, scores and compares them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from harness.interfaces import Task
from tasks import _formats, _library, _numbers, _symbolic


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

    def peer_graders(self) -> Mapping[str, Callable[[str, str], tuple[str | None, bool]]]:
        return {"math_verify": _library.math_verify}

    def _own(self, completion: str) -> str:
        """The part of a completion that is about its problem."""
        return completion
