"""Repeated calls of numpy arrays: values, results and flags are checked in every call."""

import inspect
import sys

import numpy as np
import pytest
from engines import Engine, not_parsed
from replayed_calls import ROWS, calls_of, functions_run

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_jvp, fp8, prepare, shared_prefix_attention, weight_sums, widen
from cupy_sdpa.parallel import Loopback, context_parallel

ENGINE = Engine("numpy", np)


def arrays(*shape, count=3, dtype=np.float32):
    """Random arrays in Fortran order."""
    return [ENGINE.normal(n, *(shape or (8, 2, 12, 2)), dtype=dtype) for n in range(count)]


def test_a_plain_call_enters_few_functions():
    """The number does not grow with heads and batch items, as small ones are computed together."""
    for heads, batch in ((1, 1), (2, 1), (8, 3)):
        x = arrays(8, heads, 4, batch)
        out, stats = attention(*x, return_stats=True)
        attention(*x)
        attention_backward(out, *x, out, stats)
        assert functions_run(attention, *x) <= 25
        assert functions_run(attention_backward, out, *x, out, stats) <= 70


def checked_values():
    """Calls whose values are checked: the array that is changed, an element that is wrong, and a part of the message."""
    q, k, v = arrays()
    lengths, table, ends, starts = (np.array(x, np.int32) for x in ([3, 12], [[0, 0], [1, 2]], [24, 20], [0, 5, 12]))
    pages = [np.asfortranarray(np.repeat(x, 2, axis=3)[:, :, :12]) for x in (k, v)]
    packed, wide = [x[..., 0] for x in (q, k, v)], widen(q, k, v, q)
    of_packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 7, "max_seqlen_kv": 7}
    of_pages = {"page_table": table, "seq_lens_kv": ends}
    return {
        "lengths": (lambda: attention(q, k, v, seq_lens_kv=lengths), lengths, 13, "seq_lens_kv"),
        "negative lengths": (lambda: attention(q, k, v, seq_lens_kv=lengths), lengths, -1, "seq_lens_kv"),
        "lengths, with a layout": (
            lambda: attention(*(x.T for x in (q, k, v)), layout="bshd", seq_lens_kv=lengths),
            lengths,
            13,
            r"seq_lens_kv.*layout='bshd'",
        ),
        "offsets": (lambda: attention(*packed, **of_packed), starts[1:], 1, "a sequence of 11"),
        "pages": (lambda: attention(q, *pages, **of_pages), table[1:], 4, "page_table"),
        "lengths of a conversion": (lambda: fp8.quantize(q, lengths=lengths).data, lengths, 13, "lengths"),
        "pages of a prefix": (lambda: shared_prefix_attention(q, *pages, 12, **of_pages), table, 3, "begins with the pages"),
        "lengths of a prefix": (lambda: shared_prefix_attention(q, *pages, 12, **of_pages), ends, 25, "seq_lens_kv"),
        "keys that were copied": (lambda: attention_jvp(q, k, v, widened=wide), k, 7.0, "k differs from its copy"),
        "a copy": (lambda: attention_jvp(q, k, v, widened=wide), wide.q, 7.0, "q differs from its copy"),
    }


@pytest.mark.parametrize("name", checked_values())
def test_values_are_checked_in_every_call(name):
    """Valid values are not parsed; a wrong one raises, and changes nothing."""
    call, array, value, message = checked_values()[name]
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
    """``return_stats`` may be np.True_ or 1; their texts raise, also after these calls."""
    q, k, v = arrays()
    for flag in (np.True_, 1):
        assert len(attention(q, k, v, return_stats=flag, **options)) == 2
        with pytest.raises(ValueError, match=f"return_stats is '{flag}'"):
            attention(q, k, v, return_stats=str(flag), **options)


def test_a_layout_that_was_named_is_named_in_every_call():
    """A call without it raises, as if it were the first."""
    x = [np.random.default_rng(0).standard_normal((2, 12, 2, 8), np.float32).transpose(3, 2, 1, 0) for _ in range(3)]
    x = [np.ascontiguousarray(y) for y in x]  # strides that a GPU cannot read
    out = attention(*x, layout="dhsb")
    attention(*x, layout="dhsb", compute_dtype=None)
    with pytest.raises(ValueError, match="layout="):
        attention(*x)
    np.testing.assert_array_equal(attention(*x, layout="dhsb"), out)


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


#: Public functions that compute nothing with arrays, and the one that is prepared in its own test.
WITHOUT_ROWS = {
    "alibi_slopes", "block_mask", "cu_seqlens_with_gaps", "explain", "explain_function", "get_plan_cache", "jvp_problems",
    "page_table_from_lists", "prepare", "problem", "supported", "weight_sums_problems",
}  # fmt: skip


def test_every_function_has_a_row():
    """A new public function that computes needs a row."""
    called, before = set(), sys.getprofile()
    sys.setprofile(lambda frame, event, _: called.add(frame.f_code.co_name) if event == "call" else None)
    try:
        for name in ROWS:
            calls_of(ENGINE, name).launch()
    finally:
        sys.setprofile(before)
    public = {name for name in cupy_sdpa.__all__ if inspect.isfunction(getattr(cupy_sdpa, name))}
    assert public > WITHOUT_ROWS
    assert public - WITHOUT_ROWS <= called
