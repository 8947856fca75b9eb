"""Run programs: on numpy step by step, on a GPU with one block of memory, as one call of the replay cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.argument import check_separate, read_array
from ..arrays.view import View, part_of
from ..calls.arguments import check_lengths
from ..calls.call import LaunchRecord
from ..calls.call_key import HOST, read_key, tensor_name
from ..calls.replay_cache import cache_call
from ..calls.user_functions import function_identities
from ..device import cupy_runtime
from ..device.interpreted import InterpretedArray
from ..problem.problem import CU_SEQLENS, LENGTHS, Problem
from ..problem.tensor_spec import TensorSpec, make_spec
from .program import Builder, Program

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..plans.plan import Plan


class _Signature(NamedTuple):
    """What the replay cache reads of the problem of a call: the arrays whose alignments are part of the program."""

    tensors: tuple[TensorSpec, ...]
    trivial: bool = False


class ProgramCall:
    """A program and its arrays. It is cached and captured as one call.

    It has the attributes of :class:`~cupy_sdpa.calls.call.Call` that :mod:`~cupy_sdpa.calls.replay_cache` uses.

    Args:
        program: the program.
        inputs: the caller's arrays and the results.
        result_names: the names of the results.
        identities: the identities of the functions when they were traced.
    """

    own_results, gradients = False, None
    fills: Mapping[str, Any] = {}
    captured: Mapping[str, Any] = {}
    scalars: Mapping[str, float] = {}

    def __init__(
        self, program: Program, inputs: Inputs, result_names: list[str], identities: tuple[Hashable | None, ...]
    ) -> None:
        self.program, self.arrays, self.result_names, self.identities = program, inputs.arrays, result_names, identities
        self.problem = _Signature(tuple(make_spec(name, view.signature) for name, view in inputs.views.items()))
        self.launched: LaunchRecord | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether the arrays are CuPy's."""
        return cupy_runtime.is_array(self.arrays["q"])

    def on(self, arrays: dict[str, Any]) -> ProgramCall:
        """The same call on other arrays of the same dtypes, shapes, strides and alignments."""
        call = copy.copy(self)
        call.arrays, call.launched = arrays, None
        return call

    def plan(self) -> None:
        """Build the plans of all steps, if they are not in the plan cache.

        Raises:
            Unsupported, CudnnError: a step cannot run; ``error.step`` is its name.
        """
        if not self.on_gpu:
            return
        with cupy_runtime.on_device_of(self.arrays["q"]) as device:
            for step in self.program.steps:
                if step.call:
                    try:
                        step.call.plan(device)
                    except Exception as error:
                        error.__dict__["step"] = step.name
                        raise

    def run(self, memory: cupy_runtime.Memory | None = None) -> list[Any]:
        """Compute and return the results; ``memory`` is that for everything else that is allocated."""
        self.launched = None
        if not self.on_gpu:
            block = cupy_runtime.temporary(self.arrays["q"], (self.program.memory_bytes,), np.uint8)
            self._execute(None, block, {name: self.program.constant(name).array for name in self.program.constants})
            return self.results()
        with cupy_runtime.on_device_of(self.arrays["q"]) as device:
            if cupy_runtime.capturing():  # into an arena of the capture, if there is one
                self._execute_on_gpu(device, keep=True)
            else:
                with cupy_runtime.arena(memory) as arena:
                    plans = self._execute_on_gpu(device)
                self.launched = LaunchRecord(tuple(plans), arena.needed, False)
        return self.results()

    def results(self) -> list[Any]:
        """The results, in the order of :attr:`result_names`."""
        return [self.arrays[name] for name in self.result_names]

    def lengths(self) -> list[tuple[Problem, dict[str, str]]]:
        """The problems of the steps that read lengths of the caller, and the names of these among the arrays."""
        return lengths_of(self.program, self.arrays)

    def evaluation(self) -> None:
        """Nothing: the call has several steps."""

    def enqueue(self) -> None:
        """Enqueue the work again, on the same arrays, in a capture of the package."""
        self._execute_on_gpu(self.arrays["q"].data.device_id)

    def _execute_on_gpu(self, device: int, *, keep: bool = False) -> list[Plan]:
        constants = {name: self.program.constant(name).on_device() for name in self.program.constants}
        with cupy_runtime.released():
            return self._execute(
                device, cupy_runtime.empty((self.program.memory_bytes,), np.dtype(np.uint8)), constants, keep=keep
            )

    def _execute(self, device: int | None, block: Any, constants: Mapping[str, Any], *, keep: bool = False) -> list[Plan]:
        """Run all steps with a block of memory; returns the plans."""
        own = {name: block[place.begin :] for name, place in self.program.temporaries.items()}
        bind = _Binding({**self.arrays, **own, **constants})
        plans: list[Plan] = []
        for step in self.program.steps:
            if step.call:
                arrays = {name: bind(view) for name, view in step.call.arrays.items()}
                plans += step.call.on(arrays).execute(device, keep=keep)
            else:
                assert step.function
                step.function(*map(bind, step.arguments))
        return plans


