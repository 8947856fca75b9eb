"""Validation: construct a problem from array signatures and settings, and check shapes and dtypes.

Every error message names the value, the limit and the fix.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..errors import Unsupported
from ..options.table import OF_DIAGONAL, Settings
from ..score_fn.expression import EMPTY_EXPRESSION
from .arrays import ARRAYS, CU_SEQLENS, FP8_FACTORS, LENGTHS, OPTION_ARRAYS, REQUESTED_GRADIENTS, SCORE_INPUTS
from .problem import Problem
from .split import obstacle
from .tensor_spec import (
    FLOAT_DTYPES,
    FP8_LARGEST,
    Expected,
    TensorSpec,
    check_broadcastable,
    check_equal,
    check_spec,
    dense_spec,
    has_callers_axes,
    in_callers_axes,
    legend_in_callers_axes,
    row_stats_dtype,
    shown_shape,
)

_DENSE = (
    "shapes are (head_dim, heads, seq, batch). Arrays in C order (batch, seq, heads, head_dim) are passed as x.T, or with "
    "layout='bshd'; (batch, heads, seq, head_dim) with layout='bhsd'"
)
_PAGED = (
    "with a page table the shapes of k and v are (head_dim, heads, page size, pages); pages in the memory order "
    "(head_dim, page size, heads, pages) are passed as pages.transpose(0, 2, 1, 3), and q and pages (pages, page size, heads, "
    "head_dim) with layout='bshd'"
)
_PACKED = (
    "shapes of packed sequences are (head_dim, heads, total). Arrays in C order (total, heads, head_dim) are passed as x.T, or "
    "with layout='thd'"
)


#: The message for gradients of paged keys.
NO_PAGED_GRADIENTS = (
    "gradients are not supported with page_table, because cuDNN reads pages in the forward pass only: gather the pages into "
    "dense k and v"
)
#: The message for gradients of FP8 arrays.
NO_FP8_GRADIENTS = (
    "gradients of FP8 arrays are not supported, because they are slower than bfloat16 gradients with causal masks on Hopper: "
    "call attention_vjp(q, k, v, compute_dtype='float8_e4m3fn') on float16 or bfloat16 arrays, whose gradients are computed in "
    "their own dtype"
)


class RequestedOutputs(NamedTuple):
    """The results that a call requests in addition to the output or the gradients of q, k and v.

    Attributes:
        stats: the log-sum-exp.
        max_sumexp: the maximum and the sum of exponentials in the log-sum-exp.
        backward: gradients instead of the output.
        gradients: the names of requested gradients (:data:`.arrays.REQUESTED_GRADIENTS`).
        rng_dump: the dropout mask.
        out_dtype: the dtype of the output of FP8 arrays; empty for the same dtype.
    """

    stats: bool = False
    max_sumexp: bool = False
    backward: bool = False
    gradients: tuple[str, ...] = ()
    rng_dump: bool = False
    out_dtype: str = ""


@functools.lru_cache(maxsize=4096)
def make_problem(specs_of_arrays: tuple[TensorSpec, ...], settings: Settings, requested: RequestedOutputs) -> Problem:
    """Return the problem of arrays and settings. Results that are not passed are dense, and so are dout, out and stats."""
    arrays = {spec.name: spec for spec in specs_of_arrays}
    problem = _inputs(arrays, settings)
    if requested.out_dtype and not problem.fp8:
        raise ValueError(f"out_dtype is {requested.out_dtype!r} and q is {problem.dtype}; only FP8 arrays take an output dtype")
    if problem.fp8 and requested.backward:
        raise Unsupported(NO_FP8_GRADIENTS)
    if requested.backward and problem.paged:
        raise Unsupported(NO_PAGED_GRADIENTS)
    sq = problem.sizes[4]
    if not requested.backward and sq != 1 and problem.deterministic:  # only kernels for one query are not reproducible
        problem = dataclasses.replace(problem, settings=problem.settings._replace(deterministic=False))
    if settings.num_splits is not None and (other := obstacle(problem)):
        raise ValueError(f"num_splits is {settings.num_splits}, which is not supported with {other}: omit num_splits")
    specs: dict[str, TensorSpec] = {}
    for expected in _outputs(problem, requested, arrays):
        spec = arrays.get(expected.name) or dense_spec(expected.name, expected.dtype, expected.shape)
        check_spec(spec, expected)
        specs[expected.name] = spec
    problem = dataclasses.replace(problem, **specs)  # type: ignore[arg-type]
    return dataclasses.replace(problem, scale_out=None) if problem.scale_out and problem.out.dtype != problem.dtype else problem


@functools.lru_cache(maxsize=4096)
def with_captured_gradients(problem: Problem, names: tuple[str, ...]) -> Problem:
    """Return the problem with the gradients of some captured arrays as results.

    The gradients are float32 or float64: a call may sum several of them before it rounds to the dtype of the array.
    """
    dtype = row_stats_dtype(problem.dtype)
    dcaptured = tuple(dense_spec(f"d{spec.name}", dtype, spec.shape) for spec in problem.captured if spec.name in names)
    return dataclasses.replace(problem, dcaptured=dcaptured) if dcaptured else problem


def _inputs(arrays: Mapping[str, TensorSpec], settings: Settings) -> Problem:
    """Return the problem of the forward pass's inputs, with q as a placeholder for out."""
    q, k, v = (arrays[name] for name in "qkv")
    packed, paged = any(name in arrays for name in CU_SEQLENS), "page_table" in arrays
    if paged and "cu_seqlens_kv" in arrays:
        raise ValueError(
            f"cu_seqlens_kv {arrays['cu_seqlens_kv'].shape} and page_table {arrays['page_table'].shape} are both passed: with "
            f"pages only the queries can be packed; omit cu_seqlens_kv, and pass seq_lens_kv"
        )
    _check_qkv(q, k, v, packed, paged)
    if packed:
        _check_packed(arrays, settings, paged)
    if paged:
        _check_paged(arrays, q)
    problem = Problem(q, k, v, q, settings, cu_seqlens_q=arrays.get("cu_seqlens_q"), page_table=arrays.get("page_table"))
    _check_options(arrays, problem)
    settings = settings._replace(bias_repeats=None)  # the shapes of the problem have it
    *_, sq, skv, _ = problem.sizes
    if not packed and (maximum := settings.max_seqlen_q) is not None:
        if maximum > sq:
            raise ValueError(
                f"max_seqlen_q is {maximum}, the maximum of seq_lens_q, but Sq is {sq}: pass {maximum} or more queries. "
                "KVCache.view() returns both for the queries of the last append; for other queries replace them, with None for "
                "the newest tokens of every sequence: cache.view() | {'seq_lens_q': None, 'max_seqlen_q': None}"
            )
        settings = settings._replace(max_seqlen_q=None)  # no plan depends on it
    if band := settings.band:
        ragged = packed or paged or "seq_lens_q" in arrays
        measured = any(option.name in arrays or getattr(settings, option.setting, False) for option in OF_DIAGONAL)
        band = band.simplified(sq, skv, lengths=ragged, needs_diagonal=measured)
    options: dict[str, Any] = {name: arrays[name] for name in OPTION_ARRAYS if name in arrays}
    if problem.fp8:
        options |= {name: arrays.get(name) or dense_spec(name, "float32", (1,)) for name in FP8_FACTORS}
    captured = tuple(arrays[step.name] for step in (settings.expression or EMPTY_EXPRESSION).captured)
    return Problem(q, k, v, q, settings._replace(band=band), captured=captured, **options)


