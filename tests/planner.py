"""Plan with the real cuDNN for a described GPU, in a child process with a stub driver.

On a machine without a GPU cuDNN builds complete execution plans, with compiled kernels, if it finds a libcuda.so.1 that
describes a GPU. A process that may use a GPU must not load the stub, and some graphs crash cuDNN, so planning runs in children.
"""

import contextlib
import hashlib
import json
import shutil
import sys
from typing import NamedTuple
from unittest import mock

from cupy_sdpa.offline._workers import Pool, Worker, WorkerEnded, worker_environment

#: The environment of a child that imports what its parent does.
child_environment = worker_environment


def ready() -> None:
    """In a child: load the driver, or a stub, before cuDNN searches for it."""
    from cupy_sdpa.core.cudnn.deviceless import load_driver_or_stub

    load_driver_or_stub()


def library_version() -> int | str:
    """In a child: the version of cuDNN, or the reason why it cannot be loaded."""
    from cupy_sdpa import CudnnError
    from cupy_sdpa.core.cudnn.library import library

    try:
        return library().version
    except CudnnError as error:
        return str(error)


@contextlib.contextmanager
def without_kernels():
    """In a child: searches take the first engine config that cuDNN's checks accept, and no kernel is compiled.

    Compiling takes a second, everything else 20 milliseconds. Engine, notes and workspace are those of the plan, and its limit
    applies; the knobs are missing, and a kernel that does not compile is not noticed.
    """
    from cupy_sdpa import Unsupported
    from cupy_sdpa.core.cudnn.constants import AttributeType
    from cupy_sdpa.core.cudnn.descriptor import Descriptor
    from cupy_sdpa.core.cudnn_engine.engines import EngineSearch, _number_and_notes
    from cupy_sdpa.core.cudnn_engine.plan import Candidate, Facts

    def take(search, config):
        engine, notes = _number_and_notes(config)
        (need,) = config.get("WORKSPACE_SIZE", AttributeType.INT64)
        try:
            search.check_workspace(need)
        except Unsupported as error:
            search.refused.append(f"engine {engine}: {error}")
            return None
        facts = Facts(search.lowered.uids, engine, (), notes, need, 0.0, tuple(search.refused))
        return Candidate(Descriptor("EXECUTION_PLAN"), "", facts)

    with mock.patch.object(EngineSearch, "_try", take):
        yield


def accept(function, *arguments):
    """In a child: what a function that plans gives without compiling kernels."""
    with without_kernels():
        return function(*arguments)


def plan_problem(problem, gpu):
    """In a child: plan a problem as a call would, for a described GPU or its name; gives the PlanInfo, or the text of the refusal."""
    from cupy_sdpa import Unsupported
    from cupy_sdpa.core.cudnn_engine.disk_cache import DiskCache
    from cupy_sdpa.core.cudnn_engine.plan import Target
    from cupy_sdpa.core.cudnn_engine.planner import plan_for

    try:
        plan = plan_for(problem, Target.described(gpu) if isinstance(gpu, str) else gpu, DiskCache(None))
    except Unsupported as error:
        return str(error)
    plan.close()
    return plan.info


def plan_graph(graph, gpu: str, config=None):
    """In a child: plan a graph for a described GPU; gives the PlanInfo, or the text of the refusal."""
    from cupy_sdpa import Unsupported
    from cupy_sdpa.core.cudnn_engine.engines import engine_search
    from cupy_sdpa.core.cudnn_engine.plan import Plan, Target

    target = Target.described(gpu)
    try:
        with engine_search(graph, target) as search:
            plan = Plan(search.first(config), graph, target, 0.0)
    except Unsupported as error:
        return str(error)
    plan.close()
    return plan.info


class Kernels(NamedTuple):
    """The kernels that cuDNN compiles for a graph.

    Attributes:
        digest: of their machine code.
        passed: the names of the graph's tensors that they are passed, as pointers or by value.
    """

    digest: str
    passed: frozenset[str]


