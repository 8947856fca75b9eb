"""What the tests of the gpu tier share."""

import numpy as np
from tolerance import accumulation_floor, assert_close

from cupy_sdpa import attention, reference


def poisoned(cupy, shape, dtype):
    """An array in which every element that is not written shows."""
    return cupy.full(shape, np.nan, dtype=dtype, order="F")


def check_forward(cupy, case):
    """Run a case on the GPU with poisoned outputs and hold it to the tolerance policy."""
    q, k, v = case.arrays()
    options = {"scale": case.scale, **case.mask()}
    truth, truth_stats = reference.attention(q, k, v, **options)
    naive, naive_stats = attention(q, k, v, return_stats=True, **options)
    on_gpu = case.laid_out([cupy.asarray(x) for x in (q, k, v)])
    out = poisoned(cupy, truth.shape, q.dtype)
    stats = poisoned(cupy, truth_stats.shape, np.float32) if case.stats else None
    got = attention(*on_gpu, out=out, stats=stats, scale=case.scale, **case.mask(cupy))
    got_out, got_stats = got if case.stats else (got, None)
    assert got_out is out
    assert got_stats is stats
    assert_close(cupy.asnumpy(out), truth, naive)
    if case.stats:
        assert_close(cupy.asnumpy(stats), truth_stats, naive_stats, accumulation_floor(q, k, case.tau, truth_stats))
