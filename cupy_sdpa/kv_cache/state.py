"""The state of a key/value cache on the device and on the host, and changes that happen on both or on neither."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from ..extend import cupy_runtime
from . import cache_kernels
from .cache_arguments import tokens_of, uniform
from .cache_lengths import register
from .fp8_pages import Fp8Pages
from .page_tables import Change, Entry, Pages
from .rope import Rope

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

#: The alignment of the state array's parts, in elements of 4 bytes.
_UNIT = 64
#: The attributes that are views of others, or follow from them.
_DERIVED = ("_keys", "_values", "_parts", "_device_id", "full_table", "lengths", "table", "_rope_compiled", "_queries")


class CacheStep(NamedTuple):
    """The present step.

    Attributes:
        counts: the new tokens of each sequence, as on the device; not to be modified.
        added: the tokens that the step added to what each sequence is now: the counts, unless sequences were reordered.
        present: how many of them no call has removed; not to be modified.
        needed: :func:`tokens_of` the counts.
        missing: the layers that are not appended; in a graph they may be.
        tokens: S of the arrays of layer 0, or T if they are packed; None before its append.
        packed: whether the arrays of layer 0 are packed.
        changed: whether tokens were removed, or sequences forked or reordered, since.
    """

    counts: NDArray[np.int64]
    added: NDArray[np.int64]
    present: NDArray[np.int64]
    needed: tuple[int, int]
    missing: frozenset[int]
    tokens: int | None = None
    packed: bool = False
    changed: bool = False


class _Undo(NamedTuple):
    """What restores a cache: the pages, the step, the known FP8 scales, places and values of the state array, and rows."""

    change: Change
    step: CacheStep
    known: frozenset[tuple[int, int]]
    values: list[tuple[int, int]]
    rows: Callable[[], None]


class CacheState:
    """The arrays of a :class:`cupy_sdpa.KVCache`, its pages and its present step."""

    head_dim: int
    head_dim_v: int
    heads_kv: int
    pages: int
    page_size: int
    batch: int
    layers: int
    max_length: int
    layout: str | None
    table: Any
    _fp8: Fp8Pages | None
    #: Whether the kernel that rotates keys is compiled.
    _rope_compiled = False
    #: The rotation of the keys of each layer whose latest rotation is known.
    _ropes: Mapping[int, Rope] = {}

    def _create(self, dtype: np.dtype[Any], *, of_numpy: bool) -> None:
        """Create everything, without tokens; ``dtype`` is the dtype of the pages in memory."""
        self._numpy = of_numpy
        self._storage = [self._zeros((*self._page_shape(dim), self.layers), dtype) for dim in (self.head_dim, self.head_dim_v)]
        self._pages = Pages(self.pages, self.page_size, self.batch, self.max_length)
        self._width = min(-(-self.max_length // self.page_size), self.pages)
        sizes = self._width * self.batch, self.batch, self.batch, self.batch, self.batch + 1
        #: Where the table, the lengths, the counts, the numbers of the kernel and the offsets begin in the state array.
        self._starts = np.cumsum([0, *(-(-size // _UNIT) * _UNIT for size in sizes)]).tolist()
        self._state = self._zeros((self._starts[-1],), np.dtype(np.int32))
        nothing = uniform(0, self.batch)
        self._step = CacheStep(nothing, nothing, nothing, (0, 0), frozenset())
        self._every = frozenset(range(self.layers))
        #: The layers whose append was captured.
        self._captured: frozenset[int] = frozenset()
        #: S or T of the arrays of layer 0 in the capture, and whether they are packed.
        self._captured_tokens = 0, False
        self._undo: _Undo | None = None
        self._create_views()

    def _zeros(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return an array of zeros in Fortran order."""
        if self._numpy:
            return np.zeros(shape, dtype, order="F")
        array = cupy_runtime.empty(shape, dtype)
        array.T.fill(0)  # in C order CuPy clears memory with one driver call
        return array

    @property
    def nbytes(self) -> int:
        """The bytes of the cache's arrays: pages, the page table and lengths, and the scales and means of FP8 pages.

        >>> from cupy_sdpa import KVCache
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> cache.nbytes >= cache.keys().nbytes + cache.values().nbytes
        True
        """
        of_fp8 = self._fp8.nbytes if self._fp8 else 0
        return int(sum(x.nbytes for x in (*self._storage, self._state)) + of_fp8)

    @property
    def _of_pages(self) -> list[Any]:
        """The arrays that belong to pages: keys, values, and the means of FP8 values."""
        return [*self._storage, *([self._fp8.means] if self._fp8 else [])]

    def _page_shape(self, dim: int) -> tuple[int, ...]:
        return dim, self.page_size, self.heads_kv, self.pages

    def _create_views(self) -> None:
        """Create the views of the pages and of the state array: table, lengths and counts, which kernels update."""
        self._keys, self._values = (
            [storage[..., layer].transpose(0, 2, 1, 3) for layer in range(self.layers)] for storage in self._storage
        )
        self.full_table = self._state[: self._width * self.batch].reshape((self._width, self.batch), order="F")
        self.lengths, counts, finished = (self._state[start : start + self.batch] for start in self._starts[1:4])
        starts = self._state[self._starts[4] :][: self.batch + 1]
        self._parts = cache_kernels.State(self.full_table, self.lengths, counts, finished, starts)
        self._device_id = None if self._numpy else self._state.data.device_id
        if self._numpy:  # the caller reads these views; writing to them would change the state
            self.full_table, self.lengths, counts, starts = self.full_table[:], self.lengths[:], counts[:], starts[:]
            for view in (self.full_table, self.lengths, counts, starts):
                view.flags.writeable = False
        #: The lengths and the offsets of the last append's queries.
        self._queries = counts, starts
        if self.layout is not None:
            self.full_table = self.full_table.T
        register(self)
        self._fit_table()

    def _fit_table(self) -> None:
        """Give ``table`` a power of two of rows, so that a growing sequence needs few plans."""
        longest = max(1, *map(len, self._pages.by_sequence))
        needed = min(1 << (longest - 1).bit_length(), self._width)
        rows = 0 if self.layout is None else 1
        if "table" not in vars(self) or needed != self.table.shape[rows]:
            self.table = self.full_table[:, :needed] if rows else self.full_table[:needed]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, without views; arrays have one axis, so that a copy has their memory order."""
        self._recover()
        state = {name: value for name, value in vars(self).items() if name not in _DERIVED}
        return state | {"_storage": [storage.reshape((-1,), order="F") for storage in self._storage]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        shapes = [(*self._page_shape(dim), self.layers) for dim in (self.head_dim, self.head_dim_v)]
        self._storage = [x.reshape(shape, order="F") for x, shape in zip(self._storage, shapes, strict=True)]
        self._create_views()

    def __copy__(self) -> NoReturn:
        raise TypeError(
            "copy.copy of a KVCache would share its pages: use copy.deepcopy for an independent cache, or fork() for a sequence"
        )

    def _beginning(self, counts: NDArray[np.int64]) -> tuple[Change, CacheStep, Callable[[], None]]:
        """Return the change of the host that begins a step, the step, and the work of the device."""
        change, copies = self._pages.extend(counts)
        before, updates = self._step, self._entries(change)
        step = CacheStep(counts, counts, counts, before.needed, self._every)
        if counts is not before.counts:
            both = zip(self._counts_of(counts), self._counts_of(before.counts), strict=True)
            updates += [new for new, old in both if new != old]
            step = CacheStep(counts, counts, counts, tokens_of(counts), self._every)

        def work() -> None:
            if copies:
                cache_kernels.copy_pages(self._of_pages, copies)
            if updates:
                cache_kernels.store(self._state, updates)

        return change, step, work

    def _counts_of(self, counts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Counts, and the offsets of packed arrays, as places and values of the state array."""
        starts = np.cumsum([0, *counts]).tolist()
        return [*enumerate(counts.tolist(), self._starts[2]), *enumerate(starts, self._starts[4])]

    def _lengths_of(self, lengths: NDArray[np.int64]) -> list[tuple[int, int]]:
        """Lengths as places and values of the state array."""
        return list(enumerate(lengths.tolist(), self._starts[1]))

    def _device_lengths(self) -> list[tuple[int, int]]:
        """Return the lengths on the device, which the append of layer 0 advances, as places and values of the state array."""
        step, lengths = self._step, self._pages.lengths
        return self._lengths_of(lengths - step.counts if 0 in step.missing else lengths)

    def _entries(self, change: Change) -> list[tuple[int, int]]:
        """Return the new entries of the table as places and values of the state array."""
        return self._places(self._pages.entries(change))

    def _places(self, entries: Sequence[Entry]) -> list[tuple[int, int]]:
        return [(entry.sequence * self._width + entry.place, entry.page) for entry in entries]

    def _set(
        self,
        change: Change,
        before: list[tuple[int, int]],
        copies: Sequence[Entry] = (),
        moved: Sequence[tuple[int, int]] = (),
        order: Sequence[int] | None = None,
    ) -> None:
        """Change lengths and pages between two steps; ``before`` are the lengths on the device that change.

        ``copies`` are the new entries of pages that are copied, and ``moved`` tokens move, as pairs of rows (from, to).
        ``order`` is the sequence that each one continues; None if tokens are removed.
        """
        lengths = [(place, int(change.lengths[place - self._starts[1]])) for place, _ in before]
        updates = lengths + self._entries(change) + self._places(copies)
        pages = [(self._pages.by_sequence[entry.sequence][entry.place], entry.page) for entry in copies]
        targets, count = [to for _, to in moved], len(moved)
        with self._device():
            saved = cache_kernels.read_rows(self._storage, [row for row, _ in moved] + targets) if moved else []

        def work() -> None:
            if pages:
                cache_kernels.copy_pages(self._of_pages, pages)
            if moved:
                cache_kernels.write_rows(self._storage, saved, targets, 0)
            cache_kernels.store(self._state, updates)

        def restore() -> None:
            if moved:
                cache_kernels.write_rows(self._storage, saved, targets, count)

        added, present, removed = self._step.added, self._step.present, []
        if order is None:
            removed = self._pages.rest(change.lengths, self._pages.lengths, change)
            present = np.clip(present - (self._pages.lengths - change.lengths), 0, present)
        else:
            added, present = added[order], present[order]
        step = self._step._replace(missing=frozenset(), added=added, present=present, changed=True)
        self._perform(change, step, work, before, restore, removed)

    def _perform(
        self,
        change: Change,
        step: CacheStep,
        work: Callable[[], None],
        lengths: Sequence[tuple[int, int]] = (),
        restore: Callable[[], None] = lambda: None,
        removed: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Change the device and the host, or neither if an exception is raised.

        ``work`` enqueues the work of the device, and ``restore`` what restores the pages. It changes ``lengths``, the present
        values as places and values of the state array. The rows of ``removed`` tokens are cleared after the change: what is
        left to do is then in the place of what undoes it.
        """
        counts = self._counts_of(self._step.counts) if step.counts is not self._step.counts else []
        known = self._fp8.known if self._fp8 else frozenset()
        undo = _Undo(self._pages.inverse(change), self._step, known, [*lengths, *counts], restore)
        try:
            self._undo = undo
            with self._device():
                work()
            self._pages.make(change)
            self._step = step
            if change.by_sequence:
                self._fit_table()
            self._undo = self._clearing(removed) if removed else None
            self._recover()
        except BaseException:
            self._recover()
            raise

    def _clearing(self, rows: Sequence[tuple[int, int]]) -> _Undo:
        """Return what clears rows, and changes nothing else."""
        known = self._fp8.known if self._fp8 else frozenset()
        return _Undo(
            self._pages.unchanged(), self._step, known, [], functools.partial(cache_kernels.clear_rows, self._storage, rows)
        )

    def _recover(self) -> None:
        """Undo a change that was not completed, or clear removed rows. If this is interrupted, the next call begins with it."""
        if self._undo is None:
            return
        if self._capturing():
            raise RuntimeError(
                "the stream is being captured, and an earlier call was interrupted; end the capture: the next call restores "
                "the cache"
            )
        change, self._step, known, values, rows = self._undo
        self._pages.make(change)
        self._fit_table()
        for b, pages in change.by_sequence.items():
            column = [*pages, *[0] * (self._width - len(pages))]
            values = [*values, *enumerate(column, b * self._width)]
        with self._device():
            if values:
                cache_kernels.store(self._state, values)
            rows()
            if self._fp8:
                self._fp8.restore(known)
        self._undo = None

    def _device(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self._numpy else cupy_runtime.on_device_of(self._state)

    def _capturing(self) -> bool:
        return not self._numpy and cupy_runtime.capturing()

    def _check_appended(self, name: str) -> None:
        """Check that the lengths on the device include the announced tokens; ``name`` is what reads them."""
        step = self._step
        if 0 in step.missing - self._captured:
            raise RuntimeError(
                f"a step with seq_lens_q {step.counts.tolist()} is announced and not appended; append its layer 0 before "
                f"{name}, or call cancel_step()"
            )

    def _check_layer(self, layer: int, capturing: bool) -> bool:
        """True if the append of a layer belongs to the step that has begun; otherwise it begins one. It must be its turn."""
        missing = self._step.missing
        if layer in missing:
            if layer and not capturing and 0 in missing - self._captured:
                raise RuntimeError(f"layer {layer} is appended, but layer 0 of this step is not; append layer 0 first")
            return True
        if capturing:
            raise RuntimeError(
                "the stream is being captured and no step is announced; call begin_step() before the capture begins"
            )
        if layer and missing - self._captured:
            raise RuntimeError(
                f"layer {layer} of this step is appended already; layers {sorted(missing)} are not: pass layer= of one of them"
            )
        if layer:
            raise RuntimeError(f"layer {layer} is appended, but no step has begun; append layer 0 first")
        self._check_no_step("the next append of layer 0")
        return False

    def _check_not_capturing(self, name: str) -> None:
        """Check that a call that changes the tables of the host is outside of a capture."""
        if self._capturing():
            raise RuntimeError(f"the stream is being captured; call {name} before the capture begins")

    def _check_no_step(self, name: str) -> None:
        """Check that a call is between two steps. After a capture it is unknown whether the captured layers were launched."""
        self._check_not_capturing(name)
        missing = self._step.missing - self._captured
        if 0 in missing:
            raise RuntimeError(f"a step is announced and not appended; append its layer 0 before {name}, or call cancel_step()")
        if missing:
            raise RuntimeError(
                f"layers {sorted(missing)} of this step are not appended; append them (layer=) before {name}, or call "
                "cancel_step()"
            )
