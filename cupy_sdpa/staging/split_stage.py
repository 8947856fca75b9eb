"""The arrays of a split problem (:mod:`cupy_sdpa.problem.split`): rows, chunks of the page table, and the merged results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import merge
from ..device.cupy_runtime import empty, temporary_copy
from ..device.paging import paged, records
from ..problem.problem import Problem
from ..problem.split import queries_in_rows
from ..problem.tensor_spec import storage_dtype


class SplitStage:
    """The arrays of one call whose keys are split, on the GPU. It has the attributes of :class:`~.stage.Stage`.

    Args:
        problem: the caller's problem.
        engine_problem: the split problem.
        arrays: the caller's arrays and all results, by name.
        scalars: the by-value scalars, by name.
    """

    unchanged = False

    def __init__(
        self, problem: Problem, engine_problem: Problem, arrays: Mapping[str, Any], scalars: Mapping[str, float]
    ) -> None:
        split = engine_problem.settings.split
        assert split
        assert engine_problem.page_table
        self._problem, self._originals = problem, arrays
        dtype = storage_dtype(problem.dtype, on_gpu=True)
        d, dv, hq, hkv, sq, _, b = problem.sizes
        staged, entries = queries_in_rows(problem), b * split.chunks
        rows = hq // hkv * staged
        k, v, table = (arrays[name] for name in ("k", "v", "page_table"))
        q, self._lengths_q, lengths_kv = (_without_gaps(arrays[name]) for name in ("q", "seq_lens_q", "seq_lens_kv"))
        keys = records.Keys(k, v, table, self._lengths_q, lengths_kv, problem.band)
        chunks = records.Chunks(
            rows=empty((d, staged, hq, entries), dtype),
            table=empty(engine_problem.page_table.shape, np.dtype(np.int32)),
            row_counts=empty((entries,), np.dtype(np.int32)),
            lengths=empty((entries,), np.dtype(np.int32)),
            stats=empty((staged, hq, entries), np.dtype(np.float32)),
        )
        out, boundary = empty((dv, staged, hq, entries), dtype), None
        self._parts = [_parts(out, chunks.stats, split.chunks, sq)]
        if problem.band:
            results = empty((dv, sq, hq, b), dtype), empty((sq, hq, b), np.dtype(np.float32))
            boundary = records.BoundaryKeys(*results, scalars["scale"], scalars.get("softcap"))
            self._parts.append(_parts(*results, 1, sq))
        factors = None
        if problem.fp8:
            number = np.dtype(np.float32)
            descale_q, descale_k, descale_v = (arrays[name] for name in ("descale_q", "descale_k", "descale_v"))
            factors = records.PagedFactors(descale_q, descale_k, descale_v, empty((1,), number), arrays["amax_out"])
        paged.split(q, keys, split, chunks, boundary, problem.dtype, factors)
        #: The rows of a key/value head are the heads of its group and the queries.
        self.arrays: dict[str, Any] = {
            "q": _by_rows(chunks.rows, rows), "k": k, "v": v, "out": _by_rows(out, rows),
            "stats": chunks.stats.reshape((rows, hkv, entries), order="F"), "page_table": chunks.table,
            "seq_lens_q": chunks.row_counts, "seq_lens_kv": chunks.lengths,
        }  # fmt: skip
        if factors:
            own = {"scale_out": factors.scale_parts, "amax_out": empty((1,), number)}
            self.arrays |= {name: arrays[name] for name in factors._fields[:3]} | own

    def finish(self) -> None:
        """Merge the results of the chunks, of the boundary keys, and of other keys."""
        arrays, parts = self._originals, self._parts
        if "other_out" in arrays:
            parts = [*parts, merge.Parts(arrays["other_out"][..., None], arrays["other_stats"][..., None])]
        factors = None
        if self._problem.fp8:
            scale = arrays["scale_out"] if self._problem.scale_out else None
            factors = merge.Factors(self._problem.dtype, arrays["descale_v"], scale, arrays["amax_out"])
        merge.merge(parts, arrays["out"], arrays.get("stats"), arrays.get("sinks"), self._lengths_q, factors)


def _without_gaps(array: Any) -> Any:
    """The array, or a copy if its first axis is not contiguous: the kernels read rows and lengths without gaps."""
    if len(array) < 2 or array.strides[0] == array.itemsize:
        return array
    return temporary_copy(array)


def _by_rows(array: Any, rows: int) -> Any:
    """An array ``(D, Sq, Hq, entries)`` as ``(D, Hkv, rows, entries)``."""
    d, _, _, entries = array.shape
    return array.reshape((d, rows, -1, entries), order="F").transpose(0, 2, 1, 3)


def _parts(out: Any, stats: Any, chunks: int, sq: int) -> merge.Parts:
    """The parts of the first ``sq`` queries of arrays ``(Dv, S, Hq, B C)`` and ``(S, Hq, B C)``: C chunks of a batch entry."""
    dv, staged, hq, entries = out.shape
    shape = (staged, hq, chunks, entries // chunks)
    parts = out.reshape((dv, *shape), order="F").transpose(0, 2, 1, 4, 3)[:, :, :sq]
    return merge.Parts(parts, stats.reshape(shape, order="F").transpose(0, 1, 3, 2)[:sq])
