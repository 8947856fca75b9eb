"""What is done to the scores before the softmax, one formula a step: the scale, what is added, and what is masked.

Both passes of :mod:`cupy_sdpa.graph.patterns` write these steps; the derivative of a step stands beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from .. import zoo
from ..problem.band import Band
from ..problem.problem import MASKED_SCORE
from ..score_fn.expression import AXES, EMPTY_PROGRAM, Kind, Program
from ..score_fn.proxy import Value
from ..score_fn.tracer import Tracer
from .emit import Emitter
from .nodes import Builder, Tensor


@dataclass(frozen=True)
class Scores:
    """What takes part in the scores beside q and k; None for what does not.

    Attributes:
        scale: a number.
        positive_scale: whether it is positive.
        softcap: a number.
        slopes: ``(1, Hq, 1, 1)``.
        bias: ``(B, Hq, Sq, Skv)``, every dimension may be 1.
        mask: of the same shape, 0 where nothing is seen.
        queries, keys: ``(B, 1, 1, 1)`` int32, how many there are in every batch entry.
        diagonal: ``(B, 1, Sq, 1)`` int32, the key on the diagonal of every query, where slopes need that of every entry.
        band: which keys are seen by their distance from the diagonal.
        program: what the caller's own functions do.
        captured: the arrays that they read, ``(B, Hq, Sq, Skv)``, every dimension may be 1.
        gradient_of: the array in whose gradient the backward pass takes that of the scores; empty for the scores.
        key_positions, head_positions: ``(1, 1, 1, Skv)`` and ``(1, Hq, 1, Skv)`` int32, the index of every key and of its head,
            where they are read from memory.
        floor: whether scores at or below :data:`~cupy_sdpa.problem.MASKED_SCORE` count as masked.
    """

    scale: Tensor
    positive_scale: bool = True
    softcap: Tensor | None = None
    slopes: Tensor | None = None
    bias: Tensor | None = None
    mask: Tensor | None = None
    queries: Tensor | None = None
    keys: Tensor | None = None
    diagonal: Tensor | None = None
    band: Band | None = None
    program: Program = EMPTY_PROGRAM
    captured: Mapping[str, Tensor] = field(default_factory=dict)
    gradient_of: str = ""
    key_positions: Tensor | None = None
    head_positions: Tensor | None = None
    floor: bool = False

    def modified(self, g: Builder, s: Tensor) -> tuple[Tensor, Changes]:
        """The scores with all that changes their values; and what that was."""
        s = self._scaled(g, s)
        changes = self._changes(g, s)
        s = changes.emitter(changes.root)
        if self.floor:
            lowest = g.scalar("lowest", g.compute_dtype, value=MASKED_SCORE)
            # The condition as a number: with a boolean the H200's forward kernel is 5 to 10 % slower (9.19 and 9.28).
            above = g.pointwise(f"above = {s} > {MASKED_SCORE:g}", "cmp_gt", s, lowest, out="above")
            s = hidden(g, s, above)
        return s, changes

    def derivative(self, g: Builder, ds: Tensor, changes: Changes) -> Tensor:
        """The gradient of the scaled scores, or of what ``gradient_of`` names, from that of the modified scores."""
        return changes.emitter.times(
            changes.emitter.slope(changes.root, self.gradient_of), ds, finite=self.program.score is not None
        )

    def within(self, g: Builder, s: Tensor) -> Tensor:
        """``S <- S where i < seq_lens_q and j < seq_lens_kv, else -inf``, where there are lengths."""
        return hidden(g, s, within(g, s, self.queries, self.keys)) if self.queries and self.keys else s

    def masked(self, g: Builder, s: Tensor, changes: Changes) -> Tensor:
        """``S <- S where the query sees the key, else -inf``, of those that exist."""
        for condition in self._conditions(changes):
            s = hidden(g, s, condition(g, s))
        return s

    def _conditions(self, changes: Changes) -> Iterator[Callable[[Builder, Tensor], Tensor]]:
        """What must hold for a query to see a key, from the scores as they are by then: cuDNN wants a chain."""
        if self.band and self.band.right is not None:
            yield partial(self._visible, band=self.band, right=self.band.right)
        if self.band and self.band.left is not None:
            yield partial(self._near, band=self.band, left=self.band.left)
        if mask := self.mask:
            yield lambda g, s: _seen(g, s, mask)
        if (root := self.program.mask) is not None:
            yield lambda g, s: self._unlike_a_band(g, changes.emitter.on(s, "m")(root))

    def _unlike_a_band(self, g: Builder, condition: Tensor) -> Tensor:
        """A condition in a form that cuDNN does not take for a band: of two bands it applies one (measured with 9.19)."""
        if self.band is None:
            return condition
        zero = g.scalar("no", g.compute_dtype, value=0.0)
        return g.pointwise(f"{condition} ≠ 0", "cmp_neq", condition, zero, out=f"{condition} ≠ 0", dtype="bool")

    def _scaled(self, g: Builder, s: Tensor) -> Tensor:
        """``S <- scale S``."""
        s = g.pointwise("S₁ = scale · S", "mul", s, self.scale, out="S₁")
        if not self.positive_scale:
            # cuDNN's Hopper kernels fold a scale that comes last into their exponent and mask, and take the maximum, before
            # it, which is right for a positive scale only: 0 and below gave NaN (measured with 9.19). One more step keeps
            # them apart.
            s = g.pointwise("S₁′ = 1 · S₁", "mul", s, g.scalar("unit", g.compute_dtype, value=1.0), out="S₁′")
        return s

    def _changes(self, g: Builder, s: Tensor) -> Changes:
        """The caller's function, then softcap, slopes and bias, as one function of the scaled scores."""
        tracer = Tracer({}, {}, self.program.steps)
        leaf = tracer.writer.leaf
        score = Value(tracer, leaf("score") if self.program.score is None else self.program.score)
        b, h, row, column = (Value(tracer, leaf("index", axis, "int")) for axis in AXES)
        given = dict(self.captured)
        if self.softcap:
            score = zoo.softcap(Value(tracer, leaf("number", "softcap")))(score, b, h, row, column)
        if self.slopes:
            given["alibi_slopes"] = self.slopes
            slope = Value(tracer, leaf("captured", "alibi_slopes"))
            band = self.band or Band()
            if self.diagonal:
                given["diagonal"] = self.diagonal
                row = Value(tracer, leaf("captured", "diagonal", "int"))
            elif band.bottom_right:
                row = row + Value(tracer, tracer.writer.constant(s.shape[3] - s.shape[2], "int"))
            # otherwise no key behind the diagonal is seen, and the distance is never negative
            score = zoo.add_linear_bias(score, slope, row - column if band.right == 0 else abs(row - column))
        if self.bias:
            given["bias"] = self.bias
            score = score + Value(tracer, leaf("captured", "bias"))
        given |= {axis: tensor for axis, tensor in (("kv_idx", self.key_positions), ("h", self.head_positions)) if tensor}
        numbers = {step.name: partial(_number, g, step.name) for step in tracer.writer.steps if step.mode == "number"}
        arrays = {name: partial(_given, tensor) for name, tensor in given.items()}
        return Changes(Emitter(g, tracer.writer, s, numbers | arrays), score.step)

    def _diagonal(self, g: Builder, s: Tensor, name: str, band: Band) -> Tensor:
        """``p = i``, or from the bottom right ``p = i + Skv - Sq``, with every entry's own lengths where they are given."""
        row = positions(g, s, name, axis=2)
        if band.bottom_right:
            row = moved(g, f"{row} + Skv", "add", row, self.keys or g.scalar("Skv", "int32", value=s.shape[3]))
            row = moved(g, f"{row} − Sq", "sub", row, self.queries or g.scalar("Sq", "int32", value=s.shape[2]))
        return row

    def _visible(self, g: Builder, s: Tensor, band: Band, right: int) -> Tensor:
        """``j <= p + right``."""
        row = self._diagonal(g, s, "i", band)
        if right:
            row = moved(g, f"{row} + {right}", "add", row, g.scalar("right", "int32", value=right))
        column = positions(g, s, "j", axis=3)
        return g.pointwise(f"visible = {row} ≥ j", "cmp_ge", row, column, out="visible", dtype="bool")

    def _near(self, g: Builder, s: Tensor, band: Band, left: int) -> Tensor:
        """``j + left + 1 > p``."""
        row = positions(g, s, "i‴", axis=2)
        column = positions(g, s, "j‴", axis=3)
        bound = left + 1
        if band.bottom_right and self.queries and self.keys:
            column = moved(g, f"j‴ + {bound}", "add", column, g.scalar("left", "int32", value=bound))
            column = moved(g, f"{column} − Skv", "sub", column, self.keys)
            column = moved(g, f"{column} + Sq", "add", column, self.queries)
        else:
            bound -= s.shape[3] - s.shape[2] if band.bottom_right else 0
            number = g.scalar("left", "float32", value=float(bound))
            column = g.pointwise(f"j‴ + {bound}", "add", column, number, out=f"j‴ + {bound}", dtype="float32")
        return g.pointwise(f"near = {column} > i‴", "cmp_gt", column, row, out="near", dtype="bool")


