"""The option ``engine``: the engine of a call, which by default follows from the type of its arrays.

``"numpy"`` and ``"cudnn"`` confirm the engines of numpy and of CuPy arrays. ``"cupy"`` computes with CuPy's own operations: its
arrays become :class:`.InterpretedArray`, and from there their type selects this engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..problem.arrays import SEEDS
from ..problem.view import View
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import InterpretedArray, on_host
from .read_array import INT32, arrays_on_gpu

#: The values of the option except None, and the arrays that each engine computes with.
ENGINES = {"numpy": "numpy", "cudnn": "CuPy", "cupy": "CuPy"}


def read_engine(engine: Any, array: Any) -> str | None:
    """Return the option; None for the engine of the arrays."""
    if engine is None:
        return None
    if not isinstance(engine, str) or engine not in ENGINES:
        raise ValueError(
            f"engine is {engine!r}; it must be 'cupy' (CuPy arrays, without cuDNN), 'cudnn' (the default of CuPy arrays), "
            "'numpy' (the default of numpy arrays), or None for the default"
        )
    kind = "numpy" if isinstance(array, np.ndarray) else "CuPy"
    if ENGINES[engine] == kind:
        if engine == "cupy" and cupy_runtime.capturing():
            raise RuntimeError(
                "the stream is being captured into a CUDA graph, and engine is 'cupy', which reads lengths on the host and "
                "calls cuBLAS: run the call outside of the capture"
            )
        return engine
    if kind == "numpy":
        remedy = "omit engine for the CPU, or copy the arrays to the GPU with cupy.asarray(...)"
    else:
        remedy = "pass engine='cupy' for CuPy's own operations, or copy the arrays to the CPU with cupy.asnumpy(...)"
    raise TypeError(f"engine is {engine!r}, which computes with {ENGINES[engine]} arrays, and q is a {kind} array: {remedy}")


def interpreted(name: str, array: Any, device: int) -> Any:
    """Return an argument of a call with ``engine="cupy"``; integers that the host needs, such as lengths, are copied there."""
    is_numpy = isinstance(array, np.ndarray)
    if not is_numpy and not cupy_runtime.is_array(array):
        return array
    arrays_on_gpu({"q": View.dense("q", (), np.float16, device), name: array})
    return on_host(InterpretedArray(array)) if name in INT32 or name in SEEDS else InterpretedArray(array)
