"""Whether two LaTeX expressions are equal, by math-verify 0.9.0 and sympy; only `tasks._child` imports it.

Departures from math-verify: variables that differ in case differ, `i` is the imaginary unit, tuples and matrices are
compared entry by entry, a tuple may state a column vector, and chains of inequalities may be read from either end.
"""

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import parser
from sympy import Basic, Eq, Expr, I, ImmutableMatrix, Interval, MatrixBase, Symbol, Tuple
from sympy.core.relational import Relational
from sympy.logic.boolalg import BooleanAtom
from sympy.matrices.expressions import MatrixExpr

from tasks._questions import COMPARE, FIRST, SECOND, Verdict

# No units: that rule takes the `t` off `10t`.
_REWRITES = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_AS_WRITTEN = ConversionConfig(lowercase_symbols=False)
_SMALL_I = Symbol("i", real=True)
_CAPITAL_I = Symbol("I", real=True)  # the parser takes it for the imaginary unit


def _refuse(text: str) -> None:
    raise ValueError("plain expressions are not read: the library evaluates their text as Python")


logging.disable(logging.CRITICAL)
parser.parse_expr_cached = _refuse  # pyright: ignore[reportAttributeAccessIssue]


def compare(first: str, second: str, begin: Callable[[bytes], None]) -> Verdict:
    """Whether two expressions are equal in both directions of math-verify's comparison; `begin` announces a stage."""
    begin(FIRST)
    one = _read(first)
    begin(SECOND)
    other = _read(second)
    begin(COMPARE)
    if one.has(I) or other.has(I):
        one, other = (_renamed(value, _complex_variables(value)) for value in (one, other))
    return "equal" if _equal(one, other) else "different"


def compare_as_library(gold: str, completion: str, begin: Callable[[bytes], None]) -> Verdict:
    """Whether a completion states the gold answer, by math-verify alone."""
    begin(FIRST)
    expected = math_verify.parse(rf"\boxed{{{gold}}}", parsing_timeout=0)
    begin(SECOND)
    found = math_verify.parse(completion, parsing_timeout=0)
    begin(COMPARE)
    if not found:
        return "unparsable"
    return "equal" if math_verify.verify(expected, found, timeout_seconds=None) else "different"


@lru_cache(maxsize=4096)
def _read(text: str) -> Basic | MatrixBase:
    text = normalize_latex(text, _REWRITES)
    try:
        parsed = _parse(text)
    except Exception:
        parsed = _parse(parser.get_last_eq(text))
    if not isinstance(parsed, Basic | MatrixBase):
        raise ValueError("not an expression")
    if parsed.has(I):
        parsed = _renamed(parsed, {I: _CAPITAL_I})
    if parsed.has(_SMALL_I):
        parsed = Tuple(parsed.start, parsed.end) if isinstance(parsed, Interval) else parsed
        parsed = _renamed(parsed, _complex_variables(parsed) | {_SMALL_I: I})
    if isinstance(parsed, MatrixBase | MatrixExpr):
        parsed = ImmutableMatrix(parsed.doit())
    chain = [part.canonical for part in parsed.args if isinstance(part, Relational) and not isinstance(part, Eq)]
    if isinstance(parsed, And) and len(chain) == len(parsed.args):
        parsed = And(*sorted(chain, key=sympy.default_sort_key))
    if isinstance(parsed, BooleanAtom):
        raise ValueError("not an answer")  # else all that is false would be equal
    if isinstance(parsed, Expr) and not parsed.free_symbols:
        parsed.doit().evalf(15)  # a value beyond the limits must show here, not in every comparison
    return parsed


def _parse(text: str) -> Any:
    # Not math_verify.parse: it ignores case.
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_AS_WRITTEN)


def _complex_variables(value: Any) -> dict[Any, Any]:
    return {symbol: Symbol(symbol.name) for symbol in value.free_symbols}


def _renamed(value: Any, names: dict[Any, Any]) -> Any:
    with sympy.evaluate(False):  # else `x=i` for a real x would be False
        return value.xreplace(names)


def _entries(value: Any, other: Any) -> tuple[tuple[Any, ...], list[Any]] | None:
    """The shape and the values that are compared one by one; a tuple is a column if `other` is one."""
    is_column = isinstance(other, MatrixBase) and other.cols == 1 < other.rows
    if isinstance(value, Interval) and not (is_column and value.is_open):  # the parser takes `(1,2)` for one
        return ("interval", value.left_open, value.right_open), [value.start, value.end]
    if isinstance(value, MatrixBase):
        return ("matrix", *value.shape), list(value.flat())
    if not isinstance(value, Interval | Tuple):
        return None
    values = [value.start, value.end] if isinstance(value, Interval) else list(value)
    return ("matrix", len(values), 1) if is_column else ("tuple", len(values)), values


def _equal(first: Any, second: Any) -> bool:
    parts, others = _entries(first, second), _entries(second, first)
    if parts and others and parts[0] == others[0]:
        return all(map(_equal, parts[1], others[1]))
    if isinstance(first, Expr) and isinstance(second, Expr) and (first.is_Symbol or second.is_Symbol):
        return bool(sympy.simplify(first - second) == 0)  # math-verify joins letters to words, without case
    verify = partial(math_verify.verify, allow_set_relation_comp=True, timeout_seconds=None)
    return verify(first, second) and verify(second, first) and _same_size(first, second)


def _same_size(first: Any, second: Any) -> bool:
    """math-verify takes a difference below 1e-15 for zero, even between `2^{-98}` and `2^{-99}`."""
    if not isinstance(first, Expr) or not isinstance(second, Expr) or first.free_symbols or second.free_symbols:
        return True
    if first == second:
        return True  # infinity, for one
    first, second = first.doit(), second.doit()
    if first.is_Rational and second.is_Rational:
        return first == second
    return bool(abs((first - second).evalf(20)) <= 1e-12 * abs(first.evalf(20)))
