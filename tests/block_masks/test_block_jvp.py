"""Directional derivatives with a block mask, against those with the dense mask and central differences."""

import numpy as np
import pytest
from planner import library_version, plan_problem

from cupy_sdpa import BlockMask, Unsupported, attention, attention_jvp, block_mask, explain, jvp_problems, widen
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.support.why_not import why_not

TABLE = np.array([[True, False, True], [True, True, False], [False, True, True]])
MASKS = {
    "packed": lambda: block_mask(lambda b, h, i, j: i // 100 == j // 100, 300, 300),
    "slices": lambda: block_mask(lambda b, h, i, j: (i >= j) | (j < 70), 300, 300),
    "full blocks": lambda: BlockMask.from_blocks(TABLE, 300, 300),
    "partial blocks": lambda: BlockMask.from_blocks(TABLE, 300, 300, mask_mod=lambda b, h, i, j: (i + j) % 3 > 0),
    "heads": lambda: BlockMask.from_blocks(np.stack([TABLE, TABLE.T], axis=2)[..., None], 300, 300),
    "rows without keys": lambda: block_mask(lambda b, h, i, j: (j < 130) & (i != 200) & (i < 256), 300, 300),
}
OPTIONS = {
    "": {},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": np.array([0.5, -1.0], np.float32)},
    "score function": {"score_mod": lambda s, b, h, i, j: s - 0.01 * (i - j) * (i - j) / 300},
}


def drawn(dtype, d=8, dv=16, seed=0):
    """q, k, v and their tangents."""
    rng = np.random.default_rng(seed)
    shapes = [(d, 2, 300, 1), (d, 1, 300, 1), (dv, 1, 300, 1)] * 2
    return [np.asfortranarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


@pytest.mark.parametrize("given", ["qkv", "q", "kv", "v"])
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_derivatives_are_those_with_the_dense_mask(name, option, given):
    """For every method, with tangents of some arrays, and with options."""
    mask = MASKS[name]()
    *arrays, dq, dk, dv = drawn("float64")
    tangents = {f"d{n}": x for n, x in zip("qkv", (dq, dk, dv), strict=True) if n in given}
    options = OPTIONS[option]
    expected = attention_jvp(*arrays, **tangents, mask=mask.to_dense(), return_stats=True, **options)
    got = attention_jvp(*arrays, **tangents, block_mask=mask, return_stats=True, **options)
    for x, y in zip(got, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", MASKS)
def test_derivatives_are_central_differences(name):
    """In float64; a wrong direction is found."""
    mask = MASKS[name]()
    q, k, v, dq, dk, dv = drawn("float64")
    _, got = attention_jvp(q, k, v, dq, dk, dv, block_mask=mask)
    plus, minus = (attention(q + t * dq, k + t * dk, v + t * dv, block_mask=mask) for t in (1e-5, -1e-5))
    np.testing.assert_allclose(got, (plus - minus) / 2e-5, atol=1e-6)
    assert abs(attention_jvp(q, k, v, dq, -dk, dv, block_mask=mask)[1] - got).max() > 1e-3


@pytest.mark.parametrize("name", MASKS)
def test_on_the_fake_cupy(name, fake):
    """Repeated, into arrays full of NaN, and with arrays that were widened before."""
    mask, arrays = MASKS[name](), drawn("float16", 16, 16)
    wide = [x.astype("f8") for x in arrays]
    expected = attention_jvp(*wide, mask=mask.to_dense())
    on_gpu = [fake.asarray(x) for x in arrays]
    widened = widen(*on_gpu, block_mask=mask)
    for number in range(4):
        results = {n: fake.asarray(np.full((16, 2, 300, 1), np.nan, "f2", order="F")) for n in ("out", "dout")}
        if number % 2:
            got = attention_jvp(*on_gpu[:3], widened=widened, block_mask=mask)
        else:
            got = attention_jvp(*on_gpu, block_mask=mask, deterministic=number == 2, **results)
            assert got[0] is results["out"]
        for x, y in zip(got, expected, strict=True):
            np.testing.assert_allclose(x.get(), y, atol=4e-2, rtol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["qkv", "q", "kv", "v"])
@pytest.mark.parametrize("name", MASKS)
def test_on_the_gpu(name, given, cupy):
    """With cuDNN, against the dense mask in float64; repeated until the passes are captured."""
    mask, arrays = MASKS[name](), drawn("float16", 64, 64)
    wide = [x.astype("f8") for x in arrays]
    pick = lambda values: {f"d{n}": x for n, x in zip("qkv", values, strict=True) if n in given}  # noqa: E731
    expected = attention_jvp(*wide[:3], **pick(wide[3:]), mask=mask.to_dense())
    on_gpu = [cupy.asarray(x) for x in arrays]
    for _ in range(5):
        got = attention_jvp(*on_gpu[:3], **pick(on_gpu[3:]), block_mask=mask)
        for x, y in zip(got, expected, strict=True):
            assert abs(x.get() - y).max() <= 2e-2 * max(1, abs(y).max())


@pytest.mark.in_turn(3)
@pytest.mark.cudnn
@pytest.mark.parametrize("name", MASKS)
def test_every_pass_is_planned(name, planned, planner):
    """On Hopper; explain shows all of them."""
    mask, arrays = MASKS[name](), drawn("float16", 64, 64)
    report = explain(*arrays[:3], jvp=True, block_mask=mask, gpu="h200")
    assert report, report
    for problem in jvp_problems(*arrays[:3], block_mask=mask):
        assert not why_not(problem, planner.call(library_version), 90)
        assert isinstance(plan := planned(plan_problem, problem, "h200"), PlanInfo), plan


def test_other_options_are_refused_before_anything_is_written():
    """As in attention."""
    q, k, v, dq, *_ = drawn("float32")
    out = np.full((16, 2, 300, 1), 3, np.float32, order="F")
    with pytest.raises(ValueError, match="causal and block_mask"):
        attention_jvp(q, k, v, dq, block_mask=MASKS["packed"](), causal=True, out=out)
    with pytest.raises(TypeError, match="must be a cupy_sdpa"):
        attention_jvp(q, k, v, dq, block_mask=np.ones(3), out=out)
    with pytest.raises(ValueError, match="block_mask is for 256 queries"):
        attention_jvp(q, k, v, dq, block_mask=BlockMask.from_blocks(np.ones((2, 2), bool)), out=out)
    assert (out == 3).all()


@pytest.mark.parametrize("name", MASKS)
def test_explained_with_a_score_function_on_the_fake_cupy(name, fake):
    """explain takes what the call takes: arrays of the GPU in tensors."""
    q, k, v, *_ = (fake.asarray(x) for x in drawn("float16", 16, 16))
    rows = fake.asarray(np.ones((2, 300), np.float32))
    options = {"score_mod": lambda s, b, h, i, j, rows: s + rows[h, i], "tensors": {"rows": rows}}
    report = explain(q, k, v, jvp=True, block_mask=MASKS[name](), **options)
    assert report
    assert len(report.launches) >= 2
    shapes = [(16, 2, 300, 1), (16, 1, 300, 1), (16, 1, 300, 1)]
    of_shapes = jvp_problems(*shapes, dtype="float16", block_mask=MASKS[name](), **{**options, "tensors": {"rows": (2, 300)}})
    assert [str(problem) for problem in of_shapes] == [str(launch.problem) for launch in report.launches]


def test_every_form_is_planned_before_anything_is_written(fake):
    """A derivative whose second pass cannot run writes no output, also after one that can run."""
    mask = MASKS["full blocks"]()
    q, k, v = (fake.asarray(np.ones((d, 1, 300, 1), np.float16, order="F")) for d in (160, 160, 16))
    attention_jvp(q, k, v, dv=v, block_mask=mask)
    out = fake.asarray(np.full((16, 1, 300, 1), 3, np.float16, order="F"))
    with pytest.raises(Unsupported, match="gradients with head dims 320 and 320"):
        attention_jvp(q, k, v, q, k, block_mask=mask, out=out)
    assert (out.get() == 3).all()
