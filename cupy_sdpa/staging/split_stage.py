"""The arrays of a split problem (:mod:`cupy_sdpa.problem.split`): rows, chunks of the page table, and the merged results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import merge, paged
from ..device.cupy_runtime import empty
from ..problem.problem import Problem
from ..problem.tensor_spec import numpy_dtype


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
        self._originals, dtype = arrays, numpy_dtype(problem.dtype)
        d, dv, hq, hkv, sq, _, b = problem.sizes
        entries, rows = b * split.chunks, hq // hkv * sq
        q, k, v, table = (arrays[name] for name in ("q", "k", "v", "page_table"))
        keys = paged.Keys(k, v, table, arrays["seq_lens_q"], arrays["seq_lens_kv"], problem.band)
        chunks = paged.Chunks(
            rows=empty((d, sq, hq, entries), dtype),
            table=empty((split.pages, entries), np.dtype(np.int32)),
            row_counts=empty((entries,), np.dtype(np.int32)),
            lengths=empty((entries,), np.dtype(np.int32)),
            stats=empty((sq, hq, entries), np.dtype(np.float32)),
        )
        out, boundary = empty((dv, sq, hq, entries), dtype), None
        self._parts = [_parts(out, chunks.stats, split.chunks)]
        if problem.band:
            results = empty((dv, sq, hq, b), dtype), empty((sq, hq, b), np.dtype(np.float32))
            boundary = paged.BoundaryKeys(*results, scalars["scale"], scalars.get("softcap"))
            self._parts.append(_parts(*results, 1))
        paged.split(q, keys, split, rows, chunks, boundary)
        #: The rows of a key/value head are the heads of its group and the queries.
        self.arrays: dict[str, Any] = {
            "q": _by_rows(chunks.rows, rows), "k": k, "v": v, "out": _by_rows(out, rows),
            "stats": chunks.stats.reshape((rows, hkv, entries), order="F"), "page_table": chunks.table,
            "seq_lens_q": chunks.row_counts, "seq_lens_kv": chunks.lengths,
        }  # fmt: skip

    def finish(self) -> None:
        """Merge the results of the chunks, of the boundary keys, and of other keys."""
        arrays, parts = self._originals, self._parts
        if "other_out" in arrays:
            parts = [*parts, merge.Parts(arrays["other_out"][..., None], arrays["other_stats"][..., None])]
        merge.merge(parts, arrays["out"], arrays.get("stats"), arrays.get("sinks"), arrays["seq_lens_q"])


def _by_rows(array: Any, rows: int) -> Any:
    """An array ``(D, Sq, Hq, entries)`` as ``(D, Hkv, rows, entries)``."""
    d, _, _, entries = array.shape
    return array.reshape((d, rows, -1, entries), order="F").transpose(0, 2, 1, 3)


def _parts(out: Any, stats: Any, chunks: int) -> merge.Parts:
    """The parts of arrays ``(Dv, Sq, Hq, B C)`` and ``(Sq, Hq, B C)`` with C chunks for each batch entry."""
    dv, sq, hq, entries = out.shape
    shape = (sq, hq, chunks, entries // chunks)
    return merge.Parts(
        out.reshape((dv, *shape), order="F").transpose(0, 2, 1, 4, 3), stats.reshape(shape, order="F").transpose(0, 1, 3, 2)
    )
