"""A paged key/value cache: its arrays and its page table, on the device or in numpy arrays."""

from __future__ import annotations

from collections.abc import Sequence
from types import EllipsisType
from typing import TYPE_CHECKING, Any

import numpy as np

from ..extend import TYPES, Array, Axes, cupy_runtime, dtype_name, numpy_dtype, read_flag, read_number, takes_options
from ..layout import Layout
from . import cache_kernels
from .cache_arguments import check_new_tokens, check_tokens, index, read_lengths, refuse_names, tokens_of
from .cache_sequences import CacheSequences
from .fp8_pages import Fp8Pages
from .picture import picture
from .rope import Rope, read_positions, read_rope

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import


class KVCache(CacheSequences):
    """Keep keys and values of a batch of sequences in pages, for attention with a page table.

    Every sequence is a list of pages. Sequences may share pages (:meth:`fork`); a shared page is copied before one of its
    owners writes to it. One step adds new tokens to every sequence: :meth:`begin_step` reserves pages, and :meth:`append`
    writes the keys and values of one layer, layer 0 first. Without :meth:`begin_step`, the append of layer 0 calls it. A step
    ends when every layer is appended; :meth:`cancel_step` removes the tokens of an incomplete step.

    If a call raises (even Ctrl-C), the cache is either unchanged or fully updated. ``copy.deepcopy`` and ``pickle`` give an
    independent cache.

    In a captured CUDA graph :meth:`append` reads the numbers of new tokens, the page table and the lengths from arrays with
    constant addresses. Call ``begin_step`` before the capture and before every launch of the graph; the numbers of tokens may
    differ, up to S, or up to a sum of T. Also call ``begin_step`` before an append outside of the graph. Attention in the graph
    reads the rows of the table that it was captured with: capture ``full_table``, or capture again when ``table`` has grown.

    All work is enqueued on CuPy's current stream. Use a cache from one thread and one stream at a time.

    Args:
        head_dim: D, the head dim of keys.
        heads_kv: Hkv, the number of key/value heads.
        pages: the number of pages.
        batch: B, the number of sequences.
        page_size: tokens per page. Default 64.
        head_dim_v: Dv, the head dim of values. Default None: D.
        dtype: float16, bfloat16, float32, float64; or float8_e4m3fn or float8_e5m2 for FP8 (:doc:`/fp8`). Default None:
            bfloat16, and float32 for a cache of numpy arrays, because the CPU computes in float32.
        layers: the number of layers, which share the page table. Default 1.
        max_length: the maximum number of tokens of one sequence. Default None: ``pages * page_size``.
        k_scale, v_scale: the scales of FP8 keys and values, which are multiplied by the scale and rounded: a number, or a
            number for each layer. Values larger than the dtype's largest number divided by the scale saturate. Default None:
            each layer's scale is chosen for twice the largest magnitude of its first tokens; if they are an FP8 array, the
            cache takes its scale.
        rotate: whether FP8 keys are rotated, see :func:`cupy_sdpa.fp8.quantize`; D must be even. You must then also rotate FP8
            queries. Default False.
        numpy: True for a cache of numpy arrays, False for arrays on CuPy's current device. Default False.
        layout: the axes of new tokens, :meth:`keys` and :meth:`values`, as for :func:`cupy_sdpa.attention`: ``"bshd"``,
            ``"bhsd"`` or ``"sbhd"``; packed tokens are then ``(T, Hkv, D)``, and the axes of ``table`` and ``full_table`` are
            reversed. Default None: the layout of :func:`cupy_sdpa.layout.default`, or the shapes below.

    Attributes:
        full_table: the page table for the maximum length, int32 ``(ceil(max_length / page_size), B)``, at a constant address.
            Column b contains the pages of sequence b in order, then zeros.
        table: the first rows of ``full_table``: as many as the longest sequence has pages, rounded up to a power of two. Read
            it again after every append: an older table may lack rows, and keys beyond its rows are not attended to.
        lengths: the length of each sequence, int32 ``(B,)``, at a constant address. The append of layer 0 advances it. These
            arrays are the state of the cache: do not write to them (numpy arrays are read-only).

    Raises:
        TypeError, ValueError: an argument has the wrong type, or is not positive.
        RuntimeError: there is no GPU or no CuPy, and ``numpy`` is False.

    >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
    >>> tokens = np.ones((8, 2, 20, 2), np.float32, order="F")
    >>> cache.append(tokens, tokens, seq_lens_q=[20, 5])
    >>> cache
    <KVCache: 2 of 2 sequences, 25 tokens, 3 of 4 pages, 1 layer>
    >>> cache.lengths
    array([20,  5], dtype=int32)
    >>> cache.table
    array([[3, 1],
           [2, 0]], dtype=int32)
    """

    #: The end of the error message of a call that takes the cache for an array.
    _not_an_array = "pass **cache.view(layer) instead of k and v, for example attention(q, **cache.view(0))"

    @takes_options
    def __init__(
        self,
        head_dim: int,
        heads_kv: int,
        *,
        pages: int,
        batch: int,
        page_size: int = 64,
        head_dim_v: int | None = None,
        dtype: Any = None,
        layers: int = 1,
        max_length: int | None = None,
        k_scale: float | Sequence[float] | None = None,
        v_scale: float | Sequence[float] | None = None,
        rotate: bool = False,
        numpy: bool = False,
        layout: Layout | None = None,
    ) -> None:
        self.layout = Axes(layout).layout
        if layout == "thd":
            raise ValueError("layout is 'thd', which is for packed tokens only; pass 'bshd', whose packed tokens are 'thd'")
        self.head_dim, self.heads_kv = read_number("head_dim", head_dim, 1), read_number("heads_kv", heads_kv, 1)
        self.head_dim_v = self.head_dim if head_dim_v is None else read_number("head_dim_v", head_dim_v, 1)
        self.pages, self.batch = read_number("pages", pages, 1), read_number("batch", batch, 1)
        self.page_size, self.layers = read_number("page_size", page_size, 1), read_number("layers", layers, 1)
        tokens = self.pages * self.page_size
        self.max_length = tokens if max_length is None else read_number("max_length", max_length, 1)
        if min(tokens, self.max_length + self.page_size) * self.heads_kv >= 1 << 31:
            raise ValueError(f"max_length is {self.max_length} with {self.heads_kv} heads; their product must be below 2**31")
        numpy = read_flag("numpy", numpy)
        dtype = ("float32" if numpy else "bfloat16") if dtype is None else dtype
        name = dtype if isinstance(dtype, str) else dtype_name(np.dtype(dtype))
        if name not in TYPES:
            raise TypeError(f"dtype is {name}; it must be one of {', '.join(TYPES)}")
        self.dtype = numpy_dtype(name)
        self._fp8 = self._fp8_pages(name, (k_scale, v_scale), rotate, on_gpu=not numpy)
        if not numpy and cupy_runtime.current_device() is None:
            raise RuntimeError(
                "numpy is False and there is no GPU here, or no CuPy: pass numpy=True for a cache of numpy arrays on the CPU. "
                "`python -m cupy_sdpa info` lists what a GPU needs"
            )
        self._create(numpy_dtype(name, on_gpu=not numpy), of_numpy=numpy)
        self._load()

    def _fp8_pages(self, name: str, scales: tuple[Any, Any], rotate: Any, *, on_gpu: bool) -> Fp8Pages | None:
        """Return the conversion of tokens to FP8; None for other dtypes, which do not take its options."""
        if self.dtype.itemsize == 1:
            sizes = {"heads": self.heads_kv, "pages": self.pages, "layers": self.layers}
            dims, rotated = (self.head_dim, self.head_dim_v), read_flag("rotate", rotate)
            return Fp8Pages(name, dims, scales, **sizes, rotated=rotated, on_gpu=on_gpu)
        if rotate or any(scale is not None for scale in scales):
            raise ValueError(f"dtype is {name}; k_scale, v_scale and rotate are for FP8 caches: omit them")
        return None

    def _load(self) -> None:
        """Append nothing, so that the kernel is compiled before a capture, during which it cannot be."""
        if self._fp8:
            return
        nothing = (self._zeros((dim, self.heads_kv, 0, self.batch), self.dtype) for dim in (self.head_dim, self.head_dim_v))
        self._write(next(nothing), next(nothing), 0)

    def _write(
        self, k: Any, v: Any, layer: int, rotation: Any = None, positions: Any = None, *, may_begin: bool = True
    ) -> None:
        """Enqueue the kernel that writes tokens of a layer, and rotates their keys; ``may_begin`` as for FP8 pages."""
        pages = self._keys[layer], self._values[layer]
        if self._fp8:
            self._fp8.append(k, v, pages, layer, self._parts, advance=not layer, may_begin=may_begin)
        else:
            cache_kernels.append(k, v, *pages, self._parts, advance=not layer, rotation=rotation, positions=positions)

    def __repr__(self) -> str:
        lengths, used = self._pages.lengths, self.pages - self.free_pages
        return (
            f"<KVCache: {np.count_nonzero(lengths)} of {self.batch} sequences, {lengths.sum()} tokens, "
            f"{used} of {self.pages} pages, {self.layers} layer{'s' * (self.layers > 1)}>"
        )

    def _repr_html_(self) -> str:
        return f"<div><b>{repr(self)[1:-1]}</b>{picture(self._pages)}</div>"

    @property
    def free_pages(self) -> int:
        """The number of free pages.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> cache.begin_step([20, 5])
        >>> cache.free_pages
        1
        """
        return len(self._pages.free)

    @property
    def host_lengths(self) -> NDArray[np.int64]:
        """The length of each sequence after the step that began last, as a numpy array int64 ``(B,)``; a copy.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> cache.begin_step([20, 5])
        >>> cache.host_lengths.tolist(), cache.lengths.tolist()  # no layer is appended yet
        ([20, 5], [0, 0])
        """
        return self._pages.lengths.copy()

    def keys(self, layer: int = 0) -> Any:
        """Return a layer's keys in all pages; column b of ``table`` contains the pages of sequence b.

        Args:
            layer: the layer.

        Returns:
            A view ``(D, Hkv, page_size, pages)``, in memory in the order (D, page_size, Hkv, pages). With a layout, the axes
            have its order, for example ``(pages, page_size, Hkv, D)`` for ``"bshd"``. An FP8 cache returns a
            :class:`cupy_sdpa.fp8.Fp8Array`.

        Raises:
            TypeError, ValueError: the cache has no such layer.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 20, 2), np.float32, order="F")
        >>> cache.append(tokens, tokens)
        >>> cache.keys().shape
        (8, 2, 16, 4)
        """
        return self._arrays(self._keys, 0, layer, Axes(self.layout))

    def values(self, layer: int = 0) -> Any:
        """Return a layer's values in all pages, as :meth:`keys` returns its keys.

        Args:
            layer: the layer.

        Returns:
            A view ``(Dv, Hkv, page_size, pages)``, in memory in the order (Dv, page_size, Hkv, pages); see :meth:`keys`.

        Raises:
            TypeError, ValueError: the cache has no such layer.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, head_dim_v=4, numpy=True)
        >>> cache.values().shape
        (4, 2, 16, 4)
        """
        return self._arrays(self._values, 1, layer, Axes(self.layout))

    @refuse_names
    def view(self, layer: int = 0, *, seq_lens_q: Array | EllipsisType | None = ...) -> dict[str, Any]:
        """Return a layer's arguments for attention: ``attention(q, **cache.view(layer), causal="bottom_right")``.

        :func:`cupy_sdpa.apply_rope` and :func:`cupy_sdpa.tree_mask` take the same dictionary.

        Args:
            layer: the layer.
            seq_lens_q: for queries other than the last append's: their lengths, as for :func:`cupy_sdpa.attention`; or None for
                the newest tokens of every sequence. Pass them here, because Python raises TypeError if a call gets
                ``seq_lens_q=`` twice. By default the dictionary describes the queries of the last append.

        Returns:
            A new dictionary of ``k``, ``v``, ``page_table`` and ``seq_lens_kv``: :meth:`keys`, :meth:`values`, ``table`` and
            ``lengths``; and of ``layout``, if the cache has one.

            By default the dictionary describes the queries of the last append. After an append of packed arrays it also has
            ``cu_seqlens_q`` and ``max_seqlen_q``: pass packed queries. If some of the S tokens were padding, it has
            ``seq_lens_q``, as passed to the append, and ``max_seqlen_q``, their maximum: pass at least that many queries. It
            also has them while an append with S > 1 is captured, because the lengths may differ in every launch;
            ``max_seqlen_q`` is then S, or T for packed arrays. Otherwise it has no lengths, and any number of queries counts as
            the newest tokens of every sequence. This includes steps with S = 1 in which some sequences get no token: ignore the
            outputs and weights of their queries, or pass ``seq_lens_q=``.

            The arrays are at constant addresses and follow later appends. Still, make a new dictionary after every append,
            because the table may have grown. For a captured graph use ``cache.view(layer) | {"page_table": cache.full_table}``.

        Raises:
            TypeError, ValueError: the cache has no such layer.
            RuntimeError: it is unknown which queries are padding: the last append had padding, and since then tokens were
                removed or sequences were forked or reordered; or a step with padding is announced and not yet appended.

        >>> import cupy_sdpa
        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> tokens = np.ones((8, 2, 3, 2), np.float32, order="F")
        >>> cache.append(tokens, tokens)
        >>> cupy_sdpa.attention(tokens, **cache.view(), causal="bottom_right").shape
        (8, 2, 3, 2)
        """
        queries = self._of_queries() if seq_lens_q is ... else {} if seq_lens_q is None else {"seq_lens_q": seq_lens_q}
        layout = self.layout and ("thd" if "cu_seqlens_q" in queries else self.layout)
        axes = Axes(layout)
        k, v = (self._arrays(layers, side, layer, axes) for side, layers in enumerate((self._keys, self._values)))
        of_layout = {} if layout is None else {"layout": layout}
        return {"k": k, "v": v, "page_table": self.table, "seq_lens_kv": self.lengths, **queries, **of_layout}

    def _of_queries(self) -> dict[str, Any]:
        """Return the lengths or offsets of the last append's queries, as options of :func:`cupy_sdpa.attention`."""
        step, (counts, starts) = self._step, self._queries
        captured = 0 in step.missing & self._captured
        tokens, packed = self._captured_tokens if captured else (step.tokens, step.packed)
        most = max(1, step.needed[0])
        if packed:  # rounded up, because a plan depends on the maximum
            longest = tokens if captured else 1 << (most - 1).bit_length()
            return {} if step.changed else {"cu_seqlens_q": starts, "max_seqlen_q": longest}
        full = tokens or most
        if captured:
            return {"seq_lens_q": counts, "max_seqlen_q": tokens} if full > 1 else {}
        if full == 1 or (step.counts == full).all():
            return {}
        self._check_appended("view()")
        if step.changed and ((step.added > 0) & (step.added < full) & (step.present > 0)).any():
            raise RuntimeError(
                f"the last append had seq_lens_q {step.counts.tolist()}, and tokens were removed, or sequences forked or "
                "reordered since: it is unknown which queries are padding; call view() before, or pass the lengths of your "
                "queries to view(seq_lens_q=)"
            )
        return {} if step.changed else {"seq_lens_q": counts, "max_seqlen_q": most}

    def _arrays(self, layers: list[Any], side: int, layer: int, axes: Axes) -> Any:
        pages = layers[index(layer, self.layers, "layer")]
        return axes.result("kv"[side], self._fp8.array(pages, side, layer) if self._fp8 else pages)

    @refuse_names
    def begin_step(self, seq_lens_q: int | Sequence[int] | NDArray[Any] = 1) -> None:
        """Announce a step: reserve pages for the new tokens, and copy shared pages that will be written.

        If every sequence gets as many tokens as in the previous step and no page is taken, nothing is enqueued.

        Args:
            seq_lens_q: the number of new tokens of each sequence, B numbers on the host; or one number for all sequences.

        Raises:
            TypeError, ValueError: ``seq_lens_q`` is not B integers of 0 or more, or a sequence would exceed ``max_length``.
            OutOfPages: not enough pages are free. The cache is unchanged after any of these errors.
            RuntimeError: the stream is being captured, or the previous step is incomplete: a layer is not appended.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
        >>> cache.begin_step([1, 30])
        >>> cache.host_lengths.tolist(), cache.free_pages
        ([1, 30], 1)
        """
        self._recover()
        self._check_no_step("begin_step()")
        change, step, work = self._beginning(read_lengths(seq_lens_q, self.batch))
        self._perform(change, step, work)

    @refuse_names
    def append(
        self,
        k: Array,
        v: Array,
        layer: int = 0,
        *,
        seq_lens_q: int | Sequence[int] | NDArray[Any] | None = None,
        rope: Rope | None = None,
        positions: Array | None = None,
    ) -> None:
        """Write the new keys and values of one layer, in one kernel. A step begins with layer 0.

        Args:
            k: ``(D, Hkv, S, B)``, of which the first ``seq_lens_q[b]`` of the S tokens of each sequence are written; or packed
                ``(D, Hkv, T)``, with the new tokens of all sequences in order; T is their number. The stride along D is one
                element.
            v: ``(Dv, Hkv, S, B)`` or packed ``(Dv, Hkv, T)``. k and v have the dtype of the cache. An FP8 cache takes float16,
                bfloat16, float32 (numpy: also float64), and FP8 arrays of any scale.
            layer: the layer.
            seq_lens_q: the number of new tokens of each sequence, as for :meth:`begin_step`, which is called with it if no step
                is announced. Default None: the numbers of the announced step, or S for every sequence. Packed arrays without an
                announced step need it.
            rope: rotates the keys by their positions in the cache while they are written;
                ``apply_rope(q, rope, **cache.view(layer))`` then rotates the queries. Not for FP8 caches. Default None: keys
                are written unchanged, also after rotated ones.
            positions: with ``rope``, the position of every token instead of its place in the cache, for example in a tree of
                drafts (:func:`cupy_sdpa.tree_depths`): int32 ``(S,)``, ``(S, B)`` or packed ``(T,)``; with a layout
                ``(B, S)``. Positions of padding are ignored.

        Raises:
            TypeError, ValueError: arrays or ``rope`` do not match the cache, each other, or ``seq_lens_q``; earlier keys of the
                layer had another ``rope``; and as :meth:`begin_step`.
            OutOfPages: not enough pages are free. The cache is unchanged after any of these errors.
            RuntimeError: the step already has this layer, or does not have layer 0 yet. Or the stream is being captured and no
                step is announced, or no keys were rotated before.

        >>> cache = KVCache(8, 2, pages=4, batch=2, page_size=16, layers=2, numpy=True)
        >>> packed = np.ones((8, 2, 5), np.float32, order="F")
        >>> cache.append(packed, packed, seq_lens_q=[2, 3])
        >>> cache.append(packed, packed, layer=1)
        >>> cache.lengths
        array([2, 3], dtype=int32)
        """
        layer = index(layer, self.layers, "layer")
        axes = Axes("thd" if self.layout and getattr(k, "ndim", 0) == 3 else self.layout)
        k, v = axes.array("k", k), axes.array("v", v)
        keys, values, source = self._fp8.read(k, v) if self._fp8 else (k, v, "")
        dtype, dims = None if self._fp8 else self.dtype, (self.head_dim, self.head_dim_v)
        check_new_tokens(keys, values, dims, self.heads_kv, self.batch, dtype, self._device_id)
        if rope is not None and self._fp8:
            raise ValueError(
                f"rope is passed, but the cache is {self._fp8.dtype}; rotate the keys with cupy_sdpa.apply_rope(k, rope, "
                "start=...), and append them without rope="
            )
        rotation = None if rope is None else read_rope(rope, self.head_dim)
        if positions is not None:
            if rope is None:
                raise ValueError(
                    "positions are passed without rope=, which would rotate by them: pass rope=, or omit positions="
                )
            positions = read_positions(positions, k, axes)
        self._recover()
        capturing, step = self._capturing(), self._step
        begun = self._check_layer(layer, capturing)
        if rope is not None:
            self._check_rope(rope, layer, empty=not (self._pages.lengths - (step.counts if begun else 0)).any())
        if seq_lens_q is not None:
            given = read_lengths(seq_lens_q, self.batch)
        elif begun:
            given = step.counts
        elif k.ndim == 4:
            given = read_lengths(k.shape[2], self.batch)
        else:
            raise ValueError("packed arrays need the number of tokens of each sequence; pass seq_lens_q=, or call begin_step()")
        if begun and given is not step.counts and (given != step.counts).any():
            raise ValueError(
                f"seq_lens_q is {given.tolist()}, but the step was announced with {step.counts.tolist()}; omit seq_lens_q"
            )
        check_tokens(k, given, step.needed if begun else tokens_of(given), capturing)
        if seq_lens_q is None and layer and k.ndim == 4 and not step.packed and step.tokens not in (None, k.shape[2]):
            raise ValueError(
                f"k has S = {k.shape[2]} tokens in layer {layer}, but {step.tokens} in layer 0 of this step; pass the tokens "
                "of one step, or seq_lens_q="
            )
        if capturing:
            if self._fp8:
                self._fp8.check_capture(layer, source)
            if rope and not self._rope_compiled:
                raise RuntimeError("the stream is being captured; append with rope= once before, to compile the kernel")
            with self._device():
                self._write(k, v, layer, rotation, positions)
            self._captured |= {layer}
            if layer == 0:
                self._captured_tokens = k.shape[2], k.ndim == 3
            return
        change, begin = self._pages.unchanged(), None
        if not begun:
            change, step, begin = self._beginning(given)

        def work() -> None:
            if begin:
                begin()
            if self._fp8 and self._fp8.unknown(layer) and given.any():
                self._fp8.set_scales(k, v, layer, self._parts.counts)
            self._write(k, v, layer, rotation, positions, may_begin=may_begin)

        before = self._pages.lengths - given if begun else self._pages.lengths
        may_begin = bool(((before == 0) & (given > 0)).any())

        def clear() -> None:
            pages = self._pages
            cache_kernels.clear_rows(self._storage, pages.rest(before, before + given, pages.unchanged()))

        step = step._replace(missing=step.missing - {layer})
        if layer == 0:
            step = step._replace(tokens=k.shape[2], packed=k.ndim == 3)
        of_first = (self._lengths_of(before), clear) if layer == 0 else ()
        self._perform(change, step, work, *of_first)
        if rope is not None:
            self._rope_compiled, self._ropes = True, {**self._ropes, layer: rope}

    def _check_rope(self, rope: Rope, layer: int, *, empty: bool) -> None:
        """Check that keys are rotated like the earlier keys of their layer; ``empty`` without earlier keys."""
        known = self._ropes.get(layer)
        if empty or known is None or rope == known:
            return
        both: Any = rope, known
        given, before = (f"{one} with frequencies from {one.frequencies[0]:.6g} to {one.frequencies[-1]:.6g}" for one in both)
        raise ValueError(
            f"rope is {given}, but the keys of layer {layer} in the cache were rotated with {before}: pass the same rotation "
            "in every step, or release() all sequences"
        )
