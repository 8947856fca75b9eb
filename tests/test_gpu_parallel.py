"""Groups on GPUs: threads with CuPy arrays on one GPU, and NCCL on two, compared with the reference in float64 and with one GPU."""

import numpy as np
import pytest
from parallel_cases import METHODS
from parallel_on_gpu import CASES, PACKED, assert_as_exact_as_one_gpu, exact, problem_of, results_of, results_of_one_gpu

from cupy_sdpa.parallel import GroupError, Loopback, context_parallel, run_on_gpus, run_threads

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", [*CASES, *PACKED])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_threads_on_one_gpu(cupy, dtype, name, method):
    """A group of threads with CuPy arrays on one GPU gives the results of one GPU, in both passes and after repeats."""
    problem = problem_of(name, dtype)
    results = run_threads(Loopback(2, timeout=120).members, results_of(cupy, problem, method))
    assert_as_exact_as_one_gpu(results, results_of_one_gpu(cupy, problem), exact(problem))


@pytest.mark.parametrize(
    ("size", "method"),
    [(size, method) for size in (3, 4) for method in METHODS if (size, method) != (3, "all_to_all")],  # 8 heads
)
def test_more_threads_with_delays(cupy, size, method):
    """Delays of threads change nothing, nor do lengths that the number of members does not divide."""
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
def test_a_thread_that_ends_is_detected(cupy):
    """If a thread does not call, the other one raises in the host, before anything is enqueued."""

    def member(own):
        cp = context_parallel(own, method="ring", check=False)
        x = cupy.zeros((64, 4, 256, 1), np.float16, order="F")
        if own.rank == 0:
            with pytest.raises(GroupError, match="did not call within 2 s"):
                cp.attention(x, x, x, causal=True)

    with pytest.raises(GroupError):  # the check at the end of the member
        run_on_gpus(member, 2, timeout=2.0)


@pytest.mark.multi_gpu
def test_a_member_that_ends_is_detected_by_nccl(cupy):
    """If a member does not call, the watchdog aborts the exchange of the other one, which raises; as with processes."""

    def member(own):
        own._meeting = None  # as in a process of its own
        cp = context_parallel(own, method="ring", check=False)
        x = cupy.zeros((64, 4, 256, 1), np.float16, order="F")
        if own.rank == 1:
            return
        cp.attention(x, x, x, causal=True)
        cupy.cuda.Device().synchronize()  # returns after the exchange was aborted
        with pytest.raises(GroupError, match="waited 2 s"):
            cp.attention(x, x, x, causal=True)

    with pytest.raises(GroupError):  # the check at the end of the member
        run_on_gpus(member, 2, timeout=2.0)
