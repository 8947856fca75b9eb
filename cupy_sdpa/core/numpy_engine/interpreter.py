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
    SCORE_GRADIENT,
    WEIGHTS,
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
from . import buffers
from .axes import COLUMNS, ROWS
from .bands import Masked
from .fusion import Fused, exponentials, log_sum_exp, normalized
from .tiles import Evaluation, Tile, analyze

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
                if not tile.last and node.out.name in run.partial:
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
    (``whole`` is False), rows of P add up to less. The ``appended`` last rows along the head dim of dO and O are no part of the
    output: D of the graph has them (:mod:`.core.programs.stats_gradient`).

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

    def __init__(self, graph: Graph, sinks: Array | None, dropout: float, *, whole: bool, appended: int = 0) -> None:
        self.sinks, self.keep, self.whole, self.appended = sinks, 1 - dropout, whole, appended
        self.tensors = analyze(graph).inputs
        #: The sums of the rows of P of the current tile.
        self.sums = np.zeros(0)

    def __call__(self, node: Node, tile: Tile) -> None:
        """Check a tile when its P or its dS was computed."""
        name = node.outputs[0].name
        if name == WEIGHTS:
            self.check_stats(tile)
        elif name == SCORE_GRADIENT and self.whole:
            self.check_out(tile)

    def check_stats(self, tile: Tile) -> None:
        """Check the sums of the rows of P: at first with the part of the tolerance that is the same for all rows."""
        p = tile.values[WEIGHTS]
        self.sums = total = np.add.reduce(p, axis=-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks[tile.heads.start : tile.heads.stop, None] - self.read(tile, "stats")[..., 0])
        excess, least = total - 1, _UNIT * (8 * math.log(tile.all_columns + 2) + tile.all_columns)
        if not ((np.abs(excess) if self.whole else excess) < least).all():
            self.check_every_total(tile, total)

    def check_every_total(self, tile: Tile, total: Array) -> None:
        """Check the sums of the rows of P with the tolerance of each row."""
        stats = self.read(tile, "stats")[..., 0]
        expected = np.where(np.isfinite(stats), 1.0, 0.0)
        excess = total - expected if not self.whole else np.abs(total - expected)
        remedy = f"pass the stats that the forward call returned for the same q, k and options. {_CHANGED}"
        text = "exp(score - stats) of the keys must add up to {1:g} and adds up to {0:.6g}"
        self.refuse("stats", tile, excess, np.expm1(self.tolerance(tile)), (total, expected), f"{text}: {remedy}")

    def tolerance(self, tile: Tile) -> Array:
        """The tolerance of the scores of each row."""
        stats = self.read(tile, "stats")[..., 0]
        size = np.abs(np.where(np.isfinite(stats), stats, 0)) + math.log(tile.all_columns + 2)
        products = abs(tile.run.scalars["scale"]) * _norms(self.read(tile, "q"), -1) * self.largest(tile, "k")
        return _UNIT * (8 * size + tile.all_columns + 2 * (self.tensors["q"].shape[3] + 8) * products)  # type: ignore[no-any-return]

    def check_out(self, tile: Tile) -> None:
        """Check the sums of the rows of dS: at first without the parts of the tolerance that depend on the scores and out."""
        dout, out = self.read(tile, "dout"), self.read(tile, "out")
        own = slice(dout.shape[-1] - self.appended)
        subtracted, d = (self.keep * np.einsum("bhij,bhij->bhi", dout[..., of], out[..., of]) for of in (slice(None), own))
        found = np.add.reduce(tile.values[SCORE_GRADIENT], axis=-1) + subtracted * self.sums  # the sums of the rows of P o dP
        units = {"float16": (2.0**-11, 2.0**-25), "bfloat16": (2.0**-9, 2.0**-134)}
        unit, subnormal = units.get(self.tensors["out"].dtype, (_UNIT, 2.0**-150))
        columns, head_dim = tile.all_columns, dout.shape[-1]
        # weights below the smallest normal float16 are rounded by up to 2^-25
        least = 2 * unit + columns * 2.0**-25 + _UNIT * (head_dim + columns)
        values = self.largest(tile, "v") + (self.appended > 0)  # the gradient of L is added to dP as it is
        if (np.square(found - d) < np.einsum("bhij,bhij->bhi", dout, dout) * np.square(values * least)).all():
            return
        errors = least + 2 * np.expm1(self.tolerance(tile))
        tolerance = _norms(dout, -1) * (values * errors + unit * _norms(out, -1)) + subnormal * np.abs(dout).sum(axis=-1)
        remedy = f"pass the out that the forward call returned for the same q, k, v and options. {_CHANGED}"
        text = "sum(dout * out) is {1:.6g}, and the weights and v give {0:.6g}"
        self.refuse("out", tile, np.abs(found - d), tolerance, (found, d), f"{text}: {remedy}")

    def refuse(self, name: str, tile: Tile, error: Array, tolerance: Array, values: tuple[Array, Array], text: str) -> None:
        """Raise ValueError if an error of a row of the sequence exceeds its tolerance; NaN does not."""
        rows = np.arange(tile.rows.start, tile.rows.start + error.shape[2])
        exists = rows < self.length(tile, "seq_lens_q", tile.all_rows)
        wrong = exists & (error > tolerance)
        if wrong.any():
            entry, head, row = (int(n) for n in np.argwhere(wrong)[0])
            place = f"query {tile.rows[row]}, head {tile.heads[head]} and batch entry {tile.batch[entry]}"
            numbers = text.format(*(x[entry, head, row] for x in values))
            count = f"{int(wrong[entry, head].sum())} of {int(exists.sum())} rows of this head are wrong"
            raise ValueError(f"{name} is of another call: at {place} {numbers} ({count})")

    def read(self, tile: Tile, name: str) -> Array:
        """The rows of an input that the tile reads, in the dtype of the evaluation."""
        return tile.part_of(self.tensors[name]).astype(tile.run.dtype, copy=False)

    def length(self, tile: Tile, name: str, full: int) -> int:
        """The length of the batch entry."""
        return int(tile.run.views[name][tile.batch.start, 0, 0, 0]) if name in tile.run.views else full

    def largest(self, tile: Tile, name: str) -> Array:
        """The largest norm of the keys or values of each head, ``(batch, heads, 1)``: the same for all tiles of the heads."""
        key = f"largest norm of {name}"
        if key not in tile.cache:
            columns = tile.part_of(self.tensors[name], every_column=True)  # transposed: (head_dim, keys)
            columns = columns[..., : self.length(tile, "seq_lens_kv", columns.shape[3])]
            norms = _norms(columns, -2).max(axis=-1, initial=0)
            tile.cache[key] = np.repeat(norms, len(tile.heads) // norms.shape[1], axis=1)[..., None]
        return tile.cache[key]


#: The end of the message of statistics that do not belong to the other arrays. A pullback passes its own.
_CHANGED = "If an array was changed in place after that call, as by q *= 2, pass that call a copy: q.copy(order='F')"
#: The unit of the tolerance of :class:`RowCheck`.
_UNIT = 2.0**-23


def _norms(matrix: Array, axis: int) -> Array:
    """The Euclidean norms of the rows or columns of a matrix; 0 of those that are not finite."""
    rows = (matrix if axis == -1 else matrix.swapaxes(-1, -2)).astype(np.float64)
    norms = np.sqrt(np.einsum("...i,...i->...", rows, rows))
    return np.where(np.isfinite(norms), norms, 0)


def _matmul(node: Matmul, tile: Tile) -> None:
    run, name = tile.run, node.out.name
    analysis = run.analysis
    a, b = tile[node.a], tile[node.b]
    row_axis, column_axis, summed_axis = analysis.products[name]
    if name in analysis.narrow:
        rows, terms = (
            len(tile.rows) if axis == ROWS else len(tile.columns) if axis == COLUMNS else full
            for axis, full in ((row_axis, a.shape[2]), (summed_axis, a.shape[3]))
        )
        a = run.xp.broadcast_to(a, (len(tile.batch), len(tile.heads), rows, terms))
    if node.k is not None:
        length = max(0, tile.number(node.k) - tile.start(summed_axis))
        a, b = a[..., :length], b[..., :length, :]
    scale = analysis.scales.get(name) if run.xp is np else None
    if scale is not None:
        a = np.multiply(a, run.scalars[scale.name], dtype=run.dtype, order="C")
    group = analysis.grouped.get(name)
    out = _product(a, b) if group is None else _sum_of_products(a, b, group)
    if node.m is not None:
        out[:, :, max(0, tile.number(node.m) - tile.start(row_axis)) :] = 0
    if node.n is not None:
        out[..., max(0, tile.number(node.n) - tile.start(column_axis)) :] = 0
    if (total := tile.divisors.get(node.a.name)) is not None:
        finite = np.isfinite(out).all(axis=-1, keepdims=True)
        out = _divided(out, total, run.xp)
        if not finite.all():  # a sum may be too large though the quotient is not
            np.copyto(out, _product(_divided(a.copy(), total, run.xp), b), where=~finite)
    if summed_axis == ROWS and name in run.later:
        tile.add_to_rows(node.out, out)
    else:
        tile[node.out] = out


def _product(a: Array, b: Array) -> Array:
    """``a b`` for each batch entry and head; the rows of a group of heads that share a head of b are one matrix."""
    batch, heads, rows, terms = a.shape
    shared = b.shape[1]
    if heads != shared:
        a = a.reshape(batch, shared, heads // shared * rows, terms)
    if type(a) is not np.ndarray:
        out = a @ b
    else:
        out = buffers.empty((*a.shape[:3], b.shape[3]), a.dtype)
        if 1 < a.shape[2] <= _FEW_ROWS and b.strides[3] > b.strides[2]:
            out[...] = (b.swapaxes(-1, -2) @ a.swapaxes(-1, -2)).swapaxes(-1, -2)
        else:
            np.matmul(a, b, out=out)
    return out if heads == shared else out.reshape(batch, heads, rows, b.shape[3])


#: Up to this number of rows, ``b^T a^T`` is faster than ``a b`` if b is a transposed matrix: OpenBLAS packs b otherwise. With 4
#: to 16 rows of 128 elements and 4096 columns it takes 0.4 to 0.6 of the time.
_FEW_ROWS = 32


def _sum_of_products(a: Array, b: Array, group: int) -> Array:
    """The sum of ``a b`` over each group of heads: one product of the rows of all its heads. ``a`` is a transposed matrix."""
    batch, heads, columns, rows = a.shape
    left = a.swapaxes(-1, -2).reshape(batch, heads // group, group * rows, columns).swapaxes(-1, -2)
    return left @ b.reshape(batch, heads // group, group * rows, b.shape[3])


def _paged_load(node: PagedLoad, tile: Tile) -> None:
    """Gather the pages that hold rows before the length; later rows are 0. All tiles of some heads share the result."""
    name = node.out.name
    if name not in tile.cache:
        views, length, xp = tile.run.views, tile.number(node.lengths), tile.run.xp
        pages = views[node.pages.name]
        page, columns = pages.shape[2:]
        used = xp.asarray(views[node.table.name][tile.batch.start, 0, : -(-length // page), 0])
        # pages, rows, heads, columns: the order in memory
        rows = pages[:, tile.heads_of(pages)].transpose(0, 2, 1, 3)[used].astype(tile.run.dtype, copy=False)
        rows = rows.reshape(len(used) * page, rows.shape[2], columns)[:length]
        if length < tile.columns.stop:
            rows = xp.pad(rows, [(0, tile.all_columns - length), (0, 0), (0, 0)])
        tile.cache[name] = rows.transpose(1, 2, 0)[None] if node.transposed else rows.transpose(1, 0, 2)[None]
    value = tile.cache[name]
    columns = tile.part(COLUMNS, tile.all_columns)
    tile.values[name] = value[..., columns] if node.transposed else value[..., columns, :]
    tile.borrowed.add(name)


def _softmax(node: Softmax, tile: Tile) -> None:
    x, run = tile[node.x], tile.run
    xp = run.xp
    sink = None if node.sink is None else tile[node.sink]
    if sink is not None and node.rows is not None:
        valid = xp.arange(tile.rows.start, tile.rows.start + x.shape[2])[:, None] < tile.number(node.rows)
        sink = xp.where(valid, sink, -np.inf).astype(run.dtype)
    if xp is np:
        # m = max(x), with the sink; the lowest number in place of -inf, so that exp(-inf - m) = 0, not exp(-inf + inf) = NaN
        top = np.maximum.reduce(x, axis=-1, keepdims=True, initial=_LOWEST[run.dtype_name])
        if sink is not None:
            top = np.maximum(top, sink)
        # p = exp(x - m)
        p = tile.reusable(node.x)
        p = np.subtract(x, top, out=buffers.empty(x.shape, run.dtype) if p is None else p)
        np.exp(p, out=p)
        # l = sum(p), with the sink
        total = np.add.reduce(p, axis=-1, keepdims=True)
        if sink is not None:
            total += np.exp(sink - top)
    else:
        top = _row_maxima(x)
        if sink is not None:
            top = xp.maximum(top, sink)
        p = exponentials(x, top)
        total = p.sum(axis=-1, keepdims=True)
        if sink is not None:
            total += exponentials(sink, top)
    if node.scale is not None:
        # p = round(scale p), in the units of FP8 from here on
        p *= tile[node.scale]
        p = p if run.exact else rounded(p, node.out.dtype).astype(run.dtype)
    # stats = m + log(l); log 0 = -inf is the result of a row of -inf
    if node.stats is not None and tile.is_needed(node.stats):
        tile[node.stats] = top + np.log(total) if xp is np else log_sum_exp(top, total)
    if node.max is not None:
        tile[node.max] = np.where(total == 0, -np.inf, top).astype(run.dtype) if xp is np else top
    if node.sum_exp is not None:
        tile[node.sum_exp] = total
    # p = p / l, in this step or, with numpy, after the product that reads p
    if xp is np and node.out.name in run.analysis.undivided:
        tile.divisors[node.out.name] = total
    else:
        p = _divided(p, total, xp)
    if node.scale is None:
        tile[node.out] = p
    else:
        tile.values[node.out.name] = p  # rounded already


#: What replaces the maximum -inf of a row without a key.
_LOWEST = {name: np.finfo(name).min for name in ("float32", "float64")}


def _divided(x: Array, total: Array, xp: Any) -> Array:
    """``x / l`` of the sums of rows, written to x; rows without a key are divided by 1. All other sums are at least 1."""
    if xp is not np:
        return normalized(x, total)  # type: ignore[no-any-return]
    return np.divide(x, np.maximum(total, 1), out=x)


def _row_maxima(x: Array) -> Array:
    """The largest element of each row of a CuPy array, -inf without elements: CuPy's reductions have no initial value."""
    return x.max(axis=-1, keepdims=True) if x.shape[-1] else x.sum(axis=-1, keepdims=True) - np.inf  # type: ignore[no-any-return]


def _bernoulli(node: Bernoulli, tile: Tile) -> None:
    """Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3"): 32 random bits per element.

    The numbers differ from those of cuDNN. Like those, they depend only on the seed, the offset and the indices of the element.
    """
    run, (*_, columns) = tile.run, node.out.shape
    words = -(-columns // 8) * 4  # the number of 64-bit words per row, a multiple of Philox's block of four
    key = [int(run.views[t.name][0, 0, 0, 0]) % 2**64 for t in (node.seed, node.offset)]
    rows, first = len(tile.rows), tile.rows.start * words // 4
    kept = run.xp.empty((len(tile.batch), len(tile.heads), rows, len(tile.columns)), run.dtype)
    for entry in tile.batch:
        for head in tile.heads:
            if run.xp is np:
                source = np.random.Philox(key=key, counter=[0, 0, head, entry])
                source.advance(first)
                numbers = source.random_raw(rows * words)
            else:
                numbers = philox((key[0], key[1]), (first, 0, head, entry), rows * words)
            bits = numbers.view(np.uint32).reshape(rows, 2 * words)[:, tile.columns.start : tile.columns.stop]
            kept[entry - tile.batch.start, head - tile.heads.start] = bits < np.uint64(round(node.probability * 2**32))
    tile[node.out] = kept


def _pointwise(node: Pointwise, tile: Tile) -> None:
    tile[node.out] = POINTWISE[node.mode](node, tile)


def _masked(node: Masked, tile: Tile) -> None:
    """-inf in the columns where not every row satisfies the conditions."""
    x = tile[node.x]
    shape = (*x.shape[:2], len(tile.rows), len(tile.columns))
    if tile.reusable(node.x) is None or x.shape != shape:
        x = np.broadcast_to(x, shape).copy()
    row, column = tile.rows.start, tile.columns.start
    for condition in node.conditions:
        bound = tile.run.bound(condition, tile.batch.start)
        every = bound.columns(tile.rows, tile.columns, every=True)
        for part in (
            (range(tile.columns.start, every.start), range(every.stop, tile.columns.stop)) if every else (tile.columns,)
        ):
            if part:
                rows = bound.row * np.arange(row, row + x.shape[2])[:, None] - bound.most
                hidden = rows > -bound.column * np.arange(part.start, part.stop)
                np.copyto(x[..., part.start - column : part.stop - column], -np.inf, where=hidden)
    tile[node.out] = x


def _fused(node: Fused, tile: Tile) -> None:
    run, operands = tile.run, [tile[t] for t in node.inputs]
    shapes = [getattr(x, "shape", ()) for x in operands]
    for part in node.parts:
        if part.mode == "gen_index":
            shapes.append(_index_shape(part, tile))
    shape = np.broadcast_shapes((1, 1, 1, 1), *shapes)
    dtypes = (x.dtype.name if hasattr(x, "dtype") else "int64" if isinstance(x, int) else run.dtype_name for x in operands)
    kernel, dtype = node.kernel(tuple(dtypes), run.dtype_name)
    starts = (tile.batch.start, tile.heads.start, tile.rows.start, tile.columns.start)
    tile[node.out] = kernel(*operands, *starts, *shape[1:], run.xp.empty(shape, dtype))


def _reduction(node: Reduction, tile: Tile) -> None:
    x = -tile[node.x] if node.negative else tile[node.x]
    if node.amax:
        tile.add_to_largest(node.out, x)
    elif node.out.name in tile.run.totals:
        tile.add_to_total(node.out, x)
    elif node.out.shape[3] == 1 and node.x.shape[3] > 1:
        tile[node.out] = x.sum(axis=-1, keepdims=True)
    elif node.x.name in tile.run.analysis.grouped:
        tile[node.out] = x  # the product is this sum
    else:
        batch, heads, rows, columns = x.shape
        group = node.x.shape[1] // node.out.shape[1]
        tile[node.out] = x.reshape(batch, heads // group, group, rows, columns).sum(axis=2)


def _transpose(node: Transpose, tile: Tile) -> None:
    name = node.out.name
    value = tile[node.x].swapaxes(-1, -2)
    tile.borrowed.add(name)
    tile[node.out] = value


def _index_shape(node: Pointwise, tile: Tile) -> tuple[int, int, int, int]:
    """The shape of indices: a vector, not a matrix; it is broadcast where it is read."""
    shape = [1, 1, 1, 1]
    shape[node.axis or 0] = len(_positions(node, tile))
    return (shape[0], shape[1], shape[2], shape[3])


def _positions(node: Pointwise, tile: Tile) -> range:
    """The positions of the tile along the axis of a node."""
    axis = node.axis or 0
    if axis < 2:
        return (tile.batch, tile.heads)[axis]
    label = tile.run.analysis.axes[node.x.name][axis - 2]
    return {ROWS: tile.rows, COLUMNS: tile.columns}.get(label or "", range(node.x.shape[axis]))


def _gen_index(node: Pointwise, tile: Tile) -> Array:
    positions = _positions(node, tile)
    indices = tile.run.xp.arange(positions.start, positions.stop, dtype=np.int64)
    return indices.reshape(_index_shape(node, tile))  # type: ignore[no-any-return]


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
        out = tile.reusable(node.x, node.b)
        if out is not None or tile.run.xp is not np:
            return function(*operands, out=out, dtype=tile.run.dtype)  # type: ignore[no-any-return]
        return function(*operands, dtype=tile.run.dtype, order="C")  # type: ignore[no-any-return]

    return compute


def _identity(node: Pointwise, tile: Tile) -> Array:
    tile.borrowed |= {node.x.name, node.out.name}
    return tile[node.x]  # type: ignore[no-any-return]


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
    "identity": _identity,
    "gen_index": _gen_index,
    "binary_select": _select,
}

#: The meaning of every node.
RULES: dict[type[Node], Callable[[Any, Tile], None]] = {
    Bernoulli: _bernoulli,
    Fused: _fused,
    Masked: _masked,
    Matmul: _matmul,
    PagedLoad: _paged_load,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}
