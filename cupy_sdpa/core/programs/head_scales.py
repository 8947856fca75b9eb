"""A scale for each head: q is multiplied by it before the passes, which then have the scale 1.

The gradient of q is the product's gradient times the scale, and the gradient of the scale is the sum of q times the gradient of
the product, over all elements of a head. Neither divides by the scale, so it may be 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..boundary.read_array import check_arrays
from ..boundary.read_options import ReadOptions
from ..errors import in_words
from ..problem.tensor_spec import Expected
from ..problem.view import View
from .steps import Steps


def check_request(options: Mapping[str, Any], return_dscale: bool) -> None:
    """Check that the scale whose gradient is requested is an array."""
    if return_dscale and not hasattr(options.get("scale"), "shape"):
        scale = options.get("scale")
        raise ValueError(
            f"return_dscale is True and scale is {scale if isinstance(scale, float) else in_words(scale)}: pass scale= as an "
            "array (Hq,), or remove return_dscale"
        )


def check_scales(views: Mapping[str, View], computed: str) -> None:
    """Check the scales of a call that computes in a dtype: float32, for float64 arrays also float64."""
    scale = views["scale"]
    wide = computed == "float64" and scale.dtype.name == "float64"
    legend = "(Hq,), a scale for each head; a scale for all heads is a number, float(scale)"
    expected = Expected("scale", (views["q"].shape[1],), "float64" if wide else "float32", legend)
    check_arrays([expected], {"q": views["q"], "scale": scale})


def unscaled_options(options: ReadOptions) -> ReadOptions:
    """Return the options of the passes on the product of q and its scale, which were read with the scale 1."""
    return options.without("scale")


def scaled(
    steps: Steps, arrays: Mapping[str, Any], options: ReadOptions, dscale: View | None = None
) -> tuple[dict[str, Any], ReadOptions, Callable[[], None]]:
    """Return a pass's arrays with q times the scale, the options with scale 1, and a function that adds later steps.

    In a backward pass these steps write the gradient of q, and the gradient of the scale into ``dscale``. Without a scale for
    each head nothing changes.
    """
    made, scale = {**arrays}, options.get("scale")
    if not isinstance(scale, View):
        return made, options, lambda: None
    from ..kernels.scale_kernel import scale_heads

    q, dq = arrays["q"], arrays.get("dq")
    made["q"] = steps.temporary(q.shape, q.dtype)
    steps.run(scale_heads, made["q"], q, scale, writes=[made["q"]])
    if dq is not None:
        made["dq"] = steps.temporary(q.shape, dq.dtype)

    def finish() -> None:
        if dq is None:
            return
        if dscale is not None:
            _add_gradient(steps, dscale, arrays["stats"], q, made["dq"])
        steps.run(scale_heads, dq, made["dq"], scale, writes=[dq])

    return made, unscaled_options(options), finish


def _add_gradient(steps: Steps, dscale: View, stats: View, q: View, dq: View) -> None:
    """The sum of the products of q and the gradient of q times its scale, over the elements of each head."""
    from ..kernels.ragged import sum_over_scores

    if not stats.size:
        steps.fill(dscale, 0)
        return
    rows = steps.temporary(stats.shape, stats.dtype)
    steps.row_means(rows, stats, (dq, q), None, 1.0)
    of_tokens = rows.T[..., None] if rows.ndim == 2 else rows  # (tokens, heads, batch)
    steps.run(sum_over_scores, of_tokens.transpose(0, 2, 1)[..., None], dscale[None, None, :, None], writes=[dscale])
