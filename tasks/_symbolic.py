r"""Decides whether two LaTeX expressions are equal, by computer algebra (`tasks._algebra`) in a child process.

math-verify (github.com/huggingface/Math-Verify) compares with sympy, which can take unlimited time and memory on text
such as `9^{9^9}`, so a comparison that is stopped is `unparsable`. Limits are the last resort: large expressions are
refused first by their size, which does not depend on the machine.

An answer that overran the limits, when it was read or as the larger of two, is not tried again: after the first time if
it spent its processor time or memory, as it would on any machine; after the second if only the clock ran out, because
the machine may have been busy. Expressions whose values at a point differ are different. A child returns the values
with its verdict, so each of G different expressions is compared with one other, and the rest of the G(G - 1)/2 pairs
cost no question.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from functools import cache
from typing import Literal

from ._child import GRACE_SECONDS, Children, Question, Reply, remember

Verdict = Literal["equal", "different", "unparsable"]

UNPARSABLE: Verdict = "unparsable"
MAX_TRIES = 2  # of reading or comparing an answer, because a busy machine may have ended the first


@cache
def checker() -> Checker:
    """The checker that this process shares."""
    return Checker()


@cache
def library() -> Checker:
    """The checker that asks math-verify alone (`tasks._answers.math_verify`)."""
    return Checker(library=True)


def set_num_children(num_children: int) -> None:
    """Let each checker work on that many questions at once, for as many comparing threads."""
    if num_children < 1:
        raise ValueError(f"num_children must be at least 1, got {num_children}")
    checker().set_count(num_children)
    library().set_count(num_children)


class Checker(Children):
    """Compares expressions.

    wall_seconds, cpu_seconds  limits of each stage of a question: read the first, read the second, compare
    library                    ask math-verify alone about (gold, completion), instead of by our own comparison
    counts                     verdicts given, also those known before
    """

    def __init__(
        self,
        wall_seconds: float = 5.0,
        cpu_seconds: float = 3.0,
        memory_bytes: int = 2**30,
        count: int = 1,
        library: bool = False,
    ):
        self.library = library
        self.counts: Counter[Verdict] = Counter()
        self._values: OrderedDict[str, complex] = OrderedDict()
        self._overran: OrderedDict[str, int] = OrderedDict()
        super().__init__(
            f"{__package__}._algebra",
            ("library" if library else "own", cpu_seconds, wall_seconds),
            cpu_seconds=cpu_seconds,
            wait_seconds=wall_seconds + GRACE_SECONDS,
            memory_bytes=memory_bytes,
            count=count,
        )

    def compare(self, first: str, second: str) -> Verdict:
        """The verdict on whether two LaTeX expressions are equal in both directions of math-verify's comparison.

        With `library`: on whether the second text, a completion, states the first, the gold answer.
        """
        pair = (first, second) if first <= second or self.library else (second, first)
        verdict = self._verdict(("compare", *pair))
        with self._turn:
            self.counts[verdict] += 1
        return verdict

    def is_worked_out(self, answer: str, gold: str) -> bool:
        """Whether an answer that equals the gold answer leaves no work that the gold answer does not leave."""
        return self._verdict(("is_worked_out", answer, gold)) == "equal"

    def _verdict(self, question: Question) -> Verdict:
        answer = self.ask(question)
        return UNPARSABLE if answer is None else answer[0]

    def _known(self, question: Question) -> list[Verdict] | None:
        kind, *pair = question
        if (answer := super()._known(question)) is not None:
            return answer
        if kind == "compare" and _surely_differ(*map(self._values.get, pair)):
            return ["different"]
        return [UNPARSABLE] if any(self._overran.get(text, 0) >= MAX_TRIES for text in pair) else None

    def _note(self, question: Question, reply: Reply, is_kept: bool) -> None:
        super()._note(question, reply, is_kept)
        _, *pair = question
        for text, value in zip(pair, (reply.answer or ())[1:], strict=False):
            if value is not None:
                remember(self._values, text, complex(value))
        if reply.answer is None:
            remember(self._answers, question, [UNPARSABLE])
            if reply.stage is not None:
                text = pair[reply.stage]
                remember(self._overran, text, MAX_TRIES if reply.is_certain else self._overran.get(text, 0) + 1)


def _surely_differ(value: complex | None, other: complex | None) -> bool:
    """Whether a child would find the values apart; the margin is above its own, so that rounding does not matter."""
    return value is not None and other is not None and abs(value - other) > 2e-6 * (abs(value) + abs(other))
