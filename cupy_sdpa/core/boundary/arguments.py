"""Parse and validate the arguments of a call: arrays become signatures, signatures and options become a problem."""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..options.table import Settings
from ..options.values import is_one_of, read_flag
from ..problem.arrays import ARRAYS, CU_SEQLENS, LENGTHS, OPTION_ARRAYS, REQUESTED_GRADIENTS, SEEDS, has_score_axes
from ..problem.bucket import Rounding
from ..problem.problem import Problem
from ..problem.tensor_spec import (
    FLOAT_DTYPES,
    ITEMSIZE,
    TensorSpec,
    check_counts,
    check_offsets,
    dense_spec,
    has_callers_axes,
    numpy_dtype,
    row_stats_shape,
)
from ..problem.validation import RequestedOutputs, make_problem, with_captured_gradients
from ..problem.view import Storage, View
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import InterpretedArray
from . import layouts, user_functions
from .axes import Axes, check_strides
from .call import BoundProblem, Fill
from .options import check_factors, check_names
from .read_array import check_separate, read_arrays, spec_of, tensor_name
from .read_options import ReadOptions, check_option_names, read_options


def read_forward(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    return_stats: Any = False,
    deterministic: Any = False,
    return_kept: bool = False,
    out_dtype: Any = "",
    out: Any = None,
    stats: Any = None,
    **others: Any,
) -> BoundProblem:
    """Validate the arguments of the forward pass, and return the problem that they define; nothing is allocated.

    :meth:`.Builder.call` adds the problem to a program if q, k and v are views. For errors see :func:`cupy_sdpa.attention`.

    Args:
        q, k, v: arrays, or views.
        options: the options.
        return_stats, deterministic, out, stats: as for :func:`cupy_sdpa.attention`.
        return_kept: also return which weights dropout keeps. Default False.
        out_dtype: the dtype of the output of FP8 arrays. Default ``""``: q's dtype.
        others: the factors of FP8 arrays.

    >>> import numpy as np
    >>> q = np.zeros((8, 2, 5, 1), np.float16, order="F")
    >>> read_forward(q, q, q, {"causal": True}, return_stats=True).result_names
    ['out', 'stats']
    """
    _check_return_stats(return_stats)
    max_sumexp = return_stats == "max_sumexp"
    outputs = RequestedOutputs(bool(return_stats), max_sumexp, rng_dump=return_kept, out_dtype=out_dtype)
    return _read({"q": q, "k": k, "v": v, "out": out, "stats": stats, **others}, options, outputs, deterministic)


def read_backward(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    return_dtensors: Any = False,
    deterministic: bool = False,
    **others: Any,
) -> BoundProblem:
    """Validate the arguments of the backward pass; nothing is allocated. For errors see :func:`cupy_sdpa.attention`.

    ``others`` are dout, out, stats, dq, dk and dv, which are assumed to be dense if they are None, and the flags that request
    other gradients (:data:`.arrays.REQUESTED_GRADIENTS`).
    """
    rows = [row for row in REQUESTED_GRADIENTS if read_flag(row.request, others.pop(row.request, False))]
    outputs = RequestedOutputs(backward=True, gradients=tuple(row.name for row in rows))
    return _read({"q": q, "k": k, "v": v, **others}, options, outputs, deterministic, return_dtensors)


def _check_return_stats(value: Any) -> None:
    if not is_one_of(value, (False, True, "max_sumexp")):
        raise ValueError(f"return_stats is {value!r}; it must be False, True or 'max_sumexp'")


#: The arrays of a backward pass in the order of its arguments.
_OF_BACKWARD = ("dout", "q", "k", "v", "out", "stats")


def check_order(arrays: Mapping[str, Any], layout: str | None = None) -> None:
    """Check that the arrays of a backward pass are not in another order, such as q, k, v, out, dout, stats."""
    shapes: list[Any] = [getattr(arrays.get(name), "shape", None) for name in _OF_BACKWARD]
    if None in shapes:
        return
    own = shapes if layout is None else [
        layouts.to_own("q", shape, layout) if len(shape) == len(layout) else shape[::-1] for shape in shapes
    ]  # fmt: skip
    if not _is_backward(*own) and any(_is_backward(*order) for order in itertools.permutations(own)):
        given = ", ".join(f"{name} {shape}" for name, shape in zip(_OF_BACKWARD, shapes, strict=True))
        raise ValueError(f"the arrays are in the wrong order; pass ({', '.join(_OF_BACKWARD)}). Passed: {given}")


