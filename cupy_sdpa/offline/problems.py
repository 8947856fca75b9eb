"""Named problems for the support table: single features, pairs of options, and operations of score functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ..calls.arguments import read_shapes
from ..problem.problem import Problem
from ..problem.tensor_spec import dense_spec
from ..score_fn.ufuncs import FUNCTIONS

#: Arguments of :func:`cupy_sdpa.problem` that are not options of :func:`cupy_sdpa.attention`.
_OUTPUTS = (
    "return_stats",
    "out_dtype",
    "backward",
    "deterministic",
    "return_dbias",
    "return_dsinks",
    "return_dtensors",
    "seq_lens",
)


def _problem(
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
    return _read((d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b), dtype, options)


def _packed(queries: int = 512, d: int = 128, dv: int | None = None, *, dtype: str = "bfloat16", **options: Any) -> Problem:
    starts = {"cu_seqlens_q": (5,), "cu_seqlens_kv": (5,), "max_seqlen_q": queries, "max_seqlen_kv": 512}
    return _read((d, 8, 4 * queries), (d, 2, 2048), (dv or d, 2, 2048), dtype, starts | options)


def _paged(sq: int = 1, page: int = 16, *, dtype: str = "bfloat16", **options: Any) -> Problem:
    pages = (128, 2, page, 600)
    return _read((128, 8, sq, 2), pages, pages, dtype, {"page_table": (4096 // page, 2), **options})


def _paged_with_packed_queries(queries: int, page: int = 16, **options: Any) -> Problem:
    pages, packed = (128, 2, page, 600), {"cu_seqlens_q": (3,), "max_seqlen_q": queries}
    return _read((128, 8, 2 * queries), pages, pages, "bfloat16", {"page_table": (4096 // page, 2), **packed, **options})


def _read(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], dtype: str, options: dict[str, Any]) -> Problem:
    """The problem of shapes, as :func:`cupy_sdpa.problem` reads them."""
    outputs = {name: options[name] for name in _OUTPUTS if name in options}
    options = {name: value for name, value in options.items() if name not in outputs}
    return read_shapes(q, k, v, options, dtype=dtype, **outputs)


#: A problem for each feature, by title.
PROBES: dict[str, Problem] = {
    "forward, head dim 64": _problem(64),
    "forward, head dim 128": _problem(),
    "forward, head dim 256": _problem(256),
    "forward, head dim 192, 128 for v": _problem(192, 128),
    "forward, head dim 12": _problem(12),
    "forward, float16, causal, GQA": _problem(hkv=2, dtype="float16", causal=True),
    "forward, log-sum-exp": _problem(return_stats=True),
    "forward, lengths not multiples of 64": _problem(sq=333, skv=777),
    "forward, causal bottom-right": _problem(sq=333, skv=777, causal="bottom_right"),
    "forward, window": _problem(window=(100, 50)),
    "forward, causal window bottom-right": _problem(sq=333, skv=777, causal="bottom_right", window=(100, None)),
    "forward, sequence lengths": _problem(seq_lens=True, causal=True),
    "forward, sequence lengths, window bottom-right": _problem(seq_lens=True, window=(100, 50, "bottom_right")),
    "forward, bucketed lengths, causal": _problem(sq=333, skv=777, causal=True, bucket=256),
    "forward, one query": _problem(hkv=2, sq=1, skv=4096),
    "forward, one query, score function of the head": _problem(
        hkv=2, sq=1, skv=4096, score_mod=lambda s, b, h, i, j: s + 0.1 * h
    ),
    "forward, packed sequences, causal": _packed(causal=True),
    "forward, packed sequences of one query, log-sum-exp": _packed(queries=1, return_stats=True),
    "forward, bias, ALiBi, softcap": _problem(bias=(512, 512, 8, 1), alibi_slopes=True, softcap=30.0, causal=True),
    "forward, key padding mask": _problem(mask=(512, 1, 1, 2)),
    "forward, sinks, window": _problem(sinks=True, window=(100, 0)),
    "forward, dropout": _problem(dropout_p=0.1, seed=0),
    "forward, maximum and sum of exponentials": _problem(return_stats="max_sumexp"),
    "forward, block mask in the kernel, causal": replace(
        _problem(hkv=2, causal=True, return_stats=True), block_bits=dense_spec("block_bits", "uint8", (1, 4, 8, 2))
    ),
    "forward, pages of 16 keys, one query": _paged(),
    "forward, pages of 64 keys, one query, sinks": _paged(page=64, sinks=True),
    "forward, pages of 16 keys, 4 queries, causal bottom-right": _paged(4, causal="bottom_right"),
    "forward, pages of 64 keys, 70 queries, causal bottom-right": _paged(70, 64, causal="bottom_right"),
    "forward, pages of 16 keys, packed queries, causal bottom-right": _paged_with_packed_queries(70, causal="bottom_right"),
    "forward, pages of 64 keys, packed sequences of one query": _paged_with_packed_queries(1, 64),
    "forward, pages of 48 keys": _paged(70, 48),
    "forward, one query and one paged key, mask": _problem(sq=1, skv=1, page_table=(1, 2), seq_lens=True, mask=(1, 1, 8, 1)),
    "forward, pages of 16 keys, one query, dropout": _paged(dropout_p=0.1, seed=0),
    "forward, FP8, causal, log-sum-exp": _problem(dtype="float8_e4m3fn", hkv=2, causal=True, return_stats=True),
    "forward, FP8 (e5m2), head dim 192, 128 for v": _problem(192, 128, dtype="float8_e5m2"),
    "forward, FP8, head dim 256": _problem(256, dtype="float8_e4m3fn"),
    "forward, FP8, sequence lengths, window": _problem(dtype="float8_e4m3fn", seq_lens=True, window=(100, 50)),
    "forward, FP8, sequence lengths, window bottom-right": _problem(
        dtype="float8_e4m3fn", seq_lens=True, window=(100, 50, "bottom_right")
    ),
    "forward, FP8, bfloat16 output": _problem(dtype="float8_e4m3fn", skv=4096, out_dtype="bfloat16"),
    "forward, FP8, one query": _problem(dtype="float8_e4m3fn", sq=1, skv=4096),
    "forward, FP8, pages of 64 keys, 4 queries": _paged(4, 64, dtype="float8_e4m3fn"),
    "forward, FP8, softcap": _problem(dtype="float8_e4m3fn", softcap=30.0),
    "forward, FP8, packed sequences": _packed(dtype="float8_e4m3fn"),
    "gradients, head dim 64": _problem(64, backward=True),
    "gradients, head dim 128": _problem(backward=True),
    "gradients, head dim 128, GQA, causal": _problem(hkv=2, causal=True, backward=True),
    "gradients, head dim 256": _problem(256, backward=True),
    "gradients, head dim 192, 128 for v": _problem(192, 128, backward=True),
    "gradients, causal window": _problem(causal=True, window=(100, None), backward=True),
    "gradients, causal bottom-right": _problem(sq=333, skv=777, causal="bottom_right", backward=True),
    "gradients, window, sequence lengths": _problem(window=(100, 50, "bottom_right"), seq_lens=True, backward=True),
    "gradients, bucketed lengths": _problem(sq=333, skv=777, backward=True, bucket=256),
    "gradients, deterministic": _problem(backward=True, deterministic=True),
    "gradients, packed sequences, GQA": _packed(backward=True),
    "gradients, packed sequences, head dim 72": _packed(d=72, backward=True),
    "gradients, packed sequences, head dim 256, 128 for v": _packed(d=256, dv=128, backward=True),
    "gradients, bias and its gradient": _problem(bias=(512, 512, 8, 1), backward=True, return_dbias=True),
    "gradients, key padding mask": _problem(mask=(512, 1, 1, 2), backward=True),
    "gradients, ALiBi, softcap, dropout": _problem(
        alibi_slopes=True, softcap=30.0, dropout_p=0.1, seed=0, causal=True, backward=True
    ),
    "gradients, sinks and their gradient": _problem(sinks=True, backward=True, return_dsinks=True),
    "gradients, one query": _problem(sq=1, skv=4096, backward=True),
    "gradients, one query, head and batch entry": _problem(hq=1, hkv=1, sq=1, b=1, backward=True),
    "gradients, deterministic, head dim 192, 128 for v": _problem(192, 128, backward=True, deterministic=True),
    "gradients, deterministic, head dim 136, 72 for v": _problem(136, 72, backward=True, deterministic=True),
    "forward, one query and key, int32 tensors": _problem(
        sq=1, skv=1, score_mod=lambda s, b, h, i, j, t: s + t[b], tensors={"t": np.ones(2, np.int32)}
    ),
    "gradients, one query and key, scores minus an array of one element": _problem(
        sq=1, skv=1, backward=True, score_mod=lambda s, b, h, i, j, t: s - t, tensors={"t": ()}
    ),
}


_SQ, _SKV = 333, 777
#: The options of which every pair is a problem, forward and backward, by title. Arrays are written as shapes.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (100, 50)},
    "lengths": {"seq_lens": True},
    "packed": {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": _SQ, "max_seqlen_kv": _SKV},
    "bias": {"bias": (_SKV, _SQ, 8, 1)},
    "mask": {"mask": (_SKV, _SQ, 1, 2)},
    "key padding mask": {"mask": (_SKV, 1, 1, 2)},
    "ALiBi": {"alibi_slopes": True},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.1, "seed": 0},
    "max and sum": {"return_stats": "max_sumexp"},
    "bias gradient": {"bias": (_SKV, _SQ, 8, 1), "return_dbias": True},
    "sinks gradient": {"sinks": True, "return_dsinks": True},
    "deterministic": {"deterministic": True},
}
#: The options of one direction only, by whether it is the backward pass.
ONE_DIRECTION = {False: {"max and sum"}, True: {"bias gradient", "sinks gradient", "deterministic"}}


def names_of_options(*, backward: bool) -> list[str]:
    """Return the names of the options of one direction."""
    return [name for name in OPTIONS if name not in ONE_DIRECTION[not backward]]


def excluded(first: str, second: str, *, backward: bool) -> bool:
    """Whether two options exclude each other, or one of them belongs to the other direction."""
    if {first, second} & ONE_DIRECTION[not backward]:
        return True
    one, other = OPTIONS[first], OPTIONS[second]
    conflicting = any(one[name] != other[name] for name in one.keys() & other.keys())
    return conflicting or {first, second} == {"lengths", "packed"}


def pair(first: str, second: str, *, backward: bool) -> Problem | None:
    """Return the problem with two options, or with one if they are equal; None if :func:`excluded`."""
    if excluded(first, second, backward=backward):
        return None
    options = {**OPTIONS[first], **OPTIONS[second], "backward": backward}
    if "packed" in (first, second):
        return _read((128, 8, 2 * _SQ), (128, 2, 2 * _SKV), (128, 2, 2 * _SKV), "bfloat16", options)
    return _problem(hkv=2, sq=_SQ, skv=_SKV, **options)


def pairs() -> dict[str, Problem]:
    """Return the problems of single options and of pairs in both directions, by title."""
    problems = {}
    for backward in (False, True):
        direction = "gradients" if backward else "forward"
        for index, first in enumerate(OPTIONS):
            for second in list(OPTIONS)[index:]:
                if problem := pair(first, second, backward=backward):
                    problems[f"{direction}, {first if first == second else f'{first} and {second}'}"] = problem
    return problems


def _of_score(function: Callable[[Any], Any]) -> dict[str, Any]:
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: function(score)}


def _mask(function: Callable[..., Any], *shape: int) -> dict[str, Any]:
    tensors = {"tensors": {"x": np.zeros(shape, np.int32)}} if shape else {}
    return {"mask_mod": function, **tensors}


def _reads(function: Callable[..., Any], *shape: int) -> dict[str, Any]:
    return {"score_mod": function, "tensors": {"x": shape}}


#: The operations of score and mask functions, as options by title.
OPERATIONS: dict[str, dict[str, Any]] = {
    "`s + s * s - 3`, `-s`": _of_score(lambda s: -(s + s * s - 3)),
    "`s / (1 + s * s)`, `1 / s`": _of_score(lambda s: s / (1 + s * s)),
    "`s ** 3`, `np.power`": _of_score(lambda s: (1 + s * s) ** s),
    "`abs`, `np.sign`": _of_score(lambda s: abs(s) + np.sign(s)),
    "`np.maximum`, `np.minimum`, `np.clip`": _of_score(lambda s: np.clip(s, -1.5, 1.5)),
    "`np.exp`, `np.exp2`, `np.expm1`": _of_score(lambda s: np.exp(0.5 * s)),
    "`np.log`, `np.log1p`, `np.log2`, `np.log10`": _of_score(lambda s: np.log(1 + s * s)),
    "`np.logaddexp`": _of_score(lambda s: np.logaddexp(s, 0.5)),
    "`np.sqrt`, `np.hypot`": _of_score(lambda s: np.sqrt(1 + s * s)),
    "`s ** -0.5`": _of_score(lambda s: (1 + s * s) ** -0.5),
    "`np.tanh`": _of_score(np.tanh),
    "`scipy.special.expit`": _of_score(lambda s: FUNCTIONS["expit"](s)),
    "`scipy.special.erf`": _of_score(lambda s: FUNCTIONS["erf"](s)),
    "`np.sinh`, `np.cosh`": _of_score(lambda s: np.sinh(0.5 * s)),
    "`np.sin`, `np.cos`": _of_score(np.sin),
    "`np.tan`": _of_score(np.tan),
    "`np.arctan`": _of_score(np.arctan),
    "`np.floor`, `np.ceil`, `//`, `%`": _of_score(lambda s: s % 1.5 + np.ceil(s)),
    "`np.round`, `np.rint`, `np.trunc`": _of_score(lambda s: np.round(s) + np.trunc(s)),
    "`np.where(s > 0, ...)`, `==`, `<=`": _of_score(lambda s: np.where((s > 0) | (s <= -1), s, 0.5 * s)),
    "positions as numbers": {"score_mod": lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * 0.1 + b - h},
    "`x[h]`, `x[b, h]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s * x[h], 8),
    "`x[kv_idx]`, `x[b, h, kv_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s + x[b, kv_idx], 2, 512),
    "`x[q_idx]`, `x[b, h, q_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s * x[b, h, q_idx], 2, 8, 512),
    "`x[h, q_idx, kv_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s + x[h, q_idx, kv_idx], 8, 512, 512),
    "masks of positions, `&`, `|`, `~`, `^`": _mask(
        lambda b, h, q_idx, kv_idx: (q_idx % 3 == 0) ^ ~(kv_idx // 64 == q_idx // 64)
    ),
    "masks of int32 arrays": _mask(lambda b, h, q_idx, kv_idx, x: x[b, q_idx] == x[b, kv_idx], 2, 512),
}


def operations() -> dict[str, Problem]:
    """Return the problems of the operations of functions in both directions, by title."""
    return {
        f"{direction}, {title}": _problem(backward=direction == "gradients", **options)
        for direction in ("forward", "gradients")
        for title, options in OPERATIONS.items()
    }
