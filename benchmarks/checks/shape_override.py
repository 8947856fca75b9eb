"""Whether one plan can run several shapes that are set at execution (cuDNN 9.21 and newer), by ctypes.

    python -m benchmarks shape_override

Executes plans for several shapes with other shapes. Prints the largest difference from a plan for the exact shape, and
whether memory outside the output was written. Each combination runs in its own process, because some end with an illegal
address. With cuDNN 9.28 on an H200 only the planned shape itself gave correct results, so the package does not use this
feature (docs/design.md).
"""

from __future__ import annotations

import ctypes
import os
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

from ..common.script import check_gpu, parser

PLANNED = (1024, 1001, 4095)
SHAPES = ((2, 1024, 1024), (2, 1001, 1001), (1, 4095, 4095), (2, 1000, 1000), (3, 333, 333), (1, 128, 128), (2, 2048, 1024))
D, HQ, HKV, SCALE, MARGIN = 128, 8, 2, 0.1, 1 << 16
BF16 = np.dtype(ml_dtypes.bfloat16)


class _Vector(ctypes.Structure):
    """A ``std::vector``: its begin, its end and the end of its memory."""

    _fields_ = (("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity", ctypes.c_void_p))


def vector(array: Any) -> _Vector:
    """A vector over the memory of a ctypes array, which must stay alive."""
    begin = ctypes.addressof(array)
    return _Vector(begin, begin + ctypes.sizeof(array), begin + ctypes.sizeof(array))


def plan(batch: int, sq: int, skv: int, handle: Handle, override: bool) -> Plan:
    """A forward plan; with ``override`` its graph allows other shapes at execution."""
    load_target = problem((D, HQ, sq, batch), (D, HKV, skv, batch), (D, HKV, skv, batch), dtype="bfloat16")
    make = OperationGraph.make

    def with_override(self: OperationGraph, kind: str, attributes: dict[str, Any], *rest: Any, **options: Any) -> Any:
        extra = {"IS_OVERRIDE_SHAPE_ENABLED": True} if kind == "OPERATIONGRAPH" and override else {}
        return make(self, kind, {**attributes, **extra}, *rest, **options)

    OperationGraph.make = with_override  # type: ignore[method-assign]
    try:
        target = Target("", cupy_runtime.capability(0), handle)
        with engine_search(forward(load_target), target) as (search, uids):
            return Plan(SerializedPlan(uids, search.first()), forward(load_target), target, "", 0.0)
    finally:
        OperationGraph.make = make  # type: ignore[method-assign]


def execute(
    planned: Plan, handle: Handle, arrays: dict[str, Any], shapes: Sequence[Sequence[int]], strides: Sequence[Sequence[int]]
) -> None:
    """Execute a plan with other shapes than its own."""
    lib, uids = library(), planned._serialized.uids
    scale, workspace = ctypes.c_float(SCALE), cupy_runtime.allocate(max(planned.info.workspace, 1 << 20))
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
    lib.check(lib.cudnnBackendExecute(handle.pointer, planned._descriptor.pointer, pack), "execute")
    cupy.cuda.runtime.deviceSynchronize()


def compare(planned: int, batch: int, sq: int, skv: int) -> str:
    """Execute a plan for the length ``planned`` with another shape and describe the result."""
    handle = Handle()
    q, k, v = (
        cupy.asfortranarray(cupy.random.standard_normal((D, heads, length, batch), dtype=np.float32).astype(BF16))
        for heads, length in ((HQ, sq), (HKV, skv), (HKV, skv))
    )
    exact, expected = plan(batch, sq, skv, handle, override=False), cupy.empty((D, HQ, sq, batch), BF16, order="F")
    exact.execute(
        {name: array.data.ptr for name, array in zip(("q", "k", "v", "out"), (q, k, v, expected), strict=True)},
        {"scale": SCALE},
        cupy_runtime.allocate(max(exact.info.workspace, 1)).ptr,
    )
    buffer = cupy.full(expected.size + 2 * MARGIN, 7, BF16)
    out = buffer[MARGIN:-MARGIN].reshape(expected.shape, order="F")
    arrays = {"q": q, "k": k, "v": v, "out": out}
    # cuDNN's order (batch, heads, seq, head_dim), K not transposed
    shapes = [[x.shape[axis] for axis in (3, 1, 2, 0)] for x in arrays.values()]
    strides = [[x.strides[axis] // 2 for axis in (3, 1, 2, 0)] for x in arrays.values()]
    execute(plan(2 if planned < 4095 else 1, planned, planned, handle, override=True), handle, arrays, shapes, strides)
    difference = float(cupy.abs(out.astype("f4") - expected.astype("f4")).max())
    clean = bool((buffer[:MARGIN] == 7).all() and (buffer[-MARGIN:] == 7).all())
    return f"largest difference {difference:.3g}, memory outside the output {'unchanged' if clean else 'overwritten'}"


def main(words: Sequence[str]) -> int:
    """Run every planned length with every shape, each in its own process."""
    options = parser("shape_override", __doc__)
    options.add_argument("numbers", nargs="*", type=int, help="planned length, batch, queries, keys: run one combination")
    numbers = options.parse_args(words).numbers
    if len(numbers) not in (0, 4):
        options.error(f"{len(numbers)} numbers are given; pass four, or none to run all combinations")
    check_gpu("shape_override")
    if numbers:
        print(compare(*numbers))
        return 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    for planned in PLANNED:
        for shape in SHAPES:
            command = [sys.executable, "-m", "benchmarks", "shape_override", str(planned), *map(str, shape)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
            lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no output"]
            errors = [line for line in lines if "Error" in line]
            print(f"planned {planned}, run with batch, queries, keys {shape}: {(errors or lines)[-1][:150]}", flush=True)
    return 0
