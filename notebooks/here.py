"""Array module and helpers of the notebooks: CuPy if there is a GPU, numpy otherwise."""

import importlib.util

import numpy as np

xp = np
if importlib.util.find_spec("cupy"):
    import cupy

    xp = cupy if cupy.cuda.is_available() else np

#: cuDNN computes in 16 bits; numpy is faster in 32.
dtype = np.dtype(np.float32 if xp is np else np.float16)


def randn(*shape, seed=0):
    """Normal random numbers in Fortran order, an array of ``xp``."""
    return xp.asarray(np.asfortranarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)))


def cpu(array):
    """A float32 numpy copy, for plotting."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.get(), np.float32)
