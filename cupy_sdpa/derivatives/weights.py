"""What the weights of attention are: their sums over the queries, for every key, and their entropy, for every query."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

import numpy as np

from .. import Problem, Unsupported
from ..block_masks.block_mask_calls import decide_dense
from ..extend import (
    OPTIONS,
    Array,
    Axes,
    Builder,
    Call,
    CallKey,
    Constant,
    Options,
    ReadCall,
    ReadOptions,
    Recorded,
    View,
    composed,
    operation,
    read_flag,
    read_forward,
    read_operands,
    results_of,
    takes_options,
)
from .weights_kernel import add_exponentials, gathered, negated_rows, row_entropies

#: The options of queries, and the options of keys that take their place.
_PAIRS = {"seq_lens_q": "seq_lens_kv", "cu_seqlens_q": "cu_seqlens_kv"}
_LENGTHS = {*_PAIRS, *_PAIRS.values()}


@takes_options
def weight_sums(q: Array, k: Array, *, per_kv_head: bool = False, **options: Unpack[Options]) -> Any:
    r"""Sum the weights of attention over the queries, for every key: how much attention each key gets.

    .. math:: w_{j} = \sum_i P_{ij} = \sum_i e^{s_{ij} - L_i}, \qquad L_i = \log \sum_j e^{s_{ij}}

    with the scores s of :func:`cupy_sdpa.attention`, including masks; a sink counts in L. Nothing of size Sq x Skv is stored:
    one forward pass computes L; then a pass with queries and keys exchanged computes the log-sum-exp over i of :math:`s_{ij} -
    L_i`. There is one such pass for each of the query heads that share a key/value head; k is not repeated.

    Args:
        q, k: as for :func:`cupy_sdpa.attention`; with ``page_table`` k has pages, which are gathered into dense keys.
        per_kv_head: also sum over the query heads that share a key/value head. Default False.
        options: as for :func:`cupy_sdpa.attention`, except ``bias``, dropout, ``num_splits``, ``layout``, ``compute_dtype`` and
            ``batch_invariant``; ``block_mask`` is computed as a dense mask.

    Returns:
        float32, or float64 for float64 arrays: ``(Skv, Hq, B)``, or ``(Skv, Hkv, B)`` with ``per_kv_head``; for packed
        sequences ``(Hq, Tkv)`` or ``(Hkv, Tkv)``. With ``page_table``, Skv is the number of rows of the table times the page
        size. It is 0 for keys that no query attends to, including keys after the end of a sequence. Without sinks, the sum over
        the keys is the number of queries that attend to a key.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`; or an option is not supported.

    Source: Zhang et al. 2023, "H2O: Heavy-Hitter Oracle", section 4, for eviction by these sums.

    >>> import numpy as np
    >>> from cupy_sdpa import weight_sums
    >>> q, k = (np.zeros((8, 1, n, 1), np.float32, order="F") for n in (3, 3))
    >>> weight_sums(q, k, causal=True).ravel().round(4)
    array([1.8333, 0.8333, 0.3333], dtype=float32)
    """
    per_kv_head = read_flag("per_kv_head", per_kv_head)
    _refuse("weight_sums", options)
    return results_of(_sums_call((q, k), options, per_kv_head=per_kv_head))[0]


@operation(weight_sums, ("q", "k"), {"per_kv_head": False})
def _sums_call(arrays: tuple[Any, ...], options: Mapping[str, Any], *, per_kv_head: bool) -> Call:
    """Return a call of :func:`weight_sums` as a value."""
    key = CallKey(("weight sums", per_kv_head), ("q", "k"), arrays, options)
    return Call(key, functools.partial(_parse_sums, per_kv_head=per_kv_head), _converted("sums", options), decide_dense)


def _converted(result: str, options: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the results to convert back: only ``engine`` converts arrays."""
    return (result,) if "engine" in options else ()


def _parse_sums(key: CallKey, *, per_kv_head: bool) -> ReadCall:
    """Check the arguments of :func:`weight_sums`."""
    if key.options.get("page_table") is not None and key.options.get("cu_seqlens_q") is not None:
        raise Unsupported("weight_sums is not supported with page_table and cu_seqlens_q: pass dense q with seq_lens_q=")
    arrays, views, options = read_operands(key.named(), key.options)
    q, k = views["q"], views["k"]
    read_forward(q, k, k, options, return_stats=True)
    shape = _shape_of_keys(k, options)
    heads = k.shape[1] if per_kv_head else q.shape[1]
    sums = View.row_stats("sums", View.dense("keys", (shape[0], heads, *shape[2:]), q.dtype, q.storage.device))
    return composed(
        key, arrays, views, {"sums": sums}, functools.partial(_add_sums_steps, q=q, k=k, sums=sums, options=options)
    )


@takes_options
def weight_sums_problems(
    q: Array | Sequence[int], k: Array | Sequence[int], *, dtype: Any = None, **options: Any
) -> tuple[Problem, ...]:
    """List the problems of :func:`cupy_sdpa.weight_sums`'s passes, for :func:`cupy_sdpa.explain` and ``store.build``.

    Args:
        q, k, dtype, options: as for :func:`cupy_sdpa.problem`.

    Returns:
        The problems of all passes in the order in which they run.

    Raises:
        TypeError, ValueError, Unsupported: the arguments are invalid.

    >>> from cupy_sdpa import weight_sums_problems
    >>> for problem in weight_sums_problems((64, 8, 1024, 2), (64, 4, 4096, 2), dtype="bfloat16"):
    ...     print(problem.q.shape, problem.k.shape)
    (64, 8, 1024, 2) (64, 4, 4096, 2)
    (64, 4, 4096, 2) (64, 4, 1024, 2)
    (64, 4, 4096, 2) (64, 4, 1024, 2)
    """
    _refuse("weight_sums", options)
    return Call.of_shapes(weight_sums, {"q": q, "k": k}, options, dtype=dtype).read().problems


@takes_options
def weight_entropy(q: Array, k: Array, **options: Unpack[Options]) -> Any:
    r"""Compute the entropy of the weights of each query: near 0 if one key gets all attention, log(n) for n equal weights.

    .. math:: H_i = -\sum_j P_{ij} \log P_{ij} = L_i - \sum_j P_{ij} s_{ij} = L_i - \text{scale} \; q_i \cdot o_i,
              \qquad o_i = \sum_j P_{ij} k_j

    with the scores s and the log-sum-exp L of :func:`cupy_sdpa.attention`, including masks. One forward pass, with k as values,
    computes L and o. A sink counts as one more key. Low entropies of many queries are a sign of training that becomes unstable.

    The result has the rounding errors of o, which is a 16-bit array for 16-bit q and k: about :math:`2^{-9}` (bfloat16) or
    :math:`2^{-12}` (float16) times :math:`\text{scale} \, |q_i| |o_i|`. Results below 0 by rounding are 0.

    Args:
        q, k: as for :func:`cupy_sdpa.attention`; with ``page_table`` k has pages.
        options: as for :func:`cupy_sdpa.attention`, except ``layout``, ``compute_dtype``, ``batch_invariant``, ``num_splits``
            and dropout, and except ``bias``, ``alibi_slopes``, ``softcap`` and ``score_mod``: o gives the mean of
            :math:`\text{scale} \, q k` only, not of changed scores. ``block_mask`` is computed as a dense mask.

    Returns:
        float32, or float64 for float64 arrays: ``(Sq, Hq, B)``, or ``(Hq, Tq)`` for packed sequences, like the log-sum-exp. It
        is 0 for queries without keys and for padding. To plan ahead of time, use ``problem(q, k, k, return_stats=True)`` with
        the same options.

    Raises:
        TypeError, ValueError, Unsupported, CudnnError: as :func:`cupy_sdpa.attention`; or an option is not supported.

    Source: Zhai et al. 2023, "Stabilizing Transformer Training by Preventing Attention Entropy Collapse".

    >>> import numpy as np
    >>> from cupy_sdpa import weight_entropy
    >>> q, k = (np.zeros((8, 1, n, 1), np.float32, order="F") for n in (3, 3))
    >>> np.exp(weight_entropy(q, k, causal=True)).ravel().round(4)
    array([1., 2., 3.], dtype=float32)
    """
    _refuse("weight_entropy", options)
    return results_of(_entropy_call((q, k), options))[0]


@operation(weight_entropy, ("q", "k"), {})
def _entropy_call(arrays: tuple[Any, ...], options: Mapping[str, Any]) -> Call:
    """Return a call of :func:`weight_entropy` as a value."""
    key = CallKey(("weight entropy",), ("q", "k"), arrays, options)
    return Call(key, _parse_entropy, _converted("entropies", options), decide_dense)


def _parse_entropy(key: CallKey) -> ReadCall:
    """Check the arguments of :func:`weight_entropy`."""
    arrays, views, options = read_operands(key.named(), key.options)
    q, k = views["q"], views["k"]
    read_forward(q, k, k, options, return_stats=True)
    entropies = View.row_stats("entropies", q)
    build = functools.partial(_add_entropy_steps, q=q, k=k, entropies=entropies, options=options)
    return composed(key, arrays, views, {"entropies": entropies}, build)


def _add_entropy_steps(builder: Builder, *, q: View, k: View, entropies: View, options: ReadOptions) -> None:
    """Add the steps of :func:`weight_entropy`."""
    stats, out = builder.temporary_stats(q), builder.temporary(q.shape, q.dtype)
    builder.part = "the mean key of each query"
    builder.attend("attention", q, k, k, options, out=out, stats=stats)
    builder.part = "entropy"
    scale = options.scalars["scale"]
    builder.run(row_entropies, entropies, stats, q, out, options.get("sinks"), scale, writes=[entropies])


def _refuse(name: str, options: Mapping[str, Any]) -> None:
    """Check that there are only supported options."""
    for option, value in options.items():
        instead = OPTIONS[option].refusal(name) if option in OPTIONS else None
        if instead and OPTIONS[option].is_passed(value) and (option != "layout" or Axes(value).layout):
            raise Unsupported(f"{name} is not supported with {option}: {instead}")


def _shape_of_keys(k: Any, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the shape of the keys, without pages."""
    table = options.get("page_table")
    return k.shape if table is None else (k.shape[0], k.shape[1], k.shape[2] * table.shape[0], table.shape[1])


# The steps


def _add_sums_steps(builder: Builder, q: View, k: View, sums: View, options: ReadOptions) -> None:
    """Add the steps that write ``sum_i exp(s_ij - L_i)`` of every key: exp of the log-sum-exp of the scores ``s_ij - L_i``."""
    starts, table = options.get("cu_seqlens_q"), options.get("page_table")
    stats = builder.temporary_stats(q)
    builder.part = "statistics of queries"
    builder.attend("attention", q, k, k, options, out=builder.temporary(q.shape, q.dtype), stats=stats)
    builder.part = "sums over queries"
    keys = k
    if table is not None:
        dim, heads, size, _ = k.shape
        keys = builder.temporary((dim, heads, table.shape[0] * size, table.shape[1]), k.dtype)
        builder.run(gathered, keys, k, table, options["seq_lens_kv"], writes=[keys])
    packed = starts is not None
    longest, batch = (q.shape[2], q.shape[3]) if starts is None else (options.settings.max_seqlen_q or 0, starts.shape[0] - 1)
    group, of_queries = q.shape[1] // max(k.shape[1], 1), sums.shape[0 if packed else 1] == q.shape[1]
    for member in range(group):
        own = slice(member, None, group)
        bias = builder.temporary((longest, 1, k.shape[1], batch), stats.dtype)
        builder.run(negated_rows, bias, stats[own] if packed else stats[:, own], starts, writes=[bias])
        logarithms = builder.temporary_stats(keys)
        out = builder.temporary(keys.shape, keys.dtype)
        swapped = _swapped(builder, options, own, k.shape[1]) | {"bias": bias}
        queries = q[:, own]
        builder.attend("attention", keys, queries, queries, swapped, out=out, stats=logarithms)
        target = sums if not of_queries else sums[own] if packed else sums[:, own]
        builder.run(add_exponentials, target, logarithms, member > 0 and not of_queries, writes=[target])


def _swapped(builder: Builder, options: ReadOptions, own: slice, count: int) -> ReadOptions:
    """Return the options with queries and keys in each other's place, for the ``count`` query heads ``own``."""
    group, settings, packed, functions = own.step, options.settings, "cu_seqlens_q" in options, options.functions
    found: dict[str, Any] = {"tensors": options["tensors"]} if "tensors" in options else {}
    for name, other in _PAIRS.items():
        found |= {new: options[old] for new, old in ((name, other), (other, name)) if old in options}
    found["max_seqlen_q"] = settings.max_seqlen_kv
    found["max_seqlen_kv"] = settings.max_seqlen_q if packed else None  # otherwise the maximum of seq_lens_q, which is checked
    if (band := settings.band) is not None:
        found["band"] = band._replace(left=band.right, right=band.left)
    for name, value in options.items():
        if OPTIONS[name].parts != "sliced" or name in functions or name in _LENGTHS:
            continue
        if "Skv" in OPTIONS[name].axes:
            value = (value if value.shape[2] == 1 else value[:, :, own]).transpose(1, 0, 2, 3)
        elif group > 1:  # an element of each head
            value = builder.copied(value[own])
        found[name] = value
    for name, function in functions.items():
        if group > 1:
            function, tensors = _of_heads(builder, function, options.get("tensors") or {}, own, count)
            found["tensors"] = {**found.get("tensors", {}), **tensors}
        found[name] = _exchanged(name, function)
    # with packed sequences the bias has the size of the longest ones
    return dataclasses.replace(options, inputs={}, round_up=None if packed else options.round_up) | found


def _of_heads(
    builder: Builder, function: Recorded, tensors: Mapping[str, View], own: slice, count: int
) -> tuple[Recorded, dict[str, View]]:
    """Return a score or mask function for some heads, and the arrays that it reads: the heads' slices, and head numbers."""
    reads, arrays = {}, {}
    for access in function.reads:
        array = tensors[access.name]
        for axis, index in enumerate(access.axes):
            array = array[(*[slice(None)] * axis, own)] if index == "h" else array
        reads[access] = name, _ = f"{access} of some heads", access.axes
        arrays[name] = array
    heads = f"heads from {own.start}"
    numbers = own.start + own.step * np.arange(count, dtype=np.int32)
    arrays[heads] = builder.constant(Constant(numbers), keep=True)
    return function.relocated(reads, places={"h": (heads, ("h",))}), arrays


def _exchanged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a score or mask function of queries and keys in each other's place."""

    def score_mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **tensors: Any) -> Any:
        return function(score, b, h, kv_idx, q_idx, **tensors)

    def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, **tensors: Any) -> Any:
        return function(b, h, kv_idx, q_idx, **tensors)

    return score_mod if name == "score_mod" else mask_mod
