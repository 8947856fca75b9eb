"""Attention and its gradients: as one problem, or as a program with a block mask, in another dtype, or both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..block_masks.block_mask import BlockMask
from ..block_masks.method import check, check_arrays
from ..boundary.arguments import read_backward, read_forward
from ..boundary.call import GivenStats, ProblemCall
from ..boundary.compute import check_converted
from ..boundary.layouts import VECTORS
from ..boundary.user_functions import Gradients, gradient_name, kept_options
from ..problem.problem import row_stats_dtype, row_stats_shape
from ..problem.tensor_spec import check_spec, dtype_name, numpy_dtype
from ..problem.validation import expected_arrays
from ..problem.view import View
from . import block_mask_steps
from .block_mask_steps import BACKWARD, FORWARD, score_function
from .decided_options import split_options
from .executor import Inputs, Reading, Wanted
from .program import Builder

#: The results in the dtype of the program that are kept for the gradients.
_KEPT = ("q", "k", "v", "out")


def parse_forward(
    arrays: dict[str, Any],
    options: Mapping[str, Any],
    *,
    kept: bool = False,
    return_stats: Any = False,
    deterministic: bool = False,
) -> Reading | ProblemCall:
    """Check the arguments of :func:`cupy_sdpa.attention`: q, k and v, perhaps also out and stats, and decided options.

    If ``kept``, q, k, v and out are also returned in ``compute_dtype``, as the last results.
    """
    mask, dtype, others = split_options(options)
    flags: dict[str, Any] = {"return_stats": return_stats, "deterministic": deterministic}
    if mask is None and dtype is None:
        return read_forward(**arrays, options=others, **flags)
    inputs = _inputs(arrays, others, mask, dtype, ("out", "stats"), None)
    of_call: dict[str, Any] = {"mask": mask, "dtype": dtype, **flags}
    wanted, _ = results_of(inputs.views, inputs.options, **of_call)
    if kept:
        assert dtype
        shapes = {name: wanted[name][0] if name in wanted else inputs.arrays[name].shape for name in _KEPT}
        wanted |= {f"kept {name}": (shape, numpy_dtype(dtype)) for name, shape in shapes.items()}
    build = functools.partial(add, views=inputs.views, options=inputs.options, **of_call)
    return Reading(inputs, wanted, build)


def parse_backward(
    arrays: dict[str, Any],
    options: Mapping[str, Any],
    *,
    result: Any = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: Any = False,
) -> Reading | ProblemCall:
    """Check the arguments of :func:`cupy_sdpa.attention_backward`: dout to stats, perhaps dq, dk and dv, and decided options.

    ``result`` is the dtype of dout, dq, dk and dv if q, k, v and out were kept by :func:`parse_forward`. Default None: q's.
    """
    flags: dict[str, Any] = {
        "deterministic": deterministic, "return_dbias": return_dbias, "return_dsinks": return_dsinks,
        "return_dtensors": return_dtensors,
    }  # fmt: skip
    for name in ("dout", "out", "stats"):
        if arrays[name] is None:
            raise TypeError(
                f"{name} is None; the backward pass needs it: attention(..., return_stats=True) returns out and stats"
            )
    mask, dtype, others = split_options(options)
    if mask is None and dtype is None:
        call = read_backward(**arrays, options=others, **flags)
        call.given_stats = "whole"
        return call
    inputs = _inputs(arrays, others, mask, dtype, ("dq", "dk", "dv"), result)
    of_call: dict[str, Any] = {"mask": mask, "dtype": dtype, **flags}
    wanted, gradients = results_of(inputs.views, inputs.options, gradients=True, result=result, **of_call)
    of_call |= {"views": inputs.views, "options": inputs.options}
    return Reading(inputs, wanted, functools.partial(add, **of_call), gradients)


def _inputs(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    mask: BlockMask | None,
    dtype: str | None,
    results: Sequence[str],
    result: Any,
) -> Inputs:
    """The arrays and options of a call; what can be checked without a problem is checked."""
    inputs = Inputs(arrays, kept_options(arrays["q"], options))
    if dtype is not None:
        check_converted(arrays, dtype=result, results=results)
    if mask is not None:
        q, k, v = (arrays[name] for name in "qkv")
        check(q, k, v, mask)
        check_arrays(arrays, options.get("sinks"), results, dtype=result, rounded=dtype is not None)
        score_function(q.shape, k.shape, inputs.options)  # checks it
    return inputs


def results_of(
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    gradients: bool = False,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    result: Any = None,
    **flags: Any,
) -> tuple[Wanted, Gradients | None]:
    """The results of a call in order, and which gradients of ``tensors`` are among them; the views of results are checked.

    ``views`` has q, k and v, and what the caller passed of the other arrays; ``flags`` are the other arguments of the call.
    """
    q, k, v = (views[name] for name in "qkv")
    own, out = q.dtype if result is None else result, (v.shape[0], *q.shape[1:])
    if mask is not None:
        with_stats = "stats" in views or bool(flags.get("return_stats"))
        rows = {"stats": (row_stats_shape(q.shape), np.dtype(row_stats_dtype(dtype or q.dtype)))} if with_stats else {}
        return ({f"d{name}": (views[name].shape, own) for name in "qkv"} if gradients else {"out": (out, own), **rows}), None
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    if gradients:
        shapes |= {name: views[name].shape if name in views else out for name in ("dout", "out")}
    kind = q.dtype if dtype is None else numpy_dtype(dtype)
    dense: dict[str, Any] = {name: View.dense(name, shape, kind, q.storage.device) for name, shape in shapes.items()}
    call = (read_backward if gradients else read_forward)(**dense, options=options, stats=views.get("stats"), **flags)
    return wanted_results(call, views, own), call.gradients


def wanted_results(call: ProblemCall, views: Mapping[str, View], dtype: Any) -> Wanted:
    """The results of a call in order, those with a head dim in ``dtype``; the views of results are checked."""
    found = {
        spec.name: (spec.shape, dtype if spec.name in VECTORS else numpy_dtype(spec.dtype)) for spec in call.problem.results
    }
    if call.gradients:
        found |= {gradient_name(name): spec for name, spec in call.gradients.specs.items()}
    table = expected_arrays(call.problem.q, call.problem.k, call.problem.v)
    for name in ("out", "dq", "dk", "dv"):
        if name in found and name in views and name in call.result_names:
            expected = table[name]._replace(dtype=dtype_name(dtype), writable=True)
            check_spec(views[name].spec(name), expected)
    return {name: found[name] for name in call.result_names}


# Builders


def add(
    builder: Builder,
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    given_stats: GivenStats = "whole",
    deterministic: bool = False,
    **outputs: Any,
) -> None:
    """Add the steps of a pass: of the gradients if ``dout`` is among the views, otherwise of the forward pass.

    ``views`` has the arrays of the pass and its results; and "kept q" and others to keep what is rounded. The options have
    views in place of arrays. ``outputs`` are the results that the caller asked for, ``return_stats`` and others.
    """
    backward = "dout" in views
    kept = {name: views[f"kept {name}"] for name in _KEPT if f"kept {name}" in views}
    given = {name: views.get(name) for name in (BACKWARD if backward else FORWARD)}
    own, finish = rounded(builder, given, dtype, ("dq", "dk", "dv") if backward else ("out",), kept)
    if mask is None:
        read = read_backward if backward else read_forward
        call = read(**own, options=options, deterministic=deterministic, **outputs)
        call.given_stats = given_stats
        call.arrays |= {name: views[name] for name in call.result_names if name in views and name not in call.arrays}
        builder.call("gradients" if backward else "attention", call)
    else:
        block_mask_steps.add(builder, own, mask, options, deterministic=deterministic)
    finish()


def rounded(
    builder: Builder,
    arrays: Mapping[str, View | None],
    dtype: str | None,
    results: Sequence[str],
    kept: Mapping[str, View] | None = None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """The arrays with a head dim in another dtype, and a function that adds the steps which convert the ``results`` back.

    They are converted into those of ``kept``, by default into temporaries. Without a dtype nothing is converted.
    """
    made: dict[str, Any] = {**arrays}
    own, back = None if dtype is None else numpy_dtype(dtype), []
    for name, view in arrays.items():
        if own is None or view is None or name not in VECTORS or view.dtype == own:
            continue
        made[name] = target = kept[name] if kept else builder.temporary(view.shape, own)
        if name in results:
            back.append((view, target))
        else:
            builder.copy(target, view)

    def finish() -> None:
        for view, target in back:
            builder.copy(view, target)

    return made, finish
