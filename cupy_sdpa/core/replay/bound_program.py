"""Bound programs: a program, and where each of its operands is among the arrays that the caller passes.

A bound program holds no arrays. It runs on any arrays with the cache key of the call that was bound: these calls differ only in
the addresses of their arrays. An array with permuted axes, split heads or another batch axis begins at the first byte of the
caller's array, and a program's views have shapes and strides of their own. Repeated calls therefore create no views.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..boundary.read_array import check_separate, tensor_name
from ..problem.tensor_spec import dense_strides
from ..problem.view import View, array_of_view, placed

#: A program and its arrays. :class:`.core.programs.executor.ReadCall` is in a layer above.
Repeatable = Any

#: The shape, the dtype, the bytes, the strides and the order of a result that a call creates; the strides are None if they
#: follow from the order.
Created = tuple[tuple[int, ...], Any, int, tuple[int, ...] | None, Literal["C", "F"]]

#: Numbers the uses of bound programs, to find the least recently used.
next_use = itertools.count().__next__


class BoundProgram:
    """A program, and the place of each of its operands; on numpy :class:`HostProgram`, on a GPU :class:`.DeviceProgram`.

    Args:
        call: the call, after it ran.
        names, arrays: the arrays that the caller passed.
        results: the results by name, as the caller gets them.

    Attributes:
        call: the call, without its arrays.
        names: the names of the arrays that the caller passes, and then of the results that are created.
        places: the place of each operand that the caller passes: its position among the names, and its offset in bytes.
        created: how the results are created, with the caller's axes.
        returned: the position of each result among the names.
        written: the names of the results that the caller passes.
        gradients: which gradients of ``tensors`` are among the results.
        used: when the program was last used, see :data:`next_use`.
    """

    __slots__ = ("_new", "_parts", "_whole", "call", "created", "gradients", "names", "places", "returned", "used", "written")

    def __init__(self, call: Repeatable, names: Sequence[str], arrays: Sequence[Any], results: Mapping[str, Any]) -> None:
        new = {name: array for name, array in results.items() if name not in names}
        self.call, self._new, self.names, self.used = call.on({}), [*new], [*names, *new], next_use()
        self.created, self.returned = [created_like(array) for array in new.values()], [*map(self.names.index, results)]
        self.written, self.gradients = [name for name in results if name in names], call.gradients
        self.places: dict[str, tuple[int, int]] = {}
        #: The operands that begin with an array of the caller: name and position.
        self._whole: list[tuple[str, int]] = []
        #: Those that begin inside one, such as a row of an array that a score function reads: name, position and view.
        self._parts: list[tuple[str, int, View]] = []
        for name, array, position in operands(call, names):
            offset = _first_byte(array) - _first_byte(arrays[position])
            self.places[name] = position, offset
            if offset:
                view = View.of(name, array)
                self._parts.append((name, position, View(view.storage, view.dtype, view.shape, view.strides, offset)))
            else:
                self._whole.append((name, position))

    def on(self, arrays: Sequence[Any], created: Sequence[Any]) -> Repeatable:
        """Return the call on the caller's arrays and the created results."""
        by_name = {name: arrays[position] for name, position in self._whole}
        for name, position, view in self._parts:
            by_name[name] = placed(view, arrays[position])
        return self.call.on(by_name | dict(zip(self._new, created, strict=True)))

    def addresses(self, addresses: Sequence[int]) -> dict[str, int]:
        """Return the operands' addresses by name, from the addresses of the caller's arrays and of the created results."""
        by_name = {name: addresses[position] for name, position in self._whole}
        for name, position, view in self._parts:
            by_name[name] = addresses[position] + view.offset
        return by_name | dict(zip(self._new, addresses[len(self.names) - len(self._new) :], strict=False))


