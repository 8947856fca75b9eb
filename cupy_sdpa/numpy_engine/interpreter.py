"""The interpreter: it evaluates a graph on arrays of numpy or CuPy, and defines the meaning of every node.

It is the engine of numpy arrays, and of CuPy arrays with ``engine="cupy"``: the module of the arrays is ``tile.run.xp``.
Integers that the host needs, such as lengths and page tables, are numpy arrays in both cases.

There are two precisions. *Declared*: every tensor is rounded to its dtype in the graph, and arithmetic uses the compute
dtype. This is how calls are computed, and the naive computation to which cuDNN's error is compared. *Exact*:
float64 without rounding, the exact value of the graph.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..graph.nodes import (
    Bernoulli,
    Graph,
    Matmul,
    Node,
    PagedLoad,
    Pointwise,
    Reduction,
    Softmax,
    Transpose,
)
from ..problem.tensor_spec import rounded
from ..runtime.interpreted_array import erf, philox
from ..score_fn.modes import CONDITIONS, MODES
from .fusion import Fused, exponentials, log_sum_exp, normalized
from .tiles import Evaluation, Tile

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]


def evaluate(
    graph: Graph,
    arrays: Mapping[str, Array],
    scalars: Mapping[str, float],
    *,
    exact: bool = False,
    check: RowCheck | None = None,
) -> None:
    """Compute a graph and write the results into the arrays of its output tensors.

    ``arrays`` are the caller's, by the names of the input and output tensors: of numpy, or of CuPy except for integers that the
    host needs. ``scalars`` have the values that the graph lacks. With ``exact`` only the results are rounded.

    Raises:
        ValueError: ``check`` refused the inputs of a backward pass; results may have been written.
    """
    run = Evaluation(graph, arrays, scalars, exact)
    with np.errstate(all="ignore"):  # infinities and NaN propagate as in IEEE 754, as on a GPU
        for tile in run.tiles():
            for node, last_reads in run.steps:
                if not tile.last and node.outputs[0].name in run.later:
                    continue
                tile.last_reads = last_reads
                RULES[type(node)](node, tile)
                if check is not None:
                    check(node, tile)
                for name in last_reads:
                    tile.values.pop(name, None)
    for name, total in run.totals.items():
        run.views[name][...] = total


class RowCheck:
    """Whether the log-sum-exp and the output that a backward pass gets are those of its forward pass.

    The pass computes ``P = exp(S - L)`` and ``dS = P o (dO V^T - D)`` with ``D = rowsum(dO o O)`` in any case. Rows of P add up
    to 1, or to ``1 - exp(sink - L)``, and rows of dS to ``D (1 - sum(P))``. If the call has only a part of the keys of its rows
    (``whole`` is False), rows of P add up to less.

    The tolerance is a bound of the rounding errors, in float32 for every dtype: statistics of a GPU and of merged parts were
    computed in float32. With u = 2^-23, a unit of float32 for the sums of tensor cores, which truncate:

    - L is a sum of a maximum and a logarithm, each of at most ``|L| + log n``, and S of terms that are added to the scores:
      eight roundings of ``u (|L| + log n)``;
    - each pass computes the D products of a score: ``u D |scale| |q| |k|``;
    - a sum over n keys: ``u n``;
    - O is rounded to its dtype, and so are the weights by which the forward pass multiplies V. An element of O has an error of
      at most ``unit |O|``, or of half of the smallest subnormal number where it is subnormal, so
      D has one of at most ``unit |dO| |O| + half sum |dO|``.

    The tanh of a soft cap is exact on the CPU. Hardware computes it with a relative error of 2^-11, so statistics of a GPU may
    be refused. Score functions may magnify these errors without a bound: their rows are not checked.
    """

    def __init__(self, graph: Graph, sinks: Array | None, dropout: float, *, whole: bool) -> None:
        self.sinks, self.keep, self.whole = sinks, 1 - dropout, whole
        self.tensors = {tensor.name: tensor for tensor in graph.by_role("input")}
        #: The sums of the rows of P of the current tile, which rows are in the sequence, and the tolerance.
        self.sums, self.exists, self.tolerance = np.zeros(0), np.zeros(0, bool), np.zeros(0)

    def __call__(self, node: Node, tile: Tile) -> None:
        """Check a tile when its P or its dS was computed."""
        name = node.outputs[0].name
        if name == "P":
            self.check_stats(tile)
        elif name == "P∘(dP−D)" and self.whole:
            self.check_out(tile)

    def check_stats(self, tile: Tile) -> None:
        """Check the sums of the rows of P."""
        p, (stats,) = tile.values["P"], self.read(tile, "stats").T
        rows, columns = p.shape
        self.sums = p.sum(axis=1)
        self.exists = np.arange(tile.start, tile.start + rows) < self.length(tile, "seq_lens_q", rows + tile.start)
        size = np.abs(np.where(np.isfinite(stats), stats, 0)) + math.log(columns + 2)
        products = abs(tile.run.scalars["scale"]) * _norms(self.read(tile, "q"), 1) * self.largest(tile, "k")
        head_dim = self.tensors["q"].shape[3]
        self.tolerance = _UNIT * (8 * size + columns + 2 * (head_dim + 8) * products)
        total = self.sums if self.sinks is None else self.sums + np.exp(self.sinks[tile.head] - stats)
        expected = np.where(np.isfinite(stats), 1.0, 0.0)
        excess = total - expected if not self.whole else np.abs(total - expected)
        remedy = f"pass the stats that the forward call returned for the same q, k and options. {_CHANGED}"
        text = "exp(score - stats) of the keys must add up to {1:g} and adds up to {0:.6g}"
        self.refuse("stats", tile, excess, np.expm1(self.tolerance), (total, expected), f"{text}: {remedy}")

    def check_out(self, tile: Tile) -> None:
        """Check the sums of the rows of dS."""
        dout, out = self.read(tile, "dout"), self.read(tile, "out")
        d = self.keep * np.einsum("ij,ij->i", dout, out)
        found = tile.values["P∘(dP−D)"].sum(axis=1) + d * self.sums  # the sums of the rows of P o dP
        units = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-9, 2.0**-134)}
        unit, subnormal = units.get(self.tensors["out"].dtype, (_UNIT, 2.0**-150))
        (_, columns), (_, head_dim) = tile.values["P∘(dP−D)"].shape, dout.shape
        # weights below the smallest normal float16 are rounded by up to 2^-25
        errors = 2 * unit + columns * 2.0**-25 + 2 * np.expm1(self.tolerance) + _UNIT * (head_dim + columns)
        values = self.largest(tile, "v") * errors
        tolerance = _norms(dout, 1) * (values + unit * _norms(out, 1)) + subnormal * np.abs(dout).sum(axis=1)
        remedy = f"pass the out that the forward call returned for the same q, k, v and options. {_CHANGED}"
        text = "sum(dout * out) is {1:.6g}, and the weights and v give {0:.6g}"
        self.refuse("out", tile, np.abs(found - d), tolerance, (found, d), f"{text}: {remedy}")

    def refuse(self, name: str, tile: Tile, error: Array, tolerance: Array, values: tuple[Array, Array], text: str) -> None:
        """Raise ValueError if an error of a row of the sequence exceeds its tolerance; NaN does not."""
        wrong = np.flatnonzero(self.exists & (error > tolerance))
        if wrong.size:
            first = int(wrong[0])
            place = f"query {tile.start + first}, head {tile.head} and batch entry {tile.batch}"
            count = f"{wrong.size} of {int(self.exists.sum())} rows of this head are wrong"
            raise ValueError(f"{name} is of another call: at {place} {text.format(*(x[first] for x in values))} ({count})")

    def read(self, tile: Tile, name: str) -> Array:
        """The rows of an input that the tile reads, in the dtype of the evaluation."""
        return tile.rows_of(self.tensors[name]).astype(tile.run.dtype)

    def length(self, tile: Tile, name: str, full: int) -> int:
        """The length of the batch entry."""
        return int(tile.run.views[name][tile.batch, 0, 0, 0]) if name in tile.run.views else full

    def largest(self, tile: Tile, name: str) -> float:
        """The largest norm of the keys or values of the batch entry."""
        columns = self.read(tile, name)  # transposed: (head_dim, keys)
        return float(_norms(columns[:, : self.length(tile, "seq_lens_kv", columns.shape[1])], 0).max(initial=0))


#: The end of the message of statistics that do not belong to the other arrays. A pullback passes its own.
_CHANGED = "If an array was changed in place after that call, as by q *= 2, pass that call a copy: q.copy(order='F')"
#: The unit of the tolerance of :class:`RowCheck`.
_UNIT = 2.0**-23


def _norms(matrix: Array, axis: int) -> Array:
    """The Euclidean norms of the rows or columns of a matrix; 0 of those that are not finite."""
    norms = np.sqrt(np.square(matrix, dtype=np.float64).sum(axis=axis))
    return np.where(np.isfinite(norms), norms, 0)


def _matmul(node: Matmul, tile: Tile) -> None:
    a, b = tile[node.a], tile[node.b]
    summed = node.out.name in tile.run.summed
    # in a sum over the tiles of a head, the rows of the tile are the terms; else they are the rows of the result
    first_term, first_row = (tile.start, 0) if summed else (0, tile.start)
    if node.k is not None:
        length = max(0, tile.number(node.k) - first_term)
        a, b = a[:, :length], b[:length]
    out = a @ b
    if node.m is not None:
        out[max(0, tile.number(node.m) - first_row) :] = 0
    if node.n is not None:
        out[:, tile.number(node.n) :] = 0
    if summed:
        tile.add_to_rows(node.out, out)
    else:
        tile[node.out] = out


def _paged_load(node: PagedLoad, tile: Tile) -> None:
    """Gather the pages that hold rows before the length; later rows are 0. All tiles of a head share the result."""
    if node.out.name in tile.cache:
        return
    views, length, xp = tile.run.views, tile.number(node.lengths), tile.run.xp
    pages = views[node.pages.name]
    (_, _, page, columns), head = pages.shape, tile.head_of(pages)
    count = page * node.table.shape[2] if tile.columns is None else tile.columns
    rows = xp.zeros((count, columns), tile.run.dtype)
    used = xp.asarray(views[node.table.name][tile.batch, 0, : -(-length // page), 0])
    rows[:length] = pages[:, head][used].reshape(len(used) * page, columns)[:length]
    tile.cache[node.out.name] = rows.T if node.transposed else rows


def _softmax(node: Softmax, tile: Tile) -> None:
    x, xp = tile[node.x], tile.run.xp
    # m = max(x), with the sink
    top = x.max(axis=1, keepdims=True, initial=-np.inf) if xp is np else _row_maxima(x)
    sink = None if node.sink is None else tile[node.sink]
    if sink is not None:
        if node.rows is not None:
            valid = xp.arange(tile.start, tile.start + len(x))[:, None] < tile.number(node.rows)
            sink = xp.where(valid, sink, -np.inf).astype(tile.run.dtype)
        top = xp.maximum(top, sink)
    # p = exp(x - m); 0 in place of m in a row of -inf, so that exp(-inf - 0) = 0, not exp(-inf + inf) = NaN
    if xp is np:
        shift = np.where(top == -np.inf, 0, top)
        p = np.subtract(x, shift, out=tile.reusable(node.x))
        np.exp(p, out=p)
    else:
        p = exponentials(x, top)
    # l = sum(p), with the sink
    total = p.sum(axis=1, keepdims=True)
    if sink is not None:
        total += np.exp(sink - shift) if xp is np else exponentials(sink, top)
    if node.scale is not None:
        # p = round(scale p), in the units of FP8 from here on
        p *= tile[node.scale]
        p = p if tile.run.exact else rounded(p, node.out.dtype).astype(tile.run.dtype)
    # p = p / l, stats = m + log(l); log 0 = -inf is the result of a row of -inf
    if xp is np:
        p /= np.where(total == 0, 1, total)
    else:
        p = normalized(p, total)
    if node.stats is not None and tile.is_needed(node.stats):
        tile[node.stats] = shift + np.log(total) if xp is np else log_sum_exp(top, total)
    for out, value in ((node.max, top), (node.sum_exp, total)):
        if out is not None:
            tile[out] = value
    if node.scale is None:
        tile[node.out] = p
    else:
        tile.values[node.out.name] = p  # rounded already


def _row_maxima(x: Array) -> Array:
    """The largest element of each row of a CuPy array, -inf without elements: CuPy's reductions have no initial value."""
    return x.max(axis=1, keepdims=True) if x.shape[1] else x.sum(axis=1, keepdims=True) - np.inf  # type: ignore[no-any-return]


