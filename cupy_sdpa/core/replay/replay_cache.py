"""Repeated calls: they skip validation and replay the launches from a captured CUDA graph.

Calls are cached by a key of their arguments' dtypes, shapes, strides and options (:mod:`.call_key`). A call whose functions
have no identity (:mod:`.core.score_fn.identity`) has no key and is parsed every time. The cost of a repeated call depends on
the addresses of its arrays (docs/speed.md):

- Addresses that occurred :data:`CAPTURE_AFTER` times: everything that the call enqueues has been captured. The call looks
  itself up, allocates its results and memory, and launches a graph.
- Other addresses: the call executes the plan. If it also copies or clears arrays, the parsed call runs on the new arrays.

Everything that a call allocates, except its results, is one block of memory: the workspace and copies of arrays. A graph is
launched only if the block has the captured address, so graphs do not own large memory.

The cache belongs to a thread's session in a CUDA context. Each graph belongs to the plan whose kernels it contains, and is
destroyed before the plan. A graph contains the addresses of the caller's arrays but does not keep the arrays alive. Replay is
an optimization: if a graph cannot be captured or launched, the call issues a warning and runs without it.

A stream is identified by its address. A later stream can have the same address. This is safe: a graph is launched only if the
results have the addresses that it writes to, and it owns all other memory that it writes to. Launches of two graphs therefore
never write to the same memory. Two unordered launches of one graph would also race for the results without graphs.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import logging
import sys
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..boundary.call import logger
from ..boundary.layouts import is_named
from ..boundary.read_array import INT32
from ..boundary.user_functions import function_identities
from ..runtime import cupy_runtime, driver
from ..runtime.memory import is_constant
from .bound_program import BoundProgram, HostProgram, Repeatable, equal_runs, next_use, operands, results_by_name, shares_memory
from .call_key import HOST, Arguments, ArrayType, BoundPrograms, CallKey, address, array_names, read_key

if TYPE_CHECKING:  # modules that load cuDNN are imported only for CuPy arrays
    from ..cudnn_engine.plan_cache import PlanCache
    from ..cudnn_engine.sessions import Session
    from ..runtime.cuda_graph import Recording

#: The maximum number of calls in a session, and of address sets counted per call; the least recently used are removed first.
MAX_CALLS, MAX_ADDRESS_SETS = 1024, 1024
#: Up to this many graphs of a call, launched in turn, take no more device time than their kernels.
FEW_GRAPHS = 4
#: One of many graphs is made executable if it has at least this number of kernels and memsets. In a mix of calls, launching one
#: of them takes 2.7 us, and launching the graph 7.6 us, including the check whether the stream is busy (H200).
LEAST_NODES = 4
#: A call is captured when the same addresses occur this many times; a capture takes as long as ten launches. A parsed call
#: counts only if it allocates no memory, because the memory's address is one of the addresses.
CAPTURE_AFTER = 3
#: The number of runs after a failed capture or launch before a call is captured again.
RETRY_AFTER = 1000
#: The number of runs of a call between two captures that destroy other graphs. If the graphs in use exceed the limit, every
#: capture would otherwise destroy a graph that is needed soon, and every call would be captured in vain.
EVICT_EVERY = 64
#: A graph owns its memory up to this number of bytes; an allocation in every call takes 1.5 us.
SMALL_BYTES = 1 << 14

#: The CuPy functions that a repeated call needs, set when a call is cached: attribute look-ups in modules take time.
_runtime: _Runtime | None = None


class _Runtime(ArrayType):
    def __init__(self) -> None:
        from ..cudnn_engine.sessions import existing_session

        cuda = cupy_runtime.cupy().cuda
        super().__init__(cupy_runtime.cupy().ndarray)
        self.arrays = cupy_runtime.arrays_function(self.ndarray)
        self.alloc, self.current_stream, self.is_capturing = cuda.alloc, cuda.get_current_stream, cuda.runtime.streamIsCapturing
        self.context_id, self.session = driver.bindings().cuCtxGetId, existing_session


class DeviceProgram(BoundProgram):
    """A bound program on a GPU, with its plans and the CUDA graphs that were captured from it.

    Args:
        call: the call, after it ran.
        cache: the plan cache that holds its plans.
        names, arrays, results: as for :class:`.BoundProgram`.
        forget: removes the program from its session; called when it is closed.
    """

    __slots__ = (
        "__weakref__",
        "_alignments",
        "_cache",
        "_closed",
        "_constants",
        "_counts",
        "_device",
        "_forget",
        "_graphs",
        "_may_overlap",
        "_memory_bytes",
        "_own_memory",
        "_pause",
        "_plan_only",
        "_runs",
        "_scalars",
        "_segments",
        "_validated",
        "plans",
    )  # fmt: skip

    def __init__(
        self,
        call: Repeatable,
        cache: PlanCache,
        names: Sequence[str],
        arrays: Sequence[Any],
        results: Mapping[str, Any],
        forget: Callable[[], object],
    ) -> None:
        assert call.launched
        super().__init__(call, names, arrays, results)
        self.plans, self._cache, self._closed, self._forget = call.launched.plans, cache, False, forget
        #: The number of CUDA graphs for one set of addresses.
        self._segments = call.program.segments
        self._graphs: dict[tuple[int, ...], Recording] = {}
        #: How often addresses without a graph occurred.
        self._counts: dict[tuple[int, ...], int] = {}
        #: Addresses of the caller's arrays that are known to be free of overlaps between a result and another array.
        self._validated: dict[tuple[int, ...], None] = {}
        #: How many calls must run before the next capture.
        self._pause = 0
        #: Whether a result at a new address may overlap another array.
        self._may_overlap = bool(self.written)
        self._runs = equal_runs(self.created)
        self._scalars = {**call.scalars, **call.program.launches[0].scalars} if call.launched.plan_only else {}
        self._device = call.arrays["q"].data.device_id
        inputs = {name: call.arrays[name] for name in call.fills}
        #: The addresses of the inputs that were created and never change, by name.
        self._constants = {name: array.data.ptr for name, array in inputs.items() if is_constant(array)}
        #: Position, offset, bits and their value: the alignments. Integers may have any.
        self._alignments = [
            (*self.places[spec.name], *((15, 0) if spec.alignment >= 16 else (2 * spec.alignment - 1, spec.alignment)))
            for spec in call.tensors
            if spec.name in self.places and not spec.dtype.startswith("int")
        ]
        #: Whether the call only executes the plan, on the caller's arrays and the results that it creates.
        self._plan_only = call.launched.plan_only and call.fills.keys() <= self._constants.keys()
        self._memory_bytes = call.launched.memory_bytes
        #: Whether graphs own the memory.
        self._own_memory = self._memory_bytes <= SMALL_BYTES
        for plan in self.plans:
            plan.dependents.add(self)

    def belongs_to(self, session: Session) -> bool:
        """True if the plans belong to a session."""
        return session.cache is self._cache

    def accepts(self, arrays: Sequence[Any], addresses: Sequence[int]) -> bool:
        """True if arrays are on the device of the call and have the alignments of its problem."""
        for array in arrays:
            if array.data.device_id != self._device:
                return False
        for at, offset, bits, value in self._alignments:  # noqa: SIM110 - any() enters a function for each
            if (addresses[at] + offset) & bits != value:
                return False
        return True

    def run(self, runtime: _Runtime, arrays: Sequence[Any]) -> list[Any] | None:
        """Launch the graph for these addresses, execute the plan, or run the parsed call; None if the call must be parsed."""
        # Every repeated call runs this method: work is inlined, and CuPy is called through attributes of ``runtime``.
        stream = runtime.current_stream().ptr
        if stream and runtime.is_capturing(stream):
            return None
        addresses: list[int] = []
        for array in arrays:  # a comprehension takes longer
            addresses.append(array.data.ptr)
        created: list[Any] = []
        if self.created:
            new = []
            for _, _, size, _, _ in self.created:
                new.append(runtime.alloc(size))
            # CuPy's pool returns free blocks of one size in varying order. Sorted, the same blocks are the same addresses, for
            # which a graph has been captured.
            for run in self._runs:
                new[run] = sorted(new[run], key=address)
            created = runtime.arrays(self.created, new)
            for pointer in new:
                addresses.append(pointer.ptr)
        addresses.append(stream)
        memory = None
        if not self._own_memory:
            try:
                memory = cupy_runtime.Memory(runtime.alloc(self._memory_bytes), self._memory_bytes)
            except Exception:
                return None  # parsing the call allocates it again, and the error then has a note on the workspace
            addresses.append(memory.pointer.ptr)
        pointers, cache = tuple(addresses), self._cache
        cache.lock.acquire()  # "with" takes twice as long
        try:
            graph = self._graphs.get(pointers)
            if graph is not None:
                try:
                    graph.launch(of_many=len(self._graphs) * self._segments > FEW_GRAPHS)
                except Exception as error:
                    if graph.has_host_steps:  # the other members of the group have begun the call
                        raise
                    self._discard_graph(graph, error)
                    return None
                graph.used = True
                cache.hits += 1
            elif not self._may_run(arrays, pointers):
                return None
            self.used = next_use()
            for plan in self.plans:
                plan.used = True
        finally:
            cache.lock.release()
        if graph is None and not self._run_without_graph(runtime, arrays, created, pointers, memory):
            return None
        if not self._may_overlap and not self.gradients:
            return created
        arrays_and_results = [*arrays, *created]
        results = [arrays_and_results[position] for position in self.returned]
        return self.gradients.as_last(results) if self.gradients else results

    def _may_run(self, arrays: Sequence[Any], pointers: tuple[int, ...]) -> bool:
        """True if the call may run on addresses without a graph; False if it must be parsed, which checks them."""
        if self._closed or (self._may_overlap and pointers[: len(arrays)] not in self._validated):
            return False
        return pointers in self._counts or self.accepts(arrays, pointers)

    def _run_without_graph(
        self,
        runtime: _Runtime,
        arrays: Sequence[Any],
        created: Sequence[Any],
        pointers: tuple[int, ...],
        memory: cupy_runtime.Memory | None,
    ) -> bool:
        """Execute the plan if the call does nothing else; otherwise run the parsed call, and capture it if it is frequent.

        Returns whether it ran: False without memory for the workspace.
        """
        frequent = self._counts.get(pointers, 0) + 1 >= CAPTURE_AFTER
        captures = frequent and not self._pause and self._cache.recorded.limit > 0
        if self._plan_only and not captures:
            with self._cache.lock:
                if self._closed or not self._execute(runtime, pointers, memory):
                    return False
                self._count(pointers)
                self._cache.hits += 1
            return True
        call = self.on(arrays, created)
        with self._cache.lock:
            if self._closed:
                return False
            self._cache.hits += len(self.plans)
            call.run(memory, self.plans)
            if captures and call.launched and call.launched.plans == self.plans:
                try:
                    self._capture(call, pointers, memory)
                except Exception as error:
                    _warn(self._cache, error, stacklevel=6)
            else:
                self._count(pointers)
        return True

    def _execute(self, runtime: _Runtime, pointers: tuple[int, ...], memory: cupy_runtime.Memory | None) -> bool:
        """Execute the plan; False if there is no memory for its workspace."""
        (plan,) = self.plans
        workspace = memory.pointer if memory else None
        if workspace is None and self._memory_bytes:
            try:
                workspace = runtime.alloc(self._memory_bytes)
            except Exception:
                return False  # as in run()
        plan.set_stream(pointers[len(self.names)])
        plan.execute(self.addresses(pointers) | self._constants, self._scalars, workspace.ptr if workspace else 0)
        return True

    def _count(self, pointers: tuple[int, ...]) -> None:
        """Count addresses without a graph."""
        self._pause = max(self._pause - 1, 0)
        self._counts[pointers] = self._counts.pop(pointers, 0) + 1  # they become the most recent
        if len(self._counts) > MAX_ADDRESS_SETS:
            del self._counts[next(iter(self._counts))]

    def note_parsed_run(self, call: Repeatable, addresses: Sequence[int]) -> None:
        """Note that a call was parsed and ran on the caller's arrays at these addresses."""
        with self._cache.lock:
            self._validated[tuple(addresses)] = None
            if len(self._validated) > MAX_ADDRESS_SETS:
                del self._validated[next(iter(self._validated))]
            if self._own_memory:
                created = [call.arrays[name].data.ptr for name in self.names[len(addresses) :]]
                self._count((*addresses, *created, cupy_runtime.stream()))

    def _capture(self, call: Repeatable, pointers: tuple[int, ...], memory: cupy_runtime.Memory | None) -> None:
        """Capture a call that has run."""
        self._counts.pop(pointers, None)
        self._pause = RETRY_AFTER  # unless the capture succeeds and fits the limit
        own = [call.arrays[name] for name in call.fills]
        if memory is None and self._memory_bytes:
            own.append(cupy_runtime.empty((self._memory_bytes,), np.dtype(np.uint8)))
            memory = cupy_runtime.Memory(own[-1].data, self._memory_bytes)
        elif memory is not None:  # it is allocated in every call: arguments of host steps must not keep it alive
            memory = cupy_runtime.unowned(memory, self._device)
        recorded = self._cache.recorded
        few = (len(self._graphs) + 1) * self._segments <= FEW_GRAPHS
        least = 0 if few else LEAST_NODES if recorded.bytes < recorded.limit // 2 else sys.maxsize
        from ..runtime.cuda_graph import Recording

        try:
            graph = Recording(call.enqueue, own, memory=memory, least_nodes=least)
        finally:
            for plan in self.plans:
                plan.set_stream(pointers[len(self.names)])  # it was the stream of the capture
        exceeded = recorded.add(graph, self._graphs, pointers)
        if pointers in self._graphs:
            self._pause = EVICT_EVERY if exceeded else 0

    def _discard_graph(self, graph: Recording, error: Exception) -> None:
        """Destroy a graph that failed to launch, and do not capture the next calls."""
        self._pause = RETRY_AFTER
        with contextlib.suppress(Exception):
            self._cache.recorded.destroy(graph)
        _warn(self._cache, error, stacklevel=6)

    def close(self) -> None:
        """Destroy the graphs, and leave the session's calls; called before each plan of the call is destroyed."""
        if self._closed:  # since then the session may have another call with this key
            return
        self._closed = True
        self._forget()
        with contextlib.ExitStack() as stack:  # all of them, even if one fails
            for graph in self._graphs.values():
                stack.callback(self._cache.recorded.destroy, graph)

    def remove(self) -> None:
        """Destroy the graphs, and detach from the plans, which are not destroyed."""
        with self._cache.lock:
            for plan in self.plans:
                plan.dependents.discard(self)
            self.close()


