"""The option ``layout``: arrays of a call as views in the layout of this package, and results as views in the caller's layout.

The arrays with a head dim are permuted. With a layout in C order (``bshd``, ``bhsd``, ``sbhd``, ``thd``), all other arrays have
their axes in reverse order: a mask ``(Skv, Sq, Hq, B)`` is ``(B, Hq, Sq, Skv)``, the log-sum-exp ``(Sq, Hq, B)`` is
``(B, Hq, Sq)``. Nothing is copied.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn, ParamSpec, TypeVar, get_args

from .._typing import Layout
from ..layout import AXES, default_is, default_layout, order
from ..problem.arrays import CU_SEQLENS, ROW_STATS, SCORE_INPUTS, letters_of
from ..problem.arrays import VECTORS as ARRAYS_WITH_HEAD_DIM
from ..problem.problem import Problem
from ..problem.tensor_spec import CallersAxes, callers_axes
from .read_array import as_int32

P = ParamSpec("P")
T = TypeVar("T")
#: The layouts that calls take. The first two are this package's layout, dense and packed.
LAYOUTS = get_args(Layout)
#: The arrays with a head dim, including ``outs[0]`` and the others; for a group also other arrays with the axes of q.
VECTORS = frozenset((*ARRAYS_WITH_HEAD_DIM, "outs", "mean"))
#: The options with more than one axis.
_OPTIONS = (*SCORE_INPUTS, "page_table")


def check_layout(layout: Any) -> None:
    """Check the option."""
    if layout is not None and (not isinstance(layout, str) or layout not in LAYOUTS):
        known = ", ".join(map(repr, LAYOUTS))
        raise ValueError(
            f"layout is {layout!r}; it must be one of {known}, or None for 'dhsb'. The letters are b batch, s seq, h heads, "
            "d head_dim, and t all positions of packed sequences"
        )


def own_layout(axes: int) -> str:
    """Return the package's layout for this many axes."""
    return "dht" if axes == 3 else "dhsb"


#: The options of packed sequences.
_PACKING = (*CU_SEQLENS, "max_seqlen_q", "max_seqlen_kv")
#: The options with which an array of three axes has no missing batch axis.
_OF_BATCHES = (*_PACKING, "page_table")


