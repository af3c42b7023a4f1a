"""Programs of launches as IR text, for tests of the rules, the oracle and the code."""

from __future__ import annotations

SUMS = """
n = symbol("n")
@program(symbols=(n,))
def sums(x: f32[n, 64], out: f32[n]):
    for b in block_x(n):
        with allocate((64,), "float32", "shared") as parts:
            for t in thread_x(64):
                parts[t] = x[b, t] * float32(2.0)
                barrier()
                if index(t) < index(1):
                    with allocate((), "float32", "local") as total:
                        total[()] = float32(0.0)
                        for k in serial(64):
                            total[()] += parts[k]
                        out[b] = total[()]
"""
"""Twice the sum of each row: all threads of a block write their element, and the first adds them."""

SHUFFLED = """
n = symbol("n")
@program(symbols=(n,))
def shuffled(x: f32[n, 32], out: f32[n]):
    for b in block_x(n):
        for t in thread_x(32):
            with allocate((), "float32", "local") as total:
                total[()] = x[b, t]
                total[()] += intrinsic("shuffle_xor", total[()], int32(16), dtype="float32")
                total[()] += intrinsic("shuffle_xor", total[()], int32(8), dtype="float32")
                total[()] += intrinsic("shuffle_xor", total[()], int32(4), dtype="float32")
                total[()] += intrinsic("shuffle_xor", total[()], int32(2), dtype="float32")
                total[()] += intrinsic("shuffle_xor", total[()], int32(1), dtype="float32")
                if index(t) < index(1):
                    out[b] = total[()]
"""
"""The sum of each row, by one warp."""

PRODUCT = """
n = symbol("n")
@program(symbols=(n,))
def product(a: f16[n, 16], b: f16[16, 8], out: f32[n, 8]):
    for by in block_x((n + 15) // 16):
        with allocate((16, 16), "float16", "shared") as a_tile:
            with allocate((16, 16), "float16", "shared") as b_tile:
                for t in thread_x(32):
                    with allocate((4,), "int32", "local") as a_frag:
                      with allocate((4,), "int32", "local") as b_frag:
                        with allocate((4,), "float32", "local") as acc:
                            for e in unrolled(4):
                                acc[e] = float32(0.0)
                            call_library("warp", "copy_async", written(a_tile[15 - t % 16, t // 16 * 8]), address_of(a[min(by * 16 + 15 - t % 16, max(n - 1, 0)), t // 16 * 8]), index(max(min(n - by * 16 - 15 + t % 16, 1), 0) * 16, "int32"))
                            call_library("warp", "copy_async", written(b_tile[t % 16, t // 16 * 8]), address_of(b[t % 16, 0]), index((1 - t // 16) * 16, "int32"))
                            call_library("warp", "commit")
                            call_library("warp", "wait", int32(0))
                            barrier()
                            call_library("warp", "load_matrix", written(a_frag[0]), address_of(a_tile[t % 16, t // 16 * 8]))
                            call_library("warp", "load_matrix_t", written(b_frag[0]), address_of(b_tile[t % 16, t // 16 * 8]))
                            call_library("warp", "mma_f16", written(acc[0]), address_of(a_frag[0]), address_of(b_frag[0]))
                            for e in unrolled(4):
                                if index(by * 16 + t // 4 + e // 2 * 8) < index(n):
                                    out[by * 16 + t // 4 + e // 2 * 8, t % 4 * 2 + e % 2] = acc[e]
"""  # noqa: E501
"""a @ b on tensor cores: one warp per 16 rows, tiles by asynchronous copies."""

CHECKED = """
n = symbol("n")
m = symbol("m")
@program(symbols=(n, m))
def gather(x: f32[m], i: i64[n], out: f32[n]):
    for b in block_x((n + 31) // 32):
        for t in thread_x(32):
            if index(b * 32 + t) < index(n):
                with let_index(i[b * 32 + t]) as at:
                    assert (index(0) <= index(at)) & (index(at) < index(m)), "an index is outside of x"
                    out[b * 32 + t] = x[at]
"""
"""x[i], which fails for an index outside of x."""
