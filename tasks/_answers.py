r"""Tasks whose completions state an answer: `#### 42`, `\boxed{42}` or `<think>...</think><answer>42</answer>`.

The formats come from GSM8K (arXiv:2110.14168), MATH (arXiv:2103.03874) and DeepSeek-R1 (arXiv:2501.12948). An
explicit marker is unambiguous, so a reader accepts all of them and tries the configured one first; the format score
tells whether a completion keeps that one. No marker in a thought counts. Reading takes time linear in the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from ..harness.interfaces import Task
from . import _numbers, _units

TAIL_CHARS = 4000  # the end of a completion, which may hold an unmarked answer
UNITS = "|".join(name for name in _units.NAMES.split("|") if len(name) > 2)  # `5 in all` names none
NUMBER = re.compile(  # not within a name, such as `A2`
    r"(?:(?<![\w.)\]])[-\u2212])?\$?(?<![A-Za-z\d])(?<!\d\.)(?:\d++(?:,\d++)*+(?:\.\d++)?|\.\d++)(?:\s?/\s?\d++)?"
    rf"(?:%|\s(?:{UNITS})\b)?"
)
FORMULA = re.compile(  # between single dollars with space inside, which may be money, only where LaTeX begins
    r"\$\$([^$]{1,500})\$\$|\$(?=[^\s$])([^$\n]{1,500})(?<=\S)\$(?!\d)|\$ (\\[^$\n]{1,500})\$"
    r"|\\[(\[]([^$]{1,500}?)\\[)\]]"
)
DENIED = re.compile(r"(?:\bnot|n't)\s+(?:equal to\s+)?(?:\\[(\[]\s*)?\Z")

AnswerFormat = Literal["hash", "boxed", "think_answer"]


class AnswerTask(Task):
    """Answers are numbers; a subclass with others overrides `read` and `equivalent`."""

    answer_format: AnswerFormat = Field(default="hash", description="how prompts ask for and solutions state answers")
    answers: Literal["marked", "last"] = Field(
        default="marked", description="last: without a marked one the last number or formula counts, for rewards too"
    )

    def read(self, text: str) -> str | None:
        """The answer that a text at a marker states, in canonical spelling, or None."""
        return _numbers.canonical(text)

    def extract(self, completion: str) -> str | None:
        """The answer that is marked, or else, with `answers` `last`, the last number or formula."""
        marked = self.marked(completion)
        return self.last(completion) if marked is None and self.answers == "last" else marked

    def marked(self, completion: str) -> str | None:
        """The answer at the marker of the configured format, or else at another's."""
        return first_readable(stated(after_thought(self.own_part(completion)), self.answer_format), self.read)

    def last(self, completion: str) -> str | None:
        """The last number or formula that can be read as an answer, as lm-eval's `flexible-extract` does, but none that
        the text denies (`not 42`), and no number in a formula but its last side."""
        tail = after_thought(self.own_part(completion))[-TAIL_CHARS:]

        def kept(pattern: re.Pattern[str]) -> list[re.Match[str]]:
            return [match for match in pattern.finditer(tail) if not DENIED.search(tail[: match.start()][-20:])]

        formulas = kept(FORMULA)[-1:]
        inside = [range(*match.span()) for match in formulas]
        numbers = [match for match in kept(NUMBER) if not any(match.start() in span for span in inside)][-1:]
        found = sorted(formulas + numbers, key=lambda match: match.end(), reverse=True)
        texts = [match[match.lastindex or 0] for match in found]
        return first_readable((part for text in texts for part in (text, text.rpartition("=")[2])), self.read)

    def ends_in(self, completion: str, gold: str) -> bool:
        answer = self.last(completion)
        return answer is not None and AnswerTask.equivalent(self, answer, gold)

    def format_score(self, completion: str) -> float:
        """`####` and boxes score 1 with something in the marker, else 0. Tags score 1 for one `<think>` pair and then
        one `<answer>` pair that is not empty, with only white space around them, and 0.5 if one of the pairs is right.
        """
        completion = self.own_part(completion)
        if self.answer_format != "think_answer":
            return 1.0 if _READERS[self.answer_format](completion) else 0.0
        think, answer = _only_pair(completion, "think"), _only_pair(completion, "answer")
        is_answer = answer is not None and bool(answer[1].strip())
        if think is not None and is_answer and _BOTH_PAIRS.fullmatch(completion):
            return 1.0
        return 0.5 if think is not None or is_answer else 0.0

    def equivalent(self, answer: str, other: str) -> bool:
        value = _numbers.number(answer)
        return answer == other or (value is not None and value == _numbers.number(other))


