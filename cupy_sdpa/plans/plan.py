"""Graph -> a finalized cuDNN execution plan, looked up on the shelf or built and put there; what is known of it; running it."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from .._cudnn.constants import AttributeType
from .._cudnn.descriptor import Descriptor
from .._cudnn.launch import Handle, Launcher
from .._cudnn.library import library
from .._cudnn.nvrtc import nvrtc
from ..device import memory
from ..errors import CudnnError, Unsupported
from ..graph.nodes import Graph
from ..graph.patterns import backward, forward
from ..problem.problem import Problem, writes_directly
from ..problem.tensor_spec import SIZES
from ..support.why_not import guards
from ..version import version_text
from . import plan_file
from .disk_cache import DiskCache, current
from .engines import Candidate, EngineConfig, Knobs, Search, knobs_text, no_memory
from .lowering import OperationGraph

#: Scratch tensors begin at multiples of so many bytes, as CuPy's allocations do.
ALIGNMENT = 256

#: Hopper's backward engine, adding up dQ in a fixed order: the same bits in every run with no memory of size Sq x Skv.
#: Heuristics never propose it. On an H200 with 9.28, 8192 by 8192, it takes 1.3 times as long as the default without a mask
#: and 5.5 times with causal (benchmarks/results/h200_cudnn928_deterministic.csv).
ORDERED = EngineConfig(6, (("KERNEL_CFG", 2), ("TILE_M", 2), ("TILE_N", 1), ("STAGES", 4)))
#: The first cuDNN with it.
ORDERED_SINCE = 92501


@dataclass(frozen=True)
class Target:
    """The GPU that a plan is for.

    Attributes:
        model: what tells it from GPUs that need other plans: its name, compute capability and number of multiprocessors.
        capability: its compute capability, 9.0 is 90.
        handle: the handle that the plan will belong to, of a GPU that is here; None for one that is described.
        description: of a GPU that need not be here, JSON as cuDNN writes it; such a plan cannot be run.
    """

    model: str
    capability: int
    handle: Handle | None = None
    description: str | None = None


@dataclass(frozen=True)
class PlanInfo:
    """What is known of a plan, as values that outlive it.

    Attributes:
        engine: cuDNN's number of the engine.
        knobs: the engine's settings, (name, value); -1 is the engine's own choice.
        workspace: bytes that an execution needs beside its arrays, scratch tensors included.
        notes: numerical notes, such as ``TENSOR_CORE`` and ``NONDETERMINISTIC``.
        build_ms: milliseconds that it took to get the plan: to build it, or to load it from the shelf.
        loaded: whether it was loaded.
        tuned: whether it was chosen by measuring (:func:`cupy_sdpa.prepare`).
        size: bytes of the plan in its serialized form, its kernel among them.
        refused: of every engine config that was tried before, its engine and cuDNN's reason.
        cudnn: the version that made it.
        graph: the steps that it computes.
    """

    engine: int
    knobs: Knobs
    workspace: int
    notes: tuple[str, ...]
    build_ms: float
    loaded: bool
    tuned: bool
    size: int
    refused: tuple[str, ...]
    cudnn: int
    graph: Graph = field(repr=False)

    def __str__(self) -> str:
        return "\n".join([", ".join(f"{name} {value}" for name, value in self.facts()), *self.reasons()])

    def facts(self) -> Iterator[tuple[str, str]]:
        """What there is to say of it, a name and a value each."""
        yield "cuDNN", version_text(self.cudnn)
        yield "engine", f"{self.engine}{', the fastest measured' * self.tuned}"
        yield "knobs", knobs_text(self.knobs) or "none"
        yield "numerical notes", " ".join(note.lower() for note in self.notes) or "none"
        yield "workspace", f"{self.workspace} bytes"
        yield ("loaded in" if self.loaded else "built in"), f"{self.build_ms:.1f} ms"
        yield "size", f"{self.size} bytes"

    def reasons(self) -> list[str]:
        """A line for every engine config that was refused before this one."""
        return [f"refused: {reason}" for reason in self.refused]


def plan_for(problem: Problem, target: Target, disk_cache: DiskCache | None = None) -> Plan:
    """The plan of a problem: of the ways to compute it the first that runs within ``max_workspace``.

    Deterministic gradients have two: writing dQ directly, for which cuDNN keeps dS, of size Hq x Sq x Skv x B; and, where that
    exceeds ``max_workspace``, Hopper's ordered engine, which is slower and needs little memory. The choice depends on the
    problem, the GPU's model and the version of cuDNN alone, never on how much memory is free: two runs give the same bits.

    Args:
        problem: what is asked.
        target: the GPU.
        shelf: where plans are kept; None for the process's own.

    Raises:
        Unsupported: none of them runs; the message holds every reason.
    """
    limit = problem.settings.max_workspace
    needed = guards(problem, library().version, target.capability)
    if not problem.backward:
        return make(forward(problem, needed), target, limit=limit, disk_cache=disk_cache)
    if not problem.deterministic:
        return make(backward(problem, writes_directly(problem), needed), target, limit=limit, disk_cache=disk_cache)
    try:
        return make(backward(problem, direct=True, guards=needed), target, limit=limit, disk_cache=disk_cache)
    except Unsupported as quadratic:
        if problem.sums:  # cuDNN never writes them unless dQ is written directly, see writes_directly
            raise
        version = library().version
        if version < ORDERED_SINCE or not 90 <= target.capability < 100:
            raise Unsupported(
                f"{quadratic}\n  the engine that needs less came with cuDNN {version_text(ORDERED_SINCE)}, for Hopper only: "
                f"this is cuDNN {version_text(version)} and compute capability {target.capability / 10}"
            ) from None
        before = str(quadratic).splitlines()[1:]
        graph = backward(problem, guards=needed)
        return make(graph, target, config=ORDERED, limit=limit, refused=before, disk_cache=disk_cache)


def make(
    graph: Graph,
    target: Target,
    *,
    config: EngineConfig | None = None,
    limit: int | None = None,
    refused: Sequence[str] = (),
    disk_cache: DiskCache | None = None,
) -> Plan:
    """The plan of a graph: loaded where the shelf has it, else built and put there.

    Args:
        graph: what to compute.
        target: the GPU.
        config: the engine to use; None asks heuristics.
        limit: bytes of workspace that the plan may need; None for no limit.
        refused: reasons against what was tried before.
        shelf: where plans are kept; None for the process's own.

    Raises:
        Unsupported: no engine config can be finalized; the message holds every config's reason.
        CudnnError: cuDNN failed.
    """
    disk_cache = disk_cache or current()
    key = disk_cache_key(graph, target, config, limit)
    with disk_cache.building(key):
        content = disk_cache.get(key)
        if content is not None:
            try:
                return load(content, graph, target, key)
            except (CudnnError, Unsupported, ValueError, LookupError) as error:
                if no_memory(error):
                    raise
                disk_cache.reject(key, f"{type(error).__name__}: {error}")
        started = time.perf_counter()
        with searching(graph, target, limit, refused) as (search, uids):
            kept = SerializedPlan(uids, search.first(config), tuple(search.refused))
        try:
            plan = Plan(kept, graph, target, key, (time.perf_counter() - started) * 1e3)
            disk_cache.put(key, kept.content())
        except BaseException:
            kept.candidate.close()
            raise
    return plan


def load(content: bytes, graph: Graph, target: Target, key: str) -> Plan:
    """The plan in an entry of the shelf, made ready for the target.

    Raises:
        CudnnError, Unsupported, ValueError, LookupError: it is damaged, or of no use to this cuDNN.
    """
    started = time.perf_counter()
    facts, text = plan_file.read(content)
    descriptor = Descriptor("EXECUTION_PLAN")
    try:
        with contextlib.ExitStack() as stack:
            if target.handle is not None:
                descriptor.set_handle(target.handle.pointer)
            else:
                descriptor.set("DEVICEPROP", stack.enter_context(_described(target)))
            descriptor.set("JSON_REPRESENTATION", text)
            descriptor.finalize("load a serialized plan")
        need: int = descriptor.get("WORKSPACE_SIZE", AttributeType.INT64)[0]
        if need != facts.need:
            raise ValueError(f"its workspace is {need} bytes, {facts.need} were written down")
        candidate = Candidate(descriptor, text.decode(), facts.engine, facts.knobs, facts.notes, need, facts.build_ms)
        kept = SerializedPlan(facts.uids, candidate, facts.refused, facts.tuned)
        return Plan(kept, graph, target, key, (time.perf_counter() - started) * 1e3, loaded=True)
    except BaseException:
        descriptor.close()
        raise


def disk_cache_key(graph: Graph, target: Target, config: EngineConfig | None, limit: int | None) -> str:
    """The key of a plan: of everything that it depends on, the graph by its structure and its layouts.

    cuDNN compiles a plan's kernel with the NVRTC that it finds, which is updated without cuDNN: another version or build of it
    has other keys. Where there is no NVRTC, that is part of the key too.
    """
    what = (library().build, str(nvrtc()), target.model, repr(graph), repr(config), repr(limit))
    return hashlib.sha256("\0".join(what).encode()).hexdigest()


@contextlib.contextmanager
def searching(
    graph: Graph, target: Target, limit: int | None = None, refused: Sequence[str] = (), *, guarded: bool = True
) -> Iterator[tuple[Search, dict[str, int]]]:
    """A search for engine configs of a graph, and cuDNN's numbers of its tensors.

    Args:
        graph, target, limit, refused: as for :func:`make`.
        guarded: see :class:`OperationGraph`.
    """
    handle = target.handle.pointer if target.handle else None
    with contextlib.ExitStack() as stack:
        lowered = stack.enter_context(OperationGraph(graph, handle, guarded=guarded))
        device = None if target.description is None else stack.enter_context(_described(target))
        search = Search(lowered.descriptor, handle, device, limit, Scratch(graph).total, list(refused), graph.no_split)
        yield search, lowered.uids


@dataclass(frozen=True)
class SerializedPlan:
    """All that it takes to have a plan again without planning.

    Attributes:
        uids: cuDNN's numbers of the tensors that are handed over.
        candidate: the plan.
        refused: the reasons against what was tried before.
        tuned: whether it was chosen by measuring.
    """

    uids: dict[str, int]
    candidate: Candidate
    refused: tuple[str, ...] = ()
    tuned: bool = False

    def content(self) -> bytes:
        """As an entry of the shelf: a line of facts, then cuDNN's text."""
        c = self.candidate
        facts = plan_file.Facts(self.uids, c.engine, c.knobs, c.notes, c.need, round(c.build_ms, 3), self.refused, self.tuned)
        return facts.content(c.text)


