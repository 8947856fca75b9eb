"""Shared prefixes: the same result as attention to all pages; and the number of plans of a long generation."""

import sys

import numpy as np
import pytest
from engines import Engine

import cupy_sdpa
from cupy_sdpa import KVCache, attention, shared_prefix_attention
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.device import cupy_runtime


def draw(seed, xp, dtype):
    """A random call of sequences that share their first pages, or were released, with NaN in pages that no sequence owns."""
    rng = np.random.default_rng(seed)
    pick = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
    d, dv, hkv, group, sq, b = pick(8, 16), pick(8, 16), pick(1, 2), pick(1, 3), pick(1, 2, 5), pick(1, 2, 7)
    page, prefix_pages, own_pages = pick(1, 2, 16), pick(0, 1, 9), pick(1, 2, 4)
    prefix, count = prefix_pages * page, prefix_pages + own_pages * b + 1
    order = rng.permutation(count).astype(np.int32)
    table = np.empty((prefix_pages + own_pages, b), np.int32, order="F")
    table[:prefix_pages] = order[:prefix_pages, None]
    table[prefix_pages:] = order[prefix_pages:-1].reshape((own_pages, b))
    lengths = prefix + rng.integers(0, own_pages * page + 1, b).astype(np.int32)
    released = rng.random(b) < pick(0, 0.4)
    lengths[released], table[:, released] = 0, 0
    k, v = (np.asfortranarray(rng.standard_normal((n, hkv, page, count)).astype(dtype)) for n in (d, dv))
    for pages in (k, v):
        pages[..., order[-1]] = np.nan
    q = np.asfortranarray(rng.standard_normal((d, hkv * group, sq, b)).astype(dtype))
    options = [
        {},
        {"num_splits": 3},
        {"causal": "bottom_right"},
        {"softcap": 2.0},
        {"sinks": rng.standard_normal(hkv * group).astype("f4")},
    ]
    chosen = dict(pick(*options))
    arrays = {name: xp.asarray(x) if isinstance(x, np.ndarray) else x for name, x in chosen.items()}
    pages = {"page_table": xp.asarray(table), "seq_lens_kv": xp.asarray(lengths), **arrays}
    return [xp.asarray(x) for x in (q, k, v)], prefix, pages


def check(seed, xp, dtype, tolerance):
    """Compare with attention to all pages, on numpy in float64."""
    (q, k, v), prefix, options = draw(seed, xp, dtype)
    given, _, wide = draw(seed, np, dtype)
    want, stats = attention(*(x.astype(np.float64, order="F") for x in given), **wide, return_stats=True)
    out = xp.asarray(np.full(want.shape, np.nan, dtype, order="F"))
    got = shared_prefix_attention(q, k, v, prefix, **options, out=out, return_stats=True)
    assert got[0] is out
    # without the log-sum-exp there is one merge for a single query; repeated, with NaN in the output
    merged = [shared_prefix_attention(q, k, v, prefix, **options)]
    for _ in range(4):
        out = xp.asarray(np.full(want.shape, np.nan, dtype, order="F"))
        assert shared_prefix_attention(q, k, v, prefix, **options, out=out) is out
        merged.append(out)
    for one, other in [*zip(got, (want, stats), strict=True), *((x, want) for x in merged)]:
        found, kept = one.get() if hasattr(one, "get") else one, wide["seq_lens_kv"] > 0
        np.testing.assert_allclose(found[..., kept], other[..., kept], rtol=tolerance, atol=tolerance)


