"""FP8 arrays of the tests: their elements and values, copies on an engine, and the error that FP8 permits."""

import numpy as np
import pytest

from cupy_sdpa import fp8
from cupy_sdpa.check.formats import FORMATS, dtype_of

FAKE, GPU = pytest.param("fake", marks=pytest.mark.slow), pytest.param("cupy", marks=pytest.mark.gpu)
#: All engines, and the engines with CUDA kernels. FP8 kernels take long to compile, so the tests on the fake CuPy are slow.
ENGINES = pytest.mark.parametrize("engine", ["numpy", FAKE, GPU], indirect=True)
ON_A_GPU = pytest.mark.parametrize("engine", [FAKE, GPU], indirect=True)
#: The error of FP8: three roundings (P, the output, and a second rounding where both meet) of half a unit in the last place.
ERROR = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}
DTYPES = tuple(ERROR)
#: The largest number of each dtype.
LARGEST = {name: FORMATS[name].largest for name in DTYPES}


def normal(shape, dtype="float32", seed=0):
    """Normal numbers in Fortran order, on numpy."""
    return np.asfortranarray(np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(dtype)))


def rounded(x, dtype):
    """Float32 numbers as elements: rounded to nearest, saturated."""
    return np.clip(x, -LARGEST[dtype], LARGEST[dtype]).astype(dtype_of(dtype))


def elements(engine, x):
    """The elements of an FP8 array on numpy."""
    return np.asfortranarray(engine.get(x.data)).view(dtype_of(x.dtype))


def values_of(x):
    """The values of an FP8 array of numpy in float64; a rotation is not undone, because scores do not depend on it."""
    values = x.data.astype(np.float64) * float(x.descale[0])
    return np.asfortranarray(values if x.mean is None else values + x.mean)


def moved(engine, x):
    """An FP8 array of numpy on an engine."""
    data = engine.put(x.data.view(np.uint8) if engine.on_cudnn else x.data)
    return fp8.Fp8Array(data, engine.put(x.descale), scale=engine.put(x.scale), dtype=x.dtype, rotated=x.rotated)


def relative(a, b):
    """The relative error in the norm."""
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30))
