"""Tensor programs to machine code through LLVM: `compile_programs`; `emit_program` and `emit_assembly` are to look at.

module.py      programs to one LLVM module to object code
statements.py  loops, stores, conditions, scratch memory; parallel.py, loops.py
values.py      expressions over data; scalars.py: each scalar function; math.py, math_double.py: exp, sin, ...
memory.py      loads and stores of one element, of a vector, under a mask; types.py: conversions
indices.py     symbolic integers, computed where their variables are; checked.py: with overflow tests
emitter.py     the builder of IR text
"""

from relaxlite.codegen.llvm.module import ObjectCode, compile_programs, emit_assembly, emit_program

__all__ = ["ObjectCode", "compile_programs", "emit_assembly", "emit_program"]
