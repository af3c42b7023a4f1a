"""Reference interpreter of modules and tensor programs, with NumPy and plain Python loops; the oracle of tests.

`run_program` runs one tensor program; `Interpreter(module).run("main", x, y)` runs a graph-level function of any stage
before bytecode. Every result is checked against its type in the module.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.python_source import compile_to_python, poisoned
from relaxlite.codegen.simt import run_launches
from relaxlite.errors import ExecutionError, InputError, OutOfBoundsError, ShapeMismatchError
from relaxlite.ir.builder import BlockBuilder, result_types
from relaxlite.ir.expr import (
    Block,
    Body,
    Call,
    Constant,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)  # fmt: skip
from relaxlite.ir.launch import has_launches
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.symbolic import SymExpr, SymVar, evaluate
from relaxlite.ir.types import ObjectType, ShapeType, TensorType, TupleType, Type, defined_symbols

Symbols = dict[SymVar, int]


def run_program(
    program: TensorProgram,
    inputs: Sequence[Any],
    symbols: Mapping[SymVar, int] | Sequence[int] | None = None,
    outputs: Sequence[Any] | None = None,
    name: str = "program",
) -> list[Any]:
    """Run a tensor program with the interpreter; returns the outputs, allocated where `outputs` is None.

    `symbols`: a mapping, a sequence in the program's order, or None to read them off the inputs' shapes. InputError for
    arrays of another shape or dtype, OutOfBoundsError for an access outside of a buffer, KernelFaultError for a program
    of a GPU that depends on the order of its threads.
    """
    values = program_symbols(program, inputs, symbols)
    outputs = program_outputs(program, inputs, values, outputs, name)
    if has_launches(program):
        run_launches(program, (*inputs, *outputs), values)
        return list(outputs)
    kernel = compile_to_python(program, name)
    try:
        with np.errstate(all="ignore"):
            kernel(*inputs, *outputs, *(values[s] for s in program.symbols))
    except IndexError as error:
        raise OutOfBoundsError(f"{name}: a buffer is accessed outside its bounds: {error}") from error
    return list(outputs)


def program_outputs(
    program: TensorProgram, inputs: Sequence[Any], values: Symbols, outputs: Sequence[Any] | None, name: str
) -> Sequence[Any]:
    """Allocate poisoned outputs where `outputs` is None, and check all arrays. InputError for a wrong shape or
    dtype."""
    if outputs is None:
        outputs = [poisoned(tuple(evaluate(d, values) for d in b.shape), b.dtype) for b in program.outputs]
    for buffer, array in zip(program.params, (*inputs, *outputs), strict=True):
        expected = tuple(evaluate(d, values) for d in buffer.shape)
        if array.shape != expected or array.dtype != dtypes.to_numpy(buffer.dtype):
            raise InputError(
                f"{name}: {buffer.name} must be {expected} {buffer.dtype}, got {array.shape} {array.dtype}"
            )
    return outputs


def program_symbols(
    program: TensorProgram, inputs: Sequence[Any], symbols: Mapping[SymVar, int] | Sequence[int] | None
) -> Symbols:
    """Values of a program's symbols; `symbols` as `run_program` takes them."""
    if isinstance(symbols, Mapping):
        return dict(symbols)
    if symbols is not None:
        return dict(zip(program.symbols, symbols, strict=True))
    result: Symbols = {}
    for buffer, array in zip(program.inputs, inputs, strict=True):
        result.update((d, n) for d, n in zip(buffer.shape, array.shape, strict=True) if isinstance(d, SymVar))
    return result


