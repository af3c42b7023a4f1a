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


def functionalize(program: ExportedProgram) -> ExportedProgram:
    """Return the program without operators that write into tensors, and with unknown operators decomposed."""
    if not any(map(_needs_retrace, all_nodes(program.graph_module))):
        return program
    with recurrent_layers_kept(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return program.run_decompositions(decompositions())


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
            return False
        return node.target in _default_table() or bool(node.target._can_decompose())  # composite ones lose views
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return False
    return "vmap" in name_of(node.target) or "batch_dim" in name_of(node.target)


def decompositions() -> Decompositions:
    """The decompositions of operators that have no converter."""
    return {op: f for op, f in _default_table().items() if find_converter(name_of(op)) is None}


@cache
def _default_table() -> Decompositions:
    """Torch's own decompositions, which take torch 0.2 s to collect."""
    return dict(default_decompositions().items())
