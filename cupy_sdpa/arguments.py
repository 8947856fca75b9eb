"""A call's arguments, read and checked: the problem that they pose, the arrays and the numbers, and the engine they choose."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import gpu
from .bucket import Bucket, check_bucket
from .call import Call, full_lengths
from .problem import ITEMSIZE, LENGTHS, Band, Problem, Signature, dense_strides, gradient_problem, problem


def read_forward(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any = None,
    causal: Any = False,
    window: Any = None,
    seq_lens_q: Any = None,
    seq_lens_kv: Any = None,
    return_stats: bool = False,
    max_workspace: Any = None,
    bucket: Bucket = None,
    out: Any = None,
    stats: Any = None,
) -> Call:
    """Check a forward call's arguments; the first thing wrong is raised, before anything is allocated."""
    return _read(
        _given(q=q, k=k, v=v, out=out, stats=stats, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv), scale, bucket,
        lambda of, positive: problem(
            *map(of, ("q", "k", "v", "out", "stats")),
            bool(return_stats), _band(causal, window), positive, _workspace(max_workspace), *map(of, LENGTHS),
        ),
    )  # fmt: skip


def read_backward(
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: Any = None,
    causal: Any = False,
    window: Any = None,
    seq_lens_q: Any = None,
    seq_lens_kv: Any = None,
    deterministic: bool = False,
    max_workspace: Any = None,
    bucket: Bucket = None,
    **others: Any,
) -> Call:
    """Check a backward call's arguments; the first thing wrong is raised, before anything is allocated.

    Args:
        others: dout, out, stats, dq, dk and dv; what is None is taken to be dense.
    """
    return _read(
        _given(q, k, v, **others, seq_lens_q=seq_lens_q, seq_lens_kv=seq_lens_kv), scale, bucket,
        lambda of, positive: gradient_problem(
            *map(of, ("q", "k", "v", "dout", "out", "stats", "dq", "dk", "dv")),
            _band(causal, window), positive, bool(deterministic), _workspace(max_workspace), *map(of, LENGTHS),
        ),
    )  # fmt: skip


def _read(arrays: dict[str, Any], scale: Any, bucket: Any, pose: Callable[[Callable[[str], Any], bool], Problem]) -> Call:
    """What both passes check, in the order in which they do.

    Args:
        arrays, scale, bucket: as the caller gave them.
        pose: (name of an array -> its signature or None, whether the scale is positive) -> the problem.
    """
    on_gpu = _engine(arrays)
    tau = _scale(scale, arrays["q"])
    _complete_lengths(arrays, on_gpu)
    asked = pose(lambda name: _signature(arrays.get(name)), tau >= _SMALLEST_SCALE)
    _check_lengths(asked, arrays)
    _check_overlap(asked, arrays)
    return Call(asked, arrays, {"scale": tau}, on_gpu, check_bucket(bucket))


def read_shapes(
    q: Any,
    k: Any,
    v: Any,
    *,
    dtype: Any = None,
    scale: Any = None,
    causal: Any = False,
    window: Any = None,
    seq_lens: bool = False,
    return_stats: bool = False,
    backward: bool = False,
    deterministic: bool = False,
    max_workspace: Any = None,
    bucket: Bucket = None,
) -> Problem:
    """The problem that shapes (of dense arrays in Fortran order) or arrays would pose; no array is made or read."""
    given = [_shape_signature(name, x, dtype) for name, x in (("q", q), ("k", k), ("v", v))]
    positive = scale is None or _finite_scale(scale, "1/sqrt(head_dim)") >= _SMALLEST_SCALE
    limit = _workspace(max_workspace)
    length = ("int32", given[0][1][3:], (4,), 16) if seq_lens and len(given[0][1]) == 4 else None
    band = _band(causal, window)
    if backward:
        asked = gradient_problem(
            *given, band=band, positive_scale=positive, deterministic=bool(deterministic), max_workspace=limit,
            seq_lens_q=length, seq_lens_kv=length,
        )  # fmt: skip
    else:
        asked = problem(*given, None, None, bool(return_stats), band, positive, limit, length, length)
    policy = check_bucket(bucket)
    return policy(asked) if policy else asked


def _shape_signature(name: str, x: Any, dtype: Any) -> Signature:
    if gpu.is_array(x) or isinstance(x, np.ndarray):
        signature: Signature = _signature(x)
        return signature
    if not isinstance(x, (tuple, list)) or not all(isinstance(n, numbers.Integral) and int(n) >= 0 for n in x):
        raise TypeError(f"{name} is {x!r}; give a shape, such as (128, 32, 4096, 1), or an array")
    if dtype is None:
        raise TypeError(f"{name} is given as the shape {tuple(x)}; its dtype is missing: dtype='bfloat16'")
    kind = str(dtype) if isinstance(dtype, str) else np.dtype(dtype).name
    shape = tuple(int(n) for n in x)
    return kind, shape, dense_strides(shape, ITEMSIZE.get(kind, 1)), 16


