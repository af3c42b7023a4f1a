"""Programs of products with constant weights: finding them, and computing them in two ways (two_ways.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from relaxlite.config import compile_threads
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Array, Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Binary, Check, For, IndexValue, Literal, Load, Stmt, Store, TensorProgram, Value
from relaxlite.ir.program_visitor import loads, walk_values
from relaxlite.ir.symbolic import as_int, product
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.passes.constant_values import PARTS
from relaxlite.passes.loop_pattern import perfect_nest, top_stages
from relaxlite.passes.manager import PassContext
from relaxlite.passes.pack_constants import SHARED_BYTES
from relaxlite.passes.prologue import symbols_of
from relaxlite.passes.schedule_reduction import reduction_block
from relaxlite.passes.specialize import clamped_loops
from relaxlite.passes.two_ways import Product, Products
from relaxlite.records import dataclass

_ANALYZER = Analyzer()
AT_A_TIME = 1 << 24  # of widened weights that are looked at: 64 MB


@dataclass(frozen=True, slots=True)
class Way:
    """Another way to compute products, of a pass of this name.

    `make`: a program and its products, or None where it is not worth it. `weights`: those of the new program in place
    of a constant, w first, or why it is none for this. `reason`: why products take it.
    """

    name: str
    make: Callable[[TensorProgram, tuple[Product, ...]], Products | None]
    weights: Callable[[Constant], tuple[Constant, ...] | str]
    reason: str


def take(way: Way, module: IRModule, context: PassContext) -> IRModule:
    """The module whose products with constant weights go this way, too, where they may."""
    programs = module.programs().items()
    found = {name: them for name, p in programs if (them := _find(p, way)) is not None}
    uses, readers = _uses(module, found), _readers(module)
    fit: dict[Key, _Use] = {}
    problems: dict[str, str] = {}
    for use in uses:
        if (problem := use.problem(readers)) is not None:
            problems.setdefault(use.program, problem)
        elif use.program not in problems:
            fit[use.key] = use
    with ThreadPoolExecutor(compile_threads(), "relaxlite-weights") as pool:  # starts no more threads than it needs
        results = pool.map(lambda use: use.made(way), fit.values())
        programs_made = {name: products.program() for name, products in found.items() if name not in problems}
        made_of = dict(zip(fit, results, strict=True))
    for use in uses:
        if isinstance(problem := made_of.get(use.key), str):
            problems.setdefault(use.program, f"{use.part.stored[0].name} {problem}")
    for name in found:
        context.decide(way.name, name, name not in problems, problems.get(name, way.reason))
    definitions: dict[str, Definition] = {name: programs_made[name] for name in found if name not in problems}
    weights = {key: each for key, each in made_of.items() if not isinstance(each, str)}
    passing = _PassWeights({name: found[name] for name in definitions}, weights)
    definitions |= {name: passing.function(function) for name, function in module.functions().items()}
    return module.updated(definitions)


Key: TypeAlias = "tuple[int, ...]"


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """What a call passes as the weights of a part of a program."""

    program: str
    part: Product
    args: tuple[Expr, ...]

    @property
    def key(self) -> Key:
        """The same for the same weights: the constants' identities, and what widens them."""
        ids = (id(arg.value) for arg in self.args if isinstance(arg, Constant))
        return (id(self.part) if self.part.is_widened else 0, *ids)

    def problem(self, readers: Mapping[int, set[tuple[str, int]]]) -> str | None:
        """Why these are no weights to be replaced, or of which more is to be known."""
        for buffer, arg in zip(self.part.stored, self.args, strict=True):
            if not isinstance(arg, Constant):
                return f"{buffer.name} is no constant"
            if self.part.is_widened or arg.value.nbytes < SHARED_BYTES:
                continue
            if len(readers[id(arg.value)]) > 1:
                return f"{buffer.name} is read elsewhere, too, and stays one copy as it is"
        return None

    def made(self, way: Way) -> tuple[Constant, ...] | str:
        """What is passed in place of the weights and beside them, or only beside them where they are widened. Of those,
        each part of the columns that is looked at has to be fit."""
        constants = [arg for arg in self.args if isinstance(arg, Constant)]
        if not self.part.is_widened:
            return way.weights(*constants)
        arrays, columns = [constant.value for constant in constants], int(self.part.column.extent)
        some, found = max(1, AT_A_TIME // int(self.part.step.extent)), list[tuple[Array, ...]]()
        for start in range(0, columns, some):
            made = way.weights(Constant.of(self.part.floats(arrays, start, min(start + some, columns))))
            if isinstance(made, str):
                return made
            found.append(tuple(constant.value for constant in made[1:]))
        return tuple(Constant.of(np.concatenate(parts)) for parts in zip(*found, strict=True))


def would_take(way: Way, program: TensorProgram, args: Sequence[Expr]) -> bool:
    """Whether the products of a call may go this way, as far as that shows without a look at the weights."""
    products = _find(program, way)
    return products is not None and all(isinstance(args[k], Constant) for part in products.stored for k in part)


def _uses(module: IRModule, found: Mapping[str, Products]) -> list[_Use]:
    calls = [(call, found[call.callee.name]) for call in program_calls(module) if call.callee.name in found]
    return [
        _Use(call.callee.name, part, tuple(call.args[k] for k in places))
        for call, products in calls
        for part, places in zip(products.parts, products.stored, strict=True)
    ]


def _readers(module: IRModule) -> dict[int, set[tuple[str, int]]]:
    """By the id of each constant's value, the programs that read it, and as which of their inputs."""
    readers: dict[int, set[tuple[str, int]]] = {}
    for call in program_calls(module):
        for place, arg in enumerate(call.args):
            if isinstance(arg, Constant):
                readers.setdefault(id(arg.value), set()).add((call.callee.name, place))
    return readers


def _find(program: TensorProgram, way: Way) -> Products | None:
    """The program as products of one matrix with weights; None: it is something else, or not worth it."""
    if program.attrs.get("scheduled"):
        return None
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    made = [_product_of(stage, program) for stage in stages]
    found = [each for each in made if each is not None]
    if not found or len(found) < len(made):
        return None
    first, weights = found[0], {buffer for each in found for buffer in each.stored}
    reads = [load for load in loads(program.body) if load.buffer in weights]
    own = [part for each in found for part in walk_values(each.w) if isinstance(part, Load)]
    is_shared = sum(len(each.stored) for each in found) > len(weights) or len(reads) > len(own)
    if is_shared or not all(each.reads_like(first) for each in found):
        return None
    products = way.make(program, tuple(found))
    _, most_rows = _ANALYZER.bounds(product(first.dims))
    return products if products is None or most_rows is None or most_rows >= products.least_rows else None


def _product_of(stage: Stmt, program: TensorProgram) -> Product | None:
    block = reduction_block(stage)
    if block is None or block.is_pair or len(block.spatial) < 2 or clamped_loops(stage):
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
                return Product(stage, block, x, w)
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
    if not (step.extent.is_const and column.extent.is_const) or not all(isinstance(v, PARTS) for v in walk_values(w)):
        return False
    indices = [part.index for part in walk_values(w) if isinstance(part, IndexValue)]
    for load in (part for part in walk_values(w) if isinstance(part, Load)):
        is_of_column = load.indices[-1:] == (column.var,)
        indices += load.indices[:-1] if is_of_column else load.indices
        if load.buffer not in program.inputs or (is_of_column and load.buffer.shape[-1] is not column.extent):
            return False
    return symbols_of(w) == {step.var, column.var} and all(set(i.free_vars()) <= {step.var} for i in indices)


class _PassWeights(Rewriter):
    """Passes the new weights."""

    def __init__(self, found: Mapping[str, Products], made: Mapping[Key, tuple[Constant, ...]]) -> None:
        super().__init__()
        self._found, self._made = found, made

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        products = self._found.get(value.callee.name)
        if products is None:
            return None
        args, beside = list(value.args), list[Constant]()
        for part, places in zip(products.parts, products.stored, strict=True):
            made = list(self._made[_Use(value.callee.name, part, tuple(args[k] for k in places)).key])
            if not part.is_widened:
                args[places[0]] = made.pop(0)
            beside += made
        inputs = len(products.whole.inputs)
        return replace(value, args=(*args[:inputs], *beside, *args[inputs:]))
