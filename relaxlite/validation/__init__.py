"""Translation validation by execution: a module computes the same before and after each pass, and as machine code.

samples.py     sizes of symbols, and random inputs of these sizes
running.py     execution of tensor programs by the interpreter or by bounds-checked machine code
oracle.py      results of the original module, and how far rounding may move each element
rounding.py    execution with perturbed or higher-precision floats
sum_lengths.py   number of terms that an op sums
difference.py  comparison of two results
coverage.py    how many elements were compared, and how tightly
record.py      mismatches as files that reproduce them
validator.py   the check of each pass and of the compiled model
"""

from relaxlite.validation.validator import Validator

__all__ = ["Validator"]
