"""User interface of compiled models: `Executable`, which is called with arrays.

exe = load("model.rlx")
print(exe.inputs)                     # names, dtypes, symbolic shapes, bounds
logits = exe(tokens, mask=mask)       # one array, or a tuple in the model's order
named = exe.run({"input.ids": ids})   # by name, also where names are not identifiers
"""

from __future__ import annotations

import copy
import difflib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from relaxlite import config, dtypes
from relaxlite.errors import ExecutionError, InputError, InvalidArgumentError
from relaxlite.garbage import with_gc_disabled
from relaxlite.nesting import INITIAL_STATE, CallStructure, nest, to_array, to_tensor, torch_of
from relaxlite.runtime import artifact, scratch, threadpool
from relaxlite.runtime.border import Border
from relaxlite.runtime.executable import ENTRY, ExecutableData, SymbolBounds, TensorSpec, bound_problem, disassemble
from relaxlite.runtime.host import HostFailedError
from relaxlite.runtime.state import State
from relaxlite.runtime.tensor import Tensor, export_array, import_tensor
from relaxlite.runtime.vm import VirtualMachine
from relaxlite.runtime.weights import align_weights, place_weights

if TYPE_CHECKING:
    from relaxlite.runtime.profile import Profile
    from relaxlite.runtime.roofline import MachineLimits

Update: TypeAlias = "Callable[[ExecutableData, Any], ExecutableData]"  # gives a model with other weights

_UNBOUNDED: SymbolBounds = (0, None, 1)


