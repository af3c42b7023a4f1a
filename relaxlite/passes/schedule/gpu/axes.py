"""Builders of launches: axes, flat indices of nests, unrolled copies of statements."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from relaxlite.ir.program import For, LoopKind, Stmt
from relaxlite.ir.symbolic import IntLike, SymExpr, SymVar, as_int, product, sym
from relaxlite.records import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """A loop on an axis of a GPU."""

    var: SymVar
    kind: LoopKind
    extent: SymExpr

    @staticmethod
    def of(name: str, kind: LoopKind, extent: IntLike) -> Axis:
        """Axis with a new variable, whose bounds are known if the extent is constant."""
        count = as_int(sym(extent))
        return Axis(SymVar(name, lower=0, upper=None if count is None else max(count - 1, 0)), kind, sym(extent))


def on_axes(axes: Sequence[Axis], body: Stmt) -> Stmt:
    """The nest of these axes around a body, outermost first."""
    for axis in reversed(axes):
        body = For(axis.var, axis.extent, body, axis.kind)
    return body


def repeat(name: str, extent: IntLike, body: Callable[[SymVar], Stmt]) -> Stmt:
    """for name in range(extent): body(name); unrolled if the extent is constant."""
    axis = Axis.of(name, "serial" if as_int(sym(extent)) is None else "unrolled", extent)
    return For(axis.var, axis.extent, body(axis.var), axis.kind)


def flat_places(loops: Sequence[For], number: SymExpr) -> dict[SymVar, SymExpr]:
    """The value of each loop variable at a number of the flattened nest, in row-major order."""
    places: dict[SymVar, SymExpr] = {}
    rest = number
    for loop in reversed(loops[1:]):
        width = loop.extent if as_int(loop.extent) != 0 else sym(1)  # an empty loop must not divide by 0
        places[loop.var], rest = rest % width, rest // width
    if loops:
        places[loops[0].var] = rest
    return places


def size_of(loops: Sequence[For]) -> SymExpr:
    """Number of iterations of a nest; 1 without loops."""
    return product([loop.extent for loop in loops]) if loops else sym(1)
