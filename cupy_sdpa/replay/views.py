"""Repeated calls on other views of the caller's arrays: with a batch axis, with split heads, or with the axes of a layout.

The first call makes the views, and runs a program on them. It is cached with the key of the caller's arrays, and its results
have the caller's axes. A repeated call therefore makes no view, which takes 5 us with CuPy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..boundary.call import in_mode
from ..boundary.conversion import Conversion, needs_conversion
from ..boundary.user_functions import function_identities
from .call_key import Repeatable, array_names, passed_arrays, results_by_name
from .replay_cache import MAX_CALLS, arguments_of, cache_call, keep_recent, run_cached

#: The keys of the latest calls that run no program, several, or one on copies of the arrays. What they call is cached instead.
_not_views: dict[Any, None] = {}


def on_views(kind: Any, arrays: Mapping[str, Any], options: Mapping[str, Any], compute: Callable[[], Any]) -> Any:
    """What a function of arrays returns: an array or a tuple, computed by a cached call or by the function.

    The arrays may be None; further arrays are options. A call that the function makes is cached if its arrays are views of
    these, or of the options, by the same names, and if all of its results are returned in order, perhaps as views.
    """
    passed = tuple(arrays.values())
    results = run_cached(kind, passed, options)
    if results is None:
        return run_and_cache(kind, (*arrays,), passed, options, compute)
    return results[0] if len(results) == 1 else tuple(results)


def on_own_arrays(
    kind: Any,
    names: Sequence[str],
    arrays: tuple[Any, ...],
    options: Mapping[str, Any],
    compute: Callable[[tuple[Any, ...], Mapping[str, Any]], list[Any]],
    results: Sequence[str],
) -> list[Any]:
    """The results of a call that is not repeated, computed on its arrays in the form of this package.

    Arrays of other libraries, without a batch axis, with ``engine``, or with ``layout`` are converted. ``compute`` returns the
    results from the arrays and the options in the form of this package; the caller gets those in ``results`` in its form.
    """
    named = dict(zip(names, arrays, strict=True))
    if not needs_conversion(named["q"], options):
        return compute(arrays, options)

    def convert() -> tuple[Any, ...]:
        conversion = Conversion(named["q"], options)

        def of_own(**own: Any) -> tuple[Any, ...]:
            return tuple(compute((*own.values(),), conversion.options))

        found: tuple[Any, ...] = conversion.run(of_own, named, results)
        return found

    return [*run_and_cache(kind, names, arrays, options, convert)]


def run_and_cache(
    kind: Any, names: Sequence[str], arrays: tuple[Any, ...], options: Mapping[str, Any], compute: Callable[[], Any]
) -> Any:
    """Call a function as :func:`on_views`, without a look-up; ``names`` are those of the arrays."""
    arguments = arguments_of(kind, arrays, options)
    if arguments is None or arguments[0] in _not_views:
        return compute()
    key, passed = arguments
    noted: list[Repeatable] = []
    with in_mode(noted=noted):
        found = compute()
    again = arguments_of(kind, arrays, options)
    if again is None or again[0] != key:
        return found  # a function changed while it was called
    results = list(found) if isinstance(found, tuple) else [found]
    every = array_names(type(passed[0]), names, arrays, options)
    # a call with other functions, such as that of a dense block mask beside another mask, is cached itself
    own = [call for call in noted if not call.identities or call.identities == function_identities(options)]
    if len(own) == len(noted) == 1 and _is_on_views(own[0], every, passed, results):
        cache_call(kind, names, arrays, options, own[0], results)
    else:
        keep_recent(_not_views, key, None, MAX_CALLS)
    return found


def _is_on_views(call: Repeatable, names: Sequence[str], arrays: Sequence[Any], results: Sequence[Any]) -> bool:
    """Whether the arrays of a call are views of these, and these results views of all elements of its results."""
    passed = list(passed_arrays(call, names))
    if not all(_share_memory(array, arrays[position]) for _, array, position in passed):
        return False
    if not call.arrays.keys() <= {name for name, *_ in passed} | {*call.result_names} | call.fills.keys():
        return False  # it needs arrays that were made for it
    for name, result in results_by_name(call, results).items():
        own = call.arrays[name]
        if name in names:
            if result is not arrays[names.index(name)]:
                return False
        elif result.dtype != own.dtype or result.nbytes != own.nbytes or not _share_memory(result, own):
            return False
    return True


def _share_memory(one: Any, other: Any) -> bool:
    """Whether an array is a view of the memory of another, and not a copy."""
    if type(one) is not type(other):
        return False
    return np.may_share_memory(one, other) if isinstance(one, np.ndarray) else one.data.mem is other.data.mem
