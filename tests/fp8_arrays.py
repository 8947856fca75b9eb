"""FP8 arrays of the tests: their values, copies on a device, and the error that FP8 permits."""

import numpy as np

from cupy_sdpa import fp8
from cupy_sdpa.problem.tensor_spec import numpy_dtype

#: The error of FP8: three roundings (P, the output, and a second rounding where both meet) of half a unit in the last place.
ERROR = {"float8_e4m3fn": 2.0**-4, "float8_e5m2": 2.0**-3}


def host(x):
    """The elements of an FP8 array on the host."""
    return x.data.get().view(numpy_dtype(x.dtype)) if hasattr(x.data, "get") else x.data


def values_of(x):
    """The values of an FP8 array on numpy in float64; a rotation is not undone, because scores do not depend on it."""
    return np.asfortranarray(x.data.astype(np.float64) * float(x.descale[0]))


def moved(cupy, x, data=None):
    """An FP8 array on the device.

    Args:
        cupy: the module.
        x: the array on numpy.
        data: its elements on the device, such as in another memory layout. Default None: in Fortran order.
    """
    if data is None:
        data = cupy.asarray(x.data.view(np.uint8), order="F")
    return fp8.Fp8Array(data, cupy.asarray(x.descale), scale=cupy.asarray(x.scale), dtype=x.dtype, rotated=x.rotated)


def relative(a, b):
    """The relative error in the norm."""
    return float(np.linalg.norm(np.asarray(a, np.float64) - b) / max(np.linalg.norm(b), 1e-30))
