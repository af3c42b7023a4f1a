"""Broadcasting of symbolic shapes by NumPy's rule: sizes are equal, or one of them is 1.

Two sizes that cannot be compared at compile time are *ambiguous*: at run time they may be equal, or one may be 1. The
result then has the size `max(a, b) * min(1, min(a, b))` (an empty dimension stays empty), operands are read at
`min(i, size - 1)`, which is i for an operand of the full size and 0 for one of size 1, and the program starts with a
`Check` that the sizes agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from relaxlite.errors import TypeInferenceError
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.ops.scalars import index
from relaxlite.ir.program import Buffer, Check, Stmt, Value, compute, seq
from relaxlite.ir.simplify import num_extrema
from relaxlite.ir.symbolic import BinaryAtom, SymExpr, SymVar, as_int, smax, smin, substitute, sym

Shape = tuple[SymExpr, ...]

PROVER = Analyzer()  # uses only the bounds and divisors of symbols


def broadcast_dim(a: SymExpr, b: SymExpr) -> SymExpr | None:
    """Broadcast two sizes of one dimension; None if they can never agree."""
    x, y = as_int(a), as_int(b)
    if a is b or y == 1:
        return a
    if x == 1:
        return b
    if x is not None and y is not None:
        return a if x == y else None
    if x is not None or y is not None:
        constant, other = (a, b) if x is not None else (b, a)
        return None if _never_one(other) and PROVER.can_prove_ne(a, b) else constant
    if PROVER.can_prove_equal(a, b):
        return a
    if _never_one(a) and _never_one(b) and PROVER.can_prove_ne(a, b):
        return None
    return _ambiguous_dim(a, b)


def _ambiguous_dim(a: SymExpr, b: SymExpr) -> SymExpr:
    """Broadcast size of ambiguous dimensions: max(a, b), or 0 if one is 0; simplified to a or b if provable."""
    for large, small in ((a, b), (b, a)):
        if PROVER.can_prove_le(small, large) and _is_empty_with(large, small):
            return large
    for vanishing, other in ((a, b), (b, a)):
        if _agree_unless_empty(vanishing, other):
            return vanishing
    if PROVER.can_prove_le(1, a) and PROVER.can_prove_le(1, b):
        return smax(a, b)
    return smax(a, b) * smin(1, smin(a, b))


def _is_empty_with(a: SymExpr, b: SymExpr) -> bool:
    """Whether b == 0 implies a == 0: b is positive if all its symbols are, and a is 0 if any of them is."""
    zeros = [v for v in b.free_vars() if (v.lower or 0) <= 0]
    if not PROVER.can_prove_le(1, substitute(b, _positive(zeros))):
        return False
    return _vanishes_with_any(a, zeros)


def _agree_unless_empty(vanishing: SymExpr, other: SymExpr) -> bool:
    """Whether both sizes are equal if no symbol is 0, and `vanishing` is 0 if any symbol is.

    `vanishing` is then their broadcast size, as a 0 broadcasts with 0 or 1 only.
    """
    symbols = dict.fromkeys((*vanishing.free_vars(), *other.free_vars()))
    zeros = [v for v in symbols if v.lower == 0]
    if any(v.lower is None or v.lower < 0 for v in symbols):
        return False
    if not _vanishes_with_any(vanishing, zeros):
        return False
    positive = _positive(zeros)
    return PROVER.can_prove_equal(substitute(vanishing, positive), substitute(other, positive))


def _vanishes_with_any(size: SymExpr, symbols: Iterable[SymVar]) -> bool:
    """Whether `size` is 0 if any of the symbols is; False if `size` divides by one of them."""
    try:
        return all(as_int(substitute(size, {v: 0})) == 0 for v in symbols)
    except ZeroDivisionError:
        return False


def _positive(symbols: Iterable[SymVar]) -> dict[SymVar, SymVar]:
    """Map symbols to fresh ones with a lower bound of 1."""
    return {v: SymVar(v.name, lower=1, upper=v.upper, divisor=v.divisor) for v in symbols if v.upper != 0}


def simplify_nonempty(size: SymExpr) -> SymExpr:
    """Simplify a size under the assumption that no symbol is 0, if that removes a min or max: max(1, n) becomes n.

    An exporter's `1 + (n - 1) / 16`, rounded towards zero, becomes the convolution's (n + 15) // 16.
    """
    if not any(isinstance(atom, BinaryAtom) for monomial, _ in size.terms for atom in monomial):
        return size
    positive = _positive(v for v in size.free_vars() if v.lower == 0)
    simplified = PROVER.simplify(substitute(size, positive))
    simplified = substitute(simplified, {positive_symbol: v for v, positive_symbol in positive.items()})
    return simplified if num_extrema(simplified) < num_extrema(size) else size


def _never_one(dim: SymExpr) -> bool:
    return PROVER.can_prove_ne(dim, 1)


def _raise(message: str) -> NoReturn:
    raise TypeInferenceError(message)


def broadcast_shapes(*shapes: Shape, fail: Callable[[str], NoReturn] = _raise) -> Shape:
    """Broadcast shapes; on failure call `fail` with a message (default: raise TypeInferenceError)."""
    result = shapes[0]
    for shape in shapes[1:]:
        result = _broadcast_pair(result, shape, fail)
    return result


def _broadcast_pair(a: Shape, b: Shape, fail: Callable[[str], NoReturn]) -> Shape:
    rank = max(len(a), len(b))
    dims = []
    for axis, (x, y) in enumerate(zip(_padded(a, rank), _padded(b, rank), strict=True)):
        dim = broadcast_dim(x, y)
        if dim is None:
            fail(
                f"shapes {format_shape(a)} and {format_shape(b)} cannot be broadcast: "
                f"dimension {axis - rank} is {x} in one and {y} in the other, and neither is 1"
            )
        dims.append(dim)
    return tuple(dims)


def _padded(shape: Shape, rank: int) -> Shape:
    return (sym(1),) * (rank - len(shape)) + shape


def broadcast_index(shape: Shape, out_indices: Sequence[SymExpr], out_shape: Shape) -> Shape:
    """Indices of an operand of `shape` for element `out_indices` of the result."""
    skipped = len(out_shape) - len(shape)
    pairs = zip(shape, out_indices[skipped:], out_shape[skipped:], strict=True)
    return tuple(_index(dim, i, out) for dim, i, out in pairs)


def _index(dim: SymExpr, i: SymExpr, out: SymExpr) -> SymExpr:
    if as_int(dim) == 1:
        return sym(0)
    return i if dim is out or PROVER.can_prove_equal(dim, out) else smin(i, dim - 1)


def broadcast_checks(name: str, *shapes: Shape, directed: bool = False) -> tuple[Check, ...]:
    """Run-time checks that ambiguous dimensions agree; `directed`: the last shape is the result's."""
    rank = max(len(s) for s in shapes)
    checks: dict[tuple[SymExpr, SymExpr], Check] = {}
    for axis in range(rank):
        dims = list(dict.fromkeys(_padded(s, rank)[axis] for s in shapes))
        for k, a in enumerate(dims):
            for b in dims[k + 1 :]:
                is_one = (as_int(a) == 1, as_int(b) == 1 and not directed)
                if not any(is_one) and not PROVER.can_prove_equal(a, b):
                    checks.setdefault((a, b), _agreement_check(name, a, b, (a,) if directed else (a, b)))
    return tuple(checks.values())


def _agreement_check(name: str, a: SymExpr, b: SymExpr, stretched: Shape) -> Check:
    cases = [index(a).equals(b)] + [index(d).equals(1) for d in stretched if not _never_one(d)]
    cond = cases[0]
    for case in cases[1:]:
        cond = cond | case
    return Check(
        cond.value, f"{name}: operands could not be broadcast: one dimension is {a}, the other {b}, and neither is 1"
    )


def compute_broadcast(name: str, out: Buffer, operands: Sequence[Buffer], value: Callable[..., Value]) -> Stmt:
    """Build the checks and the loop nest of out[i...] = value(broadcast elements of the operands)."""
    checks = broadcast_checks(name, *(x.shape for x in operands))

    def element(*i: SymExpr) -> Value:
        return value(*(x[broadcast_index(x.shape, i, out.shape)] for x in operands))

    return seq(*checks, compute(out, element))


def format_shape(shape: Shape) -> str:
    """Format a shape as Python formats a tuple."""
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"
