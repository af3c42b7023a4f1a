"""Strategies for products with constant weights: the passes that apply them, and fusion's questions about them.

A pass asks the table of strategies (strategy_table.py) for each product of a program, checks and transforms the weights
of its calls, and redirects these to a new program (prepared_rows.py). Fusion must not join a product that has such a
strategy with one that has not into one kernel: neither would get it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import TypeAlias

import numpy as np

from relaxlite.config import compile_threads
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import BATCH_INVARIANT, INHERITS_LAYOUT, RELAXED_PRECISION, SCHEDULED
from relaxlite.ir.expr import Array, Attrs, Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Binary, Check, For, IndexValue, Literal, Load, Stmt, Store, TensorProgram, Value
from relaxlite.ir.program_visitor import loads, walk_values
from relaxlite.ir.symbolic import as_int, product
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.constant_values import EVALUABLE_NODES
from relaxlite.passes.loops.merge_calls import CallSite
from relaxlite.passes.loops.pattern import perfect_nest, top_stages
from relaxlite.passes.loops.versioning import clamped_indices
from relaxlite.passes.products.pack_constants import SHARED_BYTES
from relaxlite.passes.products.prepared_rows import Product, Products
from relaxlite.passes.products.prologue import symbols_of
from relaxlite.passes.products.reduction import reduction_block
from relaxlite.passes.products.strategy import Precision, Strategy, allowed_of, candidates
from relaxlite.passes.products.strategy_table import TABLE, WINOGRAD_FLOAT32, WINOGRAD_INT16, WINOGRAD_INT16_KEPT
from relaxlite.records import dataclass
from relaxlite.target import Target

_ANALYZER = Analyzer()
AT_A_TIME = 1 << 24  # dequantized weights that are checked at a time: 64 MB


@dataclass(frozen=True, slots=True)
class WeightStrategy:
    """A strategy of the table as the pass `name` applies it to a module.

    `reason`: why products take the strategy, for decisions. `functions`: whose products take it; None: of all.
    """

    name: str
    strategy: Strategy
    target: Target
    precision: Precision
    reason: str
    functions: Collection[str] | None = None

    @property
    def keeps(self) -> bool:
        """Whether weights stay as they are stored, floats too, and are packed as other readers need."""
        return self.strategy is WINOGRAD_INT16_KEPT

    def is_for(self, function: str) -> bool:
        """Whether products of the function `function` may take the strategy."""
        return self.functions is None or function in self.functions

    def is_fit(self, part: Product) -> bool:
        """Whether a product may take the strategy."""
        return self.strategy in allowed_of(candidates(TABLE, part.contraction, self.target, self.precision))

    def make(self, program: TensorProgram, parts: tuple[Product, ...]) -> Products | None:
        """Build the new products of a program; None where they do not pay."""
        assert self.strategy.prepares is not None
        products = self.strategy.prepares(program, parts, self.target.vector_lanes(4))
        return products if products.pays(self.target) else None

    def convert(self, weights: Constant) -> tuple[Constant, ...] | str:
        """Convert a constant to the weights of the new program, w first; or return the reason against."""
        assert self.strategy.prepares is not None
        return self.strategy.prepares.convert(weights)


def word_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights in integers where bfloat16 is precise enough and additions are free."""
    return _take(_in_int16(module, context), module, context)


def inner_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights by Winograd's inner product where additions are free."""
    return _take(_in_float32(module, context), module, context)


def _in_int16(module: IRModule, context: PassContext) -> WeightStrategy | None:
    """Return the strategy in integers; None: it does not pay on the target, or rounding is not allowed."""
    target, precision = context.target, Precision(context.precision)
    if WINOGRAD_INT16.lacking(target, precision) is None:
        return WeightStrategy("word_products", WINOGRAD_INT16, target, precision, "it is faster than in bfloat16")
    relaxed = [name for name, function in module.functions().items() if function.attrs.get(RELAXED_PRECISION)]
    precision = replace(precision, is_relaxed=True)
    if not relaxed or WINOGRAD_INT16_KEPT.lacking(target, precision) is not None:
        return None
    reason = "the function may round, and it is faster than in floats"
    return WeightStrategy("word_products", WINOGRAD_INT16_KEPT, target, precision, reason, relaxed)