class HostProgram(BoundProgram):
    """A bound program of numpy arrays; the arguments are as for :class:`BoundProgram`."""

    __slots__ = ("_evaluate", "_permuted")

    def __init__(self, call: Repeatable, names: Sequence[str], arrays: Sequence[Any], results: Mapping[str, Any]) -> None:
        super().__init__(call, names, arrays, results)
        new = {name: results[name] for name in self._new}
        #: Computes the call, if it does nothing but evaluate a graph.
        self._evaluate = self.call.evaluation()
        passed = {name: arrays[position] for name, position in self._whole} | new
        views = call.program.launches[0].arrays if self._evaluate else {}
        #: The operands of the graph that have other axes than the caller's arrays.
        self._permuted = [
            (name, view)
            for name, view in views.items()
            if name in passed and (passed[name].shape, passed[name].strides) != (view.shape, view.strides)
        ]

    def run(self, arrays: Sequence[Any]) -> list[Any]:
        """Check elements such as lengths, and that results overlap no other array; then compute with the caller's arrays."""
        # Loops instead of comprehensions and calls: each would enter a function.
        call = self.call
        by_name: dict[str, Any] = {}
        for name, position in self._whole:
            by_name[name] = arrays[position]
        for name, position, view in self._parts:
            by_name[name] = placed(view, arrays[position])
        if call.program.checks:
            call.check_elements(by_name)
        if self.written:
            check_separate(self.written, {callers_name(call, name): array for name, array in by_name.items()})
        arrays_and_results = [*arrays]
        for name, (shape, dtype, _, strides, order) in zip(self._new, self.created, strict=True):
            by_name[name] = np.empty(shape, dtype, order) if strides is None else np.ndarray(shape, dtype, strides=strides)
            arrays_and_results.append(by_name[name])
        if self._evaluate is None:
            call.on(by_name).run()
        else:
            for name, view in self._permuted:
                by_name[name] = array_of_view(view, by_name[name])
            self._evaluate(by_name)
        results = []
        for position in self.returned:
            results.append(arrays_and_results[position])
        return self.gradients.as_last(results) if self.gradients else results


def created_like(array: Any) -> Created:
    """Return how to create an array like a result, also with its strides along axes of length 1."""
    order: Literal["C", "F"] = "F" if array.flags.f_contiguous else "C"
    step = 1 if order == "F" else -1
    dense = dense_strides(array.shape[::step], array.itemsize)[::step]
    return array.shape, array.dtype, array.nbytes, None if array.strides == dense else array.strides, order


def equal_runs(created: Sequence[Created]) -> list[slice]:
    """Return the runs of several results of equal sizes.

    >>> import numpy as np
    >>> equal_runs([created_like(np.zeros(shape, np.float16)) for shape in ((2, 3), (6,), (1,))])
    [slice(0, 2, None)]
    """
    runs, begin = [], 0
    for _, run in itertools.groupby(created, operator.itemgetter(2)):
        end = begin + len([*run])
        if end > begin + 1:
            runs.append(slice(begin, end))
        begin = end
    return runs


def callers_name(call: Repeatable, name: str) -> str:
    """Return the caller's name of an array of a call: of an array that a function reads, for example ``tensors['slopes']``."""
    return tensor_name(call.functions.captured[name].name) if name in call.functions.captured else name


def operands(call: Repeatable, names: Sequence[str]) -> Iterator[tuple[str, Any, int]]:
    """Yield the arrays of a call that the caller passed, or views of these: name, array and position among ``names``."""
    for name, array in call.arrays.items():
        source = callers_name(call, name)
        if source in names:
            yield name, array, names.index(source)


def results_by_name(call: Repeatable, results: Sequence[Any] | None) -> dict[str, Any]:
    """Return a call's results by name; ``results`` are the caller's, if they are views of the call's results."""
    if results is None:
        return {name: call.arrays[name] for name in call.results}
    arrays = [*results[:-1], *results[-1].values()] if call.gradients else results
    return dict(zip(call.results, arrays, strict=True))


def shares_memory(array: Any, whole: Any) -> bool:
    """True if an array is a view of another one's memory, and not a copy."""
    if type(array) is not type(whole):
        return False
    return np.may_share_memory(array, whole) if isinstance(array, np.ndarray) else array.data.mem is whole.data.mem


def _first_byte(array: Any) -> int:
    """Return the address of an array of numpy or CuPy."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr  # type: ignore[no-any-return]
