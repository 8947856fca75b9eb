"""Convert between array layouts without copies: axes are named by letters, results are views.

The letters are ``b`` batch, ``s`` sequence, ``h`` heads, ``d`` head dim, and ``t`` all positions of packed sequences. This
package uses ``dhsb`` (packed: ``dht``); in Fortran order this is the memory layout of ``bshd`` (packed: ``thd``) in C order.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LAYOUTS", "from_julia", "to_julia"]

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


def __dir__() -> list[str]:
    """The public names."""
    return __all__
