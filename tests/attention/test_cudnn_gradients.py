"""Gradients of cuDNN on a GPU: extreme statistics, the known bugs of its versions, and deterministic methods."""

import ml_dtypes
import numpy as np
import pytest
from engines import Engine
from tolerance import assert_close, gradient_floor

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, explain, get_plan_cache, reference
from cupy_sdpa.core.cudnn.library import library
from cupy_sdpa.core.cudnn_engine import planner
from cupy_sdpa.core.support.known_bugs import BUGS

LENGTHS = [(1, 64), (1, 128), (1, 320), (64, 192), (100, 64), (128, 448), (256, 128), (100, 333), (7, 1)]
#: Skv % 128 == 64, with queries beyond the last key.
TAILS = [(256, 192), (200, 192), (320, 64)]
#: Masks with a right bound.
BOUNDED = {
    "causal": {"causal": True}, "bottom-right": {"causal": "bottom_right"}, "window": {"window": (100, 50)},
    "window-bottom-right": {"window": (100, 50, "bottom_right")},
}  # fmt: skip
MASKS = {"full": {}, "left": {"window": (100, None)}, **BOUNDED}


@pytest.fixture
def gpu(cupy):
    """The engine on a GPU, and an empty plan cache."""
    get_plan_cache().clear()
    yield Engine("cupy", cupy)
    get_plan_cache().clear()


def scored(engine, sq, skv, score):
    """dout, q, k and v whose scores, and so the log-sum-exp, are near a number; on the host."""
    rng = np.random.default_rng([sq, skv])
    size = np.sqrt(abs(score) / np.sqrt(128))
    q, k = (size + 0.05 * rng.standard_normal((128, heads, n, 1)) for heads, n in ((4, sq), (2, skv)))
    dout, v = (rng.standard_normal(shape) for shape in ((128, 4, sq, 1), (128, 2, skv, 1)))
    dtype = ml_dtypes.bfloat16 if engine.name == "cupy" else engine.dtype
    return [np.asfortranarray(x.astype(dtype)) for x in (dout, np.sign(score) * q, k, v)]


def close_gradients(engine, arrays, mask):
    """The gradients of the arrays with a mask, on the host; they agree with the reference."""
    truth = reference.attention_backward(*arrays, **mask)
    naive = attention_backward(*arrays, *attention(*arrays[1:], return_stats=True, **mask), **mask)
    there = engine.put(arrays)
    got = attention_backward(*there, *attention(*there[1:], return_stats=True, **mask), **mask)
    for one, wanted, other in zip(engine.get(got), truth, naive, strict=True):
        assert_close(one, wanted, other, gradient_floor(*arrays, 128**-0.5, wanted, other.dtype))


def remove_guards(monkeypatch):
    """Plan without the guards of known bugs."""
    monkeypatch.setattr(planner, "guards", lambda *_: frozenset())


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("score", [-110, -94, 100])
@pytest.mark.parametrize(("sq", "skv"), LENGTHS + TAILS)
@pytest.mark.in_turn(10)
def test_extreme_log_sum_exps(sq, skv, score, mask, engine):
    """A log-sum-exp near -100 or +100 gives no NaN and no wrong gradient, with any lengths (known Hopper bugs, guarded)."""
    close_gradients(engine, scored(engine, sq, skv, score), MASKS[mask])


@pytest.mark.gpu
@pytest.mark.parametrize(("sq", "skv"), LENGTHS[:6])
def test_the_known_bugs_are_where_the_table_has_them(sq, skv, gpu, monkeypatch):
    """Without the guards there is NaN exactly where the table lists a bug of this cuDNN."""
    dout, q, k, v = gpu.put(scored(gpu, sq, skv, -110))
    version, shapes = library().version, (q.shape, k.shape, v.shape)
    met = {bug.name for bug in BUGS if bug.affects(cupy_sdpa.problem(*shapes, dtype="bfloat16", backward=True), version, 90)}
    remove_guards(monkeypatch)
    out, stats = attention(q, k, v, return_stats=True)
    dq, dk, dv = (np.isnan(x.astype("f4")).any() for x in gpu.get(attention_backward(dout, q, k, v, out, stats)))
    assert dq == ("backward-key-tail" in met)
    if version <= 92501 or skv % 128 == 0:  # since 9.26 only multiples of 128 have the bug; the guard covers all
        assert dk == dv == ("backward-query-tail" in met)


