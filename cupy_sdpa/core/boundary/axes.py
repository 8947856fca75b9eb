"""Permute axes: view the caller's arrays with the package's axes, and the results with the caller's axes; check strides."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..problem.arrays import ROW_STATS, SCORE_INPUTS
from ..problem.problem import Problem
from ..problem.tensor_spec import ITEMSIZE, TensorSpec, density_obstacle, order_obstacle, stride_obstacle
from ..problem.view import View, device_of
from . import layouts
from .read_array import spec_of

#: Why an array on a GPU may be in C order. (numpy's operators keep the order of their operands.)
_OF_OPERATORS = ". CuPy's operators, as in 2 * q, return arrays in C order"
#: The end of the error message for a CPU array whose strides look like another layout.
_CONFIRM = ", or, on the CPU, pass layout={!r}, which confirms these axes and accepts any strides"


class Axes:
    """The caller's axes, read from ``layout``. Functions that are not operations use it to permute their arrays.

    Attributes:
        layout: the caller's layout in C order, such as ``"bshd"``. None: the package's axes, so nothing is permuted.

    Raises:
        ValueError: there is no such layout.

    >>> import numpy as np
    >>> axes = Axes("bshd")
    >>> x = axes.array("q", np.zeros((2, 5, 3, 8)))
    >>> x.shape, axes.result("out", x).shape
    ((8, 3, 5, 2), (2, 5, 3, 8))
    """

    def __init__(self, layout: str | None) -> None:
        layouts.check_layout(layout)
        self.layout = layouts.other_layout({"layout": layout})
        self._named, self._is_unbatched = layout, False
        self._bias_axes: int | None = None
        #: The shapes of the caller's arrays, for messages.
        self._shapes: dict[str, tuple[int, ...]] = {}

    @classmethod
    def of_call(cls, q: Any, options: Mapping[str, Any]) -> Axes:
        """Return the axes of a call. If q has no batch axis, no array has one."""
        axes = cls(options.get("layout"))
        axes._is_unbatched = layouts.is_unbatched(q, options)
        axes._bias_axes = getattr(options.get("bias"), "ndim", None)
        axes._shapes |= layouts.shapes_of({"q": q}, options)
        return axes

    def context(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors show the caller's axes; with ``layout=``, arrays may have any strides."""
        return layouts.of_caller(self._named, self._shapes, unbatched=self._is_unbatched)

    def array(self, name: str, array: Any) -> Any:
        """Return an array with the package's axes. Arrays named ``q``, ``k`` or ``v``, or after a result, have a head dim."""
        if self.layout is None and not self._is_unbatched:
            return array
        self._shapes |= layouts.shapes_of({name: array}, {})
        if self._is_unbatched:
            array = layouts.with_batch(name, array, self.layout)
        return array if self.layout is None else layouts.to_own(name, array, self.layout)

    def option(self, name: str, value: Any) -> Any:
        """Return the value of an option with the package's axes."""
        if self._is_unbatched and name in SCORE_INPUTS:
            value = layouts.with_batch(name, value, self.layout)
        return value if self.layout is None else layouts.option_to_own(name, value, self.layout)

    def result(self, name: str, array: Any) -> Any:
        """Return a result with the caller's axes."""
        if self.layout is not None:
            array = layouts.from_own(name, array, self.layout, self._bias_axes if name == "dbias" else None)
        if self._is_unbatched:
            unchanged = name != "dbias" or self.layout is not None or self._bias_axes != 3
            array = layouts.without_batch(name, array, self.layout) if unchanged else array[..., 0]
        return array

    @staticmethod
    def check_strides(
        name: str, array: Any, *, required: bool = False, written: bool = False, remedy: str | None = None
    ) -> None:
        """Raise ValueError if the strides of an array with a head dim look like another layout.

        Other objects, and arrays of a call with ``layout=``, are not checked. ``required``: kernels need these strides even if
        the caller passed a layout. ``written``: the array is a result. ``remedy`` ends the message; None: the fix for C order.

        >>> import numpy as np
        >>> Axes.check_strides("x", np.zeros((8, 3, 5), order="F")[:, ::-1], remedy="")
        Traceback (most recent call last):
        ValueError: x has strides (8, -64, 192) bytes; cuDNN does not support negative strides: copy it with asfortranarray(x)
        """
        on_gpu = device_of(array) is not None
        if not (on_gpu or isinstance(array, (np.ndarray, View))) or array.ndim not in (3, 4):
            return
        if array.strides[0] != array.itemsize or min(array.strides) < 0 or array.shape[0] == 1:
            spec = spec_of(name, array)
            obstacle = _vector_obstacle(spec, on_gpu, written)
            if obstacle and ((required and on_gpu) or not layouts.is_named()):
                raise ValueError(f"{obstacle}{_confirm(array.ndim, on_gpu) if remedy is None else remedy}")


def check_strides(problem: Problem, layout: str | None, *, on_gpu: bool) -> None:
    """Raise ValueError if the strides of an array look like another layout, unless ``layout=`` is passed.

    On a GPU, planning rejects most arrays with such strides; the remaining ones, and arrays on the CPU, would be read with the
    wrong axes. Masks, page tables and ``tensors`` may have any strides on both engines.
    """
    if layout is not None or layouts.is_named():
        return
    results = {spec.name for spec in problem.results}
    for spec in problem.tensors:
        obstacle = ""
        if spec.name in layouts.VECTORS:
            obstacle = _vector_obstacle(spec, on_gpu, spec.name in results)
        elif not on_gpu and spec.name in ("bias", *ROW_STATS) and spec.strides[0] != ITEMSIZE[spec.dtype]:
            obstacle = density_obstacle(spec)  # the first axis is not the fastest; sums of broadcast arrays permute the others
        if obstacle:
            raise ValueError(f"{obstacle}{_confirm(len(problem.q.shape), on_gpu)}")


def _vector_obstacle(spec: TensorSpec, on_gpu: bool, written: bool) -> str:
    """Return why an array with a head dim is probably in another layout, or ""; a GPU itself rejects a head dim of 1."""
    return stride_obstacle(spec, written=written) or ("" if on_gpu else order_obstacle(spec, written=written))


def _confirm(axes: int, on_gpu: bool) -> str:
    """Return the end of the error message for an array with this many axes."""
    return _OF_OPERATORS if on_gpu else _CONFIRM.format(layouts.own_layout(axes))
