"""The two failures that are not the caller's mistake, and a warning.

Mistakes raise TypeError (type, dtype) and ValueError (shape, value).
"""

from __future__ import annotations


class Unsupported(NotImplementedError):
    """What was asked is right, but this cuDNN or this GPU cannot run it; the message says why and what would help."""


class CudnnError(RuntimeError):
    """A cuDNN call failed, or cuDNN could not be loaded.

    Attributes:
        status: cuDNN's status code, or None where cuDNN was never reached.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def summary(self) -> str:
        """The message without the places where cuDNN was looked for."""
        return str(self).partition(" Searched:")[0]


class DiskCacheWarning(UserWarning):
    """A store of plans cannot be used, or something in it: plans are built anew."""
