"""Functional form of exported programs: retracing, where a program needs that.

`torch.export` leaves operators that write into tensors, and Python functions of vmap, in the graph; a retrace turns
both into functions of their operands. Operators without a converter are decomposed in the same retrace, by torch's own
table. A retrace costs as much as the export, so a program that needs none is taken as it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch
from torch.export import ExportedProgram, _patches, default_decompositions

from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import all_nodes, name_of

Decompositions = dict[Any, Callable[..., Any]]
_NORMALIZATIONS = ("aten.batch_norm.default", "aten.instance_norm.default")


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program without operators that write into tensors, and with unknown operators decomposed."""
    if not any(map(_needs_retrace, all_nodes(program.graph_module))):
        return program
    written = {node.target for node in all_nodes(program.graph_module) if _updates_statistics(node)}
    table = decompositions() | {op: f for op, f in _default_table().items() if op in written}
    with recurrent_layers_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.run_decompositions(table)


@contextmanager
def recurrent_layers_kept() -> Iterator[None]:
    """Keep LSTM and GRU layers whole in exports and retraces, so that their time stays dynamic (pytorch#193192)."""
    with ExitStack() as patches:
        for name in ("register_lstm_while_loop_decomposition", "register_gru_while_loop_decomposition"):
            patch = getattr(_patches, name, None)
            if patch is not None:
                patches.enter_context(patch())
        yield


def _needs_retrace(node: torch.fx.Node) -> bool:
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        if node.target._schema.is_mutable:
            return True
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
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, node.args, strict=False)) | node.kwargs
    is_training = bool(given.get("training") or given.get("use_input_stats"))
    return is_training and given.get("running_mean") is not None


def decompositions() -> Decompositions:
    """The decompositions of operators that have no converter."""
    return {op: f for op, f in _default_table().items() if find_converter(name_of(op)) is None}


@cache
def _default_table() -> Decompositions:
    """Torch's own decompositions, which take torch 0.2 s to collect."""
    return dict(default_decompositions().items())
