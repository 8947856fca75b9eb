"""Attention with paged keys and values, on the CPU engine, the fake CuPy and a GPU: random problems against the dense reference.

Pages that no sequence owns are full of NaN, and table entries after the length are arbitrary numbers.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest

from cupy_sdpa import attention, reference
from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.problem.split import obstacle

#: Options of the call, by name; arrays are made from a random number generator and the number of query heads.
OPTIONS: dict[str, Any] = {
    "none": lambda rng, hq: {},
    "causal": lambda rng, hq: {"causal": "bottom_right"},
    "top left": lambda rng, hq: {"causal": True},
    "window": lambda rng, hq: {"window": (int(rng.integers(0, 40)), 0, "bottom_right")},
    "wide window": lambda rng, hq: {"window": (int(rng.integers(0, 40)), int(rng.integers(0, 3)), "bottom_right")},
    "softcap": lambda rng, hq: {"softcap": 2.0, "causal": "bottom_right"},
    "sinks": lambda rng, hq: {"sinks": rng.standard_normal(hq).astype(np.float32), "causal": "bottom_right"},
    "alibi": lambda rng, hq: {"alibi_slopes": np.abs(rng.standard_normal(hq)).astype(np.float32), "causal": "bottom_right"},
    "score_mod": lambda rng, hq: {"score_mod": lambda s, b, h, i, j: s * 0.5 + 0.01 * j - 0.02 * i + 0.1 * h},
    "mask_mod": lambda rng, hq: {"mask_mod": lambda b, h, i, j: (i + j + h) % 3 != 0},
    "scale": lambda rng, hq: {"scale": 0.3},
}


class Paged(NamedTuple):
    """A random problem: float64 arrays on the host."""

    q: Any
    k: Any
    v: Any
    table: Any
    lengths: Any
    options: dict[str, Any]
    dtype: str
    order: str

    @property
    def page(self) -> int:
        return self.k.shape[2]

    def dense(self, pages):
        """The keys or values of every sequence as a dense array; 0 after the lengths."""
        d, h, page, _ = pages.shape
        p, b = self.table.shape
        out = np.zeros((d, h, p * page, b))
        for n, length in enumerate(self.lengths):
            used = self.table[: -(-length // page), n]
            rows = pages[..., used].transpose(0, 1, 3, 2).reshape(d, h, -1)[:, :, :length]
            out[:, :, :length, n] = rows
        return np.asfortranarray(out)

    def truth(self, **options):
        """Output and log-sum-exp of the dense reference, float64."""
        functions = {name: self.options[name] for name in ("score_mod", "mask_mod") if name in self.options}
        others = {name: value for name, value in self.options.items() if name not in functions}
        if "cu_seqlens_q" in others:
            return self._packed_truth(others, functions)
        return dense_attention(self.q, self.dense(self.k), self.dense(self.v), self.lengths, others, functions)

    def _packed_truth(self, others, functions):
        starts, most = others.pop("cu_seqlens_q"), others.pop("max_seqlen_q")
        _, hq, total = self.q.shape
        out, stats = np.zeros((self.v.shape[0], hq, total)), np.full((hq, total), -np.inf)
        k, v = self.dense(self.k), self.dense(self.v)
        for b, (begin, end) in enumerate(itertools.pairwise(starts)):
            assert end - begin <= most
            if end > begin:
                part = self.q[:, :, begin:end, None], k[..., b : b + 1], v[..., b : b + 1], self.lengths[b : b + 1]
                one, row = dense_attention(*part, others, functions)
                out[:, :, begin:end], stats[:, begin:end] = one[..., 0], row[..., 0].T
        return out, stats


def dense_attention(q, k, v, lengths, options, functions):
    """The reference, or the CPU engine in float64 for functions, which the reference does not take."""
    if functions:
        return attention(q, k, v, seq_lens_kv=lengths, return_stats=True, **options, **functions)
    return reference.attention(q, k, v, seq_lens_kv=lengths, **options)


def draw(seed, dtypes=("float64", "float32"), pages=(1, 2, 8, 16, 64)):
    """A random problem; the smallest sizes are as likely as large ones."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    page, p, b = pick(*pages), pick(1, 2, 3, 9), pick(1, 2, 3)
    hkv, group, d, dv, sq = pick(1, 2), pick(1, 2, 3, 4), pick(8, 16, 64), pick(8, 16, 64), pick(1, 1, 2, 3, 4, 40)
    dtype, order, name = pick(*dtypes), pick("pages", "heads"), pick(*OPTIONS)
    held = "float16" if dtype == "float16" else "float32"  # the values are exact in this dtype
    count = p * b + 2
    lengths = np.array([pick(0, 1, page, p * page, int(rng.integers(0, p * page + 1))) for _ in range(b)], np.int32)
    table = rng.permutation(count)[: p * b].reshape(p, b).astype(np.int32)
    made = lambda *shape: np.asfortranarray(rng.standard_normal(shape).astype(held).astype(float))  # noqa: E731
    options = OPTIONS[name](rng, hkv * group)
    q = made(d, hkv * group, sq, b)
    if sq > 1 and pick(False, False, True):
        starts = np.concatenate([[0], np.cumsum(rng.integers(0, sq + 1, b))]).astype(np.int32)
        q = made(d, hkv * group, max(int(starts[-1]), 1))
        options |= {"cu_seqlens_q": starts, "max_seqlen_q": sq}
    elif pick(False, True):
        options |= {"seq_lens_q": rng.integers(0, sq + 1, b).astype(np.int32)}
    return Paged(q, made(d, hkv, page, count), made(dv, hkv, page, count), table, lengths, options, dtype, order)


