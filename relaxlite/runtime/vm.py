"""Bytecode interpreter (docs/runtime-abi.md, "Bytecode").

At its first call a function is decoded to basic blocks of Python closures, one per instruction. A call runs the
closures over a list of registers. Constants and immediates of the function follow the registers, so every operand is an
index into that list; the last element takes unused results.

Thread-safe: a call modifies only its own registers and arenas.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from relaxlite import config, dtypes
from relaxlite.errors import (
    ArtifactError,
    ExecutionError,
    InputError,
    OutOfMemoryError,
    RelaxliteError,
    ShapeMismatchError,
)
from relaxlite.records import dataclass
from relaxlite.runtime import array_reader, cpu, libraries, native, support, threadpool
from relaxlite.runtime.executable import (
    Call,
    Const,
    Entry,
    ExecutableData,
    Goto,
    If,
    Imm,
    KernelInfo,
    Operand,
    Reg,
    Ret,
    VMFunction,
    bound_problem,
    instruction_text,
    validate,
)
from relaxlite.runtime.host import HostFunction
from relaxlite.runtime.memory import ArenaPool, Memory
from relaxlite.runtime.memory_check import WatchedArenas, watched
from relaxlite.runtime.tensor import Heap, Tensor, copy, import_tensor, new_tensor
from relaxlite.runtime.weights import Constants

Value: TypeAlias = Any  # a Tensor, a shape (tuple of int), a tuple of values, or an arena
Registers: TypeAlias = list[Value]
Step: TypeAlias = Callable[[Registers, list[Memory]], None]
KernelFunction: TypeAlias = Callable[[bytes, int], int]  # (packed buffer addresses, symbols' address) -> status

_KERNEL_TYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
_HOLD_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int32)
_OVERFLOW, _NO_MEMORY = -1, -2  # statuses of kernels; k > 0: check k - 1 failed
_I64_MIN, _I64_MAX = -(1 << 63), (1 << 63) - 1

register_extern = libraries.register_function  # functions called by `extern:SYMBOL`, which may also take immediates


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


class VirtualMachine:
    """Runs the functions of an executable.

    `kernels`: replace the compiled kernels, as for profiling. `constants`: shared with another VM of the executable.
    `is_checked`: bytecode and target are already validated; else ArtifactError where they are invalid.
    """

    def __init__(
        self,
        data: ExecutableData,
        *,
        kernels: Mapping[str, KernelFunction] | None = None,
        constants: Constants | None = None,
        is_checked: bool = False,
    ) -> None:
        if not is_checked:
            validate(data)
            _check_machine(data)
        self.data = data
        self.poison = bool(config.get("poison_memory"))
        self.check_memory = bool(config.get("check_memory"))
        self.pool = ArenaPool(poison=self.poison)
        self._library: object = None  # keeps the kernels' code alive
        self.missing_libraries: tuple[str, ...] = ()
        support.register_objects(data.support)
        if kernels is None:
            bound = libraries.bind(data.libraries)
            self.missing_libraries = bound.missing
            self._library, kernels = _link(data, bound)
        self.kernels = kernels
        self._hold = _hold_workers() if data.kernels else _ignore
        self.constants = constants or Constants([_constant(array) for array in data.constants])
        self._decoded: dict[str, DecodedFunction] = {}  # decoded lazily, as host functions replace most calls

    def run(self, name: str, args: Sequence[Value]) -> Value:
        """Call a function from outside; workers of the thread pool keep spinning during the call."""
        self._hold(1)
        try:
            return self.invoke(name, args)
        finally:
            self._hold(-1)

    def invoke(self, name: str, args: Sequence[Value]) -> Value:
        """Call a function, also from bytecode. ExecutionError and its subclasses name the failed instruction."""
        decoded = self._decoded.get(name)
        if decoded is None:
            decoded = self._decoded[name] = _Decoder(self, self.data.functions[name]).decode()
        blocks = decoded.blocks
        block = blocks[0]
        registers = [*args, *decoded.initial]
        arenas: list[Memory] = WatchedArenas(decoded.function) if self.check_memory else []
        step: Step | None = None
        try:
            while True:
                for step in block.steps:
                    step(registers, arenas)
                if block.then < 0:
                    result = registers[block.register]
                    if isinstance(arenas, WatchedArenas):
                        arenas.verify_result(result)
                    return _detach(result, arenas) if arenas else result
                is_taken = block.register < 0 or _truth(registers[block.register])
                block = blocks[block.then if is_taken else block.otherwise]
        except RelaxliteError as error:
            _add_location(error, decoded, block, step)
            raise
        except (AttributeError, TypeError, ValueError, IndexError, struct.error) as error:
            execution_error = ExecutionError(
                f"{_instruction_name(decoded, block, step)}: a value of the wrong kind ({error})"
            )
            _add_location(execution_error, decoded, block, step)
            raise execution_error from error
        except MemoryError as error:
            execution_error = OutOfMemoryError(
                f"{_instruction_name(decoded, block, step)}: the system has no memory left"
            )
            _add_location(execution_error, decoded, block, step)
            raise execution_error from error
        except RecursionError as error:
            raise ExecutionError(f"function '{name}' calls itself too deeply") from error
        finally:
            if arenas:
                self.pool.give(arenas)

    def host_function(self, entry: Entry) -> HostFunction | None:
        """Load the host function of an entry; None where the executable or this Python does not support one."""
        if not entry.host.object_code or not array_reader.is_supported():
            return None
        addresses = [ctypes.cast(self.kernels[name], ctypes.c_void_p).value or 0 for name in self.data.kernels]  # type: ignore[arg-type]
        return HostFunction(entry, addresses, self.constants, poison=self.poison)

    def release_memory(self) -> int:
        """Free unused arenas; returns their size in bytes."""
        return self.pool.release()


def _constant(array: np.ndarray) -> Tensor:
    return import_tensor(array, array.dtype.name, "a constant")


def _link(data: ExecutableData, bound: libraries.BoundRoutines) -> tuple[object, dict[str, KernelFunction]]:
    """Link the kernels; returns (owner of their code, kernels by name)."""
    if not data.kernels:
        return None, {}
    exports = [kernel.symbol for kernel in data.kernels.values()]
    library = native.load_objects(data.objects, bound.cells, exports=exports)
    return (library, bound), {
        name: _KERNEL_TYPE(library.address(kernel.symbol)) for name, kernel in data.kernels.items()
    }


def _check_machine(data: ExecutableData) -> None:
    """Raise ArtifactError unless this machine can run the code."""
    if not data.objects or not data.target.triple:
        return
    try:
        cpu.check(data.target)
    except ArtifactError as error:
        raise ArtifactError(f"the model cannot run here: {error}") from error


def _hold_workers() -> Callable[[int], None]:
    return _HOLD_TYPE(threadpool.symbols()["relaxlite_hold_workers"])


def _ignore(_: int) -> None:
    pass


def _truth(condition: Tensor) -> bool:
    if condition.dtype != "bool" or math.prod(condition.shape) != 1:
        raise ExecutionError(f"a condition must be one bool, got {condition!r}")
    return ctypes.c_bool.from_address(condition.ptr).value


def _instruction_name(decoded: DecodedFunction, block: BasicBlock, step: Step | None) -> str:
    function, position = decoded.function, _instruction_number(block, step)
    if position is None:
        return f"function '{function.name}'"
    return f"function '{function.name}', {position}: {instruction_text(function.instructions[position])}"


def _instruction_number(block: BasicBlock, step: Step | None) -> int | None:
    """Instruction number of a step; None outside of the block."""
    return None if step is None or step not in block.steps else block.positions[block.steps.index(step)]


def _add_location(error: RelaxliteError, decoded: DecodedFunction, block: BasicBlock, step: Step | None) -> None:
    """Prefix an error's message with the source location of the step, once: by the innermost function."""
    position = _instruction_number(block, step)
    location = None if position is None else decoded.function.location(position)
    if location is None or getattr(error, "is_placed", False):
        return
    error.is_placed = True  # type: ignore[attr-defined]
    if not str(error).startswith(location):
        error.args = (f"{location}: {error}", *error.args[1:])


