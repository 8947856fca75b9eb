"""The options of a part: score and mask functions, biases and masks at the positions of the part in its sequence.

Options are those of a call on one GPU, for whole sequences and all heads. A part gets the slice of every array with the axes of
the scores, and functions that see the positions in the whole sequence.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...calls.user_functions import FUNCTIONS
from ...device import cupy_runtime
from ...problem.problem import LENGTHS, SCORE_INPUTS
from ...score_fn.expression import AXES
from ...score_fn.proxy import Value
from ...score_fn.tracer import Access, trace

#: The options that are the same for every part.
SAME = ("scale", "softcap", "max_workspace")


class Window(NamedTuple):
    """The positions of a call within the whole sequences.

    Attributes:
        first: the first batch entry, query head, query and key.
        counts: the numbers of them.
        diagonal: the key on the diagonal of query 0 of the sequence.
        own_diagonal: the key on the diagonal of the first query of the call, as the call itself determines it.
    """

    first: tuple[int, int, int, int]
    counts: tuple[int, int, int, int]
    diagonal: int
    own_diagonal: int


def accesses(options: Mapping[str, Any], sizes: Sequence[int]) -> tuple[Access, ...]:
    """How the functions of a call index ``tensors``, from calling them with traced values of whole sequences.

    Args:
        options: the options of the call.
        sizes: the numbers of batch entries, query heads, queries and keys.

    Raises:
        Exception: any exception that the functions raise, and errors for operations that cannot be traced.
    """
    if all(options.get(name) is None for name in FUNCTIONS):
        return ()
    lengths = dict(zip(AXES, sizes, strict=True))
    traced = trace(options.get("score_mod"), options.get("mask_mod"), dict(options.get("tensors") or {}), lengths)
    return tuple(traced.captured.values())


def options_at(options: Mapping[str, Any], known: Sequence[Access], window: Window) -> dict[str, Any]:
    """The options of a call at some positions, except masks of bands, packing, sinks and dropout.

    Args:
        options: the options for whole sequences.
        known: how the functions index ``tensors``, from :func:`accesses`.
        window: the positions.
    """
    made = {name: options[name] for name in SAME if options.get(name) is not None}
    (b, h, i, j), (entries, heads, queries, keys) = window.first, window.counts
    for name in SCORE_INPUTS:
        if (array := options.get(name)) is not None:
            made[name] = _sliced(array, ((j, keys), (i, queries), (h, heads), (b, entries)))
    for name, first, count in zip(LENGTHS, (i, j), (queries, keys), strict=True):
        if (lengths := options.get(name)) is not None:
            made[name] = (lengths - np.int32(first)).clip(0, count)
    slopes = options.get("alibi_slopes")
    functions = {name: options[name] for name in FUNCTIONS if options.get(name) is not None}
    tensors, known = dict(options.get("tensors") or {}), list(known)
    if slopes is not None and window.own_diagonal == i - j + window.diagonal:
        made["alibi_slopes"] = slopes if heads == slopes.shape[0] else aligned(slopes[h : h + heads])
    elif slopes is not None:  # the call's own diagonal is another one
        functions["score_mod"] = _with_alibi(functions.get("score_mod"), made.pop("softcap", None), window.diagonal)
        tensors[_SLOPES] = slopes
        known.append(Access(_SLOPES, ("h",)))
    ranges = dict(zip(AXES, zip(window.first, window.counts, strict=True), strict=True))
    if not any(window.first) and all(_is_whole(tensors[access.name], access, ranges) for access in known):
        return made | functions | ({"tensors": tensors} if tensors else {})
    local, views = {}, {}
    for number, access in enumerate(dict.fromkeys(known)):
        axes = [ranges[axis] if isinstance(axis, str) else None for axis in access.axes]
        array = tensors[access.name]
        local[f"t{number}"] = _taken_from(array, tuple(slice(None) if x is None else slice(x[0], sum(x)) for x in axes))
        views[access.name, access.axes] = f"t{number}"
    shapes = {name: (tuple(array.shape), array.dtype) for name, array in tensors.items()}
    for name, function in functions.items():
        made[name] = _shifted(function, _taken(function, shapes, name), window.first, views, shapes)
    return made | ({"tensors": local} if local else {})


#: The name of the slopes among the arrays of a function.
_SLOPES = "alibi_slopes "


def _is_whole(array: Any, access: Access, ranges: Mapping[str, tuple[int, int]]) -> bool:
    """Whether a call reads an array along its whole axes, by the caller's name."""
    axes = zip(array.shape, access.axes, strict=True)
    return access.name != _SLOPES and all(not isinstance(axis, str) or n == ranges[axis][1] for n, axis in axes)


