"""Compile the bytecode of an entry to a host function, so that a call of a model is one native call.

`runtime/host.py` defines the interface. Bytecode is compiled instruction by instruction, with the interpreter's checks;
a failed check gives up, and the interpreter runs the call again to raise the error. Kernels are called through a table
of addresses, so the object has no dependencies on other objects.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from relaxlite import dtypes
from relaxlite.codegen.host_inline import NotNativeError, inline_calls
from relaxlite.codegen.host_plan import plan_host
from relaxlite.codegen.kernel_cache import open_cache
from relaxlite.codegen.llvm.compile import generator_key
from relaxlite.codegen.llvm.emitter import FALSE, TRUE, Emitter, ModuleEmitter, Val, int_const
from relaxlite.codegen.llvm.host_values import MEMORY_IR, HostTensor, HostValue
from relaxlite.codegen.llvm.host_writer import NULL, AvailableValues, HostProgram, HostWriter
from relaxlite.codegen.llvm.machine_code import to_object
from relaxlite.errors import CodegenError
from relaxlite.runtime import host
from relaxlite.runtime.executable import (
    ENTRY,
    Call,
    Goto,
    HostCode,
    If,
    KernelInfo,
    Reg,
    Ret,
    Signature,
    VMFunction,
)
from relaxlite.target import Target


def compile_host(
    functions: Mapping[str, VMFunction],
    signature: Signature,
    kernels: Mapping[str, KernelInfo],
    constants: Sequence[np.ndarray],
    target: Target,
    name: str = ENTRY,
) -> HostCode:
    """Compile the host function of entry `name`; without code, but with a reason, where bytecode must be interpreted.

    The bytecode must be valid. CodegenError where LLVM rejects the generated code.
    """
    if target.kind != "llvm":
        return HostCode(reason="host functions read tensors, which lie in the memory of a GPU")
    try:
        plan = plan_host(inline_calls(functions, name), len(signature.outputs))
        program = HostProgram(plan, signature, kernels, constants, host.FrameLayout.of(signature))
        code = _code_of(program, target)
    except NotNativeError as error:
        return HostCode(reason=str(error))
    except CodegenError as error:
        raise CodegenError(f"the host function: {error}") from error
    return HostCode(code, sum(slots for _, slots in plan.heaps.values()))


def _code_of(program: HostProgram, target: Target) -> bytes:
    """Object code of the host function, by the kernel cache."""
    types = [(array.dtype.name, array.shape) for array in program.constants]
    parts = (program.plan.function, program.signature, list(program.kernels.values()), types)
    key = hashlib.sha256(f"host {generator_key(target)} {parts!r}".encode()).hexdigest()
    store = open_cache()
    code = store.get(key) if store else None
    if code is None:
        code = to_object(emit_host(program, target), target, optimize=False)
        if store:
            store.put({key: code})
    return code


def emit_host(program: HostProgram, target: Target) -> str:
    """LLVM IR of a host function; NotNativeError where the bytecode cannot be compiled."""
    module = ModuleEmitter(target)
    _Prepare(module, program).write()
    _Run(module, program).write()
    _write_finish(module, program)
    module.functions.append(MEMORY_IR)
    return module.text()


def _write_finish(module: ModuleEmitter, program: HostProgram) -> None:
    """Write the finish function: copies flagged results to Python's arrays, and releases the owners of all results."""
    e = Emitter(module)
    e.start("entry")

    def word(at: int, elem: str, hint: str) -> Val:
        place = e.op(f"getelementptr i64, ptr %frame, i64 {at}", "ptr", 0, "at")
        return e.op(f"load {elem}, {place}, align 8", elem, 0, hint)

    for record in program.layout.outputs:
        copies, done = e.fresh("copies"), e.fresh("done")
        e.branch_if(e.icmp("ne", word(record + host.OUT_COPIED, "i64", "flag"), int_const(0)), copies, done)
        e.start(copies)
        to = e.call("relaxlite_array_data", [word(record + host.OUT_ARRAY, "ptr", "array")], "ptr", 0, "to")
        source, nbytes = word(record + host.OUT_RESULT, "ptr", "result"), word(record + host.OUT_BYTES, "i64", "bytes")
        e.line(f"call void @llvm.memcpy.p0.p0.i64({to}, {source}, {nbytes}, i1 false)")
        e.branch(done)
        e.start(done)
        e.line(f"call void @release({word(record + host.OUT_OWNER, 'ptr', 'owner')})")
    e.line("ret void")
    module.add_function(f"define void @{host.FINISH}(ptr %frame)", e)


