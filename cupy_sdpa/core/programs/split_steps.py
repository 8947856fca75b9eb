"""The builder of a split problem (:mod:`.core.problem.split`): rows, chunks of the page table, and the merged results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..kernels import merge, paged
from ..problem.problem import Problem
from ..problem.split import queries_in_rows
from ..problem.tensor_spec import numpy_dtype
from ..problem.view import View
from .steps import Attend, Scalar, Steps


def add(
    steps: Steps, name: str, problem: Problem, split: Problem, arrays: Mapping[str, View], values: Mapping[str, Any]
) -> list[merge.Parts]:
    """Add the steps that compute the results of all chunks, and of the boundary keys.

    ``values`` has the scalars of :class:`.Attend`, if they belong to the program. Returns the parts, to be merged, as
    :func:`.add_parts`.
    """
    chunks_of = split.settings.split
    assert chunks_of
    assert split.page_table
    dtype = numpy_dtype(problem.dtype, on_gpu=True)
    d, dv, hq, hkv, sq, _, b = problem.sizes
    scalars: Mapping[str, Any] = values.get("scalars", {})
    count, staged = chunks_of.chunks, queries_in_rows(problem)
    rows, entries = hq // hkv * staged, b * count
    k, v, table = (arrays[name] for name in ("k", "v", "page_table"))
    q, lengths_q, lengths_kv = (_without_gaps(steps, arrays[name]) for name in ("q", "seq_lens_q", "seq_lens_kv"))
    chunks = paged.Chunks(
        rows=steps.temporary((d, staged, hq, entries), dtype),
        table=steps.temporary(split.page_table.shape, np.int32),
        row_counts=steps.temporary((entries,), np.int32),
        lengths=steps.temporary((entries,), np.int32),
        stats=steps.temporary((staged, hq, entries), np.float32),
    )
    out, boundary = steps.temporary((dv, staged, hq, entries), dtype), None
    parts, writes = [_parts(out, chunks.stats, count, sq)], list(chunks)
    if problem.band:
        results = steps.temporary((dv, sq, hq, b), dtype), steps.temporary((sq, hq, b), np.float32)
        scale, softcap = (scalars.get(name, Scalar(name)) for name in ("scale", "softcap"))
        boundary = paged.BoundaryKeys(*results, scale, softcap if problem.settings.softcap else None)
        parts.append(_parts(*results, 1, sq))
        writes += results
    factors = None
    if problem.fp8:
        descale_q, descale_k, descale_v = (arrays[name] for name in ("descale_q", "descale_k", "descale_v"))
        scale_parts = steps.temporary((1,), np.float32)
        factors = paged.PagedFactors(descale_q, descale_k, descale_v, scale_parts, arrays["amax_out"])
        writes += factors[3:]
    keys = paged.Keys(k, v, table, lengths_q, lengths_kv, problem.band)
    steps.run(paged.split, q, keys, chunks_of, chunks, boundary, problem.dtype, factors, writes=writes)
    #: The rows of a key/value head are the heads of its group and the queries.
    own = {
        "q": _by_rows(chunks.rows, rows), "k": k, "v": v, "out": _by_rows(out, rows),
        "stats": chunks.stats.reshape((rows, hkv, entries), order="F"), "page_table": chunks.table,
        "seq_lens_q": chunks.row_counts, "seq_lens_kv": chunks.lengths,
    }  # fmt: skip
    if factors:
        of_parts = {"scale_out": factors.scale_parts, "amax_out": steps.temporary((1,), np.float32)}
        own |= {name: arrays[name] for name in factors._fields[:3]} | of_parts
    steps.attend_to(name, Attend(split, own, problem, **values))
    return parts


def whole(results: Mapping[str, View]) -> merge.Parts:
    """The results of a pass over all keys as one part."""
    return merge.Parts(results["out"][..., None], results["stats"][..., None])


def add_merge(steps: Steps, problem: Problem, parts: Sequence[merge.Parts], arrays: Mapping[str, View]) -> None:
    """Add the step that merges the parts of a problem into its results."""
    factors = None
    if problem.fp8:
        scale = arrays["scale_out"] if problem.scale_out else None
        factors = merge.Factors(problem.dtype, arrays["descale_v"], scale, arrays["amax_out"])
    lengths = _without_gaps(steps, arrays["seq_lens_q"])
    writes = [arrays[spec.name] for spec in problem.results]
    out, stats, sinks = (arrays.get(name) for name in ("out", "stats", "sinks"))
    steps.run(merge.merge_parts, list(parts), out, stats, sinks, lengths, factors, writes=writes)


def _without_gaps(steps: Steps, x: View) -> View:
    """Return the array, or a copy if its first axis is not contiguous: the kernels read rows and lengths without gaps."""
    return x if x.shape[0] < 2 or x.strides[0] == x.itemsize else steps.copied(x)


def _by_rows(x: View, rows: int) -> View:
    """Return an array ``(D, Sq, Hq, entries)`` as ``(D, Hkv, rows, entries)``."""
    d, _, heads, entries = x.shape
    return x.reshape((d, rows, x.shape[1] * heads // rows, entries), order="F").transpose(0, 2, 1, 3)


def _parts(out: View, stats: View, chunks: int, sq: int) -> merge.Parts:
    """Return the first ``sq`` queries of ``(Dv, S, Hq, B C)`` and ``(S, Hq, B C)`` by part: C chunks per batch item."""
    dv, staged, hq, entries = out.shape
    shape = (staged, hq, chunks, entries // chunks)
    parts = out.reshape((dv, *shape), order="F").transpose(0, 2, 1, 4, 3)[:, :, :sq]
    return merge.Parts(parts, stats.reshape(shape, order="F").transpose(0, 1, 3, 2)[:sq])
