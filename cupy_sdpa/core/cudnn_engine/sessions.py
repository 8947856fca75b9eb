"""Sessions: the cuDNN handle and the plan cache of each thread in each CUDA context.

A plan belongs to the cuDNN handle that it was finalized for, and only one thread at a time may use a handle. Every thread
therefore owns a handle and a plan cache in every CUDA context that it uses. When a thread ends, the next new thread takes over
its sessions, plans included. Nothing is destroyed at the end of a thread, at interpreter exit or in a forked child.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

from ..cudnn.launch import Handle
from .plan_cache import PlanCache


class Session:
    """The state of a thread in a CUDA context: the cuDNN handle, the plans that were finalized for it, and the cached calls."""

    def __init__(self) -> None:
        self.handle = Handle()
        self.cache = PlanCache()
        self.bound_programs: dict[Any, Any] = {}
        _all.add(self)


class _ThreadSessions:
    """The sessions of a thread, by context id. They become idle when the thread ends, and other threads can take them over."""

    def __init__(self) -> None:
        self.by_context: dict[int, Session] = {}
        self._idle = _idle  # a separate reference: at interpreter exit the module's names are deleted before this object

    def __del__(self) -> None:
        # Runs in the ending thread. It only moves Python objects: cuDNN must never be called from here.
        for context, session in self.by_context.items():
            self._idle.setdefault(context, []).append(session)


#: Sessions of threads that have ended, by context id.
_idle: dict[int, list[Session]] = {}
_thread = threading.local()
#: The sessions of all threads.
_all: weakref.WeakSet[Session] = weakref.WeakSet()


def existing_session(context: int) -> Session | None:
    """Return the session that :func:`session` returns; None if the current thread has no session yet."""
    try:  # every repeated call runs this: a try block takes no time unless it raises
        found: Session = _thread.by_context[context]
    except (AttributeError, KeyError):
        return None
    return found


def session(context: int) -> Session:
    """Return the current thread's session in the current CUDA context; created or taken over from an ended thread on first use.

    The id of a context (:func:`.core.runtime.driver.context_id`) is never reused.
    """
    sessions: _ThreadSessions | None = getattr(_thread, "sessions", None)
    if sessions is None:
        sessions = _thread.sessions = _ThreadSessions()
        _thread.by_context = sessions.by_context
    result = sessions.by_context.get(context)
    if result is None:
        try:
            result = _idle[context].pop()
        except (KeyError, IndexError):
            result = Session()
        sessions.by_context[context] = result
    return result


def plan_caches() -> list[PlanCache]:
    """Return the plan caches of all threads, also of those that have ended."""
    return [session.cache for session in list(_all)]


def _reset_after_fork() -> None:
    """Drop every session in a forked child: handles and plans belong to the parent, and CUDA does not survive a fork."""
    global _thread
    sessions: _ThreadSessions | None = getattr(_thread, "sessions", None)
    if sessions is not None:
        sessions.by_context = {}
    _idle.clear()
    _all.clear()
    _thread = threading.local()


if hasattr(os, "register_at_fork"):  # Windows has no fork
    os.register_at_fork(after_in_child=_reset_after_fork)
