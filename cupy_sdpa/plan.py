"""Graph -> a finalized cuDNN execution plan: which engine, how much workspace, and why the others were refused."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._cudnn.constants import AttributeType, HeurMode, KnobType, NumericalNote, name_of
from ._cudnn.descriptor import Descriptor
from ._cudnn.launch import Handle, Launcher
from ._cudnn.library import library
from .errors import CudnnError, Unsupported
from .graph import Graph
from .lowering import OperationGraph
from .patterns import backward, forward
from .problem import Problem
from .support import guards
from .version import version_text

#: Scratch tensors begin at multiples of so many bytes, as CuPy's allocations do.
ALIGNMENT = 256


@dataclass(frozen=True)
class EngineConfig:
    """An engine and its knobs, set by hand where heuristics do not offer them."""

    engine: int
    knobs: tuple[tuple[KnobType, int], ...]


#: Hopper's backward engine, adding up dQ in a fixed order: the same bits in every run with no memory of size Sq x Skv.
#: Heuristics never propose it. On an H200 with 9.28, 8192 by 8192, it takes 1.3 times as long as the default without a mask
#: and 5.5 times with causal (benchmarks/results/h200_cudnn928_deterministic.csv).
ORDERED = EngineConfig(6, ((KnobType.KERNEL_CFG, 2), (KnobType.TILE_M, 2), (KnobType.TILE_N, 1), (KnobType.STAGES, 4)))
#: The first cuDNN with it.
ORDERED_SINCE = 92501


@dataclass(frozen=True)
class PlanInfo:
    """What is known of a plan, as values that outlive it.

    Attributes:
        engine: cuDNN's number of the engine.
        workspace: bytes that an execution needs beside its arrays, scratch tensors included.
        notes: numerical notes, such as ``TENSOR_CORE`` and ``NONDETERMINISTIC``.
        build_ms: milliseconds that heuristics and finalization took.
        refused: of every engine config that was tried before, its engine and cuDNN's reason.
        cudnn: the version that made it.
        graph: the steps that it computes.
    """

    engine: int
    workspace: int
    notes: tuple[str, ...]
    build_ms: float
    refused: tuple[str, ...]
    cudnn: int
    graph: Graph

    def __str__(self) -> str:
        notes = ", ".join(note.lower() for note in self.notes) or "no notes"
        text = (
            f"cuDNN {version_text(self.cudnn)} engine {self.engine} ({notes}), workspace {self.workspace} bytes, "
            f"built in {self.build_ms:.0f} ms"
        )
        return "\n".join([text, *(f"refused: {reason}" for reason in self.refused)])


def plan_for(
    problem: Problem, handle: Handle | None = None, device: str | None = None, *, capability: int, memory: int | None = None
) -> Plan:
    """The plan of a problem: of the ways to compute it the first that runs within the memory allowed.

    Deterministic gradients have two: writing dQ directly, for which cuDNN keeps dS, of size Sq x Skv; and, beyond that
    memory, Hopper's ordered engine, which is slower and needs next to none.

    Args:
        problem: what is asked.
        handle, device: as for :class:`Plan`.
        capability: the GPU's compute capability, 9.0 is 90.
        memory: bytes that could be allocated now; None where nobody knows.

    Raises:
        Unsupported: none of them runs; the message holds every reason.
    """
    limit = problem.max_workspace
    if not problem.backward:
        return Plan(forward(problem), handle, device, limit=limit)
    needed = guards(problem, library().version, capability)
    if not problem.deterministic:
        return Plan(backward(problem, guards=needed), handle, device, limit=limit)
    within = min((bound for bound in (limit, memory) if bound is not None), default=None)
    try:
        return Plan(backward(problem, direct=True, guards=needed), handle, device, limit=within)
    except Unsupported as quadratic:
        version = library().version
        if version < ORDERED_SINCE or not 90 <= capability < 100:
            raise Unsupported(
                f"{quadratic}\n  the engine that needs less came with cuDNN {version_text(ORDERED_SINCE)}, for Hopper only: "
                f"this is cuDNN {version_text(version)} and compute capability {capability / 10}"
            ) from None
        before = str(quadratic).splitlines()[1:]
        return Plan(backward(problem, guards=needed), handle, device, config=ORDERED, limit=within, refused=before)


class Plan:
    """A finalized plan, ready to run; owned by a plan cache, which closes it.

    Args:
        graph: what to compute.
        handle: the handle that the plan will belong to; None plans for ``device`` instead.
        device: a description of a GPU that need not be here (JSON as cuDNN writes it); such a plan cannot be run.
        config: the engine to use; None asks heuristics.
        limit: bytes of workspace that the plan may need; None for no limit.
        refused: reasons against what was tried before.
        guarded: see :class:`OperationGraph`.

    Raises:
        Unsupported: no engine config can be finalized; the message holds every config's reason.
        CudnnError: cuDNN failed.
    """

    def __init__(
        self,
        graph: Graph,
        handle: Handle | None = None,
        device: str | None = None,
        *,
        config: EngineConfig | None = None,
        limit: int | None = None,
        refused: Sequence[str] = (),
        guarded: bool = True,
    ) -> None:
        started = time.perf_counter()
        self._handle = handle
        scratch = graph.by_role("scratch")
        sizes = [_aligned(math.prod(t.shape) * 4) for t in scratch]
        choice = _Choice(handle.pointer if handle else None, limit, sum(sizes), list(refused))
        with contextlib.ExitStack() as stack:
            lowered = stack.enter_context(OperationGraph(graph, choice.handle, guarded=guarded))
            if device is not None:
                choice.device = stack.enter_context(Descriptor("DEVICEPROP"))
                choice.device.set("JSON_REPRESENTATION", device.encode())
                choice.device.finalize("read the description of the GPU")
            chosen = choice.by_hand(lowered.descriptor, config) if config else choice.by_heuristics(lowered.descriptor)
            uids = lowered.uids
        self._descriptor, engine, notes, need = chosen
        build_ms = (time.perf_counter() - started) * 1e3
        #: Where every scratch tensor lies in the workspace: behind cuDNN's own part.
        starts = itertools.accumulate(sizes, initial=_aligned(need))
        self._scratch = {t.name: start for t, start in zip(scratch, starts, strict=False)}
        workspace = _aligned(need) + sum(sizes) if sizes else need
        self.info = PlanInfo(engine, workspace, notes, build_ms, tuple(choice.refused), library().version, graph)
        self._arrays = [t.name for t in graph.by_role("input", "output", "scratch")]
        numbers = graph.by_role("scalar")
        self._scalars = [t.name for t in numbers if t.value is None]
        self._launcher = Launcher(
            self._descriptor, [uids[name] for name in self._arrays], [(uids[t.name], t.dtype, t.value) for t in numbers]
        )

    def execute(self, addresses: Mapping[str, int], scalars: Mapping[str, float], workspace: int = 0) -> None:
        """Enqueue on the handle's stream; returns before the GPU is done.

        Args:
            addresses: where the array of every input and output begins, by name.
            scalars: the numbers that the graph leaves open, by name.
            workspace: address of at least ``info.workspace`` bytes.
        """
        assert self._handle is not None, "planned for a GPU that is not here"
        if self._scratch:
            addresses = {**addresses, **{name: workspace + start for name, start in self._scratch.items()}}
        self._launcher.launch(
            self._handle, [addresses[name] for name in self._arrays], [scalars[name] for name in self._scalars], workspace
        )

    def close(self) -> None:
        """Destroy the plan; the kernels that it has enqueued run on."""
        self._descriptor.close()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


#: A finalized plan, its engine, its notes, and the bytes of workspace that cuDNN wants.
_Chosen = tuple[Descriptor, int, tuple[str, ...], int]


@dataclass
class _Choice:
    """The search for an engine config that finalizes and keeps within the limit; what was refused on the way is kept."""

    handle: int | None
    limit: int | None
    scratch: int
    refused: list[str]
    device: Descriptor | None = None

    def by_heuristics(self, graph: Descriptor) -> _Chosen:
        """The first that does, in the order of cuDNN's heuristics."""
        for mode in (HeurMode.A, HeurMode.FALLBACK):
            library().last_error()  # forget what was said before
            try:
                configs = _configs(graph, mode, self.device)
            except Unsupported as error:
                self.refused.append(f"heuristics {mode.name}: {error}")
                continue
            if not configs and not self.refused:  # no failure, but cuDNN says in its error text why it proposes nothing
                said = library().last_error() or ["no reason given"]
                self.refused += [f"heuristics {mode.name} proposed none: {cause}" for cause in said]
            try:
                while configs:
                    with configs.pop(0) as config:
                        if chosen := self._try(config):
                            return chosen
            finally:
                _close(configs)
        raise self._refusal()

    def by_hand(self, graph: Descriptor, wanted: EngineConfig) -> _Chosen:
        """The engine and knobs named."""
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(Descriptor("ENGINE"))
            engine.set("OPERATION_GRAPH", graph)
            engine.set("GLOBAL_INDEX", wanted.engine)
            if self.device is not None:
                engine.set("DEVICEPROP", self.device)
            engine.finalize(f"take engine {wanted.engine}")
            choices = []
            for knob, value in wanted.knobs:
                choice = stack.enter_context(Descriptor("KNOB_CHOICE"))
                choice.set("KNOB_TYPE", knob)
                choice.set("KNOB_VALUE", value)
                choice.finalize(f"set knob {knob.name}")
                choices.append(choice)
            config = stack.enter_context(Descriptor("ENGINECFG"))
            config.set("ENGINE", engine)
            config.set("KNOB_CHOICES", choices)
            config.finalize(f"configure engine {wanted.engine}")
            if chosen := self._try(config):
                return chosen
        raise self._refusal()

    def _try(self, config: Descriptor) -> _Chosen | None:
        """Finalize a plan; None, and the reason kept, where it cannot be or needs too much."""
        engine, notes = _engine(config)
        plan = Descriptor("EXECUTION_PLAN")
        try:
            if self.handle is not None:
                plan.set_handle(self.handle)
            plan.set("ENGINE_CONFIG", config)
            if self.device is not None:
                plan.set("DEVICEPROP", self.device)
            plan.finalize(f"finalize a plan with engine {engine}")
            need: int = plan.get("WORKSPACE_SIZE", AttributeType.INT64)[0]
            total = _aligned(need) + self.scratch if self.scratch else need
            if self.limit is not None and total > self.limit:
                raise Unsupported(f"it needs a workspace of {total} bytes, {self.limit} are allowed or free")
            return plan, engine, notes, need
        except BaseException as error:
            plan.close()
            # A kernel that does not compile (4001) is one engine's failure: the next may do.
            if not isinstance(error, (Unsupported, CudnnError)):
                raise
            self.refused.append(f"engine {engine}: {error}")
            return None

    def _refusal(self) -> Unsupported:
        reasons = "\n".join(f"  {reason}" for reason in self.refused)
        return Unsupported(f"cuDNN {version_text(library().version)} has no engine for this graph:\n{reasons}")


