"""Plan with the real cuDNN for a GPU that is described to it, in a child process that has a stub for a driver.

cuDNN on a machine without a GPU builds complete execution plans, kernels compiled and all, if it finds a libcuda.so.1 and
is told of the GPU. The stub must never be seen by a process that may use a GPU, and some graphs kill the process inside
cuDNN, so all of this happens in children.
"""

import ctypes
import multiprocessing
import shutil
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")


def build_stub(folder: Path) -> Path:
    """Compile the stub driver."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)))
    target = folder / "libcuda.so.1"
    source = Path(__file__).with_name("stub_libcuda.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-w", "-Wl,-soname,libcuda.so.1", "-o", str(target), str(source)], check=True)
    return target


def use_stub(path: str) -> None:
    """In a child: load the stub before cuDNN looks for the driver."""
    ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)


def library_version() -> int | str:
    """In a child: cuDNN's version, or why it cannot be loaded."""
    from cupy_sdpa import CudnnError
    from cupy_sdpa._cudnn.library import library

    try:
        return library().version
    except CudnnError as error:
        return str(error)


def plan_problem(problem, gpu: str, memory=None):
    """In a child: plan a problem as a call would; gives the PlanInfo, or the text of the refusal."""
    from cupy_sdpa import Unsupported, gpus
    from cupy_sdpa.plan import plan_for

    try:
        plan = plan_for(problem, device=gpus.describe(gpu), capability=gpus.capability(gpu), memory=memory)
    except Unsupported as error:
        return str(error)
    plan.close()
    return plan.info


def plan_graph(graph, gpu: str, guarded: bool = True, config=None):
    """In a child: plan a graph for a described GPU; gives the PlanInfo, or the text of the refusal."""
    from cupy_sdpa import Unsupported, gpus
    from cupy_sdpa.plan import Plan

    try:
        plan = Plan(graph, device=gpus.describe(gpu), config=config, guarded=guarded)
    except Unsupported as error:
        return str(error)
    plan.close()
    return plan.info


def in_child(stub: str, function, *arguments) -> int:
    """Run a function in a child of its own; gives its exit code, negative for the signal that killed it."""
    context = multiprocessing.get_context("spawn")
    child = context.Process(target=_call, args=(stub, function, arguments))
    child.start()
    child.join(timeout=120)
    if child.exitcode is None:
        child.kill()
        child.join()
    return child.exitcode


def _call(stub, function, arguments):
    use_stub(stub)
    function(*arguments)


class Planner:
    """A child that plans, started anew when a graph has killed it."""

    def __init__(self):
        self._folder = tempfile.TemporaryDirectory()
        self.stub = str(build_stub(Path(self._folder.name)))
        self._pool = None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._pool:
            self._pool.shutdown()
        self._folder.cleanup()

    def call(self, function, *arguments):
        """Run a function in the child."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(1, mp_context=context, initializer=use_stub, initargs=(self.stub,))
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
