"""cudnn-frontend's way: its own attention nodes, and the plans that its heuristics choose."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from ..device import cupy_runtime
from ..problem.tensor_spec import ITEMSIZE
from .way import Call, Inputs, Way

#: What the backward node calls its inputs.
_BACKWARD_INPUTS = {"q": "q", "k": "k", "v": "v", "o": "out", "dO": "dout", "stats": "stats"}


@functools.cache
def handle() -> Any:
    """A handle of cudnn-frontend's, on CuPy's current stream."""
    import cudnn

    made = cudnn.create_handle()
    cudnn.set_stream(handle=made, stream=cupy_runtime.stream())
    return made


class _Graph:
    """A graph with one attention node over dense arrays in Julia's layout."""

    def __init__(self, way: Frontend) -> None:
        import cudnn

        self._cudnn, self._way = cudnn, way
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle(),
            sm_version=cupy_runtime.capability(cupy_runtime.cupy().cuda.runtime.getDevice()),
        )
        self._named: dict[str, Any] = {}

    def input(self, name: str) -> Any:
        """A tensor that the graph reads."""
        dim, stride, kind = self._layout(name)
        self._named[name] = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=kind)
        return self._named[name]

    def output(self, name: str, tensor: Any) -> None:
        """A tensor that the graph writes."""
        dim, stride, kind = self._layout(name)
        tensor.set_output(True).set_dim(dim).set_stride(stride).set_data_type(kind)
        self._named[name] = tensor

    def build(self) -> None:
        """Plan."""
        modes = [self._cudnn.heur_mode.A, self._cudnn.heur_mode.FALLBACK]
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans(modes)
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace_bytes = int(self.graph.get_workspace_size())
        self._workspace = cupy_runtime.allocate(max(self.workspace_bytes, 1))

    def runner(self, data: dict[str, Any]) -> Any:
        """Execute on these arrays."""
        pack = {tensor.get_uid(): data[name].data.ptr for name, tensor in self._named.items()}
        return functools.partial(self.graph.execute, pack, self._workspace.ptr, handle=handle())

    def _layout(self, name: str) -> tuple[list[int], list[int], Any]:
        """Dimensions (batch, heads, seq, head_dim), strides in elements, and data type."""
        shape, kind = self._way.shape(name), self._cudnn.data_type.BFLOAT16
        if name == "stats":  # (seq, heads, batch)
            s, h, b = shape
            return [b, h, s, 1], [h * s, s, 1, 1], self._cudnn.data_type.FLOAT
        d, h, s, b = shape
        return [b, h, s, d], [d * h * s, d, d * h, 1], kind


class Frontend(Way):
    """Graphs of cudnn-frontend on the same memory; results are written into arrays that are made once."""

    name, title, needs = "cudnn-frontend", "cudnn-frontend", ("cudnn",)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of an array of the graphs."""
        p = self.preset
        shapes = dict(zip(("q", "k", "v"), p.shapes, strict=True))
        every = {**shapes, **{f"d{x}": shape for x, shape in shapes.items()}, "out": p.out_shape, "dout": p.out_shape}
        return {**every, "stats": (p.sq, p.hq, p.b)}[name]

    @functools.cached_property
    def _masks(self) -> dict[str, Any]:
        scaled = {"attn_scale": self.preset.d**-0.5, "use_causal_mask": self.preset.causal}
        # Its bound is the first distance that is hidden, ours is the last one that is seen.
        return scaled if self.preset.left is None else {**scaled, "diagonal_band_left_bound": self.preset.left + 1}

    @functools.cached_property
    def _forward(self) -> _Graph:
        made, stats = _Graph(self), self.direction != "forward"
        tensors = made.graph.sdpa(**{x: made.input(x) for x in ("q", "k", "v")}, generate_stats=stats, **self._masks)
        for name, tensor in zip(("out", "stats") if stats else ("out",), tensors, strict=False):
            made.output(name, tensor)
        made.build()
        return made

    @functools.cached_property
    def _backward(self) -> _Graph:
        made = _Graph(self)
        inputs = {key: made.input(name) for key, name in _BACKWARD_INPUTS.items()}
        tensors = made.graph.sdpa_backward(**inputs, **self._masks)
        for name, tensor in zip(("dq", "dk", "dv"), tensors, strict=True):
            made.output(name, tensor)
        made.build()
        return made

    @property
    def _results(self) -> tuple[str, ...]:
        """The names of a call's results."""
        return {"forward": ("out",), "backward": ("dq", "dk", "dv"), "both": ("out", "dq", "dk", "dv")}[self.direction]

    def call(self, inputs: Inputs) -> Call:
        """Execute the graphs, one or both."""
        data = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
        for name in ("out", "stats", "dq", "dk", "dv"):
            data[name] = cupy_runtime.empty(self.shape(name), "float32" if name == "stats" else inputs.q.dtype)
        runners = [self._forward.runner(data)]
        if self.direction != "forward":
            runners.append(self._backward.runner(data))
        if self.direction == "backward":
            runners.pop(0)()  # once, for what the gradients need

        def run() -> Sequence[Any]:
            for execute in runners:
                execute()
            return [data[name] for name in self._results]  # the graphs hold addresses only: what they read stays here

        return run

    @property
    def _graphs(self) -> list[_Graph]:
        """Those that a call executes."""
        used = {"forward": ["_forward"], "backward": ["_backward"], "both": ["_forward", "_backward"]}[self.direction]
        return [getattr(self, name) for name in used]

    def peak_bytes(self, call: Call) -> int:
        """Results, statistics in between, and workspace, which are all made once."""
        results = sum(int(array.nbytes) for array in call())
        stats = ITEMSIZE["float32"] * math.prod(self.shape("stats")) if self.direction == "both" else 0
        return results + stats + self._workspace_bytes

    def facts(self) -> dict[str, Any]:
        """The plans' names and the greatest workspace."""
        names = " + ".join(str(made.graph.get_plan_name_at_index(0)) for made in self._graphs)
        return {"engine": names, "workspace_bytes": self._workspace_bytes}

    @property
    def _workspace_bytes(self) -> int:
        return max(made.workspace_bytes for made in self._graphs)
