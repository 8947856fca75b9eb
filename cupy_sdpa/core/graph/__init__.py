"""Attention as an operation graph, plain data that both engines read."""

from __future__ import annotations

from ..problem.problem import Problem, writes_dq_directly
from .attention_forward import forward
from .nodes import Graph


def graph_of(problem: Problem, guards: frozenset[str] = frozenset()) -> Graph:
    """Return the graph of a problem: the one that the interpreter evaluates, or with ``guards`` the first that cuDNN plans."""
    if not problem.backward:
        return forward(problem, guards)
    from .attention_backward import backward

    return backward(problem, writes_dq_directly(problem), guards)