def _in_float32(module: IRModule, context: PassContext) -> WeightStrategy | None:
    """Return the strategy in float32; None: it does not pay on the target, or the module must be batch invariant."""
    target, precision = context.target, Precision(context.precision)
    if WINOGRAD_FLOAT32.lacking(target, precision) is not None or module.attrs.get(BATCH_INVARIANT):
        return None
    reason = "additions take no time beside multiply-adds"
    return WeightStrategy("inner_products", WINOGRAD_FLOAT32, target, precision, reason)


# Questions of fusion


class ProductStrategies:
    """The weight strategies of a module, in order of preference."""

    def __init__(self, module: IRModule, context: PassContext) -> None:
        self._all = [s for s in (_in_int16(module, context), _in_float32(module, context)) if s is not None]

    def of(self, function: str) -> Sequence[WeightStrategy]:
        """Return the strategies that apply to products of the function `function`."""
        return [strategy for strategy in self._all if strategy.is_for(function)]


def strategy_for(sites: Sequence[CallSite], strategies: Sequence[WeightStrategy]) -> WeightStrategy | None:
    """Return the first strategy that all calls may take, judged without reading their weights; None: there is none."""

    def would_take(strategy: WeightStrategy, site: CallSite) -> bool:
        products = _find(site.program, strategy)
        return products is not None and _are_constants(products.parts, site)

    return next((s for s in strategies if all(would_take(s, site) for site in sites)), None)


def strategies_fit_for(site: CallSite, strategies: Sequence[WeightStrategy]) -> tuple[str, ...]:
    """Return the names of the strategies that the products of a call may take, if these are many enough to pay."""
    parts_of = {strategy.name: _parts(site.program, strategy) for strategy in strategies}
    return tuple(name for name, parts in parts_of.items() if parts is not None and _are_constants(parts, site))


def _are_constants(parts: Sequence[Product], site: CallSite) -> bool:
    """Whether a call passes constants for all weights of the products `parts`."""
    passed = dict(zip(site.program.inputs, site.call.args, strict=False))
    return all(isinstance(passed[buffer], Constant) for part in parts for buffer in part.stored)


# Rewriting


def _take(strategy: WeightStrategy | None, module: IRModule, context: PassContext) -> IRModule:
    """Apply a strategy to the products with constant weights of a module, where it may be taken.

    A program that other calls still need is kept beside the new one. Every choice is recorded as a decision.
    """
    if strategy is None:
        return module
    names, programs = [name for name in module.functions() if strategy.is_for(name)], module.programs()
    calls = program_calls(module, names)
    called = [name for name in dict.fromkeys(call.callee.name for call in calls) if name in programs]
    products_of = {name: products for name in called if (products := _find(programs[name], strategy)) is not None}
    uses = [(call, _uses(call, products_of[call.callee.name])) for call in calls if call.callee.name in products_of]
    weights_of = _convert_weights(
        strategy, {use.key: use for _, call_uses in uses for use in call_uses}, _readers(module)
    )
    refusals = {
        id(call): (call.callee.name, problem)
        for call, call_uses in uses
        if (problem := next((text for use in call_uses if isinstance(text := weights_of[use.key], str)), None))
        is not None
    }
    taken = {id(call): call.callee.name for call, _ in uses if id(call) not in refusals}
    for name, problem in dict.fromkeys(refusals.values()):
        context.decide(strategy.name, name, False, problem)
    for name in dict.fromkeys(taken.values()):
        context.decide(strategy.name, name, True, strategy.reason)
    needed = {call.callee.name for call in program_calls(module) if id(call) not in taken}
    new_names = {name: _unused(name, module) if name in needed else name for name in taken.values()}
    new_programs = {new: products_of[name].program() for name, new in new_names.items()}
    definitions: dict[str, Definition] = {
        new: _inheriting(p) if strategy.keeps else p for new, p in new_programs.items()
    }
    weights = {key: constants for key, constants in weights_of.items() if not isinstance(constants, str)}
    passing = _PassWeights(products_of, new_names, weights)
    definitions |= {name: passing.function(module.functions()[name]) for name in names}
    return module.updated(definitions)


