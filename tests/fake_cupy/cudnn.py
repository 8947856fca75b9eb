"""cuDNN's C functions as Python functions on host memory.

Descriptors store their attributes. A finalized plan holds a :class:`fake_cupy.program.Program`, the operation graph that was
passed to cuDNN; an execution evaluates it on the stream of its handle. Heuristics propose :data:`CONFIGS`.
"""

from __future__ import annotations

import itertools
import json
import os
from dataclasses import dataclass, field, replace
from typing import Any

from cupy_sdpa.core.cudnn.constants import AttributeName, DescriptorType, HeurMode, KnobType
from cupy_sdpa.core.cudnn.library import CudnnLibrary

from .device import ILLEGAL_ADDRESS, POISON, CUDARuntimeError, Device, Work
from .program import Program, Read

#: cuDNN's status codes.
BAD_PARAM, NOT_SUPPORTED, EXECUTION_FAILED = 2000, 3000, 5000
#: Bytes of a plan's workspace, which an execution first fills with garbage.
WORKSPACE = 4096

_KIND = {int(kind): kind.name.removesuffix("_DESCRIPTOR") for kind in DescriptorType}
_ATTRIBUTE = {int(attribute): attribute.name for attribute in AttributeName}


@dataclass(frozen=True)
class Config:
    """An engine config, and its behavior.

    Attributes:
        fails: the step that fails, ``finalize``, ``load`` or ``execute``; empty if none does.
        status: the status of the failure. Default 0: the status of an engine that does not take the graph, or of a failed
            launch.
        error: raised instead of the failure. Default None.
    """

    engine: int
    knobs: tuple[tuple[str, int], ...] = ()
    fails: str = ""
    status: int = 0
    error: BaseException | None = None

    def failure(self, status: int) -> int:
        """The status of a failure; raises ``error`` if it is set."""
        if self.error:
            raise self.error
        return self.status or status


#: The configs of the heuristics.
CONFIGS = (Config(2, (("KERNEL_CFG", 3),)), Config(1, (("KERNEL_CFG", 7),)))


@dataclass
class Record:
    """A descriptor."""

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    finalized: bool = False

    def __getitem__(self, name: str) -> Any:
        return self.values[f"{self.kind}_{name}"]

    def get(self, name: str, other: Any = None) -> Any:
        """An attribute, or ``other`` if it is not set."""
        return self.values.get(f"{self.kind}_{name}", other)

    def __setitem__(self, name: str, value: Any) -> None:
        self.values[f"{self.kind}_{name}"] = value


@dataclass(frozen=True)
class Execution:
    """An enqueued execution: its handle, stream and engine config."""

    handle: int
    stream: int
    config: Config


