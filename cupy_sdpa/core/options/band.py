"""The options ``causal`` and ``window``: causal masks and sliding windows are one band of keys."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

from .values import is_one_of


class Band(NamedTuple):
    """The keys that a query attends to: at most ``left`` before and ``right`` after the diagonal; None is unbounded.

    Query i is on the diagonal with key i (top-left alignment), or with key ``i + Skv - Sq`` (bottom-right alignment).

    >>> Band(left=5, right=3).intersected(Band(right=0))
    Band(left=5, right=0, bottom_right=False)
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def simplified(self, queries: int, keys: int, *, lengths: bool, needs_diagonal: bool = False) -> Band | None:
        """Return the simplest band with the same mask for some lengths; None if every query attends to every key.

        ``lengths``: batch items have their own lengths. ``needs_diagonal``: an option measures positions from the diagonal.

        >>> Band(right=0, bottom_right=True).simplified(1, 100, lengths=False)  # one query, which attends to every key
        >>> Band(left=5, right=500, bottom_right=True).simplified(100, 100, lengths=False)
        Band(left=5, right=None, bottom_right=False)
        """
        left, right, bottom_right = self
        if right is not None and right >= (queries if bottom_right else keys) - 1:
            right = None
        if left is not None and left >= (keys if bottom_right else queries) - 1:
            left = None
        bottom_right = bottom_right and (lengths or queries != keys)
        if left is None and right is None and not (bottom_right and needs_diagonal):
            return None
        return Band(left, right, bottom_right)

    def intersected(self, other: Band | None) -> Band:
        """Return the band of the keys that are in both bands, which must have the same diagonal; None is no other band."""
        if other is None:
            return self
        pairs = (self.left, other.left), (self.right, other.right)
        left, right = (min((side for side in pair if side is not None), default=None) for pair in pairs)
        return Band(left, right, self.bottom_right)

    def moved(self, shift: int) -> Band:
        """Return the band whose diagonal is ``shift`` keys before this one, with the same mask.

        >>> Band(left=5, right=0).moved(2)
        Band(left=3, right=2, bottom_right=False)
        """
        left = None if self.left is None else self.left - shift
        right = None if self.right is None else self.right + shift
        if (left is not None and left < 0) or (right is not None and right < 0):
            raise ValueError(f"the band ({left}, {right}) excludes the diagonal")
        return Band(left, right, self.bottom_right)

    def __str__(self) -> str:
        corner = "bottom right" if self.bottom_right else "top left"
        if self.left is None and self.right == 0:
            return f"causal from the {corner}"
        if self.left is None and self.right is None:
            return f"diagonal from the {corner}"
        sides = ("all" if side is None else side for side in (self.left, self.right))
        return "window of {} keys before and {} after the diagonal from the {}".format(*sides, corner)


def read_band(causal: Any, window: Any) -> Band | None:
    """Read the band of keys that a query attends to: the right bound of ``causal`` and the bounds of ``window``."""
    causal = False if causal is None else causal
    if not is_one_of(causal, (False, True, "top_left", "bottom_right")):
        raise ValueError(f"causal is {causal!r}; it must be False, True, 'top_left' or 'bottom_right'")
    bottom_right = causal == "bottom_right"
    if window is None:
        return Band(right=0, bottom_right=bottom_right) if causal else None
    if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
        raise TypeError(f"window is {window!r}; it must be (left, right) or (left, right, 'bottom_right')")
    for side in window[:2]:
        if side is not None and (isinstance(side, bool) or not isinstance(side, numbers.Integral) or int(side) < 0):
            raise ValueError(f"window is {window!r}; left and right are numbers of keys, 0 or more, or None for no bound")
    left, right = (None if side is None else int(side) for side in window[:2])
    corner = window[2] if len(window) == 3 else "bottom_right" if bottom_right else "top_left"
    if not is_one_of(corner, ("top_left", "bottom_right")):
        raise ValueError(f"window is {window!r}; its third entry must be 'top_left' or 'bottom_right'")
    if causal and (corner == "bottom_right") != bottom_right:
        raise ValueError(f"causal is {causal!r} and window is {window!r}: they name different diagonals")
    return Band(left, 0 if causal else right, corner == "bottom_right")


def band_options(band: Band | None) -> dict[str, Any]:
    """Return the options of a call with a band: the inverse of :func:`read_band`."""
    return {} if band is None else {"window": (band.left, band.right, "bottom_right" if band.bottom_right else "top_left")}


def read(options: Mapping[str, Any]) -> Band | None:
    """Read the band from the options of a call."""
    return read_band(options.get("causal", False), options.get("window"))