def in_default(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function that takes ``layout`` with :func:`cupy_sdpa.layout.default`; calls inside it have no default."""
    layout = default_layout()
    if kwargs.get("layout") is None and not (args and isinstance(args[0], Problem)):
        of_parts = args[0][0] if args and isinstance(args[0], (list, tuple)) and args[0] else None
        packed = any(kwargs.get(name) is not None for name in (*_PACKING, "cu_seqlens"))
        if packed or getattr(of_parts, "ndim", 0) == 3:
            layout = "dht" if layout == "dhsb" else "thd"
        kwargs["layout"] = layout
    with default_is(None):
        return function(*args, **kwargs)


def takes_default(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose ``layout=`` defaults to the layout of :func:`cupy_sdpa.layout.default`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        return function(*args, **kwargs) if default_layout() is None else in_default(function, *args, **kwargs)

    return call


def refuse_default(name: str) -> NoReturn:
    """Raise the error of a function without ``layout=`` where there is a default layout."""
    raise TypeError(
        f"the default layout is {default_layout()!r}, and {name} has no layout=: call it outside of "
        "cupy_sdpa.layout.default(...), with arrays (head_dim, heads, seq, batch)"
    )


def has_own_axes(function: Callable[P, T]) -> Callable[P, T]:
    """Return a function whose axes :func:`cupy_sdpa.layout.default` does not change: calls inside it have no default."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if default_layout() is None:
            return function(*args, **kwargs)
        with default_is(None):
            return function(*args, **kwargs)

    return call


def is_unbatched(q: Any, options: Mapping[str, Any]) -> bool:
    """True if q is an array without a batch axis: it has three axes, and no option is of packed sequences or pages."""
    if getattr(q, "ndim", 0) != 3 or options.get("layout") in ("thd", "dht") or is_named():  # it was added to others
        return False
    for name in _OF_BATCHES:  # noqa: SIM110 - any() enters a function for each
        if options.get(name) is not None:
            return False
    return True


def with_batch(name: str, array: Any, layout: str | None) -> Any:
    """Return an array of a call without batch axes with a batch axis of length 1; masks and biases may have one."""
    axes = 3 if name in VECTORS else 2
    if name in SCORE_INPUTS:
        return array[..., None] if layout is None and getattr(array, "ndim", 0) == 3 else array
    if name not in (*VECTORS, *ROW_STATS) or not hasattr(array, "ndim"):
        return array
    if array.ndim != axes:
        raise ValueError(
            f"q has 3 axes and {name} has {array.ndim}: {tuple(array.shape)}. Without a batch axis {name} has {axes}, so pass "
            f"q with a batch axis, or {name} without it; packed sequences need cu_seqlens_q=, cu_seqlens_kv=, max_seqlen_q= "
            "and max_seqlen_kv="
        )
    return array[(slice(None),) * _batch_axis(name, layout, axes) + (None,)]


def without_batch(name: str, array: Any, layout: str | None) -> Any:
    """Return a result of a call without batch axes, without its batch axis."""
    if name not in (*VECTORS, *ROW_STATS):
        return array
    return array[(slice(None),) * _batch_axis(name, layout, array.ndim - 1) + (0,)]


def _batch_axis(name: str, layout: str | None, axes: int) -> int:
    if layout is None:
        return axes
    return layout.index("b") if name in VECTORS else 0


def other_layout(options: Mapping[str, Any]) -> str | None:
    """Return the option ``layout`` if it is in C order; None for this package's layout, so that nothing is permuted."""
    layout: str | None = options.get("layout")
    return None if layout is None or layout[0] == "d" else layout


def to_own(name: str, array: Any, layout: str) -> Any:
    """Return an array or a shape of a C-order layout in this package's layout; anything else unchanged, to raise later."""
    is_shape = isinstance(array, (tuple, list)) and all(isinstance(n, numbers.Integral) for n in array)
    shape = tuple(array) if is_shape else getattr(array, "shape", None)
    if shape is None:
        return array
    if name.partition("[")[0] not in VECTORS:
        return _reversed(name, array, shape, is_shape)
    axes = order(_letters(name, layout, shape), own_layout(len(shape)))
    return tuple(shape[axis] for axis in axes) if is_shape else array.transpose(axes)


def from_own(name: str, array: Any, layout: str, axes: int | None = None) -> Any:
    """Return a view of a result in the caller's C-order layout. ``axes`` is the rank of the bias, for its gradient."""
    if name in VECTORS:
        # pages of keys are bshd
        return array.transpose(order(own_layout(array.ndim), layout if len(layout) == array.ndim else "bshd"))
    found = array.T
    return found if axes is None else found[(0,) * (found.ndim - axes)]


def option_to_own(name: str, value: Any, layout: str) -> Any:
    """Return an option in the layout of this package."""
    if name == "page_table" and isinstance(value, (list, tuple)) and not all(isinstance(n, numbers.Integral) for n in value):
        value = as_int32(name, value)  # rows of pages; a shape is a tuple of integers
    return to_own(name, value, layout) if name in _OPTIONS and value is not None else value


def shapes_of(arrays: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a call's arrays, including its options' arrays."""
    return {name: tuple(x.shape) for name, x in {**options, **arrays}.items() if hasattr(x, "shape")}


#: Whether the caller of a converted call named the layout.
_is_named: ContextVar[bool] = ContextVar("layout_is_named", default=False)
#: Whether it is so; a function of C, because every call of numpy arrays calls it.
is_named = _is_named.get


@contextlib.contextmanager
def of_caller(layout: str | None, shapes: Mapping[str, tuple[int, ...]], *, unbatched: bool = False) -> Iterator[None]:
    """A context in which arrays of the caller's layout are checked after they were permuted.

    Errors show the axes and the ``shapes`` of the caller's arrays, if ``unbatched`` without the batch axis that was added, and
    name the layout. Arrays may have any strides if it is named, also with the axes of this package.
    """
    other = other_layout({"layout": layout})
    caller = callers_axes.get()
    if other or unbatched:
        caller = CallersAxes(functools.partial(_axes_from_own, other, unbatched), shapes, other is not None)
    axes, named = callers_axes.set(caller), _is_named.set(layout is not None or is_named())
    try:
        yield
    except ValueError as error:
        text, name = str(error), f"[layout={other!r}]"
        if other and not text.endswith(name):  # another member of a group may have named it
            error.args = (f"{text} {name}", *error.args[1:])
        raise
    finally:
        callers_axes.reset(axes)
        _is_named.reset(named)


def _axes_from_own(layout: str | None, unbatched: bool, name: str, axes: Sequence[Any]) -> tuple[Any, ...]:
    """Axes in the layout of this package in the order of the caller's array, if ``unbatched`` without the batch axis."""
    places: Sequence[int] = range(len(axes))
    if len(letters_of(name)) == 1:  # any other shape is a mistake, shown unchanged
        return tuple(axes)
    if layout and name not in VECTORS:
        places = places[::-1]
    elif layout:
        places = order(own_layout(len(axes)), layout if len(layout) == len(axes) else "thd" if len(axes) == 3 else "bshd")
    return tuple(axes[place] for place in places if not (unbatched and place == len(axes) - 1))


def _reversed(name: str, array: Any, shape: tuple[int, ...], is_shape: bool) -> Any:
    """Return an array or a shape with reversed axes; masks and biases with fewer than four axes get axes of length 1."""
    missing = max(4 - len(shape), 0) if name in SCORE_INPUTS else 0
    if is_shape:
        return shape[::-1] + (1,) * missing
    found = array.T if len(shape) > 1 else array
    return found[(..., *(None,) * missing)] if missing else found


def _letters(name: str, layout: str, shape: tuple[int, ...]) -> str:
    """Return the letters of the axes of an array with a head dim; pages of keys have the axes ``bshd`` with packed queries."""
    if layout == "thd" and name in ("k", "v", "mean") and len(shape) == 4:
        return "bshd"
    if len(shape) != len(layout):
        wanted = ", ".join(AXES[letter] for letter in layout)
        hint = "packed sequences are layout='thd'" if len(shape) == 3 else "dense arrays are layout='bshd' or 'bhsd'"
        given = f"{name} has {len(shape)} axes {tuple(shape)}"
        raise ValueError(f"{given}; with layout={layout!r} it must have {len(layout)}: ({wanted}). {hint}")
    return layout
