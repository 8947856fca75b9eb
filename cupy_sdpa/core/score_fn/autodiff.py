"""Reverse-mode automatic differentiation of a score function, by the rules of the modes (:mod:`.adjoints`)."""

from __future__ import annotations

from collections.abc import Sequence

from .adjoints import Adjoint, AdjointArithmetic
from .expression import Writer
from .modes import MODES


def gradients(writer: Writer, root: int, leaves: Sequence[int]) -> list[int | None]:
    """Return the steps that differentiate ``root`` with respect to the leaves; None for leaves that it does not depend on."""
    arithmetic = AdjointArithmetic(writer)
    active = set(leaves)  # the steps that depend on the leaves
    order = writer.reachable(root)
    for step in order:
        if active.intersection(writer.steps[step].args):
            active.add(step)
    adjoints = {root: Adjoint(writer.constant(1.0))}
    for step in reversed(order):
        mode, args, *_ = writer.steps[step]
        if step not in active or step not in adjoints or not args:
            continue
        for arg, adjoint in zip(args, MODES[mode].derivative(arithmetic, adjoints[step], step, *args), strict=True):
            if adjoint is not None and arg in active:
                adjoints[arg] = arithmetic.add(adjoints[arg], adjoint) if arg in adjoints else adjoint
    return [arithmetic.step(adjoints[leaf]) if leaf in adjoints else None for leaf in leaves]
