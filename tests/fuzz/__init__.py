"""The fuzzer: random well-typed modules, compiled with random pipelines, against the interpreter.

    python -m tests.fuzz --minutes 10            modules of new seeds, in one process per core
    python -m tests.fuzz --seed 77 --count 1     one module again
    python -m tests.fuzz --replay FILE           a failure that was kept, or an entry of tests/corpus

generator.py   the state of a module under construction; steps_*.py: what may be added to it
pipelines.py   random orders of passes
case.py        a module, its pipeline and its sizes, as a file; running it
shrink.py      the least case with the same failure
runner.py      many cases, in processes that may die
"""
