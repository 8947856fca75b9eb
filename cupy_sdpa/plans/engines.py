"""The engines that could run an operation graph: those that heuristics propose, and settings made by hand."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from .._cudnn.constants import AttributeType, HeurMode, KnobType, NumericalNote, Status, name_of
from .._cudnn.descriptor import Descriptor
from .._cudnn.library import library
from ..errors import CudnnError, Unsupported
from ..version import version_text

#: Settings of an engine: pairs of a knob's name, as cuDNN's headers have it, and its value.
Knobs = tuple[tuple[str, int], ...]

_KNOB = "CUDNN_KNOB_TYPE_"


@dataclass(frozen=True)
class EngineConfig:
    """An engine and its knobs, set by hand where heuristics do not offer them."""

    engine: int
    knobs: Knobs

    def __str__(self) -> str:
        return f"engine {self.engine} ({', '.join(f'{name} {value}' for name, value in self.knobs)})"


@dataclass(frozen=True)
class Candidate:
    """A finalized plan, for whoever takes it to close, and what is known of it.

    Attributes:
        descriptor: the plan.
        text: the plan as cuDNN serializes it, kernels and all.
        engine, knobs: what it runs on.
        notes: cuDNN's numerical notes on the engine.
        need: bytes of workspace that cuDNN wants.
        build_ms: milliseconds that finalization took.
    """

    descriptor: Descriptor = field(repr=False)
    text: str = field(repr=False)
    engine: int
    knobs: Knobs
    notes: tuple[str, ...]
    need: int
    build_ms: float

    def close(self) -> None:
        """Destroy the plan."""
        self.descriptor.close()


@dataclass
class Search:
    """A search for engine configs of one graph that finalize and keep within a limit; what is refused on the way is kept.

    Args:
        graph: the finalized operation graph.
        handle: the cuDNN handle that plans will belong to; None where they are for a described GPU.
        device: that GPU's description, finalized.
        limit: bytes of workspace allowed, None for no limit.
        size: cuDNN's bytes of workspace -> all bytes that an execution needs.
        refused: reasons so far.
        no_split: pass over the kernel that splits the keys, see :func:`splits_keys`.
    """

    graph: Descriptor
    handle: int | None
    device: Descriptor | None
    limit: int | None
    size: Callable[[int], int]
    refused: list[str]
    no_split: bool = False

    def first(self, wanted: EngineConfig | None = None) -> Candidate:
        """The config wanted, or else the first of the heuristics' that will do.

        Raises:
            Unsupported: none will; the message holds every reason.
        """
        for candidate in self.by_hand([wanted]) if wanted else self.proposed():
            return candidate
        reasons = "\n".join(f"  {reason}" for reason in self.refused)
        raise Unsupported(f"cuDNN {version_text(library().version)} has no engine for this graph:\n{reasons}")

    def proposed(self) -> Iterator[Candidate]:
        """Every config that heuristics propose and that will do, in their order."""
        for mode in (HeurMode.A, HeurMode.FALLBACK):
            library().last_error()  # forget what was said before
            try:
                configs = self._configs(mode)
            except Unsupported as error:
                self.refused.append(f"heuristics {mode.name}: {error}")
                continue
            if not configs and not self.refused:  # no failure, but cuDNN says in its error text why it proposes nothing
                said = library().last_error() or ["no reason given"]
                self.refused += [f"heuristics {mode.name} proposed none: {cause}" for cause in said]
            try:
                while configs:
                    with configs.pop(0) as config:
                        candidate = self._try(config)
                    if candidate:
                        yield candidate
            finally:
                for config in configs:
                    config.close()

    def by_hand(self, settings: Sequence[EngineConfig]) -> Iterator[Candidate]:
        """Those of some configs, set by hand, that will do."""
        for wanted in settings:
            with contextlib.ExitStack() as stack:
                try:
                    config = stack.enter_context(self._configured(wanted, stack))
                except (Unsupported, CudnnError) as error:
                    self.refused.append(f"{wanted}: {error}")
                    continue
                candidate = self._try(config)
            if candidate:
                yield candidate

    def knobs(self, engine: int) -> dict[str, range]:
        """The knobs of an engine, and the values that it says they can have; most of their combinations it refuses."""
        found = {}
        with self._engine(engine) as descriptor, contextlib.ExitStack() as stack:
            count = descriptor.count("KNOB_INFO", AttributeType.BACKEND_DESCRIPTOR)
            infos = [stack.enter_context(Descriptor("KNOB_INFO")) for _ in range(count)]
            for info in infos[: descriptor.fill("KNOB_INFO", infos)] if infos else ():
                number = info.get("TYPE", AttributeType.KNOB_TYPE)[0]
                low, high, step = (
                    info.get(name, AttributeType.INT64)[0] for name in ("MINIMUM_VALUE", "MAXIMUM_VALUE", "STRIDE")
                )
                found[name_of(KnobType, number) or str(number)] = range(low, high + 1, step or 1)
        return found

    def _engine(self, number: int) -> Descriptor:
        engine = Descriptor("ENGINE")
        try:
            engine.set("OPERATION_GRAPH", self.graph)
            engine.set("GLOBAL_INDEX", number)
            if self.device is not None:
                engine.set("DEVICEPROP", self.device)
            engine.finalize(f"take engine {number}")
        except BaseException:
            engine.close()
            raise
        return engine

    def _configured(self, wanted: EngineConfig, stack: contextlib.ExitStack) -> Descriptor:
        engine = stack.enter_context(self._engine(wanted.engine))
        choices = []
        for name, value in wanted.knobs:
            choice = stack.enter_context(Descriptor("KNOB_CHOICE"))
            choice.set("KNOB_TYPE", KnobType[name])
            choice.set("KNOB_VALUE", value)
            choice.finalize(f"set knob {name}")
            choices.append(choice)
        config = stack.enter_context(Descriptor("ENGINECFG"))
        config.set("ENGINE", engine)
        config.set("KNOB_CHOICES", choices)
        config.finalize(f"configure {wanted}")
        return config

    def _configs(self, mode: HeurMode) -> list[Descriptor]:
        """The engine configs that heuristics propose, the most promising first; the caller closes them."""
        with Descriptor("ENGINEHEUR") as heuristics:
            heuristics.set("OPERATION_GRAPH", self.graph)
            heuristics.set("MODE", mode)
            if self.device is not None:
                heuristics.set("DEVICEPROP", self.device)
            heuristics.finalize("ask the heuristics for engines")
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
        for config in configs[filled:]:  # before anything long runs
            config.close()
        return configs[:filled]

    def _try(self, config: Descriptor) -> Candidate | None:
        """Finalize a plan; None, and the reason kept, where it cannot be or needs too much.

        Raises:
            CudnnError: there is no memory to finalize it with.
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
            plan.finalize(f"finalize a plan with engine {engine}")
            need: int = plan.get("WORKSPACE_SIZE", AttributeType.INT64)[0]
            if self.limit is not None and (total := self.size(need)) > self.limit:
                raise Unsupported(f"it needs a workspace of {total} bytes, {self.limit} are allowed")
            build_ms = (time.perf_counter() - started) * 1e3
            text = plan.get_text("JSON_REPRESENTATION")
            knobs = knobs_of(text)
            if self.no_split and splits_keys(engine, dict(knobs)):
                raise Unsupported(f"its kernel, which splits the keys, is not used for this problem ({knobs_text(knobs)})")
            return Candidate(plan, text, engine, knobs, notes, need, build_ms)
        except BaseException as error:
            plan.close()
            # A kernel that does not compile (4001) is one engine's failure: the next may do. A lack of memory may pass.
            if not isinstance(error, (Unsupported, CudnnError)) or no_memory(error):
                raise
            self.refused.append(f"engine {engine}: {error}")
            return None


