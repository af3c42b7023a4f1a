"""The step of a decoder over a paged KV cache: one function for prefill, decode and mixtures of both.

    main(tokens int64[n], positions int64[n], slots int64[n], table int32[b, m], blocks int64[w, 6], wanted int64[r],
         keys_0, values_0, ...) -> logits float32[r, vocab]

Tokens of all sequences are concatenated without padding; positions, slots, table and blocks describe them (made by
runtime/kv_cache.py, explained at the ops kv_append and paged_attention). `wanted` are the rows whose logits are
computed. A layer with a convolution has convolved_K in place of keys and values; a layer that reads the keys and values
of another one has no pools. If layers have states (delta_net.py, mamba.py), `spans` int64[b, 4] follow the blocks, and
tails_K, states_K all other pools. Pools are donated: a call writes new tokens into the caller's arrays. Any change of
this signature requires another STEP_VERSION.

With `has_fill` the module has a second function, which takes all of these but `wanted` and returns no logits: it
fills the cache only, without the last layers if these cache nothing, and in relaxed precision
(passes/graph/integer_products.py, passes/products/int16_products.py), as no logits of its tokens are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from relaxlite.errors import InvalidArgumentError
from relaxlite.frontend.llm.checkpoint import Checkpoint
from relaxlite.frontend.llm.config import DecoderConfig, Experts
from relaxlite.frontend.llm.layers import Decoder
from relaxlite.ir.attributes import BATCH_INVARIANT, DONATED, EXPORTED, INPUT_NAMES, OUTPUT_NAMES, RELAXED_PRECISION
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, Expr, Tuple, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass
from relaxlite.version import STEP_VERSION

PAGE = 64  # tokens; kernels vectorize along them, larger pages waste memory (docs/measurements/llm.md)
BLOCK_ROWS = 64  # queries times query heads per KV head in one attention block
STEP_TOKENS = 512
CHUNK = 128
MIN_EXPERT_ROWS = 64  # the number of rows from which products run near full speed (docs/measurements/llm.md)
MAX_PARTS = 1024  # attention blocks beyond one per sequence: four for each of 256 threads
CACHE_DTYPES = ("float32", "float16", "int8")
ENTRY, FILL = "main", "fill"
POOL_PREFIXES = ("keys_", "values_", "key_scales_", "value_scales_", "convolved_")
STATE_PREFIXES = ("tails_", "states_")  # pools with a slot for each state
_INT8_MAX = 127  # largest code of an int8 cache


def build_step(
    checkpoint: Checkpoint,
    *,
    page: int = PAGE,
    cache_dtype: str = "float32",
    step_tokens: int = STEP_TOKENS,
    has_fill: bool = False,
    groups_rows: bool = False,
) -> IRModule:
    """Build the module of a checkpoint.

    `page`: tokens per page. `cache_dtype`: the type of the KV cache, one of CACHE_DTYPES. `step_tokens`: the maximum
    number of tokens of a step. `has_fill`: add the function that only fills the cache. `groups_rows`: products of
    experts are grouped matmuls, which are fast for products in integers only. Raises InvalidArgumentError for another
    `cache_dtype`.
    """
    if cache_dtype not in CACHE_DTYPES:
        raise InvalidArgumentError(f"a cache holds {', '.join(CACHE_DTYPES)}, not {cache_dtype!r}")
    config, bb = checkpoint.config, BlockBuilder()
    decoder = Decoder(bb, config, checkpoint.weights, groups_rows=groups_rows)
    min_kv_heads = min(config.kv_heads_of(layer) for layer in range(config.layers))
    block = max(1, BLOCK_ROWS // (config.heads // min_kv_heads))
    for name in (ENTRY, FILL) if has_fill else (ENTRY,):
        types = _parameters(bb, config, page, cache_dtype, step_tokens, has_wanted=name == ENTRY)
        pool_indices = [
            k for k, parameter in enumerate(types) if parameter.startswith((*POOL_PREFIXES, *STATE_PREFIXES))
        ]
        outputs = ("logits",) if name == ENTRY else ()
        relaxed_attrs = {EXPORTED: True, RELAXED_PRECISION: True} if name == FILL else {}
        names = {INPUT_NAMES: tuple(types), OUTPUT_NAMES: (*outputs, *list(types)[pool_indices[0] :])}
        attrs = Attrs({DONATED: tuple(pool_indices), **names, **relaxed_attrs})
        with bb.function(name, attrs, **types) as params:
            by_name = dict(zip(types, params, strict=True))
            tokens, positions, slots, table, blocks = params[:5]
            wanted = by_name.get("wanted")
            layers = decoder.in_function(is_relaxed=name == FILL)
            pools = dict(list(by_name.items())[pool_indices[0] :])
            mix = CachedMixer(layers, pools, slots, table, blocks, block, by_name.get("spans"))
            hidden = layers.hidden(tokens, positions, mix, wanted)
            bb.result(Tuple((*([layers.logits(hidden)] if name == ENTRY else []), *mix.pools.values())))
    facts = {
        "context": config.context,
        "attention_block": block,
        "step_tokens": step_tokens,
        "chunk": min(step_tokens, _chunk(config.experts)),
    }
    return bb.module(Attrs({**facts, "step_version": STEP_VERSION, BATCH_INVARIANT: True}))


def _chunk(experts: Experts | None) -> int:
    """Return the number of tokens in which a long prompt is best split.

    Larger chunks take memory and overflow the CPU's caches (docs/measurements/llm.md); but with few tokens per expert,
    products wait for the experts' weights.
    """
    if experts is None:
        return CHUNK
    min_tokens = MIN_EXPERT_ROWS * experts.count // experts.top_k
    return max(CHUNK, -(-min_tokens // CHUNK) * CHUNK)


def _parameters(
    bb: BlockBuilder, config: DecoderConfig, page: int, cache_dtype: str, step_tokens: int, *, has_wanted: bool
) -> dict[str, TensorType]:
    """Return the names and types of a function's parameters."""
    n = bb.symbol("n", lower=1, upper=step_tokens)
    batch = bb.symbol("batch", lower=1, upper=step_tokens)
    blocks = bb.symbol("blocks", lower=1, upper=step_tokens + MAX_PARTS)
    context_pages = bb.symbol("context_pages", lower=1, upper=-(-config.context // page))
    types = {
        "tokens": TensorType.of((n,), "int64"),
        "positions": TensorType.of((n,), "int64"),
        "slots": TensorType.of((n,), "int64"),
        "table": TensorType.of((batch, context_pages), "int32"),
        "blocks": TensorType.of((blocks, 6), "int64"),
    }
    if config.states is not None:
        types["spans"] = TensorType.of((batch, 4), "int64")
    if has_wanted:
        types["wanted"] = TensorType.of((bb.symbol("rows", lower=1, upper=step_tokens),), "int64")
    pages = bb.symbol("pages", lower=1)
    for layer in range(config.layers):
        types |= _pools(layer, pages, config, page, cache_dtype)
    if config.states is not None:
        slots, layout = bb.symbol("states", lower=1), config.states
        shapes = {
            "tails": (1, slots, layout.length - 1, layout.channels),
            "states": (layout.heads, slots, layout.key_width, layout.width),
        }
        for layer in range(config.layers):
            if layout.layers[layer]:
                types |= {f"{name}_{layer}": TensorType.of(shape, "float32") for name, shape in shapes.items()}
    return types


def _pools(layer: int, pages: SymVar, config: DecoderConfig, page: int, dtype: str) -> dict[str, TensorType]:
    """Return the names and types of a layer's pools."""
    if config.mixing(layer) in ("delta", "mamba") or config.kv_layer_of(layer) != layer:
        return {}
    if config.mixing(layer) == "convolution":  # int8 would need a scale per channel
        pool_dtype = "float16" if dtype == "float16" else "float32"
        return {f"convolved_{layer}": TensorType.of((1, pages, page, config.hidden), pool_dtype)}
    heads, width = config.kv_heads_of(layer), config.head_width_of(layer)
    result = {
        f"keys_{layer}": TensorType.of((heads, pages, width, page), dtype),
        f"values_{layer}": TensorType.of((heads, pages, page, config.value_width_of(layer)), dtype),
    }
    if dtype == "int8":
        for name in ("key_scales", "value_scales"):
            result[f"{name}_{layer}"] = TensorType.of((heads, pages, page, 1), "float32")
    return result


@lru_cache(maxsize=4)  # one array for all layers, which a compiled model stores once
def _signs(width: int, size: int) -> np.ndarray[Any, Any]:
    """Return random signs [width], divided by size**0.5, which makes a Walsh-Hadamard matrix of `size` orthogonal."""
    array = np.random.default_rng(0).choice(np.array([-1.0, 1.0]), width) / size**0.5
    array = array.astype(np.float32)
    array.flags.writeable = False
    return array


@dataclass(slots=True)
class CachedMixer:
    """A `Mixer` over the cache. `pools`: the latest contents by the names of parameters, in their order."""

    decoder: Decoder
    pools: dict[str, Var]
    slots: Expr
    table: Expr
    blocks: Expr
    block: int
    spans: Expr | None = None

    def __call__(self, layer: int, q: Expr, k: Expr | None, v: Expr | None) -> Expr:
        d, c = self.decoder, self.decoder.config
        names = [name for kind in POOL_PREFIXES if (name := f"{kind}{c.kv_layer_of(layer)}") in self.pools]
        if len(names) > 2:  # with scales
            q, k = self._rotated(q), None if k is None else self._rotated(k)
        if k is not None and v is not None:
            self._append(names, k, v)
        keys, values, *scales = (self.pools[name] for name in names)
        scale = c.head_width_of(layer) ** -0.5 if c.query_scale is None else c.query_scale
        window = c.window if c.is_local_layer(layer) else None
        sinks = [d.vector(f"layers.{layer}.sinks")] if c.has_sinks else []
        return d.op(
            "paged_attention", q, keys, values, self.table, self.blocks, *scales, *sinks,
            scale=scale, window=window, cap=c.score_cap, block=self.block,
        )  # fmt: skip

    def _append(self, names: Sequence[str], k: Expr, v: Expr) -> None:
        """Append keys and values (n, heads, width) to the pools `names`: keys, values and, for int8, their scales."""
        d, (keys, values, *scales) = self.decoder, (self.pools[name] for name in names)
        assert isinstance(keys.ty, TensorType)
        (k, key_scale), (v, value_scale) = (self._stored(x, keys.ty.dtype) for x in (k, v))
        result = [d.op("kv_append", keys, k, self.slots, turned=True), d.op("kv_append", values, v, self.slots)]
        if scales:
            new_scales = zip(scales, (key_scale, value_scale), strict=True)
            result += [d.op("kv_append", pool, new, self.slots) for pool, new in new_scales]
        self.pools |= zip(names, result, strict=True)

    def causal_convolution(self, layer: int, x: Expr, weight: np.ndarray[Any, Any]) -> Expr:
        d, name = self.decoder, f"convolved_{layer}"
        if name not in self.pools:
            return self._with_state("state_convolution", f"tails_{layer}", x, weight)
        pool = self.pools[name]
        assert isinstance(pool.ty, TensorType)
        row = d.op("expand_dims", x, axes=(1,))
        stored = row if pool.ty.dtype == "float32" else d.op("cast", row, dtype=pool.ty.dtype)
        self.pools[name] = d.op("kv_append", pool, stored, self.slots)
        return d.op("paged_convolution", self.pools[name], weight, x, self.table, self.blocks)

    def linear_attention(self, layer: int, q: Expr, k: Expr, v: Expr, decay: Expr, beta: Expr) -> Expr:
        states = self.decoder.config.states
        assert states is not None
        attrs = {"tiled": states.tiled, "delta": states.kind == "delta"}
        return self._with_state("gated_linear_attention", f"states_{layer}", q, k, v, decay, beta, **attrs)

    def _with_state(self, op: str, name: str, *operands: Any, **attrs: Any) -> Var:
        """Emit an op on a state in pool `name`, and replace the pool by the new state."""
        results = self.decoder.op(op, *operands, self.pools[name], self.spans, **attrs)
        result, self.pools[name] = (self.decoder.bb.emit(TupleGetItem(results, k)) for k in (0, 1))
        return result

    def _rotated(self, x: Expr) -> Expr:
        """Multiply queries or keys by an orthogonal matrix: random signs, then a Walsh-Hadamard matrix.

        Products of rotated queries and keys are unchanged, and no element of a key dominates the others, which would
        spoil the rest in 8 bits (Ashkboos et al., "QuaRot", arXiv 2404.00456). The matrix has the size of the largest
        power of two that divides the width. All rows are summed alike, so a token is stored in a batch as it is alone.
        """
        assert isinstance(x.ty, TensorType) and x.ty.shape is not None
        d, width = self.decoder, x.ty.shape[-1].const
        size = width & -width
        return d.op("walsh_hadamard", d.op("multiply", x, _signs(width, size)), size=size)

    def _stored(self, x: Expr, dtype: str) -> tuple[Expr, Expr | None]:
        """Convert keys or values (n, heads, width) to the cache's type; for int8, return scales (n, heads, 1) too."""
        d = self.decoder
        if dtype != "int8":
            return (x if dtype == "float32" else d.op("cast", x, dtype=dtype)), None
        absmax = d.op("max", d.op("abs", x), axes=(-1,), keepdims=True)
        scale = d.op("divide", d.op("maximum", absmax, np.float32(1e-30)), np.float32(_INT8_MAX))
        return d.op("cast", d.op("round", d.op("divide", x, scale)), dtype="int8"), scale
