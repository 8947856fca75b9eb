"""Calls with CuPy arrays on host memory: staging, kernels, the graphs that are passed to cuDNN, and cleared padding.

The fake cuDNN writes what 9.19 writes and nothing else, and lets NaN in the padding spread as 9.19 does, see :mod:`fake_cupy`.
Outputs, workspaces and free memory are full of NaN. On a real GPU: tests/test_gpu*.py.
"""

import functools
import itertools
from dataclasses import replace
from typing import NamedTuple

import functions
import numpy as np
import pytest
from cases import FORWARD, HIDDEN_ROWS, VARIANTS, Case, options_of_reference
from fake_cupy import DEVICE
from on_gpu import check_backward, check_forward, poisoned
from tolerance import accumulation_floor, assert_close, gradient_floor

import cupy_sdpa
from cupy_sdpa import Unsupported, attention, attention_backward, explain, get_plan_cache, reference
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.device import driver
from cupy_sdpa.support.why_not import why_not

VERSION, CAPABILITY = 91900, 90


@pytest.fixture
def cupy(fake):
    """Install the fake CuPy."""
    return fake


def runs(case):
    """Whether the support table allows a case."""
    return not why_not(case.problem(), VERSION, CAPABILITY)


SMALL = [case for case in FORWARD if max(case.longest) * case.hq * case.d < 1 << 16 and runs(case)]
NAMES = [
    "lengths",
    "packed",
    "bias",
    "mask",
    "alibi",
    "sinks",
    "dropout",
    "max",
    "bhsd",
    "sliced",
    "bshd",
    "softcap",
    "decode",
    "one_key",
    "window_bottom",
]
CASES = [case for case in SMALL if any(name in case.name for name in NAMES)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case, cupy):
    """Output and log-sum-exp with every kind of array and layout."""
    check_forward(cupy, case)


def backward_checked(cupy, case, **options):
    """Check every gradient that this cuDNN supports."""
    less = {
        "deterministic-sinks": "return_dsinks", "packed-sinks-gradient": "return_dsinks",
        "dropout-sinks-gradient": "return_dsinks", "bias-gradient": "return_dbias",
    }  # fmt: skip
    case = replace(case, stats=True)
    reasons = {reason.rule for reason in why_not(case.gradient_problem(**options), VERSION, CAPABILITY)}
    check_backward(cupy, case, *case.arrays(), **options, **{less[rule]: False for rule in reasons})


@pytest.mark.parametrize("case", [case for case in CASES if case in VARIANTS or "lengths" in case.name], ids=str)
def test_backward(case, cupy):
    """Gradients with every kind of array."""
    backward_checked(cupy, case)


@pytest.mark.parametrize("case", HIDDEN_ROWS, ids=str)
def test_rows_that_attend_only_to_the_sink(case, cupy):
    """Rows that a bias of -inf masks: output 0, the sink as log-sum-exp, and gradients of 0."""
    check_forward(cupy, case)
    backward_checked(cupy, case)


DIRECT = ["lengths", "lengths_of_nothing", "packed_window_tail", "alibi_lengths_bottom_right", "sinks_lengths", "dropout"]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in DIRECT], ids=str)
def test_deterministic_backward(case, cupy):
    """The graph that writes dQ directly."""
    backward_checked(cupy, case, deterministic=True)


SUBSETS = ["".join(axes) or "-" for n in range(5) for axes in itertools.combinations("kqhb", n)]


@pytest.mark.parametrize("axes", SUBSETS)
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_broadcast_axes(name, axes, cupy):
    """A bias and a mask of every broadcast shape, in both passes, and the gradient of the bias."""
    case = Case(f"{name}_{axes}", d=16, sq=20, skv=24, hkv=2, b=3, **{name: axes})
    check_forward(cupy, case)
    check_backward(cupy, case, *case.arrays())


@pytest.mark.parametrize("axes", ["b", "hb"])
def test_a_bias_of_the_batch_and_one_key(axes, cupy):
    """One element per batch entry, with a single key: each entry uses its own, see ``program._is_mistaken``."""
    check_forward(cupy, Case(f"one_key_{axes}", d=16, sq=20, skv=1, b=3, bias=axes))


