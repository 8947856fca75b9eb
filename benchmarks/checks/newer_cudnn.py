"""What newer versions of cuDNN offer: graph retention, offsets with a multiplier, float32 outputs. Uses CuPy only.

    python -m benchmarks newer_cudnn [results.csv]

- ``graph``: the device time of a launch of a captured CUDA graph, with a plan that the graph owns (``retained``, the default
  from 9.28 on) and with one that it does not own; and of the same kernels one by one.
- ``packed``: packed sequences forward: a call, its plan alone, and from 9.24 on cuDNN's single operation for attention, which
  reads ``cu_seqlens`` with multipliers in place of an array of offsets for each tensor.
- ``float32 output``: bfloat16 inputs with an output of bfloat16 and of float32; the largest error against numpy in float64.

``CUPY_SDPA_CUDNN`` selects the version. Medians of rounds in turn, after other work that hides the host's time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import cupy
import numpy as np

import cupy_sdpa
from cupy_sdpa._cudnn.constants import DataType
from cupy_sdpa._cudnn.launch import Launcher
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.device import cupy_runtime, driver
from cupy_sdpa.device.cuda_graph import Recording
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.graph.nodes import Graph, Tensor
from cupy_sdpa.plans import engines, planner
from cupy_sdpa.plans.disk_cache import DiskCache
from cupy_sdpa.plans.engines import GRAPH_RETENTION_SINCE, EngineSearch
from cupy_sdpa.plans.lowering import OperationGraph
from cupy_sdpa.plans.plan import Plan, Target
from cupy_sdpa.plans.sessions import session

from ..common.device import arrays_of_launch, random_normal
from ..common.machine import versions
from ..common.script import csv_path, listed, write_csv
from ..common.timing import device_ms, interleaved

#: (head dim, query heads, key/value heads, queries, keys, batch), and options.
GRAPHS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((64, 8, 8, 128, 128, 1), {"causal": True}),
    ((64, 8, 8, 256, 256, 2), {}),
    ((128, 16, 16, 1024, 1024, 1), {"causal": True}),
    ((128, 32, 8, 1, 8192, 8), {}),
    ((128, 32, 8, 1, 32768, 1), {}),
)
#: The lengths of packed sequences with 32 query and 8 key/value heads of 128 elements.
PACKED = ((1024, 200, 777, 4096, 64, 2048), (1024,) * 4, (128,) * 64)
#: As ``GRAPHS``.
OUTPUTS: tuple[tuple[tuple[int, ...], dict[str, Any]], ...] = (
    ((64, 2, 2, 256, 256, 1), {}),
    ((128, 4, 2, 256, 512, 2), {}),
    ((128, 4, 2, 512, 512, 1), {"causal": True}),
    ((128, 8, 2, 1, 4096, 1), {}),
    ((256, 2, 2, 256, 256, 1), {}),
)
#: The first version whose single operation reads cu_seqlens with multipliers.
MULTIPLIERS_SINCE = 92400
ROUNDS, LAUNCHES = 11, 32


def target() -> Target:
    """The current GPU."""
    return Target(cupy_runtime.model(0), cupy_runtime.capability(0), session(driver.context_id()).handle)


def arrays(sizes: Sequence[int]) -> tuple[Any, Any, Any]:
    """Random q, k and v."""
    d, hq, hkv, sq, skv, b = sizes
    return random_normal(d, hq, sq, b), random_normal(d, hkv, skv, b), random_normal(d, hkv, skv, b)


def median_us(runs: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median microseconds of the device for each function, in turn."""
    busy = cupy.random.standard_normal((4096, 4096), dtype="float32").astype("float16")
    timers = {name: functools.partial(device_ms, [run] * LAUNCHES, busy) for name, run in runs.items()}
    return {name: round(statistics.median(times) * 1e3, 2) for name, times in interleaved(timers, ROUNDS).items()}


