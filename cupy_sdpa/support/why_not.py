"""What each cuDNN version and GPU can run, and every known bug, as data: two tables, each row with its sentence.

:func:`why_not` asks every rule and bug about a problem; no reason means that nothing known speaks against it (cuDNN may
still refuse, with its own words). :func:`guards` names the steps that avoid a bug. :func:`deadly` keeps graphs that kill
the process inside cuDNN away from it.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import Unsupported
from ..graph.nodes import Graph, Matmul, Pointwise
from ..problem.problem import Problem, writes_directly
from ..version import RELEASES, version_text
from .rules import FRONTEND, PYTORCH, RULES

#: The GPU generations, by a compute capability that stands for each.
GENERATIONS = {80: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell", 120: "GeForce Blackwell"}
#: Names the rows of the table that are not to hold, separated by commas.
SWITCH = "CUPY_SDPA_GUARDS_OFF"


class Reason(NamedTuple):
    """Why a problem cannot run: the rule, the class of the exception that says so, the sentence, and what would lift it."""

    rule: str
    error: type[Exception]
    text: str
    lift: str = ""

    def __str__(self) -> str:
        return f"{self.text}. It would run {self.lift}" if self.lift else self.text


def why_not(problem: Problem, cudnn: int, capability: int) -> list[Reason]:
    """Every known reason why cuDNN cannot run a problem.

    Args:
        problem: what is asked.
        cudnn: cuDNN's version as it counts, 9.19.0 is 91900.
        capability: the GPU's compute capability, 9.0 is 90.
    """
    return [reason._replace(lift=_lift(reason, problem, cudnn, capability)) for reason in _reasons(problem, cudnn, capability)]


def _reasons(problem: Problem, cudnn: int, capability: int) -> list[Reason]:
    off = turned_off()
    reasons = [
        Reason(rule.name, rule.error, text)
        for rule in RULES
        if rule.refuses and rule.name not in off
        for text in rule.violations(problem, cudnn, capability)
    ]
    for bug in BUGS:
        if not bug.guards and bug.name not in off and bug.met_by(problem, cudnn, capability):
            text = f"{bug.when}: {bug.effect} with cuDNN {version_text(cudnn)} on this GPU: {bug.remedy} ({bug.link})"
            reasons.append(Reason(bug.name, Unsupported, text))
    return reasons


def _lift(reason: Reason, problem: Problem, cudnn: int, capability: int) -> str:
    """The cuDNN releases and the GPUs on which a reason would fall away; nothing where none would help."""
    if reason.error is not Unsupported:
        return ""

    def free(version: int, gpu: int) -> bool:
        return reason.rule not in {other.rule for other in _reasons(problem, version, gpu)}

    newer = [v for v in RELEASES if v > cudnn and free(v, capability)]
    older = [v for v in RELEASES if v < cudnn and free(v, capability)]
    versions = [f"with cuDNN {version_text(v)}" for v in (newer[:1] or older[-1:])]
    gpus = [name for gpu, name in GENERATIONS.items() if gpu != capability and free(cudnn, gpu)]
    return ", or ".join([*versions, *([f"on {', '.join(gpus)}"] if gpus else [])])


@functools.cache
def turned_off() -> frozenset[str]:
    """The rows of the table that the environment turns off, read once; for whoever knows better, or wants to measure.

    Raises:
        ValueError: a name that is no row, or one of a row that keeps memory safe.
    """
    named = frozenset(filter(None, os.environ.get(SWITCH, "").replace(" ", "").split(",")))
    allowed = {bug.name for bug in BUGS} | {rule.name for rule in RULES if rule.error is Unsupported}
    if unknown := named - allowed:
        raise ValueError(f"{SWITCH} names {', '.join(sorted(unknown))}; it can turn off {', '.join(sorted(allowed))}")
    return named


@dataclass(frozen=True)
class Bug:
    """A known bug of cuDNN's that what we offer would meet.

    Attributes:
        name: short and stable.
        first, last: the cuDNN versions that have it.
        capabilities: the compute capabilities that have it.
        condition: which problems meet it.
        when: the same in words.
        effect: what happens.
        guards: what works around it, of :data:`GUARDS`; none where it must be refused.
        remedy: what a person can do; for a refusal.
        link: where it was reported.
    """

    name: str
    first: int
    last: int
    capabilities: range
    condition: Callable[[Problem], bool]
    when: str
    effect: str
    guards: frozenset[str]
    remedy: str
    link: str

    def met_by(self, problem: Problem, cudnn: int, capability: int) -> bool:
        """Whether a problem would meet the bug with this cuDNN on this GPU."""
        return self.first <= cudnn <= self.last and capability in self.capabilities and self.condition(problem)


def _one_query(problem: Problem) -> bool:
    *_, sq, _, _ = problem.sizes
    return sq == 1


def has_one_packed_query(problem: Problem) -> bool:
    """Whether packed sequences have one query each, or none."""
    return problem.packed and _one_query(problem)


def has_strided_packed_queries(problem: Problem) -> bool:
    """Whether gradients of packed sequences are asked for whose queries are not dense."""
    return problem.packed and problem.backward and not problem.q.dense


def hides_rows_but_sinks(problem: Problem) -> bool:
    """Whether gradients have sinks and a bias of one number a query, which may hide every key from it."""
    return problem.backward and problem.sinks is not None and problem.bias is not None and problem.bias.shape[0] == 1


def _direct_with_narrow_values(problem: Problem) -> bool:
    """Whether dQ is written directly, with a head dim above 128 and another one of v that was not measured right."""
    d, dv, *_ = problem.sizes
    return problem.backward and writes_directly(problem) and d > 128 and d != dv and (d, dv) != (192, 128)


def _unbounded(problem: Problem) -> bool:
    """Whether the last queries see the last keys for all that is known: no causal mask, and no lengths of the caller's."""
    return not problem.ragged and (problem.band is None or problem.band.right is None)