class Scratch:
    """Where a graph's scratch tensors lie in the workspace: behind cuDNN's own part."""

    def __init__(self, graph: Graph) -> None:
        self._sizes = {t.name: _aligned(t.size * SIZES[t.dtype]) for t in graph.by_role("scratch")}

    def total(self, need: int) -> int:
        """Bytes of the workspace, where cuDNN needs ``need`` of them."""
        return _aligned(need) + sum(self._sizes.values()) if self._sizes else need

    def starts(self, need: int) -> dict[str, int]:
        """Where every scratch tensor begins."""
        return dict(zip(self._sizes, itertools.accumulate(self._sizes.values(), initial=_aligned(need)), strict=False))


class Closable(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Give up what it has."""


class Plan:
    """A finalized plan, ready to run; owned by a plan cache, which closes it.

    Args:
        kept: the plan itself.
        graph: what it computes.
        target: the GPU that it is for.
        key: where it is on the shelf.
        build_ms, loaded: how it was got.

    Attributes:
        info: what is known of it.
        used: whether it ran without a look-up in its cache, see :mod:`cupy_sdpa.calls.replay_cache`.
        dependents: what is made of it, and is closed before it is.
    """

    def __init__(
        self, kept: SerializedPlan, graph: Graph, target: Target, key: str, build_ms: float, *, loaded: bool = False
    ) -> None:
        c, scratch = kept.candidate, Scratch(graph)
        self.key, self.target = key, target
        self.used = False
        self.dependents: set[Closable] = set()
        self._recorded = False
        self._descriptor = c.descriptor
        self._kept = replace(kept, candidate=replace(c, text=""))  # cuDNN has it too, see content()
        self._scratch = scratch.starts(c.need)
        self.info = PlanInfo(
            c.engine, c.knobs, scratch.total(c.need), c.notes, build_ms, loaded, kept.tuned, len(c.text), kept.refused,
            library().version, graph,
        )  # fmt: skip
        constants = graph.by_role("constant")
        here = target.handle is not None
        self._constants = {t.name: memory.positions(t.span).data.ptr if here else 0 for t in constants}
        self._arrays = [t.name for t in graph.by_role("input", "output", "constant", "scratch")]
        numbers = graph.by_role("scalar")
        self._scalars = [t.name for t in numbers if t.value is None]
        uids = kept.uids
        self._launcher = Launcher(
            c.descriptor, [uids[name] for name in self._arrays], [(uids[t.name], t.dtype, t.value) for t in numbers]
        )

    def set_stream(self, stream: int) -> None:
        """Have what follows run on a stream."""
        assert self.target.handle is not None, "planned for a GPU that is not here"
        self.target.handle.set_stream(stream)

    def execute(self, addresses: Mapping[str, int], scalars: Mapping[str, float], workspace: int = 0) -> None:
        """Enqueue on the handle's stream; returns before the GPU is done.

        Args:
            addresses: where the array of every input and output begins, by name.
            scalars: the numbers that the graph leaves open, by name.
            workspace: address of at least ``info.workspace`` bytes.
        """
        assert self.target.handle is not None, "planned for a GPU that is not here"
        if self._scratch or self._constants:
            scratch = {name: workspace + start for name, start in self._scratch.items()}
            addresses = {**addresses, **scratch, **self._constants}
        self._launcher.launch(
            self.target.handle, [addresses[name] for name in self._arrays], [scalars[name] for name in self._scalars], workspace
        )

    def mark_tuned(self) -> None:
        """Note that it was chosen by measuring."""
        self._kept = replace(self._kept, tuned=True)
        self.info = replace(self.info, tuned=True)

    def content(self) -> bytes:
        """As an entry of the shelf."""
        text = self._descriptor.get_text("JSON_REPRESENTATION")
        return replace(self._kept, candidate=replace(self._kept.candidate, text=text)).content()

    def keep(self) -> None:
        """Never destroy the plan: a CUDA graph has recorded its kernels, and may be replayed after a cache has let go of it."""
        self._recorded = True

    def close(self) -> None:
        """Close what is made of it, then destroy the plan, unless a CUDA graph needs it; kernels already enqueued still run.

        One failure does not stop the rest: all are closed, then the error is raised.
        """
        with contextlib.ExitStack() as stack:
            if not self._recorded:
                stack.callback(self._descriptor.close)  # the first one in is the last one out
            while self.dependents:
                stack.callback(self.dependents.pop().close)


def _described(target: Target) -> Descriptor:
    """cuDNN's reading of a described GPU; the caller closes it."""
    assert target.description is not None
    device = Descriptor("DEVICEPROP")
    try:
        device.set("JSON_REPRESENTATION", target.description.encode())
        device.finalize("read the description of the GPU")
    except BaseException:
        device.close()
        raise
    return device


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
