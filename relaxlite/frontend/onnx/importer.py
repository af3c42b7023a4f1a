"""Conversion of an ONNX graph, with its functions and subgraphs, into one IRModule."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import onnx
from onnx import AttributeProto

from relaxlite.errors import ImportModelError, RelaxliteError
from relaxlite.frontend.common.control_flow import ControlFlowBuilder
from relaxlite.frontend.onnx import border
from relaxlite.frontend.onnx.assumptions import Assumptions
from relaxlite.frontend.onnx.functions import Expansion, expand_model_function, expand_schema
from relaxlite.frontend.onnx.loading import LoadedModel, load_model
from relaxlite.frontend.onnx.narrow_types import (
    CONTROL_FLOW_OPS,
    CONVERSION_OPS,
    DATA_MOVEMENT_OPS,
    SHAPE_QUERY_OPS,
    TEXT_OPS,
    NarrowType,
)
from relaxlite.frontend.onnx.node import Node
from relaxlite.frontend.onnx.registry import Result, canonical_domain, find_converter
from relaxlite.frontend.onnx.shape_values import ShapeResolver
from relaxlite.frontend.onnx.symbols import Bounds, DynamicShapes, SymbolTable, input_types
from relaxlite.frontend.onnx.tensors import TensorReader, narrow_type, sparse_constant
from relaxlite.frontend.onnx.validation import (
    OpSurvey,
    check_graph,
    check_opsets,
    function_key,
    max_inputs,
    node_label,
    opset_versions,
    topological_order,
)
from relaxlite.garbage import with_gc_disabled
from relaxlite.ir.attributes import STRINGS
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, AttrValue, Constant, Expr, Function, GlobalVar, Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.types import TensorType

_MAX_ATTEMPTS = 16  # imports with different `Assumptions`
_MAX_EXPANSIONS = 64  # nesting depth of inlined functions


@with_gc_disabled
def from_onnx(
    model: str | Path | bytes | onnx.ModelProto,
    *,
    dynamic_shapes: DynamicShapes | None = None,
    bounds: Bounds | None = None,
) -> IRModule:
    """Import an ONNX model as an IRModule whose entry function is "main".

    model: a path, the bytes of a file, or a ModelProto. External data is read from the folder of the path.
    dynamic_shapes: overrides dimensions of inputs, `{"x": {0: "batch", 2: 224}}` or `{"x": ["batch", None, 224]}`: a
        name makes a dimension symbolic (equal names are equal sizes), a number fixes its size, None keeps it.
    bounds: sizes that symbols may have, `{"batch": "1..64"}` or `{"batch": (1, 64)}`; checked when the model runs.

    Raises ImportModelError (UnsupportedOpsError lists all unknown ops at once), InvalidArgumentError for wrong options.
    """
    loaded = load_model(model)
    try:
        return ModelImporter(loaded).run(dynamic_shapes, bounds)
    except RelaxliteError:
        raise
    except Exception as error:  # a damaged file may have fields of any type and value
        raise ImportModelError(f"{loaded.name} cannot be imported ({type(error).__name__}: {error})") from error


class ModelImporter:
    """Imports one model; holds what its graphs, functions and subgraphs share."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.proto = loaded.proto
        self.name = loaded.name
        self.reader = TensorReader(loaded.path, loaded.content)
        self.opsets = opset_versions(self.proto.opset_import)
        self.assumptions = Assumptions()
        self.functions = {function_key(f): f for f in self.proto.functions}

    def run(self, dynamic_shapes: DynamicShapes | None, bounds: Bounds | None) -> IRModule:
        check_opsets(self.opsets)
        check_graph(self.proto.graph)
        survey = OpSurvey(self.functions)
        survey.visit(self.proto.graph.node, self.opsets)
        survey.raise_if_any()
        return self._import_with_choices(dynamic_shapes, bounds)

    def _import_with_choices(self, dynamic_shapes: DynamicShapes | None, bounds: Bounds | None) -> IRModule:
        """Import with the first combination of choices that succeeds and gives outputs of the declared ranks.

        If no combination does both, the first that succeeds: declared ranks are often wrong.
        """
        first_error: ImportModelError | None = None
        first_module: IRModule | None = None
        for _ in range(_MAX_ATTEMPTS):
            try:
                module = self._import_graph(dynamic_shapes, bounds)
                if _has_declared_ranks(module, self.proto.graph):
                    return module
                first_module = first_module or module
            except ImportModelError as error:
                first_error = first_error or error
            if not self.assumptions.next():
                break
        if first_module is None:
            assert first_error is not None
            raise first_error
        return first_module

    def _import_graph(self, dynamic_shapes: DynamicShapes | None, bounds: Bounds | None) -> IRModule:
        graph, table, bb = self.proto.graph, SymbolTable(bounds), BlockBuilder()
        initialized = {t.name for t in graph.initializer} | {s.values.name for s in graph.sparse_initializer}
        inputs = [i for i in graph.input if i.name not in initialized]
        types = input_types(inputs, dynamic_shapes, table)
        importer = GraphImporter(self, bb, ShapeResolver(bb, table), table)
        values = [border.input_value(i, ty, bb, table, importer.narrow) for i, ty in zip(inputs, types, strict=True)]
        with bb.body() as scope:
            importer.define_all({v.name: v.value for v in values})
            values_of_outputs = importer.graph(graph)
            results = [
                border.output_value(o, x, bb, importer.narrow)
                for o, x in zip(graph.output, values_of_outputs, strict=True)
            ]
            outputs = [bb.leaf(part) for v in results for part in v.parts]
            bb.result(outputs[0] if len(outputs) == 1 else Tuple(tuple(outputs)))
        attrs = dict(border.signature(values, results))
        if self.reader.strings:
            attrs[STRINGS] = tuple(self.reader.strings)
        params = tuple(part for v in values for part in v.parts if isinstance(part, Var))
        main = Function(params, bb.finish(scope), Attrs(attrs))
        return IRModule({"main": main, **dict(bb.module().items())}, self._metadata())

    def _metadata(self) -> Attrs:
        proto = self.proto
        values: dict[str, AttrValue] = {
            "producer": f"{proto.producer_name} {proto.producer_version}".strip(),
            "ir_version": proto.ir_version,
            "opset": self.opsets.get(""),
            "assumptions": self.assumptions.messages(),
            "metadata": tuple((entry.key, entry.value) for entry in proto.metadata_props),
        }
        if self.reader.external:
            values["external_data"] = tuple(self.reader.external)
        return Attrs(values)


