"""Decoding as a split problem: few queries against the paged keys of long sequences.

cuDNN computes one query head with few queries at a time: it reads the keys once per query head, and leaves most of the GPU idle
if there are few sequences. A split problem avoids both. The G query heads of a key/value head and the Sq queries become
``R = G Sq`` rows of one head, and the pages of each sequence are split into C chunks. Each chunk is a batch item, whose row of
the page table is a part of the sequence's row. The results of the chunks are merged (core/kernels/merge.py).

The chunks have no mask, which would take a fifth of the time: they cover the common keys, whole pages to which every query
attends. A small kernel computes attention over the boundary keys, the few other keys of each query (core/kernels/paged.py).

Row ``r = g Sq + s`` is query s of head g of the group, so the rows of all heads in memory are an array ``(D, Sq, Hq, B C)``.
Source: Dao et al. 2023, "Flash-Decoding for long-context inference".
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from ..options.table import OPTIONS, Split
from .problem import Problem
from .tensor_spec import TensorSpec, dense_spec

#: The largest number of rows, and the number in a tile of cuDNN's kernels.
MAX_ROWS, TILE_ROWS = 512, 128
#: Chunks are added up to this number of blocks: tiles of the rows of a key/value head in a chunk. An H200 has 132
#: multiprocessors.
BLOCKS = 128
#: The smallest number of keys per chunk.
MIN_KEYS = 256
#: The keys that cuDNN's kernels load at once: they use all table entries of a tile.
TILE_KEYS = 128
#: The same for FP8 kernels, whose tiles are wider: a multiple of 192 and 256. With a table of 128 keys the kernel used
#: the memory after it as entries.
FP8_TILE_KEYS = 768
#: The largest number of keys per chunk of FP8 arrays. On Hopper the error of a kernel grows with its number of keys; the merge
#: adds in float32.
MAX_FP8_KEYS = 4096


def obstacle(problem: Problem) -> str:
    """Return what prevents a problem from being split, such as an option; empty if nothing does."""
    _, _, hq, hkv, sq, _, _ = problem.sizes
    rows = hq // max(hkv, 1) * sq
    options = {
        "page_table=None": not problem.paged,
        "cu_seqlens_q": problem.packed,
        **{option.name: option.of(problem) for option in OPTIONS.values() if option.weights and not option.split},
        "return_stats='max_sumexp'": problem.max,
        f"{rows} rows of a key/value head (at most {MAX_ROWS})": rows > MAX_ROWS,
    }
    return next((name for name, applies in options.items() if applies), "")


def split_of(problem: Problem) -> Split | None:
    """Return how to split a problem on the GPU; None if cuDNN runs it unsplit.

    The number of chunks depends on the batch size, the heads, and the width of the page table or of the window; the lengths are
    on the device. For a single query, cuDNN's own kernel that splits the keys is as fast; it takes no FP8 arrays.
    """
    _, _, hq, hkv, sq, _, b = problem.sizes
    settings = problem.settings
    others = (settings.num_splits, problem.sinks, problem.band)
    requested = problem.deterministic or any(option is not None for option in others)
    if problem.trivial or obstacle(problem) or not (sq > 1 or requested or problem.fp8):
        return None
    assert problem.page_table
    (pages, _), page, tiles = problem.page_table.shape, problem.k.shape[2], -(-(hq // hkv * sq) // TILE_ROWS)
    if (band := problem.band) and band.left is not None and band.right is not None:
        pages = min(pages, (band.left + band.right + 1) // page + 2)
    least = -(-pages * page // MAX_FP8_KEYS) if problem.fp8 else 1
    chunks = settings.num_splits or max(least, min(BLOCKS // (b * hkv * tiles), pages * page // MIN_KEYS))
    per_chunk = padded_pages(-(-pages // min(chunks, pages)), page)
    return Split(-(-pages // per_chunk), per_chunk)


def queries_in_rows(problem: Problem) -> int:
    """Return the queries of a head in the rows: Sq, or 2 for a single row of FP8, which is computed twice.

    cuDNN has no FP8 kernel for one row on Hopper; its kernel computes a tile of rows in any case.
    """
    _, _, hq, hkv, sq, _, _ = problem.sizes
    return 2 if problem.fp8 and hq == hkv and sq == 1 else sq


def split_problem(problem: Problem, split: Split) -> Problem:
    """Return the problem of the chunks: ``(D, Hkv, R, B C)``, with the log-sum-exp, without sinks."""
    d, dv, hq, hkv, _, _, b = problem.sizes
    rows, entries, dtype = hq // hkv * queries_in_rows(problem), b * split.chunks, problem.dtype
    width = padded_pages(split.pages, problem.k.shape[2], FP8_TILE_KEYS) if problem.fp8 else split.pages
    specs: dict[str, Any] = {
        "q": _rows_spec("q", dtype, (d, rows, hkv, entries)),
        "out": _rows_spec("out", dtype, (dv, rows, hkv, entries)),
        "stats": dense_spec("stats", "float32", (rows, hkv, entries)),
        "page_table": dense_spec("page_table", "int32", (width, entries)),
        "seq_lens_q": dense_spec("seq_lens_q", "int32", (entries,)),
        "seq_lens_kv": dense_spec("seq_lens_kv", "int32", (entries,)),
    }
    if problem.fp8:
        specs |= {"scale_out": dense_spec("scale_out", "float32", (1,)), "amax_out": dense_spec("amax_out", "float32", (1,))}
    settings = problem.settings._replace(num_splits=None, band=None, split=split, deterministic=rows == 1)
    return replace(problem, settings=settings, sinks=None, **specs)


def _rows_spec(name: str, dtype: str, shape: tuple[int, int, int, int]) -> TensorSpec:
    """Return an array ``(D, heads, rows, entries)`` whose memory is a dense array ``(D, rows, heads, entries)``."""
    memory = dense_spec(name, dtype, shape)
    d, rows, heads, entries = shape
    column, row, head, entry = memory.strides
    return replace(memory, shape=(d, heads, rows, entries), strides=(column, head, row, entry))


def padded_pages(pages: int, page: int, tile: int = TILE_KEYS) -> int:
    """Return the number of pages rounded up to whole tiles of keys: cuDNN loads page 0 for the rest of a tile.

    >>> padded_pages(3, 16), padded_pages(3, 64), padded_pages(3, 128)
    (8, 4, 3)
    """
    unit = tile // math.gcd(tile, page)
    return -(-pages // unit) * unit


def with_whole_tiles(problem: Problem) -> Problem:
    """Return the problem with a page table of whole key tiles, if cuDNN loads tiles; score arrays get as many keys."""
    *_, sq, skv, _ = problem.sizes
    table, page = problem.page_table, problem.k.shape[2]
    if table is None or (sq == 1 and not problem.packed):
        return problem
    pages = padded_pages(table.shape[0], page, FP8_TILE_KEYS if problem.fp8 else TILE_KEYS)

    def longer(spec: TensorSpec) -> TensorSpec:
        keys, *others = spec.shape
        return spec if keys == 1 != skv else dense_spec(spec.name, spec.dtype, (pages * page, *others))

    specs: dict[str, Any] = {"page_table": dense_spec("page_table", "int32", (pages, table.shape[1]))}
    if pages > table.shape[0]:
        specs |= {spec.name: longer(spec) for spec in (problem.bias, problem.mask, problem.rng_dump) if spec}
        specs["captured"] = tuple(map(longer, problem.captured))
    return replace(problem, **specs)
