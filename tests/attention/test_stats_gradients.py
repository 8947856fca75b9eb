"""Gradients through the log-sum-exp: ``dstats`` of attention_backward and of pullbacks, and the gradients of merge."""

import ml_dtypes
import numpy as np
import pytest
from engines import every_engine, numbers

import cupy_sdpa
from cupy_sdpa import (
    Unsupported,
    attention,
    attention_backward,
    attention_vjp,
    explain,
    merge,
    merge_backward,
    prepare,
    reference,
)


@pytest.mark.parametrize("number", numbers(40, quick=10))
@every_engine
def test_random_problems(number, engine):
    """They agree with the reference with any other options, also without the gradient of the output."""
    engine.agrees(engine.draw({"dstats"}, number), refused=True)


def arrays(d=16, dv=16, *, dtype=np.float64, seed=0):
    """q, k, v, the gradients of the output and of the log-sum-exp, and the shape of the scores."""
    rng = np.random.default_rng(seed)
    shapes = (d, 4, 9, 2), (d, 2, 11, 2), (dv, 2, 11, 2), (dv, 4, 9, 2), (9, 4, 2)
    return [np.asfortranarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


#: Options whose gradients are compared with differences, and the gradients that they add.
OPTIONS = {
    "no option": {}, "causal": {"causal": True}, "a scale of 0": {"scale": 0.0}, "softcap": {"softcap": 1.0},
    "dropout": {"dropout_p": 0.4, "seed": 3}, "deterministic": {"deterministic": True},
    "a score function": {"score_mod": lambda score, b, h, i, j: score * score * 0.3},
    "sinks": {"sinks": np.linspace(-1, 2, 4), "return_dsinks": True},
    "bias": {"bias": np.asfortranarray(np.random.default_rng(1).standard_normal((11, 9, 4, 1))), "return_dbias": True},
    "lengths": {"seq_lens_q": np.array([9, 4], np.int32), "seq_lens_kv": np.array([0, 7], np.int32)},
    "masked rows": {"mask": np.asfortranarray(np.random.default_rng(2).random((11, 9, 1, 2)) < 0.15)},
}  # fmt: skip


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_central_differences(options, both):
    """Of the scalar products of the output and the log-sum-exp with their gradients, in float64; rows of -inf are ignored."""
    q, k, v, dout, dstats = arrays()
    forward = {name: x for name, x in options.items() if not name.startswith("return")}

    def loss():
        out, stats = attention(q, k, v, return_stats=True, **forward)
        return both * (out * dout).sum() + (np.where(np.isneginf(stats), 0, stats) * dstats).sum()

    out, stats = attention(q, k, v, return_stats=True, **forward)
    given = np.where(np.isneginf(stats), np.nan, dstats).astype(np.float64, order="F")
    found = attention_backward(dout if both else None, q, k, v, out, stats, dstats=given, **options)
    extra = [options[name.removeprefix("return_d")] for name in options if name.startswith("return_d")]
    rng, step = np.random.default_rng(5), 1e-6
    for x, gradient in zip([q, k, v, *extra], found, strict=True):
        assert np.isfinite(gradient).all()
        for _ in range(6):
            place, values = tuple(rng.integers(n) for n in x.shape), []
            for sign in (1, -1):
                own, x[place] = x[place], x[place] + sign * step
                values.append(loss())
                x[place] = own
            assert abs((values[0] - values[1]) / (2 * step) - gradient[place]) < 1e-6
    if not both:
        assert not found[2].any()


def test_the_reference_has_the_same_gradients():
    """Also of packed sequences and of sinks."""
    q, k, v, dout, dstats = arrays()
    options = {"causal": True, "sinks": np.linspace(-1, 2, 4), "return_dsinks": True}
    out, stats = attention(q, k, v, return_stats=True, causal=True, sinks=options["sinks"])
    found = attention_backward(dout, q, k, v, out, stats, dstats=dstats, **options)
    for one, other in zip(found, reference.attention_backward(dout, q, k, v, dstats=dstats, **options), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-12)
    starts = np.array([0, 4, 9], np.int32)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    one = [np.asfortranarray(x[:, :, :9, 0]) for x in (q, k, v, dout)]
    longest, dstats = {"max_seqlen_q": 5, "max_seqlen_kv": 5}, np.asfortranarray(dstats[..., 0].T)
    out, stats = attention(*one[:3], return_stats=True, **packed, **longest)
    found = attention_backward(one[3], *one[:3], out, stats, dstats=dstats, **packed, **longest)
    for a, b in zip(found, reference.attention_backward(one[3], *one[:3], dstats=dstats, **packed), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)


@pytest.mark.parametrize(
    "way", ["pullback", "bshd", "no batch axis", "prepared", "compute_dtype", "FP8", "block mask", "into arrays"]
)
def test_every_way_to_call(way):
    """They have the gradients of the reference."""
    q, k, v, dout, dstats = arrays(dtype=np.float32)
    atol, options = 2e-5, {}
    expected = reference.attention_backward(dout, q, k, v, dstats=dstats)
    if way in ("compute_dtype", "FP8"):
        options, atol = (
            {"compute_dtype": "float16" if way == "compute_dtype" else "float8_e4m3fn"},
            0.02 if way == "compute_dtype" else 1.0,
        )
    if way == "FP8":
        q, k, v, dout = (x.astype(ml_dtypes.bfloat16) for x in (q, k, v, dout))
    if way == "block mask":
        options = {"block_mask": cupy_sdpa.BlockMask.from_blocks(np.ones((1, 1, 1, 1), bool), 9, 11)}
    if way == "prepared":
        out, stats = attention(q, k, v, return_stats=True)
        call = prepare(q, k, v, backward=True, dstats=dstats)
        found = call(dout, q, k, v, out, stats, dstats=dstats)
        again = call(2 * dout, q, k, v, out, stats, dstats=2 * dstats)
        np.testing.assert_allclose(again[0], 2 * found[0], atol=1e-5)
        with pytest.raises(ValueError, match=r"dstats|prepared"):
            call(dout, q, k, v, out, stats)
    elif way == "into arrays":
        out, stats = attention(q, k, v, return_stats=True)
        targets = {f"d{name}": np.full_like(x, np.nan) for name, x in zip("qkv", (q, k, v), strict=True)}
        found = attention_backward(dout, q, k, v, out, stats, dstats=dstats, **targets)
        assert all(x is y for x, y in zip(found, targets.values(), strict=True))
    elif way == "bshd":
        own = [np.ascontiguousarray(x.transpose(3, 2, 1, 0)) for x in (q, k, v, dout)]
        (_, stats), pull = attention_vjp(*own[:3], layout="bshd", return_stats=True)
        assert stats.shape == (2, 4, 9)
        found = [x.transpose(3, 2, 1, 0) for x in pull(own[3], dstats.T)]
    elif way == "no batch axis":
        found = []
        for b in range(2):
            _, pull = attention_vjp(*(x[..., b] for x in (q, k, v)), return_stats=True)
            found.append(pull(dout[..., b], dstats[..., b]))
        found = [np.stack(x, axis=-1) for x in zip(*found, strict=True)]
    else:
        (out, stats), pull = attention_vjp(q, k, v, return_stats=True, **options)
        assert out.shape == dout.shape
        assert stats.shape == dstats.shape
        found = pull(dout, dstats)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_allclose(x.astype(np.float64), y, atol=atol)


def test_head_dims_at_the_limit():
    """The rows of dL may need head dims that a GPU does not have; gradients of the log-sum-exp alone need none."""
    shape, rows = (128, 2, 256, 1), np.zeros((256, 2, 1), np.float32, order="F")
    x = np.zeros(shape, np.float16, order="F")
    gpus = {"gpu": "A100", "cudnn": "9.19"}
    assert explain(x, x, x, backward=True, **gpus)
    report = explain(x, x, x, backward=True, dstats=rows, **gpus)
    assert not report
    assert "128 and 136" in report.reasons[0]
    assert "attention_backward(None, ..., dstats=dstats)" in report.reasons[-1]
    assert explain(x, x, x, backward=True, dstats=rows, gpu="H200", cudnn="9.19")
    alone = cupy_sdpa.explain_function(attention_backward, None, x, x, x, x, rows, dstats=rows, **gpus)
    assert alone
    assert alone.problem.v.shape[0] == 8


def test_the_limit_on_a_gpu(fake):
    """The error names the head dims of the call, and what computes the same."""
    x = fake.asarray(np.zeros((256, 1, 8, 1), np.float16, order="F"))
    out, stats = attention(x, x, x, return_stats=True)
    with pytest.raises(Unsupported, match=r"head dims 256 and 256 .* 264.*attention_backward\(None, \.\.\., dstats=dstats\)"):
        attention_backward(x, x, x, x, out, stats, dstats=stats)
    dq, _, _ = attention_backward(None, x, x, x, out, stats, dstats=stats)
    assert not dq.get().any()


@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"causal": True}])
def test_problems_of_shapes(options):
    """problem(dstats=True) is the problem that a call plans."""
    x, rows = np.zeros((64, 2, 96, 1), np.float16, order="F"), np.zeros((96, 2, 1), np.float32, order="F")
    made = cupy_sdpa.problem(x, x, x, backward=True, dstats=True, **options)
    assert made == explain(x, x, x, backward=True, dstats=rows, gpu="H200", cudnn="9.19", **options).problem
    assert made.v.shape[0] == (80 if options.get("deterministic") else 72)
    assert made.q.shape[0] == (80 if options.get("deterministic") else 64)


