"""Conversion of an exported PyTorch program, with its subgraphs, into one IRModule.

`main` takes the tensors among the user's arguments, then the state: the buffers that the model writes. The last results
are the new contents of the state and of the arguments that the model writes (attribute `donated`). `initial_state`
gives the exported contents of the state. Parameters and other buffers are constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind

from relaxlite.errors import ImportModelError, RelaxliteError
from relaxlite.frontend.common.control_flow import ControlFlowBuilder
from relaxlite.frontend.torch import signature
from relaxlite.frontend.torch.binding import bind_arguments
from relaxlite.frontend.torch.dtypes import dtype_name, to_numpy
from relaxlite.frontend.torch.node import Complex, Node
from relaxlite.frontend.torch.places import place_of, source_code
from relaxlite.frontend.torch.registry import find_converter
from relaxlite.frontend.torch.survey import name_of
from relaxlite.frontend.torch.symbols import SymbolTable, sympy_of
from relaxlite.ir import ops
from relaxlite.ir.attributes import CALL_STRUCTURE, DONATED, EXPORTED, INPUT_NAMES, OUTPUT_NAMES, STATE
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, AttrValue, Constant, Expr, Function, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType
from relaxlite.runtime.structure import INITIAL_STATE

DimNames = Mapping[tuple[str, int], str]  # (placeholder, axis) -> the name that the user gave
_LARGE_STATE = 1 << 14  # bytes; a larger state of equal elements is filled in, not stored
_MUTATIONS = tuple(
    kind
    for name in ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION")
    if (kind := getattr(OutputKind, name, None)) is not None
)


class ProgramImporter:
    """Imports one functional program; holds what its graph and subgraphs share."""

    def __init__(self, program: ExportedProgram, names: DimNames | None = None) -> None:
        self.program, self.names = program, names or {}
        self.bb = BlockBuilder()
        self.symbols = SymbolTable(program.range_constraints, self.bb)
        self.flow = ControlFlowBuilder(self.bb, self.symbols.fresh, self.symbols.scope)
        self._values: list[dict[torch.fx.Node, Any]] = [{}]
        self._constants: dict[tuple[object, ...], Constant] = {}
        self._reported: RelaxliteError | None = None
        self._params: list[Var] = []
        self._state: list[tuple[str, torch.Tensor, Var]] = []
        self._inputs: list[signature.Leaf] = []  # one for each leaf of the user's arguments
        self._sizes: list[tuple[Var, Any, str]] = []  # integer arguments, and the symbols that they bind

    def run(self) -> IRModule:
        """Import the program."""
        self._define_inputs()
        with self.bb.body() as scope:
            for param, symbol, name in self._sizes:
                self._bind_size(param, symbol, name)
            outputs = self.nodes(self.program.graph_module)
            results, leaves, updates = self._results(outputs)
            written = [param for param, _ in updates]
            fields = tuple(self.bb.leaf(x) for x in (*results, *(value for _, value in updates)))
            self.bb.result(fields[0] if len(fields) == 1 else Tuple(fields))
        params = (*self._params, *(param for _, _, param in self._state))
        attrs: dict[str, AttrValue] = {
            INPUT_NAMES: tuple(p.name for p in params),
            OUTPUT_NAMES: tuple(leaf.name for leaf in leaves if leaf.is_tensor)
            + tuple(f"{p.name}.new" for p in written),
            CALL_STRUCTURE: signature.structure_text(self.program, self._inputs, leaves),
        }
        if updates:
            attrs[DONATED] = tuple(params.index(p) for p in written)
        if self._state:
            attrs[STATE] = tuple(name for name, _, _ in self._state)
        functions = {"main": Function(params, self.bb.finish(scope), Attrs(attrs))}
        if self._state:
            functions[INITIAL_STATE] = self._initial_state()
        return IRModule(functions, Attrs({"producer": f"torch {torch.__version__}"}))

    # inputs

    def _define_inputs(self) -> None:
        program, mutated = self.program, set()
        for spec in program.graph_signature.output_specs:
            if spec.kind in _MUTATIONS and spec.kind != OutputKind.USER_INPUT_MUTATION:
                mutated.add(spec.target)
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
            self._values[0][node] = self._input(node, spec, spec.target in mutated)

    def _input(self, node: torch.fx.Node, spec: InputSpec, is_state: bool) -> Any:
        if spec.kind == InputKind.USER_INPUT:
            return self._user_input(node, spec)
        if spec.kind == InputKind.TOKEN:
            return None
        name = str(spec.target)
        if spec.kind == InputKind.CUSTOM_OBJ:
            raise ImportModelError(f"'{name}' is a custom object of TorchScript, which is not supported")
        tensor = self._stored(name)
        if not is_state:
            return self.constant(tensor, name)
        param = Var(self.bb.unique_name(name), self._stored_type(tensor))
        self._state.append((name, tensor, param))
        return Complex(param) if tensor.is_complex() else param

    def _stored(self, name: str) -> torch.Tensor:
        """Return a parameter, buffer or constant of the program. ImportModelError if it is missing."""
        for table in (self.program.state_dict, self.program.constants):
            if isinstance(table.get(name), torch.Tensor):
                return table[name]
        raise ImportModelError(f"the weight '{name}' is missing in the program; save it again with its state_dict")

    def _stored_type(self, tensor: torch.Tensor) -> TensorType:
        shape = (*tensor.shape, 2) if tensor.is_complex() else tuple(tensor.shape)
        return TensorType.of(shape, dtype_name(tensor.dtype))

    def _user_input(self, node: torch.fx.Node, spec: InputSpec) -> Any:
        value, name = node.meta.get("val"), node.name
        if isinstance(spec.arg, ConstantArgument) or value is None:
            constant = getattr(spec.arg, "value", value)
            self._inputs.append(signature.Leaf("const", value=constant))
            return constant
        if isinstance(value, torch.Tensor):
            dims = [self.symbols.input_dim(d, self._dim_name(node, k)) for k, d in enumerate(value.shape)]
            shape = (*dims, *((sym(2),) if value.is_complex() else ()))
            param = Var(self.bb.unique_name(name), TensorType.of(shape, dtype_name(value.dtype)))
            self._inputs.append(signature.Leaf("complex" if value.is_complex() else "tensor", name=param.name))
            self._params.append(param)
            return Complex(param) if value.is_complex() else param
        if isinstance(value, torch.SymInt):
            param = Var(self.bb.unique_name(name), TensorType.of((), "int64"))
            self._inputs.append(signature.Leaf("int", name=param.name))
            self._params.append(param)
            self._sizes.append((param, sympy_of(value), name))
            return value
        if isinstance(value, torch.SymFloat | torch.SymBool):
            dtype = "float64" if isinstance(value, torch.SymFloat) else "bool"
            param = Var(self.bb.unique_name(name), TensorType.of((), dtype))
            self._inputs.append(signature.Leaf("float" if dtype == "float64" else "bool", name=param.name))
            self._params.append(param)
            self.symbols.define_float(sympy_of(value), param)
            return value
        raise ImportModelError(f"argument '{name}' is {type(value).__name__}; tensors and numbers are supported")

    def _dim_name(self, node: torch.fx.Node, axis: int) -> str:
        return self.names.get((node.name, axis)) or f"{node.name}_dim{axis}"

    def _bind_size(self, param: Var, symbol: Any, name: str) -> None:
        """Read an integer argument; where a dimension gave its symbol already, check that both agree."""
        vector = self.bb.emit(ops.reshape(param, (1,)))
        size = self.symbols.expr(symbol) if self.symbols.knows(symbol) else self.symbols.define(symbol, name)
        self.bb.match_shape(self.bb.emit(ops.tensor_to_shape(vector)), (size,))

    def _initial_state(self) -> Function:
        with self.bb.body() as scope:
            values = [self._initial_value(to_numpy(tensor), name) for name, tensor, _ in self._state]
            leaves = tuple(self.bb.leaf(x) for x in values)
            self.bb.result(leaves[0] if len(leaves) == 1 else Tuple(leaves))
        names = tuple(name for name, _, _ in self._state)
        return Function((), self.bb.finish(scope), Attrs({OUTPUT_NAMES: names, EXPORTED: True}))

    def _initial_value(self, array: np.ndarray, name: str) -> Expr:
        if array.nbytes >= _LARGE_STATE and (array == array.flat[0]).all():
            return ops.full(array.shape, Constant.of(array.reshape(-1)[0]))
        return Constant.of(array, name=name)

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

    # nodes

    @contextmanager
    def scope(self, values: Mapping[torch.fx.Node, Any]) -> Iterator[None]:
        """Open a scope of nodes' values, for a subgraph."""
        self._values.append(dict(values))
        yield
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
            if error is self._reported:
                raise
            raise self._located(str(error), node) from error
        except Exception as error:
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
        converter = find_converter(name)
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

    def _results(self, outputs: list[Any]) -> tuple[list[Expr], list[signature.Leaf], list[tuple[Var, Expr]]]:
        """Return the user's results with their leaves, and the new contents of written inputs."""
        results: list[Expr] = []
        leaves: list[signature.Leaf] = []
        updates: dict[Var, Expr] = {}
        by_name = {node.name: value for node, value in self._values[0].items()}
        state = {name: param for name, _, param in self._state}
        for spec, value in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            if spec.kind in _MUTATIONS:
                is_input = spec.kind == OutputKind.USER_INPUT_MUTATION
                param = by_name[str(spec.target)] if is_input else state[str(spec.target)]
                new = value.parts if isinstance(value, Complex) else value
                key = param.parts if isinstance(param, Complex) else param
                assert isinstance(key, Var)
                updates[key] = new
            elif spec.kind == OutputKind.USER_OUTPUT:
                name = getattr(spec.arg, "name", None) or f"output_{len(leaves)}"
                leaves.append(self._result(value, name, results))
        return results, leaves, list(updates.items())

    def _result(self, value: Any, name: str, results: list[Expr]) -> signature.Leaf:
        if isinstance(value, Complex):
            results.append(value.parts)
            return signature.Leaf("complex", name=name)
        if isinstance(value, Var | Constant):
            results.append(value)
            return signature.Leaf("tensor", name=name)
        kind, dtype = _SCALARS.get(type(value)) or (("int", "int64") if isinstance(value, SymExpr) else (None, ""))
        if kind is None:
            return signature.Leaf("const", value=value)
        results.append(self.symbols.tensor(value, dtype))
        return signature.Leaf(kind, name=name)


_SCALARS: dict[type, tuple[str, str]] = {
    torch.SymInt: ("int", "int64"),
    torch.SymFloat: ("float", "float64"),
    torch.SymBool: ("bool", "bool"),
}


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value