def runner(call: Any, plan: Plan) -> Callable[[], None]:
    """A function that executes a plan on the arrays of a call, on the current stream."""
    arrays = arrays_of_launch(call)
    addresses = {name: array.data.ptr for name, array in arrays.items()}
    workspace = cupy_runtime.allocate(max(plan.info.workspace, 1))

    def run(keep: Any = (arrays, workspace)) -> None:
        plan.set_stream(cupy_runtime.stream())
        plan.execute(addresses, call.scalars, workspace.ptr)

    return run


def graph_rows() -> Iterator[dict[str, Any]]:
    """Launches of captured graphs."""
    retains = (False, True) if library().version >= GRAPH_RETENTION_SINCE else (False,)
    for sizes, options in GRAPHS:
        call = read_forward(*arrays(sizes), options)
        with contextlib.ExitStack() as stack:
            runs: dict[str, Callable[[], Any]] = {}
            for retained in retains:
                with mock.patch.object(engines, "disable_graph_retention") if retained else contextlib.nullcontext():
                    plan = planner.load_or_build(forward(call.engine_problem), target(), disk_cache=DiskCache(None))
                stack.callback(plan.close)
                run = runner(call, plan)
                run()
                recording = Recording(run)
                stack.callback(recording.close)
                runs["graph, retained" if retained else "graph"] = functools.partial(recording.launch, of_many=False)
            runs["kernels"] = recording.launch_one_by_one
            for name, us in median_us(runs).items():
                yield {"check": "graph", "case": f"{sizes} {options}", "variant": name, "us": us}


class _OneOperation(OperationGraph):
    """Packed attention as one operation that reads ``cu_seqlens`` with multipliers."""

    def __init__(self, handle: int, d: int, hq: int, hkv: int, longest: int, batch: int) -> None:
        self.uids: dict[str, int] = {}
        self._tensors, self._numbers, self._operations = {}, {}, []
        with contextlib.ExitStack() as stack:
            self._stack = stack
            starts = self._input("cu_seqlens", (batch + 1, 1, 1, 1), DataType.INT32, 4)
            parts = {
                f"{name.upper()}DESC": self._input(
                    {"o": "out"}.get(name, name), (batch, heads, longest, d), DataType.BFLOAT16, 16,
                    STRIDES=[longest * heads * d, d, heads * d, 1], RAGGED_OFFSET_DESC=starts,
                    RAGGED_OFFSET_MULTIPLIER=heads * d,
                )
                for name, heads in (("q", hq), ("k", hkv), ("v", hkv), ("o", hq))
            }  # fmt: skip
            scale = self._input("scale", (1, 1, 1, 1), DataType.FLOAT, 4, IS_BY_VALUE=True)
            lengths = {"CU_SEQ_LEN_QDESC": starts, "CU_SEQ_LEN_KVDESC": starts}
            self.operation("SDPA_FWD", {**parts, "SCALEDESC": scale, **lengths}, "packed attention")
            self.descriptor = self.close_graph("finalize the graph", handle)
            self._stack = stack.pop_all()

    def _input(self, name: str, shape: tuple[int, ...], dtype: DataType, alignment: int, **more: Any) -> Any:
        self.uids[name] = len(self.uids) + 1
        attributes = {
            "UNIQUE_ID": self.uids[name], "DATA_TYPE": dtype, "DIMENSIONS": list(shape), "STRIDES": [1] * 4,
            "BYTE_ALIGNMENT": alignment, "IS_VIRTUAL": False, **more,
        }  # fmt: skip
        return self.make("TENSOR", attributes, f"finalize the tensor {name}")


