"""cuDNN's engines: search for an engine config that supports an operation graph."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..cudnn.constants import AttributeType, CudaGraphRetention, HeurMode, KnobType, NumericalNote, Status, name_of
from ..cudnn.descriptor import Descriptor
from ..cudnn.library import library
from ..errors import INSTALL_FOR_GPU, CudnnError, Unsupported
from ..graph.nodes import Graph
from ..version import version_text
from .lowering import OperationGraph
from .plan import Candidate, Facts, Knobs, Scratch, Target, knobs_text

_KNOB = "CUDNN_KNOB_TYPE_"
#: The first cuDNN version whose captured CUDA graphs keep plans alive.
GRAPH_RETENTION_SINCE = 92800


class EngineConfig(NamedTuple):
    """An engine and its knobs, for a config that heuristics do not propose."""

    engine: int
    knobs: Knobs

    def __str__(self) -> str:
        return f"engine {self.engine} ({', '.join(f'{name} {value}' for name, value in self.knobs)})"


class EngineSearch:
    """A search for engine configs of a graph that can be finalized and do not exceed the workspace limit.

    ``device`` is the description of a GPU that need not be installed, finalized; else None. The search appends to ``refused``
    the reasons against the configs that were rejected.
    """

    def __init__(
        self,
        graph: Graph,
        lowered: OperationGraph,
        target: Target,
        device: Descriptor | None,
        limit: int | None,
        refused: list[str],
    ) -> None:
        self.graph, self.lowered, self.limit, self.refused = graph, lowered, limit, refused
        self._handle, self._device = target.cudnn_handle, device

    def first(self, config: EngineConfig | None = None) -> Candidate:
        """Return the plan of ``config``; by default the plan of the first proposed config that is supported.

        Raises:
            Unsupported: no config is supported; the message contains every reason.
        """
        candidate = self._configured(config) if config else next(self.proposed(), None)
        if candidate:
            return candidate
        reasons = "\n".join(f"  {reason}" for reason in self.refused)
        light = f" in its light configuration; all engines: {INSTALL_FOR_GPU}"
        where = light if library().is_light else ""
        raise Unsupported(f"cuDNN {version_text(library().version)} has no engine for this graph{where}:\n{reasons}")

    def proposed(self) -> Iterator[Candidate]:
        """Yield the plans of all supported configs that the heuristics propose, in order."""
        for mode in (HeurMode.A, HeurMode.FALLBACK):
            library().last_error()  # clear the error text
            with contextlib.ExitStack() as stack:
                try:
                    configs = self._heuristic_configs(mode, stack)
                except Unsupported as error:
                    self.refused.append(f"heuristics {mode.name}: {error}")
                    continue
                if not configs and not self.refused:  # no failure, but the error text contains the reason
                    causes = library().last_error() or ["no reason given"]
                    self.refused += [f"heuristics {mode.name} proposed none: {cause}" for cause in causes]
                for config in configs:
                    if candidate := self._try(config):
                        yield candidate

    def _configured(self, config: EngineConfig) -> Candidate | None:
        """Return the plan of a config; None if it is not supported."""
        with contextlib.ExitStack() as stack:

            def made(kind: str, doing: str, **attributes: Any) -> Descriptor:
                return stack.enter_context(Descriptor.finalized(kind, doing, **attributes))

            try:
                of = {"OPERATION_GRAPH": self.lowered.descriptor, "GLOBAL_INDEX": config.engine, "DEVICEPROP": self._device}
                engine = made("ENGINE", f"finalize engine {config.engine}", **of)
                choices = [
                    made("KNOB_CHOICE", f"set knob {name}", KNOB_TYPE=KnobType[name], KNOB_VALUE=value)
                    for name, value in config.knobs
                ]
                descriptor = made("ENGINECFG", f"configure {config}", ENGINE=engine, KNOB_CHOICES=choices)
            except (Unsupported, CudnnError) as error:
                self.refused.append(f"{config}: {error}")
                return None
            return self._try(descriptor)

    def _heuristic_configs(self, mode: HeurMode, stack: contextlib.ExitStack) -> Sequence[Descriptor]:
        """Return the configs that heuristics propose, most promising first; ``stack`` closes them."""
        given = {"OPERATION_GRAPH": self.lowered.descriptor, "MODE": mode, "DEVICEPROP": self._device}
        with Descriptor.finalized("ENGINEHEUR", "query heuristics", **given) as heuristics:
            count = heuristics.count("RESULTS", AttributeType.BACKEND_DESCRIPTOR)
            configs = [stack.enter_context(Descriptor("ENGINECFG")) for _ in range(count)]
            return configs[: heuristics.fill("RESULTS", configs)] if configs else ()

    def _try(self, config: Descriptor) -> Candidate | None:
        """Finalize a config's plan; None, with the reason appended to ``refused``, if it is not supported or exceeds the limit.

        Raises:
            CudnnError: there is not enough memory to finalize it.
        """
        engine, notes = _number_and_notes(config)
        started = time.perf_counter()
        with contextlib.ExitStack() as stack:
            try:
                of = {"HANDLE": self._handle, "ENGINE_CONFIG": config, "DEVICEPROP": self._device, **graph_retention()}
                plan = stack.enter_context(
                    Descriptor.finalized("EXECUTION_PLAN", f"finalize a plan with engine {engine}", **of)
                )
                (workspace_bytes,) = plan.get("WORKSPACE_SIZE", AttributeType.INT64)
                self.check_workspace(workspace_bytes)
                build_ms = (time.perf_counter() - started) * 1e3
                text = plan.get_text("JSON_REPRESENTATION")
                knobs = knobs_of(text)
                if self.graph.no_split and splits_keys(engine, dict(knobs)):
                    raise Unsupported(f"its kernel, which splits the keys, is not used for this problem ({knobs_text(knobs)})")
            except (Unsupported, CudnnError) as error:
                # A kernel that does not compile (4001) is a failure of one engine only. Out of memory is temporary.
                if is_out_of_memory(error):
                    raise
                self.refused.append(f"engine {engine}: {error}")
                return None
            stack.pop_all()
        facts = Facts(self.lowered.uids, engine, knobs, notes, workspace_bytes, round(build_ms, 3), tuple(self.refused))
        return Candidate(plan, text, facts)

    def check_workspace(self, workspace_bytes: int) -> None:
        """Raise Unsupported if an execution needs more memory than the limit, given the bytes of cuDNN's part."""
        total = Scratch(self.graph).total_bytes(workspace_bytes)
        if self.limit is not None and total > self.limit:
            raise Unsupported(f"it needs a workspace of {total} bytes, and the limit is {self.limit}")


