r"""Score and mask functions from the literature, to use and to copy. Options with the same names have the same formulas.

Mask functions return whether query i attends to key j. Functions with parameters are created by a call:
``score_mod=zoo.softcap(30.0)``. Functions that read arrays take them from ``tensors=`` by the names in their docstrings:
``tensors={"slopes": ...}``. Hq is the number of query heads, Sq and Skv are the lengths, B is the batch size. In the formulas
:math:`s` is the scaled score, i the query and j the key.

>>> import numpy as np, cupy_sdpa
>>> from cupy_sdpa import zoo
>>> x = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 20, 1)))
>>> one = cupy_sdpa.attention(x, x, x, score_mod=zoo.softcap(2.0), mask_mod=zoo.causal)
>>> bool(np.allclose(one, cupy_sdpa.attention(x, x, x, softcap=2.0, causal=True)))
True
>>> ids = np.repeat([[0, 1, 2]], [5, 5, 10], axis=1).astype(np.int32)        # three packed documents
>>> cupy_sdpa.attention(x, x, x, mask_mod=zoo.document, tensors={"document_id": ids}).shape
(8, 2, 20, 1)
"""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

Function = Callable[..., Any]


#: The range of positive numbers of float32, in which GPUs compute, and the largest number of positions.
_SMALLEST, _LARGEST, _POSITIONS = 2.0**-126, (2 - 2**-23) * 2.0**127, 2**31 - 1


def _check(least: float, most: float = _POSITIONS, **values: Any) -> None:
    """Raise ValueError for a number out of range, with which scores would be NaN; traced values are not checked."""
    for name, value in values.items():
        if isinstance(value, numbers.Real) and not least <= float(value) <= most:
            raise ValueError(f"{name} is {value}; it must be a number from {least} to {most}")


def softcap(cap: Any) -> Function:
    r""":math:`c \tanh(s / c)`; Gemma Team 2024, "Gemma 2", section 2."""
    _check(_SMALLEST, _LARGEST, cap=cap)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return cap * np.tanh(score / cap)

    return score_mod


def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, slopes: Any) -> Any:
    """``s - slope_h |i - j|``, ``slopes`` (Hq,); Press et al. 2022, "Train Short, Test Long", section 3."""
    return score - slopes[h] * abs(q_idx - kv_idx)


