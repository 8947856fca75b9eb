"""Arrays' signatures and settings -> Problem: the rules of shapes and dtypes, each with a sentence that names both values."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

from ..score_fn.expression import EMPTY_PROGRAM
from .problem import CU_SEQLENS, LENGTHS, PLAIN, SCORE_INPUTS, SEEDS, Problem, Settings
from .tensor_spec import FLOAT_DTYPES, ITEMSIZE, Signature, TensorSpec, dense_spec, spec_of

_DENSE = "shapes are (head_dim, heads, seq, batch). Arrays in C order (batch, seq, heads, head_dim) are passed as x.T"
_PACKED = (
    "shapes of packed sequences are (head_dim, heads, total). Arrays in C order (total, heads, head_dim) are passed as x.T"
)


class RequestedOutputs(NamedTuple):
    """Which results are asked for.

    Attributes:
        stats: the log-sum-exp.
        max_sumexp: the maximum and the sum that it is made of.
        backward: the gradients, in place of the output.
        dbias, dsinks: those of bias and sinks, too.
        rng_dump: which weights dropout keeps.
    """

    stats: bool = False
    max_sumexp: bool = False
    backward: bool = False
    dbias: bool = False
    dsinks: bool = False
    rng_dump: bool = False


#: The output alone.
OUTPUT = RequestedOutputs()


@functools.lru_cache(maxsize=4096)
def make_problem(
    given: tuple[tuple[str, Signature], ...], settings: Settings = PLAIN, wanted: RequestedOutputs = OUTPUT
) -> Problem:
    """The problem that arrays and options pose; a result that is not given is dense, in Fortran order.

    Args:
        given: the name of every array and what it looks like.
        settings: the options.
        wanted: which results are asked for. For gradients, dout, out and stats are taken to be dense where they are not given.

    Raises:
        TypeError: a dtype that attention does not take, or dtypes that differ.
        ValueError: shapes that do not fit.
    """
    arrays = {name: spec_of(name, signature) for name, signature in given}
    problem = _inputs(arrays, settings)
    _, dv, hq, _, sq, skv, b = problem.sizes
    dtype, packed = problem.dtype, problem.packed
    total = problem.q.shape[2]
    of_out = (dv, hq, total) if packed else (dv, hq, sq, b)
    of_stats = (hq, total) if packed else (sq, hq, b)
    out_legend = f"{'(Dv, Hq, Tq)' if packed else '(Dv, Hq, Sq, B)'}, the dtype of q"
    row_legend = "(Hq, Tq)" if packed else "(Sq, Hq, B)"
    found: dict[str, TensorSpec] = {}

    def take(name: str, shape: tuple[int, ...], kind: str, legend: str, *, result: bool) -> None:
        spec = found[name] = arrays.get(name) or dense_spec(name, kind, shape)
        check_spec(spec, shape, kind, legend)
        if result:
            _writable(spec)

    backward = wanted.backward
    take("out", of_out, dtype, out_legend, result=not backward)
    if backward or wanted.stats or "stats" in arrays:
        take("stats", of_stats, "float32", row_legend, result=not backward)
    if wanted.max_sumexp:
        take("max", of_stats, "float32", row_legend, result=True)
        take("sum_exp", of_stats, "float32", row_legend, result=True)
    if wanted.rng_dump:
        take("rng_dump", (skv, sq, hq, b), "float32", "(Skv, Sq, Hq, B)", result=True)
    if backward:
        take("dout", of_out, dtype, out_legend, result=False)
        for name, of in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v)):
            take(name, of.shape, of.dtype, f"that of {of.name}, and its dtype", result=True)
    for asked, name, like in ((wanted.dbias, "dbias", problem.bias), (wanted.dsinks, "dsinks", problem.sinks)):
        if asked:
            if like is None:
                raise ValueError(f"return_{name} is True and {name[1:]} is None: give {name[1:]}=, or leave return_{name} out")
            take(name, like.shape, like.dtype, f"that of {like.name}", result=True)
    return dataclasses.replace(problem, **found)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=4096)
def with_captured_gradients(problem: Problem, names: tuple[str, ...]) -> Problem:
    """A problem that also asks for the gradients of some of the arrays that its functions read.

    They are parts of what the call gives, so they are rounded when they have been added up.
    """
    kind = "float64" if problem.dtype == "float64" else "float32"
    sums = tuple(dense_spec(f"d{spec.name}", kind, spec.shape) for spec in problem.captured if spec.name in names)
    return dataclasses.replace(problem, dcaptured=sums) if sums else problem


def _inputs(arrays: dict[str, TensorSpec], settings: Settings) -> Problem:
    """What q, k, v and the arrays of the options pose, with a placeholder for the output."""
    q, k, v = (arrays[name] for name in "qkv")
    packed = any(name in arrays for name in CU_SEQLENS)
    rank, legend = (3, _PACKED) if packed else (4, _DENSE)
    for spec in (q, k, v):
        if len(spec.shape) != rank:
            raise ValueError(
                f"{spec.name} has {len(spec.shape)} dimensions {spec.shape}; it needs {rank}: "
                + ("(head_dim, heads, total), for cu_seqlens_q and cu_seqlens_kv are given" if packed else
                   f"(head_dim, heads, seq, batch). For a single sequence add a batch axis: {spec.name}[..., None]")
            )  # fmt: skip
        if spec.dtype not in FLOAT_DTYPES:
            raise TypeError(
                f"{spec.name} is {spec.dtype}; attention takes {', '.join(FLOAT_DTYPES)}: convert with .astype(...)"
            )
        if spec.dtype != q.dtype:
            raise TypeError(f"{spec.name} is {spec.dtype} and q is {q.dtype}: convert one, so that all have one dtype")
    _equal("head dims (axis 0)", q, k, 0, legend)
    if not packed:
        _equal("batch sizes (axis 3)", q, k, 3, legend)
        _equal("batch sizes (axis 3)", q, v, 3, legend)
    _equal("numbers of heads (axis 1)", k, v, 1, legend)
    _equal("lengths (axis 2)", k, v, 2, legend)
    (d, hq, *_), (_, hkv, *_) = q.shape, v.shape
    if d == 0:
        raise ValueError(f"q {q.shape} has head dim 0; the first axis is head_dim")
    if (hq % hkv) if hkv else hq:
        raise ValueError(
            f"q has {hq} heads and k, v have {hkv}: {hq} must be a multiple of {hkv} "
            f"(grouped queries: each key/value head serves {hq}/{hkv} query heads); {legend.split('. ')[0]}"
        )
    if packed:
        _check_packed(arrays, settings)
    bare = Problem(q, k, v, q, settings, cu_seqlens_q=arrays.get("cu_seqlens_q"))
    *_, sq, skv, b = bare.sizes
    for name in LENGTHS:
        if name in arrays:
            check_spec(arrays[name], (b,), "int32", "(B,)")
    for name in ("alibi_slopes", "sinks"):
        if name in arrays:
            check_spec(arrays[name], (hq,), "float32", "(Hq,)")
    for name in SEEDS:
        if name in arrays:
            check_spec(arrays[name], (1,), "int64", "one number")
    for name in SCORE_INPUTS:
        if name in arrays:
            _broadcasts(arrays[name], (skv, sq, hq, b), packed)
    if "dropout_mask" in arrays and arrays["dropout_mask"].shape != (skv, sq, hq, b):
        shape = arrays["dropout_mask"].shape
        raise ValueError(f"dropout_mask has shape {shape}; it must be {(skv, sq, hq, b)}, (Skv, Sq, Hq, B)")
    band, ragged = settings.band, packed or "seq_lens_q" in arrays
    simple = band and band.simplified(sq, skv, lengths=ragged, used="alibi_slopes" in arrays)
    chosen = (*LENGTHS, *CU_SEQLENS, "alibi_slopes", "sinks", *SEEDS, *SCORE_INPUTS)
    options: dict[str, Any] = {name: arrays[name] for name in chosen if name in arrays}
    captured = tuple(arrays[step.name] for step in (settings.program or EMPTY_PROGRAM).captured)
    return Problem(q, k, v, q, settings._replace(band=simple), captured=captured, **options)


def _check_packed(arrays: dict[str, TensorSpec], settings: Settings) -> None:
    for name in CU_SEQLENS:
        if name not in arrays:
            raise ValueError(f"{name} is None; packed sequences need both cu_seqlens_q and cu_seqlens_kv")
    for name in LENGTHS:
        if name in arrays:
            raise ValueError(f"{name} and cu_seqlens_* are given; the lengths of packed sequences follow from cu_seqlens_*")
    one, other = (arrays[name] for name in CU_SEQLENS)
    for spec in (one, other):
        if spec.dtype not in ("int32", "int64"):
            raise TypeError(f"{spec.name} is {spec.dtype}; it must be int32 or int64: convert with .astype")
        if len(spec.shape) != 1 or spec.shape[0] < 1 or spec.shape != one.shape:
            raise ValueError(f"cu_seqlens_q has shape {one.shape} and cu_seqlens_kv {other.shape}; both must be (B + 1,)")
    for name, most in (("max_seqlen_q", settings.max_seqlen_q), ("max_seqlen_kv", settings.max_seqlen_kv)):
        if most is None:
            raise ValueError(f"{name} is None; packed sequences need the length of the longest, or more")


def _broadcasts(spec: TensorSpec, full: tuple[int, ...], packed: bool) -> None:
    """A bias or a mask, of the scores' axes, each of them full or 1."""
    allowed = ("float16", "bfloat16", "float32", "float64") if spec.name == "bias" else ("bool",)
    if spec.dtype not in allowed:
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be {', '.join(allowed)}: convert with .astype")
    if len(spec.shape) != 4 or any(n not in (1, most) for n, most in zip(spec.shape, full, strict=True)):
        legend = "(max_seqlen_kv, max_seqlen_q, Hq, B)" if packed else "(Skv, Sq, Hq, B)"
        raise ValueError(
            f"{spec.name} has shape {spec.shape}; it must have the four axes {full}, {legend}, each of them full or 1: "
            f"keys come first. Add axes with {spec.name}[..., None], and swap them with .transpose"
        )


