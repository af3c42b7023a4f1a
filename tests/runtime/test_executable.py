"""Bytecode as data: what `validate` refuses, and what the disassembler shows."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import numpy as np
import pytest

from relaxlite.errors import ArtifactError
from relaxlite.runtime.executable import (
    Call,
    Const,
    ExecutableData,
    Goto,
    If,
    Imm,
    Instruction,
    KernelInfo,
    Reg,
    Ret,
    Signature,
    TensorSpec,
    VMFunction,
    bound_text,
    disassemble,
    validate,
)


def program(*code: Instruction, registers: int = 4, **fields: object) -> ExecutableData:
    main = VMFunction("main", ("x",), registers, code)
    x = TensorSpec("x", "float32", ("n",), {"n": (1, 8, 2)})
    data = ExecutableData({"main": main}, Signature((x,), (x,)))
    return dataclasses.replace(data, **fields)  # type: ignore[arg-type]


def test_places_of_other_instructions_are_refused() -> None:
    data = program(Goto(1), Ret(0))
    main = dataclasses.replace(data.functions["main"], locations=("ONNX node 'a' (Add)",))
    with pytest.raises(ArtifactError, match="function 'main': 1 places of 2 instructions"):
        validate(dataclasses.replace(data, functions={"main": main}))


def test_a_valid_program_passes() -> None:
    validate(program(If(0, 2), Goto(2), Ret(0)))


def test_the_disassembly_shows_everything() -> None:
    data = program(
        Call(1, "builtin:alloc_heap", (Imm(2),)),
        Call(-1, "kernel:add", (Reg(1), Imm(0), Reg(0), Const(0))),
        If(0, 3),
        Goto(4),
        Ret(0),
        kernels={"add": KernelInfo("add", "rl_add", ("a check",))},
        constants=(np.zeros((2, 3), np.int32),),
    )
    assert disassemble(data) == (
        "inputs:\n"
        "  x: float32[n] where 1 <= n <= 8, n % 2 == 0\n"
        "outputs:\n"
        "  x: float32[n] where 1 <= n <= 8, n % 2 == 0\n"
        "constants:\n"
        "  c0: int32[2, 3] (24 bytes)\n"
        "kernels:\n"
        "  add -> rl_add\n"
        "\n"
        "func main(r0 x)  # 4 registers\n"
        "  0: r1 = builtin:alloc_heap(2)\n"
        "  1: kernel:add(r1, 0, r0, c0)\n"
        "  2: if r0 else goto 3\n"
        "  3: goto 4\n"
        "  4: ret r0\n"
    )


def test_bounds_read_as_inequalities() -> None:
    assert bound_text("n", (0, None, 1)) == ""
    assert bound_text("n", (None, 5, 1)) == "n <= 5"
    assert bound_text("n", (1, None, 4)) == "1 <= n, n % 4 == 0"


KERNEL = {"k": KernelInfo("k", "k", (), num_buffers=1, num_symbols=2)}
BAD = [
    ("does not end in ret or goto", [Call(1, "builtin:copy", (Reg(0),))]),
    ("does not end in ret or goto", []),
    ("no register r4", [Ret(4)]),
    ("no register r-1", [Ret(-1)]),
    ("no register r9", [Call(9, "builtin:copy", (Reg(0),)), Ret(0)]),
    ("no register r-2", [Call(-2, "builtin:copy", (Reg(0),)), Ret(0)]),
    ("no register r7", [Call(1, "builtin:copy", (Reg(7),)), Ret(0)]),
    ("no constant c0", [Call(1, "builtin:copy", (Const(0),)), Ret(1)]),
    ("no instruction 1", [Goto(1)]),
    ("no instruction -1", [If(0, -1), Ret(0)]),
    ("no register r8", [If(8, 1), Ret(0)]),
    ("r1 is read before it is written", [Ret(1)]),
    ("r1 is read before it is written", [If(0, 2), Call(1, "builtin:copy", (Reg(0),)), Ret(1)]),
    ("no builtin 'fly'", [Call(1, "builtin:fly", ()), Ret(0)]),
    ("takes 1 operands, got 2", [Call(1, "builtin:copy", (Reg(0), Reg(0))), Ret(0)]),
    ("operand 0 must be an immediate integer >= 0", [Call(1, "builtin:alloc_heap", (Imm(-1),)), Ret(0)]),
    ("operand 0 must be a register or constant", [Call(1, "builtin:copy", (Imm(3),)), Ret(0)]),
    ("operand 2 must be an immediate dtype", [Call(1, "builtin:alloc_tensor", (Imm(None), Imm(()), Imm("f"))), Ret(0)]),
    ("operand 2 must be an immediate tuple of dims", [Call(1, "builtin:reshape", (Reg(0), Imm(None), Imm(3))), Ret(0)]),
    ("must be an immediate shape specification",
     [Call(-1, "builtin:match_shape", (Reg(0), Imm(None), Imm((("bind", -1, "n", 0, None, 1),)), Imm("x"))), Ret(0)]),
    ("no kernel 'z'", [Call(-1, "kernel:z", (Imm(None), Imm(0), Reg(0))), Ret(0)]),
    ("the kernel takes 1 tensors, got 2", [Call(-1, "kernel:k", (Reg(0), Imm(0), Reg(0), Reg(0))), Ret(0)]),
    ("has 2 symbols, but no heap", [Call(-1, "kernel:k", (Imm(None), Imm(0), Reg(0))), Ret(0)]),
    ("must be a heap, the first slot, then tensors", [Call(-1, "kernel:k", (Reg(0),)), Ret(0)]),
    ("no function 'f'", [Call(1, "func:f", ()), Ret(0)]),
    ("'main' takes 1 values, got 0", [Call(1, "func:main", ()), Ret(0)]),
    ("operands must be registers or constants", [Call(1, "func:main", (Imm(1),)), Ret(0)]),
    ("unknown kind of callee", [Call(1, "print", ()), Ret(0)]),
]  # fmt: skip


@pytest.mark.parametrize(("message", "code"), BAD)
def test_bad_bytecode_is_refused(message: str, code: list[Instruction]) -> None:
    with pytest.raises(ArtifactError) as caught:
        validate(program(*code, kernels=KERNEL))
    assert message in str(caught.value)
    assert "function 'main'" in str(caught.value)


def test_the_entry_must_exist_and_fit_the_signature() -> None:
    data = program(Ret(0))
    with pytest.raises(ArtifactError, match="no function 'main'"):
        validate(dataclasses.replace(data, functions={}))
    with pytest.raises(ArtifactError, match="takes 1 values, but the signature has 0 inputs"):
        validate(dataclasses.replace(data, signature=Signature((), ())))
    with pytest.raises(ArtifactError, match="'y' in the signature has the unknown dtype 'float99'"):
        validate(dataclasses.replace(data, signature=Signature((TensorSpec("y", "float99", ()),), ())))


def test_more_parameters_than_registers_is_refused() -> None:
    with pytest.raises(ArtifactError, match="1 parameters, 0 registers"):
        validate(program(Goto(0), registers=0))


def test_the_runtime_does_not_import_the_compiler() -> None:
    script = (
        "import sys, relaxlite.runtime, relaxlite.runtime.module\n"
        "bad = ('relaxlite.ir', 'relaxlite.passes', 'relaxlite.codegen', 'relaxlite.frontend', 'onnx', 'sympy')\n"
        "print([name for name in sys.modules if name.startswith(bad)])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
