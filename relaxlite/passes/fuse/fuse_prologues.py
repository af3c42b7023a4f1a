"""Prologue fusion: matrix products load constants as stored, and dequantize or convert them at the load.

    w = dequantize(q, scale)                      for i, j, k: e += x[i, k] * (float32(q[k, j]) * scale[j])
    for i, j, k: e += x[i, k] * w[k, j]     =>

Here `q` and `scale` are constants, and w is computed from them by a chain of injective programs. The product then moves
the bytes of q instead of the bytes of w; the schedule decides how often an element is dequantized (prologue.py). A
chain with several consumers is fused into each of them, as its operands never change.

A right operand that is a transposed copy (last two dimensions swapped) with one use is replaced by its source
(transposed.py):

    for i, j, k: e += x[i, k] * t[k, j],  t = y.T    =>    for i, j, k: e += x[i, k] * y[j, k]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from relaxlite import dtypes
from relaxlite.ir.attributes import COMPOSITE
from relaxlite.ir.expr import Attrs, Block, Body, Call, Constant, Expr, Function, GlobalVar, Let, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.program import Allocate, Binary, Cast, Load, TensorProgram, Value
from relaxlite.ir.program_visitor import loads, walk_stmts
from relaxlite.ir.symbolic import SymExpr, product
from relaxlite.ir.types import ShapeType, TensorType, type_symbols
from relaxlite.ir.visitor import Rewriter, bodies, expr_symbols, operands
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.fuse_programs import merge_composite
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.pattern import LoopPattern, analyze, injective_store, perfect_nest, reduction_of, top_stages

MAX_CHAIN = 12  # calls between a constant and the product: bounds the inlined code size


def fuse_prologues(module: IRModule, context: PassContext) -> IRModule:
    """Inline dequantization and conversion of constant operands into the matrix products that load them."""
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    changed = False
    for name, function in module.functions().items():
        uses = Counter(v for body in bodies(function) for v in _own_uses(body))
        fused = _FusePrologues(module, table, context, uses).function(function)
        changed = changed or fused is not function
        definitions[name] = fused
    return eliminate_dead(module.updated(definitions)) if changed else module


def _own_uses(body: Body) -> Iterator[Var]:
    """Uses of variables in a body, with repetitions, without uses in nested bodies."""
    for binding in body.bindings():
        value = binding.value if isinstance(binding, Let) else binding.source
        yield from (v for v in (value, *operands(value)) if isinstance(v, Var))
    if isinstance(body.result, Var):
        yield body.result
    yield from (v for v in operands(body.result) if isinstance(v, Var))


class _FusePrologues(Rewriter):
    def __init__(
        self,
        module: IRModule,
        table: ProgramTable,
        context: PassContext,
        uses: Mapping[Var, int],
    ) -> None:
        super().__init__()
        self._module, self._table, self._context = module, table, context
        self._uses = uses
        self._transposed: dict[Var, Call] = {}  # transposed copies with one use
        self._chains: dict[
            Var, tuple[tuple[Var, Call], ...]
        ] = {}  # variables computed from constants alone, with their calls

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        program = self._program(value)
        if program is None:
            return None
        assert isinstance(value, Call)
        constant_chains = [self._chains[a] for a in value.args if isinstance(a, Var) and a in self._chains]
        if value.args and all(isinstance(a, Constant) or a in self._chains for a in value.args):
            self._add_chain(var, value, constant_chains)
            return None
        if self._uses[var] == 1 and _swaps_last(program):
            self._transposed[var] = value
            return None
        has_transposed = any(a in self._transposed for a in value.args)
        if not (constant_chains or has_transposed) or not is_matrix_product(program):
            return None
        columns = _along_columns(program, value)
        transposed = self._transposed_columns(columns, var, value)
        dequantized = [a for a in columns if a in self._chains]
        if not dequantized:
            return self._merge_transposed(transposed, var, value) if transposed else None
        chain = dict(step for a in dequantized for step in self._chains[a])
        stored_bytes = sum((_bytes(a.ty) for a in _constants(chain)), start=product(()) * 0)
        dequantized_bytes = sum((_bytes(a.ty) for a in dequantized), start=product(()) * 0)
        subject = f"{', '.join(v.name for v in chain)} into {var.name}"
        reason = "the product reads the constant as it is stored"
        self._context.decide(
            "fuse_prologues", subject, True, reason, bytes_stored=stored_bytes, bytes_widened=dequantized_bytes
        )
        return self._merge(chain, var, value)

    def _transposed_columns(self, columns: list[Var], var: Var, call: Call) -> dict[Var, Call]:
        """Transposed operands whose columns are the columns of the product.

        The operand of the rows keeps its transposed copy: otherwise each tile of the product would access memory with a
        stride of a row.
        """
        for arg in call.args:
            if isinstance(arg, Var) and arg in self._transposed and arg not in columns:
                subject = f"{arg.name} into {var.name}"
                reason = (
                    "each tile of rows would step through memory; a copy that lies along the sum is read many times"
                )
                self._context.decide("fuse_prologues", subject, False, reason, bytes_copied=2 * _bytes(arg.ty))
        return {a: self._transposed[a] for a in columns if a in self._transposed}

    def _merge_transposed(self, transposed: dict[Var, Call], var: Var, call: Call) -> Call:
        """The product with the sources of transposed operands as operands."""
        copied = sum((2 * _bytes(a.ty) for a in transposed), start=product(()) * 0)
        for copy in transposed:
            reason = "the product reads the operand as it lies, and there is no copy to write and read"
            self._context.decide("fuse_prologues", f"{copy.name} into {var.name}", True, reason, bytes_saved=copied)
        return self._merge(transposed, var, call)

    def _program(self, value: Expr) -> TensorProgram | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        program = self._module.get(value.callee.name)
        return program if isinstance(program, TensorProgram) else None

    def _add_chain(self, var: Var, call: Call, operand_chains: list[tuple[tuple[Var, Call], ...]]) -> None:
        """Record an injective call whose operands are all computed from constants."""
        steps = dict(step for steps in operand_chains for step in steps) | {var: call}
        program = self._program(call)
        if len(steps) <= MAX_CHAIN and program is not None and analyze(program) <= LoopPattern.INJECTIVE:
            self._chains[var] = tuple(steps.items())

    def _merge(self, chain: dict[Var, Call], var: Var, call: Call) -> Call:
        """Call of one program that computes the chain and the product."""
        calls = {**chain, var: call}
        inputs = tuple(dict.fromkeys(a for c in calls.values() for a in c.args if a not in chain))
        symbols: tuple[SymExpr, ...] = tuple(
            dict.fromkeys(s for v, c in calls.items() for s in (*expr_symbols(c), *type_symbols(v.ty)))
        )
        params = {a: Var(a.name if isinstance(a, Var) else f"c{k}", a.ty) for k, a in enumerate(inputs)}
        inside: dict[Expr, Expr] = dict(params)
        bindings = []
        for old, c in calls.items():
            args = tuple(inside[a] for a in c.args)
            inside[old] = Var(old.name, old.ty)
            bindings.append(Let(inside[old], Call(c.callee, args, c.attrs, c.sym_args, c.ty, c.loc)))  # type: ignore[arg-type]
        shape = Var("symbols", ShapeType(symbols, len(symbols)))
        body = Body((Block(tuple(bindings)),), bindings[-1].var)
        program = merge_composite(Function((*params.values(), shape), body, Attrs({COMPOSITE: True})), self._module)
        kind = "stored" if all(isinstance(a, Constant) for c in chain.values() for a in c.args[:1]) else "turned"
        callee = self._table.add(f"{call.callee.name}_of_{kind}", program)
        assert set(program.symbols) <= set(symbols)
        return Call(callee, inputs, call.attrs, program.symbols, call.ty, call.loc)


def _swaps_last(program: TensorProgram) -> bool:
    """Whether a program is the transposition of the last two dimensions."""
    stages = top_stages(program)
    if len(stages) != 1 or len(program.inputs) != 1:
        return False
    store = injective_store(perfect_nest(stages[0]))
    if store is None or not isinstance(store.value, Load) or len(store.indices) < 2:
        return False
    *outer, a, b = store.indices
    return store.value.indices == (*outer, b, a)


def _along_columns(program: TensorProgram, call: Call) -> list[Var]:
    """Operands of a matrix product whose last index is the column of the result."""
    reduction = reduction_of(top_stages(program)[-1])
    assert reduction is not None
    column = reduction.spatial[-1].var if reduction.spatial else None
    column_buffers = {load.buffer for load in loads(reduction.update) if load.indices and load.indices[-1] is column}
    pairs = zip(program.inputs, call.args, strict=True)
    return [arg for buffer, arg in pairs if buffer in column_buffers and isinstance(arg, Var)]


def _constants(chain: dict[Var, Call]) -> list[Constant]:
    return list(dict.fromkeys(a for call in chain.values() for a in call.args if isinstance(a, Constant)))


def _bytes(ty: object) -> SymExpr:
    assert isinstance(ty, TensorType) and ty.shape is not None
    return product(ty.shape) * dtypes.itemsize(ty.dtype)


def is_matrix_product(program: TensorProgram) -> bool:
    """Whether a program is one sum, over one loop, of products of two loaded elements."""
    reduction = reduction_of(top_stages(program)[-1])
    if reduction is None or reduction.update.combine != "add" or len(perfect_nest(reduction.inner).loops) != 1:
        return False
    if sum(isinstance(s, Allocate) for s in walk_stmts(program.body)) > 1:
        return False
    value = reduction.update.value
    return isinstance(value, Binary) and value.op == "mul" and _is_element(value.a) and _is_element(value.b)


def _is_element(value: Value) -> bool:
    return isinstance(value, Load) or (isinstance(value, Cast) and isinstance(value.x, Load))
