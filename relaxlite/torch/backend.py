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
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

from relaxlite import driver
from relaxlite.errors import InvalidArgumentError, RelaxliteError
from relaxlite.frontend.torch.dynamo_graph import DynamoGraphImporter
from relaxlite.frontend.torch.functional import decompositions
from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import check_operators, name_of, needs_converter
from relaxlite.nesting import to_array, to_tensor
from relaxlite.records import dataclass
from relaxlite.runtime.module import Executable

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


class _Supported(OperatorSupportBase):
    """What a partition may hold: operators that have a converter."""

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        """Whether a node is an operator with a converter."""
        is_operator = needs_converter(node) and isinstance(node.target, torch._ops.OpOverload)
        return is_operator and find_converter(name_of(node.target)) is not None


def _with_eager_parts(graph: torch.fx.GraphModule, entry: GraphReport, options: Any) -> Callable[..., Any]:
    """Compile the largest parts of a graph that are supported; the rest runs in eager."""
    partitioner = CapabilityBasedPartitioner(graph, _Supported(), allows_single_node_partition=False)
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
        importer = DynamoGraphImporter(self._graph, weights)
        with unset_fake_temporarily():  # the weights are real tensors
            module = importer.run()
        self._executable = Executable(driver.build(module, **self._options))
        self._inputs, self._outputs = importer.inputs, importer.outputs
        self._views = _views_of_inputs(self._graph)
        self._entry.compilations += 1
        self._entry.seconds += time.perf_counter() - start

    def __call__(self, *args: Any) -> list[Any]:
        for k, tensor, version, address in self._weights:
            x = args[k]
            if x is not tensor or x._version != version or x.data_ptr() != address:
                self._build({k: args[k] for k, *_ in self._weights})
                break
        arrays = [_TAKEN[kind](args[k]) for kind, k in self._inputs]
        results = self._executable._call(tuple(arrays))
        outputs = [value if kind == "const" else _converted(kind, results[value]) for kind, value in self._outputs]
        if self._views is not None:
            numbers, views = self._views
            for number, view in zip(numbers, views(*args), strict=True):
                outputs[number] = view
        return outputs

    def as_module_forward(self, *args: Any) -> Any:
        """Run as the forward of a graph module: one result alone is no list."""
        results = self(*args)
        output = next(node for node in self._graph.graph.nodes if node.op == "output")
        return tuple(results) if isinstance(output.args[0], tuple | list) else results[0]


def _views_of_inputs(graph: torch.fx.GraphModule) -> tuple[list[int], torch.fx.GraphModule] | None:
    """Return the numbers of the results that are views of inputs, and a graph that takes these views.

    aot_autograd makes such results from the input, by the strides and the offset of what the graph gives.
    """
    output = next(node for node in graph.graph.nodes if node.op == "output")
    results = output.args[0] if isinstance(output.args[0], tuple | list) else (output.args[0],)
    numbers = [k for k, node in enumerate(results) if isinstance(node, torch.fx.Node) and _is_view_of_input(node)]
    if not numbers:
        return None
    views = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    needed = {results[k] for k in numbers}
    pending = list(needed)
    while pending:
        more = [n for n in pending.pop().all_input_nodes if n not in needed]
        needed.update(more)
        pending += more
    for node in graph.graph.nodes:
        if node.op == "placeholder" or node in needed:
            copies[node] = views.node_copy(node, copies.__getitem__)
    views.output(tuple(copies[results[k]] for k in numbers))
    return numbers, torch.fx.GraphModule(graph, views)


def _is_view_of_input(node: torch.fx.Node) -> bool:
    """Whether a chain of operators that share memory leads from an input to a node."""
    while node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not isinstance(node.args[0], torch.fx.Node):
            return False
        node = node.args[0]
    return node.op == "placeholder"


def _pairs(tensor: torch.Tensor) -> np.ndarray:
    return torch.view_as_real(tensor.detach().resolve_conj()).numpy()


_TAKEN: dict[str, Callable[[Any], np.ndarray]] = {"tensor": to_array, "complex": _pairs, "number": np.asarray}


def _converted(kind: str, array: np.ndarray) -> Any:
    """Return a result as what the graph gives."""
    if kind == "tensor":
        return to_tensor(torch, array)
    if kind == "complex":
        return torch.view_as_complex(torch.from_numpy(array))
    return array.item()
