"""Run one case in this process and compare every result of every call."""

from __future__ import annotations

import importlib
import traceback
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupy_sdpa

from ..cases.case import Case
from ..cases.data import Data, build, call_options, dropout_options, dtype_of
from ..cases.memory import Memory, memory_of
from .oracle import Problem, Results, evaluate
from .outcome import Outcome
from .planning import plan
from .tolerance import compare, exact_places, floors

#: Which set of values each call in the same memory has. On the GPU the third call on the same addresses is recorded as a CUDA
#: graph, and later ones replay it.
SEQUENCE = {"gpu": (0, 1, 0, 1, 0, 1), "cpu": (0, 1, 0)}


@dataclass
class Expected:
    """What the results of one set of values must be near to."""

    problem: Problem
    truth: Results
    naive: Results
    floors: dict[str, float]
    exact: dict[str, Any] = field(default_factory=dict)


def expected(data: Data) -> Expected:
    """The truth, the naive computation, and the tolerances of one set of values."""
    problem = Problem(data)
    truth = evaluate(problem)
    naive = evaluate(problem, data.case.dtype, exact=truth)
    return Expected(problem, truth, naive, floors(problem, truth), exact_places(problem, truth))


def wrong(wanted: Expected, results: dict[str, Any]) -> dict[str, str]:
    """What is wrong with results, by name."""
    case, found = wanted.problem.case, {}
    for name, actual in results.items():
        if wanted.truth.kinked and name not in ("out", "stats", "max", "sum_exp", "dv"):
            continue  # the derivative of the score function has no value here
        if name not in wanted.truth.values:  # the gradient of an array that only a mask function reads
            if np.any(np.asarray(actual) != 0):
                found[name] = f"{name} is not 0, and the scores do not depend on it"
            continue
        truth, naive = wanted.truth.values[name], wanted.naive.values[name]
        exact = None if "tensors" in name else wanted.exact.get(name)
        if message := compare(name, np.asarray(actual), truth, naive, wanted.floors[name], exact):
            found[name] = message
        kind = actual.dtype
        if name in ("out", "dq", "dk", "dv") and kind != dtype_of(case.dtype):
            found[name] = f"{name} is {kind}, expected {case.dtype}"
    return found


