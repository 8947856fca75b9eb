"""Array metadata (dtype, shape, strides and alignment), and checks against what a call needs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from .arrays import ARRAYS, ArrayRow

#: The dtypes of q, k and v.
FloatDtype = Literal["float16", "bfloat16", "float32", "float64"]
FLOAT_DTYPES: tuple[FloatDtype, ...] = get_args(FloatDtype)
#: The dtypes of 8 bits (FP8), each with its largest number. The values of an array are its elements times a scale factor.
FP8_LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

#: The bytes per element of every dtype that an array may have.
ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "bool": 1, "uint8": 1}
ITEMSIZE |= dict.fromkeys(FP8_LARGEST, 1)


@functools.cache
def dtype_name(dtype: Any) -> str:
    """Return the name of a numpy dtype; cached, because numpy takes half a microsecond to format it.

    >>> dtype_name(np.dtype("float16"))
    'float16'
    """
    return str(dtype.name)


def numpy_dtype(name: str, *, on_gpu: bool = False) -> np.dtype[Any]:
    """Return the numpy dtype of arrays of a dtype; bfloat16 and FP8 are dtypes of ml_dtypes.

    ``on_gpu``: return the dtype of CuPy arrays; FP8 elements are then uint8, because CuPy has no FP8 dtype.

    >>> numpy_dtype("bfloat16").itemsize, numpy_dtype("float8_e5m2", on_gpu=True)
    (2, dtype('uint8'))
    """
    if on_gpu and name in FP8_LARGEST:
        return np.dtype(np.uint8)
    if name == "bfloat16" or name in FP8_LARGEST:
        import ml_dtypes  # takes 45 ms to import

        return np.dtype(getattr(ml_dtypes, name))  # type: ignore[no-any-return, unused-ignore]  # typed since ml_dtypes 0.6
    return np.dtype(name)


def rounded(values: Any, dtype: str) -> Any:
    """Round a numpy array to a dtype. FP8 saturates, as on GPUs: larger numbers become the dtype's largest number.

    >>> rounded(np.array([0.3, 1000.0]), "float8_e4m3fn").tolist()
    [0.3125, 448.0]
    """
    largest = FP8_LARGEST.get(dtype)
    return (values if largest is None else np.clip(values, -largest, largest)).astype(numpy_dtype(dtype))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The metadata of one array of a problem.

    Attributes:
        name: the name of the argument.
        dtype: the name of the numpy dtype.
        shape: the shape in the caller's axis order, such as ``(head_dim, heads, seq, batch)``.
        strides: in bytes. An axis of length 1 has the stride of a dense array.
        alignment: the alignment of the first element in bytes, at most 16.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    alignment: int

    @property
    def dense(self) -> bool:
        """Whether the array is dense in Fortran order."""
        return self.strides == dense_strides(self.shape, ITEMSIZE[self.dtype])

    def __str__(self) -> str:
        text = f"{self.name} {self.shape} {self.dtype}"
        return text if self.dense else f"{text} strides {self.strides} bytes"


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Return the strides in bytes of a dense array in Fortran order."""
    strides, step = [], itemsize
    for length in shape:
        strides.append(step)
        step *= max(length, 1)
    return tuple(strides)


