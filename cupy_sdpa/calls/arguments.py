"""A call's arguments, read and checked: the problem that they pose, the arrays and the numbers, and the engine they choose."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..device import cupy_runtime
from ..problem.bucket import Policy, check_bucket
from ..problem.problem import CU_SEQLENS, LENGTHS, SEEDS, Problem, Settings, has_score_axes
from ..problem.tensor_spec import Signature, dense_signature, dtype_name
from ..problem.validation import RequestedOutputs, make_problem, with_captured_gradients
from . import user_functions
from .call import Call, Fill
from .options import ARRAYS, check_names, is_one_of, read_flag, read_scale, read_settings
from .staging import engine_problem


def read_forward(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    return_stats: Any = False,
    return_kept: bool = False,
    deterministic: Any = False,
    out: Any = None,
    stats: Any = None,
) -> Call:
    """Check a forward call's arguments; the first thing wrong is raised, before anything is allocated."""
    wanted, exact = _rows_wanted(return_stats)._replace(rng_dump=return_kept), read_flag("deterministic", deterministic)
    return _read({"q": q, "k": k, "v": v, "out": out, "stats": stats}, options, wanted, deterministic=exact)


def _rows_wanted(return_stats: Any) -> RequestedOutputs:
    """The numbers of every row that are asked for."""
    if not is_one_of(return_stats, (False, True, "max_sumexp")):
        raise ValueError(f"return_stats is {return_stats!r}; it must be False, True or 'max_sumexp'")
    return RequestedOutputs(stats=bool(return_stats), max_sumexp=return_stats == "max_sumexp")


def read_backward(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: Any = False,
    deterministic: bool = False,
    **others: Any,
) -> Call:
    """Check a backward call's arguments; the first thing wrong is raised, before anything is allocated.

    Args:
        others: dout, out, stats, dq, dk and dv; what is None is taken to be dense.
    """
    dbias, dsinks = read_flag("return_dbias", return_dbias), read_flag("return_dsinks", return_dsinks)
    wanted, exact = RequestedOutputs(backward=True, dbias=dbias, dsinks=dsinks), read_flag("deterministic", deterministic)
    given = {"q": q, "k": k, "v": v, **others}
    return _read(given, options, wanted, deterministic=exact, return_dtensors=return_dtensors)


def _read(
    given: dict[str, Any],
    options: Mapping[str, Any],
    wanted: RequestedOutputs,
    *,
    deterministic: bool = False,
    return_dtensors: Any = False,
) -> Call:
    """What both passes check, in the order in which they do."""
    check_names(options)
    user_functions.check_tensors(options)
    given |= {name: options.get(name) for name in ARRAYS}
    numbers_given = {name: given.pop(name) for name in SEEDS if _is_number(given[name])}
    arrays = {name: array for name, array in given.items() if array is not None or name in ("q", "k", "v")}
    on_gpu = _engine(arrays | {f"tensors[{name!r}]": array for name, array in (options.get("tensors") or {}).items()})
    tau = read_scale(options.get("scale"), arrays["q"].shape[0] if arrays["q"].ndim else 0)
    settings, scalars = read_settings(options, tau, deterministic=deterministic)
    drawn = settings.dropout and "dropout_mask" not in arrays
    filled: dict[str, Fill] = {}
    for name in SEEDS:
        if not drawn:
            arrays.pop(name, None)
        elif name in arrays:
            arrays[name] = arrays[name].reshape(1) if arrays[name].shape == () else arrays[name]
        else:
            filled[name] = Fill("int64", 1, numbers_given.get(name, 0))
    filled |= _missing_lengths(arrays)
    signatures = {name: _signature(array) for name, array in arrays.items()}
    signatures |= {name: dense_signature(fill.dtype, (fill.size,)) for name, fill in filled.items()}
    asked, own, gradients = _posed_with_functions(signatures, options, settings, wanted, return_dtensors)
    lines: dict[str, str] = {}
    if own:
        if on_gpu:
            user_functions.check_numbers(own.numbers)
        arrays, scalars, lines = arrays | own.arrays, scalars | own.numbers, own.lines
    if not on_gpu:
        _check_lengths(asked, arrays)
    _check_overlap(asked, arrays)
    return Call(asked, arrays, scalars, on_gpu, _policy(options.get("bucket"), asked), lines, gradients, filled)


