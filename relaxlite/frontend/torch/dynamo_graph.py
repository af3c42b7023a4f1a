"""Import of the functional graphs that aot_autograd makes of Dynamo's graphs, for `torch.compile`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import detect_fake_mode

from relaxlite.errors import ImportModelError
from relaxlite.frontend.torch.dtypes import dtype_name
from relaxlite.frontend.torch.importer import GraphImporter
from relaxlite.frontend.torch.node import Complex
from relaxlite.frontend.torch.symbols import sympy_of
from relaxlite.ir import ops
from relaxlite.ir.attributes import INPUT_NAMES, OUTPUT_NAMES
from relaxlite.ir.expr import Attrs, Constant, Expr, Function, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType


class DynamoGraphImporter(GraphImporter):
    """Imports a graph of aot_autograd as "main"; sizes that tensors have are no inputs."""

    def __init__(self, graph: torch.fx.GraphModule, weights: dict[int, torch.Tensor]) -> None:
        fake_mode = detect_fake_mode([n.meta.get("val") for n in graph.graph.nodes if n.op == "placeholder"])
        shape_env = getattr(fake_mode, "shape_env", None)
        super().__init__(dict(shape_env.var_to_range) if shape_env is not None else {})
        self._graph, self._frozen = graph, weights
        self.inputs: list[int] = []  # numbers of the graph's inputs that the code takes
        self.scalars: set[int] = set()  # those that are numbers
        self.outputs: list[tuple[str, Any]] = []  # ("tensor", number of the result) or ("const", value)

    def run(self) -> IRModule:
        """Import the graph."""
        placeholders = [node for node in self._graph.graph.nodes if node.op == "placeholder"]
        params: list[Var] = []
        numbered = sorted(enumerate(placeholders), key=lambda item: not isinstance(_val(item[1]), torch.Tensor))
        sizes: list[tuple[Var, Any, str]] = []
        for number, node in numbered:
            value = self._placeholder(number, node, params, sizes)
            self._values[0][node] = value
        with self.bb.body() as scope:
            for param, symbol, name in sizes:
                self._read_size(param, symbol, name)
            results = self._import_results()
            self.bb.result(results[0] if len(results) == 1 else Tuple(tuple(results)))
        attrs = Attrs({
            INPUT_NAMES: tuple(p.name for p in params),
            OUTPUT_NAMES: tuple(f"output_{k}" for k in range(len(results))),
        })  # fmt: skip
        return IRModule({"main": Function(tuple(params), self.bb.finish(scope), attrs)}, Attrs({"producer": "Dynamo"}))

    def _placeholder(
        self, number: int, node: torch.fx.Node, params: list[Var], sizes: list[tuple[Var, Any, str]]
    ) -> Any:
        value = _val(node)
        if number in self._frozen:
            return self.constant(self._frozen[number].detach(), node.name)
        if isinstance(value, torch.Tensor):
            dims = [self.symbols.input_dim(d, f"{node.name}_dim{k}") for k, d in enumerate(value.shape)]
            if value.is_complex():
                raise ImportModelError(f"input '{node.name}' is complex; complex inputs are not supported here")
            param = Var(self.bb.unique_name(node.name), TensorType.of(tuple(dims), dtype_name(value.dtype)))
        elif isinstance(value, torch.SymInt):
            if self.symbols.knows(sympy_of(value)):
                return value
            param = Var(self.bb.unique_name(node.name), TensorType.of((), "int64"))
            sizes.append((param, sympy_of(value), node.name))
            self.scalars.add(number)
        elif isinstance(value, torch.SymFloat):
            param = Var(self.bb.unique_name(node.name), TensorType.of((), "float64"))
            self.symbols.define_float(sympy_of(value), param)
            self.scalars.add(number)
        elif isinstance(value, int | float | bool):
            return value
        else:
            raise ImportModelError(f"input '{node.name}' is {type(value).__name__}; tensors and numbers are supported")
        self.inputs.append(number)
        params.append(param)
        return value if number in self.scalars else param

    def _read_size(self, param: Var, symbol: Any, name: str) -> None:
        size = self.symbols.define(symbol, name)
        vector = self.bb.emit(ops.reshape(param, (1,)))
        self.bb.match_shape(self.bb.emit(ops.tensor_to_shape(vector)), (size,))

    def _import_results(self) -> list[Expr]:
        """Import the nodes and return the results that are computed."""
        results: list[Expr] = []
        for value in self.nodes(self._graph):
            if isinstance(value, Var | Constant):
                kind = "tensor"
            elif isinstance(value, Complex):
                kind, value = "complex", value.parts
            elif isinstance(value, SymExpr | torch.SymFloat | torch.SymBool):
                kind = "number"
                value = self.symbols.tensor(value, "int64" if isinstance(value, SymExpr) else "float64")
            else:
                self.outputs.append(("const", value))
                continue
            self.outputs.append((kind, len(results)))
            results.append(self.bb.leaf(value))
        return results or [Constant.of(np.float32(0))]


def _val(node: torch.fx.Node) -> Any:
    return node.meta.get("val")