class _Binding:
    """From views to arrays.

    It refers to no function that refers to it: memory is freed when a run ends, not when the garbage collector finds a cycle.

    Args:
        found: the arrays by the names of storages.
    """

    def __init__(self, found: Mapping[str, Any]) -> None:
        self._found = found
        self._bound: dict[View, Any] = {}

    def __call__(self, value: Any) -> Any:
        """The array of a view; the same for the views in a sequence; other values as they are."""
        if isinstance(value, View):
            if value not in self._bound:
                self._bound[value] = part_of(self._found[value.storage.name], value)
            return self._bound[value]
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self, value))
        return type(value)(map(self, value)) if isinstance(value, (tuple, list)) else value


class Inputs:
    """The arrays of a call and their views.

    Args:
        arrays: the arrays by name; those that are None are left out.
        options: the options of the call, whose arrays are added.
    """

    def __init__(self, arrays: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self.arrays = {name: array for name, array in arrays.items() if array is not None}
        self.options = {name: value for name, value in options.items() if value is not None}
        for name, value in self.options.items():
            if is_any_array(value):
                self.arrays[name] = value
        tensors = dict(self.options.get("tensors") or {})
        self.arrays |= {tensor_name(name): array for name, array in tensors.items()}
        self.views = {name: View.of(name, array) for name, array in self.arrays.items()}
        self.options |= {name: self.views[name] for name in self.options if name in self.views}
        if tensors:
            self.options["tensors"] = {name: self.views[tensor_name(name)] for name in tensors}

    @property
    def device(self) -> int | None:
        """The number of the GPU of q; None for numpy."""
        return self.views["q"].storage.device

    def of(self, names: Iterable[str]) -> list[Any]:
        """The views of some arrays; None for those that are not passed."""
        return [self.views.get(name) for name in names]


def is_any_array(value: Any) -> bool:
    """Whether a value is an array of numpy or CuPy."""
    return isinstance(value, (np.ndarray, InterpretedArray)) or cupy_runtime.is_array(value)


#: The programs of the latest calls, by what they depend on.
_programs: dict[Hashable, Program] = {}
#: The largest number of programs.
MAX_PROGRAMS = 256


def run_program(
    kind: Any,
    names: Sequence[str],
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    inputs: Inputs,
    result_names: list[str],
    build: Callable[[Builder], None],
) -> list[Any]:
    """Run the program of a call whose arguments are valid, and cache the call.

    Args:
        kind, names, arrays, options: as for :func:`.cache_call`.
        inputs: the arrays, with those of new results.
        result_names: the names of the results.
        build: adds the steps to a builder; calls with equal arguments share the program.
    """
    identities = function_identities(options)
    key = _key(kind, inputs, options)
    program = _programs.get(key)
    if program is None:
        builder = Builder(inputs.device)
        build(builder)
        program = builder.build()
    passed = [name for name, array in zip(names, arrays, strict=True) if array is not None]
    _check(program, inputs, [name for name in result_names if name in passed])
    call = ProgramCall(program, inputs, result_names, identities)
    call.plan()
    if key and function_identities(options) == identities:  # no function changed while it was called
        _programs.pop(key, None)
        _programs[key] = program  # it becomes the most recent
        if len(_programs) > MAX_PROGRAMS:
            _programs.pop(next(iter(_programs)), None)
    results = call.run()
    cache_call(kind, names, arrays, options, call)
    return results


def _check(program: Program, inputs: Inputs, results: Sequence[str]) -> None:
    """Check the arrays of the caller, which the steps know as views only.

    Args:
        program: the program.
        inputs: its arrays.
        results: the names of the results that the caller passed.

    Raises:
        ValueError: a result is read-only or overlaps another array, or on the CPU a length is invalid.
    """
    arguments = {name: read_array(name, array) for name, array in inputs.arrays.items()}
    check_separate([arguments[name] for name in results], list(arguments.values()))
    if inputs.device is None:
        for problem, lengths in lengths_of(program, inputs.arrays):
            check_lengths(problem, {name: inputs.arrays[source] for name, source in lengths.items()})


def lengths_of(program: Program, arrays: Mapping[str, Any]) -> list[tuple[Problem, dict[str, str]]]:
    """The problems of the steps that read lengths or offsets of the caller, and the names of these among the arrays."""
    found = []
    for step in program.steps:
        views = {name: step.call.arrays.get(name) for name in (*LENGTHS, *CU_SEQLENS)} if step.call else {}
        lengths = {name: view.storage.name for name, view in views.items() if view and view.storage.name in arrays}
        if step.call and lengths:
            found.append((step.call.problem, lengths))
    return found


def _key(kind: Any, inputs: Inputs, options: Mapping[str, Any]) -> Hashable | None:
    """What a program depends on; None if an option cannot be compared."""
    others = {name: value for name, value in options.items() if name != "tensors" and not is_any_array(value)}
    found = read_key(HOST, kind, (), others)
    return found and (found[0], *inputs.views.values())