class Interpreter:
    """Interpreter of a module's graph-level functions. `externs`: symbol -> Python function of (inputs..., outputs...).

    `around_call(call, args, run)`: hook around every call of an op, program or library routine, which returns the
    call's result, as by `run(args)`. `program_runner`: replaces `run_program`, with the same arguments.
    """

    def __init__(
        self,
        module: IRModule,
        externs: Mapping[str, Callable[..., Any]] | None = None,
        *,
        around_call: Callable[[Call, list[Any], Callable[[list[Any]], Any]], Any] | None = None,
        program_runner: Callable[..., list[Any]] = run_program,
    ) -> None:
        self.module = module
        self.externs = dict(externs or {})
        self.around_call = around_call
        self.run_program = program_runner

    def run(self, name: str, *args: Any) -> Any:
        """Call a function; arguments and results are arrays, shapes (tuples of ints) and tuples of these.

        InputError for another number or type of arguments, ExecutionError and its subclasses where the call fails.
        """
        function = self.module[name]
        if not isinstance(function, Function):
            raise InputError(f"{name} is not a graph-level function")
        if len(args) != len(function.params):
            raise InputError(f"{name} takes {len(function.params)} arguments, got {len(args)}")
        frame = _Frame(self, {}, {})
        for param, arg in zip(function.params, args, strict=True):
            bind(param.ty, arg, frame.symbols, param.name, define_only=True)
        for param, arg in zip(function.params, args, strict=True):
            frame.assign(param, arg)
        return frame.body(function.body)


class _Frame:
    """Values of variables and symbols in one activation of a function, branch or loop body."""

    def __init__(self, interpreter: Interpreter, values: dict[Var, Any], symbols: Symbols) -> None:
        self.interpreter = interpreter
        self.values = values
        self.symbols = symbols

    def nested(self) -> _Frame:
        return _Frame(self.interpreter, dict(self.values), dict(self.symbols))

    def assign(self, var: Var, value: Any) -> None:
        bind(var.ty, value, self.symbols, var.name)
        self.values[var] = value

    def body(self, body: Body) -> Any:
        for block in body.blocks:
            self._block(block)
        return self.eval(body.result)

    def _block(self, block: Block) -> None:
        for binding in block.bindings:
            if isinstance(binding, Let):
                self.assign(binding.var, self.eval(binding.value))
            else:
                self._match_shape(binding)

    def _match_shape(self, binding: MatchShape) -> None:
        value = self.eval(binding.source)
        shape = value if isinstance(value, tuple) else value.shape
        where = f"{binding.var.name} (at {binding.loc})" if binding.loc else binding.var.name
        match_dims(binding.shape, shape, self.symbols, where)
        self.assign(binding.var, value)

    def eval(self, expr: Expr) -> Any:
        method = _EVALUATE.get(type(expr))
        if method is None:
            raise ExecutionError(f"the interpreter has no meaning for {type(expr).__name__}")
        return method(self, expr)

    def dims(self, dims: Sequence[SymExpr]) -> tuple[int, ...]:
        return tuple(evaluate(d, self.symbols) for d in dims)

    def _var(self, var: Var) -> Any:
        if var not in self.values:
            raise ExecutionError(f"variable {var.name} is used before it is defined")
        return self.values[var]

    def _if(self, branch: If) -> Any:
        taken = branch.then_body if _truth(self.eval(branch.cond)) else branch.else_body
        return self.nested().body(taken)

    def _loop(self, loop: Loop) -> Any:
        cond, values = self.eval(loop.cond), tuple(self.eval(x) for x in loop.inits)
        rebound = {s for p in loop.params for s in defined_symbols(p.ty)}
        while _truth(cond):
            frame = self.nested()
            for symbol in rebound:
                frame.symbols.pop(symbol, None)
            for define_only in (True, False):
                for param, value in zip(loop.params, values, strict=True):
                    bind(param.ty, value, frame.symbols, param.name, define_only=define_only)
            frame.values.update(zip(loop.params, values, strict=True))
            cond, *rest = frame.body(loop.body)
            values = tuple(rest)
        return values

    def _call(self, call: Call) -> Any:
        args = [self.eval(a) for a in call.args]
        around = self.interpreter.around_call
        return (
            self._dispatch(call, args)
            if around is None
            else around(call, args, lambda replaced: self._dispatch(call, replaced))
        )

    def _dispatch(self, call: Call, args: list[Any]) -> Any:
        if isinstance(call.callee, Op):
            return self._call_op(call.callee, call, args)
        return self._call_global(self.eval(call.callee), call, args)

    def _call_global(self, target: GlobalVar, call: Call, args: list[Any]) -> Any:
        definition = self.interpreter.module[target.name]
        if isinstance(definition, TensorProgram):
            return self._call_program(definition, target.name, call, args)
        if isinstance(definition, ExternFunction):
            return self._call_extern(definition, call, args)
        return self.interpreter.run(target.name, *args)

    def _call_op(self, op: Op, call: Call, args: list[Any]) -> Any:
        builtin = _MEMORY.get(op.name)
        if builtin is not None:
            return builtin(*args, **call.attrs)
        if type(op).reference is Op.reference:
            return self._call_decomposed(op, call, args)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # such as the mean of an empty array
            result = op.reference(*args, **call.attrs)
        return tuple(map(_tensor, result)) if isinstance(call.ty, TupleType) else _tensor(result)

    def _call_decomposed(self, op: Op, call: Call, args: list[Any]) -> Any:
        bb = BlockBuilder()
        with bb.body() as scope:
            result = op.decompose(bb, call)
            if result is None:
                raise ExecutionError(f"op {op.name} has neither a NumPy reference nor a decomposition")
            bb.result(result)
        return self.nested().body(bb.finish(scope))

    def _call_program(self, program: TensorProgram, name: str, call: Call, args: list[Any]) -> Any:
        symbols = list(self.dims(call.sym_args))
        if len(args) == len(program.params):
            count = len(program.inputs)
            self.interpreter.run_program(program, args[:count], symbols, args[count:], name)
            return ()
        outputs = self.interpreter.run_program(program, args, symbols, name=name)
        return tuple(outputs) if isinstance(call.ty, TupleType) else outputs[0]

    def _call_extern(self, extern: ExternFunction, call: Call, args: list[Any]) -> Any:
        if extern.symbol not in self.interpreter.externs:
            raise ExecutionError(f"no Python function is given for the library routine {extern.symbol}")
        routine = self.interpreter.externs[extern.symbol]
        if call.ty == TupleType(()):
            routine(*args)
            return ()
        types = [t for t in result_types(call.ty) if isinstance(t, TensorType) and t.shape is not None]
        outputs = [poisoned(self.dims(t.shape or ()), t.dtype) for t in types]
        routine(*args, *outputs)
        return tuple(outputs) if isinstance(call.ty, TupleType) else outputs[0]


