"""Build a module by hand, watch passes change it, compile it, run it: python 02_build_a_module.py

As it was built:

n = symbol("n")
@function
def main(x: Tensor((n, 4), "float32")):
    with dataflow():
        a: Tensor((n, 4), "float32") = tanh(x)
        b: Tensor((n, 4), "float32") = tanh(x)
        c: Tensor((n, 4), "float32") = multiply(b, x)
        d: Tensor((n, 4), "float32") = add(a, c)
    return d

tanh(x) is computed once:

n = symbol("n")
@function
def main(x: Tensor((n, 4), "float32")):
    with dataflow():
        a: Tensor((n, 4), "float32") = tanh(x)
        c: Tensor((n, 4), "float32") = multiply(a, x)
        d: Tensor((n, 4), "float32") = add(a, c)
    return d

Three calls became one loop nest:

?

(0, 4): True
(1, 4): True
(1000, 4): True
"""

import numpy as np

import relaxlite as rl
from relaxlite.passes.manager import PassContext, run_passes
from relaxlite.passes.pipeline import PASSES


def after(module: rl.IRModule, *names: str) -> rl.IRModule:
    return run_passes(module, [PASSES[name] for name in names], PassContext(rl.Target.host()))


# tanh(x) + tanh(x) * x, for any number n of rows. `emit` names a value, `result` ends the function.
bb = rl.BlockBuilder()
n = bb.symbol("n")
with bb.function("main", x=rl.TensorType.of((n, 4), "float32")) as (x,):
    a = bb.emit(rl.ops.tanh(x), "a")
    b = bb.emit(rl.ops.tanh(x), "b")
    c = bb.emit(rl.ops.multiply(b, x), "c")
    bb.result(bb.emit(rl.ops.add(a, c), "d"))
module = bb.module()
print(f"As it was built:\n\n{module}")

# A module is immutable: a pass makes another one.
cleaned = after(module, "eliminate_common", "eliminate_dead")
print(f"tanh(x) is computed once:\n\n{cleaned}")

# Ops become loops ("legalize"), calls that belong together are grouped, and their loops merged.
fused = after(cleaned, "legalize", "fuse_ops", "fuse_programs", "drop_unused")
print(f"Three calls became one loop nest:\n\n{fused}")

# `rl.compile` runs all passes, on the module as it was built.
exe = rl.compile(module)
for rows in (0, 1, 1000):
    x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
    print(f"{x.shape}: {np.allclose(exe(x), np.tanh(x) + np.tanh(x) * x, atol=1e-6)}")
