"""Arrays that functions read at computed indices: both passes, on every engine; ranges, memory and repeated calls."""

import numpy as np
import pytest
from engines import every_engine, numbers, one_in

from cupy_sdpa import attention, attention_backward, attention_vjp, explain, zoo
from cupy_sdpa.check.functions import MASKS, SCORES

D, H, SQ, SKV, B = 8, 4, 21, 18, 2
TABLES = [name for name, function in SCORES.items() if function.is_computed]
MASK_TABLES = [name for name, function in MASKS.items() if function.is_computed]
#: What a score function is combined with.
OTHERS = ("bucket", "jvp", "packed", "paged", "parallel", "preallocated", "seq_lens_kv", "weight_sums")


def near(score, b, h, q_idx, kv_idx, table):
    """A limited distance."""
    return score + table[h, np.clip(q_idx - kv_idx, -4, 4) + 4]


def unlimited(score, b, h, q_idx, kv_idx, table):
    """Of 9 elements, indices beyond both ends."""
    return score + table[h, q_idx - kv_idx]


def by_segment(score, b, h, q_idx, kv_idx, table, segment, flag):
    """Indices that are computed from elements of other arrays, some negative."""
    return score * table[b, segment[b, q_idx] - segment[b, kv_idx] - 1, np.where(flag[h], -1 - h // 2, 0)]


def qkv(engine, skv=SKV):
    return tuple(engine.normal([skv, n], D, H, length, B) for n, length in enumerate((SQ, skv, skv)))


def table(engine, seed=3, dtype=np.float32):
    return engine.put(np.random.default_rng(seed).standard_normal((H, 9)).astype(dtype))


@every_engine
@pytest.mark.parametrize("name", one_in(2, TABLES))
def test_both_passes(name, engine):
    """The output and all gradients agree with the reference, which reads with numpy's indices."""
    options = {"score_mod": (name, "float32"), "causal": "top_left", "return_dtensors": True}
    engine.agrees(engine.case(b=B, hq=H, hkv=2, sq=SQ, skv=SKV, d=D, dv=D, backward=True, options=options))


@every_engine
@pytest.mark.parametrize("name", MASK_TABLES)
def test_masks(name, engine):
    """Mask functions also read at computed indices."""
    engine.agrees(engine.case(b=B, hq=H, hkv=2, sq=70, skv=60, d=D, dv=D, options={"mask_mod": (name, "bool")}))


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("number", numbers(6, quick=1, sweep=3))
def test_random_problems(number, other, engine):
    """Together with the other options."""
    case = engine.draw({"score_mod", other}, number).without("block_mask")
    name = TABLES[(number + OTHERS.index(other)) % len(TABLES)]
    engine.agrees(case.with_(options={**case.options, "score_mod": (name, "float32")}), refused=True)


@every_engine
def test_indices_from_other_arrays(engine):
    """Indices are computed from elements of arrays of integers and conditions; the elements are those of numpy."""
    rng, (q, k, v) = np.random.default_rng(0), qkv(engine, SQ)
    values, segment = rng.random((B, 6, 3)).astype(np.float32) + 0.5, rng.integers(0, 3, (B, SQ)).astype(np.int32)
    flag = np.array([True, False, True, False])
    b, h, i, j = np.ix_(*map(np.arange, (B, H, SQ, SQ)))
    elements = by_segment(1, b, h, i, j, values, segment, flag)
    wanted = attention(
        q, k, v, score_mod=lambda s, b, h, i, j, x: s * x[b, h, i, j], tensors={"x": engine.put(elements)}, **engine.options
    )
    tensors = engine.put({"table": values, "segment": segment, "flag": flag})
    out = attention(q, k, v, score_mod=by_segment, tensors=tensors, **engine.options)
    np.testing.assert_array_equal(engine.get(out), engine.get(wanted))


@every_engine
def test_an_index_out_of_range(engine):
    """numpy raises, also in the interpreter on CuPy; on the GPU the row is NaN. Negative indices count from the end."""
    q, k, v = qkv(engine)
    options = {"score_mod": unlimited, "tensors": {"table": table(engine)}, **engine.options}
    if not engine.on_cudnn:
        with pytest.raises(IndexError, match=r"length 9 along axis 1.*from -17 to 20.*np\.clip"):
            attention(q, k, v, **options)
        return
    distance = np.arange(SQ)[:, None] - np.arange(SKV)
    inside = ((distance >= -9) & (distance < 9)).all(axis=1)
    out = engine.get(attention(q, k, v, **options))
    assert (np.isnan(out).all(axis=(0, 1, 3)) == ~inside).all()
    subtracted = engine.get(
        attention(q, k, v, **options | {"score_mod": lambda *args, table: 2 * args[0] - unlimited(*args, table)})
    )
    assert (np.isnan(subtracted).all(axis=(0, 1, 3)) == ~inside).all()
    near_diagonal = engine.get(attention(q, k, v, window=(8, 9), **options))
    assert np.isfinite(near_diagonal).all(), "masked pairs have no effect"


def test_gradients_do_not_depend_on_the_order_of_sums(engine):
    """Equal calls give equal bits, and a gradient of the output that is not finite makes the gradient of the array NaN."""
    q, k, v = qkv(engine)
    tensors = {"table": table(engine)}
    out, stats = attention(q, k, v, score_mod=near, tensors=tensors, return_stats=True)
    dout = engine.normal(9, *out.shape)
    options = {"score_mod": near, "tensors": tensors, "return_dtensors": "table", "deterministic": True}
    first, again = (engine.get(attention_backward(dout, q, k, v, out, stats, **options)[-1]["table"]) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_allclose(first.sum(axis=1), 0, atol=20 * engine.tolerance)  # the rows of dS sum to 0
    dout[0, 0, 0, 0] = np.inf
    assert not np.isfinite(engine.get(attention_backward(dout, q, k, v, out, stats, **options)[-1]["table"])[0]).all()


def test_an_array_that_is_read_twice():
    """Its gradient is the sum over both reads, in the dtype of the array."""
    q, k, v = (np.random.default_rng(n).standard_normal((D, H, n, B)).copy("F") for n in (SQ, SKV, SKV))
    table = np.random.default_rng(3).standard_normal((H, 9)).astype(np.float32)
    distances, places = np.clip(np.arange(SQ)[:, None] - np.arange(SKV), -4, 4) + 4, np.arange(SKV) % 9

    def gradients(score_mod, tensors):
        out, pullback = attention_vjp(q, k, v, score_mod=score_mod, tensors=tensors, return_dtensors=True)
        return pullback(out)[-1]

    found = gradients(lambda s, b, h, i, j, t: s + t[h, np.clip(i - j, -4, 4) + 4] + t[h, j % 9], {"t": table})["t"]
    arrays = {"x": table[:, distances], "y": table[:, places]}
    parts, wanted = gradients(lambda s, b, h, i, j, x, y: s + x[h, i, j] + y[h, j], arrays), np.zeros((H, 9))
    for head in range(H):
        np.add.at(wanted[head], distances, parts["x"][head])
        np.add.at(wanted[head], places, parts["y"][head])
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_memory_is_reported(engine):
    """``explain`` shows the step, and the array with the axes that the indices depend on."""
    q, k, v = qkv(engine)
    tensors = {"table": table(engine)}
    report = explain(q, k, v, score_mod=near, tensors=tensors)
    assert report
    assert report.temporary_bytes == -(-SKV * SQ * H * 4 // 256) * 256
    assert any("read_elements" in step and f"{SKV}x{SQ}x{H}x1 float32" in step for step in report.steps)
    gradients = explain(q, k, v, score_mod=near, tensors=tensors, backward=True, return_dtensors="table")
    assert gradients.temporary_bytes <= SKV * SQ * H * (4 + 4 + 2 * engine.on_cudnn) + 4096
    of_keys = explain(q, k, v, score_mod=lambda s, b, h, i, j, table: s + table[0, j // 2], tensors=tensors)
    assert any(f"{SKV}x1x1x1 float32" in step for step in of_keys.steps)


@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 256), (64, 128), (8, 20)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_of_t5(bidirectional, buckets, max_distance):
    """They are those of the formula with logarithms in float32, as implementations of T5 compute it."""
    distance = np.arange(-1000, 1001)
    side = buckets // 2 if bidirectional else buckets
    exact = side // 2
    n = abs(distance) if bidirectional else np.maximum(-distance, 0)
    large = np.log(np.maximum(n, 1).astype(np.float32) / np.float32(exact)) / np.float32(np.log(max_distance / exact))
    large = np.minimum(exact + (large * np.float32(side - exact)).astype(int), side - 1)
    wanted = np.where(n < exact, n, large) + (distance > 0) * side * bidirectional
    np.testing.assert_array_equal(zoo.t5_bucket(distance, bidirectional, buckets, max_distance), wanted)


def test_the_index_of_swin():
    """It is the sum of the distances along both axes, as the reference implementation of Swin computes it."""
    height, width = 3, 4
    y, x = (axis.reshape(-1) for axis in np.mgrid[:height, :width])
    index = (y[:, None] - y + height - 1) * (2 * width - 1) + (x[:, None] - x + width - 1)
    q, k, v = (np.random.default_rng(n).standard_normal((D, H, height * width, B)).copy("F") for n in range(3))
    values = np.random.default_rng(3).standard_normal(((2 * height - 1) * (2 * width - 1), H))
    bias = np.asfortranarray(values[index].transpose(1, 0, 2)[..., None])
    out = attention(q, k, v, score_mod=zoo.swin(height, width), tensors={"table": values})
    np.testing.assert_allclose(out, attention(q, k, v, bias=bias), rtol=1e-12, atol=1e-12)
