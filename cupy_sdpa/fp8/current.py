"""Current scaling on the GPU. Conversions of arrays with equal metadata differ in addresses only: they are prepared once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..boundary.layouts import from_own
from ..kernels import fp8_kernels
from ..problem.view import View
from ..runtime import cupy_runtime
from .array import Fp8Array, of_factors

#: The largest number of prepared conversions.
MAX_PREPARED = 1024


class _Result(NamedTuple):
    """An FP8 array to create: its shape, its strides (None for Fortran order), and what :class:`Fp8Array` holds."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    nbytes: int
    rotated: bool
    axis: int


class PreparedConversion(NamedTuple):
    """The launches of conversions, without the addresses.

    Attributes:
        arguments: of the kernels.
        places: where the addresses are in them: of the source, the target, the factors and the lengths of each array.
        grid: of both launches.
        kernels: of the largest magnitudes, and of the conversion.
        results: the arrays to create.
        dtype: the FP8 dtype.
    """

    arguments: Any
    places: Any
    grid: tuple[int, int]
    kernels: tuple[Any, Any]
    results: tuple[_Result, ...]
    dtype: str

    def run(self, arrays: Sequence[Any], lengths: Sequence[Any]) -> list[Fp8Array]:
        """Convert arrays: two launches, without synchronization."""
        ndarray, alloc = cupy_runtime.cupy().ndarray, cupy_runtime.cupy().cuda.alloc
        count, blocks = len(arrays), self.grid[0] * self.grid[1]
        bytes_of_factors = 8 * fp8_kernels.FACTOR_STEP * count
        memory = alloc(bytes_of_factors + 4 * blocks)  # the factors, and the largest magnitudes of the blocks
        factors = ndarray((2 * fp8_kernels.FACTOR_STEP * count,), np.float32, memory)
        address, addresses, made = memory.ptr, [], []
        for i, (x, n, (shape, strides, nbytes, rotated, axis)) in enumerate(zip(arrays, lengths, self.results, strict=True)):
            data = ndarray(shape, np.uint8, alloc(nbytes), strides, "F")
            place = 2 * fp8_kernels.FACTOR_STEP * i
            addresses += [x.data.ptr, data.data.ptr, address + 4 * place, 0 if n is None else n.data.ptr]
            made.append(of_factors(data, factors, place, self.dtype, rotated=rotated, axis=axis))
        arguments = self.arguments.copy()
        arguments["numbers"][self.places] = addresses
        for kernel in self.kernels:
            kernel(self.grid, (fp8_kernels.THREADS,), (arguments, np.int64(address + bytes_of_factors)))
        return made


def prepare(
    arrays: Sequence[Any], dtype: str, rotations: Sequence[int], lengths: Sequence[Any], layout: str | None
) -> PreparedConversion:
    """Prepare the conversion of arrays in the layout of this package.

    Args:
        arrays: ``(D, H, S, B)`` or packed ``(D, H, T)``, of one dtype.
        dtype: the FP8 dtype.
        rotations: the length of the parts of head_dim that are rotated; 1 for none.
        lengths: int32 ``(B,)``, or None.
        layout: the layout of the results; None for that of this package.
    """
    conversions = [
        fp8_kernels.Conversion(x, None, None, part, n) for x, part, n in zip(arrays, rotations, lengths, strict=True)
    ]
    grid, arguments, source = fp8_kernels.launch(conversions)
    array, places = fp8_kernels.ARRAY, []
    for i in range(len(arrays)):
        places += [i * array.size + array.fields.index(name) for name in ("source", "target", "factors", "lengths")]
    results = [_result(name, x, part, layout) for name, x, part in zip("qkv", arrays, rotations, strict=False)]
    both = fp8_kernels.kernel(source, dtype, "amax"), fp8_kernels.kernel(source, dtype, "convert")
    return PreparedConversion(arguments, np.array(places), grid, both, tuple(results), dtype)


def _result(name: str, x: Any, rotation: int, layout: str | None) -> _Result:
    """The result of an array."""
    shape, size = tuple(x.shape), max(x.size, 1)
    if layout is None:
        return _Result(shape, None, size, rotation > 1, 0)
    view = from_own(name, View.dense(name, shape, np.uint8, None), layout)
    return _Result(view.shape, view.strides, size, rotation > 1, len(shape) - 1 if rotation > 1 else 0)


#: The conversions that were prepared, by the metadata of the arrays.
_prepared: dict[Any, PreparedConversion] = {}


def key_of(arrays: Sequence[Any], dtype: str, rotations: Sequence[bool], lengths: Sequence[Any], layout: str | None) -> Any:
    """What a conversion depends on besides the addresses."""
    given = [(type(x), x.dtype, x.shape, x.strides) for x in arrays]
    sizes = [(type(n), n.dtype, n.shape, n.strides) if hasattr(n, "strides") else type(n) for n in lengths]
    return dtype, layout, *rotations, *given, *sizes


def found(key: Any) -> PreparedConversion | None:
    """The conversion that was prepared for a key."""
    return _prepared.get(key)


def keep(key: Any, prepared: PreparedConversion) -> None:
    """Keep a conversion. If :data:`MAX_PREPARED` are kept already, these are dropped first."""
    if len(_prepared) >= MAX_PREPARED:
        _prepared.clear()
    _prepared[key] = prepared
