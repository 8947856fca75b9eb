"""Programs: a call as a frozen list of steps over named arrays, built from the arguments' metadata alone.

A builder describes a feature: it adds steps to a :class:`Builder`, without allocating or launching anything. Running, planning,
capturing and explaining a call all read the same :class:`Program`.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from ..boundary.arguments import read_backward, read_forward
from ..boundary.call import BoundProblem, Fill
from ..boundary.read_options import ReadOptions
from ..problem.view import View
from ..runtime import cupy_runtime
from . import attention_steps
from .binding import Bindings
from .steps import Attend, Check, Constant, ProgramStep, Steps, join_of

if TYPE_CHECKING:
    from ..kernels.merge import Parts

#: The alignment of temporaries in their block of memory, in bytes.
ALIGNMENT = 256


class Place(NamedTuple):
    """The place of a temporary in the block of memory, in bytes."""

    begin: int
    size: int


@dataclass(frozen=True)
class Program:
    """A call as a list of steps, immutable and without pointers.

    Attributes:
        steps: the steps, in order.
        temporaries: where each temporary is in the block. Two of them share memory if their uses do not overlap.
        memory_bytes: the size of the block of memory.
        constants: the constants by the name of their storage. Most belong to what they describe, such as a block mask, which
            the caller of a running program keeps alive; a cached program does not.
        kept: the other constants.
        fills: the arrays of equal integers by the name of their storage.
        checks: the checks on elements of the caller's arrays, in every call on the CPU.
    """

    steps: tuple[ProgramStep, ...]
    temporaries: Mapping[str, Place]
    memory_bytes: int
    constants: Mapping[str, weakref.ref[Constant]]
    fills: Mapping[str, Fill]
    kept: tuple[Constant, ...]
    checks: tuple[Check, ...]

    def constant(self, name: str) -> Constant:
        """Return a constant of a running program."""
        found = self.constants[name]()
        assert found is not None
        return found

    @functools.cached_property
    def bindings(self) -> Bindings:
        """What the arguments of the steps refer to."""
        return Bindings(self.steps, {name: place.begin for name, place in self.temporaries.items()})

    @functools.cached_property
    def launches(self) -> tuple[Attend, ...]:
        """What the engine runs: all steps that are attention."""
        return tuple(step.attend for step in self.steps if step.attend)

    @functools.cached_property
    def join(self) -> int:
        """The number of the step before which the branch must have ended."""
        return join_of(self.steps)

    @functools.cached_property
    def has_host_steps(self) -> bool:
        """Whether there are host steps: then a call that raised cannot be repeated."""
        return any(step.on_host for step in self.steps)

    @functools.cached_property
    def segments(self) -> int:
        """The number of CUDA graphs of a capture: one between host steps."""
        return sum(not on_host for on_host, _ in itertools.groupby(step.on_host for step in self.steps))

    @functools.cached_property
    def plan_only(self) -> bool:
        """Whether only one plan runs, on the call's arrays by their names."""
        if len(self.steps) > 1 or not self.launches or self.constants or self.fills:
            return False
        (attend,) = self.launches
        return all(x.storage.name == name and not x.offset for name, x in attend.arrays.items())

    @property
    def summary(self) -> str:
        """What the program computes, in one line."""
        steps = f"{len(self.steps)} step{'s' * (len(self.steps) != 1)}, {self.memory_bytes / 2**20:.3g} MiB of temporary memory"
        return f"{self.launches[0].of}; {steps}" if len(self.launches) == 1 else f"{len(self.launches)} launches; {steps}"

    def lines(self) -> Iterator[str]:
        """Yield one line for each step: what it does and writes, and the problem of a launch."""
        for number, step in enumerate(self.steps, 1):
            written = ", ".join(f"{x.storage.name} {'x'.join(map(str, x.shape))} {x.dtype}" for x in step.writes)
            what = f": {step.attend.problem}" if step.attend else ""
            yield f"{number:4}. {step.name}{f' -> {written}' if written else ''}{what}"

    def __str__(self) -> str:
        return "\n".join([self.summary, *self.lines()])


class Builder(Steps):
    """The steps of a program; functions that build features add them.

    >>> import numpy as np
    >>> builder = Builder(device=None)
    >>> x = View.dense("x", (4, 3), np.float32, None)
    >>> total = builder.temporary((4, 3), np.float32)
    >>> builder.fill(total, 1)
    >>> builder.add(total, x)
    >>> builder.copy(x, total)
    >>> [step.name for step in builder.build().steps]
    ['fill', 'add', 'copy']
    """

    def attend(self, name: str, q: View, k: View, v: View, options: Mapping[str, Any], **others: Any) -> None:
        """Add attention; ``others``: as for :func:`.read_forward`, except ``return_stats``: pass ``stats`` instead."""
        self.call(name, read_forward(q, k, v, options, return_stats=others.get("stats") is not None, **others))

    def attend_backward(self, name: str, q: View, k: View, v: View, options: Mapping[str, Any], **others: Any) -> None:
        """Add the gradients; ``others``: dout, out, stats, dq, dk, dv, deterministic, requests such as ``return_dsinks``."""
        self.call(name, read_backward(q, k, v, options, **others))

    def attend_to_parts(self, name: str, q: View, k: View, v: View, options: Mapping[str, Any], **others: Any) -> list[Parts]:
        """Add attention; return parts to merge with other parts (:func:`.merge_parts`). ``others``: as for :meth:`attend`."""
        return attention_steps.add_parts(self, name, read_forward(q, k, v, options, return_stats=True, **others))

    def add_pass(self, views: Mapping[str, View], options: ReadOptions, **others: Any) -> None:
        """Add attention, or its gradients if ``dout`` or ``dstats`` is among ``views``, the arrays and results by name.

        ``others`` are the other arguments of :func:`.pass_steps.add_pass`.
        """
        from .pass_steps import add_pass

        add_pass(self, views, options, **others)

    def in_dtype(
        self, arrays: Mapping[str, View | None], dtype: str | None, results: Sequence[str]
    ) -> tuple[dict[str, Any], Callable[[], None]]:
        """Convert arrays with a head dim, and return them with a function that adds the steps to convert ``results`` back."""
        from .pass_steps import in_dtype

        return in_dtype(self, arrays, dtype, results)

    @property
    def writes_16_bits(self) -> bool:
        """True if the engine can write outputs of FP8 arrays in 16 bits; otherwise it writes them only in FP8."""
        from ..support.rules import writes_16_bits

        return self.device is None or writes_16_bits(cupy_runtime.capability(self.device))

    def call(self, name: str, call: BoundProblem) -> None:
        """Add a call that was read from views. Results without a view are temporary."""
        attention_steps.add(self, name, call, with_values=True)

    def build(self) -> Program:
        """Return the program; temporaries share memory where they can."""
        places, total = _places(self.steps, self.sizes)
        constants = {name: weakref.ref(constant) for name, constant in self.constants.items()}
        return Program(tuple(self.steps), places, total, constants, dict(self.fills), tuple(self.kept), tuple(self.checks))


def _places(steps: Sequence[ProgramStep], sizes: Mapping[str, int]) -> tuple[dict[str, Place], int]:
    """Place each temporary in the first gap between temporaries in use at the same time; also return the block's size."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    join = join_of(steps)
    for number, step in enumerate(steps):
        for view in step.views():
            if view.storage.name in sizes:
                first.setdefault(view.storage.name, number)
                last[view.storage.name] = join if step.branch else number
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
