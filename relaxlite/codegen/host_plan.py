"""What is known about the bytecode of `main` before its host function is written (codegen/llvm/host.py)."""

from __future__ import annotations

from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from relaxlite.codegen.host_inline import NotNativeError
from relaxlite.records import dataclass
from relaxlite.runtime.executable import (
    Call,
    Const,
    Goto,
    If,
    Imm,
    Instruction,
    Operand,
    Reg,
    Ret,
    VMFunction,
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A result that one instruction allocates, at most once.

    `dims`, which may refer to `heap`, are those of what is returned: a reshape or a view of all of it may follow.
    """

    site: int
    heap: Operand
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostPlan:
    function: VMFunction
    split: int  # the instructions before it only compute shapes: they run while Python can still allocate
    heap: Operand  # that they compute with: a register, or Imm(None)
    heaps: Mapping[int, tuple[int, int]]  # by register: where its slots begin among all slots, and how many they are
    arena: tuple[int, int] | None  # where the first arena is allocated, and its size as a dim
    variables: frozenset[int]  # registers that several instructions write
    targets: frozenset[int]  # of jumps
    prepared: tuple[Prepared | None, ...]  # per output
    releases: Mapping[int, tuple[int, ...]]  # after an instruction: those whose memory nobody reads any more


def plan_host(function: VMFunction, num_outputs: int) -> HostPlan:
    """The plan of a function that calls no other one. NotNativeError when it calls Python."""
    code = function.instructions
    for instruction in code:
        if isinstance(instruction, Call) and instruction.callee.startswith("extern:"):
            raise NotNativeError(f"it calls {instruction.callee}")
    writes = Counter(i.dst for i in code if isinstance(i, Call) and i.dst >= 0)
    writes.update(range(len(function.params)))
    variables = frozenset(register for register, count in writes.items() if count > 1)
    heaps = _heaps(code, variables)
    heap, split = _prologue(function)
    arena = _first_arena(code, heap, split)
    return HostPlan(
        function=function,
        split=split,
        heap=heap,
        heaps=heaps,
        arena=arena,
        variables=variables,
        targets=_jump_targets(code),
        prepared=_prepare(_Values(function, variables), num_outputs),
        releases=_releases(code, variables, -1 if arena is None else arena[0]),
    )


def _jump_targets(code: Sequence[Instruction]) -> frozenset[int]:
    targets = {i.target for i in code if isinstance(i, Goto)} | {i.else_target for i in code if isinstance(i, If)}
    return frozenset(targets)


def _in_loop(code: Sequence[Instruction], at: int) -> bool:
    """Whether the instruction may run twice: a jump leads from behind it to before it."""
    jumps = [
        (k, i.target if isinstance(i, Goto) else i.else_target) for k, i in enumerate(code) if isinstance(i, Goto | If)
    ]
    return any(target <= at <= source for source, target in jumps)


def _heaps(code: Sequence[Instruction], variables: frozenset[int]) -> dict[int, tuple[int, int]]:
    heaps, total = {}, 0
    for instruction in code:
        if isinstance(instruction, Call) and instruction.callee == "builtin:alloc_heap":
            if instruction.dst in variables:
                raise NotNativeError("a heap goes through a branch")
            slots = immediate(instruction.operands[0])
            heaps[instruction.dst] = total, slots
            total += slots
    return heaps


def _prologue(function: VMFunction) -> tuple[Operand, int]:
    """How many instructions at the start only compute shapes, and the heap that they do it with."""
    code, split = function.instructions, 0
    heap: Operand = Imm(None)
    end = min({len(code), *_jump_targets(code)})
    while split < end and _computes_shapes(instruction := code[split], heap, len(function.params)):
        assert isinstance(instruction, Call)
        if instruction.callee == "builtin:alloc_heap":
            heap = Reg(instruction.dst)
        split += 1
    return heap, split


def _computes_shapes(instruction: Instruction, heap: Operand, num_params: int) -> bool:
    match instruction:
        case Call(_, "builtin:alloc_heap", _):
            return heap == Imm(None)
        case Call(_, "builtin:match_shape", (Reg(index), other, *_)):
            return index < num_params and other in (heap, Imm(None))
        case Call(_, callee, (other, _, *tensors)) if callee.startswith("kernel:") and tensors:
            return isinstance(heap, Reg) and all(operand == heap for operand in (other, *tensors))
    return False


def _first_arena(code: Sequence[Instruction], heap: Operand, split: int) -> tuple[int, int] | None:
    """One that Python provides, of a size that is known before anything runs.

    NotNativeError where an arena is allocated in a loop: it would have to be kept.
    """
    arenas = [k for k, i in enumerate(code) if isinstance(i, Call) and i.callee == "builtin:alloc_arena"]
    if any(_in_loop(code, at) for at in arenas):
        raise NotNativeError("it allocates an arena in a loop")
    for at in arenas:
        match code[at]:
            case Call(_, _, (other, Imm(int(size)))) if at >= split and (size >= 0 or (other == heap and at == split)):
                return at, size
    return None


class _Values:
    """Where values come from, through tuples, reshapes and views; only of registers with one definition."""

    def __init__(self, function: VMFunction, variables: frozenset[int]) -> None:
        self.code = function.instructions
        self.definitions: Mapping[int, int] = {
            i.dst: k for k, i in enumerate(self.code) if isinstance(i, Call) and i.dst >= 0 and i.dst not in variables
        }

    def definition(self, operand: Operand) -> tuple[int, str, tuple[Operand, ...]]:
        """The instruction's place, builtin and operands; an empty builtin when there is not just one instruction."""
        if not isinstance(operand, Reg) or operand.index not in self.definitions:
            return -1, "", ()
        at = self.definitions[operand.index]
        call = self.code[at]
        assert isinstance(call, Call)
        return at, call.callee.removeprefix("builtin:"), call.operands

    def source(self, operand: Operand) -> Operand:
        """The same value before it went through tuples."""
        _, builtin, operands = self.definition(operand)
        if builtin == "tuple_get":
            _, inner, fields = self.definition(self.source(operands[0]))
            index = immediate(operands[1])
            if inner == "make_tuple" and index < len(fields):
                return self.source(fields[index])
        return operand

    def results(self, num_outputs: int) -> tuple[Operand, ...]:
        """The outputs as operands, where one return says which they are."""
        returned = [i.register for i in self.code if isinstance(i, Ret)]
        if len(returned) != 1:
            return ()
        operand = self.source(Reg(returned[0]))
        _, builtin, fields = self.definition(operand)
        if builtin == "make_tuple":
            return tuple(map(self.source, fields)) if len(fields) == num_outputs else ()
        return (operand,) if num_outputs == 1 else ()


def _prepare(values: _Values, num_outputs: int) -> tuple[Prepared | None, ...]:
    prepared: list[Prepared | None] = []
    for operand in values.results(num_outputs) or (Const(0),) * num_outputs:
        result = _allocation(values, operand)
        taken = {other.site for other in prepared if other is not None}
        prepared.append(
            None if result is None or result.site in taken or _in_loop(values.code, result.site) else result
        )
    return tuple(prepared)


def _allocation(values: _Values, operand: Operand) -> Prepared | None:
    at, builtin, operands = values.definition(values.source(operand))
    if builtin == "alloc_tensor":
        return Prepared(at, operands[0], immediate(operands[1]))
    dims_at = _DIMS_OF_WHOLE.get(builtin)
    if dims_at is None or (builtin == "view" and immediate(operands[2]) != 0):
        return None
    source = _allocation(values, operands[0])
    return Prepared(source.site, operands[1], immediate(operands[dims_at])) if source is not None else None


_DIMS_OF_WHOLE = {"reshape": 2, "view": 3}  # where the dims stand of what may be all of a tensor under another type


def _releases(code: Sequence[Instruction], variables: frozenset[int], given: int) -> dict[int, tuple[int, ...]]:
    """Memory that is written and read in one run of instructions without jumps is free after the last one.

    So is an arena, jumps or not, where that is in no loop; but for the one that Python gives, at instruction `given`.
    """
    ends = sorted({*_jump_targets(code), *(k for k, i in enumerate(code) if not isinstance(i, Call))})
    readers = _readers(code)
    result: dict[int, tuple[int, ...]] = {}
    for site, instruction in enumerate(code):
        if isinstance(instruction, Call) and instruction.callee in _NEW_MEMORY and site != given:
            last = _last_use(code, readers, instruction.dst, site)
            following = bisect(ends, site)
            is_straight = following == len(ends) or last < ends[following]
            is_arena = instruction.callee == "builtin:alloc_arena" and not _in_loop(code, last)
            if (is_straight or is_arena) and instruction.dst not in variables:
                result[last] = (*result.get(last, ()), site)
    return result


def _readers(code: Sequence[Instruction]) -> Mapping[int, list[int]]:
    """The instructions that read a register."""
    readers: dict[int, list[int]] = defaultdict(list)
    for at, instruction in enumerate(code):
        match instruction:
            case Call(_, _, operands):
                for operand in operands:
                    if isinstance(operand, Reg):
                        readers[operand.index].append(at)
            case Ret(register) | If(register, _):
                readers[register].append(at)
    return readers


def _last_use(code: Sequence[Instruction], readers: Mapping[int, list[int]], register: int, site: int) -> int:
    """Of the value that instruction `site` writes, also under other names. Variables keep references of their own."""
    names, last = [register], site
    for name in names:  # which grows
        for at in readers.get(name, ()):
            last, instruction = max(last, at), code[at]
            if isinstance(instruction, Call) and instruction.callee in _SAME_MEMORY and instruction.dst not in names:
                names.append(instruction.dst)
    return last


_NEW_MEMORY = ("builtin:alloc_tensor", "builtin:copy", "builtin:alloc_arena")
_SAME_MEMORY = ("builtin:reshape", "builtin:view", "builtin:make_tuple", "builtin:tuple_get")


def immediate(operand: Operand) -> Any:
    """The value of an operand that is an immediate in valid bytecode."""
    assert isinstance(operand, Imm)
    return operand.value
