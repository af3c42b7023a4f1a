"""Table of performance facts of microarchitectures, on which schedules depend. No other module names a processor.

The facts of a row were measured or read in manuals; the instructions of a processor are LLVM's features (`Target.has`).
A target has the first row that matches its CPU name and the width of its vectors, which features may narrow.
docs/measurements/cpus.md has a section with the figures behind each fact; docs/howto-add/processor.md says how to add a
row.

>>> find("znver4", 512).loads_per_fma, find("no name that has a row", 256).name
(2, 'x86-64 of 256 bits')
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from relaxlite.records import dataclass

_PAGE = 4 << 10  # bytes; hardware prefetchers stop at page boundaries


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """Prefetch plan: how contractions with blocked weights read the weights' panels from memory.

    A panel consists of several arrays: codes, scales, and others.
    """

    panels: int
    """Maximum number of interleaved panels of a GEMV, which reads a few cache lines of each in turn."""
    gemv_bytes: int
    """Prefetch distance of a GEMV in bytes of a panel; 0: no prefetching."""
    gemm_bytes: int
    """Prefetch distance of a GEMM, of two or more rows, in bytes of a panel; 0: no prefetching."""
    max_arrays: int = 64
    """Maximum number of arrays of all interleaved panels together."""
    max_vectors: int = 2
    """Maximum width of a GEMM's register tiles, in vectors."""

    def interleaved_panels(self, arrays: int) -> int:
        """Return the number of panels that a GEMV interleaves if each consists of `arrays` arrays."""
        return max(1, min(self.panels, self.max_arrays // max(arrays, 1)))


@dataclass(frozen=True, slots=True)
class Microarchitecture:
    """A row of the table: the processors that it describes and their facts. Defaults: an unknown processor.

    Prefetch distances are in bytes; 0: no prefetching.
    """

    name: str
    llvm_names: tuple[str, ...]
    """Patterns of LLVM's CPU names, such as "znver*"."""
    vector_bits: int = 0
    """Width of the target's vectors; 0: any."""
    is_x86: bool = True

    weight_prefetch_bytes: int = 0
    """Prefetch distance of packed integer weights that are widened after the load."""
    elementwise_prefetch_bytes: int = 0
    """Prefetch distance of elementwise loops over several arrays in memory, with nontemporal stores of results."""
    block_prefetch_plan: PrefetchPlan = PrefetchPlan(1, 0, 0)
    """Prefetch plan of blocked weights."""
    panel_prefetch_steps: int = 0
    """Prefetch distance of a register tile in its own panel of float weights, in steps of the sum.

    The tile also prefetches an even share of the next panel; 0: only that (passes/products/panel_prefetch.py)."""
    page_prefetch_bytes: int = 0
    """Prefetch distance of keys and values in paged attention, rounded to whole rows."""
    prefetches_next_row: bool = False
    """Whether softmax, norms and other row programs prefetch the next row and its destination during a row.

    Otherwise rows may overlap (passes/schedule/cpu/pipelined_rows.py)."""
    hides_conversions: bool = False
    """Whether widening of vectors overlaps with FMAs at no cost, so that each register tile may widen its weights."""
    adds_beside_fmas: bool = False
    """Whether as many vector additions as FMAs, or as dot products of int16 pairs, issue in parallel at no cost."""
    loads_per_fma: int = 1
    """Loads from the L1 cache, of vectors or broadcast elements, that issue in the time of one FMA.

    A prefetch counts as a load. Used if additions issue in parallel with FMAs."""
    has_fast_bf16_dots: bool = False
    """Whether bfloat16 dot products, if supported, have twice the rate of float32 FMAs."""
    interleaves_rows: bool = False
    """Whether row interleaving of dp4a groups pays (passes/products/blocks_interleaved.py)."""

    def fits(self, llvm_name: str, vector_bits: int, is_x86: bool) -> bool:
        """Whether the row matches a processor; the first matching row counts."""
        has_vectors = self.vector_bits in (0, vector_bits) and self.is_x86 == is_x86
        return has_vectors and any(fnmatchcase(llvm_name, pattern) for pattern in self.llvm_names)


_PLAN256 = PrefetchPlan(4, 1024, 1024)  # of all processors with 256-bit vectors

_ZEN_4 = Microarchitecture(
    "Zen 4",
    ("znver4",),
    512,
    elementwise_prefetch_bytes=1024,
    block_prefetch_plan=PrefetchPlan(2, 0, _PAGE, max_arrays=6, max_vectors=1),
    page_prefetch_bytes=2 * _PAGE,
    hides_conversions=True,
    adds_beside_fmas=True,
    loads_per_fma=2,
    has_fast_bf16_dots=True,
)
_ZEN_5 = Microarchitecture(
    "Zen 5",
    ("znver5",),
    512,
    weight_prefetch_bytes=_PAGE,
    elementwise_prefetch_bytes=1024,
    block_prefetch_plan=PrefetchPlan(1, _PAGE, _PAGE),
    page_prefetch_bytes=_PAGE,
    hides_conversions=True,
    adds_beside_fmas=True,
    has_fast_bf16_dots=True,
)
_ZEN_3 = Microarchitecture(
    "Zen 3",
    ("znver3", "znver2", "znver1", "bdver?", "btver2"),  # older ones are assumed to be similar
    256,
    elementwise_prefetch_bytes=1024,
    block_prefetch_plan=_PLAN256,
    page_prefetch_bytes=2 * _PAGE,
    hides_conversions=True,
    has_fast_bf16_dots=True,
)
_GRANITE_RAPIDS = Microarchitecture(
    "Granite Rapids",
    ("graniterapids", "graniterapids-d"),  # in virtual machines that hide features, LLVM detects a rocketlake
    512,
    weight_prefetch_bytes=4 * _PAGE,
    block_prefetch_plan=PrefetchPlan(4, 768, _PAGE),
    panel_prefetch_steps=8,
    page_prefetch_bytes=_PAGE,
    prefetches_next_row=True,
    interleaves_rows=True,
)
_AMD = replace(_ZEN_5, name="AMD", llvm_names=("znver*", "bdver*", "btver*"), vector_bits=0, adds_beside_fmas=False)

MICROARCHITECTURES: tuple[Microarchitecture, ...] = (
    _ZEN_3,
    replace(_ZEN_3, name="Zen 3, other vectors", vector_bits=0, block_prefetch_plan=PrefetchPlan(1, 0, 0),
            page_prefetch_bytes=0),
    _ZEN_4,
    replace(_ZEN_4, name="Zen 4, 256 bits", vector_bits=256, block_prefetch_plan=_PLAN256, adds_beside_fmas=False),
    replace(_ZEN_4, name="Zen 4, 128 bits", vector_bits=128, block_prefetch_plan=PrefetchPlan(1, 0, 0),
            adds_beside_fmas=False),
    _ZEN_5,
    replace(_ZEN_5, name="Zen 5, 128 bits", vector_bits=128, adds_beside_fmas=False),
    replace(_AMD, name="AMD of 256 bits", vector_bits=256, block_prefetch_plan=_PLAN256, page_prefetch_bytes=2 * _PAGE),
    replace(_AMD, page_prefetch_bytes=0),
    # Intel processors that have not been measured are assumed to be similar to Granite Rapids.
    replace(_GRANITE_RAPIDS, name="Ice Lake-SP", llvm_names=("icelake-server",)),
    replace(_GRANITE_RAPIDS, name="Sapphire Rapids", llvm_names=("sapphirerapids", "emeraldrapids")),
    _GRANITE_RAPIDS,
    replace(_GRANITE_RAPIDS, name="Intel of 512 bits", llvm_names=("*",)),
    Microarchitecture("x86-64 of 256 bits", ("*",), 256, weight_prefetch_bytes=4 * _PAGE, block_prefetch_plan=_PLAN256,
                      page_prefetch_bytes=2 * _PAGE),
    Microarchitecture("x86-64 of 128 bits", ("*",), 128, weight_prefetch_bytes=4 * _PAGE,
                      block_prefetch_plan=PrefetchPlan(1, 4 * _PAGE, 4 * _PAGE)),
    Microarchitecture("other architectures", ("*",), is_x86=False, hides_conversions=True),  # AArch64 and others
)  # fmt: skip


def find(llvm_name: str, vector_bits: int, *, is_x86: bool = True) -> Microarchitecture:
    """Return the first row that matches a processor."""
    return next(row for row in MICROARCHITECTURES if row.fits(llvm_name, vector_bits, is_x86))
