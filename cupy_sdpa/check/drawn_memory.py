"""Arrays in every memory layout, each inside a larger array of NaN: a read outside the array is visible in the results.

A layout is the letters of the axes, fastest first: ``d`` head dim, ``h`` heads, ``s`` sequence, ``b`` batch. Suffixes follow:
``+x`` for a slice of a longer axis x, ``*x`` for every second element along x, ``-x`` for reverse order along x. In the layout
``"qkv"`` q, k and v share one array, concatenated along the heads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from .case import Case
from .data import LARGE_ENTRY, shape_of
from .formats import dtype_of

#: The default layout.
DENSE = "dhsb"


def parse_layout(layout: str) -> tuple[str, dict[str, str]]:
    """Split a layout into its letters, and the suffix of each axis that has one.

    >>> parse_layout("dshb+s*b")
    ('dshb', {'s': '+', 'b': '*'})
    """
    letters = re.match(r"[a-z]*", layout)
    assert letters
    return letters[0], {axis: suffix for suffix, axis in re.findall(r"([+*-])([a-z])", layout)}


def named_layout(case: Case) -> dict[str, Any]:
    """Return the option ``layout`` of a case whose arrays need it: on the CPU it confirms strides that a GPU cannot read.

    >>> named_layout(Case(layouts={"k": "hdsb"}))
    {'layout': 'dhsb'}
    """
    one = 1 in (case.d, case.dv)  # a head dim of 1 has no stride: the other axes may be in the order of another layout
    needed = any(
        layout != "qkv" and (layout[0] != "d" or "-" in layout or (one and not layout.startswith("dhs")))
        for layout in case.layouts.values()
    )
    return {"layout": "dht" if "packed" in case.options else DENSE} if case.is_interpreted and needed else {}


def bits_of(array: Any) -> Any:
    """Return a view as unsigned integers; all bits set is NaN in every floating-point dtype."""
    return array.view(f"u{array.dtype.itemsize}")


def fill_nan(array: Any) -> Any:
    """Fill an array with NaN."""
    bits = bits_of(array)
    bits[...] = ~bits.dtype.type(0)
    return array


class DrawnMemory:
    """Named arrays of numpy or CuPy, ``views``, each of a larger array of NaN in ``parents``."""

    def __init__(self, xp: Any) -> None:
        self.xp = xp
        self.views: dict[str, Any] = {}
        self.parents: dict[str, Any] = {}

    def allocate(self, name: str, shape: tuple[int, ...], dtype: Any, layout: str = "") -> Any:
        """Allocate an array full of NaN, or of 0 for integers; its shape is in the order ``dhsb``, or ``dhs`` if packed."""
        axes = DENSE[: len(shape)]
        if not layout:
            self.parents[name] = self.views[name] = self._filled(shape, dtype)
            return self.views[name]
        order, suffixes = parse_layout(layout)
        lengths = dict(zip(axes, shape, strict=True))
        sizes, slices = [], []
        for axis in order:
            n, suffix, margin = lengths[axis], suffixes.get(axis), 8 if axis == "d" else 1
            sizes.append(n + 2 * margin if suffix == "+" else 2 * n if suffix == "*" else n)
            step = {"*": 2, "-": -1}.get(suffix or "", 1)
            slices.append(slice(margin, margin + n) if suffix == "+" else slice(None, None, step))
        parent = self.parents[name] = self._filled(tuple(sizes), dtype)
        self.views[name] = parent[tuple(slices)].transpose([order.index(axis) for axis in axes])
        return self.views[name]

    def allocate_interleaved(self, shapes: Mapping[str, tuple[int, ...]], dtype: Any) -> None:
        """Allocate arrays of equal head dims and lengths in one array, concatenated along the heads."""
        heads = [shape[1] for shape in shapes.values()]
        first = next(iter(shapes.values()))
        parent = self._filled((first[0], sum(heads), *first[2:]), dtype)
        ends = np.cumsum(heads)
        for name, end, count in zip(shapes, ends, heads, strict=True):
            self.parents[name], self.views[name] = parent, parent[:, end - count : end]

    def allocate_table(self, name: str, shape: tuple[int, ...]) -> None:
        """Allocate a page table as a part of a longer and wider one."""
        pages, batch = shape
        parent = self.parents[name] = self.xp.full((pages + 3, batch + 1), LARGE_ENTRY, np.int32, order="F")
        self.views[name] = parent[:pages, 1:]

    def _filled(self, shape: tuple[int, ...], dtype: Any) -> Any:
        array = self.xp.zeros(shape, dtype=dtype, order="F")
        return array if np.dtype(dtype).kind in "biu" else fill_nan(array)

    def load(self, values: Mapping[str, Any]) -> None:
        """Copy values into the arrays in place; a missing array is allocated in Fortran order."""
        for name, value in values.items():
            if name not in self.views:
                self.allocate(name, value.shape, value.dtype)
            bits_of(self.views[name])[...] = self.xp.asarray(bits_of(value))

    def host_bits(self, name: str) -> Any:
        """Return a copy on the host of an array and the memory around it, as unsigned integers."""
        parent = bits_of(self.parents[name])
        return parent.copy() if isinstance(parent, np.ndarray) else parent.get()

    def surroundings_changed(self, name: str) -> bool:
        """True if any element of the memory around an array is no longer NaN."""
        bits = bits_of(self.views[name])
        saved = bits.copy()
        fill_nan(self.views[name])
        changed = bool((bits_of(self.parents[name]) != ~bits.dtype.type(0)).any())
        bits[...] = saved
        return changed


def memory_of(case: Case, xp: Any, names: Iterable[str]) -> DrawnMemory:
    """Allocate arrays of a case in its layouts, full of NaN; ``names`` names q, k, v, dout and the results."""
    memory, dtype = DrawnMemory(xp), dtype_of(case.dtype)
    if case.paged:
        memory.allocate_table("page_table", (case.skv // case.paged.page, case.b))
    elif case.layouts.get("q") == "qkv" and "packed" not in case.options:
        memory.allocate_interleaved({name: shape_of(case, name) for name in "qkv"}, dtype)
    for name in names:
        if name == "stats":
            memory.allocate(name, shape_of(case, name), np.dtype(np.float64 if case.dtype == "float64" else np.float32))
        elif name not in memory.views:
            shape, layout = shape_of(case, name), case.layouts.get(name, "qkv")
            if case.paged and name in ("k", "v"):
                layout = {"pages": "dshb", "heads": "dhsb"}[case.paged.order]
            memory.allocate(name, shape, dtype, DENSE[: len(shape)] if layout == "qkv" else layout)
    return memory
