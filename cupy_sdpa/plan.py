"""Graph -> a finalized cuDNN execution plan: which engine, how much workspace, and why the others were refused."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ._cudnn.constants import AttributeType, HeurMode, NumericalNote, name_of
from ._cudnn.descriptor import Descriptor
from ._cudnn.launch import Handle, Launcher
from ._cudnn.library import library
from .errors import CudnnError, Unsupported
from .graph import Graph
from .lowering import OperationGraph
from .version import version_text


@dataclass(frozen=True)
class PlanInfo:
    """What is known of a plan, as values that outlive it.

    Attributes:
        engine: cuDNN's number of the engine.
        workspace: bytes that an execution needs beside its arrays.
        notes: numerical notes, such as ``TENSOR_CORE`` and ``NONDETERMINISTIC``.
        build_ms: milliseconds that heuristics and finalization took.
        refused: of every engine config that was tried before, its engine and cuDNN's reason.
        cudnn: the version that made it.
    """

    engine: int
    workspace: int
    notes: tuple[str, ...]
    build_ms: float
    refused: tuple[str, ...]
    cudnn: int

    def __str__(self) -> str:
        notes = ", ".join(note.lower() for note in self.notes) or "no notes"
        text = (
            f"cuDNN {version_text(self.cudnn)} engine {self.engine} ({notes}), workspace {self.workspace} bytes, "
            f"built in {self.build_ms:.0f} ms"
        )
        return "\n".join([text, *(f"refused: {reason}" for reason in self.refused)])


class Plan:
    """A finalized plan, ready to run; owned by a plan cache, which closes it.

    Args:
        graph: what to compute.
        handle: the handle that the plan will belong to; None plans for ``device`` instead.
        device: a description of a GPU that need not be here (JSON as cuDNN writes it); such a plan cannot be run.
        guarded: see :class:`OperationGraph`.

    Raises:
        Unsupported: no engine config can be finalized; the message holds every config's reason.
        CudnnError: cuDNN failed.
    """

    def __init__(self, graph: Graph, handle: Handle | None = None, device: str | None = None, *, guarded: bool = True) -> None:
        started = time.perf_counter()
        self._handle = handle
        pointer = handle.pointer if handle else None
        with OperationGraph(graph, pointer, guarded=guarded) as lowered:
            if device is None:
                self._descriptor, engine, notes, refused = _choose(lowered.descriptor, pointer, None)
            else:
                with Descriptor("DEVICEPROP") as description:
                    description.set("JSON_REPRESENTATION", device.encode())
                    description.finalize("read the description of the GPU")
                    self._descriptor, engine, notes, refused = _choose(lowered.descriptor, pointer, description)
            uids = lowered.uids
        workspace = self._descriptor.get("WORKSPACE_SIZE", AttributeType.INT64)[0]
        build_ms = (time.perf_counter() - started) * 1e3
        self.info = PlanInfo(engine, workspace, notes, build_ms, tuple(refused), library().version)
        #: The tensors that :meth:`execute` wants the addresses and the values of, by name, in this order.
        self.arrays = [t.name for t in graph.by_role("input", "output")]
        numbers = graph.by_role("scalar")
        self.scalars = [t.name for t in numbers if t.value is None]
        self._launcher = Launcher(
            self._descriptor, [uids[name] for name in self.arrays], [(uids[t.name], t.dtype, t.value) for t in numbers]
        )

    def execute(self, addresses: Mapping[str, int], scalars: Mapping[str, float], workspace: int = 0) -> None:
        """Enqueue on the handle's stream; returns before the GPU is done.

        Args:
            addresses: where the array of every input and output begins, by name.
            scalars: the numbers that the graph leaves open, by name.
            workspace: address of at least ``info.workspace`` bytes.
        """
        assert self._handle is not None, "planned for a GPU that is not here"
        self._launcher.launch(
            self._handle, [addresses[name] for name in self.arrays], [scalars[name] for name in self.scalars], workspace
        )

    def close(self) -> None:
        """Destroy the plan; the kernels that it has enqueued run on."""
        self._descriptor.close()


def _choose(
    graph: Descriptor, handle: int | None, device: Descriptor | None
) -> tuple[Descriptor, int, tuple[str, ...], list[str]]:
    """The first engine config that finalizes, in the order of cuDNN's heuristics: (plan, engine, notes, refusals)."""
    refused: list[str] = []
    for mode in (HeurMode.A, HeurMode.FALLBACK):
        library().last_error()  # forget what was said before
        try:
            configs = _configs(graph, mode, device)
        except Unsupported as error:
            refused.append(f"heuristics {mode.name}: {error}")
            continue
        if not configs:  # no failure, but cuDNN says in its error text why it proposes nothing
            said = library().last_error() or ["no reason given"]
            refused += [f"heuristics {mode.name} proposed none: {cause}" for cause in said]
        try:
            while configs:
                with configs.pop(0) as config:
                    engine, notes = _engine(config)
                    plan = Descriptor("EXECUTION_PLAN")
                    try:
                        if handle is not None:
                            plan.set_handle(handle)
                        plan.set("ENGINE_CONFIG", config)
                        if device is not None:
                            plan.set("DEVICEPROP", device)
                        plan.finalize(f"finalize a plan with engine {engine}")
                        return plan, engine, notes, refused
                    except BaseException as error:
                        plan.close()
                        # A kernel that does not compile (4001) is one engine's failure: the next may do.
                        if not isinstance(error, (Unsupported, CudnnError)):
                            raise
                        refused.append(f"engine {engine}: {error}")
        finally:
            for config in configs:
                config.close()
    reasons = "\n".join(f"  {reason}" for reason in refused)
    raise Unsupported(f"cuDNN {version_text(library().version)} has no engine for this graph:\n{reasons}")


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
