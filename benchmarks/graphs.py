"""Different recordings in turn: what launching them as CUDA graphs costs, and what launching their kernels does.

    python benchmarks/graphs.py [results.csv]

Each recording is of the same call on arrays of its own, a kernel of some microseconds forward and a handful of them backward.
Microseconds of a launch, medians, both ways in turn: on the device, behind other work that hides the host; of the host, while
the device has that work; and of both together in an endless row. By these figures ``replay.py`` chooses.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import cupy
from common import device_ms, interleaved, random_normal, versions, write_csv

from cupy_sdpa import attention, attention_backward
from cupy_sdpa.bench.measure import WallClock, busy_matrix
from cupy_sdpa.device.cuda_graph import Recording

SHAPE = (64, 8, 256, 2)
#: How many recordings there are, and how many launches are in a row.
COUNTS, LAUNCHES = (1, 2, 4, 8, 16, 32, 64), 64
ROUNDS = 11


def recordings(count: int) -> dict[str, list[Recording]]:
    """So many of both passes, each on arrays of its own."""
    made: dict[str, list[Recording]] = {"forward": [], "backward": []}
    for _ in range(count):
        q, k, v, dout = (random_normal(*SHAPE) for _ in range(4))
        out, stats = attention(q, k, v, return_stats=True)
        y, dq, dk, dv = (cupy.empty_like(q) for _ in range(4))
        forward = functools.partial(attention, q, k, v, out=y)
        backward = functools.partial(attention_backward, dout, q, k, v, out, stats, dq=dq, dk=dk, dv=dv)
        for call in (forward, backward):
            call()  # it is planned
        made["forward"].append(Recording(forward, [q, k, v, y]))
        made["backward"].append(Recording(backward, [dout, q, k, v, out, stats, dq, dk, dv]))
    return made


def synchronize(_: Any = None) -> None:
    """Wait for the device."""
    cupy.cuda.Device().synchronize()


def host_ms(launches: list[Callable[[], None]], busy: Any) -> float:
    """Milliseconds of the host for each launch, while the device has other work."""
    synchronize()
    for _ in range(8):
        _ = busy @ busy
    begin = time.perf_counter()
    for launch in launches:
        launch()
    taken = time.perf_counter() - begin
    synchronize()
    return taken * 1e3 / len(launches)


def main(path: str | None = None) -> None:
    """Print the times and, where a path is given, write them as CSV."""
    used = versions()
    print(", ".join(f"{name} {value}" for name, value in used.items()))
    busy, _ = busy_matrix()
    timed: dict[tuple[str, int, str, str], Callable[[], float]] = {}
    for count in COUNTS:
        for direction, every in recordings(count).items():
            ways = {
                "graph": [functools.partial(one.launch, of_many=False) for one in every],
                "kernels": [one.launch_one_by_one for one in every],
            }
            for way, few in ways.items():
                launches = few * (LAUNCHES // count)
                timed[direction, count, way, "device_us"] = functools.partial(device_ms, launches, busy)
                timed[direction, count, way, "host_us"] = functools.partial(host_ms, launches, busy)
                timed[direction, count, way, "row_us"] = WallClock(launches, synchronize)
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for (direction, count, way, column), times in interleaved(timed, ROUNDS).items():
        row = rows.setdefault((direction, count, way), {"direction": direction, "recordings": count, "way": way})
        row[column] = round(statistics.median(times) * 1e3, 2)
    for row in rows.values():
        print(", ".join(f"{name} {value}" for name, value in row.items()))
    if path:
        write_csv(path, [{**row, **used} for row in rows.values()])


if __name__ == "__main__":
    main(*sys.argv[1:])