@pytest.mark.gpu
@pytest.mark.parametrize("mask", BOUNDED)
@pytest.mark.parametrize(("sq", "skv"), [(64, 192), *TAILS])
def test_a_right_bound_prevents_the_bug_of_the_last_keys(sq, skv, mask, gpu, monkeypatch):
    """With Skv % 128 == 64 and a mask with a right bound the gradients are right without any guard."""
    remove_guards(monkeypatch)
    close_gradients(gpu, scored(gpu, sq, skv, -94), BOUNDED[mask])


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("way", ["quadratic", "second_engine", "ordered"])
def test_deterministic_gradients_are_the_same_bits(way, causal, gpu):
    """Every deterministic method gives the same bits in eight runs; the workspace limit selects the method."""
    q, k, v, dout = (gpu.normal(n, 128, heads, 2048, 1) for n, heads in enumerate((16, 4, 4, 16)))
    out, stats = attention(q, k, v, return_stats=True, causal=causal)
    options = {"causal": causal, "deterministic": True, "max_workspace": 100 << 20 if way == "ordered" else None}
    report = explain(q, k, v, backward=True, **options)
    if way == "second_engine":  # slightly less than the first method needs
        options["max_workspace"] = report.workspace - 1
        report = explain(q, k, v, backward=True, **options)
        assert report.plan.engine == 7
    if way == "ordered" and library().version < planner.ORDERED_SINCE:
        assert not report
        assert any("9.25.1 or newer and a Hopper GPU" in reason for reason in report.reasons)
        return
    assert (report.workspace <= 100 << 20) == (way == "ordered")
    runs = [attention_backward(dout, q, k, v, out, stats, **options) for _ in range(8)]
    for run in runs[1:]:
        for a, b in zip(run, runs[0], strict=True):
            assert (a.view("u2") == b.view("u2")).all()
    default = attention_backward(dout, q, k, v, out, stats, causal=causal)
    for a, b in zip(gpu.get(runs[0]), gpu.get(default), strict=True):
        assert np.abs(a.astype("f4") - b.astype("f4")).max() <= 0.02 * np.abs(b.astype("f4")).max()


@pytest.mark.gpu
def test_dk_and_dv_are_the_same_bits_in_every_run(gpu):
    """By default only dq is accumulated in any order."""
    q, k, v, dout = (gpu.normal(n, 128, heads, 1024, 1) for n, heads in enumerate((8, 2, 2, 8)))
    out, stats = attention(q, k, v, return_stats=True)
    runs = [attention_backward(dout, q, k, v, out, stats) for _ in range(5)]
    for run in runs[1:]:
        for a, b in zip(run[1:], runs[0][1:], strict=True):
            assert (a.view("u2") == b.view("u2")).all()


@pytest.mark.parametrize("offset", [0, 4])
def test_packed_queries_at_any_address(offset, engine):
    """Queries that begin 8 bytes after a multiple of 16: the gradients have the same bits as with aligned queries.

    cuDNN's kernel for packed sequences fails on them with a misaligned address; it gets a copy.
    """
    starts = engine.put(np.array([0, 5, 12], np.int32))
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    aligned, k, v, dout = (engine.normal([n], 16, 2, 12, dtype=np.float16) for n in range(4))
    memory = engine.xp.empty((aligned.size + offset,), aligned.dtype)
    q = memory[offset:].reshape(aligned.shape, order="F")
    q[...] = aligned
    found = []
    for queries in (aligned, q):
        out, stats = attention(queries, k, v, return_stats=True, **packed)
        found.append(attention_backward(dout, queries, k, v, out, stats, deterministic=True, **packed))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(engine.get(one), engine.get(other))
    if engine.on_cudnn:
        copied = "the queries are copied to a dense array" in str(explain(q, k, v, backward=True, deterministic=True, **packed))
        assert copied == bool(offset)
