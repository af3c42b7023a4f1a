"""Branches and loops of the IR, built from bodies whose types are known only when they have been converted.

A symbol that a body binds ends with it. So what leaves a branch or loop has unknown sizes where they depend on such
symbols, or differ from one branch or iteration to the next: a MatchShape behind it binds fresh ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

from relaxlite.errors import ImportModelError
from relaxlite.frontend.onnx.shape_values import ShapeResolver
from relaxlite.frontend.onnx.symbols import SymbolTable
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Body, Expr, If, Loop, Tuple, TupleGetItem, Var
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int
from relaxlite.ir.types import TensorType, TupleType
from relaxlite.records import dataclass

Dims = tuple["SymExpr | None", ...]  # None: not known outside
Outputs = tuple[Expr, list[Expr]]  # next condition, next values

_MAX_WIDENINGS = 32


class RankConflict(ImportModelError):
    """An output of an If has another rank in one branch than in the other."""


@dataclass
class Choices:
    """Decisions at import where a rank depends on data: the branch of an If, whether a symbolic size is squeezed away.

    An import that fails is repeated with the next combination (`next`). What was decided is checked at run time.
    """

    _taken: dict[str, bool] = field(default_factory=dict)  # place of the node -> the decision
    _why: dict[str, str] = field(default_factory=dict)

    def take(self, place: str, why: str) -> bool:
        self._why[place] = why
        return self._taken.setdefault(place, True)

    def next(self) -> bool:
        """Decide otherwise at the last place where that was not tried; False when there is none."""
        for place in reversed(self._taken):
            if self._taken[place]:
                self._taken[place] = False
                return True
            self._taken = {p: t for p, t in self._taken.items() if p != place}
        return False

    def assumptions(self) -> tuple[str, ...]:
        """For people: what a run checks."""
        return tuple(
            f"{place}: taken to be {str(taken).lower()}: {self._why[place]}" for place, taken in self._taken.items()
        )


class FlowBuilder:
    """Builds If and Loop nodes into the body under construction."""

    def __init__(self, bb: BlockBuilder, resolver: ShapeResolver, symbols: SymbolTable) -> None:
        self._bb, self._resolver, self._symbols = bb, resolver, symbols

    # branches

    def branch(self, cond: Expr, bodies: Sequence[Callable[[], list[Expr]]], names: Sequence[str]) -> list[Expr]:
        """If: the outputs of one of two bodies. RankConflict where an output differs in rank."""
        marker = SymVar("outer").serial
        built = [self._body(body, {}) for body in bodies]
        columns = list(zip(*(types for _, types in built), strict=True))
        fits = {k: min(t.rank or 0 for t in pair) for k, pair in enumerate(columns) if _are_single(*pair)}
        if fits:  # of one element, but of different ranks: reshaped to one rank inside the branches
            built = [self._body(body, fits) for body in bodies]
            columns = list(zip(*(types for _, types in built), strict=True))
        fields, dims = [], []
        for name, (left, right) in zip(names, columns, strict=True):
            known = _common_dims(name, left, right, marker)
            fields.append(_field_type(left.dtype, known))
            dims.append(known)
        ty = TupleType(tuple(fields))
        result = self._bb.emit(If(cond, built[0][0], built[1][0], ty, self._bb.loc))
        return [self._field(result, k, names[k], known) for k, known in enumerate(dims)]

    def _body(self, make: Callable[[], list[Expr]], fits: Mapping[int, int]) -> tuple[Body, list[TensorType]]:
        """`fits`: outputs of one element to reshape to a rank."""
        with self._bb.body() as scope, self._resolver.scope():
            outputs = [self._bb.leaf(x) for x in make()]
            for k, rank in fits.items():
                if _tensor_type(outputs[k]).rank != rank:
                    outputs[k] = self._bb.emit(ops.reshape(outputs[k], (1,) * rank))
            self._bb.result(Tuple(tuple(outputs)))
        return self._bb.finish(scope), [_tensor_type(x) for x in outputs]

    def _field(self, value: Var, index: int, name: str, dims: Dims) -> Expr:
        """One result, its unknown sizes bound to fresh symbols."""
        item = self._bb.emit(TupleGetItem(value, index), name)
        if None not in dims:
            return item
        shape = [self._symbols.fresh(f"{name}_dim{k}") if d is None else d for k, d in enumerate(dims)]
        return self._bb.match_shape(item, tuple(shape), name)

    # loops

    def loop(
        self,
        cond: Expr,
        inits: Sequence[Expr],
        names: Sequence[str],
        make: Callable[[Sequence[Var]], Outputs],
        known: Sequence[SymExpr | None] = (),
    ) -> list[Expr]:
        """Loop: the final values. `make` converts the body once for each guess of the types of the values.

        A size that changes from one iteration to the next becomes a symbol of the loop's parameters. `known[k]` is what
        the leading dimension of value k is known to be in the end.
        """
        inits = [self._bb.leaf(x) for x in inits]
        types = [_tensor_type(x) for x in inits]
        marker = SymVar("outer").serial
        for _ in range(_MAX_WIDENINGS):
            params = tuple(Var(self._bb.unique_name(name), ty) for name, ty in zip(names, types, strict=True))
            body, result = self._loop_body(params, make)
            wider = [self._widen(*args, marker) for args in zip(names, types, result, strict=True)]
            if wider == types:
                return self._finish_loop(params, inits, cond, body, marker, known)
            types = wider
        raise ImportModelError("the sizes of the values that a loop carries never settle")

    def _loop_body(
        self, params: tuple[Var, ...], make: Callable[[Sequence[Var]], Outputs]
    ) -> tuple[Body, list[TensorType]]:
        with self._bb.body() as scope, self._resolver.scope():
            cond, values = make(params)
            leaves = [self._fit_single(p, self._bb.leaf(x)) for p, x in zip(params, values, strict=True)]
            self._bb.result(Tuple((self._bb.leaf(cond), *leaves)))
        return self._bb.finish(scope), [_tensor_type(x) for x in leaves]

    def _fit_single(self, param: Var, value: Expr) -> Expr:
        """A next value of one element in the rank that the loop began with."""
        now, after = _tensor_type(param), _tensor_type(value)
        return self._bb.emit(ops.reshape(value, now.shape or ())) if _are_single(now, after) else value

    def _widen(self, name: str, now: TensorType, after: TensorType, marker: int) -> TensorType:
        if now.dtype != after.dtype:
            raise ImportModelError(
                f"loop value '{name}' is {now.dtype} at first and {after.dtype} in the next iteration"
            )
        if now.shape is None or after.shape is None or len(now.shape) != len(after.shape):
            raise ImportModelError(
                f"loop value '{name}' changes its rank: it is {now} at first and {after} in the next iteration"
            )
        dims = []
        for k, (old, new) in enumerate(zip(now.shape, after.shape, strict=True)):
            is_own = isinstance(old, SymVar) and old.serial > marker
            same = is_own or PROVER.can_prove_equal(old, new)
            dims.append(old if same else self._symbols.fresh(f"{name}_dim{k}"))
        return TensorType.of(tuple(dims), now.dtype) if tuple(dims) != now.shape else now

    def _finish_loop(
        self,
        params: tuple[Var, ...],
        inits: Sequence[Expr],
        cond: Expr,
        body: Body,
        marker: int,
        known: Sequence[SymExpr | None],
    ) -> list[Expr]:
        dims: list[Dims] = []
        for k, param in enumerate(params):
            sizes: list[SymExpr | None] = [d if _is_outer(d, marker) else None for d in _tensor_type(param).shape or ()]
            dims.append(tuple(sizes))
            if k < len(known) and known[k] is not None and sizes and sizes[0] is None:
                dims[k] = (known[k], *sizes[1:])
        fields = tuple(_instantiated(_tensor_type(p), marker) for p in params)
        result = self._bb.emit(Loop(params, tuple(inits), self._bb.leaf(cond), body, TupleType(fields), self._bb.loc))
        results = []
        for k, param in enumerate(params):
            item = self._bb.emit(TupleGetItem(result, k), param.name)
            if fields[k].shape is None:
                shape = [self._symbols.fresh(f"{param.name}_dim{a}") if d is None else d for a, d in enumerate(dims[k])]
                results.append(self._bb.match_shape(item, tuple(shape), param.name))
            else:
                results.append(item)
        return list(results)


def _tensor_type(x: Expr) -> TensorType:
    if not isinstance(x.ty, TensorType):
        raise ImportModelError("a branch or loop carries a sequence, not a tensor")
    return x.ty


def _is_outer(dim: SymExpr, marker: int) -> bool:
    """Made of symbols that existed before the body."""
    return all(v.serial < marker for v in dim.free_vars())


def _instantiated(ty: TensorType, marker: int) -> TensorType:
    if ty.shape is not None and all(_is_outer(d, marker) for d in ty.shape):
        return ty
    return TensorType(None, ty.dtype, ty.rank)


def _are_single(left: TensorType, right: TensorType) -> bool:
    """Both have one element, but not the same rank."""
    both = (left.shape, right.shape)
    return left.rank != right.rank and all(s is not None and all(as_int(d) == 1 for d in s) for s in both)


def _common_dims(name: str, left: TensorType, right: TensorType, marker: int) -> Dims:
    """What both branches agree on."""
    if left.dtype != right.dtype:
        raise ImportModelError(f"output '{name}' is {left.dtype} in one branch and {right.dtype} in the other")
    if left.shape is None or right.shape is None or len(left.shape) != len(right.shape):
        raise RankConflict(f"output '{name}' is {left} in one branch and {right} in the other")
    pairs = zip(left.shape, right.shape, strict=True)
    return tuple(a if _is_outer(a, marker) and PROVER.can_prove_equal(a, b) else None for a, b in pairs)


def _field_type(dtype: str, dims: Dims) -> TensorType:
    known = [d for d in dims if d is not None]
    return TensorType.of(tuple(known), dtype) if len(known) == len(dims) else TensorType(None, dtype, len(dims))
