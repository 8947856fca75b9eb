"""Repeated calls with functions, ``tensors`` and gradients of arrays through cuDNN: nothing is parsed, and nothing is stale."""

import contextlib

import numpy as np
import pytest
from engines import not_parsed

from cupy_sdpa import attention, attention_backward, attention_jvp, attention_vjp, get_plan_cache, prepare, zoo

#: Calls with the same addresses after which a CUDA graph is replayed.
OFTEN = 5
pytestmark = pytest.mark.parametrize("engine", ["fake", pytest.param("cupy", marks=pytest.mark.gpu)], indirect=True)


@pytest.fixture(autouse=True)
def _all_work_is_done(engine):
    """Replayed graphs have run when their plans are destroyed."""
    yield
    engine.xp.cuda.Device().synchronize()


def arrays(engine, size=40):
    """Random q, k, v and dout."""
    return [engine.normal(n, 16, heads, size, 2) for n, heads in enumerate((4, 2, 2, 4))]


def both_passes(q, k, v, dout, *, return_dtensors=False, **options):
    """The output, the log-sum-exp and all gradients."""
    out, stats = attention(q, k, v, return_stats=True, **options)
    *gradients, last = attention_backward(dout, q, k, v, out, stats, return_dtensors=return_dtensors, **options)
    return [out, stats, *gradients, *(last.values() if isinstance(last, dict) else [last])]


def test_functions_that_are_created_in_every_call(engine):
    """Equal closures are one call, which is not parsed, in either pass; other numbers have the same plan."""
    *given, dout = arrays(engine)

    def run(cap):
        out, pullback = attention_vjp(*given, score_mod=zoo.softcap(cap), mask_mod=zoo.sliding_window(7))
        return [engine.get(x) for x in (out, *pullback(dout))]

    want, count = run(3.0), get_plan_cache().misses
    for number in range(2 * OFTEN):
        with not_parsed() if number == 0 else contextlib.nullcontext():
            for x, y in zip(run(3.0), want, strict=True):
                np.testing.assert_array_equal(x, y)
    for number in range(12):
        cap = 2.0 + number / 4

        def closure(score, b, h, q_idx, kv_idx):
            return cap * np.tanh(score / cap)  # noqa: B023

        exact = attention(*(engine.get(x).astype("f8") for x in given), softcap=cap, window=(7, 0))
        for function in (closure, zoo.softcap(cap), closure):
            out = attention(*given, score_mod=function, mask_mod=zoo.sliding_window(7))
            np.testing.assert_allclose(engine.get(out), exact, atol=4e-3)
    assert get_plan_cache().misses == count + 1, "a plan for every number"


def test_results_at_new_addresses_are_checked(engine):
    """An output that overlaps an array of ``tensors`` raises, also in a repeated call."""
    q, k, v, _ = arrays(engine)
    memory = engine.normal(1, 4, 40, 40, dtype=np.float16).copy("C")
    options = {"score_mod": lambda s, b, h, i, j, bias: s + bias[h, i, j], "tensors": {"bias": memory}}
    for _ in range(OFTEN):
        attention(q, k, v, out=engine.xp.empty_like(q), **options)
    flat = memory.reshape(-1)[: q.size].reshape(q.shape[::-1]).T
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out overlaps tensors\['bias'\]"):
            attention(q, k, v, out=flat, **options)


def test_prepared_calls_take_their_options_again(engine):
    """Functions that read arrays before other operations are equal to those that were prepared; other arrays are used."""
    q, k, v, _ = arrays(engine)
    one, other = ({"slopes": engine.normal(seed, 4, dtype=np.float32)} for seed in (8, 9))
    call = prepare(q, k, v, score_mod=zoo.alibi, tensors=one)
    np.testing.assert_array_equal(engine.get(call(q, k, v, score_mod=zoo.alibi, tensors=one)), engine.get(call(q, k, v)))
    expected = engine.get(attention(q, k, v, score_mod=zoo.alibi, tensors=other))
    np.testing.assert_array_equal(engine.get(call(q, k, v, score_mod=zoo.alibi, tensors=other)), expected)
    with pytest.raises(ValueError, match="differs from the prepared one"):
        call(q, k, v, score_mod=zoo.temperature, tensors={"temperature": one["slopes"]})


