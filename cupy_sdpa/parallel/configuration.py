"""The shapes and options of a call as every member sees them: whole sequences, who holds what, and which calls each one makes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..calls.arguments import read_array
from ..calls.options import ARRAYS, check_names, read_scale, read_settings
from ..calls.user_functions import FUNCTIONS, check_tensors, function_identities
from ..device import cupy_runtime
from ..errors import Unsupported
from ..helpers import dropout_mask
from ..problem.band import Band
from ..problem.problem import CU_SEQLENS, LENGTHS, SEEDS, Problem
from ..problem.tensor_spec import Signature, dense_signature, dtype_name, numpy_dtype
from ..problem.validation import make_problem
from ..score_fn.tracer import Access
from .groups.channel import Spec
from .layout import Interval, Layout
from .parts import Part, Selection, gradient_dtype, parts, share_buffers, stats_dtype
from .positions import Window, accesses, options_at

#: The methods, from the one that sends the least to the one that sends the most arrays.
METHODS = ("ring", "all_gather", "all_to_all")
#: Options that a call of a group does not take.
_EXCLUDED = {
    "page_table": "pages are for decoding, where each sequence has few queries: use cupy_sdpa.attention on the GPU that has them",
    "num_splits": "it is an option of paged keys",
    "bucket": "every member has the same lengths already: pad the sequence before shard()",
}
#: The options that depend on the positions of queries and keys.
_POSITIONAL = ("bias", "mask", "dropout_mask", "alibi_slopes", *FUNCTIONS, *LENGTHS)


@dataclass(frozen=True)
class Configuration:
    """A call of a group, without the arrays.

    Attributes:
        rank: this member.
        problem: the problem of the same call on one GPU.
        queries, keys: who holds which positions.
        diagonals: for every sequence the key on the diagonal of query 0.
        known: how the functions index ``tensors``.
        positional: whether an option depends on positions.
        drawn: whether random numbers are drawn for dropout.
        on_gpu: whether the arrays are CuPy's.
        text: the shapes and options in words, which must be equal for all members.
    """

    rank: int
    problem: Problem
    queries: Layout
    keys: Layout
    diagonals: tuple[int, ...]
    known: tuple[Access, ...]
    positional: bool
    drawn: bool
    on_gpu: bool
    text: str

    @property
    def size(self) -> int:
        """The number of members."""
        return self.queries.size

    @property
    def packed(self) -> bool:
        """Whether sequences are packed."""
        return self.queries.packed

    @property
    def batch(self) -> tuple[int, ...]:
        """The last axis of dense arrays."""
        return () if self.packed else self.problem.q.shape[3:]

    @property
    def dtype(self) -> Any:
        """The dtype of q."""
        return numpy_dtype(self.problem.dtype)

    @functools.cached_property
    def refusals(self) -> dict[str, str]:
        """The methods that cannot run, and why."""
        found = {}
        heads, group, size = self.problem.sizes[2], self.group, self.size
        shared = heads // size if size and heads % size == 0 else 0
        if heads % size:
            found["all_to_all"] = f"{heads} query heads cannot be shared out equally among {size} members"
        elif shared % group and group % shared:
            found["all_to_all"] = (
                f"the {shared} query heads of a member do not belong to whole groups of {group} query heads per key/value head"
            )
        band = self.problem.band
        if band and band.bottom_right and any(getattr(self.problem, name) for name in LENGTHS) and size > 1:
            reason = "with lengths of batch entries, a bottom-right diagonal is at another position in every entry"
            found |= {"ring": reason, "all_gather": reason}
        return found

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        _, _, hq, hkv, *_ = self.problem.sizes
        return hq // hkv if hkv else 1

    def heads(self, rank: int) -> tuple[slice, slice]:
        """The query heads and the key/value heads of a member with the method all_to_all."""
        shared = self.problem.sizes[2] // self.size
        start, stop = rank * shared, (rank + 1) * shared
        return slice(start, stop), slice(start // self.group, -(-stop // self.group))

    @functools.cached_property
    def steps(self) -> tuple[tuple[tuple[Part, ...], ...], int]:
        """The calls of the ring, for the keys of every member in the order of the steps; and the number of partial results."""
        made = [tuple(self._parts(self.keys.intervals((self.rank - step) % self.size))) for step in range(self.size)]
        return tuple(made), share_buffers([part for step in made for part in step])

    @functools.cached_property
    def whole(self) -> tuple[tuple[Part, ...], int]:
        """The calls on all keys in order, and the number of partial results."""
        intervals = [
            (Interval(0, length, start),) if length else ()
            for length, start in zip(self.keys.lengths, self.keys.starts, strict=True)
        ]
        made = tuple(self._parts(intervals))
        return made, share_buffers(made)

    def _parts(self, keys: Sequence[Sequence[Interval]]) -> list[Part]:
        has_lengths = any(getattr(self.problem, name) for name in LENGTHS)
        return parts(
            self.queries, self.rank, keys, self.diagonals, self.problem.band, positional=self.positional, aligned=not has_lengths
        )

    def part_options(self, part: Part, like: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of a part."""
        _, _, heads, _, sq, skv, entries = self.problem.sizes
        if self.packed and part.sequence is None:
            counts = (entries, heads, sq, skv)
        else:
            counts = (1 if self.packed else entries, heads, part.rows.length, part.keys.length)
        band, (i, j) = part.band, part.first
        own = part.keys.length - part.rows.length if band and band.bottom_right else 0
        first = (part.sequence or 0, 0, i, j) if self.positional else (0, 0, 0, 0)
        made = options_at(options, self.known, Window(first, counts, part.diagonal, own))
        return made | _window(band) | part.packing(like) | self._dropout(made, options)

    def head_options(self, like: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the call on this member's heads of whole sequences."""
        _, _, _, _, sq, skv, entries = self.problem.sizes
        rows, _ = self.heads(self.rank)
        band = self.problem.band
        aligned = (skv - sq if band and band.bottom_right else 0) if not self.packed else 0
        window = Window((0, rows.start, 0, 0), (entries, rows.stop - rows.start, sq, skv), aligned, aligned)
        made = options_at(options, self.known, window)
        return made | _window(band) | self.everything.packing(like) | self._dropout(made, options)

    @functools.cached_property
    def everything(self) -> Part:
        """All positions of whole packed sequences, of which only the offsets are used."""
        lengths = tuple(zip(self.queries.lengths, self.keys.lengths, strict=True)) if self.packed else None
        return Part(Selection([]), Selection([]), None, (0, 0), None, 0, lengths)

    def _dropout(self, made: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of dropout; a mask of a part is among the options that were sliced."""
        p = options.get("dropout_p", 0.0)
        if not p:
            return {}
        if "dropout_mask" in made:
            return {"dropout_p": p}
        return {"dropout_p": p} | {name: options[name] for name in SEEDS if options.get(name) is not None}

    def with_dropout_mask(self, options: Mapping[str, Any]) -> Mapping[str, Any]:
        """The options with the dropout mask of the whole sequences in place of the seed, on the CPU."""
        if not self.drawn or self.on_gpu:
            return options
        _, _, hq, hkv, sq, skv, entries = self.problem.sizes
        shapes = (1, hq, sq, entries), (1, hkv, skv, entries)
        q, k = (np.zeros(shape, np.float32, order="F") for shape in shapes)
        drawn = {name: options[name] for name in ("dropout_p", *SEEDS) if options.get(name) is not None}
        mask = dropout_mask(q, k, **drawn)
        return {**{name: value for name, value in options.items() if name not in SEEDS}, "dropout_mask": mask}

    def key_specs(self, rank: int, dtype: Any = None) -> list[Spec]:
        """The shapes and dtypes of the keys and values that a member holds, or of their gradients."""
        d, dv, _, hkv, *_ = self.problem.sizes
        share = self.keys.share(rank)
        return [((width, hkv, share, *self.batch), dtype or self.dtype) for width in (d, dv)]

    @property
    def sums(self) -> Any:
        """The dtype in which gradients are summed."""
        return gradient_dtype(self.dtype)

    @property
    def stats(self) -> Any:
        """The dtype of the log-sum-exp."""
        return stats_dtype(self.dtype)


def _window(band: Band | None) -> dict[str, Any]:
    if band is None:
        return {}
    return {"window": (band.left, band.right, "bottom_right" if band.bottom_right else "top_left")}


def configure(
    rank: int,
    size: int,
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    seqlens: tuple[int | None, int | None],
) -> Configuration:
    """Validate the arguments of a call.

    Args:
        rank, size: the member, and the number of members.
        arrays: q, k and v, and in the backward pass dout, out and stats.
        options: the options.
        seqlens: the lengths of the sequences of dense arrays; None for the local length times the number of members.

    Raises:
        TypeError, ValueError, Unsupported: as :func:`cupy_sdpa.attention`; and if arrays are not the member's part.
    """
    check_names(options)
    check_tensors(options)
    for name, reason in _EXCLUDED.items():
        if options.get(name) is not None:
            raise Unsupported(f"{name} is passed, which a group does not support: {reason}")
    given = {name: read_array(name, x) for name, x in arrays.items()}
    q, k, v = (given[name].array for name in "qkv")
    packed = any(options.get(name) is not None for name in CU_SEQLENS)
    rank_of_arrays = 3 if packed else 4
    for name, argument in given.items():
        expected = rank_of_arrays - (name == "stats")
        if argument.array.ndim != expected:
            raise ValueError(f"{name} has {argument.array.ndim} dimensions {argument.array.shape}; it needs {expected}")
    if packed:
        layouts = [Layout(_lengths(name, options, size), size, packed=True) for name in CU_SEQLENS]
        queries, keys = layouts
        if len(queries.lengths) != len(keys.lengths):
            raise ValueError(f"cu_seqlens_q has {len(queries.lengths)} sequences and cu_seqlens_kv {len(keys.lengths)}")
    else:
        queries, keys = _dense_layouts(q.shape[2], k.shape[2], size, seqlens)
    for name, layout in (("q", queries), ("k", keys), ("v", keys), ("dout", queries), ("out", queries)):
        if name in given and given[name].array.shape[2] != layout.share(rank):
            _raise_share(name, given[name].array.shape, layout, rank, packed)
    problem = _problem(given, options, queries, keys)
    on_gpu = given["q"].device is not None
    drawn = bool(problem.settings.dropout) and options.get("dropout_mask") is None
    if drawn and on_gpu and size > 1:
        raise Unsupported(
            f"dropout_p is {options['dropout_p']} with {size} members: cuDNN derives the random number of a weight from its place "
            "in the call, and has no input for the place of the call in the sequence, so members would drop other weights than "
            "one GPU, and both passes would disagree: omit dropout_p"
        )
    _check_gradient_inputs(given, problem, queries, rank)
    band = problem.band
    aligned = band is not None and band.bottom_right
    diagonals = tuple(m - n if aligned else 0 for n, m in zip(queries.lengths, keys.lengths, strict=True))
    _, _, hq, _, sq, skv, entries = problem.sizes
    known = accesses(options, (entries, hq, sq, skv))
    positional = drawn or any(options.get(name) is not None for name in _POSITIONAL)
    text = _text(problem, options, queries, keys)
    return Configuration(rank, problem, queries, keys, diagonals, known, positional, drawn, on_gpu, text)


def _lengths(name: str, options: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """The lengths of packed sequences, from the offsets of the whole sequences on the host."""
    starts = options.get(name)
    if starts is None:
        raise ValueError(f"{name} is None; packed sequences need both cu_seqlens_q and cu_seqlens_kv")
    if cupy_runtime.is_array(starts):
        raise TypeError(
            f"{name} is a CuPy array; a group cuts every sequence on the host, and reading the offsets from the GPU would wait for "
            "it: pass a numpy array"
        )
    starts = np.asarray(starts)
    if starts.dtype.kind != "i" or starts.ndim != 1 or not starts.size:
        raise TypeError(f"{name} is {starts.dtype} of shape {starts.shape}; it must be int32 or int64 (B + 1,)")
    lengths = np.diff(starts)
    if starts[0] or (lengths < 0).any():
        raise ValueError(f"{name} is {starts.tolist()}; the offsets of whole sequences begin with 0 and must not decrease")
    side = name.removeprefix("cu_seqlens_")
    longest = options.get(f"max_seqlen_{side}")
    if longest is not None and lengths.size and lengths.max() > longest:
        raise ValueError(f"{name} has a sequence of {lengths.max()}; max_seqlen_{side} is {longest}")
    return tuple(lengths.tolist())


def _dense_layouts(
    queries: int, keys: int, size: int, seqlens: tuple[int | None, int | None]
) -> tuple[Layout, Layout]:
    """The layouts of dense arrays from the lengths of the member's arrays."""
    seqlen_q, seqlen_kv = seqlens
    whole_q = queries * size if seqlen_q is None else int(seqlen_q)
    if seqlen_kv is None:
        seqlen_kv = whole_q if queries == keys else keys * size
    return Layout((whole_q,), size), Layout((int(seqlen_kv),), size)


def _raise_share(name: str, shape: tuple[int, ...], layout: Layout, rank: int, packed: bool) -> None:
    side = "kv" if name in "kv" else "q"
    source = f"cu_seqlens_{side}" if packed else f"seqlen_{side}"
    remedy = "cut arrays with shard()" if packed else f"cut arrays with shard(), and pass {source}= if {2 * layout.size} does not divide it"
    raise ValueError(
        f"{name} has shape {shape}; of {layout.total} positions ({source}) member {rank} of {layout.size} holds "
        f"{layout.share(rank)}: {remedy}"
    )


def _problem(given: Mapping[str, Any], options: Mapping[str, Any], queries: Layout, keys: Layout) -> Problem:
    """The problem of the call on one GPU."""
    signatures: dict[str, Signature] = {}
    for name, layout in (("q", queries), ("k", keys), ("v", keys)):
        x = given[name].array
        signatures[name] = dense_signature(dtype_name(x.dtype), (*x.shape[:2], layout.total, *x.shape[3:]))
    for name in ARRAYS:
        value = options.get(name)
        if value is None or name in SEEDS:
            continue
        if name in CU_SEQLENS:
            signatures[name] = dense_signature("int32", (len(queries.lengths) + 1,))
            continue
        argument = read_array(name, value)
        if (argument.device is None) != (given["q"].device is None):
            raise TypeError(f"arrays are mixed: q and {name} must both be numpy arrays or both be CuPy arrays")
        signatures[name] = argument.signature
    lengths = [name for name in LENGTHS if name in signatures]
    if len(lengths) == 1:
        (missing,) = set(LENGTHS) - set(lengths)
        signatures[missing] = signatures[lengths[0]]
    known = dict(options)
    if queries.packed:
        known |= {"max_seqlen_q": max(queries.lengths, default=0), "max_seqlen_kv": max(keys.lengths, default=0)}
    tau = read_scale(options.get("scale"), given["q"].array.shape[0])
    settings, _ = read_settings(known, tau)
    return make_problem(tuple(signatures.items()), settings)


def _check_gradient_inputs(given: Mapping[str, Any], problem: Problem, queries: Layout, rank: int) -> None:
    """Check dout, out and stats of a member."""
    _, dv, hq, *_ = problem.sizes
    share, batch = queries.share(rank), () if queries.packed else problem.q.shape[3:]
    stats = (hq, share) if queries.packed else (share, hq, *batch)
    for name, shape in (("dout", (dv, hq, share, *batch)), ("out", (dv, hq, share, *batch)), ("stats", stats)):
        if name in given and given[name].array.shape != shape:
            raise ValueError(f"{name} has shape {given[name].array.shape}; it must be {shape}")


def _text(problem: Problem, options: Mapping[str, Any], queries: Layout, keys: Layout) -> str:
    """The shapes and options, one per line."""
    lines = [f"problem: {problem}", f"lengths of q: {_listed(queries.lengths)}", f"lengths of k: {_listed(keys.lengths)}"]
    for name in sorted(options):
        value = options[name]
        if value is None or name in CU_SEQLENS:
            continue
        if name in FUNCTIONS:
            text = getattr(value, "__qualname__", type(value).__qualname__)
        elif name == "tensors":
            text = ", ".join(f"{key} {array.shape} {array.dtype}" for key, array in value.items())
        else:
            text = f"{value.shape} {value.dtype}" if hasattr(value, "shape") else repr(value)
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def _listed(lengths: Sequence[int]) -> str:
    """Lengths as text; many are abbreviated by their number, total and a checksum."""
    if len(lengths) <= 8:
        return ", ".join(map(str, lengths))
    import zlib

    return f"{len(lengths)} sequences of {sum(lengths)} positions, checksum {zlib.crc32(repr(tuple(lengths)).encode()):08x}"


def key_of(arrays: Mapping[str, Any], options: Mapping[str, Any], *others: Any) -> Any:
    """A hashable value that is equal for calls with the same configuration; None if there is none."""
    parts_of_key: list[Any] = [*others]
    for name, x in arrays.items():
        parts_of_key.append((name, x.shape, x.dtype.str, x.dtype.name, cupy_runtime.is_array(x)))
    for name, value in options.items():
        if value is None or name in FUNCTIONS:
            continue
        if name in CU_SEQLENS:
            if cupy_runtime.is_array(value):
                return None
            parts_of_key.append((name, np.asarray(value).tobytes()))
        elif name == "tensors":
            parts_of_key.append((name, tuple((key, x.shape, x.dtype.name) for key, x in value.items())))
        elif hasattr(value, "shape"):
            parts_of_key.append((name, value.shape, value.dtype.name))
        else:
            parts_of_key.append((name, value if not isinstance(value, list) else tuple(value)))
    identities = function_identities(options)
    if any(options.get(name) is not None and own is None for name, own in zip(FUNCTIONS, identities, strict=True)):
        return None
    key = (*parts_of_key, identities)
    try:
        hash(key)
    except TypeError:
        return None
    return key
