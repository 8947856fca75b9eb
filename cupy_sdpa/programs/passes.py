"""Attention and its gradients as programs: with a block mask, in another dtype than that of the arrays, or both."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..block_masks.automatic import automatic_mask
from ..block_masks.block_mask import BlockMask
from ..block_masks.method import SUPPORTED, check, check_arrays, method_of
from ..block_masks.native import is_supported
from ..boundary.arguments import read_backward, read_forward
from ..boundary.call import Call, GivenStats
from ..boundary.compute import check_converted
from ..boundary.conversion import OUTPUTS, gradient_names
from ..boundary.layouts import VECTORS, in_own_layout, of_caller, other_layout, results_in
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
#: Arrays with the same axes.
_LIKE_KEPT = ("dq", "dk", "dv", "dout")
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

#: The shapes and dtypes of results by name.
Wanted = dict[str, tuple[tuple[int, ...], Any]]


class Reading(NamedTuple):
    """What is known of a call whose arguments are valid.

    Attributes:
        inputs: the arrays, and the options, in the layout of this package.
        wanted: the results in order.
        build: adds the steps to a builder.
        gradients: which gradients of ``tensors`` are among the results. Default None: none.
    """

    inputs: Inputs
    wanted: Wanted
    build: Callable[[Builder], object]
    gradients: TensorGradients | None = None


def call_program(
    kind: Any,
    names: Sequence[str],
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    read: Callable[[dict[str, Any]], Reading],
    outputs: Sequence[str],
) -> list[Any]:
    """Run a call as a program: one that is repeated as it was cached, any other after its arguments have been read.

    Args:
        kind, names, arrays, options: as for :func:`.cache_call`.
        read: reads the arrays, by name; the errors that it and the builder raise have the axes of the caller.
        outputs: the names of the results that the caller gets in its layout; further results remain as they are.
    """
    results = run_cached(kind, arrays, options)
    if results is None:
        named = dict(zip(names, arrays, strict=True))
        like = next(array for array in arrays if array is not None)
        with cupy_runtime.device_context(like):
            with of_caller(named, options):
                inputs, wanted, build, gradients = read(named)
                add_results(inputs, like, wanted)

            def build_of_caller(builder: Builder) -> None:
                with of_caller(named, options):
                    build(builder)

            results = run_program(kind, names, arrays, options, inputs, list(wanted), build_of_caller, gradients)
    if "layout" in options and (layout := other_layout(options)):
        given = dict(zip(names, arrays, strict=True))
        results = results_in(layout, outputs, results, given, options) + results[len(outputs) :]
    return results


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
    statistics = return_stats if type(return_stats) is bool else repr(return_stats)
    kind = ("forward program", dtype, kept, statistics, deterministic, mask if mask is None else key_of(mask))

    def read(arrays: dict[str, Any]) -> Reading:
        inputs = _inputs(arrays, options, mask, dtype, ("out", "stats"), None)
        of_call: dict[str, Any] = {"mask": mask, "dtype": dtype, "return_stats": return_stats, "deterministic": deterministic}
        native = False
        if mask is not None:
            sizes, with_stats = check(q, k, v, mask), bool(return_stats) or stats is not None
            if method_of(mask, sizes).blocks is not None:
                native = is_supported((q, k, v), mask, sizes, inputs.options, return_stats=with_stats, dtype=dtype)
        wanted, _ = results_of(inputs.views, inputs.options, **of_call)
        if kept:
            assert dtype
            shapes = {name: wanted[name][0] if name in wanted else inputs.arrays[name].shape for name in _KEPT}
            wanted |= {f"kept {name}": (shape, numpy_dtype(dtype)) for name, shape in shapes.items()}
        build = functools.partial(forward, views=inputs.views, options=inputs.options, native=native, **of_call)
        return Reading(inputs, wanted, build)

    outputs = (*OUTPUTS[:2], *_LIKE_KEPT) if kept else OUTPUTS
    return call_program(kind, Forward._fields, (q, k, v, out, stats), options, read, outputs)


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

    def read(named: dict[str, Any]) -> Reading:
        for name in ("dout", "out", "stats"):
            if named[name] is None:
                raise TypeError(
                    f"{name} is None; the backward pass needs it: attention(..., return_stats=True) returns out and stats"
                )
        inputs = _inputs(named, options, mask, dtype, ("dq", "dk", "dv"), result)
        of_call: dict[str, Any] = {"mask": mask, "dtype": dtype, **flags}
        wanted, gradients = results_of(inputs.views, inputs.options, gradients=True, result=result, **of_call)
        of_call |= {"views": inputs.views, "options": inputs.options, "given_stats": given_stats}
        return Reading(inputs, wanted, functools.partial(backward, **of_call), gradients)

    return call_program(kind, Gradients._fields, arrays, options, read, gradient_names(return_dbias, return_dsinks))


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
