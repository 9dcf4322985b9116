r"""Decides when two LaTeX answers are mathematically equal: cheap rules first, computer algebra for the rest.

Numbers are compared as exact rationals (`tasks._numbers`), words and multiple-choice letters as text, numerals with a
base (`52_8`, or `52`) and times or ratios (`12:30`) as written; two named units must agree (`tasks._units`). Where an
answer has an inequality, `or` joins conditions; commas, `and` and any other `or` make a list. The rest goes to a child
process (`Checker`, `tasks._algebra`).
math-verify 0.9.0 would judge some of it too generously or too strictly, so decimals become exact fractions first, and a
set equals no tuple and no interval.

An answer must also be worked out (`is_answered`): `513^2-487^2` equals 26000 but is not an answer to its value.
"""

import re
from collections import Counter, OrderedDict
from functools import cache, lru_cache
from itertools import accumulate
from typing import Literal

from . import _numbers, _units
from ._child import GRACE_SECONDS, Children, remember

Verdict = Literal["equal", "different", "unparsable"]

MAX_CHARS = 500  # a longer answer is compared as written
MAX_DEPTH = 20  # of nested brackets


class Checker(Children):
    """Compares LaTeX expressions by computer algebra, which can take unlimited time on text such as `9^{9^9}`.

    A question that is stopped is `unparsable`. Limits are the last resort: large expressions are refused first by their
    size, which does not depend on the machine. A text that spent its processor time or memory, when it was read or as
    the larger of two, is not tried again. `work` is the module that judges; the limits are of each stage of a question:
    read the first, read the second, compare.
    """

    def __init__(self, work: str = f"{__package__}._algebra", *, cpu_seconds: float = 3.0, wall_seconds: float = 5.0):
        wait = wall_seconds + GRACE_SECONDS
        super().__init__(
            work, cpu_seconds, wall_seconds, cpu_seconds=cpu_seconds, wait_seconds=wait, memory_bytes=2**30
        )
        self.counts: Counter[Verdict] = Counter()  # verdicts on comparisons, also those known before
        self._spent: OrderedDict[str, None] = OrderedDict()

    def compare(self, first: str, second: str) -> Verdict:
        """The verdict on whether two expressions are equal in both directions of math-verify's comparison."""
        verdict = self.verdict("compare", *sorted((first, second)))
        self.counts[verdict] += 1
        return verdict

    def is_worked_out(self, answer: str, gold: str) -> bool:
        """Whether an answer that equals the gold answer leaves no work that the gold answer does not leave."""
        return self.verdict("is_worked_out", answer, gold) == "equal"

    def verdict(self, kind: str, *pair: str) -> Verdict:
        """The verdict on a question of this kind, `unparsable` without any."""
        if not self._spent.keys().isdisjoint(pair):
            return "unparsable"
        reply = self.ask(kind, *pair)
        if reply.spent and reply.stage is not None:
            remember(self._spent, pair[reply.stage], None)
        return reply.answer or "unparsable"


checker = cache(Checker)  # which this process shares


def equivalent(answer: str, other: str) -> bool:
    """Whether both answers are equal. Symmetric, never raises on any text, bounded by the checker's limits."""
    if answer == other:
        return True
    if max(len(answer), len(other)) > MAX_CHARS:
        return False
    if _units.contradict(answer, other):
        return False
    number, other_number = _numbers.number(answer, prose=False), _numbers.number(other, prose=False)
    if number is not None and other_number is not None:
        return number == other_number
    first, second = _tidy(answer), _tidy(other)
    for one, rest in ((first, second), (second, first)):
        if label := _LABELLED.fullmatch(one):
            return equivalent(f"({label[1]})" if _LETTER.fullmatch(rest) else label[2], rest)
        if one[-1:] != "_" and (numeral := _BASE_NUMERAL.fullmatch(one)) and numeral[1] == rest:
            return True  # the base may be missing
    if (choices := _choices(first)) and (others := _choices(second)):
        return choices == others
    is_text = _is_text(first) or _is_text(second)
    if _key(first, is_text) == _key(second, is_text):
        return True
    brackets = {_brackets(first), _brackets(second)} - {None}
    if _is_literal(first) or _is_literal(second) or len(brackets) > 1:
        return False  # a set is no tuple, a closed interval is no open one
    if not (_is_well_formed(first) and _is_well_formed(second)):
        return False
    return checker().compare(_exact(first), _exact(second)) == "equal"