def _bernoulli(node: Bernoulli, tile: Tile) -> None:
    """Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"): 32 random bits per element.

    The numbers differ from those of cuDNN. Like those, they depend only on the seed, the offset and the indices of the element.
    """
    *_, rows, columns = node.out.shape
    words = -(-columns // 8) * 4  # the number of 64-bit words per row, a multiple of Philox's block of four
    seed, offset = (int(tile.run.views[t.name][0, 0, 0, 0]) % 2**64 for t in (node.seed, node.offset))
    rows = min(tile.stop, rows) - tile.start
    first = tile.start * words // 4
    if tile.run.xp is np:
        source = np.random.Philox(key=[seed, offset], counter=[0, 0, tile.head, tile.batch])
        source.advance(first)
        numbers = source.random_raw(rows * words)
    else:
        numbers = philox((seed, offset), (first, 0, tile.head, tile.batch), rows * words)
    bits = numbers.view(np.uint32).reshape(rows, 2 * words)[:, :columns]
    kept = bits[:, : tile.columns] < np.uint64(round(node.probability * 2**32))
    tile[node.out] = kept.astype(tile.run.dtype)


def _pointwise(node: Pointwise, tile: Tile) -> None:
    tile[node.out] = POINTWISE[node.mode](node, tile)


def _fused(node: Fused, tile: Tile) -> None:
    run, operands = tile.run, [tile[t] for t in node.inputs]
    shapes = [getattr(x, "shape", ()) for x in operands]
    for part in node.parts:
        if part.mode == "gen_index":
            shapes.append(_index_shape(part, tile))
    shape = np.broadcast_shapes((1, 1), *shapes)
    dtypes = (x.dtype.name if hasattr(x, "dtype") else "int64" if isinstance(x, int) else run.dtype.name for x in operands)
    kernel, dtype = node.kernel(tuple(dtypes), run.dtype.name)
    tile[node.out] = kernel(*operands, tile.start, shape[1], tile.head, tile.batch, run.xp.empty(shape, dtype))


def _reduction(node: Reduction, tile: Tile) -> None:
    x = -tile[node.x] if node.negative else tile[node.x]
    if node.amax:
        tile.add_to_largest(node.out, x)
    elif node.out.name in tile.run.totals:
        tile.add_to_total(node.out, x)
    elif node.out.shape[3] == 1 and node.x.shape[3] > 1:
        tile[node.out] = x.sum(axis=1, keepdims=True)
    else:
        tile.add_to_group(node.out, x)


def _transpose(node: Transpose, tile: Tile) -> None:
    tile[node.out] = tile[node.x].T


def _index_shape(node: Pointwise, tile: Tile) -> tuple[int, int]:
    """The shape of indices: a row or a column, not a matrix; it is broadcast where it is read."""
    *_, rows, columns = node.x.shape
    if node.axis == 2:
        return min(tile.stop, rows) - tile.start, 1
    return 1, 1 if node.axis != 3 else columns if tile.columns is None else min(columns, tile.columns)


def _gen_index(node: Pointwise, tile: Tile) -> Array:
    xp, shape = tile.run.xp, _index_shape(node, tile)
    if node.axis == 2:
        return xp.arange(tile.start, tile.start + shape[0], dtype=np.int64)[:, None]  # type: ignore[no-any-return]
    if node.axis == 3:
        return xp.arange(shape[1], dtype=np.int64)[None]  # type: ignore[no-any-return]
    return xp.full(shape, tile.batch if node.axis == 0 else tile.head, np.int64)  # type: ignore[no-any-return]


def _operands(node: Pointwise, tile: Tile) -> list[Any]:
    operands = [tile[node.x]]
    if node.b is not None:
        operands.append(tile[node.b])
        if node.t is not None:
            operands.append(tile[node.t])
    return operands


def _select(node: Pointwise, tile: Tile) -> Array:
    x, other, condition = _operands(node, tile)
    condition = condition != 0  # it may be 1 and 0
    if tile.run.xp is not np:
        return tile.run.xp.where(condition, x, other).astype(x.dtype, copy=False)  # type: ignore[no-any-return]
    out = tile.reusable(node.x, node.t)
    if out is None or np.broadcast_shapes(out.shape, np.shape(other)) != out.shape:
        return np.where(condition, x, np.asarray(other, x.dtype))
    np.copyto(out, other, where=~condition)
    return out


def _truncated_division(x: Array, b: Array) -> Array:
    quotient = x // b  # rounded down, and faster than numpy's remainder
    return quotient + ((quotient < 0) & (quotient * b != x))  # type: ignore[no-any-return]


def _elementwise(mode: str, integer: Callable[..., Array] | None = None) -> Callable[[Pointwise, Tile], Array]:
    """Elementwise, in the dtype of the evaluation, or in 64-bit integers if the result is an integer; or a condition."""
    name = MODES[mode].numpy
    assert isinstance(name, str), mode

    def compute(node: Pointwise, tile: Tile) -> Array:
        function, operands = getattr(tile.run.xp, name), _operands(node, tile)
        if mode in CONDITIONS:
            return function(*operands)  # type: ignore[no-any-return]
        if node.out.dtype.startswith("int"):
            return (integer or function)(*operands)
        return function(*operands, out=tile.reusable(node.x, node.b), dtype=tile.run.dtype)  # type: ignore[no-any-return]

    return compute


def _erf(node: Pointwise, tile: Tile) -> Array:
    x = tile[node.x]
    function: Any = MODES["erf"].numpy if tile.run.xp is np else erf
    return function(x).astype(tile.run.dtype)  # type: ignore[no-any-return]


#: The meaning of every pointwise mode of a graph.
POINTWISE: dict[str, Callable[[Pointwise, Tile], Array]] = {
    **{mode: _elementwise(mode) for mode, of in MODES.items() if isinstance(of.numpy, str) and isinstance(of.cudnn, str)},
    "div": _elementwise("div", _truncated_division),
    "rsqrt": lambda node, tile: 1 / tile.run.xp.sqrt(tile[node.x]),
    "erf": _erf,
    "identity": lambda node, tile: tile[node.x],
    "gen_index": _gen_index,
    "binary_select": _select,
}

#: The meaning of every node.
RULES: dict[type[Node], Callable[[Any, Tile], None]] = {
    Bernoulli: _bernoulli,
    Fused: _fused,
    Matmul: _matmul,
    PagedLoad: _paged_load,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}