def _legend(packed: bool, paged: bool) -> str:
    """Return the axes of q, k and v for messages, in the caller's layout."""
    if not has_callers_axes():
        return _PAGED if paged else _PACKED if packed else _DENSE
    if paged:
        pages = legend_in_callers_axes("k", "(head_dim, heads, page size, pages)")
        return (
            f"with this layout the axes of pages are {pages}. A cupy_sdpa.KVCache has the axes (head_dim, heads, page size, "
            "pages): omit layout, and pass q as (head_dim, heads, seq, batch), which is q.T of (batch, seq, heads, head_dim)"
        )
    own = "(head_dim, heads, total)" if packed else "(head_dim, heads, seq, batch)"
    return f"with this layout the axes are {legend_in_callers_axes('q', own)}; omit layout for arrays {own}"


def _check_qkv(q: TensorSpec, k: TensorSpec, v: TensorSpec, packed: bool, paged: bool) -> None:
    """Check that the dtypes and shapes of q, k and v match."""
    legend = _legend(packed, paged)
    for spec in (q, k, v):
        rank = 3 if packed and not (paged and spec is not q) else 4
        if len(spec.shape) != rank:
            as_q = f", as q {shown_shape(q)} has" if len(q.shape) == rank and spec is not q else ""
            raise ValueError(
                f"{spec.name} has {len(spec.shape)} dimensions {shown_shape(spec)}; it needs {rank}{as_q}: "
                f"{_wanted_axes(spec.name, len(spec.shape), packed, paged)}"
            )
        if spec.dtype not in FLOAT_DTYPES and spec.dtype not in FP8_LARGEST:
            raise TypeError(
                f"{spec.name} is {spec.dtype}; attention takes {', '.join(FLOAT_DTYPES)}: convert with .astype('float16')"
            )
        if spec.dtype != q.dtype:
            raise TypeError(f"{spec.name} is {spec.dtype} and q is {q.dtype}; the dtypes must be equal: convert one of them")
    check_equal("head dims", q, k, 0, legend)
    if paged:
        check_equal("numbers of pages", k, v, 3, legend)
    elif not packed:
        check_equal("batch sizes", q, k, 3, legend)
        check_equal("batch sizes", q, v, 3, legend)
    check_equal("numbers of heads", k, v, 1, legend)
    check_equal("page sizes" if paged else "lengths", k, v, 2, legend)
    (d, hq, *_), (_, hkv, *_) = q.shape, v.shape
    if d == 0:
        axis = in_callers_axes("q", range(len(q.shape))).index(0)
        raise ValueError(f"q {shown_shape(q)} has head dim 0; axis {axis} is head_dim, and must not be empty")
    if (hq % hkv) if hkv else hq:
        what = legend if paged else legend.split(". ")[0]
        if not (packed or paged or has_callers_axes()) and k.shape[2] and q.shape[2] % k.shape[2] == 0:
            what += (
                ". Heads and seq may be exchanged, as in x.T of x (batch, heads, seq, head_dim): pass x with layout='bhsd', or "
                "x.transpose(3, 1, 2, 0)"
            )
        raise ValueError(
            f"q has {hq} heads and k, v have {hkv}: {hq} must be a multiple of {hkv} (grouped-query attention: each key/value "
            f"head serves {hq}/{hkv} query heads); q is {shown_shape(q)}, k is {shown_shape(k)}; {what}"
        )


