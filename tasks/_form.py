"""Decides whether an expression is worked out: whether it leaves no operation that the gold answer does not leave.

A fraction of constants need not be reduced, nor one root taken or simplified, because graders differ there; a product
may keep a common factor.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import sympy
from sympy import Add, Basic, Eq, I, Integer, Mul, Pow, Rational, Symbol
from sympy.concrete.expr_with_limits import ExprWithLimits
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import InverseTrigonometricFunction, TrigonometricFunction


def is_worked_out(answer: Any, gold: Any) -> bool:
    """Whether an answer leaves no kind of work that the gold answer does not, and is factored where that is."""
    answer, gold = _right_side(answer), _right_side(gold)
    if _num_factors(gold) > 1 and isinstance(answer, Add):
        return False
    return set(_work(_rooted(answer))) <= set(_work(gold))


def _right_side(value: Any) -> Any:
    """The value of a stated variable or constant: `5` for `x=5`."""
    return value.rhs if isinstance(value, Eq) and (value.lhs.is_Symbol or not value.free_symbols) else value


def _rooted(value: Any) -> Any:
    r"""The value with its root taken, if it is one exact root: `8` for `\sqrt[3]{512}`."""
    parts: Any = value.as_coeff_Mul() if isinstance(value, Mul) else (1, value)
    sign, root = parts
    is_root = isinstance(root, Pow) and isinstance(root.exp, Rational) and root.exp.p == 1 < root.exp.q
    return sign * Pow(root.base, root.exp) if is_root and _is_exact(root) and (sign == -1 or root is value) else value


def _is_exact(root: Any) -> bool:
    base = root.base
    return bool(base.is_Rational and base.p < 10**12 and base.q < 10**12 and Pow(base, root.exp).is_Rational)


def _work(value: Any) -> Iterator[str]:
    """The kinds of work left in an expression and its parts."""
    if isinstance(value, Relational) and not isinstance(value, Eq):
        sides = value.lhs, value.rhs
        if not any(isinstance(one, Symbol) and not other.free_symbols for one, other in (sides, sides[::-1])):
            yield "solve"  # it does not give the bound of a variable
    if isinstance(value, Add):
        terms = Counter(Mul(*Mul.make_args(term)).as_coeff_Mul()[1] for term in _terms(value))
        if max(terms.values()) > 1 or 0 in value.args:
            yield "add"
        for term in value.args:  # a product has a variable beside its sums: `x(x+1)`
            beside = (f for f, power in _factors(term) if power > 0 and not isinstance(_base(f), Add))
            if _num_factors(term) and any(f.free_symbols for f in beside):
                yield "multiply out"
    if isinstance(value, Mul):
        factors = list(_factors(value))
        over, under = ([f for f, power in factors if f.is_Rational and power == sign and f != -1] for sign in (1, -1))
        divides = any(power < 0 for _, power in factors)
        # A fraction of constants may keep a common factor: `\sqrt{3}/(2\sqrt{3})`.
        bases = Counter((_base(f), 1 if f.free_symbols else power) for f, power in factors if not f.is_Rational)
        if max(len([f for f in over if f != 1]), len(under), *bases.values()) > 1 or (1 in over and not divides):
            yield "multiply"
        if any(power < 0 and f.has(I) for f, power in factors):
            yield "divide"
    if isinstance(value, Pow) and not value.base.free_symbols and value.exp.is_Rational:
        base: Any = value.base
        if value.exp.is_Integer and value.exp != -1 and base not in (sympy.pi, sympy.E):
            yield "raise"
        if not value.exp.is_Integer and (_is_exact(value) or base.has(Pow)):
            yield "root"
    is_exponential = isinstance(value, sympy.exp) and not value.has(I)
    if isinstance(value, sympy.Function) and not value.free_symbols and not is_exponential:
        is_trigonometric = isinstance(value, TrigonometricFunction | InverseTrigonometricFunction)
        yield "trigonometry" if is_trigonometric else type(value).__name__
    if isinstance(value, ExprWithLimits | sympy.Limit | sympy.Derivative):
        yield type(value).__name__
    if _num_factors(value) > 1:
        yield "multiply out"
    divides = isinstance(value, Pow) and value.exp == -1  # a denominator may be a product or not
    for part in getattr(value, "args", ()):
        if isinstance(part, Basic):
            yield from (kind for kind in _work(part) if not (divides and kind == "multiply out"))


def _terms(value: Any) -> Iterator[Any]:
    """The terms of a sum, and of sums in it that have only a constant before them."""
    if isinstance(value, Add):
        for part in value.args:
            yield from _terms(part)
        return
    factors = Mul.make_args(value)
    sums = [part for part in factors if isinstance(part, Add)]
    others = (part.base if isinstance(part, Pow) and part.exp == -1 else part for part in factors if part not in sums)
    if len(sums) == 1 and all(other.is_Rational for other in others):
        yield from _terms(sums[0])
    else:
        yield value


def _factors(value: Any, sign: int = 1) -> Iterator[tuple[Any, int]]:
    """The factors of a product, each with 1, or -1 where it divides; powers stay whole."""
    for part in Mul.make_args(value):
        if isinstance(part, Mul):
            yield from _factors(part, sign)
        elif isinstance(part, Pow) and part.exp == -1:
            yield from _factors(part.base, -sign)
        elif isinstance(part, Rational) and part.q != 1:
            yield Integer(part.p), sign
            yield Integer(part.q), -sign
        else:
            yield part, sign


def _base(factor: Any) -> Any:
    return factor.base if isinstance(factor, Pow) else factor


def _num_factors(value: Any) -> int:
    """The number of sums with variables in a product, with repetition."""
    count = 0
    for part, sign in _factors(value) if isinstance(value, Mul | Pow) else ():
        base, power = (part.base, part.exp) if isinstance(part, Pow) else (part, Integer(1))
        if sign > 0 and isinstance(base, Add) and base.free_symbols and power.is_Integer and power > 0:
            count += int(power)
    return count
