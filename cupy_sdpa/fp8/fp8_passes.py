"""Programs of FP8 attention: conversion of arrays to FP8 and back, the forward pass, and gradients of a pass in FP8."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..extend import Builder, Expected, ReadOptions, View, numpy_dtype, read_forward
from . import fp8_kernels, mean_kernels

#: The dtypes other than FP8 in which the engine may write an output.
OUTPUTS = ("float16", "bfloat16")
#: The factors of a call's arrays.
FACTORS = ("descale_q", "descale_k", "descale_v", "scale_out")
#: What is passed for values whose mean was subtracted: the mean, and their scale.
MEAN = ("mean", "scale_v")


def add_conversions(
    builder: Builder,
    sources: Sequence[View],
    dtype: str,
    rotations: Sequence[int],
    lengths: Sequence[View | None],
    targets: Sequence[View] | None = None,
    factors: View | None = None,
    means: Sequence[View | None] = (None, None, None),
) -> list[tuple[View, View, View]]:
    """Add the step that converts up to three arrays to FP8; returns the elements, the scale and the descale of each.

    ``rotations`` are the lengths of the parts of head_dim that are rotated, 1 for none. Elements are written to ``targets``,
    dense in Fortran order, and the factors to ``factors`` (:func:`factors_in`). Default: temporaries. ``means`` are written and
    subtracted: the mean over the keys, float32 ``(D, H, 1, B)``; None for arrays that keep theirs.
    """
    storage = numpy_dtype(dtype, on_gpu=builder.on_gpu)
    targets = targets or [builder.temporary(x.shape, storage) for x in sources]
    factors = factors or builder.temporary((2 * fp8_kernels.FACTOR_STEP * len(sources),), np.float32)
    dense = []
    for source, x in zip(sources, lengths, strict=True):
        if x is not None:
            builder.check(functools.partial(_check_lengths, expected_lengths(source)), {"lengths": x})
            x = x if x.flags.c_contiguous else builder.copied(x)
        dense.append(x)
    for source, mean, n in zip(sources, means, dense, strict=False):
        if mean is not None:
            sums = builder.temporary(mean_kernels.sums_shape(source.shape), np.float32) if builder.on_gpu else None
            builder.run(mean_kernels.write_mean, source, mean, n, sums, writes=[mean, *([sums] if sums else [])])
    amax = None
    if builder.device is not None:
        amax = builder.temporary((fp8_kernels.blocks_of(sources) * len(sources),), np.uint32)
    step = 2 * fp8_kernels.FACTOR_STEP
    conversions = [
        fp8_kernels.Fp8Conversion(x, target, factors[step * i : step * (i + 1)], rotation, n, mean)
        for i, (x, target, rotation, n, mean) in enumerate(zip(sources, targets, rotations, dense, means, strict=False))
    ]
    writes = [*targets, factors] if amax is None else [*targets, factors, amax]
    builder.run(fp8_kernels.quantize_arrays, conversions, amax, dtype, writes=writes)
    return [(target, *factors_in(factors, i)) for i, target in enumerate(targets)]


def expected_lengths(source: Any) -> Expected:
    """Return the expected dtype, shape and range of the sequence lengths of an array to convert."""
    return Expected("lengths", tuple(source.shape[3:]), "int32", "(B,)", most=source.shape[2])


def _check_lengths(expected: Expected, arrays: Mapping[str, Any]) -> None:
    expected.check_elements(arrays["lengths"])


def mean_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the mean over the keys of an array of a shape."""
    width, heads, _, *batch = shape
    return width, heads, 1, *batch


def factors_in(factors: Any, number: int) -> tuple[Any, Any]:
    """Return an array's scale and descale, float32 ``(1,)``, from the factors of several arrays."""
    place = 2 * fp8_kernels.FACTOR_STEP * number
    return factors[place : place + 1], factors[place + fp8_kernels.FACTOR_STEP : place + fp8_kernels.FACTOR_STEP + 1]


