"""Output of the commands: labeled lines that fit the terminal, progress bars, and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Self

from .. import CudnnError

#: The maximum width of a line, and the width of the labels at the start of lines.
WIDTH, LABEL = 100, 10
#: The width of a progress bar.
BAR = 30
#: The seconds after which a step that is still running is shown on a terminal, and between two updates.
WAIT, UPDATE = 1.0, 0.5

#: The result so far if it is printed as a JSON object at the end; else None.
_result: ContextVar[dict[str, Any] | None] = ContextVar("result", default=None)


class Help(argparse.RawDescriptionHelpFormatter):
    """A help formatter that wraps single-line texts and does not change multi-line texts, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(text, width, indent) if "\n" in text else textwrap.fill(text, width)


def pip_install(extra: str, other: str = "") -> str:
    """Return the command that installs an extra of this package, or an ``other`` one, for messages; the package is on no index.

    >>> pip_install("plot")
    "pip install -e '.[plot]' in a clone of the repository"
    """
    return f"pip install -e '.[{extra}]'{f' (or [{other}])' if other else ''} in a clone of the repository"


class CommandError(Exception):
    """A command cannot run; the message is printed as one line."""


def width() -> int:
    """Return the width of the terminal (or of ``COLUMNS``), at most ``WIDTH``."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


@contextlib.contextmanager
def command_errors() -> Iterator[None]:
    """Raise errors of the package in the block, of files, versions, shapes and options, as errors of the command."""
    try:
        yield
    except CudnnError as error:
        raise CommandError(brief(error)) from error
    except OSError as error:
        raise CommandError(file_error(error)) from error
    except (RuntimeError, TypeError, ValueError) as error:
        raise CommandError(str(error)) from error


def brief(error: CudnnError) -> str:
    """Return the message of a failure without the list of searched places, which ``info`` prints."""
    more = " `python -m cupy_sdpa info` lists the searched places" if error.summary != str(error) else ""
    return error.summary + more


def positive(value: str) -> int:
    """Parse an option whose value is a positive integer."""
    try:
        number = int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is not an integer") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def output_file(value: str) -> Path:
    """Parse an option whose value is a file to write; leaves no new file behind. CommandError if it cannot be written."""
    target = Path(os.path.realpath(value))  # keeps a symbolic link
    is_new = not target.exists()
    try:
        target.open("a").close()
    except OSError as error:
        raise CommandError(f"cannot write {value}: {error.strerror}") from None
    if is_new:
        target.unlink(missing_ok=True)
    return Path(value)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json`` to a command that reports its result by :func:`result`."""
    parser.add_argument("--json", action="store_true", dest="json_result", help="print one JSON object instead of text")


@contextlib.contextmanager
def output_of(arguments: argparse.Namespace) -> Iterator[None]:
    """Print the text of the block at once; or with ``--json`` its result as one JSON object, unless the block fails."""
    if not getattr(arguments, "json_result", False):
        yield
        return
    facts: dict[str, Any] = {}
    token = _result.set(facts)
    try:
        yield
    finally:
        _result.reset(token)
    print(json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False))


def result(**facts: Any) -> bool:
    """Add facts to the JSON object if the output is JSON; returns whether it is. docs/command_line.md lists them."""
    if (found := _result.get()) is None:
        return False
    found |= facts
    return True


def print_labeled(label: str, text: str) -> None:
    """Print a label and a text; long texts continue in the text's column."""
    if result():
        return
    begin = f"{label} ".ljust(LABEL)
    print(textwrap.fill(text, width(), initial_indent=begin, subsequent_indent=" " * LABEL, break_on_hyphens=False))


def print_wrapped(text: str) -> None:
    """Print lines, unless the output is JSON; long lines continue two columns to the right of their indentation."""
    for line in [] if result() else text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        # only long lines are wrapped, which keeps aligned columns
        print(line if len(line) <= width() else textwrap.fill(line, width(), subsequent_indent=indent, break_on_hyphens=False))


def file_error(error: OSError) -> str:
    """Return the file and the reason, without the error number."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def one_line(text: str) -> str:
    """Return the lines of a text joined by semicolons, with unprintable characters escaped.

    >>> one_line("no engine:\\n  engine 8 failed\\n  engine 6 failed")
    'no engine: engine 8 failed; engine 6 failed'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = ""
    for line in lines:
        joined += line if not joined else f" {line}" if joined.endswith(":") else f"; {line}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def counted(number: int, noun: str) -> str:
    """Return a number and a noun.

    >>> counted(1, "problem"), counted(0, "call")
    ('1 problem', '0 calls')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def milliseconds(seconds: float) -> str:
    """Return a time in milliseconds with three significant digits.

    >>> milliseconds(0.0000234), milliseconds(0.0423), milliseconds(12.3)
    ('0.0234 ms', '42.3 ms', '12300 ms')
    """
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


class StatusLine:
    """A line on stderr that is overwritten, if stderr is a terminal; it is cleared at the end."""

    def __init__(self) -> None:
        self.visible = sys.stderr.isatty()

    def show(self, text: str) -> None:
        """Replace the line."""
        if self.visible:
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")


class Progress(StatusLine):
    """A progress bar after a title; called with the number of finished steps and their total."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title

    def __call__(self, done: int, total: int) -> None:
        """Draw the bar."""
        filled = BAR * done // max(total, 1)
        self.show(f"{self._title} [{'#' * filled}{'.' * (BAR - filled)}] {done} of {total}")


@contextlib.contextmanager
def working(title: str) -> Iterator[None]:
    """Show how long the block takes, from one second on, after a title such as "planning"."""
    with StatusLine() as status:
        done, started = threading.Event(), time.monotonic()

        def show() -> None:
            wait = WAIT
            while not done.wait(wait):
                wait = UPDATE
                status.show(f"{title}: {time.monotonic() - started:.0f} s")

        thread = threading.Thread(target=show, daemon=True)
        if status.visible:
            thread.start()
        try:
            yield
        finally:
            done.set()
            if status.visible:
                thread.join()
