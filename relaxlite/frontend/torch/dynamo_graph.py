"""Import of the functional graphs that aot_autograd makes of Dynamo's graphs, for `torch.compile`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch._dynamo.utils import detect_fake_mode
from torch.utils._sympy.value_ranges import ValueRanges

from relaxlite.frontend.torch.importer import GraphImporter
from relaxlite.frontend.torch.node import Complex
from relaxlite.ir.attributes import INPUT_NAMES, OUTPUT_NAMES
from relaxlite.ir.expr import Attrs, Constant, Expr, Function, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr


class DynamoGraphImporter(GraphImporter):
    """Imports a graph of aot_autograd as "main"; sizes that tensors have are no inputs."""

    def __init__(
        self, graph: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor], skipped: Collection[int] = ()
    ) -> None:
        """weights: inputs that are constants, by number. skipped: numbers of results that are not computed."""
        self.ranges = symbol_ranges(graph)
        super().__init__(self.ranges)
        self._graph, self._frozen, self._skipped = graph, weights, skipped
        self.inputs: list[tuple[str, int]] = []  # "tensor", "complex" or "number", and the number of the graph's input
        self.outputs: list[tuple[str, Any]] = []  # ("tensor", number of the result) or ("const", value)

    def run(self) -> IRModule:
        """Import the graph."""
        placeholders = placeholders_of(self._graph)
        taken = (node for number, node in enumerate(placeholders) if number not in self._frozen)
        self.name_sizes(taken, lambda node, k: f"{node.name}_dim{k}")
        numbered = sorted(enumerate(placeholders), key=lambda item: not isinstance(_val(item[1]), torch.Tensor))
        for number, node in numbered:
            self._values[0][node] = self._placeholder(number, node)
        with self.bb.body() as scope:
            self.read_sizes()
            results = self._import_results()
            self.bb.result(results[0] if len(results) == 1 else Tuple(tuple(results)))
        attrs = Attrs({
            INPUT_NAMES: tuple(p.name for p in self._params),
            OUTPUT_NAMES: tuple(f"output_{k}" for k in range(len(results))),
        })  # fmt: skip
        main = Function(tuple(self._params), self.bb.finish(scope), attrs)
        return IRModule({"main": main}, Attrs({"producer": "Dynamo"}))

    def _placeholder(self, number: int, node: torch.fx.Node) -> Any:
        value = _val(node)
        if number in self._frozen:
            return self.constant(self._frozen[number].detach(), node.name)
        if isinstance(value, torch.Tensor):
            self.inputs.append(("complex" if value.is_complex() else "tensor", number))
            return self.tensor_input(value, node.name, [f"{node.name}_dim{k}" for k in range(value.dim())])
        is_fixed = isinstance(value, int | float | bool)  # the graph holds for this number only
        if is_fixed or (isinstance(value, torch.SymInt) and not self.symbols.unknown(value)):
            return value
        self.number_input(value, node.name)
        self.inputs.append(("number", number))
        return value

    def _import_results(self) -> list[Expr]:
        """Import the nodes and return the results that are computed."""
        results: list[Expr] = []
        for number, value in enumerate(self.nodes(self._graph)):
            if number in self._skipped:
                self.outputs.append(("const", None))
                continue
            if isinstance(value, Var | Constant):
                kind = "tensor"
            elif isinstance(value, Complex):
                kind, value = "complex", value.parts
            elif (dtype := _NUMBERS.get(type(value))) or isinstance(value, SymExpr):
                kind, value = "number", self.symbols.tensor(value, dtype or "int64")
            else:
                self.outputs.append(("const", value))
                continue
            self.outputs.append((kind, len(results)))
            results.append(self.bb.leaf(value))
        return results or [Constant.of(np.float32(0))]


_NUMBERS = {torch.SymInt: "int64", torch.SymFloat: "float64", torch.SymBool: "bool"}


def placeholders_of(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Return the inputs of a graph."""
    return [node for node in graph.graph.nodes if node.op == "placeholder"]


def symbol_ranges(graph: torch.fx.GraphModule) -> dict[Any, Any]:
    """Return the ranges of a graph's symbols.

    A lower bound of 2 is none of the model: Dynamo traces the sizes 0 and 1 apart. So the code holds for these, too.
    """
    fake_mode = detect_fake_mode([n.meta.get("val") for n in placeholders_of(graph)])
    shape_env = getattr(fake_mode, "shape_env", None)
    ranges = dict(shape_env.var_to_range) if shape_env is not None else {}
    return {symbol: ValueRanges(0, r.upper) if r.lower == 2 else r for symbol, r in ranges.items()}


def _val(node: torch.fx.Node) -> Any:
    return node.meta.get("val")
