"""Weight strategies for fusion: which products with constant weights have a strategy other than register tiles.

A product with such a strategy must not be fused into one kernel with a product without it: neither would get it.
"""

from __future__ import annotations

from collections.abc import Sequence

from relaxlite.ir.module import IRModule
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.merge_calls import CallSite
from relaxlite.passes.products import int16_products, winograd_products
from relaxlite.passes.products.constant_weights import WeightStrategy, is_fit, would_take


class ProductStrategies:
    """The weight strategies of a module, in order of preference."""

    def __init__(self, module: IRModule, context: PassContext) -> None:
        strategies = [find(module, context) for find in (int16_products.strategy_of, winograd_products.strategy_of)]
        self._all = [strategy for strategy in strategies if strategy is not None]

    def of(self, function: str) -> Sequence[WeightStrategy]:
        """Return the strategies that apply to products of the function `function`."""
        return [strategy for strategy in self._all if strategy.is_for(function)]


def strategy_for(sites: Sequence[CallSite], strategies: Sequence[WeightStrategy]) -> WeightStrategy | None:
    """Return the first strategy that all calls may take, judged without reading their weights; None: there is none."""
    return next(
        (
            strategy
            for strategy in strategies
            if all(would_take(strategy, site.program, site.call.args) for site in sites)
        ),
        None,
    )


def strategies_fit_for(site: CallSite, strategies: Sequence[WeightStrategy]) -> tuple[str, ...]:
    """Return the names of the strategies that the products of a call may take, if these are many enough to pay."""
    return tuple(strategy.name for strategy in strategies if is_fit(strategy, site.program, site.call.args))
