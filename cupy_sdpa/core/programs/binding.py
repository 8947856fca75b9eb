"""Bind a program's views to arrays. The first run of a program finds out which view each argument of a step is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..problem.view import View, array_of_view
from ..runtime import cupy_runtime
from .steps import ProgramStep, Scalar

#: The name of the block of memory of the temporaries among the arrays of a run.
BLOCK = "temporaries"


class StepArguments:
    """The arguments of a step, or nested ones, with positions instead of views and scalars.

    They are a sequence, or a mapping of names. ``number`` returns a view's number in the program; ``depends`` is whether there
    is a view or a scalar among them.
    """

    __slots__ = ("_make", "_names", "_nested", "_scalars", "_values", "_views", "depends")

    def __init__(self, given: Any, number: Callable[[View], int]) -> None:
        self._names = tuple(given) if isinstance(given, Mapping) else None
        self._make: Any = getattr(given, "_make", None) or (list if self._names else type(given))
        self._values = [*given.values()] if isinstance(given, Mapping) else [*given]
        self._views: list[tuple[int, int]] = []
        self._scalars: list[tuple[int, str]] = []
        self._nested: list[tuple[int, StepArguments]] = []
        for position, value in enumerate(self._values):
            if isinstance(value, View):
                self._views.append((position, number(value)))
            elif isinstance(value, Scalar):
                self._scalars.append((position, value.name))
            elif isinstance(value, (tuple, list)):
                nested = StepArguments(value, number)
                if nested.depends:
                    self._nested.append((position, nested))
        self.depends: bool = bool(self._views or self._scalars or self._nested)

    def on(self, arrays: Sequence[Any], scalars: Mapping[str, float]) -> Any:
        """Return the arguments with arrays and numbers, in a container of the original type."""
        values = self._values.copy()
        for position, number in self._views:
            values[position] = arrays[number]
        for position, name in self._scalars:
            values[position] = scalars[name]
        for position, nested in self._nested:
            values[position] = nested.on(arrays, scalars)
        return self._make(values) if self._names is None else dict(zip(self._names, values, strict=True))


class Bindings:
    """The views of a program, and the arguments of its steps; ``places`` has the first byte of each temporary in the block."""

    def __init__(self, steps: Sequence[ProgramStep], places: Mapping[str, int]) -> None:
        self._views: list[View] = []
        numbers: dict[View, int] = {}

        def number(view: View) -> int:
            if view not in numbers:
                numbers[view] = len(numbers)
                begin = places.get(view.storage.name)
                block = view.storage._replace(name=BLOCK)
                self._views.append(view if begin is None else replace(view, storage=block, offset=view.offset + begin))
            return numbers[view]

        given = (step.attend.arrays if step.attend else step.arguments for step in steps)
        self.arguments = [StepArguments(one, number) for one in given]

    def arrays(self, by_storage: Mapping[str, Any], *, on_gpu: bool) -> list[Any]:
        """Return the arrays of all views, from arrays by the names of storages; the temporaries' storage is :data:`BLOCK`."""
        ndarray: Any = cupy_runtime.cupy().ndarray if on_gpu else None
        made = []
        for view in self._views:
            array = by_storage[view.storage.name]
            if not view.offset and array.shape == view.shape and array.strides == view.strides and array.dtype == view.dtype:
                made.append(array)
            elif on_gpu:
                made.append(ndarray(view.shape, view.dtype, array.data + view.offset, view.strides))
            else:
                made.append(array_of_view(view, array))
        return made
