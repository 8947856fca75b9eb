"""Rounded-up lengths: the same results as with exact lengths, from few plans."""

import dataclasses
import pickle

import numpy as np
import pytest
from cases import VARIANTS, Case

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_vjp, explain
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.problem.bucket import Policy, check_bucket

LENGTHS = [(1, 1), (1, 100), (5, 64), (63, 65), (64, 64), (100, 37), (128, 130)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("bucket", [1, 64, "power_of_two", lambda n: n + 3], ids=["1", "64", "power_of_two", "function"])
@pytest.mark.parametrize(("sq", "skv"), LENGTHS, ids=str)
def test_results_are_those_of_exact_lengths(sq, skv, bucket, causal):
    """Output, log-sum-exp and gradients in float64, with grouped-query attention and every policy."""
    case = Case("bucket", d=16, hq=4, hkv=2, sq=sq, skv=skv, dtype="float64", causal=causal)
    q, k, v = case.arrays()
    dout = np.asfortranarray(np.random.default_rng(0).standard_normal(q.shape))
    out, stats = attention(q, k, v, causal=causal, return_stats=True)
    got, got_stats = attention(q, k, v, causal=causal, return_stats=True, bucket=bucket)
    np.testing.assert_allclose(got, out, atol=1e-12)
    np.testing.assert_allclose(got_stats, stats, atol=1e-6)
    assert got.flags.f_contiguous
    exact = attention_backward(dout, q, k, v, out, stats, causal=causal)
    padded = attention_backward(dout, q, k, v, out, stats, causal=causal, bucket=bucket)
    for mine, right in zip(padded, exact, strict=True):
        np.testing.assert_allclose(mine, right, atol=1e-10)
        assert mine.shape == right.shape


def test_strided_arrays_and_preallocated_results():
    """Inputs and preallocated results may be strided views."""
    case = Case("strided", d=16, sq=50, skv=70, dtype="float32")
    q, k, v = case.arrays()
    wide = np.zeros((16, 4, 100, 2), np.float32, order="F")
    out = wide[:, :, ::2]
    assert attention(q, k[:, :, ::-1], v[:, :, ::-1], out=out, bucket=64, layout="dhsb") is out
    np.testing.assert_allclose(out, attention(q, k, v), atol=1e-6)
    assert not wide[:, :, 1::2].any()


def test_memory_after_the_arrays_is_not_read():
    """NaN in the memory after a view has no effect."""
    case = Case("view", d=16, sq=50, skv=70, dtype="float32")
    q, k, v = case.arrays()
    longer = [np.full((*x.shape[:2], 128, x.shape[3]), np.nan, x.dtype, order="F") for x in (k, v)]
    for whole, part in zip(longer, (k, v), strict=True):
        whole[:, :, :70] = part
    got = attention(q, longer[0][:, :, :70], longer[1][:, :, :70], bucket=128)
    np.testing.assert_allclose(got, attention(q, k, v), atol=1e-6)


def test_lengths_of_a_bucket_give_one_problem():
    """The key of the plan is the same for every length of a bucket, and differs for the next bucket."""

    def engine_problem(sq, skv):
        q, k, v = Case("p", sq=sq, skv=skv, dtype="float32").arrays()
        return explain(q, k, v, bucket=64).problem

    assert engine_problem(10, 100) == engine_problem(64, 65)
    assert engine_problem(10, 100) != engine_problem(65, 100)
    assert engine_problem(64, 128) != explain(*Case("p", sq=64, skv=128, dtype="float32").arrays()).problem
    assert "at most 64 queries, at most 128 keys" in str(engine_problem(10, 100))
    assert "j″ < seq_lens_kv" in str(forward(engine_problem(10, 100)))


def test_a_single_query_stays_single():
    """Decoding has its own kernels, so only the keys are rounded up."""
    shape = (64, 4, 1, 2)
    asked = cupy_sdpa.problem(shape, (64, 4, 1000, 2), (64, 4, 1000, 2), dtype="bfloat16", bucket=256)
    assert (asked.q.shape[2], asked.k.shape[2]) == (1, 1024)


@pytest.mark.parametrize("lengths", [(20, 30), (1, 30), (20, 1)], ids=str)
@pytest.mark.parametrize("engine", ["numpy", "fake"])
def test_the_dropout_mask_of_a_bucket(engine, lengths, request):
    """It is that of the call: with unit vectors as values the output is the weights."""
    xp = np if engine == "numpy" else request.getfixturevalue("fake")
    sq, skv = lengths
    q, k, v = (np.zeros((32, 2, n, 1), np.float16, order="F") for n in (sq, skv, skv))
    v[np.arange(skv), :, np.arange(skv)] = 1
    options = {"dropout_p": 0.5, "seed": 3, "bucket": 48}
    q, k, v = (xp.asarray(x) for x in (q, k, v))
    out, kept, other = (
        attention(q, k, v, **options), cupy_sdpa.dropout_mask(q, k, **options),
        cupy_sdpa.dropout_mask(q, k, **{**options, "bucket": None}),
    )  # fmt: skip
    out, kept, other = (x.get() if engine == "fake" else x for x in (out, kept, other))
    np.testing.assert_array_equal((out[:skv] != 0).transpose(0, 2, 1, 3), kept)
    assert kept.shape == (skv, sq, 2, 1)
    if engine == "numpy" and lengths == (20, 30):  # the generator of the CPU depends on the lengths of the bucket
        assert (kept != other).any()


def test_the_dropout_mask_of_packed_sequences_takes_rounded_lengths():
    """The mask has the shape of the maximum lengths, so the remedy is to pass the rounded ones."""
    q, starts = np.ones((16, 2, 30), np.float32, order="F"), np.array([0, 10, 30], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 20, "max_seqlen_kv": 20}
    with pytest.raises(ValueError, match="bucket is 32 and cu_seqlens_q is passed; round max_seqlen_q"):
        cupy_sdpa.dropout_mask(q, q, dropout_p=0.5, seed=1, bucket=32, **packed)
    kept = cupy_sdpa.dropout_mask(q, q, dropout_p=0.5, seed=1, **packed | {"max_seqlen_q": 32, "max_seqlen_kv": 32})
    v = np.zeros((30, 2, 30), np.float32, order="F")
    v[np.arange(30), :, np.arange(30)] = 1
    out = attention(q, q, v, dropout_p=0.5, seed=1, bucket=32, **packed)
    np.testing.assert_array_equal((out[10:, :, 10:] != 0).transpose(0, 2, 1), kept[:20, :20, :, 1])


def test_the_vjp_and_empty_keys():
    """The pullback keeps the bucket; without keys there is nothing to round."""
    q, k, v = Case("vjp", d=16, sq=20, skv=30, dtype="float64").arrays()
    out, pullback = attention_vjp(q, k, v, bucket=16)
    want, right = attention_vjp(q, k, v)
    np.testing.assert_allclose(out, want, atol=1e-12)
    for mine, theirs in zip(pullback(out), right(out), strict=True):
        np.testing.assert_allclose(mine, theirs, atol=1e-10)
    assert not attention(q, k[:, :, :0], v[:, :, :0], bucket=16).any()


@pytest.mark.parametrize(
    ("bucket", "error", "words"),
    [
        (0, ValueError, "bucket is 0"),
        (-5, ValueError, "bucket is -5"),
        (1.5, TypeError, r"bucket is 1\.5"),
        (True, TypeError, "bucket is True"),
        ("power_of_3", TypeError, "'power_of_3'"),
        (lambda n: n - 1, ValueError, "bucket returned 9 for the length 10"),
        (lambda n: n + 0.5, ValueError, "bucket returned 10.5"),
    ],
    ids=["zero", "negative", "fraction", "bool", "word", "function_down", "function_fraction"],
)
def test_bad_buckets_raise(bucket, error, words):
    """The message contains the value and the valid ones."""
    x = np.ones((8, 1, 10, 1), np.float32, order="F")
    with pytest.raises(error, match=words):
        attention(x, x, x, bucket=bucket)


def test_policies():
    """None rounds nothing; a number rounds to its multiples; powers of two start at 64."""
    assert check_bucket(None) is None
    assert [Policy("power_of_two").length(n) for n in (1, 64, 65, 1024, 1025)] == [64, 64, 128, 1024, 2048]
    assert [check_bucket(np.int64(100)).length(n) for n in (1, 100, 101)] == [100, 100, 200]


def test_a_problem_can_be_pickled():
    """It is equal afterwards, and its hash is computed again, because hashes differ between processes."""
    asked = cupy_sdpa.problem((64, 4, 10, 2), (64, 4, 10, 2), (64, 4, 10, 2), dtype="bfloat16", bucket=64)
    data = pickle.dumps(asked)
    assert str(asked._hash).encode() not in data
    again = pickle.loads(data)
    assert again == asked
    assert hash(again) == hash(asked)
    assert {field.name for field in dataclasses.fields(asked) if not field.init} == {"_hash"}


@pytest.mark.parametrize("case", [c for c in VARIANTS if not (c.packed and c.bias)], ids=str)
def test_every_option_in_a_bucket(case):
    """Biases, masks and their gradients are padded and cropped; of packed sequences only the maximum lengths are rounded."""
    case = case.with_dtype("float32")
    arrays, options = case.arrays(), case.options(dropout_mask=None if case.packed else case.kept())
    if case.packed and case.dropout:
        options = {name: value for name, value in options.items() if name not in ("dropout_p", "seed", "offset")}
    results = []
    for more in ({}, {"bucket": 64}):
        forward = attention(*arrays, return_stats=case.stats, **options, **more)
        backward = attention_backward(case.dout(), *arrays, *forward[:2], **options, **case.gradients, **more)
        results.append((*forward, *backward))
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