def forward(
    builder: Builder,
    views: Mapping[str, View],
    options: ReadOptions,
    *,
    dtype: str,
    rotated: bool,
    out_dtype: str | None,
    writes_out: bool | None,
    return_stats: Any,
) -> None:
    """Add the steps of the forward pass.

    Args:
        builder, options, return_stats: as for :meth:`.Builder.add_pass`.
        views: q, k, v, their factors (:data:`FACTORS`), and the results: out, amax_out unless it is temporary, and stats, max
            and sum_exp if they are computed. Without descale_q, q is converted first. If a mean was subtracted from v,
            :data:`MEAN` is added to the output; it has v's axes, and is equal for all keys and all pages of a sequence.
        dtype: the FP8 dtype.
        rotated: whether k is rotated, so that q must be rotated when it is converted.
        out_dtype: the dtype of the output; None for FP8.
        writes_out: whether the engine itself writes an output that is not FP8; otherwise a step converts the output. None:
            if the engine can.
    """
    if writes_out is None:
        writes_out = out_dtype in OUTPUTS and builder.writes_16_bits
    given: dict[str, Any] = {**views}
    if "descale_q" not in given:
        parts = [fp8_kernels.rotation_of(given["q"].shape[0]) if rotated else 1]
        ((given["q"], _, given["descale_q"]),) = add_conversions(
            builder, [given["q"]], dtype, parts, [options.get("seq_lens_q")]
        )
    if "mean" in given and given["mean"].size and (options.get("page_table") is None or options["page_table"].size):
        _forward_with_mean(builder, given, options, dtype, out_dtype, return_stats, writes_out=writes_out)
        return
    if "amax_out" not in given:
        given["amax_out"] = builder.temporary((1,), np.float32)
    out, direct = given["out"], out_dtype is None or writes_out
    if not direct:
        given["out"] = builder.temporary(out.shape, numpy_dtype(dtype, on_gpu=builder.on_gpu))
    elif out_dtype is not None:
        given.pop("scale_out", None)
    _attend_in_fp8(builder, given, options, dtype, out_dtype if direct else None, return_stats)
    if not direct:
        scaled = out if out.flags.f_contiguous else builder.temporary(out.shape, out.dtype)
        builder.run(fp8_kernels.dequantize, given["out"], scaled, given["descale_v"], 1, dtype, writes=(scaled,))
        if scaled is not out:
            builder.copy(out, scaled)


def _forward_with_mean(
    builder: Builder,
    views: dict[str, Any],
    options: ReadOptions,
    dtype: str,
    out_dtype: str | None,
    return_stats: Any,
    *,
    writes_out: bool,
) -> None:
    """Add attention to the values without their mean, and a step that adds the mean to the output.

    The step always needs the statistics: they tell which rows have no keys, and the sink's weight.
    """
    given, written = {**views}, out_dtype if writes_out else None
    out, mean, amax, scale = given.pop("out"), given.pop("mean"), given.get("amax_out"), given.pop("scale_out", None)
    target = out if out.flags.f_contiguous else builder.temporary(out.shape, out.dtype)
    given["amax_out"] = builder.temporary((1,), np.float32)
    if written is None:
        given["out"] = builder.temporary(out.shape, numpy_dtype(dtype, on_gpu=builder.on_gpu))
        given["scale_out"] = given["scale_v"]
    else:
        given["out"] = target
    if "stats" not in given:
        given["stats"] = builder.temporary_stats(given["q"])
    _attend_in_fp8(builder, given, options, dtype, written, return_stats or True)
    weights = mean_kernels.Weights(given["stats"], options.get("sinks"))
    scaled = mean_kernels.Scaled(scale if out_dtype is None else None, amax)
    if amax is not None:
        builder.fill(amax, 0)
    table = options["page_table"][0] if options.get("page_table") is not None else None
    of_sequences = mean[:, :, 0] if mean.ndim == 4 else mean[:, :, :1]
    builder.run(
        mean_kernels.add_mean, given["out"], target, given["descale_v"] if written is None else None, of_sequences, weights,
        scaled, table, dtype, writes=[target, *([] if amax is None else [amax])],
    )  # fmt: skip
    if target is not out:
        builder.copy(out, target)


def _attend_in_fp8(
    builder: Builder, views: Mapping[str, Any], options: ReadOptions, dtype: str, out_dtype: str | None, return_stats: Any
) -> None:
    """Add attention of FP8 arrays."""
    call = read_forward(**_typed(views, dtype, out_dtype, return_stats), options=options)
    call.arrays |= {name: views[name] for name in ("q", "k", "v", "out", "max", "sum_exp") if name in views}
    builder.call("attention", call)


