"""Attention of a batch whose sequences begin with the same pages: the shared pages are read once."""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any, Unpack

import numpy as np

from .._typing import Array
from ..arrays.argument import check_arrays, read_array
from ..attention import attention
from ..calls.arguments import read_forward
from ..calls.options import Options, check_names, is_one_of, takes_options
from ..calls.replay_cache import cache_call, run_cached
from ..device import cupy_runtime
from ..device.paging import paged
from ..fp8.array import Fp8Array
from ..helpers import merge
from ..problem.problem import OTHER_RESULTS
from ..problem.split import MAX_ROWS
from ..problem.tensor_spec import Expected, check_spec, make_spec
from ..problem.validation import expected_arrays

#: The options that the parts do not take: queries see the whole prefix, so only masks after it are supported.
_EXCLUDED = ("window", "cu_seqlens_q", "bias", "mask", "alibi_slopes", "score_mod", "mask_mod", "dropout_p", "seq_lens_q",
             "layout", "compute_dtype")  # fmt: skip

#: The options that are arrays.
_READ = ("page_table", "seq_lens_kv", "sinks")


@takes_options
def shared_prefix_attention(
    q: Array,
    k: Array,
    v: Array,
    shared_prefix: int,
    *,
    return_stats: bool = False,
    out: Array | None = None,
    **options: Unpack[Options],
) -> Any:
    """:func:`cupy_sdpa.attention` with a page table, for sequences whose first keys are the same pages.

    The queries of all sequences attend to the shared pages as one batch entry, which is read once. Each sequence attends to its
    other pages. The two results are merged (:func:`cupy_sdpa.merge`). In a captured CUDA graph the two parts run in parallel if
    there is one query per sequence.

    Args:
        q: queries ``(D, Hq, Sq, B)``.
        k, v: pages, as for :func:`cupy_sdpa.attention`.
        shared_prefix: the number of keys that all sequences share, a multiple of the page size: the first entries of all
            columns of ``page_table`` are the same. :meth:`cupy_sdpa.KVCache.shared_prefix` returns it. Every sequence has these
            keys, or none, as a released one; the output of a sequence without keys is not 0, but undefined. On the CPU this is
            checked; on the GPU the pages of the first sequence that is long enough are read for all.
        return_stats: also return the log-sum-exp, float32 ``(Sq, Hq, B)``. Default False.
        out: array ``(Dv, Hq, Sq, B)`` to write the output into. Default None: a new array.
        options: ``page_table`` and ``seq_lens_kv``, which includes the prefix; ``scale``, ``softcap``, ``sinks``,
            ``num_splits``, ``max_workspace``, and ``causal="bottom_right"``.

    Returns:
        The output ``(Dv, Hq, Sq, B)``, or ``(out, stats)``.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`; and for other options.

    Source: Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes", section 3.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> cache = cupy_sdpa.KVCache(8, 2, pages=8, batch=2, page_size=4, dtype="float32", numpy=True)
    >>> k, v = (np.asfortranarray(rng.standard_normal((8, 2, 6), np.float32)) for _ in range(2))
    >>> cache.append(k, v, counts=[6, 0])
    >>> cache.fork(0, 1)
    >>> cache.append(k[:, :, :2], v[:, :, :2], counts=[1, 1])
    >>> q = np.asfortranarray(rng.standard_normal((8, 4, 1, 2), np.float32))
    >>> pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    >>> out = cupy_sdpa.shared_prefix_attention(q, cache.keys(), cache.values(), cache.shared_prefix(), **pages)
    >>> cache.shared_prefix(), bool(np.allclose(out, cupy_sdpa.attention(q, cache.keys(), cache.values(), **pages), atol=1e-6))
    (4, True)
    """
    table: Any = options.get("page_table")
    lengths: Any = options.get("seq_lens_kv")
    parts: dict[str, Any] = {
        name: value for name, value in options.items() if name not in ("page_table", "seq_lens_kv", "sinks")
    }
    _check(q, k, shared_prefix, options)
    if isinstance(table, np.ndarray) and isinstance(lengths, np.ndarray):
        _check_pages(table, lengths, int(shared_prefix), shared_prefix // k.shape[2])
    # A sequence may have fewer keys after the prefix than queries: keys that only some of its queries see are no part of it.
    hidden = q.shape[2] - 1 if options.get("causal") else 0
    pages = max(0, int(shared_prefix) - hidden) // k.shape[2]
    prefix_length = pages * k.shape[2]
    if not pages or not q.shape[3]:
        return attention(q, k, v, return_stats=return_stats, out=out, **options)
    with cupy_runtime.device_context(q):
        (_, hq, sq, b), dv = q.shape, v.shape[0]
        new = functools.partial(cupy_runtime.temporary, q)
        own, own_stats, rest = new((dv, hq, sq, b), q.dtype), new((sq, hq, b), np.float32), new((b,), np.int32)
        shared_pages, shared_length = new((pages, 1), np.int32), new((1,), np.int32)
        _divide(table, lengths, prefix_length, shared_pages, shared_length, rest)
        shared = {"page_table": shared_pages, "seq_lens_kv": shared_length, **parts, "causal": False}
        merges_once = sq == 1 and not return_stats and cupy_runtime.is_array(q) and hq // k.shape[1] * b <= MAX_ROWS
        if out is not None and not merges_once:
            of_call = {"q": q, "k": k, "v": v, "out": out, **{name: options.get(name) for name in _READ}}
            check_arrays([expected_arrays(q, k, v)["out"]._replace(writable=True)], of_call)
        in_parallel = merges_once and cupy_runtime.capturing()
        with cupy_runtime.parallel_branch() if in_parallel else contextlib.nullcontext() as join:
            attention(q, k, v, page_table=table[pages:], seq_lens_kv=rest, out=own, stats=own_stats, return_stats=True, **parts)
        if merges_once:
            try:
                out = cupy_runtime.new_result(q, own.shape, q.dtype) if out is None else out
                sinks = {name: value for name, value in options.items() if name == "sinks"}
                others = _as_one_entry(own), own_stats.transpose(2, 1, 0)
                _attend_and_merge(_as_one_entry(q), k, v, _as_one_entry(out), others, shared | sinks, join)
            except BaseException:
                if join:
                    join()  # a capture with a branch that is not joined could not be ended
                raise
            return out
        prefix, prefix_stats = _attend_as_one_entry(q, k, v, shared)
        stats = [prefix_stats, own_stats]
        return merge([prefix, own], stats, sinks=options.get("sinks"), out=out, return_stats=return_stats)


def _attend_as_one_entry(q: Any, k: Any, v: Any, options: Mapping[str, Any]) -> tuple[Any, Any]:
    """The output ``(Dv, Hq, Sq, B)`` and the log-sum-exp ``(Sq, Hq, B)`` of all queries as those of one batch entry."""
    (d, hq, sq, b), dv = q.shape, v.shape[0]
    rows = q if q.flags.f_contiguous else cupy_runtime.temporary_copy(q)
    out, stats = cupy_runtime.temporary(q, (dv, hq, sq, b), q.dtype), cupy_runtime.temporary(q, (sq, b, hq), np.float32)
    attention(
        rows.reshape((d, hq, sq * b, 1), order="F"), k, v, **options, out=out.reshape((dv, hq, sq * b, 1), order="F"),
        stats=stats.reshape((sq * b, hq, 1), order="F"), return_stats=True,
    )  # fmt: skip
    return out, stats.transpose(0, 2, 1)


def _as_one_entry(array: Any) -> Any:
    """An array ``(D, Hq, 1, B)`` of one query per sequence as one batch entry of B queries, ``(D, Hq, B, 1)``."""
    return array.transpose(0, 1, 3, 2)


def _attend_and_merge(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    others: tuple[Any, Any],
    options: Mapping[str, Any],
    join: Callable[[], None] | None,
) -> None:
    """Attend to the prefix in chunks, and merge the results of the chunks with those over other keys, in one kernel.

    Args:
        q, k, v, out, options: of the call.
        others: the output and the log-sum-exp over other keys.
        join: waits for these results; None if they are in stream order.
    """
    kind, arrays = "shared prefix", (q, k, v, out, *others)
    if join or run_cached(kind, arrays, options) is None:
        call = read_forward(q, k, v, options, out=out, **dict(zip(OTHER_RESULTS, others, strict=True)))
        call.before_finish = join
        call.run()
        cache_call(kind, ("q", "k", "v", "out", *OTHER_RESULTS), arrays, options, call)


def _divide(table: Any, lengths: Any, prefix: int, shared: Any, shared_length: Any, rest: Any) -> None:
    """:func:`.paged.divide`, also for numpy arrays. The sequence is chosen on the device: a released one has no pages."""
    if cupy_runtime.is_array(lengths):
        paged.divide(table, lengths, prefix, shared, shared_length, rest)
        return
    whole = lengths >= prefix
    shared[...] = table[: len(shared), whole.argmax(), None] if whole.any() else 0
    shared_length[...] = prefix if whole.any() else 0
    np.maximum(lengths - np.int32(prefix), 0, out=rest)


def _check(q: Array, k: Array, shared_prefix: int, options: Options) -> None:
    """Check the prefix and the options.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if isinstance(k, Fp8Array):
        raise TypeError(
            "k is an FP8 array; shared_prefix_attention does not support FP8: use cupy_sdpa.attention, which reads the shared "
            "pages once for each sequence"
        )
    check_names({name: value for name, value in options.items() if name not in ("layout", "compute_dtype")})
    for name in _EXCLUDED:
        if not is_one_of(options.get(name), (None, 0)):
            raise ValueError(f"{name} is passed, which shared_prefix_attention does not support: use cupy_sdpa.attention")
    if options.get("page_table") is None or options.get("seq_lens_kv") is None:
        raise ValueError("shared_prefix_attention needs page_table and seq_lens_kv; dense arrays have no shared pages")
    if not isinstance(shared_prefix, numbers.Integral) or isinstance(shared_prefix, bool):
        raise TypeError(f"shared_prefix is {shared_prefix!r}; it must be a number of keys")
    lengths = make_spec("seq_lens_kv", read_array("seq_lens_kv", options["seq_lens_kv"]).signature)
    check_spec(lengths, Expected("seq_lens_kv", q.shape[3:], "int32", "(B,)"))
    page, width = k.shape[2], options["page_table"].shape[0]
    if not 0 <= shared_prefix <= page * width or (page and shared_prefix % page):
        raise ValueError(
            f"shared_prefix is {shared_prefix}; it must be a multiple of the page size {page} from 0 to {page * width}, the "
            "keys of the page table"
        )
    if not is_one_of(options.get("causal"), (None, False, "bottom_right")):
        raise ValueError(f"causal is {options.get('causal')!r}; with a shared prefix it must be 'bottom_right' or False")


def _check_pages(table: Any, lengths: Any, shared_prefix: int, pages: int) -> None:
    """Check that all sequences with keys begin with the pages of the prefix, on the CPU only: reading them would synchronize.

    Raises:
        ValueError: a sequence does not.
    """
    first = None
    for b in np.flatnonzero(lengths) if table.ndim == 2 and table.shape[1:] == lengths.shape else ():
        if lengths[b] < shared_prefix:
            raise ValueError(
                f"shared_prefix is {shared_prefix}, and seq_lens_kv of sequence {b} is {lengths[b]}: every sequence must have "
                "the keys of the prefix"
            )
        own = table[:pages, b]
        first = own if first is None else first
        if (own != first).any():
            raise ValueError(
                f"shared_prefix is {shared_prefix}, {pages} pages, and sequence {b} begins with the pages {own.tolist()}, "
                f"others with {first.tolist()}: they must be the same, see KVCache.shared_prefix"
            )
