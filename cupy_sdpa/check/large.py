"""Problems beyond 2^31 elements, and near the largest grids, on a GPU: samples of their results are compared with float64.

``python -m cupy_sdpa check --large`` runs the cases, and so does the tier ``large`` of the tests. The samples are the first and
the last batch items or positions, and the ones around element 2^31.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .. import (
    KVCache,
    Rope,
    apply_rope,
    attention,
    attention_backward,
    attention_jvp,
    block_mask,
    dropout_mask,
    fp8,
    merge,
    reference,
    weight_sums,
)
from ..extend import cupy_runtime

#: The number of elements that the arrays of a case exceed.
ELEMENTS = 2**31
#: The largest number of blocks along the second and third axis of a CUDA grid.
GRID = 65535
#: The error of a result in 16 bits, divided by its largest magnitude; of FP8.
TOLERANCE, FP8_TOLERANCE = 6e-3, 0.15

#: The elements after which random numbers repeat.
_PERIOD = 16_777_183

Arrays = Mapping[str, Any]


class LargeCase(NamedTuple):
    """A case: its name, the memory that it needs in GiB, and a function that yields the errors of its results."""

    name: str
    gib: int
    run: Callable[[Sizes], Iterator[str]]


class Sizes(NamedTuple):
    """The sizes of a case; the defaults are for a GPU.

    Attributes:
        elements: the number of elements that arrays exceed.
        seq: the length of sequences.
        grid: the number of heads or batch items of the cases of large grids.
    """

    elements: int = ELEMENTS
    seq: int = 1024
    grid: int = GRID

    def batch(self, d: int, heads: int) -> int:
        """Return the number of batch items whose arrays exceed the elements, by six entries."""
        return self.elements // (d * heads * self.seq) + 6


#: All cases, in the order of their definition.
CASES: list[LargeCase] = []


def _case(name: str, gib: int) -> Callable[[Callable[[Sizes], Iterator[str]]], Callable[[Sizes], Iterator[str]]]:
    def add(run: Callable[[Sizes], Iterator[str]]) -> Callable[[Sizes], Iterator[str]]:
        CASES.append(LargeCase(name, gib, run))
        return run

    return add


def run(case: LargeCase, sizes: Sizes | None = None) -> list[str]:
    """Run a case; returns its errors, or raises what a call raises. The memory is released."""
    try:
        return list(case.run(sizes or Sizes()))
    finally:
        cupy_runtime.cupy().get_default_memory_pool().free_all_blocks()


def free_gib() -> float:
    """Return the free memory of the current GPU in GiB."""
    free, _ = cupy_runtime.cupy().cuda.runtime.memGetInfo()
    return float(free) / 2**30


# Arrays and samples


def _normal(seed: int, *shape: int, dtype: Any = np.float16) -> Any:
    """Normal numbers in Fortran order. They repeat after a prime number of elements, so that no two addresses are confused."""
    cupy = cupy_runtime.cupy()
    array = cupy.empty(shape, dtype, order="F")
    flat = array.reshape(-1, order="F")
    block = cupy.asarray(np.random.default_rng(seed).standard_normal(min(flat.size, _PERIOD), np.float32).astype(dtype))
    for first in range(0, flat.size, _PERIOD):
        flat[first : first + _PERIOD] = block[: flat.size - first]
    return array


def _nan(*shape: int, dtype: Any = np.float16) -> Any:
    array = cupy_runtime.cupy().empty(shape, dtype, order="F")
    array.fill(np.nan)
    return array


def _qkv(d: int, hq: int, hkv: int, sq: int, skv: int, b: int) -> tuple[Any, Any, Any]:
    return _normal(1, d, hq, sq, b), _normal(2, d, hkv, skv, b), _normal(3, d, hkv, skv, b)


def _entries(count: int, *others: int) -> list[int]:
    """Return the first and the last index, the indices around the middle, and others that exist."""
    return sorted({n for n in (0, count // 2, count - 2, count - 1, *others) if 0 <= n < count})


def _host(x: Any) -> Any:
    return np.asarray(x.get(order="F") if hasattr(x, "get") else x).astype(np.float64)


def _error(name: str, where: object, actual: Any, truth: Any, tolerance: float = TOLERANCE) -> Iterator[str]:
    """Yield the message of a sample that is wrong; NaN is wrong."""
    actual = _host(actual)
    finite = np.isfinite(truth)
    largest = max(float(np.abs(truth[finite]).max(initial=0)), 1e-3)
    same = np.array_equal(actual[~finite], truth[~finite])
    worst = float(np.abs(np.where(finite, actual, 0) - np.where(finite, truth, 0)).max(initial=0)) / largest
    if not (same and worst <= tolerance):
        yield f"{name} of {where} has a relative error of {worst:.2g}, allowed {tolerance:g}"


def _both_passes(
    arrays: Arrays, entries: Iterable[int], heads: Iterable[int], truth_options: Mapping[str, Any] | None = None, **options: Any
) -> Iterator[str]:
    """Run both passes of q, k, v and dout, into results full of NaN, and compare samples of all results.

    ``truth_options`` are the options of the reference. Default: the call's options.
    """
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, stats = _nan(*q.shape), _nan(q.shape[2], q.shape[1], q.shape[3], dtype=np.float32)
    attention(q, k, v, out=out, stats=stats, **options)
    gradients = {f"d{name}": _nan(*arrays[name].shape) for name in "qkv"}
    attention_backward(dout, q, k, v, out, stats, **gradients, **options)
    group = q.shape[1] // k.shape[1]
    for b in entries:
        for g in heads:
            of_q, of_kv = (
                (slice(None), slice(g * group, (g + 1) * group), slice(None), slice(b, b + 1)),
                np.s_[:, g : g + 1, :, b : b + 1],
            )
            part = {name: _host(arrays[name][of_kv if name in "kv" else of_q]) for name in ("q", "k", "v", "dout")}
            given = _of_entry(truth_options or options, b)
            truth_out, truth_stats = reference.attention(part["q"], part["k"], part["v"], **given)
            truths = reference.attention_backward(part["dout"], part["q"], part["k"], part["v"], **given)
            where = f"key/value head {g}, entry {b}"
            yield from _error("out", where, out[of_q], truth_out)
            yield from _error("stats", where, stats[:, of_q[1], of_q[3]], truth_stats)
            for name, truth in zip(("dq", "dk", "dv"), truths, strict=True):
                yield from _error(name, where, gradients[name][of_q if name == "dq" else of_kv], truth)


def _of_entry(options: Mapping[str, Any], b: int) -> dict[str, Any]:
    """Return the options of the reference for one batch item."""
    return {name: _host(x[b : b + 1]).astype(int) if name.startswith("seq_lens") else x for name, x in options.items()}


def _with_dout(q: Any, k: Any, v: Any) -> dict[str, Any]:
    return {"q": q, "k": k, "v": v, "dout": _normal(4, v.shape[0], *q.shape[1:])}


# Cases


@_case("both passes", 28)
def _dense(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    yield from _both_passes(_with_dout(*_qkv(128, 16, 4, s, s, b)), _entries(b, b - 6, b - 7), (0, 3), causal=True)


@_case("both passes, lengths", 28)
def _lengths(sizes: Sizes) -> Iterator[str]:
    cupy = cupy_runtime.cupy()
    b, s = sizes.batch(128, 16), sizes.seq
    lengths: dict[str, Any] = {name: cupy.asarray(np.random.default_rng(n).integers(0, s + 1, b).astype(np.int32))
               for n, name in enumerate(("seq_lens_q", "seq_lens_kv"))}  # fmt: skip
    yield from _both_passes(_with_dout(*_qkv(128, 16, 4, s, s, b)), _entries(b, b - 6), (0, 3), **lengths)


@_case("both passes, dout of few heads of a larger array", 30)
def _strided(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    arrays = {**_with_dout(*_qkv(128, 2, 2, s, s, b)), "dout": _normal(5, 128, 16, s, b)[:, 7:9]}
    yield from _both_passes(arrays, _entries(b, b - 6), (0, 1))


@_case("both passes, one long sequence with a window", 40)
def _long(sizes: Sizes) -> Iterator[str]:
    width = min(256, sizes.seq // 4)
    s = sizes.elements // (128 * 16) // 64 * 64 + 8 * width
    arrays = _with_dout(*_qkv(128, 16, 4, s, s, 1))
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, stats = attention(q, k, v, window=(width - 1, 0), return_stats=True)
    gradients = {f"d{name}": _nan(*arrays[name].shape) for name in "qkv"}
    attention_backward(dout, q, k, v, out, stats, **gradients, window=(width - 1, 0))
    for first in (0, s // 2, s - 8 * width, s - 4 * width):
        own = slice(first, first + 4 * width)
        inner = slice(0 if first == 0 else width, 4 * width if own.stop == s else 3 * width)  # all that the window reaches
        for g in (0, 3):
            group = slice(4 * g, 4 * g + 4)
            part = [_host(x[:, group, own]) for x in (dout, q)] + [_host(x[:, g : g + 1, own]) for x in (k, v)]
            truth_out, _ = reference.attention(*part[1:], window=(width - 1, 0))
            truths = reference.attention_backward(*part, window=(width - 1, 0))
            where = f"key/value head {g}, positions from {first}"
            yield from _error("out", where, out[:, group, own][:, :, inner], truth_out[:, :, inner])
            for (name, x), truth in zip(gradients.items(), truths, strict=True):
                heads = group if name == "dq" else slice(g, g + 1)
                yield from _error(name, where, x[:, heads, own][:, :, inner], truth[:, :, inner])


@_case("both passes, packed sequences", 40)
def _packed(sizes: Sizes) -> Iterator[str]:
    cupy = cupy_runtime.cupy()
    count = sizes.elements // (128 * 8 * sizes.seq) + 40
    lengths = np.random.default_rng(0).integers(sizes.seq - sizes.seq // 64, sizes.seq + 1, count)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    total, offsets = int(starts[-1]), cupy.asarray(starts)
    q, dout = _normal(1, 128, 8, total), _normal(4, 128, 8, total)
    k, v = _normal(2, 128, 2, total), _normal(3, 128, 2, total)
    options: dict[str, Any] = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_kv": offsets,
        "max_seqlen_q": sizes.seq,
        "max_seqlen_kv": sizes.seq,
    }
    out, stats = attention(q, k, v, causal=True, return_stats=True, **options)
    gradients = {"dq": _nan(*q.shape), "dk": _nan(*k.shape), "dv": _nan(*v.shape)}
    attention_backward(dout, q, k, v, out, stats, causal=True, **gradients, **options)
    for b in _entries(count):
        own = slice(int(starts[b]), int(starts[b + 1]))
        part = [_host(x[:, :4, own])[..., None] for x in (dout, q)] + [_host(x[:, :1, own])[..., None] for x in (k, v)]
        yield from _error("out", f"sequence {b}", out[:, :4, own], reference.attention(*part[1:], causal=True)[0][..., 0])
        for (name, x), truth in zip(gradients.items(), reference.attention_backward(*part, causal=True), strict=True):
            yield from _error(name, f"sequence {b}", x[:, : 4 if name == "dq" else 1, own], truth[..., 0])


@_case("both passes, dropout", 28)
def _dropout(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    arrays = _with_dout(*_qkv(128, 16, 4, s, s, b))
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    given: dict[str, Any] = {"dropout_p": 0.25, "seed": 7}
    out, stats = attention(q, k, v, return_stats=True, offset=3, **given)
    gradients = attention_backward(dout, q, k, v, out, stats, offset=3, **given)
    for entry in _entries(b, b - 6, b - 7):
        # the numbers of an entry alone: the heads of all entries are 32 apart
        offset, only = 3 + 32 * 16 * entry, slice(entry, entry + 1)
        kept = _host(dropout_mask(q[..., only], k[..., only], offset=offset, **given)) != 0
        part = [_host(x[:, :4, :, only]) for x in (dout, q)] + [_host(x[:, :1, :, only]) for x in (k, v)]
        options: dict[str, Any] = {"dropout_p": 0.25, "dropout_mask": kept[:, :, :4]}
        yield from _error("out", f"entry {entry}", out[:, :4, :, only], reference.attention(*part[1:], **options)[0])
        for name, x, truth in zip(("dq", "dk", "dv"), gradients, reference.attention_backward(*part, **options), strict=True):
            yield from _error(name, f"entry {entry}", x[:, : 4 if name == "dq" else 1, :, only], truth)


@_case("gradients that are sums over the batch, and functions of the batch item", 36)
def _sums(sizes: Sizes) -> Iterator[str]:
    cupy = cupy_runtime.cupy()
    b, s = sizes.batch(128, 16), sizes.seq
    q, k, v, dout = _with_dout(*_qkv(128, 16, 4, s, s, b)).values()
    bias, sinks = _normal(5, s, s, 1, 1), _normal(6, 16, dtype=np.float32)
    of_entry = cupy.asarray(np.linspace(-1, 1, b, dtype=np.float32))

    def score(x: Any, b: Any, h: Any, i: Any, j: Any, *, slope: Any) -> Any:
        return x + slope[b] * h / 8 * (i - j) / s

    def call(part: slice) -> tuple[Any, ...]:
        own: list[Any] = [x[..., part] for x in (dout, q, k, v)]
        options: dict[str, Any] = {
            "score_mod": score,
            "tensors": {"slope": of_entry[part].copy()},
            "bias": bias,
            "sinks": sinks,
        }
        out, stats = attention(own[1], own[2], own[3], return_stats=True, **options)
        found: tuple[Any, ...] = attention_backward(
            own[0], own[1], own[2], own[3], out, stats, return_dbias=True, return_dsinks=True, **options
        )
        return found

    whole, half = call(slice(0, b)), b // 2
    parts = call(slice(0, half)), call(slice(half, b))
    for n, name in enumerate(("dq", "dk", "dv")):
        for part, where in ((0, slice(half - 1, half)), (1, slice(b - half - 1, b - half))):
            entry = where.start + part * half
            yield from _error(name, f"entry {entry}", whole[n][..., entry], _host(parts[part][n][..., where])[..., 0])
    for n, name in ((3, "dbias"), (4, "dsinks")):
        yield from _error(name, "all entries", whole[n], _host(parts[0][n]) + _host(parts[1][n]), 3e-2)


@_case("a bias of all scores, and its gradient", 30)
def _bias(sizes: Sizes) -> Iterator[str]:
    s = sizes.seq
    b = sizes.elements // (s * s * 8) + 2
    arrays, bias = _with_dout(*_qkv(64, 8, 8, s, s, b)), _normal(5, s, s, 8, b)
    q, k, v, dout = (arrays[name] for name in ("q", "k", "v", "dout"))
    out, stats = attention(q, k, v, bias=bias, return_stats=True)
    *gradients, dbias = attention_backward(dout, q, k, v, out, stats, bias=bias, return_dbias=True)
    for entry in _entries(b):
        at = np.s_[:, 7:8, :, entry : entry + 1]
        part = [_host(x[at]) for x in (dout, q, k, v)]
        own = _host(bias[:, :, 7:8, entry : entry + 1])
        yield from _error("out", f"entry {entry}", out[at], reference.attention(*part[1:], bias=own)[0])
        truths = reference.attention_backward(*part, bias=own, return_dbias=True)
        for name, x, truth in zip(("dq", "dk", "dv"), gradients, truths[:3], strict=True):
            yield from _error(name, f"entry {entry}", x[at], truth)
        yield from _error("dbias", f"entry {entry}", dbias[:, :, 7:8, entry : entry + 1], truths[3])


@_case("a mask of all scores", 16)
def _mask(sizes: Sizes) -> Iterator[str]:
    s = sizes.seq
    b = sizes.elements // (s * s * 8) + 2
    q, k, v = _qkv(64, 8, 8, s, s, b)
    mask = _normal(5, s, s, 8, b) > -1
    out = attention(q, k, v, mask=mask)
    for entry in _entries(b):
        at = np.s_[:, 7:8, :, entry : entry + 1]
        truth, _ = reference.attention(*(_host(x[at]) for x in (q, k, v)), mask=_host(mask[:, :, 7:8, entry : entry + 1]) != 0)
        yield from _error("out", f"entry {entry}", out[at], truth)


@_case("a block mask, both passes", 60)
def _blocks(sizes: Sizes) -> Iterator[str]:
    s = max(sizes.seq, 256)
    b = sizes.elements // (128 * 16 * s) + 6
    mask = block_mask(lambda b, h, i, j: (i >= j) & (i - j < s // 4), s, s)
    arrays = _with_dout(*_qkv(128, 16, 4, s, s, b))
    yield from _both_passes(arrays, _entries(b, b - 6), (0, 3), {"window": (s // 4 - 1, 0)}, block_mask=mask)


@_case("derivative in a direction", 30)
def _jvp(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    q, k, v = _qkv(128, 16, 4, s, s, b)
    tangent = _normal(4, *q.shape)
    out, derivative = attention_jvp(q, k, v, dq=tangent)
    for entry in _entries(b, b - 6):
        at, keys = np.s_[:, :4, :, entry : entry + 1], np.s_[:, :1, :, entry : entry + 1]
        part = _host(k[keys]), _host(v[keys])
        step = 1e-4 * _host(tangent[at])
        high, low = (reference.attention(_host(q[at]) + x, *part)[0] for x in (step, -step))
        yield from _error("out", f"entry {entry}", out[at], reference.attention(_host(q[at]), *part)[0])
        yield from _error("the derivative", f"entry {entry}", derivative[at], (high - low) / 2e-4)


@_case("sums of weights", 14)
def _weights(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    q, k, _ = _qkv(128, 16, 4, s, s, b)
    sums = weight_sums(q, k, causal=True)
    for entry in _entries(b, b - 6):
        query, key = _host(q[:, :1, :, entry : entry + 1]), _host(k[:, :1, :, entry : entry + 1])
        values = np.eye(s)[:, None, :, None]
        truth = reference.attention(query, key, values, causal=True)[0].sum(axis=2)[:, 0, 0]
        yield from _error("the sums", f"entry {entry}", sums[:, 0, entry], truth)


@_case("merge", 24)
def _merge(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    outs = [_normal(n, 128, 16, s, b) for n in (1, 2)]
    stats = [_normal(n, s, 16, b, dtype=np.float32) for n in (3, 4)]
    out = merge(outs, stats)
    for entry in _entries(b, b - 6):
        first, second = (np.exp(_host(x[:, 15, entry])) for x in stats)
        parts = [_host(x[:, 15, :, entry]) for x in outs]
        yield from _error(
            "out", f"entry {entry}", out[:, 15, :, entry], (first * parts[0] + second * parts[1]) / (first + second)
        )


@_case("rotation", 16)
def _rotation(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    x, rope = _normal(1, 128, 16, s, b), Rope(128)
    rotated = apply_rope(x, rope, start=5)
    for entry in _entries(b, b - 6):
        truth = apply_rope(_host(x[..., entry : entry + 1]), rope, start=5)
        yield from _error("the rotated array", f"entry {entry}", rotated[..., entry : entry + 1], truth)


@_case("compute_dtype", 50)
def _converted(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    q, k, v = (_normal(n, 128, heads, s, b, dtype=np.float32) for n, heads in enumerate((16, 4, 4)))
    out = attention(q, k, v, compute_dtype="bfloat16")
    for entry in _entries(b, b - 6):
        at, keys = np.s_[:, 12:, :, entry : entry + 1], np.s_[:, 3:, :, entry : entry + 1]
        truth, _ = reference.attention(_host(q[at]), _host(k[keys]), _host(v[keys]))
        yield from _error("out", f"entry {entry}", out[at], truth, 3e-2)


@_case("FP8, with its conversion", 24)
def _fp8(sizes: Sizes) -> Iterator[str]:
    b, s = sizes.batch(128, 16), sizes.seq
    q, k, v = _qkv(128, 16, 4, s, s, b)
    out = fp8.attention(*fp8.quantize_qkv(q, k, v))
    values = out.dequantize()
    for entry in _entries(b, b - 6):
        at, keys = np.s_[:, 12:, :, entry : entry + 1], np.s_[:, 3:, :, entry : entry + 1]
        truth, _ = reference.attention(_host(q[at]), _host(k[keys]), _host(v[keys]))
        yield from _error("out", f"entry {entry}", values[at], truth, FP8_TOLERANCE)


@_case("pages of a cache", 40)
def _pages(sizes: Sizes) -> Iterator[str]:
    page, batch = 64, 4
    pages = sizes.elements // (128 * 8 * page) + 4 * batch
    tokens = pages // batch * page - 3
    cache = KVCache(128, 8, pages=pages, batch=batch, page_size=page, dtype="float16")
    k, v = (_normal(n, 128, 8, tokens, batch) for n in (1, 2))
    cache.append(k, v)
    for queries in (1, 4):
        q = _normal(3, 128, 16, queries, batch)
        out = attention(q, **cache.view(), causal="bottom_right")
        for entry in range(batch):
            at, keys = np.s_[:, 14:, :, entry : entry + 1], np.s_[:, 7:, :, entry : entry + 1]
            truth, _ = reference.attention(_host(q[at]), _host(k[keys]), _host(v[keys]), causal="bottom_right")
            yield from _error("out", f"{queries} queries, entry {entry}", out[at], truth, 2e-2)


@_case("log-sum-exps of more than 2^31 rows", 92)
def _rows(sizes: Sizes) -> Iterator[str]:
    s, b = sizes.seq, sizes.elements // (64 * sizes.seq) + 6
    q, k, v = _normal(1, 8, 64, s, b), _normal(2, 8, 1, 2, b), _normal(3, 8, 1, 2, b)
    out, stats = attention(q, k, v, return_stats=True)
    for entry in _entries(b, b - 6):
        at, keys = np.s_[:, 63:, :, entry : entry + 1], np.s_[..., entry : entry + 1]
        truth, truth_stats = reference.attention(_host(q[at]), _host(k[keys]), _host(v[keys]))
        yield from _error("out", f"entry {entry}", out[at], truth)
        yield from _error("stats", f"entry {entry}", stats[:, 63:, entry : entry + 1], truth_stats)


def _grids(heads: int, batch: int) -> Iterator[str]:
    """Both passes and the kernels of this package with many heads, or many batch items."""
    cupy = cupy_runtime.cupy()
    arrays = _with_dout(*_qkv(16, heads, heads, 3, 5, batch))
    picked, chosen = _entries(batch), [h for h in _entries(heads) if h in (0, heads - 1)]
    yield from _both_passes(arrays, picked, chosen, causal="bottom_right")
    lengths: dict[str, Any] = {
        name: cupy.asarray(np.arange(batch, dtype=np.int32) % (n + 1)) for name, n in (("seq_lens_q", 3), ("seq_lens_kv", 5))
    }
    yield from _both_passes(arrays, picked, chosen, **lengths)
    q, k, v = (arrays[name] for name in "qkv")
    rope = Rope(16)
    rotated, sums = apply_rope(q, rope, start=5), weight_sums(q, k)
    for entry in picked:
        for h in chosen:
            at = np.s_[:, h : h + 1, :, entry : entry + 1]
            yield from _error(
                "the rotated array", f"head {h}, entry {entry}", rotated[at], apply_rope(_host(q[at]), rope, start=5)
            )
            truth = reference.attention(_host(q[at]), _host(k[at]), np.eye(5)[:, None, :, None])[0].sum(axis=2)[:, 0, 0]
            yield from _error("the sums of weights", f"head {h}, entry {entry}", sums[:, h, entry], truth)
    out, stats = attention(q, k, v, return_stats=True)
    merged = merge([out, out], [stats, stats])
    for entry in picked:
        for h in chosen:
            yield from _error(
                "the merged output", f"head {h}, entry {entry}", merged[:, h, :, entry], _host(out[:, h, :, entry])
            )
    converted = fp8.quantize(q)
    yield from _error("FP8", "the last entry", converted.dequantize()[..., -1], _host(q[..., -1]), FP8_TOLERANCE)


@_case("many heads", 2)
def _heads(sizes: Sizes) -> Iterator[str]:
    yield from _grids(sizes.grid, 1)


@_case("many batch items", 2)
def _batch(sizes: Sizes) -> Iterator[str]:
    yield from _grids(1, sizes.grid)


@_case("many heads and batch items", 2)
def _heads_and_batch(sizes: Sizes) -> Iterator[str]:
    side = math.isqrt(sizes.grid) + 40
    yield from _grids(side, side)