# Padding that must not be read, and results that must be cleared


def nan_beyond(x, lengths):
    """A copy with NaN in the padding of every batch entry."""
    beyond = np.arange(x.shape[2])[:, None] >= np.asarray(lengths)
    return np.asfortranarray(np.where(beyond, np.array(np.nan, x.dtype), x))


PADDED = [
    Case("padded", d=16, sq=40, skv=48, seq_lens_q=(20, 33), seq_lens_kv=(40, 3)),
    Case("padded_bottom_right", d=16, sq=40, skv=48, hkv=2, seq_lens_q=(20, 33), seq_lens_kv=(40, 3), causal="bottom_right"),
    Case("padded_empty", d=16, sq=24, skv=24, b=4, seq_lens_q=(24, 0, 9, 24), seq_lens_kv=(24, 10, 0, 1)),
    Case("padded_bias", d=16, sq=24, skv=24, seq_lens_q=(24, 9), seq_lens_kv=(7, 24), bias="kqh"),
    Case("padded_sinks", d=16, sq=24, skv=24, seq_lens_q=(24, 9), seq_lens_kv=(7, 24), sinks=True),
    Case("padded_alibi", d=16, sq=24, skv=40, seq_lens_q=(24, 9), seq_lens_kv=(7, 40), alibi=True, causal="bottom_right"),
    Case("one_query", d=16, sq=1, skv=40, hkv=2, seq_lens_q=(1, 1), seq_lens_kv=(7, 40)),
]


@pytest.mark.parametrize("bucket", [None, 32], ids=["exact", "bucket"])
@pytest.mark.parametrize("case", PADDED, ids=str)
def test_padding_full_of_nan(case, bucket, cupy):
    """NaN in the padding of q, k, v and dout does not affect the results, which are 0 and -inf in the padding."""
    (q, k, v), dout = case.arrays(), case.dout()
    known, there = case.options(), case.options(cupy) | {"bucket": bucket}
    lengths = case.seq_lens_q, case.seq_lens_kv, case.seq_lens_kv, case.seq_lens_q
    given = [cupy.asarray(nan_beyond(x, of)) for x, of in zip((q, k, v, dout), lengths, strict=True)]
    out, stats = poisoned(cupy, q.shape, q.dtype), poisoned(cupy, (case.sq, case.hq, case.b), np.float32)
    attention(*given[:3], out=out, stats=stats, **there)
    truth = reference.attention(q, k, v, **options_of_reference(known))
    naive = attention(q, k, v, return_stats=True, **known)
    assert_close(out.get(), truth[0], naive[0])
    assert_close(stats.get(), truth[1], naive[1], accumulation_floor(q, k, case.tau, truth[1], case.added(known)))
    into = [poisoned(cupy, x.shape, x.dtype) for x in (q, k, v)]
    attention_backward(given[3], *given[:3], out, stats, **dict(zip(("dq", "dk", "dv"), into, strict=True)), **there)
    truth = reference.attention_backward(dout, q, k, v, **options_of_reference(known))
    naive = attention_backward(dout, q, k, v, *naive, **known)
    for got, wanted, other, of in zip(into, truth, naive, lengths, strict=False):
        assert_close(got.get(), wanted, other, gradient_floor(dout, q, k, v, case.tau, wanted, q.dtype))
        beyond = np.arange(got.shape[2])[:, None] >= np.asarray(of)
        assert not got.get()[..., beyond].any()


class Places(NamedTuple):
    """The positions of packed sequences: where each begins and the last ends, the total, and options."""

    q: list
    kv: list
    total_q: int
    total_kv: int
    options: dict = {}  # noqa: RUF012

    def sequences(self):
        """The positions of the queries and keys of every sequence."""
        for begins in zip(self.q[:-1], self.q[1:], self.kv[:-1], self.kv[1:], strict=True):
            most = self.options.get("max_seqlen_q", 1 << 30), self.options.get("max_seqlen_kv", 1 << 30)
            q, kv = (slice(a, min(b, a + n)) for a, b, n in zip(begins[::2], begins[1::2], most, strict=True))
            if q.start < q.stop and kv.start < kv.stop:
                yield {"q": q, "kv": kv}

    def call_options(self, xp):
        """The options of a call."""
        starts = {
            "cu_seqlens_q": xp.asarray(np.array(self.q, np.int32)),
            "cu_seqlens_kv": xp.asarray(np.array(self.kv, np.int32)),
        }
        longest = {f"max_seqlen_{side}": int(np.diff(of).max()) for side, of in (("q", self.q), ("kv", self.kv))}
        return starts | longest | self.options


