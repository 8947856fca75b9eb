"""Repeated calls: they skip validation and replay the launches from a captured CUDA graph.

Parsing a call's arguments takes about 30 us of Python, preparing cuDNN's arguments up to 200 us, and
``cudnnBackendExecute`` 7 to 20 us; launching the same kernels as a CUDA graph takes 3 us (docs/speed.md). Calls are
therefore cached by a key of their arguments' dtypes, shapes, strides and options (:mod:`.call_key`). The cost of a repeated
call depends on the addresses of its arrays:

- Addresses that occurred :data:`CAPTURE_AFTER` times: everything that the call enqueues has been captured. The call
  consists of a look-up, the allocation of its results, and a graph launch.
- Other addresses: the plan is executed. If the call also copies or clears arrays, the parsed call runs on the new arrays.
- Calls that copy large arrays, and gradients of a bias and of ``tensors``, are not captured: they run in the second way.

Calls without a key are parsed every time: those whose functions have no identity (:mod:`cupy_sdpa.score_fn.identity`).

The cache belongs to a thread's session in a CUDA context, and each graph to the plan whose kernels it contains: it is
destroyed before the plan. A graph contains the addresses of the caller's arrays; it does not keep the arrays alive. Replay is
an optimization: if a graph cannot be captured or launched, a warning is issued and the call runs without a graph.

A stream is identified by its address. A later stream can have the same address: a new stream after the first was destroyed,
or the default stream of another thread that took over the session. This is safe. A graph is launched only if the results have
the addresses that it writes to, and it owns all other memory that it writes to. Launches of two graphs therefore never
write to the same memory. Two unordered launches of one graph would also race for the results without graphs.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..device import cupy_runtime, driver
from ..device.cuda_graph import Recording
from .call import Call, active_tunings
from .call_key import Arguments, Template, array_names, read_key
from .user_functions import function_identities

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..plans.plan import Plan
    from ..plans.plan_cache import PlanCache
    from ..plans.sessions import Session

#: The maximum number of calls in a session, and of address sets counted per call; the least recently used are removed first.
MAX_CALLS, MAX_ADDRESS_SETS = 1024, 1024
#: Up to this number of graphs of a call, launched in turn, take no more device time than their kernels.
FEW_GRAPHS = 4
#: A call is captured when the same addresses occur this many times; a capture takes as long as ten launches.
CAPTURE_AFTER = 3
#: The number of runs after a failed capture or launch before a call is captured again.
RETRY_AFTER = 1000
#: The number of runs of a call between two captures that destroy other graphs. If all graphs that are used in turn exceed the
#: limit, every capture would destroy a graph that is used soon, and every call would be captured in vain.
EVICT_EVERY = 64
#: A graph keeps its own workspace up to this number of bytes.
SMALL_BYTES = 1 << 16
#: A graph keeps its own copies of arrays up to this number of bytes. The rows and partial results of split decoding fit.
COPIED_BYTES = 1 << 22

#: Numbers the uses of calls, to find the least recently used.
_next_use = itertools.count().__next__

#: The functions of CuPy that a repeated call needs, set when a call is cached: attribute look-ups in modules take time.
_runtime: _Runtime | None = None


class _Runtime:
    def __init__(self) -> None:
        from ..plans.sessions import existing_session

        cupy = cupy_runtime.cupy()
        self.ndarray, self.alloc = cupy.ndarray, cupy.cuda.alloc
        self.current_stream, self.is_capturing = cupy.cuda.get_current_stream, cupy.cuda.runtime.streamIsCapturing
        self.context_id, self.session = driver.bindings().cuCtxGetId, existing_session


class CachedCall:
    """A call that was parsed: calls with the same key differ from it only in the addresses of their arrays.

    Args:
        call: the call, after it ran.
        cache: the plan cache that holds its plan.
        names: the names of the arrays that the caller passed.
        arrays: these arrays.

    Attributes:
        plan: the plan; None for a call that is not captured.
        accepts: whether arrays at some addresses have the device and the alignments of the call.
        used: the number of the latest use.
    """

    __slots__ = (
        "_cache", "_closed", "_counts", "_created", "_graphs", "_may_overlap", "_names", "_pause", "_plan_only", "_positions",
        "_scalars", "_template", "_workspace", "accepts", "plan", "used",
    )  # fmt: skip

    def __init__(self, call: Call, cache: PlanCache, names: Sequence[str], arrays: Sequence[Any]) -> None:
        self.plan, self._cache, self._closed = _captured_plan(call), cache, False
        self._graphs: dict[tuple[int, ...], Recording] = {}
        #: How often addresses without a graph occurred.
        self._counts: dict[tuple[int, ...], int] = {}
        #: How many calls must run before the next capture.
        self._pause = 0
        self.used = _next_use()
        results = [spec.name for spec in call.problem.results]
        #: The position of each result among the caller's arrays, or -1 if the call creates it.
        self._positions = [names.index(name) if name in names else -1 for name in results]
        #: Whether a result at a new address may overlap another array.
        self._may_overlap = max(self._positions) >= 0 and not call.own_results
        created = [name for name in results if name not in names] if self.plan else []
        self._created = [(x.shape, x.dtype, x.nbytes) for x in (call.arrays[name] for name in created)]
        self._template = Template(call, names, arrays, created)
        self.accepts = self._template.accepts
        self._names, self._scalars = [*names, *created], dict(call.scalars)
        #: Whether the call does nothing but execute the plan, on the caller's arrays and the results that it creates.
        self._plan_only = False
        #: Bytes of workspace to allocate in every call; a small workspace is part of each graph.
        self._workspace = 0
        if self.plan:
            assert call.launched
            self._plan_only = call.launched.plan_only and call.fills.keys() <= self._template.constants.keys()
            self._workspace = self.plan.info.workspace if self.plan.info.workspace > SMALL_BYTES else 0
            self.plan.dependents.add(self)

    def run(self, runtime: _Runtime, arrays: Sequence[Any], addresses: Sequence[int]) -> list[Any] | None:
        """Launch the graph for these addresses, execute the plan, or run the parsed call on these arrays.

        Args:
            runtime: the functions of CuPy.
            arrays: the caller's arrays, in the order of the names.
            addresses: their addresses.

        Returns:
            The results; None if the call must be parsed.
        """
        stream = runtime.current_stream().ptr
        if stream and runtime.is_capturing(stream):
            return None
        created = [runtime.ndarray(shape, dtype, runtime.alloc(size), None, "F") for shape, dtype, size in self._created]
        pointers = (stream, *addresses, *[array.data.ptr for array in created])
        workspace = None
        if self._workspace:
            try:
                workspace = runtime.alloc(self._workspace)
            except Exception:
                return None  # parsing the call allocates it again, and the error then has a note on the workspace
            pointers = (*pointers, workspace.ptr)
        with self._cache.lock:
            graph = self._graphs.get(pointers)
            if graph is not None:
                try:
                    graph.launch(of_many=len(self._graphs) > FEW_GRAPHS)
                except Exception as error:
                    self._discard_graph(graph, error)
                    return None
                self._cache.recorded.use(graph)
            elif not self._may_run(arrays, pointers) or not self._execute(runtime, pointers, workspace):
                return None
            self.used = _next_use()
            if self.plan:
                self.plan.used = True
            if done := graph is not None or self._plan_only:
                self._cache.hits += 1
        if not done:
            del workspace  # the call allocates it after its results, at the same address
            return self._template.run(runtime.ndarray, arrays, created)
        if not created:
            return [arrays[position] for position in self._positions]
        new = iter(created)
        return [next(new) if position < 0 else arrays[position] for position in self._positions]

    def _may_run(self, arrays: Sequence[Any], pointers: tuple[int, ...]) -> bool:
        """Whether the call may run on addresses without a graph; False if it must be parsed, to check or to capture it."""
        count = self._counts.get(pointers, 0) + 1
        if self._closed or (self.plan and count >= CAPTURE_AFTER and self._may_capture()):
            return False
        if count == 1 and self._may_overlap:
            return False
        if not self.accepts(arrays, pointers[1:]):
            return False
        self._count(pointers, count)
        return True

    def _execute(self, runtime: _Runtime, pointers: tuple[int, ...], workspace: Any) -> bool:
        """Execute the plan on addresses without a graph, if the call does nothing else; False if there is no memory."""
        if not self._plan_only:
            return True
        assert self.plan
        if workspace is None and self.plan.info.workspace:
            try:
                workspace = runtime.alloc(self.plan.info.workspace)
            except Exception:
                return False  # as in run()
        stream, *addresses = pointers
        self.plan.set_stream(stream)
        self.plan.execute(self._template.named(addresses), self._scalars, workspace.ptr if workspace else 0)
        return True

    def _may_capture(self) -> bool:
        return not self._pause and self._cache.recorded.limit > 0

    def _count(self, pointers: tuple[int, ...], count: int) -> None:
        """Store how often addresses without a graph occurred."""
        self._pause = max(self._pause - 1, 0)
        self._counts.pop(pointers, None)  # so that they become the most recent
        self._counts[pointers] = count
        if len(self._counts) > MAX_ADDRESS_SETS:
            del self._counts[next(iter(self._counts))]

    def count_or_capture(self, call: Call, addresses: Sequence[int], own: list[Any]) -> None:
        """Count the addresses that a call ran on; capture the call if they occurred often enough.

        Args:
            call: the call, after it ran.
            addresses: the addresses of the caller's arrays.
            own: the inputs that were created for the call.
        """
        stream, created = cupy_runtime.stream(), self._names[len(addresses) :]
        pointers = (stream, *addresses, *[call.arrays[name].data.ptr for name in created])
        if self._workspace and call.launched:
            pointers = (*pointers, call.launched.workspace)
        with self._cache.lock:
            if self._closed or pointers in self._graphs:
                return
            count = self._counts.get(pointers, 0) + 1
            if not self.plan or count < CAPTURE_AFTER or not self._may_capture():
                self._count(pointers, count)
                return
            self._counts.pop(pointers, None)
            self._pause = RETRY_AFTER  # unless the capture succeeds and fits the limit
            exceeded = self._cache.recorded.add(self._capture(call, stream, own), self._graphs, pointers)
            if pointers in self._graphs:
                self._pause = EVICT_EVERY if exceeded else 0

    def _capture(self, call: Call, stream: int, own: list[Any]) -> Recording:
        assert self.plan
        assert call.launched
        if not self._workspace and self.plan.info.workspace:
            workspace = cupy_runtime.empty((self.plan.info.workspace,), np.uint8)
            own = [*own, workspace]
            call.launched = call.launched._replace(workspace=workspace.data.ptr)
        try:
            recorded = self._cache.recorded
            executable = len(self._graphs) < FEW_GRAPHS or recorded.bytes < recorded.limit // 2
            return Recording(call.enqueue, own, executable=executable)
        finally:
            self.plan.set_stream(stream)  # it was the stream of the capture

    def _discard_graph(self, graph: Recording, error: Exception) -> None:
        """Destroy a graph that failed to launch, and capture no graph for the next calls."""
        self._pause = RETRY_AFTER
        with contextlib.suppress(Exception):
            self._cache.recorded.destroy(graph)
        _warn(self._cache, error, stacklevel=6)

    def close(self) -> None:
        """Destroy the graphs; called before the plan is destroyed."""
        self._closed = True
        with contextlib.ExitStack() as stack:  # all of them, even if one fails
            for graph in self._graphs.values():
                stack.callback(self._cache.recorded.destroy, graph)

    def remove(self) -> None:
        """Destroy the graphs, and detach from the plan, which is not destroyed."""
        with self._cache.lock:
            if self.plan:
                self.plan.dependents.discard(self)
            self.close()


def run_cached(kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any] | None:
    """Run a call that is cached.

    Args:
        kind: the part of the key besides arrays and options, hashable.
        arrays: the array arguments, which may be None.
        options: the options.

    Returns:
        The results; None if the call has to be read.
    """
    runtime = _runtime
    if runtime is None or active_tunings.get() is not None:
        return None
    arguments = read_key(runtime.ndarray, kind, arrays, options)
    if arguments is None:
        return None
    key, passed, addresses = arguments
    status, context = runtime.context_id(0)
    if status or (session := runtime.session(context)) is None:
        return None
    cached: CachedCall | None = session.cached_calls.get(key)
    return None if cached is None else cached.run(runtime, passed, addresses)


def cache_call(kind: Any, names: Sequence[str], arrays: tuple[Any, ...], options: Mapping[str, Any], call: Call) -> None:
    """Cache a call that has run; capture it if the same addresses occurred often. A failure is only a warning.

    Args:
        kind, arrays, options: the arguments of :func:`run_cached`.
        names: the names of ``arrays``.
        call: the call, after it ran.
    """
    global _runtime
    if not call.on_gpu or call.problem.trivial or active_tunings.get() is not None:
        return
    if call.launched is None and not _has_reductions(call):
        return  # the stream is being captured
    runtime = _runtime = _runtime or _Runtime()
    arguments = read_key(runtime.ndarray, kind, arrays, options)
    session = runtime.session(driver.context_id())
    if arguments is None or session is None:
        return
    if call.launched and call.launched.plan.target.handle is not session.handle:
        return  # the call ran on a device that is not the current one
    if call.identities and call.identities != function_identities(options):
        return  # a function changed while the call ran
    passed_names = array_names(runtime.ndarray, names, arrays, options)
    own = [call.arrays[name] for name in call.fills]
    try:
        _cached(session, arguments, call, passed_names).count_or_capture(call, arguments.addresses, own)
    except Exception as error:
        _warn(session.cache, error, stacklevel=4)


def _has_reductions(call: Call) -> bool:
    """Whether a call sums gradients of a bias or of ``tensors``, in memory that a graph would have to own."""
    return bool(call.problem.ds_reductions) or call.gradients is not None


def _captured_plan(call: Call) -> Plan | None:
    """The plan of a call that may be captured; None for calls with large copies and with reductions."""
    if call.launched is None or call.launched.copied_bytes > COPIED_BYTES or _has_reductions(call):
        return None
    return call.launched.plan


def _cached(session: Session, arguments: Arguments, call: Call, names: Sequence[str]) -> CachedCall:
    """The call that is cached under a key, or this one, which is then cached."""
    key, arrays, addresses = arguments
    cached: CachedCall | None = session.cached_calls.get(key)
    if cached is not None and cached.plan is _captured_plan(call) and cached.accepts(arrays, addresses):
        cached.used = _next_use()
        return cached
    if cached is not None:  # its plan was destroyed, or its arrays had another alignment or device
        cached.remove()
    if len(session.cached_calls) >= MAX_CALLS:  # remove more than one, so that this search is rare
        oldest = heapq.nsmallest(1 + MAX_CALLS // 8, session.cached_calls.items(), key=lambda item: item[1].used)
        for other, old in oldest:
            del session.cached_calls[other]
            old.remove()
    new = session.cached_calls[key] = CachedCall(call, session.cache, names, arrays)
    return new


def _warn(cache: PlanCache, error: Exception, stacklevel: int) -> None:
    """Warn, once in a session, that a call cannot be captured or its graph cannot be launched."""
    if not cache.recorded.warned:
        cache.recorded.warned = True
        warnings.warn(
            f"a repeated call could not be replayed from a CUDA graph: {type(error).__name__}: {error}. Its results are right, "
            f"but it takes more host time. It is captured again after {RETRY_AFTER} calls, without another warning; "
            "get_plan_cache().set_recording_limit(0) turns CUDA graphs off",
            RuntimeWarning,
            stacklevel=stacklevel,
        )
