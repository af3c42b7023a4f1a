"""The backend of `torch.compile(model, backend="relaxlite")`.

Dynamo hands over graphs with symbolic sizes; aot_autograd makes them functional, and deals with inputs that are
written and with outputs that alias inputs. Each graph is compiled once for all sizes of its symbols. Parameters are
constants of the compiled code; if one is written or replaced, the graph is compiled again. A part of a graph that is
not supported runs in eager; `relaxlite.torch.report()` says what and why.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import field
from typing import Any

import numpy as np
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import detect_fake_mode

from relaxlite import driver
from relaxlite.errors import ImportModelError, InvalidArgumentError, RelaxliteError
from relaxlite.frontend.torch.dtypes import dtype_name
from relaxlite.frontend.torch.functional import decompositions
from relaxlite.frontend.torch.importer import GraphImporter
from relaxlite.frontend.torch.node import Complex
from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import check_operators, name_of, needs_converter
from relaxlite.frontend.torch.symbols import sympy_of
from relaxlite.ir import ops
from relaxlite.ir.attributes import INPUT_NAMES, OUTPUT_NAMES
from relaxlite.ir.expr import Attrs, Constant, Expr, Function, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass
from relaxlite.runtime.module import Executable
from relaxlite.runtime.structure import to_array, to_tensor

GRADIENTS = (
    "the backend 'relaxlite' computes no gradients, and a result requires one; call the model under torch.no_grad() or "
    "torch.inference_mode(), or set requires_grad_(False)"
)


@dataclass
class GraphReport:
    """What became of one graph: operators, seconds of compilation, and why parts of it run in eager."""

    operators: int
    compilations: int = 0
    seconds: float = 0.0
    eager: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"graph of {self.operators} operators: compiled {self.compilations} times in {self.seconds:.2f} s"]
        return "\n".join(lines + [f"  in eager: {reason}" for reason in self.eager])


@dataclass
class Report:
    """The graphs that `torch.compile` gave to relaxlite in this process."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def compilations(self) -> int:
        """Number of compilations of all graphs."""
        return sum(graph.compilations for graph in self.graphs)

    def __str__(self) -> str:
        return "\n".join(map(str, self.graphs)) or "no graph has been compiled"


_report = Report()


def report() -> Report:
    """Return what `torch.compile(backend="relaxlite")` compiled in this process, and what runs in eager and why."""
    return _report


def reset_report() -> None:
    """Forget the graphs of the report."""
    _report.graphs.clear()


def backend(graph: torch.fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Compile a graph of Dynamo; torch calls this function. options: of `relaxlite.compile` (mode, options of torch).

    Raises InvalidArgumentError for a graph whose results require gradients.
    """
    weights: dict[int, torch.Tensor] = {
        k: x for k, x in enumerate(example_inputs) if isinstance(x, torch.nn.Parameter) and not x.is_inference()
    }
    compile_graph = functools.partial(_compile, weights=weights, options=options.get("options") or {})
    return aot_autograd(
        fw_compiler=_refuse_gradients, inference_compiler=compile_graph, decompositions=decompositions()
    )(graph, example_inputs)


def _refuse_gradients(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    raise InvalidArgumentError(GRADIENTS)


def _compile(
    graph: torch.fx.GraphModule, example_inputs: Sequence[Any], *, weights: dict[int, torch.Tensor], options: Any
) -> Callable[..., Any]:
    """Compile a functional graph; what is not supported in it runs in eager."""
    entry = GraphReport(sum(node.op == "call_function" for node in graph.graph.nodes))
    _report.graphs.append(entry)
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    if len(placeholders) != len(example_inputs) or any(k >= len(placeholders) for k in weights):
        weights = {}
    try:
        check_operators(graph)
        return _boxed(CompiledGraph(graph, weights, entry, options))
    except RelaxliteError as error:
        entry.eager.append(str(error))
        return _boxed(_with_eager_parts(graph, entry, options))


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take the arguments in a list, as aot_autograd passes them."""

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return function(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _with_eager_parts(graph: torch.fx.GraphModule, entry: GraphReport, options: Any) -> Callable[..., Any]:
    """Compile the largest parts of a graph that are supported; the rest runs in eager."""
    from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
    from torch.fx.passes.operator_support import OperatorSupportBase

    class Supported(OperatorSupportBase):
        def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
            return (
                needs_converter(node)
                and isinstance(node.target, torch._ops.OpOverload)
                and find_converter(name_of(node.target)) is not None
            )

    partitioner = CapabilityBasedPartitioner(graph, Supported(), allows_single_node_partition=False)
    parted = (
        partitioner.partition_and_fuse()
        if hasattr(partitioner, "partition_and_fuse")
        else (partitioner.fuse_partitions(partitioner.propose_partitions()))
    )
    for name, part in list(parted.named_children()):
        if isinstance(part, torch.fx.GraphModule) and name.startswith("fused_"):
            try:
                compiled = CompiledGraph(part, {}, entry, options)
            except RelaxliteError as error:
                entry.eager.append(str(error))
                continue
            part.forward = compiled.as_module_forward
    return parted


class CompiledGraph:
    """A graph as compiled code. Called with the graph's inputs: tensors and sizes."""

    def __init__(
        self, graph: torch.fx.GraphModule, weights: dict[int, torch.Tensor], entry: GraphReport, options: Any
    ) -> None:
        self._graph, self._entry, self._options = graph, entry, dict(options)
        self._build(weights)

    def _build(self, weights: dict[int, torch.Tensor]) -> None:
        start = time.perf_counter()
        self._weights = [(k, x, x._version, x.data_ptr()) for k, x in weights.items()]
        importer = CompiledGraphImporter(self._graph, weights)
        module = importer.run()
        self._executable = Executable(driver.build(module, **self._options))
        self._inputs, self._outputs, self._scalars = importer.inputs, importer.outputs, importer.scalars
        self._entry.compilations += 1
        self._entry.seconds += time.perf_counter() - start

    def __call__(self, *args: Any) -> list[Any]:
        for k, tensor, version, address in self._weights:
            x = args[k]
            if x is not tensor or x._version != version or x.data_ptr() != address:
                self._build({k: args[k] for k, *_ in self._weights})
                break
        scalars = self._scalars
        arrays = [np.asarray(args[k]) if k in scalars else to_array(args[k]) for k in self._inputs]
        results = self._executable._call(tuple(arrays))
        return [value if kind == "const" else _converted(kind, results[value]) for kind, value in self._outputs]

    def as_module_forward(self, *args: Any) -> Any:
        """Run as the forward of a graph module: one result alone is no list."""
        results = self(*args)
        output = next(node for node in self._graph.graph.nodes if node.op == "output")
        return tuple(results) if isinstance(output.args[0], tuple | list) else results[0]


def _converted(kind: str, array: np.ndarray) -> Any:
    """Return a result as what the graph gives."""
    if kind == "tensor":
        return to_tensor(torch, array)
    if kind == "complex":
        return torch.view_as_complex(torch.from_numpy(array))
    return array.item()


class CompiledGraphImporter(GraphImporter):
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
