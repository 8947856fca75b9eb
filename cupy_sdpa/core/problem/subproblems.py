"""Split a backward problem into subproblems, one for each launch.

The gradient of an array that is added to the scores, or that a score function reads, is a reduction: ``dX = sum dS * dS/dX``.
A kernel computes one such reduction. An array whose ``dS/dX`` equals the derivative with respect to the scores shares the
launch that computes dq and dk. Every other array needs one more launch: the same graph with ``dS/dX`` instead of the derivative
with respect to the scores; its dq and dk are discarded.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from ..score_fn.autodiff import gradients
from ..score_fn.expression import Writer
from .arrays import SCORE_GRADIENTS
from .problem import Problem
from .tensor_spec import TensorSpec, dense_spec


@functools.lru_cache(maxsize=1024)
def subproblems(problem: Problem) -> tuple[Problem, ...]:
    """Return a problem's launches: the first computes all but some reductions of dS, each further one a reduction."""
    if problem.trivial or not problem.ds_reductions or problem.settings.gradient_of:
        return (problem,)
    shared = next((spec for spec in problem.ds_reductions if _shares_launch(problem, spec)), None)
    others = (spec for spec in problem.ds_reductions if spec is not shared)
    return (_with_reduction(problem, shared), *(_separate_launch(problem, spec) for spec in others))


@functools.lru_cache(maxsize=1024)
def score_derivatives(problem: Problem) -> dict[str, int]:
    """Return the derivatives of a score function with respect to its captured arrays, and to the score under the empty name.

    Returns:
        The steps that compute the derivatives; arrays without a derivative are left out.
    """
    expression = problem.settings.expression
    if expression is None or expression.score is None:
        return {}
    writer = Writer(expression.steps)
    leaves = {spec.name: writer.leaf("captured", spec.name) for spec in problem.captured}
    leaves[""] = writer.leaf("score")
    steps = gradients(writer, expression.score, list(leaves.values()))
    return {name: step for name, step in zip(leaves, steps, strict=True) if step is not None}


def _shares_launch(problem: Problem, spec: TensorSpec) -> bool:
    """True if a reduction sums the gradient of the scores that dq and dk also use."""
    if spec is problem.dbias:  # the bias is added last
        return not problem.settings.softcap and not problem.has_score_mod
    if spec not in problem.dcaptured:
        return False
    derivatives = score_derivatives(problem)
    return derivatives.get(spec.name[1:]) == derivatives.get("")


def _separate_launch(problem: Problem, spec: TensorSpec) -> Problem:
    """Return a launch that computes one reduction only; dq, dk and dv are written to dense scratch memory."""
    settings = problem.settings._replace(gradient_of=spec.name[1:])
    discarded: dict[str, Any] = {  # dense, because the caller's arrays may have gaps
        result.name: dense_spec(result.name, result.dtype, result.shape)
        for result in (problem.dq, problem.dk, problem.dv)
        if result
    }
    return replace(_with_reduction(problem, spec), dsinks=None, settings=settings, **discarded)


def _with_reduction(problem: Problem, spec: TensorSpec | None) -> Problem:
    """Return the problem with one reduction of dS, or none."""
    fields: dict[str, Any] = dict.fromkeys((row.name for row in SCORE_GRADIENTS), None) | {"dcaptured": ()}
    if spec is not None:
        fields |= {"dcaptured": (spec,)} if spec in problem.dcaptured else {spec.name: spec}
    return replace(problem, **fields)
