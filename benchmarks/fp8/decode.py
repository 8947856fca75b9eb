"""Decoding with an FP8 key/value cache beside a bfloat16 cache of the same tokens.

One query per sequence, 32 query and 8 key/value heads, head dim 128, pages of 64 tokens. ``fp8`` has FP8 queries and an FP8
output, ``converted`` bfloat16 queries, which each call converts, and a bfloat16 output. The keys exceed the L2 cache.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import cupy_sdpa
from cupy_sdpa import fp8

from ..common.device import busy_matrix, copy_gbs, random_normal
from ..common.timing import device_ms, interleaved, ratio

HEADS, KEY_HEADS, D, PAGE = 32, 8, 128, 64
#: (batch, keys)
PROBLEMS = ((8, 8192), (8, 32768), (32, 8192), (32, 32768))
#: The tokens that are appended at once.
STEP = 4096
ROUNDS, PRODUCTS, SECONDS = 11, 24, 0.4
FP8 = "float8_e4m3fn"


def caches(batch: int, keys: int) -> dict[str, Any]:
    """A cache of each dtype with the same tokens."""
    made = {
        name: cupy_sdpa.KVCache(D, KEY_HEADS, pages=batch * -(-keys // PAGE), batch=batch, page_size=PAGE, dtype=name)
        for name in ("bfloat16", FP8)
    }
    for begin in range(0, keys, STEP):
        tokens = [random_normal(D, KEY_HEADS, min(STEP, keys - begin), batch) for _ in range(2)]
        for cache in made.values():
            cache.append(*tokens)
    return made


def contenders(batch: int, keys: int) -> dict[str, Callable[[], Any]]:
    """The calls of a decoding step's attention."""
    q, made = random_normal(D, HEADS, 1, batch), caches(batch, keys)
    q8 = fp8.quantize(q)

    def call(query: Any, name: str) -> Callable[[], Any]:
        cache = made[name]
        options = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
        return functools.partial(cupy_sdpa.attention, query, cache.keys(), cache.values(), **options)

    return {"bfloat16": call(q, "bfloat16"), "fp8": call(q8, FP8), "converted": call(q, FP8)}


def measure(batch: int, keys: int) -> dict[str, Any]:
    """One row: milliseconds, the time of bfloat16 divided by that of FP8, and the rate at which FP8 pages are read."""
    calls = contenders(batch, keys)
    for call in calls.values():  # so that repeated calls are captured before the measurement
        for _ in range(4):
            call()
    busy, _ = busy_matrix()
    timers = {name: functools.partial(device_ms, [call], busy, PRODUCTS) for name, call in calls.items()}
    times = interleaved(timers, ROUNDS, seconds=SECONDS, min_rounds=3)
    row: dict[str, Any] = {"batch": batch, "keys": keys, "heads": f"{HEADS}/{KEY_HEADS}"}
    row |= {f"{name}_ms": f"{statistics.median(found):.4f}" for name, found in times.items()}
    row |= {f"{name}_speedup": round(ratio(times["bfloat16"], times[name]), 3) for name in ("fp8", "converted")}
    rate = 2 * D * KEY_HEADS * keys * batch / statistics.median(times["fp8"]) / 1e6
    return row | {"fp8_gbs": round(rate), "copy_gbs": round(copy_gbs())}
