"""Repeated calls: they skip validation and replay the launches from a captured CUDA graph.

Parsing a call's arguments takes about 30 us of Python, preparing cuDNN's arguments up to 200 us, and
``cudnnBackendExecute`` 7 to 20 us; launching the same kernels as a CUDA graph takes 3 us (docs/speed.md). Calls are
therefore cached by a key of their arguments' dtypes, shapes, strides and options. The cost of a repeated call depends on
the addresses of its arrays:

- Addresses that occurred :data:`CAPTURE_AFTER` times: everything that the call enqueues has been captured. The call
  consists of a look-up, the allocation of its results, and a graph launch.
- Other addresses: the plan is executed, if the call consists of nothing else.
- Calls with functions, and calls that copy large arrays, are parsed every time.

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

from ..device import cupy_runtime, driver, memory
from ..device.cuda_graph import Recording
from .call import Call, active_tunings

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..plans.plan_cache import PlanCache
    from ..plans.sessions import Session

#: The maximum number of calls in a session, and of address sets counted per call; the least recently used are removed first.
MAX_CALLS, MAX_ADDRESS_SETS = 1024, 128
#: Up to this number of graphs of a call, launched in turn, take no more device time than their kernels.
FEW_GRAPHS = 4
#: A call is captured when the same addresses occur this many times; a capture takes as long as ten launches.
CAPTURE_AFTER = 3
#: The number of runs after a failed capture or launch before a call is captured again.
RETRY_AFTER = 1000
#: A graph keeps its own workspace up to this number of bytes.
SMALL_BYTES = 1 << 16
#: A graph keeps its own copies of arrays up to this number of bytes. The rows and partial results of split decoding fit.
COPIED_BYTES = 1 << 22

#: Options of these types are part of the key as they are. Tuples are keyed by their repr: (1, 0) and (1.0, 0) differ.
_KEY_TYPES = frozenset({bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64})

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
        names: the names of the arrays that the caller passed, in the order of their addresses.

    Attributes:
        plan: the plan.
        used: the number of the latest use.
    """

    __slots__ = (
        "_cache", "_closed", "_constants", "_counts", "_created", "_device", "_graphs", "_names", "_pause", "_plan_only",
        "_positions", "_scalars", "_workspace", "plan", "used",
    )  # fmt: skip

    def __init__(self, call: Call, cache: PlanCache, names: Sequence[str]) -> None:
        assert call.launched
        self.plan, self._cache, self._closed = call.launched.plan, cache, False
        self._device = call.arrays["q"].data.device_id
        self._graphs: dict[tuple[int, ...], Recording] = {}
        #: How often addresses without a graph occurred.
        self._counts: dict[tuple[int, ...], int] = {}
        #: How many calls must run before the next capture.
        self._pause = 0
        #: Bytes of workspace to allocate in every call; a small workspace is part of each graph.
        self._workspace = self.plan.info.workspace if self.plan.info.workspace > SMALL_BYTES else 0
        self.used = _next_use()
        results = [spec.name for spec in call.problem.results]
        #: The position of each result among the caller's arrays, or -1 if the call creates it.
        self._positions = [names.index(name) if name in names else -1 for name in results]
        created = [name for name in results if name not in names]
        self._created = [(x.shape, x.dtype, x.nbytes) for x in (call.arrays[name] for name in created)]
        #: Whether the call does nothing but execute the plan, on the caller's arrays and the results that it creates.
        aligned = all(spec.alignment >= 16 for spec in call.problem.tensors)
        self._constants = {name: call.arrays[name].data.ptr for name in call.fills if memory.is_constant(call.arrays[name])}
        self._plan_only = call.launched.plan_only and aligned and call.arrays.keys() <= {*names, *created, *self._constants}
        self._names, self._scalars = [*names, *created], dict(call.scalars)
        self.plan.dependents.add(self)

    def run(self, runtime: _Runtime, arrays: Sequence[Any], addresses: Sequence[int]) -> list[Any] | None:
        """Launch the graph for these addresses, or execute the plan.

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
            if graph is None:
                if not self._execute(runtime, arrays, pointers, workspace):
                    return None
            else:
                try:
                    graph.launch(of_many=len(self._graphs) > FEW_GRAPHS)
                except Exception as error:
                    self._discard_graph(graph, error)
                    return None
                self._cache.recorded.use(graph)
            self.plan.used = True
            self._cache.hits += 1
            self.used = _next_use()
        if not created:
            return [arrays[position] for position in self._positions]
        new = iter(created)
        return [next(new) if position < 0 else arrays[position] for position in self._positions]

    def _execute(self, runtime: _Runtime, arrays: Sequence[Any], pointers: tuple[int, ...], workspace: Any) -> bool:
        """Execute the plan on addresses without a graph; False if the call must be parsed, to check or to capture it."""
        count = self._counts.get(pointers, 0) + 1
        if self._closed or not self._plan_only or (count >= CAPTURE_AFTER and self._may_capture()):
            return False
        if count == 1 and max(self._positions) >= 0:
            return False  # a result at a new address may overlap another array
        stream, *addresses = pointers
        if any(address & 15 for address in addresses) or any(array.data.device_id != self._device for array in arrays):
            return False
        if workspace is None and self.plan.info.workspace:
            try:
                workspace = runtime.alloc(self.plan.info.workspace)
            except Exception:
                return False  # as in run()
        self._count(pointers, count)
        self.plan.set_stream(stream)
        named = dict(zip(self._names, addresses, strict=False)) | self._constants  # pointers may end with that of the workspace
        self.plan.execute(named, self._scalars, workspace.ptr if workspace else 0)
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
        assert call.launched
        stream, created = cupy_runtime.stream(), self._names[len(addresses) :]
        pointers = (stream, *addresses, *[call.arrays[name].data.ptr for name in created])
        if self._workspace:
            pointers = (*pointers, call.launched.workspace)
        with self._cache.lock:
            if self._closed or pointers in self._graphs:
                return
            count = self._counts.get(pointers, 0) + 1
            if count < CAPTURE_AFTER or not self._may_capture():
                self._count(pointers, count)
                return
            self._counts.pop(pointers, None)
            self._pause = RETRY_AFTER  # unless the capture succeeds and fits the limit
            self._cache.recorded.add(self._capture(call, stream, own), self._graphs, pointers)
            if pointers in self._graphs:
                self._pause = 0

    def _capture(self, call: Call, stream: int, own: list[Any]) -> Recording:
        assert call.launched
        if not self._workspace and self.plan.info.workspace:
            workspace = cupy_runtime.empty((self.plan.info.workspace,), np.uint8)
            own = [*own, workspace]
            call.launched = call.launched._replace(workspace=workspace.data.ptr)
        try:
            return Recording(call.enqueue, own, executable=len(self._graphs) < FEW_GRAPHS)
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
    parts = _key(runtime.ndarray, kind, arrays, options)
    if parts is None:
        return None
    key, passed, addresses = parts
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
    if call.launched is None or call.launched.copied_bytes > COPIED_BYTES or active_tunings.get() is not None:
        return
    if call.problem.ds_reductions or call.gradients is not None:
        return  # gradients of bias and tensors need more than launches
    runtime = _runtime = _runtime or _Runtime()
    parts = _key(runtime.ndarray, kind, arrays, options)
    session = runtime.session(driver.context_id())
    if parts is None or session is None or call.launched.plan.target.handle is not session.handle:
        return  # the last: the call ran on a device that is not the current one
    key, passed, addresses = parts
    passed_names = [name for name, array in zip(names, arrays, strict=True) if array is not None]
    passed_names += [name for name, value in options.items() if type(value) is runtime.ndarray]
    others = {id(array) for array in passed} | {id(call.arrays[spec.name]) for spec in call.problem.results}
    own = [array for array in call.arrays.values() if id(array) not in others]
    try:
        _cached(session, key, call, passed_names).count_or_capture(call, addresses, own)
    except Exception as error:
        _warn(session.cache, error, stacklevel=4)


def _cached(session: Session, key: tuple[Any, ...], call: Call, names: Sequence[str]) -> CachedCall:
    """The call that is cached under a key, or this one, which is then cached."""
    assert call.launched
    cached: CachedCall | None = session.cached_calls.get(key)
    if cached is not None and cached.plan is call.launched.plan:
        cached.used = _next_use()
        return cached
    if cached is not None:  # its plan was destroyed, or its arrays had another alignment
        cached.remove()
    if len(session.cached_calls) >= MAX_CALLS:  # remove more than one, so that this search is rare
        oldest = heapq.nsmallest(1 + MAX_CALLS // 8, session.cached_calls.items(), key=lambda item: item[1].used)
        for other, old in oldest:
            del session.cached_calls[other]
            old.remove()
    new = session.cached_calls[key] = CachedCall(call, session.cache, names)
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


def _key(
    ndarray: Any, kind: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[Any], list[int]] | None:
    """The key of a call, its arrays and their addresses; None if the call must be parsed every time.

    Device and alignment are not in the key: both follow from the addresses, and are checked for new addresses.
    """
    key: list[Any] = [kind]
    passed: list[Any] = []
    addresses: list[int] = []
    for array in arrays:
        if type(array) is ndarray:
            key.append(array.dtype)
            key.append(array.shape)
            key.append(array.strides)
            passed.append(array)
            addresses.append(array.data.ptr)
        elif array is None:
            key.append(None)
        else:
            return None
    for name, value in options.items():
        value_type = type(value)
        key.append(name)
        if value_type in _KEY_TYPES:
            key.append(value_type)
            key.append(value)
        elif value_type is ndarray:
            key += (value.dtype, value.shape, value.strides)
            passed.append(value)
            addresses.append(value.data.ptr)
        elif value_type is tuple:
            key.append(repr(value))
        else:
            return None
    return tuple(key), passed, addresses