def _is_backward(dout: Any, q: Any, k: Any, v: Any, out: Any, stats: Any) -> bool:
    """True if the shapes fit a backward pass."""
    if not len(q) == len(k) == len(v) in (3, 4) or q[0] != k[0] or k[1:] != v[1:] or k[3:] != q[3:]:
        return False
    return bool(dout == out == (v[0], *q[1:]) and stats == row_stats_shape(q) and (q[1] == 0 if not k[1] else q[1] % k[1] == 0))


def _read(
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    outputs: RequestedOutputs,
    deterministic: Any,
    return_dtensors: Any = False,
) -> BoundProblem:
    """Validate the arguments of either pass. The order of the checks decides which error is raised first."""
    deterministic = read_flag("deterministic", deterministic)
    check_option_names(options)
    passed, tensors, on_gpu = read_arrays(arrays, options)
    if options.get("layout") is None and not has_callers_axes() and not isinstance(passed["q"], View):
        for name in ("q", "k", "v"):  # before shapes are compared, because axes of another layout would not match
            Axes.check_strides(name, passed[name])
    head_dim, *_ = passed["q"].shape or (0,)
    options = read_options(options, head_dim)
    settings, scalars = options.settings._replace(deterministic=deterministic), {**options.scalars}
    seeds = {name: options[name] for name in SEEDS if name not in passed and options.get(name) is not None}
    fills = _read_seeds(passed, seeds, drawn=bool(settings.dropout and "dropout_mask" not in passed))
    specs = {name: spec_of(name, array) for name, array in passed.items()}
    fills |= _missing_lengths(specs)
    specs |= {name: dense_spec(name, fill.dtype, (fill.size,)) for name, fill in fills.items()}
    problem, functions, gradients = _define_problem(specs, options, settings, outputs, return_dtensors)
    if on_gpu:
        user_functions.check_scalars(functions.scalars)
    passed |= functions.arrays
    scalars.update(functions.scalars)
    *_, sq, skv, _ = problem.sizes
    causal = options.causal
    if problem.paged and causal and not isinstance(causal, str) and sq != skv:
        raise ValueError(
            f"causal is {causal} with page_table, and Sq is {sq}, and the pages have up to {skv} keys: pass "
            "causal='bottom_right', where the last query attends to all keys of its sequence, or 'top_left', where query i "
            "attends to keys 0 to i"
        )
    if not isinstance(passed["q"], View):  # the arrays of a program's step are right by construction
        check_factors(problem, passed)
        if not on_gpu:
            check_lengths(problem, passed)
        results = [spec.name for spec in problem.results if spec.name in passed]
        check_separate(results, tensors | passed)  # arrays in tensors by the caller's names
    bucket = _rounding(options, problem)
    if options.batch_invariant:
        from ..support.batch import check_batch_invariant

        check_batch_invariant(problem, on_cudnn=on_gpu)
    check_strides(problem, options.layout, on_gpu=on_gpu)
    return BoundProblem(problem, passed, scalars, on_gpu, bucket, functions, gradients, fills)


def _read_seeds(arrays: dict[str, Any], seeds: Mapping[str, Any], *, drawn: bool) -> dict[str, Fill]:
    """Return the seed and offset to create, if random numbers are drawn; reshape one-element arrays, drop unused ones."""
    fills = {}
    for name in SEEDS:
        if not drawn:
            arrays.pop(name, None)
        elif name not in arrays:
            fills[name] = Fill("int64", 1, seeds.get(name, 0))
        elif arrays[name].shape == ():
            arrays[name] = arrays[name].reshape(1)
    return fills


def _missing_lengths(specs: Mapping[str, TensorSpec]) -> dict[str, Fill]:
    """Return the missing lengths if only q's or only k's are passed: the full length for every batch item."""
    passed = [name for name in LENGTHS if name in specs]
    q, k = specs["q"].shape, specs["k"].shape
    if len(passed) != 1 or any(name in specs for name in CU_SEQLENS) or not len(q) == len(k) == 4:
        return {}  # other shapes raise an error later
    if "page_table" in specs and "seq_lens_kv" not in specs:
        return {}
    (missing,) = set(LENGTHS) - set(passed)
    *_, length, batch = q if missing == "seq_lens_q" else k
    return {missing: Fill("int32", batch, length)}