@pytest.mark.parametrize("packed", [False, True])
@every_engine
def test_sinks_without_keys(packed, engine):
    """The log-sum-exp of a row without keys is the sink, whose gradient is then dL; rows of the padding have no gradient."""
    shape = (16, 2, 5) if packed else (16, 2, 5, 3)
    q, k = engine.normal(1, *shape), engine.normal(2, *shape)[:, :, :0]
    if packed:
        starts = engine.put(np.array([[0, 2, 4], [0, 0, 0]], np.int32))
        options = {"cu_seqlens_q": starts[0], "cu_seqlens_kv": starts[1], "max_seqlen_q": 3, "max_seqlen_kv": 3}
    else:
        lengths = engine.put(np.array([5, 2, 0], np.int32))
        options = {"seq_lens_q": lengths, "seq_lens_kv": engine.xp.zeros_like(lengths)}
    options |= {"sinks": engine.normal(3, 2, dtype=np.float32), **engine.options}
    out, stats = attention(q, k, k, return_stats=True, **options)
    dstats = engine.put(np.full(stats.shape, 0.5, np.float32, order="F"))
    *_, dsinks = attention_backward(None, q, k, k, out, stats, dstats=dstats, return_dsinks=True, **options)
    np.testing.assert_array_equal(engine.get(dsinks), 0.5 * (4 if packed else 7))