def _typed(views: Mapping[str, Any], dtype: str, out_dtype: str | None, return_stats: Any) -> dict[str, Any]:
    """Return the arguments of :func:`.read_forward` except the options; ``out`` may be missing.

    Views of FP8 arrays get the FP8 dtype; the arrays on the GPU are uint8.
    """
    in_fp8 = [name for name in ("q", "k", "v", "out") if name in views and not (name == "out" and out_dtype)]
    typed = {name: replace(views[name], dtype=numpy_dtype(dtype)) for name in in_fp8}
    others = {name: view for name, view in views.items() if name not in ("max", "sum_exp", *MEAN)}
    return {**others, **typed, "out_dtype": out_dtype or "", "return_stats": return_stats}


def read_results(
    views: Mapping[str, View],
    given: Mapping[str, View],
    result: Any,
    options: ReadOptions,
    *,
    dtype: str,
    out_dtype: str | None,
    return_stats: Any,
) -> dict[str, View]:
    """Check the call, and return the views of the results of :func:`forward`; with a head dim, their dtype is ``result``.

    ``views`` has q, k, v (FP8 or not), their factors, and no result except stats. ``given`` has the views of the caller's
    arrays; the results among them are checked.
    """
    elements: dict[str, Any] = {**views}
    if "descale_q" not in elements:
        q, k = elements["q"], elements["k"]
        elements["q"] = View.dense("q", q.shape, k.dtype, q.storage.device)
        elements["descale_q"] = elements["descale_k"]
    if out_dtype is not None:
        elements.pop("scale_out", None)
    call = read_forward(**_typed(elements, dtype, out_dtype, return_stats), options=options)
    return call.result_views(given, result)


def keep_in_fp8(
    builder: Builder, views: Mapping[str, View], options: ReadOptions, *, dtype: str, return_stats: Any, out_dtype: str
) -> None:
    """Add the steps of a forward pass whose q, k and v are kept in FP8 for the gradients.

    ``views`` are q, k, v, out and stats; and "kept q", "kept k", "kept v" and "factors", which are written; and "kept mean" if
    the mean of v is subtracted.
    """
    q, k, v = (views[name] for name in "qkv")
    part, lengths = (
        fp8_kernels.rotation_of(q.shape[0]),
        [options.get(name) for name in ("seq_lens_q", "seq_lens_kv", "seq_lens_kv")],
    )
    kept, mean = [views[f"kept {name}"] for name in "qkv"], views.get("kept mean")
    means = None, None, mean
    made = add_conversions(builder, [q, k, v], dtype, [part, part, 1], lengths, kept, views["factors"], means)
    given = {name: elements for name, (elements, *_) in zip("qkv", made, strict=True)}
    given |= {f"descale_{name}": descale for name, (*_, descale) in zip("qkv", made, strict=True)}
    given |= {"scale_out": made[2][1], "out": views["out"], "stats": views["stats"]}
    given |= {} if mean is None else {"mean": mean, "scale_v": made[2][1]}
    flags: dict[str, Any] = {"out_dtype": out_dtype, "writes_out": False, "return_stats": return_stats}
    forward(builder, given, options, dtype=dtype, rotated=True, **flags)


def backward(builder: Builder, views: Mapping[str, View], options: ReadOptions, *, dtype: str, **flags: Any) -> None:
    """Add the steps of the gradients, computed in the output's dtype from the values that :func:`keep_in_fp8` kept.

    The log-sum-exp was computed from the same values, so exp(S - L) is at most 1 even where the conversion changed a score.
    ``views`` has dout, out, stats, the results, q, k and v in FP8, "factors", and "mean" if a mean was subtracted from v.
    ``flags`` are as for :meth:`.Builder.add_pass`.
    """
    given = {**views}
    mean = given.pop("mean", None)
    for i, name in enumerate("qkv"):
        elements = views[name]
        given[name] = target = builder.temporary(elements.shape, views["out"].dtype)
        _, descale = factors_in(views["factors"], i)
        rotation = 1 if name == "v" else fp8_kernels.rotation_of(elements.shape[0])
        of_values = _along_keys(mean, elements.shape) if name == "v" and mean is not None else None
        builder.run(fp8_kernels.dequantize, elements, target, descale, rotation, dtype, of_values, writes=(target,))
    builder.add_pass(given, options, given_stats="other", **flags)


def _along_keys(mean: View, shape: tuple[int, ...]) -> View:
    """Return a mean with one key as an array of a shape, constant along the keys."""
    return mean.strided(shape, (*mean.strides[:2], 0, *mean.strides[3:]))
