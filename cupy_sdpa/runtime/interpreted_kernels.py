"""Two kernels of the interpreter on CuPy arrays: functions that CuPy alone does not have. They need no CUDA header."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cupy_runtime import cupy, elementwise


def erf(x: Any) -> Any:
    """The error function of a CuPy array, in float64."""
    return elementwise("float64 x", "float64 y", "y = erf(x)", "erf")(x.astype(np.float64))


#: The numbers that ``numpy.random.Philox`` draws (Salmon et al. 2011, Philox 4x64 with 10 rounds): element i is number i % 4 of
#: the block at the counter + i / 4 + 1.
_PHILOX = """
    unsigned long long a = first + 1 + i / 4, b = c1, c = c2, d = c3, k = key0, l = key1;
    for (int round = 0; round < 10; ++round) {
        const unsigned long long high0 = __umul64hi(0xD2E7470EE14C6C93ULL, a), low0 = 0xD2E7470EE14C6C93ULL * a;
        const unsigned long long high1 = __umul64hi(0xCA5A826395121157ULL, c), low1 = 0xCA5A826395121157ULL * c;
        a = high1 ^ b ^ k; b = low1; c = high0 ^ d ^ l; d = low0;
        k += 0x9E3779B97F4A7C15ULL; l += 0xBB67AE8584CAA73BULL;
    }
    y = i % 4 < 2 ? (i % 4 ? b : a) : (i % 4 == 2 ? c : d)
"""


def philox(key: tuple[int, int], counter: tuple[int, int, int, int], count: int) -> Any:
    """The first numbers of ``numpy.random.Philox(key=key, counter=counter).random_raw(count)``, uint64, as a CuPy array."""
    parameters = ", ".join(f"uint64 {name}" for name in ("key0", "key1", "first", "c1", "c2", "c3"))
    kernel = elementwise(parameters, "uint64 y", _PHILOX, "philox")
    return kernel(*map(np.uint64, (*key, *counter)), cupy().empty(count, np.uint64))
