"""The arrays of a problem as tensors of an operation graph.

A tensor is a view of the caller's array with permuted axes, ``(batch, heads, rows, columns)``. No data is copied.
"""

from __future__ import annotations

from dataclasses import replace

from ..problem.arrays import KEY_ARRAYS, ROW_STATS, letters_of
from ..problem.problem import Problem, has_ragged_diagonal
from ..problem.tensor_spec import ITEMSIZE, TensorSpec
from ..problem.varlen import ragged_offset_name, token_stride
from .nodes import Role, Shape, Tensor, row_major

# The axes of a tensor, as positions in the caller's array; -1 is a new axis of length 1.
#: ``(head_dim, heads, seq, batch)`` to ``(batch, heads, seq, head_dim)``, and to its transpose in the last two axes.
#: Packed sequences, ``(head_dim, heads, total)``, have no batch axis.
QKV_AXES = (3, 1, 2, 0)
TRANSPOSED_AXES = (3, 1, 0, 2)
#: ``(seq, heads, batch)``, and of packed sequences ``(heads, total)``, to ``(batch, heads, seq, 1)``.
STATS_AXES = (2, 1, 0, -1)
PACKED_STATS_AXES = (-1, 0, 1, -1)
#: ``(batch,)`` to ``(batch, 1, 1, 1)``.
BATCH_AXES = (0, -1, -1, -1)
#: ``(pages per sequence, batch)`` to ``(batch, 1, pages per sequence, 1)``.
TABLE_AXES = (1, -1, 0, -1)
#: ``(heads,)`` to ``(1, heads, 1, 1)``.
HEAD_AXES = (-1, 0, -1, -1)
#: ``(keys, queries, heads, batch)`` to ``(batch, heads, queries, keys)``.
SCORE_AXES = (3, 2, 1, 0)


