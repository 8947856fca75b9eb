"""Markdown as a terminal shows it: headings, paragraphs and tables in so many columns."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

#: Between the columns of a table.
_GAP = "  "
_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)|<(https?://[^>]*)>")
_BAR = re.compile(r"(?<!\\)\|")


def plain(markdown: Iterable[str], width: int) -> Iterator[str]:
    """The lines of a page, in at most so many columns but for words that are longer."""
    every = "\n".join(line for line in markdown if not line.startswith("<!--"))
    for kind, lines in itertools.groupby(re.sub(r"\n{3,}", "\n\n", every).split("\n"), key=_kind):
        if kind == "table":
            rows = [_cells(line) for line in lines]
            yield from table([row for row in rows if not set("".join(row)) <= {"-", ":"}], width)
        else:
            for line in lines:
                yield from _text(line, width)


def _kind(line: str) -> str:
    return "table" if line.startswith("|") else "text"


def _cells(line: str) -> list[str]:
    return [_inline(cell.strip()) for cell in _BAR.split(line.strip())[1:-1]]


def _inline(text: str) -> str:
    """Without what marks code, links and escapes.

    >>> _inline(r"`a \\| b`, see [design](design.md) or <https://example.org>")
    'a | b, see design or https://example.org'
    """
    return _LINK.sub(lambda found: found[1] or found[2], text).replace("\\|", "|").replace("`", "")


def _text(line: str, width: int) -> list[str]:
    marks, _, title = line.partition(" ")
    if marks and set(marks) == {"#"}:
        return [title, ("=" if marks == "#" else "-") * len(title)]
    return _filled(_inline(line), width)


def _filled(text: str, width: int, *, hyphens: bool = False) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=hyphens and "://" not in text) or [""]


def table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """A table, the first row its heads: cells are continued below where it is too wide; if that is no help, a paragraph a row.

    >>> print(*table([["", "forward", "gradients"], ["causal", "yes", "on H200 and B200"]], 28), sep="\\n")
            forward  gradients
    causal  yes      on H200 and
                     B200
    >>> print(*table([["", "forward", "gradients"], ["causal", "yes", "no"]], 20), sep="\\n")
    causal: forward yes;
      gradients no
    """
    columns = list(zip(*rows, strict=True))
    least = [max(len(part) for cell in column for part in _filled(cell, 1, hyphens=True)) for column in columns]
    widths = [max(map(len, column)) for column in columns]
    room = width - len(_GAP) * (len(columns) - 1)
    if sum(least) > room:
        heads, *others = rows
        for row in others:
            told = "; ".join(f"{head} {cell}" for head, cell in zip(heads[1:], row[1:], strict=True) if cell)
            yield from textwrap.wrap(f"{row[0]}: {told}", width, subsequent_indent="  ", break_on_hyphens=False)
        return
    while sum(widths) > room:  # the first column says what a row is about: it is the last to be narrowed
        narrowed = [at for at in range(1, len(widths)) if widths[at] > least[at]]
        widths[max(narrowed, key=widths.__getitem__, default=0)] -= 1
    for row in rows:
        cells = [_filled(cell, size, hyphens=True) for cell, size in zip(row, widths, strict=True)]
        for line in itertools.zip_longest(*cells, fillvalue=""):
            yield _GAP.join(part.ljust(size) for part, size in zip(line, widths, strict=True)).rstrip()
