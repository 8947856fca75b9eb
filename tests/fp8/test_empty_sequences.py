"""FP8 with sequences without keys, for which cuDNN's kernel on Hopper never ends."""

import numpy as np
import pytest

from cupy_sdpa import Unsupported, attention, fp8


def test_some_sequences_without_keys(engine):
    """Their results are 0 and -inf, and the others are those of a call without them."""
    lengths = np.array([0, 20, 7, 0, 20, 1, 0, 3], np.int32)
    q, k, v = (engine.normal([1, n], 16, 9, s, 8, dtype=np.float16) for n, s in enumerate((130, 20, 20)))
    arrays = [fp8.quantize(x) for x in (q, k, v)]
    given = engine.put(lengths)

    def results(of):
        out, stats = attention(*arrays, seq_lens_kv=of, return_stats=True)
        return engine.get(out.dequantize(np.float32)), engine.get(stats)

    out, stats = results(given)
    assert (out[..., lengths == 0] == 0).all()
    assert np.isneginf(stats[..., lengths == 0]).all()
    assert (engine.get(given) == lengths).all()
    wanted, rows = results(engine.put(np.maximum(lengths, 1)))
    np.testing.assert_array_equal(out[..., lengths > 0], wanted[..., lengths > 0])
    np.testing.assert_array_equal(stats[..., lengths > 0], rows[..., lengths > 0])


@pytest.mark.parametrize(
    ("sq", "splits"), [pytest.param(130, None, marks=pytest.mark.slow), pytest.param(4, None, marks=pytest.mark.slow), (4, 3)]
)
def test_some_paged_sequences_without_keys(sq, splits, engine):
    """Their results are 0 and -inf, also if the keys are split: then most parts of short sequences have no keys."""
    times, heads = (3 if sq == 4 else 1, 9) if engine.name == "cupy" else (1, 2)  # more tiles than a GPU has multiprocessors
    lengths = np.array([0, 200, 7, 0, 20, 1, 0, 3] * times, np.int32)
    batch = len(lengths)
    q = fp8.quantize(engine.normal(1, 16, heads, sq, batch, dtype=np.float16))
    k, v = (fp8.quantize(engine.normal(n, 16, heads, 16, 13 * batch, dtype=np.float16)) for n in (2, 3))
    table = np.arange(13 * batch, dtype=np.int32).reshape(13, batch, order="F")
    table[np.arange(13)[:, None] * 16 >= lengths] = 2**30  # entries that must not be read
    out, stats = attention(
        q, k, v, page_table=engine.put(table), seq_lens_kv=engine.put(lengths), num_splits=splits, return_stats=True
    )
    got, rows = engine.get(out.dequantize(np.float32)), engine.get(stats)
    assert (got[..., lengths == 0] == 0).all()
    assert np.isneginf(rows[..., lengths == 0]).all()
    assert np.isfinite(rows[..., lengths > 0]).all()
    one = lengths == 1  # its output is the value, in the scale of the output
    values = engine.get(v.dequantize(np.float32))[:, :, 0, table[0, one]]
    np.testing.assert_allclose(got[:, :, 0, one], values, rtol=0.1, atol=1e-2)


BANDS = [
    ({"causal": "bottom_right"}, True), ({"window": (5, 3)}, True), ({"window": (5, 3, "bottom_right")}, False),
    ({"window": (5, 0)}, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("band", "lengths"), [BANDS[0], *(pytest.param(*x, marks=pytest.mark.slow) for x in BANDS[1:])], ids=str
)
def test_tiles_without_keys(band, lengths, engine):
    """Queries without keys: a call of 128 queries, one tile, is right. Hopper refuses more, and names the remedy."""

    given = {"seq_lens_kv": np.array([0, 20, 7, 0, 20, 1, 0, 3], np.int32)} if lengths else {}

    def called(sq):
        """The output, and that of attention in float32 over the same values."""
        arrays = [fp8.quantize(engine.normal(n, 16, 9, s, 8, dtype=np.float16)) for n, s in enumerate((sq, 20, 20))]
        out = engine.get(attention(*arrays, **band, **engine.put(given)).dequantize(np.float32))
        return out, attention(*(engine.get(x.dequantize(np.float32)) for x in arrays), **band, **given)

    np.testing.assert_allclose(*called(128), rtol=0.1, atol=0.1)
    if engine.on_cudnn:
        with pytest.raises(Unsupported, match="pass at most 128 queries in a call, or bfloat16 arrays"):
            called(129 if lengths else 150)
    else:
        np.testing.assert_allclose(*called(150), rtol=0.1, atol=0.1)
