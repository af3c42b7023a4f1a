"""Compile graph-level functions at stage "vm" to VM bytecode (docs/runtime-abi.md, "Bytecode")."""

from __future__ import annotations

import numpy as np

from relaxlite.errors import CodegenError
from relaxlite.ir.expr import (
    Body,
    Call,
    Constant,
    Expr,
    Function,
    GlobalVar,
    If,
    Let,
    Loop,
    MatchShape,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.program import TensorProgram
from relaxlite.ir.types import UNIT
from relaxlite.runtime import executable as vm


def compile_functions(module: IRModule) -> tuple[dict[str, vm.VMFunction], tuple[np.ndarray, ...]]:
    """Compile every graph-level function of a module; returns the functions by name and the constant pool they share.

    CodegenError for what bytecode cannot express, such as a MatchShape that lower_shapes has not lowered.
    """
    constants = _Constants()
    functions = {name: _FunctionCompiler(name, module, constants).compile(f) for name, f in module.functions().items()}
    return functions, tuple(constants.values)


class _Constants:
    """The constant pool: each constant array once, by the identity of its array."""

    def __init__(self) -> None:
        self.values: list[np.ndarray] = []
        self._index: dict[int, int] = {}
        self._constants: list[Constant] = []  # keeps the objects alive, so that their ids stay unique

    def index(self, constant: Constant) -> int:
        key = id(constant.value)
        if key not in self._index:
            self._index[key] = len(self.values)
            self.values.append(constant.value)
            self._constants.append(constant)
        return self._index[key]


class _FunctionCompiler:
    """Compiles one function: assigns registers to variables, emits instructions and patches jumps."""

    def __init__(self, name: str, module: IRModule, constants: _Constants) -> None:
        self._name, self._module, self._constants = name, module, constants
        self._code: list[vm.Instruction] = []
        self._locations: list[str | None] = []  # source location of each instruction
        self._location: str | None = None  # source location of the call being compiled
        self._values: dict[Var, vm.Operand] = {}
        self._heap: vm.Operand = vm.Imm(None)
        self._registers = 0

    def compile(self, function: Function) -> vm.VMFunction:
        for param in function.params:
            self._values[param] = vm.Reg(self._new_register())
        result = self._body(function.body)
        self._append(vm.Ret(self._in_register(result)))
        locations = tuple(self._locations) if any(self._locations) else ()
        params = tuple(p.name for p in function.params)
        return vm.VMFunction(self._name, params, self._registers, tuple(self._code), locations)

    def _append(self, instruction: vm.Instruction) -> None:
        self._code.append(instruction)
        self._locations.append(self._location)

    def _new_register(self) -> int:
        self._registers += 1
        return self._registers - 1

    def _emit(self, callee: str, *operands: vm.Operand, dst: int | None = None) -> vm.Reg:
        dst = self._new_register() if dst is None else dst
        self._append(vm.Call(dst, callee, operands))
        return vm.Reg(dst)

    def _in_register(self, operand: vm.Operand) -> int:
        """Move an operand into a register where it is none: `If` and `Ret` take only registers."""
        if isinstance(operand, vm.Reg):
            return operand.index
        return self._emit("builtin:tuple_get", self._emit("builtin:make_tuple", operand), vm.Imm(0)).index

    def _body(self, body: Body) -> vm.Operand:
        for binding in body.bindings():
            if isinstance(binding, MatchShape):
                raise CodegenError(f"{self._name}: a MatchShape of {binding.var.name} is left; run lower_shapes first")
            self._let(binding)
        return self._operand(body.result)

    def _let(self, binding: Let) -> None:
        value = binding.value
        if isinstance(value, If):
            self._values[binding.var] = self._if(value)
        elif isinstance(value, Loop):
            self._values[binding.var] = self._loop(value)
        elif isinstance(value, Call):
            self._location = value.loc or binding.var.loc
            self._values[binding.var] = self._call(value)
            self._location = None
        else:
            self._values[binding.var] = self._operand(value)

    def _operand(self, expr: Expr) -> vm.Operand:
        if isinstance(expr, Var):
            return self._values[expr]
        if isinstance(expr, Constant):
            return vm.Const(self._constants.index(expr))
        if isinstance(expr, Tuple):
            return self._emit("builtin:make_tuple", *(self._operand(f) for f in expr.fields))
        if isinstance(expr, TupleGetItem):
            return self._emit("builtin:tuple_get", self._operand(expr.value), vm.Imm(expr.index))
        raise CodegenError(f"{self._name}: {type(expr).__name__} cannot be an operand of bytecode")

    def _call(self, call: Call) -> vm.Operand:
        args = tuple(self._operand(a) for a in call.args)
        if isinstance(call.callee, GlobalVar):
            return self._call_global(call.callee, args, call)
        if not isinstance(call.callee, Op):
            raise CodegenError(f"{self._name}: calls of function values are not supported")
        name = call.callee.name
        if name.startswith(("vm.", "memory.")):
            name = name.partition(".")[2]
        attrs = call.callee.attrs  # declared in the order of the builtin's operands
        immediates = (vm.Imm(call.attrs[a]) for a in attrs)  # type: ignore[arg-type]
        dst = -1 if call.ty == UNIT else None
        result = self._emit(f"builtin:{name}", *args, *immediates, dst=dst)
        if name == "alloc_heap":
            self._heap = result
        return result

    def _call_global(self, callee: GlobalVar, args: tuple[vm.Operand, ...], call: Call) -> vm.Operand:
        definition = self._module[callee.name]
        if isinstance(definition, TensorProgram):
            slot = vm.Imm(int(call.attrs.get("first_slot", 0)))  # type: ignore[arg-type]
            return self._emit(f"kernel:{callee.name}", self._heap, slot, *args, dst=-1)
        if isinstance(definition, Function):
            return self._emit(f"func:{callee.name}", *args)
        return self._emit(f"extern:{definition.symbol}", *args, dst=-1)

    def _jump(self) -> int:
        """Append a placeholder for a jump, to be patched later; returns its position."""
        self._append(vm.Goto(0))
        return len(self._code) - 1

    def _if(self, branch: If) -> vm.Operand:
        cond = self._in_register(self._operand(branch.cond))
        result = self._new_register()
        test = self._jump()
        self._move(self._body(branch.then_body), result)
        end = self._jump()
        self._code[test] = vm.If(cond, len(self._code))
        self._move(self._body(branch.else_body), result)
        self._code[end] = vm.Goto(len(self._code))
        return vm.Reg(result)

    def _move(self, operand: vm.Operand, register: int) -> None:
        pair = self._emit("builtin:make_tuple", operand)
        self._emit("builtin:tuple_get", pair, vm.Imm(0), dst=register)

    def _loop(self, loop: Loop) -> vm.Operand:
        carried, cond = self._new_register(), self._new_register()
        self._emit("builtin:make_tuple", *(self._operand(i) for i in loop.inits), dst=carried)
        self._move(self._operand(loop.cond), cond)
        start = len(self._code)
        test = self._jump()
        for k, param in enumerate(loop.params):
            self._values[param] = self._emit("builtin:tuple_get", vm.Reg(carried), vm.Imm(k))
        result = self._body(loop.body)
        if not isinstance(loop.body.result, Tuple) or not isinstance(result, vm.Reg):
            raise CodegenError(f"{self._name}: a loop's body must yield a tuple of its condition and its values")
        fields = [self._operand(f) for f in loop.body.result.fields]
        self._locations.pop()
        self._code.pop()  # drop the make_tuple of the body's result: only its fields are used
        self._emit("builtin:make_tuple", *fields[1:], dst=carried)
        self._move(fields[0], cond)
        self._append(vm.Goto(start))
        self._code[test] = vm.If(cond, len(self._code))
        return vm.Reg(carried)
