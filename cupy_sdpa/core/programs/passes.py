"""Read calls of attention and its gradients as one problem; :mod:`.composed_passes` reads passes of several steps."""

from __future__ import annotations

from typing import Any

from ..boundary.arguments import read_backward, read_forward
from ..hooks import split_options
from ..replay.call_key import CallKey
from .executor import ReadCall, call_of_problem, is_any_array


def parse_forward(key: CallKey, *, kept: bool = False, return_stats: Any = False, deterministic: bool = False) -> ReadCall:
    """Read a call of :func:`cupy_sdpa.attention`: q, k, v, the decided options and, optionally, out and stats.

    If ``kept``, the call also returns q, k, v and out in ``compute_dtype``, as its last results.
    """
    flags: dict[str, Any] = {"return_stats": return_stats, "deterministic": deterministic}
    if _is_one_problem(key):
        return call_of_problem(read_forward(**key.named(), options=key.options, **flags))
    from .composed_passes import read_forward_steps

    return read_forward_steps(key, kept=kept, **flags)


def parse_backward(
    key: CallKey,
    *,
    result: Any = None,
    deterministic: bool = False,
    **requests: Any,
) -> ReadCall:
    """Read a call of :func:`cupy_sdpa.attention_backward`: its arrays and the decided options.

    ``result`` is the dtype of dout, dq, dk and dv if :func:`parse_forward` kept q, k, v and out. Default None: q's dtype.
    ``requests`` are the flags that request gradients (:data:`.arrays.REQUESTS`).
    """
    flags = {"deterministic": deterministic, **requests}
    of_stats = key.named().get("dstats") is not None
    for name in ("dout", "out", "stats"):
        if key.array(name) is None and not (name == "dout" and of_stats):
            also = ", or dstats, the gradient of stats, or both" * (name == "dout")
            raise TypeError(
                f"{name} is None; the backward pass needs it{also}: attention(..., return_stats=True) returns out and stats"
            )
    if _is_one_problem(key) and not of_stats and not requests.get("return_dscale"):
        flags.pop("return_dscale", None)
        call = read_backward(**key.named(), options=key.options, **flags)
        call.given_stats = "whole"
        return call_of_problem(call)
    from .composed_passes import read_backward_steps

    return read_backward_steps(key, result=result, **flags)


def _is_one_problem(key: CallKey) -> bool:
    """True unless the pass needs several steps: for a layer's option, another dtype, or a scale for each head."""
    layer_option, dtype, others = split_options(key.options)
    return layer_option is None and dtype is None and not is_any_array(others.get("scale"))
