r"""Reads the number that a text states: an exact rational, or None if it states none, several, or one too large.

It may have signs, thousands separators, decimals, fractions, mixed numbers, repeating decimals, scientific notation,
LaTeX and Markdown wrapping, currency, percent signs, units, scale words (`3 million`), full-width and other Unicode
digits and punctuation, and Chinese numerals. Nothing is rounded: 0.333 is not 1/3; only a decimal of a double's 15
digits and more is read as the fraction that it writes out (`unrounded`). Units and percent signs are dropped,
not converted: `20%` is 20 and `5 cents` is 5, as in the reference answers of GSM8K and MATH.

Every pattern takes linear time: repetitions that could split a text in several ways are possessive (`*+`).
"""

import re
import unicodedata
from fractions import Fraction
from functools import lru_cache
from math import floor

from ..harness.base.rationals import Token, decimal, evaluate

MAX_CHARS = 400  # a longer text is prose, not a number
MAX_DIGITS = 100  # of one numeral
MAX_EXPONENT = 100  # of ten, either sign
MAX_DECIMAL_PLACES = 12  # spelled as a decimal up to here, as a fraction beyond
MIN_CUT_DIGITS = 15  # significant ones of a decimal that stands for a fraction: as many as a double has
MIN_CUT_PLACES = 12  # of its digits, and the largest denominator of the fraction: chance gives such a decimal in one
MAX_CUT_DENOMINATOR = 1000  # of a million cases


def canonical(text: str, *, prose: bool = True) -> str | None:
    """The number that `text` states in its one spelling, or None; equal numbers have equal spellings."""
    value = number(text, prose=prose)
    return None if value is None else spell(value)


def number(text: str, *, prose: bool = True) -> Fraction | None:
    """The number that `text` states, or None.

    With `prose`, words may surround it (`The answer is 18 clips.`) and an equation counts as its right-hand side.
    Without, only signs, currency, percent and units may, so `2x`, `x=5` and `5!` state no number. An equation whose
    sides agree states their number if one side is it: `18 = 9*2`.
    """
    return None if len(text) > MAX_CHARS else _parse(text, prose)


def unrounded(text: str) -> Fraction:
    """The value of a decimal: exact, or if it is long, the fraction whose digits it writes out, cut off or rounded.

    `0.0833333333333333` is 1/12, for its 15 significant digits fit 1/12 and no other fraction with a small
    denominator. The value does not depend on what it is compared with, so equality stays transitive.
    """
    value = decimal(text)
    places = len(text.partition(".")[2])
    if places < MIN_CUT_PLACES or len(re.sub(r"\D", "", text).lstrip("0")) < MIN_CUT_DIGITS:
        return value
    fraction = value.limit_denominator(MAX_CUT_DENOMINATOR)
    digits = fraction * 10**places
    return fraction if value * 10**places in (floor(digits), floor(digits + Fraction(1, 2))) else value


