"""Which cache has the lengths that a function gets: what the host knows of them is checked without reading the device."""

from __future__ import annotations

import weakref
from typing import Any

#: The caches by the id of their arrays of lengths, which live as long as they do.
_CACHES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(cache: Any) -> None:
    """Note that ``cache.lengths`` is the array of a :class:`cupy_sdpa.KVCache`."""
    _CACHES[id(cache.lengths)] = cache


def cache_of(lengths: Any) -> Any:
    """Return the cache whose ``lengths`` are this array; None for other arrays, such as copies."""
    cache = _CACHES.get(id(lengths))
    return cache if cache is not None and cache.lengths is lengths else None