def is_answered(answer: str, question: str, gold: str | None) -> bool:
    """Whether an answer that equals `gold` leaves no work that this does not, and is no copy from the question; gold's
    own text counts, in any order. Without gold only a copy that leaves work is no answer."""
    text = _tidy(answer)
    if label := _LABELLED.fullmatch(text):
        return bool(gold and _LETTER.fullmatch(_tidy(gold))) or is_answered(label[2], question, gold)
    if _numbers.number(answer, prose=False) is not None or _is_text(text) or _choices(text):
        return True
    if len({number for side in text.split("=") if (number := _numbers.number(side, prose=False)) is not None}) > 1:
        return False  # `x=6=5`
    is_copy = _symbols(text, without=("0", "1")) in _expressions(question)
    if gold is None:
        return not is_copy or not (_OPERATORS.search(text) or not _is_worked_out(text, "0"))
    target = _tidy(gold)
    if _BASE_NUMERAL.fullmatch(text) and not _BASE_NUMERAL.fullmatch(target):
        return False  # only an answer may leave out the base
    if _symbols(text) == _symbols(target) or _key(text, _is_text(target)) == _key(target, _is_text(target)):
        return True
    is_operator_known = set(_OPERATORS.findall(text)) <= set(_OPERATORS.findall(target))
    return not is_copy and is_operator_known and _is_worked_out(text, target)


def canonical(answer: str) -> str:
    """One spelling for plain numbers; else, and with a unit, the text without surrounding space and dollars."""
    number = None if _units.unit(answer) else _numbers.canonical(answer, prose=False)
    return " ".join(answer.strip().strip("$").split()) if number is None else number


_SYMBOLS = {"\u2264": r"\le ", "\u2265": r"\ge ", "\u222a": r"\cup ", "\u2229": r"\cap ", "\u2208": r"\in "}
_SYMBOLS |= {"\u00b1": r"\pm ", "\u221e": r"\infty ", "\u03c0": r"\pi ", "\u221a": r"\sqrt ", "\u03b8": r"\theta "}
_SYMBOLS |= {"\u2026": r"\ldots "}
_TRIG = r"\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{?\d\}?)?"
_DEGREES = r"(?:\\degree(?![A-Za-z])|\^\s*\{?\s*\\circ\s*\}?|\u00b0)"
_SCALE = r"(?:\\(?:text|mbox|mathrm)\s*\{\s*[CF]\s*\}|[CF](?![A-Za-z]))"
_UNIT = rf"\\text\s*\{{(?!\s*\([A-Za-z]\)|[^{{}}]*{_numbers.HEDGE})[^{{}}]*\}}"
_BRACED = re.compile(r"\{([^{}]*)\}")
_TIME = r"(?:[01]?\d|2[0-4])\s*:\s*[0-5]\d\s*\.?\s*\Z"
_ORDER = re.compile(r"[<>\u2264\u2265\u2260]|\\(?:leq?|geq?|neq?|[lg]t|[lg]eqslant)(?![A-Za-z])")
_OR = re.compile(r",?\s*(?:\\(?:text\w*|mbox|mathrm)\s*\{\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z])|\\vee(?![A-Za-z]))")
# `]1,2]`, at the start or beside a union.
_OPEN_ENDED = (
    r"(?:(?<=\A)|(?<=\\cup)|(?<=\\cap)|(?<=\\in)|(?<=\s))([\[\](])([^\[\](),]+,[^\[\](),]+)([\[\])])"
    r"(?=\s*(?:\\|,|\.?\Z))"
)


