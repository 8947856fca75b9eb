"""The builder of a problem in slices (:mod:`.core.problem.slices`): the arrays of each slice, and the sums over slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from ..boundary.call import Fill
from ..problem.arrays import VECTORS
from ..problem.problem import Problem
from ..problem.slices import OFFSET_OF_HEADS, Slice, index_of, is_copied, with_arrays
from ..problem.tensor_spec import TensorSpec
from ..problem.view import View
from .steps import Steps


def parts(
    steps: Steps, problem: Problem, slices: tuple[Slice, ...], arrays: Mapping[str, View]
) -> Iterator[tuple[Problem, dict[str, View]]]:
    """Yield the problem and the arrays of each slice; the caller adds its launches before it asks for the next slice.

    A gradient of elements that several slices share, such as that of a bias shared by all batch items, is summed in float32.
    """
    summed = {spec.name for spec in problem.results if _is_sum(problem, spec, slices)}
    totals = {name: steps.temporary(arrays[name].shape, np.float32) for name in summed}
    for total in totals.values():
        steps.fill(total, 0)
    for part in slices:
        own = {spec.name: _part(steps, problem, spec, arrays[spec.name], part) for spec in problem.tensors}
        sums = {name: steps.temporary(own[name].shape, np.float32) for name in summed}
        own |= sums
        yield with_arrays(problem, {name: view.spec(name) for name, view in own.items()}, part), own
        for name, view in sums.items():
            steps.add(totals[name][index_of(problem, name, totals[name].shape, part)], view)
        for spec in problem.results:
            target = arrays[spec.name][index_of(problem, spec.name, spec.shape, part)]
            if spec.name not in summed and own[spec.name] != target:
                steps.copy(target, own[spec.name])
    for name, total in totals.items():
        steps.copy(arrays[name], total)


def _is_sum(problem: Problem, spec: TensorSpec, slices: tuple[Slice, ...]) -> bool:
    """True if a result is a gradient that several slices contribute to. Others are written as parts of the whole arrays."""
    indices = [index_of(problem, spec.name, spec.shape, part) for part in slices]
    return any(index in indices[:number] for number, index in enumerate(indices))


def _part(steps: Steps, problem: Problem, spec: TensorSpec, array: View, part: Slice) -> View:
    """Return the view of the elements that belong to a slice, or a copy in the form that the engine needs."""
    view = array[index_of(problem, spec.name, array.shape, part)]
    if spec.name == "offset":
        return _offset(steps, problem, view, part)
    if spec in problem.results:
        copied = steps.on_gpu and spec.name not in VECTORS and is_copied(view.spec(spec.name), spec)
        return steps.temporary(view.shape, view.dtype) if copied else view
    return steps.copied(view) if steps.on_gpu and is_copied(view.spec(spec.name), spec) else view


def _offset(steps: Steps, problem: Problem, offset: View, part: Slice) -> View:
    """Return the offset with which dropout draws the same numbers for these heads and batch items as in one launch."""
    _, _, hq, hkv, *_ = problem.sizes
    first = part.batch.start * hq + part.heads.start * (hq // hkv)
    if not first:
        return offset
    made = steps.copied(offset)
    steps.add(made, steps.filled(Fill("int64", 1, OFFSET_OF_HEADS * first)))
    return made
