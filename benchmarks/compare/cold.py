"""First calls in a new process: ``python -m benchmarks.compare.cold CONTENDER PRESET`` prints their milliseconds.

A first call is timed from "libraries imported, inputs allocated" until its result is ready: it includes loading cuDNN's
libraries and creating a handle. The second call has another length, so its time is that of a new plan with the libraries
loaded. The CUDA driver's own cache of compiled kernels on disk is not touched.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time

from .. import presets
from ..contenders.contender import Inputs
from ..contenders.ours import Ours
from ..contenders.pytorch import TorchCudnn, TorchFlash
from ..contenders.registry import CONTENDERS, unavailable

#: The contenders whose cold start is measured, and the number of processes for each.
COLD, REPEATS = (Ours.name, TorchCudnn.name, TorchFlash.name), 3
#: The second call's sequences are longer by this much.
EXTRA_LENGTH = 64
_TIMEOUT_SECONDS = 300


class ColdStartError(Exception):
    """The process failed; the message is the last line of its output."""


def cold_ms(contender: str, preset: str) -> dict[str, float]:
    """Median milliseconds of first calls, by column; for this package also with plans in the disk cache, and of second calls.

    Raises:
        ColdStartError: a process failed.
    """
    times: dict[str, list[float]] = {"cold_ms": [], "cold_kept_ms": [], "next_kept_ms": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            times["cold_ms"].append(_run_process(contender, preset, folder)[0])
            if contender == Ours.name:
                first, second = _run_process(contender, preset, folder)
                times["cold_kept_ms"].append(first)
                times["next_kept_ms"].append(second)
    return {column: statistics.median(values) for column, values in times.items() if values}


def _run_process(contender: str, preset: str, folder: str) -> tuple[float, float]:
    environment = {**os.environ, "CUPY_SDPA_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __spec__.name, contender, preset]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise ColdStartError(f"no result after {_TIMEOUT_SECONDS} seconds") from error
    if done.returncode:
        raise ColdStartError((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1])
    first, second = done.stdout.split()[-2:]
    return float(first), float(second)


def main(contender: str, name: str) -> None:
    """Time the first call in this process, and a call with another length."""
    if reason := unavailable(CONTENDERS[contender]):
        raise ColdStartError(reason)
    (preset,) = presets.select([name])
    sq = preset.sq if preset.decode else preset.sq + EXTRA_LENGTH
    longer = dataclasses.replace(preset, skv=preset.skv + EXTRA_LENGTH, sq=sq)
    for problem in (preset, longer):
        implementation, inputs = CONTENDERS[contender](problem, "forward"), Inputs(problem)
        with implementation.active():
            call = implementation.call(inputs)
            implementation.wait()
            begin = time.perf_counter()
            implementation.wait(call())
            print((time.perf_counter() - begin) * 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
