"""A picture of a key/value cache's pages for notebooks."""

from __future__ import annotations

from .page_tables import Pages

#: The most pages of a sequence, and the most sequences, that are drawn.
_PAGES, _SEQUENCES = 64, 32
#: The colors of pages with one owner, with several owners, and of free rows.
_OWN, _SHARED, _FREE = "#4c78a8", "#f58518", "#e8e8e8"
#: Where the pages begin, and the height of a row.
_LEFT, _ROW = 9.0, 1.4


def picture(pages: Pages) -> str:
    """Return an SVG picture: a row of pages for each sequence, and one of the free pages. Shared pages are orange.

    The last page of a sequence is filled up to its last token. Long rows end in the number of pages that are not drawn.
    """
    rows = []
    for b, (own, length) in enumerate(zip(pages.by_sequence[:_SEQUENCES], pages.lengths.tolist(), strict=False)):
        filled = [(_SHARED if pages.owners[page] > 1 else _OWN, min(1, length / pages.size - i)) for i, page in enumerate(own)]
        rows.append((f"{b}: {length} token{'s' * (length != 1)}", filled))
    if hidden := len(pages.by_sequence) - len(rows):
        rows.append((f"{hidden} more sequences", []))
    rows.append((f"{len(pages.free)} free", [(_FREE, 1)] * len(pages.free)))
    width = _LEFT + min(_PAGES, max(len(filled) for _, filled in rows)) + 4
    parts = [part for y, (name, filled) in enumerate(rows) for part in _row(y * _ROW, name, filled)]
    height = len(rows) * _ROW
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{14 * width:g}" '
        f'height="{14 * height:g}" font-size="0.9" font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _row(y: float, name: str, filled: list[tuple[str, float]]) -> list[str]:
    """Return the name of a row, and its pages: their colors, and how full they are."""
    parts = [f'<text x="0" y="{y + 0.95:g}">{name}</text>']
    for x, (color, full) in enumerate(filled[:_PAGES]):
        place = f'x="{_LEFT + x:g}" y="{y:g}" height="1.2"'
        parts.append(f'<rect {place} width="0.9" fill="{_FREE}"/><rect {place} width="{0.9 * full:g}" fill="{color}"/>')
    if hidden := len(filled) - _PAGES:
        parts += [f'<text x="{_LEFT + _PAGES:g}" y="{y + 0.95:g}">+{hidden}</text>'] * (hidden > 0)
    return parts
