"""Slots of recurrent states of sequences, which have constant size, such as one matrix per head.

    states = StateSlots(2, make, may_grow)  # of two pools
    states.reserve(a)                       # a slot for the next state, besides that of the current one
    first, then = states.span(a, True)      # slot that a step reads (-1: zero state), slot that it writes
    states.commit(a, 5, 5)                  # sequence a has 5 tokens now, 5 more than before

A state summarizes all tokens up to a position, and cannot be truncated. So several states of a sequence are kept: the
current one; the one before, for the rollback of draft tokens; and that after the last prompt, for another reply to it.
`drop` and `fork` use the longest state that is short enough; the tokens behind it must be computed again.

Slots are reference-counted, as forks share them. A reserved slot differs from the current state's slot, and the steps
of a long prompt update it in place: nothing changes until `commit`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from relaxlite.errors import CacheFullError
from relaxlite.records import dataclass

Array: TypeAlias = "np.ndarray[Any, Any]"
ZERO_STATE = -1  # slot number of the zero state of an empty sequence
STATES_PER_SEQUENCE = 3  # slots of one sequence: current, previous (reused by the next step), after the prompt
MIN_PROMPT_TOKENS = 16  # a step of at least so many tokens counts as a prompt, or the end of one


class State(NamedTuple):
    """State after `length` tokens, in a slot."""

    length: int
    slot: int
    is_prompt: bool


@dataclass(slots=True)
class _SequenceStates:
    """States of one sequence, and its reserved slot."""

    states: list[State] = field(default_factory=list)  # in ascending order of length
    next: int | None = None  # reserved slot


class StateSlots:
    """Allocator of state slots. Not thread-safe.

    KeyboardInterrupt may leak slots, which `recount_references` reclaims.
    """

    def __init__(self, count: int, make: Callable[[int, int], Array], may_grow: Callable[[int], bool]) -> None:
        """Create empty pools. `count`: number of pools; `make(pool, slots)` allocates a pool, `may_grow(slots)`:
        whether that many slots fit."""
        self._make, self._may_grow = make, may_grow
        self.pools = [make(k, 0) for k in range(count)]
        self._references: list[int] = []
        self._free: list[int] = []
        self._sequences: dict[int, _SequenceStates] = {}
        self._is_growing = False  # a growth is in progress

    @property
    def count(self) -> int:
        """Number of allocated slots."""
        return len(self._references)

    def length(self, sequence: int) -> int:
        """Number of tokens of the current state; 0 for a new sequence."""
        states = self._entry(sequence).states
        return states[-1].length if states else 0

    def longest_prefix(self, sequence: int, length: int) -> int:
        """Length of the longest state of at most `length` tokens; 0 without one."""
        return max((state.length for state in self._entry(sequence).states if state.length <= length), default=0)

    def fork(self, sequence: int, fork_id: int, length: int) -> None:
        """Share the state of `length` tokens, as `longest_prefix` returned it, with the new sequence `fork_id`."""
        for state in self._entry(sequence).states:
            if state.length == length:
                self._references[state.slot] += 1
                self._entry(fork_id).states.append(state)

    def drop(self, sequence: int, length: int) -> None:
        """Roll back to the longest state of at most `length` tokens."""
        states = self._entry(sequence).states
        while states and states[-1].length > length:
            self._release(states.pop().slot)

    def remove(self, sequence: int) -> None:
        """Delete a sequence, and release its slots."""
        self.cancel(sequence)
        self.drop(sequence, -1)
        self._sequences.pop(sequence, None)

    def reserve(self, sequence: int) -> None:
        """Reserve a slot for the next state, reusing that of the previous state where no fork shares it.

        CacheFullError where no slot is left.
        """
        entry = self._entry(sequence)
        if self._is_growing:  # a growth was interrupted
            self._shrink()
        if entry.next is not None:
            return
        previous = entry.states[-2] if len(entry.states) > 1 else None
        if previous is not None and not previous.is_prompt and self._references[previous.slot] == 1:
            del entry.states[-2]
            entry.next = previous.slot
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._references[slot] = 1
        entry.next = slot

    def span(self, sequence: int, is_first: bool) -> tuple[int, int]:
        """(slot to read, slot to write) of a step; `is_first`: the first step since `reserve`."""
        entry = self._entry(sequence)
        assert entry.next is not None
        if not is_first:
            return entry.next, entry.next
        return entry.states[-1].slot if entry.states else ZERO_STATE, entry.next

    def commit(self, sequence: int, length: int, count: int) -> None:
        """Make the reserved slot the current state, of `length` tokens, after a step of `count` tokens."""
        entry = self._entry(sequence)
        slot, entry.next = entry.next, None
        assert slot is not None
        entry.states.append(State(length, slot, count >= MIN_PROMPT_TOKENS))
        last_prompt = max((k for k, state in enumerate(entry.states) if state.is_prompt), default=-1)
        for k in reversed(range(len(entry.states) - 2)):
            if k != last_prompt:
                self._release(entry.states.pop(k).slot)

    def cancel(self, sequence: int) -> None:
        """Release the reserved slot."""
        entry = self._entry(sequence)
        if entry.next is not None:
            slot, entry.next = entry.next, None
            self._release(slot)

    def recount_references(self) -> None:
        """Recompute the reference counts, to reclaim slots that interrupts have leaked."""
        references = Counter(state.slot for entry in self._sequences.values() for state in entry.states)
        references.update(entry.next for entry in self._sequences.values() if entry.next is not None)
        self._references = [references[slot] for slot in range(len(self._references))]
        self._free = [slot for slot in reversed(range(len(self._references))) if not references[slot]]

    def _entry(self, sequence: int) -> _SequenceStates:
        return self._sequences.setdefault(sequence, _SequenceStates())

    def _release(self, slot: int) -> None:
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)

    def _grow(self) -> None:
        """Grow by a factor of 1.5, or by one slot where that does not fit. CacheFullError where neither fits."""
        self.recount_references()
        if self._free:
            return
        old = len(self._references)
        new_count = next((n for n in (max(STATES_PER_SEQUENCE, old + old // 2), old + 1) if self._may_grow(n)), None)
        if new_count is None:
            raise CacheFullError(f"the cache is full: there is no room for more than {old} states of sequences")
        self._is_growing = True
        try:
            for k, pool in enumerate(self.pools):
                grown = self._make(k, new_count)
                grown[:, :old] = pool
                self.pools[k] = grown
        except (MemoryError, OSError) as error:
            self._shrink()
            raise CacheFullError(f"there is no memory for {new_count} states of sequences") from error
        self._references += [0] * (new_count - old)
        self._free = list(reversed(range(old, new_count)))
        self._is_growing = False

    def _shrink(self) -> None:
        """Truncate the pools to the known slots, after an interrupted growth."""
        self.pools = [pool[:, : self.count].copy() for pool in self.pools]
        self._is_growing = False