def _convert_weights(
    strategy: WeightStrategy, uses: Mapping[Key, _Use], readers: Mapping[int, set[tuple[str, int]]]
) -> dict[Key, tuple[Constant, ...] | str]:
    """Return the new weights, or the reason against them, for each distinct use of weights."""
    weights_of: dict[Key, tuple[Constant, ...] | str] = {
        key: problem for key, use in uses.items() if (problem := use.problem(readers)) is not None
    }
    fit = {key: use for key, use in uses.items() if key not in weights_of}
    with ThreadPoolExecutor(compile_threads(), "relaxlite-weights") as pool:  # starts threads on demand
        results = pool.map(lambda use: use.convert(strategy), fit.values())
        for (key, use), result in zip(fit.items(), results, strict=True):
            weights_of[key] = f"{use.part.stored[0].name} {result}" if isinstance(result, str) else result
    return weights_of


def _inheriting(program: TensorProgram) -> TensorProgram:
    """Mark a program whose weights are packed as other readers need."""
    return replace(program, attrs=Attrs({**program.attrs, INHERITS_LAYOUT: True}))


def _unused(name: str, module: IRModule) -> str:
    """Return an unused name for a variant of a program."""
    return next(new for k in count() if (new := f"{name}_other{k or ''}") not in module)


