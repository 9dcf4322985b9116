"""Computes the size of an expression and its value at a point, before algebra spends time on it.

Both depend only on the expression, never on the machine, so a run that continues elsewhere gets the same decisions.
"""

import hashlib
from functools import lru_cache
from math import comb, inf, log10
from typing import Any

import sympy
from sympy import Add, Basic, Mul, Pow, Rational, Symbol, factorial
from sympy.core.numbers import ImaginaryUnit
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction

MAX_DIGITS = 10_000  # of a constant; the longest answer has 500 characters
MAX_TERMS = 200  # of two expressions, multiplied out: algebra takes a second for them
_ELEMENTARY = (Add, Mul, Pow, Symbol, sympy.Number, sympy.NumberSymbol, sympy.Abs, sympy.exp, sympy.log, sympy.floor)
_ELEMENTARY += (sympy.ceiling, ImaginaryUnit, TrigonometricFunction, InverseTrigonometricFunction)


def num_digits(value: Any) -> float:
    """An upper bound for the digits of a constant and of every constant in an expression, without computing any."""
    inner = max(map(num_digits, value.args), default=0.0)
    if isinstance(value, Pow | factorial) and not value.free_symbols:
        return max(inner, _log_size(value))
    return inner


def num_terms(value: Any) -> int:
    """The terms of an expression if it were multiplied out; other functions count the sum over their parts."""
    if not isinstance(value, Basic) or not value.args:
        return 1
    if isinstance(value, Pow) and value.exp.is_Integer:
        terms = num_terms(value.base)
        return 1 if terms == 1 else comb(min(abs(int(value.exp)), 10**4) + terms - 1, min(terms - 1, 100))
    counts = [num_terms(part) for part in value.args]
    if not isinstance(value, Mul):
        return sum(counts)
    product = 1
    for count in counts:
        product *= count
    return product


def surely_differ(first: Any, second: Any) -> bool:
    """Whether two expressions have different values at one fixed point; algebra decides the rest."""
    value, other = _at_point(first), _at_point(second)
    if value is None or other is None:
        return False
    return bool(abs(value - other) > 1e-6 * (abs(value) + abs(other)))


def to_complex(value: Any) -> complex | None:
    """The value at that point for comparison in double precision, None if unknown or of an unsafe size."""
    value = _at_point(value)
    if value is None or not 1e-30 < abs(value) < 1e300:
        return None
    return complex(value)


def _log_size(value: Any) -> float:
    """The decimal logarithm of a bound for the larger of numerator and denominator of a constant."""
    if isinstance(value, Rational):
        return log10(max(abs(value.p), value.q, 1))
    if isinstance(value, Pow):
        base, exponent = _log_size(value.base), _log_size(value.exp)
        return base * (10**exponent if exponent < 300 else inf) if base else 0.0
    if isinstance(value, factorial):
        size = _log_size(value.args[0])
        return size * 10**size if size < 300 else inf
    return sum(map(_log_size, value.args)) + log10(2) * (len(value.args) - 1) if value.args else 1.0


@lru_cache(maxsize=4096)
def _at_point(value: Any) -> Any:
    """The value with each variable at a number from 1 to 2 that is a hash of its name; None if it is unknown."""
    if not all(isinstance(part, _ELEMENTARY) for part in sympy.preorder_traversal(value)):
        return None
    point = {symbol: _coordinate(symbol.name) for symbol in value.free_symbols}
    number = value.evalf(15, subs=point, maxn=60)
    return number if number.is_number and number.is_finite else None


def _coordinate(name: str) -> Any:
    digest = hashlib.sha256(name.encode()).digest()
    return 1 + Rational(int.from_bytes(digest[:4]), 2**32)
