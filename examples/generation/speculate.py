"""Speculative decoding: a cheap draft proposes tokens, and one step of the model checks them all.

Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding".
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

from .decoder import Decoder


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
        self._next = {last: found.most_common(1)[0][0] for last, found in counts.items()}

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """The next tokens after a sequence."""
        last = [int(token) for token in tokens[max(0, len(tokens) - self.order) :]]
        for _ in range(count):
            keys = (tuple(last[len(last) - n :]) for n in range(min(self.order, len(last)), -1, -1))
            last.append(next(self._next[key] for key in keys if key in self._next))
        return last[-count:]


def speculate(
    decoder: Decoder,
    prompts: Sequence[Any],
    first: Sequence[int],
    count: int,
    draft: NGrams,
    proposals: int = 4,
    noise: Any = None,
) -> tuple[list[list[int]], int, int]:
    """Decode with draft tokens; the result is that of :meth:`Decoder.decode`.

    One step appends the last token and the proposed tokens of each sequence. Proposals are accepted up to the first one that
    differs from the model's choice, which takes its place. The cache keeps the accepted tokens.

    Args:
        decoder: the decoder, whose cache contains the prompts.
        prompts: the tokens of the prompts.
        first: the first token of each sequence, which is not in the cache yet.
        count: the number of further tokens.
        draft: proposes tokens.
        proposals: the number of proposed tokens per step.
        noise: ``(count, C, B)``, added to the logits; by default the most likely tokens are taken.

    Returns:
        The further tokens of each sequence, the number of accepted proposals, and the number of all proposals.
    """
    step, xp, cache = decoder.step(proposals + 1), decoder.model.xp, decoder.cache
    written = [[token] for token in first]
    accepted = proposed = 0
    while min(map(len, written)) <= count:
        active = [b for b, tokens in enumerate(written) if len(tokens) <= count]
        given, counts = np.zeros((proposals + 1, decoder.batch), np.int32), np.zeros(decoder.batch, np.int64)
        drawn = np.zeros(step.noise.shape, np.float32)
        for b in active:
            given[0, b], counts[b] = written[b][-1], proposals + 1
            given[1:, b] = draft.propose([*prompts[b], *written[b]], proposals)
            if noise is not None:
                part = noise[len(written[b]) - 1 :][: proposals + 1, :, b]
                drawn[:, : len(part), b] = part.T
        with decoder.stream():
            step.tokens[...] = xp.asarray(given)
            step.noise[...] = xp.asarray(drawn)
            step.run(counts)
            chosen = decoder.to_host(step.chosen)
            lengths = cache.host_lengths
            for b in active:
                right = given[1:, b] == chosen[:-1, b]
                kept = proposals if right.all() else int(right.argmin())
                cache.truncate(b, int(lengths[b]) - (proposals - kept))
                written[b] += chosen[: kept + 1, b].tolist()
                accepted, proposed = accepted + kept, proposed + proposals
    return [tokens[1 : count + 1] for tokens in written], accepted, proposed
