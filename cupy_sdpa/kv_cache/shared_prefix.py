"""Attention of a batch whose sequences begin with the same pages: the shared pages are read once."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Hashable, Mapping
from typing import Any, Unpack

import numpy as np

from ..extend import (
    OPTIONS,
    Array,
    Builder,
    Call,
    CallKey,
    Expected,
    Options,
    Parts,
    ReadCall,
    ReadOptions,
    View,
    check_arrays,
    composed,
    merge_parts,
    operation,
    read_forward,
    read_operands,
    results_of,
    takes_options,
)
from ..fp8.array import Fp8Array
from .shared_prefix_kernel import divide


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
    """Compute :func:`cupy_sdpa.attention` with a page table for sequences whose first keys are in the same pages.

    The queries of all sequences attend to the shared pages together, as if they were one sequence, so the pages are read once.
    Then each sequence attends to its remaining pages, and the two results are merged (:func:`cupy_sdpa.merge`).

    Args:
        q: queries ``(D, Hq, Sq, B)``.
        k, v: pages, as for :func:`cupy_sdpa.attention`.
        shared_prefix: the number of keys that all sequences share, a multiple of the page size: the first entries of all
            columns of ``page_table`` are the same. :meth:`cupy_sdpa.KVCache.shared_prefix` returns it. Each sequence must have
            these keys or be empty (for example after ``release``); the output of an empty sequence is undefined, not 0. The CPU
            and ``engine="cupy"`` check this; cuDNN reads the pages of the first sequence that is long enough for all.
        return_stats: also return the log-sum-exp, float32 (float64 for float64 arrays) ``(Sq, Hq, B)``. Default False.
        out: array ``(Dv, Hq, Sq, B)`` to write the output into. Default None: a new array.
        options: ``page_table`` and ``seq_lens_kv``, which includes the prefix; ``scale``, ``softcap``, ``sinks``,
            ``num_splits``, ``max_workspace``, ``layout``, ``engine``, and ``causal="bottom_right"``.

    Returns:
        The output ``(Dv, Hq, Sq, B)``, or ``(out, stats)``.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`; and for other options.

    Source: Juravsky et al. 2024, "Hydragen: High-Throughput LLM Inference with Shared Prefixes", section 3.

    >>> import numpy as np, cupy_sdpa
    >>> rng = np.random.default_rng(0)
    >>> cache = cupy_sdpa.KVCache(8, 2, pages=8, batch=2, page_size=4, numpy=True)
    >>> k, v = (np.asfortranarray(rng.standard_normal((8, 2, 6), np.float32)) for _ in range(2))
    >>> cache.append(k, v, seq_lens_q=[6, 0])
    >>> cache.fork(0, 1)
    >>> cache.append(k[:, :, :2], v[:, :, :2], seq_lens_q=[1, 1])
    >>> q = np.asfortranarray(rng.standard_normal((8, 4, 1, 2), np.float32))
    >>> pages = {"page_table": cache.table, "seq_lens_kv": cache.lengths}
    >>> out = cupy_sdpa.shared_prefix_attention(q, cache.keys(), cache.values(), cache.shared_prefix(), **pages)
    >>> cache.shared_prefix(), bool(np.allclose(out, cupy_sdpa.attention(q, cache.keys(), cache.values(), **pages), atol=1e-6))
    (4, True)
    """
    if type(return_stats) is not bool and not (isinstance(return_stats, Hashable) and return_stats in (False, True)):
        raise ValueError(f"return_stats is {return_stats!r}; it must be False or True with a shared prefix")
    results = results_of(_shared_prefix_call((q, k, v, out), options, shared_prefix=shared_prefix, return_stats=return_stats))
    return tuple(results) if return_stats else results[0]


_NAMES = ("q", "k", "v", "out")


@operation(shared_prefix_attention, _NAMES, {"shared_prefix": None, "return_stats": False}, ("q", "k", "v", "shared_prefix"))
def _shared_prefix_call(arrays: tuple[Any, ...], options: Mapping[str, Any], *, shared_prefix: int, return_stats: Any) -> Call:
    """Return a call of :func:`shared_prefix_attention` as a value."""
    tag = ("shared prefix", repr(shared_prefix), bool(return_stats))
    parse = functools.partial(_parse_shared_prefix, shared_prefix=shared_prefix, return_stats=return_stats)
    return Call(
        CallKey(tag, _NAMES, arrays, options), parse, ("out", "stats"), check=functools.partial(_refuse_options, options)
    )


def _parse_shared_prefix(key: CallKey, *, shared_prefix: int, return_stats: bool) -> ReadCall:
    """Check the arguments of :func:`shared_prefix_attention`."""
    if isinstance(key.array("k"), Fp8Array):
        raise TypeError(
            "k is an FP8 array; shared_prefix_attention does not support FP8: use cupy_sdpa.attention, which reads the shared "
            "pages once for each sequence"
        )
    arrays, views, options = read_operands(key.named(), key.options)
    _check_prefix(views["q"], views["k"], shared_prefix, options)
    own: dict[str, Any] = {name: views.get(name) for name in _NAMES}
    call = read_forward(**own, options=options, return_stats=return_stats)
    page = call.problem.k.shape[2]
    # A sequence may have fewer keys after the prefix than queries: keys that only some queries see are no part of it.
    hidden = call.problem.q.shape[2] - 1 if options.causal else 0
    pages = max(0, int(shared_prefix) - hidden) // max(page, 1)
    check = functools.partial(_check_pages, int(shared_prefix), int(shared_prefix) // max(page, 1))

    def build(builder: Builder) -> None:
        builder.check_lengths(call.problem, views)
        builder.check(check, {name: views[name] for name in ("page_table", "seq_lens_kv")})
        if pages and call.problem.q.shape[3]:
            _add_steps(builder, views, options, pages)
        else:
            results: dict[str, Any] = {name: views.get(name) for name in ("out", "stats")}
            builder.attend("attention", views["q"], views["k"], views["v"], options, **results)

    return composed(key, arrays, views, call.result_views(views, views["q"].dtype), build)


def _add_steps(builder: Builder, views: Mapping[str, View], options: ReadOptions, pages: int) -> None:
    """Add the steps: the keys after the prefix; the prefix, with all queries in one batch item; and the merge."""
    q, k, v, out = (views[name] for name in _NAMES)
    stats, sinks, options = views.get("stats"), views.get("sinks"), options.without("sinks")
    table, lengths = options["page_table"], options["seq_lens_kv"]
    (_, _, sq, b), integers = q.shape, np.dtype(np.int32)
    shared, length, rest = (builder.temporary(shape, integers) for shape in ((pages, 1), (1,), (b,)))
    builder.run(divide, table, lengths, pages * k.shape[2], shared, length, rest, writes=(shared, length, rest))
    own = {"page_table": table[pages:], "seq_lens_kv": rest}
    results: dict[str, Any] = {"out": builder.temporary(out.shape, out.dtype), "stats": builder.temporary_stats(q)}
    builder.branch = True
    builder.attend("own keys", q, k, v, options | own, **results)
    builder.branch = False
    prefix = {"page_table": shared, "seq_lens_kv": length, "band": None}
    # deterministic: also the keys of one query are split, so that the merge below is the only one
    parts = builder.attend_to_parts(
        "shared prefix", _as_one_entry(builder, q), k, v, options | prefix, deterministic=builder.on_gpu
    )
    groups = [_of_sequences(part, sq, b) for part in parts]
    groups.append(Parts(results["out"][..., None], results["stats"][..., None]))
    builder.run(merge_parts, groups, out, stats, sinks, writes=[x for x in (out, stats) if x is not None])


def _as_one_entry(builder: Builder, q: View) -> View:
    """Queries ``(D, Hq, Sq, B)`` as one batch item, ``(D, Hq, Sq B, 1)``; a copy if they are not evenly spaced."""
    d, heads, sq, b = q.shape
    if sq > 1 and b > 1 and q.strides[3] != sq * q.strides[2]:
        q = builder.copied(q)
    step = q.strides[2 if sq > 1 else 3]
    return q.strided((d, heads, sq * b, 1), (*q.strides[:2], step, step * sq * b))


def _of_sequences(parts: Parts, sq: int, b: int) -> Parts:
    """Parts of one batch item as parts of the sequences."""
    out, stats = parts.out, parts.stats
    (dv, heads, _, _, chunks), (d, head, row, _, chunk) = out.shape, out.strides
    of_row, of_head, _, of_chunk = stats.strides
    return Parts(
        out.strided((dv, heads, sq, b, chunks), (d, head, row, row * sq, chunk)),
        stats.strided((sq, heads, b, chunks), (of_row, of_head, of_row * sq, of_chunk)),
    )


def _check_prefix(q: Array, k: Array, shared_prefix: int, options: ReadOptions) -> None:
    """Check the prefix and the options."""
    if options.get("page_table") is None or options.get("seq_lens_kv") is None:
        raise ValueError("shared_prefix_attention needs page_table and seq_lens_kv; dense arrays have no shared pages")
    if not isinstance(shared_prefix, numbers.Integral) or isinstance(shared_prefix, bool):
        raise TypeError(f"shared_prefix is {shared_prefix!r}; it must be a number of keys")
    check_arrays([Expected("seq_lens_kv", q.shape[3:], "int32", "(B,)")], {"seq_lens_kv": options["seq_lens_kv"]})
    page, width = k.shape[2], options["page_table"].shape[0]
    if not 0 <= shared_prefix <= page * width or (page and shared_prefix % page):
        raise ValueError(
            f"shared_prefix is {shared_prefix}; it must be a multiple of the page size {page} from 0 to {page * width}, the "
            "keys of the page table"
        )
    if options.causal not in (None, False, "bottom_right"):
        raise ValueError(f"causal is {options.causal!r}; with a shared prefix it must be 'bottom_right' or False")


def _refuse_options(options: Mapping[str, Any]) -> None:
    """Check that no option is passed that the parts do not take: queries see the whole prefix, and masks are after it."""
    for name, option in OPTIONS.items():
        if option.is_passed(options.get(name)) and option.refusal("shared_prefix_attention") is not None:
            raise ValueError(f"{name} is passed, which shared_prefix_attention does not support: use cupy_sdpa.attention")


def _check_pages(shared_prefix: int, pages: int, arrays: Mapping[str, Any]) -> None:
    """Check that all sequences with keys begin with the pages of the prefix."""
    table, lengths, first = arrays["page_table"], arrays["seq_lens_kv"], None
    for b in np.flatnonzero(lengths):
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
                f"others with {first.tolist()}: they must be equal, see KVCache.shared_prefix"
            )