class FakeLibrary(CudnnLibrary):
    """A replacement of the loaded cuDNN that imitates version 9.19.

    Attributes:
        executions: the enqueued executions, in order.
        finalized: the numbers of plans that were built and loaded.
        configs: the configs of the heuristics.
        log_masks: the masks of the messages that its log was routed with, in order.
    """

    def __init__(self, device: Device) -> None:
        self.cudart_version = 12090
        self.path = self.found_via = "a stand-in for cuDNN"
        self.executions: list[Execution] = []
        self.finalized: dict[str, int]
        self.configs: tuple[Config, ...]
        self.reset()
        self._device, self._error = device, ""
        self._numbers = itertools.count(0x100)
        self._streams: dict[int, int] = {}
        self._programs: list[tuple[Program, Config]] = []

    def forget_plans(self) -> int:
        """Destroy the plans that captured graphs have kept alive; returns their number."""
        left = [number for number, record in self._records.items() if record.kind == "EXECUTION_PLAN"]
        for number in left:
            del self._records[number]
        return len(left)

    def reset(self) -> None:
        """Remove the state of earlier tests, failed ones included, and restore the version and the default configs."""
        self.version = 91900
        self.build = f"{self.path} in process {os.getpid()}"  # prevents other processes from using its plans
        self._records: dict[int, Record] = {}
        self.executions.clear()
        self.log_masks: list[int] = []
        self.finalized = {"built": 0, "loaded": 0}
        self.configs = CONFIGS

    def cudnnSetCallback(self, mask: int, data: Any, callback: Any) -> int:
        self.log_masks.append(mask)
        return 0

    def stream_of_last_handle(self) -> int:
        """The stream of the last execution's handle."""
        return self._streams[self.executions[-1].handle]

    @property
    def live(self) -> dict[str, int]:
        """The number of existing descriptors of each kind."""
        kinds = [record.kind for record in self._records.values()]
        return {kind: kinds.count(kind) for kind in set(kinds)}

    # The C functions

    def cudnnGetVersion(self) -> int:
        return self.version

    def cudnnGetErrorString(self, status: int) -> bytes:
        return b"CUDNN_STATUS_AN_ERROR"

    def cudnnGetLastErrorString(self, buffer: Any, size: int) -> None:
        buffer.value, self._error = self._error.encode(), ""

    def cudnnCreate(self, handle: Any) -> int:
        handle._obj.value = next(self._numbers)
        self._streams[handle._obj.value] = 0
        return 0

    def cudnnSetStream(self, handle: int, stream: int) -> int:
        self._streams[handle] = stream
        return 0

    def cudnnBackendCreateDescriptor(self, kind: int, descriptor: Any) -> int:
        descriptor._obj.value = next(self._numbers)
        self._records[descriptor._obj.value] = Record(_KIND[int(kind)])
        return 0

    def cudnnBackendDestroyDescriptor(self, descriptor: Any) -> int:
        del self._records[_number(descriptor)]
        return 0

    def cudnnBackendSetAttribute(self, descriptor: Any, name: int, kind: int, count: int, array: Any) -> int:
        values = list(array)[:count]
        if values and isinstance(values[0], bytes):
            values = [b"".join(values)]
        self._records[_number(descriptor)].values[_ATTRIBUTE[int(name)]] = values
        return 0

    def cudnnBackendGetAttribute(self, descriptor: Any, name: int, kind: int, count: int, got: Any, array: Any) -> int:
        record, attribute = self._records[_number(descriptor)], _ATTRIBUTE[int(name)]
        values = self._attribute(record, attribute)
        if values and isinstance(values[0], Record):
            if count:
                targets = [self._records[pointer] for pointer in list(array)[: len(values)]]
                for target, value in zip(targets, values, strict=False):
                    target.values, target.finalized = dict(value.values), True
        else:
            for place, value in enumerate(values[:count]):
                array[place] = value
        got._obj.value = min(len(values), count) if count else len(values)
        return 0

    def cudnnBackendFinalize(self, descriptor: Any) -> int:
        record = self._records[_number(descriptor)]
        record.finalized = True
        if record.kind == "OPERATIONGRAPH":
            record.values["program"] = self._program(record)
        if record.kind == "EXECUTION_PLAN":
            return self._finalize_plan(record)
        return 0

    def cudnnBackendExecute(self, handle: int, plan: Any, pack: Any) -> int:
        record, given = self._records[_number(plan)], self._records[_number(pack)]
        program, config = record.values["program"], record.values["config"]
        if [handle] != record.get("HANDLE"):
            return self._fail(BAD_PARAM, "the plan was finalized for another handle")
        if config.fails == "execute":
            return self._fail(config.failure(EXECUTION_FAILED), "the kernel cannot be launched")
        pointers = dict(zip(given["UNIQUE_IDS"], given["DATA_POINTERS"], strict=True))
        if missing := [t.name for t in program.tensors if pointers.get(t.uid) is None]:
            return self._fail(BAD_PARAM, f"no address for {missing}")
        (workspace,) = given["WORKSPACE"]
        numbers = program.numbers(pointers)
        device, stream = self._device, self._streams[handle]

        number = _number(plan)

        def check() -> None:
            if self._records.get(number) is not record:
                raise CUDARuntimeError(ILLEGAL_ADDRESS, "a CUDA graph is launched, and its plan was destroyed")

        def run() -> None:
            own = device.view(workspace, (WORKSPACE,), (1,), "u1")
            program.run(Read(device, pointers, numbers), lambda: own.fill(POISON))

        self.executions.append(Execution(handle, stream, config))
        device.submit(stream, Work(run, check=check))
        return 0

    # Implementation

    def _fail(self, status: int, text: str) -> int:
        self._error = text
        return status

    def _attribute(self, record: Record, name: str) -> list[Any]:
        name = name.removeprefix(f"{record.kind}_")
        if (record.kind, name) == ("ENGINEHEUR", "RESULTS"):
            program = self._records[record["OPERATION_GRAPH"][0]].values["program"]
            configs = self.configs if record["MODE"] == [int(HeurMode.A)] else ()
            return [Record("ENGINECFG", {"program": program, "config": config}) for config in configs]
        if (record.kind, name) == ("ENGINECFG", "ENGINE"):
            if "config" not in record.values:  # a config without heuristics
                return [self._records[pointer] for pointer in record["ENGINE"]]
            config = record.values["config"]
            return [Record("ENGINE", {"ENGINE_GLOBAL_INDEX": [config.engine], "ENGINE_NUMERICAL_NOTE": []})]
        if name in ("KNOB_INFO", "NUMERICAL_NOTE"):
            return []
        if (record.kind, name) == ("EXECUTION_PLAN", "WORKSPACE_SIZE"):
            return [WORKSPACE]
        if (record.kind, name) == ("EXECUTION_PLAN", "JSON_REPRESENTATION"):
            return [bytes([byte]) for byte in record.values["text"]]
        return list(record[name])

    def _program(self, record: Record) -> Program:
        def resolved(pointer: int) -> Any:
            """The attributes of a descriptor, including the attributes of descriptors that it points to."""
            of = self._records[pointer]
            found = {}
            for name, value in of.values.items():
                short = name.removeprefix(f"{of.kind}_")
                found[short] = resolved(value[0]) if short.endswith("DESC") or short in _POINTERS else value
            return of.kind, pointer, found

        return Program.of([resolved(pointer) for pointer in record["OPS"]])

    def _finalize_plan(self, record: Record) -> int:
        if (text := record.get("JSON_REPRESENTATION")) is not None:
            program, config = self._programs[json.loads(text[0])["program"]]
            if config.fails == "load":
                return self._fail(config.failure(NOT_SUPPORTED), "the plan cannot be loaded")
            record.values |= {"program": program, "config": config, "text": text[0]}
            self.finalized["loaded"] += 1
            return 0
        chosen = self._records[record["ENGINE_CONFIG"][0]]
        if "config" in chosen.values:
            program, config = chosen.values["program"], chosen.values["config"]
        else:  # a config without heuristics: accept any engine
            engine = self._records[chosen["ENGINE"][0]]
            choices = [self._records[pointer] for pointer in chosen.get("KNOB_CHOICES", [])]
            knobs = tuple((KnobType(c["KNOB_TYPE"][0]).name, c["KNOB_VALUE"][0]) for c in choices)
            program = self._records[engine["OPERATION_GRAPH"][0]].values["program"]
            config = replace(CONFIGS[0], engine=engine["GLOBAL_INDEX"][0], knobs=knobs)
        if config.fails == "finalize":
            return self._fail(config.failure(NOT_SUPPORTED), "the engine does not take this graph")
        choices = {f"CUDNN_KNOB_TYPE_{name}": value for name, value in config.knobs}
        facts = {"engine": {"engineId": config.engine, "knobChoices": choices}, "program": len(self._programs)}
        self._programs.append((program, config))
        record.values |= {"program": program, "config": config, "text": json.dumps(facts).encode()}
        self.finalized["built"] += 1
        return 0


#: Attributes that are pointers to descriptors although their names do not end in DESC.
_POINTERS = ("PW_DESCRIPTOR", "SEED")


def _number(descriptor: Any) -> int:
    return int(descriptor if isinstance(descriptor, int) else descriptor.value)
