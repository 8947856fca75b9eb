"""Arrays in every memory layout, surrounded by NaN: what must not be read shows in the results.

A layout is the letters of the axes from the nearest in memory, ``d`` head dim, ``h`` heads, ``s`` sequence, ``b`` batch, and
then ``+x`` for a slice along an axis of a longer array, ``*x`` for every second position, ``-x`` for the reverse order.
``"qkv"`` lets q, k and v share one array, heads after heads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

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


def bits(array: Any) -> Any:
    """The memory of an array as bytes, in the order of its elements."""
    return np.ascontiguousarray(array).view(np.uint8)


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
            cuts.append(
                slice(unit, unit + n) if kind == "+" else slice(None, None, {"*": 2, "-": -1}.get(kind or "", 1))
            )
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
        value = 0 if np.dtype(dtype).kind in "biu" else np.nan
        return self.xp.full(shape, value, dtype=dtype, order="F")

    def load(self, values: Mapping[str, Any]) -> None:
        """Copy values into the arrays, in place; one that is not there yet is made, dense."""
        for name, value in values.items():
            if name not in self.views:
                self.make(name, value.shape, value.dtype)
            self.views[name][...] = self.xp.asarray(value)

    def poison(self, name: str) -> None:
        """Fill an array, not what surrounds it, with NaN."""
        self.views[name][...] = np.nan

    def on_host(self, name: str) -> Any:
        """The whole memory of an array, as bytes on the host."""
        parent = self.parents[name]
        return bits(parent if isinstance(parent, np.ndarray) else parent.get()).copy()

    def surroundings_changed(self, name: str) -> bool:
        """Whether anything that surrounds an array is no longer NaN."""
        view = self.views[name]
        saved = view.copy()
        view[...] = np.nan
        parent = self.parents[name]
        clean = bool(self.xp.isnan(parent.astype(np.float32)).all())
        view[...] = saved
        return not clean
