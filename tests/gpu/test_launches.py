"""Rules of launches: what the verifier refuses; the text form round-trips."""

from __future__ import annotations

import numpy as np
import pytest

from relaxlite import dtypes
from relaxlite.errors import VerifyError
from relaxlite.ir.equality import first_difference
from relaxlite.ir.launch import launch_of, launches
from relaxlite.ir.parser import parse_module
from relaxlite.ir.printer import print_module
from relaxlite.ir.symbolic import SymVar
from relaxlite.ir.verifier import verify
from relaxlite.ir.warp import INSTRUCTIONS, MMA, load_matrices, multiply
from tests.gpu import programs
from tests.support.ir_text import module, program

TEXTS = {name: text for name, text in vars(programs).items() if name.isupper()}


@pytest.mark.parametrize("name", TEXTS)
def test_programs_are_legal_and_their_text_round_trips(name: str) -> None:
    given = module(TEXTS[name])
    verify(given, "lowered")
    assert first_difference(given, parse_module(print_module(given))) is None


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("SUMS", "thread_x(64)", "thread_x(n)", "thread_x of t has the extent n"),
        ("SUMS", "thread_x(64)", "thread_x(2048)", "2048 threads in all"),
        ("SUMS", "for k in serial(64)", "for k in block_y(64)", "block_y of k stands inside of threads"),
        ("SUMS", "for k in serial(64)", "for k in thread_x(64)", "thread_x is bound again, by k"),
        ("SHUFFLED", "for b in block_x(n)", "for b in serial(n)", "thread_x of t stands outside of blocks"),
        ("SUMS", '(64,), "float32", "shared"', '(n,), "float32", "shared"', "shared buffer parts has no constant size"),
        ("SUMS", '(), "float32", "local"', '(), "float32", "shared"', "shared buffer total is not between"),
        ("SUMS", '(64,), "float32", "shared"', '(64,), "float32"', "the global buffer parts is allocated inside of"),
        ("SUMS", "total[()] += parts[k]", "barrier()", "under a condition, or in a loop, that varies over threads"),
        (
            "SUMS",
            "for t in thread_x(64):\n",
            "barrier()\n            for t in thread_x(64):\n",
            "outside of the thread",
        ),
        ("SHUFFLED", "int32(16)", "int32(32)", "the distance of a shuffle is a literal below 32"),
        ("PRODUCT", "mma_f16", "mma_f15", "unknown warp instruction 'mma_f15'"),
        ("PRODUCT", '"commit"', '"commit", int32(1)', "commit takes 0 operands, got 1"),
        ("PRODUCT", "written(acc[0])", "address_of(acc[0])", "mma_f16: the address in acc is written"),
        ("PRODUCT", '"int32", "local") as a_frag', '"float32", "local") as a_frag', "a_frag is of int32, got float32"),
        ("PRODUCT", "written(a_frag[0])", "written(a_tile[0, 0])", "must be an address in local memory"),
        ("PRODUCT", 'call_library("warp", "commit")', 'call_library("blas", "f")', "f of blas is called inside of a"),
    ],
)
def test_a_broken_rule_is_named(name: str, old: str, new: str, message: str) -> None:
    text = TEXTS[name]
    assert old in text
    with pytest.raises(VerifyError, match=message):
        verify(module(text.replace(old, new)), "lowered")


def test_the_host_touches_no_elements() -> None:
    text = f"{TEXTS['SUMS']}    out[0] = float32(1.0)\n"
    with pytest.raises(VerifyError, match="out is accessed outside of launches"):
        verify(module(text), "lowered")


def test_a_launch_knows_what_it_takes_from_the_host() -> None:
    given = program(TEXTS["PRODUCT"])
    (nest,) = launches(given.body)
    launch = launch_of(nest)
    assert [b.name for b in launch.buffers] == ["out", "a", "b"] and launch.threads == (32, 1, 1)
    assert [b.name for b in launch.written] == ["out"]
    assert [s.name for s in launch.symbols] == ["n"] and isinstance(launch.symbols[0], SymVar)
    assert str(launch.extents["block_y"]) == "1"


@pytest.mark.parametrize("name", MMA)
def test_mma_multiplies_matrices(name: str) -> None:
    """Fragments by the layout of the docstring of ir/warp.py, written out with loops."""
    mma, rng = MMA[name], np.random.default_rng(0)
    elements = {"float16": 2, "bfloat16": 2, "float32": 1, "int8": 4}[mma.dtype]
    dtype = dtypes.to_numpy(mma.dtype)
    a, b = rng.integers(-9, 9, (16, mma.width)).astype(dtype), rng.integers(-9, 9, (mma.width, 8)).astype(dtype)
    a_frag, b_frag = np.empty((32, 4 * elements), dtype), np.empty((32, 2 * elements), dtype)
    for lane, word, e in np.ndindex(32, 4, elements):
        column = elements * (lane % 4) + 4 * elements * (word // 2) + e
        a_frag[lane, word * elements + e] = a[lane // 4 + 8 * (word % 2), column]
    for lane, word, e in np.ndindex(32, 2, elements):
        b_frag[lane, word * elements + e] = b[elements * (lane % 4) + 4 * elements * word + e, lane // 4]
    start = np.ones((1, 32, 4), dtypes.to_numpy(mma.total))
    c = multiply(mma, a_frag.view(np.int32)[None], b_frag.view(np.int32)[None], start)[0]
    want = a.astype(np.int64) @ b.astype(np.int64) + 1
    for lane, word in np.ndindex(32, 4):
        assert c[lane, word] == want[lane // 4 + 8 * (word // 2), 2 * (lane % 4) + word % 2]
    assert len(INSTRUCTIONS[name].operands) == 3 and mma.shape in mma.ptx


def test_load_matrix_gives_fragments_of_a() -> None:
    tile = np.arange(256, dtype=np.int16).reshape(16, 16)
    rows = np.stack([tile[lane % 16, lane // 16 * 8 :][:8] for lane in range(32)])
    words = load_matrices(rows[None], is_transposed=False)[0].view(np.int16)
    for lane, word, e in np.ndindex(32, 4, 2):
        row, column = lane // 4 + 8 * (word % 2), 2 * (lane % 4) + 8 * (word // 2) + e
        assert words[lane, 2 * word + e] == tile[row, column]
