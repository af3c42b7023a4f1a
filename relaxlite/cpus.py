"""What schedules ask about processors: a table with a row for each microarchitecture. No other file names one.

A row says how a processor behaves, in facts that were measured or read in its manuals; which instructions it has is a
matter of LLVM's features (`Target.has`). A target has the first row of the table that fits its processor's name and the
width of its vectors, which features may make narrower than they are. docs/measurements/cpus.md has a section of each
fact's name, with the figures behind it; docs/howto-add/processor.md says how to add a row.

>>> find("znver4", 512).loads_per_fma, find("no name that has a row", 256).name
(2, 'x86-64 of 256 bits')
"""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase

from relaxlite.records import dataclass

_PAGE = 4 << 10  # bytes of memory in which a processor's own prefetching goes on


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """How products of rows of activations with blocked weights read these from memory: a prefetch plan.

    Weights lie in panels, each of several arrays: codes, scales, and others.
    """

    panels: int
    """Panels that a GEMV interleaves, at most: it reads a line or a few of each in turn."""
    gemv_bytes: int
    """Prefetch distance of a GEMV in bytes of a panel; 0: it does not prefetch."""
    gemm_bytes: int
    """Prefetch distance of a GEMM, of two rows and more, in bytes of a panel; 0: it does not prefetch."""
    max_arrays: int = 64
    """Arrays that are read in turn, at most, of all interleaved panels together."""
    max_vectors: int = 2
    """Width of a GEMM's register tiles in vectors, at most."""

    def interleaved_panels(self, arrays: int) -> int:
        """How many panels a GEMV interleaves where each is of so many arrays."""
        return max(1, min(self.panels, self.max_arrays // max(arrays, 1)))


@dataclass(frozen=True, slots=True)
class Microarchitecture:
    """One row: which processors it is of, and their facts. Defaults are of a processor about which nothing is known.

    Prefetch distances are in bytes ahead of a load; 0: code does not prefetch there.
    """

    name: str
    llvm_names: tuple[str, ...]
    """LLVM's names of its processors; "znver*" stands for all that begin so."""
    vector_bits: int = 0
    """Width of the target's vectors; 0: any."""
    is_x86: bool = True

    weight_prefetch_bytes: int = 0
    """Prefetch distance of packed integer weights that are widened as they are read."""
    elementwise_prefetch_bytes: int = 0
    """Prefetch distance of elementwise loops over several arrays in memory, whose results are stored past the caches.
    """
    block_prefetch_plan: PrefetchPlan = PrefetchPlan(1, 0, 0)
    """How blocked weights are read."""
    panel_prefetch_steps: int = 0
    """Steps of a sum by which a register tile prefetches its own panel of float weights, beside an even share of the
    next panel; 0: it prefetches the next panel only (passes/products/panel_prefetch.py)."""
    page_prefetch_bytes: int = 0
    """Prefetch distance of keys and values in attention over pages of a KV cache, rounded to whole rows."""
    prefetches_next_row: bool = False
    """Whether softmax, norms and other programs over rows prefetch the next row, and where its result goes, while they
    compute one. Where not, rows may overlap (passes/schedule/cpu/pipelined_rows.py)."""
    hides_conversions: bool = False
    """Whether vectors are widened beside FMAs at no cost, so that each register tile may widen its weights again."""
    adds_beside_fmas: bool = False
    """Whether vector additions issue beside as many FMAs, or dot products of int16 pairs, at no cost."""
    loads_per_fma: int = 1
    """Loads from the first cache, of vectors or of elements for all lanes, that issue in the time of one FMA. A
    prefetch counts as one. Asked where additions issue beside FMAs."""
    has_fast_bf16_dots: bool = False
    """Whether bfloat16 dot products, where there are any, have twice the rate of float32 FMAs."""
    interleaves_rows: bool = False
    """Whether dp4a groups of several rows are issued in turn (passes/products/blocks_interleaved.py)."""

    def fits(self, llvm_name: str, vector_bits: int, is_x86: bool) -> bool:
        """Whether it is the row of a processor, if none before it is."""
        has_its_vectors = self.vector_bits in (0, vector_bits) and self.is_x86 == is_x86
        return has_its_vectors and any(fnmatchcase(llvm_name, pattern) for pattern in self.llvm_names)


_IN_TURN = PrefetchPlan(4, 1024, 1024)  # of all vectors of 256 bits

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
    ("znver3", "znver2", "znver1", "bdver?", "btver2"),  # the older ones are taken to be like it
    256,
    elementwise_prefetch_bytes=1024,
    block_prefetch_plan=_IN_TURN,
    page_prefetch_bytes=2 * _PAGE,
    hides_conversions=True,
    has_fast_bf16_dots=True,
)
_GRANITE_RAPIDS = Microarchitecture(
    "Granite Rapids",
    ("graniterapids", "graniterapids-d"),  # virtual machines may hide so much that LLVM takes it for a rocketlake
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
    replace(_ZEN_4, name="Zen 4, 256 bits", vector_bits=256, block_prefetch_plan=_IN_TURN, adds_beside_fmas=False),
    replace(_ZEN_4, name="Zen 4, 128 bits", vector_bits=128, block_prefetch_plan=PrefetchPlan(1, 0, 0),
            adds_beside_fmas=False),
    _ZEN_5,
    replace(_ZEN_5, name="Zen 5, 128 bits", vector_bits=128, adds_beside_fmas=False),
    replace(_AMD, name="AMD of 256 bits", vector_bits=256, block_prefetch_plan=_IN_TURN, page_prefetch_bytes=2 * _PAGE),
    replace(_AMD, page_prefetch_bytes=0),
    # Those of Intel are taken to be like a Granite Rapids where they have not been measured.
    replace(_GRANITE_RAPIDS, name="Ice Lake-SP", llvm_names=("icelake-server",)),
    replace(_GRANITE_RAPIDS, name="Sapphire Rapids", llvm_names=("sapphirerapids", "emeraldrapids")),
    _GRANITE_RAPIDS,
    replace(_GRANITE_RAPIDS, name="Intel of 512 bits", llvm_names=("*",)),
    Microarchitecture("x86-64 of 256 bits", ("*",), 256, weight_prefetch_bytes=4 * _PAGE, block_prefetch_plan=_IN_TURN,
                      page_prefetch_bytes=2 * _PAGE),
    Microarchitecture("x86-64 of 128 bits", ("*",), 128, weight_prefetch_bytes=4 * _PAGE,
                      block_prefetch_plan=PrefetchPlan(1, 4 * _PAGE, 4 * _PAGE)),
    Microarchitecture("other architectures", ("*",), is_x86=False, hides_conversions=True),  # AArch64 and others
)  # fmt: skip


def find(llvm_name: str, vector_bits: int, *, is_x86: bool = True) -> Microarchitecture:
    """The row of a processor: the first that fits."""
    return next(row for row in MICROARCHITECTURES if row.fits(llvm_name, vector_bits, is_x86))
