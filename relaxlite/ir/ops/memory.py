"""Ops for explicit memory and run-time shapes in lowered functions.

`memory.*` ops (IR stage "dps") take symbolic shapes. `vm.*` ops (IR stage "vm") take slots of the shape heap: a *dim*
d >= 0 is a constant, d < 0 the heap slot -1-d (docs/runtime-abi.md, Bytecode).
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
    """Allocate an uninitialized tensor."""

    name = "memory.alloc_tensor"
    operands = ("shape",)
    attrs = {"dtype": Attr("dtype")}
    is_pure = True

    def infer(self, shape: Expr, *, dtype: str) -> Type:
        return TensorType.of(self.shape(shape), dtype)


@register
class AllocArena(_RuntimeOp):
    """Allocate the arena of a function call; `size` is a shape of one value, in bytes."""

    name = "memory.alloc_arena"
    operands = ("size",)
    is_pure = True

    def infer(self, size: Expr) -> Type:
        return ObjectType()


@register
class View(_RuntimeOp):
    """Uninitialized tensor inside an arena, at a byte offset (a shape of one value)."""

    name = "memory.view"
    operands = ("arena", "offset", "shape")
    attrs = {"dtype": Attr("dtype")}
    is_pure = True

    def infer(self, arena: Expr, offset: Expr, shape: Expr, *, dtype: str) -> Type:
        return TensorType.of(self.shape(shape), dtype)


@register
class Part(_RuntimeOp):
    """View of the memory of tensor `x` from a byte offset (a shape of one value) on, with its own shape and dtype.

    Writes to the view are visible in `x` and vice versa.
    """

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
    """Copy a tensor to newly allocated memory."""

    name = "memory.copy"
    operands = ("x",)
    is_pure = True

    def infer(self, x: Expr) -> Type:
        return x.ty

    def reference(self, x: Any) -> Any:
        return x.copy()


class _VmOp(_RuntimeOp):
    """Op whose result type lowering supplies (see `typed`), as slots do not determine it."""

    def infer(self, *operands: Any, **attrs: Any) -> Type:
        return UNIT


@register
class AllocHeap(_VmOp):
    """Allocate the shape heap: an int64 tensor of `slots` zeros."""

    name = "vm.alloc_heap"
    operands = ()
    attrs = {"slots": Attr("int")}

    def infer(self, *, slots: int) -> Type:
        return TensorType.of((slots,), "int64")


@register
class VmMatchShape(_VmOp):
    """Check the dimensions of `x` against slots and constants, and bind slots; `what` names x in error messages."""

    name = "vm.match_shape"
    operands = ("x", "heap")
    attrs = {"spec": Attr("tuple"), "what": Attr("str")}


@register
class VmAllocTensor(_VmOp):
    """Allocate a tensor with these dims."""

    name = "vm.alloc_tensor"
    operands = ("heap",)
    attrs = {"dims": Attr("ints"), "dtype": Attr("dtype")}
    is_pure = True


@register
class VmAllocArena(_VmOp):
    """Allocate an arena of `size` bytes (a dim)."""

    name = "vm.alloc_arena"
    operands = ("heap",)
    attrs = {"size": Attr("int")}
    is_pure = True


@register
class VmView(_VmOp):
    """Tensor inside an arena or inside another tensor."""

    name = "vm.view"
    operands = ("arena", "heap")
    attrs = {"offset": Attr("int"), "dims": Attr("ints"), "dtype": Attr("dtype")}
    is_pure = True


@register
class VmReshape(_VmOp):
    """Reinterpret the memory of a tensor with another shape."""

    name = "vm.reshape"
    operands = ("x", "heap")
    attrs = {"dims": Attr("ints")}
    is_pure = True
