"""cudnn-frontend: graphs with ragged offsets over packed tensors."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..contenders.cudnn_frontend import BACKWARD_INPUTS, AttentionGraph
from .contenders import Call, Contender
from .problems import Inputs, Problem


class _PackedGraph(AttentionGraph):
    """A graph over packed tensors: dimensions of padded tensors, with ragged offsets."""

    def __init__(self, problem: Problem) -> None:
        super().__init__()
        self.problem = problem
        self._fixed: list[tuple[Any, Any]] = []  # tensors and their data, the same for all inputs
        starts = torch.tensor(problem.starts, dtype=torch.int64, device="cuda")
        lengths = torch.tensor(problem.lengths, dtype=torch.int32, device="cuda")
        row_sizes = {"q": problem.hq * problem.d, "kv": problem.hkv * problem.d, "stats": problem.hq}
        self._offsets = {name: self._vector(starts * size) for name, size in row_sizes.items()}
        self.options = {
            "attn_scale": problem.d**-0.5,
            "use_padding_mask": True,
            "seq_len_q": self._vector(lengths),
            "seq_len_kv": self._vector(lengths),
            "use_causal_mask": problem.causal,
        }

    def _vector(self, data: Any) -> Any:
        data_type = self.types.INT64 if data.dtype == torch.int64 else self.types.INT32
        tensor = self.graph.tensor(dim=[len(data), 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type)
        self._fixed.append((tensor, data))
        return tensor

    def layout(self, name: str) -> dict[str, Any]:
        """Dimensions (batch, heads, longest, head_dim), strides in elements, data type, and ragged offsets."""
        p = self.problem
        heads = {"k": p.hkv, "v": p.hkv, "dk": p.hkv, "dv": p.hkv}.get(name, p.hq)
        d = 1 if name == "stats" else p.d
        offsets = "stats" if name == "stats" else "kv" if name in ("k", "v", "dk", "dv") else "q"
        return {
            "dim": [len(p.lengths), heads, p.longest, d],
            "stride": [p.longest * heads * d, d, heads * d, 1],
            "data_type": self.types.FLOAT if name == "stats" else self.types.BFLOAT16,
            "ragged_offset": self._offsets[offsets],
        }

    def call(self, arrays: dict[str, Any], results: list[str]) -> Call:
        """Execute on these tensors."""
        addresses = {name: x.data_ptr() for name, x in arrays.items()}
        execute = self.runner(addresses, [(tensor, data.data_ptr()) for tensor, data in self._fixed])

        def run() -> list[Any]:
            execute()
            return [arrays[name] for name in results]  # ``arrays`` keeps the inputs alive, too

        return run


class Frontend(Contender):
    """cudnn-frontend's graphs, with the plans that its heuristics choose."""

    name = "cudnn-frontend"

    @functools.cached_property
    def _forward(self) -> _PackedGraph:
        graph = _PackedGraph(self.problem)
        inputs = {name: graph.input(name) for name in "qkv"}
        out, stats = graph.graph.sdpa(**inputs, is_inference=False, **graph.options)
        graph.output("out", out)
        graph.output("stats", stats)
        graph.build()
        return graph

    @functools.cached_property
    def _backward(self) -> _PackedGraph:
        """The backward graph, with a workspace for the total length."""
        graph = _PackedGraph(self.problem)
        inputs = {key: graph.input(name) for key, name in BACKWARD_INPUTS.items()}
        bounds = {"max_total_seq_len_q": self.problem.total, "max_total_seq_len_kv": self.problem.total}
        gradients = graph.graph.sdpa_backward(**inputs, **bounds, **graph.options)
        for name, tensor in zip(("dq", "dk", "dv"), gradients, strict=True):
            graph.output(name, tensor)
        graph.build()
        return graph

    def _arrays(self, inputs: Inputs) -> dict[str, Any]:
        """The inputs and the results of the forward pass."""
        stats = torch.empty(self.problem.total, self.problem.hq, device="cuda")
        return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "out": torch.empty_like(inputs.q), "stats": stats}

    def forward(self, inputs: Inputs) -> Call:
        """The call."""
        return self._forward.call(self._arrays(inputs), ["out"])

    def backward(self, inputs: Inputs) -> Call:
        """The call, after the forward pass."""
        arrays = self._arrays(inputs)
        self._forward.call(arrays, ["out"])()
        gradients = {f"d{name}": torch.empty_like(arrays[name]) for name in "qkv"}
        return self._backward.call({**arrays, "dout": inputs.dout, **gradients}, list(gradients))

    def facts(self, direction: str, inputs: Inputs) -> dict[str, Any]:
        """The name of the plan and its workspace."""
        graph = self._forward if direction == "forward" else self._backward
        return {"engine": graph.plan_name, "workspace_bytes": graph.workspace_bytes}