@contextlib.contextmanager
def engine_search(
    graph: Graph, target: Target, limit: int | None = None, refused: Sequence[str] = ()
) -> Iterator[EngineSearch]:
    """A search for engine configs of a graph; arguments as for :class:`EngineSearch`."""
    with contextlib.ExitStack() as stack:
        lowered = stack.enter_context(OperationGraph(graph, target.cudnn_handle))
        yield EngineSearch(graph, lowered, target, described_device(target, stack), limit, list(refused))


def described_device(target: Target, stack: contextlib.ExitStack) -> Descriptor | None:
    """Return the descriptor of a described GPU, which ``stack`` closes; None for the GPU of this process."""
    if target.description is None:
        return None
    of = {"JSON_REPRESENTATION": target.description.encode()}
    return stack.enter_context(Descriptor.finalized("DEVICEPROP", "read the description of the GPU", **of))


def graph_retention() -> dict[str, Any]:
    """Return the attribute of a plan that prevents captured CUDA graphs from keeping it alive.

    By default, cuDNN 9.28 and newer add an object to every captured graph that owns the plan. A launch of such a graph takes 2
    to 6 us longer (H200; docs/cudnn.md). It is not needed: plans outlive the graphs that contain their kernels.
    """
    return {"CUDA_GRAPH_RETENTION": CudaGraphRetention.NONE} if library().version >= GRAPH_RETENTION_SINCE else {}


def splits_keys(engine: int, knobs: Mapping[str, int]) -> bool:
    """True if an engine config runs the split-K kernel, which distributes the keys of a single query over many blocks.

    The kernel is engine 1 with KERNEL_CFG 33 to 35 up to cuDNN 9.22, and with STREAM_K 1 since 9.23.

    >>> splits_keys(1, {"KERNEL_CFG": 35}), splits_keys(1, {"KERNEL_CFG": 2, "STREAM_K": 1}), splits_keys(2, {"KERNEL_CFG": 7})
    (True, True, False)
    """
    if engine != 1:
        return False
    return knobs["STREAM_K"] == 1 if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") in (33, 34, 35)


def is_out_of_memory(error: Exception) -> bool:
    """True if cuDNN could not allocate memory. In that case no other engine is chosen, and no refusal is cached."""
    statuses = (Status.INTERNAL_ERROR_HOST_ALLOCATION_FAILED, Status.INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)
    return isinstance(error, CudnnError) and error.status in statuses


def knobs_of(text: str) -> Knobs:
    """Return the knobs of a serialized plan; -1 lets the engine choose.

    >>> knobs_of('{"engine": {"engineId": 2, "knobChoices": {"CUDNN_KNOB_TYPE_TILE_M": 3}}}')
    (('TILE_M', 3),)
    """
    choices = json.loads(text)["engine"]["knobChoices"]
    return tuple((name.removeprefix(_KNOB), int(value)) for name, value in choices.items())


def _number_and_notes(config: Descriptor) -> tuple[int, tuple[str, ...]]:
    """Return the number of a config's engine, and the engine's numerical notes."""
    with Descriptor("ENGINE") as engine:
        config.fill("ENGINE", [engine])
        notes = engine.get("NUMERICAL_NOTE", AttributeType.NUMERICAL_NOTE, count=16)
        names = tuple(name_of(NumericalNote, note) or f"note {note}" for note in notes)
        return engine.get("GLOBAL_INDEX", AttributeType.INT64)[0], names
