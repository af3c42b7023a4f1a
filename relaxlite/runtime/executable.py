"""Data model of executables: bytecode, kernels, weights and signatures, as the compiler hands them to the runtime.

docs/runtime-abi.md ("Bytecode") specifies the instructions; `vm.py` runs them, `artifact.py` stores executables in
files. `validate` rejects bytecode with undefined references.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any, TypeAlias

import numpy as np

from relaxlite import dtypes
from relaxlite.errors import ArtifactError
from relaxlite.records import dataclass
from relaxlite.version import __version__

ENTRY = "main"

# Names that code of launches on a GPU imports: a routine of the driver, and cells (8-byte words) by prefix.
LAUNCH_ROUTINE = "cuLaunchKernel"
STREAM_CELL = "relaxlite_gpu.stream"
LAUNCH_CELLS = {"function": "relaxlite_gpu.function.", "status": "relaxlite_gpu.status."}
LAUNCH_FAILED = -1000  # minus the driver's error: the status of a kernel whose launch the driver refused


def launch_symbol(kernel: str, number: int) -> str:
    """Name of the device function of a kernel's launch."""
    return f"{kernel}_{number}"


ImmValue: TypeAlias = "int | str | tuple[ImmValue, ...] | None"
SymbolBounds: TypeAlias = tuple[int | None, int | None, int]  # lower, upper, divisor


@dataclass(frozen=True, slots=True)
class Reg:
    """A register operand."""

    index: int


@dataclass(frozen=True, slots=True)
class Const:
    """A constant operand: an index into `ExecutableData.constants`."""

    index: int


@dataclass(frozen=True, slots=True)
class Imm:
    """An immediate operand."""

    value: ImmValue


Operand: TypeAlias = Reg | Const | Imm


@dataclass(frozen=True, slots=True)
class Call:
    """Calls a kernel, function, library routine or builtin; `dst`: the register of the result."""

    dst: int  # -1: no result
    callee: str  # "kernel:NAME", "func:NAME", "extern:SYMBOL" or "builtin:NAME"
    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Ret:
    """Returns the value of a register."""

    register: int


@dataclass(frozen=True, slots=True)
class Goto:
    """Jumps to an instruction."""

    target: int


@dataclass(frozen=True, slots=True)
class If:
    """Falls through where the one-element bool tensor in `register` is true, else jumps to `else_target`."""

    register: int
    else_target: int


Instruction: TypeAlias = Call | Ret | Goto | If


@dataclass(frozen=True, slots=True)
class VMFunction:
    """A bytecode function."""

    name: str
    params: tuple[str, ...]  # in registers 0, 1, ... at entry
    num_registers: int
    instructions: tuple[Instruction, ...]
    locations: tuple[str | None, ...] = ()  # source location of each instruction, as an ONNX node; empty: unknown

    def location(self, at: int) -> str | None:
        """Source location of an instruction."""
        return self.locations[at] if self.locations else None


@dataclass(frozen=True, slots=True)
class KernelCost:
    """Lower bounds of the cost of one call: operations, bytes read, bytes written (rules: passes/cost.py).

    Texts for `expression.parse_expression`, in which s0, s1, ... are the values of the kernel's symbols, in order.
    """

    symbols: tuple[str, ...]  # names of the symbols
    flops: str
    bytes_read: str
    bytes_written: str
    is_bound: bool = True  # False: loops with data-dependent extents count as one iteration


@dataclass(frozen=True, slots=True)
class KernelInfo:
    """A compiled tensor program. `checks[k - 1]`: message of status k. The counts are checked at calls, None:
    unknown."""

    name: str
    symbol: str  # name in the object code
    checks: tuple[str, ...] = ()
    num_buffers: int | None = None
    num_symbols: int | None = None
    cost: KernelCost | None = None
    launches: int = 0  # on a GPU; device functions are named by `launch_symbol`


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output of a model. Each dimension is a constant or the text of a symbolic expression."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    bounds: Mapping[str, SymbolBounds] = field(default_factory=dict)  # of the symbols in `shape`
    element: str = ""  # what a caller's elements are where the dtype only stores them: "int4", "string"

    def __str__(self) -> str:
        dims = ", ".join(str(dim) for dim in self.shape)
        facts = [text for symbol, bound in self.bounds.items() if (text := bound_text(symbol, bound))]
        return f"{self.name}: {self.element or self.dtype}[{dims}]" + (f" where {', '.join(facts)}" if facts else "")


