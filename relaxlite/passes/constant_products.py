"""Programs of products with constant weights: finding them, and computing them in two ways (two_ways.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from relaxlite.config import compile_threads
from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Call, Constant, Expr, GlobalVar, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Binary, Check, For, Literal, Load, Stmt, Store, TensorProgram
from relaxlite.ir.program_visitor import loads
from relaxlite.ir.symbolic import as_int, product
from relaxlite.ir.visitor import Rewriter, program_calls
from relaxlite.passes.loop_pattern import perfect_nest, top_stages
from relaxlite.passes.manager import PassContext
from relaxlite.passes.pack_constants import SHARED_BYTES
from relaxlite.passes.schedule_reduction import reduction_block
from relaxlite.passes.specialize import clamped_loops
from relaxlite.passes.two_ways import Product, Products
from relaxlite.records import dataclass

_ANALYZER = Analyzer()


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
    operands, readers = _operands(module, found), _readers(module)
    fit: dict[int, Constant] = {}  # by the id of their value
    problems: dict[str, str] = {}
    for name, operand, arg in operands:
        if not isinstance(arg, Constant):
            problems.setdefault(name, f"{operand} is no constant")
        elif arg.value.nbytes >= SHARED_BYTES and len(readers[id(arg.value)]) > 1:
            problems.setdefault(name, f"{operand} is read elsewhere, too, and stays one copy as it is")
        elif name not in problems:
            fit[id(arg.value)] = arg
    with ThreadPoolExecutor(compile_threads(), "relaxlite-weights") as pool:  # starts no more threads than it needs
        results = pool.map(way.weights, fit.values())
        made = {name: products.program() for name, products in found.items() if name not in problems}  # meanwhile
        made_of = dict(zip(fit, results, strict=True))
    for name, operand, arg in operands:
        if isinstance(arg, Constant) and isinstance(problem := made_of.get(id(arg.value)), str):
            problems.setdefault(name, f"{operand} {problem}")
    for name in found:
        context.decide(way.name, name, name not in problems, problems.get(name, way.reason))
    definitions: dict[str, Definition] = {name: made[name] for name in found if name not in problems}
    weights = {key: each for key, each in made_of.items() if not isinstance(each, str)}
    passing = _PassWeights({name: found[name] for name in definitions}, weights)
    definitions |= {name: passing.function(function) for name, function in module.functions().items()}
    return module.updated(definitions)


def would_take(way: Way, program: TensorProgram, args: Sequence[Expr]) -> bool:
    """Whether the products of a call may go this way, as far as that shows without a look at the weights."""
    products = _find(program, way)
    return products is not None and all(isinstance(args[k], Constant) for k in products.weights)


def _operands(module: IRModule, found: Mapping[str, Products]) -> list[tuple[str, str, Expr]]:
    """What calls pass as weights: the name of the program, that of its operand, the argument."""
    calls = [(call, found[call.callee.name]) for call in program_calls(module) if call.callee.name in found]
    return [(c.callee.name, p.whole.inputs[k].name, c.args[k]) for c, p in calls for k in p.weights]


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
    first, weights = found[0], {each.w.buffer for each in found}
    reads = [load.buffer for load in loads(program.body) if load.buffer in weights]
    if not all(each.reads_like(first) for each in found) or len(reads) > len(weights):
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
        if not isinstance(x, Load) or not isinstance(w, Load) or {x.dtype, w.dtype} != {"float32"}:
            return None
        if x.buffer in program.inputs and w.buffer in program.inputs and _is_matrix(w, reduced[0], column):
            where = {v for index in x.indices[:-1] for v in index.free_vars()}
            is_row = x.indices[-1] is reduced[0].var and x.buffer.shape[-1] is reduced[0].extent
            if is_row and where.isdisjoint((reduced[0].var, column.var)):
                return Product(stage, block, x, w)
    return None


def _is_matrix(w: Load, step: For, column: For) -> bool:
    """Whether these are all of the weights of a matrix, or of filters of one pixel: w[0, 0, k, j]."""
    if len(w.indices) < 2:
        return False
    *ones, depth, columns = w.buffer.shape
    is_pixel = all(as_int(d) == 1 for d in ones) and all(as_int(i) == 0 for i in w.indices[:-2])
    is_whole = depth is step.extent and columns is column.extent and depth.is_const and columns.is_const
    return is_pixel and is_whole and w.indices[-2:] == (step.var, column.var)


class _PassWeights(Rewriter):
    """Passes the new weights."""

    def __init__(self, found: Mapping[str, Products], made: Mapping[int, tuple[Constant, ...]]) -> None:
        super().__init__()
        self._found, self._made = found, made

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        products = self._found.get(value.callee.name)
        if products is None:
            return None
        args, beside = list(value.args), list[Constant]()
        for place in products.weights:
            weights = args[place]
            assert isinstance(weights, Constant)
            args[place], *more = self._made[id(weights.value)]
            beside += more
        inputs = len(products.whole.inputs)
        return replace(value, args=(*args[:inputs], *beside, *args[inputs:]))
