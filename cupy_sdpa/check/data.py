"""The values of a case's arrays, on the host. Each case has two sets of equal shapes, which alternate in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .case import Case, Packed
from .formats import FP8_SCALE, dtype_of, round_fp8
from .functions import function_of, tensor_shape
from .weight_options import ROWS, bias_repeats, random_mask, score_shape

#: Options whose literals are passed to the call unchanged.
LITERAL_OPTIONS = (
    "scale", "causal", "window", *(name for name, row in ROWS.items() if row.array is None), "bucket", "max_workspace",
)  # fmt: skip
#: Options of the call that are arrays.
ARRAY_OPTIONS = (
    "scale",
    *(name for name, row in ROWS.items() if row.array is not None), "seq_lens_q", "seq_lens_kv", "cu_seqlens_q",
    "cu_seqlens_kv", "page_table",
)  # fmt: skip
#: Parts of the seed, which keep the random numbers of lengths, tangents, trees and means apart from the arrays' numbers.
_LENGTHS_STREAM, _TANGENTS_STREAM, _TREES_STREAM, _MEAN_STREAM, _STATS_STREAM, _SCALES_STREAM = 77, 78, 79, 80, 81, 82
#: The number of pages that no table lists before the lengths.
UNUSED = 3
#: Part of the seed of the page table.
_TABLE_STREAM = 78
#: The largest magnitude of the rows after the lengths.
_GARBAGE = 1e4
#: An entry of the page table that is not a page.
LARGE_ENTRY = 2**30


@dataclass
class Data:
    """One set of values.

    Attributes:
        case: the case that the values belong to.
        arrays: q, k, v, dout, dstats and the tangents ``tq``, ``tk`` and ``tv`` in logical shape and the array options, by
            name; NaN where nothing may be read.
        tensors: the arrays that the score and mask functions capture, by name.
        lengths: the lengths of queries and keys of each batch item, at most the maximum lengths; None where all are full.
        starts: ``cu_seqlens_q`` and ``cu_seqlens_kv``; None where the sequences are not packed.
        dense: k and v in the shape of dense arrays, if the arrays of the call are pages.
        attends: the pairs of the block mask, bool, broadcasts to ``(Skv, Sq, Hq, B)``; None without one.
        parents: the parents of the trees' tokens, ``(Sq, B)``; None without a tree.
        mean: the mean of v in FP8, float32 ``(Dv, Hkv, 1, B)``, which is not in the arrays; None without one.
        keep: the weights that dropout keeps, ``(Skv, Sq, Hq, B)``; set later if the engine generates them.
    """

    case: Case
    arrays: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[Any, Any] = (None, None)
    starts: tuple[Any, Any] = (None, None)
    dense: dict[str, Any] = field(default_factory=dict)
    attends: Any = None
    parents: Any = None
    mean: Any = None
    keep: Any = None


def build(case: Case, index: int) -> Data:
    """Generate the set of values 0 or 1."""
    data, seeded = Data(case), index
    if case.paged and case.paged.moved:
        index = 0
    rng = np.random.default_rng([case.seed, index])
    _add_lengths(data, index)
    data.arrays |= {name: _position_array(data, rng, name) for name in ("q", "k", "v", "dout")}
    if case.cache and case.cache.shares:
        for b, length in enumerate(forked_lengths(data.lengths[1])):
            for name in "kv":
                data.arrays[name][:, :, :length, b] = data.arrays[name][:, :, :length, 0]
    if case.paged:
        data.dense = {name: data.arrays[name] for name in "kv"}
        data.arrays |= build_pages(case, seeded, data.dense, data.lengths[1])
    of_tangents = np.random.default_rng([case.seed, index, _TANGENTS_STREAM])
    data.arrays |= {f"t{name}": _position_array(data, of_tangents, f"t{name}") for name in case.options.get("jvp", "")}
    if "dstats" in case.options:
        data.arrays["dstats"] = _stats_gradient(data, np.random.default_rng([case.seed, index, _STATS_STREAM]))
    if "head_scales" in case.options:
        data.arrays["scale"] = _head_scales(case, np.random.default_rng([case.seed, index, _SCALES_STREAM]))
    for name, row in ROWS.items():
        if name in case.options and row.array is not None:
            data.arrays[name] = row.array(case, np.random.default_rng([case.seed, index, len(name)]), case.options[name])
    if "mean" in case.options:
        of_mean, most = np.random.default_rng([case.seed, index, _MEAN_STREAM]), case.options["mean"]
        data.mean = of_mean.uniform(-most, most, (case.b, 1, case.hkv, case.dv)).astype(np.float32).T
    if "block_mask" in case.options:
        data.attends = _attends(case)
    if "tree" in case.options:
        data.parents = _parents(case, np.random.default_rng([case.seed, index, _TREES_STREAM]))
    if dropout := case.dropout:
        if dropout.source == "mask":
            data.keep = data.arrays["dropout_mask"] = random_mask(rng, case, "kqhb", 0.7)
        elif dropout.source == "array":
            data.arrays |= {"seed": np.array([dropout.seed + seeded]), "offset": np.array([dropout.offset])}
    for option in ("score_mod", "mask_mod"):
        if option in case.options:
            data.tensors |= _tensors(case, rng, option)
    return data


def _random_lengths(rng: np.random.Generator, kind: str, maximum: int, batch: int, excess: int = 0) -> Any:
    """Sequence lengths ``(B,)`` of a kind; full lengths exceed the maximum by ``excess``."""
    random = rng.integers(0, maximum + 1, batch)
    random = np.where(rng.random(batch) < 0.2, maximum + excess, random)
    by_kind: dict[str, Callable[[], Any]] = {
        "random": lambda: random,
        "some_zero": lambda: np.where(rng.random(batch) < 0.5, 0, random),
        "zero": lambda: np.zeros(batch),
        "full": lambda: np.full(batch, maximum + excess),
        "one": lambda: np.full(batch, min(1, maximum)),
    }
    return by_kind[kind]().astype(np.int32)


def forked_lengths(lengths: Any) -> Any:
    """Return how many first keys each sequence shares with sequence 0 if a cache begins with copies of sequence 0."""
    shared = np.minimum(lengths[0], lengths) // 2
    return np.where(np.arange(len(lengths)) == 0, 0, shared)


def _packed_lengths(case: Case, index: int) -> tuple[Any, Any]:
    """Return the lengths of packed queries and keys. In a group both sets of values share them, as nothing follows them."""
    packed, (sq, skv, b) = Packed(*case.options["packed"]), (case.sq, case.skv, case.b)
    rng = np.random.default_rng([case.seed, 0 if "parallel" in case.options else index, _LENGTHS_STREAM])
    queries = _random_lengths(rng, packed.kind_q, sq, b, packed.excess)
    keys = np.minimum(queries, skv) if packed.kind_kv == "same" else _random_lengths(rng, packed.kind_kv, skv, b, packed.excess)
    return queries, keys


def _add_lengths(data: Data, index: int) -> None:
    """Add ``seq_lens`` or ``cu_seqlens``."""
    case, packed = data.case, data.case.packed
    rng = np.random.default_rng([case.seed, index, _LENGTHS_STREAM])
    lengths: list[Any] = [None, None]
    starts: list[Any] = [None, None]
    pages = case.paged or case.cache
    for side, (name, maximum) in enumerate((("q", case.sq), ("kv", case.skv))):
        kind = pages.lengths if pages and side else case.options.get(f"seq_lens_{name}")
        if packed and not (side and case.paged):
            own = _packed_lengths(case, index)[side]
            starts[side] = np.concatenate([[packed.before], packed.before + np.cumsum(own)]).astype(packed.dtype)
            data.arrays[f"cu_seqlens_{name}"] = starts[side]
            lengths[side] = np.minimum(own, maximum)
        elif kind is not None:
            own = _random_lengths(rng, kind, maximum, case.b)
            lengths[side] = np.maximum(own, np.int32(case.shared_keys)) if side and "shared_prefix" in case.options else own
            if not (side and case.cache):
                data.arrays[f"seq_lens_{name}"] = lengths[side]
    data.lengths, data.starts = (lengths[0], lengths[1]), (starts[0], starts[1])


def packed_total(case: Case, side: int) -> int:
    """Return the length of the packed arrays of the queries (0) or keys (1); the same for both sets of values."""
    packed = Packed(*case.options["packed"])
    lengths = [_packed_lengths(case, index)[side] for index in (0, 1)]
    total = int(packed.before + max(x.sum() for x in lengths) + packed.after)
    sums = [packed.before + (packed.before + np.cumsum(x)).sum() for x in lengths]
    while packed.before and total in sums:  # offsets that add up to the total raise an error, because they may be lengths
        total += 1
    return total


def shape_of(case: Case, name: str) -> tuple[int, ...]:
    """Return the shape of q, k, v, out, stats or a gradient of one of them, also of an input of the backward pass."""
    return pool_shape(case, name) if case.paged and name in ("k", "v") else dense_shape(case, name)


def dense_shape(case: Case, name: str) -> tuple[int, ...]:
    """As :func:`shape_of`, but k and v are not pages."""
    is_key_array = name in ("k", "v", "dk", "dv", "tk", "tv")
    heads, length = (case.hkv, case.skv) if is_key_array else (case.hq, case.sq)
    dim = case.dv if name in ("v", "dv", "tv", "out", "dout", "jvp") else case.d
    if "packed" in case.options and not (is_key_array and case.paged):
        length = packed_total(case, int(is_key_array))
        return (heads, length) if name in ("stats", "dstats") else (dim, heads, length)
    return (length, heads, case.b) if name in ("stats", "dstats") else (dim, heads, length, case.b)


def _position_array(data: Data, rng: np.random.Generator, name: str) -> Any:
    """q, k, v, dout or a tangent: random inside the sequences, NaN in the padding."""
    case, side = data.case, int(name[-1] in "kv")
    array = rng.standard_normal(dense_shape(case, name), np.float32)
    array = np.where(_in_sequences(data, side, array.shape[2]), array, np.nan)
    if "offset" in case.options and name in "qk":
        array[0] = case.options["offset"] if name == "q" else 1
    if "fp8" in case.options:
        array = round_fp8(array, case.options["fp8"], FP8_SCALE)
    return np.asfortranarray(array.astype(dtype_of(case.dtype)))


def _in_sequences(data: Data, side: int, count: int) -> Any:
    """Return which of ``count`` positions of the queries (0) or keys (1) are in a sequence: ``(count, B)`` or ``(count,)``."""
    lengths, starts, positions = data.lengths[side], data.starts[side], np.arange(count)[:, None]
    if starts is not None:
        return ((positions >= starts[:-1]) & (positions < starts[:-1] + lengths)).any(axis=1)
    return np.ones((count, 1), bool) if lengths is None else positions < lengths


def _stats_gradient(data: Data, rng: np.random.Generator) -> Any:
    """Return the gradient of the log-sum-exp: random inside the sequences, NaN in the padding."""
    case = data.case
    array = rng.standard_normal(dense_shape(case, "dstats"), np.float32)
    packed = array.ndim == 2
    inside = _in_sequences(data, 0, array.shape[1 if packed else 0])
    array = np.where(inside if packed else inside[:, None], array, np.float32(np.nan))
    return np.asfortranarray(array.astype(np.float64) if case.dtype == "float64" else array)


def _head_scales(case: Case, rng: np.random.Generator) -> Any:
    """Return the option ``head_scales``."""
    scales = rng.uniform(-0.1, 0.5, case.hq)
    scales[: int(case.options["head_scales"] == "zero")] = 0
    return scales.astype(np.float32)


def _attends(case: Case) -> Any:
    """Return the pairs of the option ``block_mask``."""
    kind, axes = case.options["block_mask"]
    seed, sq, skv, shape = case.seed, case.sq, case.skv, score_shape(case, axes)
    rng = np.random.default_rng([seed, len(kind)])
    i, j = np.arange(sq)[:, None, None], np.arange(skv)[:, None, None, None]
    if kind == "documents":
        document = np.sort(rng.integers(0, 4, max(sq, skv, 1)))
        return np.broadcast_to((document[i] == document[j]) & ((i >= j) | (seed % 2 == 0)), shape)
    if kind == "prefix":
        return np.broadcast_to((i >= j) | (j < rng.integers(0, skv + 1)), shape)
    if kind == "window":  # of documents, or with first keys that every query attends to
        window, document = (i >= j) & (i < j + rng.integers(1, 200)), np.sort(rng.integers(0, 4, max(sq, skv, 1)))
        return np.broadcast_to(window & (document[i] == document[j]) if seed % 2 else window | (j < rng.integers(0, 20)), shape)
    if kind == "segments":  # consecutive queries attend to consecutive keys, some causally; ranges of keys are often nested
        segment = np.searchsorted(np.sort(rng.integers(0, sq + 1, 3)), i, side="right")
        first, last = np.sort(rng.integers(0, skv + 1, (4, 2)), axis=1).T
        inside = (first[segment] <= j) & (j < last[segment])
        return np.broadcast_to(inside & ((i >= j) | (rng.random(4) < 0.7)[segment]), shape)
    kinds = rng.integers(0, 2 if kind == "blocks" else 3, (-(-skv // 128), -(-sq // 128), *shape[2:]))
    kinds = np.repeat(np.repeat(kinds, 128, axis=0), 128, axis=1)[:skv, :sq]
    return np.where(kinds == 2, rng.random(shape) < 0.5, kinds == 1)


def _parents(case: Case, rng: np.random.Generator) -> Any:
    """Return the parents of random trees of the newest tokens, ``(Sq, B)``, or ``(Sq, 1)`` for all sequences."""
    sizes, tokens = (case.sq, 1 if case.options["tree"] == "one" else case.b), np.arange(case.sq)[:, None]
    random = rng.integers(-1, np.maximum(tokens, 0), sizes)
    return np.asfortranarray(np.where(rng.random(sizes) < 0.5, tokens - 1, random).astype(np.int32))


def tree_pairs(parents: Any) -> Any:
    """Return which tokens of the trees ``(Sq, B)`` see each other, bool ``(Sq, Sq, B)``, keys before queries."""
    tokens, batch = parents.shape
    pairs = np.zeros((tokens, tokens, batch), bool)
    for query, b in np.ndindex(tokens, batch):
        ancestor = query
        while ancestor >= 0:
            pairs[ancestor, query, b] = True
            ancestor = int(parents[ancestor, b])
    return pairs


def pool_shape(case: Case, name: str) -> tuple[int, ...]:
    """Return the shape of the pages of k or v."""
    assert case.paged
    pages = case.skv // case.paged.page * case.b + UNUSED
    return (case.dv if name == "v" else case.d, case.hkv, case.paged.page, pages)


def build_pages(case: Case, index: int, dense: dict[str, Any], lengths: Any) -> dict[str, Any]:
    """Return the arrays ``k``, ``v`` and ``page_table``: the dense keys and values of every sequence, distributed over pages.

    Pages that no sequence uses are NaN. Rows of a last page after the length are finite, up to 1e4. In the dense arrays the
    keys of shared pages are changed. The pages depend on the index of the set of values.
    """
    assert case.paged
    rng = np.random.default_rng([case.seed, index, _TABLE_STREAM])
    page, width = case.paged.page, case.skv // case.paged.page
    count = width * case.b + UNUSED
    pages = rng.permutation(count)[: count - UNUSED].reshape(width, case.b).astype(np.int32)
    if case.paged.shared or "shared_prefix" in case.options:
        _share(case, pages, dense, lengths)
    unowned = np.setdiff1d(np.arange(count), pages)
    after_length: dict[str, Any] = {
        "large": [LARGE_ENTRY], "negative": [-1], "unowned": unowned, "mixed": [LARGE_ENTRY, -1, *unowned],
    }  # fmt: skip
    table = np.asfortranarray(rng.choice(after_length[case.paged.rest], pages.shape).astype(np.int32))
    arrays: dict[str, Any] = {"page_table": table}
    for name in "kv":
        garbage = _GARBAGE * (2 * rng.random(pool_shape(case, name), np.float32) - 1)
        arrays[name] = np.asfortranarray(garbage.astype(dense[name].dtype))
    unused = np.ones(count, bool)
    for b, length in enumerate(lengths):
        used = pages[: -(-int(length) // page), b]
        table[: len(used), b] = used
        unused[used] = False
        j = np.arange(int(length))
        for name in "kv":
            arrays[name][:, :, j % page, pages[j // page, b]] = dense[name][:, :, j, b]
    for name in "kv":
        arrays[name][..., unused] = np.nan
    return arrays


def _share(case: Case, pages: Any, dense: dict[str, Any], lengths: Any) -> None:
    """Give every sequence the first full pages of sequence 0."""
    assert case.paged
    page = case.paged.page
    for b in range(1, case.b):
        count = (int(min(lengths[0], lengths[b])) // page + 1) // 2
        count = max(count, case.shared_keys // page) if "shared_prefix" in case.options else count
        pages[:count, b] = pages[:count, 0]
        for name in "kv":
            dense[name][:, :, : count * page, b] = dense[name][:, :, : count * page, 0]


def _tensors(case: Case, rng: np.random.Generator, option: str) -> dict[str, Any]:
    """Return the arrays that a score or mask function captures, by name."""
    name, dtype = case.options[option]
    function, tensors = function_of(option, name), {}
    for tensor, axes in function.tensors.items():
        shape = tensor_shape(axes, case.b, case.hq, case.sq, case.skv)
        values: Any = rng.random(shape) + 0.5
        if dtype == "bool":
            values = values < 1.1
        elif dtype.startswith("int"):
            values = rng.integers(-3, 4, shape)
        tensors[tensor] = np.array(values, dtype_of(dtype), order="F")
    return tensors


def call_options(case: Case, arrays: dict[str, Any], tensors: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the forward call's options, with arrays as in :class:`Data`; the dropout seed depends on the set of values."""
    options = {name: case.options[name] for name in LITERAL_OPTIONS if name in case.options}
    options |= {name: arrays[name] for name in ARRAY_OPTIONS if name in arrays}
    if "bias_repeats" in case.options:
        options["bias_repeats"] = bias_repeats(case) or None
    if "packed" in case.options:
        options |= {"max_seqlen_q": case.sq} | ({} if case.paged else {"max_seqlen_kv": case.skv})
    if case.paged and case.paged.num_splits:
        options["num_splits"] = case.paged.num_splits
    options |= dropout_options(case, arrays, index)
    for option in ("score_mod", "mask_mod"):
        if option in case.options:
            options[option] = function_of(option, case.options[option][0]).call
    options |= {"engine": "cupy"} if case.engine == "cupy" else {}
    return options | ({"tensors": tensors} if tensors else {})


def dropout_options(case: Case, arrays: dict[str, Any], index: int) -> dict[str, Any]:
    """Return the dropout options of the call."""
    dropout = case.dropout
    if dropout is None:
        return {}
    if dropout.source == "mask":
        return {"dropout_p": dropout.p, "dropout_mask": arrays["dropout_mask"]}
    if dropout.source == "array":
        return {"dropout_p": dropout.p, "seed": arrays["seed"], "offset": arrays["offset"]}
    return {"dropout_p": dropout.p, "seed": dropout.seed + index, "offset": dropout.offset}
