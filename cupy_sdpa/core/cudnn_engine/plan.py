"""Execution plans: their properties and their execution."""

from __future__ import annotations

import contextlib
import itertools
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..cudnn.descriptor import Descriptor
from ..cudnn.launch import Handle, Launcher
from ..cudnn.library import library
from ..graph.nodes import Graph
from ..problem.tensor_spec import ITEMSIZE
from ..runtime import cupy_runtime, memory
from ..version import version_text

#: Alignment of scratch tensors in the workspace, in bytes; the same as for CuPy's allocations.
ALIGNMENT = 256


@dataclass(frozen=True)
class Target:
    """The GPU that a plan is for.

    Attributes:
        model: the GPU model, see :func:`.core.runtime.cupy_runtime.model_of`.
        capability: the compute capability; 90 is 9.0.
        handle: the cuDNN handle that the plan belongs to; None for a described GPU.
        description: the description of a GPU that need not be installed, in cuDNN's JSON. Plans for it cannot run.
    """

    model: str
    capability: int
    handle: Handle | None = None
    description: str | None = None

    @classmethod
    def described(cls, gpu: str) -> Target:
        """Return a described GPU, given its name, such as ``"h200"``, or the path of a file that ``info --describe`` wrote.

        Raises:
            ValueError: there is no such description.

        >>> Target.described("h200").model
        'NVIDIA H200, compute capability 9.0, 132 multiprocessors'
        """
        from ..support.gpus import capability_of, describe

        text = describe(gpu)
        properties, number = json.loads(text), capability_of(gpu)
        model = cupy_runtime.model_of(properties["deviceName"], number, properties["multiProcessorCount"])
        return cls(model, number, description=text)

    @property
    def cudnn_handle(self) -> int | None:
        """The pointer of the handle."""
        return self.handle.pointer if self.handle else None


#: Settings of an engine: pairs of a knob's name, as in cuDNN's headers, and its value.
Knobs = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Facts:
    """The properties of a finalized plan that are stored with it. The names are the keys in the file.

    Attributes:
        uids: cuDNN's ids of the tensors that an execution binds, by name.
        engine: cuDNN's number of the engine.
        knobs: the engine's settings as (name, value); -1 lets the engine choose.
        notes: numerical notes, such as ``TENSOR_CORE`` and ``NONDETERMINISTIC``.
        need: bytes of workspace that cuDNN needs.
        build_ms: milliseconds that it took to build the plan, or to load it from the disk cache.
        refused: for every engine config tried before this one, the engine and cuDNN's reason for refusing it.
    """

    uids: dict[str, int] = field(repr=False, hash=False)
    engine: int
    knobs: Knobs
    notes: tuple[str, ...]
    need: int
    build_ms: float
    refused: tuple[str, ...]

    def content(self, text: str) -> bytes:
        """Return the entry in the disk cache: a line of JSON with these properties, then the plan as cuDNN serializes it."""
        return json.dumps({name: getattr(self, name) for name in _CHECKS}).encode() + b"\n" + text.encode()


def knobs_text(knobs: Knobs) -> str:
    """Knobs as text.

    >>> knobs_text((("TILE_M", 3), ("TILE_N", 2)))
    'TILE_M=3 TILE_N=2'
    """
    return " ".join(f"{name}={value}" for name, value in knobs)


def facts_of(content: bytes) -> tuple[Facts, bytes]:
    """Return the facts and the serialized plan of an entry in the disk cache.

    Raises:
        ValueError: the facts are not JSON, not exactly the expected ones, or one has a wrong type or value.
    """
    head, _, text = content.partition(b"\n")
    try:
        facts = json.loads(head)
    except RecursionError:
        raise ValueError("its facts are nested too deeply") from None
    if not isinstance(facts, dict) or facts.keys() != _CHECKS.keys():
        raise ValueError(f"its facts are not {', '.join(_CHECKS)}")
    if wrong := [name for name, is_valid in _CHECKS.items() if not is_valid(facts[name])]:
        raise ValueError(f"its {wrong[0]} has a wrong type or value")
    knobs = tuple((name, value) for name, value in facts["knobs"])
    return Facts(**(facts | {"knobs": knobs, "notes": tuple(facts["notes"]), "refused": tuple(facts["refused"])})), text


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list_of_knobs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(knob, list) and len(knob) == 2 and isinstance(knob[0], str) and _is_int64(knob[1]) for knob in value
    )


#: For every fact, whether a value read from a file is valid.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "uids": lambda value: isinstance(value, dict) and all(map(_is_int64, value.values())),
    "engine": _is_int64,
    "knobs": _is_list_of_knobs,
    "notes": _is_list_of_text,
    "need": lambda value: _is_int64(value) and value >= 0,
    "build_ms": lambda value: isinstance(value, int | float) and 0 <= value < float("inf"),
    "refused": _is_list_of_text,
}


class Candidate(NamedTuple):
    """A finalized plan as cuDNN has it, as cuDNN serializes it, and its properties. The receiver closes the descriptor."""

    descriptor: Descriptor
    text: str
    facts: Facts


