"""The cache of keys and values: pools of pages that sequences share, and the arrays that describe a step to the model.

    cache = KVCache(layout, max_bytes=1 << 30)
    a = cache.new()
    cache.reserve([(a, 5)])                     # pages for five more tokens, or CacheFullError and nothing has changed
    inputs = cache.describe([(a, 0, 5)])        # where they go, and what they attend to
    model(tokens, *inputs, ..., *cache.pools)   # writes keys and values
    cache.commit([(a, 5)])                      # from here on they are part of the sequence

A sequence is a list of pages and a length. Pages are counted: `fork` shares them, and a shared page is copied before a
sequence writes to it. Pools grow by halves, array by array, up to `max_bytes`.
"""

from __future__ import annotations

import math
import mmap
from collections import Counter
from collections.abc import Sequence
from dataclasses import field
from numbers import Integral
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from relaxlite.errors import CacheFullError, InvalidArgumentError
from relaxlite.records import dataclass
from relaxlite.runtime import threadpool
from relaxlite.runtime.state_slots import STATES, StateSlots

Array: TypeAlias = "np.ndarray[Any, Any]"
_Block: TypeAlias = tuple[int, int, int, int]  # sequence, first row, rows, position of the first row
FIRST_PAGES = 8  # of a pool when the first token comes
ENOUGH_TASKS = 4  # of each thread, to share them out evenly
PAGES_OF_PART = 2  # at least: those of one page are slower than of two, which cost a row next to nothing, many 2 to 5 %
MAX_THREADS = 256  # bounds the parts of a step (frontend/llm/step.py)
DTYPES = ("float32", "float16", "int8")

