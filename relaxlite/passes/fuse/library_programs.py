"""Lower a subgraph to the loops of one program: legalized and fused as a module of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from relaxlite.ir.builder import result_types
from relaxlite.ir.expr import Block, Body, Call, Constant, Expr, Function, Let, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Allocate, Buffer, Check, Stmt, TensorProgram, seq
from relaxlite.ir.program_visitor import Substitute, loads
from relaxlite.ir.types import TensorType, TupleType, Type
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.fuse_ops import fuse_ops
from relaxlite.passes.fuse.fuse_programs import fuse_programs
from relaxlite.passes.loops.legalize import legalize
from relaxlite.passes.loops.pattern import top_stages
from relaxlite.records import dataclass
from relaxlite.target import Target


@dataclass(frozen=True, slots=True)
class LoweredSubgraph:
    """Loops over operands in the symbols of the enclosing function.

    `buffers` holds the buffer of each operand, large constants included.
    """

    buffers: Mapping[Expr, Buffer]
    outputs: tuple[Buffer, ...]
    checks: tuple[Stmt, ...]  # required by any implementation, the library routine too
    body: Stmt

    def with_buffers(self, buffers: Mapping[Expr, Buffer], outputs: tuple[Buffer, ...]) -> Stmt | None:
        """The loops with other buffers; None where a buffer is missing."""
        if any(operand not in buffers for operand in self.buffers):
            return None
        renamed = {buffer: buffers[operand] for operand, buffer in self.buffers.items()}
        renamed |= dict(zip(self.outputs, outputs, strict=True))
        return Substitute({}, renamed, fresh=True).stmt(self.body)


@dataclass(frozen=True, slots=True)
class Subgraph:
    """Subgraph that ends in the call `root`: `inner` are the variables between the root and the operands."""

    root: Call
    inner: Collection[Var]
    bound: Mapping[Var, Expr]

    def loops(self, operands: Mapping[Expr, str], target: Target) -> LoweredSubgraph | str:
        """Lower the subgraph to loops.

        `operands` maps operands to names of their buffers. Returns the reason as text where that is impossible.
        """
        params = {operand: Var(name, operand.ty) for operand, name in operands.items()}
        copied = self._copy(params)
        if isinstance(copied, str):
            return copied
        module = IRModule({"main": Function(tuple(params.values()), copied)})
        lowered = fuse_programs(fuse_ops(legalize(module), PassContext(target, verify=False, dump_dir=None)))
        main = lowered["main"]
        assert isinstance(main, Function)
        compose = _Compose(lowered, params.values())
        for binding in main.body.bindings():
            assert isinstance(binding, Let)
            problem = compose.add(binding)
            if problem is not None:
                return problem
        return compose.finish(main.body.result, params)

    def _copy(self, params: Mapping[Expr, Var]) -> Body | str:
        """The ops of the subgraph over parameters; the reason as text where an op reads another variable."""
        copies: dict[Expr, Expr] = dict(params)
        lets: list[Let] = []
        missing: list[str] = []

        def operand(expr: Expr) -> Expr:
            if expr not in copies and isinstance(expr, Var):
                if expr in self.bound and expr in self.inner:
                    copies[expr] = emit(self.bound[expr], expr.name)
                else:
                    missing.append(expr.name)
            return copies.get(expr, expr)

        def emit(expr: Expr, name: str) -> Expr:
            if isinstance(expr, Call):
                value_copy: Expr = Call(expr.callee, tuple(map(operand, expr.args)), expr.attrs, expr.sym_args, expr.ty)
            elif isinstance(expr, TupleGetItem):
                value_copy = TupleGetItem(operand(expr.value), expr.index)
            else:
                return operand(expr)
            lets.append(Let(Var(name, expr.ty), value_copy))
            return lets[-1].var

        result = emit(self.root, "out")
        if missing:
            return f"its pattern also matches {missing[0]}, which is no operand of the rule; name it among the operands"
        return Body((Block(tuple(lets)),), result)


class _Compose:
    """Builder that concatenates the called programs of a function into the loops of one program."""

    def __init__(self, module: IRModule, params: Iterable[Var]) -> None:
        self._module = module
        self._buffers: dict[Expr, Buffer | tuple[Buffer, ...]] = {p: _buffer(p.name, p.ty) for p in params}
        self._constants: dict[Expr, Buffer] = {}
        self._results: list[Buffer] = []
        self._stmts: list[Stmt] = []

    def add(self, binding: Let) -> str | None:
        """Append the program of a binding; the reason as text where that is impossible."""
        value = binding.value
        if isinstance(value, TupleGetItem):
            fields = self._buffers[value.value]
            assert isinstance(fields, tuple)
            self._buffers[binding.var] = fields[value.index]
            return None
        program = self._module.get(value.callee.name) if isinstance(value, Call) else None
        if not isinstance(value, Call) or not isinstance(program, TensorProgram):
            callee = value.callee.name if isinstance(value, Call) else type(value).__name__
            return f"{callee} is not computed by loops, so there would be nothing to fall back on"
        outputs = tuple(_buffer(f"{binding.var.name}{k or ''}", ty) for k, ty in enumerate(result_types(value.ty)))
        self._buffers[binding.var] = outputs if isinstance(value.ty, TupleType) else outputs[0]
        self._results += outputs
        arguments = [*map(self._operand, value.args), *outputs]
        symbols = dict(zip(program.symbols, value.sym_args, strict=True))
        substitution = Substitute(symbols, dict(zip(program.params, arguments, strict=True)), fresh=True)
        self._stmts += [substitution.stmt(s) for s in top_stages(program)]
        return None

    def _operand(self, expr: Expr) -> Buffer:
        if isinstance(expr, Constant):
            self._buffers[expr] = self._constants.setdefault(expr, _buffer(expr.name or "constant", expr.ty))
        result = self._buffers[expr]
        assert isinstance(result, Buffer)
        return result

    def finish(self, result: Expr, params: Mapping[Expr, Var]) -> LoweredSubgraph | str:
        """The concatenated loops; the reason as text where the result is an operand."""
        result_buffers = self._buffers[result]
        outputs = result_buffers if isinstance(result_buffers, tuple) else (result_buffers,)
        if any(buffer not in self._results for buffer in outputs):
            return "its result is one of its operands"
        inner = [buffer for buffer in self._results if buffer not in outputs]
        checks: list[Stmt] = [
            s for s in self._stmts if isinstance(s, Check) and not any(load.buffer in inner for load in loads(s))
        ]
        body = seq(*(s for s in self._stmts if s not in checks))
        for buffer in inner:
            body = Allocate(buffer, body)
        buffers = {operand: self._operand(param) for operand, param in params.items()} | self._constants
        return LoweredSubgraph(buffers, outputs, tuple(checks), body)


def _buffer(name: str, ty: Type) -> Buffer:
    assert isinstance(ty, TensorType) and ty.shape is not None
    return Buffer(name, ty.shape, ty.dtype)
