"""What is done to the scores before the softmax, one formula a step: the scale, what is added, and what is masked.

Both passes of :mod:`cupy_sdpa.patterns` write these steps; the derivative of a step stands beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .band import Band
from .graph import Builder, Tensor


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

    def modified(self, g: Builder, s: Tensor) -> tuple[Tensor, Tensor | None]:
        """The scores with all that changes their values; and the tanh of the softcap, for the derivative."""
        t = None
        s = self._scaled(g, s)
        if self.softcap:
            # S <- c tanh(S / c)                Gemma 2, section 2 ("logit soft-capping")
            s = g.pointwise(f"{s} / c", "div", s, self.softcap, out="S/c")
            t = g.pointwise("T = tanh(S / c)", "tanh_fwd", s, out="T")
            s = g.pointwise("S₂ = c · T", "mul", t, self.softcap, out="S₂")
        if self.slopes:
            s = self._sloped(g, s, self.slopes)
        if self.bias:
            # S <- S + bias
            s = g.pointwise(f"S₄ = {s} + bias", "add", s, self.bias, out="S₄")
        return s, t

    def derivative(self, g: Builder, ds: Tensor, t: Tensor | None, dtype: str) -> Tensor:
        """The gradient of ``Q K^T`` from that of the modified scores, rounded to a dtype."""
        if t:
            # c tanh(S / c) has the derivative 1 - T^2; from the saved T, which every engine takes
            part = g.pointwise("dS ∘ T", "mul", ds, t, out="dS∘T")
            part = g.pointwise("dS ∘ T²", "mul", part, t, out="dS∘T²")
            ds = g.pointwise("dS − dS ∘ T²", "sub", ds, part, out="dS₁")
        return g.pointwise(f"dS = scale · {ds}", "mul", ds, self.scale, out="dS", dtype=dtype)

    def masked(self, g: Builder, s: Tensor) -> Tensor:
        """``S <- S where the query sees the key, else -inf``."""
        if self.queries and self.keys:
            s = within(g, s, self.queries, self.keys)
        if self.band:
            s = self._banded(g, s, self.band)
        if self.mask:
            mask = g.pointwise("M = 0 + mask", "add", zeros(g, s, "iₘ"), self.mask, out="M")
            none = g.scalar("none", g.accumulate, value=0.0)
            s = hidden(g, s, g.pointwise("seen = M ≠ 0", "cmp_neq", mask, none, out="seen", dtype="bool"))
        return s

    def _scaled(self, g: Builder, s: Tensor) -> Tensor:
        """``S <- scale S``."""
        s = g.pointwise("S₁ = scale · S", "mul", s, self.scale, out="S₁")
        if not self.positive_scale:
            # cuDNN's Hopper kernels fold a scale that comes last into their exponent and mask, and take the maximum, before
            # it, which is right for a positive scale only: 0 and below gave NaN (measured with 9.19). One more step keeps
            # them apart.
            s = g.pointwise("S₁′ = 1 · S₁", "mul", s, g.scalar("unit", g.accumulate, value=1.0), out="S₁′")
        return s

    def _sloped(self, g: Builder, s: Tensor, slopes: Tensor) -> Tensor:
        """``S_ij <- S_ij - slope |p - j|``; Press et al. 2022, "Train Short, Test Long" (ALiBi), section 3."""
        band = self.band or Band()
        if self.diagonal:
            row = moved(g, "p = 0 + diagonal", "add", zeros(g, s, "iₐ"), self.diagonal)
        else:
            row = self._diagonal(g, s, "iₐ", band)
        apart = moved(g, f"{row} − jₐ", "sub", row, positions(g, s, "jₐ", axis=3))
        if band.right != 0:  # otherwise no key behind the diagonal is seen
            apart = g.pointwise(f"|{apart}|", "abs", apart, out=f"|{apart}|")
        formula = f"slope · {apart}" if band.right != 0 else f"slope · ({apart})"
        far = g.pointwise(formula, "mul", apart, slopes, out="slope·distance")
        return g.pointwise(f"S₃ = {s} − slope · distance", "sub", s, far, out="S₃")

    def _diagonal(self, g: Builder, s: Tensor, name: str, band: Band) -> Tensor:
        """``p = i``, or from the bottom right ``p = i + Skv - Sq``, with every entry's own lengths where they are given."""
        row = positions(g, s, name, axis=2)
        if band.bottom_right:
            row = moved(g, f"{row} + Skv", "add", row, self.keys or g.scalar("Skv", "int32", value=s.shape[3]))
            row = moved(g, f"{row} − Sq", "sub", row, self.queries or g.scalar("Sq", "int32", value=s.shape[2]))
        return row

    def _banded(self, g: Builder, s: Tensor, band: Band) -> Tensor:
        """``S_ij <- S_ij where p - left <= j <= p + right, else -inf``."""
        if band.right is not None:
            row = self._diagonal(g, s, "i", band)
            if band.right:
                row = moved(g, f"{row} + {band.right}", "add", row, g.scalar("right", "int32", value=band.right))
            column = positions(g, s, "j", axis=3)
            s = hidden(g, s, g.pointwise(f"visible = {row} ≥ j", "cmp_ge", row, column, out="visible", dtype="bool"))
        if band.left is not None:
            # j + left + 1 > p
            row = positions(g, s, "i‴", axis=2)
            column = positions(g, s, "j‴", axis=3)
            bound = band.left + 1
            if band.bottom_right and self.queries and self.keys:
                column = moved(g, f"j‴ + {bound}", "add", column, g.scalar("left", "int32", value=bound))
                column = moved(g, f"{column} − Skv", "sub", column, self.keys)
                column = moved(g, f"{column} + Sq", "add", column, self.queries)
            else:
                bound -= s.shape[3] - s.shape[2] if band.bottom_right else 0
                left = g.scalar("left", "float32", value=float(bound))
                column = g.pointwise(f"j‴ + {bound}", "add", column, left, out=f"j‴ + {bound}", dtype="float32")
            s = hidden(g, s, g.pointwise(f"near = {column} > i‴", "cmp_gt", column, row, out="near", dtype="bool"))
        return s


def below(g: Builder, s: Tensor, name: str, axis: int) -> Tensor:
    """``S <- S where j < Skv, else -inf`` (or i and Sq): true of every element that exists."""
    length = g.scalar(f"{name} length", "int32", value=s.shape[axis])
    index = positions(g, s, f"{name}′", axis)
    return hidden(g, s, g.pointwise(f"{name}′ < {s.shape[axis]}", "cmp_lt", index, length, out=f"{name} exists", dtype="bool"))


def within(g: Builder, s: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """``S_ij <- S_ij where i < seq_lens_q and j < seq_lens_kv, else -inf``: what lies behind a sequence does not exist."""
    row = positions(g, s, "i″", axis=2)
    column = positions(g, s, "j″", axis=3)
    is_query = g.pointwise("i″ < seq_lens_q", "cmp_lt", row, queries, out="is query", dtype="bool")
    is_key = g.pointwise("j″ < seq_lens_kv", "cmp_lt", column, keys, out="is key", dtype="bool")
    return hidden(g, s, g.pointwise("exists = both", "logical_and", is_query, is_key, out="exists", dtype="bool"))


def hidden(g: Builder, s: Tensor, seen: Tensor) -> Tensor:
    """``S <- S where seen, else -inf``."""
    nothing = g.scalar("-inf", g.accumulate, value=-math.inf)
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