def run_cached(
    tag: Any, arrays: tuple[Any, ...], options: Mapping[str, Any], programs: BoundPrograms | None = None
) -> list[Any] | None:
    """Run a cached call; return None if it must be parsed. The arguments are as for :class:`.CallKey`.

    To save time in repeated calls, call it first, and make a :class:`.Call` for :func:`.results_of` only if it returns None.

    >>> from cupy_sdpa import attention
    >>> q = np.zeros((8, 1, 4, 1), order="F")
    >>> first = attention(q, q, q)
    >>> [out.shape for out in run_cached(("forward", False, False), (q, q, q), {})]
    [(8, 1, 4, 1)]
    """
    first = arrays[0] if arrays[0] is not None else arrays[1]  # dout may be None
    if type(first) is np.ndarray:
        arguments = read_key(HOST, (tag, is_named()), arrays, options)
        on_host = None if arguments is None else (_on_host if programs is None else programs).get(arguments[0])
        if arguments is None or on_host is None:
            return None
        try:
            return on_host.run(arguments[1])
        except ValueError:  # an element, such as a length, is wrong: the parsed call raises the error with the caller's axes
            if on_host.call.program.has_host_steps:  # the other members of the group have begun the call
                raise
            return None
    runtime = _runtime
    if runtime is None or type(first) is not runtime.ndarray:
        return None
    arguments = read_key(runtime, tag, arrays, options)
    if arguments is None:
        return None
    key, passed = arguments
    status, context = runtime.context_id(0)
    if status or (session := runtime.session(context)) is None:
        return None
    on_device: DeviceProgram | None = (session.bound_programs if programs is None else programs).get(key)
    if on_device is None or (programs is not None and not on_device.belongs_to(session)):
        return None
    return on_device.run(runtime, passed)


