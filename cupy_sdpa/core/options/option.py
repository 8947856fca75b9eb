"""A row of the table of options, and what an option reads to change the scores."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from ..score_fn.proxy import Value
from ..score_fn.tracer import FunctionTracer
from .band import Band
from .values import is_one_of

#: What the parts of a call get if a function splits it, such as the methods of a group and ``weight_sums``: the ``"same"``
#: value, the elements of the part (``"sliced"``), or what the function decides (``"call"``), as for masks of bands and packed
#: sequences. Without a value (``""``) such functions do not take the option.
PartsOption = Literal["", "same", "sliced", "call"]
#: The functions that take only a few options; an option lists the functions that take it in ``taken``.
OF_FEW_OPTIONS = ("shared_prefix_attention", "widen")
#: The functions that split a call into calls on parts of the sequences; ``ContextParallel`` stands for its methods. They only
#: take options whose rows say what a part gets.
OF_PARTS = ("weight_sums", "weight_sums_problems", "ContextParallel")
_NO_PARTS = "the call is split into parts of the sequences, and what a part of this option is was not defined: omit it"


@dataclass(frozen=True)
class ScoreInputs:
    """What an option reads to change the scores.

    It has no indices, because a call may compute a part of the sequences: only distances from the diagonal do not depend on it.

    Attributes:
        tracer: records the operations.
        band: the band of keys, or None.
        distance: returns the key on the diagonal of each query minus the key; only for options of the ``diagonal``.
        may_mask: whether a score function may have masked a score by a low number.
    """

    tracer: FunctionTracer
    band: Band | None
    distance: Callable[[], Value]
    may_mask: bool

    def number(self, name: str) -> Value:
        """Return the option's value, which is passed by value."""
        return Value(self.tracer, self.tracer.writer.leaf("number", name))

    def array(self, name: str) -> Value:
        """Return the element of the option's array for each score."""
        return Value(self.tracer, self.tracer.writer.leaf("captured", name))

    def constant(self, value: float) -> Value:
        """Return a number that is part of the plan."""
        return Value(self.tracer, self.tracer.writer.constant(value))


class CpuOnly(NamedTuple):
    """Why an option is not supported with cuDNN, such as results that were not compared on a GPU.

    Attributes:
        rule: one sentence for the support table.
        instead: the end of the message, after "because": the reason, and what to pass instead.
    """

    rule: str
    instead: str


def _value(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Option:
    """One option of a call. Every option is part of the key of a repeated call.

    Attributes:
        name: the keyword.
        group: a key of :data:`.table.GROUPS`.
        default: the value of a call without it.
        axes, dtype: an array's axes and dtype, as in :class:`.core.problem.arrays.ArrayRow`; empty for other options.
        read: reads the value from the options of a call. None: the array is all there is to read, another option reads it, or
            it does not take part in the problem.
        part: the attribute of a problem that tells of it; ``settings.`` and a field if it is read into the settings. Default:
            the array.
        plan_of: returns what the plan depends on; by default the value itself.
        by_value: whether every execution gets the value as a scalar, so that a new value needs no new plan.
        phrase: how a problem with it is described, a format of ``value``.
        weights: whether it changes the weights of the keys that the band and the lengths leave. FP8 kernels compute no such
            option, and keys in pages are not split with it, except with ``split``.
        split: whether keys in pages are split with it.
        diagonal: whether it measures positions from the diagonal.
        blocks: whether the blocks of a block mask are computed with it; with other options the mask becomes dense.
        parts: how a function that splits a call gives it to the calls on the parts, see :data:`PartsOption`.
        cpu_only: why cuDNN does not compute it; None if it does.
        refused: the functions that do not take it, and what to do instead; empty if another error says it.
        taken: the functions that take it although they take few options (:data:`OF_FEW_OPTIONS`).
    """

    name: str
    group: str
    default: Any = None
    axes: str = ""
    dtype: str = ""
    read: Callable[[Mapping[str, Any]], Any] | None = None
    part: str = ""
    plan_of: Callable[[Any], Any] = _value
    by_value: bool = False
    phrase: str = ""
    weights: bool = False
    split: bool = False
    diagonal: bool = False
    blocks: bool = False
    parts: PartsOption = ""
    cpu_only: CpuOnly | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    taken: tuple[str, ...] = ()

    @functools.cached_property
    def setting(self) -> str:
        """The field of the settings that it is read into; empty if it has no field."""
        return self.part.partition("settings.")[2]

    @property
    def plan_depends_on(self) -> str:
        """What a plan depends on, in words; empty if the option is only part of the key of a repeated call."""
        if self.by_value:
            return "whether it is given" if self.phrase else "its sign"
        if self.setting:
            return "its value"
        if self.part.startswith("has_"):
            return "its operations"
        return "its shape and dtype" if self.axes or self.part else ""

    @functools.cached_property
    def of(self) -> Callable[[Any], Any]:
        """Return what a problem has of the option: an array, or the value of a setting; None or False without it."""
        path = self.part or (self.name if self.axes else "")
        return operator.attrgetter(path) if path else lambda problem: None

    def refusal(self, function: str) -> str | None:
        """Return None if a public function takes the option; otherwise what to do instead, which may be an empty string.

        >>> option = Option("sinks", "sinks", refused={"weight_sums": "use another function"})
        >>> option.refusal("weight_sums"), option.refusal("attention_vjp")
        ('use another function', None)
        """
        if function in OF_FEW_OPTIONS:
            return None if function in self.taken else ""
        without_parts = _NO_PARTS if function in OF_PARTS and not self.parts else None
        return self.refused.get(function, without_parts)

    def is_passed(self, value: Any) -> bool:
        """True if a value differs from the option's default."""
        without = self.default is not None and is_one_of(value, (self.default,))
        return value is not None and value is not False and not without