def spell(value: Fraction | int) -> str:
    """`18`, `-2.5` or `1/3`: an integer, else a short decimal if it is exact, else a reduced fraction."""
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, MAX_DECIMAL_PLACES + 1):
        if 10**places % value.denominator == 0:
            digits = str(abs(value.numerator) * 10**places // value.denominator).rjust(places + 1, "0")
            return f"{'-' if value < 0 else ''}{digits[:-places]}.{digits[-places:]}"
    return f"{value.numerator}/{value.denominator}"


def last_boxed(completion: str) -> str | None:
    r"""The answer in the last `\boxed{...}` with balanced braces (the innermost of nested ones), or None.

    Boxes that only commas, spaces, dollars, `and` or `or` part are one statement: `\boxed{5} or \boxed{7}` is the list
    `5, 7`, which states no number and equals no element. Other words or a blank line end a statement. Equal contents
    count once. `\boxed 5` without braces reaches to the next box, `$` or line end. Time is linear in the text.
    """
    open_braces: list[tuple[int, int]] = []  # where a box and its content start, (-1, -1) for any other brace
    start, end = -1, -1  # of the last box
    content = None
    contents: dict[str, None] = {}  # of the last statement, in order
    for token in _BRACES.finditer(completion):
        word = token[0]
        if word == "}":
            box, opened = open_braces.pop() if open_braces else (-1, -1)
            if opened < 0:
                continue
            if opened < start:  # the box holds the last one
                end = token.end()
                continue
            span = opened, token.start()
        elif token["bare"]:
            box, span = token.start(), token.span("bare")
        else:
            if word[-1] == "{" and word != r"\{":
                open_braces.append((token.start(), token.end()) if len(word) > 1 else (-1, -1))
            continue
        if not (0 <= box - end <= _JOIN_CHARS and _JOIN.fullmatch(completion, end, box)):
            contents.clear()
        content = completion[slice(*span)].strip()
        contents[content] = None
        start, end = span[0], token.end()
    return content and ", ".join(filter(None, contents))


@lru_cache(maxsize=4096)
def to_ascii(char: str) -> str:
    """The ASCII of a character in a number: `-` for every dash, `3` for every three, nothing for invisible marks."""
    if char.isascii():
        return char
    category = unicodedata.category(char)
    if category == "Nd":
        return str(unicodedata.decimal(char))
    if category in ("Cf", "Mn"):
        return ""
    if category[0] in "ZC":
        return " "
    if category == "Pd" or char == "\u2212":
        return "-"
    if category == "No":
        form = unicodedata.normalize("NFKC", char).replace("\u2044", "/")
        return f"^{form}" if unicodedata.decomposition(char).startswith("<super>") else f" {form} "
    if "\uff01" <= char <= "\uff5e":
        return chr(ord(char) - 0xFEE0)
    return _PUNCTUATION.get(char, char)


_BOX = r"\\(?:boxed|fbox)"
_BRACES = re.compile(rf"{_BOX}(?:\s*\{{|\s+(?P<bare>[^${{}}\s](?:(?!{_BOX})[^${{}}\n]){{0,99}}))|\\[\\{{}}]|[{{}}]")
_JOIN_CHARS = 60
_JOIN = re.compile(r"(?:(?!\n\s*\n)[\s$,;~]|\\[()\[\],;: ]|\\q?quad|(?:\\text\s*\{\s*)?(?:and|or)(?:\s*\})?)*+")

# Chinese numerals, by code point: zero (two forms) to nine, two (a second form); ten, hundred, thousand; 10^4, 10^8.
_CHINESE_VALUES = {char: int(unicodedata.numeric(char)) for char in "\u96f6\u3007\u4e00\u4e8c\u4e09\u56db\u4e94\u516d"
                   "\u4e03\u516b\u4e5d\u5341\u767e\u5343\u4e07\u842c\u4ebf\u5104"} | {"\u4e24": 2}  # fmt: skip
_KILO = "(?![\u7c73\u514b\u74e6\u5361\u5347])"  # a thousand before metre, gram, watt, calorie, litre is a prefix
_CHINESE_CHARS = "".join(_CHINESE_VALUES.keys() - {"\u5343"})
_CHINESE = re.compile(f"(?:[{_CHINESE_CHARS}]|\u5343{_KILO}){{1,30}}")
# "minus", before a numeral; "A parts of which B"; "point"; "and" between a whole number and a fraction.
_CHINESE_MINUS = re.compile(rf"\u8d1f\s?(?=[\d.\u5343{_CHINESE_CHARS}])")
_CHINESE_FRACTION = re.compile(r"(\d{1,30})\s?\u5206\u4e4b\s?(\d{1,30}(?:\.\d{1,30})?)")
_CHINESE_POINT = re.compile(r"(?<=\d)\u70b9(?=\d)")
_CHINESE_AND = re.compile(r"(?<=\d)\s?\u53c8\s?(?=\d)")

_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_SCALES |= {char: value for char, value in _CHINESE_VALUES.items() if value > 9}
_SCALE = "|".join(word + _KILO if word == "\u5343" else word for word in _SCALES)
_CURRENCY = r"\u20ac\u00a3\u00a5\u20b9\u00a2"
_DECIMAL = r"(?:\d{1,3}(?:,\d{3})++|\d{1,3}(?:[ ]\d{3})++|\d++)(?:\.\d*+)?|\.\d++"
_VALUE = rf"""
    (?P<sign>[+-]?) \s*[{_CURRENCY}]?\s*
    (?: (?P<whole>\d++) (?:\s++|\s++and\s++) (?P<part>\d++)\s*/\s*(?P<parts>\d++)
      | (?P<stem>\d*+\.\d*+) \\overline\s*(?P<cycle>\d++)
      | (?P<over>{_DECIMAL}) \s*/\s* (?P<under>[+-]?(?:{_DECIMAL}))
      | (?P<decimal>{_DECIMAL})
        (?: [eE](?P<e>[+-]?\d++) | \s*[*x]\s*10\s*(?:\^|\*\*)\s*\(?\s*(?P<ten>[+-]?\d++)\s*\)? )?
      | 10\s*(?:\^|\*\*)\s*(?P<power>[+-]?\d++)
    )
    (?: \s*(?P<scale>{_SCALE})(?![A-Za-z]) )?
    (?! (?:\s?(?-i:[kKMB])|[xXnyz]) (?![A-Za-z]) )
"""
_LENGTH = r"(?:[cdkm]?m|ft|in|yd|mi|inch(?:es)?|feet|foot|yards?|miles?|met(?:er|re)s?|units?)"
_RATE = r"\s?/\s?(?:s|secs?|min|h|hrs?)\b(?:\s?\^?\s?2)?"
_POWER = rf"(?:\b|(?<=\d)){_LENGTH}(?:\s?\^?\s?[23](?!\d)|{_RATE})"  # cm^2, cm2, units ^2, m/s
UNITS = (  # as alternatives of a pattern
    "degrees? deg percent dollars? cents? euros? pounds? usd inch(?:es)? feet foot ft yards? yd miles? mi mph kmh? kph "
    "[cdkm]m met(?:er|re)s? [ckm]g grams? tons? lbs? oz ounces? [cm]l lit(?:er|re)s? gallons? cups? hours? hrs? "
    "minutes? mins? seconds? secs? days? weeks? months? years? units? square sq cubic cu per people students? ways? "
    "pct percentage radians? (?<=/)[hs]"
).replace(" ", "|")
# Words that take back a number or leave others open; a text with one of them states no number.
HEDGE = r"\b(?:or|any\w*|not|either|neither|maybe|wrong|at (?:least|most)|(?:more|less|fewer|greater) than)\b"
_HEDGE = re.compile(rf"{HEDGE}|[<>!]=", re.I)
_UNEQUAL = re.compile(r"(?:^|=)\s*(\d++)\s*=\s*(?!\1\b)\d++\s*$")  # `6 = 5`
_DENIED = re.compile(r"(?<![\d.,])(\d[\d.,]*+)\s?\(not (?!\1\))[\d.,]++\)$")  # `18 (not 20)`
_SIDE = re.compile(r"\s*+(?:(\d{1,30}+(?:\.\d{1,30})?+)|([-+*/()]))\s*+")  # a token of a calculation
# Around a number in prose: words and punctuation, but no digit and no operator. A hyphen must join words, and a sign
# must not touch the word before it: `x-5` states no number.
_LETTER = r"[^\W\d_]"
_BEFORE = rf"""(?: {_LETTER} | [\s:'"(\[~|#\u2248{_CURRENCY}] | [.,;!?](?=\s) | (?<={_LETTER})-(?={_LETTER}) )*+"""
_AFTER = rf"""(?: {_POWER} | {_LETTER} | [\s.,;:!?'"()\[\]%~|#\u00b0{_CURRENCY}] | [/-](?=\s*{_LETTER}) )*+"""
_BARE_AFTER = rf"(?: \u00b0\s?[CF]\b | [\s.%\u00b0{_CURRENCY}] | {_POWER} | /?\b(?:{UNITS})\b )*+"
_PROSE = re.compile(rf"(?: {_BEFORE}(?<![A-Za-z])(?![+-]\s) | (?=[+-]) ) {_VALUE} {_AFTER}", re.X)
_BARE = re.compile(rf"(?P<open>\()? \s* {_VALUE} \s* (?(open)\)) {_BARE_AFTER}", re.X | re.I)

_MINUS = re.compile(r"\b(?:minus|negative)\s+(?=[\d.])", re.I)
_SPACES = re.compile(r"\\[,;: ]|\\q?quad(?![A-Za-z])|\\hspace\{[^{}]*\}|[~\s]")
_DROPPED = re.compile(r"\\!\s*|\\(?:left|right|displaystyle|textstyle)(?![A-Za-z])|\\[()\[\]]")
_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mbox|math(?:rm|bf|it|sf)|operatorname)\s*\{([^{}]*)\}")
_FRACTION = re.compile(r"\\[dtc]?frac\s*(?:\{([^{}\\]*)\}|(\d))\s*(?:\{([^{}\\]*)\}|(\d))")
_DEGREES = re.compile(r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])")
_BOLD = re.compile(r"\*\*([^*]+)\*\*|__([^_]+)__|(?<![\w)\]}])([*_`])(?! )([^*_`]+)\3(?!\w)")


