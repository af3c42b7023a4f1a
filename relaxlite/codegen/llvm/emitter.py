"""A small builder of LLVM IR as text: values that know their type, instructions, blocks.

Scalar and vector code come from the same calls: an operation of a scalar and a vector splats the scalar, so a value
that is the same in all lanes stays a scalar until it meets one that is not.
A function's text is a nested list of lines, so that an instruction can still be put into an earlier place (`place`).
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
_RESERVED = ("entry", "buffers", "symbols", "context", "chunk")  # names of the first block and of functions' parameters
_MANGLED = {"half": "f16", "float": "f32", "double": "f64", "ptr": "p0"}


def bits_of(elem: str) -> int:
    return _BITS[elem]


def vector_type(elem: str, lanes: int) -> str:
    return f"<{lanes} x {elem}>" if lanes else elem


def mangle(elem: str, lanes: int) -> str:
    """The suffix by which an overloaded intrinsic names a type: v16f32."""
    return (f"v{lanes}" if lanes else "") + _MANGLED.get(elem, elem)


@dataclass(frozen=True, slots=True)
class Val:
    """An SSA value or a constant as it stands in an instruction, its scalar type, and its lanes (0: a scalar)."""

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
    """An integer modulo 2**bits, written as a signed number."""
    bits = _BITS[elem]
    if bits == 1:
        return Val("true" if value & 1 else "false", elem)
    value &= (1 << bits) - 1
    return Val(str(value - (1 << bits) if value >> (bits - 1) else value), elem)


def float_const(value: float, elem: str = "float") -> Val:
    """A float32 or float64, in hexadecimal so that it is exact; a float32 is rounded to nearest first."""
    if elem == "float":
        try:
            value = struct.unpack("f", struct.pack("f", value))[0]
        except OverflowError:
            value = float("inf") if value > 0 else float("-inf")
    return Val(f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}", elem)


TRUE, FALSE = Val("true", "i1"), Val("false", "i1")


@cache
def lane_numbers(lanes: int, elem: str = "i64") -> Val:
    """<0, 1, 2, ...>"""
    return Val("<" + ", ".join(f"{elem} {k}" for k in range(lanes)) + ">", elem, lanes)


class ModuleEmitter:
    """One LLVM module: its functions, the declarations that they need, constant tables, loop metadata."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.functions: list[str] = []
        self._declarations: dict[str, str] = {}
        self._globals: dict[str, str] = {}
        self._metadata = ['!{!"llvm.loop.unroll.disable"}']  # numbered nodes
        self._weights: dict[tuple[int, int], int] = {}
        self._one: int | None = None

    def declare(self, name: str, result: str, args: Sequence[str], attributes: str = "") -> None:
        self._declarations[name] = f"declare {result} @{name}({', '.join(args)}){attributes}"

    def table(self, name: str, elem: str, values: Sequence[int]) -> Val:
        """A constant array, as a pointer to its first element."""
        items = ", ".join(f"{elem} {int_const(v, elem).text}" for v in values)
        self._globals[name] = f"@{name} = internal unnamed_addr constant [{len(values)} x {elem}] [{items}], align 64"
        return Val(f"@{name}", "ptr")

    def external(self, name: str) -> Val:
        """A word of memory that whoever links the module provides, as a pointer to it."""
        self._globals[name] = f"@{name} = external global ptr, align 8"
        return Val(f"@{name}", "ptr")

    def add_function(self, head: str, emitter: Emitter, comment: str = "") -> None:
        self.functions.append(
            "\n".join([*([comment] if comment else []), f"{head} nounwind {{", *emitter.lines(), "}", ""])
        )

    def loop_metadata(self) -> str:
        """A new loop's own metadata node: never unroll (the schedule has decided)."""
        number = len(self._metadata)
        self._metadata.append(f"distinct !{{!{number}, !0}}")
        return f"!llvm.loop !{number}"

    def branch_weights(self, then: int, other: int) -> str:
        """How often a branch is taken and how often not: what LLVM keeps in registers depends on it."""
        if (then, other) not in self._weights:
            self._weights[then, other] = len(self._metadata)
            self._metadata.append(f'!{{!"branch_weights", i32 {then}, i32 {other}}}')
        return f"!prof !{self._weights[then, other]}"

    def one(self) -> str:
        """The metadata node that marks a store as nontemporal."""
        if self._one is None:
            self._one = len(self._metadata)
            self._metadata.append("!{i32 1}")
        return f"!{self._one}"

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
        self._splats: dict[tuple[str, int], Val] = {}  # by name and lanes: those above in this block

    # Text

    def fresh(self, hint: str) -> str:
        """A name that is not used in this function yet. Dots separate our own numbers, so a hint has none."""
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
        """Put instructions (no blocks) into `lines`, a place reserved earlier by `reserve`."""
        saved, self.out = self.out, lines
        splats, self._splats = self._splats, {}
        try:
            yield
        finally:
            self.out, self._splats = saved, splats

    def reserve(self) -> Lines:
        """A place here that later instructions may go to."""
        lines: Lines = []
        self.out.append(lines)
        return lines

    # Blocks

    def start(self, label: str) -> None:
        self.out.append(f"{label}:")
        self.label = label
        self._splats = {}

    def branch(self, label: str) -> None:
        self.line(f"br label %{label}")

    def branch_if(self, cond: Val, then: str, other: str) -> None:
        self.line(f"br i1 {cond.text}, label %{then}, label %{other}")

    def if_value(self, cond: Val, then: Callable[[], Val], other: Callable[[], Val], hint: str) -> Val:
        """then() if cond else other(), by a branch: only one of them runs. `cond` is a scalar."""
        return self.if_values(cond, lambda: (then(),), lambda: (other(),), hint)[0]

    def if_values(
        self, cond: Val, then: Callable[[], tuple[Val, ...]], other: Callable[[], tuple[Val, ...]], hint: str
    ) -> tuple[Val, ...]:
        labels = [self.fresh(f"{hint}_{part}") for part in ("then", "else", "done")]
        self.branch_if(cond, labels[0], labels[1])
        ends: list[tuple[tuple[Val, ...], str, Lines]] = []
        for label, make in ((labels[0], then), (labels[1], other)):
            self.start(label)
            values = make()
            ends.append((values, self.label, self.reserve()))
            self.branch(labels[2])
        self.start(labels[2])
        return tuple(self._join(pair, ends, hint) for pair in zip(*(values for values, _, _ in ends), strict=True))

    def _join(self, pair: tuple[Val, ...], ends: list[tuple[tuple[Val, ...], str, Lines]], hint: str) -> Val:
        """A phi of one value per branch; where only one is a vector, the other is splatted at its branch's end."""
        lanes = max(value.lanes for value in pair)
        arms = []
        for value, (_, label, tail) in zip(pair, ends, strict=True):
            with self.place(tail):
                arms.append(f"[ {self.splat(value, lanes).text}, %{label} ]")
        elem = pair[0].elem
        return self.op(f"phi {vector_type(elem, lanes)} {', '.join(arms)}", elem, lanes, hint)

    # Instructions

    def op(self, text: str, elem: str, lanes: int = 0, hint: str = "v") -> Val:
        name = self.fresh(hint)
        self.line(f"%{name} = {text}")
        return Val(f"%{name}", elem, lanes)

    def splat(self, a: Val, lanes: int) -> Val:
        if a.lanes == lanes:
            return a
        if a.is_const:
            zero = a.text in ("0", "false", "0x0000000000000000", "null")
            return Val("zeroinitializer" if zero else f"splat ({a})", a.elem, lanes)
        found = self._splats.get((a.text, lanes))
        if found is None:
            ty = vector_type(a.elem, lanes)
            one = self.op(f"insertelement {ty} poison, {a}, i64 0", a.elem, lanes, "lane0")
            result = f"shufflevector {one}, {ty} poison, <{lanes} x i32> zeroinitializer"
            found = self._splats[a.text, lanes] = self.op(result, a.elem, lanes, "splat")
        return found

    def match(self, *values: Val) -> tuple[Val, ...]:
        lanes = max([v.lanes for v in values])
        return tuple([v if v.lanes == lanes else self.splat(v, lanes) for v in values])

    def binary(self, opcode: str, a: Val, b: Val, hint: str = "v") -> Val:
        a, b = self.match(a, b)
        return self.op(f"{opcode} {a}, {b.text}", a.elem, a.lanes, hint)

    def icmp(self, predicate: str, a: Val, b: Val, hint: str = "c") -> Val:
        a, b = self.match(a, b)
        return self.op(f"icmp {predicate} {a}, {b.text}", "i1", a.lanes, hint)

    def fcmp(self, predicate: str, a: Val, b: Val, hint: str = "c") -> Val:
        a, b = self.match(a, b)
        return self.op(f"fcmp {predicate} {a}, {b.text}", "i1", a.lanes, hint)

    def select(self, cond: Val, a: Val, b: Val, hint: str = "v") -> Val:
        if cond.text in ("true", "false"):
            return a if cond.text == "true" else b
        if cond.lanes:
            cond, a, b = self.match(cond, a, b)
        else:
            a, b = self.match(a, b)
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
        """llvm.NAME, overloaded on the type of its operands, which is also its result's; `extra` follow as they are."""
        matched = self.match(*args)
        first = matched[0]
        return self.call(
            f"llvm.{name}.{mangle(first.elem, first.lanes)}", [*matched, *extra], first.elem, first.lanes, hint
        )

    def any_lane(self, mask: Val) -> Val:
        if not mask.lanes:
            return mask
        return self.call(f"llvm.vector.reduce.or.{mangle('i1', mask.lanes)}", [mask], "i1", 0, "any")

    def extract(self, a: Val, lane: int) -> Val:
        return self.op(f"extractelement {a}, i64 {lane}", a.elem, 0, "elem") if a.lanes else a

    def for_each_lane(self, args: Sequence[Val], elem: str, function: Callable[..., Val]) -> Val:
        """function(lane of each argument...) lane by lane, for what has no vector form."""
        args = self.match(*args)
        lanes = args[0].lanes
        if not lanes:
            return function(*args)
        result = Val("poison", elem, lanes)
        for lane in range(lanes):
            value = function(*(self.extract(a, lane) for a in args))
            result = self.op(f"insertelement {result}, {value}, i64 {lane}", elem, lanes)
        return result

    def by_parts(self, args: Sequence[Val], lanes: int, function: Callable[..., Val]) -> Val:
        """function(`lanes` lanes of each argument...) for each such part, for what has one width only."""
        total = args[0].lanes
        if total == lanes:
            return function(*args)
        result: Val | None = None
        for start in range(0, total, lanes):
            place = int_const(start)
            part = function(*(self._part(a, lanes, place) for a in args))
            name = f"llvm.vector.insert.{mangle(part.elem, total)}.{mangle(part.elem, lanes)}"
            whole = Val("poison", part.elem, total) if result is None else result
            result = self.call(name, [whole, part, place], part.elem, total, "whole")
        assert result is not None
        return result

    def _part(self, a: Val, lanes: int, place: Val) -> Val:
        name = f"llvm.vector.extract.{mangle(a.elem, lanes)}.{mangle(a.elem, a.lanes)}"
        return self.call(name, [a, place], a.elem, lanes, "part")

    # Shorthands of numeric code

    def fma(self, a: Val, b: Val, c: Val) -> Val:
        """a*b + c with one rounding where the target can, else with two."""
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
        """A constant of the element type of `like`, as a scalar."""
        if like.elem in ("float", "double"):
            return float_const(float(value), like.elem)
        return int_const(int(value), like.elem)


@cache
def _as_name(hint: str) -> str:
    name = re.sub(r"[^A-Za-z0-9_]", "_", hint)
    return name if name[:1].isalpha() or name[:1] == "_" else f"v{name}"  # a name of LLVM begins with no digit


def _flatten(lines: Lines) -> Iterator[str]:
    for line in lines:
        if isinstance(line, str):
            yield line
        else:
            yield from _flatten(line)
