"""The call of a traced problem on random arrays of its full size, to time it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa

from ..cases.case import Case, Packed, Paged
from ..cases.data import build, call_options
from ..cases.memory import memory_of, named_layout
from ..verify.routes import arrays_in_fp8
from .convert import case_of
from .entry import Entry

#: The floating-point operations of each function, relative to the forward pass. The forward pass has two matrix products, the
#: backward pass has five, and attention_jvp has nine: two forward passes and a backward pass.
OPERATIONS = {"attention": 1.0, "attention_backward": 2.5, "attention_jvp": 4.5}


class Replayed(NamedTuple):
    """A call that can be repeated.

    Attributes:
        run: makes the call.
        operations: its floating-point operations, with those of masked pairs left out for causal masks and windows.
        case: the sizes and options of the call.
    """

    run: Callable[[], Any]
    operations: float
    case: Case


def replayed(entry: Entry, engine: str) -> Replayed:
    """The call of a traced problem; sequences have their full lengths.

    Args:
        entry: the problem.
        engine: ``"gpu"`` for CuPy arrays, ``"cpu"`` for numpy arrays.

    Raises:
        NotReplayableError: the problem cannot be made again.
    """
    case = _full(case_of(entry, engine))
    xp = importlib.import_module("cupy") if engine == "gpu" else np
    data = build(case, 0)
    names = ["q", "k", "v", *(["dout"] if case.backward else []), *case.tangents.values()]
    memory = memory_of(case, xp, names)
    arrays = {name: x for name, x in data.arrays.items() if name != "dout" or case.backward}
    memory.load(arrays | {f"tensors/{name}": x for name, x in data.tensors.items()})
    views = memory.views
    tensors = {name.removeprefix("tensors/"): x for name, x in views.items() if name.startswith("tensors/")}
    options = call_options(case, views, tensors, 0) | named_layout(case)
    q, k, v = arrays_in_fp8(case, views) if "fp8" in case.options else [views[name] for name in "qkv"]
    flags: dict[str, Any] = {"deterministic": True} if "deterministic" in case.options else {}
    operations = 2.0 * case.b * case.hq * visible_pairs(case) * (case.d + case.dv) * OPERATIONS[entry.call]
    if entry.call == "attention_backward":
        out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **flags, **options)
        flags |= {name: True for name in ("return_dbias", "return_dsinks", "return_dtensors") if name in case.options}
        given = (views["dout"], q, k, v, out, stats)
        return Replayed(functools.partial(cupy_sdpa.attention_backward, *given, **flags, **options), operations, case)
    stats = case.options.get("stats", False)
    if entry.call == "attention_jvp":
        tangents = {name: views[other] for name, other in case.tangents.items()}
        call = functools.partial(cupy_sdpa.attention_jvp, q, k, v, return_stats=bool(stats), **tangents, **flags, **options)
        return Replayed(call, operations, case)
    return Replayed(functools.partial(cupy_sdpa.attention, q, k, v, return_stats=stats, **flags, **options), operations, case)


def _full(case: Case) -> Case:
    """The case with full sequence lengths."""
    options = dict(case.options)
    options |= {name: "full" for name in ("seq_lens_q", "seq_lens_kv") if name in options}
    if packed := case.packed:
        options["packed"] = tuple(Packed("full", "full", *packed[2:]))
    if paged := case.paged:
        options["paged"] = tuple(Paged(**{**paged._asdict(), "lengths": "full"}))
    return case.with_(options=options)


def visible_pairs(case: Case) -> int:
    """The pairs of a query and a key in the causal mask or the window.

    >>> visible_pairs(Case(sq=4, skv=4)), visible_pairs(Case(sq=4, skv=4, options={"causal": "top_left"}))
    (16, 10)
    """
    left, right, *corner = case.options.get("window", (None, None))
    causal = case.options.get("causal")
    shift = case.skv - case.sq if "bottom_right" in (causal, *corner) else 0
    diagonal = np.arange(case.sq) + shift
    last = np.full(case.sq, case.skv - 1) if right is None and not causal else diagonal + (0 if causal else right)
    first = np.zeros(case.sq, int) if left is None else diagonal - left
    return int(np.maximum(np.minimum(last, case.skv - 1) - np.maximum(first, 0) + 1, 0).sum())