def _plain(text: str) -> str | None:
    """The text without LaTeX, Markdown and Unicode dressing; None if it holds LaTeX that no number has."""
    if not text.isascii():
        text = "".join(map(to_ascii, text))
    if r"\boxed" in text:
        text = last_boxed(text) or ""
    if "\\" in text:
        text = _SPACES.sub(" ", _DROPPED.sub("", text.replace(r"\%", "%").replace(r"\$", "$")))
        text = _FRACTION.sub(lambda m: f" {(m[1] or m[2] or '').strip()}/{(m[3] or m[4] or '').strip()} ", text)
        text = _DEGREES.sub("\u00b0", _TEXT.sub(_unit, text))
        text = text.replace(r"\times", "*").replace(r"\cdot", "*").replace(r"\approx", "\u2248")
        text = text.replace(r"\bar{", r"\overline{")
        if "\\" in text.replace(r"\overline", ""):
            return None
    text = re.sub(r"(?<=\d)'(?=\d{3}(?!\d))", ",", text)
    text = re.sub(r"([+-])\s*\$\s*", r"\1", text.replace("{,}", ",")).replace("$", " ")
    text = text.replace("{", " ").replace("}", " ")
    text = _BOLD.sub(lambda m: f" {m[1] or m[2] or m[4]} ", text)
    return _DENIED.sub(r"\1", " ".join(text.strip(" \t\r\n\0*_`'\"").split()))


