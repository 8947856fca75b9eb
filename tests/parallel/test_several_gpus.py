"""Groups of several GPUs that NCCL connects: results, and threads and processes that end, hang or disagree."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from parallel_cases import METHODS, Problem, assert_close

from cupy_sdpa.parallel import GroupError, context_parallel, run_on_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.multi_gpu]
#: Heads, lengths and options.
PROBLEMS = {
    "causal": {"length": 512},
    "odd length": {"length": 317},
    "window": {"length": 512, "options": {"window": (50, 0)}},
    "sinks": {"length": 512, "options": {"sinks": np.linspace(-1, 1, 8, dtype=np.float32)}},
    "packed": {"length": (256, 64, 0, 192)},
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_two_gpus(cupy, name, method):
    """Two GPUs give the results of the reference, also in calls that are replayed."""
    problem = Problem(heads=(8, 4), d=64, dtype=np.float16, **PROBLEMS[name])
    found = run_on_gpus(problem.member(method, cupy.asarray, calls=4), 2, timeout=60)
    assert_close(found, problem.expected(), 6e-3)


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
