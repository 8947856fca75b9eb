"""Types in public signatures."""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypeVar

#: The axis orders that ``layout=`` accepts.
Layout = Literal["dhsb", "dht", "bshd", "bhsd", "sbhd", "thd"]
#: The option ``engine``.
Engine = Literal["numpy", "cudnn", "cupy"] | None


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


#: The type of an array; a result has the same type, shape and dtype.
ArrayT = TypeVar("ArrayT", bound=Array)
#: The type of an array that is passed as ``stats``, and returned.
StatsT = TypeVar("StatsT", bound=Array)
