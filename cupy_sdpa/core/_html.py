"""HTML for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_CELL = "text-align:left;vertical-align:top"


def escape(text: str) -> str:
    """Escape text for HTML."""
    import html  # slow to import, and needed in notebooks only

    return html.escape(text)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the text of its cells is escaped."""

    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f'<{tag} style="{_CELL}">{escape(cell)}</{tag}>' for cell in cells) + "</tr>"

    return "<table>" + row(columns, "th") + "".join(row(cells, "td") for cells in rows) + "</table>"


def with_title(title: str, body: str) -> str:
    """Return HTML under a title, for the method ``_repr_html_`` of what a notebook shows.

    >>> with_title("4 < 5", "<p>yes</p>")
    '<div><b>4 &lt; 5</b><p>yes</p></div>'
    """
    return f"<div><b>{escape(title)}</b>{body}</div>"


def details(title: str, body: str) -> str:
    """HTML that is expanded by a click on its title."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"