def _less_a_number(problem: Problem) -> bool:
    """Whether gradients are wanted of scores of a single key, and a function takes an array of one element away."""
    program = problem.settings.program
    if not problem.backward or program is None or problem.sizes[5] != 1:
        return False
    lone = {spec.name for spec in problem.captured if math.prod(spec.shape) == 1}
    taken = [program.steps[step.args[1]] for step in program.steps if step.mode == "sub"]
    return any(step.mode == "captured" and step.name in lone for step in taken)


def _reads_positions(problem: Problem) -> bool:
    """Whether the scores of a single query depend on a key's position, or on an array."""
    program = problem.settings.program
    places = program is not None and any(step.mode in ("index", "captured") for step in program.steps)
    reads = places or problem.alibi_slopes is not None
    other_kernel = problem.settings.dropout or problem.sinks is not None
    return not problem.backward and _one_query(problem) and reads and not other_kernel


#: What each guard does.
GUARDS = {
    "keys": "keys beyond the last are masked explicitly",
    "queries": "queries beyond the last are masked explicitly",
    "positions": "positions of keys, and arrays without an axis of keys, are read for every key from memory",
    "no-split": "another kernel is used",
    "clear-last": "results beyond the lengths are cleared after the kernel instead of before",
    "two-rows": "the sequences are planned for two queries",
    "dense-queries": "the queries are copied",
    "finite-bias": "-inf is replaced by -1e30 in a float32 copy of the bias",
}

#: Newer than every cuDNN there is: a bug that no version has been seen without.
_OPEN = 99999

_REFUSE: frozenset[str] = frozenset()

