"""Padding of convolutions and pools, from `pads` and `auto_pad`: begins, then ends, of the spatial dimensions."""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.frontend.onnx.node import Node
from relaxlite.ir.ops.broadcast import PROVER
from relaxlite.ir.symbolic import SymExpr, ceildiv, smax, sym

Shape = tuple[SymExpr, ...]


def window_pads(
    n: Node, sizes: Shape, kernel: Sequence[SymExpr | int], strides: Sequence[int], dilations: Sequence[int]
) -> Shape:
    """Return a node's padding, 2 * len(sizes) values. "SAME": the padding for results of ceil(size / stride)."""
    mode, pads = auto_pad(n), n.ints("pads", None)
    count = len(sizes)
    if mode in ("SAME_UPPER", "SAME_LOWER"):
        pairs = [
            _same(*args, upper=mode == "SAME_UPPER") for args in zip(sizes, kernel, strides, dilations, strict=True)
        ]
        return tuple(p for p, _ in pairs) + tuple(p for _, p in pairs)
    if mode == "VALID" or pads is None:
        return (sym(0),) * (2 * count)
    if len(pads) != 2 * count:
        n.fail(f"attribute 'pads' must have {2 * count} values for {count} spatial dimensions, got {len(pads)}")
    return tuple(sym(p) for p in pads)


def auto_pad(n: Node) -> str:
    """Return the attribute `auto_pad`, NOTSET by default. Raises ImportModelError for an unknown mode."""
    mode = n.text("auto_pad", "NOTSET") or "NOTSET"
    if mode not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        n.fail(f"attribute 'auto_pad' must be NOTSET, VALID, SAME_UPPER or SAME_LOWER, not {mode!r}")
    return mode


def _same(size: SymExpr, kernel: SymExpr | int, stride: int, dilation: int, *, upper: bool) -> tuple[SymExpr, SymExpr]:
    extent = (sym(kernel) - 1) * dilation + 1
    total = (ceildiv(size, stride) - 1) * stride + extent - size
    total = total if PROVER.can_prove_le(0, total) else smax(total, 0)
    return split_padding(total, more_at_end=upper)


def split_padding(total: SymExpr, *, more_at_end: bool) -> tuple[SymExpr, SymExpr]:
    """Split a total into (begin, end); if it is odd, the end or the begin gets one more."""
    half = total // 2
    return (half, total - half) if more_at_end else (total - half, half)
