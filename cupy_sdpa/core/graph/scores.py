"""The steps between ``S = Q Kᵀ`` and the softmax, one formula per step: the scale, score modifications and masks.

:mod:`.core.graph.attention_forward` and :mod:`.core.graph.attention_backward` both emit these steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..options.band import Band
from ..options.option import ScoreInputs
from ..options.table import OPTIONS, SCORE_CHANGES
from ..problem.problem import Problem
from ..score_fn.expression import AXES, EMPTY_EXPRESSION
from ..score_fn.mask_analysis import MASKED_SCORE
from ..score_fn.proxy import Value
from ..score_fn.tracer import FunctionTracer
from .emit import UNBOUNDED, Emitter, is_repeated
from .nodes import GraphBuilder, Tensor
from .operands import GraphOperands

#: The modes with which a score function may mask a score.
_MAY_MASK = (UNBOUNDED - {"score"}) | {"binary_select", "captured"}
#: The dtypes with numbers below ``MASKED_SCORE``; float16 does not reach it.
_WIDE = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class ScoreFunction:
    """The modified scores, the step ``root`` of the emitter, as a function of the scaled scores."""

    emitter: Emitter
    root: int


class Scores:
    """Emits the steps of the scores.

    Attributes:
        queries, keys: ``(B, 1, 1, 1)`` int32, the lengths of each batch item; None if they are equal for all batch items.
    """

    def __init__(self, g: GraphBuilder, operands: GraphOperands) -> None:
        self.g, self.operands, self.problem = g, operands, operands.problem
        self.settings, self.band = self.problem.settings, self.problem.band
        self.expression = self.settings.expression or EMPTY_EXPRESSION
        self.scale = g.scalar("scale", g.compute_dtype)
        self.queries, self.keys = operands.lengths()
        self.mask = operands.score_input("mask")
        self.diagonal = operands.diagonal()

    def modify(self, s: Tensor) -> tuple[Tensor, ScoreFunction]:
        """``S <- f(scale S)`` with the score function and the options that change the scores in f; and f itself."""
        s = self._scaled(s)
        function = self._function(s)
        return self._mask_by_value(function.emitter(function.root)), function

    def derivative(self, ds: Tensor, function: ScoreFunction) -> Tensor:
        """``dS <- dS * dS/dx`` with the scaled score x, or the array ``gradient_of`` of the settings."""
        derivative = function.emitter.derivative(function.root, self.settings.gradient_of)
        reduced = bool(self.problem.ds_reductions) and function.emitter.selects(function.root)
        return function.emitter.times(derivative, ds, finite=self.expression.score is not None, always=reduced)

    def mask_lengths(self, s: Tensor) -> Tensor:
        """``S <- S where i < seq_lens_q and j < seq_lens_kv, else -inf``, if there are lengths."""
        if self.queries is None or self.keys is None:
            return s
        row, column = self._index(s, "i″", axis=2), self._index(s, "j″", axis=3)
        is_query = self.g.pointwise("i″ < seq_lens_q", "cmp_lt", row, self.queries, out="is query", dtype="bool")
        is_key = self.g.pointwise("j″ < seq_lens_kv", "cmp_lt", column, self.keys, out="is key", dtype="bool")
        exists = self.g.pointwise("exists = is query and is key", "logical_and", is_query, is_key, out="exists", dtype="bool")
        return self._where(s, exists)

    def mask_positions(self, s: Tensor, function: ScoreFunction) -> Tensor:
        """``S <- S where the query attends to the key, else -inf``: the band, the mask and the mask function.

        cuDNN recognizes masks only as a chain: each condition takes its indices from the result of the mask before it.
        """
        band, mask, root = self.band, self.mask, self.expression.mask
        if band and band.right is not None:
            s = self._where(s, self._within_right(s, band, band.right))
        if band and band.left is not None:
            s = self._where(s, self._within_left(s, band, band.left))
        if mask:
            s = self._where(s, self._nonzero(s, mask))
        if root is not None:
            emitter = function.emitter.on(s, "m")
            condition = emitter(root)
            # With two bands cuDNN applies only one (measured with 9.19).
            s = self._where(s, emitter.not_a_band(condition) if band else condition)
        return s

    def mask_tail(self, s: Tensor, name: str, axis: int) -> Tensor:
        """``S <- S where j < Skv, else -inf`` (or i and Sq), which holds for every element of the tensor."""
        name = f"{name}′"
        length = self.g.scalar(f"{name} length", "int32", value=s.shape[axis])
        index = self._index(s, name, axis)
        exists = self.g.pointwise(f"{name} < {s.shape[axis]}", "cmp_lt", index, length, out=f"{name} exists", dtype="bool")
        return self._where(s, exists)

    def _scaled(self, s: Tensor) -> Tensor:
        """``S <- scale S``."""
        s = self.g.pointwise("S₁ = scale · S", "mul", s, self.scale, out="S₁")
        if self.problem.fp8:
            s = self.g.pointwise("S₂ = descale_q · S₁", "mul", s, self.operands.factor("descale_q"), out="S₂")
            return self.g.pointwise("S₃ = descale_k · S₂", "mul", s, self.operands.factor("descale_k"), out="S₃")
        if not self.settings.positive_scale:
            # If the scale is the last step, cuDNN's Hopper kernels fold it into the exponent, and mask and take the maximum
            # before it. This is correct for a positive scale only: 0 and negative scales gave NaN (measured with 9.19).
            # An additional step prevents this.
            s = self.g.pointwise("S₁′ = 1 · S₁", "mul", s, self.g.scalar("unit", self.g.compute_dtype, value=1.0), out="S₁′")
        return s

    def _function(self, s: Tensor) -> ScoreFunction:
        """Compose the score function and the options that change the scores into one function of the scaled scores."""
        tracer = FunctionTracer({}, {}, self.expression.steps)
        leaf = tracer.writer.leaf
        score = Value(tracer, leaf("score") if self.expression.score is None else self.expression.score)
        row, column = (Value(tracer, leaf("index", axis, "int")) for axis in AXES[2:])

        def distance() -> Value:
            found: Value = self._diagonal(tracer, s, row) - column
            return found

        may_mask = self.expression.score is not None and any(step.mode in _MAY_MASK for step in self.expression.steps)
        inputs = ScoreInputs(tracer, self.band, distance, may_mask)
        for name, change in SCORE_CHANGES.items():
            if OPTIONS[name].of(self.problem):
                score = change(score, inputs)
        return ScoreFunction(Emitter(self.g, tracer.writer, s, self._inputs()), score.step)

    def _mask_by_value(self, s: Tensor) -> Tensor:
        """``S <- S where not (S <= MASKED_SCORE), else -inf``, in a forward pass that may need it: NaN is not masked.

        Comparing the score needs no second copy of it: a comparison of what a float32 array adds made Hopper's kernel spill
        registers, and take 2.4 times as long.
        """
        if self.problem.backward or not _may_mask_by_value(self.problem):
            return s
        lowest, zero = (
            self.g.scalar(name, self.g.compute_dtype, value=x) for name, x in (("lowest", MASKED_SCORE), ("zero″", 0.0))
        )
        # The conditions are floats: with a boolean the H200's forward kernel is 5 to 10 % slower (9.19 and 9.28).
        masked = self.g.pointwise(f"masked = {s} ≤ {MASKED_SCORE:g}", "cmp_le", s, lowest, out="masked")
        return self._where(s, self.g.pointwise("kept = masked = 0", "cmp_eq", masked, zero, out="kept"))

    def _diagonal(self, tracer: FunctionTracer, s: Tensor, row: Value) -> Value:
        """Return the key p on the diagonal of the query ``row``."""
        if self.diagonal:
            return Value(tracer, tracer.writer.leaf("captured", "diagonal", "int"))
        if self.band and self.band.bottom_right:
            row += Value(tracer, tracer.writer.constant(s.shape[3] - s.shape[2], "int"))
        return row

    def _inputs(self) -> dict[str, Tensor]:
        """Return the arrays that the function of the scores reads, by the names of its leaves."""
        operands = self.operands
        inputs = {
            "diagonal": self.diagonal,
            "kv_idx": operands.index_input("key positions", 1, (0, 0, 0, 1)),
            "h": operands.index_input("head positions", self.problem.sizes[2], (0, 1, 0, 0)),
            **{name: operands.weight_input(name) for name in (*SCORE_CHANGES, *(spec.name for spec in self.problem.captured))},
        }
        return {name: tensor for name, tensor in inputs.items() if tensor is not None}

    def _within_right(self, s: Tensor, band: Band, right: int) -> Tensor:
        """``j <= p + right`` with the diagonal ``p = i``, or from the bottom right ``p = i + Skv - Sq``."""
        row = self._index(s, "i", axis=2)
        if band.bottom_right:
            row = self._offset(f"{row} + Skv", "add", row, self.keys or self.g.scalar("Skv", "int32", value=s.shape[3]))
            row = self._offset(f"{row} − Sq", "sub", row, self.queries or self.g.scalar("Sq", "int32", value=s.shape[2]))
        if right:
            row = self._offset(f"{row} + {right}", "add", row, self.g.scalar("right", "int32", value=right))
        column = self._index(s, "j", axis=3)
        return self.g.pointwise(f"visible = {row} ≥ j", "cmp_ge", row, column, out="visible", dtype="bool")

    def _within_left(self, s: Tensor, band: Band, left: int) -> Tensor:
        """``j + left + 1 > p``."""
        row = self._index(s, "i‴", axis=2)
        column = self._index(s, "j‴", axis=3)
        bound = left + 1
        if band.bottom_right and self.queries and self.keys:
            column = self._offset(f"j‴ + {bound}", "add", column, self.g.scalar("left", "int32", value=bound))
            column = self._offset(f"{column} − Skv", "sub", column, self.keys)
            column = self._offset(f"{column} + Sq", "add", column, self.queries)
        else:
            bound -= s.shape[3] - s.shape[2] if band.bottom_right else 0
            number = self.g.scalar("left", "float32", value=float(bound))
            column = self.g.pointwise(f"j‴ + {bound}", "add", column, number, out=f"j‴ + {bound}", dtype="float32")
        return self.g.pointwise(f"in window = {column} > i‴", "cmp_gt", column, row, out="in window", dtype="bool")

    def _nonzero(self, s: Tensor, mask: Tensor) -> Tensor:
        """``0 + mask != 0``, or ``1 · mask != 0``: cuDNN does not accept an input as the first operand of a step."""
        row = self._index(s, "iₘ", axis=2)
        zeros = self._offset("0 = iₘ − iₘ", "sub", row, row)
        if is_repeated(mask):  # a mask of a single key
            ones = self.g.pointwise("1 = 0 + 1", "add", zeros, self.g.scalar("one", self.g.compute_dtype, value=1.0), out="1")
            matrix = self.g.pointwise("M = 1 · mask", "mul", ones, mask, out="M")
        else:
            matrix = self.g.pointwise("M = 0 + mask", "add", zeros, mask, out="M")
        zero = self.g.scalar("zero", self.g.compute_dtype, value=0.0)
        return self.g.pointwise("attends = M ≠ 0", "cmp_neq", matrix, zero, out="attends", dtype="bool")

    def _where(self, s: Tensor, condition: Tensor) -> Tensor:
        """``S <- S where condition, else -inf``."""
        minus_infinity = self.g.scalar("-inf", self.g.compute_dtype, value=-math.inf)
        formula, name = f"{s} where {condition}, else −∞", f"{s} where {condition}"
        return self.g.pointwise(formula, "binary_select", s, minus_infinity, condition, out=name)

    def _offset(self, formula: str, mode: str, index: Tensor, number: Tensor) -> Tensor:
        """Indices plus or minus a number, int32."""
        return self.g.pointwise(formula, mode, index, number, out=formula, dtype="int32")

    def _index(self, like: Tensor, name: str, axis: int) -> Tensor:
        """Return the index of every element of ``like`` along an axis, int32."""
        kind = {2: "query", 3: "key"}[axis]
        return self.g.pointwise(f"{name} = position of the {kind}", "gen_index", like, out=name, dtype="int32", axis=axis)


def partial_tiles(problem: Problem) -> frozenset[str]:
    """Return the axes, keys and queries, on which a score function may need a mask beyond the last element.

    The tiles of cuDNN's kernels extend beyond it. cuDNN masks there before the score function, and -s turns -inf into inf
    (measured with 9.19: NaN). Lengths that are a multiple of 128 consist of whole tiles.
    """
    *_, sq, skv, _ = problem.sizes
    # The backward pass is also affected by a mask function, exp(S + inf) in a fully masked row, and by a softcap: the score
    # there becomes -softcap, and exp(S - L) overflows if a bias makes L much lower.
    settings, added = problem.settings, any(OPTIONS[name].of(problem) for name in SCORE_CHANGES if name != "softcap")
    in_backward = settings.expression is not None or (settings.softcap and added)
    affected = problem.has_score_mod or (problem.backward and in_backward)
    if not affected or problem.ragged:
        return frozenset()
    return frozenset(name for name, length in (("keys", skv), ("queries", sq)) if length % 128)


def _may_mask_by_value(problem: Problem) -> bool:
    """True if a bias or a score function may mask by finite numbers, scores at or below ``MASKED_SCORE``.

    float16 has no such numbers. The backward pass does not need the step: fully masked rows have L = -inf, and in other rows
    such scores have the weight 0.
    """
    wide = [spec for spec in (problem.bias, *problem.captured) if spec and spec.dtype in _WIDE]
    if not problem.has_score_mod:
        return problem.bias in wide
    expression = problem.settings.expression
    selects = expression is not None and any(step.mode == "binary_select" for step in expression.steps)
    return bool(wide) or selects
