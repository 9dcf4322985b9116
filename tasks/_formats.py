r"""Finds and writes a completion's final answer: `#### 42`, `\boxed{42}` or `<think>...</think><answer>42</answer>`.

The formats are those of GSM8K (arXiv:2110.14168), MATH (arXiv:2103.03874) and DeepSeek-R1 (arXiv:2501.12948). An
explicit marker is unambiguous, so a reader accepts all of them and tries the configured one first; `score` measures
whether a completion keeps that one. Every function takes time linear in the text.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from . import _numbers

AnswerFormat = Literal["hash", "boxed", "think_answer"]

TAIL_CHARS = 4000  # the end of a completion, which may hold an unmarked answer


def stated(completion: str, answer_format: AnswerFormat) -> Iterator[str]:
    """The texts at the explicit markers of a final answer: first at that of the format, then at the others."""
    readers = [_READERS[answer_format], *(read for name, read in _READERS.items() if name != answer_format)]
    for read in readers:
        text = read(completion)
        if text:
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


def score(completion: str, answer_format: AnswerFormat) -> float:
    """The completion's score for the format: 0, 0.5 or 1.

    `####` and boxes score 1 with something in the marker. Tags score 1 for one `<think>` pair and then one `<answer>`
    pair that is not empty, with only white space around them, and 0.5 if at least one of the pairs is right.
    """
    if answer_format != "think_answer":
        return 1.0 if _READERS[answer_format](completion) else 0.0
    think, answer = _only_pair(completion, "think"), _only_pair(completion, "answer")
    if answer is not None and not answer[1].strip():
        answer = None
    if think is None or answer is None:
        return 0.0 if think is None and answer is None else 0.5
    outside = (completion[: think.start()], completion[think.end() : answer.start()], completion[answer.end() :])
    return 1.0 if think.end() <= answer.start() and not any(map(str.strip, outside)) else 0.5


def reasoning(completion: str, answer_format: AnswerFormat) -> str:
    """The text before the last marker, or all of it; with tags the content of the first `<think>` pair, if any."""
    if answer_format == "think_answer":
        _, opened, rest = completion.partition("<think>")
        inside, closed, _ = rest.partition("</think>")
        return inside if opened and closed else ""
    position = completion.rfind("####" if answer_format == "hash" else r"\boxed")
    return completion if position < 0 else completion[:position]


def last_resort(completion: str) -> Iterator[str]:
    """Texts that may state an unmarked number, the best first: the rest of the sentence after the last "answer is",
    the same after the last "= ", and the last number."""
    tail = completion[-TAIL_CHARS:]
    for phrase in (_ANSWER_IS, _EQUALS):
        rest = _after_last(phrase, tail)
        sentence = _SENTENCE_END.split(rest, maxsplit=1)[0]
        yield from [sentence, *_NUMBER.findall(sentence)[:1]] if sentence else ()
    yield from _last_number(tail)


def last_resort_latex(completion: str) -> Iterator[str]:
    """Texts that may state unmarked mathematics, the best first: the rest of the sentence after the last "answer is",
    the last `$...$`, and the last number."""
    tail = completion[-TAIL_CHARS:]
    rest = _after_last(_ANSWER_IS, tail)
    if rest:
        formula = _FORMULA.match(rest)
        text = formula[1] if formula else _SENTENCE_END.split(rest, maxsplit=1)[0].strip(" $*.")
        if text:
            yield text
    formulas = _FORMULA.findall(tail)
    if formulas:
        yield formulas[-1]
    yield from _last_number(tail)


def _only_pair(text: str, tag: str) -> re.Match[str] | None:
    """The tag's pair, with its content as the first group, if the tag opens once and then closes once."""
    is_single = text.count(f"<{tag}>") == 1 and text.count(f"</{tag}>") == 1
    return re.search(f"<{tag}>(.*)</{tag}>", text, re.S) if is_single else None


def _in_tag(completion: str) -> str | None:
    """The content of the last complete `<answer>` pair, or of the box in it; None without a pair."""
    start = completion.rfind("<answer>", 0, max(completion.rfind("</answer>"), 0))
    if start < 0:
        return None
    start += len("<answer>")
    content = completion[start : completion.index("</answer>", start)]
    return _numbers.last_boxed(content) or content.strip()


def _after_hash(completion: str) -> str | None:
    line = _numbers.after_marker(completion)
    return None if line is None else line.partition("</answer>")[0].strip()


_READERS: Mapping[AnswerFormat, Callable[[str], str | None]] = {
    "boxed": _numbers.last_boxed,
    "think_answer": _in_tag,
    "hash": _after_hash,
}

# The Chinese words are "the answer is" and "answer:".
_ANSWER_IS = re.compile(r"\banswer(?:\s{1,9}is\b|\s{0,9}:)|\u7b54\u6848?(?:\u662f|\u4e3a|[:\uff1a])", re.I)
_EQUALS = re.compile(r"=\s")
_NUMBER = re.compile(r"(?:(?<![\w.)\]])[-\u2212])?\$?(?:\d++(?:,\d++)*+(?:\.\d++)?|\.\d++)(?:\s?/\s?\d++)?%?")
_FORMULA = re.compile(r"\$(?=[^\s$])([^$\n]{1,500})(?<=\S)\$(?!\d)")
_SENTENCE_END = re.compile(r"\.(?=\s)|[\n\u3002]")


def _after_last(phrase: re.Pattern[str], text: str) -> str:
    """The text after the last match of the phrase, without space, colons and stars between; empty without a match."""
    end = max((match.end() for match in phrase.finditer(text)), default=None)
    return "" if end is None else text[end:].lstrip(" \t\n:*")


def _last_number(text: str) -> list[str]:
    return _NUMBER.findall(text)[-1:]
