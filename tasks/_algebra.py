r"""Decides whether two LaTeX expressions are equal, with math-verify 0.9.0 and sympy: the work of a child process.

Departures from math-verify: variables that differ in case differ, `i` is the imaginary unit, tuples and matrices are
compared entry by entry, a tuple may state a column vector, and chains of inequalities may be read from either end.
Inequalities joined by `or` are equal to the same set and to no list of them; `cases` are compared row by row, in any
order; odd roots are real, so that `\sqrt[3]{x^2}` is `x^{2/3}`; `\gamma` is a variable and no constant.

The size of an expression and its value at a point are computed before algebra spends time on it. Both depend on the
expression alone, so a run that continues elsewhere gets the same decisions.
"""

import hashlib
import logging
import re
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import combinations, product
from math import comb, inf, log10, prod
from typing import Any

import math_verify
import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex, symbols
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import grader, parser
from sympy import Basic, Eq, Expr, I, ImmutableMatrix, Interval, MatrixBase, Mul, Or, Pow, Set, Symbol, Tuple
from sympy.core.numbers import ImaginaryUnit
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction
from sympy.logic.boolalg import Boolean, BooleanAtom
from sympy.matrices.expressions import MatrixExpr

from ._child import Begin
from ._form import is_worked_out

UNPARSABLE = "unparsable"
MAX_DIGITS = 10_000  # of a constant; the longest answer has 500 characters
MAX_TERMS = 200  # of two expressions, multiplied out: algebra takes a second for them
MAX_SIGNED = 6  # variables whose signs are tried out, all of them
WARM_UP = (  # the first question is the slowest
    r"[\frac{1}{2},\sqrt{3}) \cup (4x,5\pi)",
    r"\begin{pmatrix} y+1 \\ 2^3 \end{pmatrix}",
)

