"""Translate VM instructions to LLVM IR with the interpreter's checks, for host functions (codegen/llvm/host.py).

Registers with one definition are SSA values; registers with several, of branches and loops, are stack variables. Loads
of heap slots, products of dimensions and passed checks are reused up to the next label, as no LLVM pass does that here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.host_inline import NotNativeError
from relaxlite.codegen.host_plan import HostPlan, immediate
from relaxlite.codegen.llvm.emitter import Emitter, Lines, ModuleEmitter, Val, int_const
from relaxlite.codegen.llvm.host_values import (
    BLOCK_HEADER,
    HostArena,
    HostHeap,
    HostShape,
    HostTensor,
    HostValue,
    fields_of,
    replace_tensors,
    tensors_of,
    type_key,
    with_fields,
)
from relaxlite.records import dataclass
from relaxlite.runtime import host
from relaxlite.runtime.executable import Call, Const, KernelInfo, Operand, Reg, Signature

_MAX_I64 = (1 << 63) - 1
NULL = Val("null", "ptr")


@dataclass(frozen=True, slots=True)
class HostProgram:
    """Input of host code generation: the plan of the bytecode, signature, kernels, constants and frame layout."""

    plan: HostPlan
    signature: Signature
    kernels: Mapping[str, KernelInfo]
    constants: Sequence[np.ndarray]
    layout: host.FrameLayout


@dataclass(slots=True)
class _Variable:
    """A register with several definitions: an alloca per field, and an owner slot per tensor."""

    sample: HostValue
    places: list[Val]
    owners: list[Val]


@dataclass(slots=True)
class AvailableValues:
    """Available values since the last label: heap slots, products of dimensions, and bounds checks of views."""

    slots: dict[tuple[Operand, int], Val] = field(default_factory=dict)
    products: dict[tuple[str, ...], Val] = field(default_factory=dict)
    views: set[tuple[str, ...]] = field(default_factory=set)


class HostWriter:
    """Base class of the writers of prepare and run. `variables`: registers with several definitions."""

    def __init__(self, module: ModuleEmitter, program: HostProgram, variables: frozenset[int]) -> None:
        self.program, self.plan, self.layout = program, program.plan, program.layout
        self.module, self.e = module, Emitter(module)
        self.e.start("entry")
        self.owners: Lines = (
            self.e.reserve()
        )  # insertion point of the array of owner slots, whose size is known at the end
        self.entry: Lines = self.e.reserve()
        self.frame = Val("%frame", "ptr")
        self.known = AvailableValues()
        self.is_variable = variables
        self.variables: dict[int, _Variable] = {}
        self.registers: dict[int, HostValue] = {}
        self.tables: dict[int, Val] = {}
        self.num_owners = 0
        self.owner_of: dict[int, Val] = {}  # allocating instruction -> owner slot
        self.numbers = {name: number for number, name in enumerate(program.kernels)}
        self.arguments: Val | None = None  # stack array of kernel arguments
        self.builtins: dict[str, Callable[[int, int, tuple[Operand, ...]], None]] = {
            "alloc_heap": self._alloc_heap,
            "match_shape": self._match_shape,
            "alloc_tensor": self._alloc_tensor,
            "alloc_arena": self._alloc_arena,
            "view": self._view,
            "reshape": self._reshape,
            "tensor_to_shape": self._tensor_to_shape,
            "make_tuple": self._make_tuple,
            "tuple_get": self._tuple_get,
            "copy": self._copy,
        }

    # Memory

    def at(self, pointer: Val, word: int, hint: str = "at") -> Val:
        """Address of an 8-byte word."""
        return self.e.op(f"getelementptr i64, {pointer}, i64 {word}", "ptr", 0, hint) if word else pointer

    def load(self, pointer: Val, elem: str, hint: str = "v", align: int = 8) -> Val:
        return self.e.op(f"load {elem}, {pointer}, align {align}", elem, 0, hint)

    def store(self, value: Val, pointer: Val) -> None:
        self.e.line(f"store {value}, {pointer}, align 8")

    def load_word(self, word: int, elem: str = "i64", hint: str = "v") -> Val:
        return self.load(self.at(self.frame, word), elem, hint)

    def store_word(self, value: Val, word: int) -> None:
        self.store(value, self.at(self.frame, word))

    def give_up_if(self, conditions: Sequence[Val]) -> None:
        """Branch to the exit "give_up" if any condition (i1) holds."""
        if not conditions:
            return
        bad = conditions[0]
        for further in conditions[1:]:
            bad = self.e.binary("or", bad, further, "bad")
        passed = self.e.fresh("passed")
        self.e.branch_if(bad, "give_up", passed)
        self.e.start(passed)

    # Values

    def parameters(self) -> list[HostTensor]:
        """Inputs as tensors; constant dimensions are taken from the signature."""
        tensors = []
        for at, spec in zip(self.layout.inputs, self.program.signature.inputs, strict=True):
            dims = tuple(
                int_const(size) if isinstance(size, int) else self.load_word(at + 1 + axis, hint="dim")
                for axis, size in enumerate(spec.shape)
            )
            tensors.append(HostTensor(self.load_word(at, "ptr", "input"), dims, spec.dtype))
        return tensors

    def _heap(self, register: int) -> HostHeap:
        first, slots = self.plan.heaps[register]
        return HostHeap(self.at(self.frame, self.layout.heap + first, "heap"), slots)

    def value(self, operand: Operand) -> HostValue:
        """Value of a register or constant. NotNativeError for a register without a definition before this use."""
        if isinstance(operand, Const):
            return self._constant(operand.index)
        assert isinstance(operand, Reg)
        if operand.index in self.plan.heaps:
            return self._heap(operand.index)
        if operand.index in self.is_variable:
            return self._read(operand.index)
        if operand.index not in self.registers:
            raise NotNativeError(f"register r{operand.index} is read before the code that writes it")
        return self.registers[operand.index]

    def tensor(self, operand: Operand) -> HostTensor:
        return self.as_tensor(self.value(operand))

    def as_tensor(self, value: HostValue) -> HostTensor:
        """The value as a tensor, a heap as int64[slots]; NotNativeError for other values."""
        if isinstance(value, HostHeap):
            return HostTensor(value.ptr, (int_const(value.slots),), "int64")
        if not isinstance(value, HostTensor):
            raise NotNativeError("an instruction is given a value of the wrong kind")
        return value

    def _constant(self, index: int) -> HostTensor:
        """A constant. Its address is loaded at each use: values that live through the function cost compile time."""
        array = self.program.constants[index]
        pointer = self.load(self.at(self.table(host.CONSTANTS, "constants"), index), "ptr", f"c{index}")
        return HostTensor(pointer, tuple(map(int_const, array.shape)), dtypes.from_numpy(array.dtype) or "")

    def table(self, word: int, name: str) -> Val:
        """Address table whose pointer is in a word of the frame."""
        if word not in self.tables:
            with self.e.place(self.entry):
                self.tables[word] = self.load_word(word, "ptr", name)
        return self.tables[word]

    def define(self, dst: int, value: HostValue) -> None:
        """Assign a value to a register; -1: none."""
        if dst < 0:
            return
        if dst in self.is_variable:
            self._write(dst, value)
        else:
            self.registers[dst] = self._retain_borrowed(value)

    def _retain_borrowed(self, value: HostValue) -> HostValue:
        """The value with its own references to the blocks of borrowed tensors."""
        borrowed = [t for t in tensors_of(value) if t.is_borrowed and t.owner is not None]
        for tensor in borrowed:
            self.e.line(f"call void @retain({tensor.owner})")
        for tensor in borrowed:
            assert tensor.owner is not None
            self._own(tensor.owner, self._new_slot())
        return replace_tensors(value, {t: HostTensor(t.ptr, t.dims, t.dtype, t.owner) for t in borrowed})

    def release(self, site: int) -> None:
        """Release the block that an instruction has allocated."""
        self._own(NULL, self.owner_of[site])

    def _own(self, block: Val, slot: Val) -> None:
        """Move a reference to a block into an owner slot, and release the block that the slot held."""
        old = self.load(slot, "ptr", "old")
        self.store(block, slot)
        self.e.line(f"call void @release({old})")

    def _new_slot(self) -> Val:
        self.num_owners += 1
        with self.e.place(self.entry):
            return self.e.op(f"getelementptr ptr, ptr %owners, i64 {self.num_owners - 1}", "ptr", 0, "owner_at")

    def _read(self, register: int) -> HostValue:
        if register not in self.variables:
            raise NotNativeError(f"register r{register} is read before the code that writes it")
        variable = self.variables[register]
        values = (
            self.load(place, sample.elem, f"r{register}")
            for place, sample in zip(variable.places, fields_of(variable.sample), strict=True)
        )
        owners = (self.load(slot, "ptr", "owner") for slot in variable.owners)
        return with_fields(variable.sample, values, owners)

    def _write(self, register: int, value: HostValue) -> None:
        if type_key(value) is None:
            raise NotNativeError("a heap or an arena goes through a branch")
        if register not in self.variables:
            with self.e.place(self.entry):
                places = [self.e.op(f"alloca {f.elem}", "ptr", 0, f"r{register}_at") for f in fields_of(value)]
            self.variables[register] = _Variable(value, places, [self._new_slot() for _ in tensors_of(value)])
        variable = self.variables[register]
        if type_key(variable.sample) != type_key(value):
            raise NotNativeError(f"register r{register} holds values of several types or ranks")
        owners = [tensor.owner or NULL for tensor in tensors_of(value)]
        for owner in owners:
            self.e.line(f"call void @retain({owner})")
        for place, item in zip(variable.places, fields_of(value), strict=True):
            self.store(item, place)
        replaced = [self.load(slot, "ptr", "old") for slot in variable.owners]
        for slot, owner in zip(variable.owners, owners, strict=True):
            self.store(owner, slot)
        for block in replaced:
            self.e.line(f"call void @release({block})")

    # Shapes

    def dims(self, heap: Operand, dims: Sequence[int]) -> tuple[Val, ...]:
        """Dimensions as the bytecode encodes them: constants, or ~slot of the heap."""
        return tuple(int_const(dim) if dim >= 0 else self.slot(heap, ~dim) for dim in dims)

    def slot(self, heap: Operand, slot: int) -> Val:
        """Value of a heap slot."""
        word = self._slot_word(heap, slot)
        if (heap, slot) not in self.known.slots:
            self.known.slots[heap, slot] = self.load_word(word, hint=f"slot{slot}")
        return self.known.slots[heap, slot]

    def _slot_word(self, heap: Operand, slot: int) -> int:
        first, slots = self.plan.heaps.get(heap.index, (0, 0)) if isinstance(heap, Reg) else (0, 0)
        if slot >= slots:
            raise NotNativeError(f"there is no heap slot {slot}")
        return self.layout.heap + first + slot

    def product(self, dims: Sequence[Val], factor: int) -> Val:
        """Product of dimensions and a constant; gives up on a negative dimension or int64 overflow."""
        unknown = []
        for dim in dims:
            if dim.is_const:
                factor *= int(dim.text)
            else:
                unknown.append(dim)
        if not 0 <= factor <= _MAX_I64:
            raise NotNativeError("a tensor is too large, or has a negative dimension")
        key = (str(factor), *(dim.text for dim in unknown))
        if key not in self.known.products:
            self.known.products[key] = self._multiply(unknown, factor)
        return self.known.products[key]

    def _multiply(self, dims: Sequence[Val], factor: int) -> Val:
        total = int_const(factor)
        bad = [self.e.icmp("slt", dim, int_const(0), "negative") for dim in dims]
        for dim in dims:
            pair = self.e.op(f"call {{ i64, i1 }} @llvm.smul.with.overflow.i64({total}, {dim})", "", 0, "pair")
            total = self.e.op(f"extractvalue {{ i64, i1 }} {pair.text}, 0", "i64", 0, "product")
            bad.append(self.e.op(f"extractvalue {{ i64, i1 }} {pair.text}, 1", "i1", 0, "overflows"))
        self.give_up_if(bad)
        return total

    # Instructions

    def instruction(self, at: int, call: Call) -> None:
        """Emit a kernel call or a builtin."""
        self.e.comment(f"{at}: {call.callee.replace(chr(10), ' ')}")
        kind, _, name = call.callee.partition(":")
        if kind == "kernel":
            self._kernel(name, call.operands)
        else:
            self.builtins[name](at, call.dst, call.operands)

    def _kernel(self, name: str, operands: tuple[Operand, ...]) -> None:
        first, info = immediate(operands[1]), self.program.kernels[name]
        needed = info.num_symbols or 0
        if needed:
            self._slot_word(operands[0], first + needed - 1)
        values = [self.value(operand) for operand in operands[2:]]
        tensors = list(map(self.as_tensor, values))
        array = self._argument_array()
        for k, tensor in enumerate(tensors):
            self.store(tensor.ptr, self.at(array, k))
        table = self.table(host.KERNELS, "kernels")
        address = self.load(self.at(table, self.numbers[name]), "ptr", "kernel")
        symbols = self.at(self.frame, self._slot_word(operands[0], first), "symbols") if needed else NULL
        status = self.e.op(f"call i32 {address.text}({array}, {symbols})", "i32", 0, "status")
        if any(isinstance(value, HostHeap) for value in values):
            self.known = AvailableValues()
        self.give_up_if([self.e.icmp("ne", status, int_const(0, "i32"), "failed")])

    def _argument_array(self) -> Val:
        if self.arguments is None:
            code = self.plan.function.instructions
            max_operands = max(len(i.operands) for i in code if isinstance(i, Call) and i.callee.startswith("kernel:"))
            with self.e.place(self.entry):
                self.arguments = self.e.op(f"alloca [{max_operands} x ptr]", "ptr", 0, "arguments_of_kernel")
        return self.arguments

    def _alloc_heap(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        heap = self._heap(dst)
        self.e.line(f"call void @llvm.memset.p0.i64({heap.ptr}, i8 0, i64 {8 * heap.slots}, i1 false)")

    def _match_shape(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        source, spec = self.value(operands[0]), immediate(operands[2])
        dims = source.dims if isinstance(source, HostTensor | HostShape) else self.tensor(operands[0]).dims
        if len(dims) != len(spec):
            raise NotNativeError("a shape is matched that has another rank")
        bad: list[Val] = []
        order = {"bind": 0, "const": 1, "check": 2, "any": 3}
        for item, dim in sorted(zip(spec, dims, strict=True), key=lambda pair: order[pair[0][0]]):
            match item:
                case ("bind", slot, _, lower, upper, divisor):
                    bad += self.out_of_bounds(dim, lower, upper, divisor, is_size=isinstance(source, HostTensor))
                    self.store_word(dim, self._slot_word(operands[1], slot))
                    self.known.slots[operands[1], slot] = dim
                case ("const", size):
                    bad += self.differs(dim, int_const(size))
                case ("check", slot, _):
                    bad += self.differs(dim, self.slot(operands[1], slot))
        self.give_up_if(bad)

    def differs(self, a: Val, b: Val) -> list[Val]:
        """Conditions (i1) that two values differ; empty where they are statically equal."""
        return [] if a == b else [self.e.icmp("ne", a, b, "differs")]

    def out_of_bounds(
        self, dim: Val, lower: int | None, upper: int | None, divisor: int, *, is_size: bool
    ) -> list[Val]:
        """Conditions (i1) that a symbol's value breaks its bounds; `is_size`: the value is known to be nonnegative."""
        bad = []
        if lower is not None and not (is_size and lower <= 0):
            bad.append(self.e.icmp("slt", dim, int_const(lower), "low"))
        if upper is not None and upper < _MAX_I64:
            bad.append(self.e.icmp("sgt", dim, int_const(upper), "high"))
        if divisor > 1:
            remainder = self.e.binary("srem", dim, int_const(divisor), "rest")
            bad.append(self.e.icmp("ne", remainder, int_const(0), "uneven"))
        return bad

    def _alloc_tensor(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        dims, dtype = self.dims(operands[0], immediate(operands[1])), immediate(operands[2])
        pointer, owner = self.allocate(at, self.product(dims, dtypes.itemsize(dtype)))
        self.define(dst, HostTensor(pointer, dims, dtype, owner))

    def allocate(self, at: int, nbytes: Val) -> tuple[Val, Val]:
        """Allocate memory for instruction `at`; returns (pointer, owning block), which an owner slot holds."""
        return self._block(at, nbytes)

    def _block(self, at: int, nbytes: Val) -> tuple[Val, Val]:
        block = self.e.op(f"call ptr @new_block({self.frame}, {nbytes})", "ptr", 0, "block")
        self.give_up_if([self.e.icmp("eq", block, NULL, "none")])
        self.owner_of[at] = self._new_slot()
        self._own(block, self.owner_of[at])
        return self.e.op(f"getelementptr i8, {block}, i64 {BLOCK_HEADER}", "ptr", 0, "data"), block

    def _alloc_arena(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        (nbytes,) = self.dims(operands[0], (immediate(operands[1]),))
        if self.plan.arena is None or self.plan.arena[0] != at:
            pointer, owner = self._block(at, nbytes)
            self.registers[dst] = HostArena(pointer, nbytes, owner)
            return
        available = self.load_word(host.ARENA_BYTES, hint="room")
        self.give_up_if([self.e.icmp("ugt", nbytes, available, "too_small")])
        self.registers[dst] = HostArena(self.load_word(host.ARENA, "ptr", "arena"), nbytes, None)

    def _view(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        source = self.value(operands[0])
        if not isinstance(source, HostArena | HostTensor):
            raise NotNativeError("a view of something that is neither an arena nor a tensor")
        dtype = immediate(operands[4])
        offset, *dims = self.dims(operands[1], (immediate(operands[2]), *immediate(operands[3])))
        nbytes = self.product(dims, dtypes.itemsize(dtype))
        total = self._bytes_of(source)
        key = (source.ptr.text, total.text, offset.text, nbytes.text)
        if key not in self.known.views:
            self.known.views.add(key)
            room = self.e.binary("sub", total, nbytes, "room")
            negative = self.e.icmp("slt", offset, int_const(0), "negative")
            self.give_up_if([negative, self.e.icmp("sgt", offset, room, "outside")])
        pointer = self.e.op(f"getelementptr i8, {source.ptr}, {offset}", "ptr", 0, f"r{dst}")
        is_borrowed = isinstance(source, HostTensor) and source.is_borrowed
        self.define(dst, HostTensor(pointer, tuple(dims), dtype, source.owner, is_borrowed))

    def _bytes_of(self, memory: HostArena | HostTensor) -> Val:
        if isinstance(memory, HostArena):
            return memory.nbytes
        return self.product(memory.dims, dtypes.itemsize(memory.dtype))

    def _reshape(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        source, dims = self.value(operands[0]), self.dims(operands[1], immediate(operands[2]))
        if not isinstance(source, HostTensor):
            raise NotNativeError("a reshape of something that is no tensor")
        self.give_up_if(self.differs(self.product(source.dims, 1), self.product(dims, 1)))
        self.define(dst, HostTensor(source.ptr, dims, source.dtype, source.owner, source.is_borrowed))

    def _tensor_to_shape(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        source = self.tensor(operands[0])
        if len(source.dims) > 1 or not dtypes.is_integer(source.dtype):
            raise NotNativeError("a shape is read from a tensor that cannot be one")
        if not all(dim.is_const for dim in source.dims):
            raise NotNativeError("a shape's rank is known only at run time")
        count = int(source.dims[0].text) if source.dims else 1
        size = dtypes.itemsize(source.dtype)
        widen, items = ("sext" if dtypes.is_signed(source.dtype) else "zext"), []
        for k in range(count):
            place = self.e.op(f"getelementptr i8, {source.ptr}, i64 {k * size}", "ptr", 0, "item_at")
            item = self.load(place, f"i{8 * size}", "item", size)
            items.append(self.e.cast(widen, item, "i64", "size"))
        if source.dtype == "uint64":
            self.give_up_if([self.e.icmp("slt", item, int_const(0), "huge") for item in items])
        self.define(dst, HostShape(tuple(items)))

    def _make_tuple(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        self.define(dst, tuple(map(self.value, operands)))

    def _tuple_get(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        source, index = self.value(operands[0]), immediate(operands[1])
        if not isinstance(source, tuple) or index >= len(source):
            raise NotNativeError("a field is taken of something that does not have it")
        self.define(dst, source[index])

    def _copy(self, at: int, dst: int, operands: tuple[Operand, ...]) -> None:
        source = self.tensor(operands[0])
        nbytes = self.product(source.dims, dtypes.itemsize(source.dtype))
        pointer, owner = self._block(at, nbytes)
        self.e.line(f"call void @llvm.memcpy.p0.p0.i64({pointer}, {source.ptr}, {nbytes}, i1 false)")
        self.define(dst, HostTensor(pointer, source.dims, source.dtype, owner))
