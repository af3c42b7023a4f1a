"""The layers that decoders share, written with the builder API; architectures differ in `DecoderConfig` only.

Activations are [..., hidden]; rows are tokens, whatever the leading dimensions are.
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
from relaxlite.frontend.llm.layer_inputs import LayerInputs, with_layer_input
from relaxlite.frontend.llm.mamba import mamba
from relaxlite.frontend.llm.mixture import mixture
from relaxlite.frontend.llm.quantized import GroupedWeight
from relaxlite.ir import ops  # noqa: F401  (registers them)
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Constant, Expr, Var
from relaxlite.ir.op import get_op
from relaxlite.ir.ops.block_codes import Coding, pack_codes
from relaxlite.ir.symbolic import SymExpr, sym
from relaxlite.ir.types import TensorType
from relaxlite.records import dataclass

_CODES_AT_ONCE = 1 << 18  # bytes of codes that are unpacked and packed again while caches hold them


class Mixer(Protocol):
    """How tokens look at others: densely over one batch, or over a cache of keys and values."""

    def __call__(self, layer: int, q: Expr, k: Expr | None, v: Expr | None) -> Expr:
        """From queries [..., heads, width], keys and values [..., kv_heads, width] to [..., heads, width]. None: those
        of the layer that it has them from."""
        ...

    def convolved(self, layer: int, x: Expr, weight: np.ndarray[Any, Any]) -> Expr:
        """Each channel of x [..., width] convolved along the tokens, up to each, by weight [length, width]."""
        ...

    def remembered(self, layer: int, q: Expr, k: Expr, v: Expr, decay: Expr, beta: Expr) -> Expr:
        """What the states of a layer give for queries and keys [..., key_heads, key_width], values [..., heads, width],
        decay and beta [..., heads]: [..., heads, width]"""
        ...


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight [n, k] as operands of the ops on weights in blocks (ir/ops/block_quantized.py), or several, one after
    the other along a dimension in front. With an `order`, the rows of these are the weight's columns order[0],
    order[1], ..., each weight's own of several."""

    operands: tuple[Constant, ...]
    coding: Coding
    order: np.ndarray[Any, Any] | None = None

    @staticmethod
    def of(weight: Weight, name: str) -> Blocks:
        result = Blocks.stacked([weight], name)
        operands = (Constant.of(operand.value[0], name=name) for operand in result.operands)
        return Blocks(tuple(operands), result.coding, None if result.order is None else result.order[0])

    @staticmethod
    def stacked(weights: Sequence[Weight], name: str) -> Blocks:
        """Some rows at a time, so that codes in a byte each never leave the caches, and several threads can do it."""
        n, k = weights[0].shape
        step = max(1, _CODES_AT_ONCE // k)
        firsts = [weight.grouped(slice(0, step)) for weight in weights]
        coding, has_order = firsts[0].coding, firsts[0].order is not None
        wholes = [np.empty((len(weights), len(part), n), part.dtype) for part in _operands(firsts[0])]

        def pack(place: tuple[int, int]) -> None:
            e, at = place
            some = weights[e].grouped(slice(at, at + step)) if at else firsts[e]
            for whole, part in zip(wholes, _operands(some), strict=True):
                whole[e, :, at : at + step] = part

        with ThreadPoolExecutor(compile_threads(), "relaxlite-pack") as pool:  # starts no more threads than it needs
            list(pool.map(pack, itertools.product(range(len(weights)), range(0, n, step))))
        order = np.stack([first.order for first in firsts if first.order is not None]) if has_order else None
        return Blocks(tuple(Constant.of(w, name=name) for w in wholes), coding, order)


def _kind_of(weight: GroupedWeight) -> tuple[object, ...]:
    """What is alike of weights that can be stacked."""
    numbers = [a for given in (weight.scales, weight.offsets) if given for a in (given.values, given.factors)]
    types = [(a.dtype, a.shape) for a in numbers if a is not None]
    return weight.coding, weight.shape, weight.offsets is None, weight.order is None, *types


def _operands(weight: GroupedWeight) -> list[np.ndarray[Any, Any]]:
    """Words, scales and, where no zero point says it, offsets; factors after codes."""
    numbers = [a for given in (weight.scales, weight.offsets) if given for a in (given.values, given.factors)]
    return [pack_codes(weight.codes.T, weight.group, weight.coding.bits), *(a.T for a in numbers if a is not None)]


class Decoder:
    """Emits the parts of a decoder into a builder."""

    def __init__(
        self, bb: BlockBuilder, config: DecoderConfig, weights: Mapping[str, Weight], *, groups_rows: bool = False
    ) -> None:
        """`groups_rows`: products of experts in blocks are those of groups of rows."""
        self.bb, self.config, self._weights, self.groups_rows = bb, config, weights, groups_rows
        self._tables: dict[Rope, tuple[Var, Var]] = {}
        self._growth: Var | None = None
        self._blocks: dict[str, Blocks | None] = {}
        self._stacks: dict[str, Blocks] = {}
        self._matrices: dict[str, Constant] = {}
        self._orders: dict[bytes, Constant] = {}
        self._vectors: dict[str, np.ndarray[Any, Any]] = {}
        self._is_coarse = False

    def in_function(self, *, is_coarse: bool) -> Decoder:
        """For another function of the module, over the same constants. `is_coarse`: its products with weights in blocks
        may be rounded more, but for those that make keys and values, from which half of the error would come."""
        result = copy.copy(self)
        result._tables, result._growth, result._is_coarse = {}, None, is_coarse
        return result

    def op(self, name: str, *args: Any, **attrs: Any) -> Var:
        return self.bb.emit(get_op(name)(*args, **attrs))

    def hidden(self, tokens: Expr, positions: Expr, mix: Mixer, wanted: Expr | None = None) -> Var:
        """The last layer's output, normed: [..., hidden] for tokens and positions [...], or [rows, hidden] for the
        tokens whose places `wanted` int64[rows] has; of the others the last layer makes keys and values alone."""
        x = self.embedded(tokens)
        if self.config.embedding_scale is not None:
            x = self.op("multiply", x, np.float32(self.config.embedding_scale))
        if self.config.has_positions:
            table = self._weights["positions"]
            numbers = table.data if table.block_format is None else table.to_float32()
            x = self.op("add", x, self._widened(self.op("gather", numbers, positions, axis=0)))
        inputs = None if self.config.layer_input is None else LayerInputs.of(self, tokens, x)
        for k in range(self.config.layers):
            normed = self.pre_norm(f"layers.{k}.attn_norm", x)
            attended = self.mixed(k, normed, positions, mix)
            if wanted is not None and k == self.config.layers - 1:
                attended, x = (self.op("gather", rows, wanted, axis=0) for rows in (attended, x))
                if self.config.has_one_norm:
                    normed = self.op("gather", normed, wanted, axis=0)
            out, has_bias = self._out_of(k)
            attended = self.linear(out, attended, has_bias)
            given, x = x, self.added(x, self.post_norm(f"layers.{k}.attn_post_norm", attended))
            if not self.config.has_one_norm:
                normed = self.pre_norm(f"layers.{k}.mlp_norm", given if self.config.is_parallel else x)
            x = self.added(x, self.post_norm(f"layers.{k}.mlp_post_norm", self.mlp(k, normed, x)))
            if inputs is not None:
                x = with_layer_input(self, k, x, inputs.of_layer(k, wanted if k == self.config.layers - 1 else None))
            if self.config.has_layer_scale:
                x = self.op("multiply", x, self.vector(f"layers.{k}.scale"))
        return self.norm("norm", x)

    def logits(self, x: Expr) -> Var:
        """[..., vocab]"""
        c = self.config
        result = self.linear("embed" if c.is_tied else "head", x)
        if c.has_head_bias:
            result = self.op("add", result, self.vector("head_bias"))
        if c.logit_divisor is not None:
            result = self.op("divide", result, np.float32(c.logit_divisor))
        return result if c.logit_cap is None else self.capped(result, c.logit_cap)

    def capped(self, x: Expr, cap: float) -> Var:
        return self.op("multiply", self.op("tanh", self.op("divide", x, np.float32(cap))), np.float32(cap))

    # layers

    def mixed(self, k: int, x: Expr, positions: Expr, mix: Mixer) -> Var:
        """What a layer's tokens found in those before, up to the product behind it."""
        kind = self.config.mixing(k)
        if kind == "attention":
            return self.attended(k, x, positions, mix)
        if kind == "latent":
            return latent_attention(self, k, x, positions, mix)
        if kind == "convolution":
            return self.convolved(k, x, mix)
        return delta_net(self, k, x, mix) if kind == "delta" else mamba(self, k, x, mix)

    def attended(self, k: int, x: Expr, positions: Expr, mix: Mixer) -> Var:
        """What all heads of a layer found, side by side: [..., heads * width]"""
        c, name, width = self.config, f"layers.{k}", self.config.head_width_of(k)
        kinds = "q" if c.keys_from(k) != k else "qk" if c.is_unvalued(k) else "qkv"
        result = {kind: self.linear(f"{name}.{kind}", x, c.has_qkv_bias, is_kept=kind != "q") for kind in kinds}
        turned = [kind for kind in kinds if kind != "v"]
        if c.is_qk_norm_joint:
            result |= {kind: self.norm(f"{name}.{kind}_norm", result[kind]) for kind in turned}
        counts = {"q": c.heads, "k": c.kv_heads_of(k), "v": c.kv_heads_of(k)}
        result = {kind: self.heads(y, counts[kind], width) for kind, y in result.items()}
        values = result.get("k" if c.is_unvalued(k) else "v")
        rope, is_by_head = c.rope_of(k), c.has_qk_norm and not c.is_qk_norm_joint
        if is_by_head and not c.is_qk_norm_last:
            result |= {kind: self.norm(f"{name}.{kind}_norm", result[kind]) for kind in turned}
        if rope is not None:
            result |= {kind: self.rotate(result[kind], positions, rope) for kind in turned}
        if c.query_growth is not None:
            result["q"] = self.op("multiply", result["q"], self.growth(positions, *c.query_growth))
        if is_by_head and c.is_qk_norm_last:
            result |= {kind: self.norm(f"{name}.{kind}_norm", result[kind]) for kind in turned}
        if c.has_value_norm and values is not None:
            values = self.unweighted_norm(values)
        mixed = mix(k, result["q"], result.get("k"), values)
        given = self.op("reshape", mixed, (*_dims(mixed)[:-2], c.heads * width))
        if c.has_output_gate:
            given = self.op("multiply", given, self.op("sigmoid", self.linear(f"{name}.q_gate", x)))
        return given

    def convolved(self, k: int, x: Expr, mix: Mixer) -> Var:
        """What a convolution between two gates makes of the tokens: [..., hidden]"""
        c, name = self.config.convolutions, f"layers.{k}.conv"
        assert c is not None
        before, given = (self.linear(f"{name}_{kind}", x, c.has_bias, is_kept=True) for kind in ("before", "given"))
        after = self.linear(f"{name}_after", x, c.has_bias)
        mixed = mix.convolved(k, self.op("multiply", before, given), np.ascontiguousarray(self.vector(name).T))
        if c.has_bias:
            mixed = self.op("add", mixed, self.vector(f"{name}_bias"))
        return self.op("multiply", after, mixed)

    def _out_of(self, k: int) -> tuple[str, bool]:
        """The product behind what mixed the tokens, and whether it has a bias."""
        kind, convolutions = self.config.mixing(k), self.config.convolutions
        if kind == "convolution":
            return f"layers.{k}.conv_out", convolutions is not None and convolutions.has_bias
        if kind in ("attention", "latent"):
            return f"layers.{k}.o", self.config.has_o_bias
        states = self.config.states
        return f"layers.{k}.{kind}_out", states is not None and states.has_bias

    def mlp(self, k: int, x: Expr, before: Expr) -> Var:
        """What MLP or experts of a layer give for x [..., hidden]; `before`: what x is the norm of."""
        name, experts = f"layers.{k}", self.config.experts_of(k)
        if experts is not None and experts.is_beside:
            fed = self.norm(f"{name}.dense_post_norm", self.gated(name, x))
            read, routed = (self.norm(f"{name}.{kind}_norm", before) for kind in ("experts", "router"))
            mixed = mixture(self, name, experts, read, routed)
            return self.op("add", fed, self.norm(f"{name}.experts_post_norm", mixed))
        if experts is not None:
            return mixture(self, name, experts, x, x)
        has_bias = self.config.has_mlp_bias
        if self.config.is_gated:
            return self.gated(name, x, has_bias)
        return self.linear(f"{name}.down", self.activated(self.linear(f"{name}.up", x, has_bias)), has_bias)

    def gated(self, name: str, x: Expr, has_bias: bool = False) -> Var:
        """down(activation(gate(x)) * up(x))"""
        return self.gated_by(lambda kind, given: self.linear(f"{name}.{kind}", given, has_bias), x)

    def gated_by(self, linear: Callable[[str, Expr], Var], x: Expr) -> Var:
        """The same with the products that `linear` makes of "gate", "up" and "down"."""
        gate, up = linear("gate", x), linear("up", x)
        if self.config.gate_limit is not None:
            most = np.float32(self.config.gate_limit)
            gate = self.op("minimum", gate, most)
            up = self.op("add", self.op("maximum", self.op("minimum", up, most), -most), np.float32(1))
        return linear("down", self.op("multiply", self.activated(gate), up))

    def activated(self, x: Expr) -> Var:
        if self.config.activation == "silu":
            return self.silu(x)
        if self.config.activation == "relu2":
            positive = self.op("relu", x)
            return self.op("multiply", positive, positive)
        if self.config.activation == "gelu_sigmoid":
            return self.op("multiply", x, self.op("sigmoid", self.op("multiply", x, np.float32(GELU_SIGMOID))))
        return self.op("gelu", x, approximate="none" if self.config.activation == "gelu" else "tanh")

    def norm(self, name: str, x: Expr) -> Var:
        c = self.config
        if c.norm == "rms":
            return self.op("rms_norm", x, self.vector(name), epsilon=c.norm_epsilon)
        biases = (self.vector(f"{name}_bias"),) if c.norm == "layer_biased" else ()
        return self.op("layer_norm", x, self.vector(name), *biases, axis=-1, epsilon=c.norm_epsilon)

    def unweighted_norm(self, x: Expr) -> Var:
        """An RMS norm whose weights are all 1."""
        ones = np.ones(_dims(x)[-1].const, np.float32)
        return self.op("rms_norm", x, ones, epsilon=self.config.norm_epsilon)

    def pre_norm(self, name: str, x: Expr) -> Expr:
        return self.norm(name, x) if self.config.has_pre_norms else x

    def added(self, x: Expr, given: Expr) -> Var:
        scale = self.config.residual_scale
        return self.op("add", x, given if scale is None else self.op("multiply", given, np.float32(scale)))

    def post_norm(self, name: str, x: Expr) -> Expr:
        return self.norm(name, x) if self.config.has_post_norms else x

    def linear(self, name: str, x: Expr, has_bias: bool = False, *, is_kept: bool = False) -> Var:
        """x @ W^T, plus the bias of that name. `is_kept`: a cache keeps it."""
        blocks = self.blocks(name)
        if blocks is None:
            weight: Expr = self._widened(self.matrix(name))
        else:
            if blocks.order is not None:
                x = self.op("gather", x, self._order(blocks.order), axis=-1)
            is_coarse = self._is_coarse and not is_kept
            weight = self.op("dequantize_blocks", *blocks.operands, **blocks.coding.attrs, coarse=is_coarse)
        y = self.op("matmul", x, weight)
        return self.op("add", y, self.vector(f"{name}_bias")) if has_bias else y

    def grouped(self, names: Sequence[str], x: Expr, spans: Expr, numbers: Expr) -> Var:
        """x @ W^T of the weight of each row's group, of those of these names: `spans` and `numbers` say which rows, and
        which one of each row (ops/grouped_products.py)."""
        stack = self._stacks.get(names[0])
        if stack is None:
            stack = self._stacks[names[0]] = Blocks.stacked([self._weights[name] for name in names], names[0])
        if stack.order is not None:
            orders = self.op("gather", self._order(stack.order), numbers, axis=0)
            x = self.op("gather_elements", x, orders, axis=1)
        return self.op("grouped_matmul", x, spans, *stack.operands, **stack.coding.attrs, coarse=self._is_coarse)

    def stack(self, names: Sequence[str]) -> Expr:
        """Matrices [n, k] in float32 as one operand [matrices, k, n]."""
        if names[0] not in self._matrices:
            result = [self._weights[name] for name in names]
            floats = [w.data if w.block_format is None else w.to_float32() for w in result]
            self._matrices[names[0]] = Constant.of(np.stack([each.T for each in floats]), name=names[0])
        return self._widened(self._matrices[names[0]])

    def can_stack(self, names: Sequence[str]) -> bool:
        """Whether these weights can be one operand of a grouped product: they lie in blocks of one kind."""
        weights = [self._weights[name] for name in names]
        if any(weight.block_format is None for weight in weights):
            return False
        return len({_kind_of(weight.grouped(slice(0, 1))) for weight in weights}) == 1

    def embedded(self, tokens: Expr) -> Expr:
        """The rows of the embedding: [..., hidden]"""
        if not self.config.is_tied or self.blocks("embed") is not None:
            return self.looked_up("embed", tokens)
        columns = self.op("gather", self.matrix("embed"), tokens, axis=1)  # of what the logits read: one copy
        return self._widened(self.op("transpose", columns, axes=(*range(1, len(_dims(columns))), 0)))

    def looked_up(self, name: str, places: Expr) -> Expr:
        """Rows of a matrix in float32: [..., columns]"""
        blocks = self.blocks(name)
        if blocks is None:
            return self._widened(self.op("gather", self._weights[name].data, places, axis=0))
        result = self.op("gather_blocks", places, *blocks.operands, **blocks.coding.attrs)
        if blocks.order is None:
            return result
        return self.op("gather", result, self._order(np.argsort(blocks.order)), axis=-1)

    def blocks(self, name: str) -> Blocks | None:
        """A matrix whose numbers lie in blocks, as the ops on blocks take it; None: it has none."""
        if name not in self._blocks:
            weight = self._weights[name]
            self._blocks[name] = None if weight.block_format is None else Blocks.of(weight, name)
        return self._blocks[name]

    def _order(self, order: np.ndarray[Any, Any]) -> Constant:
        """One for all weights that have it, so that what they share is sorted once."""
        return self._orders.setdefault(order.tobytes(), Constant.of(order, name="order"))

    def matrix(self, name: str) -> Constant:
        """A matrix of floats [n, k] as products read it, [k, n], in the type that the checkpoint has."""
        if name not in self._matrices:
            self._matrices[name] = Constant.of(self._weights[name].data.T, name=name)
        return self._matrices[name]

    def _widened(self, x: Constant | Var) -> Constant | Var:
        """In float32."""
        assert isinstance(x.ty, TensorType)
        return x if x.ty.dtype == "float32" else self.op("cast", x, dtype="float32")

    def vector(self, name: str) -> np.ndarray[Any, Any]:
        """A weight in float32 as it lies in the checkpoint."""
        if name not in self._vectors:
            self._vectors[name] = self._weights[name].to_float32()
        return self._vectors[name]

    def silu(self, x: Expr) -> Var:
        return self.op("multiply", x, self.op("sigmoid", x))

    def channels(self, x: Expr, first: int, count: int, width: int) -> Var:
        """[..., channels] -> [..., count, width], of the channels from `first` on"""
        lead = _dims(x)[:-1]
        part = self.op("slice", x, (*(0 for _ in lead), first), (*lead, count * width))
        return self.op("reshape", part, (*lead, count, width))

    def heads(self, x: Expr, count: int, width: int) -> Var:
        """[..., count * width] -> [..., count, width]"""
        return self.op("reshape", x, (*_dims(x)[:-1], count, width))

    def rotate(self, x: Expr, positions: Expr, rope: Rope) -> Var:
        """The rotary embedding of x [..., heads, width] at positions [...]."""
        cos, sin = self.tables(positions, rope)
        dims, half = _dims(x), rope.width // 2
        zeros = (0,) * (len(dims) - 1)
        first, second = (self.op("slice", x, (*zeros, at), (*dims[:-1], half)) for at in (0, half))
        turned = self.op("concat", self.op("neg", second), first, axis=-1)
        rest = dims[-1].const - rope.width
        if rest:
            tail = self.op("slice", x, (*zeros, rope.width), (*dims[:-1], rest))
            x = self.op("slice", x, (*zeros, 0), (*dims[:-1], rope.width))
        y = self.op("add", self.op("multiply", x, cos), self.op("multiply", turned, sin))
        return self.op("concat", y, tail, axis=-1) if rest else y

    def growth(self, positions: Expr, share: float, steps: int) -> Var:
        """The factors of queries at every position [..., 1, 1], once for all layers."""
        if self._growth is None:
            rank = len(_dims(positions))
            places = self.op("cast", self.op("floor_divide", positions, np.int64(steps)), dtype="float32")
            logs = self.op("multiply", self.op("log", self.op("add", places, np.float32(1))), np.float32(share))
            self._growth = self.op("expand_dims", self.op("add", logs, np.float32(1)), axes=(rank, rank + 1))
        return self._growth

    def tables(self, positions: Expr, rope: Rope) -> tuple[Var, Var]:
        """cos and sin [..., 1, rope.width] of every position, once for all layers."""
        if rope not in self._tables:
            frequencies, factor = rope.frequencies(self.config.context)
            both = np.concatenate([frequencies, frequencies]).astype(np.float32)
            places = self.op("cast", positions, dtype="float32")
            rank = len(_dims(positions))
            angles = self.op("multiply", self.op("expand_dims", places, axes=(rank, rank + 1)), both)
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
