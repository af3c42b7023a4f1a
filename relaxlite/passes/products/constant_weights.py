"""Programs of products with constant weights: finding them, and computing them in two ways (prepared_rows.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from typing import TypeAlias

import numpy as np

from relaxlite.config import compile_threads
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.attributes import INHERITS_LAYOUT, SCHEDULED
from relaxlite.ir.expr import Array, Attrs, Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Binary, Check, For, IndexValue, Literal, Load, Stmt, Store, TensorProgram, Value
from relaxlite.ir.program_visitor import loads, walk_values
from relaxlite.ir.symbolic import as_int, product
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.constant_values import EVALUABLE_NODES
from relaxlite.passes.loops.pattern import perfect_nest, top_stages
from relaxlite.passes.loops.versioning import clamped_indices
from relaxlite.passes.products.pack_constants import SHARED_BYTES
from relaxlite.passes.products.prepared_rows import Product, Products
from relaxlite.passes.products.prologue import symbols_of
from relaxlite.passes.products.reduction import reduction_block
from relaxlite.records import dataclass

_ANALYZER = Analyzer()
AT_A_TIME = 1 << 24  # of widened weights that are looked at: 64 MB


@dataclass(frozen=True, slots=True)
class WeightStrategy:
    """Another way to compute products, of a pass of this name.

    `is_fit`: whether a product may be one of them. `make`: a program and its products, or None where all of them are
    not worth it. `weights`: those of the new program in place of a constant, w first, or why it is none for this.
    `reason`: why products take it. `functions`: whose products do; None: of all. `keeps`: weights stay as they are
    stored, where that is as floats, too, and are packed as others want.
    """

    name: str
    is_fit: Callable[[Product], bool]
    make: Callable[[TensorProgram, tuple[Product, ...]], Products | None]
    weights: Callable[[Constant], tuple[Constant, ...] | str]
    reason: str
    functions: Collection[str] | None = None
    keeps: bool = False

    def is_for(self, function: str) -> bool:
        return self.functions is None or function in self.functions


def take(way: WeightStrategy, module: IRModule, context: PassContext) -> IRModule:
    """The module whose products with constant weights go this way, too, where they may. A program that other calls
    still need stays beside the new one."""
    names, programs = [name for name in module.functions() if way.is_for(name)], module.programs()
    calls = program_calls(module, names)
    called = [name for name in dict.fromkeys(call.callee.name for call in calls) if name in programs]
    thems = {name: them for name in called if (them := _find(programs[name], way)) is not None}
    uses = [(call, _uses(call, thems[call.callee.name])) for call in calls if call.callee.name in thems]
    result = _made(way, {use.key: use for _, them in uses for use in them}, _readers(module))
    problems = {
        id(call): (call.callee.name, problem)
        for call, them in uses
        if (problem := next((text for use in them if isinstance(text := result[use.key], str)), None)) is not None
    }
    taken = {id(call): call.callee.name for call, _ in uses if id(call) not in problems}
    for name, problem in dict.fromkeys(problems.values()):
        context.decide(way.name, name, False, problem)
    for name in dict.fromkeys(taken.values()):
        context.decide(way.name, name, True, way.reason)
    needed = {call.callee.name for call in program_calls(module) if id(call) not in taken}
    new_names = {name: _unused(name, module) if name in needed else name for name in taken.values()}
    made_of = {new: thems[name].program() for name, new in new_names.items()}
    definitions: dict[str, Definition] = {new: _inheriting(p) if way.keeps else p for new, p in made_of.items()}
    weights = {key: each for key, each in result.items() if not isinstance(each, str)}
    passing = _PassWeights(thems, new_names, weights)
    definitions |= {name: passing.function(module.functions()[name]) for name in names}
    return module.updated(definitions)


def _made(
    way: WeightStrategy, uses: Mapping[Key, _Use], readers: Mapping[int, set[tuple[str, int]]]
) -> dict[Key, tuple[Constant, ...] | str]:
    """What the new programs take of each weight, or why it is none for them."""
    problems: dict[Key, tuple[Constant, ...] | str] = {
        key: problem for key, use in uses.items() if (problem := use.problem(readers)) is not None
    }
    fit = {key: use for key, use in uses.items() if key not in problems}
    with ThreadPoolExecutor(compile_threads(), "relaxlite-weights") as pool:  # starts no more threads than it needs
        results = pool.map(lambda use: use.made(way), fit.values())
        for (key, use), result in zip(fit.items(), results, strict=True):
            problems[key] = f"{use.part.stored[0].name} {result}" if isinstance(result, str) else result
    return problems


def _inheriting(program: TensorProgram) -> TensorProgram:
    """Of weights that others read, too."""
    return replace(program, attrs=Attrs({**program.attrs, INHERITS_LAYOUT: True}))


def _unused(name: str, module: IRModule) -> str:
    """A name for another form of a program."""
    return next(new for k in count() if (new := f"{name}_other{k or ''}") not in module)


Key: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """What a call passes as the weights of a part of a program."""

    part: Product
    args: tuple[Expr, ...]

    @property
    def key(self) -> Key:
        """The same for the same weights: the constants' identities, and what widens them where they are kept."""
        ids = (id(arg.value) for arg in self.args if isinstance(arg, Constant))
        return (id(self.part) if self.part.is_kept else 0, *ids)

    def problem(self, readers: Mapping[int, set[tuple[str, int]]]) -> str | None:
        """Why these are no weights to be replaced, or of which more is to be known."""
        for buffer, arg in zip(self.part.stored, self.args, strict=True):
            if not isinstance(arg, Constant):
                return f"{buffer.name} is no constant"
            if self.part.is_kept or arg.value.nbytes < SHARED_BYTES:
                continue
            if len(readers[id(arg.value)]) > 1:
                return f"{buffer.name} is read elsewhere, too, and stays one copy as it is"
        return None

    def made(self, way: WeightStrategy) -> tuple[Constant, ...] | str:
        """What is passed in place of the weights and beside them, or only beside them where they are kept. Of those,
        each part of the columns that is looked at has to be fit."""
        constants = [arg for arg in self.args if isinstance(arg, Constant)]
        if not self.part.is_kept:
            return way.weights(*constants)
        arrays, columns = [constant.value for constant in constants], int(self.part.column.extent)
        some, result = max(1, AT_A_TIME // int(self.part.step.extent)), list[tuple[Array, ...]]()
        for start in range(0, columns, some):
            made = way.weights(Constant.of(self.part.floats(arrays, start, min(start + some, columns))))
            if isinstance(made, str):
                return made
            result.append(tuple(constant.value for constant in made[1:]))
        return tuple(Constant.of(np.concatenate(parts)) for parts in zip(*result, strict=True))


def would_take(way: WeightStrategy, program: TensorProgram, args: Sequence[Expr]) -> bool:
    """Whether the products of a call may go this way, as far as that shows without a look at the weights."""
    products = _find(program, way)
    return products is not None and _are_constants(products.parts, program, args)


def is_fit(way: WeightStrategy, program: TensorProgram, args: Sequence[Expr]) -> bool:
    """Whether the products of a call may go this way if there are enough of them."""
    parts = _parts(program, way)
    return parts is not None and _are_constants(parts, program, args)


def _are_constants(parts: Sequence[Product], program: TensorProgram, args: Sequence[Expr]) -> bool:
    """Whether these are all of the weights that a call passes."""
    passed = dict(zip(program.inputs, args, strict=False))
    return all(isinstance(passed[buffer], Constant) for part in parts for buffer in part.stored)


def _uses(call: Call, products: Products) -> list[_Use]:
    parts = zip(products.parts, products.stored, strict=True)
    return [_Use(part, tuple(call.args[k] for k in places)) for part, places in parts]


def _readers(module: IRModule) -> dict[int, set[tuple[str, int]]]:
    """By the id of each constant's value, the programs that read it, and as which of their inputs."""
    readers: dict[int, set[tuple[str, int]]] = {}
    for call in program_calls(module):
        for place, arg in enumerate(call.args):
            if isinstance(arg, Constant):
                readers.setdefault(id(arg.value), set()).add((call.callee.name, place))
    return readers


def _find(program: TensorProgram, way: WeightStrategy) -> Products | None:
    """The program as products of one matrix with weights; None: it is something else, or not worth it."""
    parts = _parts(program, way)
    products = way.make(program, parts) if parts is not None else None
    if parts is None or products is None:
        return None
    _, most_rows = _ANALYZER.bounds(product(parts[0].dims))
    return products if most_rows is None or most_rows >= products.least_rows else None


def _parts(program: TensorProgram, way: WeightStrategy) -> tuple[Product, ...] | None:
    """The products of which the program consists, of one matrix with weights; None: it is something else, or they are
    not fit."""
    if program.attrs.get(SCHEDULED):
        return None
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    products = [_product_of(stage, program, keeps=way.keeps) for stage in stages]
    eaches = [each for each in products if each is not None and way.is_fit(each)]
    if not eaches or len(eaches) < len(products):
        return None
    first, weights = eaches[0], {buffer for each in eaches for buffer in each.stored}
    reads = [load for load in loads(program.body) if load.buffer in weights]
    own = [part for each in eaches for part in walk_values(each.w) if isinstance(part, Load)]
    is_shared = sum(len(each.stored) for each in eaches) > len(weights) or len(reads) > len(own)
    return None if is_shared or not all(each.reads_like(first) for each in eaches) else tuple(eaches)


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
    """Whether these are all of the weights of a matrix, or of filters of one pixel: w[0, 0, k, j]; or what widens such
    weights."""
    if not isinstance(w, Load):
        return _is_widened_matrix(w, step, column, program)
    if len(w.indices) < 2 or w.buffer not in program.inputs:
        return False
    *ones, depth, columns = w.buffer.shape
    is_pixel = all(as_int(d) == 1 for d in ones) and all(as_int(i) == 0 for i in w.indices[:-2])
    is_whole = depth is step.extent and columns is column.extent and depth.is_const and columns.is_const
    return is_pixel and is_whole and w.indices[-2:] == (step.var, column.var)


def _is_widened_matrix(w: Value, step: For, column: For, program: TensorProgram) -> bool:
    """Whether an operand is computed from inputs, of a step and, in their last dimension, a column."""
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
    """Passes the new weights to the new programs."""

    def __init__(
        self, found: Mapping[str, Products], names: Mapping[str, str], made: Mapping[Key, tuple[Constant, ...]]
    ) -> None:
        super().__init__()
        self._found, self._names, self._made = found, names, made

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        products = self._found.get(value.callee.name)
        if products is None:
            return None
        result = [self._made.get(use.key) for use in _uses(value, products)]
        args, beside = list(value.args), list[Constant]()
        for part, places, weights in zip(products.parts, products.stored, result, strict=True):
            if weights is None:
                return None
            first, *others = weights
            if part.is_kept:
                others = [first, *others]
            else:
                args[places[0]] = first
            beside += others
        inputs = len(products.whole.inputs)
        callee = GlobalVar(self._names[value.callee.name])
        return replace(value, callee=callee, args=(*args[:inputs], *beside, *args[inputs:]))