class _Prepare(HostWriter):
    """Writer of the prepare function: reads and checks the arguments, and runs the shape prologue."""

    def __init__(self, module: ModuleEmitter, program: HostProgram) -> None:
        super().__init__(module, program, frozenset())

    def write(self) -> None:
        e, plan = self.e, self.plan
        plan_at, place = self.load_word(host.PLAN, "ptr", "plan"), self.at(self.frame, host.INPUTS)
        arguments = Val("%arguments", "ptr")
        refused = e.call("relaxlite_read_arrays", [arguments, plan_at, place], "i32", 0, "refused")
        self.give_up_if([e.icmp("ne", refused, int_const(0, "i32"), "odd")])
        self._check_arguments()
        self.registers.update(enumerate(self.parameters()))
        for at in range(plan.split):
            call = plan.function.instructions[at]
            assert isinstance(call, Call)
            self.instruction(at, call)
        needs_memory = self._announce_memory()
        ready = e.select(needs_memory, int_const(host.READY_NEEDS_MEMORY, "i32"), int_const(host.READY, "i32"), "ready")
        e.line(f"ret {ready}")
        e.start("give_up")
        e.line(f"ret i32 {host.REFUSED}")
        self.module.add_function(f"define i32 @{host.PREPARE}(ptr %arguments, ptr %frame)", e)

    def _check_arguments(self) -> None:
        """Check constant dimensions, bounds of each symbol at its first use, and equality at later uses."""
        bad: list[Val] = []
        symbols: dict[str, Val] = {}
        for at, spec in zip(self.layout.inputs, self.program.signature.inputs, strict=True):
            for axis, size in enumerate(spec.shape):
                dim = self.load_word(at + 1 + axis, hint="dim")
                if isinstance(size, int):
                    bad += self.differs(dim, int_const(size))
                elif size in symbols:
                    bad += self.differs(dim, symbols[size])
                elif size.isidentifier():
                    symbols[size] = dim
                    lower, upper, divisor = spec.bounds.get(size, (0, None, 1))
                    bad += self.out_of_bounds(dim, lower, upper, divisor, is_size=True)
        self.give_up_if(bad)

    def _announce_memory(self) -> Val:
        """Store the sizes of arena and outputs in the frame; returns whether small arrays do not suffice (i1).

        Outputs of unknown shape are announced as empty, and copied by the finish function.
        """
        e, plan = self.e, self.plan
        conditions = [e.icmp("ne", self.load_word(host.POISON), int_const(0), "poisons")]
        if plan.arena is not None:
            (needed,) = self.dims(plan.heap, (plan.arena[1],))
            self.store_word(needed, host.ARENA_NEEDED)
            conditions.append(e.icmp("sgt", needed, self.load_word(host.ARENA_BYTES), "grows"))
        specs = self.program.signature.outputs
        for record, spec, prepared in zip(self.layout.outputs, specs, plan.prepared, strict=True):
            is_known = prepared is not None and (prepared.heap == plan.heap or min(prepared.dims, default=0) >= 0)
            shape = prepared.dims if prepared is not None and is_known else (0,) * len(spec.shape)
            if len(shape) != len(spec.shape):
                raise NotNativeError(f"the output '{spec.name}' has another rank than the signature says")
            dims = self.dims(plan.heap, shape)
            nbytes = self.product(dims, dtypes.itemsize(spec.dtype))
            self.store_word(nbytes, record + host.OUT_BYTES)
            for axis, dim in enumerate(dims):
                self.store_word(dim, record + host.OUT_DIMS + axis)
            conditions.append(e.icmp("sge", nbytes, int_const(host.LARGE_RESULT), "large"))
        condition = conditions[0]
        for further in conditions[1:]:
            condition = e.binary("or", condition, further, "care")
        return condition


