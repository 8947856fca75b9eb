"""Directional derivatives: random problems on three engines, the passes that compute them, and wide arrays."""

import numpy as np
import pytest
from engines import every_engine, numbers, on_cudnn

from cupy_sdpa import Unsupported, attention, attention_jvp, explain, jvp_problems, widen, zoo


def normals(engine, d=16, dv=16, sq=24, skv=24, hq=2, hkv=1, b=2):
    """q, k, v and their tangents."""
    shapes = [(d, hq, sq, b), (d, hkv, skv, b), (dv, hkv, skv, b)] * 2
    return [engine.normal([seed, 2], *shape) for seed, shape in enumerate(shapes)]


def given(tangents, letters):
    """The tangents of the arrays named by letters, by their argument."""
    return {f"d{letter}": x for letter, x in zip("qkv", tangents, strict=True) if letter in letters}


@every_engine
@pytest.mark.parametrize("number", numbers(24, quick=2, sweep=10))
def test_random_problems(number, engine):
    """Any sizes, options, layouts, tangents and head dims; results in arrays of the caller; wide arrays."""
    engine.agrees(engine.draw({"jvp"}, number), refused=True)


OPTIONS = ["score_mod", "mask_mod", "dropout", "packed", "softcap", "sinks", "window", "bias", "alibi_slopes", "seq_lens_kv"]


@pytest.mark.parametrize("number", numbers(4, quick=1))
@pytest.mark.parametrize("option", OPTIONS)
def test_random_problems_with_an_option(option, number, engine):
    """Each option changes the derivative of the scores, the weights, or the form of the passes."""
    engine.agrees(engine.draw({"jvp", option}, number, most=2), refused=True)


@pytest.mark.parametrize("options", [{}, {"softcap": 2.0}, {"sinks": "normal"}], ids=str)
@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 2), (1, 1, 1), (2, 1, 2), (1, 2, 0), (2, 2, 2)], ids=str)
def test_smallest_sizes(sizes, options, engine):
    """Lengths and batches of 0, 1 and 2."""
    sq, skv, b = sizes
    case = engine.case(d=8, dv=16, hq=2, sq=sq, skv=skv, b=b, options={"jvp": "qkv", **options})
    engine.agrees(case, refused=True)


def difference(arrays, tangents, step=1e-6, **options):
    """The derivative of the output by central differences in float64, in the direction of some tangents."""
    moves = [tangents.get(f"d{letter}", np.zeros_like(x)) for letter, x in zip("qkv", arrays, strict=True)]
    plus, minus = (
        attention(*(x + sign * step * dx for x, dx in zip(arrays, moves, strict=True)), **options) for sign in (1, -1)
    )
    return (plus - minus) / (2 * step)


@pytest.mark.parametrize("letters", ["qkv", "v"])
@pytest.mark.parametrize(
    "options",
    [
        {"causal": "bottom_right", "softcap": 3.0}, {"score_mod": zoo.softcap(1.5), "dropout_p": 0.3, "seed": 5},
        {"mask_mod": zoo.dilated(90, 2), "sinks": np.ones(4, "f4")}, {"score_mod": zoo.length_scaled(0.3), "mask_mod": zoo.causal},
    ],
    ids=["softcap", "dropout", "sinks", "functions"],
)  # fmt: skip
def test_it_is_the_limit_of_differences(options, letters):
    """Central differences of the forward pass; a wrong direction differs."""
    rng = np.random.default_rng(0)
    shapes = [(8, 4, 30, 2), (8, 2, 40, 2), (5, 2, 40, 2)] * 2
    q, k, v, *tangents = (np.asfortranarray(rng.standard_normal(shape)) for shape in shapes)
    chosen = given(tangents, letters)
    _, dout = attention_jvp(q, k, v, **chosen, **options)
    wanted = difference((q, k, v), chosen, **options)
    np.testing.assert_allclose(dout, wanted, rtol=0, atol=2e-5 * max(1, abs(wanted).max()))
    assert abs(attention_jvp(q, k, v, **(chosen | {"dv": -chosen["dv"]}), **options)[1] - wanted).max() > 1e-2


def test_the_tangent_of_a_bias_of_keys():
    """A bias per key is a head dim: q has 1, and k the bias, in an additional row; its tangent is the row's."""
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((8, h, s, 2))) for h, s in ((4, 10), (2, 12), (2, 12)))
    bias, dbias = (np.asfortranarray(rng.standard_normal((12, 1, 1, 2))) for _ in range(2))

    def row(x, values):
        return np.asfortranarray(np.concatenate([x, np.broadcast_to(values, (1, *x.shape[1:]))]))

    of_keys, moved = (8**0.5 * x[None, :, 0, 0].reshape(1, 1, 12, 2) for x in (bias, dbias))
    out, dout = attention_jvp(row(q, 1.0), row(k, of_keys), v, dk=row(0 * k, moved), scale=8**-0.5)
    np.testing.assert_allclose(out, attention(q, k, v, bias=bias), atol=1e-6)
    plus, minus = (attention(q, k, v, bias=bias + t * dbias) for t in (1e-4, -1e-4))
    np.testing.assert_allclose(dout, (plus - minus) / 2e-4, atol=1e-6)