def _tensor(value: Any) -> Any:
    """Convert NumPy scalars to arrays; shapes stay tuples."""
    return value if isinstance(value, tuple) else np.asarray(value)


def _truth(cond: Any) -> bool:
    if cond.size != 1 or cond.dtype != np.bool_:
        raise ExecutionError(f"a condition must be a bool tensor of one element, got {cond.shape} {cond.dtype}")
    return bool(cond.reshape(-1)[0])


_EVALUATE: dict[type, Callable[[_Frame, Any], Any]] = {
    Var: _Frame._var, Call: _Frame._call, If: _Frame._if, Loop: _Frame._loop,
    Constant: lambda frame, e: e.value,
    ShapeValue: lambda frame, e: frame.dims(e.values),
    GlobalVar: lambda frame, e: e,
    Tuple: lambda frame, e: tuple(frame.eval(f) for f in e.fields),
    TupleGetItem: lambda frame, e: frame.eval(e.value)[e.index],
}  # fmt: skip


# Checks of values against types


def bind(ty: Type, value: Any, symbols: Symbols, what: str, *, define_only: bool = False) -> None:
    """Check a value against a type and bind the symbols that have no value yet. `define_only`: bind, but check no
    sizes.

    `what` names the value in errors: InputError, ShapeMismatchError, ExecutionError.
    """
    if isinstance(ty, TupleType):
        for k, field in enumerate(ty.fields):
            bind(field, value[k], symbols, f"{what}[{k}]", define_only=define_only)
    elif isinstance(ty, ShapeType):
        if ty.values is not None:
            match_dims(ty.values, value, symbols, what, define_only=define_only)
    elif isinstance(ty, TensorType):
        _bind_tensor(ty, value, symbols, what, define_only=define_only)
    elif not isinstance(ty, ObjectType) and not isinstance(value, GlobalVar):
        raise ExecutionError(f"{what} has type {ty}, but its value is {value!r}")


