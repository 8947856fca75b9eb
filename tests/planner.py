"""Plan with the real cuDNN for a GPU that is described to it, in a child process that has a stub for a driver.

cuDNN on a machine without a GPU builds complete execution plans, kernels compiled and all, if it finds a libcuda.so.1 and
is told of the GPU. The stub must never be seen by a process that may use a GPU, and some graphs kill the process inside
cuDNN, so all of this happens in children.
"""

import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool


def child_environment(**more):
    """The environment of a child that imports what its parent does."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **more}


def ready() -> None:
    """In a child: take the stub for the driver before cuDNN looks for one."""
    from cupy_sdpa._cudnn.driver import use_stub

    use_stub()


def library_version() -> int | str:
    """In a child: cuDNN's version, or why it cannot be loaded."""
    from cupy_sdpa import CudnnError
    from cupy_sdpa._cudnn.library import library

    try:
        return library().version
    except CudnnError as error:
        return str(error)


def plan_problem(problem, gpu: str):
    """In a child: plan a problem as a call would; gives the PlanInfo, or the text of the refusal."""
    from cupy_sdpa import Unsupported
    from cupy_sdpa.offline.planner import load_target
    from cupy_sdpa.plans.disk_cache import DiskCache
    from cupy_sdpa.plans.plan import plan_for

    try:
        plan = plan_for(problem, load_target(gpu), DiskCache(None))
    except Unsupported as error:
        return str(error)
    plan.close()
    return plan.info


def plan_graph(graph, gpu: str, guarded: bool = True, config=None):
    """In a child: plan a graph for a described GPU; gives the PlanInfo, or the text of the refusal."""
    from cupy_sdpa import Unsupported
    from cupy_sdpa.offline.planner import load_target
    from cupy_sdpa.plans.plan import Plan, SerializedPlan, searching

    target = load_target(gpu)
    try:
        with searching(graph, target, guarded=guarded) as (search, uids):
            plan = Plan(SerializedPlan(uids, search.first(config), tuple(search.refused)), graph, target, "", 0.0)
    except Unsupported as error:
        return str(error)
    plan.close()
    return plan.info


def in_child(function, *arguments) -> int:
    """Run a function in a child of its own; gives its exit code, negative for the signal that killed it."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_call, args=(function, arguments))
    child.start()
    child.join(timeout=120)
    if child.exitcode is None:
        child.kill()
        child.join()
    return child.exitcode


def _call(function, arguments):
    ready()
    function(*arguments)


class Planner:
    """A child that plans, started anew when a graph has killed it."""

    def __init__(self):
        self._pool = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._pool:
            self._pool.shutdown()

    def call(self, function, *arguments):
        """Run a function in the child."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=ready)
        try:
            return self._pool.submit(function, *arguments).result(timeout=300)
        except BrokenProcessPool:
            self._pool = None
            raise AssertionError("the child died inside cuDNN") from None

    def plan(self, graph, gpu="h200"):
        """The PlanInfo of a graph on a described GPU, or the text of cuDNN's refusal."""
        return self.call(plan_graph, graph, gpu)


def probe() -> str | None:
    """Why no plan can be made here, or None."""
    with Planner() as planner:
        version = planner.call(library_version)
    return version if isinstance(version, str) else None
