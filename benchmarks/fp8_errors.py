"""The error of FP8 attention against the number of keys, on the GPU and on the CPU engine, compared with bfloat16.

An error is the norm of the difference from float64, divided by the norm of the float64 result; it contains the conversion of
the inputs. The inputs are bfloat16 numbers: normal ones n, normal ones with outliers (every 37th channel of q and k is 20 times
as large), and normal ones with values v = 0.3 + n or v = 1 + 0.3 n. The output is bfloat16. On an H200 the command

    python -m benchmarks fp8 --errors errors.csv --engine cuDNN

takes less than a minute.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa
from cupy_sdpa import fp8, reference
from cupy_sdpa.core.problem.tensor_spec import numpy_dtype

#: The sizes: head dim, query heads, key/value heads, queries, and the numbers of keys.
D, HQ, HKV, SQ = 128, 2, 1, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: One channel in OUTLIER_STEP is larger by the factor OUTLIER.
OUTLIER_STEP, OUTLIER = 37, 20.0


class Arrays(NamedTuple):
    """q, k and v."""

    q: Any
    k: Any
    v: Any


def normal(keys: int) -> Arrays:
    """Normal numbers."""
    rng = np.random.default_rng(keys)
    shapes = (D, HQ, SQ, 1), (D, HKV, keys, 1), (D, HKV, keys, 1)
    return Arrays(*(np.asfortranarray(rng.standard_normal(shape, np.float32)) for shape in shapes))


def outliers(keys: int) -> Arrays:
    """Normal numbers, some channels of q and k larger."""
    q, k, v = normal(keys)
    for x in (q, k):
        x[::OUTLIER_STEP] *= OUTLIER
    return Arrays(q, k, v)


def mean(keys: int) -> Arrays:
    """Normal numbers, v with a mean of 0.3."""
    q, k, v = normal(keys)
    return Arrays(q, k, v + np.float32(0.3))


def large_mean(keys: int) -> Arrays:
    """Normal numbers, v with a mean of 1 and a standard deviation of 0.3."""
    q, k, v = normal(keys)
    return Arrays(q, k, 1 + np.float32(0.3) * v)


INPUTS: dict[str, Callable[[int], Arrays]] = {
    "normal": normal, "outliers": outliers, "v = 0.3 + n": mean, "v = 1 + 0.3 n": large_mean,
}  # fmt: skip


def in_bfloat16(arrays: Arrays) -> Any:
    """bfloat16."""
    return cupy_sdpa.attention(*arrays)


def in_fp8(arrays: Arrays, *, rotate: bool = False, center: bool = True) -> Any:
    """FP8, with the options of the conversion."""
    _, k, v = fp8.quantize_qkv(*arrays, rotate=rotate, center=center)
    return cupy_sdpa.attention(arrays.q, k, v)


METHODS: dict[str, Callable[[Arrays], Any]] = {
    "bfloat16": in_bfloat16, "FP8": in_fp8, "FP8, rotated": functools.partial(in_fp8, rotate=True),
    "FP8, rotated, with the mean of v": functools.partial(in_fp8, rotate=True, center=False),
}  # fmt: skip


def rows(lengths: Sequence[int], *, on_gpu: bool, on_cpu: bool = True) -> Iterator[dict[str, Any]]:
    """Yield the rows: engine, inputs, method, keys and error.

    Args:
        lengths: the numbers of keys.
        on_gpu: measure cuDNN.
        on_cpu: measure the CPU engine.
    """
    for name, make in INPUTS.items():
        for keys in lengths:
            arrays = Arrays(*(x.astype(numpy_dtype("bfloat16")) for x in make(keys)))
            truth, _ = reference.attention(*arrays)
            engines = {**({"numpy": arrays} if on_cpu else {}), **({"cuDNN": _on_gpu(arrays)} if on_gpu else {})}
            for engine, given in engines.items():
                for method, compute in METHODS.items():
                    found = compute(given)
                    found = (found.get() if engine == "cuDNN" else found).astype(np.float64)
                    error = float(np.linalg.norm(found - truth) / np.linalg.norm(truth))
                    yield {"engine": engine, "inputs": name, "method": method, "keys": keys, "error": f"{error:.5f}"}


def _on_gpu(arrays: Arrays) -> Arrays:
    import cupy

    return Arrays(*(cupy.asarray(x, order="F") for x in arrays))