def _equal(what: str, one: TensorSpec, other: TensorSpec, axis: int, legend: str) -> None:
    if one.shape[axis] != other.shape[axis]:
        raise ValueError(
            f"the {what} of {one.name} and {other.name} differ, {one.shape[axis]} and {other.shape[axis]}: "
            f"{one.name} is {one.shape}, {other.name} is {other.shape}; {legend}"
        )


def check_spec(spec: TensorSpec, shape: tuple[int, ...], dtype: str, legend: str) -> None:
    """Refuse an array of another dtype or shape.

    Raises:
        TypeError, ValueError: with both values.
    """
    if spec.dtype != dtype:
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be {dtype}: convert with .astype, or make it anew")
    if spec.shape != shape:
        raise ValueError(f"{spec.name} has shape {spec.shape}; it must be {shape}, {legend}")


def _writable(spec: TensorSpec) -> None:
    """Refuse a result whose elements share memory."""
    reach = ITEMSIZE[spec.dtype]  # bytes from the first element to the end of what the axes so far cover
    axes = zip(map(abs, spec.strides), spec.shape, strict=True)
    for step, length in sorted((step, length) for step, length in axes if length > 1):
        if step < reach and 0 not in spec.shape:
            raise ValueError(f"{spec.name} has strides {spec.strides} bytes: its elements share memory; pass a dense array")
        reach = step * (length - 1) + reach