def byte_range(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Return the memory of the elements of an array, in bytes from its first element: start (<= 0) and end (> 0)."""
    extents = [stride * (length - 1) for stride, length in zip(strides, shape, strict=True)]
    return sum(x for x in extents if x < 0), sum(x for x in extents if x > 0) + itemsize


def alignment_of(place: int) -> int:
    """Return the alignment of an address or of an offset in bytes: the largest power of two up to 16 that divides it."""
    return place & -place & 15 or 16


def dense_spec(name: str, dtype: str, shape: tuple[int, ...]) -> TensorSpec:
    """Return the spec of a dense array in Fortran order."""
    return TensorSpec(name, dtype, shape, dense_strides(shape, ITEMSIZE.get(dtype, 1)), 16)


def make_spec(name: str, dtype: str, shape: tuple[int, ...], strides: tuple[int, ...], alignment: int = 16) -> TensorSpec:
    """Return the spec of an array; axes of length 1 and empty arrays get the strides of a dense array."""
    if 0 in shape:
        return dense_spec(name, dtype, shape)
    normalized = list(strides)
    for axis, length in enumerate(shape):
        if length == 1:  # the stride is meaningless: numpy, CuPy and DLPack return arbitrary values, including 0
            normalized[axis] = normalized[axis - 1] * max(shape[axis - 1], 1) if axis else ITEMSIZE.get(dtype, 1)
    return TensorSpec(name, dtype, shape, tuple(normalized), alignment)


# Comparison with what a call needs


class CallersAxes(NamedTuple):
    """The axes of a call's arrays with another layout, or without a batch axis, for messages.

    Attributes:
        permute: permutes an argument's axes from this package's order to the caller's.
        shapes: the shapes of the caller's arrays.
        has_layout: whether the layout is another one.
    """

    permute: Callable[[str, Sequence[Any]], tuple[Any, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    has_layout: bool


#: The axes of the current call; None for this package's axes.
callers_axes: ContextVar[CallersAxes | None] = ContextVar("callers_axes", default=None)


def has_callers_axes() -> bool:
    """True if messages show the axes of another layout."""
    caller = callers_axes.get()
    return caller is not None and caller.has_layout


def in_callers_axes(name: str, axes: Sequence[Any]) -> tuple[Any, ...]:
    """Axes of an argument, such as a shape, in the order of the caller's array."""
    caller = callers_axes.get()
    return tuple(axes) if caller is None or len(axes) < 2 else caller.permute(name, axes)


def shown_shape(spec: TensorSpec) -> tuple[int, ...]:
    """Return the shape of an array as the caller passed it."""
    caller = callers_axes.get()
    return caller.shapes[spec.name] if caller and spec.name in caller.shapes else in_callers_axes(spec.name, spec.shape)


def legend_in_callers_axes(name: str, legend: str) -> str:
    """Return a legend such as ``(Dv, Hq, Sq, B), the dtype of q`` in the order of the caller's array."""
    letters, bracket, rest = legend.removeprefix("(").partition(")")
    if not bracket or not legend.startswith("(") or legend.startswith("(B + 1"):
        return legend
    axes = in_callers_axes(name, [letter for letter in letters.split(",") if letter])
    return f"({', '.join(letter.strip() for letter in axes)}{',' * (len(axes) == 1)}){rest}"


def row_stats_dtype(dtype: object) -> str:
    """Return the dtype of the row statistics for a compute dtype: float32, or float64 for float64.

    >>> row_stats_dtype("bfloat16"), row_stats_dtype("float64")
    ('float32', 'float64')
    """
    return "float64" if dtype == "float64" else "float32"


def row_stats_shape(queries: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the row statistics of queries ``(D, Hq, Sq, B)``, or packed ``(D, Hq, Tq)``.

    >>> row_stats_shape((64, 8, 100, 2)), row_stats_shape((64, 8, 100))
    ((100, 8, 2), (8, 100))
    """
    _, heads, length, *batch = queries
    return (length, heads, *batch) if batch else (heads, length)


#: The arrays whose shapes and dtypes follow from q, k and v.
_OF_CALL = tuple(
    name for name, row in ARRAYS.items()
    if row.of in ("q", "k", "v") or name in ("out", "dout") or row.dtype in ("statistics", "float32 or wider")
)  # fmt: skip


class Expected(NamedTuple):
    """The dtype and shape that an array must have.

    Attributes:
        name: the argument.
        shape: the shape.
        dtype: the dtype.
        legend: the shape in letters, for messages.
        writable: whether the call writes the array.
        most: the largest allowed value. Lengths must be 0 or more; offsets (``cu_seqlens``) must also rise. Default None: any
            values are allowed.

    >>> Expected("weights", (4, 2), "float32", "(S, H)").shape
    (4, 2)
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    legend: str
    writable: bool = False
    most: int | None = None

    @classmethod
    def of_call(
        cls, q: Any, k: Any, v: Any, *, given: Mapping[str, Any] | None = None, computed: Any = None
    ) -> dict[str, Expected]:
        """Return what a call's other arrays must be, by name: the results, the backward pass's inputs, and some options.

        Row statistics are float32, or float64 if the call computes in float64; sinks and slopes are float32.
        A call that computes in float64 takes both dtypes: it expects the dtype of the array in ``given``.
        ``computed`` is the dtype to compute in; None: q's.

        >>> q = np.zeros((8, 4, 3, 1), np.float16)
        >>> Expected.of_call(q, q, q)["stats"]
        Expected(name='stats', shape=(3, 4, 1), dtype='float32', legend='(Sq, Hq, B)', writable=False, most=None)
        """
        inputs = {"q": q, "k": k, "v": v}
        dtypes = {name: x.dtype if isinstance(x, TensorSpec) else dtype_name(x.dtype) for name, x in inputs.items()}
        packed = len(q.shape) == 3
        sizes = dict(zip(ARRAYS["q"].packed if packed else ARRAYS["q"].letters, q.shape, strict=False)) | {"Dv": v.shape[0]}
        wide = row_stats_dtype(dtypes["q"] if computed is None else computed)
        of_rows = {"statistics": wide, "float32 or wider": "float32"}

        def expected(row: ArrayRow) -> Expected:
            if row.of:
                return cls(row.name, inputs[row.of].shape, dtypes[row.of], f"the shape and dtype of {row.of}")
            shape = tuple(map(sizes.__getitem__, row.packed if packed else row.letters))
            own = getattr((given or {}).get(row.name), "dtype", None)
            if row.dtype not in of_rows:
                return cls(row.name, shape, dtypes["q"], f"{row.legend(packed=packed)}, the dtype of q")
            either = wide == "float64" and own in ("float32", "float64")  # calls that compute in float64 take both
            return cls(row.name, shape, str(own) if either else of_rows[row.dtype], row.legend(packed=packed))

        return {name: expected(ARRAYS[name]) for name in _OF_CALL}

    def check_elements(self, array: Any) -> None:
        """Check the values of lengths or offsets, on the CPU only: reading them from the GPU would synchronize.

        >>> Expected("lengths", (2,), "int32", "(B,)", most=4).check_elements(np.int32([3, 5]))
        Traceback (most recent call last):
        ValueError: lengths has lengths from 3 to 5; they must be from 0 to 4
        """
        if self.most is not None and isinstance(array, np.ndarray):
            check = check_offsets if self.name.startswith("cu_seqlens") else check_counts
            check(self.name, array, self.most)


def check_counts(name: str, lengths: Any, most: int) -> None:
    """Check the values of lengths on the CPU; raises ValueError."""
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= most:
        raise ValueError(f"{name} has lengths from {lengths.min()} to {lengths.max()}; they must be from 0 to {most}")


def check_offsets(name: str, starts: Any, total: int) -> None:
    """Check the values of the offsets of packed sequences on the CPU; raises ValueError."""
    if starts[0] < 0 or starts[-1] > total or (np.diff(starts) < 0).any():
        raise ValueError(
            f"{name} is {starts.tolist()}; offsets must rise from 0 or more to at most {total}, the total: if you have "
            "lengths, pass np.cumsum([0, *lengths])"
        )


def check_spec(spec: TensorSpec, expected: Expected) -> None:
    """Check the dtype, the shape and, for results, the strides of an array."""
    if spec.dtype != expected.dtype:
        remedy = "pass a new array" if expected.writable else f"convert with .astype({expected.dtype!r})"
        if spec.dtype == "bool":
            remedy = "pass a bool array, True where the query attends, as mask="
            if spec.name.startswith("seq_lens"):
                remedy = f"pass the number of True values in each sequence; or {remedy}"
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be {expected.dtype}: {remedy}")
    if spec.shape != expected.shape:
        wanted, legend = in_callers_axes(spec.name, expected.shape), legend_in_callers_axes(spec.name, expected.legend)
        raise ValueError(f"{spec.name} has shape {shown_shape(spec)}; it must be {wanted}, {legend}")
    if expected.writable:
        check_writable(spec)


def check_broadcastable(spec: TensorSpec, scores: tuple[int, ...], packed: bool) -> None:
    """Check the dtype of a bias or a mask, and that it broadcasts to the shape of the scores."""
    dtypes = FLOAT_DTYPES if spec.name == "bias" else ("bool",)
    if spec.dtype not in dtypes:
        remedy = f"convert with .astype({dtypes[0]!r})"
        if spec.name == "mask":
            remedy += ", with True where the query attends"
        if spec.dtype == "bool":
            remedy = "pass a bool array, True where the query attends, as mask="
        elif spec.name == "mask" and spec.dtype in FLOAT_DTYPES:
            remedy = "a float array that is added to the scores, such as 0 and -inf, is passed as bias="
        raise TypeError(f"{spec.name} is {spec.dtype}; it must be {' or '.join(dtypes)}: {remedy}")
    if _broadcasts(spec.shape, scores):
        return
    name, swapped = spec.name, (1,) * (4 - len(spec.shape)) + spec.shape
    legend = "(max_seqlen_kv, max_seqlen_q, Hq, B)" if packed else "(Skv, Sq, Hq, B)"
    wanted, letters = in_callers_axes(name, scores), legend_in_callers_axes(name, legend)
    batch = spec.shape[3] if name == "bias" and len(spec.shape) == 4 and not packed else 0
    if batch and scores[3] % batch == 0 and _broadcasts((*spec.shape[:3], 1), scores):
        repeats = scores[3] // batch
        raise ValueError(
            f"bias has shape {shown_shape(spec)}, a batch of {batch}, but q has a batch of {scores[3]}; it must broadcast to "
            f"{wanted}, {letters}. If each bias is for {repeats} consecutive batch items, pass bias_repeats={repeats}"
        )
    if has_callers_axes():
        reverse = _broadcasts(spec.shape[::-1], scores) if len(spec.shape) == 4 else False
        remedy = f"its axes are in reverse order: pass {name}.T" if reverse else "a mask of keys (B, Skv) is [:, None, None, :]"
        raise ValueError(f"{name} has shape {shown_shape(spec)}; it must broadcast to {wanted}, {letters}: {remedy}")
    if _broadcasts(swapped, scores[::-1]):  # the axes of PyTorch, broadcast from the right
        remedy = f"these are the axes in reverse order, (B, Hq, Sq, Skv): pass {name}.T"
        remedy += f"[{'..., ' + ', '.join(['None'] * (4 - len(spec.shape)))}]" if len(spec.shape) < 4 else ""
    elif len(spec.shape) == 2 and _broadcasts((spec.shape[1], 1, 1, spec.shape[0]), scores):
        remedy = f"pass a mask of keys (B, Skv) as {name}.T[:, None, None, :]"
    else:
        remedy = f"add axes with {name}[..., None], and permute them with .transpose"
    raise ValueError(
        f"{name} has shape {shown_shape(spec)}; it must have the {len(wanted)} axes {wanted}, {letters}, each of full length "
        f"or length 1, keys first: {remedy}"
    )


def _broadcasts(shape: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """True if an array has four axes, each of full length or length 1."""
    return len(shape) == 4 and all(n in (1, full) for n, full in zip(shape, scores, strict=True))


def check_equal(description: str, x: TensorSpec, y: TensorSpec, axis: int, legend: str) -> None:
    """Check that two of q, k and v have the same length along an axis."""
    if x.shape[axis] != y.shape[axis]:
        places = [in_callers_axes(spec.name, range(len(spec.shape))).index(axis) for spec in (x, y)]
        where = f"axis {places[0]}" if len({*places}) == 1 else f"axes {places[0]} and {places[1]}"
        raise ValueError(
            f"the {description} ({where}) of {x.name} and {y.name} differ, {x.shape[axis]} and {y.shape[axis]}: "
            f"{x.name} is {shown_shape(x)}, {y.name} is {shown_shape(y)}; {legend}"
        )


def stride_obstacle(spec: TensorSpec, *, written: bool = False) -> str:
    """Return why kernels cannot read an array whose axis 0 is head_dim, or an empty string.

    >>> import numpy as np
    >>> x = np.zeros((2, 8, 100, 64), np.float16)
    >>> print(stride_obstacle(make_spec("q", "float16", x.shape, x.strides)))
    q has a stride of 102400 bytes along head_dim; an element has 2: axis 0 must be contiguous. q has shape (2, 8, 100, 64) \
in C order: if its axes are (batch 2, heads 8, seq 100, head_dim 64), pass layout='bhsd'; if they are (head_dim, heads, seq, \
batch), copy it with asfortranarray(q)
    """
    itemsize = ITEMSIZE[spec.dtype]
    if spec.strides[0] != itemsize:
        text = f"{spec.name} has a stride of {spec.strides[0]} bytes along head_dim; an element has {itemsize}"
        text += ": axis 0 must be contiguous"
        if len(spec.shape) not in (3, 4) or spec.strides[_last_axis(spec)] != itemsize or has_callers_axes():
            return f"{text}; {_in_fortran_order(spec.name, written)}"
        return f"{text}. {_in_c_order(spec, written)}"
    if min(spec.strides) < 0:
        remedy = _in_fortran_order(spec.name, written)
        return f"{spec.name} has strides {spec.strides} bytes; cuDNN does not support negative strides: {remedy}"
    return ""


def _in_fortran_order(name: str, written: bool) -> str:
    """Return how to get an array in Fortran order; a copy would lose results."""
    return (
        "allocate it with order='F': a result cannot be written through a copy"
        if written
        else f"copy it with asfortranarray({name})"
    )


def hides_c_order(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> bool:
    """True if axis 0 of an array has length 1, so no stride, and the last axis is contiguous, so the others are in C order.

    >>> import numpy as np
    >>> x = np.zeros((1, 8, 100, 64), np.int8)
    >>> [hides_c_order(a.shape, a.strides, 1) for a in (x, np.asfortranarray(x), x[:, 0, 0, :], x[:, :, :, :1])]
    [True, False, False, False]
    """
    if shape[0] != 1 or shape[-1] == 1 or strides[-1] != itemsize:
        return False
    return any(length > 1 and stride > itemsize for stride, length in zip(strides, shape, strict=True))


def order_obstacle(spec: TensorSpec, *, written: bool = False) -> str:
    """Return why an array with a head_dim of 1 probably has its axes in another order; empty if it does not."""
    hidden = len(spec.shape) in (3, 4) and hides_c_order(spec.shape, spec.strides, ITEMSIZE[spec.dtype])
    return _in_c_order(spec, written) if hidden else ""


def _in_c_order(spec: TensorSpec, written: bool) -> str:
    """Return the likely layout of an array in C order."""
    layout, *axes = _likely_layout(spec)
    sizes = ", ".join(f"{axis} {n}" for axis, n in zip((*axes, "head_dim"), spec.shape, strict=False))
    own = "head_dim, heads, total" if len(spec.shape) == 3 else "head_dim, heads, seq, batch"
    return (
        f"{spec.name} has shape {spec.shape} in C order: if its axes are ({sizes}), pass layout={layout!r}; if they are "
        f"({own}), {_in_fortran_order(spec.name, written)}"
    )


def _likely_layout(spec: TensorSpec) -> tuple[str, ...]:
    """Return the layout that an array in C order probably has, and its axes before head_dim: seq is longer than heads."""
    if len(spec.shape) == 3:
        return "thd", "total", "heads"
    last = _last_axis(spec)
    batch = ("batch",)[: last - 2]
    # (batch, seq, heads, head_dim) split and transposed has a smaller stride along the heads
    if spec.shape[last - 1] > spec.shape[last - 2] or spec.strides[last - 1] > spec.strides[last - 2]:
        return "bhsd", *batch, "heads", "seq"
    return "bshd", *batch, "seq", "heads"


def _last_axis(spec: TensorSpec) -> int:
    """Return the last axis of an array in another layout: a batch axis of length 1 may have been appended to it."""
    return 2 if spec.shape[3:] in ((), (1,)) else 3


def density_obstacle(spec: TensorSpec) -> str:
    """Return why cuDNN cannot read an array without a head dim: it ignores strides; empty if it can."""
    if spec.dense:
        return ""
    dense = dense_strides(spec.shape, ITEMSIZE[spec.dtype])
    return f"{spec.name} has strides {spec.strides} bytes; cuDNN requires {dense}: allocate it with order='F'"


def check_writable(spec: TensorSpec) -> None:
    """Check that no two elements of a result share memory."""
    if 0 in spec.shape:
        return
    extent = ITEMSIZE[spec.dtype]  # bytes from the start of the first element to the end of the last, over the axes so far
    axes = zip(map(abs, spec.strides), spec.shape, strict=True)
    for stride, length in sorted((stride, length) for stride, length in axes if length > 1):
        if stride < extent:
            strides = in_callers_axes(spec.name, spec.strides)
            raise ValueError(f"{spec.name} has strides {strides} bytes: elements share memory; pass a dense array")
        extent += stride * (length - 1)
