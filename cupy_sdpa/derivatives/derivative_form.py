"""How a directional derivative is computed: which passes run, and the head dims of their arrays.

docs/derivatives.md derives the formulas. With ``K2 = [k; v]``, ``V2 = [k; k']``, ``Q2 = [q; 0]`` and ``dO2 = [q'; q]`` along
head_dim, the second part of the gradient of Q2 is the derivative of the output by q and k, if the backward pass subtracts the
mean of the derivatives of the scores. It does so if O2, the output for Q2, K2 and V2, is passed to it. This form is called
*centered*.

The mean is also a result of the backward pass: a row of K2 is 1, if D + Dv + 1 head dims need no larger kernel than D + Dv. In
the centered form this is the error of the mean that was subtracted, and is also subtracted. With sinks it is not: the
derivatives of the scores of the keys do not add up to 0.

The backward pass subtracts the mean before it multiplies by the derivative of a softcap or of a score function, and it drops
weights before the mean. With these options O2 is 0, nothing is subtracted, and the mean times the output is subtracted
afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..extend import Builder, View

#: The inputs of dropout.
DROPOUT = ("seed", "offset", "dropout_mask")
#: cuDNN's kernels for gradients take head dims up to 128 or up to 256, depending on the GPU.
TILES = (128, 256)


class DerivativeForm(NamedTuple):
    """How a derivative is computed.

    Attributes:
        head_dim, value_dim: D and Dv.
        queries, keys, values: whether dq, dk and dv are given.
        centered: whether the backward pass subtracts the mean.
        joint: whether a row of K2 is 1, so that the backward pass computes the mean that it did not subtract.
        score_width: the head dim of Q2 and K2.
        product_width: the head dim of V2 and dO2.
    """

    head_dim: int
    value_dim: int
    queries: bool
    keys: bool
    values: bool
    centered: bool
    joint: bool
    score_width: int
    product_width: int

    @property
    def scores(self) -> bool:
        """Whether the scores change: a backward pass is needed."""
        return self.queries or self.keys

    @property
    def mean_index(self) -> int:
        """The row of Q2's gradient with the mean of the score derivatives."""
        return self.head_dim + (self.value_dim if self.joint else 0)

    def widened(self, arrays: Sequence[Any]) -> Widened:
        """Return the wider arrays from the arrays that this form needs, in order; the other fields are None."""
        made = iter(arrays)
        needed = [self.scores] * 4 + [self.values, self.scores and not (self.centered or self.joint)]
        return Widened._make([*(next(made) if is_needed else None for is_needed in needed), self])

    @property
    def remedy(self) -> str:
        """What to do if the head dims are too large for a GPU."""
        widths = "D + Dv, 2 D and 2 Dv" if self.queries and self.keys else "D + Dv and 2 Dv"
        if not self.scores:
            return "Without dq and dk, attention(q, k, v) and attention(q, k, dv) compute both results for larger head dims"
        return (
            f"Use head dims with {widths} up to 256 on Hopper and 128 on other GPUs, or pass numpy arrays to compute on the CPU"
        )


