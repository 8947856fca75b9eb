"""The interface of a contender: an implementation of attention that computes a preset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Protocol

from cupy_sdpa.core.runtime import cupy_runtime

from ..device import random_normal
from ..presets import Preset
from ..timing import Events

Call = Callable[[], Sequence[Any]]


class UnavailableError(Exception):
    """A contender cannot run here, or cannot compute a preset; the message is the reason."""


class Timer(Protocol):
    """A function that returns the milliseconds of a call."""

    @property
    def clock(self) -> str:
        """The method of measurement."""

    def __call__(self) -> float:
        """Measure once."""


class Inputs:
    """Random q, k, v and gradient of the output, ``(head_dim, heads, seq, batch)`` in Fortran order."""

    def __init__(self, preset: Preset) -> None:
        self.q, self.k, self.v = (random_normal(*shape, dtype=preset.dtype) for shape in preset.shapes)
        self.dout = random_normal(*preset.out_shape, dtype=preset.dtype)


class Contender:
    """An implementation of attention, for one preset in one direction.

    The results of a call are a sequence: out (forward), dq, dk, dv (backward), or all four (both).

    Attributes:
        name: the name on the command line and in files.
        title: the name in figures.
        requires: the modules that it needs.
        dtypes: the dtypes of the presets that it takes part in.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    requires: ClassVar[tuple[str, ...]] = ()
    dtypes: ClassVar[tuple[str, ...]] = ("bfloat16",)

    def __init__(self, preset: Preset, direction: str) -> None:
        self.preset, self.direction = preset, direction

    def call(self, inputs: Inputs) -> Call:
        """Make the call on these inputs. For the backward pass, compute the forward pass first.

        Raises:
            UnavailableError: it cannot compute the preset.
        """
        raise NotImplementedError

    def to_cupy(self, results: Sequence[Any]) -> list[Any]:
        """Return the results as CuPy arrays ``(head_dim, heads, seq, batch)``."""
        return list(results)

    def active(self) -> AbstractContextManager[Any]:
        """Return a context manager in which its calls run."""
        return contextlib.nullcontext()

    def timer(self, calls: Sequence[Call], busy: Any) -> Timer:
        """Return the timer for its calls; ``busy`` is a matrix whose products keep the device busy."""
        return Events(calls, busy)

    def wait(self, results: Any = None) -> None:
        """Wait for the results and for the device."""
        cupy_runtime.cupy().cuda.Device().synchronize()

    def peak_bytes(self, call: Call) -> int | None:
        """Return the peak of the memory that a call allocates, results included; None if it is not known."""
        return None

    def facts(self) -> dict[str, Any]:
        """More columns for its row, such as the engine."""
        return {}

    def host_variants(self, inputs: Inputs) -> Iterator[tuple[str, Call]]:
        """Other forms of the same call, by the column of their host time."""
        return iter(())
