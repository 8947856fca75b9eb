"""A call's own functions: read, called, and turned into what a problem is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ..device import cupy_runtime
from ..problem.band import Band
from ..problem.problem import CAPTURED_DTYPES, Problem, Settings
from ..problem.subproblems import score_derivatives
from ..score_fn.expression import AXES
from ..score_fn.tracer import Access, trace

#: The axes of the scores, as arrays of their shape have them.
_ORDER = ("kv_idx", "q_idx", "h", "b")


class Functions(NamedTuple):
    """What a call's functions come to.

    Attributes:
        settings: with the program, and with the band that a mask function makes.
        arrays: what they read, by the names in the program, ``(Skv, Sq, Hq, B)``, every axis may be 1; nothing is copied.
        numbers: those that are handed over with the call.
        lines: where each operation was written.
        captured: how arrays are read, by the names in the program.
    """

    settings: Settings
    arrays: dict[str, Any]
    numbers: dict[str, float]
    lines: dict[str, str]
    captured: dict[str, Access]


def given(options: Mapping[str, Any]) -> bool:
    """Whether a call has functions."""
    return options.get("score_mod") is not None or options.get("mask_mod") is not None


def check_tensors(options: Mapping[str, Any]) -> None:
    """Refuse arrays for functions that are no mapping, or that no function is there to read.

    Raises:
        TypeError, ValueError: with what is given.
    """
    tensors = options.get("tensors")
    if tensors is not None and not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is a {type(tensors).__name__}; it must be a mapping of names to arrays")
    for name in tensors or ():
        if not isinstance(name, str):
            raise TypeError(f"tensors has the name {name!r}; functions read arrays by names, which are strings")
    if tensors and not given(options):
        raise ValueError(f"tensors has {', '.join(tensors)}, and neither score_mod nor mask_mod is given: they read it")


def check_numbers(numbers: Mapping[str, Any]) -> None:
    """Refuse integers that functions cannot compute with on the GPU.

    Raises:
        OverflowError: with the number.
    """
    for number in numbers.values():
        if isinstance(number, int) and not -(2**31) <= number < 2**31:
            raise OverflowError(
                f"a function computes with the integer {number}; on the GPU integers have 32 bits, from {-(2**31)} to "
                f"{2**31 - 1}: write {float(number)!r} for a float"
            )


def read(options: Mapping[str, Any], asked: Problem) -> Functions:
    """Call the functions of a call, with traced values.

    Args:
        options: of the call; :func:`given` says that there are functions.
        asked: the problem without them.

    Raises:
        Exception: what the functions raise, among it what cannot be traced.
    """
    _, _, hq, _, sq, skv, b = asked.sizes
    tensors = dict(options.get("tensors") or {})
    for name, array in tensors.items():
        if str(array.dtype) not in CAPTURED_DTYPES:
            kinds = ", ".join(CAPTURED_DTYPES)
            raise TypeError(f"tensors[{name!r}] is {array.dtype}; functions read {kinds}: convert with .astype(...)")
        if str(array.dtype) == "int64" and cupy_runtime.is_array(array):
            raise TypeError(
                f"tensors[{name!r}] is int64; functions compute with integers of 32 bits on the GPU: convert with "
                ".astype('int32')"
            )
    settings = asked.settings
    apart = settings.band is not None and settings.band.bottom_right  # on another diagonal
    sizes = dict(zip(AXES, (b, hq, sq, skv), strict=True))
    done = trace(options.get("score_mod"), options.get("mask_mod"), tensors, sizes, bands=not apart)
    settings = settings._replace(program=done.program, band=_both(settings.band, done.band and Band(*done.band)))
    arrays = {name: _turned(tensors[access.name], access) for name, access in done.captured.items()}
    return Functions(settings, arrays, done.numbers, done.lines, done.captured)


@dataclass(frozen=True)
class Gradients:
    """The gradients of ``tensors`` that a call is asked for.

    Attributes:
        arrays: what they are the gradients of, by the callers' names.
        captured: how these are read, by the names in the program.
    """

    arrays: dict[str, Any]
    captured: dict[str, Access]

    def wanted(self, asked: Problem) -> tuple[str, ...]:
        """What the functions read of them, and the score depends on."""
        known = score_derivatives(asked)
        return tuple(name for name, access in self.captured.items() if access.name in self.arrays and name in known)

    def gathered(self, sums: Mapping[str, Any]) -> dict[str, Any]:
        """The gradient of each array, of its shape and dtype, from the sums over every way in which it is read."""
        found = {}
        for name, array in self.arrays.items():
            zeros = cupy_runtime.cupy().zeros if cupy_runtime.is_array(array) else np.zeros
            total = zeros(array.shape, "float64" if array.dtype == "float64" else "float32", order="F")
            for read, access in self.captured.items():
                if access.name == name and (part := sums.get(f"d{read}")) is not None:
                    view = _turned(total, access)
                    view += part
            found[name] = total.astype(array.dtype, copy=False)
        return found


def gradients_of(wanted: Any, tensors: Mapping[str, Any] | None, own: Functions | None) -> Gradients | None:
    """What ``return_dtensors`` asks for; None where it asks for nothing.

    Raises:
        TypeError, ValueError: it names no array, or one that has no gradient.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is not True and not isinstance(wanted, (str, list, tuple, set, frozenset)):
        raise TypeError(f"return_dtensors is {wanted!r}; it must be True, False, a name of tensors, or several")
    there = dict(tensors or {})
    floating = [name for name, array in there.items() if "float" in str(array.dtype)]
    names = floating if wanted is True else [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        if name not in there:
            raise ValueError(f"return_dtensors names {name!r}; tensors has {', '.join(there) or 'none'}")
        if name not in floating:
            raise TypeError(
                f"return_dtensors names {name!r}, which is {there[name].dtype}: only floating-point arrays have gradients"
            )
    return Gradients({name: there[name] for name in names}, own.captured if own else {})


def _both(one: Band | None, other: Band | None) -> Band | None:
    """What both bands show, on one diagonal."""
    if one is None or other is None:
        return one or other
    sides = zip(one[:2], other[:2], strict=True)
    left, right = (min((side for side in pair if side is not None), default=None) for pair in sides)
    return Band(left, right)


def _turned(array: Any, access: Access) -> Any:
    """An array with the axes of the scores, those that it has not of length 1."""
    part = array[(*(slice(None) if isinstance(axis, str) else axis for axis in access.axes), ...)]
    names = [axis for axis in access.axes if isinstance(axis, str)]
    there = [name for name in _ORDER if name in names]
    turned = part.transpose([names.index(name) for name in there])
    return turned[tuple(slice(None) if name in names else None for name in _ORDER)]
