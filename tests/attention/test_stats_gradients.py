"""Gradients through the log-sum-exp: ``dstats`` of attention_backward and of pullbacks."""

import pytest
from engines import every_engine, numbers


from cupy_sdpa import attention, attention_backward, attention_vjp, merge, merge_backward


@pytest.mark.parametrize("number", numbers(40, quick=10))
@every_engine
def test_random_problems(number, engine):
    """They agree with the reference with any other options, also without the gradient of the output."""
    engine.agrees(engine.draw({"dstats"}, number), refused=True)


def parts_of(engine, *, packed, sinks, count=3):
    """Outputs and log-sum-exps of parts, one row of which is -inf, gradients of the merged results, and sinks; and as float64."""
    shape = (16, 3, 7) if packed else (16, 3, 7, 2)
    outs = [engine.normal([1, i], *shape) for i in range(count)]
    rows = [np.random.default_rng([2, i]).standard_normal((3, 7) if packed else (7, 3, 2)).astype("f4", order="F") for i in range(count)]
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
    """They are those of central differences of merge in float64, also of the sinks; 0 where a part has no key."""
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


@every_engine
def test_attention_in_parts_has_the_gradients_of_one_call(engine):
    """The gradients of merged parts, through their outputs and log-sum-exps, are those of one call over all keys."""
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
