"""Several captured CUDA graphs in turn: the cost of launching the graphs, and of launching their kernels one by one.

    python -m benchmarks graphs [results.csv]

Each graph captures the same call on its own arrays: one short kernel forward, a few backward. Median microseconds per launch,
both methods interleaved: on the device, after other work that hides the host's time; on the host, while the device does that
work; and of both in a long sequence of launches. The choice between the methods in ``device/cuda_graph.py`` is based on these
numbers.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import cupy

from cupy_sdpa import attention, attention_backward
from cupy_sdpa.device.cuda_graph import Recording

from .common.device import busy_matrix, random_normal
from .common.machine import versions
from .common.script import csv_path, listed, write_csv
from .common.timing import WallClock, device_ms, interleaved

SHAPE = (64, 8, 256, 2)
#: The numbers of captured graphs, and the number of launches in a sequence.
COUNTS, LAUNCHES = (1, 2, 4, 8, 16, 32, 64), 64
ROUNDS = 11


def recordings(count: int) -> dict[str, list[Recording]]:
    """Captured graphs of both passes, each on its own arrays."""
    captured: dict[str, list[Recording]] = {"forward": [], "backward": []}
    for _ in range(count):
        q, k, v, dout = (random_normal(*SHAPE) for _ in range(4))
        out, stats = attention(q, k, v, return_stats=True)
        y, dq, dk, dv = (cupy.empty_like(q) for _ in range(4))
        forward: Callable[[], Any] = functools.partial(attention, q, k, v, out=y)
        backward: Callable[[], Any] = functools.partial(attention_backward, dout, q, k, v, out, stats, dq=dq, dk=dk, dv=dv)
        for call in (forward, backward):
            call()  # builds the plan
        captured["forward"].append(Recording(forward, [q, k, v, y]))
        captured["backward"].append(Recording(backward, [dout, q, k, v, out, stats, dq, dk, dv]))
    return captured


def synchronize(_: Any = None) -> None:
    """Wait for the device."""
    cupy.cuda.Device().synchronize()


def host_ms(launches: list[Callable[[], None]], busy: Any) -> float:
    """Milliseconds of the host per launch, while the device does other work."""
    synchronize()
    for _ in range(8):
        _ = busy @ busy
    begin = time.perf_counter()
    for launch in launches:
        launch()
    seconds = time.perf_counter() - begin
    synchronize()
    return seconds * 1e3 / len(launches)


def main(words: Sequence[str]) -> int:
    """Measure, print the times and write them."""
    path = csv_path("graphs", __doc__, words)
    used = versions()
    print(listed(used))
    busy, _ = busy_matrix()
    timers: dict[tuple[str, int, str, str], Callable[[], float]] = {}
    for count in COUNTS:
        for direction, every in recordings(count).items():
            methods: dict[str, list[Callable[[], None]]] = {
                "graph": [functools.partial(one.launch, of_many=False) for one in every],
                "kernels": [one.launch_one_by_one for one in every],
            }
            for method, launchers in methods.items():
                launches = launchers * (LAUNCHES // count)
                timers[direction, count, method, "device_us"] = functools.partial(device_ms, launches, busy)
                timers[direction, count, method, "host_us"] = functools.partial(host_ms, launches, busy)
                timers[direction, count, method, "row_us"] = WallClock(launches, synchronize)
    rows: dict[tuple[str, int, str], dict[str, Any]] = {}
    for (direction, count, method, column), times in interleaved(timers, ROUNDS).items():
        row = rows.setdefault((direction, count, method), {"direction": direction, "recordings": count, "way": method})
        row[column] = round(statistics.median(times) * 1e3, 2)
    for row in rows.values():
        print(listed(row))
    if path:
        write_csv(path, [{**row, **used} for row in rows.values()])
    return 0
