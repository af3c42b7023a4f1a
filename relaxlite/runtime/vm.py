"""Bytecode interpreter (docs/runtime-abi.md, "Bytecode").

At its first call a function is decoded to basic blocks of Python closures, one per instruction. A call runs the
closures over a list of registers. Constants and immediates of the function follow the registers, so every operand is an
index into that list; the last element takes unused results.

Thread-safe: a call modifies only its own registers and arenas.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import TypeAlias

import numpy as np

from relaxlite import config
from relaxlite.errors import (
    ArtifactError,
    ExecutionError,
    OutOfMemoryError,
    RelaxliteError,
)
from relaxlite.runtime import array_reader, cpu, libraries, native, support, threadpool
from relaxlite.runtime.decoder import BasicBlock, DecodedFunction, Decoder, Step, Value, kernel_error, map_tensors
from relaxlite.runtime.executable import (
    Entry,
    ExecutableData,
    instruction_text,
    validate,
)
from relaxlite.runtime.gpu.driver import current_driver
from relaxlite.runtime.gpu.modules import DeviceModules
from relaxlite.runtime.gpu.space import GpuSpace
from relaxlite.runtime.host import HostFunction
from relaxlite.runtime.memory import ArenaPool, Block
from relaxlite.runtime.memory_check import WatchedArenas
from relaxlite.runtime.space import HostSpace, Space
from relaxlite.runtime.tensor import Tensor
from relaxlite.runtime.weights import Constants

KernelFunction: TypeAlias = Callable[[bytes, int], int]  # (packed buffer addresses, symbols' address) -> status

_KERNEL_TYPE = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
_HOLD_TYPE = ctypes.CFUNCTYPE(None, ctypes.c_int32)

register_extern = libraries.register_function  # functions called by `extern:SYMBOL`, which may also take immediates


class VirtualMachine:
    """Runs the functions of an executable.

    `kernels`: replace the compiled kernels, as for profiling. `constants`, `space`: shared with another VM of the
    executable. `is_checked`: bytecode and target are already validated; else ArtifactError where they are invalid.
    """

    def __init__(
        self,
        data: ExecutableData,
        *,
        kernels: Mapping[str, KernelFunction] | None = None,
        constants: Constants | None = None,
        space: Space | None = None,
        is_checked: bool = False,
    ) -> None:
        if not is_checked:
            validate(data)
            _check_machine(data)
        self.data = data
        self.poison = bool(config.get("poison_memory"))
        self.check_memory = bool(config.get("check_memory"))
        self.space = space or _space_of(data, check_memory=self.check_memory)
        self._modules: DeviceModules | None = None
        self._lock = threading.Lock() if data.target.device else nullcontext()  # the stream's work is of one call
        self.pool = ArenaPool(poison=self.poison, new=self.space.arena)
        self._library: object = None  # keeps the kernels' code alive
        self.missing_libraries: tuple[str, ...] = ()
        support.register_objects(data.support)
        if kernels is None:
            bound = libraries.bind(data.libraries)
            self.missing_libraries = bound.missing
            if isinstance(self.space, GpuSpace):
                self._modules = DeviceModules(data, self.space)
            self._library, kernels = _link(data, {**bound.cells, **(self._modules.symbols if self._modules else {})})
            self._library = self._library, bound
        self.kernels = kernels
        self._hold = _hold_workers() if data.kernels else _ignore
        self.constants = constants or Constants([self.space.constant(array) for array in data.constants])
        self._decoded: dict[str, DecodedFunction] = {}  # decoded lazily, as host functions replace most calls

    def run(self, name: str, args: Sequence[Value]) -> Value:
        """Call a function from outside, with tensors of the host; workers of the thread pool keep spinning during the
        call. Entries write the arguments that their signature donates."""
        self._hold(1)
        try:
            if isinstance(self.space, GpuSpace):
                return self._run_on_device(name, args)
            return self.invoke(name, args)
        finally:
            self._hold(-1)

    def _run_on_device(self, name: str, args: Sequence[Value]) -> Value:
        """Call a function with copies of the arguments on the device; returns copies of the results on the host."""
        space, entry = self.space, self.data.entries.get(name)
        with self._lock:
            space.enter()
            if self._modules is not None:
                self._modules.forget_failures()
            placed = [space.import_tensor(arg) for arg in args]
            result = self.invoke(name, placed)
            self.raise_failed_check()
            for spec, copy, arg in zip(entry.signature.inputs if entry else (), placed, args, strict=False):
                if entry is not None and spec.name in entry.signature.donated:
                    space.write_back(copy, arg)
            return map_tensors(space.export_tensor, result)

    def read(self, tensor: Tensor) -> np.ndarray:
        """Values of a tensor, for control flow and shapes that depend on data."""
        self.raise_failed_check()
        return self.space.read(tensor)

    def raise_failed_check(self) -> None:
        """Raise ExecutionError if a check on a device has failed in this call."""
        failure = self._modules.take_failure() if self._modules is not None else None
        if failure is not None:
            raise kernel_error(*failure, ())

    def invoke(self, name: str, args: Sequence[Value]) -> Value:
        """Call a function, also from bytecode. ExecutionError and its subclasses name the failed instruction."""
        decoded = self._decoded.get(name)
        if decoded is None:
            decoded = self._decoded[name] = Decoder(self, self.data.functions[name]).decode()
        blocks = decoded.blocks
        block = blocks[0]
        registers = [*args, *decoded.initial]
        arenas: list[Block] = WatchedArenas(decoded.function) if self.check_memory else []
        step: Step | None = None
        try:
            while True:
                for step in block.steps:
                    step(registers, arenas)
                if block.then < 0:
                    result = registers[block.register]
                    if isinstance(arenas, WatchedArenas):
                        arenas.verify_result(result)
                    return _detach(self.space, result, arenas) if arenas else result
                is_taken = block.register < 0 or _truth(self, registers[block.register])
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

    def waiting_kernels(self) -> Mapping[str, KernelFunction]:
        """The kernels, each of which returns when its work has ended, for measurements."""
        wait, kernels = self.space.wait, self.kernels
        if not isinstance(self.space, GpuSpace):
            return kernels

        def waiting(kernel: KernelFunction) -> KernelFunction:
            def call(buffers: bytes, symbols: int) -> int:
                status = kernel(buffers, symbols)
                wait()
                return status

            return call

        return {name: waiting(kernel) for name, kernel in kernels.items()}

    def host_function(self, entry: Entry) -> HostFunction | None:
        """Load the host function of an entry; None where the executable or this Python does not support one."""
        if not entry.host.object_code or not array_reader.is_supported():
            return None
        addresses = [ctypes.cast(self.kernels[name], ctypes.c_void_p).value or 0 for name in self.data.kernels]  # type: ignore[arg-type]
        return HostFunction(entry, addresses, self.constants, poison=self.poison)

    def release_memory(self) -> int:
        """Free unused arenas; returns their size in bytes."""
        nbytes = self.pool.release()
        return self.space.release() if isinstance(self.space, GpuSpace) else nbytes


def _space_of(data: ExecutableData, *, check_memory: bool) -> Space:
    """The memory that an executable's tensors lie in. ArtifactError where its device is missing."""
    if not data.target.device:
        return HostSpace()
    if check_memory:
        raise ArtifactError("RELAXLITE_CHECK_MEMORY reads the memory of tensors, which lies on a GPU; unset it")
    return GpuSpace(current_driver())


def _link(data: ExecutableData, symbols: Mapping[str, int]) -> tuple[object, dict[str, KernelFunction]]:
    """Link the kernels; returns (owner of their code, kernels by name)."""
    if not data.kernels:
        return None, {}
    exports = [kernel.symbol for kernel in data.kernels.values()]
    library = native.load_objects(data.objects, symbols, exports=exports)
    return library, {name: _KERNEL_TYPE(library.address(kernel.symbol)) for name, kernel in data.kernels.items()}


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


def _truth(vm: VirtualMachine, condition: Tensor) -> bool:
    if condition.dtype != "bool" or math.prod(condition.shape) != 1:
        raise ExecutionError(f"a condition must be one bool, got {condition!r}")
    return bool(vm.read(condition).reshape(-1)[0])


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


def _detach(space: Space, value: Value, arenas: list[Block]) -> Value:
    """Copy tensors of a value out of `arenas`, which are returned to the pool."""
    return map_tensors(lambda t: space.copy(t) if any(t.owner is arena for arena in arenas) else t, value)