class Widened(NamedTuple):
    """The arrays from which :func:`cupy_sdpa.attention_jvp` computes; returned by :func:`cupy_sdpa.widen`.

    W is the head dim of q and k, X the head dim of v and dout. You may write new tangents into these arrays in place.

    Attributes:
        q: ``(W, Hq, Sq, B)``: q in the first D rows, then 0.
        k: ``(W, Hkv, Skv, B)``: k, then v in rows D to D + Dv; then, if ``form.joint``, one row of 1; then 0.
        v: ``(X, Hkv, Skv, B)``: k if dq is given, then dk if it is given; then 0.
        dout: ``(X, Hq, Sq, B)``: dq if it is given, then q if dk is given; then 0.
        values: ``(2 Dv, Hkv, Skv, B)``: v, then dv; None without dv.
        ones: ``(W, Hkv, Skv, B)``: k, then one row of 1, then 0; None unless a second backward pass is needed.
        form: which tangents are given, and how the derivative is computed.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    values: Any
    ones: Any
    form: DerivativeForm

    def named(self) -> dict[str, Any]:
        """Return the arrays by name, except None."""
        return {name: array for name, array in self._asdict().items() if name != "form" and array is not None}

    def __repr__(self) -> str:
        return f"<widened: {', '.join(f'{name} {array.shape}' for name, array in self.named().items())}>"


def form_of(
    head_dim: int, value_dim: int, given: tuple[bool, ...], options: Mapping[str, Any], *, deterministic: bool = False
) -> DerivativeForm:
    """Return the form of a derivative with some of dq, dk and dv ``given``."""
    dropout = bool(options.get("dropout_p"))
    centered = not dropout and options.get("softcap") is None and options.get("score_mod") is None
    equal = deterministic or options.get("cu_seqlens_q") is not None or options.get("block_mask") is not None
    exact_mean = not (dropout or (centered and options.get("sinks") is not None))
    return _form(head_dim, value_dim, given, centered, exact_mean, equal)


@functools.lru_cache(maxsize=256)
def _form(
    head_dim: int, value_dim: int, given: tuple[bool, ...], centered: bool, exact_mean: bool, equal: bool
) -> DerivativeForm:
    queries, keys, values = given
    score_width, product_width = head_dim + value_dim, head_dim * (queries + keys)
    with_mean = Builder.padded_head_dim(score_width + 1)
    joint = exact_mean and (queries or keys) and with_mean <= _tile(score_width)
    if joint:
        score_width = with_mean
    elif not centered and not value_dim:  # the row of 1 that gives the mean needs a place
        score_width = Builder.padded_head_dim(head_dim + 1)
    if equal:
        score_width = product_width = Builder.padded_head_dim(max(score_width, product_width), equal=True)
    return DerivativeForm(head_dim, value_dim, queries, keys, values, centered, joint, score_width, product_width)


def _tile(width: int) -> int:
    """Return the largest head dim that the kernels for a head dim support; beyond all kernels, any."""
    return next((tile for tile in TILES if width <= tile), 2 * width)


def wide_arrays(
    form: DerivativeForm,
    arrays: tuple[View, View, View],
    tangents: tuple[View | None, View | None, View | None],
    new: Callable[[str, tuple[int, ...], Any], View],
    *,
    copied: bool = False,
) -> tuple[Widened, list[tuple[View, list[View], float]]]:
    """Return the wider arrays and the concatenations that fill them; ``new(name, shape, dtype)`` creates arrays.

    Unless ``copied``, a dense array that gets no further elements is used without a copy.
    """
    (q, k, v), (dq, dk, dv) = arrays, tangents
    wanted: list[tuple[View, list[View], float]] = []

    def join(name: str, width: int, *parts: View | None, then: float = 0.0) -> None:
        """Add an array that has the parts along head_dim, then the number ``then`` once, then zeros."""
        given = [part for part in parts if part is not None]
        first = given[0]
        if not copied and given == [first] and first.shape[0] == width and _is_dense(first):
            made[name] = first
            return
        made[name] = new(name, (width, *first.shape[1:]), first.dtype)
        wanted.append((made[name], given, then))

    made: dict[str, Any] = dict.fromkeys(("q", "k", "v", "dout", "values", "ones"))
    if form.scores:
        join("q", form.score_width, q)
        join("k", form.score_width, k, v, then=float(form.joint))
        join("v", form.product_width, k if form.queries else None, dk)
        join("dout", form.product_width, dq, q if form.keys else None)
        if not (form.centered or form.joint):
            join("ones", form.score_width, k, then=1.0)
    if form.values:
        join("values", 2 * form.value_dim, v, dv)
    return Widened(**made, form=form), wanted


def _is_dense(array: View) -> bool:
    """True if the engine can read an array in place: in Fortran order, and aligned, which only a GPU requires."""
    return array.flags.f_contiguous and array.spec("").alignment == 16
