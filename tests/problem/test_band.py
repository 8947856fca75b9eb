"""Bands: their simplest form, and the intersection of the bands of options and mask functions."""

import itertools

import numpy as np
import pytest
from functions import arrays

from cupy_sdpa import attention, problem
from cupy_sdpa.problem.band import Band

SIDES = (None, 0, 1, 2, 3, 4, 5, 6)


def seen(band, queries, keys):
    """Which keys each query attends to, from the definition."""
    i, j = np.ogrid[:queries, :keys]
    diagonal = i + (keys - queries if band.bottom_right else 0)
    left = np.inf if band.left is None else band.left
    right = np.inf if band.right is None else band.right
    return (diagonal - left <= j) & (j <= diagonal + right)


@pytest.mark.parametrize("bottom_right", [False, True])
@pytest.mark.parametrize("queries", range(1, 7))
def test_the_simplest_form_shows_the_same_keys(queries, bottom_right):
    """For all numbers of queries and keys up to 6 and all sides, with exact lengths."""
    for keys, left, right in itertools.product(range(1, 7), SIDES, SIDES):
        band = Band(left, right, bottom_right)
        simple = band.simplified(queries, keys, lengths=False)
        np.testing.assert_array_equal(seen(simple or Band(), queries, keys), seen(band, queries, keys), err_msg=str(band))
        for side in ("left", "right"):  # a band that masks nothing is removed
            alone = Band()._replace(**{side: getattr(simple or Band(), side)}, bottom_right=bottom_right)
            assert alone[:2] == (None, None) or not seen(alone, queries, keys).all()


@pytest.mark.parametrize("bottom_right", [False, True])
def test_the_simplest_form_holds_for_shorter_entries(bottom_right):
    """With sequence lengths, batch entries have any smaller numbers of queries and keys."""
    sizes = list(itertools.product(range(1, 5), range(1, 5)))
    for (queries, keys), left, right in itertools.product(sizes, SIDES[:6], SIDES[:6]):
        band = Band(left, right, bottom_right)
        simple = band.simplified(queries, keys, lengths=True) or Band()
        for own_queries, own_keys in itertools.product(range(1, queries + 1), range(1, keys + 1)):
            np.testing.assert_array_equal(seen(simple, own_queries, own_keys), seen(band, own_queries, own_keys))


BANDS = {
    "none": ({}, Band()),
    "window": ({"window": (4, 2)}, Band(4, 2)),
    "left": ({"window": (3, None)}, Band(3, None)),
    "right": ({"window": (None, 1)}, Band(None, 1)),
    "causal": ({"causal": True}, Band(None, 0)),
}
MASKS = {
    "wider": (lambda b, h, i, j: abs(i - j) <= 6, Band(6, 6)),
    "narrower": (lambda b, h, i, j: (i - j <= 1) & (j - i <= 1), Band(1, 1)),
    "left": (lambda b, h, i, j: i - j <= 2, Band(2, None)),
    "right": (lambda b, h, i, j: j <= i + 3, Band(None, 3)),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("option", BANDS)
def test_bands_of_options_and_functions_intersect(option, mask):
    """A query attends to the keys that both bands contain, and to no others."""
    options, one = BANDS[option]
    mask_mod, other = MASKS[mask]
    both = seen(one, 12, 12) & seen(other, 12, 12)
    q, k, v, _ = arrays(s=12)
    got = attention(q, k, v, mask_mod=mask_mod, **options)
    np.testing.assert_allclose(got, attention(q, k, v, mask=np.asfortranarray(both.T[:, :, None, None])), atol=1e-12)
    shape = (32, 1, 12, 1)
    asked = problem(shape, shape, shape, dtype="bfloat16", mask_mod=mask_mod, **options)
    np.testing.assert_array_equal(seen(asked.band, 12, 12), both)
    assert asked.settings.program is None
