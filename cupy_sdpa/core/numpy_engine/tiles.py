"""Tiles: the interpreter computes one block of rows of some heads and batch items at a time, with the columns they attend to.

Attention of 4096 queries to 4096 keys therefore takes megabytes, not gigabytes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..graph.nodes import Bernoulli, Graph, Matmul, Node, PagedLoad, Pointwise, Reduction, Softmax, Tensor
from ..runtime.cupy_runtime import cupy
from ..runtime.interpreted_array import on_host, plain
from . import buffers
from .axes import COLUMNS, ROWS, RowBlocks, matrix_axes
from .bands import Bands, Bound, Linear, masked, scaled_products, without_unread
from .fusion import fuse

if TYPE_CHECKING:
    from numpy.typing import NDArray  # slow to import

    Array = NDArray[Any]
#: The elements of a tile of scores on the CPU.
TILE_ELEMENTS = buffers.NBYTES // 4
#: The elements of a tile on a GPU: 64 MiB in float32. Smaller tiles launch more kernels: with a quarter of the elements, both
#: passes of 16384 queries take 3 times as long on an H200; with twice as many elements, they take 7 % less time.
GPU_TILE_ELEMENTS = 1 << 24
#: With a mask on positions, a tile has only an eighth of the rows, so that masked columns are skipped; but at least these.
MASKED_ROWS, GPU_MASKED_ROWS = 64, 1024

_ALL = slice(None)
_DTYPES = {name: np.dtype(name) for name in ("float32", "float64")}


class TilePlace(NamedTuple):
    """A block of rows and columns, for some heads of some batch items.

    Attributes:
        batch, heads, rows, columns: the block.
        all_rows, all_columns: how many rows and columns its batch items have.
        last: True if the block contains its heads' last rows.
        is_whole: True if the block is the graph's only one.
        lengths: the lengths of the block, then all_rows and all_columns: only these determine the shapes of all values.
    """

    batch: range
    heads: range
    rows: range
    columns: range
    all_rows: int
    all_columns: int
    last: bool
    is_whole: bool
    lengths: tuple[int, ...]


class Analysis:
    """What all evaluations of a graph share.

    Attributes:
        views: for each caller's array: its name, its axes, and the index that adds new axes.
        axes: what every tensor's last two axes are; see :func:`.matrix_axes`.
        products: by the name of a product's result: its row axis, its column axis, and the axis that it sums over.
        grouped: the products that only a sum over groups of heads reads, with the heads of a group; the product computes this
            sum directly.
        narrow: the products whose left operand does not depend on the scores, and may be a row, a column, or shared by all
            heads.
        undivided: the softmax weights that only a product reads: the product is divided by the row sums instead of the weights.
        on_host: the names of the integers that the interpreter reads one by one: lengths, offsets, page tables and seeds.
        nodes: the nodes that numpy computes; ``is_small``: True if a thread keeps the memory of all their results.
        sums: the shapes of the sums over tiles, by the result's name; ``over_tiles``: also the largest magnitudes.
        lengths: each batch item's lengths, if only these queries and keys are computed.
        by_entry: True if a tile has a single batch item, because each item has its own lengths.
        blocks: how to compute a block of rows without the other rows; None if that is impossible.
        later: see :class:`.RowBlocks`; ``partial``: the later results that are not sums over the blocks.
        scales: the factors of products, by their results' names.
        inputs: the inputs by name; ``direct``: the inputs that are read without conversion.
        visible: the conditions on positions that hold wherever a weight is not 0; ``bounds``: these conditions as
            :class:`.Bound`; None if they depend on variables or on a batch item's lengths.
        shape: batch, heads, rows and columns of the scores; ``group``: how many heads are computed together.
    """

    def __init__(self, graph: Graph) -> None:
        nodes = graph.nodes
        self.views = [(t.name, *_axes(t)) for t in graph.by_role("input", "output")]
        self.constants = {t.name: _constant(t) for t in graph.by_role("constant")}
        self.scalars = graph.by_role("scalar")
        self.axes = matrix_axes(graph)
        host = {t.name for node in nodes for t in _read_on_host(node)}
        self.on_host = host | {t.name for node in nodes for t in _seeds(node)}
        self.by_entry = bool(host)
        self.sums = {node.out.name: node.out.shape for node in nodes if _sums_over_tiles(node)}
        self.over_tiles = {*self.sums, *(node.out.name for node in nodes if isinstance(node, Reduction) and node.amax)}
        self.packed = {t.name for t in graph.tensors if _is_packed(t)}
        self.lengths = _packed_lengths(graph)
        self.blocks = RowBlocks.of(graph, self.axes)
        self.later = self.blocks.later if self.blocks else frozenset[str]()
        self.partial = self.later - self.blocks.summed if self.blocks else self.later
        self.bands = Bands(graph, self.axes, host)
        self.visible = self.bands.visible if self.blocks else ()
        constant = not self.by_entry and not any(condition.variables for condition in self.visible)
        self.bounds = (*(Bound(c.row, c.column, -c.number) for c in self.visible),) if constant else None
        self._graph = graph
        kept = without_unread([masked(node, self.bands) for node in nodes])
        rewritten, self.scales = scaled_products(kept, graph.compute_dtype)
        self.nodes = rewritten
        elements = sum(math.prod(node.out.shape) for node in nodes)
        self.is_small = elements * _DTYPES[graph.compute_dtype].itemsize <= buffers.NBYTES
        #: The steps for each kind of tile and evaluation; see :func:`.steps.steps_of`.
        self.steps: dict[tuple[bool, ...], list[Any]] = {}
        self.products = {
            node.out.name: (self.axes[node.a.name][0], self.axes[node.b.name][1], self.axes[node.b.name][0])
            for node in (*nodes, *rewritten)
            if isinstance(node, Matmul)
        }
        scores = [node.out.shape for node in nodes if isinstance(node, Matmul)][:1] or [node.out.shape for node in nodes]
        self.shape: tuple[int, ...] = tuple(map(max, zip(*scores, strict=True)))
        self.group = math.lcm(1, *(self.shape[1] // t.shape[1] for node in nodes for t in _grouped(node)))
        self.grouped, self.undivided = _merged_steps(graph)
        self.narrow = _narrow_products(graph)
        self.inputs = {t.name: t for t in graph.by_role("input")}
        self.direct = [n for n, t in self.inputs.items() if t.dtype == graph.compute_dtype and n not in self.packed]
        #: The conditions and the places of the last evaluation, by whether a GPU computes and by the elements of a tile.
        self._places: dict[tuple[bool, int], tuple[tuple[Bound, ...], list[TilePlace]]] = {}

    @functools.cached_property
    def fused_nodes(self) -> list[Node]:
        """The nodes for CuPy arrays, with pointwise nodes fused."""
        return fuse(self._graph)

    def places(self, bounds: tuple[Bound, ...], *, on_gpu: bool) -> list[TilePlace]:
        """Return the places of all tiles, and keep them; batch items must not have their own lengths."""
        kind = on_gpu, GPU_TILE_ELEMENTS if on_gpu else TILE_ELEMENTS
        known, found = self._places.get(kind, ((), []))
        if not found or known != bounds:
            batch, _, rows, columns = self.shape
            *_, entries = self.block(rows, columns, on_gpu=on_gpu)
            groups = (range(b, min(batch, b + entries)) for b in range(0, batch, entries))
            found = [place for group in groups for place in self.places_of(group, rows, columns, bounds, on_gpu=on_gpu)]
            self._places[kind] = bounds, found
        return found

    def places_of(self, batch: range, rows: int, columns: int, bounds: Sequence[Bound], *, on_gpu: bool) -> Iterator[TilePlace]:
        """Yield the places of some batch items' tiles, in the order of heads and rows."""
        heads = self.shape[1]
        step, tile_heads, _ = self.block(rows, columns, on_gpu=on_gpu)
        every = range(columns)
        for h in range(0, heads, tile_heads):
            for start in range(0, max(1, rows), step):
                part = range(start, min(rows, start + step))
                visible = _visible_columns(bounds, part, every) if bounds and columns > 1 else every
                block = (batch, range(h, min(heads, h + tile_heads)), part, visible)
                lengths = (*map(len, block),)
                yield TilePlace(*block, rows, columns, part.stop >= rows, lengths == self.shape, (*lengths, rows, columns))

    def block(self, rows: int, columns: int, *, on_gpu: bool) -> tuple[int, int, int]:
        """Return how many rows, heads and batch items a tile has."""
        batch, heads, *_ = self.shape
        elements, fine = (GPU_TILE_ELEMENTS, GPU_MASKED_ROWS) if on_gpu else (TILE_ELEMENTS, MASKED_ROWS)
        of_row = max(1, columns) * self.group
        step = max(1, min(rows, elements // of_row)) if self.blocks else max(1, rows)
        if any(condition.row and condition.column for condition in self.visible):
            step = min(step, max(fine, -(-rows // 8)))
        groups = max(1, min(heads // self.group, elements // (of_row * step)))
        entries = 1  # 1 on a GPU: with more matrices, a product may run another kernel, so bits would depend on the batch
        if groups * self.group == heads and not self.by_entry and not on_gpu:
            entries = max(1, min(batch, elements // (max(1, columns) * heads * step)))
        return step, groups * self.group, entries


def analyze(graph: Graph) -> Analysis:
    """Return the analysis of a graph, which the graph keeps."""
    found: Analysis | None = graph.notes.get("analysis")
    if found is None:
        found = graph.notes["analysis"] = Analysis(graph)
    return found


class Evaluation:
    """The evaluation of a graph: the state that all tiles share.

    A thread keeps the evaluations of small graphs for its next calls, each of which begins with :meth:`begin`.
    :func:`.evaluate` and :class:`Analysis` describe the arguments and the other attributes.

    Attributes:
        keeps: True if the thread keeps the evaluation after the call.
        only: the tile that is the whole graph, if every call has only this tile; otherwise empty.
        memories, earlier: the memory of this call's tiles and of the last call's tiles, by :attr:`TilePlace.lengths`.
        xp: the arrays' module, numpy or CuPy.
        views: the caller's arrays with the axes of their tensors, by name.
        dtype: the dtype of intermediate results.
        row_sums: unfinished sums over the tiles of some heads.
        totals, largest: the sums over tiles and the largest magnitudes so far, by the result's name.
    """

    def __init__(self, graph: Graph, exact: bool, *, keeps: bool) -> None:
        self.analysis = analysis = analyze(graph)
        self.exact, self.keeps = exact, keeps
        self.heads = analysis.shape[1]
        self.later = analysis.later
        self.dtype_name = "float64" if exact else graph.compute_dtype
        self.dtype = _DTYPES[self.dtype_name]
        self.direct = () if exact and graph.compute_dtype != "float64" else analysis.direct
        self.only: tuple[Tile, ...] = ()
        self.memories: dict[tuple[int, ...], buffers.TileMemory] = {}
        self.views: dict[str, Array] = {}
        self.scalars: dict[str, Any] = {}
        self.row_sums: dict[str, Array] = {}
        self.totals: dict[str, Array] = {}
        self.largest: dict[str, Any] = {}

    def begin(self, arrays: Mapping[str, Array], scalars: Mapping[str, float], check: Any) -> None:
        """Begin a call with these arrays, scalars and checks."""
        analysis, views = self.analysis, self.views
        self.check = check
        self.xp: Any = np
        if analysis.constants:
            views.update(analysis.constants)
        for name, axes, new_axes in analysis.views:
            array = arrays[name]
            if type(array) is not np.ndarray:
                array = on_host(array) if name in analysis.on_host else plain(array)
                self.xp = self.xp if isinstance(array, np.ndarray) else cupy()
            view = array.transpose(axes)
            views[name] = view[new_axes] if new_axes else view
        for t in analysis.scalars:
            self.scalars[t.name] = scalars[t.name] if t.value is None else t.value
        for name, shape in analysis.sums.items():
            self.totals[name] = self.xp.zeros(shape, self.dtype)
        self.largest.clear()
        for tile in self.only:
            tile.values.update(self.scalars)
            for name in self.direct:
                tile.values[name] = views[name]
        if not self.only:
            self.earlier, self.memories = self.memories, {}

    def end(self) -> None:
        """End a call: forget its arrays."""
        self.views.clear()
        self.check = None
        for tile in self.only:
            tile.values.clear()
            tile.cache.clear()

    def memory(self, place: TilePlace) -> buffers.TileMemory:
        """Return a tile's memory. Tiles with the same lengths share it, in this call and in the next one."""
        if not self.keeps:
            return buffers.NO_MEMORY
        if place.lengths not in self.memories:
            self.memories[place.lengths] = self.earlier.get(place.lengths, buffers.TileMemory())
        return self.memories[place.lengths]

    def tiles(self) -> Iterator[Tile]:
        """Yield all tiles, in the order of batch items, heads and rows."""
        cache: dict[str, Array] = {}
        analysis = self.analysis
        bounds = analysis.bounds
        if bounds is None and not analysis.by_entry:
            bounds = (*(self.bound(condition, 0) for condition in analysis.visible),)
        for place in self._places_by_entry() if bounds is None else analysis.places(bounds, on_gpu=self.xp is not np):
            if place.rows.start == 0:
                cache = {}  # these heads' keys and values: the same for every block of queries
            tile = Tile(self, place, cache)
            if self.keeps and place.is_whole and analysis.bounds is not None:
                self.only = (tile,)
            yield tile

    def _places_by_entry(self) -> Iterator[TilePlace]:
        """Yield the places of all tiles, with each batch item's lengths."""
        analysis, on_gpu = self.analysis, self.xp is not np
        batch, _, rows, columns = analysis.shape
        for b in range(batch):
            if analysis.lengths:
                rows, columns = (int(self.views[tensor.name][b, 0, 0, 0]) for tensor in analysis.lengths)
            bounds = [self.bound(condition, b) for condition in analysis.visible]
            yield from analysis.places_of(range(b, b + 1), rows, columns, bounds, on_gpu=on_gpu)

    def bound(self, condition: Linear, entry: int) -> Bound:
        """Return a condition with the values of its variables: a batch item's lengths and the numbers of functions."""
        number = condition.number
        for name, times in condition.variables:
            number += times * int(self.scalars[name] if name in self.scalars else self.views[name][entry, 0, 0, 0])
        return Bound(condition.row, condition.column, -number)


class Tile:
    """A place, and the tensors' values there: arrays with four axes.

    Attributes:
        batch, heads, rows, columns, all_rows, all_columns, last, is_whole, lengths: see :class:`TilePlace`.
        cache: the values of tensors without rows, which all tiles of the heads share.
        values: the tensors computed or read so far, in ``run.dtype``, and the scalars.
        memory: the arrays that the steps of an earlier tile of the same size wrote; see :class:`.buffers.TileMemory`.
        steps: the steps that :func:`.steps.steps_of` sets.
    """

    __slots__ = (
        "all_columns", "all_rows", "batch", "cache", "columns", "heads", "is_whole", "last", "lengths", "memory", "rows", "run",
        "steps", "values",
    )  # fmt: skip

    def __init__(self, run: Evaluation, place: TilePlace, cache: dict[str, Array]) -> None:
        self.batch, self.heads, self.rows, self.columns, self.all_rows, self.all_columns = place[:6]
        self.last, self.is_whole, self.lengths = place[6:]
        self.run, self.memory = run, run.memory(place)
        self.steps: list[Any] = []
        self.cache = cache
        self.values: dict[str, Any] = {**run.scalars}
        if self.is_whole:
            for name in run.direct:
                self.values[name] = run.views[name]

    def read(self, tensor: Tensor) -> Any:
        """Read an input. Tensors without rows that need a conversion are read once for all tiles of the heads."""
        name, run = tensor.name, self.run
        row_axis, column_axis = run.analysis.axes[name]
        kept = ROWS not in (row_axis, column_axis) and (tensor.dtype != run.dtype_name or name in run.analysis.packed)
        value = self.cache.get(name) if kept else None
        if value is None:
            value = run.xp.asarray(self.part_of(tensor, every_column=kept))
            if value.dtype.kind != "b":
                value = value.astype(np.int64 if value.dtype.kind == "i" else run.dtype, copy=False)
        if kept:
            self.cache[name] = value
            value = value[..., self.part(row_axis, value.shape[2]), self.part(column_axis, value.shape[3])]
        return value

    def number(self, tensor: Tensor) -> int:
        """Return this batch item's integer in an input in host memory, such as the lengths."""
        return int(self.run.views[tensor.name][self.batch.start, 0, 0, 0])

    def start(self, axis: str | None) -> int:
        """Return the tile's first position along a matrix axis."""
        return self.rows.start if axis == ROWS else self.columns.start if axis == COLUMNS else 0

    def part(self, axis: str | None, length: int) -> slice:
        """Return the part of an array's axis that the tile reads or writes; an axis of length 1 is broadcast."""
        if length == 1 or axis is None:
            return _ALL
        return slice(self.rows.start, self.rows.stop) if axis == ROWS else slice(self.columns.start, self.columns.stop)

    def add_to_rows(self, tensor: Tensor, value: Array) -> Array | None:
        """Add to a sum over some heads' tiles; return the sum in the last tile, else None."""
        by_columns = self.run.analysis.axes[tensor.name][0] == COLUMNS
        sums = self.run.row_sums.get(tensor.name)
        if sums is None and self.last and not (by_columns and len(self.columns) < self.all_columns):
            return value
        if sums is None:
            rows = self.all_columns if by_columns else value.shape[2]
            sums = self.run.xp.zeros((*value.shape[:2], rows, value.shape[3]), self.run.dtype)
            self.run.row_sums[tensor.name] = sums
        sums[:, :, self.part(COLUMNS if by_columns else None, sums.shape[2])] += value
        return self.run.row_sums.pop(tensor.name) if self.last else None

    def add_to_total(self, tensor: Tensor, value: Array) -> None:
        """Add to a sum over tiles: over the batch, the heads, the rows or the columns."""
        b, h, rows, columns = tensor.shape
        part = self.run.totals[tensor.name][
            slice(self.batch.start, self.batch.stop) if b > 1 else _ALL,
            slice(self.heads.start, self.heads.stop) if h > 1 else _ALL,
            slice(self.rows.start, self.rows.stop) if rows > 1 else _ALL,
            slice(self.columns.start, self.columns.stop) if columns > 1 else _ALL,
        ]
        summed = tuple(axis for axis, length in enumerate(tensor.shape) if length == 1)
        part += value.sum(axis=summed, keepdims=True) if summed else value

    def add_to_largest(self, tensor: Tensor, value: Array) -> None:
        """Update the largest magnitude over all tiles."""
        largest, name = self.run.largest, tensor.name
        largest[name] = np.maximum(largest.get(name, 0.0), np.abs(value).max(initial=0))  # for FP8, only on the CPU
        self.run.views[name][...] = largest[name]

    def part_of(self, tensor: Tensor, *, writes: bool = False, every_column: bool = False) -> Array:
        """Return the part of an array that the tile reads or writes. Sums over rows, and what reads them, have all columns."""
        name, run = tensor.name, self.run
        row_axis, column_axis = run.analysis.axes[name]
        if name in run.analysis.packed:
            return self._sequence(tensor, writes=writes, every_column=every_column)
        view: Array = run.views[name]
        if self.is_whole:
            return view
        if every_column or (writes and name in run.later):
            row_axis = column_axis = None
        return view[
            slice(self.batch.start, self.batch.stop) if view.shape[0] > 1 else _ALL,
            self.heads_of(view),
            self.part(row_axis, view.shape[2]),
            self.part(column_axis, view.shape[3]),
        ]

    def _sequence(self, tensor: Tensor, *, writes: bool, every_column: bool) -> Array:
        """Return this batch item's part of a packed tensor: its sequence, up to the graph's number of positions.

        When reading, positions of the tile beyond the sequence are zeros.
        """
        assert tensor.ragged
        view = self.run.views[tensor.name]
        axis = 3 if tensor.axes[3] == 2 else 2
        label = self.run.analysis.axes[tensor.name][axis - 2]
        offsets = self.run.views[tensor.ragged.name][:, 0, 0, 0] // tensor.strides[axis]
        begin, end = int(offsets[self.batch.start]), int(offsets[self.batch.start + 1])
        wanted = self.rows if label == ROWS else range(tensor.shape[axis])
        if label == COLUMNS:
            wanted = range(self.all_columns) if every_column or (writes and tensor.name in self.run.later) else self.columns
        tokens = slice(min(end, begin + wanted.start), min(end, begin + wanted.stop))
        part = view[:, self.heads_of(view), :, tokens] if axis == 3 else view[:, self.heads_of(view), tokens]
        missing = 0 if writes else len(wanted) - part.shape[axis]
        if missing > 0:
            part = self.run.xp.pad(part, [(0, missing if n == axis else 0) for n in range(4)])
        return part

    def heads_of(self, view: Array) -> slice:
        """Return the heads of a tensor that the tile reads; each serves a group of consecutive query heads."""
        heads, every = view.shape[1], self.run.heads
        if heads == 1 or len(self.heads) == every:
            return _ALL
        return slice(self.heads.start * heads // every, -(-self.heads.stop * heads // every))


def _visible_columns(bounds: Sequence[Bound], rows: range, columns: range) -> range:
    """Return the columns that some row attends to."""
    for bound in bounds:
        rows = bound.rows(rows)
    for bound in bounds:
        columns = bound.columns(rows, columns)
    return columns


def _read_on_host(node: Node) -> Iterator[Tensor]:
    """Yield the tensors of integers per batch item that the interpreter reads one by one."""
    names = {Matmul: ("m", "n", "k"), PagedLoad: ("table", "lengths"), Softmax: ("rows",)}
    yield from (t for name in names.get(type(node), ()) if (t := getattr(node, name)) is not None)
    yield from (t.ragged for t in (*node.inputs, *node.outputs) if t.ragged is not None and t.ragged.role == "input")


def _seeds(node: Node) -> tuple[Tensor, ...]:
    return (node.seed, node.offset) if isinstance(node, Bernoulli) else ()


def _grouped(node: Node) -> tuple[Tensor, ...]:
    """Return the tensor of a node whose heads serve groups of query heads."""
    if isinstance(node, Matmul):
        return (node.b,)
    return (node.out,) if _sums_heads(node) else ()


def _narrow_products(graph: Graph) -> set[str]:
    """Return the names in :attr:`Analysis.narrow`: a score function may use only positions and captured arrays."""
    wide = {t.name for t in graph.by_role("input")}
    narrow: set[str] = set()
    for node in graph.nodes:
        if isinstance(node, Matmul):
            wide.add(node.out.name)
            if node.a.name not in wide:
                narrow.add(node.out.name)
        elif isinstance(node, Pointwise):
            read = () if node.mode == "gen_index" else node.inputs
            if any(t.name in wide and t.role not in ("input", "scalar") for t in read):
                wide.add(node.out.name)
        elif any(t.name in wide for t in node.inputs[:1]):
            wide.add(node.out.name)
    return narrow


def _merged_steps(graph: Graph) -> tuple[dict[str, int], set[str]]:
    """Return :attr:`Analysis.grouped` and :attr:`Analysis.undivided`."""
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for t in node.inputs:
            readers.setdefault(t.name, []).append(node)

    def only(tensor: Tensor) -> Node | None:
        nodes = readers.get(tensor.name, [])
        unrounded = tensor.role == "virtual" and tensor.dtype == graph.compute_dtype
        return nodes[0] if unrounded and len(nodes) == 1 else None

    grouped: dict[str, int] = {}
    undivided: set[str] = set()
    for node in graph.nodes:
        reader = only(node.out)
        if isinstance(node, Matmul) and reader and _sums_heads(reader) and reader.out.shape[2:] == node.out.shape[2:]:
            grouped[node.out.name] = node.out.shape[1] // reader.out.shape[1]
        if isinstance(node, Softmax) and node.scale is None and isinstance(reader, Matmul) and reader.a is node.out:
            undivided.add(node.out.name)
    return grouped, undivided


class TileSize(NamedTuple):
    """The largest tile on a GPU: its queries and heads, the totals, and the bytes of all matrices that exist at once."""

    rows: int
    of: int
    heads: int
    of_heads: int
    nbytes: int

    def __str__(self) -> str:
        heads = "all heads" if self.heads == self.of_heads else f"{self.heads} of {self.of_heads} heads"
        part = f"tiles of {self.rows} of {self.of} queries of {heads}" if self.rows < self.of else f"{heads} at a time"
        return f"{part}, {self.nbytes / 1e6:.3g} MB at once"


def tile_of(graph: Graph) -> TileSize:
    """Return the size of a graph's tiles on a GPU, for reports."""
    analysis, itemsize = analyze(graph), np.dtype(graph.compute_dtype).itemsize
    _, of_heads, of, columns = analysis.shape
    rows, heads, entries = analysis.block(of, columns, on_gpu=True)
    axes = analysis.axes
    alive: dict[str, int] = {}
    most = 0
    for node, last_reads in last_reads_of(analysis.fused_nodes):
        for t in (*node.inputs, *node.outputs):
            if t.role in ("input", "output", "virtual"):
                lengths = (min(rows, n) if axis == ROWS else n for axis, n in zip(axes[t.name], t.shape[2:], strict=True))
                alive[t.name] = itemsize * min(entries, t.shape[0]) * min(heads, t.shape[1]) * math.prod(lengths)
        most = max(most, sum(alive.values()))
        for name in last_reads:
            if name in analysis.later or ROWS in axes[name] or COLUMNS not in axes[name]:
                alive.pop(name, None)
    return TileSize(rows, of, heads, of_heads, most)


def _is_packed(tensor: Tensor) -> bool:
    """Return True if a tensor holds packed sequences. Constant offsets mean a padded batch, which is read like a dense one."""
    return tensor.ragged is not None and tensor.ragged.role == "input"


def _constant(tensor: Tensor) -> Array:
    """Return the integers ``0, step, 2 step, ...`` with the tensor's strides."""
    numbers = tensor.step * np.arange(tensor.span, dtype=tensor.dtype)
    strides = [numbers.itemsize * stride for stride in tensor.strides]
    return np.lib.stride_tricks.as_strided(numbers, tensor.shape, strides, writeable=False)


def _axes(tensor: Tensor) -> tuple[tuple[int, ...], tuple[slice | None, ...]]:
    """Return the array's axes in the tensor's order, and the index that adds new axes; empty if there are no new axes."""
    axes = tuple(axis for axis in tensor.axes if axis >= 0)
    index = tuple(None if axis < 0 else slice(None) for axis in tensor.axes)
    return axes, index if None in index else ()


def _packed_lengths(graph: Graph) -> tuple[Tensor, Tensor] | None:
    """Return each batch item's lengths if only these queries and keys must be computed, else None.

    Packed sequences are computed this way, unless a result has elements for all queries and keys of the longest sequence.
    """
    first = next((node for node in graph.nodes if isinstance(node, Matmul)), None)
    if first is None or not _is_packed(first.a) or first.m is None or first.n is None:
        return None
    sums = {node.out.name for node in graph.nodes if _sums_over_tiles(node)}
    if any(not _is_packed(tensor) and tensor.name not in sums for tensor in graph.by_role("output")):
        return None
    return first.m, first.n


def _sums_heads(node: Node | None) -> bool:
    return isinstance(node, Reduction) and not (node.amax or node.negative or _sums_over_tiles(node))


def _sums_over_tiles(node: Node) -> bool:
    """Return True if a node sums over tiles, so that its result is complete only after the last tile."""
    if not isinstance(node, Reduction) or node.amax or node.out.role != "output":
        return False
    (b, h, m, n), (_, out_heads, _, _) = node.x.shape, node.out.shape
    return node.out.shape not in ((b, h, m, 1), (b, out_heads, m, n))


def last_reads_of(nodes: Sequence[Node]) -> list[tuple[Node, frozenset[str]]]:
    """Return every node with the names of its tensors that no later node reads."""
    read: set[str] = set()
    steps: list[tuple[Node, frozenset[str]]] = []
    for node in reversed(nodes):
        names = {t.name for t in (*node.inputs, *node.outputs) if t.role != "scalar"}
        steps.append((node, frozenset(names - read)))
        read |= names
    return steps[::-1]
