"""Exceptions and warnings. Invalid arguments raise TypeError (type, dtype) or ValueError (shape, value)."""

from __future__ import annotations

from typing import Any


def in_words(x: Any) -> str:
    """Describe an object that is not a valid argument, for messages.

    >>> in_words(None), in_words([1]), in_words(2)
    ('None', 'a list', 'an int')
    """
    if x is None:
        return "None"
    module, _, _ = type(x).__module__.partition(".")
    name = type(x).__qualname__ if module in ("builtins", "cupy_sdpa") else f"{type(x).__module__}.{type(x).__qualname__}"
    return f"{'an' if name[0] in 'aeiou' or name.startswith('Fp8') else 'a'} {name}"


#: The command that installs what the GPU needs; the package is on no index.
INSTALL_FOR_GPU = "pip install -e '.[cuda12]' (or [cuda13]) in a clone of the repository"


class Unsupported(NotImplementedError):
    """The arguments are valid, but this cuDNN version or GPU does not support them; the message gives reason and fix.

    >>> raise Unsupported("weights cannot be computed with page_table; gather the pages first")
    Traceback (most recent call last):
    cupy_sdpa.core.errors.Unsupported: weights cannot be computed with page_table; gather the pages first
    """


class CudnnError(RuntimeError):
    """A cuDNN call failed, or cuDNN could not be loaded.

    Attributes:
        status: cuDNN's status code, or None if no cuDNN function was called.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def summary(self) -> str:
        """The message without the list of searched paths."""
        return str(self).partition(" Searched:")[0]


class DiskCacheWarning(UserWarning):
    """The disk cache, or an entry of it, cannot be used; plans are compiled instead."""
