"""What an entry of the plan store holds: a line of JSON with the facts of a plan, then cuDNN's own text."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Facts:
    """What is written down of a plan beside cuDNN's text.

    Attributes:
        uids: cuDNN's numbers of the tensors, by name.
        engine: cuDNN's number of the engine.
        knobs: the engine's settings, (name, value).
        notes: numerical notes.
        need: bytes of workspace that cuDNN asks for.
        build_ms: milliseconds that it took to build the plan.
        refused: reasons against the engine configs that were tried before.
        tuned: whether the plan was chosen by measuring.
    """

    uids: dict[str, int]
    engine: int
    knobs: tuple[tuple[str, int], ...]
    notes: tuple[str, ...]
    need: int
    build_ms: float
    refused: tuple[str, ...]
    tuned: bool

    def content(self, text: str) -> bytes:
        """The entry, with cuDNN's text of the plan."""
        return json.dumps(asdict(self)).encode() + b"\n" + text.encode()


def read(content: bytes) -> tuple[Facts, bytes]:
    """The facts and cuDNN's text in an entry.

    Raises:
        ValueError: the facts are not JSON, one is missing or too many, or one has another type or range than it can have.
    """
    head, _, text = content.partition(b"\n")
    try:
        known = json.loads(head)
    except RecursionError:
        raise ValueError("its facts are nested too deeply") from None
    names = Facts.__dataclass_fields__.keys()
    if not isinstance(known, dict) or known.keys() != names:
        raise ValueError(f"its facts are not {', '.join(names)}")
    right = {
        "uids": isinstance(known["uids"], dict) and all(map(_is_int64, known["uids"].values())),
        "engine": _is_int64(known["engine"]),
        "knobs": _is_list_of(known["knobs"], _is_knob),
        "notes": _is_list_of(known["notes"], _is_text),
        "need": _is_int64(known["need"]) and known["need"] >= 0,
        "build_ms": isinstance(known["build_ms"], int | float) and 0 <= known["build_ms"] < float("inf"),
        "refused": _is_list_of(known["refused"], _is_text),
        "tuned": isinstance(known["tuned"], bool),
    }
    if wrong := [name for name, is_right in right.items() if not is_right]:
        raise ValueError(f"its {wrong[0]} has a type or a value that it cannot have")
    knobs = tuple((name, value) for name, value in known["knobs"])
    return Facts(**(known | {"knobs": knobs, "notes": tuple(known["notes"]), "refused": tuple(known["refused"])})), text


def _is_int64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_knob(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _is_text(value[0]) and _is_int64(value[1])


def _is_list_of(value: Any, fits: Any) -> bool:
    return isinstance(value, list) and all(map(fits, value))
