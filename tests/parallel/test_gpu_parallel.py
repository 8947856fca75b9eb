"""Groups on GPUs: threads with CuPy arrays on one GPU, and NCCL on two, compared with the reference in float64 and with one GPU."""

import os
import socket
import subprocess
import sys
from pathlib import Path

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
@pytest.mark.parametrize(
    ("mode", "error"),
    [
        ("ends", "GroupError"),
        ("is killed", "GroupError"),
        ("does not call", "GroupError"),
        ("calls with another shape", "ValueError: members call with different shapes"),
    ],
)
def test_processes_do_not_wait_for_ever(mode, error):
    """A process raises if the other one ends, hangs or calls with another shape: one process for each GPU, as with torchrun."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    folder = Path(__file__).parents[1]
    paths = {"PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent)]), "CUPY_SDPA_PORT": str(port)}
    started = [
        subprocess.Popen(
            [sys.executable, str(folder / "parallel_member.py"), mode],
            env={**os.environ, **paths, "WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        text, _ = started[0].communicate(timeout=60)
    finally:
        for process in started:
            process.kill()
            process.communicate()
    line = text.strip().splitlines()[-1]
    assert error in line, text
    assert float(line.split()[0]) < 10, text
