"""Rounded-up lengths: the same results as with exact lengths, from few plans."""

import pickle

import numpy as np
import pytest
from engines import Engine, every_engine, numbers

import cupy_sdpa
from cupy_sdpa import attention, explain

NUMPY = Engine("numpy", np)


@every_engine
@pytest.mark.parametrize("number", numbers(8, quick=2))
def test_random_problems(number, engine):
    """Together with other options, whose arrays are padded and whose gradients are cropped."""
    engine.agrees(engine.draw({"bucket"}, number), refused=True)


def test_memory_around_the_arrays():
    """Inputs may be reversed; NaN after a view is not read, and the gaps of a preallocated result are not written."""
    q, k, v = (NUMPY.normal(n, 16, 4, length, 2) for n, length in enumerate((50, 70, 70)))
    wide = np.zeros((16, 4, 100, 2), np.float32, order="F")
    longer = [np.full((*x.shape[:2], 128, x.shape[3]), np.nan, x.dtype, order="F") for x in (k, v)]
    for whole, part in zip(longer, (k, v), strict=True):
        whole[:, :, :70] = part
    out = wide[:, :, ::2]
    assert attention(q, *(x[:, :, 69::-1] for x in longer), out=out, bucket=128, layout="dhsb") is out
    np.testing.assert_allclose(out, attention(q, k, v), atol=1e-6)
    assert not wide[:, :, 1::2].any()
    assert not attention(q, k[:, :, :0], v[:, :, :0], bucket=16).any(), "without keys there is nothing to round"


def test_lengths_of_a_bucket_give_one_problem():
    """The key of the plan is the same for every length of a bucket, and differs for the next bucket."""

    def asked(sq, skv, bucket):
        q, k = (np.zeros((64, 4, length, 2), np.float32, order="F") for length in (sq, skv))
        return explain(q, k, k, bucket=bucket).problem

    assert asked(10, 100, 64) == asked(64, 65, 64)
    assert asked(10, 100, 64) != asked(65, 100, 64)
    assert asked(64, 128, 64) != asked(64, 128, None)
    assert "at most 64 queries, at most 128 keys" in str(asked(10, 100, 64))
    for bucket, lengths in {
        "power_of_two": {2: 64, 64: 64, 65: 128, 1024: 1024, 1025: 2048}, np.int64(100): {2: 100, 100: 100, 101: 200},
    }.items():  # fmt: skip
        for length, rounded in lengths.items():
            assert f"at most {rounded} queries" in str(asked(length, 200, bucket))


def test_a_single_query_stays_single():
    """Decoding has its own kernels, so only the keys are rounded up."""
    shape = (64, 4, 1, 2)
    asked = cupy_sdpa.problem(shape, (64, 4, 1000, 2), (64, 4, 1000, 2), dtype="bfloat16", bucket=256)
    assert (asked.q.shape[2], asked.k.shape[2]) == (1, 1024)


@pytest.mark.parametrize("lengths", [(20, 30), (1, 30), (20, 1)], ids=str)
def test_the_dropout_mask_of_a_bucket(lengths, engine):
    """It is the call's mask: with unit vectors as values the output is the weights."""
    sq, skv = lengths
    q, k, v = (np.zeros((32, 2, n, 1), np.float16, order="F") for n in (sq, skv, skv))
    v[np.arange(skv), :, np.arange(skv)] = 1
    options = {"dropout_p": 0.5, "seed": 3, "bucket": 48}
    q, k, v = engine.put((q, k, v))
    out, kept = engine.get((attention(q, k, v, **options), cupy_sdpa.dropout_mask(q, k, **options)))
    np.testing.assert_array_equal((out[:skv] != 0).transpose(0, 2, 1, 3), kept)
    assert kept.shape == (skv, sq, 2, 1)
    if engine.name == "numpy" and lengths == (20, 30):  # the generator of the CPU depends on the lengths of the bucket
        assert (kept != cupy_sdpa.dropout_mask(q, k, **{**options, "bucket": None})).any()


def test_the_dropout_mask_of_packed_sequences_takes_rounded_lengths():
    """The mask has the shape of the maximum lengths; with the rounded lengths it is the mask of a call with a bucket."""
    q, starts = np.ones((16, 2, 30), np.float32, order="F"), np.array([0, 10, 30], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 20, "max_seqlen_kv": 20}
    kept = cupy_sdpa.dropout_mask(q, q, dropout_p=0.5, seed=1, **packed | {"max_seqlen_q": 32, "max_seqlen_kv": 32})
    v = np.zeros((30, 2, 30), np.float32, order="F")
    v[np.arange(30), :, np.arange(30)] = 1
    out = attention(q, q, v, dropout_p=0.5, seed=1, bucket=32, **packed)
    np.testing.assert_array_equal((out[10:, :, 10:] != 0).transpose(0, 2, 1), kept[:20, :20, :, 1])


def test_a_problem_can_be_pickled():
    """It is equal afterwards, and its hash is computed again, because hashes differ between processes."""
    asked = cupy_sdpa.problem((64, 4, 10, 2), (64, 4, 10, 2), (64, 4, 10, 2), dtype="bfloat16", bucket=64)
    data = pickle.dumps(asked)
    assert str(hash(asked)).encode() not in data
    again = pickle.loads(data)
    assert again == asked
    assert hash(again) == hash(asked)