class Specs(tuple[TensorSpec, ...]):
    """Inputs or outputs of a model; printed one per line."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(map(str, self)) if self else "()"


class Executable:
    """A compiled model. Thread-safe."""

    @with_gc_disabled
    def __init__(
        self,
        data: ExecutableData,
        *,
        threads: int | None = None,
        is_checked: bool = False,
        update: Update | None = None,
    ) -> None:
        """Link the kernels and place the weights.

        `threads`: size of the process's thread pool. `is_checked`: bytecode and machine are already validated, by
        `artifact.load`; else ArtifactError where they are not valid. `update`: what `load_weights` calls.
        """
        if threads is not None:
            threadpool.set_num_threads(threads)
        uses_huge_pages = config.get("huge_pages") and not data.target.device
        weights, pending = place_weights(data.constants) if uses_huge_pages else (align_weights(data.constants), ())
        data = replace(data, constants=weights)
        self.data, self._update = data, update
        self._vm = VirtualMachine(data, is_checked=is_checked)
        self._vm.constants.move(pending)
        self._bind_entry(ENTRY)

    def _bind_entry(self, name: str) -> None:
        """Set up calls of the entry of this name."""
        entry = self.data.entries[name]
        self._name, signature = name, entry.signature
        num_inputs = len(signature.inputs) - len(signature.state)  # the state is no argument
        self.inputs, self.outputs = Specs(signature.inputs[:num_inputs]), Specs(signature.outputs)
        is_interpreted = config.get("interpret") or self._vm.check_memory
        self._host = None if is_interpreted else self._vm.host_function(entry)
        self._names = tuple(spec.name for spec in self.inputs)
        self._output_names = tuple(spec.name for spec in self.outputs)
        self._border = Border(signature) if signature.input_forms else None
        if self._border is not None:
            self._names, self._output_names = self._border.input_names, self._border.output_names
        self._plans = [_ArgumentCheck(spec) for spec in signature.inputs]
        all_names = [spec.name for spec in signature.inputs]
        self._donated = tuple(all_names.index(name) for name in signature.donated)
        self._structure = CallStructure.of_text(signature.structure) if signature.structure else None
        self._state = State(signature.state, self.entry(INITIAL_STATE)) if signature.state else None

    def entry(self, name: str) -> Executable:
        """Another entry of the model as an executable that shares kernels and weights with this one.

        Raises InvalidArgumentError for an unknown name.
        """
        if name not in self.data.entries:
            raise InvalidArgumentError(f"the model has no function {name!r}; it has {', '.join(self.data.entries)}")
        executable = copy.copy(self)
        executable._bind_entry(name)
        return executable

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on arrays by position or name; returns one array, or a tuple in the model's order.

        Arguments: objects with DLPack or the array interface, or lists of numbers. Raises InputError where they do not
        match the signature, ExecutionError where the model fails, OutOfMemoryError.
        """
        if self._structure is not None:
            return self._call_nested(self._structure, args, kwargs)
        results = self._call(self._ordered_arguments(args, kwargs) if kwargs or len(args) != len(self._names) else args)
        return results[0] if len(results) == 1 else tuple(results)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Run the model on arrays by name; returns the outputs by name. Raises as calling does."""
        if not isinstance(inputs, Mapping):
            example = f"{{{self._names[0]!r}: ...}}" if self._names else "{}"
            kind = type(inputs).__name__
            raise InputError(
                f"run takes arrays by name, as {example}, got {kind}; call the model itself with arrays in its order"
            )
        results = self._call(self._ordered_arguments((), inputs))
        return dict(zip(self._output_names, results, strict=True))

    def _call_nested(self, structure: CallStructure, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a model whose arguments and results are nested; tensors of PyTorch give such results."""
        values = structure.arguments(args, kwargs)
        torch = torch_of(values)
        arrays = values if torch is None else [to_array(v) if isinstance(v, torch.Tensor) else v for v in values]
        copies = self._dense_copies(arrays)
        results = self._call(tuple(arrays))
        for original, copy_of in copies:
            original[...] = copy_of
        return nest(structure.result, results, partial(to_tensor, torch) if torch else _identity)

    def _dense_copies(self, arrays: list[Any]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Replace arrays that a call overwrites and that are not dense by copies; return pairs to write back."""
        pairs = []
        for number in self._donated:
            if number < len(arrays) and isinstance(arrays[number], np.ndarray) and not arrays[number].flags.carray:
                pairs.append((arrays[number], arrays[number].copy(order="C")))
                arrays[number] = pairs[-1][1]
        return pairs

    @property
    def state(self) -> State:
        """The state that calls read and write, such as a cache in a buffer; array by name, `state.reset()`.

        Raises InvalidArgumentError for a model without state.
        """
        if self._state is None:
            raise InvalidArgumentError("the model has no state: it writes no buffer")
        return self._state

    def fresh(self) -> Executable:
        """Return an executable that shares kernels and weights with this one and has a state of its own."""
        executable = copy.copy(self)
        executable._bind_entry(self._name)
        return executable

    def load_weights(self, weights: Mapping[str, Any] | str | os.PathLike[str]) -> None:
        """Put other weights of the same shapes into the model, which was compiled with `updatable=True`.

        weights: arrays or tensors by name, as a state_dict, or the path of a safetensors file. Kernels stay; the passes
        run again, since they fold and pack weights. State starts anew. Executables that `fresh` and `entry` made keep
        the old weights. Raises InvalidArgumentError with the names of what does not fit, and for a model that
        `relaxlite.runtime` has loaded, without the compiler.
        """
        if self._update is None:
            raise InvalidArgumentError("the passes run again for other weights; open the model by relaxlite.load")
        name = self._name
        self.__init__(self._update(self.data, weights), update=self._update)  # type: ignore[misc]
        self._bind_entry(name)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save the model to one file, for `relaxlite.load`. Raises ArtifactError."""
        artifact.save(self.data, path)

    def profile(
        self, inputs: Mapping[str, Any] | Sequence[Any], *, runs: int = 10, limits: MachineLimits | None = None
    ) -> Profile:
        """Measure the time of each kernel over several runs, after one run of warm-up.

        `inputs`: by name, or a tuple or list in the model's order; anything else is the single input. `limits`: of this
        machine (relaxlite.machine.limits()), for a comparison with the roofline.
        """
        if runs < 1:
            raise InvalidArgumentError(f"runs must be at least 1, got {runs}")
        if isinstance(inputs, Mapping):
            values = self._ordered_arguments((), inputs)
        else:
            values = self._ordered_arguments(inputs if isinstance(inputs, tuple | list) else (inputs,), {})
        if self._state is not None:
            values = (*values, *(self._state[name] for name in self._state))  # copies: the state stays
        from relaxlite.runtime.profile import Recorder, measure  # lazily, to save memory

        recorder = Recorder(self.data.kernels)
        kernels = {n: recorder.timed(n, k) for n, k in self._vm.waiting_kernels().items()}
        vm = VirtualMachine(self.data, kernels=kernels, constants=self._vm.constants, space=self._vm.space)
        self._vm.constants.wait_until_moved()
        threads = threadpool.num_threads()

        def run() -> None:
            self._interpret(vm, self._import(values))

        profile = measure(run, recorder, runs=runs, threads=threads, limits=limits)
        shapes = {spec.name: _describe(value, spec) for spec, value in zip(self.inputs, values, strict=False)}
        return replace(profile, inputs=shapes)

    @property
    def missing_libraries(self) -> tuple[str, ...]:
        """Reasons why library routines are replaced by fallback kernels; one sentence each."""
        return self._vm.missing_libraries

    def disassemble(self) -> str:
        """Text of the bytecode."""
        return disassemble(self.data)

    def release_memory(self) -> int:
        """Return cached memory to the system; returns its size in bytes.

        Frees the arenas of this model, and the blocks that all models share: workspaces, and large results that are no
        longer referenced.
        """
        arenas = self._vm.release_memory() + (self._host.release_memory() if self._host is not None else 0)
        return arenas + scratch.trim()

    def __repr__(self) -> str:
        outputs = ", ".join(map(str, self.outputs))
        return f"Executable({', '.join(map(str, self.inputs))}) -> ({outputs})"

    def _ordered_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments in the model's order. InputError for missing, unknown and duplicate arguments."""
        names = self._names
        if not args and len(kwargs) == len(names):
            try:
                return tuple([kwargs[name] for name in names])
            except KeyError:
                pass  # the missing argument is reported below
        if not kwargs and len(args) == len(names):
            return tuple(args)
        expected = f"the model takes {len(names)} ({', '.join(names)})"
        if len(args) > len(names):
            raise InputError(f"got {len(args)} arguments; {expected}")
        for name in kwargs:
            if name not in names:
                raise InputError(f"there is no argument '{name}'{_did_you_mean(name, names)}; {expected}")
        arguments = dict(zip(names, args, strict=False))
        if duplicates := [name for name in kwargs if name in arguments]:
            raise InputError(f"argument '{duplicates[0]}' is given both by position and by name")
        arguments.update(kwargs)
        if missing := [name for name in names if name not in arguments]:
            plural = "s" if len(missing) > 1 else ""
            raise InputError(f"missing argument{plural} {', '.join(map(repr, missing))}; {expected}")
        return tuple([arguments[name] for name in names])

    def _call(self, values: tuple[Any, ...]) -> list[Any]:
        """Run the model on the arguments, and on its state."""
        border = self._border
        if border is None:
            return self._call_with_state(values)
        with border.call():
            return border.results(self._call_with_state(border.arguments(values)))

    def _call_with_state(self, values: tuple[Any, ...]) -> list[np.ndarray]:
        if self._state is None:
            return self._call_compiled(values)
        with self._state.lock:
            return self._call_compiled((*values, *self._state.arrays))

    def _call_compiled(self, values: tuple[Any, ...]) -> list[np.ndarray]:
        """Run the host function on the arguments, then on converted arguments; fall back to the interpreter."""
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
        """Convert the arguments to tensors that match the signature. Raises InputError."""
        symbols: dict[str, tuple[int, str]] = {}
        return [plan.take(value, symbols) for plan, value in zip(self._plans, values, strict=True)]

    def _interpret(self, vm: VirtualMachine, tensors: list[Tensor]) -> list[np.ndarray]:
        result = vm.run(self._name, tensors)
        results = result if isinstance(result, tuple) else (result,)
        if len(results) != len(self.outputs) or not all(isinstance(item, Tensor) for item in results):
            raise ExecutionError(f"the model should give {len(self.outputs)} tensors, got {result!r}")
        exported: set[int] = set()
        return [export_array(tensor, exported) for tensor in results]


def load(
    path: str | os.PathLike[str], *, threads: int | None = None, verify: bool = False, update: Update | None = None
) -> Executable:
    """Load a saved model. Raises ArtifactError for a damaged file, or one for another machine.

    `threads`: threads per parallel loop, in the whole process. `verify`: check every byte of large weights too, which
    reads the whole file. `update`: what `load_weights` calls.
    """
    return Executable(artifact.load(path, verify=verify), threads=threads, is_checked=True, update=update)


def _identity(array: np.ndarray) -> np.ndarray:
    return array


def _describe(value: Any, spec: TensorSpec) -> str:
    """Type of an argument as text, such as "float32[1, 128]"."""
    return f"{spec.dtype}[{', '.join(map(str, np.shape(value)))}]"


def _did_you_mean(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


class _ArgumentCheck:
    """Checks of one argument; compound dimensions such as n*2 + 1 are checked by the bytecode's match_shape."""

    def __init__(self, spec: TensorSpec) -> None:
        self.spec, self.what, self.dtype, self.rank = spec, f"argument '{spec.name}'", spec.dtype, len(spec.shape)
        self.numpy_dtype = dtypes.to_numpy(spec.dtype)
        dims = list(enumerate(spec.shape))
        self.constants = [(axis, dim) for axis, dim in dims if isinstance(dim, int)]
        self.symbols = [(axis, dim) for axis, dim in dims if isinstance(dim, str) and dim.isidentifier()]

    def check_donated(self, value: Any) -> None:
        """Raise InputError unless a donated argument is a writable, dense array of the dtype."""
        if not isinstance(value, np.ndarray) or value.dtype != self.numpy_dtype or not value.flags.carray:
            raise InputError(
                f"{self.what} is overwritten: it must be a writable, dense NumPy array of {self.dtype}, got "
                f"{type(value).__name__} {getattr(value, 'dtype', '')}"
            )

    def take(self, value: Any, symbols: dict[str, tuple[int, str]]) -> Tensor:
        """Convert an argument to a tensor; binds and checks `symbols`: name -> (value, argument that bound it)."""
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