def check_released(xp, put, get):
    """The sequences before the last one are released one after the other."""
    rng = np.random.default_rng(0)
    cache = KVCache(16, 1, pages=20, batch=3, page_size=4, dtype="float16", numpy=xp is np)
    prompt, own, q = (np.asfortranarray(rng.standard_normal((16, h, n)).astype("f2")) for h, n in ((1, 8), (1, 6), (2, 6)))
    cache.append(put(prompt), put(prompt), counts=[8, 0, 0])
    for b in (1, 2):
        cache.fork(0, b)
    cache.append(put(own), put(own), counts=[2, 2, 2])
    for released, sq in ((0, 1), (1, 2)):
        queries = put(np.asfortranarray(q[:, :, : 3 * sq].reshape(16, 2, sq, 3)))
        cache.release(released)
        options = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"}
        wanted = get(attention(queries, cache.keys(), cache.values(), **options))
        found = get(shared_prefix_attention(queries, cache.keys(), cache.values(), 8, **options))
        np.testing.assert_allclose(found[..., released + 1 :], wanted[..., released + 1 :], rtol=1e-2, atol=1e-2)


def test_after_a_release_on_numpy():
    """The pages of the prefix are those of a sequence that has it."""
    check_released(np, np.asarray, np.asarray)


def test_after_a_release_on_the_fake_cupy(fake):
    """With staging and kernels."""
    check_released(fake, fake.asarray, lambda x: x.get())


@pytest.mark.gpu
def test_after_a_release_on_the_gpu(cupy):
    """With cuDNN."""
    check_released(cupy, cupy.asarray, cupy.asnumpy)


@pytest.mark.parametrize(("sq", "own"), [(2, 0), (5, 0), (5, 2), (9, 0), (12, 3)])
def test_more_queries_than_keys_after_the_prefix(sq, own):
    """Queries before the end of the prefix attend to the part of it before them."""
    rng = np.random.default_rng(0)
    cache = KVCache(16, 1, pages=20, batch=2, page_size=4, dtype="float32", numpy=True)
    x = np.asfortranarray(rng.standard_normal((16, 1, 8), np.float32))
    cache.append(x, x, counts=[8, 0])
    cache.fork(0, 1)
    cache.append(x[:, :, :own], x[:, :, :own], counts=[own, 0])
    q = np.asfortranarray(rng.standard_normal((16, 2, sq, 2), np.float32))
    options = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right", "return_stats": True}
    wanted = attention(q, cache.keys(), cache.values(), **options)
    found = shared_prefix_attention(q, cache.keys(), cache.values(), 8, **options)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_on_numpy(seed):
    """On the CPU engine."""
    check(seed, np, "float32", 1e-5)


@pytest.mark.parametrize("seed", range(20))
def test_on_the_fake_cupy(seed, fake):
    """With staging and kernels."""
    check(seed, fake, "float16", 1e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(60))
def test_on_the_gpu(seed, cupy):
    """With cuDNN."""
    check(seed, cupy, "float16", 1e-2)


