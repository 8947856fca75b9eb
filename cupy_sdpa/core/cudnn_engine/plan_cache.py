"""The plan cache: execution plans, refusals and captured CUDA graphs, each in a bounded LRU cache."""

from __future__ import annotations

import threading
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

from .. import _html
from ..errors import Unsupported
from ..problem import trace
from ..problem.problem import Problem
from ..runtime.cuda_graph import Recording
from .plan import Plan, knobs_text

T = TypeVar("T")

#: The default number of plans in a cache.
LIMIT = 256
#: The default bytes of captured CUDA graphs in a cache, including the arrays that they keep alive.
RECORDING_LIMIT = 128 << 20


class Recordings:
    """The captured CUDA graphs of a thread in a CUDA context, limited in bytes.

    The oldest ones that were not launched since the last search are destroyed first, so that a launch only sets a flag.
    ``warned`` is set with the warning about a failed capture.
    """

    def __init__(self) -> None:
        self.limit, self.bytes, self.warned = RECORDING_LIMIT, 0, False
        #: The dictionary and the key that each graph is stored under.
        self._owners: OrderedDict[Recording, tuple[dict[Any, Any], Any]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._owners)

    def add(self, recording: Recording, owner: dict[Any, Any], key: Any) -> bool:
        """Store a graph as ``owner[key]``, which is deleted when the graph is destroyed.

        A graph that exceeds the limit on its own is destroyed at once. Returns whether the limit was exceeded, so that graphs
        were destroyed.
        """
        if recording.size > self.limit:
            recording.close()
            return True
        exceeded: bool = self.bytes + recording.size > self.limit
        try:
            self.shrink(self.limit - recording.size)
        finally:
            owner[key] = recording
            self._owners[recording] = owner, key
            self.bytes += recording.size
        return exceeded

    def shrink(self, limit: int) -> None:
        """Destroy graphs that were not used recently until the others take at most ``limit`` bytes."""
        while self.bytes > limit:
            oldest = next(iter(self._owners))
            if oldest.used:
                oldest.used = False
                self._owners.move_to_end(oldest)
            else:
                self.destroy(oldest)

    def destroy(self, recording: Recording) -> None:
        """Destroy a graph; work that it has enqueued still completes."""
        owner, key = self._owners.pop(recording)
        del owner[key]
        self.bytes -= recording.size
        recording.close()


