"""Lift workspaces of programs to parameters that the caller allocates, so that memory planning covers them.

    def argsort(x, out):                                def argsort(x, out, merged):
        with allocate((n,), "int64") as merged: ...         ...
                                                =>
    call(argsort, x, y)                                 merged = memory.alloc_tensor(shape(n), dtype="int64")
                                                        call(argsort, x, y, merged)

A workspace is an output without uses: it dies at the call, and its range of the arena is free for the next tensor.
Small workspaces of constant size go to the stack instead. A workspace in a parallel loop exists once per thread, and
the number of threads is known only at run time: it stays in the program and comes from a pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from relaxlite import dtypes
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import WORKSPACES
from relaxlite.ir.expr import Attrs, Call, Expr, GlobalVar, ShapeValue, Var
from relaxlite.ir.launch import is_launch
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Allocate, Binder, Buffer, For, IfThenElse, Stmt, TensorProgram
from relaxlite.ir.program_visitor import ProgramRewriter, Substitute, stmt_children, walk_stmts
from relaxlite.ir.signatures import is_destination_passing
from relaxlite.ir.symbolic import SymExpr, as_int, product, substitute
from relaxlite.ir.visitor import Rewriter, map_functions
from relaxlite.passes.context import PassContext
from relaxlite.records import dataclass

MAX_STACK_BYTES = 4 * 1024  # of a workspace that goes to the stack
MAX_LOCAL_BYTES = 64 * 1024  # local buffers up to this size are on the stack after code generation

_ANALYZER = Analyzer()


def lift_workspaces(module: IRModule, context: PassContext) -> IRModule:
    """Replace workspaces of programs by parameters that the callers allocate."""
    definitions: dict[str, Definition] = dict(module)
    lifted: dict[str, tuple[Buffer, ...]] = {}
    for name, program in module.programs().items():
        result = _workspaces(name, program, context)
        if result.lifted or result.on_stack:
            definitions[name] = _with_parameters(program, result)
            lifted[name] = result.lifted
    if not lifted:
        return module
    return map_functions(module.updated(definitions), lambda f: _PassWorkspaces(module, lifted).function(f))


@dataclass(frozen=True, slots=True)
class _Workspaces:
    """Workspaces of a program that become parameters, and those that move to the stack."""

    lifted: tuple[Buffer, ...]
    on_stack: tuple[Buffer, ...]


def _workspaces(name: str, program: TensorProgram, context: PassContext) -> _Workspaces:
    lifted: dict[Buffer, None] = {}
    on_stack: dict[Buffer, None] = {}
    unliftable: set[Buffer] = set()
    for allocation, path in _allocations(program.body, ()):
        buffer = allocation.buffer
        nbytes = product(buffer.shape) * dtypes.itemsize(buffer.dtype)
        size = as_int(nbytes)
        if buffer in unliftable or buffer in lifted or (buffer.scope == "local" and (size or 0) <= MAX_LOCAL_BYTES):
            continue
        has_constant_shape = None not in map(as_int, buffer.shape)  # (n, 0) has constant size 0, but no constant shape
        if has_constant_shape and (size or 0) <= MAX_STACK_BYTES and not _has_parallel(allocation.body):
            on_stack[buffer] = None
            continue
        reason = _obstacle(buffer, path, program)
        if reason is None:
            lifted[buffer] = None
        else:
            unliftable.add(buffer)
        text = reason or "it is allocated with the tensors of the caller"
        context.decide("lift_workspaces", f"{buffer.name} of {name}", reason is None, text, bytes=nbytes)
    return _Workspaces(tuple(lifted), tuple(on_stack))


def _allocations(stmt: Stmt, path: tuple[Stmt, ...]) -> Iterator[tuple[Allocate, tuple[Stmt, ...]]]:
    """Allocations of a statement outside of launches, with the enclosing statements from the outside in."""
    if is_launch(stmt):
        return
    if isinstance(stmt, Allocate):
        yield stmt, path
    for child in stmt_children(stmt):
        yield from _allocations(child, (*path, stmt))


def _has_parallel(stmt: Stmt) -> bool:
    return any(isinstance(s, For) and (s.kind == "parallel" or is_launch(s)) for s in walk_stmts(stmt))


def _obstacle(buffer: Buffer, path: tuple[Stmt, ...], program: TensorProgram) -> str | None:
    """Reason against lifting the workspace, or None."""
    if any(isinstance(s, For) and s.kind == "parallel" for s in path):
        return "each thread has one of its own, and how many there are is known only at run time"
    if any(isinstance(s, For) and s.kind == "vectorized" for s in path):
        return "each lane of a vector has one of its own"
    inner_vars = {s.var for s in path if isinstance(s, Binder)}
    if any(v in inner_vars for d in buffer.shape for v in d.free_vars()):
        return "its size is known only inside of a loop, or by data"
    if any(isinstance(s, IfThenElse) for s in path):
        return "it is needed only under a condition"
    negative = [d for d in buffer.shape if not _ANALYZER.can_prove_le(0, d)]
    return f"it is not proven that its size {negative[0]} is not negative" if negative else None


def _with_parameters(program: TensorProgram, workspaces: _Workspaces) -> TensorProgram:
    """The program with lifted workspaces as last parameters, and small ones as local buffers."""
    parameters = {b: b if b.scope == "global" else replace(b, scope="global") for b in workspaces.lifted}
    local = {b: replace(b, scope="local") for b in workspaces.on_stack}
    body, count = _WithoutAllocations(workspaces.lifted, program.body).stmt(program.body), len(workspaces.lifted)
    changed = {old: new for old, new in {**parameters, **local}.items() if new is not old}
    body = Substitute(buffers=changed).stmt(body) if changed else body
    attrs = Attrs({**program.attrs, WORKSPACES: count}) if count else program.attrs
    params = (*program.params, *parameters.values())
    return replace(program, params=params, body=body, num_outputs=program.num_outputs + count, attrs=attrs)


class _WithoutAllocations(ProgramRewriter):
    """Remove the allocations of some buffers; stops after the last of them."""

    def __init__(self, buffers: tuple[Buffer, ...], body: Stmt) -> None:
        super().__init__()
        self._buffers = frozenset(buffers)
        self._num_remaining = sum(isinstance(s, Allocate) and s.buffer in self._buffers for s in walk_stmts(body))

    def stmt(self, stmt: Stmt) -> Stmt:
        if not self._num_remaining:
            return stmt
        if isinstance(stmt, Allocate) and stmt.buffer in self._buffers:
            self._num_remaining -= 1
            return self.stmt(stmt.body)
        return super().stmt(stmt)


class _PassWorkspaces(Rewriter):
    """Allocate the workspaces at each call and pass them. `module` is the module before the pass."""

    def __init__(self, module: IRModule, lifted: dict[str, tuple[Buffer, ...]]) -> None:
        super().__init__()
        self._module, self._lifted = module, lifted

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar) or not is_destination_passing(value):
            return None
        buffers, program = self._lifted.get(value.callee.name), self._module[value.callee.name]
        if not buffers or not isinstance(program, TensorProgram):
            return None
        symbols = dict(zip(program.symbols, value.sym_args, strict=True))
        workspaces = [self._allocate(buffer, tuple(substitute(d, symbols) for d in buffer.shape)) for buffer in buffers]
        return replace(value, args=(*value.args, *workspaces))

    def _allocate(self, buffer: Buffer, shape: tuple[SymExpr, ...]) -> Var:
        allocation = get_op("memory.alloc_tensor")(ShapeValue(shape), dtype=buffer.dtype)
        return self.bb.emit(allocation, buffer.name)
