"""Helpers for options: the usual ALiBi slopes, and the dropout mask of a call."""

from __future__ import annotations

import math
import numbers
from typing import TYPE_CHECKING, Any

import numpy as np

from ._typing import Array
from .calls.arguments import read_forward
from .device import cupy_runtime

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


def alibi_slopes(heads: int) -> NDArray[np.float32]:
    r"""The usual ALiBi slopes, for ``alibi_slopes=``.

    .. math:: m_h = 2^{-8 h / H}, \quad h = 1 \dots H

    if H is a power of two; otherwise the slopes of the next lower power of two, then every second slope of the next higher.

    Args:
        heads: H, the number of query heads.

    Returns:
        numpy array ``(H,)``, float32; ``cupy.asarray`` copies it to the GPU.

    Raises:
        TypeError, ValueError: heads is not a positive integer.

    Source: Press et al. 2022, "Train Short, Test Long", section 3, and its reference code for other numbers of heads.

    >>> alibi_slopes(8).tolist()
    [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    if not isinstance(heads, numbers.Integral):
        raise TypeError(f"heads is {heads!r}; it must be an integer")
    if heads < 1:
        raise ValueError(f"heads is {heads}; it must be 1 or more")
    lower = 1 << int(math.log2(heads))
    lower_slopes, higher_slopes = (2.0 ** (-8 * np.arange(1, n + 1) / n) for n in (lower, 2 * lower))
    return np.concatenate([lower_slopes, higher_slopes[::2]])[:heads].astype(np.float32)


def dropout_mask(
    q: Array,
    k: Array,
    *,
    dropout_p: float,
    seed: int | Array,
    offset: int | Array = 0,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_kv: Array | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_kv: int | None = None,
) -> Any:
    """The weights that :func:`cupy_sdpa.attention` keeps with these arguments, on the engine of the arrays.

    The call takes memory of size Hq x Sq x Skv x B: for tests and comparisons, not for training.

    Args:
        q, k: as for the call; the elements do not matter.
        dropout_p, seed, offset: as for the call.
        cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv: as for the call.

    Returns:
        bool ``(Skv, Sq, Hq, B)``, True where a weight is kept; for packed sequences Sq and Skv are the maximum lengths. On the
        CPU, ``attention(..., dropout_p=..., dropout_mask=...)`` reproduces the dropout of the GPU with this mask.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`.

    >>> x = np.ones((8, 2, 100, 1), np.float32)
    >>> mask = dropout_mask(x, x, dropout_p=0.25, seed=7)
    >>> mask.shape, round(float(mask.mean()), 1)
    ((100, 100, 2, 1), 0.8)
    """
    options = {
        "dropout_p": dropout_p, "seed": seed, "offset": offset, "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv,
        "max_seqlen_q": max_seqlen_q, "max_seqlen_kv": max_seqlen_kv,
    }  # fmt: skip
    call = read_forward(q, k, k, options, return_kept=True)
    if not dropout_p:  # the graph draws no random numbers
        return (cupy_runtime.cupy() if call.on_gpu else np).ones(call.problem.results[-1].shape, bool, order="F")
    return call.run()[-1] > 0