def _configs(graph: Descriptor, mode: HeurMode, device: Descriptor | None) -> list[Descriptor]:
    """The engine configs that heuristics propose, the most promising first; the caller closes them."""
    with Descriptor("ENGINEHEUR") as heuristics:
        heuristics.set("OPERATION_GRAPH", graph)
        heuristics.set("MODE", mode)
        if device is not None:
            heuristics.set("DEVICEPROP", device)
        heuristics.finalize("ask the heuristics for engines")
        count = heuristics.count("RESULTS", AttributeType.BACKEND_DESCRIPTOR)
        configs: list[Descriptor] = []
        try:
            for _ in range(count):
                configs.append(Descriptor("ENGINECFG"))
            filled = heuristics.fill("RESULTS", configs) if configs else 0
        except BaseException:
            _close(configs)
            raise
    _close(configs[filled:])  # before anything long runs
    return configs[:filled]


def _engine(config: Descriptor) -> tuple[int, tuple[str, ...]]:
    """The number of an engine config's engine, and its numerical notes."""
    with Descriptor("ENGINE") as engine:
        config.fill("ENGINE", [engine])
        notes = engine.get("NUMERICAL_NOTE", AttributeType.NUMERICAL_NOTE, count=16)
        names = tuple(name_of(NumericalNote, note) or f"note {note}" for note in notes)
        return engine.get("GLOBAL_INDEX", AttributeType.INT64)[0], names


def _close(descriptors: Sequence[Descriptor]) -> None:
    for descriptor in descriptors:
        descriptor.close()