_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"(?s)\A.*\Z", lambda m: _OR.sub(r" \\lor ", m[0]) if _ORDER.search(m[0]) else m[0]),
        (r"[\"'`\0]|\\!\s*|\\(?:left|right|displaystyle|textstyle)(?![A-Za-z])|\\[bB]igg?[lrm]?(?![A-Za-z])", ""),
        (r"(?<!\\)\\[,;: ]|\\q?quad|~", " "),
        (rf"({_TRIG})\s*(\()?\s*\{{?(\d[\d.]*)\}}?\s*{_DEGREES}\s*(?(2)\))", r"\1(\\frac{\3\\pi}{180})"),
        (rf"\\?[%$]|(?<!\\)\\[()]|{_DEGREES}(?:\s*{_SCALE})?", ""),
        (r"\\(?:text(?:bf|it|rm|sf|normal)|mbox|math(?:rm|bf|it)|operatorname)\s*(?=\{)", r"\\text"),
        (r"\\text\s*\{[^{}]*\}(?:\s*\\text\s*\{[^{}]*\})+", lambda m: rf"\text{{{' '.join(_BRACED.findall(m[0]))}}}"),
        (r"(?<=\S),?\s*\\text\s*\{\s*(?:and|or)\s*\}\s*(?=\S)", ", "),  # `30 and 150` is not 30,150
        (r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
        (r"(\\frac|\\binom)\s*(\d|(?<=\s)[A-Za-z]|\\pi(?![A-Za-z]))", r"\1{\2}"),
        (r"(\\frac|\\binom)\s*(\{[^{}]*\})\s*(\d|[A-Za-z]|\\pi(?![A-Za-z]))", r"\1\2{\3}"),
        (r"\\sqrt\s*(\d)", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*(?:\([^()]*\)[^()]*)*)\)", r"\\sqrt{\1}"),
        (r"\\[lc]?dots[bcimo]?(?![A-Za-z])|(?<=[,+])\s*\.{3}(?!\.)", r"\\ldots "),
        (r"(?i)\\text\s*\{\s*infinity\s*\}|(?<![A-Za-z\\])(?:infinity|infty|oo)(?![A-Za-z])", r"\\infty "),
        (_OPEN_ENDED, lambda m: ("[" if m[1] == "[" else "(") + m[2] + ("]" if m[3] == "]" else ")")),
        (  # a unit between two numbers in its one spelling: `3 h 20`
            rf"(?i)(?<=\d)\s*(?:\\text\s*\{{\s*|\s)({_units.NAMES})\.?,?\s*(?:and\s*)?\}}?\s*(?=\d)",
            lambda m: f" {_units.name(m[1])} ",
        ),
        (r"([_^])\s*\{\s*(\w)\s*\}", r"\1\2"),
        (r"\{([,:])\}", r"\1"),
        (r"\\leq?(?![A-Za-z])|<=", r"\\le "),
        (r"(?<=\s)!=", r"\\neq "),  # `5!=120` has a factorial
        (r"\\geq?(?![A-Za-z])|>=", r"\\ge "),
        (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
        (r"\*\*", "^"),
        (r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|e[mx]|[cm]m)\s*\]", r"\\\\"),  # space between the rows of a matrix
        (r"(?<=\{)[dr]cases(?=\})", "cases"),
        (r"(?s)\\\{\s*\\begin\{array\}\s*\{[lcr| ]*\}(.*)\\end\{array\}\s*\.?$", r"\\begin{cases}\1\\end{cases}"),
        (r"\\gamma(?![A-Za-z])", "\u03b3"),  # the parser takes `\gamma+1` for the gamma function of 1
        (r"\\Gamma(?![A-Za-z]|\s*\()", "\u0393"),
        (r"\\langle(?![A-Za-z])", "("),
        (r"\\rangle(?![A-Za-z])", ")"),
        (r"\\varnothing(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\log_\{?e\}?(?![A-Za-z])", r"\\ln "),
        (r"(?<=\{)[bB]matrix(?=\})", "pmatrix"),
        (r"\\text\s*\{([A-Za-z]?|\s*\d[\d.,:/ ]*)\}", r"\1"),
        (rf"(?<=\S)\s*(?:{_UNIT}|\s(?:{_numbers.UNITS}))(?:\s*\^\s*[23])?\s*$", ""),
        (r"\A([^=]+?)\s*=\s*\1\s*\Z", r"\1"),
        (r"\A[^=:]*[A-Za-z][^=:]*:[^=:]+=\s*(?=[\d.:/ ]+\Z)", ""),  # `a:b = 3:2`
        (r"\A(\\text\s*\{\s*)?(?(1)(?:an?|An|[Tt]he)|[Tt]he)\s+(?=(?!and\b)[A-Za-z]{3})", r"\1"),
        (rf"\A\s*(?!{_TIME})(\d{{1,30}})\s*:\s*(\d{{1,30}})\s*\.?\s*\Z", r"\\frac{\1}{\2}"),
    )
)
_WORDS = re.compile(r"\\text\s*\{\s*([A-Za-z][A-Za-z ,'.-]*)\}")
_HEDGE = re.compile(rf"\\text\s*\{{[^{{}}]*{_numbers.HEDGE}", re.I)
_CHOICE = re.compile(r"(?:\\text\s*\{\s*)?\(([A-Za-z])\)(?:\s*\})?")
_CHOSEN = re.compile(r"\(([A-Za-z])\)|([A-J])")
_LETTER = re.compile(rf"{_CHOICE.pattern}|[A-J]")
_LABELLED = re.compile(  # `C. 12`, without a second label
    r"(?s)(?:\\text\s*\{\s*)?\(?([A-J])[.)](?:\s*\}\s*|\s+)(?!.*(?:"
    rf"{_numbers.HEDGE}|\band\b|(?<![A-Za-z\\])[A-J](?![A-Za-z])))([\w\\({{\[].*)"
)
_LETTERS = re.compile(r"[A-Za-z,.'-]{3,}")
_BASE_NUMERAL = re.compile(r"([0-9A-F]*\d[0-9A-F]*)\s*_(?:\s*(?:\{\s*\d+\s*\}|\d+)\Z)?")
_COMPOUND = re.compile(rf"\d (?:{_units.NAMES}) \d")  # `3 h 20`, of `3 hours 20 minutes`
_DECIMAL = re.compile(r"(?<![\d.])\d{0,30}\.\d{1,30}(?![\d.]|\s*\\(?:overline|bar|dot))")