def run(problem: Paged, seed: int, xp: Any = np, **more: Any):
    """The call of a random problem, and its arguments, with NaN in unowned pages and arbitrary table entries."""
    rng = np.random.default_rng(seed)
    _, _, page, count = problem.k.shape
    owned = {int(e) for n, length in enumerate(problem.lengths) for e in problem.table[: -(-length // page), n]}
    unowned = [e for e in range(count) if e not in owned]

    def pages(x):
        x = x.astype(problem.dtype, order="F")
        x[..., unowned] = np.nan
        if problem.order == "pages":
            return xp.asarray(np.asfortranarray(x.transpose(0, 2, 1, 3))).transpose(0, 2, 1, 3)
        return xp.asarray(x)

    p, b = problem.table.shape
    table = np.asfortranarray(rng.choice([2**30, -1, *unowned], (p + int(rng.integers(3)), b)).astype(np.int32))
    for n, length in enumerate(problem.lengths):
        used = -(-length // page)
        table[:used, n] = problem.table[:used, n]
    arrays = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in (problem.options | more).items()}
    q, k, v = xp.asarray(problem.q.astype(problem.dtype, order="F")), pages(problem.k), pages(problem.v)
    shape = (v.shape[0], *q.shape[1:])
    out = xp.asarray(np.full(shape, np.nan, problem.dtype, order="F"))
    arguments = {"page_table": xp.asarray(table)[:p], "seq_lens_kv": xp.asarray(problem.lengths), "out": out, **arrays}
    return q, k, v, arguments


def compare(got, want, tolerance):
    """Compare outputs and log-sum-exps; both contain no NaN."""
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(one, float), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(40))
def test_random_problems_on_the_cpu(seed):
    """The result is that of dense attention of the gathered pages."""
    problem = draw(seed)
    q, k, v, arguments = run(problem, seed)
    compare(attention(q, k, v, return_stats=True, **arguments), problem.truth(), 2e-5)


@pytest.mark.parametrize("seed", range(50))
def test_random_problems_on_the_fake_cupy(seed, fake):
    """Split or not, the result is that of dense attention."""
    check_on(fake, seed)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(200))
def test_random_problems_on_the_gpu(seed, cupy):
    """As on the fake CuPy."""
    check_on(cupy, seed, pages=(1, 2, 8, 16, 64, 128))


def check_on(xp, seed, pages=(1, 2, 8, 16, 64)):
    """Run a random problem several times, with the default number of chunks and with a random one if it can be split."""
    problem = draw(seed, dtypes=("float16",), pages=pages)
    q, k, v, arguments = run(problem, seed, xp)
    splits = [None]
    options = {name: value for name, value in arguments.items() if name != "out"}
    if not obstacle(read_forward(q, k, v, options).problem):
        splits.append(1 + seed % 5)
    for num_splits in splits:
        q, k, v, arguments = run(problem, seed, xp, num_splits=num_splits)
        for _ in range(5):  # the later ones are replayed from a captured CUDA graph on a GPU
            arguments["out"].fill(np.nan)
            got = attention(q, k, v, return_stats=True, **arguments)
            compare([x.get() for x in got], problem.truth(), 1e-2)


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (1, 5), (5, 1)])
@pytest.mark.parametrize("page", [1, 3])
def test_head_dim_1(page, d, dv):
    """Keys are transposed and values are not, also where the strides of both are equal."""
    rng = np.random.default_rng(0)
    made = lambda *shape: np.asfortranarray(rng.standard_normal(shape))  # noqa: E731
    q, k, v = made(d, 2, 3, 1), made(d, 1, page, 4), made(dv, 1, page, 4)
    table, lengths = np.array([[2], [0]], np.int32), np.array([2 * page], np.int32)
    problem = Paged(q, k, v, table, lengths, {}, "float64", "heads")
    compare(attention(q, k, v, page_table=table, seq_lens_kv=lengths, return_stats=True), problem.truth(), 1e-6)


