"""Decode bytecode functions to basic blocks of Python closures, one per instruction (vm.py runs them)."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from relaxlite import dtypes
from relaxlite.errors import ExecutionError, OutOfMemoryError, ShapeMismatchError
from relaxlite.records import dataclass
from relaxlite.runtime import libraries
from relaxlite.runtime.executable import (
    LAUNCH_FAILED,
    Call,
    Const,
    Goto,
    If,
    Imm,
    KernelInfo,
    Operand,
    Reg,
    Ret,
    VMFunction,
)
from relaxlite.runtime.memory import Block
from relaxlite.runtime.memory_check import watched
from relaxlite.runtime.shape_match import ShapeMatch
from relaxlite.runtime.tensor import Heap, Tensor

if TYPE_CHECKING:
    from relaxlite.runtime.vm import VirtualMachine

Value: TypeAlias = Any  # a Tensor, a shape (tuple of int), a tuple of values, or an arena
Registers: TypeAlias = list[Value]
Step: TypeAlias = Callable[[Registers, list[Block]], None]

_OVERFLOW, _NO_MEMORY = -1, -2  # statuses of kernels; k > 0: check k - 1 failed


@dataclass(slots=True)
class BasicBlock:
    """A basic block. Its terminator: return `register` (then == -1), jump to `then`, or branch on the bool in
    `register`."""

    steps: list[Step]
    positions: list[int]  # instruction number of each step
    register: int = -1  # with then >= 0: the condition, -1 for an unconditional jump
    then: int = -1
    otherwise: int = -1


@dataclass(slots=True)
class DecodedFunction:
    """A decoded function."""

    function: VMFunction
    blocks: list[BasicBlock]
    initial: Registers  # initial registers behind the parameters


class Decoder:
    """Decodes one function: instructions to closures, in basic blocks."""

    def __init__(self, vm: VirtualMachine, function: VMFunction) -> None:
        self.vm, self.function = vm, function
        self.tail: Registers = []
        self.builtins: dict[str, Callable[[int, tuple[Operand, ...]], Step]] = {
            "alloc_heap": self._alloc_heap,
            "match_shape": self._match_shape,
            "alloc_tensor": self._alloc_tensor,
            "alloc_arena": self._alloc_arena,
            "view": self._view,
            "reshape": self._reshape,
            "tensor_to_shape": self._tensor_to_shape,
            "make_tuple": self._make_tuple,
            "tuple_get": self._tuple_get,
            "copy": self._copy_tensor,
        }

    def decode(self) -> DecodedFunction:
        """Split the function at jump targets, and decode each block."""
        code = self.function.instructions
        leaders = {0}
        for at, instruction in enumerate(code):
            match instruction:
                case Goto(target):
                    leaders |= {target, at + 1}
                case If(_, target):
                    leaders |= {target, at + 1}
                case Ret():
                    leaders.add(at + 1)
        starts = sorted(target for target in leaders if target < len(code))
        block_of = {start: index for index, start in enumerate(starts)}
        blocks = [self._block(start, block_of) for start in starts]
        unset = [None] * (self.function.num_registers - len(self.function.params))
        return DecodedFunction(self.function, blocks, [*unset, *self.tail, None])

    def _block(self, start: int, block_of: Mapping[int, int]) -> BasicBlock:
        block = BasicBlock([], [])
        for at in range(start, len(self.function.instructions)):
            match self.function.instructions[at]:
                case Ret(register):
                    block.register = register
                    return block
                case Goto(target):
                    block.then = block_of[target]
                    return block
                case If(register, target):
                    block.register, block.then, block.otherwise = register, block_of[at + 1], block_of[target]
                    return block
                case Call(dst, callee, operands) as call:
                    step = self._call(dst, callee, operands)
                    block.steps.append(watched(step, call, at) if self.vm.check_memory else step)
                    block.positions.append(at)
            if at + 1 in block_of:
                break
        block.then = block_of[at + 1]
        return block

    def _slot(self, operand: Operand) -> int:
        """Index of an operand in the list of registers, constants and immediates."""
        if isinstance(operand, Reg):
            return operand.index
        if isinstance(operand, Const):
            value: Value = self.vm.constants.tensors[operand.index]
        else:
            value = operand.value
        self.tail.append(value)
        return self.function.num_registers + len(self.tail) - 1

    def _heap_slot(self, operand: Operand) -> int:
        if isinstance(operand, Imm):
            self.tail.append(_NO_HEAP)
            return self.function.num_registers + len(self.tail) - 1
        return self._slot(operand)

    def _call(self, dst: int, callee: str, operands: tuple[Operand, ...]) -> Step:
        kind, _, name = callee.partition(":")
        if kind == "builtin":
            return self.builtins[name](dst, operands)
        if kind == "kernel":
            return self._kernel(self.vm.data.kernels[name], operands)
        return self._func(dst, name, operands) if kind == "func" else self._extern(name, operands)

    def _kernel(self, info: KernelInfo, operands: tuple[Operand, ...]) -> Step:
        heap, first = self._heap_slot(operands[0]), _imm(operands[1])
        buffers = [self._slot(operand) for operand in operands[2:]]
        pack = struct.Struct(f"{len(buffers)}Q").pack
        kernel = self.vm.kernels[info.name]
        last, offset = first + (info.num_symbols or 0), 8 * first

        def step(registers: Registers, _: list[Block]) -> None:
            symbols = registers[heap]
            if symbols.shape[0] < last:
                raise ExecutionError(f"kernel '{info.name}' reads heap slot {last - 1} of {symbols.shape[0]}")
            status = kernel(pack(*[registers[i].ptr for i in buffers]), symbols.ptr + offset)
            if status:
                raise kernel_error(info, status, symbols.values[first:last])

        return step

    def _func(self, dst: int, name: str, operands: tuple[Operand, ...]) -> Step:
        slots, vm = [self._slot(operand) for operand in operands], self.vm

        def step(registers: Registers, _: list[Block]) -> None:
            registers[dst] = vm.invoke(name, [registers[i] for i in slots])

        return step

    def _extern(self, symbol: str, operands: tuple[Operand, ...]) -> Step:
        function = libraries.registered_function(symbol)
        if function is None:
            raise ExecutionError(
                f"there is no library routine '{symbol}'; make it known with relaxlite.register_function"
            )
        slots, space = [self._slot(operand) for operand in operands], self.vm.space

        def step(registers: Registers, _: list[Block]) -> None:
            values = [registers[i] for i in slots]
            on_host = [map_tensors(space.export_tensor, value) for value in values]
            try:
                function(*(value.numpy() if isinstance(value, Tensor) else value for value in on_host))
            except Exception as error:  # the routine may raise anything
                raise ExecutionError(f"the library routine '{symbol}' failed: {error}") from error
            for value, copy in zip(values, on_host, strict=True):
                if copy is not value and isinstance(value, Tensor):
                    space.update(value, copy)

        return step

    def _alloc_heap(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        slots = _imm(operands[0])

        def step(registers: Registers, _: list[Block]) -> None:
            registers[dst] = Heap(slots)

        return step

    def _match_shape(self, _dst: int, operands: tuple[Operand, ...]) -> Step:
        source, heap = self._slot(operands[0]), self._heap_slot(operands[1])
        match = ShapeMatch(_imm(operands[2]), _imm(operands[3]))

        def step(registers: Registers, _: list[Block]) -> None:
            value = registers[source]
            match.check(value if type(value) is tuple else value.shape, registers[heap].values)

        return step

    def _alloc_tensor(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        heap, shape_of, dtype = self._heap_slot(operands[0]), _shape_getter(_imm(operands[1])), _imm(operands[2])
        what, poison = f"tensor r{dst} of function '{self.function.name}'", self.vm.poison
        new_tensor = self.vm.space.new_tensor

        def step(registers: Registers, _: list[Block]) -> None:
            shape = _check_nonnegative(shape_of(registers[heap].values), what)
            registers[dst] = new_tensor(shape, dtype, what, poison=poison)

        return step

    def _alloc_arena(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        heap, size, take = self._heap_slot(operands[0]), _imm(operands[1]), self.vm.pool.take
        what = f"arena r{dst} of function '{self.function.name}'"

        def step(registers: Registers, arenas: list[Block]) -> None:
            arena = take(size if size >= 0 else registers[heap].values[~size], what)
            arenas.append(arena)
            registers[dst] = arena

        return step

    def _view(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source_slot, heap, start = self._slot(operands[0]), self._heap_slot(operands[1]), _imm(operands[2])
        shape_of, dtype = _shape_getter(_imm(operands[3])), _imm(operands[4])
        itemsize, what = dtypes.itemsize(dtype), f"tensor r{dst} of function '{self.function.name}'"

        def step(registers: Registers, _: list[Block]) -> None:
            source, values = registers[source_slot], registers[heap].values
            shape, offset = _check_nonnegative(shape_of(values), what), start if start >= 0 else values[~start]
            kind, owner = ("a tensor", source.owner) if isinstance(source, Tensor) else ("an arena", source)
            if offset < 0 or offset + math.prod(shape) * itemsize > source.nbytes:
                raise ExecutionError(f"{dtype}{list(shape)} at {offset} is not inside {kind} of {source.nbytes} bytes")
            registers[dst] = Tensor(source.ptr + offset, shape, dtype, owner)

        return step

    def _reshape(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source, heap, shape_of = self._slot(operands[0]), self._heap_slot(operands[1]), _shape_getter(_imm(operands[2]))

        def step(registers: Registers, _: list[Block]) -> None:
            tensor, shape = registers[source], shape_of(registers[heap].values)
            if math.prod(shape) != math.prod(tensor.shape) or (shape and min(shape) < 0):
                raise ShapeMismatchError(f"cannot reshape {list(tensor.shape)} to {list(shape)}: the sizes differ")
            registers[dst] = Tensor(tensor.ptr, shape, tensor.dtype, tensor.owner)

        return step

    def _tensor_to_shape(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source, read = self._slot(operands[0]), self.vm.read

        def step(registers: Registers, _: list[Block]) -> None:
            tensor = registers[source]
            if len(tensor.shape) > 1 or not dtypes.is_integer(tensor.dtype):
                raise ExecutionError(f"a shape is an integer tensor of rank 0 or 1, got {tensor!r}")
            registers[dst] = tuple(read(tensor).reshape(-1).tolist())

        return step

    def _make_tuple(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        slots = [self._slot(operand) for operand in operands]

        def step(registers: Registers, _: list[Block]) -> None:
            registers[dst] = tuple([registers[i] for i in slots])

        return step

    def _tuple_get(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source, index = self._slot(operands[0]), _imm(operands[1])

        def step(registers: Registers, _: list[Block]) -> None:
            registers[dst] = registers[source][index]

        return step

    def _copy_tensor(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source, copy = self._slot(operands[0]), self.vm.space.copy

        def step(registers: Registers, _: list[Block]) -> None:
            registers[dst] = copy(registers[source])

        return step


_NO_HEAP = Heap(0)


def _imm(operand: Operand) -> Any:
    """Value of an operand that `validate` guarantees to be an immediate of the right kind."""
    assert isinstance(operand, Imm)
    return operand.value


def _shape_getter(dims: tuple[int, ...]) -> Callable[[Any], tuple[int, ...]]:
    """Function from heap values to a shape, for encoded dims (docs/runtime-abi.md, "dim")."""
    if all(dim >= 0 for dim in dims):
        return lambda values: dims
    return lambda values: tuple([dim if dim >= 0 else values[~dim] for dim in dims])


def _check_nonnegative(shape: tuple[int, ...], what: str) -> tuple[int, ...]:
    if shape and min(shape) < 0:
        raise ShapeMismatchError(
            f"{what}: the shape {shape} has a negative dimension; an input that it depends on is too small"
        )
    return shape


def kernel_error(info: KernelInfo, status: int, symbols: Sequence[int]) -> ExecutionError:
    if status == _OVERFLOW:
        return OutOfMemoryError(f"kernel '{info.name}': size overflow: an integer does not fit 64 bits")
    if status <= LAUNCH_FAILED:
        return ExecutionError(
            f"kernel '{info.name}': the driver refused a launch (CUDA error {LAUNCH_FAILED - status})"
        )
    if status == _NO_MEMORY:
        return OutOfMemoryError(f"kernel '{info.name}': the system has no memory left for its workspace")
    failure = libraries.take_failure()
    if failure is not None and not isinstance(failure, Exception):
        raise failure  # such as KeyboardInterrupt
    is_known = 0 < status <= len(info.checks)
    reason = info.checks[status - 1] if is_known else f"failed with the unknown status {status}"
    names = zip(() if info.cost is None else info.cost.symbols, symbols, strict=False)
    values = [f"{name} = {value}" for name, value in names if re.search(rf"\b{re.escape(name)}\b", reason)]
    reason += f" ({', '.join(values)})" if values else ""
    error = ExecutionError(f"kernel '{info.name}': {reason}" + ("" if failure is None else f": {failure}"))
    error.__cause__ = failure
    return error


def map_tensors(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    """A value with a function applied to its tensors."""
    if isinstance(value, tuple):
        return tuple(map_tensors(function, item) for item in value)
    return function(value) if isinstance(value, Tensor) else value