def _forget(programs: weakref.ref[BoundPrograms], key: Any) -> None:
    """Remove a bound program, if its dictionary still exists."""
    if (kept := programs()) is not None:
        kept.pop(key, None)


def is_cacheable(key: CallKey) -> bool:
    """True if a call can be cached; otherwise it is parsed every time."""
    array = key.arrays[0] if key.arrays[0] is not None else key.arrays[1]
    of = HOST if type(array) is np.ndarray else ArrayType(type(array)) if cupy_runtime.is_array(array) else None
    return of is not None and read_key(of, key.tag, key.arrays, key.options) is not None


def cache_call(key: CallKey, call: Repeatable, results: Sequence[Any] | None = None) -> None:
    """Cache a call that has run; capture it if the same addresses occurred often. A failure is only a warning.

    Args:
        key: the call's key. Its arrays contain the call's arrays, perhaps with other axes.
        call: the call, with its arrays.
        results: the results as the caller gets them, views of the call's results. Default None: the call's results.
    """
    global _runtime
    if logger.isEnabledFor(logging.DEBUG):
        return  # the steps of every call are logged
    if call.identities and call.identities != function_identities(key.options):
        return  # a function changed while the call ran
    if any(type(key.options.get(name)) is tuple for name in INT32):
        return  # they were copied to arrays
    if not call.on_gpu:
        of: ArrayType = HOST
        arguments = read_key(HOST, (key.tag, is_named()), key.arrays, key.options)
    else:
        if (call.problem and call.problem.trivial) or call.launched is None:  # or the stream is being captured
            return
        of = _runtime = _runtime or _Runtime()
        arguments = read_key(of, key.tag, key.arrays, key.options)
    if arguments is None:
        return
    names, passed = array_names(of.ndarray, key), arguments[1]
    if any(not shares_memory(array, passed[position]) for _, array, position in operands(call, names)):
        return  # lengths of int64 are copied
    if not call.arrays.keys() <= {name for name, *_ in operands(call, names)} | {*call.results} | call.fills.keys():
        return  # it needs arrays that were made for it
    if call.on_gpu:
        _cache_on_device(arguments, names, call, results_by_name(call, results), key.programs)
        return
    bound = HostProgram(call, names, passed, results_by_name(call, results))
    keep_recent(_on_host if key.programs is None else key.programs, arguments[0], bound, MAX_CALLS)


