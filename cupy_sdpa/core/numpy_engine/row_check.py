"""Check the log-sum-exp and the output that are passed to a backward pass on the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph.nodes import SCORE_GRADIENT, SUBTRACTED, WEIGHTS, Graph, Node, Tensor
from . import buffers
from .tiles import Tile, analyze

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    from .steps import Compiler

    Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Checked(Node):
    """``out = x`` after a check of its rows: x is P, or dS with ``dout``, the forward pass's ``result`` and D."""

    x: Tensor
    dout: Tensor | None = None
    result: Tensor | None = None
    d: Tensor | None = None
    operands = ("x", "dout", "result", "d")


class RowCheck:
    """Check that the log-sum-exp and the output passed to a backward pass came from its forward pass.

    The backward pass computes ``P = exp(S - L)`` and ``dS = P o (dO V^T - D)`` with ``D = rowsum(dO o O)`` in any case. Each
    row of P must add up to 1, or to ``1 - exp(sink - L)``, and each row of dS to ``D (1 - sum(P))``. If the call has only some
    of the rows' keys (``whole`` is False), rows of P add up to less. The ``appended`` last rows of dO and O along the head dim
    do not belong to the output, but the graph's D includes them (:mod:`.core.programs.stats_gradient`).

    The tolerance bounds the rounding errors. It assumes float32 for every dtype, because a GPU and merges compute the
    log-sum-exp in float32. With u = 2^-23, a unit of float32 for sums on tensor cores, which truncate:

    - L is the sum of a maximum and a logarithm, each at most ``|L| + log n``, and terms are added to the scores S: eight
      rounding errors of ``u (|L| + log n)``;
    - each pass computes the D products of a score: ``u D |scale| |q| |k|``;
    - a sum over n keys: ``u n``;
    - O is rounded to its dtype, and so are the weights by which the forward pass multiplies V. The error of an element of O is
      at most ``unit |O|``, or half the smallest subnormal number if the element is subnormal; the error of D is therefore at
      most ``unit |dO| |O| + half sum |dO|``.

    The tanh of a soft cap is exact on the CPU. Hardware computes it with a relative error of 2^-11, so the check may raise for
    a log-sum-exp that a GPU computed. Score functions may magnify these errors without bound, so their rows are not checked.
    """

    def __init__(self, graph: Graph, sinks: Array | None, dropout: float, *, whole: bool, appended: int = 0) -> None:
        self.sinks, self.keep, self.whole, self.appended = sinks, 1 - dropout, whole, appended
        self.tensors = analyze(graph).inputs
        #: The row sums of P in the current tile.
        self.sums = np.zeros(0)

    def after(self, nodes: Sequence[Node]) -> Iterator[Node]:
        """Yield the nodes, and the checks after the nodes that compute P and dS."""
        by_name = {node.out.name: node.out for node in nodes}
        for node in nodes:
            yield node
            if node.out.name == WEIGHTS:
                yield Checked("check the rows of P", node.out, node.out)
            elif node.out.name == SCORE_GRADIENT and self.whole:
                dout, out = self.tensors["dout"], self.tensors["out"]
                yield Checked("check the rows of dS", node.out, node.out, dout, out, by_name[SUBTRACTED])

    def check_stats(self, tile: Tile, p: Array) -> None:
        """Check the row sums of P, first with the part of the tolerance that is the same for all rows."""
        self.sums = total = np.add.reduce(p, axis=-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[tile.heads.start : tile.heads.stop, None] - self.read(tile, "stats")[..., 0])
        excess, least = total - 1, _UNIT * (8 * math.log(tile.all_columns + 2) + tile.all_columns)
        if not ((np.abs(excess) if self.whole else excess) < least).all():
            self.check_every_total(tile, total)

    def check_every_total(self, tile: Tile, total: Array) -> None:
        """Check the row sums of P with each row's tolerance."""
        stats = self.read(tile, "stats")[..., 0]
        expected = np.where(np.isfinite(stats), 1.0, 0.0)
        excess = total - expected if not self.whole else np.abs(total - expected)
        remedy = f"pass the stats that the forward call returned for the same q, k and options. {_CHANGED}"
        text = "exp(score - stats) must add up to {1:g} over the keys, but adds up to {0:.6g}"
        self.refuse("stats", tile, excess, np.expm1(self.tolerance(tile)), (total, expected), f"{text}: {remedy}")

    def tolerance(self, tile: Tile) -> Array:
        """Return the tolerance of each row's scores."""
        stats = self.read(tile, "stats")[..., 0]
        size = np.abs(np.where(np.isfinite(stats), stats, 0)) + math.log(tile.all_columns + 2)
        products = abs(tile.run.scalars["scale"]) * _norms(self.read(tile, "q"), -1) * self.largest(tile, "k")
        return _UNIT * (8 * size + tile.all_columns + 2 * (self.tensors["q"].shape[3] + 8) * products)  # type: ignore[no-any-return]

    def check_out(self, tile: Tile, ds: Array, dout: Array, out: Array, subtracted: Array) -> None:
        """Check the row sums of dS, first without the parts of the tolerance that depend on the scores and on out."""
        subtracted = d = subtracted[..., 0]
        if self.appended:
            own = slice(dout.shape[-1] - self.appended)
            d = self.keep * _row_products(dout[..., own], out[..., own])
        found = np.add.reduce(ds, axis=-1) + subtracted * self.sums  # the row sums of P o dP
        units = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-9, 2.0**-134)}
        unit, subnormal = units.get(self.tensors["out"].dtype, (_UNIT, 2.0**-150))
        columns, head_dim = tile.all_columns, dout.shape[-1]
        # weights below the smallest normal float16 are rounded by up to 2^-25
        least = 2 * unit + columns * 2.0**-25 + _UNIT * (head_dim + columns)
        values = self.largest(tile, "v") + (self.appended > 0)  # the gradient of L is added to dP without a factor
        if (np.square(found - d) < _row_products(dout, dout) * np.square(values * least)).all():
            return
        errors = least + 2 * np.expm1(self.tolerance(tile))
        tolerance = _norms(dout, -1) * (values * errors + unit * _norms(out, -1)) + subnormal * np.abs(dout).sum(axis=-1)
        remedy = f"pass the out that the forward call returned for the same q, k, v and options. {_CHANGED}"
        text = "sum(dout * out) is {1:.6g}, but the weights and v give {0:.6g}"
        self.refuse("out", tile, np.abs(found - d), tolerance, (found, d), f"{text}: {remedy}")

    def refuse(self, name: str, tile: Tile, error: Array, tolerance: Array, values: tuple[Array, Array], text: str) -> None:
        """Raise ValueError if the error of one of the sequence's rows exceeds its tolerance; NaN does not."""
        rows = np.arange(tile.rows.start, tile.rows.start + error.shape[2])
        exists = rows < self.length(tile, "seq_lens_q", tile.all_rows)
        wrong = exists & (error > tolerance)
        if wrong.any():
            entry, head, row = (int(n) for n in np.argwhere(wrong)[0])
            place = f"query {tile.rows[row]}, head {tile.heads[head]} and batch item {tile.batch[entry]}"
            numbers = text.format(*(x[entry, head, row] for x in values))
            count = f"{int(wrong[entry, head].sum())} of {int(exists.sum())} rows of this head are wrong"
            raise ValueError(f"{name} is from another call: at {place}, {numbers} ({count})")

    def read(self, tile: Tile, name: str) -> Array:
        """Return the rows of an input that the tile reads, in the evaluation's dtype."""
        return tile.part_of(self.tensors[name]).astype(tile.run.dtype, copy=False)

    def length(self, tile: Tile, name: str, full: int) -> int:
        """Return the batch item's length."""
        return int(tile.run.views[name][tile.batch.start, 0, 0, 0]) if name in tile.run.views else full

    def largest(self, tile: Tile, name: str) -> Array:
        """Return the largest norm of each head's keys or values, ``(batch, heads, 1)``, cached for all tiles of the heads."""
        key = f"largest norm of {name}"
        if key not in tile.cache:
            # transposed: (head_dim, keys); 16-bit arrays are already converted for the products
            columns = tile.cache.get(name)
            columns = tile.part_of(self.tensors[name], every_column=True) if columns is None else columns
            columns = columns[..., : self.length(tile, "seq_lens_kv", columns.shape[3])]
            squares = np.maximum.reduce(np.add.reduce(np.square(columns), axis=-2), axis=-1, initial=0)
            within = columns.itemsize > 2 and bool(((squares > _SMALL) & (squares < 1 / _SMALL)).all())
            norms = np.sqrt(squares) if within else _norms(columns, -2).max(axis=-1, initial=0)
            tile.cache[key] = norms.repeat(len(tile.heads) // norms.shape[1], axis=1)[..., None]
        return tile.cache[key]


def checked(node: Checked, compiler: Compiler) -> Callable[[Tile], Array]:
    """Compile a :class:`Checked` node."""
    operands, is_weights = (
        compiler.operands([getattr(node, name) for name in node.operands if getattr(node, name)]),
        node.dout is None,
    )

    def compute(tile: Tile) -> Array:
        x, *others = operands(tile.values)
        if is_weights:
            tile.run.check.check_stats(tile, x)
        else:
            tile.run.check.check_out(tile, x, *others)
        return x  # type: ignore[no-any-return]

    return compute


#: The end of the message if stats or out does not belong to the other arrays. A pullback passes its own message.
_CHANGED = "If an array was changed in place after that call, as by q *= 2, pass that call a copy: q.copy(order='F')"
#: The unit of the tolerance of :class:`RowCheck`.
_UNIT = 2.0**-23
#: From this number to its inverse, sums of squares in float32 neither underflow nor overflow.
_SMALL = 1e-30


def _row_products(a: Array, b: Array) -> Array:
    """Return each row's sum of the products of its elements."""
    return np.add.reduce(np.multiply(a, b, out=buffers.empty(a.shape, a.dtype)), axis=-1)  # type: ignore[no-any-return]


def _norms(matrix: Array, axis: int) -> Array:
    """Return the Euclidean norms of a matrix's rows or columns, 0 instead of norms that are not finite."""
    rows = (matrix if axis == -1 else matrix.swapaxes(-1, -2)).astype(np.float64)
    norms = np.sqrt(np.einsum("...i,...i->...", rows, rows))
    return np.where(np.isfinite(norms), norms, 0)
