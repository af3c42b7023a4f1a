"""Packing of constant weights into the layout that scheduled kernels read.

A register tile reads `width` columns of B[k, n] for each k, with the stride of a whole row. Packed as
P[n / width, k, width] (the last panel is padded with zeros) the kernel streams through each panel:

    B[k, j]   =>   P[j // width, k, j % width]

Rows that a dot product multiplies together are interleaved: P[j // width, k // group, j % width, k % group].
Stacked matrices B[e, k, n], of which a tile reads one, are packed one by one: P[e, j // width, k, j % width].

A program is changed where all its calls pass constants; the schedule names the operands (attribute `panels`: input,
width; `groups`: input, group; `apart`: inputs). Programs that read the same large constants read the panels too;
programs with the attribute INHERITS_LAYOUT read all their constants as other programs have them packed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from relaxlite.ir.attributes import INHERITS_LAYOUT, PANELS, PREFETCH_BYTES, ROW_GROUPS, STACKED
from relaxlite.ir.expr import Attrs, Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import (
    AddressOf,
    Buffer,
    Compare,
    IfThenElse,
    IndexValue,
    LibraryFound,
    Literal,
    Load,
    Prefetch,
    Select,
    Seq,
    Stmt,
    TensorProgram,
    Value,
)
from relaxlite.ir.program_visitor import ProgramRewriter, all_values, walk_values
from relaxlite.ir.symbolic import SymExpr, as_int, ceildiv, sym
from relaxlite.ir.types import TensorType
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.records import dataclass

SHARED_BYTES = 1 << 20  # minimum size of a constant whose other readers take the packed layout, to keep one copy


def pack_constants(module: IRModule) -> IRModule:
    """Pack constant weights as the schedules of their programs read them."""
    wanted = {name: panels for name, p in module.programs().items() if (panels := _panels(p))}
    for call in program_calls(module):
        if call.callee.name in wanted:
            panels = wanted[call.callee.name]
            wanted[call.callee.name] = {k: w for k, w in panels.items() if isinstance(call.args[k], Constant)}
    for name, panels in _other_readers(module, wanted).items():
        wanted[name] = {**wanted.get(name, {}), **panels}
    definitions: dict[str, Definition] = {}
    for name, panels in wanted.items():
        program = module[name]
        assert isinstance(program, TensorProgram)
        definitions[name] = pack_program(program, panels)
    packer = _Packer()
    for name, function in module.functions().items():
        definitions[name] = _PackCalls(wanted, packer).function(function)
    return module.updated(definitions)


def _other_readers(module: IRModule, wanted: Mapping[str, Mapping[int, _Layout]]) -> dict[str, dict[int, _Layout]]:
    """Return the layouts of inputs of programs that also read large packed constants, so that there is one copy.

    Example: an embedding that is also the matrix of the logits.
    """
    packed: dict[int, _Layout] = {}  # by the id of the constant
    large: set[int] = set()
    for call in program_calls(module):
        panels = wanted.get(call.callee.name, {})
        constants = {k: arg.value for k in panels if isinstance(arg := call.args[k], Constant)}
        packed.update({id(value): panels[k] for k, value in constants.items()})
        if any(
            value.nbytes >= SHARED_BYTES for value in constants.values()
        ):  # and the constants packed with it, as its scales
            large.update(id(value) for value in constants.values())
    inheriting = {name for name, program in module.programs().items() if program.attrs.get(INHERITS_LAYOUT)}
    layout_of_input: dict[
        tuple[str, int], _Layout | None
    ] = {}  # (program, input) -> how all its calls pass it; None: not alike
    for call in program_calls(module):
        for k, arg in enumerate(call.args):
            place, key = (call.callee.name, k), id(arg.value) if isinstance(arg, Constant) else None
            result = packed.get(key) if key is not None and (key in large or call.callee.name in inheriting) else None
            layout_of_input[place] = result if layout_of_input.get(place, result) == result else None
    readers: dict[str, dict[int, _Layout]] = {}
    for (name, k), layout_of in layout_of_input.items():
        if layout_of is not None and k not in wanted.get(name, {}):
            readers.setdefault(name, {})[k] = layout_of
    return readers


@dataclass(frozen=True, slots=True)
class _Layout:
    """A packed layout: B[..., k, n] as P[n / width, ..., k / group, width, group]; groups of 1 have no last dimension.

    `apart`: number of leading dimensions that stay before the panels, for groups of 1.
    """

    width: int
    group: int = 1
    apart: int = 0

    def shape(self, old: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        panels, inner = ceildiv(old[-1], self.width), sym(self.width)
        if self.group == 1:
            return (*old[: self.apart], panels, *old[self.apart : -1], inner)
        return (panels, *old[:-2], old[-2] // self.group, inner, sym(self.group))

    def indices(self, old: tuple[SymExpr, ...]) -> tuple[SymExpr, ...]:
        *outer, column = old
        panel, inner = column // self.width, column % self.width
        if self.group == 1:
            return (*outer[: self.apart], panel, *outer[self.apart :], inner)
        return (panel, *outer[:-1], outer[-1] // self.group, inner, outer[-1] % self.group)

    def packed(self, value: np.ndarray) -> np.ndarray:
        columns = value.shape[-1]
        panels = -(-columns // self.width)
        padded = value
        if columns % self.width:
            padded = np.zeros((*value.shape[:-1], panels * self.width), value.dtype)
            padded[..., :columns] = value
        if self.group == 1:
            return np.moveaxis(padded.reshape(*value.shape[:-1], panels, self.width), -2, self.apart)
        rows = value.shape[-2] // self.group
        split = padded.reshape(*value.shape[:-2], rows, self.group, panels, self.width)
        return np.moveaxis(np.moveaxis(split, -2, 0), -2, -1)


def _panels(program: TensorProgram) -> dict[int, _Layout]:
    """Return the layout of each input that the schedule of a program packs."""
    if program.attrs.get(INHERITS_LAYOUT):
        return {}
    widths, groups, apart = (program.attrs.get(name, ()) for name in (PANELS, ROW_GROUPS, STACKED))
    assert isinstance(widths, tuple) and isinstance(groups, tuple) and isinstance(apart, tuple)
    width_of: dict[int, int] = dict(widths)  # type: ignore[arg-type]
    group_of: dict[int, int] = dict(groups)  # type: ignore[arg-type]
    return {k: _Layout(width, group_of.get(k, 1), int(k in apart)) for k, width in width_of.items()}


def pack_program(program: TensorProgram, panels: Mapping[int, _Layout]) -> TensorProgram:
    """Rewrite a program to read the inputs `panels` packed; other inputs that its schedule names stay unpacked."""
    names = (PANELS, ROW_GROUPS, STACKED, PREFETCH_BYTES)
    attrs = {name: value for name, value in program.attrs.items() if name not in names}
    distances: Any = program.attrs.get(PREFETCH_BYTES, ())
    if packed_distances := tuple(
        (k, count) for k, count in distances if k in panels
    ):  # distances are for packed inputs only
        attrs[PREFETCH_BYTES] = packed_distances
    packed: dict[Buffer, tuple[Buffer, _Layout]] = {}
    for k, layout in panels.items():
        old = program.params[k]
        packed[old] = (replace(old, name=f"{old.name}_packed", shape=layout.shape(old.shape)), layout)
    params = tuple(packed[b][0] if b in packed else b for b in program.params)
    loose = {program.params[k] for k in _panels(program)} - packed.keys()
    body = _PackLoads(packed, loose).stmt(program.body)
    return replace(program, params=params, body=body, attrs=Attrs(attrs))


def _calls_routine(cond: Value) -> bool:
    return any(isinstance(value, LibraryFound) for value in walk_values(cond))


class _PackLoads(ProgramRewriter):
    """Redirects loads and addresses to packed buffers.

    Library routines that take addresses of panels need packed inputs: where inputs stay `loose`, unpacked, the fallback
    branch is taken.
    """

    def __init__(self, packed: Mapping[Buffer, tuple[Buffer, _Layout]], loose: Collection[Buffer]) -> None:
        super().__init__()
        self._packed, self._loose = packed, loose

    def stmt(self, stmt: Stmt) -> Stmt:
        if isinstance(stmt, IfThenElse) and _calls_routine(stmt.cond) and self._takes_loose(stmt.then):
            return self.stmt(stmt.other or Seq(()))
        if not isinstance(stmt, Prefetch) or stmt.buffer not in self._packed.keys() | self._loose:
            return super().stmt(stmt)
        if stmt.buffer in self._loose:  # rows of its panels are not contiguous
            return Seq(())
        buffer, layout = self._packed[stmt.buffer]
        return replace(stmt, buffer=buffer, indices=layout.indices(stmt.indices))

    def _takes_loose(self, stmt: Stmt) -> bool:
        return any(isinstance(value, AddressOf) and value.buffer in self._loose for value in all_values(stmt))

    def _value(self, value: Value) -> Value:
        if isinstance(value, Select) and self._is_guarded(value):
            return self.value(value.then)  # the padding of the panel is the zero of `other`
        if not isinstance(value, Load | AddressOf) or value.buffer not in self._packed:
            return super()._value(value)
        buffer, layout = self._packed[value.buffer]
        return replace(value, buffer=buffer, indices=layout.indices(value.indices))

    def _is_guarded(self, value: Select) -> bool:
        """Whether the value is b[..., j] if j < columns else 0, of a packed b."""
        cond, load, otherwise = value.cond, value.then, value.other
        return (
            isinstance(load, Load)
            and load.buffer in self._packed
            and isinstance(cond, Compare)
            and cond.op == "lt"
            and isinstance(cond.a, IndexValue)
            and isinstance(cond.b, IndexValue)
            and cond.a.index is load.indices[-1]
            and cond.b.index is load.buffer.shape[-1]
            and isinstance(otherwise, Literal)
            and not otherwise.value
        )


class _Packer:
    """Packs each constant once."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, _Layout], tuple[Constant, Constant]] = {}

    def pack(self, constant: Constant, layout: _Layout) -> Constant:
        key = (id(constant.value), layout)
        if key not in self._done:
            packed = layout.packed(constant.value)  # a view, where it can be one: copied when the weights are gathered
            ty = TensorType.of(packed.shape, constant.ty.dtype)
            result = Constant(packed, ty, constant.name)
            self._done[key] = constant, result  # keeps the source alive, and so its id its own
        return self._done[key][1]


class _PackCalls(Rewriter):
    def __init__(self, wanted: Mapping[str, Mapping[int, _Layout]], packer: _Packer) -> None:
        super().__init__()
        self._wanted, self._packer = wanted, packer

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        panels = self._wanted.get(value.callee.name)
        if not panels:
            return None
        args = list(value.args)
        for k, layout in panels.items():
            constant = args[k]
            assert isinstance(constant, Constant) and as_int(constant.ty.shape[-1] if constant.ty.shape else 0)
            args[k] = self._packer.pack(constant, layout)
        return replace(value, args=tuple(args))