def _cache_on_device(
    arguments: Arguments,
    names: Sequence[str],
    call: Repeatable,
    results: Mapping[str, Any],
    programs: BoundPrograms | None,
) -> None:
    """Cache a call with these arguments in the session of the current context."""
    assert _runtime
    assert call.launched
    session = _runtime.session(driver.context_id())
    if session is None or any(plan.target.handle is not session.handle for plan in call.launched.plans):
        return  # the call ran on a device that is not the current one
    try:
        addresses = [array.data.ptr for array in arguments[1]]
        _bound(session, arguments, names, addresses, call, results, programs).note_parsed_run(call, addresses)
    except Exception as error:
        _warn(session.cache, error, stacklevel=5)


def _bound(
    session: Session,
    arguments: Arguments,
    names: Sequence[str],
    addresses: Sequence[int],
    call: Repeatable,
    results: Mapping[str, Any],
    programs: BoundPrograms | None,
) -> DeviceProgram:
    """Return the program that is cached with a key; otherwise cache and return the call's program."""
    key, arrays = arguments
    kept: dict[Any, Any] = session.bound_programs if programs is None else programs
    cached: DeviceProgram | None = kept.get(key)
    if (
        cached is not None
        and cached.belongs_to(session)
        and cached.plans == call.launched.plans
        and cached.accepts(arrays, addresses)
    ):
        cached.used = next_use()
        return cached
    if cached is not None:  # a plan was destroyed, or its arrays had another alignment or device
        cached.remove()
    if (excess := len(kept) + 1 - MAX_CALLS) > 0:  # remove more than these, so that this search is rare
        oldest = heapq.nsmallest(excess + MAX_CALLS // 8, kept.items(), key=lambda item: item[1].used)
        for _, old in oldest:
            old.remove()
    forget: Callable[[], object] = functools.partial(kept.pop, key, None)
    if programs is not None:
        forget = functools.partial(_forget, weakref.ref(programs), key)
    new = kept[key] = DeviceProgram(call, session.cache, names, arrays, results, forget)
    return new


#: The latest calls of numpy arrays, by their keys; the oldest are removed first.
_on_host: dict[Any, HostProgram] = {}


def keep_recent(kept: dict[Any, Any], key: Any, value: Any, most: int) -> None:
    """Make an item the most recent in a dictionary that other threads may change, and keep at most this many items."""
    kept.pop(key, None)
    kept[key] = value
    remove_oldest(kept, most)


def remove_oldest(kept: dict[Any, Any], most: int) -> None:
    """Remove the first items of a dictionary that other threads may change, until it has at most this many items."""
    while len(kept) > most:
        with contextlib.suppress(RuntimeError, StopIteration):  # it changed between the two calls
            kept.pop(next(iter(kept)), None)


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
