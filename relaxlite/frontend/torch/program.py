"""Import of an exported program as one IRModule: inputs, state, weights, results.

`main` takes the tensors among the user's arguments, then the state: the buffers that the model writes. The last results
are the new contents of the state and of the arguments that the model writes (attribute `donated`). `initial_state`
gives the exported contents of the state. Parameters and other buffers are constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, InputSpec, OutputKind

from relaxlite.errors import ImportModelError
from relaxlite.frontend.common.bounds import Bounds
from relaxlite.frontend.common.random_values import hashed
from relaxlite.frontend.torch import signature
from relaxlite.frontend.torch.dtypes import dtype_name, to_numpy
from relaxlite.frontend.torch.importer import GraphImporter
from relaxlite.frontend.torch.node import Complex
from relaxlite.ir import ops
from relaxlite.ir.attributes import (
    CALL_STRUCTURE,
    DONATED,
    EXPORTED,
    INPUT_NAMES,
    OUTPUT_NAMES,
    STATE,
    TIED,
    UNUSED,
    WEIGHTS,
)
from relaxlite.ir.expr import Attrs, AttrValue, Constant, Expr, Function, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymExpr
from relaxlite.ir.types import TensorType
from relaxlite.nesting import INITIAL_STATE

DimNames = Mapping[tuple[str, int], str]  # (placeholder, axis) -> the name that the user gave
_LARGE_STATE = 1 << 14  # bytes; a larger state of equal elements is filled in, not stored
_MUTATIONS = tuple(
    kind
    for name in ("BUFFER_MUTATION", "PARAMETER_MUTATION", "USER_INPUT_MUTATION")
    if (kind := getattr(OutputKind, name, None)) is not None
)


class ProgramImporter(GraphImporter):
    """Imports one functional program."""

    def __init__(self, program: ExportedProgram, names: DimNames | None = None, bounds: Bounds | None = None) -> None:
        super().__init__(program.range_constraints, bounds)
        self.program, self.names = program, names or {}
        self._state: list[tuple[str, torch.Tensor, Var]] = []
        self._inputs: list[signature.Leaf] = []  # one for each leaf of the user's arguments
        self._random: Var | None = None  # state of random operators: seed, number of calls
        self._num_random = 0

    def run(self) -> IRModule:
        """Import the program."""
        self._define_inputs()
        self.symbols.check_bounds_used()
        with self.bb.body() as scope:
            self.read_sizes()
            outputs = self.nodes(self.program.graph_module)
            results, leaves, updates = self._results(outputs)
            if self._random is not None:
                step = Constant.of(np.array([0, 1]))
                updates.append((self._random, self.bb.emit(ops.add(self._random, step))))
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
        return IRModule(functions, Attrs({"producer": f"torch {torch.__version__}", **self._weight_names()}))

    def random_key(self) -> Expr:
        """Return a key that depends on seed, number of the call and number of the random operator.

        The state `random_state`, int64 (seed, number of calls), counts on with each call of the executable.
        """
        if len(self._values) > 1:
            raise ImportModelError("random operators in subgraphs are not supported")
        if self._random is None:
            name = self.bb.unique_name("random_state")
            self._random = Var(name, TensorType.of((2,), "int64"))
            self._state.append((name, torch.zeros(2, dtype=torch.int64), self._random))
        emit = self.bb.emit
        key: Expr = Constant.of(self._num_random, "uint32")
        self._num_random += 1
        for k in range(2):
            number = emit(ops.reshape(emit(ops.slice(self._random, (k,), (1,))), ()))
            key = hashed(emit, emit(ops.bitwise_xor(hashed(emit, key), emit(ops.cast(number, dtype="uint32")))))
        return key

    # inputs

    def _define_inputs(self) -> None:
        program, mutated = self.program, set()
        for spec in program.graph_signature.output_specs:
            if spec.kind in _MUTATIONS and spec.kind != OutputKind.USER_INPUT_MUTATION:
                mutated.add(spec.target)
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        self.name_sizes(placeholders, self._dim_name)
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
            tensor = self.tensor_input(value, name, [self._dim_name(node, k) for k in range(value.dim())])
            kind = "complex" if isinstance(tensor, Complex) else "tensor"
            self._inputs.append(signature.Leaf(kind, name=self._params[-1].name))
            return tensor
        param = self.number_input(value, name)
        self._inputs.append(signature.Leaf(_SCALARS[type(value)][0], name=param.name))
        return value

    def _dim_name(self, node: torch.fx.Node, axis: int) -> str:
        return self.names.get((node.name, axis)) or f"{node.name}_dim{axis}"

    def _initial_state(self) -> Function:
        with self.bb.body() as scope:
            values = [self._initial_value(to_numpy(tensor).copy(), name) for name, tensor, _ in self._state]
            leaves = tuple(self.bb.leaf(x) for x in values)
            self.bb.result(leaves[0] if len(leaves) == 1 else Tuple(leaves))
        names = tuple(name for name, _, _ in self._state)
        return Function((), self.bb.finish(scope), Attrs({OUTPUT_NAMES: names, EXPORTED: True}))

    def _initial_value(self, array: np.ndarray, name: str) -> Expr:
        if array.nbytes >= _LARGE_STATE and (array == array.flat[0]).all():
            return ops.full(array.shape, Constant.of(array.reshape(-1)[0]))
        return Constant.of(array, name=name)

    def _weight_names(self) -> dict[str, AttrValue]:
        """Attributes that name the weights, for `load_weights`: constants, other names of these, unused ones."""
        names: dict[Constant, list[str]] = {}
        for node, spec in zip(self._values[0], self.program.graph_signature.input_specs, strict=False):
            value = self._values[0][node]
            constant = value.parts if isinstance(value, Complex) else value
            if isinstance(constant, Constant) and spec.target in self.program.state_dict:
                names.setdefault(constant, []).append(str(spec.target))
        used = {name for group in names.values() for name in group} | {name for name, _, _ in self._state}
        return {
            WEIGHTS: tuple(str(constant.name) for constant in names),
            TIED: tuple((name, str(c.name)) for c, group in names.items() for name in group if name != c.name),
            UNUSED: tuple([*(n for n in self.program.state_dict if n not in used), *(n for n, _, _ in self._state)]),
        }

    # results

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
