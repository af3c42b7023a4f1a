"""Legalization: replace calls of ops by calls of tensor programs in value form, shared if structurally equal."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from relaxlite.errors import PassError
from relaxlite.ir.attributes import READS_APART
from relaxlite.ir.equality import structural_hash
from relaxlite.ir.expr import NO_ATTRS, Attrs, Call, Constant, Expr, GlobalVar, ShapeValue, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import Buffer, Literal, Load, TensorProgram, Value
from relaxlite.ir.program_visitor import ProgramRewriter, program_symbols
from relaxlite.ir.symbolic import SymExpr, SymVar
from relaxlite.ir.text import attrs_key
from relaxlite.ir.types import ShapeType, TensorType, TupleType
from relaxlite.ir.visitor import Rewriter

RUNTIME_OPS = ("reshape", "tensor_to_shape")  # lowered to views and runtime builtins in later passes, not to loops


class ProgramTable:
    """Hash-consing of tensor programs: `add` returns the existing name for a structurally equal program.

    Equal structural hashes (128 bits of SHA-256) count as equal programs.
    """

    def __init__(self, definitions: dict[str, Definition]) -> None:
        self._definitions = definitions
        self._initial = dict(definitions)

    @cached_property
    def _by_hash(self) -> dict[str, tuple[str, TensorProgram]]:
        """Name and program by structural hash, computed at the first `add`, which many tables never see."""
        programs = [
            (name, definition) for name, definition in self._initial.items() if isinstance(definition, TensorProgram)
        ]
        return {structural_hash(program): (name, program) for name, program in reversed(programs)}

    def add(self, hint: str, program: TensorProgram) -> GlobalVar:
        """Define a program under the name `hint`, with a number if that is taken, unless an equal one is defined."""
        digest = structural_hash(program)
        same = self._by_hash.get(digest)
        if same is not None and self._definitions.get(same[0]) is same[1]:
            return GlobalVar(same[0])
        name, count = hint, 0
        while name in self._definitions:
            count += 1
            name = f"{hint}_{count}"
        self._definitions[name] = program
        self._by_hash[digest] = (name, program)
        return GlobalVar(name)


def legalize(module: IRModule) -> IRModule:
    """Replace each call of an op by a call of the tensor program that computes it.

    Ops that are lowered to views or runtime builtins stay. Raises PassError for an op without a lowering.
    """
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    for name, function in module.functions().items():
        definitions[name] = _Legalize(table).function(function)
    return module.updated(definitions)


class _Legalize(Rewriter):
    """Lowers calls, once per distinct signature."""

    def __init__(self, table: ProgramTable) -> None:
        super().__init__()
        self._table = table
        self._known: dict[tuple[object, ...], tuple[GlobalVar, tuple[SymVar, ...]]] = {}  # by the inputs of lowering

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, Op):
            return None
        op, value = value.callee, _with_known_shapes(value)
        if op.name in RUNTIME_OPS or op.name.startswith(("memory.", "vm.")):
            return value
        if not op.has_lowering:
            raise PassError(f"op {op.name} (at {value.loc}) has neither a lowering nor a decomposition")
        key = (op.name, attrs_key(value.attrs), value.ty, *_signature(value))
        if key not in self._known:
            program, _ = lower_call(value)
            self._known[key] = self._table.add(op.name, program), program.symbols
        callee, symbols = self._known[key]
        return Call(callee, _tensors(value), sym_args=symbols, ty=value.ty, loc=value.loc)


def _with_known_shapes(call: Call) -> Call:
    """The call with variables of known shape values (bound by a MatchShape) replaced by these values."""
    args = tuple(
        ShapeValue(a.ty.values) if isinstance(a, Var) and isinstance(a.ty, ShapeType) and a.ty.values is not None else a
        for a in call.args
    )
    return call if args == call.args else replace(call, args=args)


def _signature(call: Call) -> list[object]:
    """The part of the operands that determines a call's program: types, values of shapes and of one-element constants,
    and which operands are identical."""
    positions: dict[Expr, int] = {}
    signature: list[object] = []
    for k, arg in enumerate(call.args):
        if isinstance(arg, ShapeValue):
            signature.append(arg.values)
        else:
            number = arg.value.tobytes() if isinstance(arg, Constant) and arg.value.size == 1 else None
            signature.append((positions.setdefault(arg, k), arg.ty, number))
    return signature


def _tensors(call: Call) -> tuple[Expr, ...]:
    """The distinct operands of a call that become parameters of its program: no shapes and no one-element constants."""
    args = dict.fromkeys(arg for arg in call.args if not isinstance(arg, ShapeValue))
    return tuple(arg for arg in args if not (isinstance(arg, Constant) and arg.value.size == 1))


def lower_call(call: Call) -> tuple[TensorProgram, tuple[Expr, ...]]:
    """Lower a call of an op to (tensor program, operands to pass to it).

    One-element constants become literals, repeated tensors one parameter, shapes symbolic arguments.
    """
    op = call.callee
    assert isinstance(op, Op)
    by_arg: dict[Expr, Buffer] = {}
    literals: dict[Buffer, Value] = {}
    operands: list[Buffer | tuple[SymExpr, ...]] = []
    for k, arg in enumerate(call.args):
        if isinstance(arg, ShapeValue):
            operands.append(arg.values)
            continue
        if arg not in by_arg:
            assert isinstance(arg.ty, TensorType) and arg.ty.shape is not None
            by_arg[arg] = Buffer(_name(op, k), arg.ty.shape, arg.ty.dtype)
            if isinstance(arg, Constant) and arg.value.size == 1:
                literals[by_arg[arg]] = Literal(arg.value.reshape(-1)[0].item(), arg.ty.dtype)
        operands.append(by_arg[arg])
    fields = call.ty.fields if isinstance(call.ty, TupleType) else (call.ty,)
    outs = tuple(Buffer(f"out{k}" if k else "out", f.shape, f.dtype) for k, f in enumerate(fields))  # type: ignore[union-attr, arg-type]
    body = op.lower(*operands, out=outs if isinstance(call.ty, TupleType) else outs[0], **call.attrs)
    if literals:
        body = _InlineLiterals(literals).stmt(body)
    tensors = _tensors(call)
    params = (*(by_arg[arg] for arg in tensors), *outs)
    attrs = Attrs({READS_APART: True}) if op.reads_apart else NO_ATTRS
    return TensorProgram(params, program_symbols(params, body), body, len(outs), attrs), tensors


def _name(op: Op, k: int) -> str:
    last = op.operands[-1]
    name = op.operands[k] if k < len(op.operands) else f"{last}{k - len(op.operands) + 1}"
    return name.strip("*?")


class _InlineLiterals(ProgramRewriter):
    def __init__(self, literals: dict[Buffer, Value]) -> None:
        super().__init__()
        self._literals = literals

    def _value(self, value: Value) -> Value:
        if isinstance(value, Load) and value.buffer in self._literals:
            return self._literals[value.buffer]
        return super()._value(value)
