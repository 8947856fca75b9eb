"""The options of a part: score and mask functions, biases and masks at the positions of the part in its sequence.

The options belong to a call on one GPU, for whole sequences and all heads. A part gets the slice of every array with the axes
of the scores, and functions that see the positions in the whole sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..extend import OPTIONS, Builder, ReadOptions, Recorded, View


class Window(NamedTuple):
    """The positions of a call within the whole sequences: the first batch item, query head, query and key, and their numbers.

    ``diagonal`` is the key on the diagonal of query 0 of the sequence. ``own_diagonal`` is the key on the diagonal of the
    call's first query, as the call itself computes it.
    """

    first: tuple[int, int, int, int]
    counts: tuple[int, int, int, int]
    diagonal: int
    own_diagonal: int


def options_at(builder: Builder, options: ReadOptions, recorded: Mapping[str, Recorded], window: Window) -> ReadOptions:
    """Return the options of a call at some positions, without the options that the group sets: packing, sinks and seeds.

    ``options`` are for whole sequences, with views instead of arrays; ``recorded`` has the functions by option name. The table
    of options says which arrays are sliced (:data:`.core.options.option.PartsOption`).
    """
    made: dict[str, Any] = {"band": None, "max_seqlen_q": None, "max_seqlen_kv": None}
    scalars = {**options.scalars}
    (b, h, i, j), (entries, heads, queries, keys) = window.first, window.counts
    sizes = dict(zip(("Skv", "Sq", "Hq", "B"), ((j, keys), (i, queries), (h, heads), (b, entries)), strict=True))
    of_lengths = {"seq_lens_q": (i, queries), "seq_lens_kv": (j, keys)}
    for name, array in options.items():
        if OPTIONS[name].parts != "sliced" or name in recorded:
            continue
        if name in of_lengths:
            made[name] = target = builder.temporary(array.shape, array.dtype)
            builder.run(lengths_from, target, array, *of_lengths[name], writes=(target,))
        else:
            made[name] = _sliced(builder, array, [sizes[letter] for letter in OPTIONS[name].axes.split()])
    functions, tensors = dict(recorded), dict(options.get("tensors") or {})
    if "alibi_slopes" in made and window.own_diagonal != i - j + window.diagonal:  # the call has another diagonal
        del made["alibi_slopes"]
        tensors[_SLOPES] = options["alibi_slopes"]
        made["softcap"] = False
        score_mod = _with_alibi(functions.get("score_mod"), scalars.pop("softcap", None), window.diagonal)
        functions["score_mod"] = Recorded.of("score_mod", score_mod, tensors)
    ranges = {"b": (b, entries), "h": (h, heads), "q_idx": (i, queries), "kv_idx": (j, keys)}
    known = list(dict.fromkeys(access for function in functions.values() for access in function.reads))
    if not any(window.first) and all(_is_whole(name, tensors[name], axes, ranges) for name, axes in known):
        return dataclasses.replace(options, inputs={"tensors": tensors} if tensors else {}, scalars=scalars) | made | functions
    local, reads = {}, {}
    for number, access in enumerate(known):
        of_axes = [ranges[axis] if isinstance(axis, str) else None for axis in access.axes]
        array = tensors[access.name]
        local[f"t{number}"] = _taken_from(
            builder, array, tuple(slice(None) if x is None else slice(x[0], sum(x)) for x in of_axes)
        )
        reads[access] = f"t{number}", access.axes
    starts = {axis: start for axis, (start, _) in ranges.items() if start}
    made |= {name: function.relocated(reads, starts=starts) for name, function in functions.items()}
    return dataclasses.replace(options, inputs={"tensors": local} if local else {}, scalars=scalars) | made


#: The name of the slopes among the arrays of a function.
_SLOPES = "alibi_slopes "


def _is_whole(name: str, array: Any, axes: Sequence[str | int], ranges: Mapping[str, tuple[int, int]]) -> bool:
    """True if a call reads whole axes of an array, and knows it by the caller's name."""
    lengths = zip(array.shape, axes, strict=True)
    return name != _SLOPES and all(not isinstance(axis, str) or n == ranges[axis][1] for n, axis in lengths)


def lengths_from(target: Any, lengths: Any, first: int, count: int) -> None:
    """Write how many of ``count`` positions from the first one are within each length."""
    target[...] = (lengths - np.int32(first)).clip(0, count)


def _sliced(builder: Builder, array: View, ranges: Sequence[tuple[int, int]]) -> View:
    """Slice all axes of an array except axes of length 1; an axis without positions becomes empty, whatever its length."""
    parts = [
        slice(None) if n == 1 and count else slice(first, first + count)
        for n, (first, count) in zip(array.shape, ranges, strict=True)
    ]
    return _taken_from(builder, array, tuple(parts))


def _taken_from(builder: Builder, array: View, index: tuple[slice, ...]) -> View:
    """Return a part of an array, or the array itself if the part is the whole array."""
    part = array[index]
    return array if part.shape == array.shape else aligned(builder, part)


def aligned(builder: Builder, part: View) -> View:
    """Return a dense copy of a part of a CuPy array, aligned as cuDNN needs it; parts of numpy arrays are not copied."""
    return builder.copied(part) if builder.on_gpu else part


def _with_alibi(score_mod: Recorded | None, cap: float | None, diagonal: int) -> Callable[..., Any]:
    """Return a score function that also applies the softcap and ALiBi slopes, in the order of the options."""

    def modified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **tensors: Any) -> Any:
        if score_mod is not None:
            score = score_mod(score, b, h, q_idx, kv_idx, **tensors)
        if cap is not None:
            score = cap * np.tanh(score / cap)
        return score - tensors[_SLOPES][h] * abs(q_idx + diagonal - kv_idx if diagonal else q_idx - kv_idx)

    return modified