class Run:
    """The calls of one case on numpy or CuPy arrays.

    Args:
        case: what to run.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.outcome = case, Outcome()
        self.xp = importlib.import_module("cupy") if case.engine == "gpu" else np
        self.data = (build(case, 0), build(case, 1))
        self.expected: dict[int, Expected] = {}
        #: With deterministic=True, the results of the first call on each set of values.
        self.first: dict[int, dict[str, Any]] = {}

    def run(self) -> Outcome:
        """Make all calls; gives what they came to."""
        memory, sequence = self.memory(), SEQUENCE[self.case.engine]
        for number, which in enumerate(sequence):
            self.load(memory, which)
            inputs = {name: memory.on_host(name) for name in memory.views} if number == len(sequence) - 1 else {}
            results = self.call(memory, which)
            if not self.holds(results, which, f"call {number + 1}"):
                return self.outcome
            for name, before in inputs.items():
                if name not in RESULTS and not np.array_equal(before, memory.on_host(name)):
                    return self.found("wrong", f"the call changed its input {name}", name)
            for name in set(memory.views) & set(RESULTS):
                if memory.surroundings_changed(name):
                    return self.found("wrong", f"the call wrote beside {name}", name)
            results.clear()  # so that the next call's results may have the same addresses
        memory = self.memory()
        self.load(memory, 1)
        self.holds(self.other_call(memory), 1, "the call at other addresses")
        return self.outcome

    def memory(self) -> Memory:
        """The arrays of the case, full of NaN."""
        case = self.case
        names = ["q", "k", "v", *(["dout"] if case.backward else [])]
        if "preallocated" in case.options:
            names += RESULTS if case.backward else ("out", *(["stats"] if "stats" in case.options else []))
        return memory_of(case, self.xp, names)

    def load(self, memory: Memory, which: int) -> None:
        """Copy a set of values into the arrays; results become NaN."""
        data = self.data[which]
        arrays = {name: x for name, x in data.arrays.items() if name != "dout" or self.case.backward}
        memory.load(arrays | {f"tensors/{name}": x for name, x in data.tensors.items()})
        for name in set(memory.views) & set(RESULTS):
            memory.poison(name)

    def options(self, memory: Memory, which: int) -> dict[str, Any]:
        """The options of the forward call."""
        tensors = {name[8:]: x for name, x in memory.views.items() if name.startswith("tensors/")}
        return call_options(self.case, memory.views, tensors, which)

    def call(self, memory: Memory, which: int) -> dict[str, Any]:
        """Both passes, by the plain functions."""
        views, options = memory.views, self.options(memory, which)
        into = {name: views[name] for name in ("out", "stats") if name in views}
        results = self.forward(cupy_sdpa.attention, memory, options | into)
        if not self.case.backward:
            return results
        options |= {name: views[name] for name in ("dq", "dk", "dv") if name in views} | self.gradients
        self.outcome.calls += 1
        q, k, v = (views[name] for name in "qkv")
        got = cupy_sdpa.attention_backward(views["dout"], q, k, v, results["out"], results["stats"], **options)
        return results | self.named(got)

    def other_call(self, memory: Memory) -> dict[str, Any]:
        """The same by :func:`cupy_sdpa.attention_vjp` or :func:`cupy_sdpa.prepare`."""
        views, options = memory.views, self.options(memory, 1)
        q, k, v = (views[name] for name in "qkv")
        if self.case.backward:
            self.outcome.calls += 2
            out, pullback = cupy_sdpa.attention_vjp(q, k, v, **options, **self.gradients)
            return {"out": out} | self.named(pullback(views["dout"]))

        def prepared(*arrays: Any, out: Any = None, **options: Any) -> Any:
            return cupy_sdpa.prepare(*arrays, **options)(*arrays, out=out)

        # Prepared calls are for one layout of the result, the dense one.
        into = {"out": views["out"]} if "out" in views and "out" not in self.case.layouts else {}
        return self.forward(prepared, memory, options | into)

    def forward(self, function: Any, memory: Memory, options: dict[str, Any]) -> dict[str, Any]:
        """The forward pass; the gradients need the log-sum-exp."""
        q, k, v = (memory.views[name] for name in "qkv")
        stats: Any = self.case.options.get("stats", self.case.backward)
        self.outcome.calls += 1
        asked = self.exact | ({"return_stats": stats} if stats else {})
        got = function(q, k, v, **asked, **options)
        return dict(zip(("out", "stats", "max", "sum_exp"), got if isinstance(got, tuple) else (got,), strict=False))

    @property
    def exact(self) -> dict[str, Any]:
        """The option ``deterministic``, of both passes."""
        return {"deterministic": True} if "deterministic" in self.case.options else {}

    @property
    def gradients(self) -> dict[str, Any]:
        """The options of the backward pass that the forward pass does not have, and ``deterministic``."""
        names = ("return_dbias", "return_dsinks", "return_dtensors")
        return self.exact | {name: True for name in names if name in self.case.options}

    def named(self, got: tuple[Any, ...]) -> dict[str, Any]:
        """The gradients by name."""
        more = [name for name in ("dbias", "dsinks") if f"return_{name}" in self.case.options]
        results = dict(zip(("dq", "dk", "dv", *more), got, strict=False))
        if "return_dtensors" in self.case.options:
            results |= {f"tensors[{name!r}]": array for name, array in got[-1].items()}
        return results

    def holds(self, results: dict[str, Any], which: int, when: str) -> bool:
        """Whether results are right; what is not goes into the outcome."""
        # Copying to the host waits for the GPU, so errors of kernels appear here.
        host = {name: x if isinstance(x, np.ndarray) else x.get() for name, x in results.items()}
        messages = wrong(self.expectation(which), host)
        if "deterministic" in self.case.options:
            first = self.first.setdefault(which, {name: x.copy() for name, x in host.items()})
            for name, x in host.items():
                if x.tobytes() != first[name].tobytes() and name not in messages:
                    messages[name] = f"deterministic=True, and the bits of {name} differ from those of an earlier call"
        if messages:
            self.found("wrong", f"{when}: {'; '.join(messages.values())}", ", ".join(messages))
        return not messages

    def found(self, kind: str, message: str, what: str) -> Outcome:
        """Note a finding."""
        self.outcome.kind, self.outcome.message, self.outcome.what = kind, message, what
        return self.outcome

    def expectation(self, which: int) -> Expected:
        """What results must be near to; dropout's mask is asked of the engine."""
        if which not in self.expected:
            data, dropout = self.data[which], self.case.options.get("dropout")
            if dropout and dropout[1] != "mask":
                data.keep = self.dropout_mask(which)
            self.expected[which] = expected(data)
        return self.expected[which]

    def dropout_mask(self, which: int) -> Any:
        """Which weights the engine keeps."""
        memory = self.memory()
        self.load(memory, which)
        views = memory.views
        names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv")
        options = {name: x for name, x in self.options(memory, which).items() if name in names}
        options |= dropout_options(self.case, views, which)
        self.outcome.calls += 1
        q, k = (self.bucketed(name, views[name]) for name in "qk")
        kept = cupy_sdpa.dropout_mask(q, k, **options)
        return (kept if isinstance(kept, np.ndarray) else kept.get())[: self.case.skv, : self.case.sq]

    def bucketed(self, name: str, array: Any) -> Any:
        """An array as long as ``bucket`` makes it: the random numbers of dropout follow from the padded lengths."""
        bucket = self.case.options.get("bucket")
        d, heads, length, *batch = array.shape
        if bucket is None or not batch or (name == "q" and length == 1):  # of packed sequences only the bounds are rounded
            return array
        wide = max(64, 1 << (length - 1).bit_length()) if bucket == "power_of_two" else -(-length // bucket) * bucket
        return self.xp.zeros((d, heads, wide, *batch), array.dtype, order="F")

    def refusal(self) -> list[str]:
        """The documented reasons against the case, as ``explain`` gives them; empty where it has none."""
        memory = self.memory()
        self.load(memory, 0)
        options, views = self.options(memory, 0), memory.views
        stats = self.case.options.get("stats", self.case.backward)
        q, k, v = (views[name] for name in "qkv")
        into: dict[str, Any] = {name: views[name] for name in ("out", "stats") if name in views}
        reports = [cupy_sdpa.explain(q, k, v, return_stats=stats, **options, **into, **self.exact)]
        if self.case.backward:
            options |= {name: views[name] for name in ("dout", *RESULTS) if name in views} | self.gradients
            reports.append(cupy_sdpa.explain(q, k, v, backward=True, **options))
        return [str(reason) for report in reports for reason in report.reasons]


#: The results that may be given.
RESULTS = ("out", "stats", "dq", "dk", "dv")


def execute(case: Case) -> Outcome:
    """Run a case in this process; a death of the process is for the caller to see."""
    this = Run(case)
    try:
        return plan(case, this.outcome) if case.engine == "plan" else this.run()
    except cupy_sdpa.Unsupported as error:
        return this.found("refused", str(error).splitlines()[0], "Unsupported")
    except Exception as error:  # every other one is a finding
        if isinstance(error, (TypeError, ValueError)) and case.engine == "gpu" and (reasons := _reasons(this)):
            return this.found("refused", reasons[0], type(error).__name__)
        this.outcome.fatal = case.engine == "gpu" and not isinstance(error, (TypeError, ValueError))
        return this.found("exception", *_described(error))


def _reasons(this: Run) -> list[str]:
    try:
        return this.refusal()
    except Exception:  # the arguments are refused as such, which draws are not meant to be
        return []


def _described(error: Exception) -> tuple[str, str]:
    """An exception on one line, and its type and where it was raised."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{type(error).__name__} at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return f"{what}: {' '.join(str(error).split())[:400]}", what