def _bind_tensor(ty: TensorType, value: Any, symbols: Symbols, what: str, *, define_only: bool) -> None:
    if not isinstance(value, np.ndarray) or value.dtype != dtypes.to_numpy(ty.dtype):
        raise InputError(f"{what} must be a tensor {ty}, got {getattr(value, 'dtype', type(value).__name__)}")
    if ty.rank is not None and value.ndim != ty.rank:
        raise InputError(f"{what} must have rank {ty.rank} ({ty}), got shape {value.shape}")
    if ty.shape is not None:
        match_dims(ty.shape, value.shape, symbols, what, define_only=define_only)


def match_dims(
    dims: Sequence[SymExpr], sizes: Sequence[int], symbols: Symbols, what: str, *, define_only: bool = False
) -> None:
    """Match sizes with symbolic dimensions; binds dimensions that are a single symbol without a value.

    ShapeMismatchError, which begins with `what`, for another rank or size, or a symbol outside of its bounds.
    """
    if len(dims) != len(sizes):
        raise ShapeMismatchError(f"{what}: expected {len(dims)} dimensions, got shape {tuple(sizes)}")
    for dim, size in zip(dims, sizes, strict=True):
        if isinstance(dim, SymVar) and dim not in symbols:
            _check_bounds(dim, size, what)
            symbols[dim] = size
    if define_only:
        return
    for axis, (dim, size) in enumerate(zip(dims, sizes, strict=True)):
        expected = evaluate(dim, symbols)
        if expected != size:
            wanted = f"{expected}" if dim.is_const else f"{dim} = {expected}"
            raise ShapeMismatchError(f"{what}: dimension {axis} must be {wanted}, got {size}")


def _check_bounds(symbol: SymVar, size: int, what: str) -> None:
    low, high = symbol.lower, symbol.upper
    if (low is not None and size < low) or (high is not None and size > high) or size % symbol.divisor != 0:
        raise ShapeMismatchError(
            f"{what}: {symbol.name} = {size} breaks {low} <= {symbol.name} <= {high}, divisor {symbol.divisor}"
        )


# Builtins of explicit memory (after memory planning)


def _view(arena: Any, offset: tuple[int], shape: tuple[int, ...], *, dtype: str) -> Any:
    size = int(np.prod(shape, dtype=np.int64)) * dtypes.itemsize(dtype)
    if offset[0] < 0 or offset[0] + size > arena.size:
        raise ExecutionError(f"a view of {size} bytes at {offset[0]} leaves its arena of {arena.size} bytes")
    view = arena[offset[0] : offset[0] + size].view(dtypes.to_numpy(dtype)).reshape(shape)
    return view


def _part(x: Any, offset: tuple[int], shape: tuple[int, ...], *, dtype: str) -> Any:
    return _view(x.reshape(-1).view(np.uint8), offset, shape, dtype=dtype)


_MEMORY: dict[str, Callable[..., Any]] = {
    "memory.alloc_tensor": lambda shape, *, dtype: poisoned(shape, dtype),
    "memory.alloc_arena": lambda size: np.full(size[0], 0xFF, np.uint8),
    "memory.view": _view,
    "memory.part": _part,
}
