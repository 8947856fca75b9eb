"""Conversion to FP8 with one scale per array: current scaling, and delayed scaling with a history in memory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..extend import (
    Array,
    Axes,
    Builder,
    Call,
    CallKey,
    ReadCall,
    View,
    check_arrays,
    composed,
    cupy_runtime,
    dtype_name,
    in_words,
    numpy_dtype,
    read_array,
    read_flag,
    read_operands,
    results_of,
    takes_options,
)
from ..layout import Layout
from . import fp8_kernels
from .array import Fp8Array, along_keys, factor, is_factor, of_factors
from .fp8_kernels import FP8_DTYPES, is_name
from .fp8_passes import add_conversions, expected_lengths, mean_shape

#: The dtypes of arrays that are converted; float64 on the CPU only.
SOURCES = ("float16", "bfloat16", "float32")
#: The names of a conversion's arrays, and of their lengths.
_NAMES, _LENGTHS = ("q", "k", "v"), ("lengths of q", "lengths of k", "lengths of v")


@takes_options
def quantize(
    x: Array,
    dtype: str = "float8_e4m3fn",
    *,
    rotate: bool = False,
    center: bool = False,
    lengths: Array | None = None,
    layout: Layout | None = None,
) -> Fp8Array:
    r"""Convert an array to FP8 with the scale of its largest magnitude (current scaling, one scale per array).

    .. math:: e = \operatorname{round}(s\, x), \qquad s = \frac{M}{\max |x|}, \qquad x \approx e / s

    with the largest number M of the dtype. If :math:`\max |x|` is below 1e-30, s is 1, and all elements are 0. On the GPU two
    kernels run on CuPy's current stream, without synchronization; the scale stays in the GPU's memory.

    Args:
        x: ``(D, H, S, B)`` or packed ``(D, H, T)``; float16, bfloat16 or float32, on the CPU also float64. On the GPU D is a
            multiple of 8 and head_dim is contiguous.
        dtype: ``"float8_e4m3fn"`` or ``"float8_e5m2"``. Default ``"float8_e4m3fn"``, which is more accurate.
        rotate: multiply head_dim by a normalized Hadamard matrix; if D is not a power of two, parts with power-of-two length.
            If q and k are both rotated, the scores do not change, and large channels are spread over all channels, so that
            fewer bits are lost. Default False.
        center: subtract the mean over the sequence first, for each d, head and batch item, and keep it as the ``mean`` of the
            result; for packed sequences, the mean over all of them. Use it for values: attention to values with a mean is less
            accurate (:doc:`/fp8`). The scale then also fits x itself. On the GPU two more kernels run. Default False.
        lengths: int32 ``(B,)``, the length of each batch item. Elements beyond it are not read, and 0 is stored. Default None.
        layout: the order of x's axes, as for :func:`cupy_sdpa.attention`: ``"bshd"``, ``"bhsd"``, ``"sbhd"`` or ``"thd"`` in C
            order. Default None: ``(D, H, S, B)`` or ``(D, H, T)``.

    Returns:
        The FP8 array, with the axes of x; in memory it is dense in the order (D, H, S, B).

    Raises:
        TypeError, ValueError: the array, the dtype or the lengths are not supported.

    Sources: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 4 (scales); Shah et al. 2024,
    "FlashAttention-3", section 3.3 (rotation).

    >>> import numpy as np
    >>> from cupy_sdpa import fp8
    >>> x = fp8.quantize(np.asfortranarray(np.float32([[[[1.0]], [[-3.5]], [[0.1]]]])))
    >>> x
    <Fp8Array float8_e4m3fn (1, 3, 1, 1)>
    >>> x.scale.tolist(), x.dequantize().ravel().tolist()
    ([128.0], [1.0, -3.5, 0.1015625])
    """
    center, rotate = read_flag("center", center), read_flag("rotate", rotate)
    if center and rotate:
        raise ValueError("center and rotate are True: center is for values, rotate for queries and keys; pass one of them")
    (result,) = quantize_all([x], dtype, [rotate], [lengths], layout, centered=[center])
    return result


def quantize_all(
    arrays: Sequence[Any],
    dtype: str,
    rotations: Sequence[bool],
    lengths: Sequence[Any],
    layout: Any = None,
    *,
    centered: Sequence[bool],
) -> list[Fp8Array]:
    """:func:`quantize` for up to three arrays, in the same two launches."""
    if not is_name(dtype, FP8_DTYPES):
        raise TypeError(f"dtype is {dtype!r}; it must be {' or '.join(FP8_DTYPES)}")
    names, of_lengths = _NAMES[: len(arrays)], _LENGTHS[: len(arrays)]
    arguments = ("lengths",) if len(arrays) == 1 else ("seq_lens_q", "seq_lens_kv", "seq_lens_kv")
    lengths = [x if x is None else read_array(name, x, integers=True) for name, x in zip(arguments, lengths, strict=True)]
    if layout is not None:
        return _in_layout(lambda *own: quantize_all(own, dtype, rotations, lengths, centered=centered), arrays, layout)

    key = CallKey(("quantize", dtype, *rotations, *centered), (*names, *of_lengths), (*arrays, *lengths), {})
    parse = functools.partial(_parse_conversion, dtype=dtype, rotations=rotations, centered=centered)
    results = results_of(Call(key, parse))
    made, factors, means = results[: len(names)], results[len(names)], iter(results[len(names) + 1 :])
    return [
        of_factors(
            data, factors, 2 * fp8_kernels.FACTOR_STEP * place, dtype, rotated=turn and fp8_kernels.rotation_of(len(data)) > 1,
            mean=along_keys(next(means), data.shape) if center else None,
        )
        for place, (data, turn, center) in enumerate(zip(made, rotations, centered, strict=True))
    ]  # fmt: skip


def _parse_conversion(key: CallKey, *, dtype: str, rotations: Sequence[bool], centered: Sequence[bool]) -> ReadCall:
    """Check the arguments of :func:`quantize_all`: arrays and their lengths."""
    arrays, names, of_lengths = key.named(), _NAMES[: len(rotations)], _LENGTHS[: len(rotations)]
    several = len(names) > 1
    for name in names:
        check_type(name if several else "x", arrays[name])
    if several:  # errors name the caller's arguments
        passed = {name: arrays[name] for name in names}
        passed |= {"seq_lens_q": arrays[of_lengths[0]], "seq_lens_kv": arrays[of_lengths[1]]}
        check_arrays([], {name: View.of(name, x) for name, x in passed.items() if x is not None})
    else:
        check_source(arrays["q"], arrays[of_lengths[0]])
    arrays, views, _ = read_operands(arrays, {})
    if several:
        check_dtypes(views)
        for name, lengths in zip(names, of_lengths, strict=True):
            check_source(views[name], views.get(lengths))
    parts = [fp8_kernels.rotation_of(views[name].shape[0]) if turn else 1 for name, turn in zip(names, rotations, strict=True)]
    device = views["q"].storage.device
    storage = numpy_dtype(dtype, on_gpu=device is not None)
    results = {f"{name} in fp8": View.dense(f"{name} in fp8", views[name].shape, storage, device) for name in names}
    results["factors"] = View.dense("factors", (2 * fp8_kernels.FACTOR_STEP * len(names),), np.float32, device)
    means = [f"mean of {name}" if center else "" for name, center in zip(names, centered, strict=True)]
    for mean, name in zip(means, names, strict=True):
        if mean:
            results[mean] = View.dense(mean, mean_shape(views[name].shape), np.float32, device)

    def build(builder: Builder) -> None:
        sources, targets = [views[name] for name in names], [views[f"{name} in fp8"] for name in names]
        lengths, of_sequences = [*map(views.get, of_lengths)], [*map(views.get, means)]
        add_conversions(builder, sources, dtype, parts, lengths, targets, views["factors"], of_sequences)

    return composed(key, arrays, views, results, build)


@takes_options
def quantize_qkv(
    q: Array,
    k: Array,
    v: Array,
    dtype: str = "float8_e4m3fn",
    *,
    rotate: bool = False,
    center: bool = True,
    seq_lens_q: Array | None = None,
    seq_lens_kv: Array | None = None,
    layout: Layout | None = None,
) -> tuple[Fp8Array, Fp8Array, Fp8Array]:
    """:func:`quantize` for q, k and v, on the GPU in the same launches.

    Args:
        q, k, v: ``(D, Hq, Sq, B)``, ``(D, Hkv, Skv, B)`` and ``(Dv, Hkv, Skv, B)``, of one dtype.
        dtype: as for :func:`quantize`.
        rotate: rotate q and k, but not v. Default False.
        center: subtract the mean over the keys from v; attention adds it back to the output, see :func:`quantize`. Pass False
            for pages, and with dropout. Default True.
        seq_lens_q, seq_lens_kv: int32 ``(B,)``, the length of each batch item. Default None: full lengths.
        layout: as for :func:`quantize`.

    Returns:
        q, k and v in FP8.

    Raises:
        TypeError, ValueError: as :func:`quantize`; or the arrays have several dtypes, or are on several engines.

    >>> import numpy as np
    >>> from cupy_sdpa import fp8
    >>> x = np.ones((16, 2, 5, 1), np.float32, order="F")
    >>> fp8.quantize_qkv(x, x, x, rotate=True)
    (<Fp8Array float8_e4m3fn (16, 2, 5, 1), rotated>, <Fp8Array float8_e4m3fn (16, 2, 5, 1), rotated>, \
<Fp8Array float8_e4m3fn (16, 2, 5, 1), with a mean>)
    """
    rotate = read_flag("rotate", rotate)
    lengths, centered = [seq_lens_q, seq_lens_kv, seq_lens_kv], [False, False, read_flag("center", center)]
    results = quantize_all([q, k, v], dtype, [rotate, rotate, False], lengths, layout, centered=centered)
    return results[0], results[1], results[2]


def check_dtypes(views: Mapping[str, View]) -> None:
    """Raise TypeError if q, k and v have several dtypes."""
    q = views["q"].dtype
    for name in ("k", "v"):
        if views[name].dtype != q:
            raise TypeError(f"{name} is {views[name].dtype} and q is {q}; the dtypes must be equal: convert one of them")


class DelayedScaling:
    r"""Convert to FP8 with a scale from earlier arrays: one kernel reads the array once (delayed scaling).

    .. math:: s = \frac{M}{\max_i a_i}

    with the largest number M of the dtype and the largest magnitudes :math:`a_i` of the last arrays. Values beyond M / s are
    stored as M / s. An array with an infinity or NaN does not change the history. History and scale are in the memory of the
    arrays, and the host reads nothing: you can capture calls in a CUDA graph, whose replays advance the history.

    Args:
        like: an array on the engine to use, such as the first one to convert; its elements are not read.
        history: the number of earlier arrays; 1 is the most recent one. Default 16.
        dtype: as for :func:`quantize`.
        amax: a largest magnitude to start with, a number. Default None: the first array is converted with the scale 1.
        rotate: as for :func:`quantize`. Default False.

    Attributes:
        dtype, rotate: as above.

    Raises:
        TypeError, ValueError: an argument is invalid.

    Source: Micikevicius et al. 2022, "FP8 Formats for Deep Learning", section 4.

    >>> import numpy as np
    >>> from cupy_sdpa import fp8
    >>> x = np.ones((16, 1, 2, 1), np.float32, order="F")
    >>> scaling = fp8.DelayedScaling(x, history=2, amax=7.0)
    >>> [float(scaling.quantize(x * factor).scale[0]) for factor in (3.5, 14, 1, 1, 1)]
    [64.0, 64.0, 32.0, 32.0, 448.0]
    """

    def __init__(
        self, like: Array, history: int = 16, dtype: str = "float8_e4m3fn", *, amax: float | None = None, rotate: bool = False
    ) -> None:
        read_array("like", like)
        if not is_name(dtype, FP8_DTYPES):
            raise TypeError(f"dtype is {dtype!r}; it must be {' or '.join(FP8_DTYPES)}")
        if not isinstance(history, int) or history < 1:
            raise ValueError(f"history is {history!r}; it must be a number of arrays, 1 or more")
        if amax is not None and not is_factor(float(amax) / fp8_kernels.largest_number(dtype)):
            raise ValueError(f"amax is {amax}; it must be above 0, and a finite number of float32, or None")
        self.dtype, self.rotate = dtype, read_flag("rotate", rotate)
        state = np.zeros(fp8_kernels.STATE + history, np.float32)
        state[:2] = 1.0
        if amax is not None:
            largest = fp8_kernels.largest_number(dtype)
            state[:2] = largest / amax, amax / largest
            state[-1] = amax  # the last entry of the history that is replaced
        self._state: Any = state
        if cupy_runtime.is_array(like):
            with cupy_runtime.on_device_of(like):
                self._state = cupy_runtime.cupy().asarray(state)

    def __copy__(self) -> DelayedScaling:
        """Return an independent copy: with a history of its own."""
        return copy.deepcopy(self)

    @property
    def scale(self) -> Any:
        """The scale of the next array, float32 ``(1,)``; a copy.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> fp8.DelayedScaling(np.ones((8, 1, 2, 1), np.float32, order="F"), amax=7.0).scale
        array([64.], dtype=float32)
        """
        return self._state[:1].copy()

    @takes_options
    def quantize(self, x: Array, *, lengths: Any = None, layout: Layout | None = None) -> Fp8Array:
        """Convert an array with the current scale, and add its largest magnitude to the history.

        Args:
            x, lengths, layout: as for :func:`quantize`.

        Raises:
            TypeError, ValueError: as :func:`quantize`.
            TypeError: x is a numpy array and the history is on the GPU, or the other way round.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> x = np.ones((16, 1, 2, 1), np.float32, order="F")
        >>> scaling = fp8.DelayedScaling(x, amax=1.0)
        >>> scaling.quantize(x)
        <Fp8Array float8_e4m3fn (16, 1, 2, 1)>
        """
        if layout is not None:
            return _in_layout(lambda own: [self.quantize(own, lengths=lengths)], [x], layout)[0]
        self._check_engine(x)
        lengths = lengths if lengths is None else read_array("lengths", lengths, integers=True)
        check_type("x", x)
        check_source(x, lengths)
        expected_lengths(x).check_elements(lengths)
        part = fp8_kernels.rotation_of(x.shape[0]) if self.rotate else 1
        with cupy_runtime.device_context(x):
            if lengths is not None and not lengths.flags.c_contiguous:
                lengths = cupy_runtime.temporary_copy(lengths)
            storage = numpy_dtype(self.dtype, on_gpu=cupy_runtime.is_array(x))
            target = cupy_runtime.new_result(x, tuple(x.shape), storage)
            factors = cupy_runtime.new_result(x, (2 * fp8_kernels.FACTOR_STEP,), np.dtype(np.float32))
            fp8_kernels.delayed(fp8_kernels.Fp8Conversion(x, target, factors, part, lengths), self.dtype, self._state)
        return of_factors(target, factors, 0, self.dtype, rotated=part > 1)

    def update(self, amax: Array) -> None:
        """Add a largest magnitude to the history.

        Args:
            amax: float32 ``(1,)`` on the engine of the history, such as an output's (``fp8.attention(..., return_amax=True)``);
                ignored if not finite.

        Raises:
            TypeError: ``amax`` is not float32 ``(1,)``, or not on the engine of the history.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> scaling = fp8.DelayedScaling(np.ones((16, 1, 2, 1), np.float32, order="F"), history=1)
        >>> scaling.update(np.array([7.0], np.float32))
        >>> scaling.scale
        array([64.], dtype=float32)
        """
        self._check_engine(amax)
        amax = factor("amax", amax, self._state)
        with cupy_runtime.device_context(amax):
            fp8_kernels.update(self._state, amax, self.dtype)

    def _check_engine(self, x: Any) -> None:
        if cupy_runtime.is_array(x) != cupy_runtime.is_array(self._state):
            kinds = ["CuPy" if cupy_runtime.is_array(array) else "numpy" for array in (x, self._state)]
            raise TypeError(
                f"the array is a {kinds[0]} array, and the history is a {kinds[1]} array: create another DelayedScaling"
            )


def _in_layout(convert: Callable[..., list[Fp8Array]], arrays: Sequence[Any], layout: str) -> list[Fp8Array]:
    """Convert arrays of a layout; the results are views with its axes, of which head_dim is the last in C order."""
    axes = Axes(layout)
    with axes.context():
        made = convert(*(axes.array(name, x) for name, x in zip(_NAMES, arrays, strict=False)))
    return [axes.result(name, x) for name, x in zip(_NAMES, made, strict=False)]


def check_type(name: str, x: Any) -> None:
    """Check that an array to convert is one of numpy or CuPy."""
    if not cupy_runtime.is_array(x) and type(x) not in (np.ndarray, np.memmap):
        raise TypeError(
            f"{name} is {in_words(x)}; quantize takes numpy and CuPy arrays: share arrays of other libraries, for example "
            f"with numpy.asarray({name}) or cupy.from_dlpack({name})"
        )


def check_source(x: Any, lengths: Any) -> None:
    """Check an array to convert, or its view, in the layout of this package, and its lengths."""
    x = View.of("x", x)
    on_gpu, name = x.storage.device is not None, dtype_name(x.dtype)
    if name not in (SOURCES if on_gpu else (*SOURCES, "float64")):
        raise TypeError(f"x is {name}; quantize takes {', '.join(SOURCES)}: convert with .astype")
    if len(x.shape) not in (3, 4):
        raise ValueError(f"x has shape {x.shape}; it must be (head_dim, heads, seq, batch), or packed (head_dim, heads, total)")
    if on_gpu and x.shape[0] % fp8_kernels.UNIT:
        raise ValueError(
            f"x has shape {x.shape}; on the GPU head_dim must be a multiple of {fp8_kernels.UNIT}: pad it with zeros"
        )
    if on_gpu and x.size // fp8_kernels.UNIT >= 2**32:
        raise ValueError(
            f"x has shape {x.shape}, {x.size} elements; quantize converts at most {fp8_kernels.UNIT * 2**32 - 1}: split it"
        )
    Axes.check_strides("x", x, required=on_gpu)
    if lengths is None:
        return
    check_arrays([], {"x": x, "lengths": View.of("lengths", lengths)})
    if dtype_name(lengths.dtype) != "int32":
        raise TypeError(f"lengths is {dtype_name(lengths.dtype)}; it must be int32: convert with .astype('int32')")
    if len(x.shape) != 4 or lengths.shape != x.shape[3:]:
        raise ValueError(
            f"lengths has shape {lengths.shape} and x {x.shape}; lengths must be (B,), and x (head_dim, heads, seq, B)"
        )
