"""This package on CuPy arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cupy_sdpa.attention_functions import attention, attention_backward
from cupy_sdpa.core.runtime import cupy_runtime
from cupy_sdpa.explanation import explain
from cupy_sdpa.preparation import prepare

from ..device import peak_allocation
from ..presets import Preset
from .contender import Call, Contender, Inputs

if TYPE_CHECKING:
    from cupy_sdpa.core.cudnn_engine.plan import PlanInfo


class Ours(Contender):
    """cupy_sdpa on CuPy arrays."""

    name, title = "ours", "cupy_sdpa"

    def __init__(self, preset: Preset, direction: str) -> None:
        super().__init__(preset, direction)
        self._options = preset.options

    def call(self, inputs: Inputs) -> Call:
        """Return the plain call, which allocates its results."""
        qkv, options = (inputs.q, inputs.k, inputs.v), self._options
        if self.direction == "forward":
            return lambda: (attention(*qkv, **options),)
        if self.direction == "backward":
            arguments = (inputs.dout, *qkv, *attention(*qkv, return_stats=True, **options))
            return lambda: attention_backward(*arguments, **options)

        def both() -> tuple[Any, ...]:
            out, stats = attention(*qkv, return_stats=True, **options)
            return (out, *attention_backward(inputs.dout, *qkv, out, stats, **options))

        return both

    def host_variants(self, inputs: Inputs) -> Iterator[tuple[str, Call]]:
        """Yield the call into preallocated results, and the prepared call."""
        cupy, qkv, options = cupy_runtime.cupy(), (inputs.q, inputs.k, inputs.v), self._options
        if self.preset.engine:
            return
        if self.direction == "forward":
            out, prepared = cupy.empty_like(inputs.dout), prepare(*qkv, **options)
            yield "host_out_us", lambda: (attention(*qkv, **options, out=out),)
            yield "host_prepared_us", lambda: (prepared(*qkv),)
        elif self.direction == "backward":
            arguments = [inputs.dout, *qkv, *attention(*qkv, return_stats=True, **options)]
            into = {**options, **{f"d{name}": cupy.empty_like(array) for name, array in zip("qkv", qkv, strict=True)}}
            backward = prepare(*qkv, **options, backward=True)
            yield "host_out_us", lambda: attention_backward(*arguments, **into)
            yield "host_prepared_us", lambda: backward(*arguments)

    def facts(self) -> dict[str, Any]:
        """Return the engines of the plans, the workspace, and the time to get the plans."""
        plans = self._plans()
        if not plans:
            return {"engine": "CuPy"}
        return {
            "engine": " + ".join(str(plan.engine) for plan in plans),
            "workspace_bytes": max(plan.workspace for plan in plans),
            "plan_ms": sum(plan.build_ms for plan in plans),
        }

    def peak_bytes(self, call: Call) -> int | None:
        """Return the peak of CuPy's memory pool."""
        return peak_allocation(call)

    def _plans(self) -> list[PlanInfo]:
        plans = []
        for problem in self.preset.problems(self.direction):
            report = explain(problem)
            if report.plan is None:
                raise report.error("; ".join(report.reasons))
            plans.append(report.plan)
        return plans
