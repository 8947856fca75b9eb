"""Attention and its gradients as programs: with a block mask, in another dtype than that of the arrays, or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..block_masks.automatic import automatic_mask
from ..block_masks.block_mask import BlockMask
from ..block_masks.method import SUPPORTED, check, check_arrays, method_of
from ..block_masks.native import is_supported
from ..boundary.arguments import read_backward, read_forward
from ..boundary.call import Call, GivenStats
from ..boundary.compute import check_converted
from ..boundary.conversion import OUTPUTS, gradient_names
from ..boundary.layouts import VECTORS, from_own, in_own_layout, of_caller, other_layout, results_in
from ..boundary.options import read_flag
from ..boundary.user_functions import Gradients as TensorGradients
from ..boundary.user_functions import gradient_name, kept_options
from ..problem.problem import row_stats_shape
from ..problem.tensor_spec import check_spec, dtype_name, make_spec, numpy_dtype
from ..problem.validation import expected_arrays
from ..problem.view import View
from ..replay.replay_cache import run_cached
from ..runtime import cupy_runtime
from . import block_mask_steps
from .block_mask_calls import key_of, of_call
from .block_mask_steps import Forward, Gradients, score_function
from .executor import Inputs, run_program
from .program import Builder

#: The results in the dtype of the program that are kept for the gradients.
_KEPT = ("q", "k", "v", "out")
#: The options that the blocks of a mask are computed with, and the flags of a backward pass that returns dq, dk and dv.
_SUPPORTED = frozenset(SUPPORTED)
_NO_OUTPUTS = dict.fromkeys(("return_dbias", "return_dsinks", "return_dtensors"), False)


def blocks_of(
    q: Any,
    k: Any,
    options: Mapping[str, Any],
    *,
    automatic: bool = True,
    return_stats: Any = False,
    outputs: Mapping[str, Any] | None = None,
) -> tuple[BlockMask | None, Any]:
    """The block mask that a call computes by blocks, and its other options, a dictionary.

    Args:
        q, k, options: of the call.
        automatic: whether a mask function may become a block mask. Default True.
        return_stats, outputs: as for :func:`.block_mask_calls.of_call`.
    """
    rest = {**options}
    mask = rest.pop("block_mask", None)
    plain = (return_stats is False or return_stats is True) and (outputs is None or outputs == _NO_OUTPUTS)
    if mask is not None:  # repeated calls enter no function
        if plain and type(mask) is BlockMask and _SUPPORTED.issuperset(rest):
            return mask, rest
        return of_call(q, k, mask, rest, return_stats=return_stats, outputs=outputs)
    if automatic and plain and "mask_mod" in options and (mask := automatic_mask(q, k, rest)) is not None:
        del rest["mask_mod"]
    return mask, rest


# Calls


def attend(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    kept: bool = False,
    return_stats: Any = False,
    deterministic: Any = False,
    out: Any = None,
    stats: Any = None,
) -> list[Any]:
    """:func:`cupy_sdpa.attention` as a program.

    Args:
        q, k, v, return_stats, deterministic, out, stats: as for :func:`cupy_sdpa.attention`.
        options: the options, without ``block_mask`` and ``compute_dtype``.
        mask: the block mask. Default None.
        dtype: the dtype to compute in. Default None: that of q.
        kept: whether q, k, v and out are also returned in this dtype, as the last results. Default False.
    """
    deterministic = deterministic is not False and read_flag("deterministic", deterministic)
    statistics = return_stats if type(return_stats) is bool else str(return_stats)
    kind = ("forward program", dtype, kept, statistics, deterministic, mask if mask is None else key_of(mask))
    given = (q, k, v, out, stats)
    results = run_cached(kind, given, options)
    if results is None:
        named = dict(zip(Forward._fields, given, strict=True))
        with of_caller(named, options), cupy_runtime.device_context(q):
            inputs = _inputs(named, options, mask, dtype, ("out", "stats"), None)
            flags: dict[str, Any] = {"return_stats": return_stats, "deterministic": deterministic}
            native = False
            if mask is not None:
                sizes, with_stats = check(q, k, v, mask), bool(return_stats) or stats is not None
                if method_of(mask, sizes).blocks is not None:
                    native = is_supported((q, k, v), mask, sizes, inputs.options, return_stats=with_stats, dtype=dtype)
            wanted, _ = results_of(inputs.views, inputs.options, mask=mask, dtype=dtype, **flags)
            add_results(inputs, q, wanted)
            names = list(wanted)
            if kept:
                assert dtype
                wanted = {f"kept {name}": (inputs.arrays[name].shape, numpy_dtype(dtype)) for name in _KEPT}
                add_results(inputs, q, wanted)
                names += list(wanted)

        def build(builder: Builder) -> None:
            with of_caller(named, options):
                forward(builder, inputs.views, inputs.options, mask=mask, dtype=dtype, native=native, **flags)

        with cupy_runtime.device_context(q):
            results = run_program(kind, Forward._fields, given, options, inputs, names, build)
    if "layout" in options and (layout := other_layout(options)):
        count = len(results) - len(_KEPT) * kept
        last = [from_own(name, x, layout) for name, x in zip(_KEPT, results[count:], strict=True)] if kept else []
        results = results_in(layout, OUTPUTS, results[:count], {"out": out, "stats": stats}, options) + last
    return results


def attend_backward(
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    *,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    result: Any = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: Any = False,
    given_stats: GivenStats = "whole",
) -> list[Any]:
    """:func:`cupy_sdpa.attention_backward` as a program.

    Args:
        arrays: dout, q, k, v, out, stats, dq, dk and dv; the last three may be None.
        options: the options, without ``block_mask`` and ``compute_dtype``.
        mask: the block mask. Default None.
        dtype: the dtype to compute in. Default None: that of q.
        result: the dtype of dout, dq, dk and dv, if q, k, v and out are those that :func:`attend` kept. Default None: that of
            q.
        deterministic, return_dbias, return_dsinks, return_dtensors: as for :func:`cupy_sdpa.attention_backward`.
        given_stats: what ``stats`` is, without a block mask, whose calls always get a part of the keys. Default: of all keys.
    """
    outputs = {"return_dbias": return_dbias, "return_dsinks": return_dsinks, "return_dtensors": return_dtensors}
    flags: dict[str, Any] = {"deterministic": deterministic, **outputs}
    kind = ("backward program", dtype, result, given_stats, *map(repr, flags.values()), mask if mask is None else key_of(mask))
    q = arrays[1]
    results = run_cached(kind, arrays, options)
    named = dict(zip(Gradients._fields, arrays, strict=True))
    if results is None:
        for name in ("dout", "out", "stats"):
            if named[name] is None:
                raise TypeError(
                    f"{name} is None; the backward pass needs it: attention(..., return_stats=True) returns out and stats"
                )
        with of_caller(named, options), cupy_runtime.device_context(q):
            inputs = _inputs(named, options, mask, dtype, ("dq", "dk", "dv"), result)
            of_call = {"mask": mask, "dtype": dtype, "result": result, **flags}
            wanted, gradients = results_of(inputs.views, inputs.options, gradients=True, **of_call)
            add_results(inputs, q, wanted)

        def build(builder: Builder) -> None:
            with of_caller(named, options):
                backward(builder, inputs.views, inputs.options, mask=mask, dtype=dtype, given_stats=given_stats, **flags)

        with cupy_runtime.device_context(q):
            results = run_program(kind, Gradients._fields, arrays, options, inputs, list(wanted), build, gradients)
    if "layout" in options and (layout := other_layout(options)):
        results = results_in(layout, gradient_names(return_dbias, return_dsinks), results, named, options)
    return results


def _inputs(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    mask: BlockMask | None,
    dtype: str | None,
    results: Sequence[str],
    result: Any,
) -> Inputs:
    """The arrays and options of a call in the layout of this package; what can be checked without a problem is checked."""
    arrays, rest = in_own_layout(arrays, options)
    if dtype is not None:
        check_converted(arrays, dtype=result, results=results)
    if mask is not None:
        q, k, v = (arrays[name] for name in "qkv")
        check(q, k, v, mask)
        check_arrays(arrays, rest.get("sinks"), results, dtype=result, rounded=dtype is not None)
    kept = kept_options(arrays["q"], rest)
    if mask is not None:
        score_function(q.shape, k.shape, kept)  # checks it
    return Inputs(arrays, kept)


#: The shapes and dtypes of results by name.
Wanted = dict[str, tuple[tuple[int, ...], Any]]


def results_of(
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    gradients: bool = False,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    result: Any = None,
    **flags: Any,
) -> tuple[Wanted, TensorGradients | None]:
    """The results of a call in order, and which gradients of ``tensors`` are among them; the views of results are checked.

    Args:
        views: q, k and v, and what the caller passed of the other arrays.
        options: the options, with views in place of arrays, in the layout of this package.
        gradients: whether the call computes gradients. Default False.
        mask, dtype, result: as for :func:`attend` and :func:`attend_backward`.
        flags: the other arguments of the call, such as ``return_stats``.
    """
    q, k, v = (views[name] for name in "qkv")
    own, out = q.dtype if result is None else result, (v.shape[0], *q.shape[1:])
    if mask is not None:
        with_stats = "stats" in views or bool(flags.get("return_stats"))
        rows = {"stats": (row_stats_shape(q.shape), np.dtype(np.float32))} if with_stats else {}
        return ({f"d{name}": (views[name].shape, own) for name in "qkv"} if gradients else {"out": (out, own), **rows}), None
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    if gradients:
        shapes |= {name: views[name].shape if name in views else out for name in ("dout", "out")}
    kind = q.dtype if dtype is None else numpy_dtype(dtype)
    dense: dict[str, Any] = {name: View.dense(name, shape, kind, q.storage.device) for name, shape in shapes.items()}
    call = (read_backward if gradients else read_forward)(**dense, options=options, stats=views.get("stats"), **flags)
    return wanted_results(call, views, own), call.gradients


def wanted_results(call: Call, views: Mapping[str, View], dtype: Any) -> Wanted:
    """The results of a call in order; the views of results are checked.

    Args:
        call: the call, in the dtype of the program.
        views: the arrays.
        dtype: the dtype of the results with a head dim.
    """
    found = {
        spec.name: (spec.shape, dtype if spec.name in VECTORS else numpy_dtype(spec.dtype)) for spec in call.problem.results
    }
    if call.gradients:
        found |= {gradient_name(name): spec for name, spec in call.gradients.specs.items()}
    table = expected_arrays(call.problem.q, call.problem.k, call.problem.v)
    for name in ("out", "dq", "dk", "dv"):
        if name in found and name in views and name in call.result_names:
            expected = table[name]._replace(dtype=dtype_name(dtype), writable=True)
            check_spec(make_spec(name, views[name].signature), expected)
    return {name: found[name] for name in call.result_names}


def add_results(inputs: Inputs, q: Any, wanted: Wanted) -> None:
    """Create the results that the caller did not pass."""
    for name, (shape, dtype) in wanted.items():
        if name not in inputs.arrays:
            inputs.add(name, cupy_runtime.new_result(q, shape, dtype))


# Builders


def forward(
    builder: Builder,
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    native: bool = False,
    return_stats: Any = False,
    deterministic: bool = False,
) -> None:
    """Add the steps of the forward pass.

    Args:
        builder: collects the steps.
        views: q, k, v and out; stats, max and sum_exp if they are computed; and "kept q" and others to keep what is rounded.
        options: the options, with views in place of arrays, in the layout of this package.
        mask, dtype, return_stats, deterministic: as for :func:`attend`.
        native: as for :func:`.block_masks.forward`. Default False.
    """
    kept = {name: views[f"kept {name}"] for name in _KEPT if f"kept {name}" in views}
    own, finish = rounded(builder, {name: views.get(name) for name in Forward._fields}, dtype, ("out",), kept)
    if mask is None:
        call = read_forward(**own, options=options, return_stats=return_stats, deterministic=deterministic)
        call.arrays |= {name: views[name] for name in OUTPUTS[2:] if name in views}
        builder.call("attention", call)
    else:
        block_mask_steps.forward(builder, Forward(**own), mask, options, deterministic=deterministic, native=native)
    finish()


def backward(
    builder: Builder,
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    mask: BlockMask | None = None,
    dtype: str | None = None,
    deterministic: bool = False,
    given_stats: GivenStats = "whole",
    **outputs: Any,
) -> None:
    """Add the steps of the gradients.

    Args:
        builder: collects the steps.
        views: dout, q, k, v, out, stats and the results.
        options: the options, with views in place of arrays, in the layout of this package.
        mask, dtype, deterministic, given_stats, outputs: as for :func:`attend_backward`.
    """
    own, finish = rounded(builder, {name: views[name] for name in Gradients._fields}, dtype, ("dq", "dk", "dv"))
    if mask is None:
        call = read_backward(**own, options=options, deterministic=deterministic, **outputs)
        call.given_stats = given_stats
        call.arrays |= {name: views[name] for name in call.result_names if name not in call.arrays}
        builder.call("gradients", call)
    else:
        block_mask_steps.backward(builder, Gradients(**own), mask, options, deterministic=deterministic)
    finish()


def rounded(
    builder: Builder,
    arrays: Mapping[str, View | None],
    dtype: str | None,
    results: Sequence[str],
    kept: Mapping[str, View] | None = None,
) -> tuple[dict[str, Any], Callable[[], None]]:
    """Arrays in another dtype, and a function that adds the steps which convert the results back.

    Args:
        builder: collects the steps.
        arrays: the arrays by name. Those with a head dim and another dtype are converted.
        dtype: the dtype; None to convert nothing.
        results: the names of the arrays that are written.
        kept: what some of them are converted into, by name. Default: temporaries.
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
