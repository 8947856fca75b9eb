"""The gradient of the log-sum-exp: rows along head dim, from which the backward pass computes it.

With dL, the gradient of the log-sum-exp, the gradient of the scores is ``dS = P ∘ (dO Vᵀ − D + dL)``, where
``D = rowsum(dO ∘ O)``. The backward pass computes it from wider arrays with two more rows: -1 in O, dL in two parts in dO, and
0 in V. Then dO Vᵀ is the same, and D is less by dL. dL has two parts because dO has 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..boundary.arguments import views_of_shapes
from ..kernels.ragged import sum_over_scores
from ..kernels.stats_gradient import ROWS, append_stats_gradient
from ..options.scale import read_scale
from ..problem.arrays import SCORE_GRADIENTS
from ..problem.view import View
from ..support.rules import HEAD_DIM_MULTIPLE
from .steps import Steps

#: The flags that request sums of dS, which need dq to be written directly.
_OF_SCORES = (*(row.request for row in SCORE_GRADIENTS), "return_dtensors")
#: What to do if the head dims are at the limit of a GPU.
REMEDY = (
    "Without dout the head dims of q and v are enough: add the gradients of attention_backward(dout, ...) and of "
    "attention_backward(None, ..., dstats=dstats); or pass numpy arrays to compute on the CPU"
)


def widths(head_dim: int, value_dim: int, *, equal: bool) -> tuple[int, int]:
    """Return the head dims of q and k, and of v, out and dout, with the rows of dL; ``equal``: cuDNN needs equal ones.

    >>> widths(64, 64, equal=False), widths(64, 64, equal=True), widths(128, 0, equal=True)
    ((64, 72), (80, 80), (128, 128))
    """
    of_values = Steps.padded_head_dim(value_dim + ROWS)
    if not equal:
        return head_dim, of_values
    both = Steps.padded_head_dim(max(head_dim, value_dim + ROWS), equal=True)
    return both, both


def needs_equal(options: Mapping[str, Any], *, of_layer: bool, deterministic: bool = False, **requests: Any) -> bool:
    """True if cuDNN needs equal head dims: for packed sequences, which a layer may make, and where dq is written directly."""
    direct = deterministic or any(requests.get(name) not in (None, False) for name in _OF_SCORES)
    return of_layer or direct or options.get("cu_seqlens_q") is not None


def with_rows(steps: Steps, arrays: Mapping[str, Any], *, equal: bool) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the arrays of a backward pass with the rows of ``dstats``, and a function that adds the steps after the pass.

    ``arrays`` are dout, q, k, v, out, stats, dq, dk and dv, and dstats, which the returned arrays do not have. Without ``dout``
    the rows of dL are the only ones: v is not read, and dv is 0.
    """
    made = {**arrays}
    dstats = made.pop("dstats", None)
    if dstats is None:
        return made, lambda: None
    q, k, v, dout, out, stats = (made[name] for name in ("q", "k", "v", "dout", "out", "stats"))
    value_dim = 0 if dout is None else v.shape[0]
    of_scores, of_values = widths(q.shape[0], value_dim, equal=equal)
    wanted: list[tuple[View, list[View], float]] = []
    back: list[tuple[View, View]] = []

    def widen(name: str, like: View, width: int, *, copied: bool = True) -> None:
        """An array with more rows, which are 0; if not ``copied`` all of them are."""
        made[name] = steps.temporary((width, *like.shape[1:]), like.dtype)
        wanted.append((made[name], [like] if copied else [], 0.0))

    def widen_result(name: str, width: int) -> None:
        target = made[name]
        made[name] = steps.temporary((width, *target.shape[1:]), target.dtype)
        back.append((target, made[name]))

    given = dout is not None
    if of_scores != q.shape[0]:
        widen("q", q, of_scores)
        widen("k", k, of_scores)
        widen_result("dq", of_scores)
        widen_result("dk", of_scores)
    widen("v", v, of_values, copied=given)
    widen("out", out, of_values, copied=given)
    widen("dout", out if dout is None else dout, of_values, copied=given)
    if given:
        widen_result("dv", of_values)
    else:
        made["dv"] = steps.temporary(made["v"].shape, v.dtype)
        steps.fill(arrays["dv"], 0)
    steps.concatenate(wanted)
    steps.run(append_stats_gradient, made["dout"], made["out"], dstats, stats, writes=[made["dout"], made["out"]])

    def finish() -> None:
        for target, source in back:
            steps.copy(target, source[: target.shape[0]])

    return made, finish


def sum_of_sinks(steps: Steps, dsinks: View, dstats: View, stats: View) -> None:
    """Add the gradient of sinks for a call without keys, whose log-sum-exps are the sinks: the sum of dL over the rows."""
    of_heads = dstats if dstats.ndim == 2 else dstats.transpose(1, 0, 2)
    rows = steps.temporary((ROWS, *of_heads.shape), dstats.dtype)
    steps.run(append_stats_gradient, rows, None, dstats, stats, writes=[rows])
    first = rows[0] if dstats.ndim == 3 else rows[0][..., None]  # heads, tokens, batch
    steps.run(sum_over_scores, first.transpose(1, 2, 0)[..., None], dsinks[None, None, :, None], writes=[dsinks])


def wide_shapes(
    q: Any, k: Any, v: Any, options: Mapping[str, Any], dtype: Any, flags: Mapping[str, Any]
) -> tuple[View, View, View, dict[str, Any]]:
    """Return q, k and v (arrays, or shapes with a dtype) as views with the rows of dL, and the options without a layout."""
    views, options = views_of_shapes({"q": q, "k": k, "v": v}, options, dtype=dtype)
    head_dim, value_dim = views["q"].shape[0], views["v"].shape[0]
    of_scores, of_values = widths(head_dim, value_dim, equal=needs_equal(options, of_layer=False, **flags))
    for name, width in (("q", of_scores), ("k", of_scores), ("v", of_values)):
        if width != views[name].shape[0]:
            views[name] = View.dense(name, (width, *views[name].shape[1:]), views[name].dtype, 0)
    return views["q"], views["k"], views["v"], {**options, "scale": read_scale(options.get("scale"), head_dim)}


def refusal(head_dim: int, value_dim: int, name: str, reason: str, *, alone: bool) -> str:
    """Return why the gradients cannot run, in terms of the caller's arrays; ``alone``: without dout."""
    if alone:
        return f"attention_backward with dstats and head dim {head_dim} is not supported: {reason}"
    return (
        f"attention_backward with dstats and head dims {head_dim} and {value_dim} needs gradients with {ROWS} more head dims "
        f"of v, rounded up to a multiple of {HEAD_DIM_MULTIPLE}: {reason}. {REMEDY}"
    )
