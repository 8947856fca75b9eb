"""The builder of one call, of either pass: its launches, and their results.

What only some calls need is in modules that are imported by these calls: :mod:`.engine_form` copies arrays into the form that
the engine needs, :mod:`.split_steps` merges parts of the keys, :mod:`.slice_steps` divides calls on large arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..boundary.call import BoundProblem
from ..boundary.user_functions import Gradients, gradient_name, with_score_axes
from ..problem.problem import Problem
from ..problem.subproblems import subproblems
from ..problem.tensor_spec import numpy_dtype
from ..problem.view import Storage, View
from ..support.engine_problem import engine_problem, may_mask_rows, slices_of, without_sinks
from .steps import Attend, Steps

if TYPE_CHECKING:
    from ..kernels.merge import Parts


def problem_views(problem: Problem, gradients: Gradients | None, device: int | None) -> dict[str, View]:
    """Return views of a problem's arrays, and of the requested gradients of ``tensors``, by name."""
    on_gpu = device is not None
    hidden = {spec.name for spec in problem.dcaptured}
    views = {
        spec.name: View(
            Storage(spec.name, spec.alignment, device), numpy_dtype(spec.dtype, on_gpu=on_gpu), spec.shape, spec.strides
        )
        for spec in problem.tensors
        if spec.name not in hidden
    }
    for name, (shape, dtype) in gradients.specs.items() if gradients else ():
        views[gradient_name(name)] = View.dense(gradient_name(name), shape, dtype, device)
    return views


def add(steps: Steps, name: str, call: BoundProblem, *, with_values: bool = False) -> None:
    """Add the steps of a call whose arrays are views. Results without a view are temporary.

    ``with_values``: the values of its scalars belong to the program; by default each run passes them.
    """
    problem, arrays = call.problem, _with_inputs(steps, call)
    arrays |= {spec.name: steps.temporary_of(spec) for spec in problem.results if spec.name not in arrays}
    values: dict[str, Any] = {"scalars": call.scalars, "source_lines": call.functions.source_lines} if with_values else {}
    _add_slices(steps, name, call, problem, arrays, values)
    if call.gradients:
        _collect(steps, call.gradients, arrays)


def _add_slices(
    steps: Steps, name: str, call: BoundProblem, problem: Problem, arrays: Mapping[str, View], values: Mapping[str, Any]
) -> None:
    """Add the launches of a problem, or of its slices, which may be sliced again."""
    if parts := slices_of(engine_problem(problem, call.bucket, steps.on_gpu), steps.on_gpu):
        from . import slice_steps

        for part, own in slice_steps.parts(steps, problem, parts, arrays):
            _add_slices(steps, name, call, part, own, values)
    else:
        _add_launches(steps, name, call, problem, arrays, values)


def _add_launches(
    steps: Steps, name: str, call: BoundProblem, problem: Problem, arrays: Mapping[str, View], values: Mapping[str, Any]
) -> None:
    """Add the launches of a problem: one, and in the backward pass one for each further reduction of dS."""
    inputs = {name: view for name, view in arrays.items() if name not in {spec.name for spec in problem.results}}
    first, *others = subproblems(problem)
    _add_launch(steps, name, call, first, arrays, values)
    for part in others:  # dq, dk and dv are discarded
        reductions = {spec.name: arrays[spec.name] for spec in part.ds_reductions}
        own = {spec.name: steps.temporary_of(spec) for spec in part.results if spec.name not in reductions}
        _add_launch(steps, name, call, part, {**inputs, **own, **reductions}, values)


def add_parts(steps: Steps, name: str, call: BoundProblem) -> list[Parts]:
    """Add the steps of a forward pass whose results are merged with others; the chunks of a split problem are not merged.

    The call has no views of its results. Returns the parts: views ``(Dv, Hq, Sq, B, C)`` and ``(Sq, Hq, B, C)``.
    """
    from . import split_steps

    engine = engine_problem(call.problem, call.bucket, steps.on_gpu)
    results = {spec.name: steps.temporary_of(spec) for spec in call.problem.results}
    call = dataclasses.replace(call, arrays=call.arrays | results)
    if not engine.settings.split:
        add(steps, name, call, with_values=True)
        return [split_steps.whole(results)]
    arrays = _with_inputs(steps, call)
    return split_steps.add(steps, name, call.problem, engine, arrays, {"scalars": call.scalars})


def _with_inputs(steps: Steps, call: BoundProblem) -> dict[str, View]:
    """Return the arrays of a call, and arrays of equal numbers that the caller did not pass."""
    return {**{name: steps.filled(fill) for name, fill in call.fills.items() if name not in call.arrays}, **call.arrays}


def _add_launch(
    steps: Steps, name: str, call: BoundProblem, part: Problem, arrays: Mapping[str, View], values: Mapping[str, Any]
) -> None:
    """Add the steps of a subproblem."""
    engine = engine_problem(part, call.bucket, steps.on_gpu)
    if part.trivial:
        from .engine_form import fill_trivial_results

        fill_trivial_results(steps, part, arrays)
        steps.attend_to(name, Attend(part, {}, part))
    elif engine.settings.split or (part.sinks and not engine.sinks):
        from . import split_steps

        if engine.settings.split:
            parts = split_steps.add(steps, name, part, engine, arrays, values)
        else:
            part_of_keys = without_sinks(part)
            own = {spec.name: steps.temporary_of(spec) for spec in part_of_keys.results}
            inputs = {name: view for name, view in arrays.items() if name != "sinks"}
            _add_launch(steps, name, call, part_of_keys, inputs | own, values)
            parts = [split_steps.whole(own)]
        split_steps.add_merge(steps, part, parts, arrays)
    elif engine == part and not (part.ragged or part.max or may_mask_rows(part)):
        views = {spec.name: arrays[spec.name] for spec in engine.tensors}
        steps.attend_to(name, Attend(engine, views, part, call.given_stats, **values))
    else:
        from .engine_form import EngineForm

        form = EngineForm(steps, part, engine, arrays, full_queries="seq_lens_q" in call.fills)
        form.prepare()
        steps.attend_to(name, Attend(engine, form.of_engine(), part, call.given_stats, **values))
        form.finish()


def _collect(steps: Steps, gradients: Gradients, arrays: Mapping[str, View]) -> None:
    """Write the gradient of each array: the sum over all captured arrays that are read from it, in float32 or float64."""
    for name, (shape, dtype) in gradients.specs.items():
        gradient = arrays[gradient_name(name)]
        accumulates = str(dtype) in ("float32", "float64")
        total = gradient if accumulates else steps.temporary(shape, np.float32)
        steps.fill(total, 0)
        for captured, access in gradients.captured.items():
            if access.name == name and (part := arrays.get(f"d{captured}")) is not None:
                steps.add(with_score_axes(total, access), part)
        if total is not gradient:
            steps.copy(gradient, total)
