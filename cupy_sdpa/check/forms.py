"""The same call in another form: without batch axes, or with a default layout in C order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from .. import layout
from .case import Case

#: Features whose calls take packed sequences, pages, FP8 arrays or a part of every sequence, or have no ``layout=``.
_OTHERS = frozenset(("packed", "cache", "fp8", "parallel", "weight_sums", "merge", "shared_prefix"))
#: The options with the axes of the scores.
_SCORES = ("mask", "bias", "dropout_mask")


def _without_batch(x: Any) -> Any:
    return x[..., 0]


def _with_batch(x: Any) -> Any:
    return x[..., None]


def _reversed(x: Any) -> Any:
    return x.T


class Form:
    """How the second call of a case is written: without batch axes if there is one batch entry, else with a default layout.

    The arrays are the same memory, so that the results have the same bits.

    Args:
        case: the case.
    """

    def __init__(self, case: Case) -> None:
        self._to: Callable[[Any], Any] | None = None
        self._from: Callable[[Any], Any] = _reversed
        self._context: Any = contextlib.nullcontext()
        if _OTHERS & case.options.keys() or case.paged:
            return
        if case.b == 1:
            self._to, self._from = _without_batch, _with_batch
        else:
            self._to, self._context = _reversed, layout.default("bshd")

    def array(self, x: Any) -> Any:
        """An array of the call."""
        return x if x is None or self._to is None else self._to(x)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the call."""
        if self._to is None:
            return dict(options)
        changed = {name: self.array(x) if name in (*_SCORES, "out", "stats", "jvp") else x for name, x in options.items()}
        if self._to is _reversed:
            changed.pop("layout", None)
        return changed

    def results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """The results of the call, in the form of the first one."""
        if self._to is None:
            return dict(results)
        unchanged = [name for name in results if name == "dsinks" or "tensors" in name]
        return {name: x if name in unchanged else self._from(x) for name, x in results.items()}

    def __enter__(self) -> Form:
        self._context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._context.__exit__(*error)