class PlanCache:
    """Keep the plans of a thread in a CUDA context; :func:`cupy_sdpa.get_plan_cache` returns the current cache.

    Repeated calls on the same arrays are captured as CUDA graphs (:doc:`/design`), whose memory the cache also limits: an
    executable graph takes 0.12 MiB of device memory outside CuPy's pool, plus the arrays and the workspace that it keeps alive.

    Attributes:
        hits: number of look-ups that found a plan or a refusal.
        misses: number of look-ups that did not.
        limit: the maximum number of plans and refusals; the least recently used are evicted first.
        recorded: the captured CUDA graphs of the plans.

    >>> from cupy_sdpa import get_plan_cache
    >>> cache = get_plan_cache()
    >>> cache.hits >= 0, cache.size <= cache.limit, cache.recording_bytes <= cache.recording_limit
    (True, True, True)
    """

    _COLUMNS = ("problem", "engine", "knobs", "workspace", "size", "time")

    def __init__(self, limit: int = LIMIT) -> None:
        self.hits = self.misses = 0
        self.limit = limit
        self.recorded = Recordings()
        # Held during look-ups and executions, so that no plan is destroyed while it runs; not held while plans are built.
        self.lock = threading.RLock()
        #: A refusal is text: a cached exception would keep its frames and their arrays alive.
        self._entries: OrderedDict[Problem, Plan | str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """The number of plans and refusals."""
        return len(self._entries)

    @property
    def bytes(self) -> int:
        """Bytes of the plans in serialized form, kernels included."""
        with self.lock:
            return sum(entry.info.size for entry in self._entries.values() if isinstance(entry, Plan))

    @property
    def recordings(self) -> int:
        """The number of captured CUDA graphs."""
        return len(self.recorded)

    @property
    def recording_bytes(self) -> int:
        """Bytes of device memory of the captured CUDA graphs, with the arrays and workspaces that they keep alive."""
        return self.recorded.bytes

    @property
    def recording_limit(self) -> int:
        """The maximum number of bytes of captured CUDA graphs; those not launched recently are destroyed first."""
        return self.recorded.limit

    @property
    def problems(self) -> list[Problem]:
        """The problems of the plans and refusals, least recently used first."""
        with self.lock:
            return list(self._entries)

    def get(self, problem: Problem) -> Plan | str | None:
        """Return the entry of a problem, or None; not counted as a look-up."""
        with self.lock:
            return self._entries.get(problem)

    def use(self, problem: Problem, build: Callable[[], Plan], run: Callable[[Plan], T]) -> T:
        """Call ``run`` with the plan of a problem; ``build`` it first if necessary.

        The lock is held during ``run`` but not during ``build``. If another thread stores a plan in the meantime, its plan is
        used. Raises Unsupported if ``build`` raised it, in this call or an earlier one.
        """
        with self.lock:
            entry = self._entries.get(problem)
            if entry is not None:
                self.hits += 1
                self._entries.move_to_end(problem)
                return run(_plan_of(entry))
            self.misses += 1
        try:
            entry = build()
        except Unsupported as error:
            entry = str(error)
        with self.lock:
            stored = self._entries.get(problem)
            if stored is None:
                self._insert(problem, stored := entry)
            elif isinstance(entry, Plan):
                _destroy(entry)
            self._entries.move_to_end(problem)
            return run(_plan_of(stored))

    def clear(self) -> None:
        """Destroy every plan and every CUDA graph, delete every refusal, and reset the counts."""
        with self.lock:
            self._evict(0)
            self.recorded.shrink(0)  # graphs of calls without a plan
            self.hits = self.misses = 0

    def set_limit(self, limit: int) -> None:
        """Limit the number of plans and refusals; the least recently used ones beyond the limit are evicted now.

        Args:
            limit: the maximum number of plans and refusals. A new cache has the limit 256.

        Raises:
            TypeError: the limit is not an integer.
            ValueError: the limit is below 1.

        >>> from cupy_sdpa import get_plan_cache
        >>> cache = get_plan_cache()
        >>> cache.set_limit(cache.limit)
        """
        if not isinstance(limit, int):
            raise TypeError(f"the limit is {limit!r}; it must be a number of plans")
        if limit < 1:
            raise ValueError(f"the limit is {limit}; it must be at least 1. clear() empties the cache")
        with self.lock:
            self.limit = limit
            self._evict(limit)

    def set_recording_limit(self, limit: int) -> None:
        """Limit the bytes of device memory of captured CUDA graphs; 0 turns capturing off.

        Args:
            limit: the maximum number of bytes. A new cache has the limit 128 MiB.

        Raises:
            ValueError: the limit is below 0.

        >>> from cupy_sdpa import get_plan_cache
        >>> cache = get_plan_cache()
        >>> cache.set_recording_limit(cache.recording_limit)
        """
        if limit < 0:
            raise ValueError(f"the limit is {limit} bytes; it must be at least 0; 0 turns capturing off")
        with self.lock:
            self.recorded.limit = limit
            self.recorded.shrink(limit)

    def _insert(self, problem: Problem, entry: Plan | str) -> None:
        """Evict entries until there is space for a new one, and store it, even if an eviction fails."""
        try:
            self._evict(self.limit - 1)  # first, so that the new entry is never evicted
        finally:
            self._entries[problem] = entry

    def _evict(self, limit: int) -> None:
        """Evict the least recently used entries until at most ``limit`` are left."""
        while len(self._entries) > limit:
            problem, entry = self._entries.popitem(last=False)
            if isinstance(entry, Plan):
                if entry.used:  # it ran without a look-up, so it is not the least recently used
                    entry.used = False
                    self._entries[problem] = entry
                    continue
                _destroy(entry)
            trace.keep(problem)

    def _rows(self) -> list[tuple[str, ...]]:
        with self.lock:
            entries = list(self._entries.items())
        rows: list[tuple[str, ...]] = []
        for problem, entry in reversed(entries):
            if isinstance(entry, Plan):
                info = entry.info
                time = f"{info.build_ms:.1f} ms, {'loaded' if info.loaded else 'built'}"
                knobs = knobs_text(info.knobs)
                rows.append((str(problem), str(info.engine), knobs, f"{info.workspace} B", f"{info.size} B", time))
            else:
                rows.append((str(problem), "refused", "", "", "", ""))
        return rows

    def _title(self) -> str:
        plans = f"{self.size} of at most {self.limit}, {self.bytes} bytes, {self.hits} hits, {self.misses} misses"
        return f"plan cache: {plans}; {self.recordings} captured CUDA graphs, {self.recording_bytes} bytes"

    def __str__(self) -> str:
        lines = [self._title()]
        for problem, *facts in self._rows():
            named = (f"{name} {fact}" for name, fact in zip(self._COLUMNS[1:], facts, strict=True) if fact)
            lines.append(f"  {problem}: {', '.join(named)}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<{self._title()}>"

    def _repr_html_(self) -> str:
        return _html.with_title(self._title(), _html.table(self._COLUMNS, self._rows()))


def _plan_of(entry: Plan | str) -> Plan:
    if isinstance(entry, str):
        raise Unsupported(entry)
    return entry


def _destroy(plan: Plan) -> None:
    """Destroy an evicted plan. A failure is a warning, because the caller's own plan has not failed."""
    try:
        plan.close()
    except Exception as error:
        warnings.warn(f"a plan could not be destroyed: {type(error).__name__}: {error}", RuntimeWarning, stacklevel=2)
