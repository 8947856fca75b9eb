"""The order of the axes of arrays, by letters, and the default order of calls; :mod:`cupy_sdpa.layout` has the public names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from .errors import in_words

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


#: The layout of calls without ``layout=``, in this thread and context; None for this package's layout.
_default: ContextVar[str | None] = ContextVar("default_layout", default=None)
#: Return the layout of calls without ``layout=``, or None; a function of C, because every call calls it.
default_layout = _default.get


@contextlib.contextmanager
def default(layout: str) -> Iterator[None]:
    """Set the layout of every call without ``layout=`` in a ``with`` block.

    It applies to the calls of this thread; threads started inside the block do not inherit it. Packed sequences are ``"thd"``,
    or ``"dht"`` with ``"dhsb"``. Functions without ``layout=`` that take arrays with a head dim raise TypeError in the block;
    functions of :mod:`cupy_sdpa.nnlib` and :mod:`cupy_sdpa.reference` have their own axes and ignore it. A pullback and a
    prepared call keep the layout of the call that made them.

    Args:
        layout: ``"bshd"``, ``"bhsd"``, ``"sbhd"`` or ``"dhsb"``.

    Raises:
        ValueError: any other layout.

    >>> import numpy as np, cupy_sdpa
    >>> x = np.ones((2, 100, 8, 64), np.float32)                 # (batch, seq, heads, head_dim)
    >>> with cupy_sdpa.layout.default("bshd"):
    ...     cupy_sdpa.attention(x, x, x, causal=True).shape
    (2, 100, 8, 64)
    """
    known = [name for name in LAYOUTS if len(name) == 4]
    if layout not in known:
        raise ValueError(f"the default layout is {layout!r}; it must be {', '.join(map(repr, known))}")
    with default_is(layout):
        yield


@contextlib.contextmanager
def default_is(layout: str | None) -> Iterator[None]:
    """Set the default in a ``with`` block; None for the layout of this package."""
    token = _default.set(layout)
    try:
        yield
    finally:
        _default.reset(token)


def to_julia(array: Any, layout: str) -> Any:
    """Convert an array to the layout of this package, ``(D, H, S, B)`` or packed ``(D, H, T)``.

    Args:
        array: a numpy or CuPy array, or any object whose ``transpose`` takes a tuple of axes.
        layout: the axes of the array, such as ``"bshd"``; see :data:`cupy_sdpa.layout.LAYOUTS`.

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


@functools.cache
def order(source: str, target: str) -> tuple[int, ...]:
    """Return the axes of one layout in the order of another, as ``transpose`` takes them."""
    return tuple(source.index(letter) for letter in target)


def _julia_layout(layout: str) -> str:
    """Return the layout of this package with the same axes."""
    for julia in ("dhsb", "dht"):
        if isinstance(layout, str) and sorted(layout) == sorted(julia):
            return julia
    examples = ", ".join(LAYOUTS)
    raise ValueError(f"the layout is {layout!r}; it must have the letters b, s, h and d, or t, h and d, such as {examples}")


def _transpose(array: Any, source: str, target: str) -> Any:
    if not hasattr(array, "shape"):
        raise TypeError(f"the array is {in_words(array)}; convert it with numpy.asarray or cupy.asarray")
    shape = tuple(array.shape)
    if len(shape) != len(source):
        raise ValueError(f"the array has shape {shape}, {len(shape)} axes; the layout {source!r} has {len(source)}")
    return array.transpose(order(source, target))
