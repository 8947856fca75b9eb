"""Input for the demo: the tokens of a text, a word vector for each token, and q, k and v computed from these vectors.

Nothing is trained. The vector of a word depends on the words near it: the singular vectors (Levy and Goldberg 2014) of
positive pointwise mutual information (Church and Hanks 1990). Positions are encoded by the sinusoids of Vaswani et al. 2017,
section 3.5. Everything is deterministic.
"""

from __future__ import annotations

import importlib.resources
import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

#: Words to print first, if the text contains them.
INTERESTING = ("marmalade", "watch", "garden", "curiosity", "rabbit", "pictures")
#: ASCII replacements for the text's non-ASCII characters, which some terminals cannot print.
_ASCII = str.maketrans({"’": "'", "‘": "'", "—": "-"})
#: The maximum dimension of a word vector. With more, unrelated words get nearly orthogonal vectors, and few words are similar.
WORD_DIMENSIONS = 48
#: Words at most this many positions apart count as neighbors.
NEIGHBORS = 4
#: The score of a word with itself, in the sharpest and in the least sharp head of a group.
SHARPEST, BLUNTEST = 10.0, 5.0
#: The share of the position in a key, in the first and in the last key head; the rest is the word.
FIRST_POSITION_SHARE, LAST_POSITION_SHARE = 0.1, 0.8


def title() -> str:
    """The title and the author of the text."""
    return " ".join(_text().split("\n")[:2]).translate(_ASCII)


def tokens() -> list[str]:
    """The words and punctuation marks of the text, in lower case and ASCII."""
    return re.findall(r"\w+(?:['-]\w+)*|[^\w\s]", _text().lower().translate(_ASCII))


def _text() -> str:
    return importlib.resources.files(__package__).joinpath("alice.txt").read_text(encoding="utf-8")


def word_vectors(words: list[str], dimensions: int) -> Array:
    """A unit vector for every position of the text, of at most some dimensions; related words get similar vectors."""
    _, ids = np.unique(words, return_inverse=True)
    counts = np.zeros((ids.max() + 1,) * 2)
    for distance in range(1, NEIGHBORS + 1):
        np.add.at(counts, (ids[:-distance], ids[distance:]), 1 / distance)
    counts += counts.T
    # PPMI = max(0, log p(a, b) / (p(a) p(b))); words that are never neighbors give log 0
    totals = counts.sum(axis=1)
    with np.errstate(divide="ignore"):
        information = np.log(counts * totals.sum() / np.outer(totals, totals))
    # the matrix is symmetric: its singular vectors are its eigenvectors, which take a third of the time
    lengths, vectors = np.linalg.eigh(np.maximum(information, 0))
    largest = np.argsort(-abs(lengths))[:dimensions]
    return _unit(vectors[:, largest] * np.sqrt(abs(lengths[largest])))[ids]


def position_vectors(count: int, dimensions: int) -> Array:
    """A unit vector for every position: its sines and cosines; neighboring positions get similar vectors."""
    pair = np.arange(dimensions) // 2
    angles = np.arange(count)[:, None] / 10000 ** (2 * pair / max(dimensions, 1))
    return _unit(np.where(np.arange(dimensions) % 2, np.cos(angles), np.sin(angles)))


def heads(words: list[str], count: int, query_heads: int, key_heads: int, head_dim: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values of a text.

    A key is the concatenation of a token's word vector and position vector. The first key head is mostly word, the last one
    mostly position. A query is the same vector, scaled, so that related tokens attend to each other; the scale differs between
    the heads of a group, and a larger one gives sharper attention. A value is the key times a random matrix.

    Returns:
        q ``(head_dim, query_heads, count, 1)``, k and v ``(head_dim, key_heads, count, 1)``, float32 in Fortran order. The
        words are repeated if ``count`` is larger.
    """
    word = word_vectors(words, min(WORD_DIMENSIONS, max(1, 3 * head_dim // 4)))
    word = word[np.arange(count) % len(words)]
    position = position_vectors(count, head_dim - word.shape[1])
    share = np.linspace(FIRST_POSITION_SHARE, LAST_POSITION_SHARE, key_heads)[:, None]
    k = np.concatenate([np.sqrt(1 - share) * word[:, None], np.sqrt(share) * position[:, None]], axis=2, dtype=np.float32)

    group = query_heads // key_heads
    # sqrt(head_dim) cancels attention's own scale, 1/sqrt(head_dim)
    sharpness = np.linspace(SHARPEST, BLUNTEST, group, dtype=np.float32) * np.float32(math.sqrt(head_dim))
    q = (k[:, :, None] * sharpness[:, None]).reshape(count, query_heads, head_dim)

    mix = np.random.default_rng(1865).standard_normal((key_heads, head_dim, head_dim), np.float32)
    v = np.ascontiguousarray(np.einsum("shd,hde->she", k, mix, optimize=True))
    # (batch, seq, heads, head_dim) in C order is (head_dim, heads, seq, batch) in Fortran order
    return q[None].T, k[None].T, v[None].T


def weights(q: Array, k: Array, head: int, rows: Array, causal: bool) -> Array:
    """Attention weights of some queries: rows of the softmax of one query head, ``(len(rows), keys)`` in float64."""
    query = q[:, head, rows, 0].astype(np.float64)
    key = k[:, head * k.shape[1] // q.shape[1], :, 0].astype(np.float64)
    scores = query.T @ key / math.sqrt(q.shape[0])
    if causal:
        scores[rows[:, None] < np.arange(key.shape[1])] = -np.inf
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def interesting(words: list[str], count: int) -> list[int]:
    """The last positions of up to ``count`` different words to print: those of ``INTERESTING``, then the longest ones."""
    last = {word: position for position, word in enumerate(words)}
    listed = [word for word in INTERESTING if word in last]
    others = sorted((word for word in last if word[0].isalnum() and word not in listed), key=lambda word: (-len(word), word))
    return [last[word] for word in (listed + others)[:count]]


def strongest(weight: Array, words: list[str], position: int, count: int) -> list[tuple[str, float]]:
    """The words that a query attends to most, except the query's own, with their weights summed over all positions."""
    total: dict[str, float] = {}
    for word, share in zip(words, weight.tolist(), strict=True):
        if word != words[position] and word[0].isalnum():
            total[word] = total.get(word, 0.0) + share
    return sorted(total.items(), key=lambda item: -item[1])[:count]


def _unit(vectors: Array) -> Array:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(length == 0, 1, length))
