"""Validation: construct a problem from array signatures and settings, and check shapes and dtypes.

Every error message names the value, the limit and a remedy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

from ..errors import Unsupported
from ..score_fn.expression import EMPTY_PROGRAM
from .problem import CU_SEQLENS, DEFAULT_SETTINGS, FP8_FACTORS, LENGTHS, OTHER_RESULTS, SCORE_INPUTS, SEEDS, Problem, Settings
from .split import obstacle
from .tensor_spec import FLOAT_DTYPES, FP8_LARGEST, ITEMSIZE, Signature, TensorSpec, dense_spec, make_spec

#: The type of ``return_stats=``.
ReturnStats = bool | Literal["max_sumexp"]

_DENSE = (
    "shapes are (head_dim, heads, seq, batch). Arrays in C order (batch, seq, heads, head_dim) are passed as x.T, or with "
    "layout='bshd'; (batch, heads, seq, head_dim) with layout='bhsd'"
)
_PAGED = (
    "with a page table the shapes of k and v are (head_dim, heads, page size, pages); pages in the memory order "
    "(head_dim, page size, heads, pages) are passed as pages.transpose(0, 2, 1, 3)"
)
_PACKED = (
    "shapes of packed sequences are (head_dim, heads, total). Arrays in C order (total, heads, head_dim) are passed as x.T, or "
    "with layout='thd'"
)


#: The refusal of gradients of paged keys.
NO_PAGED_GRADIENTS = (
    "gradients are not supported with page_table, because cuDNN reads pages in the forward pass only: gather the pages into "
    "dense k and v"
)
#: The refusal of gradients of FP8 arrays.
NO_FP8_GRADIENTS = (
    "gradients of FP8 arrays are not supported, because they are slower than those of bfloat16 with causal masks on Hopper: "
    "call attention_vjp(q, k, v, compute_dtype='float8_e4m3fn') on float16 or bfloat16 arrays, whose gradients are computed in "
    "their own dtype"
)


class RequestedOutputs(NamedTuple):
    """The results that a call requests in addition to the output or the gradients of q, k and v.

    Attributes:
        stats: the log-sum-exp.
        max_sumexp: the maximum and the sum of exponentials in the log-sum-exp.
        backward: gradients instead of the output.
        dbias, dsinks: the gradients of bias and sinks.
        rng_dump: the dropout mask.
        out_dtype: the dtype of the output of FP8 arrays; empty for the same dtype.
    """

    stats: bool = False
    max_sumexp: bool = False
    backward: bool = False
    dbias: bool = False
    dsinks: bool = False
    rng_dump: bool = False
    out_dtype: str = ""


#: The output and nothing else.
OUTPUT_ONLY = RequestedOutputs()


class Expected(NamedTuple):
    """The dtype and shape that an array must have.

    Attributes:
        name: the argument.
        shape: the shape.
        dtype: the dtype.
        legend: the shape in letters, for messages.
        writable: whether the call writes the array.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    legend: str
    writable: bool = False


@functools.lru_cache(maxsize=4096)
def make_problem(
    signatures: tuple[tuple[str, Signature], ...],
    settings: Settings = DEFAULT_SETTINGS,
    requested: RequestedOutputs = OUTPUT_ONLY,
) -> Problem:
    """Construct the problem of the given arrays and settings.

    Args:
        signatures: the name and the signature of every array.
        settings: the other options.
        requested: the results. Results that are not among the arrays are dense, and so are dout, out and stats for gradients.

    Raises:
        TypeError: a dtype is not supported, or dtypes differ.
        ValueError: shapes do not match.
        Unsupported: gradients of paged keys are requested.
    """
    arrays = {name: make_spec(name, signature) for name, signature in signatures}
    problem = _inputs(arrays, settings)
    if requested.out_dtype and not problem.fp8:
        raise ValueError(
            f"out_dtype is {requested.out_dtype!r} and q is {problem.dtype}; only FP8 arrays have outputs of another dtype"
        )
    if problem.fp8 and requested.backward:
        raise Unsupported(NO_FP8_GRADIENTS)
    if requested.backward and problem.paged:
        raise Unsupported(NO_PAGED_GRADIENTS)
    sq = problem.sizes[4]
    if not requested.backward and sq != 1 and problem.deterministic:  # only kernels for one query are not reproducible
        problem = dataclasses.replace(problem, settings=problem.settings._replace(deterministic=False))
    if settings.num_splits is not None and (other := obstacle(problem)):
        raise ValueError(f"num_splits is {settings.num_splits}, which is not supported with {other}: omit num_splits")
    passes = _backward_arrays if requested.backward else _forward_arrays
    outputs = passes(problem, requested, arrays)
    specs: dict[str, TensorSpec] = {}
    for expected in outputs:
        spec = arrays.get(expected.name) or dense_spec(expected.name, expected.dtype, expected.shape)
        check_spec(spec, expected)
        specs[expected.name] = spec
    problem = dataclasses.replace(problem, **specs)  # type: ignore[arg-type]
    return dataclasses.replace(problem, scale_out=None) if problem.scale_out and problem.out.dtype != problem.dtype else problem


