"""Dispatch of ops to library routines: a subgraph that matches a rule becomes a program that calls the routine.

    y = matmul(a, b)    =>    y = call(P, a, b)   with   P:  if m <= 1 and library_found("openblas", "cblas_sgemv"):
                                                                 call_library("openblas", "cblas_sgemv", ...)
                                                             else: the loops of matmul

The generated loops are the semantics of the routine, and the fallback outside of the rule's range of sizes and where
the library is missing. Elementwise ops that follow the match become part of the program: fused into the loops, and as a
loop nest after the library call. The program is opaque to further fusion. `relaxlite.register_library` adds rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.expr import Call, Constant, Expr, Function, ShapeValue, Var
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Op
from relaxlite.ir.pattern import Match, Matcher
from relaxlite.ir.program import (
    Binary,
    Buffer,
    CallLibrary,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    LibraryFound,
    Seq,
    Stmt,
    TensorProgram,
    Value,
    seq,
)
from relaxlite.ir.program_visitor import Substitute, program_symbols
from relaxlite.ir.symbolic import SymExpr, SymVar, sym
from relaxlite.ir.types import TensorType, Type
from relaxlite.ir.visitor import Rewriter, bodies, used_vars
from relaxlite.passes.context import PassContext
from relaxlite.passes.fuse.library_programs import LoweredSubgraph, Subgraph
from relaxlite.passes.fuse.library_rules import OUT, LibraryRule, can_hold, remaining_compares
from relaxlite.passes.graph.eliminate import eliminate_dead
from relaxlite.passes.loops.legalize import RUNTIME_OPS, ProgramTable, lower_call
from relaxlite.passes.loops.pattern import LoopPattern, analyze
from relaxlite.records import dataclass

_INT32_MAX = 2**31 - 1
_MAX_EPILOGUE = 12  # ops after a library call; their loops are emitted twice


def dispatch(module: IRModule, context: PassContext) -> IRModule:
    """Replace subgraphs that a rule of `context.libraries` matches by programs that call the rule's library routine."""
    if not context.libraries:
        return module
    module = eliminate_dead(module)  # unused bindings must not count as uses
    definitions: dict[str, Definition] = dict(module)
    table = ProgramTable(definitions)
    for name, function in module.functions().items():
        definitions[name] = _Dispatch(context, table).function(function)
    return eliminate_dead(module.updated(definitions))


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Rule that matches at a position of the graph, with the dimensions of its operands."""

    rule: LibraryRule
    match: Match
    dims: Mapping[str, SymExpr]

    @property
    def operands(self) -> dict[str, Expr]:
        """Matched operands by the names of the rule, without outputs."""
        return {name: self.match[name] for name in self.rule.operands if not name.startswith(OUT)}

    def buffers(self, loops: LoweredSubgraph) -> dict[str, Buffer]:
        """Buffers of operands and outputs by the names of the rule."""
        names = [OUT] if len(loops.outputs) == 1 else [f"{OUT}{k}" for k in range(len(loops.outputs))]
        inputs = {name: loops.buffers[operand] for name, operand in self.operands.items()}
        return inputs | dict(zip(names, loops.outputs, strict=True))


@dataclass(frozen=True, slots=True)
class _Epilogue:
    """Chain of elementwise ops after a match, each the only use of the previous result; part of the kernel."""

    root: Var  # result of the match
    calls: tuple[tuple[Var, Call], ...] = ()

    @property
    def variables(self) -> tuple[Var, ...]:
        return tuple(var for var, _ in self.calls)

    def operands(self) -> dict[Expr, str]:
        """Operands of the chain other than the root and its own results, with unique names."""
        own = {self.root, *self.variables}
        extra = dict.fromkeys(a for _, call in self.calls for a in call.args if isinstance(a, Var) and a not in own)
        return {operand: f"{operand.name}_{k}" for k, operand in enumerate(extra)}


class _Dispatch(Rewriter):
    """Rewriter that first selects matches and then replaces them.

    Selection goes from the end of a function to its beginning, so that a pattern of several ops wins over a pattern of
    a part of these ops.
    """

    def __init__(self, context: PassContext, table: ProgramTable) -> None:
        super().__init__()
        self._context, self._table = context, table
        self._matcher = Matcher({})
        self._analyzer = Analyzer()
        self._users: dict[Var, list[Var]] = {}
        self._body_of: dict[Var, int] = {}
        self._removed: set[Var] = set()  # variables without a binding after the rewrite
        self._selected: dict[Var, tuple[TensorProgram, str, tuple[Expr, ...]]] = {}

    def function(self, function: Function) -> Function:
        self._matcher = Matcher.of_body(function.body)
        for number, body in enumerate(bodies(function)):
            for binding in body.bindings():
                self._body_of[binding.var] = number
        for var, value in self._matcher.bindings.items():
            for used in dict.fromkeys(used_vars(value)):
                self._users.setdefault(used, []).append(var)
        for var, value in reversed(list(self._matcher.bindings.items())):
            if var not in self._removed and isinstance(value, Call) and isinstance(value.callee, Op):
                self._select(var, value)
        return super().function(function) if self._selected else function

    def rewrite(self, var: Var, value: Expr) -> Expr | None:
        if var not in self._selected:
            return None
        assert isinstance(value, Call)
        program, name, args = self._selected[var]
        callee = self._table.add(name, program)
        operands = tuple(map(self.operand, args))
        return Call(callee, operands, sym_args=program.symbols, ty=value.ty, loc=value.loc)

    def _select(self, var: Var, value: Call) -> None:
        """Select the rules for the ops whose result is this call."""
        candidates = self._candidates(var, value)
        if not candidates:
            return
        first = candidates[0]
        epilogue = self._epilogue(var, value)
        for chosen_epilogue in (epilogue, _Epilogue(var)) if epilogue.calls else (epilogue,):
            result = self._program(candidates, chosen_epilogue, value)
            if not isinstance(result, str):
                break
        if isinstance(result, str):
            self._decide(var, first.rule, result)
            return
        for candidate in candidates:
            figures = {text: candidate.rule.evaluate(text, candidate.dims) for text in candidate.rule.when}
            self._decide(var, candidate.rule, None, figures, chosen_epilogue)
        chain = (var, *chosen_epilogue.variables)
        self._removed.update(first.match.inner, chain[:-1])
        program, args = result
        self._selected[chain[-1]] = program, _name(value, chosen_epilogue, first.rule), args

    def _program(
        self, candidates: Sequence[_Candidate], epilogue: _Epilogue, value: Call
    ) -> tuple[TensorProgram, tuple[Expr, ...]] | str:
        """The program and its operands; the reason if there is none.

        The program calls the first routine that is available and whose range contains the sizes, else runs the fallback
        loops.
        """
        first, bound, target = candidates[0], self._matcher.bindings, self._context.target
        names = {operand: name for name, operand in reversed(first.operands.items())}
        extra = {operand: name for operand, name in epilogue.operands().items() if operand not in names}
        inner = {*first.match.inner, epilogue.root, *epilogue.variables}
        last = epilogue.calls[-1][1] if epilogue.calls else value
        whole = Subgraph(last, inner, bound).loops({**names, **extra}, target)
        if isinstance(whole, str):
            return whole
        after: Stmt | None = Seq(())
        if epilogue.calls:
            operands = {epilogue.root: "product", **epilogue.operands()}
            alone = Subgraph(last, {*epilogue.variables}, bound).loops(operands, target)
            if isinstance(alone, str):
                return alone
            after = alone.with_buffers({**whole.buffers, epilogue.root: whole.outputs[0]}, whole.outputs)
        if after is None:
            return "what follows it reads a constant that its loops do not"
        body = whole.body
        for candidate in reversed(candidates):
            rule = candidate.rule
            if not all(operand in whole.buffers for operand in candidate.operands.values()):
                continue
            conditions = _conditions(candidate, self._analyzer)
            conditions.append(LibraryFound(rule.library, rule.symbol, is_required=not rule.keeps_fallback))
            cond = reduce(lambda a, b: Binary("and", a, b), conditions)
            call = _call(candidate, candidate.buffers(whole), self._analyzer)
            body = IfThenElse(cond, seq(call, Substitute({}, {}, fresh=True).stmt(after)), body)
        body = seq(*whole.checks, body)
        params = (*whole.buffers.values(), *whole.outputs)
        program = TensorProgram(params, program_symbols(params, body), body, len(whole.outputs))
        return program, tuple(whole.buffers)

    def _epilogue(self, var: Var, value: Call) -> _Epilogue:
        """The chain of elementwise ops after a call that fusion would put into its loops."""
        calls: list[tuple[Var, Call]] = []
        current = var
        while len(calls) < _MAX_EPILOGUE:
            users = self._users.get(current, [])
            call = self._matcher.bindings.get(users[0]) if len(users) == 1 else None
            if not isinstance(call, Call) or not self._extends_epilogue(call, users[0], current, value.ty):
                break
            calls.append((users[0], call))
            current = users[0]
        return _Epilogue(var, tuple(calls))

    def _extends_epilogue(self, call: Call, user: Var, current: Var, ty: Type) -> bool:
        assert self._matcher.uses is not None
        is_only_use = self._matcher.uses[current] == sum(arg is current for arg in call.args)
        is_free = user not in self._removed and user not in self._selected
        if not is_only_use or not is_free or self._body_of.get(user) != self._body_of.get(current):
            return False
        return call.ty == ty and isinstance(ty, TensorType) and is_elementwise(call)

    def _decide(
        self,
        var: Var,
        rule: LibraryRule,
        problem: str | None,
        figures: Mapping[str, SymExpr] | None = None,
        epilogue: _Epilogue | None = None,
    ) -> None:
        ranges = [f"{text} {_range_text(limits)}" for text, limits in rule.when.items()]
        where = f"where {', '.join(ranges)}" if ranges else "at all sizes"
        reason = problem or f"{where}: {rule.reason or 'the rule asks for it'}"
        if epilogue is not None and epilogue.calls:
            reason += f"; {', '.join(call.callee.name for _, call in epilogue.calls)} of its result in the same kernel"
        subject = f"{var.name} to {rule.symbol} of {rule.library} ({rule.name})"
        amounts = {text: amount for text, amount in (figures or {}).items() if text.replace(" ", "") != str(amount)}
        notes = {name: sym(amount) for name, amount in rule.figures.items()} if problem is None else {}
        self._context.decide("dispatch", subject, problem is None, reason, **amounts, **notes)

    def _candidates(self, var: Var, value: Call) -> list[_Candidate]:
        """Matching rules in order: those that match most ops, up to the first that applies at all sizes."""
        assert isinstance(value.callee, Op)
        groups: dict[frozenset[Var], list[_Candidate]] = {}
        refusals: set[str] = set()  # similar rules share a reason; report each reason once
        for rule in self._context.libraries or ():
            if value.callee.name not in rule.pattern.root_ops:
                continue
            match = self._matcher.match(rule.pattern, value)
            if match is None:
                continue
            result = value.ty if isinstance(value.ty, TensorType) else None
            dims = rule.dimensions(match, result, self._analyzer)
            problem = dims if isinstance(dims, str) else self._refusal(rule, match, dims, value.ty)
            if problem is not None:
                if problem in refusals:
                    continue
                refusals.add(problem)
                figures = {} if isinstance(dims, str) else {k: rule.evaluate(k, dims) for k in rule.when}
                self._decide(var, rule, problem, figures)
            elif not isinstance(dims, str):
                groups.setdefault(frozenset(match.inner), []).append(_Candidate(rule, match, dims))
        longest_matches = groups[max(groups, key=len)] if groups else []
        unconditional = [k for k, candidate in enumerate(longest_matches) if not _conditions(candidate, self._analyzer)]
        return longest_matches[: unconditional[0] + 1] if unconditional else longest_matches

    def _refusal(self, rule: LibraryRule, match: Match, dims: Mapping[str, SymExpr], result: Type) -> str | None:
        """Reason against a rule that matches; None if the rule applies."""
        if not match.is_removable:
            return "a value inside is used elsewhere too"
        types = {name: operand.ty for name, operand in match.captures.items()} | {OUT: result}
        if (problem := rule.dtype_problem(types)) is not None:
            return problem
        if (constant := next((name for name in rule.variable if self._is_constant(match[name])), None)) is not None:
            return f"{constant} is constant: its kernel reads what was laid out when compiling"
        if rule.check is not None and (reason := rule.check(match)) is not None:
            return reason
        for text, limits in rule.when.items():
            if not can_hold(rule.evaluate(text, dims), limits, self._analyzer):
                return f"{text} is never {_range_text(limits)}, and there it is not worth while"
        return None

    def _is_constant(self, expr: Expr) -> bool:
        """Whether an operand is computed from constants alone, such as a dequantized weight."""
        if isinstance(expr, Constant | ShapeValue):
            return True
        value = self._matcher.bindings.get(expr) if isinstance(expr, Var) else None
        return isinstance(value, Call) and isinstance(value.callee, Op) and all(map(self._is_constant, value.args))


def _conditions(candidate: _Candidate, analyzer: Analyzer) -> list[Value]:
    """Run-time conditions of a library call: the rule's range, and 32-bit arguments without overflow."""
    rule, dims = candidate.rule, candidate.dims
    ranges = [(rule.evaluate(text, dims), limits) for text, limits in rule.when.items()]
    ranges += [(expr, (None, _INT32_MAX)) for expr in rule.narrow_arguments(dims)]
    compares = [c for expr, limits in ranges for c in remaining_compares(expr, limits, analyzer)]
    return list(
        {
            (expr, op, limit): Compare(op, IndexValue(expr), IndexValue(sym(limit))) for expr, op, limit in compares
        }.values()
    )