def _sliced(array: Any, ranges: Sequence[tuple[int, int]]) -> Any:
    """The part of an array along axes that are not of length 1."""
    parts = [
        slice(None) if n == 1 else slice(first, first + count) for n, (first, count) in zip(array.shape, ranges, strict=True)
    ]
    return _taken_from(array, tuple(parts))


def _taken_from(array: Any, index: tuple[slice, ...]) -> Any:
    """A part of an array; the array itself if it is the whole."""
    part = array[index]
    return array if part.shape == array.shape else aligned(part)


def aligned(array: Any) -> Any:
    """A dense copy of a part of a CuPy array, whose address cuDNN can read; numpy arrays are not copied."""
    return array.copy(order="F") if cupy_runtime.is_array(array) else array


def _with_alibi(score_mod: Callable[..., Any] | None, cap: float | None, diagonal: int) -> Callable[..., Any]:
    """A score function that also applies the softcap and ALiBi slopes, in the order of the options."""

    def modified(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any, **tensors: Any) -> Any:
        slopes = tensors.pop(_SLOPES)
        if score_mod is not None:
            score = score_mod(score, b, h, q_idx, kv_idx, **tensors)
        if cap is not None:
            score = cap * np.tanh(score / cap)
        return score - slopes[h] * abs(q_idx + diagonal - kv_idx if diagonal else q_idx - kv_idx)

    if score_mod is not None:
        modified.__dict__["taken"] = score_mod
    return modified


def _taken(function: Callable[..., Any], shapes: Mapping[str, Any], option: str) -> tuple[str, ...]:
    """The arrays that a function takes."""
    if (inner := getattr(function, "taken", None)) is not None:
        return (*_taken(inner, {name: shape for name, shape in shapes.items() if name != _SLOPES}, option), _SLOPES)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function that is not written in Python
        return tuple(shapes)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return tuple(shapes)
    names = {p.name for p in parameters[5 if option == "score_mod" else 4 :] if p.kind is not p.POSITIONAL_ONLY}
    return tuple(name for name in shapes if name in names)


def _shifted(
    function: Callable[..., Any],
    taken: tuple[str, ...],
    first: tuple[int, ...],
    views: Mapping[tuple[str, tuple[str | int, ...]], str],
    shapes: Mapping[str, tuple[tuple[int, ...], Any]],
) -> Callable[..., Any]:
    """A function of local positions that calls a function of positions in the whole sequence."""

    def moved(*arguments: Any, **tensors: Any) -> Any:
        *score, b, h, q_idx, kv_idx = arguments
        local = dict(zip(AXES, (b, h, q_idx, kv_idx), strict=True))
        whole = {axis: x + start if start else x for (axis, x), start in zip(local.items(), first, strict=True)}
        arrays = {
            name: _Array(
                name, shapes[name], {axes: tensors[own] for (of, axes), own in views.items() if of == name}, local, whole
            )
            for name in taken
        }
        return function(*score, *whole.values(), **{name: array.as_parameter() for name, array in arrays.items()})

    return moved


class _Array:
    """A captured array for whole sequences: its elements are read from the arrays of the call."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        name: str,
        shape: tuple[tuple[int, ...], Any],
        views: Mapping[tuple[str | int, ...], Any],
        local: Mapping[str, Any],
        whole: Mapping[str, Any],
    ) -> None:
        self._name, self._views, self._local, self._whole = name, views, local, whole
        self.shape, self.dtype = shape

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def as_parameter(self) -> Any:
        """The argument of the function: the array, or the element of an array without axes."""
        return self if self.ndim else self._views.get((), 0.0)

    def __getitem__(self, index: Any) -> Any:
        found = tuple(self._axis(axis, x) for axis, x in enumerate(index if isinstance(index, tuple) else (index,)))
        if found not in self._views:
            raise IndexError(f"tensors[{self._name!r}] is indexed in another way than when the function was first called")
        return self._views[found][tuple(self._local[x] if isinstance(x, str) else x for x in found)]

    def _axis(self, axis: int, x: Any) -> str | int:
        if not isinstance(x, Value):
            return int(x) % self.shape[axis]
        return next(name for name, value in self._whole.items() if value is x or value.step == x.step)
