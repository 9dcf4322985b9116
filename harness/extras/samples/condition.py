"""A condition on a sample (`correct and tokens > 200`) as a function: names, constants and comparisons, nothing else.

The text is parsed and walked, never run.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from ...settings.errors import SpecError

_MOST = 1000  # characters, so that no tree is deep enough to end Python's stack
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda a, b: a in b, ast.NotIn: lambda a, b: a not in b, ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
}  # fmt: skip
_LEAVES = (ast.Name, ast.Constant, ast.Tuple, ast.List, ast.expr_context)
_ALLOWED = (*_LEAVES, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.Not, ast.USub, ast.Compare, *_COMPARE)


def condition(text: str) -> tuple[Callable[[Mapping[str, Any]], bool], set[str]]:
    """The function that says whether a sample meets the condition, and the names in it. SpecError for another text."""
    rule = '`where` must compare names and constants, as in "correct and tokens > 200"'
    if len(text) > _MOST:
        raise SpecError(f"{rule}, in at most {_MOST:,} characters, got {len(text):,}")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{rule}, got {text!r:.80}: {error}") from None
    for node in ast.walk(tree):
        if not isinstance(node, _ALLOWED):
            fix = "use and, or, not, in, comparisons, numbers and quoted texts"
            raise SpecError(f"{rule}, got {ast.unparse(tree):.80} with {type(node).__name__}; {fix}")

    def meets(sample: Mapping[str, Any]) -> bool:
        try:
            return bool(_value(tree, sample))
        except TypeError as error:
            raise SpecError(f"{rule}, got {text!r:.80}: {error}") from None

    return meets, {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}


def _value(node: ast.expr, sample: Mapping[str, Any]) -> Any:
    """The value for a sample; an order or membership of what is not known is False."""
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return sample.get(name)
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return [_value(part, sample) for part in parts]
        case ast.UnaryOp(op=op, operand=inner):
            value = _value(inner, sample)
            return not value if isinstance(op, ast.Not) else -value
        case ast.BoolOp(op=op, values=parts):
            return (all if isinstance(op, ast.And) else any)(_value(part, sample) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, sample) for part in (left, *others)]
            return all(
                (isinstance(op, ast.Eq | ast.NotEq | ast.Is | ast.IsNot) or None not in (a, b))
                and _COMPARE[type(op)](a, b)
                for op, a, b in zip(ops, values, values[1:], strict=False)
            )
    raise AssertionError("`condition` refuses every other node")
