"""Calls that come again: what was read of them once is not read anew, and on the same addresses they have been recorded.

Reading a call's arguments takes Python some 30 us, what is prepared for cuDNN up to 200, and ``cudnnBackendExecute`` 7 to 20;
the same kernels in a CUDA graph take 3 (docs/speed.md has the budget). So a call is known by what its arguments look like. On
addresses that have come a few times all that it enqueues has been recorded: it is a look-up, an allocation of the results and
a launch of the recording. On others its plan is executed, if that is all there is to do. Calls with functions, and those that
copy large arrays, are read every time.

What is known belongs to a thread's session in a CUDA context, and a recording to the plan whose kernels it holds: it is
destroyed before the plan. It holds the addresses of the caller's arrays, and keeps none of them alive.

A recording is an optimisation. A failure to make or to launch one is a warning, and the call runs without it.

A stream is known by its address, and another stream may have the same: a new one, after the first was destroyed, or the default
stream of another thread, to which the session was handed on. This is safe. A recording is launched only where the results have
the addresses that it writes to, and all other memory that it writes to is its own. So launches of two recordings never share
memory, and two launches of one that are not ordered by the caller would race for the results without recordings, too.
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
from .call import Call, tunings

if TYPE_CHECKING:  # cuDNN's rooms are entered only for CuPy arrays
    from ..plans.plan import Plan
    from ..plans.plan_cache import PlanCache
    from ..plans.sessions import Session

#: Calls that a session knows, and sets of addresses without a recording that each counts; the least recently used go first.
CALLS, SEEN = 1024, 128
#: Recordings of a call that are few: as graphs, in turn, they take no more of the device's time than their kernels.
FEW = 4
#: How often a call comes on the same addresses before it is recorded, which takes as long as ten launches.
SIGHTS = 3
#: After a failure to record it, or to launch a recording of it, a call runs so often before it is recorded again.
PAUSE = 1000
#: Bytes of workspace, and of arrays made for the call, up to which a recording keeps its own.
SMALL = 1 << 16

#: Options of these kinds are part of a call's key as they are. A tuple is by its text: (1, 0) and (1.0, 0) are not the same.
_PLAIN = frozenset({bool, int, float, str, type(None), np.bool_, np.int64, np.float32, np.float64})

#: Numbers the uses of calls, to tell which is the least recent.
_next_use = itertools.count().__next__

#: Everything of CuPy that a repeated call needs, once there is a call to repeat: looking names up in modules takes time.
_here: _Here | None = None


class _Here:
    def __init__(self) -> None:
        from ..plans.sessions import existing_session

        cupy = cupy_runtime.cupy()
        self.ndarray, self.alloc = cupy.ndarray, cupy.cuda.alloc
        self.current_stream, self.is_capturing = cupy.cuda.get_current_stream, cupy.cuda.runtime.streamIsCapturing
        self.context_id, self.session = driver.bindings().cuCtxGetId, existing_session


class CachedCall:
    """A call that has been read: what has its key is the same call, on other addresses or the same.

    Args:
        call: one such call, after it ran.
        plan: what it ran with.
        cache: where the plan is kept.
        names: of the arrays that the caller gave, in the order of their addresses.

    Attributes:
        used: the number of its latest use.
    """

    __slots__ = (
        "_cache", "_closed", "_device", "_made", "_names", "_numbers", "_pause", "_places", "_plain", "_recordings", "_seen",
        "_workspace", "plan", "used",
    )  # fmt: skip

    def __init__(self, call: Call, plan: Plan, cache: PlanCache, names: Sequence[str]) -> None:
        assert call.launched
        self.plan, self._cache, self._closed = plan, cache, False
        self._device = call.arrays["q"].data.device_id
        self._recordings: dict[tuple[int, ...], Recording] = {}
        #: How often addresses have come that there is no recording for.
        self._seen: dict[tuple[int, ...], int] = {}
        #: How many calls are left before it may be recorded.
        self._pause = 0
        #: Bytes of workspace to allocate in every call; a small one is part of each recording.
        self._workspace = plan.info.workspace if plan.info.workspace > SMALL else 0
        self.used = _next_use()
        results = [spec.name for spec in call.problem.results]
        #: Where each result is: its place among the addresses, or -1 where it is made.
        self._places = [names.index(name) if name in names else -1 for name in results]
        made = [name for name in results if name not in names]
        self._made = [(x.shape, x.dtype, x.nbytes) for x in (call.arrays[name] for name in made)]
        #: Whether all there is to do is to run the plan, on what the caller gave and what is made.
        aligned = all(spec.alignment >= 16 for spec in call.problem.tensors)
        self._plain = call.launched.plain and aligned and call.arrays.keys() <= {*names, *made}
        self._names, self._numbers = [*names, *made], dict(call.scalars)
        plan.dependents.add(self)

    def run(self, here: _Here, arrays: Sequence[Any], addresses: Sequence[int]) -> list[Any] | None:
        """The results; None where the call is to be read.

        Args:
            here: what is needed of CuPy.
            arrays: those that the caller gave, in the order of the names.
            addresses: theirs.
        """
        stream = here.current_stream().ptr
        if stream and here.is_capturing(stream):
            return None
        made = [here.ndarray(shape, dtype, here.alloc(size), None, "F") for shape, dtype, size in self._made]
        pointers = (stream, *addresses, *[array.data.ptr for array in made])
        workspace = None
        if self._workspace:
            try:
                workspace = here.alloc(self._workspace)
            except Exception:
                return None  # where it is allocated again, the error has a note on the workspace
            pointers = (*pointers, workspace.ptr)
        with self._cache.lock:
            recording = self._recordings.get(pointers)
            if recording is None:
                if not self._executed(here, arrays, pointers, workspace):
                    return None
            else:
                try:
                    recording.launch(of_many=len(self._recordings) > FEW)
                except Exception as error:
                    self._give_up(recording, error)
                    return None
                self._cache.recorded.use(recording)
            self.plan.used = True
            self._cache.hits += 1
            self.used = _next_use()
        if not made:
            return [arrays[place] for place in self._places]
        new = iter(made)
        return [next(new) if place < 0 else arrays[place] for place in self._places]

    def _executed(self, here: _Here, arrays: Sequence[Any], pointers: tuple[int, ...], workspace: Any) -> bool:
        """Execute the plan on addresses without a recording; False where the call is to be checked, or recorded, first."""
        seen = self._seen.get(pointers, 0) + 1
        if self._closed or not self._plain or (seen >= SIGHTS and self._may_record()):
            return False
        if seen == 1 and max(self._places) >= 0:
            return False  # whether a result overlaps another array is to be read
        stream, *addresses = pointers
        if any(address & 15 for address in addresses) or any(array.data.device_id != self._device for array in arrays):
            return False
        if workspace is None and self.plan.info.workspace:
            try:
                workspace = here.alloc(self.plan.info.workspace)
            except Exception:
                return False  # as in run()
        self._saw(pointers, seen)
        self.plan.set_stream(stream)
        named = dict(zip(self._names, addresses, strict=False))  # a workspace may come after them
        self.plan.execute(named, self._numbers, workspace.ptr if workspace else 0)
        return True

    def _may_record(self) -> bool:
        return not self._pause and self._cache.recorded.limit > 0

    def _saw(self, pointers: tuple[int, ...], times: int) -> None:
        """Note that addresses without a recording have come so often."""
        self._pause = max(self._pause - 1, 0)
        self._seen.pop(pointers, None)  # so that they become the most recent
        self._seen[pointers] = times
        if len(self._seen) > SEEN:
            del self._seen[next(iter(self._seen))]

    def learn(self, call: Call, addresses: Sequence[int], own: list[Any]) -> None:
        """Note the addresses that a call ran on; record it where they have come often.

        Args:
            call: after it ran.
            addresses: of the arrays that the caller gave.
            own: the inputs that were made for the call.
        """
        assert call.launched
        stream, made = cupy_runtime.stream(), self._names[len(addresses) :]
        pointers = (stream, *addresses, *[call.arrays[name].data.ptr for name in made])
        if self._workspace:
            pointers = (*pointers, call.launched.workspace)
        with self._cache.lock:
            if self._closed or pointers in self._recordings:
                return
            seen = self._seen.get(pointers, 0) + 1
            if seen < SIGHTS or not self._may_record():
                self._saw(pointers, seen)
                return
            self._seen.pop(pointers, None)
            self._pause = PAUSE  # unless the recording is made, and kept
            self._cache.recorded.add(self._recorded(call, stream, own), self._recordings, pointers)
            if pointers in self._recordings:
                self._pause = 0

    def _recorded(self, call: Call, stream: int, own: list[Any]) -> Recording:
        assert call.launched
        if not self._workspace and self.plan.info.workspace:
            workspace = cupy_runtime.empty((self.plan.info.workspace,), np.uint8)
            own = [*own, workspace]
            call.launched = call.launched._replace(workspace=workspace.data.ptr)
        try:
            return Recording(call.enqueue, own)
        finally:
            self.plan.set_stream(stream)  # it was that of the recording

    def _give_up(self, recording: Recording, error: Exception) -> None:
        """Destroy a recording that cannot be launched, and record nothing for a while."""
        self._pause = PAUSE
        with contextlib.suppress(Exception):
            self._cache.recorded.destroy(recording)
        _warn(self._cache, error, stacklevel=6)

    def close(self) -> None:
        """Destroy the recordings: the plan is about to be destroyed."""
        self._closed = True
        with contextlib.ExitStack() as stack:  # all of them, whichever fails
            for recording in self._recordings.values():
                stack.callback(self._cache.recorded.destroy, recording)

    def forget(self) -> None:
        """Destroy the recordings: another call takes the place."""
        with self._cache.lock:
            self.plan.dependents.discard(self)
            self.close()


def repeated(how: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any] | None:
    """Run a call that is known.

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
    key, given, addresses = found
    status, context = here.context_id(0)
    if status or (session := here.session(context)) is None:
        return None
    known: CachedCall | None = session.known.get(key)
    return None if known is None else known.run(here, given, addresses)


