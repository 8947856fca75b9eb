"""The options of every call: their names and types once, for all calls, and how their values are read."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

import numpy as np

from ..problem.band import Band, Causal, Window
from ..problem.bucket import Bucket
from ..problem.problem import CU_SEQLENS, LENGTHS, SCORE_INPUTS, SEEDS, Settings
from ..score_fn.tracer import MaskMod, ScoreMod

#: Whether gradients of ``tensors`` are wanted, or of which.
DTensors = bool | str | Sequence[str]

Function = TypeVar("Function", bound=Callable[..., Any])


class Options(TypedDict, total=False):
    """What every call takes beside its arrays; :func:`cupy_sdpa.attention` says what each of them means."""

    scale: float | None
    causal: Causal
    window: Window
    mask: Any
    bias: Any
    seq_lens_q: Any
    seq_lens_kv: Any
    cu_seqlens_q: Any
    cu_seqlens_kv: Any
    max_seqlen_q: int | None
    max_seqlen_kv: int | None
    alibi_slopes: Any
    softcap: float | None
    score_mod: ScoreMod | None
    mask_mod: MaskMod | None
    tensors: Mapping[str, Any] | None
    sinks: Any
    dropout_p: float
    seed: Any
    offset: Any
    dropout_mask: Any
    max_workspace: int | None
    bucket: Bucket


#: Those options whose default is not None.
DEFAULTS: dict[str, Any] = {"causal": False, "dropout_p": 0.0}
#: Those options that are arrays.
ARRAYS = (*SCORE_INPUTS, *LENGTHS, *CU_SEQLENS, "alibi_slopes", "sinks", *SEEDS)


def takes_options(function: Function) -> Function:
    """Have ``help`` and completion show every option in place of ``**options``."""
    signature = inspect.signature(function)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    for name, kind in Options.__annotations__.items():
        annotation = getattr(kind, "__forward_arg__", kind)
        parameters.append(
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=annotation)
        )
    function.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return function


def check_names(options: Mapping[str, Any]) -> None:
    """Refuse an option that there is not.

    Raises:
        TypeError: with the name that is nearest.
    """
    for name in options.keys() - Options.__annotations__.keys():
        import difflib  # slow to import

        near = difflib.get_close_matches(name, Options.__annotations__, 1)
        hint = f"; did you mean {near[0]}?" if near else f"; there are {', '.join(Options.__annotations__)}"
        raise TypeError(f"there is no option {name}{hint}")


def read_settings(options: Mapping[str, Any], tau: float, *, deterministic: bool = False) -> tuple[Settings, dict[str, float]]:
    """What of the options is baked into a plan, and the numbers that are handed over with every call.

    Args:
        options: as the caller gave them.
        tau: the scale.
        deterministic: as for the call.

    Raises:
        TypeError, ValueError: a value that an option cannot have.
    """
    softcap = read_softcap(options.get("softcap"))
    settings = Settings(
        read_band(options.get("causal", False), options.get("window")),
        tau >= SMALLEST_SCALE,
        softcap is not None,
        read_dropout(options),
        _count(options, "max_seqlen_q", "the length of the longest sequence"),
        _count(options, "max_seqlen_kv", "the length of the longest sequence"),
        deterministic,
        _count(options, "max_workspace", "a number of bytes"),
    )
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        if options.get(name) is not None and options.get("cu_seqlens_q") is None:
            raise ValueError(f"{name} is {options[name]} and cu_seqlens_q is None: only packed sequences have a longest one")
    return settings, {"scale": tau} | ({} if softcap is None else {"softcap": softcap})


def is_one_of(value: Any, choices: Sequence[Any]) -> bool:
    """Whether a value is one of some, whatever it is: an array, which is equal to nothing as a whole, is none."""
    return isinstance(value, Hashable) and value in choices


def read_flag(name: str, value: Any) -> bool:
    """An argument that is either True or False.

    Raises:
        TypeError: it is neither.
    """
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} is {value!r}; it must be True or False")
    return bool(value)


def read_band(causal: Any, window: Any) -> Band | None:
    """Which keys a query sees: the right bound of ``causal`` and the bounds of ``window``, on one diagonal."""
    if not is_one_of(causal, (False, True, "top_left", "bottom_right")):
        raise ValueError(f"causal is {causal!r}; it must be False, True, 'top_left' or 'bottom_right'")
    bottom_right = causal == "bottom_right"
    if window is None:
        return Band(right=0, bottom_right=bottom_right) if causal else None
    if not isinstance(window, (tuple, list)) or len(window) not in (2, 3):
        raise TypeError(f"window is {window!r}; it must be (left, right) or (left, right, 'bottom_right')")
    for side in window[:2]:
        if side is not None and (not isinstance(side, numbers.Integral) or int(side) < 0):
            raise ValueError(f"window is {window!r}; its sides are numbers of keys, 0 or more, or None for no bound")
    left, right = (None if side is None else int(side) for side in window[:2])
    corner = window[2] if len(window) == 3 else "bottom_right" if bottom_right else "top_left"
    if not is_one_of(corner, ("top_left", "bottom_right")):
        raise ValueError(f"window is {window!r}; its diagonal is 'top_left' or 'bottom_right'")
    if causal and (corner == "bottom_right") != bottom_right:
        raise ValueError(f"causal is {causal!r} and window is {window!r}: they name different diagonals")
    return Band(left, 0 if causal else right, corner == "bottom_right")


#: cuDNN gets the scale as float32: these are the least positive and the largest that it can hold without loss of range.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, (2 - 2**-23) * 2.0**127


def read_scale(scale: Any, head_dim: int) -> float:
    """The scale as a number; None stands for ``1/sqrt(head_dim)``."""
    default = 1 / math.sqrt(head_dim or 1)
    if scale is None:
        return default
    if not isinstance(scale, numbers.Real) or isinstance(scale, (bool, np.bool_)):
        raise TypeError(f"scale is a {type(scale).__name__}; it must be a number: float(...) makes one of an array")
    value = _as_float(scale)
    if not abs(value) <= LARGEST_SCALE:  # true of NaN too
        raise ValueError(f"scale is {value}; it must be finite in float32. None stands for 1/sqrt(head_dim) = {default:.6g}")
    return value


def _as_float(number: Any) -> float:
    """A number as Python's float; infinite where it is too large for one."""
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def read_softcap(softcap: Any) -> float | None:
    """The cap as a number."""
    if softcap is None:
        return None
    if not isinstance(softcap, numbers.Real) or isinstance(softcap, (bool, np.bool_)):
        raise TypeError(f"softcap is a {type(softcap).__name__}; it must be a number, or None for no cap")
    if not SMALLEST_SCALE <= _as_float(softcap) <= LARGEST_SCALE:
        raise ValueError(f"softcap is {softcap}; it must be above 0 and finite in float32, or None for no cap")
    return float(softcap)


