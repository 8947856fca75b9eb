"""Build passes that need several steps.

These passes have a layer's option, ``compute_dtype``, a gradient of the log-sum-exp, or a scale for each head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..boundary.arguments import read_backward, read_forward
from ..boundary.call import GivenStats
from ..boundary.read_options import ReadOptions
from ..problem.arrays import FORWARD, GRADIENT_ARRAYS, KEPT, VECTORS
from ..problem.tensor_spec import numpy_dtype
from ..problem.view import View
from .attention_steps import add
from .head_scales import scaled
from .stats_gradient import needs_equal, sum_of_sinks, with_rows
from .steps import Steps


def add_pass(
    steps: Steps,
    views: Mapping[str, View],
    options: ReadOptions,
    *,
    given_stats: GivenStats = "whole",
    deterministic: bool = False,
    **outputs: Any,
) -> None:
    """Add the steps of the backward pass if ``dout`` or ``dstats`` is among the views, otherwise of the forward pass.

    ``views`` has the arrays and the results of the pass. If it has "kept q" and others, the rounded arrays are kept there.
    ``outputs`` are the flags that request results, such as ``return_stats``.
    """
    layer_option, dtype, options = options.layer_option, options.compute_dtype, options.of_one_problem()
    backward, of_stats = "dout" in views, "dstats" in views
    backward |= of_stats
    kept = {name: views[f"kept {name}"] for name in KEPT if f"kept {name}" in views}
    given = {name: views.get(name) for name in (GRADIENT_ARRAYS if backward else FORWARD)}
    own, finish = in_dtype(steps, given, dtype, ("dq", "dk", "dv") if backward else ("out",), kept)
    equal = needs_equal(options, of_layer=layer_option is not None, deterministic=deterministic, **outputs)
    outputs.pop("return_dscale", None)
    own, options, unscale = scaled(steps, own, options, views.get("dscale"))
    own, narrow = with_rows(steps, own, equal=equal)
    if of_stats:
        given_stats = "appended" if given_stats == "whole" else given_stats
    if layer_option is None:
        read = read_backward if backward else read_forward
        call = read(**own, options=options, deterministic=deterministic, **outputs)
        call.given_stats = given_stats
        call.arrays |= {name: views[name] for name in call.result_names if name in views and name not in call.arrays}
        add(steps, "gradients" if backward else "attention", call, with_values=True)
        if of_stats and call.problem.dsinks and call.problem.trivial and views["dstats"].size:
            sum_of_sinks(steps, views["dsinks"], views["dstats"], views["stats"])
    else:
        layer_option.module.add(steps, own, layer_option.value, options, deterministic=deterministic)
    narrow()
    unscale()
    finish()


def in_dtype(
    steps: Steps,
    arrays: Mapping[str, View | None],
    dtype: str | None,
    results: Sequence[str],
    kept: Mapping[str, View] | None = None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Return the arrays with a head dim in another dtype, and a function that adds the steps to convert ``results`` back.

    Arrays are converted into ``kept``, or into temporaries if it is None. If ``dtype`` is None, nothing is converted.
    """
    made: dict[str, Any] = {**arrays}
    own, back = None if dtype is None else numpy_dtype(dtype), []
    for name, view in arrays.items():
        if own is None or view is None or name not in VECTORS or view.dtype == own:
            continue
        made[name] = target = kept[name] if kept else steps.temporary(view.shape, own)
        if name in results:
            back.append((view, target))
        else:
            steps.copy(target, view)

    def finish() -> None:
        for view, target in back:
            steps.copy(view, target)

    return made, finish
