"""Choose, load or build the execution plan of a problem."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Sequence

from ..cudnn.constants import AttributeType
from ..cudnn.descriptor import Descriptor
from ..cudnn.library import library
from ..cudnn.nvrtc import nvrtc
from ..errors import CudnnError, Unsupported
from ..graph import graph_of
from ..graph.attention_backward import backward
from ..graph.nodes import Graph
from ..problem.problem import Problem
from ..support.why_not import guards
from ..version import version_text
from .disk_cache import DiskCache, current
from .engines import EngineConfig, described_device, engine_search, graph_retention, is_out_of_memory
from .plan import Candidate, Plan, Scratch, Target, facts_of

#: Hopper's ordered backward engine: it accumulates dQ in a fixed order, so every run gives the same bits, and allocates nothing
#: of size Sq x Skv. Heuristics never propose it. On an H200 with 9.28, 8192 by 8192, it takes 1.3 times as long as the default
#: without a mask and 5.5 times with causal (benchmarks/results/h200_cudnn928_deterministic.csv).
ORDERED = EngineConfig(6, (("KERNEL_CFG", 2), ("TILE_M", 2), ("TILE_N", 1), ("STAGES", 4)))
#: The first cuDNN version with the ordered engine.
ORDERED_SINCE = 92501


def plan_for(problem: Problem, target: Target, disk_cache: DiskCache | None = None) -> Plan:
    """Load or build the plan of a problem; by default it is stored in the disk cache of the process.

    There are two algorithms for deterministic gradients. The first one writes dQ directly; cuDNN then stores dS, of size
    Hq x Sq x Skv x B. If that exceeds ``max_workspace``, Hopper's ordered engine is used, which is slower but needs little
    memory. The choice depends on the problem, the GPU model and the version of cuDNN only, never on the amount of free memory:
    two runs give the same bits.

    Raises:
        Unsupported: cuDNN has no plan for the problem; the message contains every reason.
    """
    library().route_log()
    limit = problem.settings.max_workspace
    workarounds = guards(problem, library().version, target.capability)
    try:
        return load_or_build(graph_of(problem, workarounds), target, limit=limit, disk_cache=disk_cache)
    except Unsupported as error:
        # cuDNN writes the reductions of dS only if dQ is written directly
        if not problem.backward or not problem.deterministic or problem.ds_reductions:
            raise
        version = library().version
        if version < ORDERED_SINCE or not 90 <= target.capability < 100:
            raise Unsupported(
                f"{error}\n  the engine that needs less workspace requires cuDNN {version_text(ORDERED_SINCE)} or newer and a "
                f"Hopper GPU; this is cuDNN {version_text(version)} and compute capability {target.capability / 10}"
            ) from None
        refused = str(error).splitlines()[1:]
    graph = backward(problem, guards=workarounds)
    return load_or_build(graph, target, config=ORDERED, limit=limit, refused=refused, disk_cache=disk_cache)


def load_or_build(
    graph: Graph,
    target: Target,
    *,
    config: EngineConfig | None = None,
    limit: int | None = None,
    refused: Sequence[str] = (),
    disk_cache: DiskCache | None = None,
) -> Plan:
    """Load the plan of a graph from the disk cache, or build it and store it there.

    Without a ``config`` it is the first supported one of cuDNN's heuristics; the other arguments are as for :func:`plan_for`
    and :class:`.engines.EngineSearch`.
    """
    disk_cache = disk_cache or current()
    key = disk_cache_key(graph, target, config, limit)
    with disk_cache.building(key):
        content = disk_cache.get(key)
        if content is not None:
            try:
                return load(content, graph, target)
            except (CudnnError, Unsupported, ValueError, LookupError) as error:
                if is_out_of_memory(error):
                    raise
                disk_cache.reject(key, f"{type(error).__name__}: {error}")
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            with engine_search(graph, target, limit, refused) as search:
                candidate = search.first(config)
            stack.enter_context(candidate.descriptor)
            plan = Plan(candidate, graph, target, (time.perf_counter() - started) * 1e3)
            disk_cache.put(key, candidate.facts.content(candidate.text))
            stack.pop_all()
    return plan


def load(content: bytes, graph: Graph, target: Target) -> Plan:
    """Finalize the plan in an entry of the disk cache; raises many errors if it is damaged, or this cuDNN cannot load it."""
    started = time.perf_counter()
    facts, text = facts_of(content)
    with contextlib.ExitStack() as stack:
        of = {"HANDLE": target.cudnn_handle, "DEVICEPROP": described_device(target, stack), "JSON_REPRESENTATION": text}
        made = Descriptor.finalized("EXECUTION_PLAN", "load a serialized plan", **of, **graph_retention())
    with contextlib.ExitStack() as stack:
        stack.enter_context(made)
        (workspace_bytes,) = made.get("WORKSPACE_SIZE", AttributeType.INT64)
        if workspace_bytes != facts.need:
            raise ValueError(f"its workspace is {workspace_bytes} bytes, the entry has {facts.need}")
        candidate, build_ms = Candidate(made, text.decode(), facts), (time.perf_counter() - started) * 1e3
        plan = Plan(candidate, graph, target, build_ms, loaded=True)
        stack.pop_all()
    return plan


def disk_cache_key(graph: Graph, target: Target, config: EngineConfig | None, limit: int | None) -> str:
    """Return the key of a plan in the disk cache: a digest of everything that the plan depends on.

    The digest covers the structure and the layouts of the graph. It also covers the version and the build of NVRTC, which
    compiles the plan's kernel and is updated independently of cuDNN, or the fact that NVRTC is missing. With a limit it covers
    the scratch memory, which counts towards the limit. For packed sequences its size depends on their total length, which is
    not part of the graph's structure.
    """
    scratch = "" if limit is None else str(Scratch(graph).total_bytes(0))
    parts = (library().build, str(nvrtc()), target.model, repr(graph), repr(config), repr(limit), scratch)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
