"""Other libraries' ways to describe sequences: lists of pages, and sequences with gaps between them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ..extend import Array, Expected, check_arrays, cupy_runtime, read_array, read_number
from .page_lists import fill_table


def page_table_from_lists(
    indptr: Array, indices: Array, last_page_len: Array, *, page_size: int, max_pages: int | None = None
) -> tuple[Any, Any]:
    r"""Make a page table from FlashInfer's lists of pages (``kv_indptr``, ``kv_indices``, ``kv_last_page_len``).

    .. math:: T_{p, b} = \text{indices}[\text{indptr}_b + p], \qquad n_b = s\, (P_b - 1) + \text{last}_b

    for the :math:`P_b = \text{indptr}_{b+1} - \text{indptr}_b > 0` pages of sequence b, with page size s. An empty list gives
    length 0. On the GPU one kernel runs on CuPy's current stream, without synchronization.

    vLLM's block tables, ``(B, P)``, need no conversion: with a layout in C order pass them as ``page_table=``; without a layout
    pass their transpose.

    Args:
        indptr: int32 ``(B+1,)``, where the list of each sequence begins in ``indices``. On the CPU the three may be lists.
        indices: int32 ``(n,)``, the pages of all sequences.
        last_page_len: int32 ``(B,)``, the number of tokens in the last page of each sequence.
        page_size: tokens per page, axis 2 of the keys and values. Caution: if it is too small, ``seq_lens_kv`` is too short and
            the last keys are silently ignored; neither this function, which gets no keys, nor a call can detect it.
        max_pages: P, the number of rows of the table. Keys in later pages are not attended to. Default None: the length of the
            longest list. On the GPU it is required, because the host does not know that length.

    Returns:
        ``(page_table, seq_lens_kv)`` for :func:`cupy_sdpa.attention`: int32 ``(P, B)`` and ``(B,)``. Entries after the pages of
        a sequence are -1. With a layout in C order, pass the transpose of the table.

    Raises:
        TypeError, ValueError: an array has the wrong dtype or shape; on the CPU the lists do not match; on the GPU
            ``max_pages`` is missing.

    Source: FlashInfer's documentation, "KV-Cache Layout in FlashInfer", section "Page Table Layout".

    >>> table, lengths = page_table_from_lists([0, 2, 3], [5, 1, 4], [3, 16], page_size=16)
    >>> table
    array([[ 5,  4],
           [ 1, -1]], dtype=int32)
    >>> lengths
    array([19, 16], dtype=int32)
    """
    page_size = read_number("page_size", page_size, 1)
    if page_size >= 2**31:
        raise ValueError(f"page_size is {page_size}; it must be below 2**31")
    indptr, indices = read_array("indptr", indptr, integers=True), read_array("indices", indices, integers=True)
    last_page_len = read_array("last_page_len", last_page_len, integers=True)
    shape, entries = indptr.shape, indices.shape
    batch = max(shape[0] - 1, 0) if len(shape) == 1 else 0
    legends = {"indptr": ((batch + 1,), "(B + 1,)"), "last_page_len": ((batch,), "(B,) with indptr (B + 1,)")}
    legends["indices"] = (entries if len(entries) == 1 else (0,)), "(n,)"
    arrays = {"indptr": indptr, "indices": indices, "last_page_len": last_page_len}
    check_arrays([Expected(name, wanted, "int32", legend) for name, (wanted, legend) in legends.items()], arrays)
    if not cupy_runtime.is_array(indptr):
        return _table_on_numpy(indptr, indices, last_page_len, page_size, max_pages)
    if max_pages is None:
        raise ValueError(
            "max_pages is None; the host does not know the longest list of CuPy arrays: pass max_pages=, for example the "
            "largest length of a sequence divided by page_size"
        )
    with cupy_runtime.on_device_of(indptr):
        table = cupy_runtime.new_result(indptr, (read_number("max_pages", max_pages, 1), batch), np.dtype(np.int32))
        lengths = cupy_runtime.new_result(indptr, (batch,), np.dtype(np.int32))
        dense = cupy_runtime.cupy().ascontiguousarray
        fill_table(dense(indptr), dense(indices), dense(last_page_len), page_size, table, lengths)
    return table, lengths


def _table_on_numpy(indptr: Any, indices: Any, last: Any, page_size: int, max_pages: int | None) -> tuple[Any, Any]:
    """:func:`page_table_from_lists` of numpy arrays."""
    counts = np.diff(indptr)
    if counts.size and (counts.min() < 0 or indptr[0] < 0 or indptr[-1] > indices.size):
        raise ValueError(f"indptr is {indptr.tolist()}; it must increase, from 0 or more up to the {indices.size} indices")
    listed = np.concatenate([indices[:0], *(indices[a:b] for a, b in itertools.pairwise(indptr))])
    if listed.size and listed.min() < 0:
        raise ValueError(
            f"indices contains {listed.min()}, which is not a page: list only the pages of each sequence, and let indptr say "
            "where a list ends"
        )
    for b in np.flatnonzero((counts > 0) & ((last < 1) | (last > page_size))).tolist():
        raise ValueError(f"last_page_len of sequence {b} is {last[b]}; it must be from 1 to page_size, {page_size}")
    width = max(int(counts.max(initial=0)), 1) if max_pages is None else read_number("max_pages", max_pages, 1)
    table = np.full((width, counts.size), -1, np.int32, order="F")
    for b, count in enumerate(np.minimum(counts, width).tolist()):
        table[:count, b] = indices[indptr[b] : indptr[b] + count]
    lengths = np.where(counts > 0, (counts.astype(np.int64) - 1) * page_size + last, 0)
    lengths = np.minimum(lengths, width * page_size)
    if lengths.size and lengths.max() >= 2**31:
        raise ValueError(f"a sequence has {lengths.max()} tokens, with page_size {page_size}; lengths must be below 2**31")
    return table, lengths.astype(np.int32)


def cu_seqlens_with_gaps(starts: Array, lengths: Array) -> Any:
    r"""Make ``cu_seqlens`` for sequences with gaps between them: each gap becomes its own sequence.

    .. math:: (s_0,\; s_0 + n_0,\; s_1,\; s_1 + n_1,\; \dots)

    so that sequence 2b of the result is sequence b, and nothing is copied. Pass the result for the queries as ``cu_seqlens_q=``
    and the result for the keys as ``cu_seqlens_kv=``, with the longest sequence or gap as ``max_seqlen_q=`` and
    ``max_seqlen_kv=``. Ignore the output of gaps. Gradients of sinks, biases and ``tensors`` also sum over gaps: set ``dout``
    to 0 there.

    - Transformer Engine: ``cu_seqlens_with_gaps(cu_seqlens_q_padded[:-1], cu_seqlens_q[1:] - cu_seqlens_q[:-1])``.
    - Padding before each sequence of ``(D, H, S, B)``: ``x.reshape((D, H, S * B), order="F")`` is packed, with starts
      ``S * b + padding[b]`` and lengths ``S - padding[b]``.

    Args:
        starts: int32 ``(B,)``, where each sequence begins among the packed positions; 0 or more, increasing.
        lengths: int32 ``(B,)``, the length of each sequence.

    Returns:
        int32 ``(2 B,)``: the offsets of 2 B - 1 sequences.

    Raises:
        TypeError, ValueError: an array has the wrong dtype or shape, or on the CPU sequences overlap, or begin before 0.

    >>> cu_seqlens_with_gaps(np.int32([0, 8]), np.int32([5, 6]))
    array([ 0,  5,  8, 14], dtype=int32)
    """
    starts, lengths = read_array("starts", starts, integers=True), read_array("lengths", lengths, integers=True)
    shape = starts.shape
    batch = shape if len(shape) == 1 and shape[0] else (1,)
    expected = [Expected("starts", batch, "int32", "(B,)"), Expected("lengths", batch, "int32", "(B,), as starts")]
    check_arrays(expected, {"starts": starts, "lengths": lengths})
    with cupy_runtime.device_context(starts):
        found = cupy_runtime.new_result(starts, (2 * batch[0],), np.dtype(np.int32))
        found[::2] = starts
        found[1::2] = starts + lengths  # type: ignore[operator]
    if not cupy_runtime.is_array(starts):
        if found[0] < 0:
            raise ValueError(f"starts begins with {found[0]}; positions are counted from 0: it must be 0 or more")
        if (last := int(starts[-1]) + int(lengths[-1])) >= 2**31:
            raise ValueError(f"the last sequence ends at {last}; offsets are int32: it must end below 2**31")
        for place in np.flatnonzero(np.diff(found.astype(np.int64)) < 0).tolist():
            b = place // 2
            if place % 2:
                raise ValueError(
                    f"sequence {b} ends at {found[place]}, but sequence {b + 1} starts at {found[place + 1]}; sequences must "
                    "not overlap"
                )
            raise ValueError(f"lengths of sequence {b} is {lengths[b]}; it must be 0 or more")
    return found
