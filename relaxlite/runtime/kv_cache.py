"""Paged KV cache: pools of pages that sequences share, and the arrays that describe a step to the model.

    cache = KVCache(layout, max_bytes=1 << 30)
    a = cache.new()
    cache.reserve([(a, 5)])                     # allocate pages for five more tokens, or CacheFullError without a
    change inputs = cache.describe([(a, 0, 5)])        # slots of the new tokens, and attention blocks
    model(tokens, *inputs, ..., *cache.pools)   # writes keys and values
    cache.commit([(a, 5)])                      # the tokens are part of the sequence from here on

A sequence is a list of pages and a length. Pages are reference-counted: `fork` shares them, and a shared page is copied
on write. Pools grow by a factor of 1.5, array by array, up to `max_bytes`.
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
from relaxlite.runtime.state_slots import STATES_PER_SEQUENCE, StateSlots

Array: TypeAlias = "np.ndarray[Any, Any]"
_QueryBlock: TypeAlias = tuple[int, int, int, int]  # sequence, first row, rows, position of the first row
INITIAL_PAGES = 8  # initial size of a pool
TASKS_PER_THREAD = 4  # attention tasks per thread, for load balance
MIN_PART_PAGES = 2  # at least, in a part of a context (docs/measurements/backend.md)
MAX_THREADS = 256  # bounds the number of parts of a step (frontend/llm/step.py)
DTYPES = ("float32", "float16", "int8")

# private memory, which a forked process does not share
_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


class PoolLayout(NamedTuple):
    """Layout of a pool: an array (heads, pages, *shape), or (heads, slots, *shape) for states (state_slots.py)."""

    heads: int
    shape: tuple[int, int]  # of one page of a head, or one slot
    dtype: str
    is_state: bool = False

    def page_bytes(self) -> int:
        """Bytes of one page, or of one slot of states, of all heads."""
        return self.heads * math.prod(self.shape) * np.dtype(self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """Pools of all layers, in the model's order, those of states last.

    Keys are (kv_heads, pages, width, page) and values (kv_heads, pages, page, width) of `dtype`; int8 has float32
    scales (kv_heads, pages, page, 1) for each. Convolutions have pools of past tokens. `block`: query rows per
    attention block. InvalidArgumentError for a dtype that is not in DTYPES.
    """

    pools: tuple[PoolLayout, ...]
    kv_heads: int
    page: int
    dtype: str
    block: int

    def __post_init__(self) -> None:
        unsupported = next((pool.dtype for pool in self.pools if pool.dtype not in DTYPES), None)
        if unsupported is not None:
            raise InvalidArgumentError(f"a cache holds {', '.join(DTYPES)}, not {unsupported!r}")

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all layers."""
        return sum(pool.page_bytes() for pool in self.pools if not pool.is_state)

    @property
    def state_bytes(self) -> int:
        """Bytes of one state slot of all layers; 0 for models without states."""
        return sum(pool.page_bytes() for pool in self.pools if pool.is_state)


class StepInputs(NamedTuple):
    """Model inputs of a step of n tokens of b sequences: positions int64 [n], slots int64 [n] (page * page size + row),
    page table int32 [b, pages], blocks int64 [w, 6] (see the op paged_attention)."""

    positions: Array
    slots: Array
    table: Array
    blocks: Array


class StatefulInputs(NamedTuple):
    """Model inputs of a step with states: `StepInputs`, and spans int64 [b, 4] of the sequences
    (ir/ops/delta_rule.py)."""

    positions: Array
    slots: Array
    table: Array
    blocks: Array
    spans: Array