@functools.lru_cache(maxsize=4096)
def with_captured_gradients(problem: Problem, names: tuple[str, ...]) -> Problem:
    """The problem with the gradients of some captured arrays as results.

    The gradients are float32 or float64: a call may sum several of them before it rounds to the dtype of the array.
    """
    dtype = "float64" if problem.dtype == "float64" else "float32"
    dcaptured = tuple(dense_spec(f"d{spec.name}", dtype, spec.shape) for spec in problem.captured if spec.name in names)
    return dataclasses.replace(problem, dcaptured=dcaptured) if dcaptured else problem


def check_spec(spec: TensorSpec, expected: Expected) -> None:
    """Check the dtype, the shape and, for results, the strides of an array.

    Raises:
        TypeError, ValueError: the array is not as expected; the message contains both values.
    """
    if spec.dtype != expected.dtype:
        raise TypeError(
            f"{spec.name} is {spec.dtype}; it must be {expected.dtype}: convert with .astype, or allocate a new array"
        )
    if spec.shape != expected.shape:
        raise ValueError(f"{spec.name} has shape {spec.shape}; it must be {expected.shape}, {expected.legend}")
    if expected.writable:
        _check_writable(spec)


def _inputs(arrays: Mapping[str, TensorSpec], settings: Settings) -> Problem:
    """The problem of the inputs of the forward pass, with q as a placeholder for out."""
    q, k, v = (arrays[name] for name in "qkv")
    packed, paged = any(name in arrays for name in CU_SEQLENS), "page_table" in arrays
    if paged and "cu_seqlens_kv" in arrays:
        raise ValueError(
            f"cu_seqlens_kv {arrays['cu_seqlens_kv'].shape} and page_table {arrays['page_table'].shape} are both passed: with "
            f"pages only the queries can be packed; omit cu_seqlens_kv, and pass seq_lens_kv"
        )
    _check_qkv(q, k, v, packed, paged)
    if packed:
        (_check_packed_queries if paged else _check_packed)(arrays, settings)
    if paged:
        _check_paged(arrays, q)
    problem = Problem(q, k, v, q, settings, cu_seqlens_q=arrays.get("cu_seqlens_q"), page_table=arrays.get("page_table"))
    _check_options(arrays, problem)
    *_, sq, skv, _ = problem.sizes
    if band := settings.band:
        ragged = packed or paged or "seq_lens_q" in arrays
        band = band.simplified(sq, skv, lengths=ragged, needs_diagonal="alibi_slopes" in arrays)
    names = (*LENGTHS, "page_table", *CU_SEQLENS, "alibi_slopes", "sinks", *SEEDS, *SCORE_INPUTS, "block_bits", *OTHER_RESULTS)
    options: dict[str, Any] = {name: arrays[name] for name in names if name in arrays}
    if problem.fp8:
        options |= {name: arrays.get(name) or dense_spec(name, "float32", (1,)) for name in FP8_FACTORS}
    captured = tuple(arrays[step.name] for step in (settings.program or EMPTY_PROGRAM).captured)
    return Problem(q, k, v, q, settings._replace(band=band), captured=captured, **options)


