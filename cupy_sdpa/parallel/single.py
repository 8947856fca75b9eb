"""Calls of a group with a single member."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..problem.problem import CU_SEQLENS, row_stats_shape
from ..runtime import cupy_runtime
from .configuration import Configuration


def empty_stats(config: Configuration, q: Any) -> Any:
    """An array for the log-sum-exp."""
    return cupy_runtime.new_result(q, row_stats_shape(q.shape), config.stats)


def on_one(
    config: Configuration, call: Any, q: Any, k: Any, v: Any, options: Mapping[str, Any], *arrays: Any, **others: Any
) -> Any:
    """The call of a single member, with the offsets of packed sequences where the arrays are."""
    known = {name: value for name, value in options.items() if name not in CU_SEQLENS and value is not None}
    return call(q, k, v, *arrays, **{**config.everything.packing(q), **known}, **others)
