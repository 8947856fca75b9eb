"""A real text as input for attention: its words, vectors that mean something, and from them q, k and v.

Nothing is trained. A word's vector says which words stand near it (Church and Hanks 1990, positive pointwise mutual
information; Levy and Goldberg 2014, its singular vectors); a place's vector is the sinusoids of Vaswani et al. 2017,
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

#: Words to show, if the text at hand has them.
INTERESTING = ("marmalade", "watch", "garden", "curiosity", "rabbit", "pictures")
#: What the text has beyond ASCII, which not every terminal can show.
_ASCII = str.maketrans({"’": "'", "‘": "'", "—": "-"})
#: Dimensions of a meaning, at most: with more, words that never meet are as far apart as they can be, and little is shared.
MEANING = 48
#: Words so many places apart count as near each other.
NEAR = 4
#: Scores of a word with itself, in the sharpest and in the bluntest head of a group.
SHARPEST, BLUNTEST = 10.0, 5.0
#: Share of a token's place in its key, in the first and in the last key head; the rest is its meaning.
FIRST_PLACE, LAST_PLACE = 0.1, 0.8


def title() -> str:
    """The text's name and author."""
    return " ".join(_text().split("\n")[:2]).translate(_ASCII)


def tokens() -> list[str]:
    """The text's words and punctuation marks, in lower case and ASCII."""
    return re.findall(r"\w+(?:['-]\w+)*|[^\w\s]", _text().lower().translate(_ASCII))


def _text() -> str:
    return importlib.resources.files(__package__).joinpath("alice.txt").read_text(encoding="utf-8")


def meanings(words: list[str], dimensions: int) -> Array:
    """A unit vector of at most so many dimensions for every place in the text, near to those of related words.

    Returns:
        ``(len(words), at most dimensions)``.
    """
    _, numbers = np.unique(words, return_inverse=True)
    together = np.zeros((numbers.max() + 1,) * 2)
    for distance in range(1, NEAR + 1):
        np.add.at(together, (numbers[:-distance], numbers[distance:]), 1 / distance)
    together += together.T
    # PPMI = max(0, log p(a, b) / (p(a) p(b))); words that never meet have log 0
    alone = together.sum(axis=1)
    with np.errstate(divide="ignore"):
        information = np.log(together * alone.sum() / np.outer(alone, alone))
    vectors, lengths, _ = np.linalg.svd(np.maximum(information, 0))
    return _unit(vectors[:, :dimensions] * np.sqrt(lengths[:dimensions]))[numbers]


def places(count: int, dimensions: int) -> Array:
    """A unit vector for every place in the text: sines and cosines of it, near to those of the places beside it."""
    pair = np.arange(dimensions) // 2
    angles = np.arange(count)[:, None] / 10000 ** (2 * pair / max(dimensions, 1))
    return _unit(np.where(np.arange(dimensions) % 2, np.cos(angles), np.sin(angles)))


def heads(words: list[str], count: int, query_heads: int, key_heads: int, head_dim: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values of a text.

    A key is a token's meaning beside its place; the first key head is nearly all meaning, the last nearly all place. A
    query is the same vector, so related tokens attend to one another, the longer the sharper: the heads of a group differ
    in that. A value is the vector through a random matrix.

    Args:
        words: the text; it is repeated where ``count`` is longer.
        count: tokens.
        query_heads, key_heads, head_dim: of the result.

    Returns:
        q ``(head_dim, query_heads, count, 1)``, k and v ``(head_dim, key_heads, count, 1)``, float32 in Fortran order.
    """
    meaning = meanings(words, min(MEANING, max(1, 3 * head_dim // 4)))
    meaning = meaning[np.arange(count) % len(words)]
    place = places(count, head_dim - meaning.shape[1])
    share = np.linspace(FIRST_PLACE, LAST_PLACE, key_heads)[:, None]
    k = np.concatenate([np.sqrt(1 - share) * meaning[:, None], np.sqrt(share) * place[:, None]], axis=2, dtype=np.float32)

    group = query_heads // key_heads
    # attention's own scale, 1/sqrt(head_dim), undoes the root
    sharpness = np.linspace(SHARPEST, BLUNTEST, group, dtype=np.float32) * np.float32(math.sqrt(head_dim))
    q = (k[:, :, None] * sharpness[:, None]).reshape(count, query_heads, head_dim)

    mix = np.random.default_rng(1865).standard_normal((key_heads, head_dim, head_dim), np.float32)
    v = np.einsum("shd,hde->she", k, mix, optimize=True)
    return q[None].T, k[None].T, v[None].T  # (batch, seq, heads, head_dim) in C order is our layout in Fortran order


def weights(q: Array, k: Array, head: int, rows: Array, causal: bool) -> Array:
    """What some queries attend to: rows of one head's softmax, in float64.

    Args:
        q, k: in our layout, batch 1.
        head: the query head.
        rows: the queries.
        causal: each sees the keys up to and with itself.

    Returns:
        ``(len(rows), keys)``; every row sums to 1.
    """
    query = q[:, head, rows, 0].astype(np.float64)
    key = k[:, head * k.shape[1] // q.shape[1], :, 0].astype(np.float64)
    scores = query.T @ key / math.sqrt(q.shape[0])
    if causal:
        scores[rows[:, None] < np.arange(key.shape[1])] = -np.inf
    e = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(e / e.sum(axis=1, keepdims=True))


def interesting(words: list[str], count: int) -> list[int]:
    """Up to so many places of different words that are worth showing, the most interesting first; the last of each."""
    last = {word: place for place, word in enumerate(words)}
    known = [word for word in INTERESTING if word in last]
    others = sorted((word for word in last if word[0].isalnum() and word not in known), key=lambda word: (-len(word), word))
    return [last[word] for word in (known + others)[:count]]


def strongest(weight: Array, words: list[str], place: int, count: int) -> list[tuple[str, float]]:
    """The words that a query attends to most, its own left out; the weights of all places of a word are added up."""
    total: dict[str, float] = {}
    for word, share in zip(words, weight.tolist(), strict=True):
        if word != words[place] and word[0].isalnum():
            total[word] = total.get(word, 0.0) + share
    return sorted(total.items(), key=lambda item: -item[1])[:count]


def _unit(vectors: Array) -> Array:
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.where(length == 0, 1, length))
