"""The same call in another form: without batch axes, or with a default layout in C order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from .. import layout
from .case import Case

#: Features whose calls take packed sequences, pages, FP8 arrays or a part of every sequence, or have no ``layout=``.
_OTHERS = frozenset(("packed", "paged", "cache", "fp8", "parallel", "weight_sums", "merge", "shared_prefix"))
#: The options and results with the axes of the scores or of the queries.
_ARRAYS = ("mask", "bias", "dropout_mask", "out", "stats", "jvp")


class Form(NamedTuple):
    """How a call is written. The arrays are the same memory in every form, so that the results have the same bits.

    Attributes:
        to: converts an array to the form.
        back: converts an array of the form back.
        layout: the default layout of the form; None for none.
    """

    to: Callable[[Any], Any]
    back: Callable[[Any], Any]
    layout: str | None = None

    def array(self, x: Any) -> Any:
        """An array of the call; None for None."""
        return None if x is None else self.to(x)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The options of the call."""
        kept = (name for name in options if name != "layout" or not self.layout)
        return {name: self.array(options[name]) if name in _ARRAYS else options[name] for name in kept}

    def results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """The results of the call in the form of the first one."""
        return {name: x if name == "dsinks" or "tensors" in name else self.back(x) for name, x in results.items()}

    def context(self) -> AbstractContextManager[Any]:
        """The context in which the call is made."""
        return layout.default(self.layout) if self.layout else contextlib.nullcontext()


#: The form of the first calls of a case.
GIVEN = Form(lambda x: x, lambda x: x)
WITHOUT_BATCH = Form(lambda x: x[..., 0], lambda x: x[..., None])
IN_C_ORDER = Form(lambda x: x.T, lambda x: x.T, "bshd")


def other_form(case: Case) -> Form:
    """The form of the last call of a case: without batch axes if there is one batch entry, else with a default layout."""
    if _OTHERS & case.options.keys():
        return GIVEN
    return WITHOUT_BATCH if case.b == 1 else IN_C_ORDER
