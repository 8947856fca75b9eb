"""Sparse masks: functions that run on NumPy, CuPy and PyTorch arrays alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_sdpa import zoo

#: The number of queries and keys of a block, the average length of a document, and the size of a window.
BLOCK, DOCUMENT, WINDOW = 128, 1024, 1024


class Pattern(NamedTuple):
    """A mask function, and its arrays for a length and a random generator."""

    name: str
    mask_mod: Callable[..., Any]
    tensors: Callable[[int, np.random.Generator], dict[str, Any]] = lambda length, rng: {}


def same_document(b: Any, h: Any, q_idx: Any, kv_idx: Any, document: Any) -> Any:
    """Query and key are in the same document; ``document`` (Sq,)."""
    return document[q_idx] == document[kv_idx]


def prefix(b: Any, h: Any, q_idx: Any, kv_idx: Any, end: Any) -> Any:
    """``j <= i or j < end``, ``end`` (1,)."""
    return (kv_idx < end[0]) | (q_idx >= kv_idx)


def listed(b: Any, h: Any, q_idx: Any, kv_idx: Any, blocks: Any) -> Any:
    """The blocks of query and key are listed; ``blocks`` bool (query blocks, key blocks)."""
    return blocks[q_idx // BLOCK, kv_idx // BLOCK]


def random_documents(length: int, rng: np.random.Generator) -> dict[str, Any]:
    """Documents of random lengths, which are no multiples of the block size."""
    return {"document": np.sort(rng.integers(0, length // DOCUMENT, length)).astype(np.int32)}


def equal_documents(length: int, rng: np.random.Generator) -> dict[str, Any]:
    """Documents of equal lengths."""
    return {"document": (np.arange(length) // DOCUMENT).astype(np.int32)}


def one_in_eight(length: int, rng: np.random.Generator) -> dict[str, Any]:
    """Random blocks, one in eight, and those on the diagonal."""
    count = length // BLOCK
    return {"blocks": (rng.random((count, count)) < 1 / 8) | np.eye(count, dtype=bool)}


PATTERNS = (
    Pattern("document", same_document, random_documents),
    Pattern("causal_document", zoo.causal_document, lambda n, rng: {"document_id": random_documents(n, rng)["document"]}),
    Pattern("window", zoo.sliding_window(WINDOW - 1)),
    Pattern("prefix", prefix, lambda n, rng: {"end": np.array([n // 4], np.int32)}),
    Pattern("dilated", zoo.dilated(WINDOW, 2)),
    Pattern("neighbourhood", zoo.image_window(BLOCK, 8)),
    Pattern("block_diagonal", same_document, equal_documents),
    Pattern("random", listed, one_in_eight),
)
