"""Lay constant weights out in the order in which the scheduled kernels read them.

A register tile reads `width` columns of B[k, n] for one k after another, far apart in memory. Packed as
P[n / width, k, width] (zeros fill up the last panel) the kernel streams through each panel:

    B[k, j]   =>   P[j // width, k, j % width]

A program is changed where all its calls pass constants; the schedule names the operands (attribute `panels`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from relaxlite.ir.expr import Attrs, Call, Constant, Expr, GlobalVar, Let, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Buffer, Compare, IndexValue, Literal, Load, Select, TensorProgram, Value
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import as_int, ceildiv, sym
from relaxlite.ir.visitor import Rewriter, bodies


def pack_constants(module: IRModule) -> IRModule:
    wanted = {name: panels for name, p in module.programs().items() if (panels := _panels(p))}
    for call in _calls(module):
        if call.callee.name in wanted:
            panels = wanted[call.callee.name]
            wanted[call.callee.name] = {k: w for k, w in panels.items() if isinstance(call.args[k], Constant)}
    definitions: dict[str, Definition] = {}
    for name, panels in wanted.items():
        program = module[name]
        assert isinstance(program, TensorProgram)
        definitions[name] = _pack_program(program, panels)
    packer = _Packer()
    for name, function in module.functions().items():
        definitions[name] = _PackCalls(wanted, packer).function(function)
    return module.updated(definitions)


def _panels(program: TensorProgram) -> dict[int, int]:
    """Input -> panel width."""
    panels = program.attrs.get("panels", ())
    assert isinstance(panels, tuple)
    return dict(panels)  # type: ignore[arg-type]


def _calls(module: IRModule) -> list[Call]:
    found = [binding for f in module.functions().values() for body in bodies(f) for binding in body.bindings()]
    values = [binding.value for binding in found if isinstance(binding, Let)]
    return [v for v in values if isinstance(v, Call) and isinstance(v.callee, GlobalVar)]


def _pack_program(program: TensorProgram, panels: Mapping[int, int]) -> TensorProgram:
    attrs = Attrs({name: value for name, value in program.attrs.items() if name != "panels"})
    packed: dict[Buffer, tuple[Buffer, int]] = {}
    for k, width in panels.items():
        old = program.params[k]
        shape = (ceildiv(old.shape[-1], width), *old.shape[:-1], sym(width))
        packed[old] = (replace(old, name=f"{old.name}_packed", shape=shape), width)
    params = tuple(packed[b][0] if b in packed else b for b in program.params)
    body = _PackLoads(packed).stmt(program.body)
    return replace(program, params=params, body=body, attrs=attrs)


class _PackLoads(ProgramRewriter):
    def __init__(self, packed: Mapping[Buffer, tuple[Buffer, int]]) -> None:
        super().__init__()
        self._packed = packed

    def _value(self, value: Value) -> Value:
        if isinstance(value, Select) and self._is_guarded(value):
            return self.value(value.then)  # what the panel holds beyond the last column is the zero of `other`
        if not isinstance(value, Load) or value.buffer not in self._packed:
            return super()._value(value)
        buffer, width = self._packed[value.buffer]
        *outer, column = value.indices
        return Load(buffer, (column // width, *outer, column % width))

    def _is_guarded(self, value: Select) -> bool:
        """b[..., j] if j < columns else 0"""
        cond, load, other = value.cond, value.then, value.other
        return (
            isinstance(load, Load)
            and load.buffer in self._packed
            and isinstance(cond, Compare)
            and cond.op == "lt"
            and isinstance(cond.a, IndexValue)
            and isinstance(cond.b, IndexValue)
            and cond.a.index is load.indices[-1]
            and cond.b.index is load.buffer.shape[-1]
            and isinstance(other, Literal)
            and not other.value
        )


class _Packer:
    """Packs each constant once."""

    def __init__(self) -> None:
        self._done: dict[tuple[int, int], tuple[Constant, Constant]] = {}

    def pack(self, constant: Constant, width: int) -> Constant:
        key = (id(constant.value), width)
        if key not in self._done:
            self._done[key] = (constant, _packed(constant, width))  # keeps the source alive, and so its id its own
        return self._done[key][1]


def _packed(constant: Constant, width: int) -> Constant:
    value = constant.value
    columns = value.shape[-1]
    panels = -(-columns // width)
    padded = np.zeros((*value.shape[:-1], panels * width), value.dtype)
    padded[..., :columns] = value
    split = padded.reshape(*value.shape[:-1], panels, width)
    return Constant.of(np.moveaxis(split, -2, 0), name=constant.name)


class _PackCalls(Rewriter):
    def __init__(self, wanted: Mapping[str, Mapping[int, int]], packer: _Packer) -> None:
        super().__init__()
        self._wanted, self._packer = wanted, packer

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        panels = self._wanted.get(value.callee.name)
        if not panels:
            return None
        args = list(value.args)
        for k, width in panels.items():
            constant = args[k]
            assert isinstance(constant, Constant) and as_int(constant.ty.shape[-1] if constant.ty.shape else 0)
            args[k] = self._packer.pack(constant, width)
        return replace(value, args=tuple(args))
