"""Types in public signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np

#: The orders of axes that calls take.
Layout = Literal["dhsb", "dht", "bshd", "bhsd", "sbhd", "thd"]


class Array(Protocol):
    """A numpy or CuPy array: the attributes of both that calls use."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The length of each dimension."""

    @property
    def ndim(self) -> int:
        """The number of dimensions."""

    @property
    def dtype(self) -> Any:
        """The numpy dtype."""

    @property
    def strides(self) -> tuple[int, ...]:
        """The bytes from one element to the next in each dimension."""

    @property
    def nbytes(self) -> int:
        """The bytes of all elements."""

    @property
    def T(self) -> Any:  # noqa: N802
        """The array with its dimensions in reverse order."""

    def __getitem__(self, key: Any, /) -> Any: ...

    def __array_wrap__(self, array: np.memmap[tuple[Any, ...], np.dtype[np.float32]], /) -> Any:
        """A numpy array as an array of this type. A memmap, because this method of a memmap takes no other arrays."""


#: The type of an array; a result has the same type, shape and dtype.
ArrayT = TypeVar("ArrayT", bound=Array)
#: The type of an array that is passed as ``stats``, and returned.
StatsT = TypeVar("StatsT", bound=Array)
#: The type of the float32 arrays that a library makes, such as the log-sum-exp of arrays of another dtype.
Float32T = TypeVar("Float32T")
Float32T_co = TypeVar("Float32T_co", covariant=True)


class ArrayOf(Array, Protocol[Float32T_co]):
    """An array, and the type of the float32 arrays of its library."""

    def __array_wrap__(self, array: np.memmap[tuple[Any, ...], np.dtype[np.float32]], /) -> Float32T_co:
        """A float32 array as an array of this type, from which type checkers infer the type."""
