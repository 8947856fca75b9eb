"""Cases that ``python -m cupy_sdpa check`` found to be wrong: they are correct or refused now."""

import pytest

import cupy_sdpa
from cupy_sdpa.check.cases.case import Case
from cupy_sdpa.check.worker import run_case
from cupy_sdpa.graph.scores import partial_tiles

FOUND = {
    "softcap and a bias of the smallest number": Case(
        "gpu", "float16", sq=1, backward=True, options={"bias": ("1111", "float16", "min_rows"), "softcap": 2.0}, seed=2069
    ),
    "softcap and a bias that masks a row": Case(
        "gpu", "float16", d=96, dv=96, hq=3, hkv=3, sq=1, skv=4, b=3, backward=True, seed=4210,
        options={"bias": ("1111", "float16", "min"), "softcap": 50.0, "return_dbias": True},
    ),
    "packed sequences and a strided dq": Case(
        "gpu", "float16", d=16, sq=9, backward=True, layouts={"dq": "dhs*s"}, seed=2119,
        options={"packed": ("random", "random", 0, 0, 3, "int32"), "preallocated": True},
    ),
    "packed sequences and narrow values": Case(
        "gpu", "float16", d=256, dv=72, sq=1, skv=1, backward=True, seed=3999,
        options={"packed": ("full", "full", 0, 0, 0, "int32")},
    ),
    "a deterministic query and a mask of heads and keys": Case(
        "gpu", "float16", hq=2, sq=1, skv=1, seed=26, options={"mask_mod": ("checkered", ""), "deterministic": True}
    ),
}  # fmt: skip


ON_THE_CPU = {
    "pages of values without a head dim": Case(
        d=1, dv=0, hq=2, sq=1, skv=1, options={"block_mask": ("prefix", "kqh1")}, seed=78
    ),
    "paged values without a head dim": Case(
        d=8, dv=0, skv=16, options={"paged": (8, "heads", "random", 0, "large", False, False)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_cases_that_failed_on_the_cpu(name):
    outcome = run_case(ON_THE_CPU[name])
    assert outcome.kind == "passed", outcome.message


@pytest.mark.gpu
@pytest.mark.parametrize("name", FOUND)
def test_cases_that_were_wrong(name):
    """The result is correct, or the problem is refused."""
    outcome = run_case(FOUND[name])
    assert outcome.kind in ("passed", "refused"), outcome.message


def test_a_softcap_beside_a_bias_is_masked_beyond_the_last_element():
    """A softcap turns the -inf of padding into a finite score, which is larger than a log-sum-exp near the smallest number."""

    def masked(**options):
        shape = (64, 4, 16, 2)
        return partial_tiles(cupy_sdpa.problem(shape, shape, shape, dtype="bfloat16", **options))

    assert masked(softcap=2.0, bias=(16, 16, 1, 1), backward=True) == {"keys", "queries"}
    assert masked(softcap=2.0, alibi_slopes=True, backward=True) == {"keys", "queries"}
    assert masked(softcap=2.0, backward=True) == masked(bias=(16, 16, 1, 1), backward=True) == frozenset()