# What the checker's parser computes or drops, so that it does not see the work.
_OPERATORS = re.compile(
    r"\\(?:binom|sum|prod|int|lim|lceil|lfloor|gcd|lcm|det|max|min|[bp]?mod|div|[lcv]?dots)(?![A-Za-z])"
    r"|!|\|[-+*/^\d. ]+\||matrix\}\s*(?:[-+^]|\\cdot|\\times|\\begin)"
)
_FORMULA = re.compile(r"(?s)\$\$(.+?)\$\$|\$(.+?)\$|\\\[(.+?)\\\]|\\\((.+?)\\\)|\\begin\{align\*?\}(.+?)\\end")
_SYMBOL = re.compile(r"\\[A-Za-z]+|[A-Za-z]|\d+(?:\.\d+)?")
_LAYOUT = frozenset((r"\frac", r"\cdot", r"\times", r"\left", r"\right", r"\text"))
_NAMED = re.compile(r"[A-Za-z](?:\([A-Za-z]\))?\s*(?:=|\\in(?![A-Za-z]))")


def _is_worked_out(text: str, gold: str) -> bool:
    return checker().is_worked_out(_exact(text), _exact(gold))


def _symbols(text: str, without: tuple[str, ...] = ()) -> frozenset[tuple[str, int]]:
    """The count of each number, letter and function in a tidy text, leaving out the name that it gives to a value."""
    named = _NAMED.match(text)
    found = _SYMBOL.findall(text[named.end() :] if named else text)
    return frozenset(Counter(symbol for symbol in found if symbol not in _LAYOUT and symbol not in without).items())


