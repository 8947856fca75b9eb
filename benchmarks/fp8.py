"""FP8 attention compared with bfloat16 and PyTorch's scaled_dot_product_attention: times, or with --errors the errors.

    python -m benchmarks fp8 [results.csv] [--lengths N ...]
    python -m benchmarks fp8 --decode [decode.csv] [--lengths N ...]
    python -m benchmarks fp8 --errors [errors.csv] [--lengths N ...] [--engine cuDNN numpy]

Times: batch 1, head dim 128, causal and full, interleaved in one run, by CUDA events as in ``compare``. ``fp8`` is attention of
FP8 arrays, ``quantized`` the conversion of q, k and v and the attention, ``converted`` also the conversion of the output to
bfloat16; ``rotated`` is ``converted`` with a rotation of q and k. The mean of v is subtracted before and added after, except in
those with ``mean_kept``: the difference is what that costs. PyTorch chooses its fastest backend.

Decoding: one query per sequence with an FP8 cache, compared with a bfloat16 cache of the same tokens, pages of 64 tokens.
``fp8`` has FP8 queries and an FP8 output, ``converted`` bfloat16 queries, which each call converts, and a bfloat16 output;
``converted_mean_kept`` adds no mean to it, so its values are wrong. The keys exceed the L2 cache. Errors: see
benchmarks/fp8_errors.py; without a GPU they are the CPU engine's.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cupy_sdpa
from cupy_sdpa import fp8
from cupy_sdpa.cli.console import positive
from cupy_sdpa.core.runtime import cupy_runtime

from . import fp8_errors, runner
from .device import as_torch, copy_gbs, input_sets, random_normal, timed, versions
from .timing import ratio

D = 128
LENGTHS, HEADS = (2048, 8192, 32768), ((16, 16), (64, 8))
ROUNDS = 11
LIMITS: dict[str, Any] = {"seconds": 0.4, "min_rounds": 3}
#: Decoding: query and key/value heads, the tokens of a page, and (batch, keys).
DECODE_HEADS, KEY_HEADS, PAGE = 32, 8, 64
PROBLEMS = ((8, 8192), (8, 32768), (32, 8192), (32, 32768))
#: The tokens that are appended at once.
STEP = 4096
FP8 = "float8_e4m3fn"


def contenders(q: Any, k: Any, v: Any, *, causal: bool) -> dict[str, Callable[[], Any]]:
    """Return the calls for one set of arrays."""
    q8, k8, v8 = fp8.quantize_qkv(q, k, v)
    mean_kept = fp8.quantize_qkv(q, k, v, center=False)

    def quantized(*, rotate: bool = False, center: bool = True) -> Any:
        return fp8.attention(*fp8.quantize_qkv(q, k, v, rotate=rotate, center=center), causal=causal)

    calls: dict[str, Callable[[], Any]] = {
        "bfloat16": functools.partial(cupy_sdpa.attention, q, k, v, causal=causal),
        "fp8": functools.partial(fp8.attention, q8, k8, v8, causal=causal),
        "fp8_mean_kept": functools.partial(fp8.attention, *mean_kept, causal=causal),
        "quantized": quantized,
        "converted": lambda: quantized().dequantize("bfloat16"),
        "converted_mean_kept": lambda: quantized(center=False).dequantize("bfloat16"),
        "rotated": lambda: quantized(rotate=True).dequantize("bfloat16"),
        "quantize": functools.partial(fp8.quantize_qkv, q, k, v),
        "quantize_mean_kept": functools.partial(fp8.quantize_qkv, q, k, v, center=False),
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
    """Return one row of the table: milliseconds, and the time of bfloat16 divided by each other contender's time."""
    hq, hkv = heads
    several: dict[str, list[Callable[[], Any]]] = {}
    for _ in range(input_sets(2 * D * length * (2 * hq + 2 * hkv))):
        arrays = (random_normal(D, hq, length, 1), random_normal(D, hkv, length, 1), random_normal(D, hkv, length, 1))
        for name, call in contenders(*arrays, causal=causal).items():
            several.setdefault(name, []).append(call)
    times = timed(several, ROUNDS, **LIMITS)
    row: dict[str, Any] = {"length": length, "heads": f"{hq}/{hkv}", "causal": causal}
    row["fp8_tflops"] = round(4 * D * hq * length**2 / (1 + causal) / statistics.median(times["fp8"]) / 1e9)
    row |= {f"{name}_ms": f"{statistics.median(found):.4f}" for name, found in times.items()}
    others = [name for name in times if not name.startswith(("bfloat16", "quantize_")) and name != "quantize"]
    return row | {f"{name}_speedup": round(ratio(times["bfloat16"], times[name]), 3) for name in others}