@dataclass(frozen=True, kw_only=True)
class PlanInfo(Facts):
    """Properties of a plan; they remain valid after the plan is destroyed.

    Attributes:
        workspace: bytes of workspace that an execution needs, scratch tensors included.
        loaded: whether it was loaded from the disk cache.
        size: bytes of the serialized plan, its kernel included.
        cudnn: the cuDNN version that built it.
        graph: the operation graph.
    """

    workspace: int
    loaded: bool
    size: int
    cudnn: int
    graph: Graph = field(repr=False)

    def __str__(self) -> str:
        return "\n".join([", ".join(f"{name} {value}" for name, value in self.facts()), *self.reasons()])

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield the properties as pairs of name and text."""
        yield "cuDNN", version_text(self.cudnn)
        yield "engine", str(self.engine)
        yield "knobs", knobs_text(self.knobs) or "none"
        yield "numerical notes", " ".join(note.lower() for note in self.notes) or "none"
        yield "workspace", size_text(self.workspace)
        yield ("loaded in" if self.loaded else "built in"), f"{self.build_ms:.1f} ms"
        yield "size", size_text(self.size)

    def as_data(self) -> dict[str, Any]:
        """Return the properties as plain data; docs/command_line.md lists the keys."""
        return {
            "cudnn": version_text(self.cudnn), "engine": self.engine, "knobs": [list(knob) for knob in self.knobs],
            "notes": list(self.notes), "workspace_bytes": self.workspace, "build_ms": self.build_ms, "loaded": self.loaded,
            "bytes": self.size, "refused": list(self.refused),
        }  # fmt: skip

    def reasons(self) -> list[str]:
        """Return one line for each engine config that was refused before this one."""
        return [f"refused: {reason}" for reason in self.refused]


def size_text(size: int) -> str:
    """Return a number of bytes in readable units.

    >>> size_text(256), size_text(75140), size_text(3 << 30)
    ('256 bytes', '73.4 KiB', '3.0 GiB')
    """
    if size < 1024:
        return f"{size} bytes"
    unit = min((size.bit_length() - 1) // 10, 4)
    return f"{size / (1 << 10 * unit):.1f} {' KMGT'[unit]}iB"


class Scratch:
    """The offsets of a graph's scratch tensors in the workspace, after cuDNN's own part."""

    def __init__(self, graph: Graph) -> None:
        self._sizes = {t.name: _align(t.size * ITEMSIZE[t.dtype]) for t in graph.by_role("scratch")}

    def total_bytes(self, workspace_bytes: int) -> int:
        """Bytes of the whole workspace, given the bytes of cuDNN's own part."""
        return _align(workspace_bytes) + sum(self._sizes.values()) if self._sizes else workspace_bytes

    def offsets(self, workspace_bytes: int) -> dict[str, int]:
        """Return the offset of every scratch tensor, given the bytes of cuDNN's own part."""
        return dict(zip(self._sizes, itertools.accumulate(self._sizes.values(), initial=_align(workspace_bytes)), strict=False))


class Plan:
    """A finalized execution plan. Its owner, a plan cache, closes it.

    Attributes:
        used: whether it ran without a look-up in its plan cache, see :mod:`.core.replay.replay_cache`.
        dependents: objects that need the plan, with a method close(), which are closed before it; it does not keep them alive.
    """

    def __init__(self, candidate: Candidate, graph: Graph, target: Target, build_ms: float, *, loaded: bool = False) -> None:
        facts, scratch = candidate.facts, Scratch(graph)
        self.target = target
        self.used = False
        self.dependents: weakref.WeakSet[Any] = weakref.WeakSet()
        self._captured = False
        self._descriptor = candidate.descriptor
        self.info = PlanInfo(
            **{**vars(facts), "build_ms": build_ms},
            workspace=scratch.total_bytes(facts.need),
            loaded=loaded,
            size=len(candidate.text),
            cudnn=library().version,
            graph=graph,
        )
        self._scratch_offsets = scratch.offsets(facts.need)
        runnable = target.handle is not None
        constants = graph.by_role("constant")
        self._constants = {t.name: memory.multiples(t.step, t.span, t.dtype).data.ptr if runnable else 0 for t in constants}
        self._arrays = [t.name for t in graph.by_role("input", "output", "constant", "scratch")]
        scalars = graph.by_role("scalar")
        self._scalars = [t.name for t in scalars if t.value is None]
        uids = facts.uids
        self._launcher = Launcher(
            candidate.descriptor, [uids[name] for name in self._arrays], [(uids[t.name], t.dtype, t.value) for t in scalars]
        )

    def set_stream(self, stream: int) -> None:
        """Run the following executions on a stream."""
        assert self.target.handle is not None, "a plan for a described GPU cannot run"
        self.target.handle.set_stream(stream)

    def execute(self, addresses: Mapping[str, int], scalars: Mapping[str, float], workspace: int = 0) -> None:
        """Enqueue the plan on the handle's stream; does not wait for the GPU.

        Takes the address of every input and output, the values of by-value scalars that the graph does not fix, both by name,
        and the address of at least ``info.workspace`` bytes.
        """
        assert self.target.handle is not None, "a plan for a described GPU cannot run"
        if self._scratch_offsets or self._constants:
            scratch = {name: workspace + offset for name, offset in self._scratch_offsets.items()}
            addresses = {**addresses, **scratch, **self._constants}
        pointers, values = map(addresses.__getitem__, self._arrays), map(scalars.__getitem__, self._scalars)
        self._launcher.launch(self.target.handle, [*pointers], [*values], workspace)

    def keep(self) -> None:
        """Never destroy the plan: the caller has captured its kernels into a CUDA graph, which may be replayed at any time."""
        self._captured = True

    def close(self) -> None:
        """Close the dependents, then destroy the plan unless :meth:`keep` was called. Enqueued kernels still run.

        Everything is closed even if one of them fails; then the error is raised.
        """
        with contextlib.ExitStack() as stack:
            if not self._captured:
                stack.callback(self._descriptor.close)  # the first callback runs last
            for dependent in [*self.dependents]:
                stack.callback(dependent.close)


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
