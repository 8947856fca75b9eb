"""What computes a call that is not repeated: the decision for :func:`cupy_sdpa.attention` and its gradients.

Arrays of other libraries, without a batch axis, or with ``engine`` are converted, and the function is called again. FP8 arrays
have programs of their own. Everything else is a program of the resolved options (:func:`.calls.resolved`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from .boundary.arguments import check_order
from .boundary.conversion import OUTPUTS, convert, gradient_names, needs_conversion
from .boundary.layouts import other_layout
from .fp8.array import Fp8Array
from .fp8.fp8_attention import attend as attend_in_fp8
from .programs.block_mask_steps import Forward, Gradients
from .programs.calls import resolved
from .programs.passes import attend, attend_backward
from .replay.views import run_and_cache


def run_forward(
    function: Callable[..., Any], kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any], **flags: Any
) -> list[Any]:
    """The results of a call of :func:`cupy_sdpa.attention`.

    Args:
        function: the function that was called.
        kind: the part of the key of the call besides arrays and options.
        arrays: q, k and v; or also out and stats, which may be None.
        options: the options.
        flags: ``return_stats`` and ``deterministic``.
    """
    q, k, *_ = arrays
    if isinstance(q, Fp8Array) or type(k) is Fp8Array:
        named = dict(zip(Forward._fields, arrays, strict=False))
        return attend_in_fp8(**named, options=options, return_stats=flags["return_stats"])
    if needs_conversion(q, options):
        named = dict(zip(Forward._fields, arrays, strict=False))
        compute = functools.partial(convert, function, named, options, OUTPUTS, **flags)
        found = run_and_cache(kind, tuple(named), arrays, options, compute)
        return [*found] if isinstance(found, tuple) else [found]
    return attend(kind, arrays, resolved(q, k, options, return_stats=flags["return_stats"]), **flags)


def run_backward(
    function: Callable[..., Any], kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any], **flags: Any
) -> list[Any]:
    """The gradients of a call of :func:`cupy_sdpa.attention_backward`.

    Args:
        function, kind, options: as for :func:`run_forward`.
        arrays: dout, q, k, v, out and stats; or also dq, dk and dv, which may be None.
        flags: ``deterministic`` and the gradients that are requested.
    """
    _, q, k, *_ = arrays
    if needs_conversion(q, options):
        names = gradient_names(flags["return_dbias"], flags["return_dsinks"])
        named = dict(zip(Gradients._fields, arrays, strict=False))
        check_order(named, other_layout(options))
        compute = functools.partial(convert, function, named, options, names, **flags)
        return [*run_and_cache(kind, tuple(named), arrays, options, compute)]
    outputs = {name: value for name, value in flags.items() if name != "deterministic"}
    return attend_backward(kind, arrays, resolved(q, k, options, outputs=outputs), **flags)
