"""Problems beyond 2^31 elements, and near the largest grids."""

import pytest

from cupy_sdpa.check import large

CASES = pytest.mark.parametrize("case", large.CASES, ids=lambda case: case.name)


@pytest.mark.large
@CASES
def test_large_problems(case, cupy):
    """Samples of the results agree with the definition."""
    if case.gib > large.free_gib():
        pytest.skip(f"needs {case.gib} GiB of GPU memory; {large.free_gib():.0f} GiB are free")
    assert large.run(case) == []


@pytest.mark.slow
@CASES
def test_cases_of_large_problems_find_nothing_in_small_ones(case, fake):
    """The cases themselves are right: with small sizes they find no error."""
    assert large.run(case, large.Sizes(elements=2**15, seq=16, grid=40)) == []
