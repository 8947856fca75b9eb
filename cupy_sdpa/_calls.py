"""What computes a call that is not repeated: the decision for :func:`cupy_sdpa.attention` and its gradients.

The arrays are converted to the form of this package (:func:`.on_own_arrays`). FP8 arrays have programs of their own. Everything
else is a program of the resolved options (:func:`.calls.resolved`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .boundary.arguments import check_order
from .boundary.conversion import OUTPUTS, gradient_names
from .boundary.layouts import check_layout, other_layout
from .fp8.array import Fp8Array
from .fp8.fp8_attention import attend as attend_in_fp8
from .programs.block_mask_steps import Forward, Gradients
from .programs.calls import resolved
from .programs.passes import attend, attend_backward
from .replay.views import on_own_arrays


def run_forward(kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any], **flags: Any) -> list[Any]:
    """The results of a call of :func:`cupy_sdpa.attention`.

    Args:
        kind: the part of the key of the call besides arrays and options.
        arrays: q, k and v; or also out and stats, which may be None.
        options: the options.
        flags: ``return_stats`` and ``deterministic``.
    """
    q, k, *_ = arrays
    names = Forward._fields[: len(arrays)]
    if isinstance(q, Fp8Array) or type(k) is Fp8Array:
        return attend_in_fp8(**dict(zip(names, arrays, strict=True)), options=options, return_stats=flags["return_stats"])

    def compute(own: tuple[Any, ...], others: Mapping[str, Any]) -> list[Any]:
        return attend(kind, own, resolved(own[0], own[1], others, return_stats=flags["return_stats"]), **flags)

    return on_own_arrays(kind, names, arrays, options, compute, OUTPUTS)


def run_backward(kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any], **flags: Any) -> list[Any]:
    """The gradients of a call of :func:`cupy_sdpa.attention_backward`.

    Args:
        kind, options: as for :func:`run_forward`.
        arrays: dout, q, k, v, out and stats; or also dq, dk and dv, which may be None.
        flags: ``deterministic`` and the gradients that are requested.
    """
    names = Gradients._fields[: len(arrays)]
    check_layout(options.get("layout"))
    check_order(dict(zip(names, arrays, strict=True)), other_layout(options))
    outputs = {name: value for name, value in flags.items() if name != "deterministic"}

    def compute(own: tuple[Any, ...], others: Mapping[str, Any]) -> list[Any]:
        return attend_backward(kind, own, resolved(own[1], own[2], others, outputs=outputs), **flags)

    results = gradient_names(flags["return_dbias"], flags["return_dsinks"])
    return on_own_arrays(kind, names, arrays, options, compute, results)
