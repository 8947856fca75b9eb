"""Offsets of packed sequences that decrease, are negative or exceed the array: on the GPU, which does not check them, nothing outside is accessed."""

import numpy as np
import pytest
from engines import on_cudnn

import cupy_sdpa
from cupy_sdpa import zoo

pytestmark = on_cudnn

TOTAL, LONGEST, SPACE = 24, 12, 8
#: Offsets of three sequences.
OFFSETS = {
    "decreasing": [0, 16, 8, 24],
    "decreasing at the end": [0, 8, 24, 16],
    "negative": [-9, 8, -3, 24],
    "too large": [0, 8, 2**30, 24],
    "all too large": [90, 80, 70, 60],
    "lengths": [8, 8, 8, 0],
}
OPTIONS = {
    "plain": {},
    "causal, with sinks": {"causal": "bottom_right", "sinks": np.ones(2, np.float32)},
    "a function": {"score_mod": zoo.alibi, "tensors": {"slopes": np.ones(2, np.float32)}},
}


class Inside:
    """Packed arrays inside of larger ones: NaN is around what is read, and around results."""

    def __init__(self, engine):
        self.engine, self.whole = engine, []

    def array(self, seed, *shape, dtype=np.float16):
        """An array whose last axis is a part of a longer one."""
        x = np.full((*shape[:-1], shape[-1] + 2 * SPACE), np.nan, dtype, order="F")
        values = np.nan if seed is None else np.random.default_rng(seed).standard_normal(shape)
        x[..., SPACE:-SPACE] = values
        self.whole.append(self.engine.put(x))
        return self.whole[-1][..., SPACE:-SPACE]

    def check(self):
        """What is around the arrays has not changed, and results were written completely, from no element around an input."""
        for x in self.whole:
            x = self.engine.get(x)
            assert np.isnan(x[..., :SPACE]).all()
            assert np.isnan(x[..., -SPACE:]).all()
            assert not np.isnan(x[..., SPACE:-SPACE]).any()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("offsets", OFFSETS)
def test_both_passes_stay_inside(offsets, options, dtype, engine):
    """Every step of both passes reads and writes elements of the arrays only."""
    inside = Inside(engine)
    starts = engine.put(np.array(OFFSETS[offsets], dtype))
    whole = engine.put(np.array([0, 8, 16, 24], dtype))
    for of_q, of_kv in ((starts, starts), (starts, whole), (whole, starts)):
        packed = {"cu_seqlens_q": of_q, "cu_seqlens_kv": of_kv, "max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST}
        packed |= engine.put(OPTIONS[options])
        q, k, v, dout = (inside.array(seed, 16, 2, TOTAL) for seed in range(4))
        out, stats = inside.array(None, 16, 2, TOTAL), inside.array(None, 2, TOTAL, dtype=np.float32)
        gradients = {name: inside.array(None, 16, 2, TOTAL) for name in ("dq", "dk", "dv")}
        cupy_sdpa.attention(q, k, v, out=out, stats=stats, **packed)
        cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **gradients, **packed)
    inside.check()


#: Other calls of packed arrays.
OTHERS = {
    "attention_jvp": lambda q, k, v, packed: cupy_sdpa.attention_jvp(q, k, v, q, k, v, **packed),
    "weight_sums": lambda q, k, v, packed: cupy_sdpa.weight_sums(q, k, **packed),
    "weight_entropy": lambda q, k, v, packed: cupy_sdpa.weight_entropy(q, k, **packed),
    "dropout_mask": lambda q, k, v, packed: cupy_sdpa.dropout_mask(q, k, dropout_p=0.5, seed=1, **packed),
    "apply_rope": lambda q, k, v, packed: cupy_sdpa.apply_rope(q, cupy_sdpa.Rope(16), cu_seqlens_q=packed["cu_seqlens_q"]),
    "converted": lambda q, k, v, packed: cupy_sdpa.attention(
        *(x.astype(np.float32, order="F") for x in (q, k, v)), compute_dtype="float16", **packed),
}  # fmt: skip


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("name", OTHERS)
def test_other_calls_stay_inside(name, offsets, engine):
    """So does every step of other calls of packed arrays."""
    inside = Inside(engine)
    q, k, v = (inside.array(seed, 16, 2, TOTAL) for seed in range(3))
    starts = engine.put(np.array(OFFSETS[offsets], np.int32))
    packed = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": LONGEST, "max_seqlen_kv": LONGEST}
    found = OTHERS[name](q, k, v, packed)
    for x in found if isinstance(found, tuple) else (found,):
        assert not np.isnan(engine.get(x).astype(np.float32)).any()
    inside.check()
