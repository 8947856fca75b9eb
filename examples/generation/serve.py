"""Continuous batching: sequences finish at different times, and waiting prompts take their places."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .decoder import Decoder


def gumbel(temperature: float, seed: int, request: int, count: int, words: int) -> Any:
    """Gumbel noise times the temperature, float32 ``(count, words)``; the same for the same seed and request.

    Source: Gumbel 1954, "Statistical Theory of Extreme Values": the argmax of logits plus noise has the probabilities of the
    softmax.
    """
    noise = np.random.default_rng([seed, request]).gumbel(size=(count, words))
    return (temperature * noise).astype(np.float32)


@dataclass
class Request:
    """A prompt to continue.

    Attributes:
        prompt: its tokens.
        count: the maximum number of new tokens.
        tokens: the new tokens; the last one may be the end.
    """

    prompt: Any
    count: int
    tokens: list[int] = field(default_factory=list)


def serve(
    decoder: Decoder, requests: Sequence[Request], *, end: int | None = None, temperature: float = 0.0, seed: int = 0
) -> list[list[int | None]]:
    """Continue all prompts, as many at a time as the decoder has sequences.

    Args:
        decoder: the decoder; its cache is empty before and after.
        requests: the prompts; the new tokens are added to them.
        end: the token after which a sequence is finished.
        temperature: 0 for the most likely tokens.
        seed: of the random choices. A request's choices do not depend on the other requests.

    Returns:
        For every step of decoding the number of the request in each sequence, or None.
    """
    step, words = decoder.step(1), len(decoder.model.vocabulary)
    waiting, places = deque(range(len(requests))), [None] * decoder.batch  # type: deque[int], list[int | None]
    noise = [gumbel(temperature, seed, n, request.count, words) for n, request in enumerate(requests)]
    history = []

    def add(sequence: int, token: int) -> None:
        """Add a token; a finished sequence is released."""
        request = requests[places[sequence] or 0]
        request.tokens.append(token)
        if token == end or len(request.tokens) == request.count:
            places[sequence] = None
            with decoder.stream():
                decoder.cache.release(sequence)

    while waiting or any(place is not None for place in places):
        joining = {}
        for sequence, place in enumerate(places):
            if place is None and waiting:
                places[sequence] = joining[sequence] = waiting.popleft()
        if joining:
            prompts = {b: requests[n].prompt for b, n in joining.items()}
            for sequence, token in decoder.prefill(prompts, {b: noise[n][0] for b, n in joining.items()}).items():
                add(sequence, token)
        active = [(b, n) for b, n in enumerate(places) if n is not None]
        if not active:
            continue
        history.append(list(places))
        tokens, counts = np.zeros((1, decoder.batch), np.int32), np.zeros(decoder.batch, np.int64)
        drawn = np.zeros((words, 1, decoder.batch), np.float32)
        for b, n in active:
            tokens[0, b], counts[b] = requests[n].tokens[-1], 1
            drawn[:, 0, b] = noise[n][len(requests[n].tokens)]
        with decoder.stream():
            step.tokens[...] = decoder.model.xp.asarray(tokens)
            step.noise[...] = decoder.model.xp.asarray(drawn)
            step.run(counts)
            chosen = decoder.to_host(step.chosen)
        for b, _ in active:
            add(b, int(chosen[0, b]))
    return history
