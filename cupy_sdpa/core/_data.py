"""Dataclasses and named tuples as plain data: dictionaries, lists, texts and numbers, field by field, as JSON has them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def as_data(value: Any) -> Any:
    """Return an object as plain data, without the fields that have their default value; a number that is not finite is a text.

    >>> from cupy_sdpa.core.options.band import Band
    >>> as_data(Band(right=0)), as_data((1, float("inf")))
    ({'right': 0}, [1, 'inf'])
    """
    if dataclasses.is_dataclass(value) or hasattr(value, "_asdict"):
        named = ((name, getattr(value, name), default) for name, default in fields_of(type(value)).items())
        return {name: as_data(part) for name, part, default in named if part != default or type(part) is not type(default)}
    if isinstance(value, tuple):
        return [as_data(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value.item() if hasattr(value, "item") else value


def fields_of(kind: Any) -> dict[str, Any]:
    """Return the fields of a dataclass or a NamedTuple, each with its default; :data:`dataclasses.MISSING` if it has none."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    return {name: kind._field_defaults.get(name, dataclasses.MISSING) for name in kind._fields}
