"""Arrays with gaps and other orders of axes, of the calls that do not read and write them as arrays of one problem."""

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import attention

#: Options whose calls write parts of the results, or copy them.
FEATURES = ("block_mask", "shared_prefix", "jvp", "packed", "bucket", "return_dtensors")


@pytest.mark.parametrize("number", numbers(6, sweep=3))
@pytest.mark.parametrize("name", FEATURES)
def test_strided_results(name, number, engine):
    """All arrays and results lie in larger arrays of NaN, with random orders of axes; nothing around them is written."""
    case = engine.draw({name, "preallocated"}, number, most=1)
    if not case.layouts:
        names = ["q", "out", *(f"d{x}" for x in "qkv" if case.backward), *(["jvp"] if case.tangents else [])]
        names += [] if case.paged else ["k", "v"]
        gaps, turned = ("dhs*s", "dsh+h") if case.packed else ("dhsb*s", "dbsh+h")
        case = case.with_(layouts={x: gaps if x in ("k", "v") else turned for x in names})
    engine.agrees(case, refused=True)


@pytest.mark.parametrize("name", ["q", "seq_lens_q", "seq_lens_kv", "page_table", "out", "stats"])
@pytest.mark.parametrize("sq", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_split_pages(sq, name, engine):
    """The kernels of split keys read rows of q and lengths without gaps; the other arrays have any strides."""
    rng, batch = np.random.default_rng(sq), 2
    q, k, v = (engine.normal([sq, n], *shape) for n, shape in enumerate([(16, 4, sq, batch), (16, 2, 16, 12), (8, 2, 16, 12)]))
    given = {
        "q": q, "out": engine.nan(8, *q.shape[1:]), "stats": engine.nan(sq, 4, batch, dtype=np.float32),
        "page_table": engine.put(rng.permutation(12)[: 3 * batch].reshape(3, batch).astype("i4", order="F")),
        "seq_lens_kv": engine.put(np.int32([29, 48])), "seq_lens_q": engine.put(np.int32([sq, 1])),
    }  # fmt: skip
    settings = {"causal": "bottom_right", "num_splits": 2} | ({} if engine.on_cudnn else {"layout": "dhsb"})
    expected = engine.get(attention(**given, k=k, v=v, **settings))
    axis = 1 if name in ("q", "out") else 0  # head_dim has no gaps
    wide = engine.put(np.asfortranarray(np.repeat(engine.get(given[name]), 2, axis=axis)))
    given[name], between = (wide[(slice(None),) * axis + (slice(first, None, 2),)] for first in (0, 1))
    for _ in range(2):
        between[...] = -1
        for result in ("out", "stats"):
            given[result].fill(np.nan)
        attention(**given, k=k, v=v, **settings)
        for of, wanted in zip(("out", "stats"), expected, strict=True):
            np.testing.assert_allclose(engine.get(given[of]), wanted, atol=engine.tolerance, rtol=0, err_msg=of)
        assert (engine.get(between) == -1).all()
