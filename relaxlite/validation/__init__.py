"""Proof by running: does a module compute the same before and after each pass, and as machine code?

samples.py     sizes for the symbols, and inputs of these sizes
running.py     tensor programs, by the interpreter or by machine code that is as careful
oracle.py      what the original module computes, and how far rounding may move each element
rounding.py    other roundings than those that a module spells out
difference.py  two results compared
coverage.py    how much was compared, and how closely
record.py      a mismatch as files that run again
validator.py   the check of each pass, and of the compiled model
"""

from relaxlite.validation.validator import Validator

__all__ = ["Validator"]
