"""The plan of a problem on a GPU: from the plan cache of the thread and CUDA context, which builds a missing plan."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from ..cudnn.library import library
from ..problem.problem import Problem
from ..runtime import cupy_runtime, driver
from ..support.why_not import Reason, why_not
from .plan import Plan, Target
from .planner import plan_for
from .sessions import Session, existing_session, session

T = TypeVar("T")

logger = logging.getLogger("cupy_sdpa")


def unsupported_reasons(problem: Problem, device: int) -> list[Reason]:
    """Return why the loaded cuDNN cannot run a problem on a device, from the support table; empty if no reason is known."""
    return why_not(problem, library().version, cupy_runtime.capability(device))


def with_plan(problem: Problem, device: int, use: Callable[[Session, Plan], T]) -> T:
    """Call ``use`` with the session and the plan of a problem; the plan is built if it is not in the plan cache."""
    context = driver.context_id()
    if existing_session(context) is None:
        _check_not_capturing(problem)
    current = session(context)

    def build() -> Plan:
        started = time.perf_counter()
        try:
            if reasons := unsupported_reasons(problem, device):
                raise reasons[0].error("\n".join(map(str, reasons)))
            _check_not_capturing(problem)
            plan = plan_for(problem, Target(cupy_runtime.model(device), cupy_runtime.capability(device), current.handle))
        except Exception as error:
            logger.info("refused in %.1f ms: %s: %s", (time.perf_counter() - started) * 1e3, problem, str(error))
            raise
        info = plan.info
        done = "loaded from the disk cache" if info.loaded else "built"
        logger.info("%s in %.1f ms: engine %d for %s", done, info.build_ms, info.engine, problem)
        return plan

    # Also for building: the stream of an earlier call may have been destroyed.
    current.handle.set_stream(cupy_runtime.stream())
    return current.cache.use(problem, build, functools.partial(use, current))


def _check_not_capturing(problem: Problem) -> None:
    if cupy_runtime.capturing():
        raise RuntimeError(
            f"the stream is being captured into a CUDA graph, and there is no plan yet for {problem}: building a plan would "
            "break the capture. Run the call, cupy_sdpa.explain(...) or cupy_sdpa.prepare(...) once before the capture begins"
        )
