"""What a user holds: a compiled model that is called with arrays.

exe = load("model.rlx")
print(exe.inputs)                     # names, dtypes, symbolic shapes, bounds
logits = exe(tokens, mask=mask)       # one array, or a tuple in the model's order
named = exe.run({"input.ids": ids})   # by name, also where names are not identifiers
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from relaxlite import config, dtypes
from relaxlite.errors import ExecutionError, InputError, InvalidArgumentError
from relaxlite.garbage import with_gc_disabled
from relaxlite.runtime import artifact, scratch, threadpool
from relaxlite.runtime.executable import ENTRY, Bound, ExecutableData, TensorSpec, bound_problem, disassemble
from relaxlite.runtime.host import HostFailedError
from relaxlite.runtime.tensor import Tensor, export_array, import_tensor
from relaxlite.runtime.vm import VirtualMachine
from relaxlite.runtime.weights import aligned, placed

if TYPE_CHECKING:
    from relaxlite.runtime.profile import Profile
    from relaxlite.runtime.roofline import MachineLimits

_UNBOUNDED: Bound = (0, None, 1)


class Specs(tuple[TensorSpec, ...]):
    """The inputs or outputs of a model; prints one per line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) if self else "()"


class Executable:
    """A compiled model. May be called from several threads at once."""

    @with_gc_disabled
    def __init__(self, data: ExecutableData, *, threads: int | None = None, is_checked: bool = False) -> None:
        """`is_checked`: `artifact.load` has found the bytecode valid, and the code to run here; else an ArtifactError
        says where it is not, or why."""
        if threads is not None:
            threadpool.set_num_threads(threads)
        weights, waiting = placed(data.constants) if config.get("huge_pages") else (aligned(data.constants), ())
        data = replace(data, constants=weights)
        self.data = data
        self._vm = VirtualMachine(data, is_checked=is_checked)
        self._vm.constants.move(waiting)
        self._become(ENTRY)

    def _become(self, name: str) -> None:
        """The function of this name, over the weights and kernels of the executable."""
        entry = self.data.entries[name]
        self._name, signature = name, entry.signature
        self.inputs, self.outputs = Specs(signature.inputs), Specs(signature.outputs)
        is_interpreted = config.get("interpret") or self._vm.check_memory
        self._host = None if is_interpreted else self._vm.host_function(entry)
        self._names = tuple(spec.name for spec in self.inputs)
        self._output_names = tuple(spec.name for spec in self.outputs)
        self._plans = [_InputPlan(spec) for spec in self.inputs]
        self._donated = tuple(self._names.index(name) for name in signature.donated)

    def entry(self, name: str) -> Executable:
        """Another function of the model, called like the model itself; what both need is in memory once.

        Raises InvalidArgumentError for one that it does not have.
        """
        if name not in self.data.entries:
            raise InvalidArgumentError(f"the model has no function {name!r}; it has {', '.join(self.data.entries)}")
        result = copy.copy(self)
        result._become(name)
        return result

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on arrays, in its order or by name: one array, or a tuple of them in the model's order.

        Arrays are anything with DLPack or the array interface, or lists of numbers. Raises InputError when they do not
        fit the signature, ExecutionError when the model itself fails, OutOfMemoryError.
        """
        results = self._call(self._by_position(args, kwargs) if kwargs or len(args) != len(self._names) else args)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run the model on named arrays; its outputs by name."""
        if not isinstance(inputs, Mapping):
            example = f"{{{self._names[0]!r}: ...}}" if self._names else "{}"
            kind = type(inputs).__name__
            raise InputError(
                f"run takes arrays by name, as {example}, got {kind}; call the model itself with arrays in its order"
            )
        results = self._call(self._by_position((), inputs))
        return dict(zip(self._output_names, results, strict=True))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the model to one file, which `relaxlite.load` reads. Raises ArtifactError."""
        artifact.save(self.data, path)

    def profile(
        self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 10, limits: MachineLimits | None = None
    ) -> Profile:
        """Run the model some times and say where the time went, kernel by kernel, and with the `limits` of this machine
        (relaxlite.machine.limits()) how much faster it could be. The first run is not counted.

        `inputs`: by name, or a tuple or list in the model's order; anything else is the one input.
        """
        if runs < 1:
            raise InvalidArgumentError(f"runs must be at least 1, got {runs}")
        if isinstance(inputs, Mapping):
            values = self._by_position((), inputs)
        else:
            values = self._by_position(inputs if isinstance(inputs, tuple | list) else (inputs,), {})
        from relaxlite.runtime.profile import Recorder, measure  # with what it imports, 1 MB that no other call needs

        recorder = Recorder(self.data.kernels)
        kernels = {n: recorder.timed(n, k) for n, k in self._vm.kernels.items()}
        vm = VirtualMachine(self.data, kernels=kernels, constants=self._vm.constants)
        self._vm.constants.settle()
        threads = threadpool.num_threads()

        def run() -> None:
            self._interpret(vm, self._import(values))

        profile = measure(run, recorder, runs=runs, threads=threads, limits=limits)
        shapes = {spec.name: _describe(value, spec) for spec, value in zip(self.inputs, values, strict=True)}
        return replace(profile, inputs=shapes)

    @property
    def missing_libraries(self) -> tuple[str, ...]:
        """Why routines of libraries are not called, for which this model has kernels of its own; one sentence each."""
        return self._vm.missing_libraries

    def disassemble(self) -> str:
        """The bytecode as text."""
        return disassemble(self.data)

    def release_memory(self) -> int:
        """Give memory that waits for the next call back to the system; says how many bytes that were.

        It is the arenas of this model, and what all models share: blocks of data-dependent size, and those of large
        results that nobody refers to any more.
        """
        arenas = self._vm.release_memory() + (self._host.release_memory() if self._host is not None else 0)
        return arenas + scratch.trim()

    def __repr__(self) -> str:
        outputs = ", ".join(map(str, self.outputs))
        return f"Executable({', '.join(map(str, self.inputs))}) -> ({outputs})"

    def _by_position(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments in the model's order."""
        names = self._names
        if not args and len(kwargs) == len(names):
            try:
                return tuple([kwargs[name] for name in names])
            except KeyError:
                pass  # which one is missing is said below
        if not kwargs and len(args) == len(names):
            return tuple(args)
        takes = f"the model takes {len(names)} ({', '.join(names)})"
        if len(args) > len(names):
            raise InputError(f"got {len(args)} arguments; {takes}")
        for name in kwargs:
            if name not in names:
                raise InputError(f"there is no argument '{name}'{_did_you_mean(name, names)}; {takes}")
        given = dict(zip(names, args, strict=False))
        if twice := [name for name in kwargs if name in given]:
            raise InputError(f"argument '{twice[0]}' is given both by position and by name")
        given.update(kwargs)
        if missing := [name for name in names if name not in given]:
            plural = "s" if len(missing) > 1 else ""
            raise InputError(f"missing argument{plural} {', '.join(map(repr, missing))}; {takes}")
        return tuple([given[name] for name in names])

    def _call(self, values: tuple[Any, ...]) -> list[np.ndarray]:
        """Run natively where that is possible: with the arguments as they are, then with what can be made of them."""
        host = self._host
        if host is not None:
            try:
                if (results := host(values)) is not None:
                    return results
            except HostFailedError:
                host = None
        for number in self._donated:
            self._plans[number].check_donated(values[number])
        tensors = self._import(values)
        if host is not None:
            try:
                if (results := host(tuple([tensor.owner for tensor in tensors]))) is not None:
                    return results
            except HostFailedError:
                pass
        return self._interpret(self._vm, tensors)

    def _import(self, values: Sequence[Any]) -> list[Tensor]:
        """The arguments as tensors, which fit the signature. Raises InputError."""
        symbols: dict[str, tuple[int, str]] = {}
        return [plan.take(value, symbols) for plan, value in zip(self._plans, values, strict=True)]

    def _interpret(self, vm: VirtualMachine, tensors: list[Tensor]) -> list[np.ndarray]:
        result = vm.run(self._name, tensors)
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(self.outputs) or not all(isinstance(item, Tensor) for item in results):
            raise ExecutionError(f"the model should give {len(self.outputs)} tensors, got {result!r}")
        given: set[int] = set()
        return [export_array(tensor, given) for tensor in results]


