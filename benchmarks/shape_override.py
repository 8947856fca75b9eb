"""Whether one plan can serve many shapes, given when it is executed (cuDNN 9.21 and newer), handed over by ctypes.

    python3 benchmarks/shape_override.py

For several planned shapes, and several others to run with the same plan: the largest difference to a plan of the exact shape,
and whether memory beside the output was written. A process each, for some end in an illegal address. With 9.28 on an H200 only
the planned shape itself was right, so the package does not use it (docs/design.md).
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from cupy_sdpa import problem
from cupy_sdpa._cudnn.constants import AttributeName, AttributeType, DescriptorType
from cupy_sdpa._cudnn.launch import Handle
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.graph.attention_forward import forward
from cupy_sdpa.plans.lowering import OperationGraph
from cupy_sdpa.plans.plan import Plan, SerializedPlan, Target
from cupy_sdpa.plans.planner import engine_search

PLANNED = (1024, 1001, 4095)
SHAPES = ((2, 1024, 1024), (2, 1001, 1001), (1, 4095, 4095), (2, 1000, 1000), (3, 333, 333), (1, 128, 128), (2, 2048, 1024))
D, HQ, HKV, SCALE, MARGIN = 128, 8, 2, 0.1, 1 << 16
BF16 = np.dtype(ml_dtypes.bfloat16)


class _Vector(ctypes.Structure):
    """A ``std::vector``: where it begins, where it ends, where its memory ends."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))


def vector(array: Any) -> _Vector:
    """A ctypes array as a vector that must not outlive it."""
    begin = ctypes.addressof(array)
    return _Vector(begin, begin + ctypes.sizeof(array), begin + ctypes.sizeof(array))


def plan(batch: int, sq: int, skv: int, handle: Handle, override: bool) -> Plan:
    """A forward plan, its graph finalized for shapes that are given later, or not."""
    asked = problem((D, HQ, sq, batch), (D, HKV, skv, batch), (D, HKV, skv, batch), dtype="bfloat16")
    made = OperationGraph.make

    def with_override(self: OperationGraph, kind: str, attributes: dict[str, Any], *rest: Any, **options: Any) -> Any:
        extra = {"IS_OVERRIDE_SHAPE_ENABLED": True} if kind == "OPERATIONGRAPH" and override else {}
        return made(self, kind, {**attributes, **extra}, *rest, **options)

    OperationGraph.make = with_override  # type: ignore[method-assign]
    try:
        target = Target("", cupy_runtime.capability(0), handle)
        with engine_search(forward(asked), target) as (search, uids):
            return Plan(SerializedPlan(uids, search.first()), forward(asked), target, "", 0.0)
    finally:
        OperationGraph.make = made  # type: ignore[method-assign]


def run(
    made: Plan, handle: Handle, arrays: dict[str, Any], shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]
) -> None:
    """Execute a plan on arrays of other shapes than it was made for."""
    lib, uids = library(), made._serialized.uids
    scale, workspace = ctypes.c_float(SCALE), cupy_runtime.allocate(max(made.info.workspace, 1 << 20))
    numbers = (ctypes.c_int64 * 5)(*(uids[name] for name in arrays), uids["scale"])
    addresses = (ctypes.c_void_p * 5)(*(array.data.ptr for array in arrays.values()), ctypes.addressof(scale))
    rows = [[(ctypes.c_int64 * 4)(*row) for row in table] for table in (shapes, strides)]
    tables = [(_Vector * 4)(*map(vector, table)) for table in rows]
    vectors = [vector(table) for table in tables]
    pack, name, kind = ctypes.c_void_p(), AttributeName, AttributeType
    lib.check(lib.cudnnBackendCreateDescriptor(DescriptorType.VARIANT_PACK_DESCRIPTOR, ctypes.byref(pack)), "create")
    for attribute, of, count, value in (
        (name.VARIANT_PACK_UNIQUE_IDS, kind.INT64, 5, numbers),
        (name.VARIANT_PACK_DATA_POINTERS, kind.VOID_PTR, 5, addresses),
        (name.VARIANT_PACK_WORKSPACE, kind.VOID_PTR, 1, (ctypes.c_void_p * 1)(workspace.ptr)),
        (name.VARIANT_PACK_OVERRIDE_UNIQUE_IDS, kind.INT64, 4, numbers),
        (name.VARIANT_PACK_OVERRIDE_SHAPES, kind.VOID_PTR, 1, ctypes.byref(vectors[0])),
        (name.VARIANT_PACK_OVERRIDE_STRIDES, kind.VOID_PTR, 1, ctypes.byref(vectors[1])),
    ):
        lib.check(lib.cudnnBackendSetAttribute(pack, attribute, of, count, value), f"set {attribute.name}")
    lib.check(lib.cudnnBackendFinalize(pack), "finalize")
    lib.check(lib.cudnnBackendExecute(handle.pointer, made._descriptor.pointer, pack), "execute")
    cupy.cuda.runtime.deviceSynchronize()


def compare(planned: int, batch: int, sq: int, skv: int) -> str:
    """What a plan of one length gives for another shape."""
    handle = Handle()
    q, k, v = (
        cupy.asfortranarray(cupy.random.standard_normal((D, heads, length, batch), dtype=np.float32).astype(BF16))
        for heads, length in ((HQ, sq), (HKV, skv), (HKV, skv))
    )
    exact, want = plan(batch, sq, skv, handle, override=False), cupy.empty((D, HQ, sq, batch), BF16, order="F")
    exact.execute(
        {name: array.data.ptr for name, array in zip(("q", "k", "v", "out"), (q, k, v, want), strict=True)},
        {"scale": SCALE},
        cupy_runtime.allocate(max(exact.info.workspace, 1)).ptr,
    )
    buffer = cupy.full(want.size + 2 * MARGIN, 7, BF16)
    out = buffer[MARGIN:-MARGIN].reshape(want.shape, order="F")
    arrays = {"q": q, "k": k, "v": v, "out": out}
    # cuDNN's order, (batch, heads, seq, head_dim), K not transposed.
    shapes = [[x.shape[axis] for axis in (3, 1, 2, 0)] for x in arrays.values()]
    strides = [[x.strides[axis] // 2 for axis in (3, 1, 2, 0)] for x in arrays.values()]
    run(plan(2 if planned < 4095 else 1, planned, planned, handle, override=True), handle, arrays, shapes, strides)
    difference = float(cupy.abs(out.astype("f4") - want.astype("f4")).max())
    clean = bool((buffer[:MARGIN] == 7).all() and (buffer[-MARGIN:] == 7).all())
    return f"largest difference {difference:.3g}, beside the output {'nothing was' if clean else 'memory was'} written"


def main() -> None:
    """Every planned length with every shape, a process each."""
    if len(sys.argv) > 1:
        print(compare(*map(int, sys.argv[1:])))
        return
    for planned in PLANNED:
        for shape in SHAPES:
            command = [sys.executable, __file__, str(planned), *map(str, shape)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["nothing was said"]
            errors = [line for line in said if "Error" in line]
            print(f"planned {planned}, run with batch, queries, keys {shape}: {(errors or said)[0][:150]}", flush=True)


if __name__ == "__main__":
    main()
