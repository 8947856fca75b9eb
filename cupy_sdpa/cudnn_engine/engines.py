"""cuDNN's engines: search for an engine config that supports an operation graph."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ..cudnn.constants import AttributeType, CudaGraphRetention, HeurMode, KnobType, NumericalNote, Status, name_of
from ..cudnn.descriptor import Descriptor
from ..cudnn.library import library
from ..errors import CudnnError, Unsupported
from ..version import version_text
from .plan_file import Facts, Knobs

_KNOB = "CUDNN_KNOB_TYPE_"
#: The first cuDNN version whose captured CUDA graphs keep plans alive.
GRAPH_RETENTION_SINCE = 92800


@dataclass(frozen=True)
class EngineConfig:
    """An engine and its knobs, for a config that heuristics do not propose."""

    engine: int
    knobs: Knobs

    def __str__(self) -> str:
        return f"engine {self.engine} ({', '.join(f'{name} {value}' for name, value in self.knobs)})"


@dataclass(frozen=True)
class Candidate:
    """A finalized plan. The receiver must close it.

    Attributes:
        descriptor: the plan.
        text: the plan as cuDNN serializes it, kernels included.
        facts: its properties.
    """

    descriptor: Descriptor = field(repr=False)
    text: str = field(repr=False)
    facts: Facts

    def close(self) -> None:
        """Destroy the plan."""
        self.descriptor.close()


@dataclass
class EngineSearch:
    """A search for engine configs of a graph that can be finalized and do not exceed the workspace limit.

    Args:
        graph: the finalized operation graph.
        uids: cuDNN's ids of the tensors that an execution binds, by name.
        handle: the cuDNN handle that plans will belong to; None for a described GPU.
        device: the device properties of the described GPU, finalized.
        limit: the maximum workspace in bytes; None for no limit.
        total_bytes: a function from the bytes of cuDNN's workspace to the total bytes that an execution needs.
        refused: reasons of the configs refused so far; the search appends to it.
        no_split: refuse the split-K kernel, see :func:`splits_keys`.
    """

    graph: Descriptor
    uids: dict[str, int]
    handle: int | None
    device: Descriptor | None
    limit: int | None
    total_bytes: Callable[[int], int]
    refused: list[str]
    no_split: bool = False

    def first(self, config: EngineConfig | None = None) -> Candidate:
        """The plan of ``config``; by default that of the first proposed config that is supported.

        Raises:
            Unsupported: no config is supported; the message contains every reason.
        """
        for candidate in self._configured(config) if config else self.proposed():
            return candidate
        reasons = "\n".join(f"  {reason}" for reason in self.refused)
        light = " in its light configuration; pip install 'cupy-sdpa[cuda12]' (or [cuda13]) has all engines"
        where = light if library().is_light else ""
        raise Unsupported(f"cuDNN {version_text(library().version)} has no engine for this graph{where}:\n{reasons}")

    def proposed(self) -> Iterator[Candidate]:
        """The plans of all supported configs that the heuristics propose, in order."""
        for mode in (HeurMode.A, HeurMode.FALLBACK):
            library().last_error()  # clear the error text
            try:
                configs = self._heuristic_configs(mode)
            except Unsupported as error:
                self.refused.append(f"heuristics {mode.name}: {error}")
                continue
            if not configs and not self.refused:  # no failure, but the error text contains the reason
                causes = library().last_error() or ["no reason given"]
                self.refused += [f"heuristics {mode.name} proposed none: {cause}" for cause in causes]
            try:
                while configs:
                    with configs.pop(0) as config:
                        candidate = self._try(config)
                    if candidate:
                        yield candidate
            finally:
                for config in configs:
                    config.close()

    def _configured(self, config: EngineConfig) -> Iterator[Candidate]:
        """The plan of a config, if it is supported."""
        with contextlib.ExitStack() as stack:
            try:
                descriptor = stack.enter_context(self._engine_config(config, stack))
            except (Unsupported, CudnnError) as error:
                self.refused.append(f"{config}: {error}")
                return
            candidate = self._try(descriptor)
        if candidate:
            yield candidate

    def _engine(self, number: int) -> Descriptor:
        engine = Descriptor("ENGINE")
        try:
            engine.set("OPERATION_GRAPH", self.graph)
            engine.set("GLOBAL_INDEX", number)
            if self.device is not None:
                engine.set("DEVICEPROP", self.device)
            engine.finalize(f"finalize engine {number}")
        except BaseException:
            engine.close()
            raise
        return engine

    def _engine_config(self, config: EngineConfig, stack: contextlib.ExitStack) -> Descriptor:
        """The descriptor of a config, which the caller closes; ``stack`` closes the descriptors that it is made of."""
        engine = stack.enter_context(self._engine(config.engine))
        choices = []
        for name, value in config.knobs:
            choice = stack.enter_context(Descriptor("KNOB_CHOICE"))
            choice.set("KNOB_TYPE", KnobType[name])
            choice.set("KNOB_VALUE", value)
            choice.finalize(f"set knob {name}")
            choices.append(choice)
        descriptor = stack.enter_context(Descriptor("ENGINECFG"))
        descriptor.set("ENGINE", engine)
        descriptor.set("KNOB_CHOICES", choices)
        descriptor.finalize(f"configure {config}")
        return descriptor

    def _heuristic_configs(self, mode: HeurMode) -> list[Descriptor]:
        """The configs that heuristics propose, most promising first; the caller closes them."""
        with Descriptor("ENGINEHEUR") as heuristics:
            heuristics.set("OPERATION_GRAPH", self.graph)
            heuristics.set("MODE", mode)
            if self.device is not None:
                heuristics.set("DEVICEPROP", self.device)
            heuristics.finalize("query heuristics")
            count = heuristics.count("RESULTS", AttributeType.BACKEND_DESCRIPTOR)
            configs: list[Descriptor] = []
            try:
                for _ in range(count):
                    configs.append(Descriptor("ENGINECFG"))
                filled = heuristics.fill("RESULTS", configs) if configs else 0
            except BaseException:
                for config in configs:
                    config.close()
                raise
        for config in configs[filled:]:
            config.close()
        return configs[:filled]

    def _try(self, config: Descriptor) -> Candidate | None:
        """Finalize a config's plan; None, with the reason appended to ``refused``, if it is not supported or exceeds the limit.

        Raises:
            CudnnError: there is not enough memory to finalize it.
        """
        engine, notes = _number_and_notes(config)
        plan = Descriptor("EXECUTION_PLAN")
        started = time.perf_counter()
        try:
            if self.handle is not None:
                plan.set_handle(self.handle)
            plan.set("ENGINE_CONFIG", config)
            if self.device is not None:
                plan.set("DEVICEPROP", self.device)
            disable_graph_retention(plan)
            plan.finalize(f"finalize a plan with engine {engine}")
            workspace_bytes: int = plan.get("WORKSPACE_SIZE", AttributeType.INT64)[0]
            total = self.total_bytes(workspace_bytes)
            if self.limit is not None and total > self.limit:
                raise Unsupported(f"it needs a workspace of {total} bytes, {self.limit} are allowed")
            build_ms = (time.perf_counter() - started) * 1e3
            text = plan.get_text("JSON_REPRESENTATION")
            knobs = knobs_of(text)
            if self.no_split and splits_keys(engine, dict(knobs)):
                raise Unsupported(f"its kernel, which splits the keys, is not used for this problem ({knobs_text(knobs)})")
            facts = Facts(self.uids, engine, knobs, notes, workspace_bytes, round(build_ms, 3), tuple(self.refused))
            return Candidate(plan, text, facts)
        except BaseException as error:
            plan.close()
            # A kernel that does not compile (4001) is a failure of one engine only. Out of memory is temporary.
            if not isinstance(error, (Unsupported, CudnnError)) or is_out_of_memory(error):
                raise
            self.refused.append(f"engine {engine}: {error}")
            return None


def disable_graph_retention(plan: Descriptor) -> None:
    """Prevent captured CUDA graphs from keeping the plan alive; called before the plan is finalized.

    From 9.28 on cuDNN by default adds an object to every captured graph that owns the plan. A launch of such a graph takes 2 to
    6 us longer (H200; docs/cudnn.md). It is not needed: plans outlive the graphs that contain their kernels.
    """
    if library().version >= GRAPH_RETENTION_SINCE:
        plan.set("CUDA_GRAPH_RETENTION", CudaGraphRetention.NONE)


def splits_keys(engine: int, knobs: Mapping[str, int]) -> bool:
    """Whether an engine config runs the split-K kernel, which distributes the keys of a single query over many blocks.

    This is engine 1 with KERNEL_CFG 33 to 35 up to cuDNN 9.22, and with STREAM_K 1 from 9.23 on.

    >>> splits_keys(1, {"KERNEL_CFG": 35}), splits_keys(1, {"KERNEL_CFG": 2, "STREAM_K": 1}), splits_keys(2, {"KERNEL_CFG": 7})
    (True, True, False)
    """
    if engine != 1:
        return False
    return knobs["STREAM_K"] == 1 if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") in (33, 34, 35)


def is_out_of_memory(error: Exception) -> bool:
    """Whether cuDNN could not allocate memory. In that case no other engine is chosen, and no refusal is cached."""
    statuses = (Status.INTERNAL_ERROR_HOST_ALLOCATION_FAILED, Status.INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)
    return isinstance(error, CudnnError) and error.status in statuses


def knobs_text(knobs: Knobs) -> str:
    """Knobs as text.

    >>> knobs_text((("TILE_M", 3), ("TILE_N", 2)))
    'TILE_M=3 TILE_N=2'
    """
    return " ".join(f"{name}={value}" for name, value in knobs)


def knobs_of(text: str) -> Knobs:
    """The knobs of a serialized plan; -1 lets the engine choose.

    >>> knobs_of('{"engine": {"engineId": 2, "knobChoices": {"CUDNN_KNOB_TYPE_TILE_M": 3}}}')
    (('TILE_M', 3),)
    """
    choices = json.loads(text)["engine"]["knobChoices"]
    return tuple((name.removeprefix(_KNOB), int(value)) for name, value in choices.items())


def _number_and_notes(config: Descriptor) -> tuple[int, tuple[str, ...]]:
    """The number of a config's engine, and the engine's numerical notes."""
    with Descriptor("ENGINE") as engine:
        config.fill("ENGINE", [engine])
        notes = engine.get("NUMERICAL_NOTE", AttributeType.NUMERICAL_NOTE, count=16)
        names = tuple(name_of(NumericalNote, note) or f"note {note}" for note in notes)
        return engine.get("GLOBAL_INDEX", AttributeType.INT64)[0], names