def _check_qkv(q: TensorSpec, k: TensorSpec, v: TensorSpec, packed: bool, paged: bool) -> None:
    """Check that the dtypes and shapes of q, k and v match."""
    legend = _PAGED if paged else _PACKED if packed else _DENSE
    for spec in (q, k, v):
        rank = 3 if packed and not (paged and spec is not q) else 4
        if len(spec.shape) != rank:
            if paged and spec is not q:
                expected = "(head_dim, heads, page size, pages), because page_table is passed"
            elif packed:
                passed = "cu_seqlens_q is" if paged else "cu_seqlens_q and cu_seqlens_kv are"
                expected = f"(head_dim, heads, total), because {passed} passed"
            else:
                expected = f"(head_dim, heads, seq, batch). For a single sequence add a batch axis: {spec.name}[..., None]"
            raise ValueError(f"{spec.name} has {len(spec.shape)} dimensions {spec.shape}; it needs {rank}: {expected}")
        if spec.dtype not in FLOAT_DTYPES and spec.dtype not in FP8_LARGEST:
            raise TypeError(f"{spec.name} is {spec.dtype}; attention takes {', '.join(FLOAT_DTYPES)}: convert with .astype")
        if spec.dtype != q.dtype:
            raise TypeError(f"{spec.name} is {spec.dtype} and q is {q.dtype}; the dtypes must be equal: convert one of them")
    _check_equal("head dims (axis 0)", q, k, 0, legend)
    if paged:
        _check_equal("numbers of pages (axis 3)", k, v, 3, legend)
    elif not packed:
        _check_equal("batch sizes (axis 3)", q, k, 3, legend)
        _check_equal("batch sizes (axis 3)", q, v, 3, legend)
    _check_equal("numbers of heads (axis 1)", k, v, 1, legend)
    _check_equal("page sizes (axis 2)" if paged else "lengths (axis 2)", k, v, 2, legend)
    (d, hq, *_), (_, hkv, *_) = q.shape, v.shape
    if d == 0:
        raise ValueError(f"q {q.shape} has head dim 0; the first axis is head_dim, and must not be empty")
    if (hq % hkv) if hkv else hq:
        raise ValueError(
            f"q has {hq} heads and k, v have {hkv}: {hq} must be a multiple of {hkv} "
            f"(grouped-query attention: each key/value head serves {hq}/{hkv} query heads); {legend.split('. ')[0]}"
        )


def _check_paged(arrays: Mapping[str, TensorSpec], q: TensorSpec) -> None:
    """Check the page table and the lengths of paged keys."""
    table, legend = arrays["page_table"], "(pages per sequence, B)"
    starts = arrays.get("cu_seqlens_q")
    batch, source = (starts.shape[0] - 1, starts) if starts else (q.shape[3], q)
    if table.dtype != "int32":
        raise TypeError(f"page_table is {table.dtype}; it must be int32: convert with .astype")
    if len(table.shape) != 2 or table.shape[1] != batch:
        raise ValueError(
            f"page_table has shape {table.shape}; it must be {legend} with {batch} sequences, as {source.name} {source.shape}"
        )
    if "seq_lens_kv" not in arrays:
        raise ValueError("page_table is passed and seq_lens_kv is None: pass the number of keys of each sequence, int32 (B,)")


def _check_packed(arrays: Mapping[str, TensorSpec], settings: Settings) -> None:
    """Check the arrays and numbers that describe packed sequences."""
    for name in CU_SEQLENS:
        if name not in arrays:
            raise ValueError(f"{name} is None; packed sequences need both cu_seqlens_q and cu_seqlens_kv")
    for name in LENGTHS:
        if name in arrays:
            raise ValueError(f"{name} and cu_seqlens_* are both passed; cu_seqlens_* define the lengths of packed sequences")
    cu_seqlens_q, cu_seqlens_kv = (arrays[name] for name in CU_SEQLENS)
    for spec in (cu_seqlens_q, cu_seqlens_kv):
        _check_integers(spec)
        if len(spec.shape) != 1 or spec.shape[0] < 1 or spec.shape != cu_seqlens_q.shape:
            raise ValueError(
                f"cu_seqlens_q has shape {cu_seqlens_q.shape} and cu_seqlens_kv {cu_seqlens_kv.shape}; both must be (B + 1,)"
            )
    for name, maximum in (("max_seqlen_q", settings.max_seqlen_q), ("max_seqlen_kv", settings.max_seqlen_kv)):
        if maximum is None:
            raise ValueError(f"{name} is None; packed sequences need the maximum length, or an upper bound")


