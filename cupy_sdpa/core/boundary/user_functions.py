"""A call's score and mask functions: validate and trace them, and turn the arrays that they read into captured arrays."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import in_words
from ..options.band import Band
from ..options.table import DEFAULT_SETTINGS, Settings
from ..problem.problem import CAPTURED_DTYPES, Problem
from ..problem.subproblems import score_derivatives
from ..problem.tensor_spec import dtype_name
from ..runtime import cupy_runtime
from ..score_fn.expression import AXES
from ..score_fn.identity import identity
from ..score_fn.numpy_calls import Access
from ..score_fn.tracer import trace
from .conversion import Conversion, needs_conversion
from .read_array import INT32, tensor_name

if TYPE_CHECKING:
    from ..score_fn.recorded import Recorded

#: The options that are functions.
FUNCTIONS = ("score_mod", "mask_mod")
#: The axes of arrays with the shape of the scores.
_ORDER = ("kv_idx", "q_idx", "h", "b")


class Functions(NamedTuple):
    """A call's traced functions.

    Attributes:
        settings: the settings, with the functions' expression and the mask function's band.
        arrays: the captured arrays as views ``(Skv, Sq, Hq, B)``, by the names in the expression; every axis may be 1.
        scalars: the by-value scalars of the expression.
        source_lines: the source line of each operation.
        captured: how each captured array is indexed, by the names in the expression.
        identities: the functions' identities, taken before the functions were called.
    """

    settings: Settings = DEFAULT_SETTINGS
    arrays: Mapping[str, Any] = {}
    scalars: Mapping[str, float] = {}
    source_lines: Mapping[str, str] = {}
    captured: Mapping[str, Access] = {}
    identities: tuple[Hashable | None, ...] = ()


#: The identities of a call without functions.
NO_FUNCTIONS = Functions()


def has_functions(options: Mapping[str, Any]) -> bool:
    """True if a call has a score function or a mask function."""
    return options.get("score_mod") is not None or options.get("mask_mod") is not None


def function_identities(options: Mapping[str, Any]) -> tuple[Hashable | None, ...]:
    """Return the identities of a call's functions, see :mod:`.core.score_fn.identity`."""
    return tuple(identity(options.get(name)) for name in FUNCTIONS)


#: Recorded functions by the identities of functions and the shapes and dtypes of arrays; emptied when it is full.
_recorded: dict[Hashable, dict[str, Recorded]] = {}
_MAX_RECORDED = 1024


