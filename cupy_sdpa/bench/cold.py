"""The first calls of a new process: ``python -m cupy_sdpa.bench.cold WAY PRESET`` prints their milliseconds.

The clock runs from "libraries imported, inputs made" until the first result is there: loading cuDNN's libraries and making its
handle are in it. The next call is the first one of another length, so it is what a plan takes where the libraries are loaded.
The cache of compiled kernels that the CUDA driver keeps on disk is left as it is.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import time

from . import presets
from .way import Inputs, Ours
from .ways import WAYS, why_not
from .with_torch import TorchCudnn, TorchFlash

#: The ways whose cold start is measured, and how often.
COLD = (Ours.name, TorchCudnn.name, TorchFlash.name)
REPEATS = 3
#: How much longer the sequences of the next call are.
OTHER = 64
_SECONDS = 300


class Failed(Exception):
    """The process ended badly; the message is its last line."""


def cold_ms(way: str, preset: str) -> dict[str, float]:
    """Milliseconds of a first call, the median of some processes; ours without kept plans and with them, and the next call.

    Raises:
        Failed: a process ended badly.
    """
    found: dict[str, list[float]] = {"cold_ms": [], "cold_kept_ms": [], "next_kept_ms": []}
    for _ in range(REPEATS):
        with tempfile.TemporaryDirectory() as folder:
            found["cold_ms"].append(_in_a_process(way, preset, folder)[0])
            if way == Ours.name:
                first, following = _in_a_process(way, preset, folder)
                found["cold_kept_ms"].append(first)
                found["next_kept_ms"].append(following)
    return {column: statistics.median(times) for column, times in found.items() if times}


def _in_a_process(way: str, preset: str, folder: str) -> tuple[float, float]:
    environment = {**os.environ, "CUPY_SDPA_CACHE_DIR": folder, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-m", __spec__.name, way, preset]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"no result after {_SECONDS} seconds") from error
    if done.returncode:
        raise Failed((done.stderr.splitlines() or [f"exit status {done.returncode}"])[-1])
    first, following = done.stdout.split()[-2:]
    return float(first), float(following)


def main(way: str, name: str) -> None:
    """Time the first call in this process, and that of another length."""
    if reason := why_not(WAYS[way]):
        raise Failed(reason)
    (preset,) = presets.chosen([name])
    other = dataclasses.replace(preset, skv=preset.skv + OTHER, sq=preset.sq if preset.decode else preset.sq + OTHER)
    for asked in (preset, other):
        one, inputs = WAYS[way](asked, "forward"), Inputs(asked)
        with one.active():
            call = one.call(inputs)
            one.wait()
            begin = time.perf_counter()
            one.wait(call())
            print((time.perf_counter() - begin) * 1e3)


if __name__ == "__main__":
    main(*sys.argv[1:])