class DecodeStep:
    """Inputs of a decode step of one token of one sequence, in arrays that are reused by the next step."""

    def __init__(self) -> None:
        self._numbers = np.zeros(14, np.int64)
        self.tokens, self.positions, self.slots, self.wanted = (self._numbers[k : k + 1] for k in range(4))
        self.blocks, self.spans = self._numbers[4:10].reshape(1, -1), self._numbers[10:].reshape(1, -1)
        self.inputs: StepInputs | StatefulInputs

    def update(
        self, token: int, position: int, slot: int, table: Array, blocks: Array | None, states: tuple[int, int] | None
    ) -> None:
        """Set all inputs. `blocks`: None for a single block of one part; `states`: (slot to read, slot to write)."""
        self._numbers[:10] = token, position, slot, 0, 0, 0, 1, position, 0, 1
        inputs = StepInputs(self.positions, self.slots, table, self.blocks if blocks is None else blocks)
        if states is None:
            self.inputs = inputs
        else:
            self._numbers[10:] = 0, 1, *states
            self.inputs = StatefulInputs(*inputs, self.spans)


@dataclass(slots=True)
class _Sequence:
    """Length and pages of one sequence."""

    length: int = 0
    pages: list[int] = field(default_factory=list)
    table: Array = field(default_factory=lambda: np.zeros(4, np.int32))  # `pages` as an array, with spare capacity

    def append(self, page: int) -> None:
        count = len(self.pages)
        if count == len(self.table):
            self.table = np.concatenate([self.table, np.zeros_like(self.table)])
        self.table[count] = page
        self.pages.append(page)