def learn(how: Any, names: Sequence[str], arrays: tuple[Any, ...], options: Mapping[str, Any], call: Call) -> None:
    """Note a call that has run, so that it need not be read again; record it where it has come often.

    Its results exist, so a failure is only a warning.

    Args:
        how, arrays, options: as :func:`repeated` got them.
        names: those of the arrays.
        call: after it ran.
    """
    global _here
    if call.launched is None or call.launched.made > SMALL or tunings.get() is not None:
        return
    if call.problem.ds_reductions or call.gradients is not None:
        return  # they are gathered by more than launches
    here = _here = _here or _Here()
    found = _key(here.ndarray, how, arrays, options)
    session = here.session(driver.context_id())
    plan = call.launched.plan
    if found is None or session is None or plan.target.handle is not session.handle:
        return  # it ran on another device than the current one
    key, given, addresses = found
    there = [name for name, array in zip(names, arrays, strict=True) if array is not None]
    there += [name for name, value in options.items() if type(value) is here.ndarray]
    others = {id(array) for array in given} | {id(call.arrays[spec.name]) for spec in call.problem.results}
    try:
        known = _known(session, key, call, there)
        known.learn(call, addresses, [array for array in call.arrays.values() if id(array) not in others])
    except Exception as error:
        _warn(session.cache, error, stacklevel=4)


