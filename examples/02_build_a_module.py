"""Build a module by hand, watch passes change it, compile it and run it.

As it was built:

n = symbol("n")
@function
def main(x: Tensor((n, 4), "float32")):
    with dataflow():
        six: Tensor((), "float32") = multiply(const(2.0, "float32"), const(3.0, "float32"))
        scaled: Tensor((n, 4), "float32") = multiply(x, six)
        shifted: Tensor((n, 4), "float32") = add(scaled, const(1.0, "float32"))
        z: Tensor((n, 4), "float32") = relu(shifted)
    return z

Constants folded:

n = symbol("n")
@function
def main(x: Tensor((n, 4), "float32")):
    with dataflow():
        scaled: Tensor((n, 4), "float32") = multiply(x, const(6.0, "float32"))
        shifted: Tensor((n, 4), "float32") = add(scaled, const(1.0, "float32"))
        z: Tensor((n, 4), "float32") = relu(shifted)
    return z

Three calls became one loop nest:

n = symbol("n")
@function
def main(x: Tensor((n, 4), "float32")):
    with dataflow():
        z: Tensor((n, 4), "float32") = call(fused_multiply_add_relu, x, sym=(n,))
    return z

n = symbol("n")
@program(symbols=(n,), outputs=1)
def fused_multiply_add_relu(x: Buffer((n, 4), "float32"), z: Buffer((n, 4), "float32")):
    for i in serial(n):
        for j in serial(4):
            z[i, j] = max(x[i, j] * float32(6.0) + float32(1.0), float32(0.0))

(0, 4) as NumPy has it: True
(1000, 4) as NumPy has it: True
"""

import numpy as np

import relaxlite as rl
from relaxlite.passes.context import PassContext
from relaxlite.passes.manager import run_passes
from relaxlite.passes.pipeline import PASSES


def after(module: rl.IRModule, *names: str) -> rl.IRModule:
    return run_passes(module, [PASSES[name] for name in names], PassContext(rl.Target.host()))


# relu(x * (2 * 3) + 1), for any number n of rows. `emit` names a value, `result` ends the function.
bb = rl.BlockBuilder()
n = bb.symbol("n")
with bb.function("main", x=rl.TensorType.of((n, 4), "float32")) as (x,):
    six = bb.emit(rl.ops.multiply(np.float32(2), np.float32(3)), "six")
    scaled = bb.emit(rl.ops.multiply(x, six), "scaled")
    shifted = bb.emit(rl.ops.add(scaled, np.float32(1)), "shifted")
    bb.result(bb.emit(rl.ops.relu(shifted), "z"))
print(f"As it was built:\n\n{(module := bb.module())}")

# A module is immutable: a pass makes another one.
folded = after(module, "fold_constants", "eliminate_dead")
print(f"Constants folded:\n\n{folded}")

# Ops become loops ("legalize"), calls that belong together are grouped, and their loops merged.
fused = after(folded, "legalize", "fuse_ops", "fuse_programs", "drop_unused")
print(f"Three calls became one loop nest:\n\n{fused}")

# `rl.compile` runs all passes, on the module as it was built.
exe = rl.compile(module)
for rows in (0, 1000):
    x = np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)
    print(f"{x.shape} as NumPy has it: {np.allclose(exe(x), np.maximum(x * 6 + 1, 0), atol=1e-5)}")
