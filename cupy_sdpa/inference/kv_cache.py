"""A paged key/value cache: its arrays and its page table, on the device or in numpy arrays."""

from __future__ import annotations

import contextlib
import numbers
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .._typing import Array
from ..calls.options import read_flag, read_positive
from ..device import cupy_runtime
from ..device.paging import cache_kernels
from ..problem.tensor_spec import FLOAT_DTYPES, FP8_LARGEST, FloatDtype, dtype_name, numpy_dtype, storage_dtype
from . import on_numpy
from .arguments import check_arrays, check_tokens, index, read_counts, tokens_of, uniform
from .fp8_pages import Fp8Pages
from .pages import Pages

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

#: The alignment of the parts of the state array, in elements of 4 bytes.
_UNIT = 64


class KVCache:
    """Keys and values of a batch of sequences in pages, for attention with a page table.

    Every sequence is a list of pages. Sequences may share pages (:meth:`fork`); a page is copied before one of several owners
    writes to it. One step adds new tokens to every sequence: :meth:`begin_step` takes pages, and :meth:`append` writes the keys
    and values of one layer, layer 0 first. Without :meth:`begin_step`, the append of layer 0 calls it.

    In a captured CUDA graph :meth:`append` reads the numbers of new tokens, the page table and the lengths from arrays with
    constant addresses. Call ``begin_step`` before the capture and before every launch of the graph; counts may differ, up to
    S, or up to a sum of T. An append outside of the graph then also needs its own ``begin_step``. Attention in the graph reads
    the rows of the table that it was captured with: capture ``full_table``, or capture again when ``table`` has grown.

    All work is enqueued on CuPy's current stream. Use a cache from one thread and one stream at a time.

    Args:
        head_dim: D, the head dim of keys.
        heads_kv: Hkv, the number of key/value heads.
        pages: the number of pages.
        batch: B, the number of sequences.
        page_size: tokens per page.
        head_dim_v: Dv, the head dim of values; by default D.
        dtype: float16, bfloat16, float32, float64; or float8_e4m3fn or float8_e5m2 for FP8 (:doc:`/fp8`). Default bfloat16.
        layers: the number of layers, which share the page table.
        max_length: the maximum number of tokens of one sequence; by default ``pages * page_size``.
        k_scale, v_scale: the scales of FP8 keys and values, which are multiplied by them and rounded: a number, or a number for
            each layer. Values beyond the largest number of the dtype divided by the scale saturate. By default that of twice
            the largest magnitude of the first tokens of a layer; if these are an FP8 array, its scale.
        rotate: whether FP8 keys are rotated, see :func:`cupy_sdpa.fp8.quantize`. FP8 queries must then be rotated as well.
        numpy: whether the cache consists of numpy arrays; otherwise of arrays on CuPy's current device.

    Attributes:
        full_table: the page table for the maximum length, int32 ``(ceil(max_length / page_size), B)``, at a constant address.
            Column b contains the pages of sequence b in order, then zeros.
        table: the first rows of ``full_table``: as many as the longest sequence has pages, rounded up to a power of two.
        lengths: the length of each sequence, int32 ``(B,)``, at a constant address. The append of layer 0 advances it. These
            arrays are the state of the cache, and must not be written to; numpy's are read-only.

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is not positive.
        RuntimeError: there is no GPU or no CuPy, and ``numpy`` is False.

    >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, dtype="float32", numpy=True)
    >>> tokens = np.ones((8, 2, 20, 2), np.float32, order="F")
    >>> cache.append(tokens, tokens, counts=[20, 5])
    >>> cache
    <KVCache: 2 of 2 sequences, 25 tokens, 3 of 4 pages, 1 layer>
    >>> cache.lengths
    array([20,  5], dtype=int32)
    >>> cache.table
    array([[3, 1],
           [2, 0]], dtype=int32)
    """

    #: The end of the error message of a call that takes the cache for an array.
    not_an_array = "pass cache.keys(layer) and cache.values(layer), with page_table=cache.table and seq_lens_kv=cache.lengths"

    def __init__(
        self,
        head_dim: int,
        heads_kv: int,
        *,
        pages: int,
        batch: int,
        page_size: int = 64,
        head_dim_v: int | None = None,
        dtype: FloatDtype | Any = "bfloat16",
        layers: int = 1,
        max_length: int | None = None,
        k_scale: float | Sequence[float] | None = None,
        v_scale: float | Sequence[float] | None = None,
        rotate: bool = False,
        numpy: bool = False,
    ) -> None:
        self.head_dim, self.heads_kv = read_positive("head_dim", head_dim), read_positive("heads_kv", heads_kv)
        self.head_dim_v = self.head_dim if head_dim_v is None else read_positive("head_dim_v", head_dim_v)
        self.pages, self.batch = read_positive("pages", pages), read_positive("batch", batch)
        self.page_size, self.layers = read_positive("page_size", page_size), read_positive("layers", layers)
        tokens = self.pages * self.page_size
        self.max_length = tokens if max_length is None else read_positive("max_length", max_length)
        if min(tokens, self.max_length + self.page_size) * self.heads_kv >= 1 << 31:
            raise ValueError(f"max_length is {self.max_length} with {self.heads_kv} heads; their product must be below 2**31")
        name = dtype if isinstance(dtype, str) else dtype_name(np.dtype(dtype))
        if name not in FLOAT_DTYPES and name not in FP8_LARGEST:
            raise TypeError(f"dtype is {name}; it must be one of {', '.join((*FLOAT_DTYPES, *FP8_LARGEST))}")
        self.dtype = numpy_dtype(name)
        self._fp8 = self._fp8_pages(name, (k_scale, v_scale), rotate, on_gpu=not numpy)
        if not numpy and cupy_runtime.current_device() is None:
            raise RuntimeError(
                "numpy is False and there is no GPU here, or no CuPy: pass numpy=True for a cache of numpy arrays on the CPU. "
                "`python -m cupy_sdpa info` lists what a GPU needs"
            )
        self._numpy, self._engine = numpy, on_numpy if numpy else cache_kernels
        self._storage = [
            self._engine.zeros((dim, self.page_size, self.heads_kv, self.pages, self.layers), storage_dtype(name, not numpy))
            for dim in (self.head_dim, self.head_dim_v)
        ]
        self._keys, self._values = (
            [storage[..., layer].transpose(0, 2, 1, 3) for layer in range(self.layers)] for storage in self._storage
        )
        self._pages = Pages(self.pages, self.page_size, self.batch, self.max_length)
        self._create_state(min(-(-self.max_length // self.page_size), self.pages))
        self._counts = uniform(0, self.batch)  # as in the state
        self._needed = 0, 0
        self._begun = self._announced = self._captured = False
        self._load()

    def _fp8_pages(self, name: str, scales: tuple[Any, Any], rotate: Any, *, on_gpu: bool) -> Fp8Pages | None:
        """The conversion of tokens to FP8; None for other dtypes, which do not take its options."""
        if name in FP8_LARGEST:
            dims = self.head_dim, self.head_dim_v
            return Fp8Pages(name, dims, self.layers, scales, rotated=read_flag("rotate", rotate), on_gpu=on_gpu)
        if rotate or any(scale is not None for scale in scales):
            raise ValueError(f"dtype is {name}; k_scale, v_scale and rotate are for FP8 caches: omit them")
        return None

    def _create_state(self, width: int) -> None:
        """Create the table, the lengths and the counts as parts of one array, which one kernel updates."""
        starts = np.cumsum([0, *(-(-size // _UNIT) * _UNIT for size in (width * self.batch, *[self.batch] * 3))]).tolist()
        self._state = self._engine.zeros((starts[-1],), np.int32)
        self.full_table = self._state[: width * self.batch].reshape((width, self.batch), order="F")
        self.lengths, counts, finished = (self._state[start : start + self.batch] for start in starts[1:-1])
        self._parts = cache_kernels.State(self.full_table, self.lengths, counts, finished)
        self._first_length, self._first_count = starts[1:3]
        self._device_id = None if self._numpy else self._state.data.device_id
        if self._numpy:  # the caller reads these views; writing to them would change the state
            self.full_table, self.lengths = self.full_table[:], self.lengths[:]
            self.full_table.flags.writeable = self.lengths.flags.writeable = False
        self.table = self.full_table[:1]

    def _load(self) -> None:
        """Append nothing, so that the kernel is compiled before a capture, during which it cannot be."""
        if self._fp8:
            return
        nothing = (
            self._engine.zeros((dim, self.heads_kv, 0, self.batch), self.dtype) for dim in (self.head_dim, self.head_dim_v)
        )
        self._write(next(nothing), next(nothing), 0)

    def _write(self, k: Any, v: Any, layer: int) -> None:
        """Enqueue the kernel that writes tokens of a layer."""
        pages = self._keys[layer], self._values[layer]
        if self._fp8:
            self._fp8.append(k, v, pages, layer, self._parts, advance=not layer)
        else:
            self._engine.append(k, v, *pages, self._parts, advance=not layer)

    def __repr__(self) -> str:
        lengths, used = self._pages.lengths, self.pages - self.free_pages
        return (
            f"<KVCache: {np.count_nonzero(lengths)} of {self.batch} sequences, {lengths.sum()} tokens, "
            f"{used} of {self.pages} pages, {self.layers} layer{'s' * (self.layers > 1)}>"
        )

    @property
    def free_pages(self) -> int:
        """The number of free pages."""
        return len(self._pages.free)

    @property
    def host_lengths(self) -> NDArray[np.int64]:
        """The length of each sequence after the step that began last, as a numpy array ``(B,)``; a copy."""
        return self._pages.lengths.copy()

    def keys(self, layer: int = 0) -> Any:
        """The keys of a layer, ``(D, Hkv, page_size, pages)``; a view of the order (D, page_size, Hkv, pages).

        Those of an FP8 cache are a :class:`cupy_sdpa.fp8.Fp8Array`.
        """
        return self._arrays(self._keys, 0, layer)

    def values(self, layer: int = 0) -> Any:
        """The values of a layer, ``(Dv, Hkv, page_size, pages)``; a view of the order (Dv, page_size, Hkv, pages)."""
        return self._arrays(self._values, 1, layer)

    def _arrays(self, layers: list[Any], side: int, layer: int) -> Any:
        pages = layers[index(layer, self.layers, "layer")]
        return self._fp8.array(pages, side, layer) if self._fp8 else pages

    def begin_step(self, counts: int | Sequence[int] | NDArray[Any] = 1) -> None:
        """Announce a step: take the pages of the new tokens, and copy shared pages that will be written.

        If the counts are those of the previous step and no page is taken, nothing is enqueued.

        Args:
            counts: the number of new tokens of each sequence, B numbers on the host; or one number for all sequences.

        Raises:
            TypeError, ValueError: counts are not B integers of 0 or more, or a sequence would exceed ``max_length``.
            OutOfPages: not enough pages are free. The cache is unchanged after any of these errors.
            RuntimeError: the stream is being captured, or the previous step was not appended.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, dtype="float32", numpy=True)
        >>> cache.begin_step([1, 30])
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([1, 30], 1)
        """
        self._check_no_step("begin_step()")
        given = read_counts(counts, self.batch)
        copies, entries = self._pages.extend(given)
        if copies:
            with self._device():
                self._engine.copy_pages(self._storage, copies)
        updates = []
        if given is not self._counts:
            updates = [(self._first_count + b, int(given[b])) for b in np.flatnonzero(given != self._counts).tolist()]
            self._counts, self._needed = given, tokens_of(given)
        self._update(entries, updates)
        self._begun = self._announced = True

    def append(self, k: Array, v: Array, layer: int = 0, *, counts: int | Sequence[int] | NDArray[Any] | None = None) -> None:
        """Write the new keys and values of one layer; one kernel. The append of layer 0 is the first of a step.

        Args:
            k: ``(D, Hkv, S, B)``, of which the first ``counts[b]`` of the S tokens of each sequence are written; or packed
                ``(D, Hkv, T)``, with the new tokens of all sequences in order; T is their number. The stride along D is one
                element.
            v: ``(Dv, Hkv, S, B)`` or packed ``(Dv, Hkv, T)``. k and v have the dtype of the cache. An FP8 cache takes float16,
                bfloat16, float32 (numpy: also float64), and FP8 arrays of any scale.
            layer: the layer.
            counts: as for :meth:`begin_step`, which is called with them if no step is announced. The default is then S for
                every sequence; packed arrays need counts.

        Raises:
            TypeError, ValueError: arrays do not match the cache, each other, or the counts; and as :meth:`begin_step`.
            OutOfPages: not enough pages are free. The cache is unchanged after any of these errors.
            RuntimeError: another layer is appended before layer 0, or the stream is being captured and no step is announced.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, dtype="float32", layers=2, numpy=True)
        >>> packed = np.ones((8, 2, 5), np.float32, order="F")
        >>> cache.append(packed, packed, counts=[2, 3])
        >>> cache.append(packed, packed, layer=1)
        >>> cache.lengths
        array([2, 3], dtype=int32)
        """
        layer = index(layer, self.layers, "layer")
        keys, values, source = self._fp8.read(k, v) if self._fp8 else (k, v, "")
        dtype, dims = None if self._fp8 else self.dtype, (self.head_dim, self.head_dim_v)
        check_arrays(keys, values, dims, self.heads_kv, self.batch, dtype, self._device_id)
        capturing = self._capturing()
        if capturing and not (self._begun if layer else self._announced):
            raise RuntimeError(
                "the stream is being captured and no step is announced; call begin_step() before the capture begins"
            )
        if layer and not capturing and (not self._begun or (self._announced and not self._captured)):
            raise RuntimeError(f"layer {layer} is appended, but layer 0 of this step is not; append layer 0 first")
        begun = bool(layer) or self._announced
        if counts is not None:
            given = read_counts(counts, self.batch)
        elif begun:
            given = self._counts
        elif k.ndim == 4:
            given = read_counts(k.shape[2], self.batch)
        else:
            raise ValueError("packed arrays need the number of new tokens of each sequence; pass counts=, or call begin_step()")
        if begun and given is not self._counts and (given != self._counts).any():
            raise ValueError(
                f"counts are {given.tolist()}, but the step was announced with {self._counts.tolist()}; leave counts out"
            )
        check_tokens(k, given, self._needed if begun else tokens_of(given), capturing)
        if self._fp8 and capturing:
            self._fp8.check_capture(layer, source)
        if not begun:
            self.begin_step(given)
        with self._device():
            if self._fp8 and self._fp8.unknown(layer) and given.any():
                self._fp8.set_scales(k, v, layer, self._parts.counts)
            self._write(k, v, layer)
        self._captured |= capturing
        if not layer and not capturing:
            self._announced = False

    def fork(self, source: int, target: int) -> None:
        """Make an empty sequence a copy of another. They share pages; no keys or values are copied before one of them grows.

        Raises:
            ValueError: a sequence is not in the batch, or the target is not empty.
            RuntimeError: a step is announced and not appended, or the stream is being captured.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, dtype="float32", numpy=True)
        >>> tokens = np.ones((8, 2, 20), np.float32, order="F")
        >>> cache.append(tokens, tokens, counts=[20, 0])
        >>> cache.fork(0, 1)
        >>> cache.free_pages, cache.shared_prefix()
        (2, 16)
        """
        source, target = (index(b, self.batch, "sequence") for b in (source, target))
        self._check_no_step("fork()")
        if length := int(self._pages.lengths[target]):
            raise ValueError(f"the target, sequence {target}, has {length} tokens; call release({target}) first")
        self._update(self._pages.fork(source, target), [self._length_of(target)])

    def truncate(self, sequence: int, length: int) -> None:
        """Shorten a sequence and free the pages beyond its new length.

        Raises:
            TypeError, ValueError: the sequence is not in the batch, or the length is negative or more than the present one.
            RuntimeError: a step is announced and not appended, or the stream is being captured.
        """
        sequence = index(sequence, self.batch, "sequence")
        present = int(self._pages.lengths[sequence])
        if not isinstance(length, numbers.Integral):
            raise TypeError(f"length is {length!r}; it must be an integer")
        if not 0 <= length <= present:
            raise ValueError(
                f"length is {length}, but sequence {sequence} has {present} tokens; it must be from 0 to {present}"
            )
        self._check_no_step("truncate()")
        self._update(self._pages.truncate(sequence, int(length)), [self._length_of(sequence)])

    def release(self, sequence: int) -> None:
        """Remove all tokens of a sequence and free its pages; :meth:`truncate` to 0."""
        self.truncate(sequence, 0)

    def shared_prefix(self) -> int:
        """The number of tokens at the start that all sequences with tokens share through the same full pages."""
        return self._pages.shared_prefix()

    # Updates of the state

    def _length_of(self, sequence: int) -> tuple[int, int]:
        """The update that sets the length of a sequence."""
        return self._first_length + sequence, int(self._pages.lengths[sequence])

    def _update(self, entries: list[Any], updates: list[tuple[int, int]]) -> None:
        """Store new entries of the table, and other updates, in the state."""
        width = self.full_table.shape[0]
        updates += [(entry.sequence * width + entry.place, entry.page) for entry in entries]
        if updates:
            with self._device():
                self._engine.store(self._state, updates)
        if entries:
            longest = max(1, *map(len, self._pages.by_sequence))
            needed = min(1 << (longest - 1).bit_length(), width)
            if needed != self.table.shape[0]:
                self.table = self.full_table[:needed]

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._numpy else cupy_runtime.on_device_of(self._state)

    def _capturing(self) -> bool:
        return not self._numpy and cupy_runtime.capturing()

    def _check_no_step(self, name: str) -> None:
        """Check that a call is between two steps. After a capture it is unknown whether the step was launched."""
        if self._capturing():
            raise RuntimeError(f"the stream is being captured; call {name} before the capture begins")
        if self._announced and not self._captured:
            raise RuntimeError(f"a step is announced and not appended; append its layer 0 before {name}")