PLACES = {
    "from_zero": Places([0, 20, 37], [0, 12, 44], 37, 44),
    "tail": Places([0, 20, 37], [0, 12, 44], 45, 61),
    "first_offset": Places([16, 30, 50], [8, 30, 41], 64, 41),
    "first_offset_of_keys": Places([0, 30, 50], [5, 30, 41], 50, 50),
    "empty_sequences": Places([0, 0, 20, 20, 37], [0, 7, 7, 11, 44], 37, 50),
    "first_offset_and_empty": Places([3, 3, 20, 29, 37], [9, 17, 30, 30, 44], 40, 44),
    "beyond_max_seqlen": Places([0, 20, 37], [0, 12, 44], 40, 44, {"max_seqlen_q": 18, "max_seqlen_kv": 30}),
    "beyond_max_seqlen_and_offset": Places([4, 20, 37], [2, 12, 44], 40, 48, {"max_seqlen_q": 15, "max_seqlen_kv": 24}),
    "bound_is_larger": Places([0, 20, 37], [0, 12, 44], 37, 44, {"max_seqlen_q": 64, "max_seqlen_kv": 100}),
}
SIDE = {"q": "q", "out": "q", "stats": "q", "dout": "q", "dq": "q", "k": "kv", "v": "kv", "dk": "kv", "dv": "kv"}


def one_by_one(compute, places, arrays, results):
    """The named results of a function applied to each sequence alone; 0, or -inf for stats, at other positions."""
    total = {"q": places.total_q, "kv": places.total_kv}
    made = {name: np.full((*shape, total[SIDE[name]]), -np.inf if name == "stats" else 0.0) for name, shape in results.items()}
    for part in places.sequences():
        given = {name: np.asfortranarray(x[..., part[SIDE[name]], None]) for name, x in arrays.items()}
        for name, value in zip(results, compute(**given), strict=True):
            made[name][..., part[SIDE[name]]] = value[..., 0].T if name == "stats" else value[..., 0]
    return made


@pytest.mark.parametrize("causal", [False, "bottom_right"], ids=["full", "bottom_right"])
@pytest.mark.parametrize("name", PLACES)
def test_packed_sequences(name, causal, cupy):
    """Both passes give the results of each sequence alone, and 0 and -inf elsewhere; NaN between the sequences is not read."""
    places, d, hq, hkv = PLACES[name], 16, 4, 2
    rng = np.random.default_rng(4)
    shapes = {"q": (d, hq), "k": (d, hkv), "v": (d, hkv), "dout": (d, hq)}
    total = {"q": places.total_q, "kv": places.total_kv}
    arrays = {x: np.asfortranarray(rng.standard_normal((*shape, total[SIDE[x]])).astype("f2")) for x, shape in shapes.items()}
    there = {}
    for x, array in arrays.items():
        read = np.zeros(array.shape[-1], bool)
        for part in places.sequences():
            read[part[SIDE[x]]] = True
        there[x] = cupy.asarray(np.asfortranarray(np.where(read, array, np.float16(np.nan))))
    options = places.call_options(cupy) | {"causal": causal}
    of_q = {"q": there["q"], "k": there["k"], "v": there["v"]}
    out = poisoned(cupy, arrays["q"].shape, "f2")
    stats = poisoned(cupy, (hq, places.total_q), "f4")
    attention(**of_q, out=out, stats=stats, **options)
    names = {"out": (d, hq), "stats": (hq,)}
    forward = {x: arrays[x] for x in "qkv"}
    truth = one_by_one(lambda **x: reference.attention(**x, causal=causal), places, forward, names)
    naive = one_by_one(lambda **x: attention(**x, causal=causal, return_stats=True), places, forward, names)
    assert_close(out.get(), truth["out"], naive["out"].astype("f2"))
    assert_close(stats.get(), truth["stats"], naive["stats"].astype("f4"), 1e-5)

    def naive_backward(dout, **x):
        out, stats = attention(**x, causal=causal, return_stats=True)
        return attention_backward(dout, **x, out=out, stats=stats, causal=causal)

    into = {f"d{x}": poisoned(cupy, there[x].shape, "f2") for x in "qkv"}
    attention_backward(there["dout"], **of_q, out=out, stats=stats, **into, **options)
    names = {f"d{x}": shapes[x] for x in "qkv"}
    truth = one_by_one(lambda dout, **x: reference.attention_backward(dout, **x, causal=causal), places, arrays, names)
    naive = one_by_one(naive_backward, places, arrays, names)
    for x, got in into.items():
        floor = gradient_floor(arrays["dout"], *forward.values(), d**-0.5, truth[x], np.dtype("f2"))
        assert_close(got.get(), truth[x], naive[x].astype("f2"), floor)


