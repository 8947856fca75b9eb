"""FP8 attention beside bfloat16 and PyTorch's scaled_dot_product_attention: times, or with --errors the errors.

    python -m benchmarks fp8 [results.csv] [--lengths N ...]
    python -m benchmarks fp8 --decode [decode.csv] [--lengths N ...]
    python -m benchmarks fp8 --errors [errors.csv] [--lengths N ...] [--engine cuDNN numpy]

Times: batch 1, head dim 128, causal and full, interleaved in one run, by CUDA events as in ``compare``. ``fp8`` is attention of
FP8 arrays, ``quantized`` the conversion of q, k and v and the attention, ``converted`` also the conversion of the output to
bfloat16; ``rotated`` is ``converted`` with a rotation of q and k. PyTorch chooses its fastest backend. Decoding: see
benchmarks/fp8/decode.py. Errors: see benchmarks/fp8/errors.py; without a GPU they are those of the CPU engine.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import cupy_sdpa
from cupy_sdpa import fp8
from cupy_sdpa._cli.helpers.console import positive
from cupy_sdpa.device import cupy_runtime

from ..common.device import as_torch, busy_matrix, free_memory, input_sets, random_normal
from ..common.machine import versions
from ..common.script import add_csv, check_gpu, listed, parser, write_csv
from ..common.timing import device_ms, interleaved, ratio
from . import decode, errors

D = 128
LENGTHS, HEADS = (2048, 8192, 32768), ((16, 16), (64, 8))
ROUNDS, PRODUCTS, SECONDS = 11, 24, 0.4


def contenders(q: Any, k: Any, v: Any, *, causal: bool) -> dict[str, Callable[[], Any]]:
    """The calls for one set of arrays."""
    q8, k8, v8 = fp8.quantize_qkv(q, k, v)

    def quantized(*, rotate: bool = False) -> Any:
        return fp8.attention(*fp8.quantize_qkv(q, k, v, rotate=rotate), causal=causal)

    calls: dict[str, Callable[[], Any]] = {
        "bfloat16": functools.partial(cupy_sdpa.attention, q, k, v, causal=causal),
        "fp8": functools.partial(fp8.attention, q8, k8, v8, causal=causal),
        "quantized": quantized,
        "converted": lambda: quantized().dequantize("bfloat16"),
        "rotated": lambda: quantized(rotate=True).dequantize("bfloat16"),
        "quantize": functools.partial(fp8.quantize_qkv, q, k, v),
        "quantize_rotated": functools.partial(fp8.quantize_qkv, q, k, v, rotate=True),
    }
    try:
        import torch
    except ImportError:
        return calls
    tensors = [as_torch(x) for x in (q, k, v)]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return calls | {"torch": functools.partial(sdpa, *tensors, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1])}


def measure(length: int, heads: tuple[int, int], *, causal: bool) -> dict[str, Any]:
    """One row of the table: milliseconds, and the time of bfloat16 divided by that of each other contender."""
    hq, hkv = heads
    several: dict[str, list[Callable[[], Any]]] = {}
    for _ in range(input_sets(2 * D * length * (2 * hq + 2 * hkv))):
        arrays = (random_normal(D, hq, length, 1), random_normal(D, hkv, length, 1), random_normal(D, hkv, length, 1))
        for name, call in contenders(*arrays, causal=causal).items():
            several.setdefault(name, []).append(call)
    for calls in several.values():  # so that repeated calls are captured before the measurement
        for _ in range(4):
            for call in calls:
                call()
    busy, _ = busy_matrix()
    timers = {name: functools.partial(device_ms, calls, busy, PRODUCTS) for name, calls in several.items()}
    times = interleaved(timers, ROUNDS, seconds=SECONDS, min_rounds=3)
    row: dict[str, Any] = {"length": length, "heads": f"{hq}/{hkv}", "causal": causal}
    row["fp8_tflops"] = round(4 * D * hq * length**2 / (1 + causal) / statistics.median(times["fp8"]) / 1e9)
    row |= {f"{name}_ms": f"{statistics.median(found):.4f}" for name, found in times.items()}
    others = [name for name in times if not name.startswith(("bfloat16", "quantize_")) and name != "quantize"]
    return row | {f"{name}_speedup": round(ratio(times["bfloat16"], times[name]), 3) for name in others}


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    arguments = parser("fp8", __doc__)
    add_csv(arguments)
    arguments.add_argument("--errors", action="store_true", help="measure errors instead of times")
    arguments.add_argument("--decode", action="store_true", help="measure decoding with an FP8 cache")
    arguments.add_argument("--lengths", nargs="*", type=positive, metavar="N", help="the numbers of keys")
    arguments.add_argument("--engine", nargs="*", choices=("cuDNN", "numpy"), help="with --errors: the engines (default: all)")
    chosen = arguments.parse_args(words)
    rows: list[dict[str, Any]] = []
    if chosen.errors:
        on_gpu = cupy_runtime.current_device() is not None
        engines = chosen.engine or ["numpy", *(["cuDNN"] if on_gpu else [])]
        if "cuDNN" in engines:
            check_gpu("fp8 --errors --engine cuDNN")
        used = versions() if "cuDNN" in engines else {}
        for row in errors.rows(chosen.lengths or errors.LENGTHS, on_gpu="cuDNN" in engines, on_cpu="numpy" in engines):
            print(listed(row), flush=True)
            rows.append(row | {name: used.get(name, "") for name in ("gpu", "cudnn")})
    elif chosen.decode:
        check_gpu("fp8 --decode")
        used = versions()
        print(listed(used))
        for batch, keys in decode.PROBLEMS:
            if chosen.lengths is None or keys in chosen.lengths:
                row = decode.measure(batch, keys)
                print(listed(row), flush=True)
                rows.append(row | used)
                free_memory()
    else:
        check_gpu("fp8")
        used = versions()
        print(listed(used))
        for length in chosen.lengths or LENGTHS:
            for heads in HEADS:
                for causal in (True, False):
                    row = measure(length, heads, causal=causal)
                    print(listed(row), flush=True)
                    rows.append(row | used)
                    free_memory()
    if chosen.csv and rows:
        write_csv(chosen.csv, rows)
    return 0
