"""Finalized plans, kept: a bounded LRU for every (thread, CUDA context).

A plan belongs to the cuDNN handle that it was finalized for, and a handle to one thread at a time, so a thread owns a
handle and a cache in every CUDA context that it uses: a :class:`Session`. When a thread ends, its sessions are left for
the next new thread to take over, plans and all. Nothing is destroyed then, nor at interpreter exit, nor in a forked child.
"""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .. import _html
from ..errors import Unsupported
from ..problem.problem import Problem
from .engines import knobs_text
from .plan import Closable, Plan

T = TypeVar("T")

#: Plans that a cache keeps unless told otherwise.
LIMIT = 256
#: Bytes of recorded CUDA graphs, with the arrays that they keep, that a cache keeps unless told otherwise.
RECORDING_LIMIT = 64 << 20


@dataclass(frozen=True)
class Refusal:
    """That a problem cannot be planned, as text: a kept exception would keep its frames, and the arrays in them, alive."""

    text: str


class Recorded(Closable, Protocol):
    """A recorded call, see :mod:`cupy_sdpa.device.cuda_graph`."""

    size: int


class Recordings:
    """The recorded calls of one thread in one CUDA context, bounded in bytes; the least recently used are destroyed first.

    Attributes:
        limit: bytes that they may take.
        bytes: bytes that they take.
        warned: whether a failure to record has been reported.
    """

    def __init__(self) -> None:
        self.limit, self.bytes, self.warned = RECORDING_LIMIT, 0, False
        self._places: OrderedDict[Recorded, tuple[dict[Any, Any], Any]] = OrderedDict()
        self.use: Callable[[Recorded], None] = self._places.move_to_end

    def __len__(self) -> int:
        return len(self._places)

    def add(self, recording: Recorded, home: dict[Any, Any], key: Any) -> None:
        """Keep a recording as ``home[key]``, from where it is removed when it is destroyed.

        One that alone takes more than the limit is destroyed at once.
        """
        home[key] = recording
        self._places[recording] = home, key
        self.bytes += recording.size
        self.shrink()

    def shrink(self) -> None:
        """Destroy the least recently used, until the rest keep within the limit."""
        while self.bytes > self.limit:
            self.destroy(next(iter(self._places)))

    def destroy(self, recording: Recorded) -> None:
        """Destroy a recording; what it has enqueued still runs."""
        home, key = self._places.pop(recording)
        del home[key]
        self.bytes -= recording.size
        recording.close()


