"""Read calls of several steps: their arrays and options, and passes that need several steps.

These passes have a layer's option, ``compute_dtype``, a gradient of the log-sum-exp, or a scale for each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..boundary.arguments import read_backward, read_forward
from ..boundary.axes import Axes
from ..boundary.compute import check_converted
from ..boundary.read_array import check_arrays as check_specs
from ..boundary.read_array import read_arrays, tensor_name
from ..boundary.read_options import ReadOptions, check_option_names, read_options
from ..boundary.user_functions import Gradients, kept_options
from ..hooks import split_options
from ..problem.arrays import KEPT
from ..problem.tensor_spec import Expected, dtype_name, numpy_dtype
from ..problem.view import View
from ..replay.call_key import CallKey
from .executor import ReadCall, composed, is_any_array
from .head_scales import check_request, check_scales, unscaled_options
from .program import Builder


class Operands(NamedTuple):
    """The arguments of a call of several steps after reading. All later checks and builders use them.

    Attributes:
        arrays: the arrays by name, including the options' arrays.
        views: their views.
        options: the options, with views instead of arrays.
    """

    arrays: dict[str, Any]
    views: dict[str, View]
    options: ReadOptions

    def composed_backward(
        self, key: CallKey, build: Callable[..., None], computed: Mapping[str, View], *, result: Any = None, **flags: Any
    ) -> ReadCall:
        """Return the call of a backward pass of several steps, see :func:`.composed`.

        Args:
            key: the call.
            build: a function of a builder that adds the steps. It also gets ``views`` (with the results), ``options`` and the
                flags.
            computed: the views of the arrays that the gradients are computed from; ``views``, unless steps first convert some.
            result: the dtype of dout, dq, dk and dv. Default None: q's dtype.
            flags: the other arguments of :func:`.read_backward`.
        """
        arrays, views, options = self
        results, gradients = _results_of(computed, options, gradients=True, result=result, **flags)
        why = _read_stats_gradient(computed, options.compute_dtype)
        steps = functools.partial(build, views=views, options=options, **flags)
        return composed(key, arrays, views, results, steps, gradients=gradients, refusal=why)


def read_operands(
    arrays: Mapping[str, Any], options: Mapping[str, Any], results: Sequence[str] | None = None, *, result: Any = None
) -> Operands:
    """Read a call of several steps; return ``(arrays, views, options)``, and record its score and mask functions.

    Args:
        arrays, options: the arrays by name, and the options of the call.
        results: for a call that takes ``compute_dtype``, the names of the arrays that it writes; with this option, dtypes and
            strides are also checked. Default None: the call does not take ``compute_dtype``.
        result: the dtype of dout, dq, dk and dv if the other arrays already have ``compute_dtype``. Default None: q's.

    Raises:
        TypeError, ValueError: an argument is not an array, an option does not exist, or has a wrong value.

    >>> import numpy as np
    >>> arrays, views, options = read_operands({"q": np.zeros((8, 2, 5, 1))}, {"causal": True})
    >>> views["q"].shape, options.settings.band
    ((8, 2, 5, 1), Band(left=None, right=0, bottom_right=False))
    """
    layer_option, dtype, options = split_options(options)
    check_option_names(options if results is not None or dtype is None else {**options, "compute_dtype": dtype})
    passed, tensors, _ = read_arrays(arrays, options)
    options = kept_options(arrays["q"], options)
    operands = passed | tensors
    views = {name: View.of(name, array) for name, array in operands.items()}
    of_options = {name: view for name, view in views.items() if name not in arrays}
    described = {name: of_options.get(name, value) for name, value in options.items() if value is not None}
    if tensors:
        described["tensors"] = {name: views[tensor_name(name)] for name in options["tensors"]}
    head_dim, *_ = views["q"].shape or (0,)
    read = replace(read_options(described, head_dim), layer_option=layer_option, compute_dtype=dtype)
    if dtype is not None:
        check_converted({name: views.get(name) for name in arrays}, dtype=result, results=results or ())
    return Operands(operands, views, read)


def read_forward_steps(key: CallKey, *, kept: bool, **flags: Any) -> ReadCall:
    """Read a forward pass; the arguments are as for :func:`.parse_forward`."""
    arrays, views, options = _read_operands(key, ("out", "stats"), None)
    results, _ = _results_of(views, options, **flags)
    if kept:
        dtype = options.compute_dtype
        assert dtype
        shapes, device = {name: (results | views)[name].shape for name in KEPT}, views["q"].storage.device
        for name, shape in shapes.items():
            results[f"kept {name}"] = View.dense(f"kept {name}", shape, numpy_dtype(dtype), device)
    return composed(key, arrays, views, results, functools.partial(Builder.add_pass, views=views, options=options, **flags))


def read_backward_steps(key: CallKey, *, result: Any = None, **flags: Any) -> ReadCall:
    """Read a backward pass; the arguments are as for :func:`.parse_backward`."""
    check_request(key.options, flags.get("return_dscale", False))
    operands = _read_operands(key, ("dq", "dk", "dv"), result)
    return operands.composed_backward(key, Builder.add_pass, operands.views, result=result, **flags)


def _read_stats_gradient(views: Mapping[str, View], dtype: str | None) -> Callable[[str, str], str] | None:
    """Check ``dstats``, and return a function that explains why cuDNN cannot run the call; None without ``dstats``.

    ``dtype`` is the dtype to compute in. None: q's dtype.
    """
    if "dstats" not in views:
        return None
    from .stats_gradient import refusal

    q, k, v = (views[name] for name in "qkv")
    table = Expected.of_call(q, k, v, given=views, computed=dtype)
    check_specs([table["dstats"]], {"q": q, "dstats": views["dstats"]})
    return functools.partial(refusal, q.shape[0], v.shape[0], alone=views.get("dout") is None)


def _read_operands(key: CallKey, results: Sequence[str], result: Any) -> Operands:
    """Call :func:`.read_operands`, and check what can be checked without a problem: scales, and a layer option's arrays."""
    scale = {"scale": key.options["scale"]} if is_any_array(key.options.get("scale")) else {}
    given = {**key.options, "scale": 1.0} if scale else key.options
    arrays, views, options = read_operands(key.named() | scale, given, results, result=result)
    layer_option, dtype = options.layer_option, options.compute_dtype
    if scale:
        check_scales(views, dtype or dtype_name(views["q"].dtype))
        options |= {"scale": views["scale"]}
    of_call = {name: views.get(name) for name in key.names}
    if layer_option is not None:
        for name in "qkv":
            Axes.check_strides(name, of_call[name], required=True)
        layer_option.module.check(layer_option.value, of_call, options)
        _check_arrays(of_call | {"sinks": options.get("sinks")}, results, dtype, result)
    return Operands(arrays, views, options)


