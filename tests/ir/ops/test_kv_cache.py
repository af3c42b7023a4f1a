"""What conformance tests of kv_append and paged_attention do not show: stale memory, many shapes, types and errors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import relaxlite as rl
from relaxlite.errors import ExecutionError, TypeInferenceError
from relaxlite.ir import ops
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.expr import Var
from relaxlite.ir.op import get_op
from relaxlite.ir.program import Allocate
from relaxlite.ir.program_visitor import walk_stmts
from relaxlite.ir.symbolic import as_int
from relaxlite.ir.types import TensorType
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import default_pipeline
from relaxlite.runtime.module import Executable
from relaxlite.target import Target

HEADS, KV_HEADS, WIDTH, PAGE, PAGES = 4, 2, 12, 8, 9


def types(**changes: Any) -> dict[str, TensorType]:
    found: dict[str, Any] = {
        "q": (("n", HEADS, WIDTH), "float32"),
        "keys": ((KV_HEADS, "p", WIDTH, PAGE), "float32"),
        "values": ((KV_HEADS, "p", PAGE, WIDTH), "float32"),
        "table": (("s", "m"), "int32"),
        "blocks": (("w", 6), "int64"),
    }
    bb = BlockBuilder()
    symbols = {name: bb.symbol(name) for name in "npsmw"}
    return {
        name: TensorType.of(tuple(symbols.get(d, d) for d in shape), dtype)
        for name, (shape, dtype) in (found | changes).items()
    }


@cache
def attention(window: int | None = None) -> Executable:
    bb = BlockBuilder()
    with bb.function("main", **types()) as params:
        bb.result(bb.emit(ops.paged_attention(*params, scale=0.3, window=window, block=8)))
    return rl.compile(bb.module())


def inputs(length: int, rows: int, fill: float = 0.0, parts: int = 1, seed: int = 0) -> list[np.ndarray]:
    """One sequence of `length` tokens, the last `rows` of which ask; all other places of the pools hold `fill`."""
    rng = np.random.default_rng((seed, length, rows))
    keys = np.full((KV_HEADS, PAGES, PAGE, WIDTH), fill, np.float32)
    values = keys.copy()
    table = rng.permutation(PAGES).astype(np.int32)[None]
    for t in range(length):
        at = (slice(None), table[0, t // PAGE], t % PAGE)
        keys[at], values[at] = rng.standard_normal((2, KV_HEADS, WIDTH))
    q = rng.standard_normal((rows, HEADS, WIDTH)).astype(np.float32)
    first = length - rows
    spans = [(0, t, min(8, rows - t), first + t) for t in range(0, rows, 8)]
    blocks = [(*span, part, parts) for span in spans for part in range(parts)]
    return [q, np.ascontiguousarray(keys.swapaxes(2, 3)), values, table, np.array(blocks, np.int64)]


@pytest.mark.parametrize("window", [None, 1, 11])
def test_every_length_number_of_rows_and_of_parts(window: int | None) -> None:
    reference = get_op("paged_attention").reference
    for length, rows in ((1, 1), (8, 8), (9, 1), (9, 9), (30, 17), (64, 1), (72, 72), (65, 3)):
        for parts in (1, 2, 5, 12):
            given = inputs(length, rows, parts=parts)
            wanted = reference(*given, scale=0.3, window=window, cap=None, block=8)
            np.testing.assert_allclose(attention(window)(*given), wanted, atol=2e-6, err_msg=f"{length} {rows} {parts}")


@pytest.mark.each_value
@pytest.mark.parametrize("target", ["llvm", "llvm -mcpu=x86-64-v3", "llvm -mcpu=x86-64"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 4, 16), (4, 2, 80), (3, 1, 72), (2, 1, 64), (4, 1, 256)])
def test_a_row_beside_others_rounds_as_it_does_alone(
    heads: int, kv_heads: int, width: int, dtype: str, target: str
) -> None:
    """Tiles of a few rows had several sums of each element, those of more rows one."""
    page = 64  # as of language models
    changes = {
        "q": (("n", heads, width), "float32"),
        "keys": ((kv_heads, "p", width, page), dtype),
        "values": ((kv_heads, "p", page, width), dtype),
    }
    bb = BlockBuilder()
    with bb.function("main", **types(**changes)) as params:
        bb.result(bb.emit(ops.paged_attention(*params, scale=width**-0.5, block=32)))
    exe = rl.compile(bb.module(), target=target)
    rng = np.random.default_rng(width)
    keys, values = rng.standard_normal((2, kv_heads, PAGES, width, page)).astype(dtype)
    values = np.ascontiguousarray(values.swapaxes(2, 3))
    table = rng.permutation(PAGES).astype(np.int32)[None]
    for length, rows in ((2, 2), (9, 3), (66, 8), (300, 5), (500, 7)):
        q = rng.standard_normal((rows, heads, width)).astype(np.float32)
        first = length - rows
        together = exe(q, keys, values, table, np.array([(0, 0, rows, first, 0, 1)]))
        for row in range(rows):
            alone = exe(q[row : row + 1], keys, values, table, np.array([(0, 0, 1, first + row, 0, 1)]))
            np.testing.assert_array_equal(together[row], alone[0], err_msg=f"{length} {rows} {row}")


@pytest.mark.parametrize("width", [64, 256, 1024])
def test_panels_of_single_sums_stay_within_the_caches(width: int) -> None:
    """What many rows share of keys in float16, where converting them takes time of its own."""
    changes = {
        "q": (("n", 4, width), "float32"),
        "keys": ((1, "p", width, 64), "float16"),
        "values": ((1, "p", 64, width), "float16"),
    }
    bb = BlockBuilder()
    with bb.function("main", **types(**changes)) as params:
        bb.result(bb.emit(ops.paged_attention(*params, block=32)))
    passes = default_pipeline()
    passes = passes[: 1 + [step.name for step in passes].index("schedule")]
    made = run_passes(bb.module(), passes, PassContext(Target.parse("llvm -mcpu=x86-64-v3")))
    allocated = [s.buffer for p in made.programs().values() for s in walk_stmts(p.body) if isinstance(s, Allocate)]
    assert {as_int(buffer.shape[0]) for buffer in allocated if buffer.name == "panel"} == {128}


def test_sinks_take_their_share_however_large_they_are() -> None:
    """As if each sequence began with one more key, whose value is 0; -inf is none."""
    params = {**types(), "sinks": TensorType.of((HEADS,), "float32")}
    bb = BlockBuilder()
    with bb.function("main", **params) as given:
        bb.result(bb.emit(ops.paged_attention(*given, scale=0.3, block=8)))
    exe = rl.compile(bb.module())
    for size in (0.0, 3.0, -80.0, 80.0, -np.inf):
        sinks = np.full(HEADS, size, np.float32) + np.arange(HEADS, dtype=np.float32)
        for length, rows, parts in ((1, 1, 1), (9, 9, 1), (72, 3, 5)):
            operands = inputs(length, rows, parts=parts)
            wanted = get_op("paged_attention").reference(*operands, sinks, scale=0.3, window=None, cap=None, block=8)
            np.testing.assert_allclose(exe(*operands, sinks), wanted, atol=2e-6)
            if size == -np.inf:
                np.testing.assert_allclose(wanted, attention(None)(*operands), atol=2e-6)


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("window", [None, 11])
def test_what_pages_held_before_does_not_show(window: int | None, parts: int) -> None:
    for length, rows in ((1, 1), (13, 5), (40, 8)):
        clean = attention(window)(*inputs(length, rows, parts=parts))
        np.testing.assert_array_equal(attention(window)(*inputs(length, rows, np.nan, parts)), clean)


def test_nan_in_a_key_that_is_seen_shows() -> None:
    given = inputs(20, 6)
    given[1][0, given[3][0, 2], :, 1] = np.nan  # of position 17, heads 0 and 1
    found = attention()(*given)
    assert np.isnan(found[3:, :2]).all() and not np.isnan(found[:3]).any() and not np.isnan(found[:, 2:]).any()


@pytest.mark.parametrize(
    ("column", "value", "what"),
    [
        (0, 1, "its sequence"), (0, -1, "its sequence"), (1, 2, "a row"), (1, -1, "a row"),
        (2, 9, "its number of rows"), (3, 72, "its position"), (3, -1, "its position"), (4, 1, "its part"),
        (4, -1, "its part"), (5, 0, "its part"), (5, 3, "one of its parts"),
    ],
)  # fmt: skip
def test_blocks_out_of_range_stop_the_run(column: int, value: int, what: str) -> None:
    given = inputs(9, 1)
    given[4][0, column] = value
    with pytest.raises(ExecutionError, match=f"paged_attention: {what} is out of range in a block"):
        attention()(*given)


@pytest.mark.parametrize("page", [-1, PAGES])
def test_pages_out_of_range_stop_the_run(page: int) -> None:
    given = inputs(9, 1)
    given[3][0, 1] = page
    with pytest.raises(ExecutionError, match="a page of the table is out of range for the pool"):
        attention()(*given)


def test_slots_beyond_the_pool_stop_the_run() -> None:
    bb = BlockBuilder()
    n, p = bb.symbol("n"), bb.symbol("p")
    pool = TensorType.of((2, p, PAGE, 3), "float32")
    with bb.function(
        "main", pool=pool, x=TensorType.of((n, 2, 3), "float32"), slots=TensorType.of((n,), "int64")
    ) as params:
        bb.result(bb.emit(ops.kv_append(*params)))
    exe = rl.compile(bb.module())
    given = np.zeros((2, 3, PAGE, 3), np.float32), np.ones((2, 2, 3), np.float32)
    assert exe(*given, np.array([23, -1])).sum() == 6
    with pytest.raises(ExecutionError, match="kv_append: a slot lies beyond the pool's pages"):
        exe(*given, np.array([0, 24]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": (("n", HEADS, WIDTH), "float16")}, "q must be float32, keys and values of one dtype"),
        ({"keys": ((KV_HEADS, "p", WIDTH, PAGE), "float16")}, "q must be float32, keys and values of one dtype"),
        ({"table": (("s", "m"), "int64")}, "table and blocks must be int32 and int64 of 6 columns"),
        ({"blocks": (("w", 4), "int64")}, "table and blocks must be int32 and int64 of 6 columns"),
        ({"q": (("n", 3, WIDTH), "float32")}, "heads, widths or pages of q, keys and values do not fit"),
        ({"q": (("n", "m", WIDTH), "float32")}, "heads, widths and the tokens of a page must be known"),
        ({"q": (("n", HEADS * WIDTH), "float32")}, "must have ranks 3, 4, 4, 2, 2"),
        ({"sinks": ((KV_HEADS,), "float32")}, rf"sinks must be float32 of \({HEADS},\), one for each head, got"),
        ({"sinks": ((HEADS,), "float16")}, rf"sinks must be float32 of \({HEADS},\), one for each head, got"),
        ({"a": ((1,), "float32"), "b": ((1,), "float32")}, "keys and values are float32, float16, or int8 with scales"),
    ],
)
def test_types_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeInferenceError, match=message):
        ops.paged_attention(*(Var(name, ty) for name, ty in types(**changes).items()))
