"""Repeated calls of numpy arrays: they are not parsed again, have the same bits, and the elements of arrays are checked again."""

import gc
import weakref

import numpy as np
import pytest
from engines import Engine, not_parsed, numbers
from replayed_calls import CASES, Calls, functions_run

from cupy_sdpa import (
    BlockMask,
    attention,
    attention_backward,
    attention_jvp,
    fp8,
    prepare,
    shared_prefix_attention,
    weight_sums,
    widen,
)
from cupy_sdpa.check.calls import CaseRunner
from cupy_sdpa.parallel import Loopback, context_parallel
from cupy_sdpa.replay import replay_cache

ENGINE = Engine("numpy", np)


def arrays(*shape, count=3, dtype=np.float32):
    """Random arrays in Fortran order."""
    return [ENGINE.normal(n, *(shape or (8, 2, 12, 2)), dtype=dtype) for n in range(count)]


def test_a_plain_call_enters_few_functions():
    """At most 40 with one head and one batch entry; each further one is a tile, which takes less than 30."""
    for heads, most in ((1, 40), (2, 70)):
        x = arrays(8, heads, 4, 1)
        attention(*x)
        assert functions_run(attention, *x) <= most


@pytest.mark.parametrize("name", CASES)
def test_repeated_calls_are_not_parsed(name):
    """With other arrays of the same shapes; the bits are those of a call that is parsed."""
    calls = Calls(ENGINE, name, preallocated=False, max_workspace=1)
    calls.run()
    for other in (calls, calls.elsewhere()):
        other.load(1)
        with not_parsed():
            got = other.host(other.launch())
        parsed = Calls(ENGINE, name, preallocated=False, max_workspace=2)  # a key of its own
        parsed.load(1)
        want = parsed.host(parsed.launch())
        assert all(got[key].tobytes() == want[key].tobytes() for key in want)


@pytest.mark.parametrize("number", numbers(40, quick=15))
def test_random_calls_have_the_same_bits(number):
    """Of all options: the first call and the next ones, on other memory, with results that the caller passes, too."""
    runner = CaseRunner(ENGINE.draw((), number, most=4))
    found = []
    for _ in range(3):
        memory = runner.allocate()
        runner.load(memory, 0)
        results = runner.call(memory, 0)
        found.append({name: np.asarray(x).tobytes() for name, x in results.items()})
    assert found[0] == found[1] == found[2]


def test_composed_calls_are_not_parsed():
    """Block masks in both passes, and derivatives."""
    mask = BlockMask.from_blocks(np.tri(3, 3, dtype=bool).T[:, :, None, None], 300, 300)
    x = arrays(8, 1, 300, 1)
    out, stats = attention(*x, block_mask=mask, return_stats=True)
    calls = (
        lambda x: attention(*x, block_mask=mask),
        lambda x: attention_backward(out, *x, out, stats, block_mask=mask),
        lambda x: attention_jvp(*x, *x, block_mask=mask),
        lambda x: attention_jvp(*x, *x),
    )
    for call in calls:
        want = call(x)
        with not_parsed():
            got = call([y.copy("K") for y in x])
        for a, b in zip(np.broadcast_arrays(got), np.broadcast_arrays(want), strict=True):
            np.testing.assert_array_equal(a, b)


def test_values_are_checked_in_every_call():
    """Lengths, offsets and page tables, which are values of arrays."""
    q, k, v = arrays()
    lengths = np.array([3, 12], np.int32)
    for good, bad in (([3, 12], [3, 13]), ([0, 1], [-1, 1])):
        lengths[:] = good
        attention(q, k, v, seq_lens_kv=lengths)
        lengths[:] = bad
        with pytest.raises(ValueError, match="seq_lens_kv has lengths from"):
            attention(q, k, v, seq_lens_kv=lengths)
    packed = [x[..., 0] for x in (q, k, v)]
    starts = np.array([0, 5, 12], np.int32)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    attention(*packed, **options)
    starts[1] = 1
    with pytest.raises(ValueError, match="a sequence of 11"):
        attention(*packed, **options)
    table, used = np.array([[0, 1]], np.int32).T, np.array([20], np.int32)
    pages = {"page_table": table, "seq_lens_kv": used}
    attention(q[..., :1], k, v, **pages)
    table[1] = 2
    with pytest.raises(ValueError, match="entries from 0 to 2"):
        attention(q[..., :1], k, v, **pages)


def test_values_are_checked_in_every_composed_call():
    """Lengths of a conversion, the pages of a shared prefix, and arrays that were copied before; valid values are not parsed."""
    q, k, v = arrays()
    lengths, table, ends = (np.array(x, np.int32) for x in ([3, 12], [[0, 0], [1, 2]], [24, 20]))
    pages = [np.asfortranarray(np.repeat(x, 2, axis=3)[:, :, :12]) for x in (k, v)]
    wide = widen(q, k, v, q)
    calls = (
        (lambda: fp8.quantize(q, lengths=lengths).data, lengths, 13, "lengths has lengths from"),
        (lambda: shared_prefix_attention(q, *pages, 12, page_table=table, seq_lens_kv=ends), table, 3, "begins with the pages"),
        (
            lambda: shared_prefix_attention(q, *pages, 12, page_table=table, seq_lens_kv=ends),
            ends,
            25,
            "seq_lens_kv has lengths",
        ),
        (lambda: attention_jvp(q, k, v, widened=wide), k, 7.0, "k differs from its copy"),
        (lambda: attention_jvp(q, k, v, widened=wide), wide.q, 7.0, "q differs from its copy"),
    )
    for call, array, value, message in calls:
        want = call()
        with not_parsed():
            np.testing.assert_array_equal(call(), want)
        before, first = array.copy("K"), (0,) * array.ndim
        array[first] = value
        with pytest.raises(ValueError, match=message):
            call()
        array[...] = before
        np.testing.assert_array_equal(call(), want)