def _name(value: Call, epilogue: _Epilogue, rule: LibraryRule) -> str:
    """Program name: fused ops, then the rule."""
    return "_".join([*(call.callee.name for call in (value, *(c for _, c in epilogue.calls))), rule.name])


def is_elementwise(call: Call) -> bool:
    """Whether each element of the result depends on one element of each operand, at the same or a broadcast index."""
    types = [arg.ty for arg in call.args]
    if not isinstance(call.callee, Op) or not call.callee.has_lowering or call.callee.name in RUNTIME_OPS:
        return False
    if any(isinstance(ty, TensorType) and ty.shape is None for ty in types):
        return False
    return bool(analyze(lower_call(call)[0]) <= LoopPattern.BROADCAST)


def _call(candidate: _Candidate, buffers: Mapping[str, Buffer], analyzer: Analyzer) -> Stmt:
    rule, values = candidate.rule, dict(candidate.dims)
    extents = {name: rule.evaluate(text, candidate.dims) for name, text in rule.loops.items()}
    variables = {name: SymVar(name) for name in extents}
    values.update(variables)
    args = rule.call_arguments(buffers, values)
    for name, extent in extents.items():
        analyzer = analyzer.with_range(variables[name], 0, extent)
    checks = [
        Check(_at_most(arg.index, _INT32_MAX), f"{rule.symbol}: an argument of {arg.index} does not fit 32 bits")
        for arg in args
        if isinstance(arg, IndexValue)
        and arg.dtype == "int32"
        and _varies(arg.index, variables)
        and remaining_compares(arg.index, (None, _INT32_MAX), analyzer)
    ]
    call = CallLibrary(rule.library, rule.symbol, args, rule.convention, rule.evaluate(rule.work, values))
    body = seq(*checks, call)
    for number, (name, extent) in reversed(list(enumerate(extents.items()))):
        body = For(variables[name], extent, body, "serial" if number else "parallel")
    return body


def _varies(expr: SymExpr, variables: Mapping[str, SymVar]) -> bool:
    return any(var in variables.values() for var in expr.free_vars())


def _at_most(expr: SymExpr, limit: int) -> Value:
    return Compare("le", IndexValue(expr), IndexValue(sym(limit)))


def _range_text(limits: tuple[int | None, int | None]) -> str:
    low, high = limits
    if low == high:
        return str(low)
    return f"at least {low}" if high is None else f"at most {high}" if low is None else f"from {low} to {high}"