def _wanted_axes(name: str, given: int, packed: bool, paged: bool) -> str:
    """Return the axes that one of q, k and v needs, and why."""
    layout = has_callers_axes()
    if paged and name != "q":
        return f"{legend_in_callers_axes(name, '(head_dim, heads, page size, pages)')}, because page_table is passed"
    if packed:
        passed = "cu_seqlens_q is" if paged else "cu_seqlens_q and cu_seqlens_kv are"
        axes = legend_in_callers_axes(name, "(head_dim, heads, total)")
        return f"{axes}, because {passed} passed{': that is layout=' * layout}{repr('thd') * layout}"
    if layout and paged:
        return "pass cu_seqlens_q and max_seqlen_q; or q[:, None] and layout='bshd' if q has one query of each sequence"
    if layout:
        return f"pass cu_seqlens_q and cu_seqlens_kv; or for a single sequence {name}[None] and layout='bshd'"
    remedy = f"for a single sequence pass {name}[..., None]; packed sequences need cu_seqlens_q and cu_seqlens_kv"
    if given == 2:
        remedy = (
            f"for a single head pass {name}[:, None, :, None] of (head_dim, seq), {name}.T[:, None, :, None] of (seq, head_dim)"
        )
    if given > 4:
        remedy = f"join axes with {name}.reshape(..., order='F')"
    return f"(head_dim, heads, seq, batch): {remedy}"


