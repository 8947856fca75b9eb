"""Where the notebooks run: on CuPy arrays where there is a GPU, else on numpy's."""

import importlib.util

import numpy as np

xp = np
if importlib.util.find_spec("cupy"):
    import cupy

    xp = cupy if cupy.cuda.is_available() else np

#: cuDNN takes 16 bits; numpy is at home with 32.
dtype = np.dtype(np.float32 if xp is np else np.float16)


def randn(*shape, seed=0):
    """Normal random numbers in Fortran order, where the notebook runs."""
    return xp.asarray(np.asfortranarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)))


def cpu(array):
    """An array in numpy's memory, float32: to be drawn."""
    return np.asarray(array if isinstance(array, np.ndarray) else array.get(), np.float32)
