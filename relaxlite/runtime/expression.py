"""Parser of integer expressions as text, such as "s0*s1*2 + min(s0, 512)", for evaluation without the compiler.

A subset of Python: names s0, s1, ..., integer literals, + - * // %, unary minus, min(...) and max(...).
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Sequence
from functools import reduce

from relaxlite.errors import ArtifactError

Expression = Callable[[Sequence[int]], int]

_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: lambda a, b: a // b if b else 0,
    ast.Mod: lambda a, b: a % b if b else 0,
}
_EXTREMA: dict[str, Callable[..., int]] = {"min": min, "max": max}


def parse_expression(text: str, num_symbols: int) -> Expression:
    """Parse an expression to a function of the values of s0, s1, ...; division by zero gives 0.

    ArtifactError for text outside of the grammar.
    """
    try:
        return _convert(ast.parse(text, mode="eval").body, num_symbols)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ArtifactError(f"{text[:80]!r} is no expression of {num_symbols} symbols: {error}") from error


def _convert(node: ast.expr, count: int) -> Expression:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        value = node.value
        return lambda symbols: value
    if isinstance(node, ast.Name) and (match := re.fullmatch(r"s(\d{1,6})", node.id)) and int(match[1]) < count:
        number = int(match[1])
        return lambda symbols: symbols[number]
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        operand = _convert(node.operand, count)
        return lambda symbols: -operand(symbols)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        combine, left, right = _OPERATORS[type(node.op)], _convert(node.left, count), _convert(node.right, count)
        return lambda symbols: combine(left(symbols), right(symbols))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _EXTREMA and node.args:
        extremum, arguments = _EXTREMA[node.func.id], [_convert(argument, count) for argument in node.args]
        if not node.keywords:
            return lambda symbols: reduce(extremum, [evaluate(symbols) for evaluate in arguments])
    raise ValueError(f"{ast.unparse(node)[:40]!r} is not part of the language")