def bound_text(symbol: str, bound: SymbolBounds) -> str:
    """Bounds of a symbol as text, such as "1 <= n <= 512, n % 8 == 0"; empty for n >= 0 alone."""
    lower, upper, divisor = bound
    below = f"{lower} <= " if lower else ""
    above = f" <= {upper}" if upper is not None else ""
    pieces = [f"{below}{symbol}{above}"] if below or above else []
    if divisor > 1:
        pieces.append(f"{symbol} % {divisor} == 0")
    return ", ".join(pieces)


def bound_problem(symbol: str, bound: SymbolBounds, value: int) -> str | None:
    """Message on how a value of a symbol breaks its bounds; None where it does not."""
    lower, upper, divisor = bound
    if lower is not None and value < lower:
        return f"{symbol} = {value} is below its lower bound {lower}"
    if upper is not None and value > upper:
        return f"{symbol} = {value} exceeds its upper bound {upper}"
    return f"{symbol} = {value} is not a multiple of {divisor}" if value % divisor else None


@dataclass(frozen=True, slots=True)
class Signature:
    """Inputs and outputs of an entry.

    `donated`: names of inputs whose arrays a call overwrites. `structure`: nesting of arguments and results, text of a
    `CallStructure`; empty for arrays in a row. `state`: names of the last inputs, which the executable keeps.
    `input_forms`, `output_forms`: (name, form) of each argument and result (forms.py); empty if all are plain tensors.
    `strings`: the text that the model may give.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    donated: tuple[str, ...] = ()
    structure: str = ""
    state: tuple[str, ...] = ()
    input_forms: tuple[tuple[str, str], ...] = ()
    output_forms: tuple[tuple[str, str], ...] = ()
    strings: tuple[str, ...] = ()

    @property
    def bounds(self) -> dict[str, SymbolBounds]:
        """Bounds by symbol, in order of first occurrence in the signature."""
        merged: dict[str, SymbolBounds] = {}
        for spec in (*self.inputs, *self.outputs):
            for symbol, bound in spec.bounds.items():
                merged.setdefault(symbol, bound)
        return merged


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """Requirements of the object code on the machine: target triple, CPU name, features.

    `device`: the target of the code of launches, such as "cuda -arch=sm_80"; empty without launches.
    """

    triple: str = ""
    cpu: str = ""
    features: tuple[str, ...] = ()  # LLVM's names, all required: "avx2", "avx512f", ...
    device: str = ""

    @property
    def processor(self) -> str:
        """The processor that does the work: the GPU, else the CPU."""
        return self.device or self.cpu


@dataclass(frozen=True, slots=True)
class Metadata:
    """Information about an executable that running does not depend on."""

    producer: str = __version__
    llvm: str = ""
    provenance: Mapping[str, Any] = field(default_factory=dict)  # origin of the model
    memory_plan: Mapping[str, Any] = field(default_factory=dict)  # summary of the memory planner
    info: Mapping[str, Any] = field(default_factory=dict)  # free-form JSON, shown by `relaxlite inspect`


@dataclass(frozen=True, slots=True)
class LibraryInfo:
    """A library whose routines kernels call: a shared library, or "python" for registered Python functions."""

    name: str
    symbols: tuple[str, ...]
    file: str = ""  # path at compile time; empty for libraries that relaxlite locates itself
    required: tuple[str, ...] = ()  # symbols without a fallback kernel in the model

    def __str__(self) -> str:
        wanted = [f"{s} (required)" if s in self.required else s for s in self.symbols]
        return f"{self.name}{f' ({self.file})' if self.file else ''}: {', '.join(wanted)}"


@dataclass(frozen=True, slots=True)
class HostCode:
    """The host function (runtime/host.py) of an entry; without object code, `reason` says why bytecode is
    interpreted."""

    object_code: bytes = b""
    heap_slots: int = 0
    reason: str = "no host function was compiled"


@dataclass(frozen=True, slots=True)
class Entry:
    """An exported function; all entries of an executable share kernels and weights."""

    signature: Signature
    host: HostCode = HostCode()


@dataclass(frozen=True, slots=True, eq=False)
class ExecutableData:
    """A compiled model as plain data."""

    functions: Mapping[str, VMFunction]  # contains ENTRY, whose parameters are the signature's inputs
    signature: Signature
    kernels: Mapping[str, KernelInfo] = field(default_factory=dict)
    objects: tuple[bytes, ...] = ()  # object files of the kernels, in the target's format
    constants: tuple[np.ndarray, ...] = ()
    host: HostCode = HostCode()
    target: TargetInfo = TargetInfo()
    metadata: Metadata = Metadata()
    libraries: tuple[LibraryInfo, ...] = ()
    attachments: Mapping[str, bytes] = field(default_factory=dict)  # other files of the model, such as its tokenizer
    support: Mapping[str, bytes] = field(
        default_factory=dict
    )  # object code of the runtime's own functions by key, see support.py
    extra_entries: Mapping[str, Entry] = field(default_factory=dict)  # exported functions besides ENTRY, by name
    device_modules: tuple[bytes, ...] = ()  # PTX of the kernels' launches

    @property
    def entries(self) -> dict[str, Entry]:
        """Exported functions by name, ENTRY first."""
        return {ENTRY: Entry(self.signature, self.host), **self.extra_entries}


# Operand kinds of builtins: "v" a register or constant, "h" the same or Imm(None) (no heap), "*" any number of values,
# "n" Imm(int >= 0), "s" Imm(str), "t" Imm(dtype), "d" Imm(dim), "D" Imm(dims), "S" Imm(match_shape's spec).
BUILTINS: dict[str, str] = {
    "alloc_heap": "n",
    "match_shape": "vhSs",
    "alloc_tensor": "hDt",
    "alloc_arena": "hd",
    "view": "vhdDt",
    "reshape": "vhD",
    "tensor_to_shape": "v",
    "make_tuple": "*",
    "tuple_get": "vn",
    "copy": "v",
}


def _validate_signature(signature: Signature) -> None:
    for spec in (*signature.inputs, *signature.outputs):
        if spec.dtype not in dtypes.ALL:
            raise ArtifactError(f"'{spec.name}' in the signature has the unknown dtype '{spec.dtype}'")


def disassemble(data: ExecutableData) -> str:
    """Text of an executable: signatures, constants, kernels, libraries, functions."""
    lines: list[str] = []
    for name, entry in data.entries.items():
        suffix = "" if name == ENTRY else f" of {name}"
        lines += [f"inputs{suffix}:", *(f"  {spec}" for spec in entry.signature.inputs)]
        lines += [f"outputs{suffix}:", *(f"  {spec}" for spec in entry.signature.outputs)]
    if data.constants:
        lines.append("constants:")
        lines += [f"  c{i}: {a.dtype}{list(a.shape)} ({a.nbytes} bytes)" for i, a in enumerate(data.constants)]
    if data.kernels:
        lines.append("kernels:")
        lines += [f"  {kernel.name} -> {kernel.symbol}" for kernel in data.kernels.values()]
    if data.libraries:
        lines.append("libraries:")
        lines += [f"  {library}" for library in data.libraries]
    for function in data.functions.values():
        lines += ["", *_disassemble_function(function)]
    return "\n".join(lines) + "\n"


def _disassemble_function(function: VMFunction) -> Iterator[str]:
    params = ", ".join(f"r{i} {name}" for i, name in enumerate(function.params))
    yield f"func {function.name}({params})  # {function.num_registers} registers"
    width = len(str(max(len(function.instructions) - 1, 0)))
    for at, instruction in enumerate(function.instructions):
        yield f"  {at:>{width}}: {instruction_text(instruction)}"


def instruction_text(instruction: Instruction) -> str:
    """Text of an instruction, as in disassembly."""
    match instruction:
        case Call(dst, callee, operands):
            call = f"{callee}({', '.join(map(_operand_text, operands))})"
            return call if dst < 0 else f"r{dst} = {call}"
        case Ret(register):
            return f"ret r{register}"
        case Goto(target):
            return f"goto {target}"
        case If(register, else_target):
            return f"if r{register} else goto {else_target}"
    raise TypeError(f"not an instruction: {instruction!r}")


def _operand_text(operand: Operand) -> str:
    match operand:
        case Reg(index):
            return f"r{index}"
        case Const(index):
            return f"c{index}"
        case Imm(value):
            return repr(value)
    raise TypeError(f"not an operand: {operand!r}")


def validate(data: ExecutableData) -> None:
    """Raise ArtifactError unless dtypes are known and functions are valid (`validate_functions`)."""
    validate_values(data)
    validate_functions(data.functions, ValidationContext.of(data))


def validate_values(data: ExecutableData) -> None:
    """Raise ArtifactError unless the dtypes of inputs, outputs and constants are known."""
    for entry in data.entries.values():
        _validate_signature(entry.signature)
    for index, array in enumerate(data.constants):
        if dtypes.from_numpy(array.dtype) is None:
            raise ArtifactError(f"constant c{index} has dtype {array.dtype}, which relaxlite does not have")


@dataclass(frozen=True, slots=True)
class ValidationContext:
    """Definitions that functions may refer to: kernels, number of constants, number of inputs of each entry."""

    kernels: Mapping[str, KernelInfo]
    constants: int
    inputs: Mapping[str, int]

    @staticmethod
    def of(data: ExecutableData) -> ValidationContext:
        inputs = {name: len(entry.signature.inputs) for name, entry in data.entries.items()}
        return ValidationContext(data.kernels, len(data.constants), inputs)


def validate_functions(functions: Mapping[str, VMFunction], surroundings: ValidationContext) -> None:
    """Raise ArtifactError unless functions are valid.

    All registers, constants, kernels, functions, builtins and jump targets exist, registers are written before they are
    read, immediates are well-formed, and no function runs off its end.
    """
    for name, count in surroundings.inputs.items():
        if name not in functions:
            raise ArtifactError(f"there is no function '{name}'")
        num_params = len(functions[name].params)
        if num_params != count:
            raise ArtifactError(f"function '{name}' takes {num_params} values, but the signature has {count} inputs")
    for function in functions.values():
        for at, instruction in enumerate(function.instructions):
            problem = _problem(functions, surroundings, function, instruction)
            if problem is not None:
                raise ArtifactError(f"function '{function.name}', {at}: {instruction_text(instruction)}: {problem}")
        if function.locations and len(function.locations) != len(function.instructions):
            counts = f"{len(function.locations)} places of {len(function.instructions)} instructions"
            raise ArtifactError(f"function '{function.name}': {counts}")
        _validate_flow(function)


def _problem(
    functions: Mapping[str, VMFunction], surroundings: ValidationContext, function: VMFunction, instruction: Instruction
) -> str | None:
    count, registers = len(function.instructions), function.num_registers
    match instruction:
        case Ret(register) if not 0 <= register < registers:
            return f"there is no register r{register}"
        case Goto(target) | If(_, target) if not 0 <= target < count:
            return f"there is no instruction {target}"
        case If(register, _) if not 0 <= register < registers:
            return f"there is no register r{register}"
        case Call(dst, callee, operands):
            if not -1 <= dst < registers:
                return f"there is no register r{dst}"
            for operand in operands:
                if isinstance(operand, Reg) and not 0 <= operand.index < registers:
                    return f"there is no register r{operand.index}"
                if isinstance(operand, Const) and not 0 <= operand.index < surroundings.constants:
                    return f"there is no constant c{operand.index}"
            return _callee_problem(functions, surroundings, callee, operands)
    return None


def _callee_problem(
    functions: Mapping[str, VMFunction], surroundings: ValidationContext, callee: str, operands: tuple[Operand, ...]
) -> str | None:
    kind, _, name = callee.partition(":")
    if kind == "builtin":
        return _builtin_problem(name, operands)
    if kind == "kernel":
        return _kernel_problem(surroundings.kernels, name, operands)
    if kind == "func":
        if name not in functions:
            return f"there is no function '{name}'"
        num_params = len(functions[name].params)
        if len(operands) != num_params:
            return f"'{name}' takes {num_params} values, got {len(operands)}"
        return None if all(isinstance(o, Reg | Const) for o in operands) else "operands must be registers or constants"
    return None if kind == "extern" and name else "unknown kind of callee"


def _kernel_problem(kernels: Mapping[str, KernelInfo], name: str, operands: tuple[Operand, ...]) -> str | None:
    if name not in kernels:
        return f"there is no kernel '{name}'"
    if len(operands) < 2 or not _fits("h", operands[0]) or not _fits("n", operands[1]):
        return "operands must be a heap, the first slot, then tensors"
    if not all(_fits("v", operand) for operand in operands[2:]):
        return "tensors must be registers or constants"
    kernel = kernels[name]
    if kernel.num_buffers is not None and kernel.num_buffers != len(operands) - 2:
        return f"the kernel takes {kernel.num_buffers} tensors, got {len(operands) - 2}"
    if kernel.num_symbols and operands[0] == Imm(None):
        return f"the kernel has {kernel.num_symbols} symbols, but no heap is passed"
    return None


def _builtin_problem(name: str, operands: tuple[Operand, ...]) -> str | None:
    if name not in BUILTINS:
        return f"there is no builtin '{name}'"
    kinds = BUILTINS[name]
    if kinds == "*":
        kinds = "v" * len(operands)
    if len(kinds) != len(operands):
        return f"takes {len(kinds)} operands, got {len(operands)}"
    for position, (kind, operand) in enumerate(zip(kinds, operands, strict=True)):
        if not _fits(kind, operand):
            return f"operand {position} must be {_KIND_TEXT[kind]}"
    return None


_KIND_TEXT = {
    "v": "a register or constant",
    "h": "a heap register or None",
    "n": "an immediate integer >= 0",
    "s": "an immediate string",
    "t": "an immediate dtype",
    "d": "an immediate dim",
    "D": "an immediate tuple of dims",
    "S": "an immediate shape specification",
}


def _fits(kind: str, operand: Operand) -> bool:
    if kind == "v":
        return not isinstance(operand, Imm)
    if not isinstance(operand, Imm):
        return kind == "h" and isinstance(operand, Reg)
    value = operand.value
    match kind:
        case "h":
            return value is None
        case "n":
            return _is_int(value) and value >= 0  # type: ignore[operator]
        case "s":
            return isinstance(value, str)
        case "t":
            return isinstance(value, str) and value in dtypes.ALL
        case "d":
            return _is_int(value)
        case "D":
            return isinstance(value, tuple) and all(_is_int(dim) for dim in value)
    return isinstance(value, tuple) and all(_is_dim_spec(dim) for dim in value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_dim_spec(dim: ImmValue) -> bool:
    match dim:
        case ("bind", int(slot), str(), None | int(), None | int(), int(divisor)):
            return slot >= 0 and divisor >= 1
        case ("check", int(slot), str()):
            return slot >= 0
        case ("const", int()) | ("any",):
            return True
    return False


def _validate_flow(function: VMFunction) -> None:
    """Definite-assignment dataflow: every register is written on all paths before it is read; no path runs off the
    end."""
    count, registers = len(function.instructions), function.num_registers
    if len(function.params) > registers:
        raise ArtifactError(f"function '{function.name}': {len(function.params)} parameters, {registers} registers")
    if count == 0 or not isinstance(function.instructions[-1], Ret | Goto):
        raise ArtifactError(f"function '{function.name}' does not end in ret or goto")
    join_points = {at for instruction in function.instructions for at in _jumps(instruction)}
    assigned_at = {
        0: (1 << len(function.params)) - 1
    }  # join point -> bit set of registers that are written on all paths
    pending = [0]
    while pending:
        at = pending.pop()
        assigned = assigned_at[at]
        while True:
            instruction = function.instructions[at]
            for register in _reads(instruction):
                if not assigned >> register & 1:
                    where = f"function '{function.name}', {at}: {instruction_text(instruction)}"
                    raise ArtifactError(f"{where}: r{register} is read before it is written")
            if isinstance(instruction, Call) and instruction.dst >= 0:
                assigned |= 1 << instruction.dst
            successors = _successors(at, instruction)
            if len(successors) == 1 and successors[0] == at + 1 and at + 1 not in join_points:
                at += 1
                continue
            for target in successors:
                merged = assigned_at.get(target, assigned) & assigned
                if assigned_at.get(target) != merged:
                    assigned_at[target] = merged
                    pending.append(target)
            break


def _jumps(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Goto(target) | If(_, target):
            return (target,)
    return ()


def _reads(instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Call(_, _, operands):
            return tuple(operand.index for operand in operands if isinstance(operand, Reg))
        case Ret(register) | If(register, _):
            return (register,)
    return ()


def _successors(at: int, instruction: Instruction) -> tuple[int, ...]:
    match instruction:
        case Ret():
            return ()
        case Goto(target):
            return (target,)
        case If(_, else_target):
            return (at + 1, else_target)
    return (at + 1,)
