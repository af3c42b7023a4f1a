"""Builder of LLVM IR as text: typed values, instructions, basic blocks.

The same calls emit scalar and vector code: an operation of a scalar and a vector splats the scalar, so a uniform value
stays a scalar until it meets a vector. The text of a function is a nested list of lines, which allows insertion points
(`reserve`, `place`).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

from relaxlite.records import dataclass
from relaxlite.target import Target

Lines: TypeAlias = "list[str | Lines]"

_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "float": 32, "double": 64, "ptr": 64}
_RESERVED = ("entry", "buffers", "symbols", "context", "chunk")  # names of the entry block and of function parameters
_MANGLED = {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}


def bits_of(elem: str) -> int:
    """Width of a scalar LLVM type in bits."""
    return _BITS[elem]


def vector_type(elem: str, lanes: int) -> str:
    """LLVM type of `lanes` elements; 0 lanes: the scalar type."""
    return f"<{lanes} x {elem}>" if lanes else elem


def mangle(elem: str, lanes: int) -> str:
    """Type suffix of an overloaded intrinsic, such as v16f32."""
    return (f"v{lanes}" if lanes else "") + _MANGLED.get(elem, elem)


@dataclass(frozen=True, slots=True)
class Val:
    """An SSA value or constant: operand text, scalar type, and lanes (0: a scalar)."""

    text: str
    elem: str
    lanes: int = 0

    @property
    def ty(self) -> str:
        return vector_type(self.elem, self.lanes)

    @property
    def is_const(self) -> bool:
        return self.text[0] != "%"

    def __str__(self) -> str:
        return f"{self.ty} {self.text}"


def int_const(value: int, elem: str = "i64") -> Val:
    """Integer constant modulo 2**bits, written as a signed number."""
    bits = _BITS[elem]
    if bits == 1:
        return Val("true" if value & 1 else "false", elem)
    value &= (1 << bits) - 1
    return Val(str(value - (1 << bits) if value >> (bits - 1) else value), elem)


def float_const(value: float, elem: str = "float") -> Val:
    """Float constant in exact hexadecimal; `elem` "float" rounds to the nearest float32 first."""
    if elem == "float":
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = float("inf") if value > 0 else float("-inf")
    return Val(f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}", elem)


TRUE, FALSE = Val("true", "i1"), Val("false", "i1")


@cache
def lane_numbers(lanes: int, elem: str = "i64") -> Val:
    """Constant vector <0, 1, 2, ...>."""
    return Val("<" + ", ".join(f"{elem} {k}" for k in range(lanes)) + ">", elem, lanes)


class ModuleEmitter:
    """One LLVM module: functions, declarations, globals, metadata."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.functions: list[str] = []
        self._declarations: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._metadata = ['!{!"llvm.loop.unroll.disable"}']  # by node number
        self._weights: dict[tuple[int, int], int] = {}
        self._nontemporal_node: int | None = None

    def declare(self, name: str, result: str, args: Sequence[str], attributes: str = "") -> None:
        self._declarations[name] = f"declare {result} @{name}({', '.join(args)}){attributes}"

    def table(self, name: str, elem: str, values: Sequence[int]) -> Val:
        """Define a constant array; returns a pointer to its first element."""
        items = ", ".join(f"{elem} {int_const(v, elem).text}" for v in values)
        self._globals[name] = f"@{name} = internal unnamed_addr constant [{len(values)} x {elem}] [{items}], align 64"
        return Val(f"@{name}", "ptr")

    def external(self, name: str) -> Val:
        """Declare an external 8-byte global that the linker resolves; returns a pointer to it."""
        self._globals[name] = f"@{name} = external global ptr, align 8"
        return Val(f"@{name}", "ptr")

    def shared(self, name: str, elem: str, count: int) -> str:
        """Define an array in the shared memory of a GPU's block; returns its name in address space 3."""
        self._globals[name] = f"@{name} = internal addrspace(3) global [{count} x {elem}] undef, align 128"
        return f"@{name}"

    def add_function(self, head: str, emitter: Emitter, comment: str = "") -> None:
        """Append a finished function; `head` is its text up to the parameters."""
        self.functions.append(
            "\n".join([*([comment] if comment else []), f"{head} nounwind {{", *emitter.lines(), "}", ""])
        )

    def loop_metadata(self) -> str:
        """Metadata of a new loop that disables unrolling, which is the schedule's decision."""
        number = len(self._metadata)
        self._metadata.append(f"distinct !{{!{number}, !0}}")
        return f"!llvm.loop !{number}"

    def branch_weights(self, then: int, other: int) -> str:
        """Profile metadata of a branch: weights of both targets, which guide LLVM's spill placement."""
        if (then, other) not in self._weights:
            self._weights[then, other] = len(self._metadata)
            self._metadata.append(f'!{{!"branch_weights", i32 {then}, i32 {other}}}')
        return f"!prof !{self._weights[then, other]}"

    def nontemporal_node(self) -> str:
        """Metadata node that marks a store as nontemporal."""
        if self._nontemporal_node is None:
            self._nontemporal_node = len(self._metadata)
            self._metadata.append("!{i32 1}")
        return f"!{self._nontemporal_node}"

    def text(self) -> str:
        head = [f'target triple = "{self.target.triple}"', ""]
        tail = [f"!{k} = {node}" for k, node in enumerate(self._metadata)]
        parts = [*self._globals.values(), "", *self.functions, *self._declarations.values(), ""]
        return "\n".join(head + parts + tail) + "\n"


