"""Winograd's inner product for matrices times constant weights, where additions cost nothing beside multiply-adds.

Two terms of a sum take one multiplication and two additions of an operand and a weight,

    x1*w1 + x2*w2 = (x1 + w2)*(x2 + w1) - x1*x2 - w1*w2

for x1*x2, summed up, is one number of a row, and w1*w2 one of a column (Winograd, "A New Algorithm for Inner Product",
IEEE Transactions on Computers, 1968). That is no gain where one unit does both; but some processors have adders beside
their multiply-adders. There, of three terms two are computed like this and the third as ever. So that the products that
are too much do not add up, every other pair adds their opposites,

    x4*w4 + x5*w5 = x4*x5 + w4*w5 - (w5 - x4)*(w4 - x5)

and a step of six terms is

    e += (w2 + x1)*(w1 + x2);  e += x3*w3;  e -= (w5 - x4)*(w4 - x5);  e += x6*w6

four multiply-adds and four additions, in the time of four for six. That is 1.5 times the peak of multiply-adds alone
(measured on a Zen 4: 1.45 times, and 1.3 to 1.4 for whole products).

**Rounding.** x and w have to be of like size, or the smaller is lost in the sums: rows and columns are multiplied by
powers of two that give them lengths (2-norms) near 1, which is exact. The error is then within the bound of an ordinary
sum of products up to a small factor, eps * |x| * |w| (Brent, "Error Analysis of Algorithms for Matrix Multiplication
and Triangular Decomposition using Winograd's Identity", 1970). Measured, its root mean square is 0.95 to 1.35 times
that of an ordinary product, with x of both signs, of one, with zeros and with outliers; without the opposites it is 7
times that where x is positive. Each row's result depends on that row alone. Weights are left alone where an ordinary
product would be much more exact than that bound: where some columns are mostly zeros, as those of a selection, or most
have few large weights. So are large ones that other programs read as well, which would need a second copy.

**Rows that have no such length**, for they hold an infinity or NaN or numbers out of all proportion: one of them, and
the ordinary product of all rows is computed, as it is for few rows. Rows and columns of zeros give zeros.

    for i: { scale[i], shift[i] = ...; balanced[i, :] = x[i, :] / scale[i] }      one pass over x
    if all rows have a length:
        for i, j: { for t: e += the step of balanced[i, 6*t .. 6*t + 5] and w[6*t .. 6*t + 5, j];
                    out[i, j] = f(((e - offset[j]) * scale[i] + shift[i]) * width[j]) }
    else:
        for i, j: { e = sum of x[i, k] * w[k, j];  out[i, j] = f(e * width[j]) }

Here it is decided which products are computed so; balanced_weights.py looks at weights and makes those of the new
program, inner_product_loops.py makes the program.
"""

from __future__ import annotations

from collections.abc import Mapping
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
from relaxlite.passes.balanced_weights import balanced
from relaxlite.passes.inner_product_loops import Product, Products
from relaxlite.passes.loop_pattern import perfect_nest, top_stages
from relaxlite.passes.manager import PassContext
from relaxlite.passes.pack_constants import SHARED_BYTES
from relaxlite.passes.schedule_reduction import reduction_block
from relaxlite.passes.specialize import clamped_loops

LEAST_COLUMNS = 64  # over which the pass over x is spread
LEAST_DEPTH = 96  # terms of a sum
_REASON = "additions take no time beside multiply-adds"

_ANALYZER = Analyzer()


def inner_products(module: IRModule, context: PassContext) -> IRModule:
    """Compute products with constant weights by fewer multiplications, where additions are free."""
    if not context.target.adds_beside_products:
        return module
    programs = module.programs().items()
    found = {name: them for name, p in programs if (them := _find(p, context.target.vector_lanes(4))) is not None}
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
    with ThreadPoolExecutor(compile_threads(), "relaxlite-balance") as pool:  # starts no more threads than it needs
        results = pool.map(balanced, fit.values())
        made = {name: products.program() for name, products in found.items() if name not in problems}  # meanwhile
        balances = dict(zip(fit, results, strict=True))
    for name, operand, arg in operands:
        if isinstance(arg, Constant) and isinstance(problem := balances.get(id(arg.value)), str):
            problems.setdefault(name, f"{operand} {problem}")
    for name in found:
        context.decide("inner_products", name, name not in problems, problems.get(name, _REASON))
    definitions: dict[str, Definition] = {name: made[name] for name in found if name not in problems}
    weights = {key: balance for key, balance in balances.items() if not isinstance(balance, str)}
    passing = _PassWeights({name: found[name] for name in definitions}, weights)
    definitions |= {name: passing.function(function) for name, function in module.functions().items()}
    return module.updated(definitions)


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


def _find(program: TensorProgram, lanes: int) -> Products | None:
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
    columns = sum(as_int(each.column.extent) or 0 for each in found)
    _, most_rows = _ANALYZER.bounds(product(first.dims))
    products = Products(program, tuple(found), lanes)
    if columns < LEAST_COLUMNS or products.depth < LEAST_DEPTH:
        return None
    return products if most_rows is None or most_rows >= products.least_rows else None


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
    """Passes balanced weights."""

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
