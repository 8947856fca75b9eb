"""Helpers of the tests of the gpu tier."""

import numpy as np
from cases import options_of_reference
from tolerance import accumulation_floor, assert_close, gradient_floor, sinks_floor

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, reference
from cupy_sdpa.problem.problem import ROW_STATS


def poisoned(cupy, shape, dtype):
    """An array full of NaN, so that missing writes show."""
    return cupy.full(shape, np.nan, dtype=dtype, order="F")


def poisoning(cupy, sizes=None):
    """Allocate memory full of NaN, so that reads of uninitialized memory show."""
    pool = cupy.cuda.MemoryPool()

    def allocate(size):
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())  # in order with the work that writes to it
        if sizes is not None:
            sizes.append(size)
        return memory

    return cupy.cuda.using_allocator(allocate)


def dropped(cupy, case):
    """The dropout mask that cuDNN uses for a case, as a numpy array; None without dropout."""
    if not case.dropout:
        return None
    q, k, _ = (cupy.asarray(x) for x in case.arrays())
    names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "dropout_p", "seed", "offset")
    options = case.options(cupy)
    return cupy.asnumpy(cupy_sdpa.dropout_mask(q, k, **{name: options[name] for name in names if name in options}))


def check_forward(cupy, case):
    """Run a case on the GPU with outputs full of NaN, and compare it within the tolerance policy."""
    q, k, v = case.arrays()
    options = case.options(dropout_mask=dropped(cupy, case))
    truth = reference.attention(q, k, v, **options_of_reference(options), max_sumexp=True)
    naive = attention(q, k, v, return_stats="max_sumexp", **options)
    on_gpu = case.laid_out([cupy.asarray(x) for x in (q, k, v)])
    out = poisoned(cupy, truth[0].shape, q.dtype)
    stats = poisoned(cupy, truth[1].shape, np.float32) if case.stats else None
    with poisoning(cupy):
        got = attention(*on_gpu, out=out, stats=stats, return_stats=case.stats, **case.options(cupy))
    got = got if case.stats else (got,)
    assert got[0] is out
    if case.stats:
        assert got[1] is stats
    assert_close(cupy.asnumpy(out), truth[0], naive[0])
    for name, array, wanted, other in zip(ROW_STATS, got[1:], truth[1:], naive[1:], strict=False):
        floor = accumulation_floor(q, k, case.tau, wanted, case.added(options))
        if name == "sum_exp":  # an error of a score is a relative error of its exponential
            floor *= max(1.0, wanted.max(initial=0))
        assert_close(cupy.asnumpy(array), wanted, other, floor)


def gradients_on_gpu(cupy, case, dout, q, k, v, **options):
    """Every gradient from cuDNN, with results and workspace full of NaN before."""
    on_gpu = case.laid_out([cupy.asarray(x) for x in (q, k, v)])
    (on_gpu_dout,) = case.laid_out([cupy.asarray(dout)])
    known = case.options(cupy)
    out, stats = attention(*on_gpu, **known, return_stats=True)
    given = {name: poisoned(cupy, x.shape, x.dtype) for name, x in zip(("dq", "dk", "dv"), (q, k, v), strict=True)}
    with poisoning(cupy):
        got = attention_backward(on_gpu_dout, *on_gpu, out, stats, **(known | case.gradients | options), **given)
    return [cupy.asnumpy(x) for x in got]


def _rounded_parts(dout, q, k, v, options):
    """The error of the sums along the axes that a bias lacks, from rounding each score gradient to the dtype of q."""
    bias = options["bias"]
    _, heads, queries, batch = q.shape
    full = (k.shape[2], queries, heads, batch)
    known = options_of_reference(options) | {"bias": np.broadcast_to(bias, full)}
    *_, parts = reference.attention_backward(dout, q, k, v, **known, return_dbias=True)
    axes = tuple(axis for axis, length in enumerate(bias.shape) if length == 1)
    return float(np.abs(parts).sum(axis=axes).max()) * float(np.spacing(q.dtype.type(1))) / 2


def check_backward(cupy, case, q, k, v, **options):
    """Compare the gradients of a case within the tolerance policy."""
    dout, known = case.dout(), case.options(dropout_mask=dropped(cupy, case))
    wanted_too = {name: options.pop(name, value) for name, value in case.gradients.items()}
    truth = reference.attention_backward(dout, q, k, v, **options_of_reference(known), **wanted_too)
    out, stats = attention(q, k, v, return_stats=True, **known)
    naive = attention_backward(dout, q, k, v, out, stats, **known, **wanted_too)
    got = gradients_on_gpu(cupy, case, dout, q, k, v, **wanted_too, **options)
    names = ("dq", "dk", "dv", *(name for name in ("dbias", "dsinks") if wanted_too[f"return_{name}"]))
    wrong = []
    for name, a, wanted, other in zip(names, got, truth, naive, strict=True):
        try:
            floor = gradient_floor(dout, q, k, v, case.tau, wanted, other.dtype)
            if name == "dbias":  # cuDNN rounds the terms, which may cancel
                floor += _rounded_parts(dout, q, k, v, known)
            if name == "dsinks":
                right = reference.attention(q, k, v, **options_of_reference(known))
                floor += sinks_floor(dout, *right, known["sinks"])
            assert_close(a, wanted, other, floor)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    assert not wrong, "\n".join(wrong)
