"""Functional form of exported programs: retracing, where a program needs that.

`torch.export` leaves operators that write into tensors, and Python functions of vmap, in the graph. Writes become
values by a rewrite of the graph (aliasing.py); where that cannot, and for vmap and operators without a converter, which
torch's own table decomposes, the program is retraced. A retrace costs as much as the export.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, OutputSpec, TensorArgument

from relaxlite.frontend.torch.aliasing import CannotFunctionalize, argument_of, functional_graph, is_write
from relaxlite.frontend.torch.recurrent_layers import recurrent_layers_kept
from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import all_nodes, name_of, needs_converter

Decompositions = dict[Any, Callable[..., Any]]
_NORMALIZATIONS = tuple(
    f"aten.{name}.default" for name in ("batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm")
)


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program without operators that write into tensors, and with unknown operators decomposed."""
    nodes = list(all_nodes(program.graph_module))
    if not any(map(_needs_retrace, nodes)):
        if not any(map(is_write, nodes)):
            return program
        try:
            return _without_writes(program)
        except CannotFunctionalize:
            pass  # torch can
    written = {node.target for node in nodes if _updates_statistics(node)}
    table = decompositions() | {op: f for op, f in _default_table().items() if op in written}
    with recurrent_layers_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _with_buffers(program).run_decompositions(table)


def _without_writes(program: ExportedProgram) -> ExportedProgram:
    """Return the program with writes as values; raises CannotFunctionalize."""
    main = program.graph_module
    if any(is_write(node) for node in all_nodes(main) if node.graph is not main.graph):
        raise CannotFunctionalize("a subgraph writes")
    program = _with_buffers(program)
    graph, written = functional_graph(main)
    signature, specs = program.graph_signature, []
    for spec in signature.input_specs:
        new = written.get(getattr(spec.arg, "name", ""))
        if new is not None:
            is_input = spec.kind == InputKind.USER_INPUT
            kind = OutputKind.USER_INPUT_MUTATION if is_input else OutputKind.BUFFER_MUTATION
            specs.append((OutputSpec(kind, TensorArgument(new.name), spec.arg.name if is_input else spec.target), new))
    output = next(node for node in graph.nodes if node.op == "output")
    output.args = ((*(new for _, new in specs), *output.args[0]),)
    changed = copy.copy(program)
    changed._graph_module = torch.fx.GraphModule(main, graph)
    if any(find_converter(name_of(n.target)) is None for n in all_nodes(changed.graph_module) if needs_converter(n)):
        raise CannotFunctionalize("a functional twin has no converter")
    outputs = [*(spec for spec, _ in specs), *signature.output_specs]
    changed._graph_signature = ExportGraphSignature(signature.input_specs, outputs)
    return changed


def _with_buffers(program: ExportedProgram) -> ExportedProgram:
    """Return the program with tensors that are plain attributes as buffers, so that the model may write them."""
    signature = program.graph_signature
    specs = [
        replace(spec, kind=InputKind.BUFFER, persistent=False) if spec.kind == InputKind.CONSTANT_TENSOR else spec
        for spec in signature.input_specs
    ]
    if specs == signature.input_specs:
        return program
    changed = copy.copy(program)
    changed._graph_signature = ExportGraphSignature(specs, signature.output_specs)
    return changed


def _needs_retrace(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        if is_write(node):
            return False  # see `_without_writes`
        if find_converter(name_of(node.target)) is not None:
            return _updates_statistics(node)
        return node.target in _default_table() or bool(node.target._can_decompose())  # composite ones lose views
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return "vmap" in name_of(node.target) or "batch_dim" in name_of(node.target)


def _updates_statistics(node: torch.fx.Node) -> bool:
    """Whether a node is a normalization that writes running statistics, which its schema does not tell."""
    if node.op != "call_function" or name_of(node.target) not in _NORMALIZATIONS:
        return False
    is_training = bool(argument_of(node, "training") or argument_of(node, "use_input_stats"))
    return is_training and argument_of(node, "running_mean") is not None


def decompositions() -> Decompositions:
    """The decompositions of operators that have no converter."""
    return {op: f for op, f in _default_table().items() if find_converter(name_of(op)) is None}


@cache
def _default_table() -> Decompositions:
    """Torch's own decompositions, which take torch 0.2 s to collect."""
    return dict(default_decompositions().items())
