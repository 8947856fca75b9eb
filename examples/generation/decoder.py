"""Generation with a paged key/value cache. On a GPU a step is captured in a CUDA graph once and then replayed."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cupy_sdpa import KVCache, apply_rope, attention, tree_depths, tree_mask

from .gpt import GPT, Product, sum_of_products

#: Tokens per page.
PAGE = 16
#: Tokens per chunk: prompts are appended in chunks.
CHUNK = 32


class Decoder:
    """A model and its cache for a batch of sequences.

    On a GPU all work runs on a stream of the decoder; methods take and return numpy arrays.

    Args:
        model: the model.
        batch: B, the number of sequences.
        graphs: whether steps are captured in CUDA graphs; has no effect on numpy arrays.

    Attributes:
        cache: the cache. Its maximum length has room for draft tokens beyond the context of the model.
    """

    def __init__(self, model: GPT, batch: int, *, graphs: bool = True) -> None:
        self.model, self.batch, self.graphs = model, batch, graphs and model.xp is not np
        self._steps: dict[tuple[int, ...], Step] = {}
        self._stream: Any = None
        if model.xp is not np:
            model.xp.cuda.get_current_stream().synchronize()  # the weights are complete
            self._stream = model.xp.cuda.Stream(non_blocking=True)
        sizes, longest = model.sizes, model.sizes.context + PAGE
        with self.stream():
            self.cache = KVCache(
                sizes.head_dim,
                sizes.heads,
                pages=batch * -(-longest // PAGE),
                batch=batch,
                page_size=PAGE,
                dtype=model.dtype,
                layers=sizes.layers,
                max_length=longest,
                numpy=model.xp is np,
            )

    def stream(self) -> contextlib.AbstractContextManager[Any]:
        """Make the decoder's stream the current one within a ``with`` block."""
        return self._stream or contextlib.nullcontext()

    def to_host(self, array: Any) -> Any:
        """Return a numpy copy."""
        return array.copy() if self.model.xp is np else array.get()

    def clear(self) -> None:
        """Remove all sequences."""
        with self.stream():
            for sequence in range(self.batch):
                self.cache.release(sequence)

    def step(self, tokens: int) -> Step:
        """Return the step that appends this number of tokens to every sequence."""
        return self.tree_step(range(-1, tokens - 1))

    def tree_step(self, parents: Sequence[int]) -> Step:
        """Return the step that appends a tree of tokens to every sequence; for each token the index of its parent, or -1."""
        if (key := tuple(parents)) not in self._steps:
            with self.stream():
                self._steps[key] = Step(self, key)
        return self._steps[key]

    def compute(self, tokens: Any, product: Product = operator.matmul, tree: Tree | None = None, **options: Any) -> Any:
        """Append tokens ``(S, B)`` to the cache; returns the logits of the next ones, ``(C, S, B)``.

        ``cache.begin_step`` announces how many of the S tokens of each sequence are appended. ``product`` is as for
        ``GPT.forward``, options are as for ``cupy_sdpa.attention``. By default the tokens follow each other; those of a tree
        attend to their ancestors.
        """
        cache, rope, xp = self.cache, self.model.sizes.rope, self.model.xp
        depths = tree.depths if tree else xp.arange(tokens.shape[0], dtype=np.int32)[:, None]
        positions = cache.lengths + depths  # before the append
        # full_table has the same shape in every step: one plan, and the table that a captured graph needs
        table, mask = {"page_table": cache.full_table}, {"causal": "bottom_right"}

        def attend(layer: int, q: Any, k: Any, v: Any) -> Any:
            nonlocal mask
            cache.append(k, v, layer, rope=rope, positions=positions)
            if tree and layer == 0:
                mask = tree_mask(tree.parents, **cache.view() | table)
            q = apply_rope(q, rope, positions=positions)
            return attention(q, **cache.view(layer) | table, **mask, **options), None

        return self.model.forward(tokens, attend, product)[0]

    def prefill(self, prompts: Mapping[int, Any], noise: Mapping[int, Any] | None = None) -> dict[int, int]:
        """Append prompts, in chunks.

        Args:
            prompts: the tokens of each prompt, by sequence. The other sequences are unchanged.
            noise: ``(C,)`` for each sequence, added to the logits of the next token.

        Returns:
            The next token of each sequence.
        """
        xp, chosen = self.model.xp, {}
        with self.stream():
            for start in range(0, max(map(len, prompts.values())), CHUNK):
                chunk = {b: tokens[start : start + CHUNK] for b, tokens in prompts.items()}
                counts, given = np.zeros(self.batch, np.int32), np.zeros((CHUNK, self.batch), np.int32)
                for b, tokens in chunk.items():
                    counts[b] = len(tokens)
                    given[: len(tokens), b] = tokens
                self.cache.begin_step(counts)
                logits = self.compute(xp.asarray(given))
                for b, tokens in chunk.items():
                    if len(tokens) and start + len(tokens) == len(prompts[b]):
                        last = self.to_host(logits[:, len(tokens) - 1, b])
                        chosen[b] = int((last if noise is None else last + noise[b]).argmax())
        return chosen

    def decode(self, first: Sequence[int], count: int, noise: Any = None) -> Any:
        """Decode token by token, without reading tokens on the host before the end.

        Args:
            first: the first token of each sequence, which is not in the cache yet.
            count: the number of further tokens.
            noise: ``(count, C, B)``, added to the logits; by default the most likely tokens are taken.

        Returns:
            The tokens ``(count, B)``.
        """
        xp, step = self.model.xp, self.step(1)
        with self.stream():
            step.tokens[...] = xp.asarray(np.array([first], np.int32))
            step.noise.fill(0)
            noise = None if noise is None else xp.asarray(noise)
            found = xp.empty((count, self.batch), np.int32)
            for i in range(count):
                if noise is not None:
                    step.noise[:, 0] = noise[i]
                step.run(1)
                found[i] = step.chosen[0]
            return self.to_host(found)


