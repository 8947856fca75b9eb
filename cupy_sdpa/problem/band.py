"""Which keys a query sees by their distance from the diagonal."""

from __future__ import annotations

from typing import NamedTuple

#: What ``window=`` takes: keys before and behind the diagonal, None for no bound; and, if wanted, which diagonal.
Window = tuple[int | None, int | None] | tuple[int | None, int | None, str] | None


class Band(NamedTuple):
    """Which keys a query sees: those from ``left`` before the diagonal to ``right`` behind it, inclusive; None is unbounded.

    The diagonal goes through the first query and the first key, or (bottom right) through the last ones.
    """

    left: int | None = None
    right: int | None = None
    bottom_right: bool = False

    def simplified(self, queries: int, keys: int, *, lengths: bool, used: bool = False) -> Band | None:
        """The same on so many queries and keys, in its simplest form; None where every query sees every key.

        Args:
            queries, keys: how many there are.
            lengths: whether every batch entry has its own.
            used: whether something else asks where the diagonal is.

        >>> Band(right=0, bottom_right=True).simplified(1, 100, lengths=False)        # a single query that sees every key
        >>> Band(left=5, right=500, bottom_right=True).simplified(100, 100, lengths=False)
        Band(left=5, right=None, bottom_right=False)
        """
        left, right, bottom_right = self
        if right is not None and right >= (queries if bottom_right else keys) - 1:
            right = None
        if left is not None and left >= (keys if bottom_right else queries) - 1:
            left = None
        bottom_right = bottom_right and (lengths or queries != keys)
        if left is None and right is None and not (bottom_right and used):
            return None
        return Band(left, right, bottom_right)

    def __str__(self) -> str:
        corner = "bottom right" if self.bottom_right else "top left"
        if self.left is None and self.right == 0:
            return f"causal from the {corner}"
        if self.left is None and self.right is None:
            return f"diagonal from the {corner}"
        sides = ("all" if side is None else side for side in (self.left, self.right))
        return "window of {} keys before and {} behind the diagonal from the {}".format(*sides, corner)