Key: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """The arguments that a call passes as the weights of one product."""

    part: Product
    args: tuple[Expr, ...]

    @property
    def key(self) -> Key:
        """Identity of the weights: ids of the constants, and of the product that dequantizes them where they are
        kept."""
        ids = (id(arg.value) for arg in self.args if isinstance(arg, Constant))
        return (id(self.part) if self.part.is_kept else 0, *ids)

    def problem(self, readers: Mapping[int, set[tuple[str, int]]]) -> str | None:
        """Return why the weights cannot be converted; None: they may be."""
        for buffer, arg in zip(self.part.stored, self.args, strict=True):
            if not isinstance(arg, Constant):
                return f"{buffer.name} is no constant"
            if self.part.is_kept or arg.value.nbytes < SHARED_BYTES:
                continue
            if len(readers[id(arg.value)]) > 1:
                return f"{buffer.name} is read elsewhere, too, and stays one copy as it is"
        return None

    def convert(self, strategy: WeightStrategy) -> tuple[Constant, ...] | str:
        """Return the new weights: all, or without w where the stored weights are kept; or the reason against.

        Kept weights are dequantized and checked in parts of their columns, each of which must pass.
        """
        constants = [arg for arg in self.args if isinstance(arg, Constant)]
        if not self.part.is_kept:
            return strategy.convert(*constants)
        arrays, columns = [constant.value for constant in constants], int(self.part.column.extent)
        columns_per_part, result = max(1, AT_A_TIME // int(self.part.step.extent)), list[tuple[Array, ...]]()
        for start in range(0, columns, columns_per_part):
            weights = strategy.convert(
                Constant.of(self.part.floats(arrays, start, min(start + columns_per_part, columns)))
            )
            if isinstance(weights, str):
                return weights
            result.append(tuple(constant.value for constant in weights[1:]))
        return tuple(Constant.of(np.concatenate(parts)) for parts in zip(*result, strict=True))


def _uses(call: Call, products: Products) -> list[_Use]:
    parts = zip(products.parts, products.stored, strict=True)
    return [_Use(part, tuple(call.args[k] for k in places)) for part, places in parts]


def _readers(module: IRModule) -> dict[int, set[tuple[str, int]]]:
    """Map the id of each constant's value to the (program, input) pairs that read it."""
    readers: dict[int, set[tuple[str, int]]] = {}
    for call in program_calls(module):
        for place, arg in enumerate(call.args):
            if isinstance(arg, Constant):
                readers.setdefault(id(arg.value), set()).add((call.callee.name, place))
    return readers


def _find(program: TensorProgram, strategy: WeightStrategy) -> Products | None:
    """Match a program as products of one matrix by weights and build the new products; None: no match, or no gain."""
    parts = _parts(program, strategy)
    products = strategy.make(program, parts) if parts is not None else None
    if parts is None or products is None:
        return None
    _, most_rows = _ANALYZER.bounds(product(parts[0].dims))
    return products if most_rows is None or most_rows >= products.least_rows else None


def _parts(program: TensorProgram, strategy: WeightStrategy) -> tuple[Product, ...] | None:
    """Match a program that consists of products of one matrix by weights; None: no match, or one is not fit."""
    if program.attrs.get(SCHEDULED):
        return None
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    products = [_product_of(stage, program, keeps=strategy.keeps) for stage in stages]
    fit_products = [each for each in products if each is not None and strategy.is_fit(each)]
    if not fit_products or len(fit_products) < len(products):
        return None
    first, weights = fit_products[0], {buffer for each in fit_products for buffer in each.stored}
    reads = [load for load in loads(program.body) if load.buffer in weights]
    own = [part for each in fit_products for part in walk_values(each.w) if isinstance(part, Load)]
    is_shared = sum(len(each.stored) for each in fit_products) > len(weights) or len(reads) > len(own)
    return None if is_shared or not all(each.reads_like(first) for each in fit_products) else tuple(fit_products)


def _product_of(stage: Stmt, program: TensorProgram, *, keeps: bool) -> Product | None:
    block = reduction_block(stage)
    if block is None or block.is_pair or len(block.spatial) < 2 or clamped_indices(stage):
        return None
    update, reduced = block.update, perfect_nest(block.stmts[1]).loops
    init, value = block.stmts[0], update.value
    if len(reduced) != 1 or not isinstance(value, Binary) or value.op != "mul" or update.combine != "add":
        return None
    if not isinstance(init, Store) or not isinstance(init.value, Literal) or init.value.value != 0:
        return None
    column = block.spatial[-1]
    for x, w in ((value.a, value.b), (value.b, value.a)):
        if not isinstance(x, Load) or {x.dtype, w.dtype} != {"float32"} or x.buffer not in program.inputs:
            continue
        if _is_matrix(w, reduced[0], column, program):
            where = {v for index in x.indices[:-1] for v in index.free_vars()}
            is_row = x.indices[-1] is reduced[0].var and x.buffer.shape[-1] is reduced[0].extent
            if is_row and where.isdisjoint((reduced[0].var, column.var)):
                return Product(stage, block, x, w, is_kept=keeps or not isinstance(w, Load))
    return None


def _is_matrix(w: Value, step: For, column: For, program: TensorProgram) -> bool:
    """Whether w is a whole matrix w[k, j] of an input, or 1x1 filters w[0, 0, k, j], or dequantizes such weights."""
    if not isinstance(w, Load):
        return _is_widened_matrix(w, step, column, program)
    if len(w.indices) < 2 or w.buffer not in program.inputs:
        return False
    *ones, depth, columns = w.buffer.shape
    is_pixel = all(as_int(d) == 1 for d in ones) and all(as_int(i) == 0 for i in w.indices[:-2])
    is_whole = depth is step.extent and columns is column.extent and depth.is_const and columns.is_const
    return is_pixel and is_whole and w.indices[-2:] == (step.var, column.var)


def _is_widened_matrix(w: Value, step: For, column: For, program: TensorProgram) -> bool:
    """Whether an operand is computed from inputs indexed by the step and, in their last dimension, the column."""
    if not (step.extent.is_const and column.extent.is_const) or not all(
        isinstance(v, EVALUABLE_NODES) for v in walk_values(w)
    ):
        return False
    indices = [part.index for part in walk_values(w) if isinstance(part, IndexValue)]
    for load in (part for part in walk_values(w) if isinstance(part, Load)):
        is_of_column = load.indices[-1:] == (column.var,)
        indices += load.indices[:-1] if is_of_column else load.indices
        if load.buffer not in program.inputs or (is_of_column and load.buffer.shape[-1] is not column.extent):
            return False
    return symbols_of(w) == {step.var, column.var} and all(set(i.free_vars()) <= {step.var} for i in indices)


class _PassWeights(Rewriter):
    """Redirects calls to the new programs, with the new weights."""

    def __init__(
        self,
        products_of: Mapping[str, Products],
        names: Mapping[str, str],
        weights_of: Mapping[Key, tuple[Constant, ...]],
    ) -> None:
        super().__init__()
        self._products_of, self._names, self._weights_of = products_of, names, weights_of

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        products = self._products_of.get(value.callee.name)
        if products is None:
            return None
        weights_of_parts = [self._weights_of.get(use.key) for use in _uses(value, products)]
        args, extra_args = list(value.args), list[Constant]()
        for part, places, weights in zip(products.parts, products.stored, weights_of_parts, strict=True):
            if weights is None:
                return None
            first, *rest = weights
            if part.is_kept:
                rest = [first, *rest]
            else:
                args[places[0]] = first
            extra_args += rest
        inputs = len(products.whole.inputs)
        callee = GlobalVar(self._names[value.callee.name])
        return replace(value, callee=callee, args=(*args[:inputs], *extra_args, *args[inputs:]))
