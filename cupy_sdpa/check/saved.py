"""Saved problems as cases of the self-test: the same sizes, layouts and options, with random values.

A problem of a plan cache is the one that the engine runs, so a case is a call that leads to it: parts are undone, and what the
problem does not contain is drawn: the contents of arrays, lengths, page tables, and the values of scalars.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from .. import Problem
from .case import GRADIENTS, SIZES, Case, Dropout, Packed, Paged
from .sampler import Limits, within
from .weight_options import ROWS

#: The most scores of a problem that is verified; larger ones are verified with smaller sizes.
MAX_SCORES = 4_000_000
#: The value of a scale that is not positive.
_SCALE = -0.1


class NotRepeatableError(ValueError):
    """The self-test has no such problem; the message is the reason."""


def case_of(problem: Problem, engine: str, seed: int = 0) -> Case:
    """Return the case of a problem on an engine, with the seed of its values.

    Raises:
        NotRepeatableError: the self-test has no such problem.
    """
    settings = problem.settings
    options: dict[str, Any] = dict(_case_options(problem))
    sizes: dict[str, Any] = dict(zip(SIZES, problem.sizes, strict=True))
    dtype, layouts = problem.dtype, _layouts(problem)
    if problem.fp8:  # converted arrays are dense
        options["fp8"], dtype, layouts = problem.dtype, "bfloat16", {}
    if split := settings.split:  # the rows are queries, and the chunks of a sequence are one batch item
        rows = problem.q.shape[2]
        sizes |= {"hq": sizes["hkv"], "sq": rows, "b": sizes["b"] // split.chunks}
        sizes["skv"] = split.pages * split.chunks * problem.k.shape[2]
        options = {name: value for name, value in options.items() if name not in ("seq_lens_q", "stats")}
        options["paged"] = (*options["paged"][:3], split.chunks, *options["paged"][4:])
        layouts = {}
    return Case(engine, dtype, **sizes, backward=problem.backward, layouts=layouts, options=options, seed=seed)


def _case_options(problem: Problem) -> Iterator[tuple[str, Any]]:
    """Yield the options of the case."""
    settings = problem.settings
    if not settings.positive_scale:
        yield "scale", _SCALE
    if settings.max_workspace is not None:
        yield "max_workspace", settings.max_workspace
    if settings.deterministic and not settings.split:
        yield "deterministic", True
    if band := settings.band:
        corner = "bottom_right" if band.bottom_right else "top_left"
        yield ("causal", corner) if (band.left, band.right) == (None, 0) else ("window", (band.left, band.right, corner))
    yield from _array_options(problem)
    yield from _length_options(problem)
    if settings.dropout:
        source = "mask" if problem.dropout_mask else "array"
        yield "dropout", tuple(Dropout(settings.dropout, source, 1, 0))
    if expression := settings.expression:
        if expression.score is not None:
            yield "score_mod", _function(problem, expression.steps_of(expression.score))
        if expression.mask is not None:
            yield "mask_mod", _function(problem, expression.steps_of(expression.mask))
    if problem.max:
        yield "stats", "max_sumexp"
    elif problem.stats and not problem.backward:
        yield "stats", True


def _array_options(problem: Problem) -> Iterator[tuple[str, Any]]:
    """Yield the options that are arrays, and their gradients."""
    for name, row in ROWS.items():
        if (value := row.saved(problem)) is not None:
            yield name, value
    written = {spec.name for spec in problem.results}
    for request in GRADIENTS:
        if request.removeprefix("return_") in written:
            yield request, True
    if problem.dcaptured:
        yield "return_dtensors", True


def _length_options(problem: Problem) -> Iterator[tuple[str, Any]]:
    """Yield the options of batch items with different lengths."""
    if problem.paged:
        page, heads = problem.k.shape[2], problem.k.shape[1]
        _, of_heads, of_keys, _ = problem.k.strides
        order = "pages" if heads > 1 and of_heads > of_keys else "heads"
        yield "paged", tuple(Paged(page, order, "random", problem.settings.num_splits or 0, "large", False, False))
    if queries := problem.cu_seqlens_q:
        same = not problem.paged and problem.q.shape[2] == problem.k.shape[2]
        yield "packed", tuple(Packed("random", "same" if same else "random", 0, 0, 0, queries.dtype))
    elif problem.seq_lens_q:
        yield "seq_lens_q", "random"
    if problem.seq_lens_kv and not problem.paged:
        yield "seq_lens_kv", "random"


def _function(problem: Problem, steps: tuple[Any, ...]) -> tuple[str, str]:
    """Return a function as the text of its program, and the dtype of the arrays that it reads."""
    read = {step.name: step.kind for step in steps if step.mode == "captured"}
    specs = {spec.name: spec for spec in problem.captured if spec.name in read}
    # a GPU gets conditions as numbers
    dtypes = sorted({"bool" if read[spec.name] == "bool" else spec.dtype for spec in specs.values()})
    if len(dtypes) > 1:
        raise NotRepeatableError(f"a function reads arrays of several dtypes: {', '.join(dtypes)}")
    axes = {
        name: "".join(letter for letter, n in zip("kqhb", spec.shape, strict=True) if n > 1)[::-1] or "1"
        for name, spec in specs.items()
    }
    return json.dumps({"arrays": axes, "steps": [step.as_data() for step in steps]}), next(iter(dtypes), "")


def _layouts(problem: Problem) -> dict[str, str]:
    """Return the layouts of q, k, v and dout that are not dense."""
    specs = [problem.q, *([] if problem.paged else [problem.k, problem.v]), *([problem.dout] if problem.dout else [])]
    return {spec.name: _layout(spec.shape, spec.strides) for spec in specs if not spec.dense}


def _layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> str:
    """Return the order of the axes in memory, fastest first; ``+h`` means that h is a slice of a longer axis.

    >>> _layout((8, 2, 5, 1), (2, 80, 16, 160))
    'dshb'
    >>> _layout((8, 2, 5, 1), (2, 16, 96, 480))
    'dhsb+h'
    """
    letters = "dhsb"[: len(shape)]
    order = sorted(range(len(shape)), key=lambda axis: (abs(strides[axis]), axis) if shape[axis] > 1 else (1 << 62, axis))
    text, slices = "".join(letters[axis] for axis in order), ""
    for inner, outer in itertools.pairwise(order):
        if shape[outer] > 1 and abs(strides[outer]) != abs(strides[inner]) * shape[inner]:
            slices += f"+{letters[inner]}"
    return text + slices


def reduced(case: Case, most: int = MAX_SCORES) -> Case:
    """Return the case with about ``most`` scores or fewer, for the reference; Skv stays a multiple of the page size."""
    sizes, page = within({name: getattr(case, name) for name in SIZES}, Limits(most)), case.paged.page if case.paged else 1
    return case.with_(**sizes | {"skv": -(-sizes["skv"] // page) * page})
