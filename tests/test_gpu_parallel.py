"""Groups on GPUs: threads with CuPy arrays on one GPU, and NCCL on two, compared with the reference in float64 and with one GPU."""

import numpy as np
import pytest
from parallel_cases import METHODS, Problem

import cupy_sdpa
from cupy_sdpa.parallel import Loopback, context_parallel, run_on_gpus, run_threads
from cupy_sdpa.problem.tensor_spec import numpy_dtype

pytestmark = pytest.mark.gpu
#: The options of each case, for 8 query and 4 key/value heads.
CASES = {
    "full": {},
    "causal": {"causal": True},
    "causal, bottom right": {"causal": "bottom_right"},
    "window": {"window": (50, 0)},
    "sinks": {"causal": True, "sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
    "softcap": {"causal": True, "softcap": 5.0},
    "ALiBi": {"causal": True, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
    "mask function": {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx // 64) >= (kv_idx // 64)},
    "score function": {"causal": True, "score_mod": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.01},
}
PACKED = {
    "packed, full": {},
    "packed, causal": {"causal": True},
    "packed, window": {"causal": True, "window": (40, 0)},
    "packed, sinks": {"causal": True, "sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
}
LENGTHS = (256, 64, 0, 192)


def problem_of(name, dtype):
    """Random arrays, and the options as numpy arrays."""
    rng = np.random.default_rng(0)
    batch = () if name in PACKED else (2,)
    length = sum(LENGTHS) if name in PACKED else 512
    shapes = (64, 8, length, *batch), (64, 4, length, *batch), (64, 4, length, *batch), (64, 8, length, *batch)
    arrays = (np.asfortranarray(rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))) for shape in shapes)
    options = dict(CASES.get(name) or PACKED.get(name) or {})
    if name in PACKED:
        options |= {f"cu_seqlens_{side}": np.cumsum([0, *LENGTHS], dtype=np.int32) for side in ("q", "kv")}
    return Problem(*arrays, options, packed=name in PACKED)


def on_device(cupy, options):
    """The options with arrays on the GPU, except the offsets of packed sequences."""
    return {
        name: cupy.asarray(x) if isinstance(x, np.ndarray) and not name.startswith("cu_seqlens") else x
        for name, x in options.items()
    }


def results_of(cupy, problem, method):
    """A function of a member that returns whole results of both passes as numpy arrays, after several repeats."""

    def member(own):
        cp = context_parallel(own, method=method)
        options = on_device(cupy, problem.options)
        starts = problem.options.get("cu_seqlens_q")
        rows = {"cu_seqlens": starts} if problem.packed else {"seqlen": problem.q.shape[2]}
        shards = {"cu_seqlens": starts}
        q, k, v, dout = (cp.shard(cupy.asarray(x), **shards) for x in (problem.q, problem.k, problem.v, problem.dout))
        for repeat in range(4):
            if repeat == 1:  # arrays changed in place change the results
                q *= 2
            elif repeat == 2:
                q /= 2
            out, stats = cp.attention(q, k, v, return_stats=True, **problem.lengths, **options)
            gradients = cp.attention_backward(dout, q, k, v, out, stats, **problem.lengths, **options)
        whole = [cp.unshard(out, **rows), cp.unshard(stats, axis=1 if problem.packed else 0, **rows)]
        found = [cupy.asnumpy(x) for x in (*whole, *(cp.unshard(x, **rows) for x in gradients))]
        cp.check()
        return found

    return member


def results_of_one_gpu(cupy, problem):
    """Both passes on one GPU."""
    options = on_device(cupy, problem.options)
    if problem.packed:
        starts = {name: cupy.asarray(problem.options[name]) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        options |= starts | {"max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS)}
    q, k, v, dout = (cupy.asarray(x) for x in (problem.q, problem.k, problem.v, problem.dout))
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
    return [cupy.asnumpy(x) for x in (out, stats, *cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options))]


def exact(problem):
    """Both passes in float64 on the CPU."""
    options = dict(problem.options)
    if problem.packed:
        options |= {"max_seqlen_q": max(LENGTHS), "max_seqlen_kv": max(LENGTHS)}
    q, k, v, dout = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v, problem.dout))
    shape = problem.q.shape[1:] if problem.packed else (q.shape[2], q.shape[1], q.shape[3])
    out, stats = cupy_sdpa.attention(q, k, v, stats=np.empty(shape, order="F"), **options)
    return out, stats, *cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options)


def assert_as_exact_as_one_gpu(results, alone, truth):
    """The error of every member is at most twice that of one GPU, plus the rounding of partial results."""
    for found in results:
        for name, got, other, wanted in zip(("out", "stats", "dq", "dk", "dv"), found, alone, truth, strict=True):
            got, other = got.astype(np.float64), other.astype(np.float64)
            assert np.isfinite(got).all(), name
            epsilon = 2**-8 if found[0].dtype.name == "bfloat16" else 2**-11
            floor = 1e-5 if name == "stats" else epsilon * np.abs(wanted).max()
            error, allowed = np.abs(got - wanted).max(), 2 * np.abs(other - wanted).max() + floor
            assert error <= allowed, f"{name}: {error} > {allowed}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*CASES, *PACKED])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_threads_on_one_gpu(cupy, dtype, name, method):
    """A group of threads with CuPy arrays on one GPU gives the results of one GPU, in both passes and after repeats."""
    problem = problem_of(name, dtype)
    results = run_threads(Loopback(2, timeout=120).members, results_of(cupy, problem, method))
    assert_as_exact_as_one_gpu(results, results_of_one_gpu(cupy, problem), exact(problem))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [3, 4])
def test_more_threads_with_delays(cupy, size, method):
    """Delays of threads change nothing, nor do lengths that the number of members does not divide."""
    if method == "all_to_all" and size == 3:
        pytest.skip("8 heads cannot be shared out among 3 members")
    problem = problem_of("full", "float16")
    results = run_threads(Loopback(size, timeout=120, max_delay=0.02).members, results_of(cupy, problem, method))
    assert_as_exact_as_one_gpu(results, results_of_one_gpu(cupy, problem), exact(problem))


@pytest.mark.multi_gpu
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*CASES, *PACKED])
def test_two_gpus(cupy, name, method):
    """Two GPUs that NCCL connects give the results of one GPU."""
    problem = problem_of(name, "bfloat16")
    results = run_on_gpus(results_of(cupy, problem, method), 2, timeout=60)
    assert_as_exact_as_one_gpu(results, results_of_one_gpu(cupy, problem), exact(problem))


@pytest.mark.multi_gpu
def test_a_member_that_ends_is_detected_by_nccl(cupy):
    """If a member does not call, the watchdog aborts the exchange of the other one, which raises."""
    from cupy_sdpa.parallel import GroupError

    def member(own):
        cp = context_parallel(own, method="ring", check=False)
        x = cupy.zeros((64, 4, 256, 1), np.float16, order="F")
        if own.rank == 1:
            return None
        cp.attention(x, x, x, causal=True)
        cupy.cuda.Device().synchronize()  # returns after the exchange was aborted
        with pytest.raises(GroupError, match="waited 2 s"):
            cp.attention(x, x, x, causal=True)
        return "raised"

    with pytest.raises(GroupError):  # the check at the end of the member
        run_on_gpus(member, 2, timeout=2.0)
