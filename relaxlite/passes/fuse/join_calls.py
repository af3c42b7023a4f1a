"""Horizontal fusion: independent calls become one call of a program with several outputs.

    q = x @ a + u;  k = x @ b + v;  w = x @ c        =>        q, k, w = joined(x, a, u, b, v, c)

The stages of the programs stand one after another in the joined program, each with its own weights, epilogue and
layout. Sizes may differ, and weights may have other uses. schedule/cpu/programs.py runs consecutive parallel loops as
one parallel loop over all of their tiles. The pass joins

    products that read one operand and allow the same strategies (the projections of attention, heads of a detector)
    copies that one call reads (keys and values that are appended to a cache, rotated queries)

A call moves to the position of the first call of its group. A call that needs a value defined after that position stays
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import zip_longest
from typing import TypeAlias

from relaxlite.ir.expr import Binding, Block, Call, Expr, Let, TupleGetItem, Var
from relaxlite.ir.module import IRModule
from relaxlite.ir.program import Binary, Buffer, Check, Store, TensorProgram, Unary, seq
from relaxlite.ir.program_visitor import all_values, loads
from relaxlite.ir.symbolic import as_int, sym
from relaxlite.passes.context import PassContext
from relaxlite.passes.loops.legalize import ProgramTable
from relaxlite.passes.loops.merge_calls import CallSite, DefUsePositions, ProgramInstances, call_sites, map_blocks, stem
from relaxlite.passes.loops.pattern import LoopPattern, analyze, perfect_nest, reduction_of, top_stages
from relaxlite.passes.products.constant_weights import ProductStrategies, WeightStrategy, strategies_fit_for
from relaxlite.records import dataclass

MAX_CALLS = 8  # per group: bounds the code size
MAX_REDUCTIONS_BETWEEN = 3  # reductions between two calls of a group
MAX_COPY_OPERATIONS = 12  # arithmetic of a copy
MAX_NAME_LENGTH = 60

_Joined: TypeAlias = dict[object, Call]  # by structural key


def join_calls(module: IRModule, context: PassContext) -> IRModule:
    """Join independent products of one operand, and independent copies for one call, into one kernel each."""

    strategies = ProductStrategies(module, context)
    # Cached, as layers repeat and share their programs.
    joined: _Joined = {}
    analyzed, product_of, is_copy = cache(analyze), cache(_product), cache(_is_copy)

    def change(
        block: Block, uses: Mapping[Var, int], table: ProgramTable, *, strategies: Sequence[WeightStrategy]
    ) -> Sequence[Binding]:
        """Join the calls of one block."""
        bindings = block.bindings
        products = partial(_products, strategies=strategies, context=context, analyzed=analyzed, product_of=product_of)
        for groups in (products, partial(_copies, is_copy=is_copy)):
            sites = call_sites(bindings, module)
            by_var = {site.var: site for site in sites}
            slots: list[list[Binding]] = [[binding] for binding in bindings]
            for names in [group_names for group_names in groups(sites) if len(group_names) > 1]:
                _join(slots, [by_var[name] for name in names], table, context, joined)
            bindings = tuple(binding for slot in slots for binding in slot)
        return bindings

    result = module
    for name in module.functions():
        result = map_blocks(result, partial(change, strategies=strategies.of(name)), [name])
    return result


def _products(
    sites: list[CallSite],
    strategies: Sequence[WeightStrategy],
    context: PassContext,
    analyzed: Callable[[TensorProgram], LoopPattern],
    product_of: Callable[[TensorProgram], _Product | None],
) -> Iterator[list[Var]]:
    """Groups of products that share operands other than weights, have equal depth, and allow the same strategies.

    Distant products stay apart: otherwise the keys and values of all layers that attend to one memory would be live at
    once.
    """
    groups: dict[tuple[tuple[Var, ...], int, tuple[str, ...]], list[list[Var]]] = {}
    last: dict[Var, int] = {}  # of a member, the number of calls with reductions before it
    count = 0
    for site in sites:
        product = product_of(site.program)
        operands = _operands(site, product) if product is not None else ()
        if product is not None and operands:
            runs = groups.setdefault((operands, product.terms, strategies_fit_for(site, strategies)), [[]])
            if runs[-1] and count - last[runs[-1][-1]] > MAX_REDUCTIONS_BETWEEN:
                reason = f"there are more than {MAX_REDUCTIONS_BETWEEN} reductions in between"
                context.decide("join_calls", f"{site.var.name} beside {runs[-1][-1].name}", False, reason)
                runs.append([])
            runs[-1].append(site.var)
            last[site.var] = count + 1
        count += bool(operands) or analyzed(site.program) >= LoopPattern.REDUCTION
    yield from (run for runs in groups.values() for run in runs)


@dataclass(frozen=True, slots=True)
class _Product:
    """Operands of a product, and its depth (terms per sum)."""

    read: tuple[Buffer, ...]
    terms: int


def _product(program: TensorProgram) -> _Product | None:
    """Match a product: one OUT_FUSIBLE reduction over one loop of constant length; None otherwise."""
    stages = [s for s in top_stages(program) if not isinstance(s, Check)]
    reduction = reduction_of(stages[0]) if len(stages) == 1 else None
    if reduction is None or analyze(program) != LoopPattern.OUT_FUSIBLE:
        return None
    steps = perfect_nest(reduction.inner).loops
    terms = as_int(steps[0].extent)
    if len(steps) != 1 or terms is None:
        return None
    return _Product(tuple(dict.fromkeys(load.buffer for load in loads(reduction.update))), terms)


def _operands(site: CallSite, product: _Product) -> tuple[Var, ...]:
    """Operands that are no constants (x and its zero point) of a product with constant weights; else ()."""
    args = dict(zip(site.program.inputs, site.call.args, strict=True))
    read = dict.fromkeys(args[buffer] for buffer in product.read)
    operands = tuple(x for x in read if isinstance(x, Var))
    return operands if len(operands) < len(read) else ()


def _copies(sites: list[CallSite], is_copy: Callable[[TensorProgram], bool]) -> Iterator[list[Var]]:
    """Groups of copies that are operands of one call."""
    by_var = {site.var: site for site in sites}
    taken: set[Var] = set()
    for site in sites:
        operands = [a for a in dict.fromkeys(site.call.args) if isinstance(a, Var) and a in by_var and a not in taken]
        group = [var for var in operands if is_copy(by_var[var].program)]
        taken.update(group)
        yield group


def _is_copy(program: TensorProgram) -> bool:
    """Whether a program only moves elements, with little arithmetic: nests without reductions that write outputs."""
    for stage in top_stages(program):
        if isinstance(stage, Check):
            continue
        body = perfect_nest(stage).body
        if not isinstance(body, Store) or body.combine is not None or body.buffer not in program.outputs:
            return False
    return sum(isinstance(v, Unary | Binary) for v in all_values(program.body)) <= MAX_COPY_OPERATIONS


def _join(
    slots: list[list[Binding]], group: list[CallSite], table: ProgramTable, context: PassContext, joined: _Joined
) -> None:
    """Replace the calls of a group by one call, unless fewer than two can move to one position.

    `slots` holds the bindings of a block by the position that the sites name.
    """
    group = sorted(group, key=lambda site: site.position)
    positions = range(group[0].position, group[-1].position + 1)
    members, position_of_call = _common_position(
        group, DefUsePositions((position, binding) for position in positions for binding in slots[position])
    )
    members = members[:MAX_CALLS]
    for site in group:
        if site not in members:
            reason = (
                "too many calls"
                if len(members) == MAX_CALLS
                else "it needs a value made in between, or is needed there"
            )
            context.decide("join_calls", f"{site.var.name} beside {group[0].var.name}", False, reason)
    if len(members) < 2:
        return
    inputs = tuple(dict.fromkeys(a for site in members for a in site.call.args))
    outputs = [site.var for site in members]
    key = _structural_key(members, inputs)
    if key not in joined:
        joined[key] = _joined_call(members, inputs, table)
    call = replace(joined[key], args=inputs, loc=members[0].call.loc)
    names, shared = ", ".join(v.name for v in outputs), sum(len(s.call.args) for s in members) - len(inputs)
    context.decide(
        "join_calls", names, True, "they do not need each other, so that one kernel shares out their tiles",
        kernels_saved=sym(len(members) - 1), operands_shared=sym(shared),
    )  # fmt: skip
    result = Var(f"{outputs[0].name}_joined", call.ty)
    bindings: list[Binding] = [Let(result, call)]
    bindings += [Let(var, TupleGetItem(result, k)) for k, var in enumerate(outputs)]
    for site in members:
        slots[site.position] = [binding for binding in slots[site.position] if binding.var is not site.var]
    slots[position_of_call] = bindings + slots[position_of_call]


def _structural_key(members: list[CallSite], inputs: Sequence[Expr]) -> object:
    """Structural key of a group: programs, symbols, types and shared operands.

    Groups with equal keys share one program.
    """
    numbers = {expr: k for k, expr in enumerate(inputs)}
    calls = [(s.call.callee, s.call.sym_args, s.var.ty, *(numbers[a] for a in s.call.args)) for s in members]
    return (*calls, *(expr.ty for expr in inputs))


def _joined_call(members: list[CallSite], inputs: Sequence[Expr], table: ProgramTable) -> Call:
    """Call of a new program that contains the stages of all members."""
    parts = ProgramInstances()
    stages = [parts.stages(site) for site in members]
    checks = [s for call_stages in stages for s in call_stages if isinstance(s, Check)]
    nests = [[s for s in call_stages if not isinstance(s, Check)] for call_stages in stages]
    ordered = [s for row in zip_longest(*nests) for s in row if s is not None]  # first stages first, ...
    return parts.call(_name(members), seq(*checks, *ordered), inputs, [site.var for site in members], table)


def _common_position(group: list[CallSite], places: DefUsePositions) -> tuple[list[CallSite], int]:
    """The calls of a group that can move to one position, and the position: of the first or of the last call."""
    first, last = group[0].position, group[-1].position
    up = [site for site in group if places.defined(site) < first]
    down = [site for site in group if not places.is_used(site.var)]
    return (up, first) if len(up) >= len(down) else (down, last)


def _name(members: list[CallSite]) -> str:
    stems = list(dict.fromkeys(stem(site) for site in members))
    return f"joined_{len(members)}_{'_'.join(stems)}"[:MAX_NAME_LENGTH]
