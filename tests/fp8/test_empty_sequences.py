"""FP8 with sequences without keys, for which cuDNN's kernel on Hopper never ends."""

import numpy as np

from cupy_sdpa import attention, fp8


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
