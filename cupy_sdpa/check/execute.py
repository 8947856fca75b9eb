"""Run one case in this process and compare every result of every call."""

from __future__ import annotations

import functools
import importlib
import traceback
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_sdpa

from ..tolerance import compare
from .case import Case
from .data import Data, build, call_options, dropout_options, dtype_of
from .drawn_memory import Memory, memory_of, named_layout
from .forms import GIVEN, Form, other_form
from .inputs import Inputs
from .oracle import Results, evaluate
from .outcome import Outcome
from .planned import plan
from .routes import arrays_in_fp8, filled_cache, forward_function, in_group, rotated_queries, with_tree, wrong_scale
from .tolerances import exact_elements, rounding_floors

#: The set of values of each call on the same memory. On the GPU the third call with the same addresses is captured as a CUDA
#: graph, and later ones replay it.
SEQUENCE = {"gpu": (0, 1, 0, 1, 0, 1), "cpu": (0, 1), "cupy": (0, 1)}
#: The same for calls whose bits are compared.
SEQUENCE_OF_BITS = SEQUENCE | {"cpu": (0, 1, 0), "cupy": (0, 1, 0)}
#: The results that may be preallocated.
RESULTS = ("out", "stats", "dq", "dk", "dv", "jvp")
#: The results that do not depend on the derivative of the score function.
WITHOUT_SCORE_DERIVATIVE = ("out", "stats", "max", "sum_exp", "weights", "dv")
#: The options of cases whose sequences are also computed alone, those of them with an element for each sequence, and the
#: results that are compared.
WITH_BITS_ALONE = {
    "scale", "causal", "window", "mask", "bias", "seq_lens_q", "seq_lens_kv", "alibi_slopes", "softcap", "sinks", "stats",
    "deterministic", "preallocated", "max_workspace", "return_dbias", "return_dsinks",
}  # fmt: skip
PER_ENTRY = ("mask", "bias", "seq_lens_q", "seq_lens_kv")
ALONE = ("out", "stats", "max", "sum_exp", "dq", "dk", "dv")
#: The options that select additional gradients.
GRADIENT_OPTIONS = ("return_dbias", "return_dsinks", "return_dtensors")


@dataclass
class Expected:
    """The expected results of one set of values.

    Attributes:
        inputs: the values.
        truth: the results in float64.
        naive: the results of a naive computation in the precision of the arrays.
        floors: the error that rounding may cause, by result.
        exact: which elements must equal the truth, by result.
    """

    inputs: Inputs
    truth: Results
    naive: Results
    floors: dict[str, float]
    exact: dict[str, Any]


def expected(data: Data) -> Expected:
    """Compute the expected results of one set of values."""
    inputs = Inputs(data)
    truth = evaluate(inputs)
    naive = evaluate(inputs, data.case.dtype, truth=truth)
    return Expected(inputs, truth, naive, rounding_floors(inputs, truth), exact_elements(inputs, truth))


def find_errors(wanted: Expected, results: dict[str, Any]) -> dict[str, str]:
    """The error messages of wrong results, by name."""
    case, errors = wanted.inputs.case, {}
    for name, actual in results.items():
        if wanted.truth.nondifferentiable and name not in WITHOUT_SCORE_DERIVATIVE:
            continue
        if name not in wanted.truth.values:  # the gradient of an array that only a mask function reads
            if np.any(np.asarray(actual) != 0):
                errors[name] = f"{name} is not 0, but the scores do not depend on it"
            continue
        truth, naive = wanted.truth.values[name], wanted.naive.values[name]
        exact = None if "tensors" in name else wanted.exact.get(name)
        if message := compare(name, np.asarray(actual), truth, naive, wanted.floors[name], exact):
            errors[name] = message
        if name in ("out", "dq", "dk", "dv", "jvp") and actual.dtype != dtype_of(case.dtype):
            errors[name] = f"{name} is {actual.dtype}, expected {case.dtype}"
    return errors


def _prepare_and_call(*arrays: Any, out: Any = None, **options: Any) -> Any:
    return cupy_sdpa.prepare(*arrays, **options)(*arrays, out=out)