def _seen(g: Builder, s: Tensor, mask: Tensor) -> Tensor:
    """``mask != 0``."""
    matrix = g.pointwise("M = 0 + mask", "add", zeros(g, s, "iₘ"), mask, out="M")
    return g.pointwise(
        "seen = M ≠ 0", "cmp_neq", matrix, g.scalar("none", g.compute_dtype, value=0.0), out="seen", dtype="bool"
    )


@dataclass
class Changes:
    """What was done to the scores.

    Attributes:
        speller: spells it, and its derivative.
        root: the step that gives the changed score.
    """

    emitter: Emitter
    root: int


def _number(g: Builder, name: str, kind: Kind) -> Tensor:
    return g.scalar(name, "int32" if kind == "int" else g.compute_dtype)


def _given(tensor: Tensor, kind: Kind) -> Tensor:
    return tensor


def below(g: Builder, s: Tensor, name: str, axis: int) -> Tensor:
    """``S <- S where j < Skv, else -inf`` (or i and Sq): true of every element that exists."""
    return hidden(g, s, _exists(g, s, f"{name}′", axis))


def _exists(g: Builder, s: Tensor, name: str, axis: int) -> Tensor:
    """``j < Skv`` (or i and Sq)."""
    length = g.scalar(f"{name} length", "int32", value=s.shape[axis])
    index = positions(g, s, name, axis)
    return g.pointwise(f"{name} < {s.shape[axis]}", "cmp_lt", index, length, out=f"{name} exists", dtype="bool")


