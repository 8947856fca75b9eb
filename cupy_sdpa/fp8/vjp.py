"""Training with FP8: a forward pass in FP8 whose gradients are computed in the dtype of the arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..device import cupy_runtime
from ..problem.tensor_spec import dtype_name
from .array import Fp8Array
from .forward import attention_in_dtype
from .quantize import SOURCES, quantize_qkv


def forward_in_fp8(q: Any, k: Any, v: Any, dtype: str, options: Mapping[str, Any]) -> tuple[Any, ...]:
    """Convert q, k and v to FP8, with q and k rotated, and compute attention.

    Args:
        q, k, v: as for :func:`cupy_sdpa.attention`, float16 or bfloat16; on the CPU also float32.
        dtype: the FP8 dtype.
        options: of the call.

    Returns:
        The arrays that the gradients need: q, k and v in FP8, and the output, in q's dtype, and its log-sum-exp.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.fp8.attention`.
    """
    allowed = SOURCES[:2] if cupy_runtime.is_array(q) else SOURCES
    if (name := dtype_name(q.dtype) if isinstance(getattr(q, "dtype", ""), np.dtype) else type(q).__name__) not in allowed:
        raise TypeError(
            f"compute_dtype is {dtype!r} and q is {name}; q must be {' or '.join(allowed)}, the dtype of the gradients"
        )
    given = {name: options[name] for name in ("seq_lens_q", "seq_lens_kv", "layout") if options.get(name) is not None}
    arrays = quantize_qkv(q, k, v, dtype, rotate=True, **given)
    out, stats = attention_in_dtype(*arrays, name, return_stats=True, stats=None, options=options)
    return (*arrays, out, stats)


def dequantized(arrays: Sequence[Any], dtype: Any) -> list[Any]:
    """The arrays that gradients need, FP8 arrays in a dtype.

    The gradients are those at the values in FP8, from which the log-sum-exp was computed: exp(S - L) is then at most 1, also
    where the conversion changed a score.
    """
    return [x.dequantize(dtype) if isinstance(x, Fp8Array) else x for x in arrays]
