"""``bench --trace``: time the problems of a trace on this machine."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..._cudnn.library import library
from ...device import cupy_runtime
from ...errors import CudnnError, Unsupported
from ...version import version_text
from ..helpers import machine
from ..helpers.console import CommandError, Help, Progress, add_json, counted, milliseconds, one_line, print_labeled, result
from ..helpers.trace import read_entries
from .timing import measure

if TYPE_CHECKING:
    from ...check.traced.entry import Entry

_EPILOG = """\
examples:
  CUPY_SDPA_TRACE=problems.jsonl python train.py
  python -m cupy_sdpa bench --trace problems.jsonl

Array contents are random, and sequences have their full lengths. On a GPU the
time is that of the device, and the host time is that of a repeated call. The
benchmarks that compare with other libraries are in the repository:
python -m benchmarks compare
"""
#: The number of calls whose host time is measured.
HOST_CALLS = 20


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser(
        "bench",
        help="time the problems that a program wrote to a file",
        description="Time every problem of a trace on this machine: on the GPU, or without one on the CPU engine.",
        epilog=_EPILOG,
        formatter_class=Help,
    )
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="a file written by CUPY_SDPA_TRACE")
    parser.add_argument("--engine", choices=("gpu", "cpu"), help="default: gpu, or without a GPU cpu")
    add_json(parser)
    parser.set_defaults(command=command)


def command(arguments: argparse.Namespace) -> int:
    """Run ``bench``; returns 1 if a problem cannot run.

    Raises:
        CommandError: the trace cannot be read, or the engine cannot run.
    """
    entries = read_entries(arguments.trace)
    obstacles = machine.obstacles()
    if arguments.engine == "gpu" and obstacles:
        raise CommandError(f"--engine gpu cannot run here: {obstacles[0]}")
    engine = arguments.engine or ("cpu" if obstacles else "gpu")
    device = _device(engine)
    result(engine=engine, device=device, problems=[])
    print_labeled("engine", device)
    rows = []
    with Progress("timing") as progress:
        for number, entry in enumerate(entries):
            progress(number, len(entries))
            rows.append(_row(entry, engine))
    result(problems=rows)
    for entry, row in zip(entries, rows, strict=True):
        print_labeled(f"line {entry.number}", "; ".join([*_texts(row), entry.describe()]))
    refused = sum(row["reason"] != "" for row in rows)
    print_labeled("timed", f"{counted(len(rows) - refused, 'problem')}, {refused} not timed")
    return 1 if refused else 0


def _device(engine: str) -> str:
    if engine == "cpu":
        return f"the CPU engine, numpy {np.__version__}"
    device = cupy_runtime.cupy().cuda.runtime.getDevice()
    return f"{machine.gpus()[device]}; cuDNN {version_text(library().version)}"


def _row(entry: Entry, engine: str) -> dict[str, Any]:
    """The times of a problem, or the reason why it was not timed."""
    from ...check.traced.calls import replayed

    row = {"line": entry.number, "call": entry.describe(), "time_ms": None, "host_us": None, "tflops": None, "reason": ""}
    try:
        call = replayed(entry, engine)
        timing = measure(call.run, engine == "gpu")
    except (Unsupported, CudnnError, TypeError, ValueError, MemoryError) as error:
        return row | {"reason": one_line(str(error))}
    except Exception as error:  # CuPy's OutOfMemoryError
        if "OutOfMemory" not in type(error).__name__:
            raise
        return row | {"reason": f"not enough memory: {one_line(str(error))}"}
    host = _host_time(call.run) if engine == "gpu" else None
    return row | {
        "time_ms": 1e3 * timing.median, "tflops": call.operations / timing.median / 1e12,
        "host_us": None if host is None else 1e6 * host,
    }  # fmt: skip


def _host_time(call: Any) -> float:
    """The median seconds until a repeated call returns; the device is idle before each of them."""
    stream, times = cupy_runtime.cupy().cuda.get_current_stream(), []
    for _ in range(HOST_CALLS):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
        stream.synchronize()
    return float(np.median(times))


def _texts(row: dict[str, Any]) -> Iterator[str]:
    """The times in words."""
    if row["reason"]:
        yield f"not timed: {row['reason']}"
        return
    yield f"{milliseconds(row['time_ms'] / 1e3)}, {row['tflops']:.3g} TFLOP/s"
    if row["host_us"] is not None:
        yield f"host {row['host_us']:.0f} us"