#: Every known bug; those of versions before 9.19, which are refused anyway, are left out. The ranges of the backward bugs
#: were measured: planning with every release from 9.19 to 9.28, running on an H200 with 9.19.0 and 9.28.0. The guards avoid
#: the bug there on both; where they are not needed they would cost time.
BUGS: tuple[Bug, ...] = (
    *(
        Bug("decode-blackwell", first, last, range(100, 120), lambda p: _one_query(p) and not p.backward,
            "one query, forward", "silently wrong", _REFUSE, "use cuDNN 9.25.1 or newer", f"{PYTORCH}/issues/193893")
        for first, last in ((91900, 92400), (92402, 92500))
    ),
    Bug("packed-one-query", 91900, _OPEN, range(80, 130), has_one_packed_query,
        "packed sequences of one query",
        "the log-sum-exp is written for one head of each group only, and gradients read it at the wrong place",
        frozenset({"two-rows"}), "", f"{FRONTEND}/issues/1083"),
    Bug("direct-narrow-values", 91900, _OPEN, range(90, 100), _direct_with_narrow_values,
        "deterministic gradients, and those of a bias or of tensors, with a head dim of q and k above 128 and another one "
        "of v, but for 192 and 128", "gradients are wrong", _REFUSE, "pad v with zeros to the head dim of q", "docs/design.md"),
    Bug("packed-strided-queries", 91900, _OPEN, range(80, 130), has_strided_packed_queries,
        "gradients of packed sequences with queries that are not dense", "dq is written at the wrong place",
        frozenset({"dense-queries"}), "", "docs/design.md"),
    Bug("sinks-infinite-bias", 91900, _OPEN, range(80, 130), hides_rows_but_sinks,
        "gradients with sinks and a bias of one number a query", "-inf in the bias is taken for 0",
        frozenset({"finite-bias"}), "", "docs/design.md"),
    Bug("dropout-sinks-gradient", 91900, 92700, range(80, 130), lambda p: p.dsinks is not None and p.settings.dropout > 0,
        "the sinks' gradient, with dropout", "too small by 1 - dropout_p", _REFUSE, "use cuDNN 9.28.0", "docs/design.md"),
    Bug("packed-sinks-gradient", 91900, 92501, range(80, 130), lambda p: p.packed and p.dsinks is not None,
        "the sinks' gradient, packed sequences", "reads beyond the arrays", _REFUSE, "leave return_dsinks=True out, or pad",
        FRONTEND),
    Bug("packed-narrow-gradient", 91900, 92700, range(90, 100),
        lambda p: p.packed and p.backward and p.sizes[0] % 16 != 0,
        "gradients of packed sequences with a head dim that 16 does not divide", "dq is wrong",
        _REFUSE, "use cuDNN 9.28.0, or pad the head dim with zeros and give scale=", "docs/design.md"),
    Bug("backward-one-row", 92600, _OPEN, range(80, 130),
        lambda p: p.backward and _one_query(p) and p.sizes[2] == p.sizes[6] == 1,
        "gradients of one query, one head and one batch entry", "planning is a segmentation fault", _REFUSE,
        "give the batch twice", f"{FRONTEND}/issues/1071"),
    *(
        Bug("single-key-difference", 92600, _OPEN, gpus, condition,
            "gradients of a single key with a function that takes an array of one element away",
            "planning is a segmentation fault", _REFUSE, "write s + (-t) in place of s - t", "docs/design.md")
        for gpus, condition in (
            (range(80, 100), lambda p: _less_a_number(p) and _one_query(p)), (range(100, 130), _less_a_number),
        )
    ),
    Bug("one-query-positions", 91900, _OPEN, range(80, 130), _reads_positions,
        "one query, ALiBi or a function that reads positions or arrays, more than 256 keys",
        "the kernel that splits the keys computes positions wrongly, and reads arrays of one element a head at wrong places",
        frozenset({"positions"}), "", "docs/design.md"),
    Bug("one-query-dropout", 91900, _OPEN, range(80, 130),
        lambda p: not p.backward and _one_query(p) and p.settings.dropout > 0,
        "one query, dropout", "the kernel that splits the keys writes beyond its shared memory, which ends the CUDA context",
        frozenset({"no-split"}), "", "docs/design.md"),
    Bug("one-query-sinks", 91900, _OPEN, range(80, 130),
        lambda p: not p.backward and _one_query(p) and p.sinks is not None,
        "one query, sinks, every key masked", "the kernel that splits the keys writes -inf for the log-sum-exp",
        frozenset({"no-split"}), "", "docs/design.md"),
    Bug("one-query-lengths", 91900, _OPEN, range(80, 130),
        lambda p: not p.backward and _one_query(p) and p.seq_lens_q is not None,
        "one query, seq_lens_q of 0", "the result is that of a query that is there, or NaN",
        frozenset({"clear-last"}), "", "docs/design.md"),
    Bug("backward-key-tail", 91900, 92501, range(90, 100),
        lambda p: p.backward and _unbounded(p) and p.k.shape[2] % 128 == 64,
        "gradients without a mask, a number of keys that leaves 64 when divided by 128, a log-sum-exp below -88.7",
        "dq is NaN", frozenset({"keys"}), "", f"{PYTORCH}/issues/196678"),
    Bug("backward-query-tail", 91900, _OPEN, range(90, 100),
        lambda p: p.backward and _unbounded(p) and _one_query(p) and p.k.shape[2] % 64 == 0,
        "gradients without a mask of one query, a number of keys that 64 divides, a log-sum-exp below -88.7",
        "dk and dv are NaN", frozenset({"queries"}), "", f"{FRONTEND}/issues/1072"),
    Bug("backward-scale", 91900, _OPEN, range(90, 100), lambda p: p.backward and not p.settings.positive_scale,
        "gradients with a scale of 0 or below and lengths that 64 does not divide",
        "all gradients are NaN", frozenset({"keys", "queries"}), "", "docs/design.md"),
)  # fmt: skip


