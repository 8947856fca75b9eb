"""Speculative decoding: a cheap draft proposes a tree of tokens, and one step of the model checks them all.

Sources: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"; Miao et al. 2024, "SpecInfer".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_sdpa import tree_depths

from .decoder import Decoder


class Speculated(NamedTuple):
    """What :func:`speculate` returns.

    Attributes:
        tokens: the further tokens of each sequence.
        accepted: the number of accepted proposals.
        proposed: the number of all proposals.
        steps: the number of steps of all sequences.
    """

    tokens: list[list[int]]
    accepted: int
    proposed: int
    steps: int


class NGrams:
    """A draft: the most frequent next token of a text after the last tokens.

    Args:
        tokens: the text.
        order: the maximum number of last tokens; fewer are used where these do not occur in the text.

    >>> NGrams([1, 2, 3, 1, 2, 4, 2, 4]).propose([9, 2], 3)
    [4, 2, 4]
    """

    def __init__(self, tokens: Sequence[int], order: int = 1) -> None:
        self.order = order
        given = [int(token) for token in tokens]
        counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for length in range(order + 1):
            for i in range(length, len(given)):
                counts[tuple(given[i - length : i])][given[i]] += 1
        #: The next tokens after the last ones, the most frequent first.
        self._next = {last: [token for token, _ in found.most_common()] for last, found in counts.items()}

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return the next tokens after a sequence."""
        return self.propose_tree(tokens, range(-1, count))[1:]

    def propose_tree(self, tokens: Sequence[int], parents: Sequence[int]) -> list[int]:
        """Return a tree of next tokens.

        Args:
            tokens: a sequence, whose last token is the root.
            parents: the index of each token's parent; -1 for the root, the first token. The children of a token are its most
                frequent next tokens.

        >>> NGrams([1, 2, 3, 1, 2, 4, 2, 4]).propose_tree([9, 2], [-1, 0, 0, 1])
        [2, 4, 3, 2]
        """
        last = [int(token) for token in tokens[max(0, len(tokens) - self.order - 1) :]]
        found: list[int] = []
        ranks: Counter[int] = Counter()
        for parent in parents:
            if parent < 0:
                found.append(last[-1])
                continue
            path = [found[token] for token in ancestors(parents, parent)]
            following = self._following([*last[:-1], *path])
            found.append(following[min(ranks[parent], len(following) - 1)])
            ranks[parent] += 1
        return found

    def _following(self, last: Sequence[int]) -> list[int]:
        """Return the next tokens after a sequence, the most frequent first."""
        keys = (tuple(last[len(last) - n :]) for n in range(min(self.order, len(last)), -1, -1))
        return next(self._next[key] for key in keys if key in self._next)


def ancestors(parents: Sequence[int], token: int) -> list[int]:
    """Return the path from the root of a tree to a token.

    >>> ancestors([-1, 0, 0, 2], 3)
    [0, 2, 3]
    """
    path = [token]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def branches(count: int, depth: int) -> list[int]:
    """Return the parents of a tree: a root with several branches, each a chain of tokens.

    >>> branches(2, 3)
    [-1, 0, 1, 2, 0, 4, 5]
    """
    return [-1, *(0 if not i else branch * depth + i for branch in range(count) for i in range(depth))]


def accepted_path(parents: Sequence[int], given: Any, chosen: Any) -> list[int]:
    """Return the longest path from the root of a tree on which every token is the model's choice after its parent.

    >>> accepted_path([-1, 0, 0, 2], [5, 6, 7, 8], [7, 1, 8, 9])
    [0, 2, 3]
    """
    path = [0]
    for token, parent in enumerate(parents):
        if parent == path[-1] and given[token] == chosen[parent]:
            path.append(token)
    return path


def speculate(
    decoder: Decoder,
    prompts: Sequence[Any],
    first: Sequence[int],
    count: int,
    draft: NGrams,
    proposals: int = 4,
    width: int = 1,
    noise: Any = None,
) -> Speculated:
    """Decode with draft tokens; the result equals :meth:`Decoder.decode`'s.

    One step appends the last token and a tree of proposed tokens to each sequence. The path of proposals that are the model's
    choices is accepted, and the choice after it is the next token. The cache keeps the accepted path.

    Args:
        decoder: the decoder, whose cache contains the prompts.
        prompts: the tokens of the prompts.
        first: the first token of each sequence, which is not in the cache yet.
        count: the number of further tokens.
        draft: proposes tokens.
        proposals: the number of proposed tokens in a branch.
        width: the number of branches of the tree.
        noise: ``(count, C, B)``, added to the logits; by default the most likely tokens are taken.
    """
    parents = branches(width, proposals)
    depths, size = tree_depths(parents)[:, 0].tolist(), len(parents)
    step, xp, cache = decoder.tree_step(parents), decoder.model.xp, decoder.cache
    written = [[token] for token in first]
    accepted = proposed = steps = 0
    while min(map(len, written)) <= count:
        active = [b for b, tokens in enumerate(written) if len(tokens) <= count]
        given, counts = np.zeros((size, decoder.batch), np.int32), np.zeros(decoder.batch, np.int64)
        drawn = np.zeros(step.noise.shape, np.float32)
        for b in active:
            given[:, b], counts[b] = draft.propose_tree([*prompts[b], *written[b]], parents), size
            for token, depth in enumerate(depths):
                if noise is not None and len(written[b]) - 1 + depth < len(noise):
                    drawn[:, token, b] = noise[len(written[b]) - 1 + depth, :, b]
        with decoder.stream():
            step.tokens[...] = xp.asarray(given)
            step.noise[...] = xp.asarray(drawn)
            step.run(counts)
            chosen = decoder.to_host(step.chosen)
            for b in active:
                path = accepted_path(parents, given[:, b], chosen[:, b])
                cache.keep(b, path)
                written[b] += chosen[path, b].tolist()
                accepted, proposed, steps = accepted + len(path) - 1, proposed + size - 1, steps + 1
    return Speculated([tokens[1 : count + 1] for tokens in written], accepted, proposed, steps)
