"""The option ``compute_dtype``: float32 and float64 arrays are computed in 16 bits, and results have the caller's dtype."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..problem.tensor_spec import dtype_name
from .axes import Axes
from .layouts import VECTORS

#: The dtypes to compute in.
COMPUTE_DTYPES = ("float16", "bfloat16")
#: The dtypes of arrays that are converted.
CONVERTED = ("float32", "float64")


def read_compute_dtype(value: Any, q: Any) -> str | None:
    """Return the dtype to compute in; None if nothing is converted."""
    if value is None:
        return None
    try:
        name = value if isinstance(value, str) else str(np.dtype(value).name)
    except TypeError:
        name = repr(value)
    if name not in COMPUTE_DTYPES:
        fp8 = ". FP8: attention_vjp takes it, and attention takes arrays of cupy_sdpa.fp8.quantize_qkv(q, k, v)"
        raise ValueError(
            f"compute_dtype is {value!r}; it must be {' or '.join(map(repr, COMPUTE_DTYPES))}, or None for q's dtype"
            f"{fp8 if 'fp8' in name or 'float8' in name else ''}"
        )
    if not hasattr(q, "dtype"):
        return name  # the call raises an error about q
    dtype = dtype_name(q.dtype) if isinstance(q.dtype, np.dtype) else str(q.dtype)
    if dtype == name:
        return None
    if dtype not in CONVERTED:
        raise TypeError(
            f"compute_dtype is {name!r} and q is {dtype}; it is for {' and '.join(CONVERTED)} arrays: omit compute_dtype, or "
            f"convert with .astype({name!r})"
        )
    return name


def check_converted(arrays: Mapping[str, Any], dtype: Any = None, results: Sequence[str] = ()) -> None:
    """Check the arrays of a call that are converted: those with a head dim; the log-sum-exp, masks and biases are not.

    ``dtype`` is the dtype of dout, dq, dk and dv, if the other arrays are already converted; ``results`` are the arrays that
    are written.
    """
    own = arrays["q"].dtype if dtype is None else dtype
    for name, x in arrays.items():
        if x is None or name not in VECTORS or (dtype is not None and name in ("q", "k", "v", "out")):
            continue
        Axes.check_strides(name, x, written=name in results)
        if dtype_name(x.dtype) != dtype_name(own):  # of any byte order
            raise TypeError(
                f"{name} is {dtype_name(x.dtype)} and q is {dtype_name(own)}; the dtypes must be equal: convert one of them"
            )


def copy(target: Any, source: Any) -> None:
    """Copy an array into another one, which may have another dtype; numbers beyond its range become infinite."""
    with np.errstate(over="ignore", under="ignore"):
        target.T[...] = source.T  # CuPy copies arrays in C order at memory speed, others much slower
