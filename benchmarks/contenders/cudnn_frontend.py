"""cudnn-frontend: graphs of its attention nodes, with the plans that its heuristics choose."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cupy_sdpa.core.problem.tensor_spec import ITEMSIZE
from cupy_sdpa.core.runtime import cupy_runtime

from ..presets import Preset
from .contender import Call, Contender, Inputs

#: The names of the backward node's inputs, and our names of the same arrays.
BACKWARD_INPUTS = {"q": "q", "k": "k", "v": "v", "o": "out", "dO": "dout", "stats": "stats"}


@functools.cache
def handle() -> Any:
    """cudnn-frontend's handle on CuPy's current stream."""
    import cudnn

    created = cudnn.create_handle()
    cudnn.set_stream(handle=created, stream=cupy_runtime.stream())
    return created


class AttentionGraph:
    """A graph with one attention node over dense arrays ``(head_dim, heads, seq, batch)``.

    Args:
        shapes: the shapes of all arrays.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        import cudnn

        self._types, self._modes = cudnn.data_type, [cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK]
        self.graph = cudnn.pygraph(
            io_data_type=cudnn.data_type.BFLOAT16,
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=handle(),
            sm_version=cupy_runtime.capability(cupy_runtime.cupy().cuda.runtime.getDevice()),
        )
        self._tensors: dict[str, Any] = {}
        self._shapes = shapes

    def _layout(self, name: str) -> dict[str, Any]:
        """Dimensions (batch, heads, seq, head_dim), strides in elements, and data type."""
        if name == "stats":
            s, h, b = self._shapes[name]
            return {"dim": [b, h, s, 1], "stride": [h * s, s, 1, 1], "data_type": self._types.FLOAT}
        d, h, s, b = self._shapes[name]
        return {"dim": [b, h, s, d], "stride": [d * h * s, d, d * h, 1], "data_type": self._types.BFLOAT16}

    def input(self, name: str) -> Any:
        """Add a tensor that the graph reads."""
        self._tensors[name] = self.graph.tensor(name=name, **self._layout(name))
        return self._tensors[name]

    def output(self, name: str, tensor: Any) -> None:
        """Mark a tensor as a result."""
        tensor.set_output(True)
        for attribute, value in self._layout(name).items():
            getattr(tensor, f"set_{attribute}")(value)
        self._tensors[name] = tensor

    def build(self) -> None:
        """Build the plan and allocate its workspace."""
        self.graph.validate()
        self.graph.build_operation_graph()
        self.graph.create_execution_plans(self._modes)
        self.graph.check_support()
        self.graph.build_plans()
        self.workspace_bytes = int(self.graph.get_workspace_size())
        self._workspace = cupy_runtime.allocate(max(self.workspace_bytes, 1))
        self.plan_name = str(self.graph.get_plan_name_at_index(0))

    def runner(self, addresses: Mapping[str, int]) -> Callable[[], None]:
        """Return a function that executes the plan on arrays at these addresses; the caller keeps the arrays alive."""
        pack = {self._tensors[name].get_uid(): address for name, address in addresses.items() if name in self._tensors}
        return functools.partial(self.graph.execute, pack, self._workspace.ptr, handle=handle())


def _shapes(preset: Preset) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all arrays of the graphs."""
    inputs = dict(zip(("q", "k", "v"), preset.shapes, strict=True))
    gradients = {f"d{name}": shape for name, shape in inputs.items()}
    stats = (preset.sq, preset.hq, preset.b)
    return {**inputs, **gradients, "out": preset.out_shape, "dout": preset.out_shape, "stats": stats}


class Frontend(Contender):
    """cudnn-frontend's graphs on the same memory; results are written into preallocated arrays."""

    name, title, requires = "cudnn-frontend", "cudnn-frontend", ("cudnn",)

    @functools.cached_property
    def _options(self) -> dict[str, Any]:
        options = {"attn_scale": self.preset.d**-0.5, "use_causal_mask": self.preset.causal}
        # Its bound is the first distance that is masked; Preset.left is the last one that is not.
        return options if self.preset.left is None else {**options, "diagonal_band_left_bound": self.preset.left + 1}

    @functools.cached_property
    def _forward(self) -> AttentionGraph:
        graph, stats = AttentionGraph(_shapes(self.preset)), self.direction != "forward"
        tensors = graph.graph.sdpa(**{name: graph.input(name) for name in "qkv"}, generate_stats=stats, **self._options)
        for name, tensor in zip(("out", "stats") if stats else ("out",), tensors, strict=False):
            graph.output(name, tensor)
        graph.build()
        return graph

    @functools.cached_property
    def _backward(self) -> AttentionGraph:
        graph = AttentionGraph(_shapes(self.preset))
        inputs = {key: graph.input(name) for key, name in BACKWARD_INPUTS.items()}
        tensors = graph.graph.sdpa_backward(**inputs, **self._options)
        for name, tensor in zip(("dq", "dk", "dv"), tensors, strict=True):
            graph.output(name, tensor)
        graph.build()
        return graph

    @property
    def _results(self) -> tuple[str, ...]:
        """The names of a call's results."""
        return {"forward": ("out",), "backward": ("dq", "dk", "dv"), "both": ("out", "dq", "dk", "dv")}[self.direction]

    def call(self, inputs: Inputs) -> Call:
        """Execute one graph, or both."""
        arrays = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "dout": inputs.dout}
        shapes = _shapes(self.preset)
        for name in ("out", "stats", "dq", "dk", "dv"):
            arrays[name] = cupy_runtime.empty(shapes[name], "float32" if name == "stats" else inputs.q.dtype)
        addresses = {name: array.data.ptr for name, array in arrays.items()}
        runners = [self._forward.runner(addresses)]
        if self.direction != "forward":
            runners.append(self._backward.runner(addresses))
        if self.direction == "backward":
            runners.pop(0)()  # the forward pass, once

        def run() -> Sequence[Any]:
            for execute in runners:
                execute()
            return [arrays[name] for name in self._results]  # ``arrays`` also keeps the inputs alive

        return run

    @property
    def _graphs(self) -> list[AttentionGraph]:
        """The graphs that a call executes."""
        used = {"forward": ["_forward"], "backward": ["_backward"], "both": ["_forward", "_backward"]}[self.direction]
        return [getattr(self, name) for name in used]

    def peak_bytes(self, call: Call) -> int:
        """Return the sum of results, stats if a call writes and reads them, and workspace, all allocated once."""
        results = sum(int(array.nbytes) for array in call())
        stats = ITEMSIZE["float32"] * math.prod(_shapes(self.preset)["stats"]) if self.direction == "both" else 0
        return results + stats + self._workspace_bytes

    def facts(self) -> dict[str, Any]:
        """Return the names of the plans and the largest workspace."""
        names = " + ".join(graph.plan_name for graph in self._graphs)
        return {"engine": names, "workspace_bytes": self._workspace_bytes}

    @property
    def _workspace_bytes(self) -> int:
        return max(graph.workspace_bytes for graph in self._graphs)