class _Run(HostWriter):
    """Writer of the run function: the instructions behind the shape prologue."""

    def __init__(self, module: ModuleEmitter, program: HostProgram) -> None:
        super().__init__(module, program, program.plan.variables)
        with self.e.place(self.entry):
            self.status = self.e.op("alloca i32", "ptr", 0, "status_at")
        self.prepared: dict[int, Val] = {}  # output number -> address of the array that Python has allocated

    def write(self) -> None:
        e, code = self.e, self.plan.function.instructions
        e.call_void("relaxlite_hold_workers", [int_const(1, "i32")])
        self._take_arrays()
        for register, tensor in enumerate(self.parameters()):
            self.define(register, tensor)
        after_jumps = {at + 1 for at, i in enumerate(code) if isinstance(i, Goto | If | Ret)}
        labels = self.plan.targets | after_jumps
        for at in range(self.plan.split, len(code)):
            if at in labels:
                if at not in after_jumps:
                    e.branch(f"at{at}")
                e.start(f"at{at}")
                self.known = AvailableValues()
            match code[at]:
                case Call() as call:
                    self.instruction(at, call)
                    for site in self.plan.releases.get(at, ()):
                        self.release(site)
                case Goto(target):
                    e.branch(f"at{target}")
                case If(register, target):
                    e.branch_if(self._truth(register), f"at{at + 1}", f"at{target}")
                case Ret(register):
                    self._return(register)
        self._leave()

    def _take_arrays(self) -> None:
        """Load the addresses of the outputs that Python has allocated."""
        for number, (record, prepared) in enumerate(zip(self.layout.outputs, self.plan.prepared, strict=True)):
            if prepared is not None:
                array = self.load_word(record + host.OUT_ARRAY, "ptr", "array")
                self.prepared[number] = self.e.call("relaxlite_array_data", [array], "ptr", 0, "result")

    def allocate(self, at: int, nbytes: Val) -> tuple[Val, Val]:
        """Use the output array that Python has allocated, where instruction `at` is its site and the size matches."""
        outputs = [k for k, prepared in enumerate(self.plan.prepared) if prepared is not None and prepared.site == at]
        if not outputs:
            return super().allocate(at, nbytes)
        pointer = self.prepared[outputs[0]]
        announced = self.load_word(self.layout.outputs[outputs[0]] + host.OUT_BYTES, hint="announced")
        expected = self.e.icmp("eq", nbytes, announced, "expected")
        ptr, owner = self.e.if_values(
            expected, lambda: (pointer, NULL), lambda: super(_Run, self).allocate(at, nbytes), "own"
        )
        return ptr, owner

    def _truth(self, register: int) -> Val:
        condition = self.tensor(Reg(register))
        if condition.dtype != "bool":
            raise NotNativeError("a condition is no bool")
        self.give_up_if(self.differs(self.product(condition.dims, 1), int_const(1)))
        byte = self.load(condition.ptr, "i8", "condition", 1)
        return self.e.icmp("ne", byte, int_const(0, "i8"), "is_true")

    def _return(self, register: int) -> None:
        value = self.value(Reg(register))
        items = value if isinstance(value, tuple) else (value,)
        if len(items) != len(self.layout.outputs):
            raise NotNativeError("it does not return as many values as the signature has outputs")
        results = [self._result(number, item) for number, item in enumerate(items)]
        sizes = [self.product(result.dims, dtypes.itemsize(result.dtype)) for result in results]  # may give up
        copied = FALSE
        for number, (result, nbytes) in enumerate(zip(results, sizes, strict=True)):
            copied = self.e.binary("or", copied, self._write_record(number, result, nbytes), "copied")
        self.store(self.e.cast("zext", copied, "i32", "status"), self.status)
        self.e.branch("leave")

    def _result(self, number: int, item: HostValue) -> HostTensor:
        spec = self.program.signature.outputs[number]
        tensor = self.as_tensor(item)
        if (tensor.dtype, len(tensor.dims)) != (spec.dtype, len(spec.shape)):
            raise NotNativeError(f"the output '{spec.name}' is not of the signature's type")
        return tensor

    def _write_record(self, number: int, tensor: HostTensor, nbytes: Val) -> Val:
        """Fill in an output's record of the frame; returns whether the finish function must copy the result (i1)."""
        e, record = self.e, self.layout.outputs[number]
        differs = [TRUE]
        if number in self.prepared:
            differs = [e.icmp("ne", tensor.ptr, self.prepared[number], "elsewhere")]
            for axis, dim in enumerate(tensor.dims):
                announced = self.load_word(record + host.OUT_DIMS + axis, hint="announced")
                differs.append(e.icmp("ne", dim, announced, "differs"))
        copied = differs[0]
        for further in differs[1:]:
            copied = e.binary("or", copied, further, "copied")
        for axis, dim in enumerate(tensor.dims):
            self.store_word(dim, record + host.OUT_DIMS + axis)
        self.store_word(nbytes, record + host.OUT_BYTES)
        owner = tensor.owner or NULL
        e.line(f"call void @retain({owner})")
        self.store_word(owner, record + host.OUT_OWNER)
        self.store_word(tensor.ptr, record + host.OUT_RESULT)
        self.store_word(e.cast("zext", copied, "i64", "copied"), record + host.OUT_COPIED)
        return copied

    def _leave(self) -> None:
        """Write the exits: release all owned blocks and return the status."""
        e, slots = self.e, self.num_owners
        e.start("give_up")
        self.store(int_const(host.GAVE_UP, "i32"), self.status)
        e.branch("leave")
        e.start("leave")
        if slots:
            with e.place(self.owners):
                e.line(f"%owners = alloca [{slots} x ptr], align 8")
                e.line(f"call void @llvm.memset.p0.i64(ptr %owners, i8 0, i64 {8 * slots}, i1 false)")
            e.line(f"call void @release_all(ptr %owners, i64 {slots})")
        e.call_void("relaxlite_hold_workers", [int_const(-1, "i32")])
        e.line(f"ret {self.load(self.status, 'i32', 'result', 4)}")
        self.module.add_function(f"define i32 @{host.RUN}(ptr %frame)", e)