def _known(session: Session, key: tuple[Any, ...], call: Call, names: Sequence[str]) -> CachedCall:
    """The call that is known under a key, or this one from now on."""
    assert call.launched
    plan = call.launched.plan
    known: CachedCall | None = session.known.get(key)
    if known is not None and known.plan is plan:
        known.used = _next_use()
        return known
    if known is not None:  # of a plan that has been destroyed, or of arrays that are aligned otherwise
        known.forget()
    if len(session.known) >= CALLS:  # some more than needed, so that it is rarely looked for
        for old, one in heapq.nsmallest(1 + CALLS // 8, session.known.items(), key=lambda item: item[1].used):
            del session.known[old]
            one.forget()
    new = session.known[key] = CachedCall(call, plan, session.cache, names)
    return new


def _warn(cache: PlanCache, error: Exception, stacklevel: int) -> None:
    """Warn, once in a session, that a call cannot be recorded, or that its recording cannot be launched."""
    if not cache.recorded.warned:
        cache.recorded.warned = True
        warnings.warn(
            f"a repeated call could not be recorded as a CUDA graph: {type(error).__name__}: {error}. Its results are right, "
            f"but it takes more of the host's time. Recording is tried again after {PAUSE} calls, without another warning; "
            "get_plan_cache().set_recording_limit(0) turns it off",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def _key(
    ndarray: Any, how: Any, arrays: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[tuple[Any, ...], list[Any], list[int]] | None:
    """What tells a call from others, its arrays, and where these are; None for a call that is not to be repeated.

    Neither device nor alignment is in it: both follow from the addresses, and are looked at where these are new.
    """
    key: list[Any] = [how]
    given: list[Any] = []
    addresses: list[int] = []
    for array in arrays:
        if type(array) is ndarray:
            key.append(array.dtype)
            key.append(array.shape)
            key.append(array.strides)
            given.append(array)
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
            given.append(value)
            addresses.append(value.data.ptr)
        elif kind is tuple:
            key.append(repr(value))
        else:
            return None
    return tuple(key), given, addresses