class Emitter:
    """One function under construction."""

    def __init__(self, module: ModuleEmitter) -> None:
        self.module = module
        self.target = module.target
        self.root: Lines = []
        self.out: Lines = self.root
        self.label = "entry"
        self._names = dict.fromkeys(_RESERVED, 1)
        self._splats: dict[tuple[str, int], Val] = {}  # (text, lanes) -> splat emitted earlier in this block

    # Text

    def fresh(self, hint: str) -> str:
        """A name that is unused in this function; the number behind the hint follows a dot."""
        base = _as_name(hint)
        count = self._names.get(base, 0)
        self._names[base] = count + 1
        return f"{base}.{count}" if count else base

    def line(self, text: str) -> None:
        self.out.append("  " + text)

    def comment(self, text: str) -> None:
        self.out.append(f"  ; {text}")

    def lines(self) -> list[str]:
        return list(_flatten(self.root))

    @contextmanager
    def place(self, lines: Lines) -> Iterator[None]:
        """Emit at an earlier insertion point, which `reserve` returned; instructions only, no blocks."""
        saved, self.out = self.out, lines
        splats, self._splats = self._splats, {}
        try:
            yield
        finally:
            self.out, self._splats = saved, splats

    def reserve(self) -> Lines:
        """Create an insertion point here, for `place`."""
        lines: Lines = []
        self.out.append(lines)
        return lines

    # Blocks

    def start(self, label: str) -> None:
        """Begin a basic block."""
        self.out.append(f"{label}:")
        self.label = label
        self._splats = {}

    def branch(self, label: str) -> None:
        self.line(f"br label %{label}")

    def branch_if(self, cond: Val, then: str, other: str) -> None:
        self.line(f"br i1 {cond.text}, label %{then}, label %{other}")

    def if_value(self, cond: Val, then: Callable[[], Val], other: Callable[[], Val], hint: str) -> Val:
        """Emit `then() if cond else other()` as a branch and a phi; `cond` is a scalar."""
        return self.if_values(cond, lambda: (then(),), lambda: (other(),), hint)[0]

    def if_values(
        self, cond: Val, then: Callable[[], tuple[Val, ...]], other: Callable[[], tuple[Val, ...]], hint: str
    ) -> tuple[Val, ...]:
        """Emit `if_value` for several values."""
        labels = [self.fresh(f"{hint}_{part}") for part in ("then", "else", "done")]
        self.branch_if(cond, labels[0], labels[1])
        ends: list[tuple[tuple[Val, ...], str, Lines]] = []
        for label, emit_arm in ((labels[0], then), (labels[1], other)):
            self.start(label)
            values = emit_arm()
            ends.append((values, self.label, self.reserve()))
            self.branch(labels[2])
        self.start(labels[2])
        return tuple(self._join(pair, ends, hint) for pair in zip(*(values for values, _, _ in ends), strict=True))

    def _join(self, pair: tuple[Val, ...], ends: list[tuple[tuple[Val, ...], str, Lines]], hint: str) -> Val:
        """Emit a phi of one value per branch; a scalar that meets a vector is splatted at the end of its branch."""
        lanes = max(value.lanes for value in pair)
        arms = []
        for value, (_, label, tail) in zip(pair, ends, strict=True):
            with self.place(tail):
                arms.append(f"[ {self.splat(value, lanes).text}, %{label} ]")
        elem = pair[0].elem
        return self.op(f"phi {vector_type(elem, lanes)} {', '.join(arms)}", elem, lanes, hint)

    # Instructions

    def op(self, text: str, elem: str, lanes: int = 0, hint: str = "v") -> Val:
        """Append an instruction and name its result."""
        name = self.fresh(hint)
        self.line(f"%{name} = {text}")
        return Val(f"%{name}", elem, lanes)

    def splat(self, a: Val, lanes: int) -> Val:
        """Broadcast a scalar to a vector."""
        if a.lanes == lanes:
            return a
        if a.is_const:
            zero = a.text in ("0", "false", "0x0000000000000000", "null")
            return Val("zeroinitializer" if zero else f"splat ({a})", a.elem, lanes)
        splat = self._splats.get((a.text, lanes))
        if splat is None:
            ty = vector_type(a.elem, lanes)
            lane0 = self.op(f"insertelement {ty} poison, {a}, i64 0", a.elem, lanes, "lane0")
            shuffle = f"shufflevector {lane0}, {ty} poison, <{lanes} x i32> zeroinitializer"
            splat = self._splats[a.text, lanes] = self.op(shuffle, a.elem, lanes, "splat")
        return splat

    def match_lanes(self, *values: Val) -> tuple[Val, ...]:
        """Splat scalars so that all values have the same number of lanes."""
        lanes = max([v.lanes for v in values])
        return tuple([v if v.lanes == lanes else self.splat(v, lanes) for v in values])

    def binary(self, opcode: str, a: Val, b: Val, hint: str = "v") -> Val:
        a, b = self.match_lanes(a, b)
        return self.op(f"{opcode} {a}, {b.text}", a.elem, a.lanes, hint)

    def icmp(self, predicate: str, a: Val, b: Val, hint: str = "c") -> Val:
        a, b = self.match_lanes(a, b)
        return self.op(f"icmp {predicate} {a}, {b.text}", "i1", a.lanes, hint)

    def fcmp(self, predicate: str, a: Val, b: Val, hint: str = "c") -> Val:
        a, b = self.match_lanes(a, b)
        return self.op(f"fcmp {predicate} {a}, {b.text}", "i1", a.lanes, hint)

    def select(self, cond: Val, a: Val, b: Val, hint: str = "v") -> Val:
        if cond.text in ("true", "false"):
            return a if cond.text == "true" else b
        if cond.lanes:
            cond, a, b = self.match_lanes(cond, a, b)
        else:
            a, b = self.match_lanes(a, b)
        return self.op(f"select {cond}, {a}, {b}", a.elem, a.lanes, hint)

    def cast(self, opcode: str, a: Val, elem: str, hint: str = "v") -> Val:
        if a.elem == elem:
            return a
        return self.op(f"{opcode} {a} to {vector_type(elem, a.lanes)}", elem, a.lanes, hint)

    def neg(self, a: Val) -> Val:
        return self.op(f"fneg {a}", a.elem, a.lanes)

    def call(self, name: str, args: Sequence[Val], elem: str, lanes: int = 0, hint: str = "v") -> Val:
        result = vector_type(elem, lanes)
        self.module.declare(name, result, [a.ty for a in args])
        return self.op(f"call {result} @{name}({', '.join(map(str, args))})", elem, lanes, hint)

    def call_void(self, name: str, args: Sequence[Val]) -> None:
        self.module.declare(name, "void", [a.ty for a in args])
        self.line(f"call void @{name}({', '.join(map(str, args))})")

    def intrinsic(self, name: str, *args: Val, extra: Sequence[Val] = (), hint: str = "v") -> Val:
        """Call llvm.NAME, overloaded on the common type of operands and result; `extra` are operands of other types."""
        matched = self.match_lanes(*args)
        first = matched[0]
        return self.call(
            f"llvm.{name}.{mangle(first.elem, first.lanes)}", [*matched, *extra], first.elem, first.lanes, hint
        )

    def any_lane(self, mask: Val) -> Val:
        """Or of all lanes of a mask."""
        if not mask.lanes:
            return mask
        return self.call(f"llvm.vector.reduce.or.{mangle('i1', mask.lanes)}", [mask], "i1", 0, "any")

    def extract(self, a: Val, lane: int) -> Val:
        """One lane of a vector; a scalar is returned unchanged."""
        return self.op(f"extractelement {a}, i64 {lane}", a.elem, 0, "elem") if a.lanes else a

    def for_each_lane(self, args: Sequence[Val], elem: str, function: Callable[..., Val]) -> Val:
        """Apply a scalar `function` lane by lane, where there is no vector form; returns a vector of `elem`."""
        args = self.match_lanes(*args)
        lanes = args[0].lanes
        if not lanes:
            return function(*args)
        result = Val("poison", elem, lanes)
        for lane in range(lanes):
            value = function(*(self.extract(a, lane) for a in args))
            result = self.op(f"insertelement {result}, {value}, i64 {lane}", elem, lanes)
        return result

    def by_subvectors(self, args: Sequence[Val], lanes: int, function: Callable[..., Val]) -> Val:
        """Apply `function` to subvectors of `lanes` lanes and concatenate the results, for instructions of a fixed
        width."""
        total = args[0].lanes
        if total == lanes:
            return function(*args)
        result: Val | None = None
        for start in range(0, total, lanes):
            index = int_const(start)
            part = function(*(self._part(a, lanes, index) for a in args))
            name = f"llvm.vector.insert.{mangle(part.elem, total)}.{mangle(part.elem, lanes)}"
            whole = Val("poison", part.elem, total) if result is None else result
            result = self.call(name, [whole, part, index], part.elem, total, "whole")
        assert result is not None
        return result

    def _part(self, a: Val, lanes: int, index: Val) -> Val:
        name = f"llvm.vector.extract.{mangle(a.elem, lanes)}.{mangle(a.elem, a.lanes)}"
        return self.call(name, [a, index], a.elem, lanes, "part")

    # Floating-point shorthands

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """a*b + c, fused where the target has FMA."""
        return self.intrinsic("fmuladd", a, b, c)

    def fadd(self, a: Val, b: Val) -> Val:
        return self.binary("fadd", a, b)

    def fsub(self, a: Val, b: Val) -> Val:
        return self.binary("fsub", a, b)

    def fmul(self, a: Val, b: Val) -> Val:
        return self.binary("fmul", a, b)

    def fdiv(self, a: Val, b: Val) -> Val:
        return self.binary("fdiv", a, b)

    def number(self, value: float, like: Val) -> Val:
        """Scalar constant of the element type of `like`."""
        if like.elem in ("float", "double"):
            return float_const(float(value), like.elem)
        return int_const(int(value), like.elem)


@cache
def _as_name(hint: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", hint)
    return name if name[:1].isalpha() or name[:1] == "_" else f"v{name}"  # LLVM names do not begin with a digit


def _flatten(lines: Lines) -> Iterator[str]:
    for line in lines:
        if isinstance(line, str):
            yield line
        else:
            yield from _flatten(line)
