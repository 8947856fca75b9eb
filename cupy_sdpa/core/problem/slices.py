"""Split a problem into slices of the batch or of the heads, one for each launch.

**A bias that several batch items share** has a launch for the items of each bias, which then has batch 1: cuDNN's bias has
batch 1 or B.

**Gradients whose output or output gradient is too large**: cuDNN's kernel for rowsum(dO∘O) computes addresses in 32 bits. dq
and dk are wrong where ``out`` or ``dout`` reaches beyond 2^31 elements (measured with 9.19.0; 9.28.0 is right). All other
arrays may be of any size. A slice is a range of batch items, where one item is too large a range of heads. Slices are
views; ``out`` and ``dout`` are copied where the view of a slice still reaches too far, for example because the heads of a
packed array are interleaved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..score_fn.expression import Expression, Writer
from .arrays import has_score_axes, letters_of
from .problem import Problem
from .tensor_spec import ITEMSIZE, TensorSpec, byte_range, dense_spec, make_spec

#: The largest number of elements from the first to the last element of ``out`` and of ``dout`` in one launch.
LIMIT = 2**31
#: How far apart the random numbers of consecutive heads are, in units of dropout's offset. Heads count over all batch items.
OFFSET_OF_HEADS = 32

#: The arrays that are read by the kernel whose addresses have 32 bits.
LIMITED = ("out", "dout")
#: The arrays whose axis 1 is the query heads or the key/value heads.
_QUERY_HEADS, _KEY_HEADS = ("q", "out", "dout", "dq"), ("k", "v", "dk", "dv")


class Slice(NamedTuple):
    """The key/value heads, with their query heads, and the batch items that one launch computes."""

    heads: range
    batch: range


def extent(spec: TensorSpec) -> int:
    """Return the number of elements from the first to the last element of an array.

    >>> extent(dense_spec("out", "float16", (64, 8, 100, 2))), extent(dense_spec("out", "float16", (64, 8, 0, 2)))
    (102400, 0)
    """
    if 0 in spec.shape:
        return 0
    start, end = byte_range(spec.shape, spec.strides, ITEMSIZE[spec.dtype])
    return (end - start) // ITEMSIZE[spec.dtype]


def is_too_large(problem: Problem) -> bool:
    """True if the gradients need more than one launch because ``out`` or ``dout`` reaches too far."""
    return problem.backward and any(extent(spec) > LIMIT for spec in _limited(problem))


def bias_slices(problem: Problem) -> tuple[Slice, ...]:
    """Return the slices of a problem whose bias is shared by groups of batch items, one for each group; empty for others."""
    _, _, _, hkv, _, _, batch = problem.sizes
    groups = problem.bias.shape[3] if problem.bias else 1
    if groups in (1, batch) or problem.trivial:
        return ()
    items = batch // groups
    return tuple(Slice(range(hkv), range(first, first + items)) for first in range(0, batch, items))


def slices_of_gradients(problem: Problem) -> tuple[Slice, ...]:
    """Return the slices of gradients that are too large for one launch; empty if not too large, or too large to slice."""
    _, dv, hq, hkv, sq, _, batch = problem.sizes
    rows = problem.out.shape[2] if problem.packed else sq
    heads, entries = range(hkv), range(batch)
    of_head = dv * (hq // hkv) * rows  # elements of the query heads of one key/value head, in one batch item
    if not is_too_large(problem):
        return ()
    if not problem.packed:
        for copied in (False, True):  # as views where possible
            largest = _largest_batch(problem, of_head * hkv, copied=copied)
            if largest:
                return tuple(Slice(heads, entries[first : first + largest]) for first in range(0, batch, largest))
    if of_head > LIMIT or (problem.packed and problem.settings.dropout):
        return ()
    count = LIMIT // of_head
    groups = [heads[first : first + count] for first in range(0, hkv, count)]
    whole = [entries] if problem.packed else [entries[b : b + 1] for b in entries]
    return tuple(Slice(group, part) for part in whole for group in groups)


def _largest_batch(problem: Problem, of_entry: int, *, copied: bool) -> int:
    """Return the largest number of batch items whose slices are small enough as views or dense copies; 0 if even one is not."""
    if copied:
        return LIMIT // of_entry
    largest = problem.out.shape[3]
    for spec in _limited(problem):
        one = make_spec(spec.name, spec.dtype, (*spec.shape[:3], 1), spec.strides)
        room = LIMIT - extent(one)
        if room < 0:
            return 0
        if stride := spec.strides[3] // ITEMSIZE[spec.dtype]:
            largest = min(largest, room // stride + 1)
    return largest


def _limited(problem: Problem) -> tuple[TensorSpec, ...]:
    return tuple(spec for spec in (problem.out, problem.dout) if spec)


def index_of(problem: Problem, name: str, shape: tuple[int, ...], part: Slice) -> tuple[slice, ...]:
    """Return the elements of an array of the problem, of this name and shape, that belong to a slice.

    An axis of an array with the axes of the scores may be shorter than that of the problem: several heads or batch items then
    share an element.
    """
    _, _, hq, hkv, _, _, batch = problem.sizes
    group, whole = hq // hkv if hkv else 0, slice(None)
    ranges = {
        "Hq": (part.heads.start * group, part.heads.stop * group, hq),
        "Hkv": (part.heads.start, part.heads.stop, hkv),
        "B": (part.batch.start, part.batch.stop, batch),
    }
    if problem.paged and name in ("k", "v"):  # the page table selects the pages
        return (whole,) * len(shape)

    def of_axis(letter: str, length: int) -> slice:
        if letter not in ranges:
            return whole
        start, stop, full = ranges[letter]
        return slice(start * length // full, -(-stop * length // full)) if has_score_axes(name) else slice(start, stop)

    letters = letters_of(name, packed=problem.packed) or ("",) * len(shape)
    return tuple(of_axis(letter, length) for letter, length in zip(letters, shape, strict=True))


def with_arrays(problem: Problem, specs: dict[str, TensorSpec], part: Slice) -> Problem:
    """Return the problem of a slice, from the specs of its arrays by name."""
    _, _, hq, hkv, *_ = problem.sizes
    expression = problem.settings.expression
    settings = problem.settings
    if expression is not None:
        first = {"h": part.heads.start * (hq // hkv), "b": part.batch.start}
        settings = settings._replace(expression=_shifted(expression, first))
    fields: dict[str, Any] = {**specs}
    for field in ("captured", "dcaptured"):
        fields[field] = tuple(fields.pop(spec.name) for spec in getattr(problem, field))
    return replace(problem, settings=settings, **fields)


def launches(problem: Problem, parts: Sequence[Slice]) -> Iterator[Problem]:
    """Yield the problem of each slice of a problem without arrays: slices of dense arrays are dense where they are copied."""
    for part in parts:
        specs = {}
        for spec in problem.tensors:
            shape = tuple(len(range(*index.indices(n))) for index, n in
                          zip(index_of(problem, spec.name, spec.shape, part), spec.shape, strict=True))  # fmt: skip
            view = make_spec(spec.name, spec.dtype, shape, spec.strides, 16)
            specs[spec.name] = dense_spec(spec.name, spec.dtype, shape) if is_copied(view, spec) else view
        yield with_arrays(problem, specs, part)


def is_copied(view: TensorSpec, whole: TensorSpec) -> bool:
    """True if the launch of a slice reads a copy of an array instead of the view of its elements.

    cuDNN reads q, k and v with any strides, integers at any address, and everything else dense and aligned to 16 bytes.
    """
    if view.name in LIMITED:
        packed = len(view.shape) == 3  # its heads are interleaved
        return packed or extent(view) > LIMIT
    if view.shape == whole.shape or view.name in ("q", "k", "v") or view.dtype.startswith("int"):
        return False
    return not view.dense or view.alignment < 16


def _shifted(expression: Expression, first: dict[str, int]) -> Expression:
    """Return a score function in which heads and batch items count from the first one of a slice."""
    writer = Writer()
    made: list[int] = []
    for step in expression.steps:
        args = [made[arg] for arg in step.args]
        if step.args:
            made.append(writer.add(step.mode, *args, kind=step.kind))
            continue
        leaf = writer.leaf(step.mode, step.name, step.kind, step.value)
        shift = first.get(step.name, 0) if step.mode == "index" else 0
        made.append(writer.add("add", leaf, writer.constant(shift, step.kind)) if shift else leaf)
    score, mask = (None if root is None else made[root] for root in (expression.score, expression.mask))
    return Expression(tuple(writer.steps), score, mask)
