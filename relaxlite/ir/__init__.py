"""The intermediate representation: one module, three levels, symbolic sizes throughout.

```
IRModule        = { name: Function | TensorProgram | ExternFunction }, attrs        immutable; the entry is "main"

graph level                                                                         A-normal form
Function        = (params: Var*, body: Body, attrs)
Body            = (blocks: Block*, result: Leaf | Tuple)
Block           = (bindings: Binding*, is_dataflow)                                 a dataflow block is pure
Binding         = Let(var, value: Expr)
                | MatchShape(var, source: Leaf, shape: SymExpr*, loc)               run-time check; binds new symbols
Expr            = Leaf
                | Call(callee, args: Leaf*, attrs, sym_args: SymExpr*, ty, loc)     callee: Op | GlobalVar | Var
                | Tuple(fields: Leaf*)
                | TupleGetItem(value: Leaf, index)
                | If(cond: Leaf, then_body: Body, else_body: Body, ty, loc)
                | Loop(params: Var*, inits: Leaf*, cond: Leaf, body: Body, ty, loc)
Leaf            = Var(name, ty, loc)
                | Constant(value, ty, name)
                | ShapeValue(values: SymExpr*)
                | GlobalVar(name)                                                   names a definition of the module
Type            = TensorType(shape: SymExpr* | unknown, dtype, rank)
                | ShapeType(values: SymExpr* | unknown, rank)
                | TupleType(fields: Type*)
                | FuncType(params: Type*, result: Type)
                | ObjectType()
Attrs           = { name: int | float | str | bool | None | tuple of these }

loop level                                                                          destination-passing style
TensorProgram   = (params: Buffer*, symbols: SymVar*, body: Stmt, num_outputs, attrs)
Buffer          = (name, shape: SymExpr*, dtype, scope)
Stmt            = For(var: SymVar, extent: SymExpr, body: Stmt, kind)
                | Store(buffer, indices: SymExpr*, value: Value, combine, nontemporal)
                | LetIndex(var: SymVar, value: Value, body: Stmt)                   an index that comes from data
                | IfThenElse(cond: Value, then: Stmt, other: Stmt | None)
                | Allocate(buffer, body: Stmt)
                | Check(cond: Value, message)
                | Prefetch(buffer, indices: SymExpr*, cache: 1 | 2)                 a hint
                | Barrier()
                | CallLibrary(library, symbol, args: Value*, convention, work: SymExpr)
                | Seq(stmts: Stmt*)
Value           = Literal(value, dtype)
                | Load(buffer, indices: SymExpr*)
                | Unary(op, x: Value)
                | Binary(op, a: Value, b: Value)
                | Compare(op, a: Value, b: Value)
                | Select(cond: Value, then: Value, other: Value)                    lazy
                | Cast(x: Value, dtype)
                | IndexValue(index: SymExpr, dtype)                                 a symbolic integer as data
                | Intrinsic(name, args: Value*, dtype)
                | AddressOf(buffer, indices: SymExpr*, is_written)                  an argument of CallLibrary
                | LibraryFound(library, symbol, is_required)                        whether the routine is there

library level
ExternFunction  = (symbol, params: Type*, num_outputs, attrs)

symbolic integers: dimensions, extents, indices
SymExpr         = SymVar(name, lower, upper, divisor)
                | FloorDiv(a: SymExpr, b: SymExpr) | FloorMod(a, b) | Min(a, b) | Max(a, b)
                | a sum of products of these and integers, in canonical form
```

Files: symbolic.py, types.py, expr.py, program.py and module.py define the nodes; op.py and ops/ the operators.
builder.py builds functions. printer.py, program_printer.py, parser.py, function_parser.py and program_parser.py print
and parse the text form. verifier.py, program_verifier.py and signatures.py check legality. equality.py compares nodes,
pattern.py matches expressions, visitor.py and program_visitor.py walk and rewrite, analyzer.py proves facts on sizes.
"""

