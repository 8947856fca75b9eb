"""Programs: a call as a frozen list of steps over named arrays, made from the metadata of the arguments alone.

A builder describes a feature: it adds steps to a :class:`Builder`, and nothing is allocated or launched. Running, planning,
capturing and explaining a call all read the same :class:`Program`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..arrays.compute import write
from ..arrays.view import View
from ..calls.arguments import read_backward, read_forward
from ..calls.call import Call
from ..device import cupy_runtime, driver, memory
from ..problem.problem import Problem
from ..problem.subproblems import subproblems
from ..support.engine_problem import engine_problem

#: The alignment of temporaries in their block of memory, in bytes.
ALIGNMENT = 256


class Constant:
    """An array whose elements are known when a program is built, and its copies on GPUs.

    Args:
        array: the array, of numpy; dense.
    """

    def __init__(self, array: Any) -> None:
        self.array = array
        #: The copies by the id of the CUDA context.
        self._copies: dict[int, Any] = {}

    def on_device(self) -> Any:
        """The copy in the current CUDA context; the first call makes it, and synchronizes.

        Raises:
            RuntimeError: there is no copy yet, and the stream is being captured.
        """
        context = driver.context_id()
        if context not in self._copies:
            if cupy_runtime.capturing():
                raise RuntimeError(
                    "the stream is being captured into a CUDA graph, and the tables of this call are not on the GPU yet: run "
                    "the call once before the capture begins"
                )
            order = "F" if self.array.flags.f_contiguous else "C"
            copy = cupy_runtime.cupy().asarray(self.array, order=order)
            cupy_runtime.cupy().cuda.get_current_stream().synchronize()  # other streams may use it next
            self._copies[context] = copy
        return self._copies[context]


class Step(NamedTuple):
    """One step of a program.

    Attributes:
        name: what it does, for reports and errors.
        call: attention or its gradients on views; None for a kernel.
        function: a function that takes arrays of numpy or of CuPy and writes into some of them; None for attention.
        arguments: its arguments: views, numbers, None, and sequences of these.
        writes: the views that it writes.
    """

    name: str
    call: Call | None
    function: Callable[..., None] | None
    arguments: tuple[Any, ...]
    writes: tuple[View, ...]

    def views(self) -> Iterator[View]:
        """All views that the step reads or writes."""
        yield from self.writes
        yield from views_of(self.arguments if self.call is None else tuple(self.call.arrays.values()))


def views_of(value: Any) -> Iterator[View]:
    """The views in an argument."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, (tuple, list)):
        for part in value:
            yield from views_of(part)


class Place(NamedTuple):
    """The place of a temporary in the block of memory, in bytes."""

    begin: int
    size: int


@dataclass(frozen=True)
class Program:
    """A call as a list of steps. It has no pointer, and it does not change.

    Attributes:
        steps: the steps, in order.
        temporaries: where each temporary lies. Two of them share memory if no step uses both, and none lies between their uses.
        memory_bytes: the size of the block of memory.
        constants: the constants by the name of their storage. They belong to what they describe, such as a block mask, which
            the caller of a running program holds: a cached program does not keep their memory.
    """

    steps: tuple[Step, ...]
    temporaries: Mapping[str, Place]
    memory_bytes: int
    constants: Mapping[str, weakref.ref[Constant]]

    def constant(self, name: str) -> Constant:
        """A constant of a running program."""
        found = self.constants[name]()
        assert found is not None
        return found

    def problems(self, *, on_gpu: bool = True) -> list[Problem]:
        """The problems that an engine runs, in the order of the steps: for plans and for reports."""
        calls = [step.call for step in self.steps if step.call]
        return [engine_problem(part, call.bucket, on_gpu) for call in calls for part in subproblems(call.problem)]

    def __str__(self) -> str:
        return "\n".join(f"{step.name}: {step.call.problem}" if step.call else step.name for step in self.steps)