def _has_declared_ranks(module: IRModule, graph: onnx.GraphProto) -> bool:
    result = module.functions()["main"].body.result
    fields = result.fields if isinstance(result, Tuple) else (result,)
    if len(fields) != len(graph.output):  # sequences and optionals
        return True
    for info, value in zip(graph.output, fields, strict=True):
        declared, ty = info.type.tensor_type, value.ty
        if declared.HasField("shape") and isinstance(ty, TensorType) and ty.rank != len(declared.shape.dim):
            return False
    return True


class GraphImporter:
    """Converts the nodes of a graph in topological order. Subgraphs see the names of their enclosing graphs."""

    def __init__(self, model: ModelImporter, bb: BlockBuilder, resolver: ShapeResolver, symbols: SymbolTable) -> None:
        self.model, self.bb, self.resolver, self.symbols = model, bb, resolver, symbols
        self.reader = model.reader
        self._scopes: list[dict[str, Expr]] = [{}]
        self._opsets: Mapping[str, int] = model.opsets
        self._arguments: Mapping[str, AttributeProto] | None = None  # of the function being inlined
        self._path: tuple[str, ...] = ()  # labels of the enclosing nodes
        self._expansions = 0
        self._reported: ImportModelError | None = None
        self.flow = ControlFlowBuilder(bb, symbols.fresh, resolver.scope)
        self.routines: dict[object, GlobalVar] = {}  # of operators that run on the host
        self.narrow: dict[Expr, NarrowType] = {}  # element types that the IR lacks

    # names

    def define_all(self, values: Mapping[str, Expr]) -> None:
        self._scopes[-1].update(values)

    def lookup(self, name: str) -> Expr | None:
        """Return the value of a name, or None for an omitted optional input, whose name is empty."""
        if not name:
            return None
        for scope in reversed(self._scopes):
            if name in scope:
                return scope[name]
        raise ImportModelError(f"'{name}' is not defined by any input, initializer or node")

    def _is_visible(self, name: str) -> bool:
        return any(name in scope for scope in self._scopes)

    @contextmanager
    def scope(self, values: Mapping[str, Expr]) -> Iterator[None]:
        """Open a nested scope: it sees the enclosing names, and its own names end with it."""
        self._scopes.append(dict(values))
        with self.resolver.scope():
            yield
        self._scopes.pop()

    # graphs

    def graph(self, graph: onnx.GraphProto) -> list[Expr]:
        """Convert a graph into the body under construction and return its outputs, which may be sequences."""
        scope = self._scopes[-1]
        for tensor in graph.initializer:
            scope[tensor.name] = self.constant(tensor)
        for sparse in graph.sparse_initializer:
            scope[sparse.values.name] = sparse_constant(sparse, self.reader)
        self.nodes(graph.node)
        return [self._output(o.name) for o in graph.output]

    def constant(self, tensor: onnx.TensorProto) -> Constant:
        constant, narrow = self.reader.constant(tensor), narrow_type(tensor.data_type)
        if narrow is not None:
            self.narrow[constant] = narrow
        return constant

    def _output(self, name: str) -> Expr:
        value = self.lookup(name)
        if value is None:
            raise ImportModelError("an output of the graph has no name")
        return value

    def nodes(self, nodes: Sequence[onnx.NodeProto]) -> None:
        for index, proto in topological_order(nodes, self._is_visible):
            label = node_label(proto, index)
            outer_loc = self.bb.loc
            self.bb.loc = " in ".join((label, *self._path[::-1]))
            self._convert(proto, label)
            self.bb.loc = outer_loc

    def _convert(self, proto: onnx.NodeProto, label: str) -> None:
        domain = canonical_domain(proto.domain)
        opset = self._opsets.get(domain, 1)
        inputs: list[Expr | None] = []
        try:
            inputs = [self.lookup(name) for name in proto.input]
            narrow = self._narrow_input(proto, inputs)
            node = Node(proto, label, inputs, self._attributes(proto), opset, self)
            result = self._run(node, domain)
            node.check_all_read()
            self._define_outputs(proto, result, narrow)
        except RelaxliteError as error:
            if error is self._reported:  # by a nested node
                raise
            raise self._located_error(str(error), proto, inputs) from error
        except Exception as error:  # a malformed node is an error of the model, not a crash
            raise self._located_error(
                f"cannot be converted ({type(error).__name__}: {error})", proto, inputs
            ) from error

    def _run(self, node: Node, domain: str) -> Result:
        function = self.model.functions.get(function_key(node.proto))
        if function is not None:
            return self._inline(node, expand_model_function(function, node))
        limit = max_inputs(domain, node.op_type, node.opset)
        if len(node.inputs) > limit and any(x is not None for x in node.inputs[limit:]):
            raise ImportModelError(
                f"{node.op_type} takes at most {limit} input{'s' * (limit != 1)}, got {len(node.inputs)}"
            )
        converter = find_converter(domain, node.op_type, node.opset)
        if converter is not None:
            return converter(node)
        return self.expand(node)

    def _located_error(self, message: str, proto: onnx.NodeProto, inputs: Sequence[Expr | None]) -> ImportModelError:
        lines = [f"{self.bb.loc}: {message}"]
        for name, value in zip(proto.input, inputs, strict=False):
            kind = "absent" if value is None else "a sequence" if isinstance(value, Tuple) else value.ty
            lines.append(f"  input '{name}': {kind}")
        self._reported = ImportModelError("\n".join(lines))
        return self._reported

    def _attributes(self, proto: onnx.NodeProto) -> dict[str, AttributeProto]:
        """Return the node's attributes by name; references to attributes of the enclosing function are resolved."""
        attributes = {}
        for attribute in proto.attribute:
            if attribute.name in attributes:
                raise ImportModelError(f"attribute '{attribute.name}' is given twice")
            if not attribute.ref_attr_name:
                attributes[attribute.name] = attribute
            elif attribute.ref_attr_name in (self._arguments or {}):
                attributes[attribute.name] = (self._arguments or {})[attribute.ref_attr_name]
        return attributes

    def _narrow_input(self, proto: onnx.NodeProto, inputs: Sequence[Expr | None]) -> NarrowType | None:
        """Return the narrow type that the outputs inherit from the inputs, or None.

        Raises ImportModelError for an op that takes no inputs of narrow types.
        """
        narrow = next((self.narrow[x] for x in inputs if x is not None and x in self.narrow), None)
        if narrow is None or proto.op_type in DATA_MOVEMENT_OPS:
            return narrow
        if (
            function_key(proto) in self.model.functions
            or proto.op_type in CONVERSION_OPS
            or proto.op_type in CONTROL_FLOW_OPS
            or proto.op_type in SHAPE_QUERY_OPS
            or (narrow.is_text and (proto.op_type in TEXT_OPS or proto.domain == "ai.onnx.ml"))
        ):
            return None
        raise ImportModelError(f"{proto.op_type} of {narrow.name} is not supported: cast or dequantize it first")

    def _define_outputs(self, proto: onnx.NodeProto, result: Result, narrow: NarrowType | None) -> None:
        values = result if isinstance(result, tuple) else (result,)
        if len(values) < len(proto.output):
            raise ImportModelError(
                f"the node has {len(proto.output)} outputs, but only {len(values)} of them can be computed"
            )
        for name, value in zip(proto.output, values, strict=False):
            if not name:
                continue
            if value is None:
                raise ImportModelError(f"output '{name}' is not supported")
            # Sequences exist at import only, as tuples of leaves.
            leaf = value if isinstance(value, Tuple) else self.resolver.with_named_sizes(self.bb.leaf(value, name))
            self._scopes[-1][name] = leaf
            own = self.narrow.get(value, narrow)
            if own is not None:
                self.narrow[leaf] = own

    # functions

    def expand(self, node: Node) -> Result:
        """Inline the function body that the ONNX specification defines for the op."""
        return self._inline(node, expand_schema(node, canonical_domain(node.proto.domain)))

    def _inline(self, node: Node, expansion: Expansion) -> Result:
        """Inline a function with the node's inputs and the expansion's attributes."""
        self._expansions += 1
        if self._expansions > _MAX_EXPANSIONS:
            raise ImportModelError(
                f"function {node.op_type} contains itself, or more than {_MAX_EXPANSIONS} functions inside each other"
            )
        function, arguments = expansion.function, expansion.arguments
        saved = self._scopes, self._opsets, self._arguments, self._path
        values = {name: node.optional(k) for k, name in enumerate(function.input)}
        self._scopes = [{name: value for name, value in values.items() if value is not None}]
        self._opsets = {**self._opsets, **opset_versions(function.opset_import)}
        self._arguments, self._path = arguments, (*self._path, node.label)
        absent = frozenset(name for name, value in values.items() if value is None)
        self.nodes([_without_absent(n, absent) for n in function.node])
        outputs = tuple(self._scopes[-1].get(name) for name in function.output)
        self._scopes, self._opsets, self._arguments, self._path = saved
        self._expansions -= 1
        return outputs

    @contextmanager
    def opset_of_domain(self, domain: str, version: int) -> Iterator[None]:
        """Convert nodes by another opset version of a domain."""
        saved = self._opsets
        self._opsets = {**saved, domain: version}
        yield
        self._opsets = saved

    # subgraphs

    def subgraph(self, graph: onnx.GraphProto, values: Sequence[Expr], label: str) -> list[Expr]:
        """Convert a subgraph into the body under construction, with `values` as its inputs."""
        if len(values) != len(graph.input):
            raise ImportModelError(
                f"subgraph '{graph.name}' has {len(graph.input)} inputs, but gets {len(values)} values"
            )
        saved = self._path
        self._path = (*self._path, label)
        outer_loc = self.bb.loc
        with self.scope({i.name: v for i, v in zip(graph.input, values, strict=True)}):
            outputs = self.graph(graph)
        self._path, self.bb.loc = saved, outer_loc
        return outputs


def _without_absent(node: onnx.NodeProto, absent: frozenset[str]) -> onnx.NodeProto:
    """Return the node without references to the function's absent inputs."""
    if not absent.intersection(node.input):
        return node
    changed = onnx.NodeProto()
    changed.CopyFrom(node)
    changed.input[:] = ["" if name in absent else name for name in node.input]
    return changed