def avoided_bugs(problem: Problem, cudnn: int, capability: int) -> list[Bug]:
    """The known bugs that a problem would meet, and that are worked around."""
    return [bug for bug in BUGS if bug.guards and bug.name not in turned_off() and bug.met_by(problem, cudnn, capability)]


#: The compute capabilities on which this package was run.
VERIFIED = frozenset({90})


def doubtful(problem: Problem, cudnn: int, capability: int) -> list[tuple[str, str]]:
    """The rules of the table, and their sentences, that a problem breaks and that refuse nothing."""
    rules = [rule for rule in RULES if not rule.refuses and rule.name not in turned_off()]
    return [(rule.name, text) for rule in rules for text in rule.violations(problem, cudnn, capability)]


def unverified(problem: Problem, cudnn: int, capability: int) -> tuple[str, ...]:
    """What of a problem was never run on such a GPU; it runs there if cuDNN can plan it."""
    doubts = [text for _, text in doubtful(problem, cudnn, capability)]
    if capability not in VERIFIED:
        doubts.append(f"this package was not run on compute capability {capability / 10}")
    return tuple(doubts)


def workarounds(problem: Problem, cudnn: int, capability: int) -> tuple[str, ...]:
    """The known bugs that are worked around, each as a line."""
    return tuple(
        f"{bug.name} ({bug.when}: {bug.effect}): {', '.join(GUARDS[guard] for guard in sorted(bug.guards))}"
        for bug in avoided_bugs(problem, cudnn, capability)
    )


def guards(problem: Problem, cudnn: int, capability: int) -> frozenset[str]:
    """What works around the known bugs that a problem would meet, see :class:`Bug`."""
    return frozenset().union(*(bug.guards for bug in avoided_bugs(problem, cudnn, capability)))


def deadly(graph: Graph) -> list[str]:
    """What in a graph kills the process inside cuDNN (measured with 9.19 and 9.28): none of it may reach the library.

    Users never see these: :func:`why_not` refuses their arrays first, in their own terms.
    """
    reasons = []
    for node in graph.nodes:
        for tensor in (*node.inputs, *node.outputs):
            if tensor.role in ("input", "output") and tensor.dtype in ("bool", "int8", "uint8"):
                reasons.append(f"{tensor} is {tensor.dtype} in memory (a floating-point exception or an abort)")
        if isinstance(node, Matmul):
            for tensor in (node.a, node.b, node.out):
                head_dim = tensor.axes.index(0) if tensor.axes else None  # the caller's axis 0
                if head_dim is not None and tensor.strides[head_dim] != 1:
                    step = tensor.strides[head_dim]
                    reasons.append(f"{tensor} has stride {step} along head_dim, not 1 (a segmentation fault)")
        if isinstance(node, Pointwise) and node.mode == "binary_select" and node.x.role == "scalar":
            reasons.append(f"{node.formula} selects from a number (a segmentation fault with 9.19)")
    return list(dict.fromkeys(reasons))
