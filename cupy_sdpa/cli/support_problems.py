"""The problems of ``support``: a named problem for each feature."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import Problem
from ..explanation import problem


def problem_of_sizes(
    d: int = 128,
    dv: int | None = None,
    *,
    hq: int = 8,
    hkv: int = 8,
    sq: int = 512,
    skv: int = 512,
    b: int = 2,
    dtype: str = "bfloat16",
    **options: Any,
) -> Problem:
    """Return the problem of dense arrays of the given sizes, with options of :func:`cupy_sdpa.problem`."""
    return problem((d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b), dtype=dtype, **options)


def _packed(queries: int = 512, d: int = 128, dv: int | None = None, *, dtype: str = "bfloat16", **options: Any) -> Problem:
    starts: dict[str, Any] = {"cu_seqlens_q": (5,), "cu_seqlens_kv": (5,), "max_seqlen_q": queries, "max_seqlen_kv": 512}
    return problem((d, 8, 4 * queries), (d, 2, 2048), (dv or d, 2, 2048), dtype=dtype, **(starts | options))


def _paged(sq: int = 1, page: int = 16, *, dtype: str = "bfloat16", **options: Any) -> Problem:
    pages = (128, 2, page, 600)
    return problem((128, 8, sq, 2), pages, pages, dtype=dtype, page_table=(4096 // page, 2), **options)


def _paged_with_packed_queries(queries: int, page: int = 16, **options: Any) -> Problem:
    pages, table = (128, 2, page, 600), (4096 // page, 2)
    options |= {"page_table": table, "cu_seqlens_q": (3,), "max_seqlen_q": queries}
    return problem((128, 8, 2 * queries), pages, pages, dtype="bfloat16", **options)


#: A problem for each feature, by title.
PROBES: dict[str, Problem] = {
    "forward, head dim 64": problem_of_sizes(64),
    "forward, head dim 128": problem_of_sizes(),
    "forward, head dim 256": problem_of_sizes(256),
    "forward, head dim 192, 128 for v": problem_of_sizes(192, 128),
    "forward, head dim 12": problem_of_sizes(12),
    "forward, float16, causal, GQA": problem_of_sizes(hkv=2, dtype="float16", causal=True),
    "forward, log-sum-exp": problem_of_sizes(return_stats=True),
    "forward, lengths not multiples of 64": problem_of_sizes(sq=333, skv=777),
    "forward, causal bottom-right": problem_of_sizes(sq=333, skv=777, causal="bottom_right"),
    "forward, window": problem_of_sizes(window=(100, 50)),
    "forward, causal window bottom-right": problem_of_sizes(sq=333, skv=777, causal="bottom_right", window=(100, None)),
    "forward, sequence lengths": problem_of_sizes(seq_lens_kv=True, causal=True),
    "forward, sequence lengths, window bottom-right": problem_of_sizes(seq_lens_kv=True, window=(100, 50, "bottom_right")),
    "forward, bucketed lengths, causal": problem_of_sizes(sq=333, skv=777, causal=True, bucket=256),
    "forward, one query": problem_of_sizes(hkv=2, sq=1, skv=4096),
    "forward, one query, score function of the head": problem_of_sizes(
        hkv=2, sq=1, skv=4096, score_mod=lambda s, b, h, i, j: s + 0.1 * h
    ),
    "forward, packed sequences, causal": _packed(causal=True),
    "forward, packed sequences of one query, log-sum-exp": _packed(queries=1, return_stats=True),
    "forward, bias, ALiBi, softcap": problem_of_sizes(bias=(512, 512, 8, 1), alibi_slopes=True, softcap=30.0, causal=True),
    "forward, key padding mask": problem_of_sizes(mask=(512, 1, 1, 2)),
    "forward, sinks, window": problem_of_sizes(sinks=True, window=(100, 0)),
    "forward, dropout": problem_of_sizes(dropout_p=0.1, seed=0),
    "forward, maximum and sum of exponentials": problem_of_sizes(return_stats="max_sumexp"),
    "forward, pages of 16 keys, one query": _paged(),
    "forward, pages of 64 keys, one query, sinks": _paged(page=64, sinks=True),
    "forward, pages of 16 keys, 4 queries, causal bottom-right": _paged(4, causal="bottom_right"),
    "forward, pages of 64 keys, 70 queries, causal bottom-right": _paged(70, 64, causal="bottom_right"),
    "forward, pages of 16 keys, packed queries, causal bottom-right": _paged_with_packed_queries(70, causal="bottom_right"),
    "forward, pages of 64 keys, packed sequences of one query": _paged_with_packed_queries(1, 64),
    "forward, pages of 48 keys": _paged(70, 48),
    "forward, one query and one paged key, mask": problem_of_sizes(
        sq=1, skv=1, page_table=(1, 2), seq_lens_kv=True, mask=(1, 1, 8, 1)
    ),
    "forward, pages of 16 keys, one query, dropout": _paged(dropout_p=0.1, seed=0),
    "forward, FP8, causal, log-sum-exp": problem_of_sizes(dtype="float8_e4m3fn", hkv=2, causal=True, return_stats=True),
    "forward, FP8 (e5m2), head dim 192, 128 for v": problem_of_sizes(192, 128, dtype="float8_e5m2"),
    "forward, FP8, head dim 256": problem_of_sizes(256, dtype="float8_e4m3fn"),
    "forward, FP8, sequence lengths, window": problem_of_sizes(dtype="float8_e4m3fn", seq_lens_kv=True, window=(100, 50)),
    "forward, FP8, sequence lengths, window bottom-right": problem_of_sizes(
        dtype="float8_e4m3fn", seq_lens_kv=True, window=(100, 50, "bottom_right")
    ),
    "forward, FP8, bfloat16 output": problem_of_sizes(dtype="float8_e4m3fn", skv=4096, out_dtype="bfloat16"),
    "forward, FP8, one query": problem_of_sizes(dtype="float8_e4m3fn", sq=1, skv=4096),
    "forward, FP8, pages of 64 keys, 4 queries": _paged(4, 64, dtype="float8_e4m3fn"),
    "forward, FP8, softcap": problem_of_sizes(dtype="float8_e4m3fn", softcap=30.0),
    "forward, FP8, packed sequences": _packed(dtype="float8_e4m3fn"),
    "gradients, head dim 64": problem_of_sizes(64, backward=True),
    "gradients, head dim 128": problem_of_sizes(backward=True),
    "gradients, head dim 128, GQA, causal": problem_of_sizes(hkv=2, causal=True, backward=True),
    "gradients, head dim 256": problem_of_sizes(256, backward=True),
    "gradients, head dim 192, 128 for v": problem_of_sizes(192, 128, backward=True),
    "gradients, causal window": problem_of_sizes(causal=True, window=(100, None), backward=True),
    "gradients, causal bottom-right": problem_of_sizes(sq=333, skv=777, causal="bottom_right", backward=True),
    "gradients, window, sequence lengths": problem_of_sizes(window=(100, 50, "bottom_right"), seq_lens_kv=True, backward=True),
    "gradients, bucketed lengths": problem_of_sizes(sq=333, skv=777, backward=True, bucket=256),
    "gradients, deterministic": problem_of_sizes(backward=True, deterministic=True),
    "gradients, packed sequences, GQA": _packed(backward=True),
    "gradients, packed sequences, head dim 72": _packed(d=72, backward=True),
    "gradients, packed sequences, head dim 256, 128 for v": _packed(d=256, dv=128, backward=True),
    "gradients, bias and its gradient": problem_of_sizes(bias=(512, 512, 8, 1), backward=True, return_dbias=True),
    "gradients, key padding mask": problem_of_sizes(mask=(512, 1, 1, 2), backward=True),
    "gradients, ALiBi, softcap, dropout": problem_of_sizes(
        alibi_slopes=True, softcap=30.0, dropout_p=0.1, seed=0, causal=True, backward=True
    ),
    "gradients, sinks and their gradient": problem_of_sizes(sinks=True, backward=True, return_dsinks=True),
    "gradients, 2^32 elements in the query heads of one key/value head": problem_of_sizes(hkv=1, sq=2**22, b=1, backward=True),
    "gradients, one query": problem_of_sizes(sq=1, skv=4096, backward=True),
    "gradients, one query, head and batch item": problem_of_sizes(hq=1, hkv=1, sq=1, b=1, backward=True),
    "gradients, deterministic, head dim 192, 128 for v": problem_of_sizes(192, 128, backward=True, deterministic=True),
    "gradients, deterministic, head dim 136, 72 for v": problem_of_sizes(136, 72, backward=True, deterministic=True),
    "forward, one query and key, int32 tensors": problem_of_sizes(
        sq=1, skv=1, score_mod=lambda s, b, h, i, j, t: s + t[b], tensors={"t": np.ones(2, np.int32)}
    ),
    "gradients, one query and key, scores minus an array of one element": problem_of_sizes(
        sq=1, skv=1, backward=True, score_mod=lambda s, b, h, i, j, t: s - t, tensors={"t": ()}
    ),
}
