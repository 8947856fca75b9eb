"""Random problems of the self-test, paged and with lengths, on the fake CuPy: staging, our kernels and replay with real graphs."""

import numpy as np
import pytest
from fake_cupy import program

import cupy_sdpa
from cupy_sdpa import fp8
from cupy_sdpa.check import Case
from cupy_sdpa.check.cases import draw as drawing
from cupy_sdpa.check.cases.combine import ONLY_WITH, is_valid, with_required
from cupy_sdpa.check.cases.data import FORMATS
from cupy_sdpa.check.cases.draw import OPTIONS, Limits, draw_options
from cupy_sdpa.check.verify.execute import execute
from cupy_sdpa.check.verify.planning import problems
from cupy_sdpa.check.verify.tolerance import FP8_SUM
from cupy_sdpa.problem.tensor_spec import numpy_dtype
from cupy_sdpa.support.why_not import why_not

#: Options with which keys are split.
SPLIT = ("causal", "window", "window", "seq_lens_q", "seq_lens_q", "sinks", "softcap", "stats", "deterministic", "preallocated")


def names_of(number):
    """The option ``paged``, and up to three others; in two of three cases only those with which keys are split."""
    rng, names = np.random.default_rng([number, 5]), {"paged"}
    others = SPLIT if number % 3 else list(OPTIONS)
    if number % 3 == 1:
        names |= {"seq_lens_q", str(rng.choice(["causal", "window"]))}
    for _ in range(int(rng.integers(0, 4))):
        more = names | {str(rng.choice(others))}
        names = more if is_valid(with_required(more)) else names
    return names


@pytest.mark.parametrize("number", range(40))
def test_paged_problems_of_the_gpu(number, fake, monkeypatch):
    """Problems as they are drawn for a GPU, with smaller sizes; none fails."""
    monkeypatch.setitem(drawing.LIMITS, "gpu", Limits(20_000, 60_000))
    case = draw_options(names_of(number), number, "gpu")
    outcome = execute(case)
    assert outcome.kind in ("passed", "refused"), f"{outcome.message}\n{case!r}"


@pytest.mark.parametrize("lengths", [None, (1, 1)], ids=["any lengths", "one query and key"])
@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.sweep) for seed in range(2, 22))])
def test_problems_of_the_gpu(seed, lengths, fake, monkeypatch):
    """Problems with any options as they are drawn for a GPU, with smaller sizes; none fails."""
    monkeypatch.setitem(drawing.LIMITS, "gpu", Limits(20_000, 60_000))
    for number in range(25 if seed == 1 else 100):
        case = drawing.draw(seed, number, "gpu", lengths)
        outcome = execute(case)
        assert outcome.kind in ("passed", "refused"), f"{outcome.message}\n{case!r}"