def _given(q: Any, k: Any, v: Any, **others: Any) -> dict[str, Any]:
    """The arrays by name; those that may be left out and are None are left out."""
    return {"q": q, "k": k, "v": v} | {name: array for name, array in others.items() if array is not None}


def _band(causal: Any, window: Any) -> Band | None:
    """Which keys a query sees: the right bound of ``causal`` and the bounds of ``window``, on one diagonal."""
    if causal not in (False, True, "top_left", "bottom_right"):
        raise ValueError(f"causal is {causal!r}; it must be False, True, 'top_left' or 'bottom_right'")
    bottom_right = causal == "bottom_right"
    if window is None:
        return Band(right=0, bottom_right=bottom_right) if causal else None
    if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
        raise TypeError(f"window is {window!r}; it must be (left, right) or (left, right, 'bottom_right')")
    for side in window[:2]:
        if side is not None and (not isinstance(side, numbers.Integral) or int(side) < 0):
            raise ValueError(f"window is {window!r}; its sides are numbers of keys, 0 or more, or None for no bound")
    left, right = (None if side is None else int(side) for side in window[:2])
    corner = window[2] if len(window) == 3 else "bottom_right" if bottom_right else "top_left"
    if corner not in ("top_left", "bottom_right"):
        raise ValueError(f"window is {window!r}; its diagonal is 'top_left' or 'bottom_right'")
    if causal and (corner == "bottom_right") != bottom_right:
        raise ValueError(f"causal is {causal!r} and window is {window!r}: they name different diagonals")
    return Band(left, 0 if causal else right, corner == "bottom_right")


def _complete_lengths(arrays: dict[str, Any], on_gpu: bool) -> None:
    """Where the lengths of one side are given, the other side has all that its array has."""
    given = [name for name in LENGTHS if name in arrays]
    if len(given) == 1:
        (missing,) = set(LENGTHS) - set(given)
        if arrays["q"].ndim == arrays["k"].ndim == 4:  # what is not is refused next
            arrays[missing] = full_lengths(missing, arrays, on_gpu)


def _check_lengths(asked: Problem, arrays: Mapping[str, Any]) -> None:
    """On the CPU the lengths are read; on the GPU that would wait for it."""
    for name, most in (("seq_lens_q", asked.q.shape[2]), ("seq_lens_kv", asked.k.shape[2])):
        lengths = arrays.get(name)
        if isinstance(lengths, np.ndarray) and lengths.size and not 0 <= lengths.min() <= lengths.max() <= most:
            raise ValueError(f"{name} has lengths from {lengths.min()} to {lengths.max()}; they must be from 0 to {most}")


def _workspace(limit: Any) -> int | None:
    if limit is None:
        return None
    if not isinstance(limit, numbers.Integral) or limit < 0:
        raise ValueError(f"max_workspace is {limit!r}; it must be a number of bytes, 0 or more, or None for no limit")
    return int(limit)


def _check_overlap(asked: Problem, arrays: Mapping[str, Any]) -> None:
    for spec in asked.results:
        if spec.name in arrays:
            for other in arrays:
                if other != spec.name and _overlap(asked, arrays, spec.name, other):
                    raise ValueError(
                        f"{spec.name} overlaps {other} in memory: results would overwrite it; pass an array of its own"
                    )


def _engine(arrays: Mapping[str, Any]) -> bool:
    """True where the arrays are CuPy's, on one device; False where they are numpy's."""
    kinds = {}
    for name, array in arrays.items():
        if gpu.is_array(array):
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


def _signature(array: Any) -> Any:
    """The array's :data:`Signature`, None of None."""
    if array is None:
        return None
    address = array.data.ptr if gpu.is_array(array) else 16  # the interpreter reads any alignment
    signature: Signature = (array.dtype.name, array.shape, array.strides, address & -address & 15 or 16)
    return signature


#: cuDNN gets the scale as float32: these are the least positive and the largest that it can hold without loss of range.
_SMALLEST_SCALE, _LARGEST_SCALE = (float(x) for x in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


def _scale(scale: Any, q: Any) -> float:
    default = 1 / math.sqrt((q.shape[0] if q.ndim else 0) or 1)
    return default if scale is None else _finite_scale(scale, f"1/sqrt(head_dim) = {default:.6g}")


def _finite_scale(scale: Any, default: str) -> float:
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number: float(...) makes one of an array")
    value = float(scale)
    if not abs(value) <= _LARGEST_SCALE:  # true of NaN too
        raise ValueError(f"scale is {value}; it must be finite in float32. None stands for {default}")
    return value


def _overlap(asked: Problem, arrays: Mapping[str, Any], one: str, other: str) -> bool:
    """Whether two arrays share an element; decided on addresses alone, no element is read."""
    a, b = arrays[one], arrays[other]
    if gpu.is_array(a):
        (a_from, a_to), (b_from, b_to) = asked.extents[one], asked.extents[other]
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
