"""The layers that all decoders share, emitted with the builder API; architectures differ in `DecoderConfig` only.

Activations are [..., hidden]; each row is a token, whatever the leading dimensions are.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np

from relaxlite.config import compile_threads
from relaxlite.frontend.llm.checkpoint import Weight
from relaxlite.frontend.llm.config import GELU_SIGMOID, DecoderConfig, Rope
from relaxlite.frontend.llm.delta_net import delta_net
from relaxlite.frontend.llm.latent import latent_attention
from relaxlite.frontend.llm.mamba import mamba
from relaxlite.frontend.llm.mixture import mixture
from relaxlite.frontend.llm.per_layer_inputs import PerLayerInputs, add_per_layer_input
from relaxlite.frontend.llm.quantized import GroupedWeight
from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.op import get_op
from relaxlite.ir.ops.block_codes import Coding, pack_codes
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

_PACKED_BYTES = 1 << 18  # of unpacked codes per task, which stay in the CPU's caches


class Mixer(Protocol):
    """The token mixer: attention, convolution and recurrence within one batch, or over a KV cache."""

    def __call__(self, layer: int, q: Expr, k: Expr | None, v: Expr | None) -> Expr:
        """Attend with queries [..., heads, width], keys and values [..., kv_heads, width]: [..., heads, width].

        Keys and values are None where a layer reads those of another layer.
        """
        ...

    def causal_convolution(self, layer: int, x: Expr, weight: np.ndarray[Any, Any]) -> Expr:
        """Emit the causal depthwise convolution of x [..., width] along tokens by weight [length, width]."""
        ...

    def linear_attention(self, layer: int, q: Expr, k: Expr, v: Expr, decay: Expr, beta: Expr) -> Expr:
        """Update a layer's states and read them: [..., heads, width].

        Queries and keys are [..., key_heads, key_width], values [..., heads, width], decay and beta [..., heads].
        """
        ...


@dataclass(frozen=True, slots=True)
class BlockOperands:
    """Operands of the ops on blocked weights (ir/ops/block_quantized.py) for one weight [n, k] or several stacked ones.

    Stacked operands have an additional first dimension. With an `order`, rows of the operands are columns order[0],
    order[1], ... of the weight; stacked weights have an order each.
    """

    operands: tuple[Constant, ...]
    coding: Coding
    order: np.ndarray[Any, Any] | None = None

    @staticmethod
    def of(weight: Weight, name: str) -> BlockOperands:
        """Pack one weight."""
        result = BlockOperands.stacked([weight], name)
        operands = (Constant.of(operand.value[0], name=name) for operand in result.operands)
        return BlockOperands(tuple(operands), result.coding, None if result.order is None else result.order[0])

    @staticmethod
    def stacked(weights: Sequence[Weight], name: str) -> BlockOperands:
        """Pack several weights of one kind.

        Rows are packed in chunks, so that unpacked codes stay in the CPU's caches and several threads can take part.
        """
        n, k = weights[0].shape
        step = max(1, _PACKED_BYTES // k)
        firsts = [weight.grouped(slice(0, step)) for weight in weights]
        coding, has_order = firsts[0].coding, firsts[0].order is not None
        results = [np.empty((len(weights), len(part), n), part.dtype) for part in _operands(firsts[0])]

        def pack(chunk: tuple[int, int]) -> None:
            e, at = chunk
            decoded = weights[e].grouped(slice(at, at + step)) if at else firsts[e]
            for result, part in zip(results, _operands(decoded), strict=True):
                result[e, :, at : at + step] = part

        with ThreadPoolExecutor(
            compile_threads(), "relaxlite-pack"
        ) as pool:  # starts only as many threads as there are tasks
            list(pool.map(pack, itertools.product(range(len(weights)), range(0, n, step))))
        order = np.stack([first.order for first in firsts if first.order is not None]) if has_order else None
        return BlockOperands(tuple(Constant.of(w, name=name) for w in results), coding, order)


def _kind_of(weight: GroupedWeight) -> tuple[object, ...]:
    """Return what weights must have in common to be stacked."""
    numbers = [a for scales in (weight.scales, weight.offsets) if scales for a in (scales.values, scales.factors)]
    types = [(a.dtype, a.shape) for a in numbers if a is not None]
    return weight.coding, weight.shape, weight.offsets is None, weight.order is None, *types


def _operands(weight: GroupedWeight) -> list[np.ndarray[Any, Any]]:
    """Return packed codes, scales and, unless the zero point replaces them, offsets; factors follow their codes."""
    numbers = [a for scales in (weight.scales, weight.offsets) if scales for a in (scales.values, scales.factors)]
    return [pack_codes(weight.codes.T, weight.group, weight.coding.bits), *(a.T for a in numbers if a is not None)]


class Decoder:
    """Emits the parts of a decoder into a builder. `groups_rows`: products of experts are grouped matmuls."""

    def __init__(
        self, bb: BlockBuilder, config: DecoderConfig, weights: Mapping[str, Weight], *, groups_rows: bool = False
    ) -> None:
        self.bb, self.config, self._weights, self.groups_rows = bb, config, weights, groups_rows
        self._tables: dict[Rope, tuple[Var, Var]] = {}
        self._query_factors: Var | None = None
        self._blocks: dict[str, BlockOperands | None] = {}
        self._stacks: dict[str, BlockOperands] = {}
        self._matrices: dict[str, Constant] = {}
        self._orders: dict[bytes, Constant] = {}
        self._vectors: dict[str, np.ndarray[Any, Any]] = {}
        self._is_relaxed = False

    def in_function(self, *, is_relaxed: bool) -> Decoder:
        """Return a decoder for another function of the module, over the same constants.

        `is_relaxed`: products with blocked weights are of relaxed precision, except those of keys and values, which
        cause half of the error.
        """
        result = copy.copy(self)
        result._tables, result._query_factors, result._is_relaxed = {}, None, is_relaxed
        return result

    def op(self, name: str, *args: Any, **attrs: Any) -> Var:
        """Emit a call of an op."""
        return self.bb.emit(get_op(name)(*args, **attrs))

    def hidden(self, tokens: Expr, positions: Expr, mix: Mixer, wanted: Expr | None = None) -> Var:
        """Emit all layers and the last norm: [..., hidden] for tokens and positions [...].

        With `wanted` int64 [rows], the places of some tokens, the result is [rows, hidden]: for other tokens the last
        layer computes keys and values only.
        """
        x = self.embed_tokens(tokens)
        if self.config.embedding_scale is not None:
            x = self.op("multiply", x, np.float32(self.config.embedding_scale))
        if self.config.has_positions:
            table = self._weights["positions"]
            numbers = table.data if table.block_format is None else table.to_float32()
            x = self.op("add", x, self._widened(self.op("gather", numbers, positions, axis=0)))
        inputs = None if self.config.per_layer_input is None else PerLayerInputs.of(self, tokens, x)
        for k in range(self.config.layers):
            normed = self.pre_norm(f"layers.{k}.attn_norm", x)
            attended = self.mix_tokens(k, normed, positions, mix)
            if wanted is not None and k == self.config.layers - 1:
                attended, x = (self.op("gather", rows, wanted, axis=0) for rows in (attended, x))
                if self.config.has_one_norm:
                    normed = self.op("gather", normed, wanted, axis=0)
            out, has_bias = self._output_projection(k)
            attended = self.linear(out, attended, has_bias)
            layer_input, x = x, self.add_residual(x, self.post_norm(f"layers.{k}.attn_post_norm", attended))
            if not self.config.has_one_norm:
                normed = self.pre_norm(f"layers.{k}.mlp_norm", layer_input if self.config.is_parallel else x)
            x = self.add_residual(x, self.post_norm(f"layers.{k}.mlp_post_norm", self.mlp(k, normed, x)))
            if inputs is not None:
                x = add_per_layer_input(self, k, x, inputs.of_layer(k, wanted if k == self.config.layers - 1 else None))
            if self.config.has_layer_scale:
                x = self.op("multiply", x, self.vector(f"layers.{k}.scale"))
        return self.norm("norm", x)

    def logits(self, x: Expr) -> Var:
        """Emit the logits [..., vocab] of hidden states."""
        c = self.config
        result = self.linear("embed" if c.is_tied else "head", x)
        if c.has_head_bias:
            result = self.op("add", result, self.vector("head_bias"))
        if c.logit_divisor is not None:
            result = self.op("divide", result, np.float32(c.logit_divisor))
        return result if c.logit_cap is None else self.soft_cap(result, c.logit_cap)

    def soft_cap(self, x: Expr, cap: float) -> Var:
        """Emit the soft cap cap * tanh(x / cap)."""
        return self.op("multiply", self.op("tanh", self.op("divide", x, np.float32(cap))), np.float32(cap))

    # layers

    def mix_tokens(self, k: int, x: Expr, positions: Expr, mix: Mixer) -> Var:
        """Emit the token mixer of layer `k` up to its output projection."""
        kind = self.config.mixing(k)
        if kind == "attention":
            return self.attention(k, x, positions, mix)
        if kind == "latent":
            return latent_attention(self, k, x, positions, mix)
        if kind == "convolution":
            return self.gated_convolution(k, x, mix)
        return delta_net(self, k, x, mix) if kind == "delta" else mamba(self, k, x, mix)

    def attention(self, k: int, x: Expr, positions: Expr, mix: Mixer) -> Var:
        """Emit the attention of layer `k` up to its output projection: [..., heads * width]."""
        c, name, width = self.config, f"layers.{k}", self.config.head_width_of(k)
        kinds = "q" if c.kv_layer_of(k) != k else "qk" if c.is_k_is_v_layer(k) else "qkv"
        result = {kind: self.linear(f"{name}.{kind}", x, c.has_qkv_bias, is_cached=kind != "q") for kind in kinds}
        rotary_kinds = [kind for kind in kinds if kind != "v"]
        if c.is_qk_norm_joint:
            result |= {kind: self.norm(f"{name}.{kind}_norm", result[kind]) for kind in rotary_kinds}
        counts = {"q": c.heads, "k": c.kv_heads_of(k), "v": c.kv_heads_of(k)}
        result = {kind: self.heads(y, counts[kind], width) for kind, y in result.items()}
        values = result.get("k" if c.is_k_is_v_layer(k) else "v")
        rope, is_by_head = c.rope_of(k), c.has_qk_norm and not c.is_qk_norm_joint
        if is_by_head and not c.is_qk_norm_last:
            result |= {kind: self.norm(f"{name}.{kind}_norm", result[kind]) for kind in rotary_kinds}
        if rope is not None:
            result |= {kind: self.apply_rope(result[kind], positions, rope) for kind in rotary_kinds}
        if c.query_log_scaling is not None:
            result["q"] = self.op("multiply", result["q"], self.query_factors(positions, *c.query_log_scaling))
        if is_by_head and c.is_qk_norm_last:
            result |= {kind: self.norm(f"{name}.{kind}_norm", result[kind]) for kind in rotary_kinds}
        if c.has_value_norm and values is not None:
            values = self.unweighted_norm(values)
        mixed = mix(k, result["q"], result.get("k"), values)
        output = self.op("reshape", mixed, (*_dims(mixed)[:-2], c.heads * width))
        if c.has_output_gate:
            output = self.op("multiply", output, self.op("sigmoid", self.linear(f"{name}.q_gate", x)))
        return output

    def gated_convolution(self, k: int, x: Expr, mix: Mixer) -> Var:
        """Emit the gated short convolution of layer `k` up to its output projection: [..., hidden]."""
        c, name = self.config.convolutions, f"layers.{k}.conv"
        assert c is not None
        before, values = (self.linear(f"{name}_{kind}", x, c.has_bias, is_cached=True) for kind in ("before", "given"))
        after = self.linear(f"{name}_after", x, c.has_bias)
        mixed = mix.causal_convolution(
            k, self.op("multiply", before, values), np.ascontiguousarray(self.vector(name).T)
        )
        if c.has_bias:
            mixed = self.op("add", mixed, self.vector(f"{name}_bias"))
        return self.op("multiply", after, mixed)

    def _output_projection(self, k: int) -> tuple[str, bool]:
        """Return the name of the output projection of layer `k`, and whether it has a bias."""
        kind, convolutions = self.config.mixing(k), self.config.convolutions
        if kind == "convolution":
            return f"layers.{k}.conv_out", convolutions is not None and convolutions.has_bias
        if kind in ("attention", "latent"):
            return f"layers.{k}.o", self.config.has_o_bias
        states = self.config.states
        return f"layers.{k}.{kind}_out", states is not None and states.has_bias

    def mlp(self, k: int, x: Expr, before: Expr) -> Var:
        """Emit MLP or experts of layer `k` for x [..., hidden]; `before`: the hidden states that x is the norm of."""
        name, experts = f"layers.{k}", self.config.experts_of(k)
        if experts is not None and experts.has_dense_mlp:
            dense = self.norm(f"{name}.dense_post_norm", self.gated_mlp(name, x))
            expert_input, router_input = (self.norm(f"{name}.{kind}_norm", before) for kind in ("experts", "router"))
            mixed = mixture(self, name, experts, expert_input, router_input)
            return self.op("add", dense, self.norm(f"{name}.experts_post_norm", mixed))
        if experts is not None:
            return mixture(self, name, experts, x, x)
        has_bias = self.config.has_mlp_bias
        if self.config.is_gated:
            return self.gated_mlp(name, x, has_bias)
        return self.linear(f"{name}.down", self.activate(self.linear(f"{name}.up", x, has_bias)), has_bias)

    def gated_mlp(self, name: str, x: Expr, has_bias: bool = False) -> Var:
        """Emit the gated MLP down(activation(gate(x)) * up(x))."""
        return self.gated_mlp_with(lambda kind, operand: self.linear(f"{name}.{kind}", operand, has_bias), x)

    def gated_mlp_with(self, linear: Callable[[str, Expr], Var], x: Expr) -> Var:
        """Emit a gated MLP whose projections "gate", "up" and "down" are emitted by `linear`."""
        gate, up = linear("gate", x), linear("up", x)
        if self.config.gate_limit is not None:
            limit = np.float32(self.config.gate_limit)
            gate = self.op("minimum", gate, limit)
            up = self.op("add", self.op("maximum", self.op("minimum", up, limit), -limit), np.float32(1))
        return linear("down", self.op("multiply", self.activate(gate), up))

    def activate(self, x: Expr) -> Var:
        """Emit the activation of the MLP."""
        if self.config.activation == "silu":
            return self.silu(x)
        if self.config.activation == "relu2":
            positive = self.op("relu", x)
            return self.op("multiply", positive, positive)
        if self.config.activation == "gelu_sigmoid":
            return self.op("multiply", x, self.op("sigmoid", self.op("multiply", x, np.float32(GELU_SIGMOID))))
        return self.op("gelu", x, approximate="none" if self.config.activation == "gelu" else "tanh")

    def norm(self, name: str, x: Expr) -> Var:
        """Emit the norm of that name."""
        c = self.config
        if c.norm == "rms":
            return self.op("rms_norm", x, self.vector(name), epsilon=c.norm_epsilon)
        biases = (self.vector(f"{name}_bias"),) if c.norm == "layer_biased" else ()
        return self.op("layer_norm", x, self.vector(name), *biases, axis=-1, epsilon=c.norm_epsilon)

    def unweighted_norm(self, x: Expr) -> Var:
        """Emit an RMS norm without weights."""
        ones = np.ones(_dims(x)[-1].const, np.float32)
        return self.op("rms_norm", x, ones, epsilon=self.config.norm_epsilon)

    def pre_norm(self, name: str, x: Expr) -> Expr:
        """Emit the norm of an input, if the model has such norms."""
        return self.norm(name, x) if self.config.has_pre_norms else x

    def add_residual(self, x: Expr, output: Expr) -> Var:
        """Add the output of a layer to the residual stream."""
        scale = self.config.residual_scale
        return self.op("add", x, output if scale is None else self.op("multiply", output, np.float32(scale)))

    def post_norm(self, name: str, x: Expr) -> Expr:
        """Emit the norm of an output, if the model has such norms."""
        return self.norm(name, x) if self.config.has_post_norms else x

    def linear(self, name: str, x: Expr, has_bias: bool = False, *, is_cached: bool = False) -> Var:
        """Emit x @ W^T, plus the bias of that name. `is_cached`: the result goes to a cache."""
        blocks = self.blocks(name)
        if blocks is None:
            weight: Expr = self._widened(self.matrix(name))
        else:
            if blocks.order is not None:
                x = self.op("gather", x, self._order(blocks.order), axis=-1)
            is_relaxed = self._is_relaxed and not is_cached
            weight = self.op("dequantize_blocks", *blocks.operands, **blocks.coding.attrs, coarse=is_relaxed)
        y = self.op("matmul", x, weight)
        return self.op("add", y, self.vector(f"{name}_bias")) if has_bias else y

    def grouped(self, names: Sequence[str], x: Expr, spans: Expr, numbers: Expr) -> Var:
        """Emit x @ W^T with one of several weights for each row.

        Rows are grouped by weight; `spans` are the groups, `numbers` the weight of each row (ops/grouped_products.py).
        """
        stack = self._stacks.get(names[0])
        if stack is None:
            stack = self._stacks[names[0]] = BlockOperands.stacked([self._weights[name] for name in names], names[0])
        if stack.order is not None:
            orders = self.op("gather", self._order(stack.order), numbers, axis=0)
            x = self.op("gather_elements", x, orders, axis=1)
        return self.op("grouped_matmul", x, spans, *stack.operands, **stack.coding.attrs, coarse=self._is_relaxed)

    def stack(self, names: Sequence[str]) -> Expr:
        """Stack matrices [n, k] in float32 to one operand [matrices, k, n]."""
        if names[0] not in self._matrices:
            weights = [self._weights[name] for name in names]
            floats = [w.data if w.block_format is None else w.to_float32() for w in weights]
            self._matrices[names[0]] = Constant.of(np.stack([matrix.T for matrix in floats]), name=names[0])
        return self._widened(self._matrices[names[0]])

    def can_stack(self, names: Sequence[str]) -> bool:
        """Return whether weights can be one operand of a grouped matmul: all blocked, in the same way."""
        weights = [self._weights[name] for name in names]
        if any(weight.block_format is None for weight in weights):
            return False
        return len({_kind_of(weight.grouped(slice(0, 1))) for weight in weights}) == 1

    def embed_tokens(self, tokens: Expr) -> Expr:
        """Emit the rows of the token embedding: [..., hidden]."""
        if not self.config.is_tied or self.blocks("embed") is not None:
            return self.lookup_rows("embed", tokens)
        columns = self.op(
            "gather", self.matrix("embed"), tokens, axis=1
        )  # a tied embedding is stored once, as the logits read it
        return self._widened(self.op("transpose", columns, axes=(*range(1, len(_dims(columns))), 0)))

    def lookup_rows(self, name: str, rows: Expr) -> Expr:
        """Emit rows of a matrix in float32: [..., columns]."""
        blocks = self.blocks(name)
        if blocks is None:
            return self._widened(self.op("gather", self._weights[name].data, rows, axis=0))
        result = self.op("gather_blocks", rows, *blocks.operands, **blocks.coding.attrs)
        if blocks.order is None:
            return result
        return self.op("gather", result, self._order(np.argsort(blocks.order)), axis=-1)

    def blocks(self, name: str) -> BlockOperands | None:
        """Return the operands of a blocked matrix; None for a matrix of floats."""
        if name not in self._blocks:
            weight = self._weights[name]
            self._blocks[name] = None if weight.block_format is None else BlockOperands.of(weight, name)
        return self._blocks[name]

    def _order(self, order: np.ndarray[Any, Any]) -> Constant:
        """Return the constant of an order of columns, shared by all weights so that an operand is permuted once."""
        return self._orders.setdefault(order.tobytes(), Constant.of(order, name="order"))

    def matrix(self, name: str) -> Constant:
        """Return a float matrix [n, k] as the constant [k, n] that products read, in the type of the checkpoint."""
        if name not in self._matrices:
            self._matrices[name] = Constant.of(self._weights[name].data.T, name=name)
        return self._matrices[name]

    def _widened(self, x: Constant | Var) -> Constant | Var:
        """Convert to float32."""
        assert isinstance(x.ty, TensorType)
        return x if x.ty.dtype == "float32" else self.op("cast", x, dtype="float32")

    def vector(self, name: str) -> np.ndarray[Any, Any]:
        """Return a weight in float32."""
        if name not in self._vectors:
            self._vectors[name] = self._weights[name].to_float32()
        return self._vectors[name]

    def silu(self, x: Expr) -> Var:
        """Emit x * sigmoid(x)."""
        return self.op("multiply", x, self.op("sigmoid", x))

    def channels(self, x: Expr, first: int, count: int, width: int) -> Var:
        """Slice channels from `first` on and split them to heads: [..., channels] -> [..., count, width]."""
        lead = _dims(x)[:-1]
        part = self.op("slice", x, (*(0 for _ in lead), first), (*lead, count * width))
        return self.op("reshape", part, (*lead, count, width))

    def heads(self, x: Expr, count: int, width: int) -> Var:
        """Split heads: [..., count * width] -> [..., count, width]."""
        return self.op("reshape", x, (*_dims(x)[:-1], count, width))

    def apply_rope(self, x: Expr, positions: Expr, rope: Rope) -> Var:
        """Apply the rotary embedding to x [..., heads, width] at positions [...]."""
        cos, sin = self.rope_tables(positions, rope)
        dims, half = _dims(x), rope.width // 2
        zeros = (0,) * (len(dims) - 1)
        first, second = (self.op("slice", x, (*zeros, at), (*dims[:-1], half)) for at in (0, half))
        rotated = self.op("concat", self.op("neg", second), first, axis=-1)
        rest = dims[-1].const - rope.width
        if rest:
            tail = self.op("slice", x, (*zeros, rope.width), (*dims[:-1], rest))
            x = self.op("slice", x, (*zeros, 0), (*dims[:-1], rope.width))
        y = self.op("add", self.op("multiply", x, cos), self.op("multiply", rotated, sin))
        return self.op("concat", y, tail, axis=-1) if rest else y

    def query_factors(self, positions: Expr, share: float, steps: int) -> Var:
        """Emit the factors of queries at all positions, once for all layers: [..., 1, 1].

        The factor at position p is 1 + share * ln(1 + p // steps).
        """
        if self._query_factors is None:
            rank = len(_dims(positions))
            quotients = self.op("cast", self.op("floor_divide", positions, np.int64(steps)), dtype="float32")
            logs = self.op("multiply", self.op("log", self.op("add", quotients, np.float32(1))), np.float32(share))
            self._query_factors = self.op("expand_dims", self.op("add", logs, np.float32(1)), axes=(rank, rank + 1))
        return self._query_factors

    def rope_tables(self, positions: Expr, rope: Rope) -> tuple[Var, Var]:
        """Emit cos and sin [..., 1, rope.width] of all positions, once for all layers."""
        if rope not in self._tables:
            frequencies, factor = rope.frequencies(self.config.context)
            both = np.concatenate([frequencies, frequencies]).astype(np.float32)
            float_positions = self.op("cast", positions, dtype="float32")
            rank = len(_dims(positions))
            angles = self.op("multiply", self.op("expand_dims", float_positions, axes=(rank, rank + 1)), both)
            tables = self.op("cos", angles), self.op("sin", angles)
            if factor != 1.0:
                tables = (
                    self.op("multiply", tables[0], np.float32(factor)),
                    self.op("multiply", tables[1], np.float32(factor)),
                )
            self._tables[rope] = tables
        return self._tables[rope]


def _dims(x: Expr) -> tuple[SymExpr, ...]:
    assert isinstance(x.ty, TensorType) and x.ty.shape is not None
    return tuple(sym(d) for d in x.ty.shape)
