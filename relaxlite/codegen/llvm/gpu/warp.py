"""Emit warp instructions (ir/warp.py) and shuffles for NVPTX."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relaxlite.codegen.llvm.context import KernelContext
from relaxlite.codegen.llvm.emitter import Val, int_const
from relaxlite.gpus import WARP
from relaxlite.ir.warp import INSTRUCTIONS, Mma

_GLOBAL, _SHARED = 1, 3  # address spaces


def emit_warp_instruction(k: KernelContext, name: str, operands: Sequence[Val]) -> None:
    """Emit an instruction of the table; addresses are generic pointers."""
    mma = INSTRUCTIONS[name].mma
    if mma is not None:
        _mma(k, mma, *operands)
    else:
        _EMITTERS[name](k, *operands)
    k.forget_loads()


def emit_shuffle_xor(k: KernelContext, x: Val, distance: Val) -> Val:
    """Emit the value of `x` in the lane at a distance."""
    everyone, last = int_const(-1, "i32"), int_const(WARP - 1, "i32")
    return k.e.call("llvm.nvvm.shfl.sync.bfly.f32", [everyone, x, distance, last], "float", 0, "shuffled")


def _in_space(k: KernelContext, pointer: Val, space: int) -> str:
    name = k.e.fresh("in_space")
    k.e.line(f"%{name} = addrspacecast {pointer} to ptr addrspace({space})")
    return f"ptr addrspace({space}) %{name}"


def _word(k: KernelContext, pointer: Val, number: int) -> Val:
    """Address of a word of a fragment."""
    return pointer if number == 0 else k.e.op(f"getelementptr i32, {pointer}, i64 {number}", "ptr", 0, "word_at")


def _copy_async(k: KernelContext, to: Val, source: Val, size: Val) -> None:
    target, origin = _in_space(k, to, _SHARED), _in_space(k, source, _GLOBAL)
    name = "llvm.nvvm.cp.async.cg.shared.global.16.s"
    k.e.module.declare(name, "void", ["ptr addrspace(3)", "ptr addrspace(1)", "i32"])
    k.e.line(f"call void @{name}({target}, {origin}, {size})")


def _commit(k: KernelContext) -> None:
    k.e.call_void("llvm.nvvm.cp.async.commit.group", [])


def _wait(k: KernelContext, count: Val) -> None:
    k.e.call_void("llvm.nvvm.cp.async.wait.group", [count])


def _load_matrix(k: KernelContext, to: Val, source: Val, suffix: str = "") -> None:
    address = _in_space(k, source, _SHARED)
    name, ty = f"llvm.nvvm.ldmatrix.sync.aligned.m8n8.x4{suffix}.b16.p3", "{i32, i32, i32, i32}"
    k.e.module.declare(name, ty, ["ptr addrspace(3)"])
    words = k.e.op(f"call {ty} @{name}({address})", "i32", 0, "matrices").text
    _store_words(k, to, f"{ty} {words}", "i32")


def _load_matrix_t(k: KernelContext, to: Val, source: Val) -> None:
    _load_matrix(k, to, source, ".trans")


def _store_words(k: KernelContext, to: Val, words: str, elem: str) -> None:
    for number in range(4):
        word = k.e.op(f"extractvalue {words}, {number}", elem, 0, "word")
        k.e.line(f"store {word}, {_word(k, to, number)}, align 4")


def _load_words(k: KernelContext, source: Val, count: int, elem: str) -> list[Val]:
    return [k.e.op(f"load {elem}, {_word(k, source, n)}, align 4", elem, 0, "word") for n in range(count)]


def _mma(k: KernelContext, mma: Mma, c: Val, a: Val, b: Val) -> None:
    elem, letter = ("i32", "r") if mma.total == "int32" else ("float", "f")
    operands = [*_load_words(k, a, 4, "i32"), *_load_words(k, b, 2, "i32"), *_load_words(k, c, 4, elem)]
    text = f"{mma.ptx} {{$0,$1,$2,$3}}, {{$4,$5,$6,$7}}, {{$8,$9}}, {{$10,$11,$12,$13}};"
    constraints = ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4)
    ty = "{" + ", ".join([elem] * 4) + "}"
    arguments = ", ".join(map(str, operands))
    totals = k.e.op(f'call {ty} asm "{text}", "{constraints}"({arguments})', elem, 0, "totals").text
    _store_words(k, c, f"{ty} {totals}", elem)


_EMITTERS: Mapping[str, Callable[..., None]] = {
    "copy_async": _copy_async,
    "commit": _commit,
    "wait": _wait,
    "load_matrix": _load_matrix,
    "load_matrix_t": _load_matrix_t,
}
