"""Arrays in every memory layout, surrounded by NaN: what must not be read shows in the results.

A layout is the letters of the axes from the nearest in memory, ``d`` head dim, ``h`` heads, ``s`` sequence, ``b`` batch, and
then ``+x`` for a slice along an axis of a longer array, ``*x`` for every second position, ``-x`` for the reverse order.
``"qkv"`` lets q, k and v share one array, heads after heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .case import Case
from .data import dtype_of, shape_of

#: The default.
DENSE = "dhsb"


def parsed(layout: str) -> tuple[str, dict[str, str]]:
    """The letters of a layout, and what is done along axes.

    >>> parsed("dshb+s*b")
    ('dshb', {'s': '+', 'b': '*'})
    """
    letters = re.match(r"[a-z]*", layout)
    assert letters
    return letters[0], {axis: kind for kind, axis in re.findall(r"([+*-])([a-z])", layout)}


def raw(array: Any) -> Any:
    """The same memory as whole numbers; all bits set is NaN in every floating-point dtype."""
    return array.view(f"u{array.dtype.itemsize}")


def fill(array: Any) -> Any:
    """Fill an array with NaN."""
    view = raw(array)
    view[...] = ~view.dtype.type(0)
    return array


class Memory:
    """Arrays by name, each inside a larger one that is full of NaN.

    Args:
        xp: numpy or CuPy.
    """

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.views: dict[str, Any] = {}
        self.parents: dict[str, Any] = {}

    def make(self, name: str, shape: tuple[int, ...], dtype: Any, layout: str = "") -> Any:
        """An array full of NaN (0 where the dtype has none) in a layout, of logical axes ``dhsb`` (``dhs`` if packed)."""
        axes = DENSE[: len(shape)] if layout else ""
        if not axes:
            self.parents[name] = self.views[name] = self._filled(shape, dtype)
            return self.views[name]
        order, kinds = parsed(layout)
        lengths = dict(zip(axes, shape, strict=True))
        sizes, cuts = [], []
        for axis in order:
            n, kind, unit = lengths[axis], kinds.get(axis), 8 if axis == "d" else 1
            sizes.append(n + 2 * unit if kind == "+" else 2 * n if kind == "*" else n)
            cuts.append(slice(unit, unit + n) if kind == "+" else slice(None, None, {"*": 2, "-": -1}.get(kind or "", 1)))
        parent = self.parents[name] = self._filled(tuple(sizes), dtype)
        self.views[name] = parent[tuple(cuts)].transpose([order.index(axis) for axis in axes])
        return self.views[name]

    def interleave(self, shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> None:
        """Arrays of equal head dims and lengths that share one array, heads after heads."""
        heads = [shape[1] for shape in shapes.values()]
        first = next(iter(shapes.values()))
        parent = self._filled((first[0], sum(heads), *first[2:]), dtype)
        ends = np.cumsum(heads)
        for name, end, count in zip(shapes, ends, heads, strict=True):
            self.parents[name], self.views[name] = parent, parent[:, end - count : end]

    def _filled(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = self.xp.zeros(shape, dtype=dtype, order="F")
        return array if np.dtype(dtype).kind in "biu" else fill(array)

    def load(self, values: Mapping[str, Any]) -> None:
        """Copy values into the arrays, in place; one that is not there yet is made, dense."""
        for name, value in values.items():
            if name not in self.views:
                self.make(name, value.shape, value.dtype)
            raw(self.views[name])[...] = self.xp.asarray(raw(value))

    def poison(self, name: str) -> None:
        """Fill an array, not what surrounds it, with NaN."""
        fill(self.views[name])

    def on_host(self, name: str) -> Any:
        """The whole memory of an array, as bytes on the host."""
        parent = raw(self.parents[name])
        return parent.copy() if isinstance(parent, np.ndarray) else parent.get()

    def surroundings_changed(self, name: str) -> bool:
        """Whether anything that surrounds an array is no longer NaN."""
        view = raw(self.views[name])
        saved = view.copy()
        view[...] = ~view.dtype.type(0)
        changed = bool((raw(self.parents[name]) != ~view.dtype.type(0)).any())
        view[...] = saved
        return changed


def memory_of(case: Case, xp: Any, names: Iterable[str]) -> Memory:
    """Arrays of a case in its layouts, full of NaN: q, k, v, dout or results."""
    memory, dtype = Memory(xp), dtype_of(case.dtype)
    if case.layouts.get("q") == "qkv" and "packed" not in case.options:
        memory.interleave({name: shape_of(case, name) for name in "qkv"}, dtype)
    for name in names:
        if name == "stats":
            memory.make(name, shape_of(case, name), np.dtype(np.float32))
        elif name not in memory.views:
            shape, layout = shape_of(case, name), case.layouts.get(name, "qkv")
            memory.make(name, shape, dtype, DENSE[: len(shape)] if layout == "qkv" else layout)
    return memory
