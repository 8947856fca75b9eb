"""The calls of a case: all passes by the functions of its features, and once more by other functions and in another form."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

import cupy_sdpa

from .. import layout
from .case import GRADIENTS, Case, Outcome
from .data import build, call_options, dense_shape, dropout_options
from .drawn_memory import DrawnMemory, fill_nan, memory_of, named_layout
from .formats import dtype_of
from .routes import arrays_in_fp8, as_numpy, filled_cache, forward_function, in_group, rotated_queries, with_tree

#: The results that may be preallocated.
RESULTS = ("out", "stats", "dq", "dk", "dv", "jvp")


class CallForm(NamedTuple):
    """How a call is written: how arrays are converted to the form and back, and its default layout, if it has one.

    The arrays are the same memory in every form, so that the results have the same bits.
    """

    to: Callable[[Any], Any]
    back: Callable[[Any], Any]
    layout: str | None = None

    def array(self, x: Any) -> Any:
        """Return an array of the call; None for None."""
        return None if x is None else self.to(x)

    def options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of the call; some have the axes of the scores or of the queries."""
        kept = (name for name in options if name != "layout" or not self.layout)
        arrays = ("mask", "bias", "dropout_mask")
        return {name: self.array(options[name]) if name in arrays else options[name] for name in kept}

    def results(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """Return the results of the call in the form of the first one."""
        return {name: x if "tensors" in name or x.ndim == 1 else self.back(x) for name, x in results.items()}

    def context(self) -> AbstractContextManager[Any]:
        """Return the context in which the call is made."""
        return layout.default(self.layout) if self.layout else contextlib.nullcontext()


#: The form of the first calls of a case.
GIVEN = CallForm(lambda x: x, lambda x: x)
WITHOUT_BATCH = CallForm(lambda x: x[..., 0], lambda x: x[..., None])
IN_C_ORDER = CallForm(lambda x: x.T, lambda x: x.T, "bshd")
#: Features whose calls take packed sequences, pages, FP8 arrays or a part of every sequence, or have no ``layout=``.
ONE_FORM = frozenset(("packed", "paged", "cache", "fp8", "parallel", "weight_sums", "weight_entropy", "merge", "shared_prefix"))


def other_form(case: Case) -> CallForm:
    """Return the form of the last call of a case: without batch axes if there is one batch item, else with a default layout."""
    if ONE_FORM & case.options.keys():
        return GIVEN
    return WITHOUT_BATCH if case.b == 1 else IN_C_ORDER


def _prepare_and_call(*arrays: Any, out: Any = None, **options: Any) -> Any:
    return cupy_sdpa.prepare(*arrays, **options)(*arrays, out=out)


class CaseRunner:
    """Makes the calls of one case on numpy or CuPy arrays, with two sets of values, and counts them.

    The options are :meth:`options`, ``deterministic``, and in the backward pass also ``backward_options``.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.count = case, 0
        self.xp = importlib.import_module("cupy") if case.engine in ("gpu", "cupy") else np
        self.data = (build(case, 0), build(case, 1))
        self.stats: Any = case.options.get("stats", case.backward)
        self.deterministic: dict[str, Any] = {"deterministic": True} if "deterministic" in case.options else {}
        self.backward_options = self.deterministic | {name: True for name in GRADIENTS if name in case.options}

    def allocate(self) -> DrawnMemory:
        """Allocate the arrays of the case, full of NaN."""
        case = self.case
        names = ["q", "k", "v", *(["dout"] if case.backward else []), *case.tangents.values()]
        if "preallocated" in case.options:
            results = RESULTS[:-1] if case.backward else ("out", *(["stats"] if "stats" in case.options else []))
            names += [*results, *(["jvp"] if case.tangents else [])]
        return memory_of(case, self.xp, names)

    def load(self, memory: DrawnMemory, index: int) -> None:
        """Copy a set of values into the arrays, and fill preallocated results with NaN."""
        data = self.data[index]
        arrays = {name: x for name, x in data.arrays.items() if name != "dout" or self.case.backward}
        memory.load(arrays | {f"tensors/{name}": x for name, x in data.tensors.items()})
        for name in set(memory.views) & set(RESULTS):
            fill_nan(memory.views[name])

    def options(self, memory: DrawnMemory, index: int) -> dict[str, Any]:
        """Return the options of the forward call."""
        tensors = {name.removeprefix("tensors/"): x for name, x in memory.views.items() if name.startswith("tensors/")}
        options = call_options(self.case, memory.views, tensors, index)
        if not self.case.cache:
            options = with_tree(self.case, self.data[index], memory.views["k"], options, self.xp)
        return options | named_layout(self.case) | ({} if self.block_mask is None else {"block_mask": self.block_mask})

    @functools.cached_property
    def block_mask(self) -> Any:
        """The block mask of the case; None without one."""
        attends, case = self.data[0].attends, self.case
        if "block_mask" not in case.options:
            return None
        if 0 in attends.shape[2:]:  # a block mask has at least one head and one batch item
            attends = np.zeros((*attends.shape[:2], 1, 1), bool)
        heads, entries = attends.shape[2] > 1, attends.shape[3] > 1

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, attends: Any) -> Any:
            return attends[kv_idx, q_idx, h if heads else 0, b if entries else 0]

        groups: dict[str, Any] = {"heads": case.hq if heads else None, "batch": case.b if entries else None}
        return cupy_sdpa.block_mask(mask_mod, case.sq, case.skv, tensors={"attends": attends}, **groups)

    def call(self, memory: DrawnMemory, index: int, form: CallForm = GIVEN, *, again: bool = False) -> dict[str, Any]:
        """Make the calls of all passes, and return the results by name.

        ``again``: by other functions, which are ``attention_vjp``, ``prepare``, and ``widen`` before a derivative.
        """
        case, views = self.case, memory.views
        options = form.options(self.options(memory, index))
        q, k, v = (form.array(views[name]) for name in "qkv")
        names = () if again and (case.tangents or "out" in case.layouts) else ("out",) if again else ("out", "stats")
        given = {name: form.array(views[name]) for name in names if name in views}  # prepared calls accept only dense outputs
        if case.tangents:
            return self._derivative(memory, options | given, form, widen=again)
        if "weight_sums" in case.options:
            self.count += 1
            per_kv_head = case.options["weight_sums"] == "key heads"
            return {"weights": cupy_sdpa.weight_sums(q, k, per_kv_head=per_kv_head, **options)}
        if "weight_entropy" in case.options:
            self.count += 1
            return {"entropy": cupy_sdpa.weight_entropy(q, k, **options)}
        if "parallel" in case.options:
            self.count += 1 + case.backward
            return in_group(case, views, options, self.backward_options if case.backward else {}, vjp=again)
        if again and case.backward:
            self.count += 2
            flags = self.backward_options | ({"return_stats": True} if "dstats" in case.options else {})
            out, pullback = cupy_sdpa.attention_vjp(q, k, v, **options, **flags)
            gradients = pullback(*self.cotangents(memory, form))
            returned = out if "dstats" in case.options else (out,)
            return dict(zip(("out", "stats"), returned, strict=False)) | self.gradients_by_name(gradients)
        prepared = again and not {"shared_prefix", "merge", "cache"} & case.options.keys()  # calls of another function
        function = _prepare_and_call if prepared else forward_function(case)
        results = self.forward(function, memory, options | given, index, form)
        if case.backward:
            self.count += 1
            options |= {name: views[name] for name in ("dq", "dk", "dv") if name in views} | self.backward_options
            dout, *of_stats = self.cotangents(memory)
            options |= dict(zip(("dstats",), of_stats, strict=False))
            gradients = cupy_sdpa.attention_backward(dout, q, k, v, results["out"], results["stats"], **options)
            results |= self.gradients_by_name(gradients)
        return results

    def cotangents(self, memory: DrawnMemory, form: CallForm = GIVEN) -> list[Any]:
        """Return the gradients of the output and, if the case has it, of the log-sum-exp."""
        of_stats = self.case.options.get("dstats")
        dout = None if of_stats == "alone" else form.array(memory.views["dout"])
        return [dout] if of_stats is None else [dout, form.array(memory.views["dstats"])]

    def _derivative(self, memory: DrawnMemory, options: dict[str, Any], form: CallForm, *, widen: bool) -> dict[str, Any]:
        """Call :func:`cupy_sdpa.attention_jvp`, or :func:`cupy_sdpa.widen` before it."""
        views, stats, array = memory.views, "stats" in self.case.options, form.array
        q, k, v = (array(views[name]) for name in "qkv")
        given: dict[str, Any] = {name: array(views[other]) for name, other in self.case.tangents.items()} | self.deterministic
        self.count += 1
        if widen:
            given = {"widened": cupy_sdpa.widen(q, k, v, **given, **options)} | self.deterministic
        given |= {"dout": array(views.get("jvp")), "return_stats": stats, "return_dstats": stats}
        results = cupy_sdpa.attention_jvp(q, k, v, **given, **options)
        return dict(zip(("out", "jvp", "stats", "dstats"), results, strict=False))

    def forward(
        self, function: Any, memory: DrawnMemory, options: dict[str, Any], index: int, form: CallForm = GIVEN
    ) -> dict[str, Any]:
        """Call a forward function; with gradients it also returns the log-sum-exp."""
        case, data, views = self.case, self.data[index], memory.views
        in_fp8 = "fp8" in case.options
        q, k, v = arrays_in_fp8(data, views, self.xp) if in_fp8 else (form.array(views[name]) for name in "qkv")
        if case.cache:
            cache = filled_cache(case, data, self.xp)
            q, k, v = rotated_queries(case, data, q, cache, self.xp), cache.keys(1), cache.values(1)
            options = options | {"page_table": cache.table, "seq_lens_kv": cache.lengths}
            options = with_tree(case, data, k, options, self.xp)
        self.count += 1
        returned = function(q, k, v, **self.deterministic, **({"return_stats": self.stats} if self.stats else {}), **options)
        results = returned if isinstance(returned, tuple) else (returned,)
        if in_fp8:
            results = (results[0].dequantize("float32").astype(dtype_of(case.dtype)), *results[1:])
        return dict(zip(("out", "stats", "max", "sum_exp"), results, strict=False))

    def gradients_by_name(self, gradients: tuple[Any, ...]) -> dict[str, Any]:
        """Return the results of a backward call by name."""
        optional = [
            name.removeprefix("return_") for name in GRADIENTS if name in self.case.options and name != "return_dtensors"
        ]
        results = dict(zip(("dq", "dk", "dv", *optional), gradients, strict=False))
        if "return_dtensors" in self.case.options:
            results |= {f"tensors[{name!r}]": array for name, array in gradients[-1].items()}
        return results

    def reports(self, memory: DrawnMemory, index: int) -> list[Any]:
        """Return what ``explain`` says about each pass."""
        options, views = self.options(memory, index), memory.views
        q, k, v = (views[name] for name in "qkv")
        if self.case.tangents:
            options |= {name: views[other] for name, other in self.case.tangents.items()}
            return [cupy_sdpa.explain(q, k, v, jvp=True, return_stats=self.stats, **options, **self.deterministic)]
        given: dict[str, Any] = {name: views[name] for name in ("out", "stats") if name in views}
        reports = [cupy_sdpa.explain(q, k, v, return_stats=self.stats, **options, **given, **self.deterministic)]
        if self.case.backward:
            options |= {name: views[name] for name in ("dout", "dstats", *RESULTS) if name in views} | self.backward_options
            reports.append(cupy_sdpa.explain(q, k, v, backward=True, **options))
        return reports

    def dropout_mask(self, index: int) -> Any:
        """Return the weights that the engine keeps, ``(Skv, Sq, Hq, B)``."""
        case, memory = self.case, self.allocate()
        self.load(memory, index)
        names = {"cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "bucket", "layout", "engine"}
        q, k = memory.views["q"], memory.views["k"]
        if case.paged:  # the random numbers are drawn as for dense arrays
            names, dense = {"engine"}, case.without("packed")
            q, k = (self.xp.zeros(dense_shape(dense, name), dtype_of(case.dtype), order="F") for name in "qk")
        options = {name: x for name, x in self.options(memory, index).items() if name in names}
        self.count += 1
        return as_numpy(cupy_sdpa.dropout_mask(q, k, **options, **dropout_options(case, memory.views, index)))


# Planning with the real cuDNN for a described GPU, without executing

#: Part of the reason of a report if a problem ended the process.
_CRASHED = "ended the process inside cuDNN"


def plan(case: Case, outcome: Outcome) -> None:
    """Plan both passes, and set the outcome. A report with neither a plan nor reasons is a finding."""
    for problem in problems(case):
        report = cupy_sdpa.explain(problem, gpu=case.gpu)
        for launch in report.launches or (report,):
            outcome.calls += not launch.problem.trivial
            if launch.reasons:
                kind = "crash" if _CRASHED in launch.reasons[0] else "refused"
                outcome.set(kind, " ".join(launch.reasons[0].split())[:400], "planning")
                return
            if not launch.plan and not launch.problem.trivial:
                outcome.set("exception", f"there is neither a plan nor a reason: {launch.problem}", "planning")
                return


def problems(case: Case) -> list[Any]:
    """Return the problem of each pass of a case."""
    data, memory = build(case, 0), memory_of(case, np, "qkv")
    table = {"page_table": memory.views["page_table"]} if case.paged else {}  # a part of a larger array, as in a call
    q, k, v = (memory.views[name] for name in "qkv")
    options = with_tree(case, data, k, call_options(case, data.arrays | table, data.tensors, 0), np)
    stats = case.options.get("stats", case.backward)
    if "deterministic" in case.options:
        options["deterministic"] = True
    if case.tangents:
        return list(cupy_sdpa.jvp_problems(q, k, v, tangents=list(case.tangents), return_stats=stats, **options))
    if "weight_sums" in case.options:
        return list(cupy_sdpa.weight_sums_problems(q, k, **options))
    if "weight_entropy" in case.options:
        return [cupy_sdpa.problem(q, k, k, return_stats=True, **options)]
    if "fp8" in case.options:
        stats = stats or "mean" in case.options
        return [cupy_sdpa.problem(q.shape, k.shape, v.shape, dtype=case.options["fp8"], return_stats=stats, **options)]
    both = [cupy_sdpa.problem(q, k, v, return_stats=stats, **options)]
    if case.backward:
        options |= {name: True for name in (*GRADIENTS, "dstats") if name in case.options}
        both.append(cupy_sdpa.problem(q, k, v, backward=True, **options))
    return both
