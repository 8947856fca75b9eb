"""Report whether and how a call would run (:meth:`.ReadCall.report`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from ..boundary.arguments import read_shapes
from ..graph import graph_of
from ..problem.problem import Problem
from ..problem.tensor_spec import dtype_name
from ..replay.bound_program import Repeatable
from ..replay.call_report import Report, explain_on_device, joined, with_workarounds
from ..runtime import cupy_runtime
from ..runtime.interpreted_array import InterpretedArray
from ..support.batch import batch_dependence


def report_of(
    call: Repeatable,
    explain: Callable[[Problem], Report] | None = None,
    target: Callable[[], tuple[int, int]] | None = None,
) -> Report:
    """Report whether and how a call would run: the steps of its program, and the plan of each launch.

    ``explain`` returns the report on a problem, and ``target`` the version of cuDNN and the compute capability that it is for.
    Default: the report on the engine of the arrays; plans are built and cached.
    """
    problems = problems_of(call)
    if explain is not None:
        report = joined([explain(problem) for problem in problems])
    elif not call.on_gpu:
        engine = "CuPy" if isinstance(call.arrays["q"], InterpretedArray) else "numpy"
        report = joined([Report(engine, problem, graph_of(problem)) for problem in problems])
    else:
        with cupy_runtime.on_device_of(call.arrays["q"]) as device:
            report = joined([explain_on_device(problem, device) for problem in problems])
            if report.plan:
                here = report.plan.cudnn, cupy_runtime.capability(device)
                target = lambda: here  # noqa: E731
    if target:
        of = dict.fromkeys(attend.of for attend in call.program.launches)
        of |= {call.problem: None} if call.problem is not None else {}
        report = with_workarounds(report, of, target)
    # unknown for a call of several parts, or one that cannot run
    dependence = None
    if call.problem is not None and not report.reasons:
        dependence = batch_dependence(call.problem, on_cudnn=report.engine == "cuDNN")
    return dataclasses.replace(
        report,
        steps=tuple(call.program.lines()),
        accuracy=accuracy_of(call),
        temporary_bytes=call.program.memory_bytes,
        scalars=tuple(call.scalars.items()),
        batch_dependence=dependence,
    )


def problems_of(call: Repeatable) -> tuple[Problem, ...]:
    """Return the problems that an engine runs, in the order of the steps; one without keys if no query attends to a key."""
    if launches := call.program.launches:
        return tuple(attend.problem for attend in launches)
    if "v" not in call.arrays:
        raise TypeError("the function computes no attention: explain and explain_function report on calls that do")
    q, v, results = call.arrays["q"], call.arrays["v"], call.results
    (d, hq, sq, b), (dv, hkv, *_) = q.shape, v.shape
    flags: dict[str, Any] = {"backward": "dq" in results, "return_stats": "stats" in results}
    return (read_shapes((d, hq, sq, b), (d, hkv, 0, b), (dv, hkv, 0, b), {}, dtype=dtype_name(q.dtype), **flags),)


def accuracy_of(call: Repeatable) -> str:
    """Return the expected error of a call in FP8, and its cause; empty for other dtypes."""
    dtypes = {attend.problem.dtype for attend in call.program.launches if attend.problem.fp8}
    if not dtypes:
        return ""
    part = "12 %" if "float8_e5m2" in dtypes else "6 %"
    rounding = (
        f"about {part} of the output of v without its mean, because q, k, v, the weights and this output are rounded to FP8"
    )
    for step in call.program.steps:
        if after := getattr(step.function, "accuracy", ""):  # what a step of a layer does about it
            return f"{rounding}; {after}"
    return (
        f"{rounding}; and on Hopper about 15 % of the mean of v at 8192 keys and 40 % at 32768, because the tensor cores "
        "truncate sums: convert v with fp8.quantize_qkv, or with center=True"
    )
