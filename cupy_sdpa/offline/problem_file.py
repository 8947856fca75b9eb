"""Problems in a file, one JSON object per line. Several running programs may append to the same file."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable

from .. import Problem

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

#: The largest file in bytes. A line has about a thousand bytes.
MAX_BYTES = 64 << 20
#: How every line begins.
_BEGIN = b'{"q": {'


def read(path: str | os.PathLike[str]) -> list[Problem]:
    """Return the problems in a file, without duplicates."""
    import json  # takes a part of the time of importing the package

    with open(_open(path, os.O_RDONLY), "rb") as file:
        lines = file.read(MAX_BYTES).splitlines()
    found: dict[Problem, None] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found[Problem.of_data(json.loads(line))] = None
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is not a problem: {error}") from None
    if not found:
        raise ValueError(f"{path} has no problem")
    return list(found)


def add(path: str | os.PathLike[str], problems: Iterable[Problem]) -> int:
    """Add problems to a file, which is created if it does not exist; those that it has are not written again.

    Returns:
        The number of problems in the file.
    """
    import json

    lines = dict.fromkeys(json.dumps(problem.as_data(), allow_nan=False).encode() for problem in problems)
    with open(_open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT), "r+b", buffering=0) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        content = file.read(MAX_BYTES)
        if content and not content.startswith(_BEGIN):
            raise OSError(errno.EINVAL, "the file does not contain problems", str(path))
        known = set(content.splitlines())
        added = [line for line in lines if line not in known]
        text = b"\n" * (bool(content) and not content.endswith(b"\n")) + b"".join(line + b"\n" for line in added)
        try:
            while text:  # one write, unless the disk is nearly full
                text = text[file.write(text) :]
        except OSError:
            os.ftruncate(file.fileno(), len(content))
            raise
    return len(known) + len(added)


def _open(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file of problems. A pipe is not waited for, and a device is not read."""
    file = os.open(path, flags | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0), 0o644)
    status, reason = os.fstat(file), ""
    if not stat.S_ISREG(status.st_mode):
        reason = "it is not a regular file"
    elif status.st_size > MAX_BYTES:
        reason = f"it has {status.st_size >> 20} MiB, and a file of problems has at most {MAX_BYTES >> 20} MiB"
    elif flags & os.O_RDWR and hasattr(os, "geteuid") and status.st_uid != os.geteuid():
        reason = "it belongs to another user"
    if reason:
        os.close(file)
        raise OSError(errno.EINVAL, reason, str(path))
    return file
