"""Bands: their simplest form, and the intersection of the bands of options and mask functions."""

import itertools

import numpy as np
import pytest
from engines import one_in

from cupy_sdpa import attention, problem

SIDES = (None, 0, 1, 2, 3, 5, 6)


def band_of(queries, keys, lengths=False, **options):
    """The band of a problem: keys before and after the diagonal, and whether that ends at the bottom right; all for no band."""
    q, k = (8, 1, queries, 2), (8, 1, keys, 2)
    given = {"seq_lens_q": (2,), "seq_lens_kv": (2,)} if lengths else {}
    return problem(q, k, k, dtype="float32", **given, **options).band or (None, None, False)


def seen(band, queries, keys):
    """Which keys each query attends to, from the definition."""
    left, right, bottom_right = band
    i, j = np.ogrid[:queries, :keys]
    diagonal = i + (keys - queries if bottom_right else 0)
    return (diagonal - (np.inf if left is None else left) <= j) & (j <= diagonal + (np.inf if right is None else right))


@pytest.mark.parametrize("corner", ["top_left", "bottom_right"])
@pytest.mark.parametrize("queries", one_in(3, range(1, 6)))
def test_the_simplest_form_shows_the_same_keys(queries, corner):
    """For all small numbers of queries and keys and all sides, with exact lengths; a side that masks nothing is removed."""
    for keys, left, right in itertools.product(range(1, 6), SIDES, SIDES):
        found = band_of(queries, keys, window=(left, right, corner))
        wanted = (left, right, corner == "bottom_right")
        np.testing.assert_array_equal(seen(found, queries, keys), seen(wanted, queries, keys), err_msg=str(wanted))
        for alone in ((found[0], None, found[2]), (None, found[1], found[2])):
            assert alone[:2] == (None, None) or not seen(alone, queries, keys).all()


@pytest.mark.parametrize("corner", ["top_left", "bottom_right"])
def test_the_simplest_form_holds_for_shorter_entries(corner):
    """With sequence lengths, batch items have any smaller numbers of queries and keys."""
    for queries, keys, left, right in itertools.product((1, 2, 4), (1, 4), SIDES[:5], SIDES[:5]):
        found = band_of(queries, keys, lengths=True, window=(left, right, corner))
        wanted = (left, right, corner == "bottom_right")
        for own in itertools.product(range(1, queries + 1), range(1, keys + 1)):
            np.testing.assert_array_equal(seen(found, *own), seen(wanted, *own))


BANDS = {
    "none": ({}, (None, None, False)),
    "window": ({"window": (4, 2)}, (4, 2, False)),
    "left": ({"window": (3, None)}, (3, None, False)),
    "right": ({"window": (None, 1)}, (None, 1, False)),
    "causal": ({"causal": True}, (None, 0, False)),
}
MASKS = {
    "wider": (lambda b, h, i, j: abs(i - j) <= 6, (6, 6, False)),
    "narrower": (lambda b, h, i, j: (i - j <= 1) & (j - i <= 1), (1, 1, False)),
    "left": (lambda b, h, i, j: i - j <= 2, (2, None, False)),
    "right": (lambda b, h, i, j: j <= i + 3, (None, 3, False)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", BANDS)
def test_bands_of_options_and_functions_intersect(option, mask):
    """A query attends to the keys that both bands contain, and to no others."""
    options, one = BANDS[option]
    mask_mod, other = MASKS[mask]
    both = seen(one, 12, 12) & seen(other, 12, 12)
    rng = np.random.default_rng(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((32, 1, 12, 1))) for _ in range(3))
    got = attention(q, k, v, mask_mod=mask_mod, **options)
    np.testing.assert_allclose(got, attention(q, k, v, mask=np.asfortranarray(both.T[:, :, None, None])), atol=1e-12)
    asked = problem(*[(32, 1, 12, 1)] * 3, dtype="bfloat16", mask_mod=mask_mod, **options)
    np.testing.assert_array_equal(seen(asked.band, 12, 12), both)
    assert asked.settings.expression is None
