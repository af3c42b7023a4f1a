"""The ways other than register tiles in which products with constant weights may be computed, as fusion asks for them:
what goes one way is not to become one kernel with what does not, or neither goes it."""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.module import IRModule
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.merge_calls import CallSite
from relaxlite.passes.products import int16_products as word_products
from relaxlite.passes.products import winograd_products as inner_products
from relaxlite.passes.products.constant_weights import WeightStrategy, is_fit, would_take


class ProductStrategies:
    """Those of a module, the one that is asked first in front."""

    def __init__(self, module: IRModule, context: PassContext) -> None:
        result = [find(module, context) for find in (word_products.strategy_of, inner_products.strategy_of)]
        self._all = [way for way in result if way is not None]

    def of(self, function: str) -> Sequence[WeightStrategy]:
        """Those that products of a function may go."""
        return [way for way in self._all if way.is_for(function)]


def strategy_for(sites: Sequence[CallSite], ways: Sequence[WeightStrategy]) -> WeightStrategy | None:
    """The first way that all these calls may go, as far as that shows without a look at their weights."""
    return next((w for w in ways if all(would_take(w, site.program, site.call.args) for site in sites)), None)


def strategies_fit_for(site: CallSite, ways: Sequence[WeightStrategy]) -> tuple[str, ...]:
    """Names of the ways that the products of a call may go, if there are enough of them."""
    return tuple(way.name for way in ways if is_fit(way, site.program, site.call.args))
