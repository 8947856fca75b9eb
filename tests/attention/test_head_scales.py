"""A scale for each head: ``scale=`` as an array, and its gradient, ``return_dscale=``."""

import numpy as np
import pytest
from engines import every_engine, numbers

import cupy_sdpa
from cupy_sdpa import attention, attention_backward, attention_vjp, explain, prepare


@pytest.mark.parametrize("number", numbers(40, quick=8))
@pytest.mark.parametrize("name", ["head_scales", "return_dscale"])
@every_engine
def test_random_problems(name, number, engine):
    """They agree with the reference with any other options."""
    engine.agrees(engine.draw({name}, number), refused=True)


SCALES = np.array([0.5, 0, -0.3, 1.0])


def arrays(dtype=np.float64):
    """q, k, v and the gradients of the output and of the log-sum-exp."""
    rng = np.random.default_rng(0)
    shapes = (8, 4, 9, 2), (8, 2, 11, 2), (8, 2, 11, 2), (8, 4, 9, 2), (9, 4, 2)
    return [np.asfortranarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


#: Options whose gradients are compared with differences.
OPTIONS = {
    "no option": {}, "softcap": {"softcap": 1.0}, "sinks": {"sinks": np.linspace(-1, 2, 4)},
    "a score function": {"score_mod": lambda score, b, h, i, j: score * score * 0.3},
    "lengths": {"seq_lens_q": np.array([9, 4], np.int32), "seq_lens_kv": np.array([0, 7], np.int32)},
    "a block mask": {"block_mask": cupy_sdpa.BlockMask.from_blocks(np.ones((1, 1, 1, 1), bool), 9, 11)},
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_central_differences(options):
    """Of q and of the scales, one of which is 0, through the output and the log-sum-exp, in float64."""
    q, k, v, dout, dstats = arrays()
    scale = SCALES.copy()

    def loss():
        out, stats = attention(q, k, v, scale=scale, return_stats=True, **options)
        return (out * dout).sum() + (np.where(np.isneginf(stats), 0, stats) * dstats).sum()

    (_, _), pullback = attention_vjp(q, k, v, scale=scale.copy(), return_stats=True, return_dscale=True, **options)
    dq, _, _, dscale = pullback(dout, dstats)
    assert (dscale.shape, dscale.dtype) == ((4,), np.float64)
    rng, step = np.random.default_rng(5), 1e-6
    for x, gradient in ((q, dq), (scale, dscale)):
        for number in range(8):
            place = (number % 4,) if x is scale else tuple(rng.integers(n) for n in x.shape)
            values = []
            for sign in (1, -1):
                own, x[place] = x[place], x[place] + sign * step
                values.append(loss())
                x[place] = own
            assert abs((values[0] - values[1]) / (2 * step) - gradient[place]) < 1e-6


@every_engine
def test_equal_scales_are_one_scale(engine):
    """Powers of two have the results of a number."""
    q, k, v, dout = (engine.normal(seed, 16, heads, 20, 2) for seed, heads in enumerate((4, 2, 2, 4)))
    results = []
    for scale in (0.25, engine.put(np.full(4, 0.25, np.float32))):
        out, stats = attention(q, k, v, scale=scale, return_stats=True, **engine.options)
        results.append(engine.get((out, stats, *attention_backward(dout, q, k, v, out, stats, scale=scale, **engine.options))))
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), atol=engine.tolerance)


def test_order_of_the_results():
    """The gradient of the scale comes after the gradients of the bias and the sinks, and before the gradients of tensors."""
    q, k, v, dout, _ = arrays(np.float32)
    options = {
        "scale": SCALES.astype("f4"), "sinks": np.ones(4, "f4"), "bias": np.zeros((11, 9, 4, 1), "f4", order="F"),
        "score_mod": lambda score, b, h, i, j, x: score * x[h], "tensors": {"x": np.ones(4, "f4")},
    }  # fmt: skip
    requests = {"return_dbias": True, "return_dsinks": True, "return_dscale": True, "return_dtensors": True}
    out, stats = attention(q, k, v, return_stats=True, **options)
    *_, dbias, dsinks, dscale, dtensors = attention_backward(dout, q, k, v, out, stats, **options, **requests)
    assert dbias.shape == (11, 9, 4, 1)
    assert dsinks.shape == dscale.shape == dtensors["x"].shape == (4,)
    # a factor of the scores and a scale have gradients in inverse proportion
    np.testing.assert_allclose((options["scale"] * dscale), dtensors["x"], atol=1e-4)


@pytest.mark.parametrize("way", ["bshd", "no batch axis", "prepared", "compute_dtype", "pages"])
def test_every_way_to_call(way):
    """They have the results of q times the scale."""
    q, k, v, dout, _ = arrays(np.float32)
    scale = SCALES.astype(np.float32)
    scaled = np.asfortranarray(q * scale[:, None, None])
    expected, pull = attention_vjp(scaled, k, v, scale=1.0)
    dq = pull(dout)[0] * scale[:, None, None]
    atol, gradient = 1e-5, None
    if way == "bshd":
        own = [np.ascontiguousarray(x.transpose(3, 2, 1, 0)) for x in (q, k, v, dout)]
        out, pull = attention_vjp(*own[:3], layout="bshd", scale=scale, return_dscale=True)
        out, gradient = (x.transpose(3, 2, 1, 0) for x in (out, pull(own[3])[0]))
    elif way == "no batch axis":
        pairs = [attention_vjp(*(x[..., b] for x in (q, k, v)), scale=scale, return_dscale=True) for b in range(2)]
        out = np.stack([x for x, _ in pairs], axis=-1)
        gradient = np.stack([pull(dout[..., b])[0] for b, (_, pull) in enumerate(pairs)], axis=-1)
    elif way == "prepared":
        out = prepare(q, k, v, scale=scale)(q, k, v)
        assert not np.array_equal(out, prepare(q, k, v, scale=scale)(q, k, v, scale=2 * scale))
    elif way == "compute_dtype":
        out, pull = attention_vjp(q, k, v, scale=scale, compute_dtype="float16", return_dscale=True)
        gradient, atol = pull(dout)[0], 1e-2
    else:
        pages = [np.asfortranarray(x.reshape(8, 2, 11, 2, order="F")) for x in (k, v)]
        table = {"page_table": np.array([[0, 1]], np.int32), "seq_lens_kv": np.array([11, 11], np.int32)}
        out = attention(q, *pages, scale=scale, **table)
    np.testing.assert_allclose(out, expected, atol=atol)
    if gradient is not None:
        np.testing.assert_allclose(gradient, dq, atol=atol)


def test_the_report_has_the_step():
    """The step that multiplies q, and the scale 1 of the problem."""
    q, k, v, _, _ = arrays(np.float16)
    report = explain(q, k, v, scale=SCALES.astype("f4"), gpu="H200", cudnn="9.19")
    assert report
    assert "scale_heads" in report.steps[0]
    problem = cupy_sdpa.problem(q, k, v, scale=SCALES.astype("f4"))
    assert problem == report.problem
