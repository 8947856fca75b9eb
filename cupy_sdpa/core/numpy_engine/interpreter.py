"""The interpreter: evaluates a graph on numpy or CuPy arrays, and defines what each node means.

It is the engine for numpy arrays, and for CuPy arrays with ``engine="cupy"``; ``compiler.xp`` is the arrays' module. Integers
that the host needs, such as lengths and page tables, are numpy arrays in both cases.

A rule compiles a node: it runs once for a graph and returns the function that computes the node for a tile.

There are two precisions. *Declared*: every tensor is rounded to its dtype in the graph, and arithmetic uses the compute
dtype. Calls use this precision, and so does the naive computation with which cuDNN's error is compared. *Exact*: float64
without rounding, which gives the graph's exact value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

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
    Tensor,
    Transpose,
)
from ..problem.tensor_spec import rounded
from ..runtime.interpreted_array import erf, philox
from ..score_fn.modes import CONDITIONS, MODES
from . import buffers, tiles
from .axes import COLUMNS, ROWS
from .bands import Masked
from .buffers import TileMemory
from .fusion import Fused, divide_by_sums, exponentials, log_sum_exp
from .row_check import Checked, RowCheck, checked
from .steps import Compiler, Compute, steps_of
from .tiles import Analysis, Evaluation, Tile, analyze

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]


@np.errstate(all="ignore")  # infinities and NaN propagate by IEEE 754, as on a GPU
def evaluate(
    graph: Graph,
    arrays: Mapping[str, Array],
    scalars: Mapping[str, float],
    *,
    exact: bool = False,
    check: RowCheck | None = None,
) -> None:
    """Compute a graph and write the results into the arrays of its output tensors.

    ``arrays`` are the caller's arrays by the names of the input and output tensors: numpy arrays, or CuPy arrays except for
    integers that the host needs. ``scalars`` are the values that the graph lacks. With ``exact``, only the results are rounded.

    Raises:
        ValueError: ``check`` found that the inputs of a backward pass are wrong; results may have been written.
    """
    analysis: Analysis = graph.notes.get("analysis") or analyze(graph)
    keeps = analysis.is_small and type(arrays[analysis.views[0][0]]) is np.ndarray
    key = analysis, exact, check and check.whole, tiles.TILE_ELEMENTS
    run = (buffers.take(key) if keeps else None) or Evaluation(graph, exact, keeps=keeps)
    run.begin(arrays, scalars, check)
    try:
        for tile in run.only or run.tiles():
            values, steps = tile.values, tile.steps or steps_of(run, tile, COMPILER_RULES)
            for compute, name, unread in steps:
                values[name] = compute(tile)
                for other in unread:
                    del values[other]
    except BaseException:
        run.only = ()  # else a cycle (evaluation, tile) keeps the caller's arrays until a garbage collection
        raise
    for name, total in run.totals.items():
        run.views[name][...] = total
    if keeps:
        run.end()
        buffers.give(key, run)


def _matmul(node: Matmul, compiler: Compiler) -> Compute:
    name, analysis, xp = node.out.name, compiler.analysis, compiler.xp
    of_a, of_b, sums = compiler.read(node.a), compiler.read(node.b), _sums_name(node.a)
    row_axis, column_axis, summed_axis = analysis.products[name]
    narrow, group = name in analysis.narrow, analysis.grouped.get(name)
    scale = compiler.read(analysis.scales[name]) if xp is np and name in analysis.scales else None
    divides = xp is np and node.a.name in analysis.undivided
    added = summed_axis == ROWS and name in analysis.later
    target = compiler.target(node.out) if divides and not added else None

    def compute(tile: Tile) -> Array | None:
        a, b, memory = tile.values[of_a], tile.values[of_b], tile.memory
        if narrow:
            rows, terms = (
                len(tile.rows) if axis == ROWS else len(tile.columns) if axis == COLUMNS else full
                for axis, full in ((row_axis, a.shape[2]), (summed_axis, a.shape[3]))
            )
            a = xp.broadcast_to(a, (len(tile.batch), len(tile.heads), rows, terms))
        if node.k is not None:
            length = max(0, tile.number(node.k) - tile.start(summed_axis))
            if length < max(a.shape[3], b.shape[2]):
                a, b = a[..., :length], b[..., :length, :]
                memory = buffers.NO_MEMORY  # another tile with the same lengths may have another number of terms
        if group is None:
            out = _product(a, b, memory, name, None if scale is None else tile.values[scale])
        else:
            out = _sum_of_products(a, b, group, memory, name)
        if node.m is not None:
            out[:, :, max(0, tile.number(node.m) - tile.start(row_axis)) :] = 0
        if node.n is not None:
            out[..., max(0, tile.number(node.n) - tile.start(column_axis)) :] = 0
        if divides:
            out = _quotient(out, a, b, tile.values.pop(sums), out if target is None else target(tile))
        return tile.add_to_rows(node.out, out) if added else out

    return compute


def _quotient(product: Array, a: Array, b: Array, total: Array, out: Array) -> Array:
    """Divide ``product = a b`` by the row sums of a, into ``out``. The product may overflow where the quotient does not."""
    numbers = product.reshape(-1)
    if math.isfinite(numbers.dot(numbers)):
        return _divided(product, total, np, out)
    finite = np.isfinite(product).all(axis=-1, keepdims=True)
    _divided(product, total, np, out)
    np.copyto(out, _product(_divided(a.copy(), total, np), b, TileMemory(), ""), where=~finite)
    return out


def _sums_name(weights: Tensor) -> str:
    """Return the name of the row sums of softmax weights that are not yet divided by them."""
    return f"sums of {weights.name}"


def _product(a: Array, b: Array, memory: TileMemory, name: str, scale: float | None = None) -> Array:
    """Return ``scale a b`` for each batch item and head; heads that share a head of b are stacked into one matrix."""
    arrays = memory.get(name)
    if arrays is None:
        if type(a) is not np.ndarray:
            batch, heads, rows, terms = a.shape
            of_b = (batch, b.shape[1], _group(a, b) * rows, terms)
            return (a.reshape(of_b) @ b).reshape(batch, heads, rows, b.shape[3])
        arrays = memory.setdefault(name, _product_arrays(a, b, scaled=scale is not None))
    result, stacked, left, shape, operand, product, turned = arrays
    if left is None:
        operand = a.reshape(shape)
    elif scale is None:
        left[...] = a.reshape(shape)
    else:
        np.multiply(a.reshape(shape), scale, out=left, dtype=left.dtype)
    if product is None:
        np.matmul(operand, b, out=stacked)
    else:
        np.matmul(b.swapaxes(-1, -2), operand, out=product)
        stacked[...] = turned
    return result  # type: ignore[no-any-return]


def _group(a: Array, b: Array) -> int:
    """Return how many heads of a share a head of b."""
    heads, shared = a.shape[1], b.shape[1]
    return heads // shared if heads != shared else 1


class _ProductArrays(NamedTuple):
    """The arrays of a product ``scale a b``.

    Attributes:
        result: the product; ``stacked`` is a view of it with stacked heads.
        left: a view of ``operand`` with separate heads, where ``scale a`` is written; None if a itself is multiplied.
        shape: the shape in which a is written to ``left`` or, without ``left``, multiplied.
        operand: the left operand, transposed if the product is; None if a itself is multiplied.
        product: the transposed product, or None; ``turned`` is a view of it with the axes of ``stacked``.
    """

    result: Array
    stacked: Array
    left: Array | None
    shape: tuple[int, ...]
    operand: Array | None = None
    product: Array | None = None
    turned: Array | None = None


def _product_arrays(a: Array, b: Array, *, scaled: bool) -> _ProductArrays:
    batch, heads, rows, terms = a.shape
    shared, columns = b.shape[1], b.shape[3]
    group, dtype = _group(a, b), b.dtype.newbyteorder("=")
    result = buffers.empty((batch, heads, rows, columns), dtype)
    shape = (batch, shared, group * rows, terms)
    stacked = result.reshape(batch, shared, group * rows, columns)
    separate = (batch, shared, group, rows, terms)
    if columns >= _MANY_COLUMNS and 1 < group * rows <= _FEW_ROWS and b.strides[3] > b.strides[2]:
        operand = buffers.empty((batch, shared, terms, group * rows), dtype)
        left = operand.reshape(batch, shared, terms, group, rows).transpose(0, 1, 3, 4, 2)
        product = buffers.empty((batch, shared, columns, group * rows), dtype)
        return _ProductArrays(result, stacked, left, separate, operand, product, product.swapaxes(-1, -2))
    if scaled:
        operand = buffers.empty(shape, dtype)
        return _ProductArrays(result, stacked, operand.reshape(separate), separate, operand)
    return _ProductArrays(result, stacked, None, shape)


#: Up to this number of rows and from this number of columns, ``b^T a^T`` with a copy of ``a^T`` is faster than ``a b`` if b is
#: a transposed matrix, which OpenBLAS would otherwise pack.
_FEW_ROWS, _MANY_COLUMNS = 32, 256


def _sum_of_products(a: Array, b: Array, group: int, memory: TileMemory, name: str) -> Array:
    """Return the sum of ``a b`` over each group of heads as one product of all their rows. ``a`` is a transposed matrix."""
    batch, heads, columns, rows = a.shape
    left = a.swapaxes(-1, -2).reshape(batch, heads // group, group * rows, columns).swapaxes(-1, -2)
    right = b.reshape(batch, heads // group, group * rows, b.shape[3])
    if type(left) is not np.ndarray:
        return left @ right
    return memory.setdefault(name, np.matmul(left, right, out=memory.get(name)))  # type: ignore[no-any-return]


def _paged_load(node: PagedLoad, compiler: Compiler) -> Compute:
    """Gather the pages with rows before the length; later rows are 0. All tiles of the same heads share the result."""
    name, xp = node.out.name, compiler.xp

    def compute(tile: Tile) -> Array:
        if name not in tile.cache:
            views, length = tile.run.views, tile.number(node.lengths)
            pages = views[node.pages.name]
            page, columns = pages.shape[2:]
            used = xp.asarray(views[node.table.name][tile.batch.start, 0, : -(-length // page), 0])
            # the order in memory: pages, rows, heads, columns
            rows = pages[:, tile.heads_of(pages)].transpose(0, 2, 1, 3)[used].astype(compiler.dtype, copy=False)
            rows = rows.reshape(len(used) * page, rows.shape[2], columns)[:length]
            if length < tile.columns.stop:
                rows = xp.pad(rows, [(0, tile.all_columns - length), (0, 0), (0, 0)])
            tile.cache[name] = rows.transpose(1, 2, 0)[None] if node.transposed else rows.transpose(1, 0, 2)[None]
        value, columns = tile.cache[name], tile.part(COLUMNS, tile.all_columns)
        return value[..., columns] if node.transposed else value[..., columns, :]

    return compute


def _softmax(node: Softmax, compiler: Compiler) -> Compute:
    xp, dtype, lowest = compiler.xp, compiler.dtype, np.finfo(compiler.dtype).min
    of_x, in_place = compiler.read(node.x), compiler.gives_memory(node.x)
    of_sink, of_scale = (None if t is None else compiler.read(t) for t in (node.sink, node.scale))
    sums = _sums_name(node.out) if xp is np and node.out.name in compiler.analysis.undivided else None
    stats = node.stats.name if node.stats and compiler.is_needed(node.stats) else None
    name = node.out.name
    of_top, of_total = f"maxima of {name}", _sums_name(node.out)

    def compute(tile: Tile) -> Array:
        values, memory = tile.values, tile.memory
        x: Array = values[of_x]
        sink = None if of_sink is None else values[of_sink]
        if sink is not None and node.rows is not None:
            valid = xp.arange(tile.rows.start, tile.rows.start + x.shape[2])[:, None] < tile.number(node.rows)
            sink = xp.where(valid, sink, -np.inf).astype(dtype)
        if xp is np:
            # m = max(x) with the sink, at least the lowest finite number: exp(-inf - m) is then 0, but exp(-inf + inf) is NaN
            top = np.maximum.reduce(x, axis=-1, keepdims=True, initial=lowest, out=memory.get(of_top))
            memory.setdefault(of_top, top)
            if sink is not None:
                top = np.maximum(top, sink)
            # p = exp(x - m)
            p: Array = np.subtract(x, top, out=x if in_place else buffers.empty(x.shape, dtype))
            np.exp(p, out=p)
            # l = sum(p), with the sink
            total = np.add.reduce(p, axis=-1, keepdims=True, out=memory.get(of_total))
            memory.setdefault(of_total, total)
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
        if of_scale is not None:
            # p = round(scale p): then p is in units of FP8
            p *= values[of_scale]
            p = p if compiler.exact else rounded(p, node.out.dtype).astype(dtype)
        # stats = m + log(l); a row of -inf gives log 0 = -inf
        if stats is not None:
            values[stats] = top + np.log(total) if xp is np else log_sum_exp(top, total)
        if node.max is not None:
            values[node.max.name] = np.where(total == 0, -np.inf, top).astype(dtype) if xp is np else top
        if node.sum_exp is not None:
            values[node.sum_exp.name] = total.copy()
        # p = p / l, here or, with numpy, after the product that reads p
        if sums is None:
            return _divided(p, total, xp)
        values[sums] = total
        return p

    return compute


def _divided(x: Array, total: Array, xp: Any, out: Array | None = None) -> Array:
    """Divide x by its row sums, into ``out`` or in place; rows without a key by 1, which is also written to ``total``.

    All other sums are at least 1.
    """
    if xp is not np:
        return divide_by_sums(x, total)  # type: ignore[no-any-return]
    return np.divide(x, np.maximum(total, _ONE, out=total), out=x if out is None else out)


#: numpy would convert a number of Python in every call.
_ONE = np.float32(1)


def _row_maxima(x: Array) -> Array:
    """Return the largest element of each row of a CuPy array, -inf for empty rows: CuPy's reductions take no initial value."""
    return x.max(axis=-1, keepdims=True) if x.shape[-1] else x.sum(axis=-1, keepdims=True) - np.inf  # type: ignore[no-any-return]