def operand(spec: TensorSpec, axes: tuple[int, ...], role: Role) -> Tensor:
    """Return the tensor of a caller's array, with its axes permuted."""
    itemsize = ITEMSIZE[spec.dtype]
    b, h, rows, columns = [spec.shape[axis] if axis >= 0 else 1 for axis in axes]
    strides = [spec.strides[axis] // itemsize if axis >= 0 else 1 for axis in axes]
    return Tensor(spec.name, (b, h, rows, columns), spec.dtype, role, (*strides,), axes)


class GraphOperands:
    """The tensors of a problem.

    With ``full_keys`` every input with the axes of the scores is broadcast along the keys, by stride 0, and the indices of keys
    and heads are read from memory.
    """

    def __init__(self, problem: Problem, *, full_keys: bool = False) -> None:
        self.problem, self.full_keys = problem, full_keys
        self.specs = {spec.name: spec for spec in problem.tensors}
        *_, self.sq, self.skv, self.batch = problem.sizes
        self.results = {spec.name for spec in problem.results}

    def __call__(self, name: str, axes: tuple[int, ...] = QKV_AXES) -> Tensor:
        """Return an array of the problem: q, k, v, out, the row statistics, one of their gradients, or the pages of k or v."""
        spec = self.specs[name]
        packed = self.problem.packed and not (self.problem.paged and name in KEY_ARRAYS)
        if packed:
            axes = PACKED_STATS_AXES if name in ROW_STATS else tuple(axis if axis < 3 else -1 for axis in axes)
        tensor = operand(spec, axes, "output" if name in self.results else "input")
        if packed:
            return self._ragged(tensor, token_stride(spec))
        return self._padded(tensor) if self.problem.settings.padded and name not in ROW_STATS else tensor

    def optional(self, name: str, axes: tuple[int, ...]) -> Tensor | None:
        """Return the input of an option; None if the problem does not have it."""
        return operand(self.specs[name], axes, "input") if name in self.specs else None

    def factor(self, name: str) -> Tensor:
        """Return a factor of FP8 arrays, ``(1, 1, 1, 1)``, or their largest output."""
        return operand(self.specs[name], BATCH_AXES, "output" if name in self.results else "input")

    def row_stats(self, name: str) -> Tensor | None:
        """Row statistics, ``(B, Hq, Sq, 1)``; None if the problem does not have them."""
        return self(name, STATS_AXES) if name in self.specs else None

    def weight_input(self, name: str) -> Tensor | None:
        """Return an input of the scores, of each head or with the axes of the scores; None if the problem does not have it."""
        if letters_of(name) != ("Hq",):
            return self.score_input(name)
        tensor = self.optional(name, HEAD_AXES)
        return self._broadcast(tensor, keys=True) if tensor and self.full_keys else tensor

    def score_input(self, name: str) -> Tensor | None:
        """Return an input with the axes of the scores; None if the problem does not have it.

        An array with a single row is broadcast along the queries by stride 0, unless it also has a single column. cuDNN reads
        a single row wrongly in the backward pass (measured with 9.19: wrong gradients, an illegal instruction). If there is
        only one key, a single element is also broadcast: cuDNN reads the elements of another batch item (9.19 and 9.28).
        """
        tensor = self.optional(name, SCORE_AXES)
        if tensor is None:
            return None
        one_row, one_column = tensor.shape[2] == 1, tensor.shape[3] == 1
        return self._broadcast(
            tensor, queries=one_row and (self.skv == 1 or not one_column), keys=one_column and self.full_keys
        )

    def index_input(self, name: str, heads: int, strides: tuple[int, ...]) -> Tensor | None:
        """Return each key's or each head's index as a constant array ``(1, heads, 1, Skv)``; None without ``full_keys``."""
        return Tensor(name, (1, heads, 1, self.skv), "int32", "constant", strides) if self.full_keys else None

    def lengths(self) -> tuple[Tensor | None, Tensor | None]:
        """Return each batch item's numbers of queries and keys, ``(B, 1, 1, 1)``; None if all batch items are equal."""
        if not self.problem.ragged:
            return None, None
        shape = (self.batch, 1, 1, 1)
        queries, keys = (
            Tensor(name, shape, "int32", "input", (1, 1, 1, 1), BATCH_AXES) for name in ("seq_lens_q", "seq_lens_kv")
        )
        return queries, keys

    def diagonal(self) -> Tensor | None:
        """Return the key on the diagonal of every query; None unless ALiBi needs it and it differs between batch items."""
        if not has_ragged_diagonal(self.problem):
            return None
        if self.sq == 1:  # one element per key, because of "one-query-positions" in the table of known bugs
            return Tensor("diagonal", (self.batch, 1, 1, self.skv), "int32", "input", (self.skv, 1, 1, 1), (1, -1, -1, 0))
        return Tensor("diagonal", (self.batch, 1, self.sq, 1), "int32", "input", (self.sq, 1, 1, 1), (1, -1, 0, -1))

    def scratch(self, name: str, like: str, shape: Shape, dtype: str) -> Tensor:
        """Scratch memory of one call; with packed sequences it has as many tokens as ``like``, q or k."""
        tensor = Tensor(name, shape, dtype, "scratch", row_major(shape))
        if not self.problem.packed:
            return tensor
        _, h, rows, columns = shape
        by_token = replace(tensor, strides=(rows * h * columns, columns, h * columns, 1))
        return self._ragged(by_token, h * columns, like, self.specs[like].shape[-1] * h * columns)

    def _broadcast(self, tensor: Tensor, *, queries: bool = False, keys: bool = False) -> Tensor:
        """Broadcast a tensor along the queries, the keys, or both, by stride 0."""
        (b, h, rows, columns), (b_stride, h_stride, row_stride, column_stride) = tensor.shape, tensor.strides
        rows, row_stride = (self.sq, 0) if queries else (rows, row_stride)
        columns, column_stride = (self.skv, 0) if keys else (columns, column_stride)
        return replace(tensor, shape=(b, h, rows, columns), strides=(b_stride, h_stride, row_stride, column_stride))

    def _padded(self, tensor: Tensor) -> Tensor:
        """Return a tensor of a padded batch: a dense one with the offset of every batch item."""
        step = tensor.strides[0]
        offsets = Tensor(f"b × {step}", (self.batch + 1, 1, 1, 1), "int64", "constant", (1, 1, 1, 1), step=step)
        return replace(tensor, ragged=offsets)

    def _ragged(self, tensor: Tensor, stride: int, like: str = "", elements: int = 0) -> Tensor:
        """Return a tensor of packed sequences, with the longest sequence's shape."""
        name = ragged_offset_name(like or tensor.name, stride)
        offsets = Tensor(name, (self.batch + 1, 1, 1, 1), "int64", "input", (1, 1, 1, 1), BATCH_AXES)
        longest = self.skv if name.startswith("cu_seqlens_kv") else self.sq
        _, h, rows, columns = tensor.shape
        transposed = bool(tensor.axes) and tensor.axes[3] == 2
        shape = (self.batch, h, rows, longest) if transposed else (self.batch, h, longest, columns)
        strides = (longest * stride, *tensor.strides[1:])
        return replace(tensor, shape=shape, strides=strides, ragged=offsets, elements=elements)
