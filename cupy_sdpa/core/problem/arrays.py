"""A table of a call's arrays, with their axes, dtypes and roles: checks, layouts, slices and results follow from it.

The rows of options come from :data:`.core.options.table.OPTIONS`.

Axes are written with the letters of :mod:`.core.problem.problem`. Packed arrays with the axis Sq or Skv, but not both, have
other axes: ``(D, Hq, Sq, B)`` is ``(D, Hq, Tq)``, and ``(Sq, Hq, B)`` is ``(Hq, Tq)``. With a page table the keys are
``(D, Hkv, page size, pages)``.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

from ..options.option import CpuOnly
from ..options.table import OPTIONS, SCORE_CHANGES
from ..score_fn.expression import is_captured

#: What an array is for: q, k and v; a result of the forward pass; the gradient of a result, which the backward pass gets; a
#: gradient, which it returns; an option; or a factor of FP8 arrays.
Role = Literal["input", "result", "cotangent", "gradient", "option", "factor"]


@dataclass(frozen=True)
class ArrayRow:
    """One array of a call.

    Attributes:
        name: the name of the argument or the result.
        axes: the letters of its axes, separated by spaces; ``1`` for a single number.
        dtype: a numpy dtype; ``"q"``, ``"k"``, ``"v"``, ``"bias"`` and ``"sinks"`` stand for that array's dtype;
            ``"statistics"`` is float32, and float64 for float64 arrays; ``"float32 or wider"`` is float32, for float64 arrays
            also float64; ``"float"`` is any float dtype of q.
        role: see :data:`Role`.
        of: the array that a gradient belongs to.
        request: the flag of the backward pass that requests a gradient; empty if it is always returned.
        cpu_only: why cuDNN does not compute a gradient; None if it does.
    """

    name: str
    axes: str
    dtype: str
    role: Role
    of: str = ""
    request: str = ""
    cpu_only: CpuOnly | None = None

    @functools.cached_property
    def letters(self) -> tuple[str, ...]:
        """The axes of dense arrays."""
        return tuple(self.axes.split())

    @functools.cached_property
    def packed(self) -> tuple[str, ...]:
        """The axes of packed sequences: the positions of all sequences follow one another along the last axis."""
        side = {"Sq", "Skv"} & {*self.letters}
        if len(side) != 1:
            return self.letters
        total = {"Sq": "Tq", "Skv": "Tkv"}[side.pop()]
        return (*(letter for letter in self.letters if letter not in ("Sq", "Skv", "B")), total)

    def legend(self, *, packed: bool = False) -> str:
        """Return the axes for messages and documentation.

        >>> ARRAYS["stats"].legend(), ARRAYS["stats"].legend(packed=True), ARRAYS["seed"].legend()
        ('(Sq, Hq, B)', '(Hq, Tq)', 'one number')
        """
        letters = self.packed if packed else self.letters
        if letters == ("1",):
            return "one number"
        return f"({', '.join(letters)}{',' * (len(letters) == 1)})"


_ROWS = (
    ArrayRow("q", "D Hq Sq B", "q", "input"),
    ArrayRow("k", "D Hkv Skv B", "q", "input"),
    ArrayRow("v", "Dv Hkv Skv B", "q", "input"),
    ArrayRow("out", "Dv Hq Sq B", "q", "result"),
    ArrayRow("stats", "Sq Hq B", "statistics", "result"),
    ArrayRow("max", "Sq Hq B", "statistics", "result"),
    ArrayRow("sum_exp", "Sq Hq B", "statistics", "result"),
    ArrayRow("rng_dump", "Skv Sq Hq B", "float32", "result"),
    ArrayRow("amax_out", "1", "float32", "result"),
    ArrayRow("dout", "Dv Hq Sq B", "q", "cotangent"),
    ArrayRow("dstats", "Sq Hq B", "statistics", "cotangent"),
    ArrayRow("dq", "D Hq Sq B", "q", "gradient", "q"),
    ArrayRow("dk", "D Hkv Skv B", "k", "gradient", "k"),
    ArrayRow("dv", "Dv Hkv Skv B", "v", "gradient", "v"),
    ArrayRow("dbias", "Skv Sq Hq B", "bias", "gradient", "bias", "return_dbias"),
    ArrayRow("dsinks", "Hq", "sinks", "gradient", "sinks", "return_dsinks"),
    *(ArrayRow(option.name, option.axes, option.dtype, "option") for option in OPTIONS.values() if option.axes),
    ArrayRow("descale_q", "1", "float32", "factor"),
    ArrayRow("descale_k", "1", "float32", "factor"),
    ArrayRow("descale_v", "1", "float32", "factor"),
    ArrayRow("scale_out", "1", "float32", "factor"),
)
#: The arrays by name. Arrays that score and mask functions read, and their gradients, have the row :data:`CAPTURED`.
ARRAYS = {row.name: row for row in _ROWS}
#: An array that a function reads: each axis has its full length or length 1.
CAPTURED = ArrayRow("tensors", "Skv Sq Hq B", "float", "option")


@functools.cache
def row_of(name: str) -> ArrayRow | None:
    """Return the row of an array; None for an array that does not belong to a call, such as offsets that a program computes."""
    return ARRAYS.get(name) or (CAPTURED if is_captured(name) else None)


def letters_of(name: str, *, packed: bool = False) -> tuple[str, ...]:
    """Return the axes of an array in letters; empty for an array that does not belong to a call.

    >>> letters_of("dv"), letters_of("dv", packed=True), letters_of("t0")
    (('Dv', 'Hkv', 'Skv', 'B'), ('Dv', 'Hkv', 'Tkv'), ('Skv', 'Sq', 'Hq', 'B'))
    """
    row = row_of(name)
    return () if row is None else row.packed if packed else row.letters


def has_score_axes(name: str) -> bool:
    """True if an array has the axes of the scores, ``(Skv, Sq, Hq, B)``; each axis has its full length or length 1."""
    return {"Skv", "Sq"} <= {*letters_of(name)}


def _with_role(role: Role) -> tuple[ArrayRow, ...]:
    return tuple(row for row in _ROWS if row.role == role)


#: The results of each pass in order: the forward pass's results, and the gradients.
RESULTS, GRADIENTS = _with_role("result"), _with_role("gradient")
#: The gradients that a flag requests, except the gradients of ``tensors``.
REQUESTED_GRADIENTS = tuple(row for row in GRADIENTS if row.request)
#: Those of arrays that change the scores: sums of dS times the derivative of the scores.
SCORE_GRADIENTS = tuple(row for row in REQUESTED_GRADIENTS if row.of in SCORE_CHANGES)
#: The flags of the backward pass that request gradients.
REQUESTS = (*(row.request for row in REQUESTED_GRADIENTS), "return_dscale", "return_dtensors")
#: The arrays of the forward pass, as for :func:`cupy_sdpa.attention`, and of the backward pass of one problem, in the order of
#: the cache key.
FORWARD = ("q", "k", "v", "out", "stats")
BACKWARD = ("dout", "q", "k", "v", "out", "stats", "dq", "dk", "dv")
#: The arrays of :func:`cupy_sdpa.attention_backward`, in the order of the cache key. The last is the log-sum-exp's gradient.
GRADIENT_ARRAYS = (*BACKWARD, "dstats")
#: The arrays that a forward pass with ``compute_dtype`` keeps, converted to it, for the gradients.
KEPT = ("q", "k", "v", "out")
#: The names of the options that are arrays.
OPTION_ARRAYS = tuple(row.name for row in _with_role("option"))
#: The factors of FP8 arrays: the values of q, k and v are their elements times ``descale_*``; ``scale_out`` times the output is
#: stored.
FP8_FACTORS = tuple(row.name for row in _with_role("factor"))
#: The options with the axes of the scores.
SCORE_INPUTS = tuple(name for name in OPTION_ARRAYS if has_score_axes(name))
#: The arrays with one row per query.
QUERY_ARRAYS = tuple(row.name for row in _ROWS if "Tq" in row.packed)
#: The arrays with one row per key.
KEY_ARRAYS = tuple(row.name for row in _ROWS if "Tkv" in row.packed)
#: The row statistics: results with one value per query and head.
ROW_STATS = tuple(row.name for row in _ROWS if row.dtype == "statistics")
#: The arrays with a head dim.
VECTORS = tuple(row.name for row in _ROWS if row.letters[0] in ("D", "Dv"))
#: The sequence lengths, and the cumulative lengths of packed sequences.
LENGTHS = tuple(row.name for row in _ROWS if row.letters == ("B",))
CU_SEQLENS = tuple(row.name for row in _ROWS if row.letters == ("B+1",))
#: The state of dropout's random number generator.
SEEDS = tuple(name for name in OPTION_ARRAYS if ARRAYS[name].letters == ("1",))
#: The integers whose values a call checks on the CPU.
INTEGERS = tuple(name for name in OPTION_ARRAYS if ARRAYS[name].dtype == "int32")
