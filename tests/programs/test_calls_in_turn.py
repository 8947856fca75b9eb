"""Calls that differ in one option, on the same arrays, in turn: each has the results of a call that is parsed."""

import functools

import numpy as np
import pytest
from engines import Engine, one_in
from validated_steps import validated_steps

import cupy_sdpa
from cupy_sdpa import BlockMask, attention, attention_backward, attention_jvp, fp8, layout


def calls_of(engine):
    """Calls by name, in groups that have most of their arguments in common."""
    dtype = "float32"
    q, k, v, dout = (engine.normal([3, n], 16, 2, 300, 1, dtype=dtype) for n in range(4))
    half = [x.astype(np.float16, order="F") for x in (q, k, v)]
    tables = [np.random.default_rng(n).random((3, 3, 1, 1)) < 0.7 for n in range(2)]
    masks = [BlockMask.from_blocks(table | np.eye(3, dtype=bool)[..., None, None], 300, 300) for table in tables]
    bias = engine.normal(9, 300, 300, 1, 1, dtype=np.float16)
    out = engine.nan(16, 2, 300, 1, dtype=np.float16)
    square = [engine.normal([4, n], 16, 16, 16, 2, dtype=np.float16) for n in range(3)]
    starts = {"cu_seqlens_q": np.array([0, 3, 16], np.int32), "cu_seqlens_kv": np.array([0, 3, 16], np.int32)}
    packed = {name: engine.put(x) for name, x in starts.items()} | {"max_seqlen_q": 13, "max_seqlen_kv": 13}
    width = [40]

    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < width[0]

    def within(n, function):
        def call():
            width[0] = n
            return function()

        return call

    def in_default():
        with layout.default("bshd"):
            return attention(*square)

    def gradients(**options):
        made, stats = attention(*half, return_stats=True, **options)
        return attention_backward(half[0], *half, made, stats, **options)

    run = functools.partial
    blocks = [run(attention, *half, block_mask=mask) for mask in masks]
    other = "cupy" if engine.on_cudnn else "numpy"
    return {
        "block masks": [*blocks, run(attention, *half), run(attention, *half, block_mask=None)],
        "bands of block masks": [blocks[0], run(attention, *half, block_mask=masks[0], causal=True),
                                 run(attention, *half, block_mask=masks[0], window=(9, 0))],
        "dense block masks": [blocks[0], *(run(attention, *half, block_mask=mask, bias=bias) for mask in masks),
                              run(attention, *half, bias=bias)],
        "statistics of block masks": [blocks[0], run(attention, *half, block_mask=masks[0], return_stats=True),
                                      run(attention, *half, block_mask=masks[0], return_stats="max_sumexp")],
        "gradients of block masks": [run(gradients, block_mask=masks[0]), run(gradients, block_mask=masks[1]), gradients],
        "derivatives of block masks": [run(attention_jvp, *half, *half, block_mask=mask) for mask in masks]
        + [run(attention_jvp, *half, *half), run(attention_jvp, *half, None, half[1])],
        "compute_dtype": [run(attention, q, k, v, compute_dtype=x) for x in ("float16", np.float16, np.dtype("float16"))]
        + [run(attention, q, k, v, compute_dtype="float16", block_mask=masks[0])]
        + [run(attention, *half, compute_dtype=x) for x in (None, "float16")],
        "derivatives in a compute_dtype": [run(attention_jvp, q, k, v, dout, compute_dtype="float16"),
                                           run(attention_jvp, *half, half[0])],
        "values of functions": [within(40, run(attention, *half, mask_mod=near)), within(9, run(attention, *half, mask_mod=near))],
        "values of functions, gradients": [within(n, run(gradients, mask_mod=near)) for n in (40, 9)],
        "layouts": [run(attention, *square), in_default, run(attention, *square, layout="bshd"),
                    run(attention, *square, layout="dhsb")],
        "layouts in a compute_dtype": [run(attention, *(x.astype(np.float32, order="F") for x in square), **given,
                                           compute_dtype="float16") for given in ({}, {"layout": "bshd"})],
        "axes": [run(attention, *(x[..., 0] for x in square)), run(attention, *(x[..., 0] for x in square), **packed)],
        "engines": [run(attention, *half), run(attention, *half, engine=other), run(attention, *half, engine=None)],
        "results of the caller": [run(attention, *half, out=out), run(attention, *half), run(attention, *half, block_mask=masks[0],
                                                                                          out=out), blocks[0]],
        "FP8": [lambda: fp8.attention(*fp8.quantize_qkv(*half)).dequantize(), run(attention, *half)],
    }  # fmt: skip


@pytest.mark.parametrize("name", one_in(2, calls_of(Engine("numpy", np))))
def test_calls_in_turn(name, engine):
    """Five times, so that they are cached and captured; inside ``validated_steps`` every call is parsed."""
    calls = calls_of(engine)[name]

    def host(found):
        return [engine.get(x).copy() for x in (found if isinstance(found, tuple) else (found,))]

    try:
        with validated_steps():
            wanted = [host(call()) for call in calls]
    except cupy_sdpa.Unsupported as error:
        pytest.skip(f"refused: {error}") if engine.on_cudnn else pytest.fail(str(error))
    for _ in range(5):
        for call, want in zip(calls, wanted, strict=True):
            for one, other in zip(host(call()), want, strict=True):
                if engine.name == "cupy" and any(word in name for word in ("gradients", "derivatives")):
                    np.testing.assert_allclose(one, other, rtol=2e-3, atol=1e-3)  # a GPU accumulates dq in an arbitrary order
                else:
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("options", [{}, {"compute_dtype": "float16"}], ids=["plain", "compute_dtype"])
def test_errors_have_the_axes_of_the_caller(options, engine):
    """Also after a call that is cached."""
    dtype = np.float32 if options else None
    q, k, v = (engine.normal(n, 2, 20, 2, 16, dtype=dtype).copy(order="C") for n in range(3))
    for _ in range(3):
        attention(q, k, v, layout="bshd", **options)
        with pytest.raises(ValueError, match=r"\(2, 10, 2, 16\).*layout='bshd'"):
            attention(q, k, v[:, :10].copy(order="C"), layout="bshd", **options)
