"""Other libraries' layouts as views of the same memory: axes are named by letters, and nothing is copied.

The letters: ``b`` batch, ``s`` sequence, ``h`` heads, ``d`` head dim, ``t`` all positions of packed sequences. Ours is ``dhsb``
(packed: ``dht``); in Fortran order it is the memory of ``bshd`` (packed: ``thd``) in C order.
"""

from __future__ import annotations

from typing import Any

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


def _ours(layout: str) -> str:
    for ours in ("dhsb", "dht"):
        if sorted(layout) == sorted(ours):
            return ours
    known = ", ".join(KNOWN)
    raise ValueError(f"the layout is {layout!r}; it must have the letters b, s, h and d, or t, h and d, such as {known}")


def _moved(array: Any, source: str, target: str) -> Any:
    shape = tuple(array.shape)
    if len(shape) != len(source):
        raise ValueError(f"the array has shape {shape}, {len(shape)} axes; the layout {source!r} has {len(source)}")
    return array.transpose(tuple(source.index(letter) for letter in target))