def _bernoulli(node: Bernoulli, compiler: Compiler) -> Compute:
    """Draw 32 random bits per element with Philox (Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3").

    cuDNN draws different numbers. Both depend only on the seed, the offset and the element's indices. In units of the offset,
    consecutive heads, counted through all batch items, are :data:`OFFSET_OF_HEADS` apart.
    """
    from ..problem.slices import OFFSET_OF_HEADS

    xp, (_, heads, _, columns) = compiler.xp, node.out.shape
    words = -(-columns // 8) * 4  # the number of 64-bit words per row, a multiple of Philox's block of four

    def compute(tile: Tile) -> Array:
        seed, offset = (int(tile.run.views[t.name][0, 0, 0, 0]) for t in (node.seed, node.offset))
        rows, first = len(tile.rows), tile.rows.start * words // 4
        kept: Array = xp.empty((len(tile.batch), len(tile.heads), rows, len(tile.columns)), compiler.dtype)
        for entry in tile.batch:
            for head in tile.heads:
                key = seed % 2**64, (offset + OFFSET_OF_HEADS * (entry * heads + head)) % 2**64
                if xp is np:
                    source = np.random.Philox(key=key)
                    source.advance(first)
                    numbers = source.random_raw(rows * words)
                else:
                    numbers = philox(key, (first, 0, 0, 0), rows * words)
                bits = numbers.view(np.uint32).reshape(rows, 2 * words)[:, tile.columns.start : tile.columns.stop]
                kept[entry - tile.batch.start, head - tile.heads.start] = bits < np.uint64(round(node.probability * 2**32))
        return kept

    return compute


def _pointwise(node: Pointwise, compiler: Compiler) -> Compute:
    return POINTWISE[node.mode](node, compiler)


def _masked(node: Masked, compiler: Compiler) -> Compute:
    """Write -inf where a condition does not hold; columns where every row satisfies it are skipped."""
    of_x, in_place = compiler.read(node.x), compiler.gives_memory(node.x, node.out)

    def compute(tile: Tile) -> Array:
        x: Array = tile.values[of_x]
        if not in_place:
            x = np.broadcast_to(x, (*x.shape[:2], len(tile.rows), len(tile.columns))).copy()
        row, column = tile.rows.start, tile.columns.start
        for condition in node.conditions:
            bound = tile.run.bound(condition, tile.batch.start)
            every = bound.columns(tile.rows, tile.columns, every=True)
            for part in (
                (range(tile.columns.start, every.start), range(every.stop, tile.columns.stop)) if every else (tile.columns,)
            ):
                if part:
                    most = bound.most - bound.row * row - bound.column * part.start
                    hidden = _hidden(bound.row, bound.column, most, x.shape[2], len(part))
                    np.copyto(x[..., part.start - column : part.stop - column], -np.inf, where=hidden)
        return x

    return compute


@functools.lru_cache(8)
def _hidden(row: int, column: int, most: int, rows: int, columns: int) -> Array:
    """Return where ``row i + column j > most``. Tiles at the edge of a causal mask or a window share the result."""
    return row * np.arange(rows)[:, None] > most - column * np.arange(columns)


def _fused(node: Fused, compiler: Compiler) -> Compute:
    xp, dtype, operands = compiler.xp, compiler.dtype, compiler.operands(node.inputs)
    positions = [part for part in node.parts if part.mode == "gen_index"]

    def compute(tile: Tile) -> Array:
        given = operands(tile.values)
        shapes = [*(getattr(x, "shape", ()) for x in given), *(_index_shape(part, tile) for part in positions)]
        shape = np.broadcast_shapes((1, 1, 1, 1), *shapes)
        dtypes = (x.dtype.name if hasattr(x, "dtype") else "int64" if isinstance(x, int) else dtype.name for x in given)
        kernel, of_result = node.kernel(tuple(dtypes), dtype.name)
        starts = (tile.batch.start, tile.heads.start, tile.rows.start, tile.columns.start)
        return kernel(*given, *starts, *shape[1:], xp.empty(shape, of_result))  # type: ignore[no-any-return]

    return compute


def _reduction(node: Reduction, compiler: Compiler) -> Compute:
    name, of_x, xp = node.out.name, compiler.read(node.x), compiler.xp
    is_total, sums_rows = name in compiler.analysis.sums, node.out.shape[3] == 1 and node.x.shape[3] > 1
    is_summed = node.x.name in compiler.analysis.grouped  # the product already is this sum
    group = node.x.shape[1] // node.out.shape[1]

    def compute(tile: Tile) -> Array | None:
        x: Array = -tile.values[of_x] if node.negative else tile.values[of_x]
        if node.amax:
            tile.add_to_largest(node.out, x)
            return None
        if is_total:
            tile.add_to_total(node.out, x)
            return None
        if sums_rows:
            if xp is not np:
                return x.sum(axis=-1, keepdims=True)  # type: ignore[no-any-return]
            memory = tile.memory
            return memory.setdefault(name, np.add.reduce(x, axis=-1, keepdims=True, out=memory.get(name)))  # type: ignore[no-any-return]
        if is_summed:
            return x
        batch, heads, rows, columns = x.shape
        return x.reshape(batch, heads // group, group, rows, columns).sum(axis=2)  # type: ignore[no-any-return]

    return compute


def _transpose(node: Transpose, compiler: Compiler) -> Compute:
    of_x = compiler.read(node.x)
    return lambda tile: tile.values[of_x].swapaxes(-1, -2)


def _index_shape(node: Pointwise, tile: Tile) -> tuple[int, int, int, int]:
    """Return the shape of indices: a vector, which is broadcast where it is read."""
    shape = [1, 1, 1, 1]
    shape[node.axis or 0] = len(_positions(node, tile))
    return (shape[0], shape[1], shape[2], shape[3])


def _positions(node: Pointwise, tile: Tile) -> range:
    """Return the tile's positions along a node's axis."""
    axis = node.axis or 0
    if axis < 2:
        return (tile.batch, tile.heads)[axis]
    label = tile.run.analysis.axes[node.x.name][axis - 2]
    return {ROWS: tile.rows, COLUMNS: tile.columns}.get(label or "", range(node.x.shape[axis]))


def _gen_index(node: Pointwise, compiler: Compiler) -> Compute:
    def compute(tile: Tile) -> Array:
        positions = _positions(node, tile)
        indices = compiler.xp.arange(positions.start, positions.stop, dtype=np.int64)
        return indices.reshape(_index_shape(node, tile))  # type: ignore[no-any-return]

    return compute


def _operands(node: Pointwise) -> list[Tensor]:
    return [t for t in (node.x, node.b, node.t) if t is not None]


def _select(node: Pointwise, compiler: Compiler) -> Compute:
    operands, in_place = compiler.operands(_operands(node)), compiler.gives_memory(node.x, node.b, node.t)

    def compute(tile: Tile) -> Array:
        x, other, condition = operands(tile.values)
        condition = condition != 0  # it may be numbers, 1 and 0
        if compiler.xp is not np:
            return compiler.xp.where(condition, x, other).astype(x.dtype, copy=False)  # type: ignore[no-any-return]
        if not in_place:
            return np.where(condition, x, np.asarray(other, x.dtype))
        np.copyto(x, other, where=~condition)
        return x  # type: ignore[no-any-return]

    return compute


def _truncated_division(x: Array, b: Array) -> Array:
    quotient = x // b  # rounds down; faster than numpy's remainder
    return quotient + ((quotient < 0) & (quotient * b != x))  # type: ignore[no-any-return]


def _elementwise(mode: str, integer: Callable[..., Array] | None = None) -> Callable[[Pointwise, Compiler], Compute]:
    """Return the rule of an elementwise mode: it computes a condition, 64-bit integers, or the evaluation's dtype."""
    name = MODES[mode].numpy
    assert isinstance(name, str), mode

    def rule(node: Pointwise, compiler: Compiler) -> Compute:
        function, operands = getattr(compiler.xp, name), compiler.operands(_operands(node))
        if mode in CONDITIONS:
            return lambda tile: function(*operands(tile.values))
        if node.out.dtype.startswith("int"):
            of_integers = integer or function
            return lambda tile: of_integers(*operands(tile.values))
        of_x, of_result, dtype = compiler.read(node.x), node.out.name, compiler.dtype
        if compiler.gives_memory(node.x, node.b):
            return lambda tile: function(*operands(tile.values), out=tile.values[of_x], dtype=dtype)
        if compiler.xp is not np:
            return lambda tile: function(*operands(tile.values), dtype=dtype)

        def compute(tile: Tile) -> Array:
            memory = tile.memory
            result = function(*operands(tile.values), out=memory.get(of_result), dtype=dtype, order="C")
            return memory.setdefault(of_result, result)  # type: ignore[no-any-return]

        return compute

    return rule


def _rsqrt(node: Pointwise, compiler: Compiler) -> Compute:
    of_x, sqrt = compiler.read(node.x), compiler.xp.sqrt
    return lambda tile: 1 / sqrt(tile.values[of_x])


def _erf(node: Pointwise, compiler: Compiler) -> Compute:
    of_x, function = compiler.read(node.x), MODES["erf"].numpy if compiler.xp is np else erf
    return lambda tile: function(tile.values[of_x]).astype(compiler.dtype)  # type: ignore[operator]


def _identity(node: Pointwise, compiler: Compiler) -> Compute:
    of_x = compiler.read(node.x)
    return lambda tile: tile.values[of_x]


#: What each pointwise mode of a graph means.
POINTWISE: dict[str, Callable[[Pointwise, Compiler], Compute]] = {
    **{mode: _elementwise(mode) for mode, of in MODES.items() if isinstance(of.numpy, str) and isinstance(of.cudnn, str)},
    "div": _elementwise("div", _truncated_division),
    "rsqrt": _rsqrt,
    "erf": _erf,
    "identity": _identity,
    "gen_index": _gen_index,
    "binary_select": _select,
}

#: What each node means.
COMPILER_RULES: dict[type[Node], Callable[[Any, Compiler], Compute]] = {
    Bernoulli: _bernoulli,
    Checked: checked,
    Fused: _fused,
    Masked: _masked,
    Matmul: _matmul,
    PagedLoad: _paged_load,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}
