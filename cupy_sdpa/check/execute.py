"""Run one case in this process and compare every result of every call."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np

import cupy_sdpa

from .calls import RESULTS, CaseRunner, other_form, plan
from .case import Case, Outcome
from .comparison import compare
from .data import Data
from .drawn_memory import DrawnMemory
from .formats import dtype_of
from .oracle import Inputs, Results
from .routes import as_numpy, wrong_scale
from .tolerances import exact_elements, rounding_floors

#: The set of values of each call on the same memory. On the GPU the third call with the same addresses is captured as a CUDA
#: graph, and later ones replay it.
SEQUENCE = {"gpu": (0, 1, 0, 1, 0, 1), "cpu": (0, 1), "cupy": (0, 1)}
#: The same for calls whose bits are compared.
SEQUENCE_OF_BITS = SEQUENCE | {"cpu": (0, 1, 0), "cupy": (0, 1, 0)}
#: The results that do not depend on the derivative of the score function.
WITHOUT_SCORE_DERIVATIVE = ("out", "stats", "max", "sum_exp", "weights", "dv")
#: The options of cases whose sequences are also computed alone; which of them have an element for each sequence; and the
#: results that are compared.
WITH_BITS_ALONE = {
    "scale", "causal", "window", "mask", "bias", "seq_lens_q", "seq_lens_kv", "alibi_slopes", "softcap", "sinks", "stats",
    "deterministic", "preallocated", "max_workspace", "return_dbias", "return_dsinks",
}  # fmt: skip
PER_ENTRY = ("mask", "bias", "seq_lens_q", "seq_lens_kv")
ALONE = ("out", "stats", "max", "sum_exp", "dq", "dk", "dv")


class ExpectedResults:
    """The expected results of one set of values: in float64, and of a naive computation in the precision of the arrays.

    For every result, also the error that rounding may cause, and which elements must equal the truth.
    """

    def __init__(self, data: Data) -> None:
        inputs, self.case = Inputs(data), data.case
        with np.errstate(invalid="ignore"):  # OpenBLAS sets the flag for NaN in memory beyond a matrix, which it loads with it
            self.truth = Results(inputs)
            self.naive = Results(inputs, data.case.dtype, self.truth)
            self.floors, self.exact = rounding_floors(inputs, self.truth), exact_elements(inputs, self.truth)

    def errors(self, results: dict[str, Any]) -> dict[str, str]:
        """Return the error messages of wrong results, by name."""
        case, errors = self.case, {}
        for name, actual in results.items():
            if self.truth.nondifferentiable and name not in WITHOUT_SCORE_DERIVATIVE:
                continue
            if name not in self.truth.values:  # the gradient of an array that only a mask function reads
                if np.any(np.asarray(actual) != 0):
                    errors[name] = f"{name} is not 0, but the scores do not depend on it"
                continue
            truth, naive = self.truth.values[name], self.naive.values[name]
            exact = None if "tensors" in name else self.exact.get(name)
            if message := compare(name, np.asarray(actual), truth, naive, self.floors[name], exact):
                errors[name] = message
            if name in ("out", "dq", "dk", "dv", "jvp") and actual.dtype != dtype_of(case.dtype):
                errors[name] = f"{name} is {actual.dtype}, expected {case.dtype}"
        return errors


#: A message, and the names of the wrong results or arrays.
Difference = tuple[str, str]


class Comparison:
    """Compares the results of the calls of one case.

    ``reproducible`` is the option that requires the bits of ``first_results`` in all calls with equal inputs; may be empty.
    """

    def __init__(self, runner: CaseRunner) -> None:
        self.runner, self.case, paged = runner, runner.case, runner.case.paged
        splits = f"num_splits={paged.num_splits}" if paged and paged.num_splits else ""
        self.reproducible = "deterministic=True" if "deterministic" in self.case.options else splits
        self.expected: dict[int, ExpectedResults] = {}
        self.first_results: dict[int, dict[str, Any]] = {}

    def findings(self) -> Iterator[Difference]:
        """Make all calls, and generate what is wrong."""
        runner, case = self.runner, self.case
        memory = runner.allocate()
        engine = "cpu" if "parallel" in case.options else case.engine  # the members of a group repeat their calls
        sequence = (SEQUENCE_OF_BITS if self.reproducible else SEQUENCE)[engine]
        for number, index in enumerate(sequence, 1):
            runner.load(memory, index)
            inputs = {name: memory.host_bits(name) for name in memory.views} if number == len(sequence) else {}
            results = runner.call(memory, index)
            results |= {name: memory.views[name] for name in results if name in RESULTS and name in memory.views}
            yield from self._of_results(results, index, f"call {number}")
            yield from self._of_memory(memory, inputs)
            if number == len(sequence):
                yield from self._of_sequences_alone(memory, results, index)
            results.clear()  # allows the next call's results to have the same addresses
        memory, form = runner.allocate(), other_form(case)
        runner.load(memory, 1)
        with form.context():
            results = form.results(runner.call(memory, 1, form, again=True))
        # with attention_vjp cuDNN writes the log-sum-exp; the calls before computed it from max and sum_exp: other bits
        same_bits = case.options.get("stats") != "max_sumexp"
        yield from self._of_results(results, 1, "the call at other addresses", same_bits=same_bits)
        if "fp8" in case.options and (message := wrong_scale(runner.data[1], memory.views)):
            yield message, "scale"

    def _of_results(self, results: dict[str, Any], index: int, call: str, *, same_bits: bool = True) -> Iterator[Difference]:
        """Compare results with the expected ones, and with the bits of an earlier call."""
        # Copying to the host waits for the GPU, so errors of kernels are raised here.
        arrays = {name: as_numpy(x) for name, x in results.items()}
        messages = self._expected(index).errors(arrays)
        if self.reproducible and same_bits:
            paged = self.case.paged
            same_values = paged and paged.moved and not self.case.dropout  # dropout has another seed for each set
            first = self.first_results.setdefault(0 if same_values else index, {name: x.copy() for name, x in arrays.items()})
            for name, x in arrays.items():
                if x.tobytes() != first[name].tobytes() and name not in messages:
                    messages[name] = f"{self.reproducible}, and the bits of {name} differ from an earlier call"
        if messages:
            yield f"{call}: {'; '.join(messages.values())}", ", ".join(messages)

    def _of_memory(self, memory: DrawnMemory, inputs: dict[str, Any]) -> Iterator[Difference]:
        """Check that a call changed no input, from the bits before the call, and nothing around the results."""
        for name, before in inputs.items():
            if name not in RESULTS and not np.array_equal(before, memory.host_bits(name)):
                yield f"the call changed its input {name}", name
        for name in set(memory.views) & set(RESULTS):
            if memory.surroundings_changed(name):
                yield f"the call wrote outside {name}", name

    def _of_sequences_alone(self, memory: DrawnMemory, results: dict[str, Any], index: int) -> Iterator[Difference]:
        """Check that the first and the last sequence have the same bits alone, where the package states it."""
        runner, case = self.runner, self.case
        if case.b < 2 or case.layouts or not case.options.keys() <= WITH_BITS_ALONE:
            return
        independent = [report.batch_dependence == "" for report in runner.reports(memory, index)]
        options = runner.options(memory, index) | {"batch_invariant": True}
        for entry in (0, case.b - 1):

            def part(x: Any, entry: int = entry) -> Any:
                return x[..., entry : entry + 1].copy(order="F") if x.shape[-1] > 1 else x

            q, k, v = (part(memory.views[name]) for name in "qkv")
            of_batch = {name: part(x) for name, x in results.items() if name in ALONE}
            of_entry: dict[str, Any] = {name: part(x) if name in PER_ENTRY else x for name, x in options.items()}
            found: dict[str, Any] = {}
            if independent[0]:
                runner.count += 1
                returned = cupy_sdpa.attention(q, k, v, return_stats=runner.stats, **of_entry, **runner.deterministic)
                found = dict(zip(ALONE, returned if isinstance(returned, tuple) else (returned,), strict=False))
            if case.backward and independent[1]:
                runner.count += 1
                dout, out, stats = part(memory.views["dout"]), of_batch["out"], of_batch["stats"]
                of_entry |= runner.backward_options
                gradients = cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **of_entry)
                found |= dict(zip(("dq", "dk", "dv"), gradients, strict=False))
            for name, x in found.items():
                alone, beside = as_numpy(x), as_numpy(of_batch[name])
                if alone.tobytes("F") != beside.tobytes("F"):
                    yield f"the bits of {name} of sequence {entry} depend on the rest of the batch", name

    def _expected(self, index: int) -> ExpectedResults:
        """Return the expected results of a set of values; the dropout mask is read from the engine."""
        if index not in self.expected:
            data, dropout = self.runner.data[index], self.case.dropout
            if dropout and dropout.source != "mask":
                data.keep = self.runner.dropout_mask(index)
            self.expected[index] = ExpectedResults(data)
        return self.expected[index]


def execute(case: Case) -> Outcome:
    """Run a case in this process. A crash ends the process, so the caller must detect it."""
    runner, outcome = CaseRunner(case), Outcome()
    try:
        if case.engine == "plan":
            plan(case, outcome)
        elif found := next(Comparison(runner).findings(), None):
            outcome.set("wrong", *found)
    except cupy_sdpa.Unsupported as error:
        outcome.set("refused", str(error).splitlines()[0], "Unsupported")
    except Exception as error:  # every other exception is a finding
        is_argument_error = isinstance(error, (TypeError, ValueError))
        if is_argument_error and case.engine == "gpu" and (reasons := _documented_reasons(runner)):
            outcome.set("refused", reasons[0], type(error).__name__)
        else:
            outcome.fatal = case.engine in ("gpu", "cupy") and not is_argument_error
            outcome.set("exception", *_describe(error))
    outcome.calls += runner.count
    return outcome


def _documented_reasons(runner: CaseRunner) -> list[str]:
    """Return the reasons from ``explain`` why the case is not supported; empty if it is supported."""
    try:
        memory = runner.allocate()
        runner.load(memory, 0)
        return [str(reason) for report in runner.reports(memory, 0) for reason in report.reasons]
    except Exception:  # the arguments themselves are rejected: a valid case has no such arguments
        return []


def _describe(error: Exception) -> tuple[str, str]:
    """Return the message of an exception on one line, and its type and line."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    cause = f"{type(error).__name__} at {frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}"
    return f"{cause}: {' '.join(str(error).split())[:400]}", cause
