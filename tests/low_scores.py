"""Scores that are low by themselves, which only a bias or a score function masks."""

import numpy as np


def low_scores(engine, other=-1000.0):
    """q, k and v with scores of -2e6; the last key may have another score."""
    q, k, v = (engine.get(engine.normal(n, 16, 1, 20, 1)) for n in range(3))
    q[:], k[:] = 0, 0
    q[0], k[0] = 2000, -1000
    k[0, 0, -1] = other
    return engine.put([q, k, v])


def close(engine, actual, wanted):
    """Whether results agree; a score of 4e6 has an error of 0.25 in float32, which scales the gradients of a row."""
    for got, want in zip(actual, wanted, strict=True):
        want = engine.get(want).astype(np.float64)
        np.testing.assert_allclose(engine.get(got).astype(np.float64), want, atol=0.3 * np.abs(want).max() + 2e-3)
