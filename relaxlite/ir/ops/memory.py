"""Explicit memory and run-time shapes: what a function consists of after lowering, beside calls of programs.

`memory.*` ops take symbolic shapes (stage "dps"); `vm.*` ops take slots of the shape heap instead, where a *dim*
d >= 0 is a constant and d < 0 the heap slot -1-d (stage "vm"; see docs/runtime-abi.md, Bytecode).
"""

from __future__ import annotations

from typing import Any

from relaxlite.ir.expr import Expr
from relaxlite.ir.op import Attr, Op, register
from relaxlite.ir.types import UNIT, ObjectType, TensorType, Type


class _RuntimeOp(Op):
    is_pure = False


@register
class AllocTensor(_RuntimeOp):
    """A new uninitialized tensor of its own memory."""

    name = "memory.alloc_tensor"
    operands = ("shape",)
    attrs = {"dtype": Attr("dtype")}
    is_pure = True

    def infer(self, shape: Expr, *, dtype: str) -> Type:
        return TensorType.of(self.shape(shape), dtype)


@register
class AllocArena(_RuntimeOp):
    """The arena of a call: `size` is a shape of one value, in bytes."""

    name = "memory.alloc_arena"
    operands = ("size",)
    is_pure = True

    def infer(self, size: Expr) -> Type:
        return ObjectType()


@register
class View(_RuntimeOp):
    """An uninitialized tensor inside an arena, at a byte offset (a shape of one value)."""

    name = "memory.view"
    operands = ("arena", "offset", "shape")
    attrs = {"dtype": Attr("dtype")}
    is_pure = True

    def infer(self, arena: Expr, offset: Expr, shape: Expr, *, dtype: str) -> Type:
        return TensorType.of(self.shape(shape), dtype)


@register
class Part(_RuntimeOp):
    """A part of the memory of tensor `x`, from a byte offset (a shape of one value) on, as one of its own shape and
    dtype: what is written to one is seen in the other."""

    name = "memory.part"
    operands = ("x", "offset", "shape")
    attrs = {"dtype": Attr("dtype")}
    is_pure = True

    def infer(self, x: Expr, offset: Expr, shape: Expr, *, dtype: str) -> Type:
        self.tensor(x, "x")
        if len(self.shape(offset, "offset")) != 1:
            self.fail("the offset is a shape of one value")
        return TensorType.of(self.shape(shape), dtype)


@register
class Copy(_RuntimeOp):
    """A new tensor of its own memory with the same contents."""

    name = "memory.copy"
    operands = ("x",)
    is_pure = True

    def infer(self, x: Expr) -> Type:
        return x.ty

    def reference(self, x: Any) -> Any:
        return x.copy()


class _VmOp(_RuntimeOp):
    """An op whose result type cannot be computed from slots: lowering gives it (see `typed`)."""

    def infer(self, *operands: Any, **attrs: Any) -> Type:
        return UNIT


@register
class AllocHeap(_VmOp):
    """The shape heap: an int64 tensor of `slots` zeros."""

    name = "vm.alloc_heap"
    operands = ()
    attrs = {"slots": Attr("int")}

    def infer(self, *, slots: int) -> Type:
        return TensorType.of((slots,), "int64")


@register
class VmMatchShape(_VmOp):
    """Check dimensions of `x` against slots and constants and bind slots; `what` names x in an error."""

    name = "vm.match_shape"
    operands = ("x", "heap")
    attrs = {"spec": Attr("tuple"), "what": Attr("str")}


@register
class VmAllocTensor(_VmOp):
    """A new tensor with these dims."""

    name = "vm.alloc_tensor"
    operands = ("heap",)
    attrs = {"dims": Attr("ints"), "dtype": Attr("dtype")}
    is_pure = True


@register
class VmAllocArena(_VmOp):
    """An arena of `size` bytes (a dim)."""

    name = "vm.alloc_arena"
    operands = ("heap",)
    attrs = {"size": Attr("int")}
    is_pure = True


@register
class VmView(_VmOp):
    """A tensor inside an arena or inside another tensor."""

    name = "vm.view"
    operands = ("arena", "heap")
    attrs = {"offset": Attr("int"), "dims": Attr("ints"), "dtype": Attr("dtype")}
    is_pure = True


@register
class VmReshape(_VmOp):
    """The same memory with another shape."""

    name = "vm.reshape"
    operands = ("x", "heap")
    attrs = {"dims": Attr("ints")}
    is_pure = True