# No memory that a forked process would share
_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class Pool(NamedTuple):
    """(heads, pages, *shape) of `dtype`; `is_state`: (heads, slots, *shape), of states (state_slots.py)"""

    heads: int
    shape: tuple[int, int]  # of one page of a head, or one slot
    dtype: str
    is_state: bool = False

    def page_bytes(self) -> int:
        return self.heads * math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The pools of all layers, in the order in which the model takes them: keys (kv_heads, pages, width, page) and
    values (kv_heads, pages, page, width) of `dtype`, int8 with float32 scales (kv_heads, pages, page, 1) of each; or
    what a convolution keeps of the tokens. Behind all of these those of states. `block`: rows of queries that the
    attention takes at once."""

    pools: tuple[Pool, ...]
    kv_heads: int
    page: int
    dtype: str
    block: int

    def __post_init__(self) -> None:
        wrong = next((pool.dtype for pool in self.pools if pool.dtype not in DTYPES), None)
        if wrong is not None:
            raise InvalidArgumentError(f"a cache holds {', '.join(DTYPES)}, not {wrong!r}")

    @property
    def page_bytes(self) -> int:
        """Of all layers."""
        return sum(pool.page_bytes() for pool in self.pools if not pool.is_state)

    @property
    def state_bytes(self) -> int:
        """Of one slot of all layers; 0: a sequence has no state beside its pages."""
        return sum(pool.page_bytes() for pool in self.pools if pool.is_state)


class StepInputs(NamedTuple):
    """What a step of n tokens of b sequences is told: positions int64 [n], slots int64 [n] (page * size + row), table
    int32 [b, pages], blocks int64 [w, 6] (see the op paged_attention)."""

    positions: Array
    slots: Array
    table: Array
    blocks: Array


class StatefulInputs(NamedTuple):
    """The same for a model with states, of each sequence in `spans` int64 [b, 4] too (ir/ops/delta_rule.py)."""

    positions: Array
    slots: Array
    table: Array
    blocks: Array
    spans: Array


class NextToken:
    """The step of one sequence by one token, in arrays that are written again for the next one."""

    def __init__(self) -> None:
        self._numbers = np.zeros(14, np.int64)
        self.tokens, self.positions, self.slots, self.wanted = (self._numbers[k : k + 1] for k in range(4))
        self.blocks, self.spans = self._numbers[4:10].reshape(1, -1), self._numbers[10:].reshape(1, -1)
        self.inputs: StepInputs | StatefulInputs

    def become(
        self, token: int, position: int, slot: int, table: Array, blocks: Array | None, states: tuple[int, int] | None
    ) -> None:
        """`blocks`: None for one in one part; `states`: the slots of the states before and behind, if there are any."""
        self._numbers[:10] = token, position, slot, 0, 0, 0, 1, position, 0, 1
        inputs = StepInputs(self.positions, self.slots, table, self.blocks if blocks is None else blocks)
        if states is None:
            self.inputs = inputs
        else:
            self._numbers[10:] = 0, 1, *states
            self.inputs = StatefulInputs(*inputs, self.spans)


@dataclass(slots=True)
class _Sequence:
    length: int = 0
    pages: list[int] = field(default_factory=list)
    table: Array = field(default_factory=lambda: np.zeros(4, np.int32))  # the same pages, with room for more

    def append(self, page: int) -> None:
        count = len(self.pages)
        if count == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.table[count] = page
        self.pages.append(page)


class KVCache:
    """Sequences and the pools that hold their keys and values. Not for several threads at once.

    An interruption (KeyboardInterrupt) may come between any two statements. Their order is such that a page counts as
    held for too long then, never for too short; `cancel` and a `reserve` that finds the cache full mend what is left.
    """

    def __init__(self, layout: CacheLayout, *, max_bytes: int) -> None:
        self.layout = layout
        self._max_bytes = max_bytes
        least = layout.page_bytes + STATES * layout.state_bytes
        if max_bytes < least:
            states = f" and {STATES} states" if layout.state_bytes else ""
            raise InvalidArgumentError(
                f"a cache of {max_bytes} bytes does not hold one page of {layout.page} tokens{states}, "
                f"which takes {least}"
            )
        paged = [pool for pool in layout.pools if not pool.is_state]
        self._pools: list[Array] = [self._pool(k, 0) for k in range(len(paged))]
        self._states: StateSlots | None = None
        if layout.state_bytes:
            self._states = StateSlots(
                len(layout.pools) - len(paged), lambda k, slots: self._pool(len(paged) + k, slots), self._may_have
            )
        self._references: list[int] = []  # of each page
        self._free: list[int] = []
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._wanted_pages = 0  # of pools that are about to grow
        self._next_token = NextToken()
        self._grow(min(FIRST_PAGES, self.max_pages))

    # what it holds

    @property
    def pools(self) -> list[Array]:
        return self._pools if self._states is None else self._pools + self._states.pools

    @property
    def max_pages(self) -> int:
        """States take their part."""
        states = 0 if self._states is None else max(self._states.count, STATES) * self.layout.state_bytes
        return (self._max_bytes - states) // self.layout.page_bytes

    def _may_have(self, slots: int) -> bool:
        """Whether there may be so many states beside the pages that are used."""
        return slots * self.layout.state_bytes + max(self.used_pages, 1) * self.layout.page_bytes <= self._max_bytes

    def length(self, sequence: int) -> int:
        return self._of(sequence).length

    @property
    def used_pages(self) -> int:
        return len(self._references) - len(self._free)

    @property
    def free_pages(self) -> int:
        """How many more there may be, whether there is memory for them yet or not."""
        return self.max_pages - self.used_pages

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)

    # sequences

    def new(self) -> int:
        """An empty sequence."""
        self._next += 1
        self._sequences[self._next] = _Sequence()
        return self._next

    def fork(self, sequence: int, length: int | None = None) -> int:
        """A sequence of the first `length` tokens of another (None: all), which shares its pages; of a model with
        states, of as many of these as there is a state for."""
        source = self._of(sequence)
        length = source.length if length is None else length
        if not isinstance(length, Integral) or not 0 <= length <= source.length:
            raise InvalidArgumentError(f"sequence {sequence} has {source.length} tokens, not {length} to fork")
        result = self.new()
        if self._states is not None:
            length = self._states.fitting(sequence, int(length))
        fork = self._sequences[result]
        for page in source.pages[: self._pages_of(length)]:
            self._references[page] += 1
            fork.append(page)
        if self._states is not None:
            self._states.fork(sequence, result, length)
        fork.length = int(length)
        return result

    def drop(self, sequence: int, count: int) -> None:
        """Forget the last `count` tokens, of a model with states those more that no state stands for; pages that are
        not needed any more are given back."""
        result = self._of(sequence)
        if not isinstance(count, Integral) or not 0 <= count <= result.length:
            raise InvalidArgumentError(f"sequence {sequence} has {result.length} tokens, not {count} to drop")
        result.length -= int(count)
        if self._states is not None:
            self._states.drop(sequence, result.length)
            result.length = self._states.length(sequence)
        self._trim(result)

    def remove(self, sequence: int) -> None:
        result = self._of(sequence)
        if self._states is not None:
            self._states.remove(sequence)
        result.length = 0
        self._trim(result)
        del self._sequences[sequence]

    # steps

    def reserve(self, batch: Sequence[tuple[int, int]]) -> None:
        """Pages of their own for `count` more tokens of each sequence. CacheFullError leaves all as it was."""
        if self._wanted_pages:  # a growth was interrupted
            self._grow(self._wanted_pages)
        wanted, pages = 0, []
        shared: dict[int, int] = {}
        for sequence, count in batch:
            result = self._of(sequence)
            pages.append((result, self._pages_of(result.length + count) - len(result.pages)))
            wanted += max(pages[-1][1], 0)
            if (page := self._shared_page(result)) is not None and count:
                shared[page] = shared.get(page, 0) + 1
        # of all that share a page, the last to write need not copy it
        wanted += sum(min(count, self._references[page] - 1) for page, count in shared.items())
        if wanted > len(self._free):
            self._make_room(wanted)
        for (_, count), (result, more) in zip(batch, pages, strict=True):
            if count:
                self._own_last_page(result)
            for _ in range(more):
                result.append(self._take())
        if self._states is not None:
            for sequence, count in batch:
                if count:
                    self._states.reserve(sequence)

    def next_token(self, sequence: int, token: int) -> NextToken | None:
        """What `reserve` and `describe` make of one more token, in few operations, up to the next call; None where it
        takes a page. The sequence is as it was."""
        result, size, states = self._sequences.get(sequence), self.layout.page, None
        if result is None or not result.length % size or self._wanted_pages:
            return None
        position = result.length
        number = position // size
        page = result.pages[number]
        if self._references[page] > 1:
            return None
        step, blocks = self._next_token, None
        if number + 1 >= 2 * PAGES_OF_PART and self._usual_parts() > 1:
            blocks = np.array(self._parted([(0, 0, 1, position)]))
        if self._states is not None:
            if self._states.length(sequence) != position:
                return None
            self._states.reserve(sequence)
            states = self._states.span(sequence, True)
        table = result.table[: number + 1].reshape(1, -1)
        step.become(token, position, page * size + position % size, table, blocks, states)
        return step

    def describe(self, parts: Sequence[tuple[int, int, int]]) -> StepInputs | StatefulInputs:
        """The inputs for parts (sequence, first, count): tokens `first` to `first + count` of those that are reserved,
        counted from the sequence's length, one part after the other."""
        page = self.layout.page
        positions: list[Array] = []
        slots: list[Array] = []
        blocks: list[_Block] = []
        row = 0
        widest = max(self._pages_of(self.length(s) + first + count) for s, first, count in parts)
        table = np.zeros((len(parts), widest), np.int32)
        for k, (sequence, first, count) in enumerate(parts):
            result = self._sequences[sequence]
            start = result.length + first
            at = np.arange(start, start + count)
            used = self._pages_of(start + count)
            table[k, :used] = result.table[:used]
            positions.append(at)
            slots.append(result.table[at // page].astype(np.int64) * page + at % page)
            blocks += self._within_pages(k, row, start, count)
            row += count
        inputs = StepInputs(np.concatenate(positions), np.concatenate(slots), table, np.array(self._parted(blocks)))
        return inputs if self._states is None else StatefulInputs(*inputs, self._spans(parts))

    def _spans(self, parts: Sequence[tuple[int, int, int]]) -> Array:
        assert self._states is not None
        spans, row = [], 0
        for sequence, first, count in parts:
            spans.append((row, count, *self._states.span(sequence, first == 0)))
            row += count
        return np.array(spans, np.int64)

    def _within_pages(self, sequence: int, row: int, start: int, count: int) -> list[_Block]:
        """Blocks that end where pages do, as the rows of each block see the same pages, and are equally high there."""
        result, t = [], 0
        while t < count:
            here = min(count - t, self.layout.page - (start + t) % self.layout.page)
            number = -(-here // self.layout.block)
            for k in range(number):
                first, end = t + k * here // number, t + (k + 1) * here // number
                result.append((sequence, row + first, end - first, start + first))
            t += here
        return result

    def _usual_parts(self) -> int:
        """In how many parts a row with a long context comes, that all threads may have equal work."""
        threads, tasks = min(threadpool.num_threads(), MAX_THREADS), self.layout.kv_heads
        return next(n for n in range(1, threads + 1) if tasks * n % threads == 0 or tasks * n >= ENOUGH_TASKS * threads)

    def _parted(self, blocks: list[_Block]) -> list[tuple[int, ...]]:
        """The blocks with part and parts. How a context is parted decides how sums are rounded. Chunks, guesses and
        other sequences are not to change a reply, so it follows from the position of each row alone, unless that makes
        more parts than a step has room for."""
        usual = min(self._usual_parts(), 1 + ENOUGH_TASKS * MAX_THREADS // max(len(blocks), 1))
        result: list[tuple[int, ...]] = []
        for block in blocks:
            parts = max(1, min(usual, (block[3] // self.layout.page + 1) // PAGES_OF_PART))
            result += [(*block, part, parts) for part in range(parts)]
        return result

    def commit(self, batch: Sequence[tuple[int, int]]) -> None:
        """The reserved tokens are written: the sequences are that much longer."""
        for sequence, count in batch:
            result = self._sequences[sequence]
            if self._states is not None and count:
                self._states.commit(sequence, result.length + count, count)
            result.length += count

    def cancel(self, batch: Sequence[tuple[int, int]]) -> None:
        """Give back what was reserved, or as much as an interrupted `reserve` has got."""
        for sequence, _ in batch:
            if (result := self._sequences.get(sequence)) is not None:
                self._trim(result)
                result.table[: len(result.pages)] = result.pages
            if self._states is not None:
                self._states.cancel(sequence)

    # pages

    def _of(self, sequence: int) -> _Sequence:
        result = self._sequences.get(sequence)
        if result is None:
            raise InvalidArgumentError(f"there is no sequence {sequence}")
        if self._states is not None:  # an interruption may have come between the two
            result.length = self._states.length(sequence)
        return result

    def _pages_of(self, length: int) -> int:
        return -(-length // self.layout.page)

    def _shared_page(self, sequence: _Sequence) -> int | None:
        """The page in which the sequence goes on, if others have it too."""
        if sequence.length % self.layout.page == 0:
            return None
        page = sequence.pages[sequence.length // self.layout.page]
        return page if self._references[page] > 1 else None

    def _own_last_page(self, sequence: _Sequence) -> None:
        page = self._shared_page(sequence)
        if page is None:
            return
        result, at = self._take(), sequence.length // self.layout.page
        for pool in self._pools:
            pool[:, result] = pool[:, page]
        sequence.pages[at] = result
        sequence.table[at] = result
        self._references[page] -= 1

    def _take(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _trim(self, sequence: _Sequence) -> None:
        """Give back the pages behind the sequence's length."""
        kept = self._pages_of(sequence.length)
        while len(sequence.pages) > kept:
            page = sequence.pages.pop()
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def _make_room(self, wanted: int) -> None:
        """At least `wanted` free pages, or CacheFullError."""
        if wanted > self.free_pages:
            self._count_again()
        if wanted > self.free_pages:
            size, most = self.layout.page, self.max_pages * self.layout.page_bytes
            raise CacheFullError(
                f"the cache is full: {wanted} more pages of {size} tokens are needed, {self.free_pages} of "
                f"{self.max_pages} are free; remove sequences, or give it more than {most} bytes"
            )
        pages = len(self._references)
        if wanted > len(self._free):
            self._grow(min(max(pages + pages // 2, self.used_pages + wanted), self.max_pages))

    def _count_again(self) -> None:
        """Find the pages that no sequence has, though they count as held."""
        held = Counter(page for sequence in self._sequences.values() for page in sequence.pages)
        self._references = [held[page] for page in range(len(self._references))]
        self._free = [page for page in reversed(range(len(self._references))) if not held[page]]

    def _pool(self, number: int, pages: int) -> Array:
        """Of zeros: attention computes with what lies behind a page's last token before it drops the result, and where
        that is the garbage of freed memory, numbers below 2**-126 cost a hundred cycles each. Mapped, so that a page
        takes memory once it is written, and a pool that has been replaced gives its own back at once."""
        pool = self.layout.pools[number]
        shape = (pool.heads, pages, *pool.shape)
        if not pages:
            return np.zeros(shape, pool.dtype)
        return np.frombuffer(mmap.mmap(-1, pages * pool.page_bytes(), **_PRIVATE), pool.dtype).reshape(shape)

    def _grow(self, pages: int) -> None:
        """Pools of so many pages, one after the other, so that no more than one is there twice."""
        old = len(self._references)
        self._wanted_pages = pages
        try:
            for k, pool in enumerate(self._pools):
                if pool.shape[1] != pages:
                    result = self._pool(k, pages)
                    result[:, :old] = pool[:, :old]
                    self._pools[k] = result
        except (MemoryError, OSError) as error:
            self._pools = [pool if pool.shape[1] == old else pool[:, :old].copy() for pool in self._pools]
            self._wanted_pages = 0
            raise CacheFullError(f"there is no memory for a cache of {pages * self.layout.page_bytes} bytes") from error
        self._references += [0] * (pages - old)
        self._free = [
            page for page in reversed(range(pages)) if not self._references[page]
        ]  # the lowest is taken first
        self._wanted_pages = 0