def _check_arrays(given: Mapping[str, Any], results: Sequence[str], dtype: str | None, result: Any) -> None:
    """Check a call's arrays except q, k and v: no problem checks the arrays that a layer's steps read and write.

    ``results``, ``dtype`` and ``result`` are as for :func:`_read_operands`.
    """
    table = Expected.of_call(*(given[name] for name in "qkv"), given=given, computed=None if dtype is None else "float32")
    if result is not None:
        table |= {name: table[name]._replace(dtype=dtype_name(result)) for name in ("dout", "dq", "dk", "dv")}
    check_specs([one._replace(writable=one.name in results) for one in table.values()], given)
    for name in table:
        if name != "stats" and given.get(name) is not None:
            Axes.check_strides(name, given[name], required=True, written=name in results)


def _results_of(
    views: Mapping[str, View],
    options: ReadOptions,
    *,
    gradients: bool = False,
    result: Any = None,
    **flags: Any,
) -> tuple[dict[str, View], Gradients | None]:
    """Return views of a call's results in order, and its gradients of ``tensors``; check the results that were passed.

    ``views`` has q, k and v, and any other arrays that the caller passed; ``flags`` are the call's other arguments.
    """
    q, k, v = (views[name] for name in "qkv")
    layer_option, dtype = options.layer_option, options.compute_dtype
    requested, options = flags.pop("return_dscale", False), unscaled_options(options.of_one_problem())
    own, out = q.dtype if result is None else result, (v.shape[0], *q.shape[1:])
    if layer_option is not None:
        shapes = {f"d{name}": views[name].shape for name in "qkv"} if gradients else {"out": out}
        results = {name: View.dense(name, shape, own, q.storage.device) for name, shape in shapes.items()}
        if not gradients and ("stats" in views or flags.get("return_stats")):
            results["stats"] = View.row_stats("stats", q, dtype)
        return (results | _of_scale(views) if requested else results), None
    shapes = {"q": q.shape, "k": k.shape, "v": v.shape}
    if gradients:
        shapes |= {name: views[name].shape if name in views else out for name in ("dout", "out")}
    kind = q.dtype if dtype is None else numpy_dtype(dtype)
    dense: dict[str, Any] = {name: View.dense(name, shape, kind, q.storage.device) for name, shape in shapes.items()}
    if dtype is None:  # the caller's views, so that their strides are checked
        dense |= {name: view for name, view in views.items() if name in (*dense, "dq", "dk", "dv")}
    call = (read_backward if gradients else read_forward)(**dense, options=options, stats=views.get("stats"), **flags)
    results = call.result_views(views, own)
    if requested:  # dscale comes before the gradients of tensors
        of_tensors = {name: results.pop(name) for name in (call.gradients.results if call.gradients else ())}
        results |= _of_scale(views) | of_tensors
    return results, call.gradients


def _of_scale(views: Mapping[str, View]) -> dict[str, View]:
    """Return the view of the scale's gradient."""
    scale = views["scale"]
    return {"dscale": View.dense("dscale", scale.shape, scale.dtype, scale.storage.device)}