def _unit(match: re.Match[str]) -> str:
    r"""The content of `\text{...}`; words other than a scale become `units`, the name for any unit."""
    words = match[1].strip()
    is_word = len(words) > 1 and words.replace(" ", "").isalpha() and words.lower() not in {"pi", *_SCALES}
    return f" {'units' if is_word and not _HEDGE.search(words) else match[1]} "


@lru_cache(maxsize=16_384)
def _parse(text: str, prose: bool) -> Fraction | None:
    plain = _plain(text)
    if plain is None:
        return None
    if prose and (_HEDGE.search(plain) or _UNEQUAL.search(plain)):
        return None
    sides = [side.strip() for side in plain.split("=")]
    values = [_side(side, prose) for side in sides]
    if len(sides) == 1 or (prose and values[-1] is not None):
        return values[-1]
    agreed = {value if value is not None else _calculated(side) for side, value in zip(sides, values, strict=True)}
    return agreed.pop() if len(agreed) == 1 and any(value is not None for value in values) else None


def _side(plain: str, prose: bool) -> Fraction | None:
    """The number that one side of an equation states."""
    if prose:
        plain = _MINUS.sub("-", plain)
        plain = plain if plain.isascii() else _without_chinese(plain)
    match = (_PROSE if prose else _BARE).fullmatch(plain)
    value = None if match is None else _magnitude(match)
    if match is None or value is None:
        return None
    return value * (-1 if match["sign"] == "-" else 1) * (_SCALES[match["scale"].lower()] if match["scale"] else 1)


