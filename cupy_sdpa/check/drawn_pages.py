"""Paged keys and values: pools of pages and a page table for the dense keys and values of every sequence.

Pages that no sequence uses are NaN. Rows of a last page after the length are finite, up to 1e4.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .case import Case

#: The number of pages that no table lists before the lengths.
UNUSED = 3
#: Part of the seed of the page table.
_TABLE_STREAM = 78
#: The largest magnitude of the rows after the lengths.
_GARBAGE = 1e4
#: An entry of the page table that is not a page.
LARGE_ENTRY = 2**30


def pool_shape(case: Case, name: str) -> tuple[int, ...]:
    """The shape of the pages of k or v."""
    assert case.paged
    pages = case.skv // case.paged.page * case.b + UNUSED
    return (case.dv if name == "v" else case.d, case.hkv, case.paged.page, pages)


def build_pages(case: Case, index: int, dense: dict[str, Any], lengths: Any) -> dict[str, Any]:
    """Distribute the keys and values of every sequence over pages.

    Args:
        case: the case.
        index: the set of values, which determines the pages of every sequence.
        dense: k and v as dense arrays; keys of shared pages are changed.
        lengths: the lengths of the keys, ``(B,)``.

    Returns:
        The arrays ``k``, ``v`` and ``page_table``.
    """
    assert case.paged
    rng = np.random.default_rng([case.seed, index, _TABLE_STREAM])
    page, width = case.paged.page, case.skv // case.paged.page
    count = width * case.b + UNUSED
    pages = rng.permutation(count)[: count - UNUSED].reshape(width, case.b).astype(np.int32)
    if case.paged.shared or "shared_prefix" in case.options:
        _share(case, pages, dense, lengths)
    unowned = np.setdiff1d(np.arange(count), pages)
    after_length: dict[str, Any] = {
        "large": [LARGE_ENTRY], "negative": [-1], "unowned": unowned, "mixed": [LARGE_ENTRY, -1, *unowned],
    }  # fmt: skip
    table = np.asfortranarray(rng.choice(after_length[case.paged.rest], pages.shape).astype(np.int32))
    arrays: dict[str, Any] = {"page_table": table}
    for name in "kv":
        garbage = _GARBAGE * (2 * rng.random(pool_shape(case, name), np.float32) - 1)
        arrays[name] = np.asfortranarray(garbage.astype(dense[name].dtype))
    unused = np.ones(count, bool)
    for b, length in enumerate(lengths):
        used = pages[: -(-int(length) // page), b]
        table[: len(used), b] = used
        unused[used] = False
        j = np.arange(int(length))
        for name in "kv":
            arrays[name][:, :, j % page, pages[j // page, b]] = dense[name][:, :, j, b]
    for name in "kv":
        arrays[name][..., unused] = np.nan
    return arrays


def _share(case: Case, pages: Any, dense: dict[str, Any], lengths: Any) -> None:
    """Give every sequence the first full pages of sequence 0."""
    assert case.paged
    page = case.paged.page
    for b in range(1, case.b):
        count = (int(min(lengths[0], lengths[b])) // page + 1) // 2
        count = max(count, case.shared_keys // page) if "shared_prefix" in case.options else count
        pages[:count, b] = pages[:count, 0]
        for name in "kv":
            dense[name][:, :, : count * page, b] = dense[name][:, :, : count * page, 0]