def _check_packed_queries(arrays: Mapping[str, TensorSpec], settings: Settings) -> None:
    """Check the arrays and numbers that describe packed queries of paged keys."""
    if "seq_lens_q" in arrays:
        raise ValueError("seq_lens_q and cu_seqlens_q are both passed; cu_seqlens_q defines the lengths of packed queries")
    starts = arrays["cu_seqlens_q"]
    _check_integers(starts)
    if len(starts.shape) != 1 or starts.shape[0] < 1:
        raise ValueError(f"cu_seqlens_q has shape {starts.shape}; it must be (B + 1,)")
    if settings.max_seqlen_q is None:
        raise ValueError("max_seqlen_q is None; packed queries need the maximum length, or an upper bound")
    if settings.max_seqlen_kv is not None:
        raise ValueError(
            f"max_seqlen_kv is {settings.max_seqlen_kv} and page_table is passed: it bounds the lengths; omit max_seqlen_kv"
        )


def _check_integers(spec: TensorSpec) -> None:
    if spec.dtype not in ("int32", "int64"):
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be int32 or int64: convert with .astype")


def _check_options(arrays: Mapping[str, TensorSpec], problem: Problem) -> None:
    """Check the arrays of the options."""
    _, _, hq, _, sq, skv, b = problem.sizes
    scores = (skv, sq, hq, b)
    expected = [Expected(name, (b,), "int32", "(B,)") for name in LENGTHS]
    expected += [Expected(name, (hq,), "float32", "(Hq,)") for name in ("alibi_slopes", "sinks")]
    expected += [Expected(name, (1,), "int64", "one number") for name in SEEDS]
    expected += [Expected(name, (1,), "float32", "one number") for name in FP8_FACTORS]
    expected.append(Expected("block_bits", (-(-skv // 1024), -(-sq // 128), hq, b), "uint8", "8 blocks of 128 keys per byte"))
    for option in expected:
        if option.name in arrays:
            check_spec(arrays[option.name], option)
    for name in SCORE_INPUTS:
        if name in arrays:
            _check_broadcastable(arrays[name], scores, problem.packed)
    if "dropout_mask" in arrays and (shape := arrays["dropout_mask"].shape) != scores:
        raise ValueError(f"dropout_mask has shape {shape}; it must be {scores}, (Skv, Sq, Hq, B)")


def _check_broadcastable(spec: TensorSpec, scores: tuple[int, ...], packed: bool) -> None:
    """Check the dtype of a bias or a mask, and that it broadcasts to the shape of the scores."""
    dtypes = FLOAT_DTYPES if spec.name == "bias" else ("bool",)
    if spec.dtype not in dtypes:
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be {' or '.join(dtypes)}: convert with .astype")
    if not _broadcasts(spec.shape, scores):
        legend = "(max_seqlen_kv, max_seqlen_q, Hq, B)" if packed else "(Skv, Sq, Hq, B)"
        if _broadcasts(
            (1,) * (4 - len(spec.shape)) + spec.shape, scores[::-1]
        ):  # the axes of PyTorch, broadcast from the right
            remedy = f"these are the axes in reverse order, (B, Hq, Sq, Skv): pass {spec.name}.T"
            remedy += f"[{'..., ' + ', '.join(['None'] * (4 - len(spec.shape)))}]" if len(spec.shape) < 4 else ""
        else:
            remedy = f"add axes with {spec.name}[..., None], and permute them with .transpose"
        raise ValueError(
            f"{spec.name} has shape {spec.shape}; it must have the four axes {scores}, {legend}, each of full length or length "
            f"1, keys first: {remedy}"
        )


def _broadcasts(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Whether an array has four axes, each of full length or length 1."""
    return len(shape) == 4 and all(n in (1, full) for n, full in zip(shape, scores, strict=True))


def _check_equal(description: str, x: TensorSpec, y: TensorSpec, axis: int, legend: str) -> None:
    """Check that two arrays have the same length along an axis."""
    if x.shape[axis] != y.shape[axis]:
        raise ValueError(
            f"the {description} of {x.name} and {y.name} differ, {x.shape[axis]} and {y.shape[axis]}: "
            f"{x.name} is {x.shape}, {y.name} is {y.shape}; {legend}"
        )


def _check_writable(spec: TensorSpec) -> None:
    """Check that no two elements of a result share memory."""
    if 0 in spec.shape:
        return
    extent = ITEMSIZE[spec.dtype]  # bytes from the start of the first element to the end of the last, over the axes so far
    axes = zip(map(abs, spec.strides), spec.shape, strict=True)
    for stride, length in sorted((stride, length) for stride, length in axes if length > 1):
        if stride < extent:
            raise ValueError(f"{spec.name} has strides {spec.strides} bytes: elements share memory; pass a dense array")
        extent += stride * (length - 1)


def _out(problem: Problem, name: str, *, writable: bool, dtype: str = "") -> Expected:
    """The shape and dtype of out and dout."""
    _, dv, hq, _, sq, _, b = problem.sizes
    shape, legend = ((dv, hq, problem.q.shape[2]), "(Dv, Hq, Tq)") if problem.packed else ((dv, hq, sq, b), "(Dv, Hq, Sq, B)")
    return Expected(name, shape, dtype or problem.dtype, f"{legend}, the dtype of q", writable)


def _row_stats(problem: Problem, name: str, arrays: Mapping[str, TensorSpec], *, writable: bool) -> Expected:
    """The shape and dtype of the row statistics: float32; also float64 if q is float64 and such an array is passed."""
    _, _, hq, _, sq, _, b = problem.sizes
    shape, legend = ((hq, problem.q.shape[2]), "(Hq, Tq)") if problem.packed else ((sq, hq, b), "(Sq, Hq, B)")
    is_double = problem.dtype == "float64" and name in arrays and arrays[name].dtype == "float64"
    return Expected(name, shape, "float64" if is_double else "float32", legend, writable)


def _forward_arrays(problem: Problem, requested: RequestedOutputs, arrays: Mapping[str, TensorSpec]) -> Iterator[Expected]:
    """The results of a forward pass."""
    yield _out(problem, "out", writable=True, dtype=requested.out_dtype)
    if problem.fp8:
        yield Expected("amax_out", (1,), "float32", "one number", True)
    if requested.stats or "stats" in arrays:
        yield _row_stats(problem, "stats", arrays, writable=True)
    if requested.max_sumexp:
        yield _row_stats(problem, "max", arrays, writable=True)
        yield _row_stats(problem, "sum_exp", arrays, writable=True)
    if requested.rng_dump:
        _, _, hq, _, sq, skv, b = problem.sizes
        yield Expected("rng_dump", (skv, sq, hq, b), "float32", "(Skv, Sq, Hq, B)", True)


def _backward_arrays(problem: Problem, requested: RequestedOutputs, arrays: Mapping[str, TensorSpec]) -> Iterator[Expected]:
    """The additional inputs and the results of a backward pass."""
    yield _out(problem, "out", writable=False)
    yield _row_stats(problem, "stats", arrays, writable=False)
    yield _out(problem, "dout", writable=False)
    for x in (problem.q, problem.k, problem.v):
        yield Expected(f"d{x.name}", x.shape, x.dtype, f"the shape and dtype of {x.name}", True)
    for name, option, is_requested in (("bias", problem.bias, requested.dbias), ("sinks", problem.sinks, requested.dsinks)):
        if is_requested and option is None:
            raise ValueError(f"return_d{name} is True and {name} is None: pass {name}=, or remove return_d{name}")
        if is_requested and option is not None:
            yield Expected(f"d{name}", option.shape, option.dtype, f"the shape of {name}", True)
