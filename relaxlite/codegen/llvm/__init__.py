"""Compile tensor programs to machine code by LLVM: `compile_programs`; `emit_program` and `emit_assembly` give text.

compile.py     programs to object files, by the on-disk cache and on all cores
machine_code.py LLVM IR to an object file; isolated.py: in a child process
module.py      a program to LLVM IR
statements.py  loops, stores, conditions, scratch memory; parallel.py, loops.py
values.py      expressions over data; scalars.py: each scalar function; math*.py, erf_table.py: exp, sin, ...
memory.py      loads and stores of one element, of a vector, under a mask; types.py: conversions
indices.py     symbolic integers, hoisted out of loops; checked.py: with overflow checks
emitter.py     builder of LLVM IR as text
host.py        bytecode to a host function; host_writer.py: its instructions, host_values.py: its values
support.py     object code of the runtime's own functions
"""

from relaxlite.codegen.llvm.compile import ObjectCode, compile_programs, emit_assembly
from relaxlite.codegen.llvm.host import compile_host
from relaxlite.codegen.llvm.module import emit_program
from relaxlite.codegen.llvm.support import compile_support

__all__ = ["ObjectCode", "compile_host", "compile_programs", "compile_support", "emit_assembly", "emit_program"]