@lru_cache(maxsize=256)
def _expressions(question: str) -> frozenset[frozenset[tuple[str, int]]]:
    """The symbols of each formula of a question and of each side of its equations."""
    formulas = ["".join(parts) for parts in _FORMULA.findall(question)]
    sides = [side for formula in formulas for side in (formula, *formula.split("="))]
    return frozenset(_symbols(_tidy(side), without=("0", "1")) for side in sides)


@lru_cache(maxsize=4096)
def _tidy(answer: str) -> str:
    """The answer without spacing, delimiter sizes, fonts, degrees, percent and dollars, which do not change it."""
    text = answer if answer.isascii() else "".join(_SYMBOLS.get(char) or _numbers.to_ascii(char) for char in answer)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return " ".join(text.split()).rstrip(". ")


def _is_text(text: str) -> bool:
    """Whether an answer is words or a marked choice, whose case does not count."""
    return bool(_WORDS.fullmatch(text) or _CHOICE.fullmatch(text))


def _key(text: str, is_text: bool) -> str:
    """The spelling that is compared as written: words without case, choices without brackets."""
    inside = _CHOICE.fullmatch(text) or _WORDS.fullmatch(text)
    plain = "".join((inside[1] if inside else text).split()).rstrip(".")
    return plain.casefold() if is_text or _LETTERS.fullmatch(plain) else plain


def _choices(text: str) -> set[str]:
    """The letters of an answer that is several marked choices; empty for any other."""
    plain = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", text)
    found = [_CHOSEN.fullmatch(part) for part in re.split(r"\s*(?:,|&|\band\b)[,\s]*(?:and\s)?\s*", plain)]
    return {(one[1] or one[2]).upper() for one in found if one} if len(found) > 1 and all(found) else set()


def _is_literal(text: str) -> bool:
    """Whether an answer is equal to nothing but itself: words, a hedge, a numeral with its base, a time or a ratio."""
    rules = _HEDGE.search(text), _BASE_NUMERAL.search(text), _COMPOUND.search(text)
    return bool(_WORDS.fullmatch(text) or any(rules) or ":" in text)


def _is_well_formed(text: str) -> bool:
    """Whether braces close and nothing nests too deep. Rollouts often hold broken text, which is slow to parse."""
    plain = text.replace(r"\{", "(").replace(r"\}", ")")
    braces = _depths(plain, "{", "}")
    return not braces or (braces[-1] == 0 <= min(braces) and max(_depths(plain, "([{", ")]}")) <= MAX_DEPTH)


def _brackets(text: str) -> str | None:
    r"""The pair of brackets around the whole text, such as `()`, `[)` or `{}` (which stands for `\{\}`), if any."""
    if r"\begin{" in text:  # a matrix, which may equal a tuple
        return "()"
    plain = text.replace(r"\{", "\1").replace(r"\}", "\2")
    pair = plain[:1] + plain[-1:]
    if pair == "\1\2":
        return "{}"
    if pair not in ("()", "(]", "[)", "[]") or 0 in _depths(plain, "([{", ")]}")[:-1]:
        return None  # the first bracket is closed early, as in `(x+1)(x-1)`
    return pair


def _depths(text: str, opening: str, closing: str) -> list[int]:
    """The number of open brackets after each character."""
    return list(accumulate(1 if char in opening else -1 if char in closing else 0 for char in text))


def _exact(text: str) -> str:
    """The text with its decimals as fractions, so that nothing is compared in floating point."""

    def fraction(match: re.Match[str]) -> str:
        value = _numbers.unrounded(match[0])
        return rf"\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value)

    return _DECIMAL.sub(fraction, text.replace(r"\ldots", r"\Xi"))  # the parser would drop the dots
