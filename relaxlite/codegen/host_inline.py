"""Inline all bytecode functions that an entry calls, because a host function is compiled from one function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from relaxlite.runtime.executable import Call, Goto, If, Imm, Instruction, Operand, Reg, Ret, VMFunction

MAX_INSTRUCTIONS = 20_000


class NotNativeError(Exception):
    """Raised where a function cannot be compiled to machine code; the message gives the reason, for `relaxlite
    inspect`."""


def inline_calls(functions: Mapping[str, VMFunction], name: str) -> VMFunction:
    """Inline every `func:` call of a function.

    NotNativeError for recursion, and for results of more than MAX_INSTRUCTIONS instructions.
    """
    if not any(_callee(instruction) for instruction in functions[name].instructions):
        return functions[name]
    return _Inliner(functions).inline(functions[name])


def _callee(instruction: Instruction) -> str:
    """Name of the bytecode function that an instruction calls; empty for other instructions."""
    is_call = isinstance(instruction, Call) and instruction.callee.startswith("func:")
    return instruction.callee.removeprefix("func:") if is_call else ""  # type: ignore[union-attr]


class _Inliner:
    """Expands calls recursively, renumbering registers and jump labels."""

    def __init__(self, functions: Mapping[str, VMFunction]) -> None:
        self.functions = functions
        self.code: list[Instruction] = []  # targets of jumps are label numbers until `_resolve`
        self.labels: list[int] = []  # position of each label
        self.num_registers = 0
        self.stack: list[str] = []  # names of the functions being expanded

    def inline(self, function: VMFunction) -> VMFunction:
        self._expand(function, (), None)
        code = tuple(map(self._resolve, self.code))
        return replace(function, num_registers=self.num_registers, instructions=code)

    def _resolve(self, instruction: Instruction) -> Instruction:
        match instruction:
            case Goto(label):
                return Goto(self.labels[label])
            case If(register, label):
                return If(register, self.labels[label])
        return instruction

    def _expand(self, function: VMFunction, arguments: Sequence[Operand], result: int | None) -> None:
        """Append a function's instructions; `result` is the register for its return value, None for the outermost
        function."""
        if function.name in self.stack:
            raise NotNativeError(f"function '{function.name}' calls itself")
        self.stack.append(function.name)
        base, first, count = self.num_registers, len(self.labels), len(function.instructions)
        self.num_registers += function.num_registers
        self.labels += [0] * (count + 1)
        for parameter, argument in enumerate(arguments):
            self._move(argument, base + parameter)
        for at, instruction in enumerate(function.instructions):
            self.labels[first + at] = len(self.code)
            match instruction:
                case Goto(target):
                    self.code.append(Goto(first + target))
                case If(register, target):
                    self.code.append(If(base + register, first + target))
                case Ret(register):
                    self._return(base + register, result, None if at + 1 == count else first + count)
                case Call(dst, _, operands):
                    renumbered = tuple(Reg(base + o.index) if isinstance(o, Reg) else o for o in operands)
                    self._call(instruction, base + dst if dst >= 0 else dst, renumbered)
        self.labels[first + count] = len(self.code)
        self.stack.pop()

    def _return(self, register: int, result: int | None, end: int | None) -> None:
        """Return from an expanded function; `end` is the label behind it, None if that is the next instruction."""
        if result is None:
            self.code.append(Ret(register))
            return
        self._move(Reg(register), result)
        if end is not None:
            self.code.append(Goto(end))

    def _call(self, call: Call, dst: int, operands: tuple[Operand, ...]) -> None:
        if len(self.code) > MAX_INSTRUCTIONS:
            raise NotNativeError(f"it would have more than {MAX_INSTRUCTIONS} instructions")
        if name := _callee(call):
            self._expand(self.functions[name], operands, dst if dst >= 0 else self._new_register())
        else:
            self.code.append(Call(dst, call.callee, operands))

    def _move(self, operand: Operand, register: int) -> None:
        pair = self._new_register()
        self.code.append(Call(pair, "builtin:make_tuple", (operand,)))
        self.code.append(Call(register, "builtin:tuple_get", (Reg(pair), Imm(0))))

    def _new_register(self) -> int:
        self.num_registers += 1
        return self.num_registers - 1