def kept_options(q: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a snapshot of the options for a later call: with recorded functions, and copies of ``tensors`` and of lists.

    Functions that were recorded before are recognized by their identities, as in a repeated call.
    """
    kept = dict(options)
    for name in ("window", *INT32):
        if isinstance(kept.get(name), list):
            kept[name] = as_tuple(kept[name])
    if kept.get("score_mod") is None and kept.get("mask_mod") is None:
        return kept
    check_tensors(options)
    tensors = dict(options.get("tensors") or {})
    if tensors:
        kept["tensors"] = tensors
        tensors = Conversion(q, {"tensors": tensors}).options["tensors"] if needs_conversion(q, {}) else tensors
        if not all(isinstance(getattr(array, "dtype", None), np.dtype) for array in tensors.values()):
            return kept  # the call raises an error for other arrays
    identities = function_identities(options)
    key = (identities, *((name, array.shape, array.dtype) for name, array in tensors.items()))
    functions = _recorded.get(key)
    if functions is None:
        from ..score_fn.recorded import record

        functions = record({name: options[name] for name in FUNCTIONS if options.get(name) is not None}, tensors)
        if None not in identities and function_identities(options) == identities:  # no function changed while it was called
            if len(_recorded) >= _MAX_RECORDED:
                _recorded.clear()
            _recorded[key] = functions
    return {**kept, **functions}


def as_tuple(value: Any) -> Any:
    """Return a list, with nested lists, as a tuple; return anything else unchanged."""
    return tuple(map(as_tuple, value)) if isinstance(value, (list, tuple)) else value


def check_tensors(options: Mapping[str, Any]) -> None:
    """Check that ``tensors`` is a mapping with string keys, and that a function can read it."""
    tensors = options.get("tensors")
    if tensors is not None and not isinstance(tensors, Mapping):
        raise TypeError(f"tensors is {in_words(tensors)}; it must be a mapping of names to arrays")
    for name in tensors or ():
        if not isinstance(name, str):
            raise TypeError(f"tensors has the key {name!r}; keys must be strings, the names of the functions' arguments")
    if tensors and not has_functions(options):
        raise ValueError(f"tensors has {', '.join(tensors)}, but neither score_mod nor mask_mod is passed to read it")


def check_scalars(scalars: Mapping[str, Any]) -> None:
    """Check that the integers of a program have at most 32 bits, as on the GPU."""
    for number in scalars.values():
        if isinstance(number, int) and not -(2**31) <= number < 2**31:
            raise OverflowError(
                f"a function computes with the integer {number}; on the GPU integers have 32 bits, from {-(2**31)} to "
                f"{2**31 - 1}: write {float(number)!r} for a float"
            )


def trace_functions(options: Mapping[str, Any], problem: Problem) -> Functions:
    """Trace a call's functions: call them with traced values."""
    _, _, hq, _, sq, skv, b = problem.sizes
    tensors = dict(options.get("tensors") or {})
    for name, array in tensors.items():
        if dtype_name(array.dtype) not in CAPTURED_DTYPES:  # of any byte order
            allowed = ", ".join(CAPTURED_DTYPES)
            raise TypeError(f"{tensor_name(name)} is {array.dtype}; functions read {allowed}: convert with .astype(...)")
        if dtype_name(array.dtype) == "int64" and cupy_runtime.is_array(array):
            raise TypeError(
                f"{tensor_name(name)} is int64; on the GPU functions compute with 32-bit integers: convert with "
                ".astype('int32')"
            )
    settings = problem.settings
    other_diagonal = settings.band is not None and settings.band.bottom_right
    sizes = dict(zip(AXES, (b, hq, sq, skv), strict=True))
    identities = function_identities(options)
    traced = trace(options.get("score_mod"), options.get("mask_mod"), tensors, sizes, bands=not other_diagonal)
    band = Band(*traced.band).intersected(settings.band) if traced.band else settings.band
    arrays = {name: with_score_axes(tensors[access.name], access) for name, access in traced.captured.items()}
    settings = settings._replace(expression=traced.expression, band=band)
    return Functions(settings, arrays, traced.numbers, traced.lines, traced.captured, identities)


@dataclass(frozen=True)
class Gradients:
    """The requested gradients of ``tensors``.

    Attributes:
        specs: shape and dtype of the arrays to differentiate with respect to, by the caller's names.
        captured: how each captured array is indexed, by the names in the expression.
    """

    specs: dict[str, tuple[tuple[int, ...], Any]]
    captured: Mapping[str, Access]

    def names_in(self, problem: Problem) -> tuple[str, ...]:
        """Return the captured arrays that are views of these arrays and that the score depends on."""
        differentiable = score_derivatives(problem)
        return tuple(name for name, access in self.captured.items() if access.name in self.specs and name in differentiable)

    @property
    def results(self) -> list[str]:
        """The names of the gradients among the arrays of the call."""
        return [gradient_name(name) for name in self.specs]

    def as_last(self, results: list[Any]) -> list[Any]:
        """Return a call's results with the gradients, which are the last results, as one dictionary."""
        count = len(results) - len(self.specs)
        return [*results[:count], dict(zip(self.specs, results[count:], strict=True))]

    def __hash__(self) -> int:
        return hash((tuple(self.specs.items()), tuple(self.captured.items())))


def gradient_name(name: str) -> str:
    """Return the name that the gradient of an array in ``tensors=`` has among a call's arrays."""
    return f"dtensors[{name!r}]"


def requested_gradients(return_dtensors: Any, tensors: Mapping[str, Any] | None, functions: Functions) -> Gradients | None:
    """Return the gradients that ``return_dtensors`` requests; None for no gradients."""
    if return_dtensors is None or return_dtensors is False:
        return None
    if return_dtensors is not True and not isinstance(return_dtensors, (str, list, tuple, set, frozenset)):
        raise TypeError(f"return_dtensors is {return_dtensors!r}; it must be True, False, a name in tensors, or several")
    arrays = dict(tensors or {})
    floating = [name for name, array in arrays.items() if "float" in dtype_name(array.dtype)]
    if return_dtensors is True:
        names = floating
    else:
        names = [return_dtensors] if isinstance(return_dtensors, str) else list(return_dtensors)
    for name in names:
        if name not in arrays:
            raise ValueError(f"return_dtensors names {name!r}; tensors has {', '.join(arrays) or 'none'}")
        if name not in floating:
            raise TypeError(
                f"return_dtensors names {name!r}, which is {arrays[name].dtype}: only floating-point arrays have gradients"
            )
    specs = {name: (arrays[name].shape, arrays[name].dtype) for name in names}
    return Gradients(specs, functions.captured)


def with_score_axes(array: Any, access: Access) -> Any:
    """Return a view of an array with the axes of the scores; missing axes have length 1."""
    part = array[(*(slice(None) if isinstance(axis, str) else axis for axis in access.axes), ...)]
    names = [axis for axis in access.axes if isinstance(axis, str)]
    ordered = part.transpose([names.index(name) for name in _ORDER if name in names])
    return ordered[tuple(slice(None) if name in names else None for name in _ORDER)]
