"""Masks of trees of draft tokens: each token attends to its ancestors, to itself, and to all earlier keys."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, KeysView, Sequence
from typing import Any

import numpy as np

from ..extend import Array, Axes, Expected, check_arrays, cupy_runtime, in_words, read_array, takes_options
from ..fp8.array import Fp8Array
from ..zoo import tree
from .cache_lengths import cache_of
from .tree_kernel import MAX_TOKENS, Intervals, fill_depths, fill_intervals


def tree_mask(
    parents: Array | Sequence[Any],
    k: Any,
    *,
    v: Any = None,
    page_table: Array | None = None,
    seq_lens_kv: Array | None = None,
    seq_lens_q: Array | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_q: Any = None,
    layout: str | None = None,
) -> _TreeMask:
    r"""Make the mask of a draft tree, for :func:`cupy_sdpa.attention` of the newest tokens to all keys.

    The tree consists of the newest Sq tokens of each sequence, whose keys are the last ones within its length. Query i
    attends to key j of the tree if j is i or an ancestor of i, and to all earlier keys. A tree without branches is
    ``causal="bottom_right"``.

    .. math:: \text{number}_i \in [\text{first}_j, \text{last}_j]

    is the condition: tokens are numbered in depth-first order, and the descendants of a token have the numbers from ``first``
    to ``last``. The mask takes 8 bytes per key, for any Sq. On the GPU one kernel runs on CuPy's current stream, without
    synchronization. It reads lengths and parents on the device, so you can capture it; keep the mask as long as the graph. Make
    the mask after the append of layer 0, once for all layers of a step. Using a mask after the cache's lengths have changed
    raises ValueError.

    Args:
        parents: ``(Sq,)``, or ``(Sq, B)`` with a tree for each sequence: integers, for each token the index of its parent,
            which must be smaller than its own; -1 for a root, which follows the earlier keys. Or bool ``(Sq, Sq)`` or ``(Sq,
            Sq, B)``, keys before queries: True where a query sees a key. Sq is at most 2048. A list or a numpy array; with CuPy
            keys also an int32 CuPy array, in which a parent that is not smaller counts as -1.
        k, page_table, seq_lens_kv, seq_lens_q: as for :func:`cupy_sdpa.attention`; ``**cache.view()`` passes them. With
            ``seq_lens_q``, the tree of a sequence consists of its first ``seq_lens_q[b]`` tokens.
        max_seqlen_q: the maximum of ``seq_lens_q``, at most Sq. Pass it if ``cache.view()`` also passes both to the call.
        cu_seqlens_q: None: packed sequences are not supported.
        v: ignored; accepted so that you can pass ``**cache.view()``.
        layout: as for :func:`cupy_sdpa.attention`. With a layout in C order ``parents`` is ``(B, Sq)``, or bool ``(B, Sq,
            Sq)``, queries before keys.

    Returns:
        A new dictionary for ``attention(q, **cache.view(layer), **mask)``: ``mask_mod``, which is :func:`cupy_sdpa.zoo.tree`,
        ``tensors``, and ``seq_lens_q`` if it is passed without ``max_seqlen_q``. You can add other options and ``tensors``. Its
        attribute ``depths`` has the numbers of :func:`tree_depths`, on the device of k.

    Raises:
        TypeError, ValueError: an array has the wrong type, dtype or shape; or on the host parents do not form a tree.
        RuntimeError: a step of the cache is announced and not appended.

    Source: Miao et al. 2024, "SpecInfer", section 4.2; Cai et al. 2024, "Medusa", section 2.1.2.

    >>> import cupy_sdpa
    >>> cache = cupy_sdpa.KVCache(8, 2, pages=4, batch=1, page_size=16, numpy=True)
    >>> x = np.asfortranarray(np.random.default_rng(0).standard_normal((8, 2, 4, 1)), np.float32)
    >>> cache.append(x, x)                    # a prompt
    >>> cache.append(x, x)                    # a draft: token 0, its children 1 and 2, and 3, the child of 2
    >>> mask = tree_mask([-1, 0, 0, 2], **cache.view())
    >>> cupy_sdpa.attention(x, **cache.view(), **mask).shape
    (8, 2, 4, 1)
    >>> cache.keep(0, [0, 2, 3])              # the accepted path
    """
    if cu_seqlens_q is not None:
        raise ValueError(
            "cu_seqlens_q is passed; trees of packed queries are not supported: append the draft as (D, Hkv, S, B)"
        )
    cache = cache_of(seq_lens_kv)
    if cache is not None:
        cache._check_appended("tree_mask")
    axes = Axes(layout)
    like = axes.array("k", k.data if isinstance(k, Fp8Array) else k)
    given = {"page_table": axes.option("page_table", page_table), "seq_lens_kv": seq_lens_kv, "seq_lens_q": seq_lens_q}
    page_table, seq_lens_kv, seq_lens_q = (x if x is None else read_array(name, x) for name, x in given.items())
    shape = read_array("k", like).shape
    if len(shape) != 4:
        raise ValueError(f"k has shape {shape}; it must be (D, Hkv, Skv, B), or with page_table (D, Hkv, page size, pages)")
    keys, batch = shape[2:]
    if page_table is not None:
        pages = page_table.shape
        keys, batch = (keys * pages[0], pages[1]) if len(pages) == 2 else (keys, batch)
    wanted = [Expected("page_table", (keys // max(shape[2], 1), batch), "int32", "(P, B)")]
    wanted += [Expected(name, (batch,), "int32", "(B,)") for name in ("seq_lens_kv", "seq_lens_q")]
    check_arrays(wanted, {"k": like, "page_table": page_table, "seq_lens_kv": seq_lens_kv, "seq_lens_q": seq_lens_q})
    on_gpu = cupy_runtime.is_array(like)
    with cupy_runtime.device_context(like):
        trees = _parents(parents, batch, on_gpu, axes)
        if max_seqlen_q is not None and max_seqlen_q > trees.shape[0]:
            raise ValueError(
                f"max_seqlen_q is {max_seqlen_q}, the tokens of the last append, but the tree has {trees.shape[0]}: make the "
                "mask after the append of the draft"
            )
        shapes = Intervals(number=(batch, trees.shape[0]), first=(batch, keys), last=(batch, keys))
        found = Intervals(*(cupy_runtime.new_result(like, shape, np.dtype(np.int32)) for shape in shapes))
        fill_intervals(trees, seq_lens_kv, seq_lens_q, found)
    tensors = {f"tree_{name}": x for name, x in found._asdict().items()}
    more = {} if seq_lens_q is None or max_seqlen_q is not None else {"seq_lens_q": seq_lens_q}
    mask = {"mask_mod": tree, "tensors": tensors, **more}
    return _TreeMask(mask, cache, functools.partial(_depths, trees, axes))


class _TreeMask(dict[str, Any]):
    """The options of :func:`tree_mask`. A call that takes them as ``**mask`` reads the keys.

    The lengths of a cache are compared then: they must be those for which the mask was made.

    Attributes:
        depths: the number of ancestors of each token, int32 ``(Sq, B)``, or ``(Sq, 1)`` of one tree for all sequences.
    """

    def __init__(self, mask: dict[str, Any], cache: Any, depths: Callable[[], Any]) -> None:
        super().__init__(mask)
        self._depths = depths
        self._cache: Callable[[], Any] = (lambda: None) if cache is None else weakref.ref(cache)
        self._lengths: Any = None if cache is None else cache.host_lengths

    @functools.cached_property
    def depths(self) -> Any:
        """See :func:`tree_depths`."""
        return self._depths()

    def __iter__(self) -> Iterator[str]:  # without it ** would not call keys()
        return iter(self.keys())

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        cache = self._cache()
        if cache is not None and (cache.host_lengths != self._lengths).any():
            raise ValueError(
                f"the tree_mask was made for lengths {self._lengths.tolist()} of the cache, which now has "
                f"{cache.host_lengths.tolist()}: make it after the append of layer 0, and a new one in every step"
            )
        return super().keys()

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return dict, ([*self.items()],)


@takes_options
def tree_depths(parents: Array | Sequence[Any], *, layout: str | None = None) -> Any:
    """Count the ancestors of each token in a draft tree: its position for a rotation, after the last accepted token.

    Use it to rotate a draft's keys before they are appended; :func:`tree_mask` needs the appended keys. A token's position is
    the sequence's length before the append plus the token's depth.

    Args:
        parents, layout: as for :func:`tree_mask`.

    Returns:
        int32 ``(Sq, B)``, or ``(Sq, 1)`` if all sequences share one tree; with a layout in C order ``(B, Sq)`` or ``(1, Sq)``.
        A CuPy array if ``parents`` is one, otherwise a numpy array. ``tree_mask(...).depths`` has the same numbers, on the
        device of the keys.

    Raises:
        TypeError, ValueError: parents have the wrong type, dtype or shape; or on the host they do not form a tree.

    >>> tree_depths([-1, 0, 0, 2]).T
    array([[0, 1, 1, 2]], dtype=int32)
    >>> import cupy_sdpa
    >>> cache = cupy_sdpa.KVCache(8, 2, pages=4, batch=2, page_size=16, numpy=True)
    >>> q, k = (np.ones((8, heads, 4, 2), np.float32, order="F") for heads in (4, 2))
    >>> rope, positions = cupy_sdpa.Rope(8), cache.lengths + tree_depths([-1, 0, 0, 2])
    >>> cache.append(k, k, rope=rope, positions=positions)
    >>> rotated = cupy_sdpa.apply_rope(q, rope, positions=positions)
    """
    axes, on_device = Axes(layout), cupy_runtime.is_array(parents)
    with cupy_runtime.device_context(parents) if on_device else contextlib.nullcontext():
        return _depths(_parents(parents, None, on_device, axes), axes)


def _depths(parents: Any, axes: Axes) -> Any:
    """Return the tokens' depths in the caller's axes, on the device of parents, ``(Sq, B)`` or ``(Sq, 1)``."""
    with cupy_runtime.device_context(parents):
        found = cupy_runtime.new_result(parents, parents.shape, np.dtype(np.int32))
        fill_depths(parents, found)
    return axes.result("depths", found)


def _parents(given: Any, batch: int | None, on_gpu: bool, axes: Axes) -> Any:
    """Return the parents, int32 ``(Sq, B)`` or ``(Sq, 1)``, where the keys are; with any B if ``batch`` is None."""
    on_device = cupy_runtime.is_array(given)
    if on_device and not on_gpu:
        raise TypeError("parents is a CuPy array, but k is a numpy array; pass parents.get()")
    array = axes.array("parents", given if on_device else np.asarray(given))
    if batch is None:
        batch = array.shape[-1] if array.ndim > (2 if array.dtype == bool else 1) else 1
    if array.dtype == bool:
        if on_device:
            raise TypeError("parents is a bool CuPy array; pass it as a numpy array, or pass the parents of the tokens")
        if array.ndim not in (2, 3) or array.shape[0] != array.shape[1] or array.shape[2:] not in ((), (1,), (batch,)):
            raise ValueError(f"parents is bool and has shape {array.shape}; it must be (Sq, Sq) or (Sq, Sq, {batch})")
        array = parents_of(array)
    if array.ndim not in (1, 2) or array.shape[1:] not in ((), (1,), (batch,)):
        raise ValueError(f"parents has shape {array.shape}; it must be (Sq,) or (Sq, {batch})")
    if (array.dtype.kind not in "iu" and array.size) or (on_device and array.dtype != np.int32):
        raise TypeError(
            f"parents is {in_words(given)} of {array.dtype}; it must be {'int32' if on_device else 'integers'}, the index of "
            "each token's parent, or bool: convert with .astype('int32')"
        )
    if array.shape[0] > MAX_TOKENS:
        raise ValueError(f"parents has {array.shape[0]} tokens; a tree has at most {MAX_TOKENS}: split the draft")
    array = array[:, None] if array.ndim == 1 else array
    if on_device:
        return cupy_runtime.cupy().asfortranarray(array)
    for token, b in np.argwhere((array < -1) | (array >= np.arange(len(array))[:, None])).tolist():
        allowed = f"from -1 to {token - 1}" if token else "-1"
        raise ValueError(
            f"the parent of token {token} is {array[token, b]}; it must be {allowed}, where -1 means the earlier keys: sort "
            "the tokens so that parents come first"
        )
    array = array.astype(np.int32, order="F")
    return cupy_runtime.cupy().asarray(array) if on_gpu else array


def parents_of(visible: Any) -> Any:
    """Return the parents in trees, int32 ``(Sq, B)``, from the keys that each query sees.

    The visible keys are bool ``(Sq, Sq)`` or ``(Sq, Sq, B)``.

    A token sees itself, its parent, and the keys that its parent sees; any other mask raises ValueError.

    >>> parents_of(np.array([[1, 1, 1], [0, 1, 0], [0, 0, 1]], bool)).T
    array([[-1,  0,  0]], dtype=int32)
    """
    visible = visible[..., None] if visible.ndim == 2 else visible
    tokens, _, batch = visible.shape
    parents = np.full((tokens, batch), -1, np.int32)
    for b, i in np.ndindex(batch, tokens):
        keys, own = visible[:, i, b], np.arange(tokens) == i
        earlier = np.flatnonzero(keys[:i])
        parent = int(earlier[-1]) if earlier.size else -1
        parents[i, b] = parent
        wanted = own if parent < 0 else own | visible[:, parent, b]
        if (keys != wanted).any():
            place = int(np.flatnonzero(keys != wanted)[0])
            attends = "attends" if keys[place] else "does not attend"
            raise ValueError(
                f"parents is not the mask of a tree: query {i} {attends} to key {place}, but it "
                f"must attend to {np.flatnonzero(wanted).tolist()}, itself and what its parent {parent} attends to. The "
                "axes are (keys, queries): pass parents.T if the first axis is the queries"
            )
    return parents
