"""Reads the unit at the end of an answer, so that `7 inches` is not `7 feet`. Nothing is converted."""

import re
from collections import Counter
from functools import lru_cache

from . import _numbers

# A unit a row: its name, then its other spellings, without case.
_ROWS = """in inch inches;ft foot feet;yd yard yards;mi mile miles;acre acres;lb lbs pound pounds;oz ounce ounces
ton tons;gal gallon gallons;cup cups;min mins minute minutes;h hr hrs hour hours;day days;week weeks;month months
year years;dollar dollars usd;cent cents;euro euros;rad radian radians;% percent percentage pct;n newton newtons
j joule joules;w watt watts;k kelvin;erg ergs;hz hertz;s sec secs;\u00b0;\u00b0f;\u00b0c"""
_METRIC = {"m": "meter metre", "g": "gram gramme", "l": "liter litre", "s": "second"}
_PREFIXES = {"": "", "k": "kilo", "c": "centi", "m": "milli", "d": "deci"}
_NAMES = {word: words.split()[0] for words in re.split("[;\n]", _ROWS) for word in words.split()} | {
    word: short + base
    for short, long in _PREFIXES.items()
    for base, names in _METRIC.items()
    for word in (short + base, *(long + name + end for name in names.split() for end in ("", "s")))
}
NAMES = "|".join(sorted(_NAMES, key=len, reverse=True))  # as alternatives of a pattern
_FONT = re.compile(r"\\(?:text\w*|mbox|mathrm|rm|operatorname)\s*\{([^{}]*)\}")
_SPACE = re.compile(r"\\[,;:! ]|~|\\cdot(?![A-Za-z])")
_DEGREE = re.compile(
    r"(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|\u00b0|\bdeg(?:rees?)?\b)\s*(?:([FC])(?:ahrenheit|elsius)?)?(?![A-Za-z])",
    re.I,
)
_WORD = rf"(?:(sq|cu)(?:uare|bic|\.)?\s+)?({NAMES})(?![A-Za-z])\.?(?:\s*\^\s*\{{?\s*(-?\d)\s*\}}?|([23])(?!\d))?"
_UNIT = re.compile(rf"(?<=\s)(?<!/\s)(?<!per\s){_WORD}(?:(?:\s*/\s*|\s+per\s+|\s+){_WORD})*\s*\Z", re.I)
_PART = re.compile(rf"(/\s*|per\s+)?{_WORD}", re.I)


def name(word: str) -> str:
    """The one spelling of a unit."""
    return _NAMES[word.lower()]


@lru_cache(maxsize=4096)
def unit(answer: str) -> frozenset[tuple[str, int]]:
    """The powers of the units that an answer names at its end; empty if it names none that is known."""
    text = answer if answer.isascii() else "".join(map(_numbers.to_ascii, answer))
    text = _SPACE.sub(" ", _FONT.sub(r" \1 ", text))
    text = _DEGREE.sub(lambda m: f" \u00b0{m[1] or ''} ", re.sub(r"\\?%", " % ", text))
    text = re.sub(r"\bmph\b", "mi/h", re.sub(r"\bk[mp]h\b", "km/h", text)).rstrip(" .$")
    powers: Counter[str] = Counter()
    for per, shape, word, power, digit in _PART.findall(found[0] if (found := _UNIT.search(text)) else ""):
        size = int(power or digit or {"s": 2, "c": 3}.get(shape[:1].lower(), 1))
        powers[name(word)] += -size if per else size
    return frozenset(powers.items()) or frozenset([("dollar", 1)] if r"\$" in answer else ())


def contradict(answer: str, other: str) -> bool:
    """Whether both answers name a unit, and not the same one; degrees may be of either temperature."""
    one, two = unit(answer), unit(other)
    is_degree = {word[:1] for word, _ in one | two} == {"\u00b0"} and ("\u00b0", 1) in one | two
    return bool(one and two) and one != two and not is_degree
