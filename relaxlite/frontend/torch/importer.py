"""Conversion of an fx graph of PyTorch, with its subgraphs, into the body of a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from relaxlite.errors import ImportModelError, RelaxliteError
from relaxlite.frontend.common.bounds import Bounds
from relaxlite.frontend.common.control_flow import ControlFlowBuilder
from relaxlite.frontend.torch.binding import bind_arguments
from relaxlite.frontend.torch.dtypes import dtype_name, to_numpy
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.places import place_of, source_code
from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import name_of
from relaxlite.frontend.torch.symbols import SymbolTable, sympy_of
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType


class GraphImporter:
    """Converts the nodes of a graph, in order. Subgraphs see the values of their enclosing graphs."""

    def __init__(self, ranges: Mapping[Any, Any], bounds: Bounds | None = None) -> None:
        """ranges: torch's ranges of its symbols. bounds: the user's, by names."""
        self.bb = BlockBuilder()
        self.symbols = SymbolTable(ranges, self.bb, bounds)
        self.flow = ControlFlowBuilder(self.bb, self.symbols.fresh, self.symbols.scope)
        self._values: list[dict[torch.fx.Node, Any]] = [{}]
        self._constants: dict[tuple[object, ...], Constant] = {}
        self._params: list[Var] = []
        self._sizes: list[tuple[Var, Any, str]] = []  # parameter, torch.SymInt, name
        self._reported: RelaxliteError | None = None
        self.failed: torch.fx.Node | None = None  # the node of the outermost graph that could not be converted

    # constants

    def constant(self, tensor: torch.Tensor, name: str | None = None) -> Constant | Complex:
        """Return a tensor of the program as a constant, without a copy where it is dense; tied ones are one."""
        if isinstance(tensor, torch.nn.Parameter | torch.nn.Buffer):
            tensor = tensor.detach()
        if type(tensor) is not torch.Tensor:
            raise ImportModelError(
                f"'{name}' is a {type(tensor).__name__}; unwrap it before the export, "
                "with torch.utils.parametrize or torchao's unwrap_tensor_subclass"
            )
        key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), tensor.is_conj())
        if key not in self._constants or not tensor.numel():
            array = to_numpy(tensor)
            view = array.view()
            view.flags.writeable = False
            self._constants[key] = Constant(view, TensorType.of(view.shape, dtype_name(tensor.dtype)), name)
        constant = self._constants[key]
        return Complex(constant) if tensor.is_complex() else constant

    # inputs

    def name_sizes(self, inputs: Iterable[torch.fx.Node], dim_name: Callable[[torch.fx.Node, int], str]) -> None:
        """Define the sizes of inputs that are symbols; sizes of other inputs may be expressions of them."""
        for node in inputs:
            value = node.meta.get("val")
            for k, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
                if isinstance(size, torch.SymInt) and sympy_of(size).is_Symbol:
                    self.symbols.input_dim(size, dim_name(node, k))

    def tensor_input(self, value: torch.Tensor, name: str, dim_names: Sequence[str]) -> Var | Complex:
        """Add a parameter for an input that is a tensor; a complex one is passed as pairs (..., 2)."""
        dims = [self.symbols.input_dim(d, dim_name) for d, dim_name in zip(value.shape, dim_names, strict=True)]
        tail = (sym(2),) if value.is_complex() else ()
        param = self._param(name, TensorType.of((*dims, *tail), dtype_name(value.dtype)))
        return Complex(param) if value.is_complex() else param

    def number_input(self, value: Any, name: str) -> Var:
        """Add a parameter of rank 0 for an input that is a torch.SymInt, torch.SymFloat or torch.SymBool."""
        if isinstance(value, torch.SymInt):
            param = self._param(name, TensorType.of((), "int64"))
            self._sizes.append((param, value, name))
            return param
        if not isinstance(value, torch.SymFloat | torch.SymBool):
            raise ImportModelError(f"input '{name}' is {type(value).__name__}; tensors and numbers are supported")
        param = self._param(name, TensorType.of((), "float64" if isinstance(value, torch.SymFloat) else "bool"))
        self.symbols.define_float(sympy_of(value), param)
        return param

    def read_sizes(self) -> None:
        """Read the integers among the inputs; where dimensions gave a symbol already, check that both agree."""
        for param, value, name in sorted(self._sizes, key=lambda entry: not sympy_of(entry[1]).is_Symbol):
            vector = self.bb.emit(ops.reshape(param, (1,)))
            size = self.symbols.input_dim(value, name)
            self.bb.match_shape(self.bb.emit(ops.tensor_to_shape(vector)), (size,))

    def _param(self, name: str, ty: TensorType) -> Var:
        self._params.append(Var(self.bb.unique_name(name), ty))
        return self._params[-1]

    # random numbers

    def random_key(self) -> Expr:
        """Return the key, uint32 of rank 0, of a random operator. ImportModelError where no state can hold a count."""
        raise ImportModelError("random operators are supported in exported programs only")

    # nodes

    @contextmanager
    def scope(self, values: Mapping[torch.fx.Node, Any]) -> Iterator[None]:
        """Open a scope of nodes' values, for a subgraph."""
        self._values.append(dict(values))
        try:
            yield
        finally:
            self._values.pop()

    def subgraph(self, graph: torch.fx.GraphModule, operands: Sequence[Any]) -> list[Any]:
        """Convert a subgraph in place, on these operands; return its results."""
        placeholders = [n for n in graph.graph.nodes if n.op == "placeholder"]
        if len(placeholders) != len(operands):
            raise ImportModelError(f"a subgraph takes {len(placeholders)} operands, got {len(operands)}")
        for node, value in zip(placeholders, operands, strict=True):
            self._bind_symbols(node.meta.get("val"), value)
        with self.scope(dict(zip(placeholders, operands, strict=True))):
            return self.nodes(graph)

    def nodes(self, graph: torch.fx.GraphModule) -> list[Any]:
        """Convert the nodes of a graph into the body under construction; return its results."""
        outer = self.bb.loc
        for node in graph.graph.nodes:
            if node.op == "output":
                results = self.value(node.args[0])
                self.bb.loc = outer
                return list(results) if isinstance(results, tuple | list) else [results]
            if node.op != "placeholder":
                self._values[-1][node] = self._convert(graph, node)
        raise ImportModelError("a graph without results")

    def value(self, arg: Any) -> Any:
        """Return an argument of a node with the values of nodes in place of the nodes."""
        if isinstance(arg, torch.fx.Node):
            for scope in reversed(self._values):
                if arg in scope:
                    return scope[arg]
            raise ImportModelError(f"'{arg.name}' is not defined")
        if isinstance(arg, tuple | list):
            return [self.value(x) for x in arg]
        if isinstance(arg, dict):
            return {k: self.value(v) for k, v in arg.items()}
        return self.symbols.int(arg) if isinstance(arg, torch.SymInt) else arg

    def _convert(self, graph: torch.fx.GraphModule, node: torch.fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(graph, str(node.target))
        self.bb.loc = place_of(node)
        try:
            return self._call(node)
        except RelaxliteError as error:
            self.failed = node
            if error is self._reported:
                raise
            raise self._located(str(error), node) from error
        except Exception as error:
            self.failed = node
            raise self._located(f"cannot be converted ({type(error).__name__}: {error})", node) from error

    def _attribute(self, graph: torch.fx.GraphModule, target: str) -> Any:
        value: Any = graph
        for part in target.split("."):
            value = getattr(value, part)
        return self.constant(value, target) if isinstance(value, torch.Tensor) else value

    def _call(self, node: torch.fx.Node) -> Any:
        name = name_of(node.target)
        if name == "getitem" and not isinstance(node.meta.get("val"), torch.SymInt):
            return self.value(node.args[0])[node.args[1]]
        converter = find_converter(name, is_complex=_is_complex(node))
        if converter is None:
            return self._symbolic(node)
        n = Node(self, node)
        args, kwargs = bind_arguments(node, converter, self.value)
        if not converter.has_complex and any(isinstance(a, Complex) for a in _flat((*args, *kwargs.values()))):
            raise ImportModelError(f"{name} of complex tensors is not supported")
        return self._checked(converter.function(n, *args, **kwargs), node)

    def _symbolic(self, node: torch.fx.Node) -> Any:
        """Return the scalar that a node computes from sizes: torch has derived it."""
        value = node.meta.get("val")
        if isinstance(value, torch.SymInt):
            return self.symbols.int(value)
        if isinstance(value, int | float | bool | torch.SymFloat | torch.SymBool):
            return value
        raise ImportModelError(f"there is no converter of {name_of(node.target)}")

    def _located(self, message: str, node: torch.fx.Node) -> ImportModelError:
        lines = [f"{place_of(node)}: {message}"]
        code = source_code(node)
        lines += [f"  {code}"] if code else []
        for arg in node.all_input_nodes:
            value = arg.meta.get("val")
            if isinstance(value, torch.Tensor):
                lines.append(f"  operand '{arg.name}': {str(value.dtype).removeprefix('torch.')}{list(value.shape)}")
        self._reported = ImportModelError("\n".join(lines))
        return self._reported

    # results

    def _checked(self, result: Any, node: torch.fx.Node) -> Any:
        """Compare results with what torch derived, and bind the symbols that this node computes."""
        described = node.meta.get("val")
        if isinstance(described, tuple | list) and isinstance(result, tuple | list):
            return tuple(self._fitted(r, d) for r, d in zip(result, described, strict=False))
        return self._fitted(result, described)

    def _fitted(self, result: Any, described: Any) -> Any:
        if isinstance(result, list | tuple) and isinstance(described, list | tuple):
            return [self._fitted(r, d) for r, d in zip(result, described, strict=True)]
        if isinstance(described, torch.SymInt | torch.SymFloat | torch.SymBool):
            self._bind_symbols(described, result)
            return self.symbols.int(described) if isinstance(described, torch.SymInt) else described
        if not isinstance(described, torch.Tensor) or result is None:
            return result
        x = result.parts if isinstance(result, Complex) else self.bb.leaf(result)
        if isinstance(result, Complex) != described.is_complex():
            raise ImportModelError("the converter's result is complex and torch's is not, or the other way round")
        x = self._with_shape(x, described)
        return Complex(x) if described.is_complex() else x

    def _with_shape(self, x: Expr, described: torch.Tensor) -> Expr:
        dtype, shape = dtype_name(described.dtype), list(described.shape)
        if not isinstance(x.ty, TensorType):
            raise ImportModelError(f"the converter's result is {x.ty}, not a tensor")
        if x.ty.dtype != dtype:
            raise ImportModelError(f"the converter's result is {x.ty}, torch's is {dtype}")
        own, tail = x.ty.shape, (2,) if described.is_complex() else ()
        if own is None:
            for k, size in enumerate(shape):
                for symbol in self.symbols.unknown(size):
                    self.symbols.define(symbol, f"{getattr(x, 'name', 'dim')}_dim{k}")
            return self.bb.match_shape(x, (*map(self.symbols.dim, shape), *tail))
        if len(own) != len(shape) + len(tail):
            raise ImportModelError(f"the converter's result is {x.ty}, torch's has the shape {shape}")
        target, differs = list(own), False
        for k, size in enumerate(shape):
            self._bind_symbols(size, own[k])
            expected = self.symbols.dim(size)
            if own[k] is expected or PROVER.can_prove_equal(own[k], expected):
                continue
            if PROVER.can_prove_ne(own[k], expected):
                raise ImportModelError(f"the converter's result is {x.ty}, torch's has the shape {shape}")
            target[k], differs = expected, True
        return self.bb.match_shape(x, tuple(target)) if differs else x

    def _bind_symbols(self, described: Any, value: Any) -> None:
        """Define the unbacked symbol that a value introduces, where torch describes the value by a symbol alone."""
        if isinstance(described, torch.Tensor):
            shape = getattr(getattr(value, "ty", None), "shape", None)
            for size, own in zip(described.shape, shape or (), strict=False):
                self._bind_symbols(size, own)
            return
        if not isinstance(described, torch.SymInt | torch.SymFloat | torch.SymBool):
            return
        symbol = sympy_of(described)
        if not symbol.is_Symbol or self.symbols.knows(symbol):
            return
        if isinstance(described, torch.SymInt):
            if isinstance(value, torch.SymInt):
                value = self.symbols.dim(value)
            if isinstance(value, SymExpr | int):
                self.symbols.define_as(symbol, self.symbols.dim_or_expr(value))
        elif isinstance(value, Var | Constant):
            self.symbols.define_float(symbol, value)


def _is_complex(node: torch.fx.Node) -> bool:
    """Whether an operand or the result of a call is a complex tensor."""
    values = (x.meta.get("val") for x in (node, *node.all_input_nodes))
    return any(isinstance(v, torch.Tensor) and v.is_complex() for v in values)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