def _check_paged(arrays: Mapping[str, TensorSpec], q: TensorSpec) -> None:
    """Check the page table and the lengths of paged keys."""
    table, legend = arrays["page_table"], legend_in_callers_axes("page_table", "(pages per sequence, B)")
    starts = arrays.get("cu_seqlens_q")
    batch, source = (starts.shape[0] - 1, starts) if starts else (q.shape[3], q)
    if table.dtype != "int32":
        raise TypeError(f"page_table is {table.dtype}; it must be int32: convert with .astype('int32')")
    if len(table.shape) != 2 or table.shape[1] != batch:
        lengths = arrays.get("seq_lens_kv")
        remedy = ": pass page_table.T" if table.shape[:1] == (batch,) else ""
        if len(table.shape) == 2 and lengths is not None and lengths.shape == table.shape[1:]:
            remedy = (
                f", and page_table and seq_lens_kv have {table.shape[1]}: pass the queries of all of these sequences, or the "
                f"table and the lengths of {batch}"
            )
        raise ValueError(
            f"page_table has shape {shown_shape(table)}; it must be {legend} with {batch} sequences, as {source.name} "
            f"{shown_shape(source)}{remedy}"
        )
    if "seq_lens_kv" not in arrays:
        raise ValueError("page_table is passed and seq_lens_kv is None: pass the number of keys of each sequence, int32 (B,)")


def _check_packed(arrays: Mapping[str, TensorSpec], settings: Settings, paged: bool) -> None:
    """Check the arrays and numbers that describe packed sequences; with pages, only the queries are packed."""
    for name in CU_SEQLENS[: 1 if paged else 2]:
        if name not in arrays:
            raise ValueError(f"{name} is None; packed sequences need both cu_seqlens_q and cu_seqlens_kv")
    for name in LENGTHS[: 1 if paged else 2]:
        if name in arrays:
            raise ValueError(
                f"{name} and cu_seqlens_* are both passed; cu_seqlens_* define the lengths of packed sequences: omit {name}. "
                "For sequences with gaps pass cu_seqlens_* of cupy_sdpa.cu_seqlens_with_gaps(starts, lengths)"
            )
    offsets = [arrays[name] for name in CU_SEQLENS if name in arrays]
    for spec in offsets:
        if spec.dtype not in ("int32", "int64"):
            raise TypeError(f"{spec.name} is {spec.dtype}; it must be int32 or int64: convert with .astype('int32')")
        if len(spec.shape) != 1 or spec.shape[0] < 1 or spec.shape != offsets[0].shape:
            shapes = " and ".join(f"{spec.name} has shape {spec.shape}" for spec in offsets)
            raise ValueError(f"{shapes}; {'it' if paged else 'both'} must be (B + 1,)")
    most = {"max_seqlen_q": settings.max_seqlen_q, "max_seqlen_kv": settings.max_seqlen_kv}
    if paged and most.pop("max_seqlen_kv") is not None:
        raise ValueError(
            f"max_seqlen_kv is {settings.max_seqlen_kv} and page_table is passed: it bounds the lengths; omit max_seqlen_kv"
        )
    for name, maximum in most.items():
        if maximum is None:
            raise ValueError(f"{name} is None; packed sequences need the maximum length, or an upper bound")


