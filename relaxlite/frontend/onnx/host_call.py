"""Calls of operators that run on the host (runtime/host_operators.py), as library routines of the module."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite.frontend.onnx.node import Node
from relaxlite.ir.expr import NO_ATTRS, Call, Constant, Expr, ExternFunction, GlobalVar, TupleGetItem
from relaxlite.ir.types import TensorType, TupleType


def host_call(n: Node, inputs: Sequence[Expr], options: Mapping[str, Any], outputs: Sequence[TensorType]) -> list[Expr]:
    """Emit a call of the node's operator for outputs of known shapes."""
    encoded = Constant.of(np.frombuffer(json.dumps(options).encode(), np.uint8))
    return _call(n, f"host.{n.op_type}", [*inputs, encoded], outputs)


def sized_host_call(
    n: Node, inputs: Sequence[Expr], options: Mapping[str, Any], outputs: Sequence[tuple[int, str]]
) -> list[Expr]:
    """Emit a call for outputs whose sizes depend on data, given as (rank, dtype).

    The operator runs twice, for the sizes and for the outputs.
    """
    encoded = Constant.of(np.frombuffer(json.dumps(options).encode(), np.uint8))
    total = sum(rank for rank, _ in outputs)
    (sizes,) = _call(n, f"host.{n.op_type}.sizes", [*inputs, encoded], [TensorType.of((total,), "int64")])
    dims, types = list(n.resolver.values(sizes, lower=0)), list[TensorType]()
    for rank, dtype in outputs:
        types.append(TensorType.of(tuple(dims[:rank]), dtype))
        dims = dims[rank:]
    return _call(n, f"host.{n.op_type}", [*inputs, encoded], types)


def _call(n: Node, symbol: str, args: Sequence[Expr], outputs: Sequence[TensorType]) -> list[Expr]:
    leaves = tuple(n.bb.leaf(x) for x in args)
    callee = _routine(n, symbol, [n.type_of(x) for x in leaves], outputs)
    ty = outputs[0] if len(outputs) == 1 else TupleType(tuple(outputs))
    result = n.emit(Call(callee, leaves, NO_ATTRS, (), ty, n.bb.loc), n.op_type)
    if len(outputs) == 1:
        return [result]
    return [n.emit(TupleGetItem(result, k)) for k in range(len(outputs))]


def _routine(n: Node, symbol: str, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> GlobalVar:
    params = tuple(TensorType(None, ty.dtype, ty.rank) for ty in (*inputs, *outputs))
    key = (symbol, params)
    if key not in n.importer.routines:
        n.importer.routines[key] = n.bb.define(symbol.replace(".", "_"), ExternFunction(symbol, params, len(outputs)))
    return n.importer.routines[key]