def load(path: str | os.PathLike[str], *, threads: int | None = None, verify: bool = False) -> Executable:
    """Open a saved model. Raises ArtifactError when the file is not one, is damaged, or needs another machine.

    `threads`: how many threads work on one parallel loop, in the whole process. `verify`: check every byte of large
    weights too, which reads the whole file.
    """
    return Executable(artifact.load(path, verify=verify), threads=threads, is_checked=True)


def _describe(value: Any, spec: TensorSpec) -> str:
    """ "float32[1, 128]" """
    return f"{spec.dtype}[{', '.join(map(str, np.shape(value)))}]"


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


class _InputPlan:
    """The checks of one argument. Compound dimensions, as n*2 + 1, are left to the bytecode's match_shape."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec, self.what, self.dtype, self.rank = spec, f"argument '{spec.name}'", spec.dtype, len(spec.shape)
        self.numpy_dtype = dtypes.to_numpy(spec.dtype)
        dims = list(enumerate(spec.shape))
        self.constants = [(axis, dim) for axis, dim in dims if isinstance(dim, int)]
        self.symbols = [(axis, dim) for axis, dim in dims if isinstance(dim, str) and dim.isidentifier()]

    def check_donated(self, value: Any) -> None:
        """InputError unless the array is one that a call can write its new contents to."""
        if not isinstance(value, np.ndarray) or value.dtype != self.numpy_dtype or not value.flags.carray:
            raise InputError(
                f"{self.what} is overwritten: it must be a writable, dense NumPy array of {self.dtype}, got "
                f"{type(value).__name__} {getattr(value, 'dtype', '')}"
            )

    def take(self, value: Any, symbols: dict[str, tuple[int, str]]) -> Tensor:
        """The argument as a tensor. `symbols`: values and where they come from, of this call so far."""
        tensor = import_tensor(value, self.dtype, self.what)
        shape = tensor.shape
        if len(shape) != self.rank:
            raise InputError(f"{self.what}: expects {self._type()} of rank {self.rank}, got rank {len(shape)}: {shape}")
        for axis, size in self.constants:
            if shape[axis] != size:
                raise self._error(axis, shape, f"expects {size}, got {shape[axis]}; the type is {self._type()}")
        for axis, symbol in self.symbols:
            if symbol not in symbols:
                if problem := bound_problem(symbol, self.spec.bounds.get(symbol, _UNBOUNDED), shape[axis]):
                    raise self._error(axis, shape, problem)
                symbols[symbol] = shape[axis], self.what
            elif symbols[symbol][0] != shape[axis]:
                other, source = symbols[symbol]
                raise self._error(axis, shape, f"{symbol} is {shape[axis]} here, but {other} in {source}")
        return tensor

    def _type(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.spec.shape))}]"

    def _error(self, axis: int, shape: tuple[int, ...], problem: str) -> InputError:
        return InputError(f"{self.what}: dimension {axis} of shape {shape}: {problem}")
