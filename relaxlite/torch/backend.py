"""The backend of `torch.compile(model, backend="relaxlite")`.

Dynamo hands over graphs with symbolic sizes; aot_autograd makes them functional, and deals with inputs that are
written and with outputs that alias inputs. Each graph is compiled once for all sizes of its symbols; a later graph that
differs only in such sizes runs the same code. Parameters and buffers are constants of the code (weights.py). A part of
a graph that is not supported runs in eager; `relaxlite.torch.report()` says what and why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd

from relaxlite.errors import InvalidArgumentError
from relaxlite.frontend.torch.dynamo_graph import placeholders_of
from relaxlite.frontend.torch.functional import decompositions
from relaxlite.torch.graph_code import GraphCall
from relaxlite.torch.parts import compile_graph
from relaxlite.torch.report import report
from relaxlite.torch.reuse import forget_all
from relaxlite.torch.weights import can_hold

GRADIENTS = (
    "the backend 'relaxlite' computes no gradients, and a result requires one; call the model under torch.no_grad() or "
    "torch.inference_mode(), or set requires_grad_(False)"
)
_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, torch.SymInt, torch.SymFloat, int, float, bool)
OPTIONS = ("target", "precision", "constant_memory", "tuning", "libraries", "validate", "threads")


def backend(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo; torch calls this function. options: those of `relaxlite.compile` that OPTIONS names.

    Raises InvalidArgumentError for a graph whose results require gradients, for a mode, and for other options.
    """
    _check_options(mode, options or {})
    weights = {k: x for k, x in enumerate(example_inputs) if can_hold(x)}
    calls: list[GraphCall] = []
    compile_graph = functools.partial(_compile, weights=weights, options=options or {}, calls=calls)
    run = aot_autograd(
        fw_compiler=_refuse_gradients, inference_compiler=compile_graph, decompositions=decompositions()
    )(graph, example_inputs)
    return calls[0] if calls and all(type(x) in _PLAIN for x in example_inputs) else run


backend.reset = forget_all  # type: ignore[attr-defined]  # torch._dynamo.reset() calls this function


def _check_options(mode: str | None, options: dict[str, Any]) -> None:
    if mode not in (None, "default"):
        raise InvalidArgumentError(
            f"the backend 'relaxlite' has no modes, got mode={mode!r}; options of relaxlite.compile are passed as "
            "options={'precision': 'bf16'}"
        )
    unknown = [name for name in options if name not in OPTIONS]
    if unknown:
        raise InvalidArgumentError(f"the backend 'relaxlite' has no option '{unknown[0]}'; it has {', '.join(OPTIONS)}")


def _refuse_gradients(graph: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    raise InvalidArgumentError(GRADIENTS)


def _compile(
    graph: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    weights: dict[int, torch.Tensor],
    options: dict[str, Any],
    calls: list[GraphCall],
) -> Callable[..., Any]:
    """Compile a functional graph. Append to `calls` where Dynamo can call the code without aot_autograd's epilogue."""
    entry = report().add(sum(node.op == "call_function" for node in graph.graph.nodes))
    metadata = getattr(torch._guards.TracingContext.try_get(), "fw_metadata", None)
    inputs = placeholders_of(graph)
    if len(inputs) != len(example_inputs) or any(k >= len(inputs) for k in weights):
        weights = {}
    written = getattr(metadata, "mutated_inp_runtime_indices", ())
    run = compile_graph(graph, {k: x for k, x in weights.items() if k not in written}, entry, options)
    if isinstance(run, GraphCall) and _needs_no_epilogue(metadata):
        calls.append(run)
    return _boxed(run)


def _needs_no_epilogue(metadata: Any) -> bool:
    """Whether a graph writes no input and returns no view, so that its results are what the code gives.

    Where sizes are static until they change, the epilogue marks those of results that are dynamic; this saves a trace.
    """
    if metadata is None or torch._dynamo.config.assume_static_by_default:
        return False
    counts = ("num_mutated_inp_runtime_indices", "num_outputs_aliased", "num_intermediate_bases")
    return (
        all(getattr(metadata, name, 1) == 0 for name in counts)
        and not metadata.is_rng_op_functionalized
        and not metadata.tokens
        and metadata.grad_enabled_mutation is None
    )


def _boxed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Take the arguments in a list, as aot_autograd passes them."""

    def run(args: list[Any]) -> Any:
        values = tuple(args)
        args.clear()
        return function(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
