"""Convert between array layouts without copies: axes are named by letters, results are views.

The letters are ``b`` batch, ``s`` sequence, ``h`` heads, ``d`` head dim, and ``t`` all positions of packed sequences. This
package uses ``dhsb`` (packed: ``dht``); in Fortran order this is the memory layout of ``bshd`` (packed: ``thd``) in C order.
"""

from __future__ import annotations

from typing import Any

from . import _html

#: The axis of each letter.
AXES = {"b": "batch", "s": "seq", "h": "heads", "d": "head_dim", "t": "total"}
#: Common layouts, and the libraries that use them.
LAYOUTS = {
    "bshd": "flash-attention, JAX, Transformer Engine",
    "bhsd": "PyTorch, cuDNN",
    "sbhd": "Megatron-LM, Transformer Engine",
    "thd": "packed sequences of flash-attention, PyTorch and Transformer Engine",
    "dhsb": "NNlib.jl, CUDA.jl, this package",
    "dht": "packed sequences of this package",
}


def to_julia(array: Any, layout: str) -> Any:
    """Convert an array to the layout of this package, ``(D, H, S, B)`` or packed ``(D, H, T)``.

    Args:
        array: a numpy or CuPy array, or any object whose ``transpose`` takes a tuple of axes.
        layout: the axes of the array, such as ``"bshd"``; see :data:`LAYOUTS`.

    Returns:
        A view. The fused kernels require stride 1 along the head dim and multiples of 16 bytes along the other axes.

    Raises:
        ValueError: an unknown layout, or one with a different number of axes.

    >>> import numpy as np
    >>> x = np.zeros((2, 100, 8, 64), np.float32)                # (batch, seq, heads, head_dim), C order
    >>> y = to_julia(x, "bshd")
    >>> y.shape, y.flags.f_contiguous, np.shares_memory(x, y)
    ((64, 8, 100, 2), True, True)
    """
    return _transpose(array, layout, _julia_layout(layout))


def from_julia(array: Any, layout: str) -> Any:
    """Convert an array from the layout of this package: the inverse of :func:`to_julia`.

    Args:
        array: ``(D, H, S, B)`` or packed ``(D, H, T)``.
        layout: the axes of the result, such as ``"bhsd"``.

    Returns:
        A view.

    Raises:
        ValueError: as for :func:`to_julia`.

    >>> import numpy as np
    >>> from_julia(np.zeros((64, 8, 100, 2), order="F"), "bhsd").shape
    (2, 8, 100, 64)
    """
    return _transpose(array, _julia_layout(layout), layout)


def order(source: str, target: str) -> tuple[int, ...]:
    """Return the axes of one layout in the order of another, as ``transpose`` takes them.

    >>> order("bhsd", "dhsb")
    (3, 1, 2, 0)
    """
    return tuple(source.index(letter) for letter in target)


def _julia_layout(layout: str) -> str:
    """The layout of this package with the same axes."""
    for julia in ("dhsb", "dht"):
        if isinstance(layout, str) and sorted(layout) == sorted(julia):
            return julia
    examples = ", ".join(LAYOUTS)
    raise ValueError(f"the layout is {layout!r}; it must have the letters b, s, h and d, or t, h and d, such as {examples}")


def _transpose(array: Any, source: str, target: str) -> Any:
    if not hasattr(array, "shape"):
        raise TypeError(f"the array is a {type(array).__name__}; convert it with numpy.asarray or cupy.asarray")
    shape = tuple(array.shape)
    if len(shape) != len(source):
        raise ValueError(f"the array has shape {shape}, {len(shape)} axes; the layout {source!r} has {len(source)}")
    return array.transpose(order(source, target))


class Layout:
    """The memory layout of an array, shown by ``print`` and in notebooks.

    Args:
        array: a numpy or CuPy array.
        letters: its axes. Default ``"dhsb"``, or ``"dht"`` for three axes.

    Raises:
        ValueError: the number of letters and the number of axes differ.

    >>> import numpy as np
    >>> print(Layout(np.zeros((64, 8, 100, 2), np.float16, order="F")))
    float16, 205 kB, axes from the smallest stride: head_dim 64, heads 8, seq 100, batch 2; dense
    >>> print(Layout(np.zeros((2, 8, 100, 64), np.float16), "bhsd"))
    float16, 205 kB, axes from the smallest stride: head_dim 64, seq 100, heads 8, batch 2; dense
    """

    def __init__(self, array: Any, letters: str | None = None) -> None:
        self.letters = letters or ("dht" if len(array.shape) == 3 else "dhsb")
        if len(self.letters) != len(array.shape) or not set(self.letters) <= set(AXES):
            raise ValueError(f"the letters are {self.letters!r} and the array has shape {tuple(array.shape)}: name each axis")
        self._array = array

    def _axes(self) -> list[tuple[str, int, int]]:
        """Name, length and stride in elements of every axis, from the smallest stride."""
        strides = [stride // self._array.itemsize for stride in self._array.strides]
        axes = zip((AXES[letter] for letter in self.letters), self._array.shape, strides, strict=True)
        return sorted(axes, key=lambda axis: (abs(axis[2]), axis[1] != 1))

    @property
    def dense(self) -> bool:
        """Whether the elements are contiguous, in any order of the axes."""
        expected = 1
        for _, length, stride in self._axes():
            if length > 1 and stride != expected:
                return False
            expected *= length
        return True

    def _dtype_and_size(self) -> str:
        return f"{self._array.dtype}, {_size(self._array.nbytes)}"

    def __str__(self) -> str:
        axes = ", ".join(f"{name} {length}" for name, length, _ in self._axes())
        gaps = "dense" if self.dense else "with gaps or overlap"
        return f"{self._dtype_and_size()}, axes from the smallest stride: {axes}; {gaps}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(name, str(length), str(step)) for name, length, step in self._axes()]
        return _html.with_title(
            self._dtype_and_size(), _html.table(("axis, from the smallest stride", "length", "stride in elements"), rows)
        )


def _size(count: int) -> str:
    """Format a number of bytes.

    >>> _size(999), _size(204800), _size(3 << 30)
    ('999 bytes', '205 kB', '3.22 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"