def _posed_with_functions(
    signatures: dict[str, Signature],
    options: Mapping[str, Any],
    settings: Settings,
    wanted: RequestedOutputs,
    return_dtensors: Any,
) -> tuple[Problem, user_functions.Functions | None, user_functions.Gradients | None]:
    """The problem that arrays and the caller's own functions pose, what these come to, and the gradients asked for."""
    asked, own = make_problem(tuple(signatures.items()), settings, wanted), None
    if user_functions.given(options):
        own = user_functions.read(options, asked)
        read = {name: _signature(array) for name, array in own.arrays.items()}
        asked = make_problem(tuple((signatures | read).items()), own.settings, wanted)
    gradients = user_functions.gradients_of(return_dtensors, options.get("tensors"), own)
    if gradients:
        asked = with_captured_gradients(asked, gradients.wanted(asked))
    return asked, own, gradients


def _is_number(value: Any) -> bool:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        return False
    if not -(2**63) <= int(value) < 2**63:
        raise ValueError(f"{value} is given as seed or offset; it must be a number of 64 bits")
    return True


def _policy(bucket: Any, asked: Problem) -> Policy | None:
    policy = check_bucket(bucket)
    if policy and asked.packed and any(has_score_axes(spec.name) for spec in asked.tensors):
        raise ValueError(
            "bucket and packed sequences with a bias, a mask or tensors are given: round max_seqlen_q and max_seqlen_kv up, "
            "and give arrays of that size"
        )
    return policy


def read_shapes(
    q: Any,
    k: Any,
    v: Any,
    options: Mapping[str, Any],
    *,
    dtype: Any = None,
    seq_lens: bool = False,
    return_stats: Any = False,
    backward: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dtensors: Any = False,
    deterministic: bool = False,
) -> Problem:
    """The problem that shapes (of dense arrays in Fortran order) or arrays would pose; no array is made or read."""
    check_names(options)
    user_functions.check_tensors(options)
    given = {name: _shape_signature(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v))}
    kind, shape, *_ = given["q"]
    head_dim, heads, *_ = *shape, 1, 1  # too few axes are refused below
    defaults = {"mask": "bool", "bias": kind, "dropout_mask": "bool", "alibi_slopes": "float32", "sinks": "float32"}
    defaults |= dict.fromkeys((*LENGTHS, *CU_SEQLENS), "int32")
    for name in ARRAYS:
        value = options.get(name)
        if name in ("alibi_slopes", "sinks") and isinstance(value, bool):
            if value:
                given[name] = dense_signature("float32", (heads,))
        elif name in SEEDS:
            if options.get("dropout_p") and options.get("dropout_mask") is None:
                given[name] = dense_signature("int64", (1,))
        elif value is not None:
            given[name] = _shape_signature(name, value, defaults[name])
    if (seq_lens or any(name in given for name in LENGTHS)) and len(given["q"][1]) == 4:  # of both sides, as a call has them
        given = dict.fromkeys(LENGTHS, dense_signature("int32", given["q"][1][3:])) | given
    options = {**options, "seed": 0} if "seed" in given else options
    tau = read_scale(options.get("scale"), head_dim)
    settings, _ = read_settings(options, tau, deterministic=bool(deterministic))
    # what belongs to the other pass is left out, as a list of problems for both passes has it
    rows = _rows_wanted(return_stats)
    wanted = RequestedOutputs(backward=True, dbias=bool(return_dbias), dsinks=bool(return_dsinks)) if backward else rows
    tensors = {name: _standin(name, x) for name, x in (options.get("tensors") or {}).items()}
    sums = return_dtensors if backward else False
    asked, _, _ = _posed_with_functions(given, {**options, "tensors": tensors}, settings, wanted, sums)
    return engine_problem(asked, _policy(options.get("bucket"), asked), on_gpu=True)


def _shape_signature(name: str, x: Any, dtype: Any) -> Signature:
    if cupy_runtime.is_array(x) or isinstance(x, np.ndarray):
        return _signature(x)
    if not isinstance(x, (tuple, list)) or not all(isinstance(n, numbers.Integral) for n in x):
        raise TypeError(f"{name} is {x!r}; give a shape, such as (128, 32, 4096, 1), or an array")
    if any(n < 0 for n in x):
        raise ValueError(f"{name} is {tuple(x)}; a length is not negative")
    if dtype is None:
        raise TypeError(f"{name} is given as the shape {tuple(x)}; its dtype is missing: dtype='bfloat16'")
    try:
        kind = np.dtype(dtype).name
    except TypeError:
        kind = str(dtype)  # refused below
    return dense_signature(kind, tuple(int(n) for n in x))


def _standin(name: str, x: Any) -> Any:
    """An array of a shape, float32 in Fortran order, that takes no memory; an array stands for itself."""
    kind, shape, strides, _ = _shape_signature(name, x, "float32")
    return x if hasattr(x, "dtype") else np.lib.stride_tricks.as_strided(np.empty(1, kind), shape, strides)