@dataclass
class Builder:
    """Collects the steps of a program.

    Attributes:
        device: the number of the GPU that the program is for; None for numpy.
        part: what the next steps compute; it is the beginning of their names. Empty for nothing.
    """

    device: int | None
    part: str = ""
    _steps: list[Step] = field(default_factory=list)
    _sizes: dict[str, int] = field(default_factory=dict)
    _constants: dict[str, Constant] = field(default_factory=dict)

    # arrays

    def temporary(self, shape: Sequence[int], dtype: Any) -> View:
        """An array in Fortran order that only this program uses."""
        view = View.dense(f"temporary {len(self._sizes) + 1}", shape, dtype, self.device)
        self._sizes[view.storage.name] = view.nbytes
        return view

    def constant(self, constant: Constant) -> View:
        """An array that is known now."""
        array = constant.array
        name = next((name for name, other in self._constants.items() if other is constant), "")
        if not name:
            name = f"constant {len(self._constants) + 1}"
            self._constants[name] = constant
        view = View.dense(name, array.shape, array.dtype, self.device)
        return view if array.flags.f_contiguous else view.strided(array.shape, array.strides)

    # steps

    def attend(self, name: str, q: View, k: View, v: View, options: Mapping[str, Any], **others: Any) -> None:
        """Attention; ``others`` are the other arguments of :func:`.read_forward`."""
        self.call(name, read_forward(q, k, v, options, return_stats=others.get("stats") is not None, **others))

    def attend_backward(self, name: str, q: View, k: View, v: View, options: Mapping[str, Any], **others: Any) -> None:
        """The gradients of attention; ``others`` are the other arguments of :func:`.read_backward`."""
        self.call(name, read_backward(q, k, v, options, **others))

    def call(self, name: str, call: Call) -> None:
        """A call that was read from views; its arrays contain all of its results."""
        writes = tuple(call.arrays[result] for result in call.result_names)
        self._steps.append(Step(f"{self.part}: {name}" if self.part else name, call, None, (), writes))

    def run(self, function: Callable[..., None], *arguments: Any, writes: Sequence[View]) -> None:
        """A kernel: a function of arrays, numbers and sequences of these that writes into ``writes``, which are arguments."""
        self._steps.append(Step(function.__name__, None, function, arguments, tuple(writes)))

    def copy(self, target: View, source: View) -> None:
        """Copy ``source``, which may be broadcast and converted, into ``target``."""
        if target.size:
            self.run(copy, target, source, writes=(target,))

    def fill(self, target: View, value: float) -> None:
        """Fill an array with a number."""
        if target.size:
            self.run(fill, target, value, writes=(target,))

    def add(self, target: View, source: View) -> None:
        """Add an array to another one."""
        if target.size:
            self.run(add, target, source, writes=(target,))

    def build(self) -> Program:
        """The program; temporaries share memory where they can."""
        places, total = _places(self._steps, self._sizes)
        constants = {name: weakref.ref(constant) for name, constant in self._constants.items()}
        return Program(tuple(self._steps), places, total, constants)


def _places(steps: Sequence[Step], sizes: Mapping[str, int]) -> tuple[dict[str, Place], int]:
    """A place for each temporary: the first gap among those that are in use at the same time; and the size of the block."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for number, step in enumerate(steps):
        for view in step.views():
            if view.storage.name in sizes:
                first.setdefault(view.storage.name, number)
                last[view.storage.name] = number
    places: dict[str, Place] = {}
    for name in sorted(first, key=lambda name: first[name]):
        size = -(-max(sizes[name], 1) // ALIGNMENT) * ALIGNMENT
        begin = 0
        for other in sorted(place for earlier, place in places.items() if last[earlier] >= first[name]):
            if begin + size <= other.begin:
                break
            begin = max(begin, other.begin + other.size)
        places[name] = Place(begin, size)
    return places, max((place.begin + place.size for place in places.values()), default=0)


def copy(target: Any, source: Any) -> None:
    """Copy an array into another one, which may have another dtype; numbers beyond its range become infinite."""
    write(target, source)


def fill(target: Any, value: float) -> None:
    """Fill an array with a number."""
    memory.clear(target, value)


def add(target: Any, source: Any) -> None:
    """Add an array to another one."""
    total = target.T
    total += source.T  # as in copy