@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("form", ["dense", "packed", "packed queries of length 1"])
@pytest.mark.parametrize("page", [1, 64, 256])
def test_entries_after_the_length_are_not_used(page, form, rows, fake):
    """Also if the table has whole tiles and is dense, and for packed sequences of one query: pages after the length are NaN."""
    check_entries_after_the_length(fake, page, form, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [0, 3])
@pytest.mark.parametrize("form", ["dense", "packed", "packed queries of length 1"])
@pytest.mark.parametrize("page", [1, 64, 128])
def test_entries_after_the_length_are_not_used_on_the_gpu(page, form, rows, cupy):
    """As on the fake CuPy."""
    check_entries_after_the_length(cupy, page, form, rows)


def check_entries_after_the_length(xp, page, form, rows):
    """A table ``(512 / page, 2)``, or the first rows of a longer one; a mask function prevents a split."""
    rng = np.random.default_rng(1)
    made = lambda *shape: np.asfortranarray(rng.standard_normal(shape).astype(np.float16).astype(float))  # noqa: E731
    width, lengths = 512 // page, np.array([5, 300], np.int32)
    used = -(-lengths // page)
    count = int(used.sum()) + 1
    table = np.full((width + rows, 2), count - 1, np.int32, order="F")
    pages = iter(rng.permutation(count - 1))
    for b, number in enumerate(used):
        table[:number, b] = [next(pages) for _ in range(number)]
    options = {"mask_mod": lambda b, h, i, j: (i + j) % 3 != 1}
    sq = 1 if form.endswith("1") else 3
    q = made(8, 2, sq, 2)
    if form != "dense":
        starts = np.array([0, 1, 1 + sq], np.int32)
        q, options = made(8, 2, int(starts[-1])), options | {"cu_seqlens_q": starts, "max_seqlen_q": sq}
    problem = Paged(q, made(8, 1, page, count), made(8, 1, page, count), table[:width], lengths, options, "float16", "heads")
    arguments = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    arrays = [x.astype(np.float16, order="F") for x in (q, problem.k, problem.v)]
    for x in arrays[1:]:
        x[..., count - 1] = np.nan
    q, k, v = map(xp.asarray, arrays)
    got = attention(
        q, k, v, page_table=xp.asarray(table)[:width], seq_lens_kv=xp.asarray(lengths), return_stats=True, **arguments
    )
    compare([x.get() for x in got], problem.truth(), 1e-2)
