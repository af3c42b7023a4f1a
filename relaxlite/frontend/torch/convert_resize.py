"""Converters of upsampling: nearest, linear and cubic, with and without antialiasing."""

from __future__ import annotations

from typing import Any

from relaxlite.frontend.torch.node import Node
from relaxlite.frontend.torch.registry import torch_op
from relaxlite.ir import ops
from relaxlite.ir.expr import Expr

_MODES = {"nearest": "nearest", "linear": "linear", "bilinear": "linear", "trilinear": "linear", "bicubic": "cubic"}


def _spatial_scales(n: Node, scales: list[Any], spatial: int) -> tuple[float, ...] | None:
    """Return the factors that map coordinates; None where the sizes decide."""
    known = [s for s in scales if s is not None]
    if len(known) < spatial or not all(isinstance(s, int | float) for s in known):
        return None
    return tuple(float(s) for s in known)


@torch_op(
    "aten.upsample_nearest1d", "aten.upsample_nearest2d", "aten.upsample_nearest3d", "aten._upsample_nearest_exact1d",
    "aten._upsample_nearest_exact2d", "aten._upsample_nearest_exact3d", "aten.upsample_linear1d",
    "aten.upsample_bilinear2d", "aten.upsample_trilinear3d", "aten.upsample_bicubic2d", "aten._upsample_bilinear2d_aa",
    "aten._upsample_bicubic2d_aa",
)  # fmt: skip
def upsample(
    n: Node, self: Expr, output_size: Any = None, align_corners: bool = False, scale_factors: Any = None,
    scales: Any = None, scales_d: Any = None, scales_h: Any = None, scales_w: Any = None,
) -> Expr:  # fmt: skip
    name = n.target.split(".")[1]
    spatial = int(next(c for c in name if c.isdigit()))
    kind = next(mode for key, mode in _MODES.items() if f"upsample_{key}" in name)
    given = list(scale_factors) if scale_factors is not None else [scales, scales_d, scales_h, scales_w]
    attrs: dict[str, Any] = {"mode": kind}
    factors = _spatial_scales(n, given, spatial)
    if factors is not None and not align_corners:
        attrs["scales"] = (1.0, 1.0, *factors)
    if kind == "nearest":
        is_exact = "exact" in name
        attrs |= {
            "coordinate_transformation_mode": "half_pixel" if is_exact else "asymmetric",
            "nearest_mode": "round_prefer_ceil" if is_exact else "floor",
        }
    else:
        attrs["coordinate_transformation_mode"] = "align_corners" if align_corners else "half_pixel"
        attrs["antialias"] = name.endswith("_aa")
        if name.endswith("_aa") and kind == "cubic":
            attrs["cubic_coeff_a"] = -0.5
            attrs["exclude_outside"] = True
    return n.emit(ops.resize(self, n.shape(), **attrs))