def kernels_of(graph, gpu: str):
    """In a child: the kernels in the serialized plan of a graph for a described GPU, or the text of the refusal."""
    from cupy_sdpa import Unsupported
    from cupy_sdpa.core.cudnn_engine.engines import engine_search
    from cupy_sdpa.core.cudnn_engine.plan import Target

    try:
        with engine_search(graph, Target.described(gpu)) as search:
            candidate = search.first()
    except Unsupported as error:
        return str(error)
    with candidate.descriptor:
        kernels = json.loads(candidate.text)["engine"]["payload"]["kernels"]
    code = "".join(kernel["cubin"] for kernel in kernels)
    bound = {entry.get("uid") for kernel in kernels for entry in kernel["kernelParams"]["offsets"]}
    passed = frozenset(name for name, uid in candidate.facts.uids.items() if uid in bound)
    return Kernels(hashlib.sha256(code.encode()).hexdigest(), passed)


def descriptors_of(problem, gpu):
    """In a child: how many descriptors planning creates, and how many exist while the plan exists and after."""
    from cupy_sdpa import Unsupported
    from cupy_sdpa.core.cudnn.library import library
    from cupy_sdpa.core.cudnn_engine.disk_cache import DiskCache
    from cupy_sdpa.core.cudnn_engine.plan import Target
    from cupy_sdpa.core.cudnn_engine.planner import plan_for

    lib, made, gone, alive = library(), [], [], 0
    create, destroy = lib.cudnnBackendCreateDescriptor, lib.cudnnBackendDestroyDescriptor
    lib.cudnnBackendCreateDescriptor = lambda *a: (made.append(1), create(*a))[1]
    lib.cudnnBackendDestroyDescriptor = lambda *a: (gone.append(1), destroy(*a))[1]
    try:
        plan = plan_for(problem, Target.described(gpu), DiskCache(None))
        alive = len(made) - len(gone)
        plan.close()
    except Unsupported:
        pass
    finally:
        lib.cudnnBackendCreateDescriptor, lib.cudnnBackendDestroyDescriptor = create, destroy
    return len(made), alive, len(made) - len(gone)


def nvrtc_in_use(problem, gpu):
    """In a child: the version and the path of NVRTC that were found, and the paths of those that are loaded after planning."""
    from pathlib import Path

    from cupy_sdpa.core.cudnn.nvrtc import nvrtc

    plan_problem(problem, gpu)
    in_use = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libnvrtc.so" in line}
    return nvrtc().version, nvrtc().path, sorted(in_use)


class Raised:
    """Instead of the result of a function that raised an exception."""

    def __init__(self, error):
        self.error = error


def handle(request):
    """In a child: call a function."""
    function, arguments = request
    try:
        return function(*arguments)
    except Exception as error:
        return Raised(error)


def start():
    """Start a child that calls functions."""
    command = [
        sys.executable,
        "-c",
        "import planner, cupy_sdpa.offline._workers; planner.ready(); cupy_sdpa.offline._workers.serve(planner.handle)",
    ]
    return Worker(command, worker_environment())


class Died(AssertionError):
    """A graph has killed the child that planned it."""


class Planner:
    """A child that plans, and is restarted after a crash."""

    def __init__(self):
        self._pool = Pool(1, start)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._pool.close()

    def call(self, function, *arguments):
        """Run a function in the child."""
        try:
            result = self._pool.request((function, arguments), 300.0)
        except WorkerEnded:
            raise Died("the child died inside cuDNN") from None
        if isinstance(result, Raised):
            raise result.error
        return result

    def accept(self, function, *arguments):
        """What a function that plans gives in the child without compiling kernels."""
        return self.call(accept, function, *arguments)


def compared(planner: Planner, function, *arguments):
    """What a function that plans gives, kernels compiled; where they are accepted, the same without them."""
    from cupy_sdpa.core.cudnn_engine.plan import PlanInfo

    plan, accepted = planner.call(function, *arguments), planner.accept(function, *arguments)
    if isinstance(plan, PlanInfo) and not plan.refused:
        assert (plan.engine, plan.workspace, plan.notes) == (accepted.engine, accepted.workspace, accepted.notes)
    elif isinstance(plan, str):
        assert isinstance(accepted, str) or "compil" in plan
    return plan


def probe() -> str | None:
    """The reason why no plan can be built here, or None."""
    from cupy_sdpa.core.cudnn.deviceless import COMPILERS

    if not any(map(shutil.which, COMPILERS)):
        return f"no C compiler ({', '.join(COMPILERS)}) to build the stub of libcuda.so.1 with"
    with Planner() as planner:
        version = planner.call(library_version)
    return version if isinstance(version, str) else None