from __future__ import annotations

from relaxlite.ir.analyzer import Analyzer
from relaxlite.ir.builder import BlockBuilder
from relaxlite.ir.equality import first_difference, structural_equal, structural_hash
from relaxlite.ir.expr import (
    NO_ATTRS,
    Attrs,
    AttrValue,
    Binding,
    Block,
    Body,
    Call,
    Constant,
    Expr,
    ExternFunction,
    Function,
    GlobalVar,
    If,
    Leaf,
    Let,
    Loop,
    MatchShape,
    ShapeValue,
    Tuple,
    TupleGetItem,
    Var,
)
from relaxlite.ir.module import Definition, IRModule
from relaxlite.ir.op import Attr, Op, Sample, all_ops, get_op, register
from relaxlite.ir.parser import parse_module
from relaxlite.ir.pattern import Match, Matcher, Pattern, is_const, is_field, is_op, match, wildcard
from relaxlite.ir.printer import (
    module_constants,
    print_expr,
    print_function,
    print_module,
    print_program,
    print_stmt,
    print_type,
    print_value,
)
from relaxlite.ir.program import (
    AddressOf,
    Allocate,
    Barrier,
    Binary,
    Buffer,
    CallLibrary,
    Cast,
    Check,
    Compare,
    For,
    IfThenElse,
    IndexValue,
    Intrinsic,
    LetIndex,
    LibraryFound,
    Literal,
    Load,
    Prefetch,
    Select,
    Seq,
    Stmt,
    Store,
    TensorProgram,
    Unary,
    Value,
)
from relaxlite.ir.program_visitor import ProgramRewriter
from relaxlite.ir.symbolic import FloorDiv, FloorMod, Max, Min, SymExpr, SymVar, evaluate, substitute, sym, syms
from relaxlite.ir.types import UNIT, FuncType, ObjectType, ShapeType, TensorType, TupleType, Type
from relaxlite.ir.verifier import STAGES, verify
from relaxlite.ir.visitor import Rewriter

__all__ = [
    "NO_ATTRS",
    "STAGES",
    "UNIT",
    "AddressOf",
    "Allocate",
    "Analyzer",
    "Attr",
    "AttrValue",
    "Attrs",
    "Barrier",
    "Binary",
    "Binding",
    "Block",
    "BlockBuilder",
    "Body",
    "Buffer",
    "Call",
    "CallLibrary",
    "Cast",
    "Check",
    "Compare",
    "Constant",
    "Definition",
    "Expr",
    "ExternFunction",
    "FloorDiv",
    "FloorMod",
    "For",
    "FuncType",
    "Function",
    "GlobalVar",
    "IRModule",
    "If",
    "IfThenElse",
    "IndexValue",
    "Intrinsic",
    "Leaf",
    "Let",
    "LetIndex",
    "LibraryFound",
    "Literal",
    "Load",
    "Loop",
    "Match",
    "MatchShape",
    "Matcher",
    "Max",
    "Min",
    "ObjectType",
    "Op",
    "Pattern",
    "Prefetch",
    "ProgramRewriter",
    "Rewriter",
    "Sample",
    "Select",
    "Seq",
    "ShapeType",
    "ShapeValue",
    "Stmt",
    "Store",
    "SymExpr",
    "SymVar",
    "TensorProgram",
    "TensorType",
    "Tuple",
    "TupleGetItem",
    "TupleType",
    "Type",
    "Unary",
    "Value",
    "Var",
    "all_ops",
    "evaluate",
    "first_difference",
    "get_op",
    "is_const",
    "is_field",
    "is_op",
    "match",
    "module_constants",
    "parse_module",
    "print_expr",
    "print_function",
    "print_module",
    "print_program",
    "print_stmt",
    "print_type",
    "print_value",
    "register",
    "structural_equal",
    "structural_hash",
    "substitute",
    "sym",
    "syms",
    "verify",
    "wildcard",
]
