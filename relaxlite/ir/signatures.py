"""Compatibility of types, and of calls with the signatures of their callees.

Dimensions are equal if an Analyzer proves it; unproven equality is a mismatch. Functions return the reason of a
mismatch as text, or None.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Call, ExternFunction, Function
from relaxlite.ir.printer import print_type
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar, substitute
from relaxlite.ir.types import UNIT, FuncType, ShapeType, TensorType, TupleType, Type

Dims = tuple[SymExpr, ...]


def mismatch(claimed: Type, actual: Type, analyzer: Analyzer, *, is_exact: bool = False) -> str | None:
    """Compare a value's type with the type claimed for it: reason of a mismatch, or None.

    `claimed` may be less specific than `actual` (unknown rank or shape), unless `is_exact`.
    """
    if isinstance(claimed, TensorType) and isinstance(actual, TensorType):
        if claimed.dtype != actual.dtype:
            return f"dtype {claimed.dtype} against {actual.dtype}"
        return _dims_mismatch(claimed, actual, analyzer, is_exact)
    if isinstance(claimed, ShapeType) and isinstance(actual, ShapeType):
        return _dims_mismatch(claimed, actual, analyzer, is_exact)
    if isinstance(claimed, TupleType) and isinstance(actual, TupleType):
        if len(claimed.fields) != len(actual.fields):
            return f"{len(claimed.fields)} fields against {len(actual.fields)}"
        for k, (left, right) in enumerate(zip(claimed.fields, actual.fields, strict=True)):
            reason = mismatch(left, right, analyzer, is_exact=is_exact)
            if reason is not None:
                return f"field {k}: {reason}"
        return None
    return None if claimed == actual else f"{print_type(claimed)} against {print_type(actual)}"


def _dims_mismatch(
    claimed: TensorType | ShapeType, actual: TensorType | ShapeType, analyzer: Analyzer, is_exact: bool
) -> str | None:
    left_dims, right_dims = dims_of(claimed), dims_of(actual)
    if left_dims is None:
        if is_exact and (right_dims is not None or claimed.rank != actual.rank):
            return "a type that knows less against one that knows more"
        is_same = claimed.rank is None or claimed.rank == actual.rank
        return None if is_same else f"rank {claimed.rank} against {_rank_text(actual.rank)}"
    if right_dims is None:
        return f"shape ({', '.join(map(str, left_dims))}) against an unknown one"
    if len(left_dims) != len(right_dims):
        return f"rank {len(left_dims)} against {len(right_dims)}"
    for k, (left, right) in enumerate(zip(left_dims, right_dims, strict=True)):
        if left is not right and not analyzer.can_prove_equal(left, right):
            return f"dimension {k}: {left} against {right}, which are not proven equal"
    return None


def _rank_text(rank: int | None) -> str:
    return "an unknown one" if rank is None else str(rank)


def dims_of(ty: Type) -> Dims | None:
    """Dimensions of a tensor type, or values of a shape type; None if unknown."""
    if isinstance(ty, TensorType):
        return ty.shape
    return ty.values if isinstance(ty, ShapeType) else None


def bind_symbols(params: Sequence[Type], args: Sequence[Type], values: dict[SymVar, SymExpr]) -> None:
    """Bind symbols of parameters to dimensions of arguments, in `values`.

    Only a symbol that is a whole dimension of a parameter type is bound; existing bindings are kept.
    """
    for param, arg in zip(params, args, strict=False):
        if isinstance(param, TupleType) and isinstance(arg, TupleType):
            bind_symbols(param.fields, arg.fields, values)
            continue
        for left, right in zip(dims_of(param) or (), dims_of(arg) or (), strict=False):
            if isinstance(left, SymVar):
                values.setdefault(left, right)


def instantiate(ty: Type, values: Mapping[SymVar, SymExpr], keep: Collection[SymVar] = ()) -> Type:
    """Substitute symbols in a type. A shape with a symbol neither in `values` nor in `keep` becomes unknown."""
    if isinstance(ty, TupleType):
        return TupleType(tuple(instantiate(field, values, keep) for field in ty.fields))
    dims = dims_of(ty)
    if dims is None or not isinstance(ty, TensorType | ShapeType):
        return ty
    is_known = all(var in values or var in keep for dim in dims for var in dim.free_vars())
    result = tuple(substitute(dim, values) for dim in dims) if is_known else None
    return TensorType(result, ty.dtype, len(dims)) if isinstance(ty, TensorType) else ShapeType(result, len(dims))


def match_arguments(
    params: Sequence[Type], args: Sequence[Type], values: dict[SymVar, SymExpr], analyzer: Analyzer
) -> str | None:
    """Bind the symbols of parameters in `values` and compare all types: reason of a mismatch, or None."""
    bind_symbols(params, args, values)
    for k, (param, arg) in enumerate(zip(params, args, strict=True)):
        reason = mismatch(instantiate(param, values), arg, analyzer)
        if reason is not None:
            return f"argument {k}: the callee has {reason}"
        free = [v.name for dim in dims_of(param) or () for v in dim.free_vars() if v not in values]
        if free:
            return f"argument {k}: nothing determines the callee's symbol {free[0]}"
    return None


def call_mismatch(
    call: Call, callee: Function | TensorProgram | ExternFunction | FuncType, analyzer: Analyzer
) -> str | None:
    """Compare a call with the signature of its callee: reason of a mismatch, or None."""
    args = [arg.ty for arg in call.args]
    if isinstance(callee, TensorProgram):
        return _program_mismatch(call, args, callee, analyzer)
    if isinstance(callee, ExternFunction):
        passed = args if is_destination_passing(call) else [*args, *_result_types(call.ty)]
        if len(passed) != len(callee.params):
            num_inputs = len(callee.params) - callee.num_outputs
            return f"takes {num_inputs} inputs and {callee.num_outputs} outputs, {_describe_args(call)}"
        return match_arguments(callee.params, passed, {}, analyzer)
    ty = callee if isinstance(callee, FuncType) else callee.ty
    if len(args) != len(ty.params):
        return f"takes {len(ty.params)} arguments, got {len(args)}"
    values: dict[SymVar, SymExpr] = {}
    reason = match_arguments(ty.params, args, values, analyzer)
    if reason is None:
        reason = mismatch(call.ty, instantiate(ty.result, values), analyzer)
        reason = reason and f"result: {reason}"
    return reason


def is_destination_passing(call: Call) -> bool:
    """Whether a call passes its outputs as arguments and returns nothing."""
    return call.ty == UNIT


def _describe_args(call: Call) -> str:
    if is_destination_passing(call):
        return f"got {len(call.args)} arguments in destination-passing form"
    return f"got {len(call.args)} inputs for {len(_result_types(call.ty))} results"


def _result_types(ty: Type) -> tuple[Type, ...]:
    return ty.fields if isinstance(ty, TupleType) else (ty,)


def _program_mismatch(call: Call, args: list[Type], program: TensorProgram, analyzer: Analyzer) -> str | None:
    if len(call.sym_args) != len(program.symbols):
        return f"takes {len(program.symbols)} symbols, got {len(call.sym_args)}"
    passed = args if is_destination_passing(call) else [*args, *_result_types(call.ty)]
    if len(passed) != len(program.params):
        return f"takes {len(program.inputs)} inputs and {program.num_outputs} outputs, {_describe_args(call)}"
    values = dict(zip(program.symbols, call.sym_args, strict=True))
    for symbol, value in values.items():
        if not _satisfies_facts(symbol, value, analyzer):
            return f"symbol {symbol.name} is declared {_facts_text(symbol)}, which is not proven of {value}"
    for buffer, ty in zip(program.params, passed, strict=True):
        shape = tuple(substitute(dim, values) for dim in buffer.shape)
        reason = mismatch(TensorType(shape, buffer.dtype, len(shape)), ty, analyzer)
        if reason is not None:
            return f"parameter {buffer.name} has {reason}"
    return None


def _satisfies_facts(symbol: SymVar, value: SymExpr, analyzer: Analyzer) -> bool:
    """Whether a value provably satisfies a symbol's facts. Nonnegativity is not checked: sizes are never negative."""
    if value is symbol:
        return True
    if symbol.lower is not None and symbol.lower > 0 and not analyzer.can_prove_le(symbol.lower, value):
        return False
    if symbol.upper is not None and not analyzer.can_prove_le(value, symbol.upper):
        return False
    return symbol.divisor == 1 or analyzer.can_prove_divisible(value, symbol.divisor)


def _facts_text(symbol: SymVar) -> str:
    return f"lower={symbol.lower}, upper={symbol.upper}, divisor={symbol.divisor}"