def _missing_lengths(arrays: Mapping[str, Any]) -> dict[str, Fill]:
    """The lengths of one side where only those of the other are given: all that its array has."""
    given = [name for name in LENGTHS if name in arrays]
    if len(given) != 1 or any(name in arrays for name in CU_SEQLENS) or not arrays["q"].ndim == arrays["k"].ndim == 4:
        return {}  # other shapes are refused next
    (missing,) = set(LENGTHS) - set(given)
    *_, length, batch = arrays["q" if missing == "seq_lens_q" else "k"].shape
    return {missing: Fill("int32", batch, length)}


def _check_lengths(asked: Problem, arrays: Mapping[str, Any]) -> None:
    """On the CPU the lengths are read; on the GPU that would wait for it."""
    *_, sq, skv, _ = asked.sizes
    for name, most in zip(LENGTHS, (sq, skv), strict=True):
        lengths = arrays.get(name)
        if lengths is not None and lengths.size and not 0 <= lengths.min() <= lengths.max() <= most:
            raise ValueError(f"{name} has lengths from {lengths.min()} to {lengths.max()}; they must be from 0 to {most}")
    for name, most, total in zip(CU_SEQLENS, (sq, skv), (asked.q.shape[2], asked.k.shape[2]), strict=True):
        if (begins := arrays.get(name)) is not None:
            lengths = np.diff(begins)
            if begins[0] < 0 or begins[-1] > total or (lengths < 0).any():
                raise ValueError(f"{name} is {begins.tolist()}; it must rise from 0 or more to at most {total}, the total")
            if lengths.size and lengths.max() > most:
                raise ValueError(f"{name} has a sequence of {lengths.max()}; max_seqlen_{name[11:]} is {most}")


def _check_overlap(asked: Problem, arrays: Mapping[str, Any]) -> None:
    for spec in asked.results:
        if spec.name in arrays:
            array = arrays[spec.name]
            if isinstance(array, np.ndarray) and not array.flags.writeable:
                raise ValueError(f"{spec.name} is read-only, and is to hold a result: pass an array that can be written to")
            for other in arrays:
                if other != spec.name and _overlap(asked, arrays, spec.name, other):
                    raise ValueError(
                        f"{spec.name} overlaps {other} in memory: results would overwrite it; pass an array of its own"
                    )


def _engine(arrays: Mapping[str, Any]) -> bool:
    """True where the arrays are CuPy's, on one device; False where they are numpy's."""
    kinds = {}
    for name, array in arrays.items():
        if cupy_runtime.is_array(array):
            kinds[name] = "CuPy"
        elif type(array) in (np.ndarray, np.memmap):  # a subclass, such as a masked array, may mean more than its numbers
            kinds[name] = "numpy"
        else:
            raise TypeError(
                f"{name} is a {type(array).__module__}.{type(array).__qualname__}; attention takes numpy and CuPy arrays: "
                "convert with numpy.asarray, cupy.asarray or cupy.from_dlpack"
            )
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name} is a {kind} array" for name, kind in kinds.items())
        raise TypeError(f"arrays are mixed: {listed}. Move them to one side with cupy.asarray(...) or cupy.asnumpy(...)")
    if kinds["q"] == "numpy":
        return False
    devices = {name: array.data.device_id for name, array in arrays.items()}
    if len(set(devices.values())) > 1:
        listed = ", ".join(f"{name} on device {device}" for name, device in devices.items())
        raise ValueError(
            f"arrays are on different devices: {listed}. Copy them to one: with cupy.cuda.Device(...): cupy.asarray(...)"
        )
    return True


def _signature(array: Any) -> Signature:
    # The interpreter reads any alignment, and cuDNN reads integers one by one.
    address = array.data.ptr if cupy_runtime.is_array(array) and array.dtype.kind != "i" else 16
    return dtype_name(array.dtype), array.shape, array.strides, address & -address & 15 or 16


def _overlap(asked: Problem, arrays: Mapping[str, Any], one: str, other: str) -> bool:
    """Whether two arrays share an element; decided on addresses alone, no element is read."""
    a, b = arrays[one], arrays[other]
    if cupy_runtime.is_array(a):
        (a_from, a_to), (b_from, b_to) = asked.byte_bounds[one], asked.byte_bounds[other]
        apart = b.data.ptr - a.data.ptr
        if a_to <= apart + b_from or apart + b_to <= a_from:
            return False
        a, b = np.asarray(_Standin(a)), np.asarray(_Standin(b))
    return bool(np.shares_memory(a, b))


class _Standin:
    """What numpy needs to know of an array on a GPU to compare addresses; a numpy array made from it must not be read."""

    def __init__(self, array: Any) -> None:
        self.__array_interface__ = {
            "data": (array.data.ptr, False),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
            "version": 3,
        }