BUGS = {
    "a bucket of one key, sinks and a bias": Case(
        engine="gpu", dtype="bfloat16", d=16, dv=16, sq=3, skv=1, backward=True,
        options={"bias": ("1111", "bfloat16", "normal"), "sinks": "high", "bucket": 128},
    ),
    "a block mask without batch entries": Case(
        engine="gpu", dtype="bfloat16", d=16, dv=16, hq=2, sq=1, skv=130, b=0, options={"block_mask": ("blocks", "kq1b")},
    ),
    "a block mask of heads, without heads": Case(
        engine="gpu", dtype="float16", d=16, dv=16, hq=0, hkv=0, sq=1, skv=4, b=2, options={"block_mask": ("prefix", "kqh1")},
    ),
    "gradients with a block mask, without heads": Case(
        engine="gpu", dtype="bfloat16", d=40, dv=40, hq=0, hkv=0, sq=7, skv=7, b=5, backward=True,
        options={"sinks": "high", "block_mask": ("documents", "kq1b")}, seed=700425,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_problems_that_failed(name, fake):
    """Findings of random problems."""
    outcome = execute(BUGS[name])
    assert outcome.kind == "passed", outcome.message


@pytest.mark.parametrize("number", range(40))
def test_problems_with_tangents_of_the_gpu(number, fake, monkeypatch):
    """Derivatives with up to three other options; none fails."""
    monkeypatch.setitem(drawing.LIMITS, "gpu", Limits(20_000, 60_000))
    rng, names = np.random.default_rng([number, 7]), {"jvp"}
    for _ in range(int(rng.integers(0, 4))):
        more = names | {str(rng.choice(list(OPTIONS)))}
        names = more if is_valid(with_required(more)) else names
    case = draw_options(names, number, "gpu")
    outcome = execute(case)
    assert outcome.kind in ("passed", "refused"), f"{outcome.message}\n{case!r}"


@pytest.mark.parametrize("number", range(60))
def test_problems_with_lengths_of_the_gpu(number, fake, monkeypatch):
    """The same with lengths and up to three other options: with and without copies, the padding is NaN."""
    monkeypatch.setitem(drawing.LIMITS, "gpu", Limits(20_000, 60_000))
    rng, names = np.random.default_rng([number, 6]), {"seq_lens_q", "seq_lens_kv"}
    for _ in range(int(rng.integers(0, 4))):
        more = names | {str(rng.choice([name for name in OPTIONS if name != "paged"]))}
        names = more if is_valid(with_required(more)) else names
    case = draw_options(names, number, "gpu")
    outcome = execute(case)
    assert outcome.kind in ("passed", "refused"), f"{outcome.message}\n{case!r}"


@pytest.mark.parametrize("number", range(60))
@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_problems_in_fp8(engine, number, fake, monkeypatch):
    """FP8 with up to three other options on both engines; none fails, and on the GPU most run."""
    monkeypatch.setitem(drawing.LIMITS, engine, Limits(20_000, 60_000))
    monkeypatch.setattr(drawing.Sampler, "head_dim", lambda sampler: 16 * sampler.pick(1, 2, 4, 5))
    rng, names = np.random.default_rng([number, 8]), {"fp8"}
    for _ in range(int(rng.integers(0, 4))):
        more = names | {str(rng.choice(sorted(ONLY_WITH["fp8"])))}
        names = more if is_valid(with_required(more)) else names
    case = draw_options(names, number, engine)
    outcome = execute(case)
    few = case.sq == 1 and not case.paged
    assert outcome.kind in (("passed", "refused") if engine == "gpu" and few else ("passed",)), f"{outcome.message}\n{case!r}"


def test_most_problems_in_fp8_are_supported():
    """Nine of ten are drawn to fit the limits of Hopper."""
    refused = 0
    for number in range(60):
        case = draw_options({"fp8"} | ({"paged"} if number % 2 else {"causal"}), number, "gpu")
        refused += any(why_not(problem, 91900, 90) for problem in problems(case) if not problem.trivial)
    assert refused < 12


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("d", [16, 256])
def test_the_tolerance_of_sums_in_fp8(d, dtype):
    """It covers the sums of tensor cores for one key, where no error averages out, and not sums with 10 bits."""
    rng, largest = np.random.default_rng(d), FORMATS[dtype].largest
    shape, kind = (20_000, d), numpy_dtype(dtype)
    q, k = (np.clip(rng.standard_normal(shape) * 90, -largest, largest).astype(kind).astype(np.float32) for _ in range(2))
    truth = (q.astype(np.float64) * k).sum(axis=1)
    allowed = 2 * FP8_SUM * np.linalg.norm(q, axis=1) * np.linalg.norm(k, axis=1)

    def errors():
        return np.abs(program.fp8_product(q[:, None], k[..., None])[:, 0, 0] - truth) / allowed

    assert errors().max() < 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "FP8_BITS", 10)
        assert errors().max() > 1


@pytest.mark.parametrize("error", [0, 1e-4, 3e-3])
def test_the_tolerance_of_the_log_sum_exp_in_fp8(error, fake, monkeypatch):
    """The error of sums on tensor cores passes, a larger one fails."""
    options = {"fp8": "float8_e4m3fn", "stats": True}
    case = Case("gpu", "float16", d=32, dv=16, hq=4, hkv=2, sq=20, skv=30, b=2, options=options)
    attention = cupy_sdpa.attention

    def inexact(*arrays, **options):
        out, stats = attention(*arrays, **options)
        return out, stats + np.float32(error)

    monkeypatch.setattr(cupy_sdpa, "attention", inexact)
    assert execute(case).kind == ("wrong" if error > 1e-3 else "passed")


@pytest.mark.parametrize("engine", ["cpu", "gpu"])
def test_wrong_results_in_fp8_are_found(engine, fake, monkeypatch):
    """An output that is a third too large fails."""
    case = Case(engine, "float16", d=32, dv=16, hq=2, hkv=1, sq=20, skv=30, seed=1, options={"fp8": "float8_e4m3fn"})
    assert execute(case).kind == "passed"
    dequantize = fp8.Fp8Array.dequantize
    monkeypatch.setattr(fp8.Fp8Array, "dequantize", lambda x, dtype: dequantize(x, dtype) * np.float32(1.33))
    assert execute(case).kind == "wrong"
