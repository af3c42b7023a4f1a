"""Let matrix products read constants as they are stored: what widens a weight becomes part of the product's loads.

    w = dequantize(q, scale)                      for i, j, k: e += x[i, k] * (float32(q[k, j]) * scale[j])
    for i, j, k: e += x[i, k] * w[k, j]     =>

Here `q` and `scale` are constants, and what computes w from them is a chain of injective programs. The product then
moves the bytes of q instead of those of w; the schedule decides how often an element is widened (prologue.py). A chain
that other calls read too is computed in each of them: its operands never change.

A computed right operand whose last two dimensions a transposition swaps is read where it lies, if nothing else reads
the transposed copy (transposed.py):

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
from relaxlite.passes.fuse.fuse_programs import merge
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.pattern import LoopPattern, analyze, injective_store, perfect_nest, reduction_of, top_stages

MAX_CHAIN = 12  # calls between a constant and the product: bounds the size of what is inlined


def fuse_prologues(module: IRModule, context: PassContext) -> IRModule:
    """Inline what widens constant operands into the matrix products that read them."""
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
    """Each use of a variable in a body, without those in the bodies inside."""
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
        self._turned: dict[Var, Call] = {}  # transposed copies that are read once
        self._chains: dict[Var, tuple[tuple[Var, Call], ...]] = {}  # constants as programs compute them

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        program = self._program(value)
        if program is None:
            return None
        assert isinstance(value, Call)
        result = [self._chains[a] for a in value.args if isinstance(a, Var) and a in self._chains]
        if value.args and all(isinstance(a, Constant) or a in self._chains for a in value.args):
            self._note_chain(var, value, result)
            return None
        if self._uses[var] == 1 and _swaps_last(program):
            self._turned[var] = value
            return None
        has_turned = any(a in self._turned for a in value.args)
        if not (result or has_turned) or not is_matrix_product(program):
            return None
        columns = _along_columns(program, value)
        turned = self._turned_columns(columns, var, value)
        widened = [a for a in columns if a in self._chains]
        if not widened:
            return self._merged_turned(turned, var, value) if turned else None
        chain = dict(step for a in widened for step in self._chains[a])
        stored = sum((_bytes(a.ty) for a in _constants(chain)), start=product(()) * 0)
        wide = sum((_bytes(a.ty) for a in widened), start=product(()) * 0)
        subject = f"{', '.join(v.name for v in chain)} into {var.name}"
        reason = "the product reads the constant as it is stored"
        self._context.decide("fuse_prologues", subject, True, reason, bytes_stored=stored, bytes_widened=wide)
        return self._merged(chain, var, value)

    def _turned_columns(self, columns: list[Var], var: Var, call: Call) -> dict[Var, Call]:
        """The transposed operands along whose columns vectors go. A transposed copy of the rows' operand pays: each
        tile of the product would step through memory a row at a time, which takes 5 to 15 % more in all (measured)."""
        for arg in call.args:
            if isinstance(arg, Var) and arg in self._turned and arg not in columns:
                subject = f"{arg.name} into {var.name}"
                reason = (
                    "each tile of rows would step through memory; a copy that lies along the sum is read many times"
                )
                self._context.decide("fuse_prologues", subject, False, reason, bytes_copied=2 * _bytes(arg.ty))
        return {a: self._turned[a] for a in columns if a in self._turned}

    def _merged_turned(self, turned: dict[Var, Call], var: Var, call: Call) -> Call:
        copied = sum((2 * _bytes(a.ty) for a in turned), start=product(()) * 0)
        for copy in turned:
            reason = "the product reads the operand as it lies, and there is no copy to write and read"
            self._context.decide("fuse_prologues", f"{copy.name} into {var.name}", True, reason, bytes_saved=copied)
        return self._merged(turned, var, call)

    def _program(self, value: Expr) -> TensorProgram | None:
        if not isinstance(value, Call) or not isinstance(value.callee, GlobalVar):
            return None
        program = self._module.get(value.callee.name)
        return program if isinstance(program, TensorProgram) else None

    def _note_chain(self, var: Var, call: Call, found: list[tuple[tuple[Var, Call], ...]]) -> None:
        """Keep a call that computes from nothing but constants, if it is injective."""
        steps = dict(step for steps in found for step in steps) | {var: call}
        program = self._program(call)
        if len(steps) <= MAX_CHAIN and program is not None and analyze(program) <= LoopPattern.INJECTIVE:
            self._chains[var] = tuple(steps.items())

    def _merged(self, chain: dict[Var, Call], var: Var, call: Call) -> Call:
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
        program = merge(Function((*params.values(), shape), body, Attrs({COMPOSITE: True})), self._module)
        kind = "stored" if all(isinstance(a, Constant) for c in chain.values() for a in c.args[:1]) else "turned"
        callee = self._table.add(f"{call.callee.name}_of_{kind}", program)
        assert set(program.symbols) <= set(symbols)
        return Call(callee, inputs, call.attrs, program.symbols, call.ty, call.loc)


def _swaps_last(program: TensorProgram) -> bool:
    """Whether it is the transposition of the last two dimensions."""
    stages = top_stages(program)
    if len(stages) != 1 or len(program.inputs) != 1:
        return False
    store = injective_store(perfect_nest(stages[0]))
    if store is None or not isinstance(store.value, Load) or len(store.indices) < 2:
        return False
    *outer, a, b = store.indices
    return store.value.indices == (*outer, b, a)


def _along_columns(program: TensorProgram, call: Call) -> list[Var]:
    """The operands of a matrix product whose last index is the result's."""
    reduction = reduction_of(top_stages(program)[-1])
    assert reduction is not None
    column = reduction.spatial[-1].var if reduction.spatial else None
    moving = {load.buffer for load in loads(reduction.update) if load.indices and load.indices[-1] is column}
    pairs = zip(program.inputs, call.args, strict=True)
    return [arg for buffer, arg in pairs if buffer in moving and isinstance(arg, Var)]


def _constants(chain: dict[Var, Call]) -> list[Constant]:
    return list(dict.fromkeys(a for call in chain.values() for a in call.args if isinstance(a, Constant)))


def _bytes(ty: object) -> SymExpr:
    assert isinstance(ty, TensorType) and ty.shape is not None
    return product(ty.shape) * dtypes.itemsize(ty.dtype)


def is_matrix_product(program: TensorProgram) -> bool:
    """One sum over one loop of products of two loaded elements."""
    reduction = reduction_of(top_stages(program)[-1])
    if reduction is None or reduction.update.combine != "add" or len(perfect_nest(reduction.inner).loops) != 1:
        return False
    if sum(isinstance(s, Allocate) for s in walk_stmts(program.body)) > 1:
        return False
    value = reduction.update.value
    return isinstance(value, Binary) and value.op == "mul" and _is_element(value.a) and _is_element(value.b)


def _is_element(value: Value) -> bool:
    return isinstance(value, Load) or (isinstance(value, Cast) and isinstance(value.x, Load))