def _calculated(text: str) -> Fraction | None:
    """The value of a written calculation such as `9*2`."""
    if not re.fullmatch(rf"(?:{_SIDE.pattern})+", text):
        return None
    tokens: list[Token] = [decimal(one[1]) if one[1] else one[2] for one in _SIDE.finditer(text)]
    evaluated = evaluate(tokens, max_depth=10, signed=True)
    return None if evaluated is None else evaluated[0]


_PUNCTUATION = {"\u3002": ".", "\u3001": ",", "\u2044": "/", "\u2215": "/", "\u00f7": "/", "\u00d7": "*", "\u22c5": "*"}
_PUNCTUATION |= {"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u300c": '"', "\u300d": '"'}
_PUNCTUATION |= {"\uffe5": "\u00a5", "\u066b": ".", "\u066c": ",", "\u066a": "%"}  # the last three are Arabic


def _magnitude(match: re.Match[str]) -> Fraction | None:
    if max(map(len, re.findall(r"\d+", match[0].replace(",", "").replace(" ", "")))) > MAX_DIGITS:
        return None
    if match["whole"]:
        part = _ratio(match["part"], match["parts"])
        return None if part is None or part >= 1 else int(match["whole"]) + part
    if match["cycle"]:  # `0.1` followed by the digits `6` for ever is 0.1 + 6/90
        stem, cycle = match["stem"], match["cycle"]
        places = len(stem.partition(".")[2])
        return decimal(f"0{stem}") + Fraction(int(cycle), 10**places * (10 ** len(cycle) - 1))
    if match["over"]:
        return _ratio(match["over"], match["under"])
    exponent = match["e"] or match["ten"] or match["power"] or "0"
    if len(exponent) > 4 or abs(int(exponent)) > MAX_EXPONENT:
        return None
    return (decimal if int(exponent) else unrounded)(match["decimal"] or "1") * Fraction(10) ** int(exponent)


def _ratio(over: str, under: str) -> Fraction | None:
    divisor = decimal(under)
    return decimal(over) / divisor if divisor else None


def _without_chinese(text: str) -> str:
    """The text with ASCII for Chinese signs and, unless it has digits of its own, for Chinese numerals."""
    text = _CHINESE_MINUS.sub("-", text)
    if not re.search(r"\d", text):
        text = _CHINESE_POINT.sub(".", _CHINESE.sub(_chinese, text))
    text = _CHINESE_FRACTION.sub(lambda m: f"{m[2]}%" if m[1] == "100" else f"{m[2]}/{m[1]}", text)
    return _CHINESE_AND.sub(" ", text)


def _chinese(match: re.Match[str]) -> str:
    """A run of Chinese numerals in digits, written place by place or with units."""
    values = [_CHINESE_VALUES[char] for char in match[0]]
    if max(values) < 10:
        return "".join(map(str, values))
    total = section = digit = 0
    for value in values:
        if value < 10:
            digit = value
            continue
        if value < 10**4:
            section += (digit or 1) * value
        else:  # the largest unit multiplies all before it, the other its section only
            total = (total + section + digit) * value if value == 10**8 else total + (section + digit) * value
            section = 0
        digit = 0
    return str(total + section + digit)
