"""A call of a group without the arrays: whole sequences, who holds what, and which calls each member makes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import Problem
from ..extend import Builder, Constant, ReadOptions, Recorded, View, numpy_dtype
from ..helpers import dropout_mask
from .parts import Part, Selection, call_parts, share_buffers
from .positions import Window, aligned, options_at
from .shards import Interval, ShardLayout

#: The shape and dtype of an array in a message.
Spec = tuple[tuple[int, ...], Any]

#: The methods, from the one that sends the least to the one that sends the most arrays.
METHODS = ("ring", "all_gather", "all_to_all")

#: The state of dropout's random number generator.
_SEEDS = ("seed", "offset")


class Request(NamedTuple):
    """What a call asks for in addition to arrays and options, None for a default; ``dtype`` is the dtype to compute in."""

    backward: bool
    method: str | None
    seqlen_q: int | None
    seqlen_kv: int | None
    deterministic: bool = False
    return_dsinks: bool = False
    dtype: str | None = None

    @property
    def arrays(self) -> tuple[str, ...]:
        """The names of the arrays."""
        return ("q", "k", "v", "dout", "out", "stats") if self.backward else ("q", "k", "v")

    @property
    def results(self) -> tuple[str, ...]:
        """The names of the results."""
        return ("dq", "dk", "dv", *(["dsinks"] if self.return_dsinks else [])) if self.backward else ("out", "stats")


@dataclass(frozen=True)
class Configuration:
    """A call of a group, without the arrays.

    Attributes:
        problem: the problem of the same call on one GPU.
        queries, keys: who holds which positions.
        diagonals: for every sequence the key on the diagonal of query 0.
        functions: the functions by the names of their options.
        positional: whether an option depends on positions.
        drawn: whether random numbers are drawn for dropout.
        text: the shapes and options in words, which must be equal for all members.
    """

    rank: int
    problem: Problem
    queries: ShardLayout
    keys: ShardLayout
    diagonals: tuple[int, ...]
    functions: Mapping[str, Recorded]
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
            found["all_to_all"] = f"{heads} query heads cannot be divided equally among {size} members"
        elif shared % group and group % shared:
            found["all_to_all"] = (
                f"the {shared} query heads of a member do not form whole groups of {group} query heads per key/value head"
            )
        band = self.problem.band
        if band and band.bottom_right and self.problem.seq_lens_kv is not None and size > 1:
            reason = "with lengths, a bottom-right diagonal has a different position in each sequence"
            found |= {"ring": reason, "all_gather": reason}
        return found

    @property
    def group(self) -> int:
        """The number of query heads per key/value head."""
        _, _, hq, hkv, *_ = self.problem.sizes
        return hq // hkv if hkv else 1

    def heads(self, rank: int) -> tuple[slice, slice]:
        """Return the query heads and the key/value heads of a member with the method all_to_all."""
        shared = self.problem.sizes[2] // self.size
        start, stop = rank * shared, (rank + 1) * shared
        return slice(start, stop), slice(start // self.group, -(-stop // self.group))

    def all_heads(self, _rank: int) -> tuple[slice, slice]:
        """Return the query heads and the key/value heads of every member with the method all_gather."""
        _, _, hq, hkv, *_ = self.problem.sizes
        return slice(0, hq), slice(0, hkv)

    @functools.cached_property
    def ring_calls(self) -> list[list[Part]]:
        """The calls of the ring, for the keys of every member in the order of the steps."""
        return self._calls([self.keys.intervals((self.rank - step) % self.size) for step in range(self.size)])

    @functools.cached_property
    def gather_calls(self) -> list[list[Part]]:
        """The calls of the all-gather: those on all keys, as of one step."""
        return self._calls([self.keys.whole])

    @functools.cached_property
    def gather_calls_backward(self) -> list[Part]:
        """The calls of the all-gather in the backward pass."""
        return self._calls([self.keys.whole], cut=True)[0]

    def _calls(self, steps: Sequence[Sequence[Sequence[Interval]]], *, cut: bool = False) -> list[list[Part]]:
        """Return the calls on the keys of every step, which are intervals for every sequence."""
        aligned = self.problem.seq_lens_kv is None
        of_calls: dict[str, Any] = {"positional": self.positional, "aligned": aligned, "cut": cut}
        made = [call_parts(self.queries, self.rank, keys, self.diagonals, self.problem.band, **of_calls) for keys in steps]
        share_buffers([part for own in made for part in own])
        return made

    def part_options(self, part: Part, builder: Builder, options: ReadOptions) -> ReadOptions:
        """Return the options of a part."""
        _, _, heads, *_, entries = self.problem.sizes
        if self.packed and part.sequence is None:
            counts = (entries, heads, *self.longest)
        else:
            counts = (1 if self.packed else entries, heads, part.rows.length, part.keys.length)
        band, (i, j) = part.band, part.first
        own = part.keys.length - part.rows.length if band and band.bottom_right else 0
        first = (part.sequence or 0, 0, i, j) if self.positional else (0, 0, 0, 0)
        return self._options(builder, options, Window(first, counts, part.diagonal, own), part)

    def head_options(self, builder: Builder, options: ReadOptions) -> ReadOptions:
        """Return the options of the call on this member's heads of whole sequences."""
        sq, skv = self.longest
        *_, entries = self.problem.sizes
        rows, _ = self.heads(self.rank)
        band = self.problem.band
        diagonal = (skv - sq if band and band.bottom_right else 0) if not self.packed else 0
        window = Window((0, rows.start, 0, 0), (entries, rows.stop - rows.start, sq, skv), diagonal, diagonal)
        made = self._options(builder, options, window, self.everything)
        if (sinks := options.get("sinks")) is not None:
            made |= {"sinks": aligned(builder, sinks[rows])}
        return made

    def _options(self, builder: Builder, options: ReadOptions, window: Window, part: Part) -> ReadOptions:
        made = options_at(builder, options, self.functions, window) | {"band": part.band, **part.packing(builder)}
        if options.settings.dropout and "dropout_mask" not in made:  # a mask of the part is among the options that were sliced
            made |= {name: options[name] for name in _SEEDS if name in options}
        return made

    @property
    def longest(self) -> tuple[int, int]:
        """The longest lengths of queries and keys; the caller's maxima of packed sequences may exceed them."""
        if self.packed:
            return max(self.queries.lengths, default=0), max(self.keys.lengths, default=0)
        return self.problem.sizes[4], self.problem.sizes[5]

    @functools.cached_property
    def everything(self) -> Part:
        """All positions of whole sequences, of which only the band and the offsets are used."""
        lengths = tuple(zip(self.queries.lengths, self.keys.lengths, strict=True)) if self.packed else None
        return Part(Selection([]), Selection([]), self.problem.band, (0, 0), None, 0, lengths)

    def with_dropout_mask(
        self, arrays: dict[str, Any], views: dict[str, View], options: ReadOptions
    ) -> tuple[dict[str, Any], dict[str, View], ReadOptions]:
        """Return the operands with the dropout mask of the whole sequences instead of the seed, on the CPU."""
        if not self.drawn or self.on_gpu or self.size == 1:
            return arrays, views, options
        _, _, hq, hkv, sq, skv, entries = self.problem.sizes
        shapes = (1, hq, sq, entries), (1, hkv, skv, entries)
        q, k = (np.zeros(shape, np.float32, order="F") for shape in shapes)
        seeds = {name: arrays.get(name, options[name]) for name in _SEEDS if name in options}
        mask = dropout_mask(q, k, dropout_p=options.settings.dropout, **seeds)
        arrays = {name: x for name, x in arrays.items() if name not in _SEEDS} | {"dropout_mask": mask}
        views = {name: View.of(name, x) for name, x in arrays.items()}
        return arrays, views, options.without(*_SEEDS) | {"dropout_mask": views["dropout_mask"]}

    def key_specs(self, rank: int, dtype: Any = None) -> list[Spec]:
        """Return the shapes and dtypes of the keys and values that a member holds, or of their gradients."""
        d, dv, _, hkv, *_ = self.problem.sizes
        share = self.keys.share(rank)
        return [((width, hkv, share, *self.batch), dtype or self.dtype) for width in (d, dv)]

    @property
    def row_axis(self) -> int:
        """The query axis of the log-sum-exp."""
        return 1 if self.packed else 0

    @functools.cached_property
    def positions(self) -> Constant:
        """The positions of the member's queries within their sequences."""
        return Constant(self.queries.positions(self.rank))

    @property
    def stats(self) -> Any:
        """The dtype of the log-sum-exp, and of sums of gradients: float64 for float64 arrays, else float32."""
        return np.promote_types(self.dtype, np.float32)
