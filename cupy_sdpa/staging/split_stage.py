"""The arrays of a split problem (:mod:`cupy_sdpa.problem.split`): rows, chunks of the page table, and the merged results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import kernels, merge, paged
from ..device.cupy_runtime import empty
from ..problem.problem import Problem
from ..problem.split import bounds_of
from ..problem.tensor_spec import numpy_dtype


class SplitStage:
    """The arrays of one call whose keys are split, on the GPU. It has the attributes of :class:`~.stage.Stage`.

    Args:
        problem: the caller's problem.
        engine_problem: the split problem.
        arrays: the caller's arrays and all results, by name.
    """

    unchanged = False

    def __init__(self, problem: Problem, engine_problem: Problem, arrays: Mapping[str, Any]) -> None:
        split = engine_problem.settings.split
        assert split
        self._problem, self._originals, self._chunks = problem, arrays, split.chunks
        d, dv, hq, _, sq, _, b = problem.sizes
        entries = b * split.chunks
        _, _, rows, _ = engine_problem.q.shape
        self._out = empty((dv, sq, hq, entries), numpy_dtype(problem.dtype))
        self._stats = empty((sq, hq, entries), np.dtype(np.float32))
        chunks = paged.Chunks(
            rows=empty((d, sq, hq, entries), numpy_dtype(problem.dtype)),
            table=paged.empty_table(next(spec for spec in engine_problem.tensors if spec.name == "page_table")),
            row_counts=empty((entries,), np.dtype(np.int32)),
            lengths=empty((entries,), np.dtype(np.int32)),
            bounds=[empty((rows, entries), np.dtype(np.int32)) for _ in bounds_of(problem).names],
            stats=self._stats,
        )
        lengths = arrays["seq_lens_q"], arrays["seq_lens_kv"]
        paged.split(arrays["q"], arrays["page_table"], *lengths, problem.k.shape[2], problem.band, split, rows, chunks)
        self.arrays: dict[str, Any] = {
            "q": chunks.rows, "k": arrays["k"], "v": arrays["v"], "out": self._out, "stats": self._stats,
            "page_table": chunks.table, "seq_lens_q": chunks.row_counts, "seq_lens_kv": chunks.lengths,
            **dict(zip(bounds_of(problem).names, chunks.bounds, strict=True)),
        }  # fmt: skip
        self.arrays = {
            name: array if name in ("k", "v") else _view(array, engine_problem, name) for name, array in self.arrays.items()
        }

    @property
    def copied_bytes(self) -> int:
        """Bytes of the arrays that the stage created."""
        return sum(array.nbytes for name, array in self.arrays.items() if name not in ("k", "v"))

    def finish(self) -> None:
        """Merge the results of the chunks."""
        arrays, (dv, sq, hq, entries) = self._originals, self._out.shape
        shape = (sq, hq, self._chunks, entries // self._chunks)
        parts = merge.Parts(
            self._out.reshape((dv, *shape), order="F").transpose(0, 2, 1, 4, 3),
            self._stats.reshape(shape, order="F").transpose(0, 1, 3, 2),
        )
        stats, sinks = arrays.get("stats"), arrays.get("sinks")
        merge.merge([parts], arrays["out"], stats, sinks)
        if stats is not None and sinks is not None:  # rows beyond the lengths have no sink
            *_, sq, skv, _ = self._problem.sizes
            queries, keys = kernels.Lengths(arrays["seq_lens_q"], sq, sq), kernels.Lengths(arrays["seq_lens_kv"], skv, skv)
            cleared = kernels.ClearedResult(stats, of_keys=False, per_row=True, fill_value=-np.inf, sinks=sinks)
            kernels.prepare_sequences(queries, keys, None, [cleared])


def _view(array: Any, problem: Problem, name: str) -> Any:
    """An array with the axes of the split problem's tensor; the memory is the same."""
    spec = next(spec for spec in problem.tensors if spec.name == name)
    if name in ("q", "out"):
        d, heads, rows, entries = spec.shape
        return array.reshape((d, rows, heads, entries), order="F").transpose(0, 2, 1, 3)
    return array if name == "page_table" else array.reshape(spec.shape, order="F")