def test_calls_after_a_function_failed(engine):
    """A function that raises in some calls, whose number has changed, leaves nothing behind; a kept pullback has the old number."""
    q, k, v, dout = arrays(engine, 9)
    factor, fails = [1.5], [False]

    def scaled(score, b, h, q_idx, kv_idx):
        if fails[0]:
            raise KeyError("data")
        return score * factor[0]

    calls = {
        "attention": lambda given: attention(q, k, v, **given),
        "attention_jvp": lambda given: attention_jvp(q, k, v, q, **given),
        "attention_vjp": lambda given: attention_vjp(q, k, v, **given)[1](dout),
        "prepare": lambda given: prepare(q, k, v, **given)(q, k, v),
    }
    kept = attention_vjp(q, k, v, score_mod=scaled)[1]
    before = engine.get(kept(dout))
    for factor[0] in (1.5, 2.5, 0.5, 2.5):
        for call in calls.values():
            fails[0] = True
            with pytest.raises(KeyError, match="data"):
                call({"score_mod": scaled})
            fails[0] = False
            expected = engine.get(call({"scale": factor[0] / 4}))
            for one, other in zip(engine.get(call({"score_mod": scaled})), expected, strict=True):
                np.testing.assert_allclose(one.astype(np.float64), other, atol=4 * engine.tolerance)
    fails[0] = True
    for one, other in zip(engine.get(kept(dout)), before, strict=True):
        np.testing.assert_allclose(one, other, atol=engine.tolerance)


class Parameters:
    """Parameters of the functions below, which are changed at random."""

    alpha = 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_random_sequences_of_calls(seed, engine):
    """Functions, their parameters, arrays, dtypes, layouts, results and contents change at random; no result is stale."""
    rng, (*given, dout) = np.random.default_rng(seed), arrays(engine, 16)
    exact = [engine.get(x).astype(np.float64) for x in (*given, dout)]
    config, weights = Parameters(), [1.0, 2.0]

    def by_object(s, b, h, i, j, x):
        return s * config.alpha + x[h, j] * weights[1]

    def by_class(s, b, h, i, j, x):
        return by_object(s, b, h, i, j, x) - Parameters.alpha * x[0, i]

    def by_condition(s, b, h, i, j, x):
        return s + x[h, j] if config.alpha > 1 else s * x[h, i]

    def by_index(s, b, h, i, j, x):
        return s + x[int(config.alpha * 2), j] * x[-1, i]

    def contents(dtype):
        return (2 * rng.standard_normal((16, 16))).astype(dtype)

    memory = [contents(dtype) for dtype in ("f4", "f4", "i4", "f2")]
    there = engine.put(memory)
    views = [lambda m: m[:4], lambda m: m[4:8], lambda m: m.T[:4], lambda m: m[1:9:2], lambda m: m[:, :4].T, lambda m: m[3::-1],
             lambda m: m.reshape(-1)[1:65].reshape(4, 16)]  # fmt: skip
    outputs = [None, engine.xp.empty_like(dout), engine.xp.empty_like(dout)]
    for _ in range(40):
        parameter, value = rng.integers(5), float(rng.choice([0.5, 1.0, 1.5]))
        if parameter == 0:
            config.alpha = value
        elif parameter == 1:
            weights[1] = value
        elif parameter == 2:
            Parameters.alpha = value
        elif parameter == 3:
            n = rng.integers(4)
            memory[n][...] = contents(memory[n].dtype)
            there[n][...] = engine.put(memory[n])
        options = {"score_mod": [by_object, by_class, by_condition, by_index][rng.integers(4)]}
        if rng.random() < 0.3:
            options["mask_mod"] = zoo.sliding_window(int(rng.integers(3, 5)))
        view, n = views[rng.integers(len(views))], rng.integers(4)
        backward = {"return_dtensors": bool(parameter % 2 and n != 2)}
        wanted = both_passes(*exact, tensors={"x": view(memory[n])}, **backward, **options)
        for _ in range(rng.integers(1, 4)):
            on_engine = {"tensors": {"x": view(there[n])}, **options}
            out, stats = attention(*given, return_stats=True, out=outputs[rng.integers(3)], **on_engine)
            *found, last = attention_backward(dout, *given, out, stats, **backward, **on_engine)
            found = [out, stats, *found, *(last.values() if isinstance(last, dict) else [last])]
            for x, y in zip(found, wanted, strict=True):
                np.testing.assert_allclose(engine.get(x), y, atol=0.02 * max(1, np.abs(y).max()))
    Parameters.alpha = 1.0
