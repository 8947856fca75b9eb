"""Convert dataclasses and named tuples to plain data, as in JSON: dictionaries, lists, strings and numbers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any


def as_data(value: Any) -> Any:
    """Return an object as plain data. Fields with their default value are left out; infinity and NaN become strings.

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
    """Return the default of each field of a dataclass or NamedTuple; without a default it is :data:`dataclasses.MISSING`."""
    if dataclasses.is_dataclass(kind):
        return {field.name: field.default for field in dataclasses.fields(kind) if field.init}
    return {name: kind._field_defaults.get(name, dataclasses.MISSING) for name in kind._fields}
