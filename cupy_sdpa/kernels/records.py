"""The arrays that the kernels beside attention with paged keys take (:mod:`.paged`)."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..problem.band import Band


class Keys(NamedTuple):
    """Paged keys and values, and the queries that attend to them.

    Attributes:
        k, v: pages ``(D, Hkv, page size, pages)`` and ``(Dv, Hkv, page size, pages)``.
        table: int32 ``(P, B)``.
        lengths_q, lengths: int32 ``(B,)``, the numbers of queries and keys.
        band: the band of keys that a query attends to, or None.
    """

    k: Any
    v: Any
    table: Any
    lengths_q: Any
    lengths: Any
    band: Band | None


class Chunks(NamedTuple):
    """The arrays of a split problem that :func:`.paged.split` writes; R rows and E entries, C for each batch entry.

    Attributes:
        rows: ``(D, Sq, Hq, E)``, the queries, repeated for every chunk.
        table: int32 ``(P, E)``, at least the pages per chunk; the first page of the chunk for the others.
        row_counts: int32 ``(E,)``, R for every entry.
        lengths: int32 ``(E,)``, the number of keys of every chunk.
        stats: float32 ``(Sq, Hq, E)``; -inf is written for chunks without keys.
    """

    rows: Any
    table: Any
    row_counts: Any
    lengths: Any
    stats: Any


class PagedFactors(NamedTuple):
    """The factors of FP8 queries and pages, float32 ``(1,)``.

    Attributes:
        descale_q, descale_k, descale_v: of the queries, the keys and the values.
        scale_parts: the scale of the results of chunks and of boundary keys, written: ``1 / descale_v``. A result is a mean of
            values, so it does not saturate.
        amax: 0 is written.
    """

    descale_q: Any
    descale_k: Any
    descale_v: Any
    scale_parts: Any
    amax: Any


class BoundaryKeys(NamedTuple):
    """The results of :func:`.paged.split` for the boundary keys, which are the keys of a band outside the common keys.

    Attributes:
        out: ``(Dv, Sq, Hq, B)``, dense, written where there are keys.
        stats: float32 ``(Sq, Hq, B)``, dense, the log-sum-exp, written.
        scale, softcap: of their scores, as for :func:`cupy_sdpa.attention`.
    """

    out: Any
    stats: Any
    scale: float
    softcap: float | None