# Buckets, score functions, and problems that need no plan


@pytest.mark.parametrize("case", [
    Case("plain", d=16, sq=37, skv=50, hkv=2),
    Case("causal", d=16, sq=50, skv=37, causal=True),
    Case("bottom_right", d=16, sq=37, skv=50, causal="bottom_right"),
    Case("bias", d=16, sq=37, skv=50, bias="kqh"),
    Case("bias_of_keys", d=16, sq=37, skv=50, bias="kb"),
    Case("mask", d=16, sq=37, skv=50, mask="qb"),
    Case("decode", d=16, sq=1, skv=50, hkv=2),
    Case("lengths", d=16, sq=37, skv=50, seq_lens_q=(37, 5), seq_lens_kv=(50, 17)),
    Case("sliced", d=16, sq=37, skv=50, layout="sliced"),
], ids=str)  # fmt: skip
def test_buckets(case, cupy, monkeypatch):
    """Preallocated results equal those of exact lengths, whatever the padding contains, and lengths share a plan."""
    options = Case.options

    def with_bucket(self, xp=np, **more):
        return options(self, xp, **more) | ({"bucket": 64} if xp is cupy else {})

    monkeypatch.setattr(Case, "options", with_bucket)
    check_forward(cupy, case)
    check_backward(cupy, case, *case.arrays())
    misses = get_plan_cache().misses
    check_forward(cupy, replace(case, sq=case.sq if case.sq == 1 else 40, skv=60, seq_lens_q=None, seq_lens_kv=None))
    assert get_plan_cache().misses == misses


def test_buckets_of_strided_arrays_that_need_no_rounding(cupy, monkeypatch):
    """Strided arrays whose lengths are rounded already are not copied."""
    options = Case.options

    def with_bucket(self, xp=np, **more):
        return options(self, xp, **more) | ({"bucket": 64} if xp is cupy else {})

    monkeypatch.setattr(Case, "options", with_bucket)
    case = Case("round", d=16, sq=64, skv=64, layout="sliced")
    check_forward(cupy, case)
    check_backward(cupy, case, *case.arrays())


@pytest.mark.parametrize("sq", [1, 5])
def test_a_sink_of_an_entry_without_keys(sq, cupy):
    """Its queries attend only to the sink: output 0, the sink as log-sum-exp; the padding is 0 and -inf."""
    rng = np.random.default_rng(sq)
    q, k, v = (np.asfortranarray(rng.standard_normal((16, 2, n, 3)).astype("f2")) for n in (sq, 7, 7))
    options = {
        "sinks": np.array([0.5, 2.0], np.float32), "seq_lens_q": np.array([sq, 0, sq], np.int32),
        "seq_lens_kv": np.array([0, 7, 3], np.int32),
    }  # fmt: skip
    out, stats = attention(*map(cupy.asarray, (q, k, v)), return_stats=True, **{n: cupy.asarray(x) for n, x in options.items()})
    truth, log_sums = reference.attention(q, k, v, **options)
    np.testing.assert_allclose(out.get().astype(float), truth, atol=2e-3)
    np.testing.assert_allclose(stats.get(), log_sums, atol=1e-4)


