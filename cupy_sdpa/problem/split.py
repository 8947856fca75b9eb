"""Decoding as a split problem: few queries against the paged keys of long sequences.

cuDNN computes one query head with few queries at a time: it reads the keys once per query head, and leaves most of the GPU idle
if there are few sequences. A split problem avoids both. The G query heads of a key/value head and the Sq queries become
``R = G Sq`` rows of one head, and the pages of each sequence are split into C chunks. Each chunk is a batch entry, whose row of
the page table is a part of the sequence's row. The results of the chunks are merged (device/merge.py).

Row ``r = g Sq + s`` is query s of head g of the group, so the rows of all heads in memory are an array ``(D, Sq, Hq, B C)``.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ..score_fn.expression import AXES, Program
from ..score_fn.tracer import MaskMod, trace
from .problem import Problem, Split
from .tensor_spec import TensorSpec, dense_spec

#: The largest number of rows: those of one tile of cuDNN's kernels.
MAX_ROWS = 128
#: Chunks are added until there are this many pairs of a chunk and a key/value head. An H100 or H200 has 132 multiprocessors.
BLOCKS = 128
#: The smallest number of keys per chunk.
MIN_KEYS = 256
#: The rows of keys that cuDNN's kernels may load at once: table entries are read up to a multiple of it.
TILE = 256


def obstacle(problem: Problem) -> str:
    """What prevents a problem from being split, such as an option; empty if nothing does."""
    _, _, hq, hkv, sq, _, _ = problem.sizes
    rows = hq // max(hkv, 1) * sq
    program = problem.settings.program
    options = {
        "page_table=None": not problem.paged,
        "cu_seqlens_q": problem.packed,
        "bias": problem.bias,
        "mask": problem.mask,
        "alibi_slopes": problem.alibi_slopes,
        "dropout_p": problem.settings.dropout,
        "score_mod": problem.has_score_mod,
        "mask_mod": program,
        "return_stats='max_sumexp'": problem.max,
        f"{rows} rows of a key/value head (at most {MAX_ROWS})": rows > MAX_ROWS,
        "a window and one query of one head": rows == 1 and problem.band,
    }
    return next((name for name, applies in options.items() if applies), "")


@functools.lru_cache(maxsize=4096)
def split_of(problem: Problem) -> Split | None:
    """How to split a problem on the GPU; None if cuDNN runs it as it is.

    The number of chunks depends on the batch size, the heads and the width of the page table; the lengths are on the device.
    For a single query, cuDNN's own kernel that splits the keys is as fast.
    """
    _, _, _, hkv, sq, skv, b = problem.sizes
    settings = problem.settings
    requested = (
        settings.num_splits is not None or problem.deterministic or problem.sinks is not None or problem.band is not None
    )
    if problem.trivial or obstacle(problem) or not (sq > 1 or requested):
        return None
    assert problem.page_table
    pages = problem.page_table.shape[0]
    chunks = settings.num_splits or max(1, min(BLOCKS // (b * hkv), skv // MIN_KEYS))
    per_chunk = -(-pages // min(chunks, pages))
    return Split(-(-pages // per_chunk), per_chunk)


def split_problem(problem: Problem, split: Split) -> Problem:
    """The problem of the chunks: ``(D, Hkv, R, B C)``, with the log-sum-exp, without sinks."""
    d, dv, hq, hkv, sq, _, b = problem.sizes
    rows, entries, dtype = hq // hkv * sq, b * split.chunks, problem.dtype
    specs: dict[str, Any] = {
        "q": _rows_spec("q", dtype, (d, rows, hkv, entries)),
        "out": _rows_spec("out", dtype, (dv, rows, hkv, entries)),
        "stats": dense_spec("stats", "float32", (rows, hkv, entries)),
        "page_table": table_spec(split.pages, entries, problem.k.shape[2]),
        "seq_lens_q": dense_spec("seq_lens_q", "int32", (entries,)),
        "seq_lens_kv": dense_spec("seq_lens_kv", "int32", (entries,)),
    }
    bounds = bounds_of(problem)
    captured = tuple(dense_spec(name, "int32", (1, rows, 1, entries)) for name in bounds.names)
    settings = problem.settings._replace(
        num_splits=None, band=None, split=split, program=bounds.program, deterministic=rows == 1
    )
    return replace(problem, settings=settings, captured=captured, sinks=None, **specs)


def _rows_spec(name: str, dtype: str, shape: tuple[int, int, int, int]) -> TensorSpec:
    """An array ``(D, heads, rows, entries)`` whose memory is a dense array ``(D, rows, heads, entries)``."""
    memory = dense_spec(name, dtype, shape)
    d, rows, heads, entries = shape
    column, row, head, entry = memory.strides
    return replace(memory, shape=(d, heads, rows, entries), strides=(column, head, row, entry))


def table_spec(pages: int, entries: int, page: int) -> TensorSpec:
    """A page table ``(pages, entries)`` with room after each column for the pages of a whole tile of keys."""
    room = -(-pages * page // TILE) * TILE // page if page < TILE else pages
    return replace(dense_spec("page_table", "int32", (pages, entries)), strides=(4, 4 * max(room, pages)))


class Bounds(NamedTuple):
    """The mask of a split problem: which keys of a chunk every row attends to.

    Attributes:
        program: the mask function, or None if no mask is needed.
        names: the captured arrays of the program, int32 ``(1, R, 1, B C)``: ``end``, and ``first`` if there is a left bound.
    """

    program: Program | None
    names: tuple[str, ...]


def bounds_of(problem: Problem) -> Bounds:
    """The mask of a split problem. A single query without a window attends to every key of each chunk."""
    *_, sq, _, _ = problem.sizes
    if sq == 1 and problem.band is None:
        return Bounds(None, ())
    return _traced_bounds(problem.band is not None and problem.band.left is not None)


@functools.cache
def _traced_bounds(left: bool) -> Bounds:
    mask: dict[bool, MaskMod] = {
        False: lambda b, h, q_idx, kv_idx, end: kv_idx < end[b, q_idx],
        True: lambda b, h, q_idx, kv_idx, end, first: (kv_idx < end[b, q_idx]) & (kv_idx >= first[b, q_idx]),
    }
    arrays = {name: np.zeros((2, 2), np.int32) for name in (("end", "first") if left else ("end",))}
    traced = trace(None, mask[left], arrays, dict.fromkeys(AXES, 2), bands=False)
    names = {access.name: name for name, access in traced.captured.items()}
    return Bounds(traced.program, tuple(names[name] for name in arrays))
