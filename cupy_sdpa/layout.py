"""Other libraries' layouts as views of the same memory: axes are named by letters, and nothing is copied.

The letters: ``b`` batch, ``s`` sequence, ``h`` heads, ``d`` head dim, ``t`` all positions of packed sequences. Ours is
``dhsb`` (packed: ``dht``); in Fortran order it is the memory of ``bshd`` (packed: ``thd``) in C order.
"""

from __future__ import annotations

from typing import Any

from . import _html

#: What the letters stand for.
AXES = {"b": "batch", "s": "seq", "h": "heads", "d": "head_dim", "t": "total"}
#: Where else a layout is at home.
KNOWN = {
    "bshd": "flash-attention, JAX, Transformer Engine",
    "bhsd": "PyTorch, cuDNN",
    "sbhd": "Megatron-LM, Transformer Engine",
    "thd": "packed sequences of flash-attention, PyTorch and Transformer Engine",
    "dhsb": "NNlib.jl, CUDA.jl, this package",
    "dht": "packed sequences of this package",
}


def to_julia(array: Any, layout: str) -> Any:
    """An array of another layout as ours, ``(D, H, S, B)`` or packed ``(D, H, T)``: a view, no copy.

    Args:
        array: of numpy, CuPy, or anything else with ``transpose`` of a tuple of axes.
        layout: what its axes are, such as ``"bshd"``; see :data:`KNOWN`.

    Returns:
        The same memory. The fused kernels take it where the head dim has stride 1 and the others are multiples of 16 bytes.

    Raises:
        ValueError: the letters are not those of a layout, or not as many as the array has axes.

    >>> import numpy as np
    >>> x = np.zeros((2, 100, 8, 64), np.float32)                # (batch, seq, heads, head_dim), C order
    >>> y = to_julia(x, "bshd")
    >>> y.shape, y.flags.f_contiguous, np.shares_memory(x, y)
    ((64, 8, 100, 2), True, True)
    """
    return _moved(array, layout, _ours(layout))


def from_julia(array: Any, layout: str) -> Any:
    """An array of ours in another layout: the opposite of :func:`to_julia`, a view, no copy.

    Args:
        array: ``(D, H, S, B)`` or packed ``(D, H, T)``.
        layout: what the axes of the result are to be, such as ``"bhsd"``.

    Raises:
        ValueError: as :func:`to_julia`.

    >>> import numpy as np
    >>> from_julia(np.zeros((64, 8, 100, 2), order="F"), "bhsd").shape
    (2, 8, 100, 64)
    """
    return _moved(array, _ours(layout), layout)


def order(source: str, target: str) -> tuple[int, ...]:
    """The axes of one layout in the order of another, as ``transpose`` takes them.

    >>> order("bhsd", "dhsb")
    (3, 1, 2, 0)
    """
    return tuple(source.index(letter) for letter in target)


def _ours(layout: str) -> str:
    for ours in ("dhsb", "dht"):
        if isinstance(layout, str) and sorted(layout) == sorted(ours):
            return ours
    known = ", ".join(KNOWN)
    raise ValueError(f"the layout is {layout!r}; it must have the letters b, s, h and d, or t, h and d, such as {known}")


def _moved(array: Any, source: str, target: str) -> Any:
    shape = tuple(array.shape)
    if len(shape) != len(source):
        raise ValueError(f"the array has shape {shape}, {len(shape)} axes; the layout {source!r} has {len(source)}")
    return array.transpose(order(source, target))


class Layout:
    """How an array lies in memory, printed or shown in a notebook.

    Args:
        array: of numpy or CuPy.
        letters: what its axes are. Default ``"dhsb"``, or ``"dht"`` for three axes.

    Raises:
        ValueError: there are not as many letters as axes.

    >>> import numpy as np
    >>> print(Layout(np.zeros((64, 8, 100, 2), np.float16, order="F")))
    float16, 205 kB, in memory from the nearest: head_dim 64, heads 8, seq 100, batch 2; dense
    >>> print(Layout(np.zeros((2, 8, 100, 64), np.float16), "bhsd"))
    float16, 205 kB, in memory from the nearest: head_dim 64, seq 100, heads 8, batch 2; dense
    """

    def __init__(self, array: Any, letters: str | None = None) -> None:
        self.letters = letters or ("dht" if len(array.shape) == 3 else "dhsb")
        if len(self.letters) != len(array.shape) or not set(self.letters) <= set(AXES):
            raise ValueError(f"the letters are {self.letters!r} and the array has shape {tuple(array.shape)}: name each axis")
        self._array = array

    def _axes(self) -> list[tuple[str, int, int]]:
        """Name, length and step in elements of every axis, from the nearest in memory."""
        steps = [step // self._array.itemsize for step in self._array.strides]
        named = zip((AXES[letter] for letter in self.letters), self._array.shape, steps, strict=True)
        return sorted(named, key=lambda axis: (abs(axis[2]), axis[1] != 1))

    @property
    def dense(self) -> bool:
        """Whether the elements lie together, in whatever order."""
        step = 1
        for _, length, own in self._axes():
            if length > 1 and own != step:
                return False
            step *= length
        return True

    def _facts(self) -> str:
        return f"{self._array.dtype}, {_size(self._array.nbytes)}"

    def __str__(self) -> str:
        order = ", ".join(f"{name} {length}" for name, length, _ in self._axes())
        return f"{self._facts()}, in memory from the nearest: {order}; {'dense' if self.dense else 'with gaps, or shared'}"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [(name, str(length), str(step)) for name, length, step in self._axes()]
        return _html.titled(self._facts(), _html.table(("axis, from the nearest in memory", "length", "elements apart"), rows))


def _size(count: int) -> str:
    """Bytes for people.

    >>> _size(999), _size(204800), _size(3 << 30)
    ('999 bytes', '205 kB', '3.22 GB')
    """
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count} bytes"