def _define_problem(
    specs: Mapping[str, TensorSpec],
    options: Mapping[str, Any],
    settings: Settings,
    outputs: RequestedOutputs,
    return_dtensors: Any,
) -> tuple[Problem, user_functions.Functions, user_functions.Gradients | None]:
    """Return the problem of the arguments, the traced functions, and the requested gradients of ``tensors``."""
    problem, functions = make_problem(tuple(specs.values()), settings, outputs), user_functions.NO_FUNCTIONS
    if user_functions.has_functions(options):
        functions = user_functions.trace_functions(options, problem)
        captured = [spec_of(name, array) for name, array in functions.arrays.items()]
        traced = functions.settings._replace(bias_repeats=settings.bias_repeats)
        problem = make_problem((*specs.values(), *captured), traced, outputs)
    gradients = user_functions.requested_gradients(return_dtensors, options.get("tensors"), functions)
    if gradients:
        problem = with_captured_gradients(problem, gradients.names_in(problem))
    return problem, functions, gradients


def _rounding(options: ReadOptions, problem: Problem) -> Rounding | None:
    round_up = options.round_up
    if round_up and problem.paged:
        raise ValueError(
            f"bucket is {options.bucket!r} and page_table is passed: omit bucket; pass a wider table, and longer q with "
            "seq_lens_q"
        )
    if round_up and problem.packed and any(has_score_axes(spec.name) for spec in problem.tensors):
        raise ValueError(
            "bucket is given with packed sequences and a bias, a mask or tensors: round max_seqlen_q and max_seqlen_kv up, "
            "and pass arrays of that size"
        )
    return Rounding.of(problem, round_up) if round_up and not problem.trivial else None


def check_lengths(problem: Problem, arrays: Mapping[str, Any]) -> None:
    """Check the values of lengths and offsets, on the CPU only: reading them from the GPU would synchronize."""
    *_, sq, skv, _ = problem.sizes
    for name, most in zip(LENGTHS, (sq, skv), strict=True):
        if (lengths := arrays.get(name)) is not None:
            check_counts(name, lengths, most)
    if problem.paged and {"page_table", "seq_lens_kv"} <= arrays.keys():
        _check_page_table(problem, arrays)
    for name, most, total in zip(CU_SEQLENS, (sq, skv), (problem.q.shape[2], problem.k.shape[2]), strict=True):
        if (starts := arrays.get(name)) is not None:
            if starts[0] > 0 and starts.sum() == total and starts.max() <= most:
                raise ValueError(
                    f"{name} is {starts.tolist()}: these are lengths, because they add up to {total}, the total; pass offsets, "
                    f"{[0, *np.cumsum(starts).tolist()]}, which np.cumsum([0, *lengths]) returns. If they are offsets, "
                    "add an unused position after the last sequence"
                )
            check_offsets(name, starts, total)
            lengths = np.diff(starts)
            if lengths.size and lengths.max() > most:
                raise ValueError(f"{name} has a sequence of {lengths.max()}; max_seqlen_{name[11:]} is {most}")


