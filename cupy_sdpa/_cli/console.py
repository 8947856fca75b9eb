"""How the commands speak: labelled lines that a terminal has room for, and failures that are one line."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import textwrap
from collections.abc import Iterator
from contextvars import ContextVar

#: Columns of the widest line, where a terminal has as many, and of the labels at its beginning.
WIDTH, LABEL = 100, 10
#: Columns of a bar of progress.
BAR = 30


#: What a command has said so far, where that is printed as JSON in the end.
_recorded: ContextVar[list[dict[str, str]] | None] = ContextVar("recorded", default=None)


class Help(argparse.RawDescriptionHelpFormatter):
    """Fills what is one line, and leaves as it is what is several, such as examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return super()._fill_text(text, width, indent) if "\n" in text else textwrap.fill(text, width)


class CommandError(Exception):
    """A command cannot do what was asked; the message is for the person who asked."""


def width() -> int:
    """Columns of the terminal, or what ``COLUMNS`` says, and no more than lines are to have."""
    return min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)


def positive(value: str) -> int:
    """A whole number from 1 on, of an option."""
    try:
        number = int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{value!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def add_json(parser: argparse.ArgumentParser) -> None:
    """Give a command that speaks by :func:`say` the option ``--json``."""
    parser.add_argument("--json", action="store_true", dest="say_json", help="print what is said as a JSON list")


@contextlib.contextmanager
def spoken_as(arguments: argparse.Namespace) -> Iterator[None]:
    """What is said inside is printed as the arguments want it: at once, or as JSON in the end."""
    if not getattr(arguments, "say_json", False):
        yield
        return
    said: list[dict[str, str]] = []
    token = _recorded.set(said)
    try:
        yield
    finally:
        _recorded.reset(token)
    if said:  # what speaks JSON by itself says nothing
        print(json.dumps(said, indent=1, ensure_ascii=False))


def record(**facts: str) -> bool:
    """Keep what is said for the end, if it is wanted as JSON; whether it is."""
    said = _recorded.get()
    if said is not None:
        said.append(facts)
    return said is not None


def say(label: str, text: str) -> None:
    """Print ``text`` behind a label, continued in the same column where it is long."""
    if record(what=label, text=text):
        return
    begin = f"{label:<{LABEL}}"
    print(textwrap.fill(text, width(), initial_indent=begin, subsequent_indent=" " * LABEL, break_on_hyphens=False))


def show(text: str) -> None:
    """Print lines, those that are too long continued two columns to the right of where they begin."""
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())] + "  "
        # what is aligned stays so: only what is too long is touched
        print(line if len(line) <= width() else textwrap.fill(line, width(), subsequent_indent=indent, break_on_hyphens=False))


def told(error: OSError) -> str:
    """What went wrong with which file, without the number that the system has for it."""
    return f"{error.filename}: {error.strerror}" if error.filename else str(error)


def one_line(text: str) -> str:
    """The lines of a text, joined by semicolons; what cannot be printed is escaped.

    >>> one_line("no engine:\\n  engine 8 said no\\n  engine 6 said no")
    'no engine: engine 8 said no; engine 6 said no'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    joined = ""
    for line in lines:
        joined += line if not joined else f" {line}" if joined.endswith(":") else f"; {line}"
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def milliseconds(seconds: float) -> str:
    """A time for people, with three digits.

    >>> milliseconds(0.0000234), milliseconds(0.0423), milliseconds(12.3)
    ('0.0234 ms', '42.3 ms', '12300 ms')
    """
    value = seconds * 1e3
    return f"{value:.0f} ms" if value >= 100 else f"{value:.3g} ms"


class Progress:
    """A bar on stderr, where that is a terminal; called with (how many are done, how many there are).

    Args:
        title: what is being done.
    """

    def __init__(self, title: str) -> None:
        self._title, self._shown = title, sys.stderr.isatty()

    def __call__(self, done: int, total: int) -> None:
        """Show how far it is."""
        if self._shown:
            filled = BAR * done // max(total, 1)
            bar = "#" * filled + "." * (BAR - filled)
            print(f"\r{self._title} [{bar}] {done} of {total}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
