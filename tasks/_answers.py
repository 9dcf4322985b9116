"""A task whose completions state their answers in a format; finds, scores and compares these answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from ..harness.interfaces import Task
from . import _formats, _numbers, _symbolic

LIBRARY_CHARS = 20_000  # math-verify's patterns are slow on more, and the end of a completion states its answer
FOUND = "(found by math-verify)"  # the library gives its verdict only


class AnswerTask(Task):
    """Answers are numbers; a subclass with others overrides `read`, `read_unmarked` and `equivalent`."""

    answer_format: _formats.AnswerFormat = Field(
        "hash", description="how the prompt and the worked solutions ask for or state answers"
    )

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


class QuestionTask(AnswerTask):
    """A task that asks its questions in a template, by default that of the answer format."""

    templates: ClassVar[Mapping[_formats.AnswerFormat, str]] = {
        "hash": "Question: {question}\nReason step by step; end with #### and the number.\nAnswer:\n",
        "boxed": "Question: {question}\nReason step by step; end with the number in \\boxed{}.\nAnswer:\n",
        "think_answer": "Question: {question}\nReason step by step in <think>...</think>; then give the number in "
        "<answer>...</answer>.\nAnswer:\n",
    }

    template: str = Field(
        "", description="prompt, in which {question} stands for the problem; by default that of the answer format"
    )

    @model_validator(mode="before")
    @classmethod
    def _template_of_the_format(cls, data: Any) -> Any:
        """The settings with the format's own template, unless they have one that is no format's own."""
        if not isinstance(data, Mapping) or data.get("template") not in (None, *cls.templates.values()):
            return data
        default = cls.model_fields["answer_format"].default
        name = data.get("answer_format", default)
        known = isinstance(name, str) and name in cls.templates
        return {**data, "template": cls.templates[name if known else default]}  # pyright: ignore[reportArgumentType]

    @field_validator("template")
    @classmethod
    def _has_place(cls, value: str) -> str:
        if "{question}" not in value:
            raise ValueError(f"template must contain {{question}}, where the problem goes, got {value!r}")
        return value


def math_verify(completion: str, gold: str) -> tuple[str | None, bool]:
    """math-verify alone, for comparison and never for a reward: (FOUND or None, whether the answer is right).

    The library (version 0.9.0) finds the answer itself, reads LaTeX and plain numbers with its defaults, and compares
    one way, as its users do. Departure: it does not read expressions without LaTeX, such as `2*(3+4)`, because it would
    evaluate their text as Python. A text that exceeds the limits of `tasks._symbolic` counts as unanswered.
    """
    verdict = _symbolic.library().compare(gold, completion[-LIBRARY_CHARS:])
    return (None if verdict == "unparsable" else FOUND), verdict == "equal"