def _check_page_table(problem: Problem, arrays: Mapping[str, Any]) -> None:
    """Check the entries of a page table before the lengths, on the CPU only."""
    (page, pages), table, lengths = problem.k.shape[2:], arrays["page_table"], arrays["seq_lens_kv"]
    queries = arrays.get("seq_lens_q")
    band, expression = problem.settings.band, problem.settings.expression
    # a page that a mask hides may be listed twice: the pages of a window are used again
    hides = band is not None and (band.left is not None or not band.bottom_right)
    masked = expression or hides or any(has_score_axes(spec.name) for spec in problem.tensors)
    for b, length in enumerate(lengths):
        used = table[: -(-int(length) // max(page, 1)), b]
        if not used.size:
            continue
        if not 0 <= used.min() <= used.max() < pages:
            raise ValueError(
                f"page_table has entries from {used.min()} to {used.max()} in sequence {b}, which has {length} keys, so "
                f"{used.size} pages of {page}; there are {pages} pages: pass its pages, or in seq_lens_kv its number of keys"
            )
        if not masked and (queries is None or queries[b]) and len({*used.tolist()}) < used.size:
            raise ValueError(
                f"page_table lists a page twice in sequence {b}: {used.tolist()}, for {length} keys in pages of {page}. Pass "
                "its pages, or in seq_lens_kv its number of keys: entries after its last page are not used"
            )


# Shapes instead of arrays


def read_shapes(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    dtype: Any = None,
    out_dtype: str = "",
    return_stats: Any = False,
    backward: bool = False,
    deterministic: bool = False,
    **requests: Any,
) -> Problem:
    """Return the problem that a GPU runs for arrays, or for dense arrays of shapes in Fortran order; no element is read.

    ``requests`` are the flags that request gradients (:data:`.arrays.REQUESTS`).
    """
    check_names(options)
    views, given = views_of_shapes({"q": q, "k": k, "v": v}, options, dtype=dtype)
    given["layout"] = "dhsb"  # arrays may have any strides
    _check_return_stats(return_stats)
    # Arguments of the other pass are ignored, so that one list of options can be used for both passes.
    passed: dict[str, Any] = {**views, "options": given, "deterministic": bool(deterministic)}
    if not backward:
        return read_forward(**passed, return_stats=return_stats, out_dtype=out_dtype).engine_problem
    flags = {name: bool(value) for name, value in requests.items() if name != "return_dtensors"}
    return read_backward(**passed, **(requests | flags)).engine_problem


def views_of_shapes(
    arrays: Mapping[str, Any], options: Mapping[str, Any], *, dtype: Any = None
) -> tuple[dict[str, View], dict[str, Any]]:
    """Return GPU views of the arrays, and the options with GPU views of their arrays.

    ``arrays`` are arrays or the shapes of dense arrays, and q is one of them. The views have the package's axes, so the
    returned options have no ``layout``.
    """
    user_functions.check_tensors(options)
    axes = Axes(options.get("layout"))
    options = {name: axes.option(name, value) for name, value in options.items() if name != "layout"}

    def view(spec: TensorSpec) -> View:
        return View(Storage(spec.name, spec.alignment, 0), numpy_dtype(spec.dtype), spec.shape, spec.strides)

    specs = {name: _spec_of_shape(name, axes.array(name, x), dtype) for name, x in arrays.items()}
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    given |= {name: view(spec) for name, spec in _specs_of_options(options, specs["q"]).items()}
    if tensors := options.get("tensors"):
        given["tensors"] = {name: view(_spec_of_shape(tensor_name(name), x, "float32")) for name, x in tensors.items()}
    return {name: view(spec) for name, spec in specs.items()}, given


def _specs_of_options(options: Mapping[str, Any], q: TensorSpec) -> dict[str, TensorSpec]:
    """Return the specs of the options' arrays, for which shapes or True are passed."""
    _, heads, *_ = *q.shape, 1, 1  # too few dimensions raise an error later
    of_row = {"float": q.dtype, "float32 or wider": "float32"}
    specs: dict[str, TensorSpec] = {}
    for name in OPTION_ARRAYS:
        value = options.get(name)
        if ARRAYS[name].letters == ("Hq",) and isinstance(value, bool):
            if value:
                specs[name] = dense_spec(name, "float32", (heads,))
        elif name in SEEDS:
            if options.get("dropout_p") and options.get("dropout_mask") is None:
                specs[name] = dense_spec(name, "int64", (1,))
        elif value is True and name in LENGTHS:
            specs[name] = dense_spec(name, "int32", q.shape[3:])
        elif value is not None and value is not False:
            specs[name] = _spec_of_shape(name, value, of_row.get(ARRAYS[name].dtype, ARRAYS[name].dtype))
    if "page_table" in specs:  # it requires lengths
        specs = {"seq_lens_kv": dense_spec("seq_lens_kv", "int32", specs["page_table"].shape[1:])} | specs
    if any(name in specs for name in LENGTHS) and len(q.shape) == 4:  # for both q and k, as in a call
        return {name: dense_spec(name, "int32", q.shape[3:]) for name in LENGTHS} | specs
    return specs


def _spec_of_shape(name: str, x: Any, dtype: Any) -> TensorSpec:
    """Return the spec of an array or a view, or of a dense array of a shape."""
    if isinstance(x, (View, np.ndarray, InterpretedArray)) or cupy_runtime.is_array(x):
        return spec_of(name, x)
    if not isinstance(x, (tuple, list)) or not all(isinstance(n, numbers.Integral) for n in x):
        raise TypeError(f"{name} is {x!r}; pass a shape, such as (128, 32, 4096, 1), or an array")
    if any(n < 0 for n in x):
        raise ValueError(f"{name} is {tuple(x)}; a dimension must not be negative")
    if dtype is None:
        raise TypeError(f"{name} is the shape {tuple(x)}, and dtype is missing: pass for example dtype='bfloat16'")
    try:
        dtype = np.dtype(dtype).name
    except TypeError:
        if (dtype := str(dtype)) not in ITEMSIZE:  # numpy does not know bfloat16 and FP8
            raise TypeError(f"{name} is {dtype}; attention takes {', '.join(FLOAT_DTYPES)}") from None
    return dense_spec(name, dtype, tuple(int(n) for n in x))