def relative_position(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """``s + (i - j)``; Dong et al. 2024, "Flex Attention", section 3."""
    return score + (q_idx - kv_idx)


def t5_bucket(distance: Any, bidirectional: bool = True, buckets: int = 32, max_distance: int = 128) -> Any:
    """Return the bucket of ``j - i``: exact for near keys, logarithmic for others; Raffel et al. 2020, "T5", section 2.1.

    The logarithms are thresholds, computed with integers.

    Args:
        distance: ``kv_idx - q_idx``, an integer array.
        bidirectional: whether half of the buckets are for later keys; otherwise later keys have bucket 0. Default True.
        buckets: the number of buckets. Default 32.
        max_distance: keys at this distance or farther share the last bucket. Default 128.

    Raises:
        ValueError: there are no logarithmic buckets.

    >>> t5_bucket(np.array([-1000, -9, -8, -3, 0, 3, 1000]))
    array([15,  8,  8,  3,  0, 19, 31])
    """
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    if not 0 < exact < max_distance:
        least = 4 if bidirectional else 2
        raise ValueError(
            f"buckets is {buckets} and max_distance {max_distance}; there must be at least {least} buckets, and max_distance "
            f"must be above {exact}, the number of exact buckets per side"
        )
    n = abs(distance) if bidirectional else np.maximum(-distance, 0)
    bucket = np.minimum(n, exact) + (np.where(distance > 0, side, 0) if bidirectional else 0)
    logarithmic, threshold = side - exact, exact
    for i in range(1, logarithmic):  # the least n with log(n / exact) / log(max_distance / exact) >= i / logarithmic
        while threshold**logarithmic * exact**i < max_distance**i * exact**logarithmic:
            threshold += 1
        bucket = bucket + np.where(n >= threshold, 1, 0)
    return bucket


def table_bias(table: Any, index: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return the bias of a learned table, whose rows the query and key positions select, and the table's gradient.

    cuDNN's kernels have no gather: the elements are gathered before the call. The bias takes Skv x Sq x Hq elements, and its
    gradient as many in float32.

    Args:
        table: ``(N, Hq)``, a numpy or CuPy array.
        index: int ``(Skv, Sq)``, the row for every pair of a key and a query; from 0 to N - 1.

    Returns:
        The bias ``(Skv, Sq, Hq, 1)`` in the dtype of the table, to pass as ``bias=``; with ``layout="bhsd"`` pass ``bias.T``.
        Also a function that turns the gradient of the bias (from ``return_dbias=True``) into the gradient of the table: the sum
        over all pairs with the same row, in float64, returned in float32 (float64 for a float64 table).

    Raises:
        ValueError: the table or the index has another number of axes, or the index is out of range.

    >>> bias, scatter = table_bias(np.array([[10.0], [20.0]]), np.array([[0, 1], [1, 1]]))
    >>> bias[..., 0, 0].tolist(), scatter(np.ones((2, 2, 1, 1))).tolist()
    ([[10.0, 20.0], [20.0, 20.0]], [[1.0], [3.0]])
    """
    xp: Any = np if isinstance(table, np.ndarray) else sys.modules["cupy"]
    if table.ndim != 2 or index.ndim != 2:
        raise ValueError(f"table has shape {table.shape}, index {index.shape}; they must be (N, Hq) and (Skv, Sq)")
    rows, heads = table.shape
    if index.size and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise ValueError(f"index is from {int(index.min())} to {int(index.max())}; table has {rows} rows")
    index = xp.asarray(index)
    bias = xp.asfortranarray(table[index])[..., None]

    def scatter(dbias: Any) -> Any:
        if dbias.shape != bias.shape:
            raise ValueError(f"dbias has shape {dbias.shape}; the bias of the table has {bias.shape}")
        sums = [xp.bincount(index.ravel(), dbias[:, :, h, 0].ravel(), rows) for h in range(heads)]
        return xp.stack(sums, axis=1).astype("float64" if table.dtype == "float64" else "float32")

    return bias, scatter


def t5_bias(
    table: Any, sq: int, skv: int, *, bidirectional: bool = True, max_distance: int = 128
) -> tuple[Any, Callable[[Any], Any]]:
    """Return T5's learned bias ``table_{bucket(j - i) h}`` and the gradient of the table, as :func:`table_bias` does.

    Args:
        table: ``(buckets, Hq)``, a numpy or CuPy array.
        sq, skv: the numbers of queries and of keys.
        bidirectional, max_distance: as for :func:`t5_bucket`; False is for a causal mask.

    T5 has ``scale=1``; Raffel et al. 2020, section 2.1.
    """
    distance = np.arange(skv)[:, None] - np.arange(sq)
    return table_bias(table, t5_bucket(distance, bidirectional, len(table), max_distance))


def swin_bias(table: Any, height: int, width: int) -> tuple[Any, Callable[[Any], Any]]:
    """Return the learned bias of pixel pairs in a window, and the gradient of the table, as :func:`table_bias` does.

    Liu et al. 2021, "Swin Transformer", section 3.2. Pixel (y, x) is position ``width y + x``; Sq = Skv = height x width.

    Args:
        table: ``((2 height - 1) (2 width - 1), Hq)``, a numpy or CuPy array: an element for every distance of two pixels.
        height, width: the size of the window.
    """
    _check(1, height=height, width=width)
    y, x = np.divmod(np.arange(height * width), width)
    down, across = y - y[:, None] + (height - 1), x - x[:, None] + (width - 1)  # from key to query
    if len(table) != (count := (2 * height - 1) * (2 * width - 1)):
        raise ValueError(f"table has {len(table)} rows; a window of {height} x {width} pixels has {count} distances")
    return table_bias(table, down * (2 * width - 1) + across)


def temperature(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, temperature: Any) -> Any:
    """``s t_h``, ``temperature`` (Hq,); Henry et al. 2020, "Query-Key Normalization for Transformers", section 3."""
    return score * temperature[h]


def length_scaled(factor: float) -> Function:
    """``s a log(i + 1)``, i + 1 is the number of keys of a causal mask; Nakanishi 2025, "Scalable-Softmax", section 2."""
    _check(-_LARGEST, _LARGEST, factor=factor)

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * (factor * np.log(q_idx + 1.0))

    return score_mod


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """``j <= i``: a causal mask."""
    return q_idx >= kv_idx


def sliding_window(size: int) -> Function:
    """``0 <= i - j <= size``: ``size + 1`` keys, as ``window=(size, 0)``; Jiang et al. 2023, "Mistral 7B", section 2.

    For a window of W keys including the query's own, pass ``W - 1``.
    """
    _check(0, size=size)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx <= size)

    return mask_mod


def nearby(size: int) -> Function:
    """``|i - j| <= size``: ``2 size + 1`` keys; Beltagy et al. 2020, "Longformer", section 3.1, with w = 2 size."""
    _check(0, size=size)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return abs(q_idx - kv_idx) <= size

    return mask_mod


def prefix_lm(b: Any, h: Any, q_idx: Any, kv_idx: Any, prefix: Any) -> Any:
    """``j <= i or j < prefix_b``, ``prefix`` (B,); Raffel et al. 2020, section 3.2.1."""
    return (kv_idx < prefix[b]) | (q_idx >= kv_idx)


def document(b: Any, h: Any, q_idx: Any, kv_idx: Any, document_id: Any) -> Any:
    """Query and key are in the same document; ``document_id`` (B, Sq), for Sq = Skv."""
    return document_id[b, q_idx] == document_id[b, kv_idx]


def causal_document(b: Any, h: Any, q_idx: Any, kv_idx: Any, document_id: Any) -> Any:
    """``j <= i`` and in the same document; ``document_id`` (Sq,)."""
    return (q_idx >= kv_idx) & (document_id[q_idx] == document_id[kv_idx])


def dilated(size: int, step: int) -> Function:
    """``0 <= i - j <= size`` and ``i - j`` is a multiple of ``step``; Beltagy et al. 2020, section 3.1, the causal half."""
    _check(0, size=size)
    _check(1, step=step)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = q_idx - kv_idx
        return (distance >= 0) & (distance <= size) & (distance % step == 0)

    return mask_mod


def chunked(size: int) -> Function:
    """``j <= i`` and in the same chunk of ``size`` positions: the local attention of Llama 4 (Meta 2025)."""
    _check(1, size=size)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx // size == kv_idx // size)

    return mask_mod


def fixed(size: int, count: int) -> Function:
    """``j <= i``, and j is in the query's block of ``size`` positions or among the last ``count`` of its own block.

    Child et al. 2019, "Sparse Transformers", section 4.3: both fixed patterns in one head, l = size, c = count.
    """
    _check(1, size=size)
    _check(0, count=count)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx // size == kv_idx // size) | (kv_idx % size >= size - count))

    return mask_mod


def strided(size: int) -> Function:
    """``0 <= i - j <= size``, or ``i - j >= 0`` is a multiple of ``size``; Child et al. 2019, section 4.3, l = size."""
    _check(1, size=size)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= size) | ((q_idx - kv_idx) % size == 0))

    return mask_mod


def natten(height: int, width: int, size: int, dilation: int = 1) -> Function:
    """In an image: the ``size`` x ``size`` pixels around the query's; Hassani et al. 2023, "NAT", section 3.

    Pixel (y, x) is position ``width y + x``. At the borders the window is shifted into the image, so that every query has
    ``size^2`` keys. With ``dilation`` the window consists of every ``dilation``-th pixel; Hassani and Shi 2022, "DiNAT",
    section 3.

    Args:
        height, width: the numbers of rows and columns; Sq = Skv = height x width.
        size: the kernel size, odd; ``size dilation`` is at most the height and the width.
        dilation: the distance of neighbouring keys. Default 1.

    Raises:
        ValueError: the size is even, or the window is larger than the image.
    """
    if size % 2 == 0 or size < 1 or dilation < 1:
        raise ValueError(f"size is {size} and dilation {dilation}; the size must be odd, and both must be positive")
    if size * dilation > min(height, width):
        raise ValueError(
            f"size {size} times dilation {dilation} is {size * dilation}; it must be at most {min(height, width)}, the smaller "
            f"side of the image of {height} rows and {width} columns"
        )

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        down = _in_window(q_idx // width, kv_idx // width, height, size, dilation)
        return down & _in_window(q_idx % width, kv_idx % width, width, size, dilation)

    return mask_mod


def _in_window(i: Any, j: Any, length: Any, size: int, dilation: int) -> Any:
    """Return whether j is among the ``size`` positions around i, in steps of ``dilation``; the window is within ``length``."""
    if dilation > 1:  # the positions with one remainder are an axis of their own
        same, count = i % dilation == j % dilation, (length + dilation - 1 - i % dilation) // dilation
        return same & _in_window(i // dilation, j // dilation, count, size, 1)
    after, before = (i - j <= size // 2) | (j >= length - size), (j - i <= size // 2) | (j < size)
    return after & before


def image_window(width: int, reach: int) -> Function:
    """In an image of ``width``: pixels at most ``reach`` rows and columns away; fewer keys at the borders.

    Ramachandran et al. 2019, "Stand-Alone Self-Attention", section 3.1, k = 2 reach + 1. Pixel (y, x) is position
    ``width y + x``.
    """
    _check(1, width=width)
    _check(0, reach=reach)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        across = q_idx % width - kv_idx % width
        down = q_idx // width - kv_idx // width
        return (abs(across) <= reach) & (abs(down) <= reach)

    return mask_mod


def with_global(size: int, count: int) -> Function:
    """``|i - j| <= size``, or query or key among the first ``count``; Beltagy et al. 2020, section 3.1."""
    _check(0, size=size, count=count)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (abs(q_idx - kv_idx) <= size) | (kv_idx < count) | (q_idx < count)

    return mask_mod


def streaming(size: int, count: int) -> Function:
    """``0 <= i - j <= size``, ``size + 1`` keys, and the first ``count`` keys up to i; Xiao et al. 2024, "Attention Sinks",
    section 3."""
    _check(0, size=size, count=count)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & ((q_idx - kv_idx <= size) | (kv_idx < count))

    return mask_mod


def permuted(b: Any, h: Any, q_idx: Any, kv_idx: Any, order: Any) -> Any:
    """``order_j <= order_i``, ``order`` (Sq,): causal in a permuted order; Yang et al. 2019, "XLNet", content stream."""
    return order[q_idx] >= order[kv_idx]


def valid_keys(b: Any, h: Any, q_idx: Any, kv_idx: Any, valid: Any) -> Any:
    """Return a key padding mask, ``valid`` (B, Skv) bool."""
    return valid[b, kv_idx]


def images(b: Any, h: Any, q_idx: Any, kv_idx: Any, image: Any) -> Any:
    """``j <= i``, or both in the same image; ``image`` (B, Sq), -1 for text; Zhou et al. 2024, "Transfusion", section 3."""
    return (q_idx >= kv_idx) | ((image[b, q_idx] == image[b, kv_idx]) & (image[b, q_idx] >= 0))


def tree(b: Any, h: Any, q_idx: Any, kv_idx: Any, tree_number: Any, tree_first: Any, tree_last: Any) -> Any:
    """``first_bj <= number_bi <= last_bj``: key j is i or an ancestor of i; :func:`cupy_sdpa.tree_mask` makes the arrays.

    ``tree_number`` (B, Sq) numbers the tokens of a tree in depth-first order, ``tree_first`` and ``tree_last`` (B, Skv) are the
    range of the numbers of a key's descendants; Miao et al. 2024, "SpecInfer", section 4.2.
    """
    number = tree_number[b, q_idx]
    return (number >= tree_first[b, kv_idx]) & (number <= tree_last[b, kv_idx])


__all__ = [name for name, made in globals().items() if getattr(made, "__module__", "") == __name__ and name[0] != "_"]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