def caches(batch: int, keys: int) -> dict[str, Any]:
    """Return a cache of each dtype with the same tokens."""
    made = {
        name: cupy_sdpa.KVCache(D, KEY_HEADS, pages=batch * -(-keys // PAGE), batch=batch, page_size=PAGE, dtype=name)
        for name in ("bfloat16", FP8)
    }
    for begin in range(0, keys, STEP):
        tokens = [random_normal(D, KEY_HEADS, min(STEP, keys - begin), batch) for _ in range(2)]
        for cache in made.values():
            cache.append(*tokens)
    return made


def decoding(batch: int, keys: int) -> dict[str, Callable[[], Any]]:
    """Return the calls of a decoding step's attention."""
    q, made = random_normal(D, DECODE_HEADS, 1, batch), caches(batch, keys)
    q8 = fp8.quantize(q)

    def call(query: Any, name: str, values: Any = None) -> Callable[[], Any]:
        cache = made[name]
        options = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
        return functools.partial(cupy_sdpa.attention, query, cache.keys(), values or cache.values(), **options)

    calls = {"bfloat16": call(q, "bfloat16"), "fp8": call(q8, FP8), "converted": call(q, FP8)}
    v = made[FP8].values()
    return calls | {"converted_mean_kept": call(q, FP8, fp8.Fp8Array(v.data, v.descale, scale=v.scale))}


def measure_decoding(batch: int, keys: int) -> dict[str, Any]:
    """Return one row: milliseconds, bfloat16's time divided by FP8's, and the rate at which FP8 pages are read."""
    times = timed({name: [call] for name, call in decoding(batch, keys).items()}, ROUNDS, **LIMITS)
    row: dict[str, Any] = {"batch": batch, "keys": keys, "heads": f"{DECODE_HEADS}/{KEY_HEADS}"}
    row |= {f"{name}_ms": f"{statistics.median(found):.4f}" for name, found in times.items()}
    row |= {f"{name}_speedup": round(ratio(times["bfloat16"], times[name]), 3) for name in ("fp8", "converted")}
    rate = 2 * D * KEY_HEADS * keys * batch / statistics.median(times["fp8"]) / 1e6
    return row | {"fp8_gbs": round(rate), "copy_gbs": round(copy_gbs())}


def rows(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the rows: errors, decoding, or times."""
    if given.errors:
        engines = engines_of(given)
        lengths = given.lengths or fp8_errors.LENGTHS
        used = versions() if "cuDNN" in engines else {}
        for row in fp8_errors.rows(lengths, on_gpu="cuDNN" in engines, on_cpu="numpy" in engines):
            yield row | {name: used.get(name, "") for name in ("gpu", "cudnn")}
    elif given.decode:
        for batch, keys in PROBLEMS:
            if given.lengths is None or keys in given.lengths:
                yield measure_decoding(batch, keys)
    else:
        for length, heads, causal in itertools.product(given.lengths or LENGTHS, HEADS, (True, False)):
            yield measure(length, heads, causal=causal)


def engines_of(given: argparse.Namespace) -> Sequence[str]:
    """Return the engines whose errors are measured."""
    found: Sequence[str] = given.engine or ["numpy", *(["cuDNN"] if cupy_runtime.current_device() is not None else [])]
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--errors", action="store_true", help="measure errors instead of times")
    parser.add_argument("--decode", action="store_true", help="measure decoding with an FP8 cache")
    parser.add_argument("--lengths", nargs="*", type=positive, metavar="N", help="the numbers of keys")
    parser.add_argument("--engine", nargs="*", choices=("cuDNN", "numpy"), help="with --errors: the engines (default: all)")


def main(words: Sequence[str]) -> int:
    """Run the benchmark."""
    needs_gpu = lambda given: not given.errors or "cuDNN" in engines_of(given)  # noqa: E731
    return runner.run("fp8", __doc__, words, rows, add_options, needs_gpu=needs_gpu)