def check_captured(seed, cupy):
    """Compare a captured call with an eager one."""
    (q, k, v), prefix, options = draw(seed, cupy, "float16")
    calls = [
        lambda: shared_prefix_attention(q, k, v, prefix, **options, return_stats=True),
        lambda: [shared_prefix_attention(q, k, v, prefix, **options)],
    ]
    for call in calls:
        want = [x.get() for x in call()]
        for one, other in zip(Engine("fake", cupy).captured(call), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("seed", range(8))
def test_captured_on_the_fake_cupy(seed, fake):
    """A graph owns the memory of the parts, and can be launched again."""
    check_captured(seed, fake)
    assert library().forget_plans() > 0, "the plans of the graph are kept"


def test_the_parts_are_branches_of_the_graph(fake, monkeypatch):
    """While a stream is captured, the other keys are a branch; an error in the branch leaves the capture valid."""
    (q, k, v), prefix, options = draw(3, fake, "float16")
    used = []
    whole = shared_prefix_attention(q, k, v, prefix, **options)
    module = sys.modules["cupy_sdpa.inference.shared_prefix"]
    attend = module.attention

    def attend_on(*arguments, **options):
        used.append(fake.cuda.get_current_stream())
        return attend(*arguments, **options)

    monkeypatch.setattr(module, "attention", attend_on)
    fake.cuda.Device().synchronize()
    with fake.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        out = shared_prefix_attention(q, k, v, prefix, **options)
        graph = stream.end_capture()
        graph.launch(stream)
        np.testing.assert_array_equal(out.get(), whole.get())
        assert used[-1] is not stream
        monkeypatch.setattr(module, "attention", lambda *_, **options: options["out"].fill(1) or 1 / 0)
        stream.begin_capture()
        with pytest.raises(ZeroDivisionError):
            shared_prefix_attention(q, k, v, prefix, **options)
        stream.end_capture()
    with fake.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        with cupy_runtime.parallel_branch():
            q.fill(0)
        with pytest.raises(fake.cuda.runtime.CUDARuntimeError, match="branch"):
            stream.end_capture()
    assert library().forget_plans() > 0, "the plans of the graph are kept"


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_captured_on_the_gpu(seed, cupy):
    """With cuDNN."""
    check_captured(seed, cupy)


def zeros(*shape, dtype=np.float32):
    """Zeros in Fortran order."""
    return np.zeros(shape, dtype, order="F")


TABLE = {"page_table": zeros(4, 2, dtype=np.int32), "seq_lens_kv": np.full(2, 9, np.int32)}
#: Changes of a valid call, the error, and words of the message.
INVALID = {
    "no_table": ({"page_table": None}, ValueError, "needs page_table and seq_lens_kv"),
    "int64": ({"seq_lens_kv": np.full(2, 9)}, TypeError, "seq_lens_kv is int64; it must be int32"),
    "part_of_a_page": ({"shared_prefix": 3}, ValueError, "shared_prefix is 3; .*multiple of the page size 4 from 0 to 16"),
    "too_long": ({"shared_prefix": 20}, ValueError, "from 0 to 16"),
    "short": ({"shared_prefix": 8, "seq_lens_kv": np.array([9, 7], np.int32)}, ValueError, "shared_prefix is 8, and seq_lens_kv of sequence 1 is 7"),
    "other_pages": ({"page_table": np.array([[0, 1]] * 4, np.int32)}, ValueError, r"sequence 1 begins with the pages \[1\], others with \[0\]"),
    "not_a_number": ({"shared_prefix": 4.0}, TypeError, "shared_prefix is 4.0"),
    "window": ({"window": (3, 0)}, ValueError, "window is passed"),
    "bias": ({"bias": zeros(16, 1, 1, 1)}, ValueError, "bias is passed"),
    "lengths": ({"seq_lens_q": np.ones(2, np.int32)}, ValueError, "seq_lens_q is passed"),
    "top_left": ({"causal": True}, ValueError, "causal is True; .*'bottom_right'"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_invalid_arguments(name):
    """They name the value and the remedy."""
    changes, error, words = INVALID[name]
    arguments = {"shared_prefix": 4, **TABLE, **changes}
    with pytest.raises(error, match=words):
        shared_prefix_attention(zeros(8, 2, 1, 2), zeros(8, 1, 4, 9), zeros(8, 1, 4, 9), **arguments)


@pytest.mark.parametrize("queries", [1, 4])
def test_a_long_generation_needs_few_plans(queries):
    """10 000 tokens: one problem for each power of two of pages."""
    cache = KVCache(8, 1, pages=160, batch=1, dtype="float16", numpy=True)
    tokens, q, problems = zeros(8, 1, 4, 1, dtype=np.float16), zeros(8, 2, queries, 1, dtype=np.float16), set()
    for _ in range(2500):
        cache.append(tokens, tokens)
        options = {"page_table": cache.table, "seq_lens_kv": cache.lengths, "causal": "bottom_right"}
        call = read_forward(q, cache.keys(), cache.values(), options)
        call.on_gpu = True
        problems.add(call.engine_problem)
    assert cache.host_lengths == [10_000]
    assert len(problems) <= 9


def test_the_public_name():
    """It is a function of the package."""
    assert cupy_sdpa.shared_prefix_attention is shared_prefix_attention
