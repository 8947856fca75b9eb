"""Calls that come again, on arrays that they were given before: run from a CUDA graph, with nothing read anew.

Reading a call's arguments takes Python some 30 us, what is prepared for cuDNN up to 200, and ``cudnnBackendExecute`` 7 to 20;
the same kernels in a CUDA graph take 3 (docs/speed.md has the budget). So a call is known by what its arguments look like, and
when it comes for the second time on the same addresses, all that it enqueues is recorded. From then on it is a look-up, an
allocation of the results and a launch. Calls with functions, and those that copy large arrays, are read every time.

What is known belongs to a thread's session in a CUDA context, and a graph to the plan whose kernels it holds: it is destroyed
before the plan is. A graph holds the addresses of the caller's arrays, and keeps none of them alive.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from . import gpu
from .call import Call, tunings

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from .cache import Session
    from .plan import Plan

#: Calls that a session knows, and sets of addresses that each has a graph for; the oldest go first.
CALLS, GRAPHS = 1024, 128
#: Bytes of workspace, and of arrays made for the call, up to which a graph keeps its own.
SMALL = 1 << 16

#: Options of these kinds are part of a call's key as they are. A tuple is by its text: (1, 0) and (1.0, 0) are not the same.
_PLAIN = frozenset({bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64})

#: Everything of CuPy that a repeated call needs, once there is a call to repeat: looking names up in modules takes time.
_here: _Here | None = None


class _Here:
    def __init__(self) -> None:
        from .cache import existing_session

        cupy = gpu.cupy()
        self.ndarray, self.alloc = cupy.ndarray, cupy.cuda.alloc
        self.current_stream, self.is_capturing = cupy.cuda.get_current_stream, cupy.cuda.runtime.streamIsCapturing
        self.launch = cupy.cuda.runtime.graphLaunch
        self.context_id, self.session = gpu.driver().cuCtxGetId, existing_session


class Known:
    """A call that has been read: what has its key is the same call, on other addresses or the same.

    Args:
        call: one such call, after it ran.
        plan: what it ran with.
        session: where it ran.
        arrays: those that the caller gave by position or as a result, None among them.
    """

    __slots__ = (
        "_cache",
        "_closed",
        "_graphs",
        "_handle",
        "_held",
        "_made",
        "_places",
        "_plan",
        "_seen",
        "_workspace",
        "_workspaces",
    )

    def __init__(self, call: Call, plan: Plan, session: Session, arrays: tuple[Any, ...]) -> None:
        self._plan, self._cache, self._closed = plan, session.cache, False
        self._handle = session.handle
        self._graphs: dict[tuple[int, ...], int] = {}
        self._seen: dict[tuple[int, ...], None] = {}
        #: Bytes of workspace to allocate in every call; a small one is kept for each stream.
        self._workspace = plan.info.workspace if plan.info.workspace > SMALL else 0
        self._workspaces: dict[int, Any] = {}
        #: The arrays that a graph has for itself. It runs on one stream only, as do all that share a workspace: when it starts
        #: nothing else uses them, and they can go back to CuPy's pool, which reuses memory in the order of its stream.
        self._held: dict[int, Any] = {}
        results = [call.arrays[spec.name] for spec in call.problem.results]
        places = {id(array): place for place, array in enumerate(arrays)}
        #: Where each result is: its place among what was given, or -1 where it is made.
        self._places = [places.get(id(array), -1) for array in results]
        self._made = [(x.shape, x.dtype, x.nbytes) for x in results if id(x) not in places]
        plan.before_close.append(self.close)

    def run(self, here: _Here, arrays: tuple[Any, ...], addresses: list[int]) -> list[Any] | None:
        """The results, where there is a graph for these addresses, those of what is made, and the current stream."""
        stream = here.current_stream().ptr
        if stream and here.is_capturing(stream):
            return None
        made = [here.ndarray(shape, dtype, here.alloc(size), None, "F") for shape, dtype, size in self._made]
        for array in made:
            addresses.append(array.data.ptr)
        if self._workspace:
            workspace = here.alloc(self._workspace)
            addresses.append(workspace.ptr)
        pointers = (stream, *addresses)
        with self._cache.lock:
            graph = self._graphs.get(pointers)
            if graph is None:
                return None
            self._plan.used = True
            self._cache.hits += 1
            here.launch(graph, stream)
        if not made:
            return [arrays[place] for place in self._places]
        new = iter(made)
        return [next(new) if place < 0 else arrays[place] for place in self._places]

    def learn(self, call: Call, addresses: list[int], own: list[Any]) -> None:
        """Note the addresses that a call ran on; record it where they have been seen before.

        Args:
            call: after it ran.
            addresses: of the arrays that the caller gave.
            own: the inputs that were made for the call.
        """
        assert call.launched
        new = [call.arrays[spec.name] for spec, place in zip(call.problem.results, self._places, strict=True) if place < 0]
        made = [array.data.ptr for array in new] + ([call.launched.workspace] if self._workspace else [])
        stream = gpu.stream()
        pointers = (stream, *addresses, *made)
        with self._cache.lock:
            if self._closed or pointers in self._graphs:
                return
            if pointers not in self._seen:
                self._seen[pointers] = None
                if len(self._seen) > GRAPHS:
                    del self._seen[next(iter(self._seen))]
                return
            del self._seen[pointers]
            if not self._workspace:
                if stream not in self._workspaces:
                    self._workspaces[stream] = gpu.allocate(self._plan.info.workspace)
                call.launched = call.launched._replace(workspace=self._workspaces[stream].ptr)
            graph, held = gpu.recorded(call.enqueue)
            self._handle.set_stream(stream)  # it was that of the recording
            self._graphs[pointers], self._held[graph] = graph, (held, own)
            if len(self._graphs) > GRAPHS:
                self._destroy(next(iter(self._graphs)))

    def _destroy(self, pointers: tuple[int, ...]) -> None:
        graph = self._graphs.pop(pointers)
        gpu.destroy_graph(graph)
        del self._held[graph]

    def of_another(self, plan: Plan) -> bool:
        """Whether it is of another plan: of one that has been destroyed, or of arrays that are aligned otherwise."""
        return self._plan is not plan

    def close(self) -> None:
        """Destroy the graphs: the plan is about to be."""
        self._closed = True
        for pointers in list(self._graphs):
            self._destroy(pointers)
        self._workspaces.clear()

    def forget(self) -> None:
        """Destroy the graphs, for another call takes the place."""
        with self._cache.lock:
            if self.close in self._plan.before_close:
                self._plan.before_close.remove(self.close)
            self.close()


def repeated(how: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any] | None:
    """Run a call that is known, on arrays that it was given before.

    Args:
        how: what else tells the call from others, hashable.
        arrays: those that the caller gave by position or as a result, None among them.
        options: the others.

    Returns:
        The results; None where the call is to be read.
    """
    here = _here
    if here is None or tunings.get() is not None:
        return None
    found = _key(here.ndarray, how, arrays, options)
    if found is None:
        return None
    key, addresses = found
    status, context = here.context_id(0)
    if status or (session := here.session(context)) is None:
        return None
    known: Known | None = session.known.get(key)
    return None if known is None else known.run(here, arrays, addresses)


def learn(how: Any, arrays: tuple[Any, ...], options: Mapping[str, Any], call: Call) -> None:
    """Note a call that has run, so that it need not be read again."""
    global _here
    if call.launched is None or call.launched.made > SMALL or call.problem.sums or tunings.get() is not None:
        return
    here = _here = _here or _Here()
    found = _key(here.ndarray, how, arrays, options)
    session = here.session(gpu.context_id())
    plan = call.launched.plan
    if found is None or session is None or plan.target.handle is not session.handle:
        return  # it ran on another device than the current one
    key, addresses = found
    known = session.known.get(key)
    if known is None or known.of_another(plan):
        if known:
            known.forget()
        known = session.known[key] = Known(call, plan, session, arrays)
        if len(session.known) > CALLS:
            session.known.pop(next(iter(session.known))).forget()
    given = {id(array) for array in (*arrays, *options.values())} | {
        id(call.arrays[spec.name]) for spec in call.problem.results
    }
    known.learn(call, addresses, [array for array in call.arrays.values() if id(array) not in given])


def _key(
    ndarray: Any, how: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[int]] | None:
    """What tells a call from others, and where its arrays are; None for a call that is not to be repeated.

    Neither device nor alignment is in it: both follow from the addresses, and only addresses that were checked are run on.
    """
    key: list[Any] = [how]
    addresses: list[int] = []
    for array in arrays:
        if type(array) is ndarray:
            key.append(array.dtype)
            key.append(array.shape)
            key.append(array.strides)
            addresses.append(array.data.ptr)
        elif array is None:
            key.append(None)
        else:
            return None
    for name, value in options.items():
        kind = type(value)
        key.append(name)
        if kind in _PLAIN:
            key.append(kind)
            key.append(value)
        elif kind is ndarray:
            key += (value.dtype, value.shape, value.strides)
            addresses.append(value.data.ptr)
        elif kind is tuple:
            key.append(repr(value))
        else:
            return None
    return tuple(key), addresses