def splits_keys(engine: int, knobs: Mapping[str, int]) -> bool:
    """Whether a plan runs the kernel that splits the keys of a single query over many blocks.

    That is engine 1 with KERNEL_CFG 33 to 35 up to cuDNN 9.22, and with STREAM_K 1 from 9.23 on.

    >>> splits_keys(1, {"KERNEL_CFG": 35}), splits_keys(1, {"KERNEL_CFG": 2, "STREAM_K": 1}), splits_keys(2, {"KERNEL_CFG": 7})
    (True, True, False)
    """
    if engine != 1:
        return False
    return knobs["STREAM_K"] == 1 if "STREAM_K" in knobs else knobs.get("KERNEL_CFG") in (33, 34, 35)


def no_memory(error: Exception) -> bool:
    """Whether cuDNN failed because it could not allocate memory: no reason to take another engine, or to keep a refusal."""
    failed = (Status.INTERNAL_ERROR_HOST_ALLOCATION_FAILED, Status.INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED)
    return isinstance(error, CudnnError) and error.status in failed


def knobs_text(knobs: Knobs) -> str:
    """Knobs for people.

    >>> knobs_text((("TILE_M", 3), ("TILE_N", 2)))
    'TILE_M=3 TILE_N=2'
    """
    return " ".join(f"{name}={value}" for name, value in knobs)


def knobs_of(text: str) -> Knobs:
    """The knobs of a serialized plan; -1 stands for the engine's own choice.

    >>> knobs_of('{"engine": {"engineId": 2, "knobChoices": {"CUDNN_KNOB_TYPE_TILE_M": 3}}}')
    (('TILE_M', 3),)
    """
    choices = json.loads(text)["engine"]["knobChoices"]
    return tuple((name.removeprefix(_KNOB), int(value)) for name, value in choices.items())


def _number_and_notes(config: Descriptor) -> tuple[int, tuple[str, ...]]:
    """The number of an engine config's engine, and its numerical notes."""
    with Descriptor("ENGINE") as engine:
        config.fill("ENGINE", [engine])
        notes = engine.get("NUMERICAL_NOTE", AttributeType.NUMERICAL_NOTE, count=16)
        names = tuple(name_of(NumericalNote, note) or f"note {note}" for note in notes)
        return engine.get("GLOBAL_INDEX", AttributeType.INT64)[0], names
