"""The file of a trace: it is opened, read and appended to without waiting, and contains whole lines only."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

#: The largest trace in bytes. A line has a few hundred bytes.
MAX_BYTES = 64 << 20
#: How the line of a problem begins.
_BEGIN = b'{"call": '


def open_trace(path: Path, flags: int) -> int:
    """Open a trace.

    Args:
        path: the file.
        flags: as for :func:`os.open`.

    Raises:
        OSError: the file cannot be opened, is not a regular file, or is too large for a trace.
    """
    # A pipe is not waited for, and a device is not read.
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0), 0o644)
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    if status.st_size > MAX_BYTES:
        os.close(file)
        raise OSError(
            errno.EFBIG, f"it has {status.st_size >> 20} MiB, and a trace has at most {MAX_BYTES >> 20} MiB", str(path)
        )
    return file


def read_trace_file(path: Path) -> bytes:
    """The contents of a trace.

    Raises:
        OSError: as :func:`open_trace`; or the file cannot be read.
    """
    with open(open_trace(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)), "rb") as file:
        return file.read(MAX_BYTES)


class TraceFile:
    """A trace that lines are appended to; several processes may append to it.

    Args:
        path: the file; it is created if it does not exist.

    Attributes:
        lines: the lines that the file has or was given.

    Raises:
        OSError: as :func:`open_trace`; or the file has other contents than a trace.
    """

    def __init__(self, path: Path) -> None:
        self._file = open_trace(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0))
        with open(os.dup(self._file), "rb") as file:
            content = file.read(MAX_BYTES)
        if content and not content.startswith(_BEGIN):
            os.close(self._file)
            raise OSError(errno.EINVAL, "it has other contents than a trace", str(path))
        self.lines = set(content.splitlines())
        self._separator = b"" if not content or content.endswith(b"\n") else b"\n"  # the last line was not completed

    def append(self, line: bytes) -> None:
        """Append a line. After an error the file has the lines that it had before.

        Raises:
            OSError: the line cannot be written.
        """
        before, written = os.fstat(self._file).st_size, 0
        text = self._separator + line + b"\n"
        try:
            while written < len(text):  # one write, unless the disk is nearly full
                written += os.write(self._file, text[written:])
        except OSError:
            if written and os.fstat(self._file).st_size == before + written:
                os.ftruncate(self._file, before)
            raise
        self._separator = b""
        self.lines.add(line)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