class Tree(NamedTuple):
    """A tree of tokens.

    Attributes:
        parents: for each token the index of its parent, or -1, int32 ``(S,)``.
        depths: the number of its ancestors, int32 ``(S, 1)``.
    """

    parents: Any
    depths: Any


class Step:
    """One step of S tokens of every sequence: embedding, layers, append, attention, logits and choice of the next tokens.

    All arrays that it reads and writes keep their addresses, so that it can be captured in a CUDA graph.

    Args:
        decoder: the decoder.
        parents: the tree of the S tokens: for each token the index of its parent, or -1.

    Attributes:
        tokens: int32 ``(S, B)``, read. With S = 1 the step writes the chosen tokens here, which the next step reads.
        noise: float32 ``(C, S, B)``, read and added to the logits. The choice is then random: with Gumbel noise times T it has
            the probabilities of temperature T.
        chosen: int32 ``(S, B)``, written: the next token after each token.
    """

    def __init__(self, decoder: Decoder, parents: tuple[int, ...]) -> None:
        xp, batch, count = decoder.model.xp, decoder.batch, len(parents)
        self._decoder, self._graph = decoder, None
        self._tree: Tree | None = None
        if parents != tuple(range(-1, count - 1)):
            self._tree = Tree(xp.asarray(np.array(parents, np.int32)), xp.asarray(tree_depths(parents)))
        self._memory: list[Any] = []
        self.tokens = xp.zeros((count, batch), np.int32)
        self.chosen = xp.zeros((count, batch), np.int32)
        self.noise = xp.zeros((len(decoder.model.vocabulary), count, batch), np.float32)
        if decoder.graphs:
            self._capture(xp)

    def run(self, counts: int | Sequence[int] | Any = 1) -> None:
        """Run the step; ``counts[b]`` is S, or 0 for a sequence that is left out, whose result is meaningless."""
        self._decoder.cache.begin_step(counts)
        if self._graph is None:
            self._compute()
        else:
            self._graph.launch()

    def _compute(self) -> None:
        product = sum_of_products if self._decoder.graphs else operator.matmul
        logits = self._decoder.compute(self.tokens, product, self._tree)
        self.chosen[...] = (logits + self.noise).argmax(axis=0)
        if len(self.tokens) == 1:
            self.tokens[...] = self.chosen

    def _capture(self, xp: Any) -> None:
        """Capture the step. The graph writes to all memory that the step allocates; it is kept from any other use."""
        cache, stream, pool = self._decoder.cache, xp.cuda.get_current_stream(), xp.get_default_memory_pool()
        cache.begin_step(0)
        self._compute()  # builds the plans and compiles the kernels; appends nothing
        cache.begin_step(0)

        def allocate(size: int) -> Any:
            self._memory.append(pool.malloc(size))
            return self._memory[-1]

        with xp.cuda.using_allocator(allocate):
            stream.begin_capture()
            try:
                self._compute()
            finally:
                self._graph = stream.end_capture()
