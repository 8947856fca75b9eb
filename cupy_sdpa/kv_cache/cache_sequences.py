"""What a cache does with whole sequences: copy, exchange, shorten and remove them, without writing new tokens."""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .cache_arguments import index, read_order, read_path
from .state import CacheState

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


class CacheSequences(CacheState):
    """The methods of :class:`cupy_sdpa.KVCache` that change or compare its sequences."""

    def cancel_step(self) -> None:
        """Remove the tokens of an announced or partly appended step.

        Raises:
            RuntimeError: every layer is appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, layers=2, numpy=True)
        >>> tokens = np.ones((8, 2, 20, 2), np.float32, order="F")
        >>> cache.append(tokens, tokens)
        >>> cache.cancel_step()
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([0, 0], 4)
        """
        self._recover()
        self._check_not_capturing("cancel_step()")
        if not self._step.missing:
            raise RuntimeError("every layer of the last step is appended; truncate() removes tokens")
        self._set(self._pages.shorten(self._pages.lengths - self._step.counts), self._device_lengths())

    def fork(self, source: int, target: int) -> None:
        """Make an empty sequence a copy of another. They share pages; keys and values are copied only when one of them grows.

        Args:
            source: the sequence to copy.
            target: the empty sequence that becomes the copy.

        Raises:
            TypeError, ValueError: a sequence is not in the batch, or the target is not empty.
            RuntimeError: a layer of the present step is not appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 20), np.float32, order="F")
        >>> cache.append(tokens, tokens, seq_lens_q=[20, 0])
        >>> cache.fork(0, 1)
        >>> cache.free_pages, cache.shared_prefix()
        (2, 16)
        """
        source, target = (index(b, self.batch, "sequence") for b in (source, target))
        self._recover()
        self._check_no_step("fork()")
        if length := int(self._pages.lengths[target]):
            raise ValueError(f"the target, sequence {target}, has {length} tokens; call release({target}) first")
        self._set(self._pages.fork(source, target), [(self._starts[1] + target, 0)])

    def reorder(self, order: Sequence[int] | NDArray[Any]) -> None:
        """Let each sequence continue another one, as in a beam search.

        Sequence b becomes a copy of what sequence ``order[b]`` was. Sequences that continue the same one share its pages. No
        keys or values are copied now; the next step copies only the last page of such sequences, if it is partially filled.
        Pages of sequences that are not continued become free.

        Args:
            order: B numbers on the host: for each sequence, the index of the sequence that it continues. An index may occur
                several times, or not at all.

        Raises:
            TypeError, ValueError: the order is not B indices of sequences.
            RuntimeError: a layer of the present step is not appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=8, batch=3, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 66), np.float32, order="F")
        >>> cache.append(tokens, tokens, seq_lens_q=[40, 20, 6])
        >>> cache.reorder([0, 0, 1])
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([40, 40, 20], 3)
        """
        self._reorder(read_order(order, self.batch), "reorder()")

    def swap(self, one: int, other: int) -> None:
        """Exchange two sequences; no keys or values are copied.

        Args:
            one, other: the two sequences; nothing changes if they are equal.

        Raises:
            TypeError, ValueError: a sequence is not in the batch.
            RuntimeError: a layer of the present step is not appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 20), np.float32, order="F")
        >>> cache.append(tokens, tokens, seq_lens_q=[20, 0])
        >>> cache.swap(0, 1)
        >>> cache.host_lengths.tolist()
        [0, 20]
        """
        one, other = (index(b, self.batch, "sequence") for b in (one, other))
        order = list(range(self.batch))
        order[one], order[other] = other, one
        self._reorder(order, "swap()")

    def _reorder(self, order: list[int], name: str) -> None:
        self._recover()
        self._check_no_step(name)
        if order != list(range(self.batch)):
            self._set(self._pages.reorder(order), self._lengths_of(self._pages.lengths), order=order)

    def reset(self) -> None:
        """Remove all tokens of all sequences, including an incomplete step. An FP8 cache keeps its scales.

        Raises:
            RuntimeError: the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> cache.begin_step(20)
        >>> cache.reset()
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([0, 0], 4)
        """
        self._recover()
        self._check_not_capturing("reset()")
        self._set(self._pages.shorten(np.zeros(self.batch, np.int64)), self._device_lengths())

    def truncate(self, sequence: int, length: int) -> None:
        """Shorten a sequence and free the pages beyond its new length.

        Args:
            sequence: the sequence.
            length: how many of its first tokens to keep, from 0 to its present length.

        Raises:
            TypeError, ValueError: the sequence is not in the batch, or the length is negative or greater than the present
                length.
            OutOfPages: the sequence would keep part of a shared page, and no page is free for the copy. The cache is unchanged.
            RuntimeError: a layer of the present step is not appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 20, 2), np.float32, order="F")
        >>> cache.append(tokens, tokens)
        >>> cache.truncate(0, 16)
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([16, 20], 1)
        """
        sequence = index(sequence, self.batch, "sequence")
        self._recover()
        present = int(self._pages.lengths[sequence])
        if not isinstance(length, numbers.Integral):
            raise TypeError(f"length is {length!r}; it must be an integer")
        if not 0 <= length <= present:
            raise ValueError(
                f"length is {length}, but sequence {sequence} has {present} tokens; it must be from 0 to {present}"
            )
        self._check_no_step("truncate()")
        change, copies, _ = self._pages.keep(sequence, length, [], "truncate()")
        self._set(change, [(self._starts[1] + sequence, present)], copies)

    def keep(self, sequence: int, path: Sequence[int] | NDArray[Any]) -> None:
        """Keep some of the tokens that the last step added to a sequence, such as the accepted tokens of a draft.

        The other new tokens are removed. The kept tokens become contiguous in every layer, and pages beyond the new length
        become free. Keys keep the rotation that they were written with. If the path is 0, 1, 2, ..., nothing is copied.

        Args:
            sequence: the sequence.
            path: ascending positions among the tokens of the last step, numbers on the host; for example the path from the root
                of a draft tree to the last accepted token. An empty path removes all of them.

        Raises:
            TypeError, ValueError: the sequence is not in the batch, or the path is not ascending, or names tokens that the last
                step did not add or that were removed since.
            OutOfPages: not enough pages are free to copy shared pages before writing. The cache is unchanged.
            RuntimeError: a layer of the present step is not appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=1, page_size=16, numpy=True)
        >>> tokens = np.zeros((8, 2, 5, 1), np.float32, order="F") + np.arange(5, dtype=np.float32)[:, None]
        >>> cache.append(tokens, tokens)
        >>> cache.keep(0, [0, 2, 3])
        >>> cache.keys()[0, 0, : cache.lengths[0], cache.table[0, 0]].tolist()
        [0.0, 2.0, 3.0]
        """
        sequence = index(sequence, self.batch, "sequence")
        self._recover()
        self._check_no_step("keep()")
        kept = read_path(path, int(self._step.present[sequence]), sequence)
        length = int(self._pages.lengths[sequence])
        change, copies, moved = self._pages.keep(sequence, length - int(self._step.present[sequence]), kept)
        self._set(change, [(self._starts[1] + sequence, length)], copies, moved)

    def release(self, sequence: int) -> None:
        """Remove all tokens of a sequence and free the pages that no other sequence shares.

        Args:
            sequence: the sequence; nothing changes if it is empty.

        Raises:
            TypeError, ValueError: the sequence is not in the batch.
            RuntimeError: a layer of the present step is not appended, or the stream is being captured.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 20, 2), np.float32, order="F")
        >>> cache.append(tokens, tokens)
        >>> cache.release(0)
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([0, 20], 2)
        """
        self.truncate(sequence, 0)

    def shared_prefix(self) -> int:
        """Count the first tokens that all non-empty sequences share through the same full pages.

        Returns:
            A multiple of the page size, for example after :meth:`fork`; 0 if all sequences are empty. Equal tokens in separate
            pages are not shared. :func:`cupy_sdpa.shared_prefix_attention` reads shared pages only once.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 20), np.float32, order="F")
        >>> cache.append(tokens, tokens, seq_lens_q=[20, 0])
        >>> cache.fork(0, 1)
        >>> cache.append(tokens[:, :, :2], tokens[:, :, :2], seq_lens_q=[1, 1])
        >>> cache.host_lengths.tolist(), cache.shared_prefix()
        ([21, 21], 16)
        """
        return self._pages.shared_prefix()