@pytest.mark.parametrize(("d", "factor"), [(56, 2.0), (64, 40.0)])
def test_the_row_of_ones_removes_the_error_of_the_mean(d, factor):
    """Keys and values with a large mean: without the row, which does not fit with head dim 64, the error is larger."""
    rng = np.random.default_rng(0)
    q, k, v, *tangents = (
        rng.standard_normal((d, h, 100, 2)) + m for h, m in zip((4, 2, 2) * 2, (0, 3, 3, 0, 0, 0), strict=True)
    )
    arrays = [np.asfortranarray(x.astype("f2")) for x in (q, k, v, *tangents)]
    _, dout = attention_jvp(*arrays)
    _, truth = attention_jvp(*(x.astype("f8", order="F") for x in arrays))
    error = np.linalg.norm(dout - truth) / np.linalg.norm(truth)
    assert factor / 10 * 2**-11 < error < factor * 2**-11


# The passes


@pytest.mark.parametrize(
    ("options", "dims", "widths"),
    [
        ({}, (64, 64), (128, 128)), ({}, (64, 32), (104, 128)), ({}, (56, 56), (120, 112)),
        ({"softcap": 2.0}, (56, 56), (120, 112)), ({"softcap": 2.0}, (64, 64), (128, 128)),
        ({"softcap": 2.0}, (120, 120), (248, 240)), ({"softcap": 2.0}, (128, 128), (256, 256)),
        ({"dropout_p": 0.5, "seed": 1}, (56, 56), (112, 112)), ({"sinks": True}, (56, 56), (112, 112)),
        ({"sinks": True, "softcap": 2.0}, (56, 56), (120, 112)), ({"packed": True}, (40, 24), (80, 80)),
    ],
    ids=str,
)  # fmt: skip
def test_head_dims_of_the_passes(options, dims, widths):
    """The head dims of both products are no larger than necessary, and equal where kernels need it."""
    (d, dv), rest = dims, (2, 32)
    if "packed" in options:
        options = {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": 16, "max_seqlen_kv": 16}
    else:
        rest = (2, 32, 1)
    problems = jvp_problems((d, *rest), (d, *rest), (dv, *rest), dtype="float16", **options)
    found = {(one.q.shape[0], one.v.shape[0]) for one in problems}
    assert {n for pair in found for n in pair} & {*widths} == {*widths}, found
    of_q = jvp_problems((d, *rest), (d, *rest), (dv, *rest), dtype="float16", tangents=["dq"], **options)
    assert max(one.q.shape[0] for one in of_q) <= widths[0]


def test_explained(engine):
    """All passes are in the report, with all tangents or those that are passed; a refusal ends with the fix."""
    q, k, v = (engine.normal(0, 64, 4, 128, 1, dtype="f2") for _ in range(3))
    report = explain(q, k, v, jvp=True, causal=True)
    assert report
    assert [(one.problem.backward, one.problem.q.shape[0]) for one in report.launches] == [
        (False, 64),
        (False, 64),
        (True, 128),
    ]
    assert str(report).count("and then") == 2
    only = explain(q, k, v, jvp=True, dv=v)
    assert not only.launches
    assert only.problem.v.shape[0] == 128
    report = explain(*(engine.normal(0, 136, 4, 128, 1, dtype="f2") for _ in range(3)), jvp=True)
    assert bool(report) is not engine.on_cudnn
    if engine.on_cudnn:
        assert report.reasons[-1].startswith("Use head dims with D + Dv, 2 D and 2 Dv up to 256 on Hopper")


# Memory, repeated calls and wide arrays


def test_nothing_is_written_by_a_refused_call(engine):
    """Results that overlap, a read-only result, and passes that cannot run, in a first and in a repeated call."""
    q, k, v, *tangents = normals(engine)
    out, dout, before = engine.nan(*q.shape), engine.nan(*q.shape), engine.get(q).copy()
    wrong = [
        ({"out": out, "dout": q}, ValueError, "dout overlaps q in memory"), ({"out": out, "dout": out}, ValueError, "out overlaps dout"),
        ({"dout": dout, "out": engine.nan(8, 2, 5, 1)}, ValueError, "out has shape"),
        ({"dout": dout, "out": out, "stats": [0.0]}, TypeError, "stats is a list"),
    ]  # fmt: skip
    if engine.name == "numpy":
        locked = engine.nan(*q.shape)
        locked.flags.writeable = False
        wrong.append(({"out": out, "dout": locked}, ValueError, "dout is read-only"))
    for _ in range(3):
        for options, error, words in wrong:
            with pytest.raises(error, match=words):
                attention_jvp(q, k, v, *tangents, **options)
        attention_jvp(q, k, v, *tangents)
    assert np.isnan(engine.get(out)).all()
    assert np.isnan(engine.get(dout)).all()
    np.testing.assert_array_equal(engine.get(q), before)
    if engine.on_cudnn:
        q, k, v, *tangents = normals(engine, 160, 16)
        attention_jvp(q, k, v, dv=tangents[2])
        out, dout = engine.nan(16, *q.shape[1:]), engine.nan(16, *q.shape[1:])
        with pytest.raises(Unsupported, match="needs gradients with head dims 184 and 320"):
            attention_jvp(q, k, v, *tangents, out=out, dout=dout)
        assert np.isnan(engine.get(out)).all()
        assert np.isnan(engine.get(dout)).all()


@on_cudnn
def test_memory_is_proportional_to_the_lengths(engine):
    """The arrays of a call together are smaller than one of Sq x Skv elements."""
    arrays, pool = normals(engine, 8, 8, 1024, 1024, 1, 1, 1), engine.xp.cuda.MemoryPool()
    with engine.xp.cuda.using_allocator(pool.malloc):
        attention_jvp(*arrays, causal=True)
    assert 0 < pool.total_bytes() < 1024 * 1024


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 2.0}, {"softcap": 2.0, "dropout_p": 0.5, "seed": 1}], ids=["", "softcap", "dropout"]
)
@pytest.mark.parametrize("letters", ["qkv", "q", "kv", "v"])
def test_widened_arrays(letters, options, engine):
    """The same bits as without them, and for tangents that are written into them later."""
    q, k, v, *tangents = normals(engine, 8, 16, 10, 12)
    first, second = given(tangents, letters), {name: x * 2 for name, x in given(tangents, letters).items()}
    wide = widen(q, k, v, **{name: x.copy(order="F") for name, x in first.items()}, **options)
    for x, y in zip(attention_jvp(q, k, v, widened=wide, **options), attention_jvp(q, k, v, **first, **options), strict=True):
        np.testing.assert_array_equal(engine.get(x), engine.get(y))
    if "dq" in second:
        wide.dout[:8] = second["dq"]
    if "dk" in second:
        wide.v[8 * ("dq" in second) :][:8] = second["dk"]
    if "dv" in second:
        wide.values[16:] = second["dv"]
    for x, y in zip(attention_jvp(q, k, v, widened=wide, **options), attention_jvp(q, k, v, **second, **options), strict=True):
        np.testing.assert_array_equal(engine.get(x), engine.get(y))