def test_results_are_checked_in_every_call():
    """A result that overlaps an input, or that is read-only."""
    q, k, v = arrays()
    memory = np.zeros((2, *q.shape[::-1]), np.float32)
    first, out = memory[0].T, memory[1].T
    assert attention(q, k, v, out=out) is out
    with not_parsed():
        assert attention(q, k, v, out=first) is first
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(first, k, v, out=first)
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        attention(q, k, v, out=out)


def test_statistics_of_another_call_are_refused_in_every_call():
    """The backward pass checks them on the CPU."""
    q, k, v = arrays()
    out, stats = attention(q, k, v, return_stats=True)
    attention_backward(out, q, k, v, out, stats)
    with pytest.raises(ValueError, match="stats"):
        attention_backward(out, q, k, v, out, stats - 1)
    with pytest.raises(ValueError, match="out"):
        attention_backward(out, q, k, v, 2 * out, stats)


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "float16"}], ids=["plain", "program"])
def test_a_text_is_no_flag_after_a_flag_of_this_text(options):
    """``return_stats`` may be np.True_ or 1; their texts are refused, also after these calls."""
    q, k, v = arrays()
    for flag in (np.True_, 1):
        assert len(attention(q, k, v, return_stats=flag, **options)) == 2
        with pytest.raises(ValueError, match=f"return_stats is '{flag}'"):
            attention(q, k, v, return_stats=str(flag), **options)


def test_a_layout_that_was_named_is_named_in_every_call():
    """A call without it is refused, as if it were the first."""
    x = [np.random.default_rng(0).standard_normal((2, 12, 2, 8), np.float32).transpose(3, 2, 1, 0) for _ in range(3)]
    x = [np.ascontiguousarray(y) for y in x]  # strides that a GPU cannot read
    out = attention(*x, layout="dhsb")
    attention(*x, layout="dhsb", compute_dtype=None)
    with pytest.raises(ValueError, match="layout="):
        attention(*x)
    np.testing.assert_array_equal(attention(*x, layout="dhsb"), out)


def test_the_cache_is_bounded(monkeypatch):
    """It keeps no array, and the oldest calls are parsed again after many others."""
    monkeypatch.setattr(replay_cache, "MAX_CALLS", 20)
    first = arrays(8, 1, 4, 1)
    attention(*first)
    few = functions_run(attention, *first)
    kept = [weakref.ref(x) for x in first]
    for length in range(25):
        x = np.zeros((8, 1, 5 + length, 1), np.float32, order="F")
        attention(x, x, x)
    assert functions_run(attention, *first) > 2 * few
    del first
    gc.collect()
    assert [ref() for ref in kept] == [None, None, None]


#: Calls of q = k and v by name.
OF_SCALE = {
    "attention": lambda x, v, **options: attention(x, x, v, **options),
    "derivative": lambda x, v, **options: attention_jvp(x, x, v, None, None, v, **options)[1],
    "sums of weights": lambda x, v, **options: weight_sums(x, x, **options),
    "prepared": lambda x, v, **options: prepare(x, x, v, **options)(x, x, v),
}


@pytest.mark.parametrize("name", [*OF_SCALE, "group"])
def test_zeros_of_both_signs_are_different_numbers(name, engine):
    """A call with the other sign of the scale is another call."""
    x, v = engine.put(np.ones((16, 2, 4, 1), engine.dtype, order="F")), engine.normal(0, 16, 2, 4, 1)
    group = context_parallel(Loopback(1).members[0])
    call = OF_SCALE.get(name, lambda x, v, **options: group.attention(x, x, v, **options))

    def sign(s, b, h, i, j):
        return np.where(1 / s > 0, np.where(i >= j, 1.0, 0.0), np.where(i <= j, 1.0, 0.0))

    found = [engine.get(call(x, v, scale=zero, score_mod=sign)).tobytes() for zero in (0.0, -0.0, 0.0, -0.0)]
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_lengths_of_another_dtype_are_read_in_every_call():
    """They are copied to int32: the copy of the first call is not those of later calls."""
    q, k, v = (np.asfortranarray(np.random.default_rng(n).standard_normal((8, 2, 10, 2), np.float32)) for n in range(3))
    for lengths in ([10, 3], [4, 10], [0, 7]):
        want = attention(q, k, v, seq_lens_kv=np.array(lengths, np.int32))
        np.testing.assert_array_equal(attention(q, k, v, seq_lens_kv=np.array(lengths, np.int64)), want)
        np.testing.assert_array_equal(attention(q, k, v, seq_lens_kv=tuple(lengths)), want)
