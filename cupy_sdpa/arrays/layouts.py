"""The option ``layout``: arrays of a call as views in the layout of this package, and results as views in the caller's layout.

The arrays with a head dim are permuted. With a layout in C order (``bshd``, ``bhsd``, ``sbhd``, ``thd``), all other arrays have
their axes in reverse order: a mask ``(Skv, Sq, Hq, B)`` is ``(B, Hq, Sq, Skv)``, the log-sum-exp ``(Sq, Hq, B)`` is
``(B, Hq, Sq)``. Nothing is copied.
"""

from __future__ import annotations

import contextlib
import functools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..layout import AXES, order
from ..problem.problem import SCORE_INPUTS
from .argument import Typed

#: The layouts that calls take. The first two are that of this package, dense and packed.
LAYOUTS = ("dhsb", "dht", "bshd", "bhsd", "sbhd", "thd")
#: The arrays with a head dim. With a group also those of other arrays that have the axes of q.
VECTORS = frozenset(("q", "k", "v", "out", "dout", "dq", "dk", "dv"))
#: The options with more than one axis.
_OPTIONS = (*SCORE_INPUTS, "page_table")


def check_layout(layout: Any) -> None:
    """Check the option.

    Raises:
        TypeError, ValueError: it is no layout.
    """
    if layout is not None and (not isinstance(layout, str) or layout not in LAYOUTS):
        known = ", ".join(map(repr, LAYOUTS))
        raise ValueError(
            f"layout is {layout!r}; it must be one of {known}, or None for 'dhsb'. The letters are b batch, s seq, h heads, "
            "d head_dim, and t all positions of packed sequences"
        )


def other_layout(options: Mapping[str, Any]) -> str | None:
    """The option ``layout`` if it is in C order; None if it is that of this package, so that nothing is permuted.

    >>> other_layout({"layout": "bshd"}), other_layout({"layout": "dht"}), other_layout({})
    ('bshd', None, None)
    """
    layout: str | None = options.get("layout")
    return None if layout is None or layout[0] == "d" else layout


def to_own(name: str, array: Any, layout: str) -> Any:
    """An array or a shape in the layout of this package.

    Args:
        name: the argument.
        array: an array; or a shape, as :func:`cupy_sdpa.problem` takes it. Anything else is returned unchanged, to be refused
            later.
        layout: a layout in C order.

    Raises:
        ValueError: the array has another number of axes than the layout.
    """
    if type(array) is Typed:
        return array._replace(array=to_own(name, array.array, layout))
    is_shape = isinstance(array, (tuple, list)) and all(isinstance(n, numbers.Integral) for n in array)
    shape = tuple(array) if is_shape else getattr(array, "shape", None)
    if shape is None:
        return array
    if name not in VECTORS:
        return _reversed(name, array, shape, is_shape)
    axes = _to_own(_letters(name, layout, shape))
    return tuple(shape[axis] for axis in axes) if is_shape else array.transpose(axes)


def from_own(name: str, array: Any, layout: str, axes: int | None = None) -> Any:
    """A result in the caller's layout: a view.

    Args:
        name: the result.
        array: the result in the layout of this package; a dictionary of gradients is returned unchanged.
        layout: a layout in C order.
        axes: for the gradient of a bias the number of axes of the bias. Default None: that of the result.
    """
    if isinstance(array, dict):
        return array
    if name in VECTORS:
        return array.transpose(_from_own(_letters(name, layout, array.shape)))
    found = array.T
    return found if axes is None else found[(0,) * (found.ndim - axes)]


def options_in_own(options: Mapping[str, Any], layout: str) -> dict[str, Any]:
    """The options without ``layout``, with their arrays in the layout of this package."""
    return {name: option_to_own(name, value, layout) for name, value in options.items() if name != "layout"}


def option_to_own(name: str, value: Any, layout: str) -> Any:
    """An option in the layout of this package."""
    return to_own(name, value, layout) if name in _OPTIONS and value is not None else value


def results_in(
    layout: str, names: Sequence[str], results: Sequence[Any], given: Mapping[str, Any], options: Mapping[str, Any]
) -> list[Any]:
    """The results of a call in the caller's layout.

    Args:
        layout: the caller's.
        names, results: of the call.
        given: the arrays that the caller passed; a result that is written into one of them is that array.
        options: the caller's options.
    """
    made = []
    for name, result in zip(names, results, strict=False):
        target = given.get(name)
        axes = options["bias"].ndim if name == "dbias" else None
        made.append(from_own(name, result, layout, axes) if target is None else target)
    return made


@contextlib.contextmanager
def described(layout: str, arrays: Mapping[str, Any]) -> Iterator[None]:
    """Errors of a ``with`` block that name shapes also say how the axes of the caller's arrays were read."""
    try:
        yield
    except ValueError as error:
        given = ", ".join(f"{name} {tuple(x.shape)}" for name, x in arrays.items() if name in "qkv" and hasattr(x, "shape"))
        axes = ", ".join(AXES[letter] for letter in layout)
        text = (
            f"{error} [with layout={layout!r}, {given} were read as ({axes}); this message lists the axes of q, k, v, out and "
            f"their gradients in the order ({', '.join(AXES[letter] for letter in _own(layout))}), and those of all other "
            "arrays in reverse order]"
        )
        error.args = (text, *error.args[1:])
        raise


def _reversed(name: str, array: Any, shape: tuple[int, ...], is_shape: bool) -> Any:
    """An array or a shape with its axes in reverse order; masks and biases with less than four axes get axes of length 1."""
    missing = max(4 - len(shape), 0) if name in SCORE_INPUTS else 0
    if is_shape:
        return shape[::-1] + (1,) * missing
    found = array.T if len(shape) > 1 else array
    return found[(..., *(None,) * missing)] if missing else found


def _letters(name: str, layout: str, shape: tuple[int, ...]) -> str:
    """The letters of the axes of an array with a head dim; pages of keys have the axes ``bshd`` with packed queries."""
    if layout == "thd" and name in "kv" and len(shape) == 4:
        return "bshd"
    if len(shape) != len(layout):
        wanted = ", ".join(AXES[letter] for letter in layout)
        hint = "packed sequences are layout='thd'" if len(shape) == 3 else "dense arrays are layout='bshd' or 'bhsd'"
        given = f"{name} has {len(shape)} axes {tuple(shape)}"
        raise ValueError(f"{given}; with layout={layout!r} it must have {len(layout)}: ({wanted}). {hint}")
    return layout


def _own(letters: str) -> str:
    """The layout of this package with the same axes."""
    return "dht" if len(letters) == 3 else "dhsb"


@functools.cache
def _to_own(letters: str) -> tuple[int, ...]:
    return order(letters, _own(letters))


@functools.cache
def _from_own(letters: str) -> tuple[int, ...]:
    return order(_own(letters), letters)
