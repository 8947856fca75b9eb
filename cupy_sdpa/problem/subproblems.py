"""A backward problem as the launches that it takes: one, and one more for each further sum of the scores' gradient.

The gradient of an array that is added to the scores, or that a function reads, is ``dX = sum dS * dS/dX``. One kernel adds up
its dS once; so an array whose derivative is that of the scores shares the launch that gives dQ and dK, and every other one gets
a launch of its own: the same graph with ``dS/dX`` in the place of the scores' derivative. Its dQ and dK are of no use.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ..score_fn.autodiff import gradients
from ..score_fn.expression import Writer
from .problem import Problem
from .tensor_spec import TensorSpec, dense_spec


@functools.lru_cache(maxsize=1024)
def subproblems(problem: Problem) -> tuple[Problem, ...]:
    """What is run for a problem; the first gives all but some of the sums, each of the others one of them."""
    if problem.trivial or not problem.ds_reductions or problem.settings.gradient_of:
        return (problem,)
    shared = next((spec for spec in problem.ds_reductions if _shares(problem, spec)), None)
    others = (spec for spec in problem.ds_reductions if spec is not shared)
    return (_with_sum(problem, shared), *(_of_its_own(problem, spec) for spec in others))


@functools.lru_cache(maxsize=1024)
def score_derivatives(problem: Problem) -> dict[str, int]:
    """The derivatives of a score function with respect to the arrays that it reads, as steps; of those that have one.

    The score has its own under the empty name.
    """
    program = problem.settings.program
    if program is None or program.score is None:
        return {}
    writer = Writer(program.steps)
    leaves = {spec.name: writer.leaf("captured", spec.name) for spec in problem.captured}
    leaves[""] = writer.leaf("score")
    found = zip(leaves, gradients(writer, program.score, list(leaves.values())), strict=True)
    return {name: step for name, step in found if step is not None}


def _shares(problem: Problem, spec: TensorSpec) -> bool:
    """Whether a sum is one of the gradient of the scores."""
    if spec is problem.dbias:  # added last
        return not problem.settings.softcap and not problem.has_score_mod
    steps = score_derivatives(problem)
    return steps.get(spec.name[1:]) == steps.get("")


def _of_its_own(problem: Problem, spec: TensorSpec) -> Problem:
    settings = problem.settings._replace(gradient_of=spec.name[1:])
    unused: dict[str, Any] = {  # in memory of its own: the caller's may have gaps
        result.name: dense_spec(result.name, result.dtype, result.shape)
        for result in (problem.dq, problem.dk, problem.dv)
        if result
    }
    return replace(_with_sum(problem, spec), dsinks=None, settings=settings, **unused)


def _with_sum(problem: Problem, spec: TensorSpec | None) -> Problem:
    if spec is None or spec is problem.dbias:
        return replace(problem, dbias=spec, dcaptured=())
    return replace(problem, dbias=None, dcaptured=(spec,))
