"""Small modules that show the work of single passes: a row of `EXAMPLES` for each pass that is illustrated."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from relaxlite.ir import ops  # noqa: F401  (registers the ops)
from relaxlite.ir.attributes import DONATED
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Attrs, Call, Constant, ShapeValue, Tuple
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import all_ops
from relaxlite.ir.symbolic import sym
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import PASSES
from relaxlite.target import Target

DTYPES = {"f32": "float32", "i8": "int8", "u8": "uint8", "i64": "int64", "bool": "bool"}


@dataclass(frozen=True)
class Example:
    """A function `main` over `params` of lines `name = expression`, the last of which is the result.

    `prepared` names the passes that run before the one that is shown.
    """

    params: str
    statements: str
    prepared: str = ""
    cpu: str = "x86-64-v3"
    precision: str = "auto"
    donated: tuple[int, ...] = ()
    shown: tuple[str, ...] = ()  # definitions; () is all that change


def module_of(example: Example) -> IRModule:
    """The module of an example, as the builder makes it."""
    bb = BlockBuilder()
    symbols = {name: bb.symbol(name) for name in "bnmhw"}
    env: dict[str, Any] = {**symbols, **_NOTATION, **{op.name: op for op in all_ops()}}
    env["match"] = lambda x, *dims: bb.match_shape(x, dims)
    types = dict(_parameter(text, symbols) for text in re.findall(r"\w+: \w+\[[^\]]*\]", example.params))
    attrs = Attrs({DONATED: example.donated}) if example.donated else Attrs()
    with bb.function("main", attrs, **types) as params:
        env.update(zip(types, params, strict=True))
        for name, text in _statements(example.statements):
            value = eval(text, env)
            env[name] = bb.emit(value, name) if isinstance(value, Call) else value
        bb.result(env[name])
    return bb.module()


def before_and_after(name: str) -> tuple[IRModule, IRModule]:
    """The module of the example of a pass just before the pass, and just after the pass."""
    example = EXAMPLES[name]
    target = Target.parse(f"llvm -mcpu={example.cpu} -mtriple=x86_64-unknown-linux-gnu -cores=2")
    context = PassContext(target, example.precision, verify=True, dump_dir=None, libraries=())
    before = run_passes(module_of(example), [PASSES[step] for step in example.prepared.split()], context)
    return before, run_passes(before, [PASSES[name]], context)


def _parameter(text: str, symbols: dict[str, Any]) -> tuple[str, TensorType]:
    name, dtype, dims = re.fullmatch(r"(\w+): (\w+)\[(.*)\]", text).groups()  # type: ignore[union-attr]
    return name, TensorType.of(eval(f"({dims},)" if dims else "()", dict(symbols)), DTYPES[dtype])


def _statements(text: str) -> Iterator[tuple[str, str]]:
    for line in text.strip().split("\n"):
        name, _, value = line.strip().partition(" = ")
        yield name, value


def _const(value: Any, shape: tuple[int, ...] | None = None, dtype: str = "int64") -> Constant:
    return Constant.of(np.full(np.shape(value) if shape is None else shape, value), dtype)


def _weights(rows: int, columns: int, *window: int, seed: int = 0) -> Constant:
    return Constant.of(np.random.default_rng(seed).standard_normal((rows, columns, *window), np.float32))


def _codes(rows: int, columns: int) -> Constant:
    return Constant.of(np.random.default_rng(0).integers(-128, 128, (rows, columns), np.int8))


_NOTATION: dict[str, Any] = {
    "const": _const,
    "weights": _weights,
    "codes": _codes,
    "shape": lambda *dims: ShapeValue(tuple(map(sym, dims))),
    "tuple_of": lambda *fields: Tuple(fields),
}

EXAMPLES: dict[str, Example] = {
    "fold_shapes": Example(
        "x: f32[n, 4]",
        """
        sizes = shape_of(x)
        rows = gather(sizes, const([0]), axis=0)
        twice = multiply(rows, const([2]))
        """,
    ),
    "decompose": Example("a: f32[n, 4], b: f32[m, 4]", "y = einsum(a, b, equation='ik,jk->ij')"),
    "integer_products": Example(
        "x: f32[n, 64]",
        """
        w = dequantize_blocks(const(0, (8, 32), "int32"), const(1, (2, 32), "float16"), bits=4, zero=8)
        y = matmul(x, w)
        """,
        cpu="znver4",
    ),
    "byte_products": Example(
        "x: u8[n, 64]",
        "y = matmul_integer(x, codes(64, 32), const(128, (), 'uint8'))",
        cpu="znver4",
    ),
    "keep_quantized": Example(
        "x: f32[n, 64]",
        """
        w = dequantize_linear(codes(64, 32), const(0.5, (32,), "float32"), axis=1)
        y = matmul(x, w)
        """,
    ),
    "fold_constants": Example(
        "x: f32[n, 4]",
        """
        two = sqrt(const(4, (), "float32"))
        y = multiply(x, two)
        """,
    ),
    "simplify_algebra": Example(
        "x: f32[n, 4]",
        """
        t = transpose(x)
        u = transpose(t)
        y = multiply(u, const(1, (), "float32"))
        """,
    ),
    "channels_last": Example(
        "x: f32[n, 3, h, w]",
        """
        y = conv(x, weights(8, 3, 3, 3), shape(1, 1, 1, 1))
        z = relu(y)
        """,
    ),
    "split_products": Example(
        "x: f32[n, 64]",
        """
        y = matmul(x, weights(64, 64))
        gate = slice(y, shape(0), shape(32), axes=(1,))
        up = slice(y, shape(32), shape(32), axes=(1,))
        z = multiply(gate, up)
        """,
    ),
    "lower_precision": Example(
        "x: f32[n, 64]", "y = matmul(x, weights(64, 64))", cpu="sapphirerapids", precision="bf16"
    ),
    "eliminate_common": Example(
        "x: f32[n, 4]",
        """
        a = exp(x)
        b = exp(x)
        y = add(a, b)
        """,
    ),
    "recognize": Example(
        "x: f32[n, 4]",
        """
        s = sigmoid(x)
        y = multiply(x, s)
        """,
    ),
    "fuse_attention": Example(
        "q: f32[b, 2, n, 8], k: f32[b, 2, m, 8], v: f32[b, 2, m, 8]",
        """
        t = transpose(k, axes=(0, 1, 3, 2))
        scores = matmul(q, t)
        p = softmax(scores, axis=-1)
        y = matmul(p, v)
        """,
    ),
    "narrow_attention": Example(
        "x: f32[b, 2, n, 8]", "y = attention(x, x, x, scale=0.35)", cpu="znver4", precision="bf16"
    ),
    "eliminate_dead": Example(
        "x: f32[n, 4]",
        """
        unused = exp(x)
        y = relu(x)
        """,
    ),
    "legalize": Example("x: f32[n, 4]", "y = relu(x)"),
    "resolve_matches": Example(
        "x: f32[n, 4], y: f32[n, 4]",
        """
        a = relu(x)
        b = match(a, n, 4)
        c = add(b, y)
        """,
        "legalize",
    ),
    "fuse_prologues": Example(
        "x: f32[n, 64]",
        """
        w = cast(codes(64, 32), dtype="float32")
        y = matmul(x, w)
        """,
        "legalize",
    ),
    "fuse_ops": Example(
        "x: f32[n, 4]",
        """
        a = exp(x)
        b = add(a, x)
        """,
        "legalize",
    ),
    "fuse_programs": Example(
        "x: f32[n, 4]",
        """
        a = exp(x)
        b = add(a, x)
        """,
        "legalize fuse_ops",
    ),
    "make_views": Example(
        "x: f32[n, 4], w: f32[4, 4]",
        """
        half = slice(x, shape(0), shape(n // 2), axes=(0,))
        y = matmul(half, w)
        """,
        "legalize",
    ),
    "pair_products": Example(
        "x: f32[n, 64]",
        """
        gate = matmul(x, weights(64, 32))
        up = matmul(x, weights(64, 32, seed=1))
        s = silu(gate)
        y = multiply(s, up)
        """,
        "legalize fuse_ops fuse_programs drop_unused",
    ),
    "join_calls": Example(
        "x: f32[n, 64]",
        """
        a = matmul(x, weights(64, 32))
        b = matmul(x, weights(64, 32, seed=1))
        y = tuple_of(a, b)
        """,
        "legalize",
    ),
    "donate": Example(
        "pool: f32[2, b, 4, 8], x: f32[n, 2, 8], slots: i64[n]",
        "y = kv_append(pool, x, slots)",
        "legalize",
        donated=(0,),
    ),
    "winograd": Example(
        "x: f32[n, h, w, 16]",
        "y = conv(x, weights(3, 3, 16, 16), shape(1, 1, 1, 1), layout='last')",
        "decompose legalize fuse_ops fuse_programs drop_unused",
        shown=("main",),
    ),
    "word_products": Example(
        "x: f32[n, 256]",
        "y = matmul(x, weights(256, 128))",
        "legalize",
        cpu="znver4",
        precision="bf16",
        shown=("main",),
    ),
    "inner_products": Example(
        "x: f32[n, 256]", "y = matmul(x, weights(256, 128))", "legalize", cpu="znver4", shown=("main",)
    ),
    "schedule": Example("x: f32[n, 64]", "y = relu(x)", "legalize"),
    "schedule_gpu": Example("x: f32[n, 64]", "y = relu(x)", "legalize"),
    "pack_constants": Example("x: f32[n, 64]", "y = matmul(x, weights(64, 64))", "legalize schedule", shown=("main",)),
    "lower_dps": Example("x: f32[n, 4]", "y = relu(x)", "legalize"),
    "lift_workspaces": Example(
        "x: f32[n, 256]",
        "y = matmul(x, weights(256, 128))",
        "legalize inner_products schedule pack_constants lower_dps",
        cpu="znver4",
        shown=("main",),
    ),
    "join_parts": Example(
        "x: f32[n, 4], z: f32[m, 4], w: f32[4, 4]",
        """
        a = matmul(x, w)
        b = matmul(z, w)
        y = concat(a, b, axis=0)
        """,
        "legalize make_views lower_dps",
    ),
    "reuse_operands": Example(
        "x: f32[n, 4], w: f32[4, 4]",
        """
        a = matmul(x, w)
        b = exp(a)
        c = matmul(b, w)
        """,
        "legalize schedule lower_dps",
    ),
    "plan_memory": Example(
        "x: f32[n, 4], w: f32[4, 4]",
        """
        a = matmul(x, w)
        b = matmul(a, w)
        c = matmul(b, w)
        d = matmul(c, w)
        """,
        "legalize lower_dps",
    ),
    "lower_shapes": Example("x: f32[n, 4]", "y = relu(x)", "legalize lower_dps plan_memory"),
}