def _detach(value: Value, arenas: list[Memory]) -> Value:
    """Copy tensors of a value out of `arenas`, which are returned to the pool."""
    if isinstance(value, tuple):
        return tuple(_detach(item, arenas) for item in value)
    if isinstance(value, Tensor) and any(value.owner is arena for arena in arenas):
        return copy(value)
    return value


class _Decoder:
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

        def step(registers: Registers, _: list[Memory]) -> None:
            symbols = registers[heap]
            if symbols.shape[0] < last:
                raise ExecutionError(f"kernel '{info.name}' reads heap slot {last - 1} of {symbols.shape[0]}")
            status = kernel(pack(*[registers[i].ptr for i in buffers]), symbols.ptr + offset)
            if status:
                raise _kernel_error(info, status, symbols.values[first:last])

        return step

    def _func(self, dst: int, name: str, operands: tuple[Operand, ...]) -> Step:
        slots, vm = [self._slot(operand) for operand in operands], self.vm

        def step(registers: Registers, _: list[Memory]) -> None:
            registers[dst] = vm.invoke(name, [registers[i] for i in slots])

        return step

    def _extern(self, symbol: str, operands: tuple[Operand, ...]) -> Step:
        function = libraries.registered_function(symbol)
        if function is None:
            raise ExecutionError(
                f"there is no library routine '{symbol}'; make it known with relaxlite.register_function"
            )
        slots = [self._slot(operand) for operand in operands]

        def step(registers: Registers, _: list[Memory]) -> None:
            values = [registers[i] for i in slots]
            try:
                function(*(value.numpy() if isinstance(value, Tensor) else value for value in values))
            except Exception as error:  # the routine may raise anything
                raise ExecutionError(f"the library routine '{symbol}' failed: {error}") from error

        return step

    def _alloc_heap(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        slots = _imm(operands[0])

        def step(registers: Registers, _: list[Memory]) -> None:
            registers[dst] = Heap(slots)

        return step

    def _match_shape(self, _dst: int, operands: tuple[Operand, ...]) -> Step:
        source, heap = self._slot(operands[0]), self._heap_slot(operands[1])
        match = _ShapeMatch(_imm(operands[2]), _imm(operands[3]))

        def step(registers: Registers, _: list[Memory]) -> None:
            value = registers[source]
            match.check(value if type(value) is tuple else value.shape, registers[heap].values)

        return step

    def _alloc_tensor(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        heap, shape_of, dtype = self._heap_slot(operands[0]), _shape_getter(_imm(operands[1])), _imm(operands[2])
        what, poison = f"tensor r{dst} of function '{self.function.name}'", self.vm.poison

        def step(registers: Registers, _: list[Memory]) -> None:
            shape = _check_nonnegative(shape_of(registers[heap].values), what)
            registers[dst] = new_tensor(shape, dtype, what, poison=poison)

        return step

    def _alloc_arena(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        heap, size, take = self._heap_slot(operands[0]), _imm(operands[1]), self.vm.pool.take
        what = f"arena r{dst} of function '{self.function.name}'"

        def step(registers: Registers, arenas: list[Memory]) -> None:
            arena = take(size if size >= 0 else registers[heap].values[~size], what)
            arenas.append(arena)
            registers[dst] = arena

        return step

    def _view(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source_slot, heap, start = self._slot(operands[0]), self._heap_slot(operands[1]), _imm(operands[2])
        shape_of, dtype = _shape_getter(_imm(operands[3])), _imm(operands[4])
        itemsize, what = dtypes.itemsize(dtype), f"tensor r{dst} of function '{self.function.name}'"

        def step(registers: Registers, _: list[Memory]) -> None:
            source, values = registers[source_slot], registers[heap].values
            shape, offset = _check_nonnegative(shape_of(values), what), start if start >= 0 else values[~start]
            kind, owner = ("a tensor", source.owner) if isinstance(source, Tensor) else ("an arena", source)
            if offset < 0 or offset + math.prod(shape) * itemsize > source.nbytes:
                raise ExecutionError(f"{dtype}{list(shape)} at {offset} is not inside {kind} of {source.nbytes} bytes")
            registers[dst] = Tensor(source.ptr + offset, shape, dtype, owner)

        return step

    def _reshape(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source, heap, shape_of = self._slot(operands[0]), self._heap_slot(operands[1]), _shape_getter(_imm(operands[2]))

        def step(registers: Registers, _: list[Memory]) -> None:
            tensor, shape = registers[source], shape_of(registers[heap].values)
            if math.prod(shape) != math.prod(tensor.shape) or (shape and min(shape) < 0):
                raise ShapeMismatchError(f"cannot reshape {list(tensor.shape)} to {list(shape)}: the sizes differ")
            registers[dst] = Tensor(tensor.ptr, shape, tensor.dtype, tensor.owner)

        return step

    def _tensor_to_shape(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source = self._slot(operands[0])

        def step(registers: Registers, _: list[Memory]) -> None:
            tensor = registers[source]
            if len(tensor.shape) > 1 or not dtypes.is_integer(tensor.dtype):
                raise ExecutionError(f"a shape is an integer tensor of rank 0 or 1, got {tensor!r}")
            registers[dst] = tuple(tensor.numpy().reshape(-1).tolist())

        return step

    def _make_tuple(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        slots = [self._slot(operand) for operand in operands]

        def step(registers: Registers, _: list[Memory]) -> None:
            registers[dst] = tuple([registers[i] for i in slots])

        return step

    def _tuple_get(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source, index = self._slot(operands[0]), _imm(operands[1])

        def step(registers: Registers, _: list[Memory]) -> None:
            registers[dst] = registers[source][index]

        return step

    def _copy_tensor(self, dst: int, operands: tuple[Operand, ...]) -> Step:
        source = self._slot(operands[0])

        def step(registers: Registers, _: list[Memory]) -> None:
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


def _kernel_error(info: KernelInfo, status: int, symbols: Sequence[int]) -> ExecutionError:
    if status == _OVERFLOW:
        return OutOfMemoryError(f"kernel '{info.name}': size overflow: an integer does not fit 64 bits")
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


def _int64_bounds(slot: int, name: str, lower: int | None, upper: int | None, divisor: int) -> tuple[Any, ...]:
    return slot, name, _I64_MIN if lower is None else lower, _I64_MAX if upper is None else upper, divisor


class _ShapeMatch:
    """A decoded match_shape: binds symbols in the heap first, then checks the other dimensions."""

    def __init__(self, spec: tuple[Any, ...], what: str) -> None:
        self.what, self.rank = what, len(spec)
        text_at = {"bind": 2, "check": 2, "const": 1, "any": 0}
        self.expected = ", ".join(str(item[text_at[item[0]]]) for item in spec)
        items = list(enumerate(spec))
        self.binds = [(axis, *_int64_bounds(*item[1:])) for axis, item in items if item[0] == "bind"]
        self.checks = [(axis, item[1], item[2]) for axis, item in items if item[0] == "check"]
        self.consts = [(axis, item[1]) for axis, item in items if item[0] == "const"]

    def check(self, shape: tuple[int, ...], values: Any) -> None:
        if len(shape) != self.rank:
            raise self._error(f"expects shape ({self.expected}) of rank {self.rank}, got {shape} of rank {len(shape)}")
        for axis, slot, name, lower, upper, divisor in self.binds:
            size = shape[axis]
            if not lower <= size <= upper or size % divisor:
                raise self._dim_error(axis, shape, bound_problem(name, (lower, upper, divisor), size) or "")
            values[slot] = size
        for axis, size in self.consts:
            if shape[axis] != size:
                raise self._dim_error(axis, shape, f"expects {size}, got {shape[axis]}")
        for axis, slot, text in self.checks:
            if shape[axis] != values[slot]:
                raise self._dim_error(axis, shape, f"expects {text} = {values[slot]}, got {shape[axis]}")

    def _dim_error(self, axis: int, shape: tuple[int, ...], problem: str) -> ExecutionError:
        return self._error(f"dimension {axis} of shape {shape}: {problem}")

    def _error(self, problem: str) -> ExecutionError:
        kind = InputError if self.what.startswith("argument ") else ShapeMismatchError
        return kind(f"{self.what}: {problem}")