def _check_options(arrays: Mapping[str, TensorSpec], problem: Problem) -> None:
    """Check the arrays of the options."""
    _, _, hq, _, sq, skv, b = problem.sizes
    scores, sizes = (skv, sq, hq, b), {"B": b, "1": 1}
    table = Expected.of_call(problem.q, problem.k, problem.v, given=arrays)
    for name in (*OPTION_ARRAYS, *FP8_FACTORS):
        row = ARRAYS[name]
        if name not in arrays or name in SCORE_INPUTS or row.letters in (("P", "B"), ("B+1",)):
            continue  # arrays of pages and packed sequences are checked before
        expected = table.get(name) or Expected(name, tuple(map(sizes.__getitem__, row.letters)), row.dtype, row.legend())
        check_spec(arrays[name], expected)
    for name in SCORE_INPUTS:
        if name in arrays:
            repeats = problem.settings.bias_repeats if name == "bias" else None
            of_array = scores if repeats is None else _scores_of_repeated_bias(arrays[name], repeats, problem)
            check_broadcastable(arrays[name], of_array, problem.packed)
    if "dropout_mask" in arrays and (shape := arrays["dropout_mask"].shape) != scores:
        wanted, legend = in_callers_axes("dropout_mask", scores), legend_in_callers_axes("dropout_mask", "(Skv, Sq, Hq, B)")
        raise ValueError(f"dropout_mask has shape {in_callers_axes('dropout_mask', shape)}; it must be {wanted}, {legend}")


def _scores_of_repeated_bias(bias: TensorSpec, repeats: int, problem: Problem) -> tuple[int, ...]:
    """Check the batch of a bias that several batch items share, and return the shape that it broadcasts to."""
    _, _, hq, _, sq, skv, b = problem.sizes
    if problem.packed and repeats > 1:
        raise Unsupported(
            f"bias_repeats is {repeats} with packed sequences, which is not supported: only dense arrays can be divided into "
            "the batch items of each bias. Pad the sequences and pass seq_lens_q and seq_lens_kv, or pass a bias for each "
            "sequence"
        )
    if problem.fp8 and repeats > 1:
        raise Unsupported(
            f"bias_repeats is {repeats} with {problem.dtype} arrays, which is not supported: amax_out would be that of the "
            "last batch items alone. Pass a bias for each batch item, or bfloat16 arrays"
        )
    if len(bias.shape) == 4 and bias.shape[3] * repeats != b:
        fix = f"pass one bias for {repeats} consecutive batch items each"
        if bias.shape[3] and not b % bias.shape[3]:
            fix = f"pass bias_repeats={b // bias.shape[3]}" + ", or omit it" * (bias.shape[3] in (1, b))
        raise ValueError(
            f"bias has shape {shown_shape(bias)} and bias_repeats is {repeats}, which is for a batch of "
            f"{bias.shape[3] * repeats}, but q has a batch of {b}: {fix}"
        )
    return skv, sq, hq, b // repeats


def _outputs(problem: Problem, requested: RequestedOutputs, arrays: Mapping[str, TensorSpec]) -> Iterator[Expected]:
    """Yield the results of a forward pass; or the additional inputs and the results of a backward pass."""
    table = Expected.of_call(problem.q, problem.k, problem.v, given=arrays)
    stats, out = table["stats"], table["out"]
    if not requested.backward:
        yield out._replace(dtype=requested.out_dtype or out.dtype, writable=True)
        if problem.fp8:
            yield Expected("amax_out", (1,), "float32", "one number", True)
        if requested.stats or "stats" in arrays:
            yield stats._replace(writable=True)
        if requested.max_sumexp:
            yield from (table[name]._replace(writable=True) for name in ("max", "sum_exp"))
        if requested.rng_dump:
            _, _, hq, _, sq, skv, b = problem.sizes
            yield Expected("rng_dump", (skv, sq, hq, b), "float32", "(Skv, Sq, Hq, B)", True)
        return
    yield from (out, stats, table["dout"])
    yield from (table[name]._replace(writable=True) for name in ("dq", "dk", "dv"))
    for row in REQUESTED_GRADIENTS:
        option: TensorSpec | None = getattr(problem, row.of)
        if row.name in requested.gradients and option is None:
            raise ValueError(f"{row.request} is True and {row.of} is None: pass {row.of}=, or remove {row.request}")
        if row.name in requested.gradients and option is not None:
            yield Expected(row.name, option.shape, option.dtype, f"the shape of {row.of}", True)