class PlanCache:
    """The plans of one thread in one CUDA context; :func:`cupy_sdpa.get_plan_cache` gives the current one.

    Calls that come again on the same arrays are recorded as CUDA graphs (docs/design.md). The cache bounds their memory, too:
    a recording takes 0.12 MiB of the device's memory outside CuPy's pool, and what it keeps of arrays and workspace.

    Attributes:
        hits: look-ups that found a plan or a refusal.
        misses: look-ups that did not.
        limit: how many plans and refusals are kept; the least recently used go first.
        recorded: the recordings of the plans.
    """

    _COLUMNS = ("problem", "engine", "knobs", "workspace", "size", "got in")

    def __init__(self, limit: int = LIMIT) -> None:
        self.hits = self.misses = 0
        self.limit = limit
        self.recorded = Recordings()
        # Held during look-ups and executions, so that a plan is never destroyed while it runs; not while plans are built.
        self.lock = threading.RLock()
        self._entries: OrderedDict[Problem, Plan | Refusal] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """How many plans and refusals are kept."""
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of the kept plans in their serialized form, kernels among them."""
        with self.lock:
            return sum(entry.info.size for entry in self._entries.values() if isinstance(entry, Plan))

    @property
    def recordings(self) -> int:
        """How many calls are recorded as CUDA graphs."""
        return len(self.recorded)

    @property
    def recording_bytes(self) -> int:
        """Bytes of the GPU's memory that the recordings take, with the arrays and workspaces that they keep."""
        return self.recorded.bytes

    @property
    def recording_limit(self) -> int:
        """Bytes that the recordings may take; the least recently used go first."""
        return self.recorded.limit

    def get(self, problem: Problem) -> Plan | Refusal | None:
        """What is kept of a problem; no look-up is counted."""
        with self.lock:
            return self._entries.get(problem)

    def put(self, problem: Problem, plan: Plan) -> None:
        """Keep a plan in place of what is kept of its problem, which is destroyed."""
        with self.lock:
            before = self._entries.pop(problem, None)
            self._keep(problem, plan)
            if isinstance(before, Plan):
                _destroy(before)

    def use(self, problem: Problem, build: Callable[[], Plan], run: Callable[[Plan], T]) -> T:
        """``run`` the plan of a problem, building it first where it is not kept.

        The lock is held while ``run`` runs, not while ``build`` does: two threads may build the same plan, the first one
        stored stays.

        Raises:
            Unsupported: ``build`` did so, now or earlier.
        """
        with self.lock:
            entry = self._entries.get(problem)
            if entry is not None:
                self.hits += 1
                self._entries.move_to_end(problem)
                return run(_usable(entry))
            self.misses += 1
        try:
            entry = build()
        except Unsupported as error:
            entry = Refusal(str(error))
        with self.lock:
            kept = self._entries.get(problem)
            if kept is None:
                self._keep(problem, kept := entry)
            elif isinstance(entry, Plan):
                _destroy(entry)
            self._entries.move_to_end(problem)
            return run(_usable(kept))

    def clear(self) -> None:
        """Destroy every plan and its recordings, and forget every refusal; counts begin anew."""
        with self.lock:
            self._evict(0)
            self.hits = self.misses = 0

    def set_limit(self, limit: int) -> None:
        """Keep at most ``limit`` plans and refusals from now on.

        Raises:
            ValueError: a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"the limit is {limit}; a cache keeps at least 1 plan. To empty it: clear()")
        with self.lock:
            self.limit = limit
            self._evict(limit)

    def set_recording_limit(self, limit: int) -> None:
        """Let recorded CUDA graphs take at most ``limit`` bytes of the GPU's memory from now on; 0 records nothing.

        Raises:
            ValueError: a limit below 0.
        """
        if limit < 0:
            raise ValueError(f"the limit is {limit} bytes; it must be at least 0, which records nothing")
        with self.lock:
            self.recorded.limit = limit
            self.recorded.shrink()

    def _keep(self, problem: Problem, entry: Plan | Refusal) -> None:
        """Make room for an entry and keep it, also where making room fails."""
        try:
            self._evict(self.limit - 1)  # before, so that the new entry is never the one to go
        finally:
            self._entries[problem] = entry

    def _evict(self, limit: int) -> None:
        """Destroy the least recently used, until no more than so many are left."""
        while len(self._entries) > limit:
            problem, entry = self._entries.popitem(last=False)
            if isinstance(entry, Plan):
                if entry.used:  # since it was last looked up: once more to the end of the queue
                    entry.used = False
                    self._entries[problem] = entry
                else:
                    _destroy(entry)

    def _rows(self) -> list[tuple[str, ...]]:
        with self.lock:
            entries = list(self._entries.items())
        rows: list[tuple[str, ...]] = []
        for problem, entry in reversed(entries):
            if isinstance(entry, Plan):
                i = entry.info
                got = f"{i.build_ms:.1f} ms, {'loaded' if i.loaded else 'built'}"
                engine = f"{i.engine}{' tuned' * i.tuned}"
                rows.append((str(problem), engine, knobs_text(i.knobs), f"{i.workspace} B", f"{i.size} B", got))
            else:
                rows.append((str(problem), "refused", "", "", "", ""))
        return rows

    def _title(self) -> str:
        plans = f"{self.size} of at most {self.limit}, {self.bytes} bytes, {self.hits} hits, {self.misses} misses"
        return f"plan cache: {plans}; {self.recordings} recordings, {self.recording_bytes} bytes"

    def __str__(self) -> str:
        lines = [self._title()]
        for problem, *facts in self._rows():
            named = (f"{name} {fact}" for name, fact in zip(self._COLUMNS[1:], facts, strict=True) if fact)
            lines.append(f"  {problem}: {', '.join(named)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _repr_html_(self) -> str:
        return _html.titled(self._title(), _html.table(self._COLUMNS, self._rows()))


def _usable(entry: Plan | Refusal) -> Plan:
    if isinstance(entry, Refusal):
        raise Unsupported(entry.text)
    return entry


def _destroy(plan: Plan) -> None:
    """Destroy a plan that nobody uses any more; a failure is a warning, for the caller's own plan has not failed."""
    try:
        plan.close()
    except Exception as error:
        warnings.warn(f"a plan could not be destroyed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
