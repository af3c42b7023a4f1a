"""States of sequences whose past does not lie in pages: one matrix for each head, say, however many tokens there were.

    states = StateSlots(2, make, may_grow)  # of two pools
    states.reserve(a)                       # a slot for what comes next, beside the one with the state as it is
    first, then = states.span(a, True)      # what a step reads (-1: the state is zero), and where it writes
    states.commit(a, 5, 5)                  # sequence a has 5 tokens now, 5 more than before

A state stands for all tokens up to one position, and cannot be cut back. So of each sequence some are kept: the last
one, the one before it, which a step of guesses goes back to, and that behind the last step of many tokens, a prompt's,
which another reply goes back to. `drop` and `fork` go to the longest that is short enough; the tokens behind it must be
computed again.

Slots are counted, as forks share them. What is reserved is another slot than the state's, in which the steps of a long
prompt go on: until `commit` all is as it was.
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
NONE = -1  # the slot of an empty sequence: its state is zero
STATES = 3  # of one sequence: as it is, before the last step, whose place the next one takes, and of the prompt
PROMPT = 16  # tokens in one step that are taken for a prompt, or the end of one


class State(NamedTuple):
    """Behind `length` tokens."""

    length: int
    slot: int
    is_prompt: bool


@dataclass(slots=True)
class _Kept:
    states: list[State] = field(default_factory=list)  # by length
    next: int | None = None  # the slot that is reserved


class StateSlots:
    """Which slots hold which states. `make(pool, slots)` makes the array of a pool, `may_grow(slots)` says whether so
    many may be there. Not for several threads at once; an interruption leaves slots held for too long, never for too
    short, until `count_again`."""

    def __init__(self, count: int, make: Callable[[int, int], Array], may_grow: Callable[[int], bool]) -> None:
        """`count`: of pools"""
        self._make, self._may_grow = make, may_grow
        self.pools = [make(k, 0) for k in range(count)]
        self._references: list[int] = []
        self._free: list[int] = []
        self._sequences: dict[int, _Kept] = {}
        self._grows = False  # until all pools have grown

    @property
    def count(self) -> int:
        """Of the slots that there is memory for."""
        return len(self._references)

    def length(self, sequence: int) -> int:
        """The tokens that its state stands for; 0 of a sequence that is new."""
        states = self._of(sequence).states
        return states[-1].length if states else 0

    def fitting(self, sequence: int, length: int) -> int:
        """How many of the first `length` tokens a state stands for."""
        return max((state.length for state in self._of(sequence).states if state.length <= length), default=0)

    def fork(self, sequence: int, made: int, length: int) -> None:
        """The state of `made`, which is new, is that of the other one behind so many tokens, which `fitting` gave."""
        for state in self._of(sequence).states:
            if state.length == length:
                self._references[state.slot] += 1
                self._of(made).states.append(state)

    def drop(self, sequence: int, length: int) -> None:
        """From here on the state stands for `length` tokens, or fewer."""
        states = self._of(sequence).states
        while states and states[-1].length > length:
            self._release(states.pop().slot)

    def remove(self, sequence: int) -> None:
        self.cancel(sequence)
        self.drop(sequence, -1)
        self._sequences.pop(sequence, None)

    def reserve(self, sequence: int) -> None:
        """A slot for the state behind the next step: that of the state before the last one, if nobody else has it."""
        result = self._of(sequence)
        if self._grows:  # a growth was interrupted
            self._shrink()
        if result.next is not None:
            return
        before = result.states[-2] if len(result.states) > 1 else None
        if before is not None and not before.is_prompt and self._references[before.slot] == 1:
            del result.states[-2]
            result.next = before.slot
            return
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._references[slot] = 1
        result.next = slot

    def span(self, sequence: int, is_first: bool) -> tuple[int, int]:
        """The slots that a step of a reservation reads and writes; `is_first`: no other one was before it."""
        result = self._of(sequence)
        assert result.next is not None
        if not is_first:
            return result.next, result.next
        return result.states[-1].slot if result.states else NONE, result.next

    def commit(self, sequence: int, length: int, count: int) -> None:
        """The sequence has `length` tokens now, `count` more than before."""
        result = self._of(sequence)
        slot, result.next = result.next, None
        assert slot is not None
        result.states.append(State(length, slot, count >= PROMPT))
        last = max((k for k, state in enumerate(result.states) if state.is_prompt), default=-1)
        for k in reversed(range(len(result.states) - 2)):
            if k != last:
                self._release(result.states.pop(k).slot)

    def cancel(self, sequence: int) -> None:
        """Give back what was reserved."""
        result = self._of(sequence)
        if result.next is not None:
            slot, result.next = result.next, None
            self._release(slot)

    def count_again(self) -> None:
        """Find the slots that no sequence has, though they count as held."""
        held = Counter(state.slot for kept in self._sequences.values() for state in kept.states)
        held.update(kept.next for kept in self._sequences.values() if kept.next is not None)
        self._references = [held[slot] for slot in range(len(self._references))]
        self._free = [slot for slot in reversed(range(len(self._references))) if not held[slot]]

    def _of(self, sequence: int) -> _Kept:
        return self._sequences.setdefault(sequence, _Kept())

    def _release(self, slot: int) -> None:
        self._references[slot] -= 1
        if not self._references[slot]:
            self._free.append(slot)

    def _grow(self) -> None:
        """More slots, by halves, or one more where there is no room for so many; CacheFullError: not even that."""
        self.count_again()
        if self._free:
            return
        old = len(self._references)
        wanted = next((n for n in (max(STATES, old + old // 2), old + 1) if self._may_grow(n)), None)
        if wanted is None:
            raise CacheFullError(f"the cache is full: there is no room for more than {old} states of sequences")
        self._grows = True
        try:
            for k, pool in enumerate(self.pools):
                result = self._make(k, wanted)
                result[:, :old] = pool
                self.pools[k] = result
        except (MemoryError, OSError) as error:
            self._shrink()
            raise CacheFullError(f"there is no memory for {wanted} states of sequences") from error
        self._references += [0] * (wanted - old)
        self._free = list(reversed(range(old, wanted)))
        self._grows = False

    def _shrink(self) -> None:
        """Pools of the slots that are known, after a growth that did not end."""
        self.pools = [pool[:, : self.count].copy() for pool in self.pools]
        self._grows = False