FUNCTIONS = {
    **{f.name: f for f in functions.ZOO if f.name in ("alibi_causal", "document_causal", "key_bias", "softcap", "temperature")},
    **{f.name: f for f in functions.LEARNED if f.name in ("added_before", "added_behind", "gated", "pairs", "number", "chosen")},
    "bool_array": functions.Functions(
        "bool_array", lambda s, b, h, i, j, keep: np.where(keep[h, j], s, s - 1.0), None,
        lambda rng, h, q, kv, b: {"keep": rng.random((h, kv)) < 0.5},
    ),
    "int32_array": functions.Functions(
        "int32_array", None, lambda b, h, i, j, ids: ids[b, i] == ids[b, j],
        lambda rng, h, q, kv, b: {"ids": np.sort(rng.integers(0, 3, (b, q)), axis=1).astype("i4")},
    ),
    "strided_array": functions.Functions(
        "strided_array", lambda s, b, h, i, j, x: s + x[i, j], None,
        lambda rng, h, q, kv, b: {"x": rng.standard_normal((q, 2 * kv)).astype("f4")[:, ::2]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name, cupy):
    """Score and mask functions with captured arrays: both passes, and the gradients of the arrays."""
    function = FUNCTIONS[name]
    learned = function in functions.LEARNED
    options = {"h": functions.HQ, "q": 200, "kv": 200, "b": functions.B}
    with_tensors = {"return_dtensors": True} if learned else {"return_dbias": False}
    functions.right_on_the_gpu(cupy, "bfloat16", function.options(**options), function.options(cupy, **options), **with_tensors)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_no_key_but_a_sink(packed, cupy):
    """Without any key no kernel of cuDNN runs: rows attend to their sink, and all other results are 0 and -inf."""
    q = cupy.ones((16, 4, 10) if packed else (16, 4, 10, 2), np.float16, order="F")
    k = cupy.empty((16, 4, 0) if packed else (16, 4, 0, 2), np.float16, order="F")
    sinks = np.arange(4, dtype=np.float32)
    options = {"seq_lens_q": np.array([10, 3], np.int32)}
    if packed:
        options = {"cu_seqlens_q": np.array([2, 6, 9], np.int32), "cu_seqlens_kv": np.zeros(3, np.int32)}
        options |= {"max_seqlen_q": 4, "max_seqlen_kv": 1}
    arrays = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    out, stats = attention(q, k, k, sinks=cupy.asarray(sinks), return_stats=True, **arrays)
    assert not out.get().any()
    there = np.zeros(10, bool) if packed else np.arange(10)[:, None] < options["seq_lens_q"]
    if packed:
        there[2:9] = True
    want = np.where(there if packed else there[:, None], sinks[:, None], -np.inf)
    np.testing.assert_array_equal(stats.get(), want)


@pytest.mark.parametrize("keys", [0, 6], ids=["no key", "keys"])
def test_sinks_of_packed_rows_of_no_sequence(keys, cupy):
    """The log-sum-exp is -inf before the first sequence, after the last, and beyond ``max_seqlen_q``, also without keys."""
    q = cupy.ones((16, 2, 14), np.float16, order="F")
    k = cupy.ones((16, 2, keys), np.float16, order="F")
    sinks, starts = np.array([0.5, 2.0], np.float32), np.array([2, 2, 7, 11], np.int32)
    keys_of = np.zeros(4, np.int32)
    lengths = {"max_seqlen_q": 3, "max_seqlen_kv": 1}
    packed = {"cu_seqlens_q": cupy.asarray(starts), "cu_seqlens_kv": cupy.asarray(keys_of), "sinks": cupy.asarray(sinks)}
    out, stats = poisoned(cupy, q.shape, np.float16), poisoned(cupy, (2, 14), np.float32)
    attention(q, k, k, out=out, stats=stats, **packed, **lengths)
    there = np.zeros(14, bool)
    there[[2, 3, 4, 7, 8, 9]] = True
    np.testing.assert_array_equal(stats.get(), np.where(there, sinks[:, None], -np.inf))
    assert not out.get().any()
    options = (
        packed | {"return_dsinks": True} if keys == 0 else packed
    )  # 9.19 does not support that gradient of packed sequences
    for gradient in attention_backward(q, q, k, k, out, stats, **options, **lengths):
        assert not gradient.get().any()


def test_dropout_depends_on_seed_and_offset(cupy):
    """Integers and arrays with the same value drop the same weights; other seeds and offsets drop others."""
    case = Case("dropped", d=16, sq=30, skv=40)
    q, k, v = map(cupy.asarray, case.arrays())
    kept = {
        (seed, offset): cupy_sdpa.dropout_mask(q, k, dropout_p=0.3, seed=seed, offset=offset).get()
        for seed, offset in ((1, 0), (2, 0), (1, 8))
    }
    arrays = {name: cupy.asarray(np.array([n], np.int64)) for name, n in (("seed", 1), ("offset", 8))}
    np.testing.assert_array_equal(cupy_sdpa.dropout_mask(q, k, dropout_p=0.3, **arrays).get(), kept[1, 8])
    assert len({x.tobytes() for x in kept.values()}) == 3
    want = attention(*case.arrays(), dropout_p=0.3, dropout_mask=kept[1, 8])
    got = attention(q, k, v, dropout_p=0.3, **arrays).get()
    np.testing.assert_allclose(got.astype("f4"), want.astype("f4"), atol=0.02)


# Behavior of calls


@pytest.mark.parametrize("case", [case for case in PADDED if case.b == 2] + [
    Case("plain", d=16, sq=20, skv=24, hkv=2), Case("mask", d=16, sq=20, skv=24, mask="kb"),
    Case("packed", d=16, packed=True, seq_lens_q=(9, 0, 7), seq_lens_kv=(6, 4, 0), b=3, hq=4, hkv=2, tail=3),
    Case("max_sumexp", d=16, sq=20, stats="max_sumexp"),
], ids=str)  # fmt: skip
def test_a_call_waits_for_nothing_and_leaves_nothing(case, cupy):
    """Neither pass synchronizes, all work is on the current stream, and all memory except the results is released.

    The first call creates the constants of its plan.
    """
    q, k, v, dout = (cupy.asarray(x) for x in (*case.arrays(), case.dout()))
    options, pool = case.options(cupy), cupy.cuda.MemoryPool()
    out, stats, *_ = attention(q, k, v, return_stats=case.stats, **options)
    attention_backward(dout, q, k, v, out, stats, **options)
    cupy.cuda.Device().synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream, cupy.cuda.using_allocator(pool.malloc):
        waits, launches = DEVICE.waits, len(DEVICE.launches)
        out, stats, *_ = attention(q, k, v, return_stats=case.stats, **options)
        gradients = attention_backward(dout, q, k, v, out, stats, **options)
        assert DEVICE.waits == waits
        assert set(DEVICE.launches[launches:]) == {stream.ptr}
        results = [out, stats, *_, *gradients]
        del _
        assert pool.used_bytes() == sum(-(-x.nbytes // 512) * 512 for x in results)
        stream.synchronize()


def test_deterministic_calls_have_plans_of_their_own_where_it_matters(cupy):
    """With one query a deterministic call has its own plan; with two there is one plan."""
    for queries, plans in ((1, 2), (2, 1)):
        q, k = cupy.ones((16, 2, queries, 1), np.float16, order="F"), cupy.ones((16, 2, 300, 1), np.float16, order="F")
        before = get_plan_cache().misses
        for _ in range(4):
            for deterministic in (False, True):
                attention(q, k, k, deterministic=deterministic).get()
        assert get_plan_cache().misses - before == plans


def test_refused_calls_launch_nothing(cupy):
    """A call that the support table refuses writes nothing, and does not clear the results."""
    x = cupy.ones((12, 4, 8, 2), np.float16, order="F")
    launches = len(DEVICE.launches)
    with pytest.raises(Unsupported, match="multiples of 8"):
        attention(x, x, x, seq_lens_q=cupy.ones(2, np.int32))
    assert len(DEVICE.launches) - launches <= 2  # the lengths of this test, and of the other side
    assert not explain(x, x, x)


def test_wrong_programs_are_noticed(cupy):
    """Tests of the fake: work on another stream is late, freed memory is NaN, and writes out of bounds raise."""
    x = cupy.zeros((4, 4), np.float32)
    assert not np.isnan(x.get()).any()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x.fill(7)
    assert not x.get().any()
    stream.synchronize()
    assert (x.get() == 7).all()
    address = x.data.ptr
    del x
    again = cupy.empty((4, 4), np.float32)
    assert again.data.ptr == address
    assert np.isnan(again.get()).all()
    driver.bindings().cuMemsetD8Async(address, 0, again.nbytes + 1, 0)
    with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="64 bytes begin"):
        again.get()
    with stream:
        stream.begin_capture()
        with pytest.raises(cupy.cuda.runtime.CUDARuntimeError, match="being captured"):
            again.get()
        stream.end_capture()


@pytest.mark.parametrize("heads", [slice(None), slice(0, 4, 2)], ids=["dense", "every second head"])
def test_packed_gradients_of_strided_queries(heads, cupy):
    """Strided queries are copied for the backward pass, and the gradients are right."""
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, n, 12)).astype("f2")) for n in (4, 2, 2, 2))
    starts = np.array([0, 5, 12], np.int32)
    wide = cupy.asarray(q)
    q = np.asfortranarray(q[:, heads][:, :2])
    given = wide[:, heads][:, :2] if heads != slice(None) else cupy.asarray(q)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    there = {name: cupy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    keys, values, gradient = map(cupy.asarray, (k, v, dout))
    out, stats = attention(given, keys, values, return_stats=True, **there)
    got = attention_backward(gradient, given, keys, values, out, stats, **there)
    truth = reference.attention_backward(dout, q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    for one, other in zip(got, truth, strict=True):
        np.testing.assert_allclose(one.get().astype(float), other, atol=1e-2)


def test_gradients_of_an_array_leave_strided_results_alone(cupy):
    """The subproblem that computes the gradient of a captured array has its own dQ, dK and dV, because the caller's have gaps."""
    rng = np.random.default_rng(0)
    q, dout = (np.asfortranarray(rng.standard_normal((16, 4, 5, 1)).astype("f2")) for _ in range(2))
    k, v = (np.asfortranarray(rng.standard_normal((16, 2, 70, 1)).astype("f2")) for _ in range(2))
    table = np.array([0.5, 2.0], np.float32)

    def gradients(xp, **results):
        arrays = {"score_mod": lambda s, b, h, i, j, t: s + t[1] * 0.05 * abs(i - j), "tensors": {"t": xp.asarray(table)}}
        given = [xp.asarray(x) for x in (q, k, v)]
        out, stats = attention(*given, return_stats=True, **arrays)
        found = attention_backward(xp.asarray(dout), *given, out, stats, return_dtensors=True, **arrays, **results)
        return [*found[:3], found[3]["t"]]

    wide = {name: cupy.full((24, 5, 70, 1), np.nan, np.float16, order="F") for name in ("dk", "dv")}
    got = gradients(cupy, **{name: x[:16, 1:3] for name, x in wide.items()})
    for one, other in zip(got, gradients(np), strict=True):
        np.testing.assert_allclose(one.get().astype(float), other.astype(float), atol=2e-2)
    for x in wide.values():
        around = x.get()
        around[:16, 1:3] = np.nan
        assert np.isnan(around).all()


@pytest.mark.parametrize("heads", [4, 2], ids=["grouped", "equal"])
@pytest.mark.parametrize("name", ["dq", "dk", "dv"])
def test_packed_gradients_in_strided_arrays(name, heads, cupy):
    """A preallocated dq, dk or dv with gaps between its heads gets the same gradients, and its gaps are not written."""
    rng = np.random.default_rng(0)
    q, dout, k, v = (np.asfortranarray(rng.standard_normal((16, n, 12)).astype("f2")) for n in (heads, heads, 2, 2))
    starts = np.array([0, 1, 5, 12], np.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    on_gpu = {key: cupy.asarray(x) if isinstance(x, np.ndarray) else x for key, x in options.items()}
    arrays = [cupy.asarray(x) for x in (q, k, v)]
    wide, written = cupy.full((16, 6, 12), np.nan, np.float16, order="F"), slice(1, 1 + (heads if name == "dq" else 2))
    out, stats = attention(*arrays, return_stats=True, **on_gpu)
    got = attention_backward(cupy.asarray(dout), *arrays, out, stats, **on_gpu, **{name: wide[:, written]})
    expected = reference.attention_backward(dout, q, k, v, cu_seqlens_q=starts, cu_seqlens_kv=starts)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one.get().astype(float), other, atol=1e-2)
    around = wide.get()
    around[:, written] = np.nan
    assert np.isnan(around).all()


def without_keys(cupy, packed, return_stats=True, **options):
    """A call without keys, whose rows attend to their sink."""
    shape, lengths = ((16, 2, 40), {}) if packed else ((16, 2, 40, 2), {"seq_lens_q": np.array([40, 9], np.int32)})
    q, k = cupy.ones(shape, np.float16, order="F"), cupy.empty((*shape[:2], 0, *shape[3:]), np.float16, order="F")
    if packed:
        lengths = {"cu_seqlens_q": np.array([2, 20, 33], np.int32), "cu_seqlens_kv": np.zeros(3, np.int32)}
    arrays = {name: cupy.asarray(x) for name, x in (lengths | {"sinks": np.array([0.5, 7, -1], np.float32)}).items()}
    arrays["sinks"] = arrays["sinks"][::2]
    longest = {"max_seqlen_q": 18, "max_seqlen_kv": 1} if packed else {}
    return functools.partial(attention, q, k, k, return_stats=return_stats, **arrays, **longest, **options)


def with_blocks(cupy):
    """A call with a block mask, some of whose queries attend to the sink alone."""
    mask = cupy_sdpa.block_mask(lambda b, h, i, j: ((i >= j) | (j < 70)) & (i < 250), 300, 300)
    x = cupy.asarray(np.random.default_rng(0).standard_normal((16, 2, 300, 2)).astype("f2"), order="F")
    sinks = cupy.asarray(np.array([0.5, -1], np.float32))
    return functools.partial(attention, x, x, x, block_mask=mask, sinks=sinks, return_stats=True)


def with_parts(cupy):
    """A merge in two launches."""
    rng = np.random.default_rng(0)
    outs = [cupy.asarray(rng.standard_normal((16, 2, 40, 2)).astype("f4"), order="F") for _ in range(11)]
    stats = [cupy.asarray(rng.standard_normal((40, 2, 2)).astype("f4"), order="F") for _ in range(11)]
    return functools.partial(cupy_sdpa.merge, outs, stats, return_stats=True)


def with_dropout(cupy):
    """The dropout mask, whose call has other results."""
    x = cupy.ones((16, 2, 40, 2), np.float16, order="F")
    return lambda: (cupy_sdpa.dropout_mask(x, x, dropout_p=0.5, seed=1),)


CAPTURED = {
    "sinks of lengths": lambda cupy: without_keys(cupy, False),
    "sinks of packed rows": lambda cupy: without_keys(cupy, True),
    "sinks and the maximum": lambda cupy: without_keys(cupy, False, "max_sumexp"),
    "a block mask": with_blocks,
    "a merge": with_parts,
    "a dropout mask": with_dropout,
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_calls_use_no_memory_of_others(name, cupy):
    """What a call allocates besides its results belongs to the CUDA graph, whose launches change nothing else."""
    call = CAPTURED[name](cupy)
    wanted = [x.get() for x in call()]
    if name.startswith("sinks"):
        assert set(np.unique(wanted[1])) == {-np.inf, -1, 0.5}
    DEVICE.wait_for_all()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        found = call()
        graph = stream.end_capture()
        # memory of the pool that was freed in the capture now belongs to these arrays
        junk = [cupy.full(size, np.nan, np.float32) for size in (1, 40, 80, 160, 320, 1600, 1 << 12) for _ in range(8)]
        for _ in range(2):
            for x in found:
                x.fill(0)
            graph.launch(stream)
            stream.synchronize()
            for x, y in zip(found, wanted, strict=True):
                np.testing.assert_array_equal(x.get(), y)
            assert all(np.isnan(part.get()).all() for part in junk)
    del graph
    get_plan_cache().clear()
    library().forget_plans()