class CaseRunner:
    """Makes the calls of one case on numpy or CuPy arrays.

    Args:
        case: the case to run.
    """

    def __init__(self, case: Case) -> None:
        self.case, self.outcome = case, Outcome()
        self.xp = importlib.import_module("cupy") if case.engine in ("gpu", "cupy") else np
        self.data = (build(case, 0), build(case, 1))
        self.expected: dict[int, Expected] = {}
        #: With deterministic=True or num_splits: the results of the first call, by set of values.
        self.first_results: dict[int, dict[str, Any]] = {}

    def run(self) -> Outcome:
        """Make all calls, until one is wrong."""
        memory = self.allocate()
        engine = "cpu" if "parallel" in self.case.options else self.case.engine  # the members of a group repeat their calls
        sequence = (SEQUENCE_OF_BITS if self.reproducible else SEQUENCE)[engine]
        for number, index in enumerate(sequence, 1):
            self.load(memory, index)
            inputs = {name: memory.host_bits(name) for name in memory.views} if number == len(sequence) else {}
            results = self.call(memory, index)
            results |= {name: memory.views[name] for name in results if name in RESULTS and name in memory.views}
            if not self.check_results(results, index, f"call {number}") or not self.check_memory(memory, inputs):
                return self.outcome
            if number == len(sequence) and not self.check_alone(memory, results, index):
                return self.outcome
            results.clear()  # allows the next call's results to have the same addresses
        memory = self.allocate()
        self.load(memory, 1)
        # with attention_vjp cuDNN writes the log-sum-exp; the calls before computed it from max and sum_exp: other bits
        same_bits = self.case.options.get("stats") != "max_sumexp"
        self.check_results(self.call_alternative(memory), 1, "the call at other addresses", same_bits=same_bits)
        if "fp8" in self.case.options and not self.outcome.is_finding and (message := wrong_scale(self.data[1], memory.views)):
            self.outcome.set("wrong", message, "scale")
        return self.outcome

    def allocate(self) -> Memory:
        """Allocate the arrays of the case, full of NaN."""
        case = self.case
        names = ["q", "k", "v", *(["dout"] if case.backward else []), *case.tangents.values()]
        if "preallocated" in case.options:
            results = RESULTS[:-1] if case.backward else ("out", *(["stats"] if "stats" in case.options else []))
            names += [*results, *(["jvp"] if case.tangents else [])]
        return memory_of(case, self.xp, names)

    def load(self, memory: Memory, index: int) -> None:
        """Copy a set of values into the arrays, and fill preallocated results with NaN."""
        data = self.data[index]
        arrays = {name: x for name, x in data.arrays.items() if name != "dout" or self.case.backward}
        memory.load(arrays | {f"tensors/{name}": x for name, x in data.tensors.items()})
        for name in set(memory.views) & set(RESULTS):
            memory.fill_nan(name)

    def options(self, memory: Memory, index: int) -> dict[str, Any]:
        """The options of the forward call."""
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
        if 0 in attends.shape[2:]:  # a block mask has at least one head and one batch entry
            attends = np.zeros((*attends.shape[:2], 1, 1), bool)
        heads, entries = attends.shape[2] > 1, attends.shape[3] > 1

        def mask_mod(b: Any, h: Any, q_idx: Any, kv_idx: Any, attends: Any) -> Any:
            return attends[kv_idx, q_idx, h if heads else 0, b if entries else 0]

        groups: dict[str, Any] = {"heads": case.hq if heads else None, "batch": case.b if entries else None}
        return cupy_sdpa.block_mask(mask_mod, case.sq, case.skv, tensors={"attends": attends}, **groups)

    def call(self, memory: Memory, index: int) -> dict[str, Any]:
        """Call :func:`cupy_sdpa.attention`, and :func:`cupy_sdpa.attention_backward` if the case has gradients."""
        views, options = memory.views, self.options(memory, index)
        preallocated = {name: views[name] for name in ("out", "stats") if name in views}
        if found := self.of_feature(memory, options | preallocated, GIVEN, again=False):
            return found
        results = self.forward(forward_function(self.case), memory, options | preallocated, index)
        if not self.case.backward:
            return results
        options |= {name: views[name] for name in ("dq", "dk", "dv") if name in views} | self.backward_options
        self.outcome.calls += 1
        q, k, v = (views[name] for name in "qkv")
        gradients = cupy_sdpa.attention_backward(views["dout"], q, k, v, results["out"], results["stats"], **options)
        return results | self.gradients_by_name(gradients)

    def call_alternative(self, memory: Memory) -> dict[str, Any]:
        """Call :func:`cupy_sdpa.attention_vjp`, or :func:`cupy_sdpa.prepare` if the case has no gradients, in another form."""
        views, form = memory.views, other_form(self.case)
        with form.context():
            options = form.options(self.options(memory, 1))
            found = self.of_feature(memory, options, form, again=True)
            if not found and self.case.backward:
                self.outcome.calls += 2
                q, k, v = (form.array(views[name]) for name in "qkv")
                out, pullback = cupy_sdpa.attention_vjp(q, k, v, **options, **self.backward_options)
                found = {"out": out} | self.gradients_by_name(pullback(form.array(views["dout"])))
            elif not found:
                # A prepared call accepts only a dense preallocated output.
                given = {"out": form.array(views["out"])} if "out" in views and "out" not in self.case.layouts else {}
                other = {"shared_prefix", "merge", "cache"} & self.case.options.keys()  # calls of another function
                function = forward_function(self.case) if other else _prepare_and_call
                found = self.forward(function, memory, options | given, 1, form)
            return form.results(found)

    def of_feature(self, memory: Memory, options: dict[str, Any], form: Form, *, again: bool) -> dict[str, Any]:
        """The results of the function of a feature with all its passes; empty if the case has no such feature.

        Args:
            memory, options, form: of the call.
            again: whether to call it in another way than before.
        """
        if self.case.tangents:
            return self.derivative(memory, options, form, widen=again)
        if "weight_sums" in self.case.options:
            return self.weight_sums(memory, options)
        if "parallel" in self.case.options:
            return self.in_group(memory, options, vjp=again)
        return {}

    def in_group(self, memory: Memory, options: dict[str, Any], *, vjp: bool) -> dict[str, Any]:
        """Call :class:`cupy_sdpa.parallel.ContextParallel`."""
        self.outcome.calls += 1 + self.case.backward
        of_backward = self.backward_options if self.case.backward else {}
        return in_group(self.case, memory.views, options, of_backward, vjp=vjp)

    def weight_sums(self, memory: Memory, options: dict[str, Any]) -> dict[str, Any]:
        """Call :func:`cupy_sdpa.weight_sums`."""
        self.outcome.calls += 1
        per_kv_head = self.case.options["weight_sums"] == "key heads"
        own = {name: value for name, value in options.items() if name != "num_splits"}
        return {"weights": cupy_sdpa.weight_sums(memory.views["q"], memory.views["k"], per_kv_head=per_kv_head, **own)}

    def derivative(self, memory: Memory, options: dict[str, Any], form: Form, *, widen: bool) -> dict[str, Any]:
        """Call :func:`cupy_sdpa.attention_jvp`, or :func:`cupy_sdpa.composed.widen` before it."""
        views, stats, array = memory.views, "stats" in self.case.options, form.array
        q, k, v = (array(views[name]) for name in "qkv")
        given: dict[str, Any] = {name: array(views[other]) for name, other in self.case.tangents.items()} | self.deterministic
        self.outcome.calls += 1
        if widen:
            given = {"widened": cupy_sdpa.composed.widen(q, k, v, **given, **options)} | self.deterministic
        results = cupy_sdpa.attention_jvp(q, k, v, dout=array(views.get("jvp")), return_stats=stats, **given, **options)
        return dict(zip(("out", "jvp", "stats"), results, strict=False))

    def forward(self, function: Any, memory: Memory, options: dict[str, Any], index: int, form: Form = GIVEN) -> dict[str, Any]:
        """Call a forward function; with gradients it also returns the log-sum-exp."""
        in_fp8 = "fp8" in self.case.options
        views = memory.views
        q, k, v = arrays_in_fp8(self.case, views) if in_fp8 else (form.array(views[name]) for name in "qkv")
        if self.case.cache:
            cache = filled_cache(self.case, self.data[index], self.xp)
            q, k, v = rotated_queries(self.case, self.data[index], q, cache, self.xp), cache.keys(1), cache.values(1)
            options = options | {"page_table": cache.table, "seq_lens_kv": cache.lengths}
            options = with_tree(self.case, self.data[index], k, options, self.xp)
        stats: Any = self.case.options.get("stats", self.case.backward)
        self.outcome.calls += 1
        returned = function(q, k, v, **self.deterministic, **({"return_stats": stats} if stats else {}), **options)
        results = returned if isinstance(returned, tuple) else (returned,)
        if in_fp8:
            results = (results[0].dequantize("float32").astype(dtype_of(self.case.dtype)), *results[1:])
        return dict(zip(("out", "stats", "max", "sum_exp"), results, strict=False))

    @property
    def deterministic(self) -> dict[str, Any]:
        """The option ``deterministic``, of both passes."""
        return {"deterministic": True} if "deterministic" in self.case.options else {}

    @property
    def reproducible(self) -> str:
        """The option that requires the same bits in all calls with equal inputs; empty if there is none."""
        paged = self.case.paged
        splits = f"num_splits={paged.num_splits}" if paged and paged.num_splits else ""
        return "deterministic=True" if "deterministic" in self.case.options else splits

    @property
    def backward_options(self) -> dict[str, Any]:
        """The options of the backward pass that are not in :meth:`options`."""
        return self.deterministic | {name: True for name in GRADIENT_OPTIONS if name in self.case.options}

    def gradients_by_name(self, gradients: tuple[Any, ...]) -> dict[str, Any]:
        """The results of a backward call by name."""
        optional = [name for name in ("dbias", "dsinks") if f"return_{name}" in self.case.options]
        results = dict(zip(("dq", "dk", "dv", *optional), gradients, strict=False))
        if "return_dtensors" in self.case.options:
            results |= {f"tensors[{name!r}]": array for name, array in gradients[-1].items()}
        return results

    def check_results(self, results: dict[str, Any], index: int, call: str, *, same_bits: bool = True) -> bool:
        """Compare results with the expected ones; a difference is written to the outcome."""
        # Copying to the host waits for the GPU, so errors of kernels are raised here.
        on_host = {name: x if isinstance(x, np.ndarray) else x.get() for name, x in results.items()}
        messages = find_errors(self.expected_results(index), on_host)
        if self.reproducible and same_bits:
            paged = self.case.paged
            same_values = paged and paged.moved and not self.case.dropout  # dropout has another seed for each set
            first = self.first_results.setdefault(0 if same_values else index, {name: x.copy() for name, x in on_host.items()})
            for name, x in on_host.items():
                if x.tobytes() != first[name].tobytes() and name not in messages:
                    messages[name] = f"{self.reproducible}, and the bits of {name} differ from those of an earlier call"
        if messages:
            self.outcome.set("wrong", f"{call}: {'; '.join(messages.values())}", ", ".join(messages))
        return not messages

    def check_alone(self, memory: Memory, results: dict[str, Any], index: int) -> bool:
        """Check that the first and the last sequence have the same bits alone, where the package states it.

        Args:
            memory: the arrays of the call.
            results: its results.
            index: the set of values.
        """
        case = self.case
        if case.b < 2 or case.layouts or not case.options.keys() <= WITH_BITS_ALONE:
            return True
        given, options = {name: x for name, x in memory.views.items() if name in "qkv"}, self.options(memory, index)
        flags = self.deterministic | {"return_stats": case.options.get("stats", case.backward)}
        reports = [cupy_sdpa.explain(**given, **options, **flags)]
        if case.backward:
            reports.append(cupy_sdpa.explain(**given, **options, **self.backward_options, backward=True))
        for entry in (0, case.b - 1):

            def part(x: Any, entry: int = entry) -> Any:
                return x[..., entry : entry + 1].copy(order="F") if x.shape[-1] > 1 else x

            q, k, v = (part(given[name]) for name in "qkv")
            of_batch = {name: part(x) for name, x in results.items() if name in ALONE}
            of_entry = {name: part(x) if name in PER_ENTRY else x for name, x in options.items()}
            of_entry["batch_invariant"] = True
            found: dict[str, Any] = {}
            if reports[0].batch_dependence == "":
                self.outcome.calls += 1
                returned = cupy_sdpa.attention(q, k, v, **of_entry, **flags)
                found = dict(zip(ALONE, returned if isinstance(returned, tuple) else (returned,), strict=False))
            if case.backward and reports[1].batch_dependence == "":
                self.outcome.calls += 1
                options_of_both = of_entry | self.backward_options
                dout, out, stats = part(memory.views["dout"]), of_batch["out"], of_batch["stats"]
                gradients = cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options_of_both)
                found |= dict(zip(("dq", "dk", "dv"), gradients, strict=False))
            for name, x in found.items():
                alone, beside = (y if isinstance(y, np.ndarray) else y.get() for y in (x, of_batch[name]))
                if alone.tobytes("F") != beside.tobytes("F"):
                    self.outcome.set("wrong", f"the bits of {name} of sequence {entry} depend on the rest of the batch", name)
                    return False
        return True

    def check_memory(self, memory: Memory, inputs: dict[str, Any]) -> bool:
        """Check that a call changed no input and nothing around the results; a change is written to the outcome.

        Args:
            memory: the arrays.
            inputs: the bits of the arrays before the call.
        """
        for name, before in inputs.items():
            if name not in RESULTS and not np.array_equal(before, memory.host_bits(name)):
                self.outcome.set("wrong", f"the call changed its input {name}", name)
                return False
        for name in set(memory.views) & set(RESULTS):
            if memory.surroundings_changed(name):
                self.outcome.set("wrong", f"the call wrote outside {name}", name)
                return False
        return True

    def expected_results(self, index: int) -> Expected:
        """The expected results of a set of values; the dropout mask is read from the engine."""
        if index not in self.expected:
            data, dropout = self.data[index], self.case.dropout
            if dropout and dropout.source != "mask":
                data.keep = self.dropout_mask(index)
            self.expected[index] = expected(data)
        return self.expected[index]

    def dropout_mask(self, index: int) -> Any:
        """The weights that the engine keeps, ``(Skv, Sq, Hq, B)``."""
        memory = self.allocate()
        self.load(memory, index)
        views = memory.views
        names = ("cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "bucket", "layout", "engine")
        options = {name: x for name, x in self.options(memory, index).items() if name in names}
        if self.case.paged:  # the random numbers are those of dense arrays
            options = {name: x for name, x in options.items() if name == "engine"}
        options |= dropout_options(self.case, views, index)
        self.outcome.calls += 1
        q, k = (self.dense_zeros(name) if self.case.paged else views[name] for name in "qk")
        keep = cupy_sdpa.dropout_mask(q, k, **options)
        return keep if isinstance(keep, np.ndarray) else keep.get()

    def dense_zeros(self, name: str) -> Any:
        """Zeros in the shape of dense q or k."""
        case = self.case
        heads, length = (case.hkv, case.skv) if name == "k" else (case.hq, case.sq)
        return self.xp.zeros((case.d, heads, length, case.b), dtype_of(case.dtype), order="F")

    def documented_reasons(self) -> list[str]:
        """The reasons from ``explain`` why the case is not supported; empty if it is supported."""
        memory = self.allocate()
        self.load(memory, 0)
        options, views = self.options(memory, 0), memory.views
        stats = self.case.options.get("stats", self.case.backward)
        q, k, v = (views[name] for name in "qkv")
        preallocated: dict[str, Any] = {name: views[name] for name in ("out", "stats") if name in views}
        if self.case.tangents:
            tangents = {name: views[other] for name, other in self.case.tangents.items()}
            report = cupy_sdpa.explain(q, k, v, jvp=True, return_stats=stats, **tangents, **options, **self.deterministic)
            return list(report.reasons)
        reports = [cupy_sdpa.explain(q, k, v, return_stats=stats, **options, **preallocated, **self.deterministic)]
        if self.case.backward:
            options |= {name: views[name] for name in ("dout", *RESULTS) if name in views} | self.backward_options
            reports.append(cupy_sdpa.explain(q, k, v, backward=True, **options))
        return [str(reason) for report in reports for reason in report.reasons]


def execute(case: Case) -> Outcome:
    """Run a case in this process. A crash ends the process, so the caller must detect it."""
    runner = CaseRunner(case)
    outcome = runner.outcome
    try:
        return plan(case, outcome) if case.engine == "plan" else runner.run()
    except cupy_sdpa.Unsupported as error:
        return outcome.set("refused", str(error).splitlines()[0], "Unsupported")
    except Exception as error:  # every other exception is a finding
        is_argument_error = isinstance(error, (TypeError, ValueError))
        if is_argument_error and case.engine == "gpu" and (reasons := _documented_reasons(runner)):
            return outcome.set("refused", reasons[0], type(error).__name__)
        outcome.fatal = case.engine in ("gpu", "cupy") and not is_argument_error
        return outcome.set("exception", *_describe(error))


def _documented_reasons(runner: CaseRunner) -> list[str]:
    try:
        return runner.documented_reasons()
    except Exception:  # the arguments themselves are rejected: a valid case has no such arguments
        return []


def _describe(error: Exception) -> tuple[str, str]:
    """The message of an exception on one line, and its type and line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    cause = f"{type(error).__name__} at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return f"{cause}: {' '.join(str(error).split())[:400]}", cause
