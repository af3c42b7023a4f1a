"""Compiled code of a graph, and calls of this code."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from relaxlite import driver
from relaxlite.frontend.torch.dynamo_graph import DynamoGraphImporter
from relaxlite.nesting import to_array, to_tensor
from relaxlite.runtime.module import Executable
from relaxlite.torch.report import GraphReport
from relaxlite.torch.views import graph_of_nodes, output_of, views_of_inputs
from relaxlite.torch.weights import Weights


class ImportFailed(Exception):
    """The import of a graph failed with `error`, at the node of the name `node` if at a node."""

    def __init__(self, error: Exception, node: str | None) -> None:
        super().__init__(str(error))
        self.error, self.node = error, node


class GraphCode:
    """The code of a graph for all sizes of its symbols. Called with the values of the graph's inputs."""

    def __init__(
        self, graph: torch.fx.GraphModule, weights: Mapping[int, torch.Tensor], options: Mapping[str, Any]
    ) -> None:
        """Import the graph; `build` compiles it. Raises ImportFailed."""
        self.graph, self.options = graph, options
        self.weights = Weights(weights)
        self._import()

    def _import(self) -> None:
        importer = DynamoGraphImporter(self.graph, self.weights.tensors, skipped=views_of_inputs(self.graph))
        try:
            with unset_fake_temporarily():  # the weights are real tensors
                self._module = importer.run()
        except Exception as error:
            raise ImportFailed(error, None if importer.failed is None else importer.failed.name) from error
        self.inputs, self._outputs, self.ranges = importer.inputs, importer.outputs, importer.ranges

    def build(self, entry: GraphReport) -> None:
        """Compile the imported graph."""
        start = time.perf_counter()
        options = {name: value for name, value in self.options.items() if name != "threads"}
        with unset_fake_temporarily():
            self._executable: Executable | None = Executable(
                driver.build(self._module, **options), threads=self.options.get("threads")
            )
        del self._module  # its constants
        self._takes = [(_ARGUMENTS[kind], number) for kind, number in self.inputs]
        self._gives = [
            (None, value) if kind == "const" else (self._giver(kind, value), value) for kind, value in self._outputs
        ]
        self._entry = entry
        entry.compilations += 1
        entry.seconds += time.perf_counter() - start

    def _giver(self, kind: str, number: int) -> Callable[[np.ndarray], Any]:
        assert self._executable is not None
        is_bfloat16 = self._executable.outputs[number].dtype == "bfloat16"
        return _RESULTS[kind] if kind != "tensor" or is_bfloat16 else torch.from_numpy

    def __call__(self, args: Sequence[Any]) -> list[Any] | None:
        """Run the code. Results that are views of inputs are None. Returns None where the code cannot be compiled."""
        if not self.weights.are_current(args):
            self._take_weights(args)
        if self._executable is None:
            return None
        results = self._executable._call(tuple([take(args[k]) for take, k in self._takes]))
        return [value if give is None else give(results[value]) for give, value in self._gives]

    def _take_weights(self, args: Sequence[Any]) -> None:
        """Compile the graph again for other weights; where that fails, calls run in eager from now on."""
        self.weights.update(args)
        try:
            self._import()
            self.build(self._entry)
        except Exception as error:
            self._entry.add_failure(error.error if isinstance(error, ImportFailed) else error)
            self._executable = None


class GraphCall:
    """A call of a graph: results of the graph's code, and views of the inputs."""

    def __init__(self, graph: torch.fx.GraphModule, code: GraphCode, order: Sequence[int | None] | None = None) -> None:
        """order: the number of the graph's input for each input of the code's graph; None where there is none."""
        self._graph, self._code, self._order = graph, code, order
        views = views_of_inputs(graph)
        self._places = list(views)
        self._views = graph_of_nodes(graph, list(views.values())) if views else None
        self._gives_one = not isinstance(output_of(graph), tuple | list)

    def __call__(self, *args: Any) -> list[Any]:
        values = args if self._order is None else [None if k is None else args[k] for k in self._order]
        results = self._code(values)
        if results is None:
            return _as_list(self._graph(*args))
        if self._views is not None:
            for place, view in zip(self._places, self._views(*args), strict=True):
                results[place] = view
        return results

    def as_module_forward(self, *args: Any) -> Any:
        """Run as the forward of a graph module: one result alone is no list."""
        results = self(*args)
        return results[0] if self._gives_one else tuple(results)


def _as_list(results: Any) -> list[Any]:
    return list(results) if isinstance(results, tuple | list) else [results]


def _pairs(tensor: torch.Tensor) -> np.ndarray:
    return torch.view_as_real(tensor.detach().resolve_conj()).numpy()


_ARGUMENTS: dict[str, Callable[[Any], np.ndarray]] = {"tensor": to_array, "complex": _pairs, "number": np.asarray}
_RESULTS: dict[str, Callable[[np.ndarray], Any]] = {
    "tensor": lambda array: to_tensor(torch, array),
    "complex": lambda array: torch.view_as_complex(torch.from_numpy(array)),
    "number": lambda array: array.item(),
}
