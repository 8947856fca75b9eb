"""Programs of FP8 attention: conversion of arrays to FP8 and back, the forward pass, and gradients of a pass in FP8."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..boundary.arguments import check_counts, read_forward
from ..boundary.call import Call
from ..kernels import fp8_kernels
from ..problem.tensor_spec import numpy_dtype, storage_dtype
from ..problem.view import View
from ..programs import passes
from ..programs.program import Builder
from ..programs.steps import Check

#: The factors of the arrays of a call.
FACTORS = ("descale_q", "descale_k", "descale_v", "scale_out")


def add_conversions(
    builder: Builder,
    sources: Sequence[View],
    dtype: str,
    rotations: Sequence[int],
    lengths: Sequence[View | None],
    targets: Sequence[View] | None = None,
    factors: View | None = None,
) -> list[tuple[View, View, View]]:
    """Add the step that converts up to three arrays to FP8; returns the elements, the scale and the descale of each.

    ``rotations`` are the lengths of the parts of head_dim that are rotated, 1 for none. Elements are written to ``targets``,
    dense in Fortran order, and the factors to ``factors`` (:func:`factors_in`). Default: temporaries.
    """
    storage = storage_dtype(dtype, builder.device is not None)
    targets = targets or [builder.temporary(x.shape, storage) for x in sources]
    factors = factors or builder.temporary((2 * fp8_kernels.FACTOR_STEP * len(sources),), np.float32)
    dense = []
    for source, x in zip(sources, lengths, strict=True):
        if x is not None:
            builder.checks.append(Check(functools.partial(_check_lengths, source.shape[2]), {"lengths": x}))
            x = x if x.flags.c_contiguous else builder.copied(x)
        dense.append(x)
    amax = None
    if builder.device is not None:
        amax = builder.temporary((fp8_kernels.blocks_of(sources) * len(sources),), np.uint32)
    step = 2 * fp8_kernels.FACTOR_STEP
    conversions = [
        fp8_kernels.Conversion(x, target, factors[step * i : step * (i + 1)], rotation, n)
        for i, (x, target, rotation, n) in enumerate(zip(sources, targets, rotations, dense, strict=True))
    ]
    writes = [*targets, factors] if amax is None else [*targets, factors, amax]
    builder.run(fp8_kernels.quantize, conversions, amax, dtype, writes=writes)
    return [(target, *factors_in(factors, i)) for i, target in enumerate(targets)]


def _check_lengths(most: int, arrays: Mapping[str, Any]) -> None:
    check_counts("lengths", arrays["lengths"], most)


def factors_in(factors: Any, number: int) -> tuple[Any, Any]:
    """The scale and the descale of an array, float32 ``(1,)``, among those of several."""
    place = 2 * fp8_kernels.FACTOR_STEP * number
    return factors[place : place + 1], factors[place + fp8_kernels.FACTOR_STEP : place + fp8_kernels.FACTOR_STEP + 1]


def forward(
    builder: Builder,
    views: Mapping[str, View],
    options: Mapping[str, Any],
    *,
    dtype: str,
    rotated: bool,
    out_dtype: str | None,
    writes_out: bool,
    return_stats: Any,
) -> Call:
    """Add the steps of the forward pass; returns the call of the kernel.

    Args:
        builder, options, return_stats: as for :func:`.passes.add`.
        views: q, k, v, their factors (:data:`FACTORS`), and the results: out, amax_out unless it is temporary, and stats, max
            and sum_exp if they are computed. Without descale_q, q is converted first.
        dtype, rotated: the FP8 dtype, and whether k is rotated, and q is if it is converted.
        out_dtype: the dtype of the output; None for FP8.
        writes_out: whether the engine writes an output of another dtype than FP8; otherwise the output is converted.
    """
    given: dict[str, Any] = {**views}
    if "descale_q" not in given:
        parts = [fp8_kernels.rotation_of(given["q"].shape[0]) if rotated else 1]
        ((given["q"], _, given["descale_q"]),) = add_conversions(
            builder, [given["q"]], dtype, parts, [options.get("seq_lens_q")]
        )
    if "amax_out" not in given:
        given["amax_out"] = builder.temporary((1,), np.float32)
    out, direct = given["out"], out_dtype is None or writes_out
    if not direct:
        given["out"] = builder.temporary(out.shape, storage_dtype(dtype, builder.device is not None))
    elif out_dtype is not None:
        given.pop("scale_out", None)
    call = _read(given, options, dtype, out_dtype if direct else None, return_stats)
    builder.call("attention", call)
    if not direct:
        scaled = out if out.flags.f_contiguous else builder.temporary(out.shape, out.dtype)
        builder.run(fp8_kernels.dequantize, given["out"], scaled, given["descale_v"], 1, dtype, writes=(scaled,))
        if scaled is not out:
            builder.copy(out, scaled)
    return call


def _read(views: Mapping[str, Any], options: Mapping[str, Any], dtype: str, out_dtype: str | None, return_stats: Any) -> Call:
    """The call of FP8 arrays; ``out`` may be missing."""
    in_fp8 = [name for name in ("q", "k", "v", "out") if name in views and not (name == "out" and out_dtype)]
    typed = {name: replace(views[name], dtype=numpy_dtype(dtype)) for name in in_fp8}  # on the GPU elements are uint8
    others = {name: view for name, view in views.items() if name not in ("max", "sum_exp")}
    call = read_forward(options=options, return_stats=return_stats, out_dtype=out_dtype or "", **{**others, **typed})
    call.arrays |= {name: views[name] for name in (*in_fp8, "max", "sum_exp") if name in views}
    return call


def read_results(
    views: Mapping[str, View], options: Mapping[str, Any], *, dtype: str, out_dtype: str | None, return_stats: Any
) -> Call:
    """The call of the kernel for dense elements, whose results are those of :func:`forward`; nothing is added to a builder.

    ``views`` are q, k and v, in FP8 or not, and their factors; without results except stats.
    """
    given: dict[str, Any] = {**views}
    if "descale_q" not in given:
        q, k = given["q"], given["k"]
        given["q"] = View.dense("q", q.shape, k.dtype, q.storage.device)
        given["descale_q"] = given["descale_k"]
    if out_dtype is not None:
        given.pop("scale_out", None)
    return _read(given, options, dtype, out_dtype, return_stats)


def keep_in_fp8(
    builder: Builder, views: Mapping[str, View], options: Mapping[str, Any], *, dtype: str, return_stats: Any, out_dtype: str
) -> None:
    """Add the steps of a forward pass whose q, k and v are kept in FP8 for the gradients.

    ``views`` are q, k, v, out and stats; and "kept q", "kept k", "kept v" and "factors", which are written.
    """
    q, k, v = (views[name] for name in "qkv")
    part, lengths = (
        fp8_kernels.rotation_of(q.shape[0]),
        [options.get(name) for name in ("seq_lens_q", "seq_lens_kv", "seq_lens_kv")],
    )
    kept = [views[f"kept {name}"] for name in "qkv"]
    made = add_conversions(builder, [q, k, v], dtype, [part, part, 1], lengths, kept, views["factors"])
    given = {name: elements for name, (elements, *_) in zip("qkv", made, strict=True)}
    given |= {f"descale_{name}": descale for name, (*_, descale) in zip("qkv", made, strict=True)}
    given |= {"scale_out": made[2][1], "out": views["out"], "stats": views["stats"]}
    flags: dict[str, Any] = {"out_dtype": out_dtype, "writes_out": False, "return_stats": return_stats}
    forward(builder, given, options, dtype=dtype, rotated=True, **flags)


def backward(builder: Builder, views: Mapping[str, View], options: Mapping[str, Any], *, dtype: str, **flags: Any) -> None:
    """Add the steps of the gradients at the values that :func:`keep_in_fp8` kept, computed in the dtype of the output.

    The log-sum-exp was computed from these values: exp(S - L) is then at most 1, also where the conversion changed a score.
    ``views`` are dout, out, stats and the results; and q, k, v in FP8, and "factors". The flags are those of
    :func:`.passes.add`.
    """
    given = {**views}
    for i, name in enumerate("qkv"):
        elements = views[name]
        given[name] = target = builder.temporary(elements.shape, views["out"].dtype)
        _, descale = factors_in(views["factors"], i)
        rotation = 1 if name == "v" else fp8_kernels.rotation_of(elements.shape[0])
        builder.run(fp8_kernels.dequantize, elements, target, descale, rotation, dtype, writes=(target,))
    passes.add(builder, given, options, given_stats="other", **flags)
