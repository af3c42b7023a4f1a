"""Weights whose scales are codes times factors of super-blocks, the K formats of GGUF: the ops on weights in blocks,
the operands that a checkpoint's weight becomes, and a model of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import TypeInferenceError
from relaxlite.frontend.llm.checkpoint import Checkpoint, Weight
from relaxlite.frontend.llm.gguf_blocks import BLOCK_FORMATS
from relaxlite.frontend.llm.layers import BlockOperands
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Tuple, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.op import get_op
from relaxlite.ir.ops.block_codes import pack_codes, unpack_codes
from relaxlite.ir.types import TensorType
from tests.support import tiers, tiny_llm
from tests.support.block_bytes import random_blocks
from tests.support.dense_llm import build_dense

K_FORMATS = ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")


def weight(kind: str, n: int, k: int, scale: float = 1.0, seed: int = 0) -> Weight:
    """Random codes, with float16 of a size."""
    count = n * k // BLOCK_FORMATS[kind].size
    blocks = random_blocks(kind, scale * np.random.default_rng(seed + 1).standard_normal(count), seed)
    return Weight(blocks.reshape(n, -1), (n, k), kind)


def reads(blocks: BlockOperands, columns: int) -> IRModule:
    """The whole weight, and columns of it."""
    bb = BlockBuilder()
    attrs = blocks.coding.attrs
    with bb.function("main", at=TensorType.of((columns,), "int64")) as (at,):
        whole = bb.emit(get_op("dequantize_blocks")(*blocks.operands, **attrs))
        bb.result(Tuple((whole, bb.emit(get_op("gather_blocks")(at, *blocks.operands, **attrs)))))
    return bb.module()


# Operands of a checkpoint's weight


@pytest.mark.each_value
@pytest.mark.parametrize("kind", BLOCK_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(7, 512), (1100, 256)])  # in one piece, and in several
def test_operands_stand_for_the_same_numbers_bit_for_bit(kind: str, n: int, k: int) -> None:
    given = weight(kind, n, k)
    wanted = given.grouped().dequantize()
    blocks = BlockOperands.of(given, "w")
    values = [c.value for c in blocks.operands]
    plain = get_op("dequantize_blocks").reference(*values, **blocks.coding.attrs, coarse=False)
    at = np.random.default_rng(1).integers(-n, n, 5)
    whole, some = rl.compile(reads(blocks, 5))(at)
    np.testing.assert_array_equal(plain, wanted.T)
    np.testing.assert_array_equal(whole, wanted.T)
    np.testing.assert_array_equal(some, wanted[at])


@pytest.mark.parametrize("kind", BLOCK_FORMATS)
def test_operands_take_as_many_bytes_as_the_file(kind: str) -> None:
    """Scales of 4 and 6 bits take 8: 148 bytes for 144 of Q4_K, 180 for 176 of Q5_K. Rows of grids take 3 or 4 bits for
    each weight, and ternary digits 2."""
    given = weight(kind, 64, 1024)
    more = {
        "Q4_K": 4 / 144, "Q5_K": 4 / 176, "Q2_K": 16 / 84, "Q3_K": 4 / 110, "IQ4_XS": 2 / 136, "MXFP4": 1 / 17,
        "IQ1_S": 108 / 50 - 1, "IQ1_M": 116 / 56 - 1, "IQ2_XXS": 108 / 66 - 1, "IQ2_XS": 116 / 74 - 1,
        "IQ2_S": 116 / 82 - 1, "IQ3_XXS": 140 / 98 - 1, "IQ3_S": 138 / 110 - 1, "TQ1_0": 74 / 54 - 1,
        "TQ2_0": 74 / 66 - 1, "Q1_0": 4 / 18, "Q2_0": 2 / 18, "NVFP4": 4 / 36,
    }.get(kind, 0)  # fmt: skip
    assert sum(c.value.nbytes for c in BlockOperands.of(given, "w").operands) == pytest.approx(
        given.nbytes * (1 + more)
    )


@pytest.mark.parametrize("kind", K_FORMATS)
def test_scales_have_two_levels(kind: str) -> None:
    found = [(c.value.dtype.name, c.value.shape) for c in BlockOperands.of(weight(kind, 5, 512), "w").operands[1:]]
    if kind in ("Q3_K", "Q6_K"):
        assert found == [("int8", (32, 5)), ("float16", (2, 5))]
    else:
        assert found == [("uint8", (32 if kind == "Q2_K" else 16, 5)), ("float16", (2, 5))] * 2


@pytest.mark.parametrize(
    ("bits", "block"),
    [
        (1, 32), (1, 8), (2, 32), (2, 16), (2, 8), (3, 32), (3, 16), (4, 32), (4, 16), (4, 8), (5, 32), (5, 16),
        (6, 32), (6, 16), (8, 32), (8, 8),
    ],
)  # fmt: skip
@pytest.mark.parametrize("order", ["C", "F"])
def test_codes_are_packed_and_found_again(bits: int, block: int, order: Any) -> None:
    codes = np.random.default_rng(0).integers(0, 1 << bits, (96, 7)).astype(np.uint8, order=order)
    words = pack_codes(codes, block, bits)
    assert words.dtype == np.int32 and words.shape == (96 * bits // 32, 7)
    np.testing.assert_array_equal(unpack_codes(words, block, bits), codes)
    if bits == 4:  # as the docstring of the ops says: rows 0 and 4 are the halves of the first byte
        assert (words[0] & 255).tolist() == (codes[0] | codes[4] << 4).tolist()


# Types


def typed(*scales: tuple[str, tuple[int, ...]]) -> None:
    words = Var("words", TensorType.of((64, 5), "int32"))  # 512 rows of 4 bits
    operands = [Var(f"v{k}", TensorType.of(shape, dtype)) for k, (dtype, shape) in enumerate(scales)]
    ops.dequantize_blocks(words, *operands, bits=4)


CODES, FACTORS = ("uint8", (16, 5)), ("float16", (2, 5))


def test_types_that_are_well_formed() -> None:
    for scales in ([CODES, FACTORS], [CODES, FACTORS] * 2, [("int8", (16, 5)), ("float32", (16, 5))]):
        typed(*scales)


@pytest.mark.parametrize(
    ("scales", "problem"),
    [
        ([CODES], r"scales of uint8 need factors after them, floats, one for several blocks"),
        (
            [CODES, CODES],
            r"factors of scales \(16, 5\) uint8 must be float32, float16, bfl.* got \(16, 5\) uint8",
        ),
        ([CODES, ("float16", (3, 5))], r"a number of rows that divides 16, got .*3, 5"),
        ([CODES, ("float16", (2, 6))], r"of as many columns .*, got .*2, 6"),
        ([CODES, ("float16", (2,))], r"a number of rows that divides 16, got "),
        ([CODES, FACTORS, CODES], r"like scales, \(16, 5\) uint8, \(2, 5\) float16, got \(16, 5\) uint8$"),
        ([CODES, FACTORS, CODES, ("float16", (4, 5))], r"offsets must be like scales, .*2, 5.*, got .*4, 5"),
        ([CODES, FACTORS, CODES, FACTORS, FACTORS], r"offsets must be like scales"),
        ([("float16", (16, 5)), FACTORS], r"offsets must be like scales, .*16, 5.*, got .*2, 5"),
        ([("int32", (16, 5)), FACTORS], r"scales float32, float16, bfloat16, or uint8 or int8 with factors, .* got "),
    ],
)
def test_what_is_no_weight_is_refused(scales: list[tuple[str, tuple[int, ...]]], problem: str) -> None:
    with pytest.raises(TypeInferenceError, match=f"dequantize_blocks: .*{problem}"):
        typed(*scales)


# Products


def product(blocks: BlockOperands, depth: int) -> IRModule:
    bb = BlockBuilder()
    m = bb.symbol("m")
    with bb.function("main", x=TensorType.of((m, depth), "float32")) as (x,):
        w = bb.emit(get_op("dequantize_blocks")(*blocks.operands, **blocks.coding.attrs))
        bb.result(bb.emit(ops.matmul(x, w)))
    return bb.module()


@pytest.mark.each_value
@pytest.mark.parametrize("kind", K_FORMATS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float32", 1e-6), ("int16", 1e-4), ("int8", 2e-2)])
@pytest.mark.parametrize("columns", [1, 40, 64])
def test_products(kind: str, precision: str, tolerance: float, columns: int) -> None:
    given = weight(kind, columns, 768)
    exe = rl.compile(product(BlockOperands.of(given, "w"), 768), precision=precision)
    exact = given.grouped().dequantize().astype(np.float64).T
    rng = np.random.default_rng(2)
    for m in (0, 1, 2, 17, 130):
        x = rng.standard_normal((m, 768)).astype(np.float32)
        scale = np.abs(x) @ np.abs(exact)
        assert (np.abs(exe(x) - x @ exact) <= tolerance * scale).all()


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_compiled_products_keep_the_bytes(precision: str) -> None:
    given = [weight(kind, 128, 512) for kind in ("Q4_K", "Q5_K", "Q6_K")]
    for one in given:
        made = rl.compile(product(BlockOperands.of(one, "w"), 512), precision=precision)
        kept = sum(a.nbytes for a in made.data.constants)
        assert one.nbytes <= kept <= 1.03 * one.nbytes + 8 * 128  # two numbers of each column, for inner products


# Models


def model() -> Checkpoint:
    """Matrices in all three formats, and an embedding that is the matrix of the logits too."""
    plain = tiny_llm.checkpoint(hidden=256, head_width=64, intermediate=512, layers=3)
    kinds = {"embed": "Q6_K", "v": "Q6_K", "down": "Q6_K", "o": "Q5_K", "up": "Q5_K"}
    weights = {
        name: weight(kinds.get(name.rpartition(".")[2], "Q4_K"), *w.shape, scale=1e-4, seed=seed)
        if len(w.shape) == 2
        else w
        for seed, (name, w) in enumerate(plain.weights.items())
    }
    return replace(plain, weights=weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "tolerance"), tiers.few_rows([(None, 1e-2), ("float32", 2e-5), ("int16", 1e-3)]))
def test_models_are_those_of_the_same_numbers_in_floats(precision: str | None, tolerance: float) -> None:
    given = model()
    floats = {name: Weight(w.to_float32(), w.shape) for name, w in given.weights.items()}
    wanted = rl.compile(build_dense(replace(given, weights=floats)))
    found = rl.compile(build_dense(given), precision=precision)
    for batch, count in ((1, 1), (1, 9), (2, 33)):
        tokens = np.random.default_rng(count).integers(0, tiny_llm.VOCAB, (batch, count))
        logits = wanted(tokens)
        np.testing.assert_allclose(found(tokens), logits, rtol=0, atol=tolerance * np.abs(logits).max())