class KVCache:
    """Sequences, and the pools with their keys and values. Not thread-safe.

    KeyboardInterrupt may occur between any two statements; their order is such that a page may leak, but is never freed
    while in use. `cancel`, and a `reserve` that finds the cache full, reclaim leaked pages.
    """

    def __init__(self, layout: CacheLayout, *, max_bytes: int) -> None:
        self.layout = layout
        self._max_bytes = max_bytes
        min_bytes = layout.page_bytes + STATES_PER_SEQUENCE * layout.state_bytes
        if max_bytes < min_bytes:
            states = f" and {STATES_PER_SEQUENCE} states" if layout.state_bytes else ""
            raise InvalidArgumentError(
                f"a cache of {max_bytes} bytes does not hold one page of {layout.page} tokens{states}, "
                f"which takes {min_bytes}"
            )
        paged = [pool for pool in layout.pools if not pool.is_state]
        self._pools: list[Array] = [self._pool(k, 0) for k in range(len(paged))]
        self._states: StateSlots | None = None
        if layout.state_bytes:
            self._states = StateSlots(
                len(layout.pools) - len(paged),
                lambda k, slots: self._pool(len(paged) + k, slots),
                self._has_room_for_states,
            )
        self._references: list[int] = []  # reference count of each page
        self._free: list[int] = []
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0
        self._growing_to = 0  # size that growing pools will have; 0: no growth in progress
        self._next_token = DecodeStep()
        self._grow(min(INITIAL_PAGES, self.max_pages))

    # contents

    @property
    def pools(self) -> list[Array]:
        """Arrays of all pools, as the model takes them."""
        return self._pools if self._states is None else self._pools + self._states.pools

    @property
    def max_pages(self) -> int:
        """Number of pages that fit `max_bytes` beside the states."""
        states = 0 if self._states is None else max(self._states.count, STATES_PER_SEQUENCE) * self.layout.state_bytes
        return (self._max_bytes - states) // self.layout.page_bytes

    def _has_room_for_states(self, slots: int) -> bool:
        """Whether so many state slots fit `max_bytes` beside the used pages."""
        return slots * self.layout.state_bytes + max(self.used_pages, 1) * self.layout.page_bytes <= self._max_bytes

    def length(self, sequence: int) -> int:
        """Number of committed tokens."""
        return self._entry(sequence).length

    @property
    def used_pages(self) -> int:
        return len(self._references) - len(self._free)

    @property
    def free_pages(self) -> int:
        """Number of pages that can still be allocated, including growth of the pools."""
        return self.max_pages - self.used_pages

    @property
    def nbytes(self) -> int:
        """Bytes of all pools."""
        return sum(pool.nbytes for pool in self.pools)

    # sequences

    def new(self) -> int:
        """Create an empty sequence; returns its id."""
        self._next += 1
        self._sequences[self._next] = _Sequence()
        return self._next

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Create a sequence of the first `length` tokens of another (None: all), sharing its pages; returns its id.

        With states, the length is reduced to the longest prefix that has a state. InvalidArgumentError.
        """
        source = self._entry(sequence)
        length = source.length if length is None else length
        if not isinstance(length, Integral) or not 0 <= length <= source.length:
            raise InvalidArgumentError(f"sequence {sequence} has {source.length} tokens, not {length} to fork")
        fork_id = self.new()
        if self._states is not None:
            length = self._states.longest_prefix(sequence, int(length))
        fork = self._sequences[fork_id]
        for page in source.pages[: self._num_pages(length)]:
            self._references[page] += 1
            fork.append(page)
        if self._states is not None:
            self._states.fork(sequence, fork_id, length)
        fork.length = int(length)
        return fork_id

    def drop(self, sequence: int, count: int) -> None:
        """Remove the last `count` tokens, and free pages. With states, more tokens are removed, back to the longest
        prefix that has a state. InvalidArgumentError."""
        entry = self._entry(sequence)
        if not isinstance(count, Integral) or not 0 <= count <= entry.length:
            raise InvalidArgumentError(f"sequence {sequence} has {entry.length} tokens, not {count} to drop")
        entry.length -= int(count)
        if self._states is not None:
            self._states.drop(sequence, entry.length)
            entry.length = self._states.length(sequence)
        self._free_unused_pages(entry)

    def remove(self, sequence: int) -> None:
        """Delete a sequence, and free its pages."""
        entry = self._entry(sequence)
        if self._states is not None:
            self._states.remove(sequence)
        entry.length = 0
        self._free_unused_pages(entry)
        del self._sequences[sequence]

    # steps

    def reserve(self, batch: Sequence[tuple[int, int]]) -> None:
        """Allocate pages for (sequence, count of new tokens) of each, copying shared pages that will be written.

        CacheFullError leaves the cache unchanged.
        """
        if self._growing_to:  # a growth was interrupted
            self._grow(self._growing_to)
        needed, pages = 0, []
        shared: dict[int, int] = {}
        for sequence, count in batch:
            entry = self._entry(sequence)
            pages.append((entry, self._num_pages(entry.length + count) - len(entry.pages)))
            needed += max(pages[-1][1], 0)
            if (page := self._shared_page(entry)) is not None and count:
                shared[page] = shared.get(page, 0) + 1
        # of the sequences that share a page, the last one to write need not copy
        needed += sum(min(count, self._references[page] - 1) for page, count in shared.items())
        if needed > len(self._free):
            self._make_room(needed)
        for (_, count), (entry, new_pages) in zip(batch, pages, strict=True):
            if count:
                self._copy_shared_page(entry)
            for _ in range(new_pages):
                entry.append(self._allocate_page())
        if self._states is not None:
            for sequence, count in batch:
                if count:
                    self._states.reserve(sequence)

    def decode_step(self, sequence: int, token: int) -> DecodeStep | None:
        """Fast path of `reserve` and `describe` for one token; the result is valid until the next call.

        None where the token needs a page to be allocated or copied; the cache is unchanged then.
        """
        entry, page_size, states = self._sequences.get(sequence), self.layout.page, None
        if entry is None or not entry.length % page_size or self._growing_to:
            return None
        position = entry.length
        page_index = position // page_size
        page = entry.pages[page_index]
        if self._references[page] > 1:
            return None
        step, blocks = self._next_token, None
        if page_index + 1 >= 2 * MIN_PART_PAGES and self._default_parts() > 1:
            blocks = np.array(self._split_contexts([(0, 0, 1, position)]))
        if self._states is not None:
            if self._states.length(sequence) != position:
                return None
            self._states.reserve(sequence)
            states = self._states.span(sequence, True)
        table = entry.table[: page_index + 1].reshape(1, -1)
        step.update(token, position, page * page_size + position % page_size, table, blocks, states)
        return step

    def describe(self, parts: Sequence[tuple[int, int, int]]) -> StepInputs | StatefulInputs:
        """Model inputs of a step over parts (sequence, first, count): the reserved tokens `first` to `first + count`,
        counted from the sequence's length."""
        page = self.layout.page
        positions: list[Array] = []
        slots: list[Array] = []
        blocks: list[_QueryBlock] = []
        row = 0
        max_pages = max(self._num_pages(self.length(s) + first + count) for s, first, count in parts)
        table = np.zeros((len(parts), max_pages), np.int32)
        for k, (sequence, first, count) in enumerate(parts):
            entry = self._sequences[sequence]
            start = entry.length + first
            token_positions = np.arange(start, start + count)
            num_pages = self._num_pages(start + count)
            table[k, :num_pages] = entry.table[:num_pages]
            positions.append(token_positions)
            slots.append(entry.table[token_positions // page].astype(np.int64) * page + token_positions % page)
            blocks += self._split_at_pages(k, row, start, count)
            row += count
        inputs = StepInputs(
            np.concatenate(positions), np.concatenate(slots), table, np.array(self._split_contexts(blocks))
        )
        return inputs if self._states is None else StatefulInputs(*inputs, self._spans(parts))

    def _spans(self, parts: Sequence[tuple[int, int, int]]) -> Array:
        assert self._states is not None
        spans, row = [], 0
        for sequence, first, count in parts:
            spans.append((row, count, *self._states.span(sequence, first == 0)))
            row += count
        return np.array(spans, np.int64)

    def _split_at_pages(self, sequence: int, row: int, start: int, count: int) -> list[_QueryBlock]:
        """Split rows of a sequence into query blocks of about equal size that do not cross pages: the rows of a block
        attend to the same pages."""
        blocks, done = [], 0
        while done < count:
            rows_in_page = min(count - done, self.layout.page - (start + done) % self.layout.page)
            num_blocks = -(-rows_in_page // self.layout.block)
            for k in range(num_blocks):
                first, end = done + k * rows_in_page // num_blocks, done + (k + 1) * rows_in_page // num_blocks
                blocks.append((sequence, row + first, end - first, start + first))
            done += rows_in_page
        return blocks

    def _default_parts(self) -> int:
        """Number of parts of a long context that gives all threads equal work (as in Flash-Decoding)."""
        threads, tasks = min(threadpool.num_threads(), MAX_THREADS), self.layout.kv_heads
        return next(
            n for n in range(1, threads + 1) if tasks * n % threads == 0 or tasks * n >= TASKS_PER_THREAD * threads
        )

    def _split_contexts(self, blocks: list[_QueryBlock]) -> list[tuple[int, ...]]:
        """Split the contexts of blocks into parts; returns (*block, part, parts).

        The split determines how sums are rounded, so it depends on the position of each row alone, unless a step would
        have too many parts: chunked prefill, draft tokens and other sequences must not change a reply.
        """
        max_parts = min(self._default_parts(), 1 + TASKS_PER_THREAD * MAX_THREADS // max(len(blocks), 1))
        parted_blocks: list[tuple[int, ...]] = []
        for block in blocks:
            parts = max(1, min(max_parts, (block[3] // self.layout.page + 1) // MIN_PART_PAGES))
            parted_blocks += [(*block, part, parts) for part in range(parts)]
        return parted_blocks

    def commit(self, batch: Sequence[tuple[int, int]]) -> None:
        """Append reserved tokens, whose keys and values have been written, to the sequences."""
        for sequence, count in batch:
            entry = self._sequences[sequence]
            if self._states is not None and count:
                self._states.commit(sequence, entry.length + count, count)
            entry.length += count

    def cancel(self, batch: Sequence[tuple[int, int]]) -> None:
        """Free reserved pages, including those of an interrupted `reserve`."""
        for sequence, _ in batch:
            if (entry := self._sequences.get(sequence)) is not None:
                self._free_unused_pages(entry)
                entry.table[: len(entry.pages)] = entry.pages
            if self._states is not None:
                self._states.cancel(sequence)

    # pages

    def _entry(self, sequence: int) -> _Sequence:
        entry = self._sequences.get(sequence)
        if entry is None:
            raise InvalidArgumentError(f"there is no sequence {sequence}")
        if self._states is not None:  # an interrupt may have left the two lengths different
            entry.length = self._states.length(sequence)
        return entry

    def _num_pages(self, length: int) -> int:
        return -(-length // self.layout.page)

    def _shared_page(self, sequence: _Sequence) -> int | None:
        """The partially filled last page, if other sequences share it."""
        if sequence.length % self.layout.page == 0:
            return None
        page = sequence.pages[sequence.length // self.layout.page]
        return page if self._references[page] > 1 else None

    def _copy_shared_page(self, sequence: _Sequence) -> None:
        """Copy-on-write of the last page."""
        page = self._shared_page(sequence)
        if page is None:
            return
        copy, page_index = self._allocate_page(), sequence.length // self.layout.page
        for pool in self._pools:
            pool[:, copy] = pool[:, page]
        sequence.pages[page_index] = copy
        sequence.table[page_index] = copy
        self._references[page] -= 1

    def _allocate_page(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _free_unused_pages(self, sequence: _Sequence) -> None:
        """Free the pages beyond the sequence's length."""
        num_pages = self._num_pages(sequence.length)
        while len(sequence.pages) > num_pages:
            page = sequence.pages.pop()
            self._references[page] -= 1
            if not self._references[page]:
                self._free.append(page)

    def _make_room(self, needed: int) -> None:
        """Grow the pools to at least `needed` free pages, or raise CacheFullError."""
        if needed > self.free_pages:
            self._recount_references()
        if needed > self.free_pages:
            page_size, max_bytes = self.layout.page, self.max_pages * self.layout.page_bytes
            raise CacheFullError(
                f"the cache is full: {needed} more pages of {page_size} tokens are needed, {self.free_pages} of "
                f"{self.max_pages} are free; remove sequences, or give it more than {max_bytes} bytes"
            )
        pages = len(self._references)
        if needed > len(self._free):
            self._grow(min(max(pages + pages // 2, self.used_pages + needed), self.max_pages))

    def _recount_references(self) -> None:
        """Recompute the reference counts, to reclaim pages that interrupts have leaked."""
        references = Counter(page for sequence in self._sequences.values() for page in sequence.pages)
        self._references = [references[page] for page in range(len(self._references))]
        self._free = [page for page in reversed(range(len(self._references))) if not references[page]]

    def _pool(self, number: int, pages: int) -> Array:
        """Allocate a zeroed pool by mmap.

        Zeroed, as attention computes with the unused rows of a page before masking, and denormals there are slow
        (docs/measurements/backend.md). Mapped, so that memory is committed at first write and freed at once.
        """
        pool = self.layout.pools[number]
        shape = (pool.heads, pages, *pool.shape)
        if not pages:
            return np.zeros(shape, pool.dtype)
        return np.frombuffer(mmap.mmap(-1, pages * pool.page_bytes(), **_PRIVATE), pool.dtype).reshape(shape)

    def _grow(self, pages: int) -> None:
        """Grow all pools to `pages`, one at a time, so that only one exists twice. CacheFullError: out of memory."""
        old = len(self._references)
        self._growing_to = pages
        try:
            for k, pool in enumerate(self._pools):
                if pool.shape[1] != pages:
                    grown = self._pool(k, pages)
                    grown[:, :old] = pool[:, :old]
                    self._pools[k] = grown
        except (MemoryError, OSError) as error:
            self._pools = [pool if pool.shape[1] == old else pool[:, :old].copy() for pool in self._pools]
            self._growing_to = 0
            raise CacheFullError(f"there is no memory for a cache of {pages * self.layout.page_bytes} bytes") from error
        self._references += [0] * (pages - old)
        self._free = [page for page in reversed(range(pages)) if not self._references[page]]  # lowest page first
        self._growing_to = 0