def test_two_numbers_of_sixteen_bits(engine):
    """dL has more digits than one number of the dtype: the sum over keys of the gradients of its scores is dL."""
    q, k = engine.normal(1, 16, 1, 5, 1), engine.normal(2, 16, 1, 3, 1)
    k[0] = 1  # so that the first row of dq is the sum, times the scale
    out, stats = attention(q, k, k, scale=1.0, return_stats=True)
    dstats = engine.put(np.full((5, 1, 1), 1 + 2.0**-11, np.float32, order="F"))
    bias = engine.put(np.zeros((3, 5, 1, 1), np.float32, order="F"))
    *_, dbias = attention_backward(None, q, k, k, out, stats, dstats=dstats, scale=1.0, bias=bias, return_dbias=True)
    tolerance = 1e-6 if engine.name == "numpy" else 4e-4  # the gradients of the scores have 16 bits
    np.testing.assert_allclose(engine.get(dbias).sum(axis=0)[:, 0, 0], 1 + 2.0**-11, rtol=tolerance)


def parts_of(engine, *, packed, sinks, count=3):
    """Outputs and log-sum-exps of parts, one row of which is -inf, gradients of the merged results, and sinks; and as float64."""
    shape = (16, 3, 7) if packed else (16, 3, 7, 2)
    outs = [engine.normal([1, i], *shape) for i in range(count)]
    rows = [
        np.random.default_rng([2, i]).standard_normal((3, 7) if packed else (7, 3, 2)).astype("f4", order="F")
        for i in range(count)
    ]
    rows[0][0] = -np.inf
    for x in rows:
        x[..., -1] = -np.inf
    dout, dstats = engine.normal(3, *shape), engine.normal(4, *rows[0].shape, dtype=np.float32)
    return outs, engine.put(rows), dout, dstats, engine.normal(5, 3, dtype=np.float32) if sinks else None