def within(g: Builder, s: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """``i < seq_lens_q and j < seq_lens_kv``: what lies behind a sequence does not exist."""
    row = positions(g, s, "i″", axis=2)
    column = positions(g, s, "j″", axis=3)
    is_query = g.pointwise("i″ < seq_lens_q", "cmp_lt", row, queries, out="is query", dtype="bool")
    is_key = g.pointwise("j″ < seq_lens_kv", "cmp_lt", column, keys, out="is key", dtype="bool")
    return g.pointwise("exists = both", "logical_and", is_query, is_key, out="exists", dtype="bool")


def hidden(g: Builder, s: Tensor, seen: Tensor) -> Tensor:
    """``S <- S where seen, else -inf``."""
    nothing = g.scalar("-inf", g.compute_dtype, value=-math.inf)
    return g.pointwise(f"{s} where {seen}, else −∞", "binary_select", s, nothing, seen, out=f"{s} where {seen}")


def moved(g: Builder, formula: str, mode: str, x: Tensor, b: Tensor) -> Tensor:
    """Positions moved by a number, int32."""
    return g.pointwise(formula, mode, x, b, out=formula, dtype="int32")


def zeros(g: Builder, like: Tensor, name: str) -> Tensor:
    """A matrix of zeros, to add an array to: cuDNN takes none as the first operand of a step."""
    row = positions(g, like, name, axis=2)
    return moved(g, f"0 = {name} − {name}", "sub", row, row)


def positions(g: Builder, like: Tensor, name: str, axis: int) -> Tensor:
    """The index of every element of ``like`` along an axis, int32."""
    what = {2: "query", 3: "key"}[axis]
    return g.pointwise(f"{name} = position of the {what}", "gen_index", like, out=name, dtype="int32", axis=axis)
