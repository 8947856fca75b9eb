"""Lower a graph to a cuDNN operation graph, with one rule for each node type.

An :class:`OperationGraph` owns all descriptors that it creates. It is used in a ``with`` block, which destroys them in reverse
order as soon as the plan is finalized.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from ..cudnn.constants import DataType, PointwiseMode, ReduceTensorOp, RngDistribution
from ..cudnn.descriptor import Descriptor
from ..errors import Unsupported
from ..graph.nodes import Bernoulli, Graph, Matmul, Node, PagedLoad, Pointwise, Reduction, Softmax, Tensor, Transpose, row_major
from ..score_fn.modes import MODES, OPPOSITE

#: cuDNN's data types by the names of numpy's dtypes.
DATA_TYPES = {
    "float16": DataType.HALF,
    "bfloat16": DataType.BFLOAT16,
    "float32": DataType.FLOAT,
    "float64": DataType.DOUBLE,
    "int32": DataType.INT32,
    "int64": DataType.INT64,
    "bool": DataType.BOOLEAN,
    "uint8": DataType.UINT8,
    "int8": DataType.INT8,
    "float8_e4m3fn": DataType.FP8_E4M3,
    "float8_e5m2": DataType.FP8_E5M2,
}

#: Alignment of a tensor in bytes, by its dtype. Integers are read one at a time, all others 16 bytes at a time.
_ALIGNMENT = {"int32": 4, "int64": 8}


class OperationGraph:
    """A finalized cuDNN operation graph, and cuDNN's id of every tensor that an execution binds, by name.

    The handle is the plan's; None for a described GPU. Arrays in memory are never bool or of 8-bit integers, head_dim is
    contiguous, and no step selects from a by-value scalar: such graphs crash cuDNN (measured with 9.19 and 9.28).

    Raises:
        Unsupported: cuDNN does not support the graph.
    """

    def __init__(self, graph: Graph, handle: int | None = None) -> None:
        self.uids: dict[str, int] = {}
        self._tensors: dict[str, Descriptor] = {}
        self._operations: list[Descriptor] = []
        with contextlib.ExitStack() as stack:
            self._stack = stack
            for node in graph.nodes:
                LOWERING_RULES[type(node)](node, self)
            self.descriptor = self.make("OPERATIONGRAPH", {"OPS": self._operations}, "finalize the graph", handle)
            self._stack = stack.pop_all()  # success: __exit__ closes it

    def __enter__(self) -> OperationGraph:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def make(self, kind: str, attributes: dict[str, Any], doing: str, handle: int | None = None) -> Descriptor:
        """Create and finalize a descriptor that is destroyed with the graph; attributes of None are not set."""
        return self._stack.enter_context(Descriptor.finalized(kind, doing, HANDLE=handle, **attributes))

    def operation(self, kind: str, attributes: dict[str, Any], doing: str) -> None:
        """Add an operation. A tensor as an attribute is replaced by its descriptor."""
        attributes = {name: self.tensor(v) if isinstance(v, Tensor) else v for name, v in attributes.items()}
        self._operations.append(self.make(f"OPERATION_{kind}", attributes, f"finalize the operation {doing}"))

    def tensor(self, tensor: Tensor) -> Descriptor:
        """Return the descriptor of a tensor, created on first use."""
        if tensor.name not in self._tensors:
            ragged = None if tensor.ragged is None else self.tensor(tensor.ragged)
            uid = len(self._tensors) + 1
            self._tensors[tensor.name] = self.make(
                "TENSOR",
                {
                    "UNIQUE_ID": uid,
                    "DATA_TYPE": DATA_TYPES[tensor.dtype],
                    "DIMENSIONS": list(tensor.shape),
                    "STRIDES": list(tensor.strides),
                    "BYTE_ALIGNMENT": _ALIGNMENT.get(tensor.dtype, 16),
                    "IS_VIRTUAL": tensor.role == "virtual",
                    "IS_BY_VALUE": True if tensor.role == "scalar" else None,
                    "RAGGED_OFFSET_DESC": ragged,
                },
                f"finalize the tensor {tensor.name} {tensor.shape} {tensor.dtype}",
            )
            if tensor.role != "virtual":
                self.uids[tensor.name] = uid
        return self._tensors[tensor.name]


def _matmul(node: Matmul, lowered: OperationGraph) -> None:
    padding = None if node.n is None else 0.0
    kind = lowered.make("MATMUL", {"COMP_TYPE": DataType.FLOAT, "PADDING_VALUE": padding}, f"describe {node.formula}")
    tensors = {
        "ADESC": node.a, "BDESC": node.b, "CDESC": node.out,
        "GEMM_M_OVERRIDE_DESC": node.m, "GEMM_N_OVERRIDE_DESC": node.n, "GEMM_K_OVERRIDE_DESC": node.k,
    }  # fmt: skip
    lowered.operation("MATMUL", {"DESC": kind, **tensors}, node.formula)


def _paged_load(node: PagedLoad, lowered: OperationGraph) -> None:
    if (rows := node.pages.shape[2]) & (rows - 1):  # cuDNN reports a bad parameter, not that it is unsupported
        raise Unsupported(f"{node.pages} has {rows} rows per page; cuDNN supports powers of two")
    tensors = {"CONTAINER_DESC": node.pages, "YDESC": node.out, "SEQUENCE_DESC": node.lengths, "PAGE_TABLE_DESC": node.table}
    lowered.operation("PAGED_CACHE_LOAD", tensors, node.formula)


def _pointwise(node: Pointwise, lowered: OperationGraph) -> None:
    # comparisons of integers compute in the type of the mask, all others in INT32 or in the accumulator's type
    if node.mode == "logical_and" or (node.mode in OPPOSITE and node.b is not None and node.b.dtype == "int32"):
        precision = DataType.BOOLEAN
    elif node.mode != "gen_index" and node.out.dtype == "int32":
        precision = DataType.INT32
    else:
        precision = DataType.FLOAT
    mode: Any = "GEN_INDEX" if node.mode == "gen_index" else MODES[node.mode].cudnn
    attributes = {"MODE": PointwiseMode[mode], "MATH_PREC": precision, "AXIS": node.axis}
    kind = lowered.make("POINTWISE", attributes, f"describe {node.formula}")
    tensors = {"XDESC": node.x, "BDESC": node.b, "TDESC": node.t, "YDESC": node.out}
    lowered.operation("POINTWISE", {"PW_DESCRIPTOR": kind, **tensors}, node.formula)


def _reduce(lowered: OperationGraph, operator: ReduceTensorOp, x: Tensor, y: Tensor, formula: str) -> None:
    kind = lowered.make("REDUCTION", {"OPERATOR": operator, "COMP_TYPE": DataType.FLOAT}, f"describe {formula}")
    lowered.operation("REDUCTION", {"DESC": kind, "XDESC": x, "YDESC": y}, formula)


def _reduction(node: Reduction, lowered: OperationGraph) -> None:
    # Only the gradient of the sinks is a negative sum. cuDNN recognizes its operations, requires a plain sum as the last one,
    # and negates the result itself (measured with 9.19 and 9.28).
    _reduce(lowered, ReduceTensorOp.AMAX if node.amax else ReduceTensorOp.ADD, node.x, node.out, node.formula)


def _bernoulli(node: Bernoulli, lowered: OperationGraph) -> None:
    attributes = {"DISTRIBUTION": RngDistribution.BERNOULLI, "BERNOULLI_DIST_PROBABILITY": node.probability}
    kind = lowered.make("RNG", attributes, f"describe {node.formula}")
    tensors = {"YDESC": node.out, "SEED": node.seed, "OFFSET_DESC": node.offset}
    lowered.operation("RNG", {"DESC": kind, **tensors}, node.formula)


def _transpose(node: Transpose, lowered: OperationGraph) -> None:
    lowered.operation("RESHAPE", {"XDESC": node.x, "YDESC": node.out}, node.formula)


def _softmax(node: Softmax, lowered: OperationGraph) -> None:
    # Primitive operations: every cuDNN 9 recognizes this chain, while its softmax operation requires 9.21.
    # The log-sum-exp must be in the graph even if it is not returned (then it is virtual); but not together with m and l, which
    # cuDNN does not write then (measured with 9.19 and 9.28).
    def virtual(name: str, like: Tensor) -> Tensor:
        return Tensor(f"{node.out.name}.{name}", like.shape, "float32", "virtual", row_major(like.shape))

    x, row, sink = node.x, node.stats or node.max, node.sink
    assert row
    top, shifted, e = node.max or virtual("m", row), virtual("x-m", x), virtual("e", x)
    total = node.sum_exp or virtual("l", row)
    # m = max x                      (B, Hq, Sq, 1)
    highest = virtual("max x", row) if sink else top
    _reduce(lowered, ReduceTensorOp.MAX, x, highest, "m = max S")
    if sink:
        _pointwise(Pointwise("m = max(m, sink)", top, "max", highest, sink), lowered)
    # e = exp(x - m)                 (B, Hq, Sq, Skv)
    _pointwise(Pointwise("S − m", shifted, "sub", x, top), lowered)
    _pointwise(Pointwise("e = exp(S − m)", e, "exp", shifted), lowered)
    # l = sum e                      (B, Hq, Sq, 1)
    added = virtual("Σ e", row) if sink else total
    _reduce(lowered, ReduceTensorOp.ADD, e, added, "l = Σ e")
    if sink:
        # l <- l + exp(sink - m)
        below, last = virtual("sink-m", row), virtual("exp(sink-m)", row)
        _pointwise(Pointwise("sink − m", below, "sub", sink, top), lowered)
        _pointwise(Pointwise("exp(sink − m)", last, "exp", below), lowered)
        _pointwise(Pointwise("l = Σ e + exp(sink − m)", total, "add", added, last), lowered)
    if node.stats:
        # L = m + log l
        log = virtual("log l", row)
        _pointwise(Pointwise("log l", log, "log", total), lowered)
        _pointwise(Pointwise("L = m + log l", node.stats, "add", top, log), lowered)
    # P = e / l
    weights = virtual("e/l", x) if node.scale else node.out
    _pointwise(Pointwise("P = e / l", weights, "div", e, total), lowered)
    if node.scale:
        # P <- scale P, FP8
        _pointwise(Pointwise("P = scale · e / l", node.out, "mul", weights, node.scale), lowered)


#: The rule of each node type.
LOWERING_RULES: dict[type[Node], Callable[[Any, OperationGraph], None]] = {
    Bernoulli: _bernoulli,
    Matmul: _matmul,
    PagedLoad: _paged_load,
    Pointwise: _pointwise,
    Reduction: _reduction,
    Softmax: _softmax,
    Transpose: _transpose,
}
