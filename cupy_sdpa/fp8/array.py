"""FP8 arrays: elements of 8 bits and the factor that gives their values."""

from __future__ import annotations

import copy
import math
import numbers
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..extend import Array, cupy_runtime, dtype_name, in_words, numpy_dtype
from . import fp8_kernels
from .fp8_kernels import FP8_DTYPES, is_name

#: The dtypes that :meth:`Fp8Array.dequantize` gives.
_DTYPES = ("float16", "bfloat16", "float32")
#: Indices of these types give a view.
_BASIC = (slice, numbers.Integral, types.NoneType, types.EllipsisType)


class Fp8Array:
    r"""Hold FP8 elements with one factor: :math:`x = d\, e + m`, with elements e, the descale d, and perhaps a mean m.

    CuPy has no FP8 dtype, so on the GPU the elements are uint8.

    Args:
        data: the elements: a numpy array of dtype ``ml_dtypes.float8_e4m3fn`` or ``float8_e5m2``, or a CuPy array of uint8.
        descale: d, a number or a float32 array ``(1,)`` on the same device as ``data``. Default: ``1 / scale``. An array is
            kept, not copied: if it changes, so do the values, including outputs with v's factor.
        scale: 1/d, a number or such an array. Default: ``1 / descale``; for an array it is computed in every call that needs
            it.
        dtype: the dtype of the elements of a CuPy array, ``"float8_e4m3fn"`` (3 bits of mantissa, up to 448) or
            ``"float8_e5m2"`` (2 bits, up to 57344). Default ``"float8_e4m3fn"``.
        rotated: whether head_dim was rotated, see :func:`quantize`. Default False.
        axis: the axis of head_dim of a rotated array. Default 0.
        mean: m of values, float32 on the same device, with the shape of ``data`` or with axes of length 1, such as
            ``(D, H, 1, B)``. Attention needs length 1 along the keys, and adds m to the output. Not for rotated arrays. Default
            None: 0.

    Attributes:
        data, dtype, rotated, axis: as above.
        mean: as above, a view with the shape of ``data``; or None.

    Raises:
        TypeError: ``data`` is not a numpy or CuPy array of the dtype; ``descale`` and ``scale`` are None; a factor is not a
            number or a float32 array ``(1,)``; or the mean is not a float32 array on the same device.
        ValueError: a factor or its inverse is not finite and above 0 in float32, the two are not inverse numbers, there is no
            such axis, the mean does not broadcast, or a rotated array has a mean.

    >>> import ml_dtypes, numpy as np
    >>> from cupy_sdpa import fp8
    >>> x = fp8.Fp8Array(np.float32([1, 2, 4]).astype(ml_dtypes.float8_e4m3fn), descale=0.5)
    >>> x.dequantize().tolist()
    [0.5, 1.0, 2.0]
    >>> x.shape, x.nbytes, x.descale, x.scale
    ((3,), 3, array([0.5], dtype=float32), array([2.], dtype=float32))
    """

    #: The end of the error message of a call that does not take FP8 arrays.
    _not_an_array = (
        "attention, explain and KVCache.append take FP8 arrays, q, k and v together; convert it with its method dequantize(), "
        "or for gradients call attention_vjp(q, k, v, compute_dtype='float8_e4m3fn') on float16 or bfloat16 arrays"
    )

    #: The call of :func:`cupy_sdpa.attention` of such arrays, or of such keys; :mod:`.fp8_attention` sets it.
    _call_of: Callable[..., Any]

    def __init__(
        self,
        data: Any,
        descale: Any = None,
        *,
        scale: Any = None,
        dtype: str | None = None,
        rotated: bool = False,
        axis: int = 0,
        mean: Any = None,
    ) -> None:
        on_gpu = cupy_runtime.is_array(data)
        if not on_gpu and type(data) is not np.ndarray:
            raise TypeError(f"data is {in_words(data)}; an Fp8Array takes a numpy or a CuPy array: use fp8.quantize")
        stored = dtype_name(data.dtype)
        if dtype is None:
            dtype = "float8_e4m3fn" if on_gpu else stored
        if not is_name(dtype, FP8_DTYPES) or stored != ("uint8" if on_gpu else dtype):
            raise TypeError(
                f"data is {stored} and dtype is {dtype!r}; the dtype must be {' or '.join(FP8_DTYPES)}, and the array "
                f"{'uint8' if on_gpu else 'of that dtype'}: use fp8.quantize for other arrays"
            )
        if descale is None and scale is None:
            raise TypeError("descale and scale are None: pass one of them, the factor of the elements or its inverse")
        if (
            isinstance(scale, numbers.Real)
            and isinstance(descale, numbers.Real)
            and not math.isclose(float(scale) * float(descale), 1, rel_tol=1e-5)
        ):
            raise ValueError(f"descale is {descale} and scale is {scale}, which is not its inverse: pass one of them")
        try:
            axis = operator.index(axis)
        except TypeError:
            raise TypeError(f"axis is {axis!r}; it must be an integer") from None
        if not 0 <= axis < max(len(data.shape), 1):
            raise ValueError(f"axis is {axis}; data has the axes 0 to {len(data.shape) - 1}")
        self.data, self.dtype, self.rotated, self.axis = data, dtype, rotated, axis
        self.mean, self._of_pages = None if mean is None else _read_mean(mean, data, rotated=rotated), False
        given = {"descale": descale, "scale": scale}
        factors: Any = {name: None if x is None else factor(name, x, data) for name, x in given.items()}
        for name, other in (("descale", "scale"), ("scale", "descale")):
            if given[other] is None and factors[name] is not given[name]:
                factors[other] = 1 / factors[name]  # of a number the inverse is a constant
        self._descale, self._scale = factors["descale"], factors["scale"]
        self._reciprocal: Any = None

    @property
    def descale(self) -> Any:
        """The factor of the elements, float32 ``(1,)``."""
        return self._inverse(self._scale) if self._descale is None else self._descale

    @property
    def scale(self) -> Any:
        """The inverse of the factor, float32 ``(1,)``."""
        return self._inverse(self._descale) if self._scale is None else self._scale

    def _inverse(self, factor: Any) -> Any:
        """Return a factor's current inverse in an array that is kept, because captured graphs contain its address."""
        if self._reciprocal is None:
            self._reciprocal = factor.copy()
        self._reciprocal[...] = 1
        self._reciprocal /= factor
        return self._reciprocal

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape, such as ``(head_dim, heads, seq, batch)``."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.data.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return int(self.data.nbytes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next in each dimension."""
        return tuple(self.data.strides)

    @property
    def T(self) -> Fp8Array:  # noqa: N802
        """A view with the dimensions in reverse order, such as ``(batch, seq, heads, head_dim)`` of a result.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> fp8.quantize(np.ones((8, 1, 2, 1), np.float32, order="F")).T
        <Fp8Array float8_e4m3fn (1, 2, 1, 8)>
        """
        return self.transpose(*range(self.ndim)[::-1])

    def transpose(self, *axes: Any) -> Fp8Array:
        """Return a view with the dimensions in another order.

        Args:
            axes: the axes in the new order, as for numpy's ``transpose``: integers or one tuple.

        Returns:
            The view, with the same factor.

        Raises:
            ValueError: the axes are not a permutation.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> fp8.quantize(np.ones((8, 1, 2, 1), np.float32, order="F")).transpose(0, 2, 1, 3).shape
        (8, 2, 1, 1)
        """
        order: Any = axes[0] if len(axes) == 1 and isinstance(axes[0], tuple) else axes  # as numpy's
        axis = order.index(self.axis) if self.rotated else 0
        mean = None if self.mean is None else self.mean.transpose(order)
        return self._with_elements(self.data.transpose(order), axis, mean)

    def __getitem__(self, index: Any) -> Fp8Array:
        """Return a view of some elements with the same factor, such as ``k[:, :, :100]``.

        The index of a rotated array selects all of head_dim.

        Raises:
            IndexError: the index is outside the array.
            ValueError: a part of head_dim of a rotated array is requested, or the index removes or adds a dimension of it.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> fp8.quantize(np.ones((8, 1, 4, 1), np.float32, order="F"))[:, :, :3].shape
        (8, 1, 3, 1)
        """
        data, axis = self.data[index], self.axis
        kept = data.shape[axis : axis + 1] == self.shape[axis : axis + 1] and (axis == 0 or data.ndim == self.ndim)
        if kept and data.size and all(isinstance(x, _BASIC) for x in (index if isinstance(index, tuple) else (index,))):
            kept = data.strides[axis] == self.strides[axis]  # it may be another axis of this length, or in reverse order
        if self.rotated and not kept:
            raise ValueError(f"the index {index!r} selects a part of head_dim, which was rotated: dequantize first")
        return self._with_elements(data, axis, None if self.mean is None else self.mean[index])

    def _with_elements(self, data: Any, axis: int, mean: Any) -> Fp8Array:
        """Return an array with other elements, whose head_dim is an axis, and the factors of this one."""
        factors = self._descale, self._scale, self.dtype
        return made(data, *factors, rotated=self.rotated, axis=axis, mean=mean, of_pages=self._of_pages)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        """Raise an error for a conversion without the factor.

        Raises:
            TypeError: always.
        """
        raise TypeError(f"an Fp8Array is not converted to an array implicitly: {self._not_an_array}")

    def dequantize(self, dtype: Any = "float32") -> Any:
        """Return the values as an array with the memory order of the elements; a rotation is undone.

        Args:
            dtype: ``"float16"``, ``"bfloat16"`` or ``"float32"``. Default ``"float32"``.

        Returns:
            A new array of numpy or CuPy with the shape of the elements.

        Raises:
            TypeError: another dtype.
            ValueError: the head_dim is not a multiple of 8 on the GPU.

        >>> import numpy as np
        >>> from cupy_sdpa import fp8
        >>> fp8.quantize(np.ones((8, 1, 2, 1), np.float32, order="F")).dequantize()[0, 0, 0]
        array([1.], dtype=float32)
        """
        name = dtype if isinstance(dtype, str) else dtype_name(np.dtype(dtype))
        if name not in _DTYPES:
            raise TypeError(f"dtype is {name}; it must be one of {', '.join(_DTYPES)}")
        axes = self._memory_order()
        data = self.data.transpose(axes)
        rotation = fp8_kernels.rotation_of(data.shape[0]) if self.rotated else 1
        back = tuple(axes.index(axis) for axis in range(self.ndim))
        on_gpu = cupy_runtime.is_array(data)
        if on_gpu and data.shape[0] % fp8_kernels.UNIT:
            raise ValueError(f"the head_dim is {data.shape[0]}; on the GPU it must be a multiple of {fp8_kernels.UNIT}")
        with cupy_runtime.device_context(data):
            source = data
            if on_gpu and (not data.flags.f_contiguous or data.data.ptr % fp8_kernels.UNIT):  # the kernel reads 8 bytes at once
                source = cupy_runtime.temporary_copy(data)
            target = cupy_runtime.new_result(source, source.shape, numpy_dtype(name))
            mean = None if self.mean is None else self.mean.transpose(axes)
            fp8_kernels.dequantize(source, target, self.descale, rotation, self.dtype, mean)
        return target.transpose(back)

    def _memory_order(self) -> tuple[int, ...]:
        """Return the axes with increasing strides: a rotated array's head_dim first, axes without a stride last."""
        strides = [abs(stride) if n > 1 else 0 for n, stride in zip(self.shape, self.data.strides, strict=True)]
        return tuple(sorted(range(self.ndim), key=lambda i: (self.rotated and i != self.axis, not strides[i], strides[i], i)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return the parts of a copy, for ``copy.deepcopy`` and ``pickle``: the elements in C order, which copies keep."""
        axes = self._memory_order()[::-1]
        back = tuple(axes.index(axis) for axis in range(self.ndim))
        # a mean without the axes along which it is constant, which a copy would fill
        mean = None if self.mean is None else self.mean[tuple(slice(None if step else 1) for step in self.mean.strides)]
        factors = self._descale, self._scale, self.dtype
        return _restored, (self.data.transpose(axes), back, *factors, self.rotated, self.axis, mean, self._of_pages)

    def __copy__(self) -> Fp8Array:
        """Return an independent copy, as of other arrays."""
        return copy.deepcopy(self)

    def __repr__(self) -> str:
        mean = "" if self.mean is None else ", with a mean"
        return f"<Fp8Array {self.dtype} {self.shape}{', rotated' if self.rotated else ''}{mean}>"


def made(
    data: Any,
    descale: Any,
    scale: Any,
    dtype: str,
    *,
    rotated: bool = False,
    axis: int = 0,
    mean: Any = None,
    of_pages: bool = False,
) -> Fp8Array:
    """Return an FP8 array of parts that are known to be valid; one of the factors may be None.

    ``mean`` has the shape of ``data``. ``of_pages``: the data are pages, and all pages of a sequence have the same mean.
    """
    array = Fp8Array.__new__(Fp8Array)
    array.data, array.dtype, array.rotated, array._descale, array._scale = data, dtype, rotated, descale, scale
    array.axis, array._reciprocal, array.mean, array._of_pages = axis, None, mean, of_pages
    return array


def descales(arrays: Sequence[Fp8Array]) -> list[Any]:
    """Return the factors of the elements of arrays; a function for all, because every repeated call needs them."""
    return [x.descale if x._descale is None else x._descale for x in arrays]


def _restored(data: Any, axes: Sequence[int], *given: Any) -> Fp8Array:
    """Return an FP8 array of the parts that its ``__reduce__`` gives."""
    descale, scale, dtype, rotated, axis, mean, of_pages = given
    data = data.transpose(axes)
    mean = None if mean is None else _broadcast(mean, data.shape)
    return made(data, descale, scale, dtype, rotated=rotated, axis=axis, mean=mean, of_pages=of_pages)


def of_factors(data: Any, factors: Any, place: int, dtype: str, *, rotated: bool, mean: Any = None) -> Fp8Array:
    """Return an FP8 array whose scale is an element of an array, with its descale :data:`.fp8_kernels.FACTOR_STEP` later."""
    descale, scale = one_of(factors, place + fp8_kernels.FACTOR_STEP), one_of(factors, place)
    return made(data, descale, scale, dtype, rotated=rotated, mean=mean)


def along_keys(mean: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of a one-key mean with a shape, constant along the keys; on CuPy faster than ``broadcast_to``."""
    if type(mean) is np.ndarray:
        return _broadcast(mean, shape)
    return type(mean)(shape, mean.dtype, mean.data, (*mean.strides[:2], 0, *mean.strides[3:]))


def _broadcast(mean: Any, shape: tuple[int, ...]) -> Any:
    """Return a view of a mean with a shape."""
    return cupy_runtime.cupy().broadcast_to(mean, shape) if cupy_runtime.is_array(mean) else np.broadcast_to(mean, shape)


def _read_mean(mean: Any, data: Any, *, rotated: bool) -> Any:
    """Return the mean that is passed for an array, with its shape."""
    same = cupy_runtime.is_array(mean) if cupy_runtime.is_array(data) else type(mean) is np.ndarray
    if not same or dtype_name(mean.dtype) != "float32":
        kind = "CuPy" if cupy_runtime.is_array(data) else "numpy"
        found = f"a {kind} array of {dtype_name(mean.dtype)}" if same else in_words(mean)
        raise TypeError(f"mean is {found}; it must be a {kind} array of float32, as data is a {kind} array")
    shape, axes = tuple(data.shape), sum(n > 1 for n in data.shape)
    if len(mean.shape) != len(shape) or any(n not in (1, of) for n, of in zip(mean.shape, shape, strict=True)) or axes > 4:
        raise ValueError(f"mean has shape {tuple(mean.shape)} and data {shape}; each of up to four axes must be as long, or 1")
    if rotated:
        raise ValueError("mean is passed and rotated is True; only values have a mean, which are not rotated: omit one of them")
    return _broadcast(mean, shape)


def one_of(array: Any, place: int) -> Any:
    """Return one element of an array as an array ``(1,)``; for CuPy arrays faster than indexing."""
    if type(array) is np.ndarray:
        return array[place : place + 1]
    return type(array)((1,), array.dtype, array.data + place * array.itemsize)


def is_factor(value: Any) -> bool:
    """True if a number is a scale: it and its inverse are normal numbers of float32."""
    return 2.0**-126 <= float(value) <= 2.0**126


def factor(name: str, value: Any, like: Array) -> Any:
    """Return a scale or a descale as a float32 array ``(1,)`` in the memory of an array; raise for other values."""
    on_gpu = cupy_runtime.is_array(like)
    if isinstance(value, (numbers.Real, np.generic)):
        if not is_factor(value):
            raise ValueError(f"{name} is {value}; it and its inverse must be above 0 and finite in float32")
        if not on_gpu:
            return np.full(1, value, np.float32)
        with cupy_runtime.on_device_of(like):
            return cupy_runtime.cupy().full(1, value, np.float32)
    same = cupy_runtime.is_array(value) if on_gpu else type(value) is np.ndarray
    if not same or dtype_name(value.dtype) != "float32" or value.shape != (1,):
        found = f"{dtype_name(value.dtype)} {value.shape}" if hasattr(value, "shape") else type(value).__name__
        kind = "CuPy" if on_gpu else "numpy"
        raise TypeError(f"{name} is {found}; it must be a number, or a {kind} array float32 (1,), as data is a {kind} array")
    return value