def packed_rows() -> Iterator[dict[str, Any]]:
    """Packed sequences: a call, its plan, and the single operation."""
    for lengths in PACKED:
        starts, total, longest = cupy.asarray(np.cumsum([0, *lengths]), np.int32), sum(lengths), max(lengths)
        q, k, v = random_normal(128, 32, total), random_normal(128, 8, total), random_normal(128, 8, total)
        options: dict[str, Any] = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
        options |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
        out = cupy_sdpa.attention(q, k, v, **options)
        call = read_forward(q, k, v, options)
        with contextlib.ExitStack() as stack:
            plan = planner.load_or_build(forward(call.engine_problem), target(), disk_cache=DiskCache(None))
            stack.callback(plan.close)
            runs: dict[str, Callable[[], Any]] = {
                "call": functools.partial(cupy_sdpa.attention, q, k, v, out=cupy.empty_like(q), **options),
                "plan": runner(call, plan),
            }
            other = cupy.full(q.shape, np.nan, q.dtype, order="F")
            if library().version >= MULTIPLIERS_SINCE:
                inputs = {"q": q, "k": k, "v": v, "out": other, "cu_seqlens": starts}
                runs["one operation"] = stack.enter_context(_one_operation(inputs, longest))
                runs["one operation"]()
            for name, us in median_us(runs).items():
                error = f"{float(abs(other - out).max()):.1e}" if name == "one operation" else ""
                yield {"check": "packed", "case": f"{lengths}", "variant": name, "us": us, "error": error}


@contextlib.contextmanager
def _one_operation(inputs: dict[str, Any], longest: int) -> Iterator[Callable[[], None]]:
    """A function that runs the single operation."""
    (d, hq, _), hkv = inputs["q"].shape, inputs["k"].shape[1]
    handle = target().handle
    assert handle is not None
    with _OneOperation(handle.pointer, d, hq, hkv, longest, inputs["cu_seqlens"].size - 1) as graph:
        search = EngineSearch(graph.descriptor, handle.pointer, None, None, lambda size: size, [])
        candidate = search.first()
        uids = graph.uids
    launcher = Launcher(candidate.descriptor, [uids[name] for name in inputs], [(uids["scale"], "float32", d**-0.5)])
    workspace = cupy_runtime.allocate(max(candidate.workspace_bytes, 1))
    addresses = [array.data.ptr for array in inputs.values()]

    def run() -> None:
        handle.set_stream(cupy_runtime.stream())
        launcher.launch(handle, list(addresses), [], workspace.ptr)

    try:
        yield run
    finally:
        candidate.close()


def with_float32_output(graph: Graph) -> Graph:
    """The graph with an output of float32."""

    def changed(value: Any) -> Any:
        is_out = isinstance(value, Tensor) and value.name == "out"
        return dataclasses.replace(value, dtype="float32") if is_out else value

    def node(old: Any) -> Any:
        return dataclasses.replace(old, **{x.name: changed(getattr(old, x.name)) for x in dataclasses.fields(old)})

    return dataclasses.replace(graph, nodes=type(graph.nodes)(node(x) for x in graph.nodes))


def output_rows() -> Iterator[dict[str, Any]]:
    """Outputs of float32 and bfloat16."""
    for sizes, options in OUTPUTS:
        q, k, v = arrays(sizes)
        exact = cupy_sdpa.attention(*(x.get().astype(np.float64) for x in (q, k, v)), **options)
        for dtype in ("bfloat16", "float32"):
            call = read_forward(q, k, v, options)
            graph = forward(call.engine_problem)
            graph = graph if dtype == "bfloat16" else with_float32_output(graph)
            call.arrays["out"] = cupy.full(q.shape, np.nan, q.dtype if dtype == "bfloat16" else np.float32, order="F")
            plan = planner.load_or_build(graph, target(), disk_cache=DiskCache(None))
            addresses = {name: array.data.ptr for name, array in call.arrays.items()}
            workspace = cupy_runtime.allocate(max(plan.info.workspace, 1))
            plan.set_stream(cupy_runtime.stream())
            plan.execute(addresses, call.scalars, workspace.ptr)
            found = call.arrays["out"].get().astype(np.float64)
            plan.close()
            error = f"{np.abs(found - exact).max():.1e} of {np.abs(exact).max():.1e}"
            yield {"check": "float32 output", "case": f"{sizes} {options}", "variant": dtype, "error": error}


def main(words: Sequence[str]) -> int:
    """Measure, print the rows and write them."""
    path = csv_path("newer_cudnn", __doc__, words)
    used, rows = versions(), []
    for make in (graph_rows, packed_rows, output_rows):
        for row in make():
            rows.append({name: row.get(name, "") for name in ("check", "case", "variant", "us", "error")} | used)
            print(listed(row), flush=True)
    if path:
        write_csv(path, rows)
    return 0
