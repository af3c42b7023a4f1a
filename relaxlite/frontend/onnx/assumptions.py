"""Assumptions about data on which ranks depend, checked at run time."""

from __future__ import annotations

from dataclasses import field

from relaxlite.records import dataclass


@dataclass
class Assumptions:
    """Assumptions about data on which ranks depend: the branch of an If, whether a symbolic size is 1 and squeezed.

    An import that fails is repeated with the next combination of assumptions. Each assumption is checked at run time.
    """

    _assumed: dict[str, bool] = field(default_factory=dict)  # location of the node -> the assumption
    _reasons: dict[str, str] = field(default_factory=dict)

    def assume(self, place: str, why: str) -> bool:
        """Return the assumption for a node, True in the first import; `why` explains it to users."""
        self._reasons[place] = why
        return self._assumed.setdefault(place, True)

    def next(self) -> bool:
        """Advance to the next combination of assumptions; False if all have been tried."""
        for place in reversed(self._assumed):
            if self._assumed[place]:
                self._assumed[place] = False
                return True
            self._assumed = {p: t for p, t in self._assumed.items() if p != place}
        return False

    def messages(self) -> tuple[str, ...]:
        """Return a message for each assumption that is checked at run time."""
        return tuple(
            f"{place}: taken to be {str(taken).lower()}: {self._reasons[place]}"
            for place, taken in self._assumed.items()
        )
