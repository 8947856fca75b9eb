"""The error of FP8 attention against the number of keys, on the GPU and on the CPU engine, beside bfloat16.

An error is the norm of the difference from float64, divided by the norm of the float64 result; it contains the conversion of
the inputs. The inputs are bfloat16 numbers: normal ones, normal ones with outliers (every 37th channel of q and k is 20 times
as large), and normal ones with a mean of 0.3 in v.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa
from cupy_sdpa import fp8, reference
from cupy_sdpa.problem.tensor_spec import numpy_dtype

#: The sizes: head dim, query heads, key/value heads, queries, and the numbers of keys.
D, HQ, HKV, SQ = 128, 2, 1, 64
LENGTHS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
#: One channel in OUTLIER_STEP is larger by the factor OUTLIER; MEAN is the mean of v.
OUTLIER_STEP, OUTLIER, MEAN = 37, 20.0, 0.3
#: The number of keys of a part, if the keys are computed in parts.
PART = 4096


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
    """Normal numbers, v with a mean."""
    q, k, v = normal(keys)
    return Arrays(q, k, v + np.float32(MEAN))


INPUTS: dict[str, Callable[[int], Arrays]] = {"normal": normal, "outliers": outliers, "mean": mean}


def in_bfloat16(arrays: Arrays) -> Any:
    """bfloat16."""
    return cupy_sdpa.attention(*arrays)


def in_fp8(arrays: Arrays) -> Any:
    """FP8."""
    return fp8.attention(*fp8.quantize_qkv(*arrays)).dequantize()


def in_fp8_rotated(arrays: Arrays) -> Any:
    """FP8, q and k rotated."""
    return fp8.attention(*fp8.quantize_qkv(*arrays, rotate=True)).dequantize()


def in_fp8_parts(arrays: Arrays) -> Any:
    """FP8, q and k rotated, the keys in parts whose results are merged in float32."""
    q, k, v = fp8.quantize_qkv(*arrays, rotate=True)
    parts = [slice(begin, begin + PART) for begin in range(0, k.shape[2], PART)]
    results = [fp8.attention(q, k[:, :, part], v[:, :, part], return_stats=True) for part in parts]
    return cupy_sdpa.merge([out.dequantize() for out, _ in results], [stats for _, stats in results])


def in_fp8_centered(arrays: Arrays) -> Any:
    """FP8, q and k rotated; the mean of v over the keys is subtracted before and added after."""
    q, k, v = (x.astype("float32") for x in arrays)
    center = v.mean(axis=2, keepdims=True)
    v -= center
    q, k, v = fp8.quantize_qkv(q, k, v, rotate=True)
    return fp8.attention(q, k, v).dequantize() + center


METHODS: dict[str, Callable[[Arrays], Any]] = {
    "bfloat16": in_bfloat16, "FP8": in_fp8, "FP8, rotated": in_fp8_rotated, "FP8, rotated, parts": in_fp8_parts,
    "FP8, rotated, centered": in_fp8_centered,
}  # fmt: skip


def rows(lengths: Sequence[int], *, on_gpu: bool, on_cpu: bool = True) -> Iterator[dict[str, Any]]:
    """The rows: engine, inputs, method, keys and error.

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
