"""Analyses of bytecode that compiling a host function needs: shape prologue, allocations, lifetimes (llvm/host.py)."""

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
class PreparedOutput:
    """An output that instruction `site` allocates, outside of loops, so that Python can allocate it before the run.

    `dims` are the dimensions of the returned tensor, after reshapes and whole views; negative ones are slots of `heap`.
    """

    site: int
    heap: Operand
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class HostPlan:
    """Results of the analyses of one inlined function."""

    function: VMFunction
    split: int  # instructions before it only compute shapes, and run in the prepare step under the GIL
    heap: Operand  # the shape heap of the prologue: a register, or Imm(None)
    heaps: Mapping[int, tuple[int, int]]  # register -> (first slot in the frame, number of slots)
    arena: tuple[int, int] | None  # (instruction, size as a dim) of the arena that Python provides
    variables: frozenset[int]  # registers with several definitions
    targets: frozenset[int]  # of jumps, as instruction numbers
    prepared: tuple[PreparedOutput | None, ...]  # per output
    releases: Mapping[int, tuple[int, ...]]  # instruction -> allocating instructions whose memory is dead after it


def plan_host(function: VMFunction, num_outputs: int) -> HostPlan:
    """Analyse a function without `func:` calls. NotNativeError where it calls Python or cannot be compiled
    otherwise."""
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
    """Whether an instruction may run more than once: a backward jump spans it."""
    jumps = [
        (k, i.target if isinstance(i, Goto) else i.else_target) for k, i in enumerate(code) if isinstance(i, Goto | If)
    ]
    return any(target <= at <= source for source, target in jumps)


def _heaps(code: Sequence[Instruction], variables: frozenset[int]) -> dict[int, tuple[int, int]]:
    """Lay the slots of all shape heaps out one after the other: register -> (first slot, number of slots)."""
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
    """Shape heap and length of the prologue: the leading instructions that only compute shapes."""
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
        case Call(_, "builtin:match_shape", (Reg(index), operand_heap, *_)):
            return index < num_params and operand_heap in (heap, Imm(None))
        case Call(_, callee, (operand_heap, _, *tensors)) if callee.startswith("kernel:") and tensors:
            return isinstance(heap, Reg) and all(buffer == heap for buffer in (operand_heap, *tensors))
    return False


def _first_arena(code: Sequence[Instruction], heap: Operand, split: int) -> tuple[int, int] | None:
    """Find the arena that Python provides: the first whose size is known before the run; (instruction, size as a dim).

    NotNativeError where an arena is allocated in a loop, as memory of several iterations would accumulate.
    """
    arenas = [k for k, i in enumerate(code) if isinstance(i, Call) and i.callee == "builtin:alloc_arena"]
    if any(_in_loop(code, at) for at in arenas):
        raise NotNativeError("it allocates an arena in a loop")
    for at in arenas:
        match code[at]:
            case Call(_, _, (arena_heap, Imm(int(size)))) if at >= split and (
                size >= 0 or (arena_heap == heap and at == split)
            ):
                return at, size
    return None


class _Values:
    """Def-use chains of registers with a single definition, through tuples, reshapes and views."""

    def __init__(self, function: VMFunction, variables: frozenset[int]) -> None:
        self.code = function.instructions
        self.definitions: Mapping[int, int] = {
            i.dst: k for k, i in enumerate(self.code) if isinstance(i, Call) and i.dst >= 0 and i.dst not in variables
        }

    def definition(self, operand: Operand) -> tuple[int, str, tuple[Operand, ...]]:
        """Position, builtin name and operands of the defining instruction; (-1, "", ()) without a single definition."""
        if not isinstance(operand, Reg) or operand.index not in self.definitions:
            return -1, "", ()
        at = self.definitions[operand.index]
        call = self.code[at]
        assert isinstance(call, Call)
        return at, call.callee.removeprefix("builtin:"), call.operands

    def source(self, operand: Operand) -> Operand:
        """Trace an operand back through make_tuple and tuple_get."""
        _, builtin, operands = self.definition(operand)
        if builtin == "tuple_get":
            _, inner, fields = self.definition(self.source(operands[0]))
            index = immediate(operands[1])
            if inner == "make_tuple" and index < len(fields):
                return self.source(fields[index])
        return operand

    def results(self, num_outputs: int) -> tuple[Operand, ...]:
        """Operands of the outputs; empty where there are several returns or the returned tuple is not known."""
        returned = [i.register for i in self.code if isinstance(i, Ret)]
        if len(returned) != 1:
            return ()
        operand = self.source(Reg(returned[0]))
        _, builtin, fields = self.definition(operand)
        if builtin == "make_tuple":
            return tuple(map(self.source, fields)) if len(fields) == num_outputs else ()
        return (operand,) if num_outputs == 1 else ()