def read_dropout(options: Mapping[str, Any]) -> float:
    """The probability with which a weight is dropped; what dropout needs must be there, and nothing that it does not use."""
    p = options.get("dropout_p", 0.0)
    if not isinstance(p, numbers.Real):
        raise TypeError(
            f"dropout_p is a {type(p).__name__}; it must be a number: the probability with which a weight is dropped"
        )
    if not 0 <= float(p) < 1:
        raise ValueError(f"dropout_p is {p}; it must be 0 or more, and below 1")
    given = [name for name in ("dropout_mask", *SEEDS) if options.get(name) is not None]
    if not p and "dropout_mask" in given:
        raise ValueError("dropout_mask is given and dropout_p is 0: what is kept is divided by 1 - dropout_p, so give that too")
    if p and "dropout_mask" in given and len(given) > 1:
        raise ValueError(f"dropout_mask and {given[1]} are given; the mask takes the place of random numbers: give one of them")
    if p and not {"seed", "dropout_mask"} & set(given):
        raise ValueError(f"dropout_p is {p} and seed is None: give a seed, so that the backward pass drops the same")
    return float(p)


def _count(options: Mapping[str, Any], name: str, what: str) -> int | None:
    value = options.get(name)
    if value is None:
        return None
    if not isinstance(value, numbers.Integral) or value < 0:
        raise ValueError(f"{name} is {value!r}; it must be {what}, 0 or more, or None")
    return int(value)
