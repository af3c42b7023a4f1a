"""Construction of the IR's If and Loop from bodies whose types are known only after their conversion.

The scope of a symbol that a body binds is the body. So sizes of a result that depend on such symbols, or differ between
branches or iterations, are unknown outside: a MatchShape after the If or Loop binds fresh symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from relaxlite.errors import ImportModelError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Body, Expr, If, Loop, Tuple, TupleGetItem, Var
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, SymVar, as_int
from relaxlite.ir.types import TensorType, TupleType

Dims = tuple["SymExpr | None", ...]  # None: not known outside of the body
Outputs = tuple[Expr, list[Expr]]  # next condition, next values

_MAX_WIDENINGS = 32


class RankConflict(ImportModelError):
    """An output of an If has different ranks in its branches."""


class ControlFlowBuilder:
    """Adds If and Loop to the body under construction."""

    def __init__(
        self, bb: BlockBuilder, fresh: Callable[[str], SymVar], scope: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """fresh: makes a symbol of a new name. scope: opens a scope of what the frontend learns inside a body."""
        self._bb, self._fresh, self._open_scope = bb, fresh, scope

    # branches

    def branch(self, cond: Expr, bodies: Sequence[Callable[[], list[Expr]]], names: Sequence[str]) -> list[Expr]:
        """Build an If and return its outputs. RankConflict if an output's ranks differ between the two bodies."""
        marker = SymVar("outer").serial
        built = [self._body(body, {}) for body in bodies]
        columns = list(zip(*(types for _, types in built), strict=True))
        common_ranks = {k: min(t.rank or 0 for t in pair) for k, pair in enumerate(columns) if _are_single(*pair)}
        if common_ranks:  # outputs of one element with different ranks are reshaped inside the branches
            built = [self._body(body, common_ranks) for body in bodies]
            columns = list(zip(*(types for _, types in built), strict=True))
        fields, dims = [], []
        for name, (left, right) in zip(names, columns, strict=True):
            common = _common_dims(name, left, right, marker)
            fields.append(_field_type(left.dtype, common))
            dims.append(common)
        ty = TupleType(tuple(fields))
        result = self._bb.emit(If(cond, built[0][0], built[1][0], ty, self._bb.loc))
        return [self._field(result, k, names[k], common) for k, common in enumerate(dims)]

    def _body(
        self, convert: Callable[[], list[Expr]], common_ranks: Mapping[int, int]
    ) -> tuple[Body, list[TensorType]]:
        """Convert a body; `common_ranks`: output -> the rank to reshape its one element to."""
        with self._bb.body() as scope, self._open_scope():
            outputs = [self._bb.leaf(x) for x in convert()]
            for k, rank in common_ranks.items():
                if _tensor_type(outputs[k]).rank != rank:
                    outputs[k] = self._bb.emit(ops.reshape(outputs[k], (1,) * rank))
            self._bb.result(Tuple(tuple(outputs)))
        return self._bb.finish(scope), [_tensor_type(x) for x in outputs]

    def _field(self, value: Var, index: int, name: str, dims: Dims) -> Expr:
        """Return one field of a result, with its unknown sizes bound to fresh symbols."""
        item = self._bb.emit(TupleGetItem(value, index), name)
        if None not in dims:
            return item
        shape = [self._fresh(f"{name}_dim{k}") if d is None else d for k, d in enumerate(dims)]
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
        """Build a Loop and return its final values.

        `make` converts the body; it runs again while the types of the values widen: a size that changes between
        iterations becomes a symbol of the loop's parameters. `known[k]`: the final leading dimension of value k, if
        known. Raises ImportModelError if types do not converge, or a value changes its rank or dtype.
        """
        inits = [self._bb.leaf(x) for x in inits]
        types = [_tensor_type(x) for x in inits]
        marker = SymVar("outer").serial
        for _ in range(_MAX_WIDENINGS):
            params = tuple(Var(self._bb.unique_name(name), ty) for name, ty in zip(names, types, strict=True))
            body, yielded = self._loop_body(params, make)
            wider = [self._widen(*args, marker) for args in zip(names, types, yielded, strict=True)]
            if wider == types:
                return self._finish_loop(params, inits, cond, body, marker, known)
            types = wider
        raise ImportModelError("the sizes of the values that a loop carries never settle")

    def _loop_body(
        self, params: tuple[Var, ...], make: Callable[[Sequence[Var]], Outputs]
    ) -> tuple[Body, list[TensorType]]:
        with self._bb.body() as scope, self._open_scope():
            cond, values = make(params)
            leaves = [self._fit_single(p, self._bb.leaf(x)) for p, x in zip(params, values, strict=True)]
            self._bb.result(Tuple((self._bb.leaf(cond), *leaves)))
        return self._bb.finish(scope), [_tensor_type(x) for x in leaves]

    def _fit_single(self, param: Var, value: Expr) -> Expr:
        """Reshape a next value of one element to the rank of the initial value."""
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
            dims.append(old if same else self._fresh(f"{name}_dim{k}"))
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
        loop = self._bb.emit(Loop(params, tuple(inits), self._bb.leaf(cond), body, TupleType(fields), self._bb.loc))
        results = []
        for k, param in enumerate(params):
            item = self._bb.emit(TupleGetItem(loop, k), param.name)
            if fields[k].shape is None:
                shape = [self._fresh(f"{param.name}_dim{a}") if d is None else d for a, d in enumerate(dims[k])]
                results.append(self._bb.match_shape(item, tuple(shape), param.name))
            else:
                results.append(item)
        return list(results)


def _tensor_type(x: Expr) -> TensorType:
    if not isinstance(x.ty, TensorType):
        raise ImportModelError("a branch or loop carries a sequence, not a tensor")
    return x.ty


def _is_outer(dim: SymExpr, marker: int) -> bool:
    """Whether a size depends only on symbols from before the body."""
    return all(v.serial < marker for v in dim.free_vars())


def _instantiated(ty: TensorType, marker: int) -> TensorType:
    if ty.shape is not None and all(_is_outer(d, marker) for d in ty.shape):
        return ty
    return TensorType(None, ty.dtype, ty.rank)


def _are_single(left: TensorType, right: TensorType) -> bool:
    """Whether both types have one element, but different ranks."""
    both = (left.shape, right.shape)
    return left.rank != right.rank and all(s is not None and all(as_int(d) == 1 for d in s) for s in both)


def _common_dims(name: str, left: TensorType, right: TensorType, marker: int) -> Dims:
    """Return the sizes that both branches have, None for others. RankConflict if ranks differ."""
    if left.dtype != right.dtype:
        raise ImportModelError(f"output '{name}' is {left.dtype} in one branch and {right.dtype} in the other")
    if left.shape is None or right.shape is None or len(left.shape) != len(right.shape):
        raise RankConflict(f"output '{name}' is {left} in one branch and {right} in the other")
    pairs = zip(left.shape, right.shape, strict=True)
    return tuple(a if _is_outer(a, marker) and PROVER.can_prove_equal(a, b) else None for a, b in pairs)


def _field_type(dtype: str, dims: Dims) -> TensorType:
    known = [d for d in dims if d is not None]
    return TensorType.of(tuple(known), dtype) if len(known) == len(dims) else TensorType(None, dtype, len(dims))