def _prepare(values: _Values, num_outputs: int) -> tuple[PreparedOutput | None, ...]:
    """Allocation of each output; None where an output has none of its own that runs at most once."""
    prepared: list[PreparedOutput | None] = []
    for operand in values.results(num_outputs) or (Const(0),) * num_outputs:
        allocation = _allocation(values, operand)
        sites = {earlier.site for earlier in prepared if earlier is not None}
        prepared.append(
            None
            if allocation is None or allocation.site in sites or _in_loop(values.code, allocation.site)
            else allocation
        )
    return tuple(prepared)


def _allocation(values: _Values, operand: Operand) -> PreparedOutput | None:
    at, builtin, operands = values.definition(values.source(operand))
    if builtin == "alloc_tensor":
        return PreparedOutput(at, operands[0], immediate(operands[1]))
    dims_at = _DIMS_OF_WHOLE.get(builtin)
    if dims_at is None or (builtin == "view" and immediate(operands[2]) != 0):
        return None
    source = _allocation(values, operands[0])
    return PreparedOutput(source.site, operands[1], immediate(operands[dims_at])) if source is not None else None


_DIMS_OF_WHOLE = {
    "reshape": 2,
    "view": 3,
}  # builtin -> its operand with the dims, for builtins that may return a whole tensor


def _releases(code: Sequence[Instruction], variables: frozenset[int], provided: int) -> dict[int, tuple[int, ...]]:
    """Map each instruction to the allocations that are dead after it.

    A tensor is released after its last use where allocation and last use lie in one basic block, an arena also where
    its last use is in no loop. `provided`: the allocation of the arena that Python owns, which is never released.
    """
    ends = sorted({*_jump_targets(code), *(k for k, i in enumerate(code) if not isinstance(i, Call))})
    readers = _readers(code)
    result: dict[int, tuple[int, ...]] = {}
    for site, instruction in enumerate(code):
        if isinstance(instruction, Call) and instruction.callee in _NEW_MEMORY and site != provided:
            last = _last_use(code, readers, instruction.dst, site)
            following = bisect(ends, site)
            is_straight = following == len(ends) or last < ends[following]
            is_arena = instruction.callee == "builtin:alloc_arena" and not _in_loop(code, last)
            if (is_straight or is_arena) and instruction.dst not in variables:
                result[last] = (*result.get(last, ()), site)
    return result


def _readers(code: Sequence[Instruction]) -> Mapping[int, list[int]]:
    """Positions of the instructions that read each register."""
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
    """Last instruction that reads the memory allocated at `site`, through aliases. Variables hold their own
    references."""
    names, last = [register], site
    for name in names:  # grows during iteration
        for at in readers.get(name, ()):
            last, instruction = max(last, at), code[at]
            if isinstance(instruction, Call) and instruction.callee in _SAME_MEMORY and instruction.dst not in names:
                names.append(instruction.dst)
    return last


_NEW_MEMORY = ("builtin:alloc_tensor", "builtin:copy", "builtin:alloc_arena")
_SAME_MEMORY = ("builtin:reshape", "builtin:view", "builtin:make_tuple", "builtin:tuple_get")


def immediate(operand: Operand) -> Any:
    """Value of an operand that valid bytecode guarantees to be an immediate."""
    assert isinstance(operand, Imm)
    return operand.value