@pytest.mark.parametrize("count", [1, 3, 20])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@every_engine
def test_gradients_of_merged_parts(packed, sinks, count, engine):
    """They agree with central differences of merge in float64, also for the sinks; 0 where a part has no key."""
    *given, of_sinks = parts_of(engine, packed=packed, sinks=sinks, count=count)
    found = merge_backward(*given, sinks=of_sinks, return_dsinks=sinks, **engine.options)
    outs, rows, dout, dstats = ([np.asfortranarray(engine.get(x), np.float64) for x in xs] if isinstance(xs, list) else
                                engine.get(xs).astype(np.float64) for xs in given)  # fmt: skip
    own_sinks = None if of_sinks is None else engine.get(of_sinks).astype(np.float64)

    def loss():
        out, stats = merge(outs, rows, sinks=own_sinks, return_stats=True)
        return (out * dout).sum() + (np.where(np.isneginf(stats), 0, stats) * dstats).sum()

    rng, step = np.random.default_rng(6), 1e-6
    pairs = [*zip(outs + rows, [*found[0], *found[1]], strict=True), *([(own_sinks, found[2])] if sinks else [])]
    for x, gradient in pairs:
        gradient = engine.get(gradient)
        assert gradient.shape == x.shape
        for _ in range(4):
            place = tuple(rng.integers(n) for n in x.shape)
            if np.isneginf(x[place]):
                assert gradient[place] == 0
                continue
            values = []
            for sign in (1, -1):
                own, x[place] = x[place], x[place] + sign * step
                values.append(loss())
                x[place] = own
            assert abs((values[0] - values[1]) / (2 * step) - gradient[place]) < 3 * engine.tolerance


@pytest.mark.parametrize("empty", [{"queries": 0}, {"batch": 0}], ids=["queries", "batch"])
@every_engine
def test_gradients_of_merged_parts_without_rows(empty, engine):
    """The gradient of the sinks is 0 if there are no queries or no sequences."""
    queries, batch = empty.get("queries", 3), empty.get("batch", 2)
    out, stats = engine.normal(1, 16, 4, queries, batch), engine.normal(2, queries, 4, batch, dtype=np.float32)
    sinks = engine.normal(3, 4, dtype=np.float32)
    given = {"sinks": sinks, "return_dsinks": True, **engine.options}
    douts, of_stats, dsinks = merge_backward([out, out], [stats, stats], out, stats, **given)
    assert [x.shape for x in (*douts, *of_stats)] == [out.shape, out.shape, stats.shape, stats.shape]
    np.testing.assert_array_equal(engine.get(dsinks), np.zeros(4))


@every_engine
def test_attention_in_parts_has_the_gradients_of_one_call(engine):
    """The gradients of merged parts, through their outputs and log-sum-exps, equal the gradients of one call over all keys."""
    q, dout, dstats = engine.normal(1, 16, 2, 9, 2), engine.normal(2, 16, 2, 9, 2), engine.normal(3, 9, 2, 2, dtype=np.float32)
    k, v = engine.normal(4, 16, 2, 30, 2), engine.normal(5, 16, 2, 30, 2)
    whole = [(k, v), *([engine.xp.asfortranarray(x[:, :, part]) for x in (k, v)] for part in (slice(11), slice(11, None)))]
    results = [attention(q, *part, return_stats=True, **engine.options) for part in whole]
    douts, of_stats = merge_backward(*zip(*results[1:], strict=True), dout, dstats, **engine.options)
    one, *others = (
        attention_backward(do, q, *part, *result, dstats=dl, **engine.options)
        for part, result, do, dl in zip(whole, results, [dout, *douts], [dstats, *of_stats], strict=True)
    )
    one, others = engine.get(one), [engine.get(x) for x in others]
    of_parts = (sum(np.float64(x[0]) for x in others), *(np.concatenate([x[n] for x in others], axis=2) for n in (1, 2)))
    for expected, found in zip(one, of_parts, strict=True):
        np.testing.assert_allclose(np.float64(found), np.float64(expected), atol=4 * engine.tolerance)