class QuestionTask(AnswerTask):
    """A task that asks its questions in a template, by default the answer format's."""

    templates: ClassVar[Mapping[AnswerFormat, str]] = {
        "hash": "Question: {question}\nReason step by step; end with #### and the number.\nAnswer:\n",
        "boxed": "Question: {question}\nReason step by step; end with the number in \\boxed{}.\nAnswer:\n",
        "think_answer": "Question: {question}\nReason step by step in <think>...</think>; then give the number in "
        "<answer>...</answer>.\nAnswer:\n",
    }

    template: str = Field(default="", description="prompt, with {question} in it; by default the answer format's")

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

    def in_words(self, text: str) -> str:
        """The question and the request of the answer format, without the template's labels; a prompt with worked
        examples, or in a template of one's own, as it is."""
        head, _, tail = self.template.partition("{question}")
        question = text.removeprefix(head).removesuffix(tail)
        is_whole = text == self.fill(question) and head not in question and self.template in self.templates.values()
        return f"{question}{tail.rsplit(chr(10), 2)[0]}" if is_whole else text

    def fill(self, question: str) -> str:
        """The template with the question."""
        return self.template.replace("{question}", question)


def after_thought(completion: str) -> str:
    """The text after the last `</think>`, which alone can answer; empty if a thought is still open."""
    rest = completion.rpartition("</think>")[2]
    return "" if "<think>" in rest else rest


def stated(completion: str, answer_format: AnswerFormat) -> Iterator[str]:
    """The texts at the explicit markers of a final answer: first at the format's marker, then at the others."""
    for name in dict.fromkeys((answer_format, *_READERS)):
        if text := _READERS[name](completion):
            yield text


def first_readable(texts: Iterable[str], read: Callable[[str], str | None]) -> str | None:
    """The first answer that `read` finds in the texts, or None."""
    return next((answer for text in texts if (answer := read(text)) is not None), None)


def write(answer_format: AnswerFormat, reasoning: str, answer: str, *, separator: str = "\n") -> str:
    """The completion of a worked solution; `separator` stands between its parts."""
    if answer_format == "hash":
        return f"{reasoning}{separator}#### {answer}"
    if answer_format == "boxed":
        return f"{reasoning}{separator}\\boxed{{{answer}}}"
    return f"<think>{separator}{reasoning}{separator}</think>{separator}<answer>{answer}</answer>"


def _only_pair(text: str, tag: str) -> re.Match[str] | None:
    """The tag's pair, with its content as the first group, if the tag opens once and then closes once."""
    is_single = text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1
    return re.search(f"<{tag}>(.*)</{tag}>", text, re.S) if is_single else None


def _in_tag(completion: str) -> str | None:
    """The content of the last complete `<answer>` pair, or of the box in it; None without a pair."""
    start = completion.rfind("<answer>", 0, max(completion.rfind("</answer>"), 0))
    if start < 0:
        return None
    content = completion[start + len("<answer>") :].partition("</answer>")[0]
    return _numbers.last_boxed(content) or content.strip()


def _after_hash(completion: str) -> str:
    """The first line with text after the last `####`, up to a closing tag; empty without one."""
    line = completion.rpartition("####")[2].lstrip()[: _numbers.MAX_CHARS + 1].partition("\n")[0]
    return line.partition("</answer>")[0].strip() if "####" in completion else ""


_READERS: Mapping[AnswerFormat, Callable[[str], str | None]] = {
    "boxed": _numbers.last_boxed,
    "think_answer": _in_tag,
    "hash": _after_hash,
}

_BOTH_PAIRS = re.compile(r"\s*<think>.*</think>\s*<answer>.*</answer>\s*", re.S)  # where each is there once