_ELEMENTARY = (
    sympy.Add, Mul, Pow, Symbol, sympy.Number, sympy.NumberSymbol, ImaginaryUnit, sympy.Abs, sympy.sign, sympy.exp,
    sympy.log, sympy.floor, sympy.ceiling, TrigonometricFunction, InverseTrigonometricFunction,
)  # fmt: skip
# No units: that rule takes the `t` off `10t`.
_REWRITES = NormalizationConfig(basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none")
_AS_WRITTEN = ConversionConfig(lowercase_symbols=False)
_SMALL_I = Symbol("i", real=True)
_CAPITAL_I = Symbol("I", real=True)  # the parser takes it for the imaginary unit


def _refuse(text: str) -> None:
    raise ValueError("plain expressions are not read: the library evaluates their text as Python")


parser.parse_expr_cached = _refuse  # pyright: ignore[reportAttributeAccessIssue]

# The index of the text that a stage has to do with; of the larger one, when both are compared.
Stage = Callable[[int], None]


def prepare(cpu_seconds: str, wall_seconds: str) -> Callable[..., str]:
    """The function that answers with a verdict: `equal`, `different` or `unparsable`."""
    hasten()
    return judging(compare, cpu_seconds, wall_seconds)


def judging(judge: Callable[[str, str, Stage], str], cpu_seconds: str, wall_seconds: str) -> Callable[..., str]:
    """The same, by a function that compares."""
    logging.disable(logging.CRITICAL)

    def answer(begin: Begin, kind: str, first: str, second: str) -> str:
        def stage(text: int) -> None:
            begin(text, float(cpu_seconds), float(wall_seconds))

        try:
            if kind == "compare":
                return judge(first, second, stage)
            stage(0)
            return "equal" if is_worked_out(_read(first), _read(second)) else "different"
        except MemoryError:
            raise
        except Exception:  # the parser and sympy raise anything on text that is no mathematics
            return UNPARSABLE

    judge(*WARM_UP, lambda text: None)
    return answer


def compare(first: str, second: str, begin: Stage) -> str:
    """The verdict on whether two expressions are equal in both directions of math-verify; `begin` announces a stage."""
    begin(0)
    one = _read(first)
    begin(1)
    other = _read(second)
    sizes = num_terms(one), num_terms(other)
    begin(0 if sizes[0] >= sizes[1] else 1)
    if sum(sizes) > MAX_TERMS:
        return "different" if surely_differ(one, other) else "equal" if one == other else UNPARSABLE
    if one.has(I) or other.has(I):
        one, other = (_renamed(value, _complex_variables(value)) for value in (one, other))
    roots = [value.replace(_is_odd_root, _real_root) for value in (one, other)]
    return "equal" if _equal(one, other) or (roots != [one, other] and _equal(*roots)) else "different"


def hasten() -> None:
    """Let math-verify solve an equation once, and simplify no difference that a point shows not to be zero: the same
    verdicts, without work that each comparison repeats."""
    solve, is_zero = grader.solve, grader.sympy_symbolic_eq

    @lru_cache(maxsize=1024)
    def solved(relation: Any, symbols: frozenset[Any]) -> Any:
        try:
            return solve(relation, set(symbols))
        except Exception:
            return None  # which math-verify takes as it takes the error: not equal by its solutions

    grader.solve = lambda relation, symbols: solved(relation, frozenset(symbols))
    grader.sympy_symbolic_eq = lambda first, second: not surely_differ(first, second) and is_zero(first, second)


def num_digits(value: Any) -> float:
    """An upper bound for the digits of a constant and of every constant in an expression, without computing any."""
    is_computed = isinstance(value, Pow | sympy.factorial) and not value.free_symbols
    return max([_log_size(value) if is_computed else 0.0, *map(num_digits, value.args)])


def num_terms(value: Any) -> int:
    """The terms of an expression if it were multiplied out; other functions count the sum over their parts."""
    if not isinstance(value, Basic) or not value.args:
        return 1
    if isinstance(value, Pow) and value.exp.is_Integer:
        terms = num_terms(value.base)
        return 1 if terms == 1 else comb(min(abs(int(value.exp)), 10**4) + terms - 1, min(terms - 1, 100))
    return (prod if isinstance(value, Mul) else sum)(map(num_terms, value.args))


class _Cases(Tuple):
    """A function given case by case: a tuple (value, condition) for each row, in any order."""


_CASES = re.compile(r"(?:[A-Za-z](?:\([A-Za-z]\))?\s*=)?\s*\\begin\{cases\}(.*)\\end\{cases\}\s*\.?", re.S)
_CONDITION = re.compile(r"[\s,]*(?:&\s*)?\\text\s*\{\s*(?:if|for|when)\s*\}|[\s,]*&\s*(?:if|for|when)\b|[\s,]*&")
_OTHERWISE = re.compile(r"\s*(?:\\text\s*\{\s*(?:otherwise|else)[.,]?\s*\}|otherwise|else)\s*")


@lru_cache(maxsize=4096)
def _read(text: str) -> Any:
    cases = _CASES.fullmatch(text.strip())
    if cases:
        rows = [row.strip(" \t\n,;.") for row in re.split(r"\\\\", cases[1])]
        pairs = [_CONDITION.split(row, maxsplit=1) for row in rows if row]
        if all(len(pair) == 2 for pair in pairs):
            otherwise = Symbol("otherwise")
            conditions = [otherwise if _OTHERWISE.fullmatch(condition) else _read(condition) for _, condition in pairs]
            return _Cases(*map(Tuple, (_read(value) for value, _ in pairs), conditions))
        return _read(", ".join(row for row in rows if row))  # a system of equations
    if r"\lor" in text:
        parts = [_read(part) for part in text.split(r"\lor")]
        if not all(isinstance(part, Boolean) for part in parts):
            raise ValueError("only conditions are joined by `or`")
        return Or(*parts, evaluate=False)  # pyright: ignore[reportCallIssue]
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
    variables = [symbol for symbol in parsed.free_symbols if isinstance(symbol, Symbol)]
    capitals = [symbol for symbol in variables if symbol.name != symbol.name.lower()]
    # math-verify ignores the case of names such as `Delta`, so that a name must differ from others without it.
    caseless = {one: "".join(f"{char.lower()}'" if char.isupper() else char for char in one.name) for one in capitals}
    parsed = _renamed(parsed, {symbol: Symbol(name, real=symbol.is_real) for symbol, name in caseless.items()})
    if isinstance(parsed, MatrixBase | MatrixExpr):
        parsed = ImmutableMatrix(parsed.doit())
    chain = [part.canonical for part in parsed.args if isinstance(part, Relational) and not isinstance(part, Eq)]
    if isinstance(parsed, And) and len(chain) == len(parsed.args):
        parsed = And(*sorted(chain, key=sympy.default_sort_key))
    if isinstance(parsed, BooleanAtom):
        raise ValueError("not an answer")  # else all that is false would be equal
    if num_digits(parsed) > MAX_DIGITS:
        raise ValueError("too long a number")
    if isinstance(parsed, Expr) and not parsed.free_symbols:
        parsed.doit().evalf(15)  # a value beyond the limits must show here, not in every comparison
    return parsed


def _parse(text: str) -> Any:
    for name in ("gamma", "Gamma"):  # else both are Euler's constant
        symbols.sympy_singleton_map.pop(name, None)
    # Not math_verify.parse: it ignores case.
    return latex2sympy(text, is_real=True, normalization_config=None, conversion_config=_AS_WRITTEN)


def _is_odd_root(value: Any) -> bool:
    """Whether a value is a rational power, with an odd denominator, of a term with variables, all of them real."""
    if not (isinstance(value, Pow) and isinstance(value.exp, sympy.Rational) and value.exp.q % 2 == 1 < value.exp.q):
        return False
    variables = value.base.free_symbols
    return bool(variables) and value.base.is_real is not False and all(symbol.is_real for symbol in variables)


def _real_root(root: Any) -> Any:
    """The odd root, taken of each factor of its base; sympy's own is the principal one, which is not."""
    product = sympy.Integer(1)
    for factor in Mul.make_args(root.base.doit()):
        base, exponent = factor.as_base_exp()
        if not exponent.is_Integer:
            base, exponent = factor, sympy.Integer(1)
        exponent *= root.exp
        if base.could_extract_minus_sign():
            product *= (-1) ** (exponent.p % 2)
            base = -base
        product *= Pow(base, exponent)
    return product


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
    if isinstance(first, _Cases) or isinstance(second, _Cases):
        return type(first) is type(second) and _match(first.args, second.args)
    if isinstance(first, Or) or isinstance(second, Or):  # conditions for the same values of one variable, or the same
        (variable, values), (other_variable, other_values) = _solutions(first), _solutions(second)
        if values is None or other_values is None:
            return isinstance(first, Or) and isinstance(second, Or) and _match(first.args, second.args)
        same_variable = variable is None or other_variable is None or variable == other_variable
        return bool(same_variable and (values == other_values or values.symmetric_difference(other_values).is_empty))
    if surely_differ(first, second):
        return False
    parts, others = _entries(first, second), _entries(second, first)
    if parts and others and parts[0] == others[0]:
        return all(map(_equal, parts[1], others[1]))
    if isinstance(first, Expr) and isinstance(second, Expr) and (first.is_Symbol or second.is_Symbol):
        return bool(sympy.simplify(first - second) == 0)  # math-verify joins letters to words, without case
    verify = partial(math_verify.verify, allow_set_relation_comp=True, timeout_seconds=None)
    if verify(first, second) and verify(second, first) and _same_size(first, second):
        return True
    named = {value.lhs for value in (first, second) if isinstance(value, Eq)}
    sides = [value.rhs if isinstance(value, Eq) and value.lhs.is_Symbol else value for value in (first, second)]
    return len(named) < 2 and _equal_where_real(*sides)


def _equal_where_real(first: Any, second: Any) -> bool:
    """Whether two expressions with roots or logarithms of variables agree wherever both are real: at points of each
    sign of each variable, and by algebra as if all that a root or logarithm is taken of were positive."""
    if not (isinstance(first, Expr) and isinstance(second, Expr)) or first.has(I):
        return False
    variables = sorted(first.free_symbols | second.free_symbols, key=str)
    if not 0 < len(variables) <= MAX_SIGNED or not any(
        map(_needs_sign, sympy.preorder_traversal(Tuple(first, second)))
    ):
        return False
    is_shared = False
    for signs, scale in product(product((1, -1), repeat=len(variables)), (sympy.Rational(1, 50), 1, 50)):
        point = {one: sign * scale * _coordinate(one) for one, sign in zip(variables, signs, strict=True)}
        differ = _differ(*(_value(one.replace(_is_odd_root, _signed_root), point) for one in (first, second)))
        if differ:
            return False
        is_shared |= differ is False
    forced = sympy.expand_power_base(sympy.factor(sympy.posify(first - second)[0], deep=True), force=True)
    return is_shared and bool(sympy.simplify(sympy.expand_log(forced, force=True)) == 0)


def surely_differ(first: Any, second: Any) -> bool:
    """Whether two expressions have different values at one fixed point, which costs no algebra."""
    is_pair = isinstance(first, Expr) and isinstance(second, Expr)
    return bool(is_pair and _differ(_at_point(first), _at_point(second)))


def _differ(value: Any, other: Any) -> bool | None:
    """Whether two values differ by more than rounding; None if one is unknown."""
    if value is None or other is None:
        return None
    return bool(abs(value - other) > 1e-6 * (abs(value) + abs(other)))


def _match(rows: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether each row equals one other, in any order."""
    left = list(others)
    for row in rows:
        same = next((other for other in left if _equal(row, other)), None)
        if same is None:
            return False
        left.remove(same)
    return not left


def _solutions(value: Any) -> tuple[Any, Any]:
    """The variable, if it is named, and the set of its values; None for a text that is no condition of one variable.

    Alternatives must be disjoint, and each possible: else `x>3 or x>5` would be right where either of them is.
    """
    if isinstance(value, Eq) and value.lhs.is_Symbol and isinstance(value.rhs, Set):
        return value.lhs, value.rhs  # how the parser reads `x \in A`
    if not isinstance(value, Boolean):
        return None, value if isinstance(value, Set) and not value.free_symbols else None
    if len(value.free_symbols) != 1:
        return None, None
    sets = [part.as_set() for part in (value.args if isinstance(value, Or) else (value,))]
    if any(part.is_empty is not False for part in sets):
        return None, None
    if any(part.intersect(other).is_empty is not True for part, other in combinations(sets, 2)):
        return None, None
    return next(iter(value.free_symbols)), sympy.Union(*sets)


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


def _log_size(value: Any) -> float:
    """The decimal logarithm of a bound for the larger of numerator and denominator of a constant."""
    if isinstance(value, sympy.Rational):
        return log10(max(abs(value.p), value.q, 1))
    if isinstance(value, Pow):
        base, exponent, power = _log_size(value.base), _log_size(value.exp), value.exp
        if isinstance(power, sympy.Rational):  # a root has fewer digits
            exponent = log10(max(abs(power.p), 1)) - log10(power.q)
        return base * (10**exponent if exponent < 300 else inf) if base else 0.0
    if isinstance(value, sympy.factorial):
        size = _log_size(value.args[0])
        return size * 10**size if size < 300 else inf
    return sum(map(_log_size, value.args)) + log10(2) * (len(value.args) - 1) if value.args else 1.0


@lru_cache(maxsize=4096)
def _at_point(value: Any) -> Any:
    """The value with each variable at its coordinate; None if it is unknown."""
    return _value(value, {symbol: _coordinate(symbol) for symbol in value.free_symbols})


def _value(value: Any, point: dict[Any, Any]) -> Any:
    """The value at a point, None if it is unknown or, of real variables, a root or logarithm in it is not real."""
    parts: list[Any] = list(sympy.preorder_traversal(value))
    if not all(isinstance(part, _ELEMENTARY) for part in parts):
        return None
    if point and not value.has(I) and not all(part.evalf(5, subs=point).is_real for part in filter(_needs_sign, parts)):
        return None
    number = value.evalf(15, subs=point, maxn=60)
    return number if number.is_number and number.is_finite else None


def _signed_root(root: Any) -> Any:
    """The odd root of a real number, also where that is negative."""
    return sympy.sign(root.base) ** root.exp.p * sympy.Abs(root.base) ** root.exp


def _needs_sign(part: Any) -> bool:
    """Whether an expression is a root or a logarithm."""
    is_root = isinstance(part, Pow) and isinstance(part.exp, sympy.Rational) and part.exp.q > 1
    return is_root or isinstance(part, sympy.log)


def _coordinate(variable: Any) -> Any:
    """A number from 1 to 2 that is a hash of a variable's name."""
    return 1 + sympy.Rational(int.from_bytes(hashlib.sha256(variable.name.encode()).digest()[:4]), 2**32)
