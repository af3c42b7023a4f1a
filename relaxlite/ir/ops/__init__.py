"""The op library: `ops.add(a, b)` is a typed call of the op named "add". Importing this package registers every op."""

from __future__ import annotations

from relaxlite.ir.op import Op, all_ops, get_op
from relaxlite.ir.ops import (  # noqa: F401  (importing a module registers its ops)
    activations,
    bessel,
    binary,
    block_quantized,
    contraction,
    creation,
    data_dependent,
    decision_trees,
    detection,
    eigenvalues,
    elementwise,
    factorizations,
    grouped_products,
    grouped_rows,
    hadamard,
    indexing,
    kv_cache,
    linalg,
    linear_attention,
    memory,
    nn_adaptive_pool,
    nn_attention,
    nn_conv,
    nn_conv_transpose,
    nn_norm,
    nn_norm_channel,
    nn_pool,
    nn_resize,
    nn_rotary,
    nn_sample,
    paged_convolution,
    pairwise_coupling,
    quantize,
    ragged_cache,
    recurrent,
    recurrent_scan,
    reduce,
    rounded_blocks,
    shape,
    slicing,
    sorting,
    special,
    special_series,
    window,
)  # fmt: skip

__all__ = ["all_ops", "get_op"]


def __getattr__(name: str) -> Op:
    try:
        return get_op(name)
    except KeyError:
        raise AttributeError(f"relaxlite has no op named {name!r}") from None
