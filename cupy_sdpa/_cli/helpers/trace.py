"""Traces as arguments of commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .console import CommandError, file_error

if TYPE_CHECKING:
    from ...check.traced.entry import Entry


def read_entries(path: Path) -> list[Entry]:
    """The entries of a trace.

    Raises:
        CommandError: the file cannot be read, or is not a trace.
    """
    from ...check.traced.entry import read_trace

    try:
        return read_trace(path)
    except OSError as error:
        raise CommandError(file_error(error)) from error
    except ValueError as error:
        raise CommandError(str(error)) from error