@on_cudnn
@pytest.mark.parametrize("dtype", [None, "float16"])
def test_captured_widened_arrays(dtype, engine):
    """A captured graph writes them again, and no memory of others."""
    arrays = [engine.get(x) for x in normals(engine, 8, 16, 10, 12)[:4]]
    arrays = [engine.put(x if dtype is None else x.astype(np.float32)) for x in arrays]
    captured = engine.captured(lambda: tuple(widen(*arrays, compute_dtype=dtype).named().values()))
    for x, y in zip(captured, widen(*arrays, compute_dtype=dtype).named().values(), strict=True):
        np.testing.assert_array_equal(x, engine.get(y))


@pytest.mark.parametrize(
    "options",
    [
        {"mask": np.ones((25, 24, 1, 1), bool)}, {"bias": np.ones((24, 24, 3, 1), np.float32)}, {"softcap": -1.0},
        {"seq_lens_kv": np.full(3, 5, np.int32)}, {"seq_lens_q": np.full(2, 99, np.int32)}, {"dropout_p": 2.0},
    ],
    ids=str,
)  # fmt: skip
def test_widen_checks_options_like_the_call(options):
    """Options of a wrong shape or value raise the error of ``attention_jvp``."""
    arrays = [np.ones((16, heads, 24, 2), np.float32, order="F") for heads in (2, 1, 1, 2)]
    errors = []
    for function in (attention_jvp, widen):
        with pytest.raises(ValueError, match=next(iter(options))) as raised:
            function(*arrays, **options)
        errors.append(str(raised.value))
    assert errors[0] == errors[1]


def test_widened_arrays_of_another_form(engine):
    """They raise although a call with these shapes is cached: with sinks there is no row of 1."""
    q, k, v, *tangents = normals(engine, 16, 8)
    sinks = engine.put(np.ones(2, np.float32))
    right, wrong = (widen(q, k, v, tangents[0], deterministic=True, **options) for options in ({}, {"sinks": sinks}))
    for _ in range(3):
        attention_jvp(q, k, v, widened=right, deterministic=True)
        with pytest.raises(ValueError, match=r"widened is for .* and the call needs"):
            attention_jvp(q, k, v, widened=wrong, deterministic=True)
