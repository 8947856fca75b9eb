"""The content of an entry in the disk cache: a line of JSON with properties of a plan, then the plan as cuDNN serializes it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

#: Settings of an engine: pairs of a knob's name, as in cuDNN's headers, and its value.
Knobs = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Facts:
    """The properties of a finalized plan that are stored with it. The names are the keys in the file.

    Attributes:
        uids: cuDNN's ids of the tensors that an execution binds, by name.
        engine: cuDNN's number of the engine.
        knobs: the engine's settings as (name, value); -1 lets the engine choose.
        notes: numerical notes, such as ``TENSOR_CORE`` and ``NONDETERMINISTIC``.
        need: bytes of workspace that cuDNN needs.
        build_ms: milliseconds that it took to build the plan, or to load it from the disk cache.
        refused: for every engine config tried before this one, the engine and cuDNN's reason for refusing it.
        tuned: whether it was chosen by measurement (:func:`cupy_sdpa.prepare`).
    """

    uids: dict[str, int] = field(repr=False, hash=False)
    engine: int
    knobs: Knobs
    notes: tuple[str, ...]
    need: int
    build_ms: float
    refused: tuple[str, ...]
    tuned: bool = False


def knobs_text(knobs: Knobs) -> str:
    """Knobs as text.

    >>> knobs_text((("TILE_M", 3), ("TILE_N", 2)))
    'TILE_M=3 TILE_N=2'
    """
    return " ".join(f"{name}={value}" for name, value in knobs)


def content(facts: Facts, text: str) -> bytes:
    """The entry of a plan as cuDNN serializes it."""
    return json.dumps({name: getattr(facts, name) for name in _CHECKS}).encode() + b"\n" + text.encode()


def read(content: bytes) -> tuple[Facts, bytes]:
    """The facts and the serialized plan of an entry.

    Raises:
        ValueError: the facts are not JSON, not exactly the expected ones, or one has a wrong type or value.
    """
    head, _, text = content.partition(b"\n")
    try:
        facts = json.loads(head)
    except RecursionError:
        raise ValueError("its facts are nested too deeply") from None
    if not isinstance(facts, dict) or facts.keys() != _CHECKS.keys():
        raise ValueError(f"its facts are not {', '.join(_CHECKS)}")
    if wrong := [name for name, is_valid in _CHECKS.items() if not is_valid(facts[name])]:
        raise ValueError(f"its {wrong[0]} has a wrong type or value")
    knobs = tuple((name, value) for name, value in facts["knobs"])
    return Facts(**(facts | {"knobs": knobs, "notes": tuple(facts["notes"]), "refused": tuple(facts["refused"])})), text


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_list_of_knobs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(knob, list) and len(knob) == 2 and isinstance(knob[0], str) and _is_int64(knob[1]) for knob in value
    )


#: For every fact, whether a value read from a file is valid.
_CHECKS: dict[str, Callable[[Any], bool]] = {
    "uids": lambda value: isinstance(value, dict) and all(map(_is_int64, value.values())),
    "engine": _is_int64,
    "knobs": _is_list_of_knobs,
    "notes": _is_list_of_text,
    "need": lambda value: _is_int64(value) and value >= 0,
    "build_ms": lambda value: isinstance(value, int | float) and 0 <= value < float("inf"),
    "refused": _is_list_of_text,
    "tuned": lambda value: isinstance(value, bool),
}
