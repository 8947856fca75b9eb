"""The support table against cuDNN, and as the page docs/support.md.

    python tools/support_table.py page > docs/support.md
    python tools/support_table.py measure                  # every problem for every described GPU (a minute or two)
    python tools/support_table.py measure --pairs          # every pair of options (half an hour)
    python tools/support_table.py measure --operations     # every operation of score functions

``measure`` plans with the installed cuDNN, or with the library of ``--cudnn``. It needs no GPU. Its exit status is 1 if cuDNN
contradicts the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cupy_sdpa
from cupy_sdpa.cli.support_problems import PROBES, problem_of_sizes
from cupy_sdpa.core.cudnn.library import OVERRIDE
from cupy_sdpa.core.cudnn_engine.described import plan_described
from cupy_sdpa.core.cudnn_engine.plan import Target
from cupy_sdpa.core.errors import CudnnError
from cupy_sdpa.core.problem.problem import Problem
from cupy_sdpa.core.problem.subproblems import subproblems
from cupy_sdpa.core.score_fn.ufuncs import FUNCTIONS
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.known_bugs import BUGS, GUARDS, NOT_FIXED, Bug
from cupy_sdpa.core.support.rules import MINIMUM_CAPABILITY, RULES
from cupy_sdpa.core.support.why_not import unverified_rules, why_not
from cupy_sdpa.core.version import MINIMUM_CUDNN, RELEASES, version_text
from cupy_sdpa.offline.remote_planner import Planner

# problems: pairs of options, and operations of score functions

_SQ, _SKV = 333, 777
#: The options of which every pair is a problem, forward and backward, by title. Arrays are written as shapes.
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (100, 50)},
    "lengths": {"seq_lens_kv": True},
    "packed": {"cu_seqlens_q": (3,), "cu_seqlens_kv": (3,), "max_seqlen_q": _SQ, "max_seqlen_kv": _SKV},
    "bias": {"bias": (_SKV, _SQ, 8, 1)},
    "mask": {"mask": (_SKV, _SQ, 1, 2)},
    "key padding mask": {"mask": (_SKV, 1, 1, 2)},
    "ALiBi": {"alibi_slopes": True},
    "softcap": {"softcap": 30.0},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.1, "seed": 0},
    "max and sum": {"return_stats": "max_sumexp"},
    "bias gradient": {"bias": (_SKV, _SQ, 8, 1), "return_dbias": True},
    "sinks gradient": {"sinks": True, "return_dsinks": True},
    "deterministic": {"deterministic": True},
}
#: The options of one direction only, by whether it is the backward pass.
ONE_DIRECTION = {False: {"max and sum"}, True: {"bias gradient", "sinks gradient", "deterministic"}}


def names_of_options(*, backward: bool) -> list[str]:
    """Return the names of the options of one direction."""
    return [name for name in OPTIONS if name not in ONE_DIRECTION[not backward]]


def excluded(first: str, second: str, *, backward: bool) -> bool:
    """True if two options exclude each other, or one of them belongs to the other direction."""
    if {first, second} & ONE_DIRECTION[not backward]:
        return True
    one, other = OPTIONS[first], OPTIONS[second]
    conflicting = any(one[name] != other[name] for name in one.keys() & other.keys())
    return conflicting or {first, second} == {"lengths", "packed"}


def pair(first: str, second: str, *, backward: bool) -> Problem | None:
    """Return the problem with two options, or with one if they are equal; None if :func:`excluded`."""
    if excluded(first, second, backward=backward):
        return None
    options = {**OPTIONS[first], **OPTIONS[second], "backward": backward}
    if "packed" in (first, second):
        return cupy_sdpa.problem((128, 8, 2 * _SQ), (128, 2, 2 * _SKV), (128, 2, 2 * _SKV), dtype="bfloat16", **options)
    return problem_of_sizes(hkv=2, sq=_SQ, skv=_SKV, **options)


def pairs() -> dict[str, Problem]:
    """Return the problems of single options and of pairs in both directions, by title."""
    problems = {}
    for backward in (False, True):
        direction = "gradients" if backward else "forward"
        for index, first in enumerate(OPTIONS):
            for second in list(OPTIONS)[index:]:
                if problem := pair(first, second, backward=backward):
                    problems[f"{direction}, {first if first == second else f'{first} and {second}'}"] = problem
    return problems


def _of_score(function: Callable[[Any], Any]) -> dict[str, Any]:
    return {"score_mod": lambda score, b, h, q_idx, kv_idx: function(score)}


def _mask(function: Callable[..., Any], *shape: int) -> dict[str, Any]:
    tensors = {"tensors": {"x": np.zeros(shape, np.int32)}} if shape else {}
    return {"mask_mod": function, **tensors}


def _reads(function: Callable[..., Any], *shape: int) -> dict[str, Any]:
    return {"score_mod": function, "tensors": {"x": shape}}


#: The operations of score and mask functions, as options by title.
OPERATIONS: dict[str, dict[str, Any]] = {
    "`s + s * s - 3`, `-s`": _of_score(lambda s: -(s + s * s - 3)),
    "`s / (1 + s * s)`, `1 / s`": _of_score(lambda s: s / (1 + s * s)),
    "`s ** 3`, `np.power`": _of_score(lambda s: (1 + s * s) ** s),
    "`abs`, `np.sign`": _of_score(lambda s: abs(s) + np.sign(s)),
    "`np.maximum`, `np.minimum`, `np.clip`": _of_score(lambda s: np.clip(s, -1.5, 1.5)),
    "`np.exp`, `np.exp2`, `np.expm1`": _of_score(lambda s: np.exp(0.5 * s)),
    "`np.log`, `np.log1p`, `np.log2`, `np.log10`": _of_score(lambda s: np.log(1 + s * s)),
    "`np.logaddexp`": _of_score(lambda s: np.logaddexp(s, 0.5)),
    "`np.sqrt`, `np.hypot`": _of_score(lambda s: np.sqrt(1 + s * s)),
    "`s ** -0.5`": _of_score(lambda s: (1 + s * s) ** -0.5),
    "`np.tanh`": _of_score(np.tanh),
    "`scipy.special.expit`": _of_score(lambda s: FUNCTIONS["expit"](s)),
    "`scipy.special.erf`": _of_score(lambda s: FUNCTIONS["erf"](s)),
    "`np.sinh`, `np.cosh`": _of_score(lambda s: np.sinh(0.5 * s)),
    "`np.sin`, `np.cos`": _of_score(np.sin),
    "`np.tan`": _of_score(np.tan),
    "`np.arctan`": _of_score(np.arctan),
    "`np.floor`, `np.ceil`, `//`, `%`": _of_score(lambda s: s % 1.5 + np.ceil(s)),
    "`np.round`, `np.rint`, `np.trunc`": _of_score(lambda s: np.round(s) + np.trunc(s)),
    "`np.where(s > 0, ...)`, `==`, `<=`": _of_score(lambda s: np.where((s > 0) | (s <= -1), s, 0.5 * s)),
    "positions as numbers": {"score_mod": lambda s, b, h, q_idx, kv_idx: s + (q_idx - kv_idx) * 0.1 + b - h},
    "`x[h]`, `x[b, h]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s * x[h], 8),
    "`x[kv_idx]`, `x[b, h, kv_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s + x[b, kv_idx], 2, 512),
    "`x[q_idx]`, `x[b, h, q_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s * x[b, h, q_idx], 2, 8, 512),
    "`x[h, q_idx, kv_idx]`": _reads(lambda s, b, h, q_idx, kv_idx, x: s + x[h, q_idx, kv_idx], 8, 512, 512),
    "masks of positions, `&`, `|`, `~`, `^`": _mask(
        lambda b, h, q_idx, kv_idx: (q_idx % 3 == 0) ^ ~(kv_idx // 64 == q_idx // 64)
    ),
    "masks of int32 arrays": _mask(lambda b, h, q_idx, kv_idx, x: x[b, q_idx] == x[b, kv_idx], 2, 512),
}


def operations() -> dict[str, Problem]:
    """Return the problems of the operations of functions in both directions, by title."""
    return {
        f"{direction}, {title}": problem_of_sizes(backward=direction == "gradients", **options)
        for direction in ("forward", "gradients")
        for title, options in OPERATIONS.items()
    }


# the survey

#: Rules and bugs whose problems cuDNN plans nevertheless: their results are wrong or not deterministic.
_PLANNED = {rule.name for rule in RULES if rule.planned} | {bug.name for bug in BUGS if bug.planned and not bug.guards}
#: Problems that cuDNN does not plan for a described GPU although the table allows them: 9.28 cannot compile the kernel
#: (NVRTC) for the constructed description of the B200. According to NVIDIA's frontend it runs since 9.23; not tried on a B200.
EXCEPTIONS = {("gradients, head dim 256", "b200")}


@dataclass(frozen=True)
class Finding:
    """The support table and the plan of one problem on one GPU.

    Attributes:
        probe: the title of the problem.
        gpu: the name of the description.
        rules: the rules and bugs that rule the problem out.
        measured: ``engine`` and its number, or cuDNN's refusal.
        agree: whether both agree. Entries about wrong results agree with any plan, which cannot confirm them.
    """

    probe: str
    gpu: str
    rules: tuple[str, ...]
    measured: str
    agree: bool


def measure(
    probes: Mapping[str, Problem], cudnn: str | None = None, progress: Callable[[int, int], None] | None = None
) -> tuple[int, list[Finding]]:
    """Plan problems for a GPU of each compute capability and compare with the support table.

    Args:
        probes: the problems by title, for example ``PROBES``.
        cudnn: path of a libcudnn.so.9. Default None: the library that this process would load.
        progress: called with (number of finished problems, number of all problems). Default None.

    Returns:
        The version of cuDNN, and the findings.

    Raises:
        CudnnError: this machine cannot plan; the message lists what is missing.
    """
    subproblem = {title: subproblems(problem)[-1] for title, problem in probes.items()}  # the last is specific to the problem
    pairs = [(title, gpu) for gpu in gpus.REPRESENTATIVES for title in probes]
    findings: dict[int, Finding] = {}
    with Planner(2, **({} if cudnn is None else {OVERRIDE: cudnn})) as planner:
        jobs = [(subproblem[title], Target.described(gpu)) for title, gpu in pairs]
        for index, plan in planner.call_all(plan_described, jobs):
            title, gpu = pairs[index]
            rules = tuple(reason.rule for reason in why_not(probes[title], planner.version, gpus.capability_of(gpu)))
            if isinstance(plan, str):
                agree, measured = bool(rules) or (title, gpu) in EXCEPTIONS, " ".join(plan.split())
            else:
                agree, measured = set(rules) <= _PLANNED, f"engine {plan.engine}"
            findings[index] = Finding(title, gpu, rules, measured, agree)
            if progress:
                progress(len(findings), len(jobs))
        return planner.version, [findings[index] for index in range(len(pairs))]


# the page


def page(version: int) -> Iterator[str]:
    """Yield the lines of the page, in Markdown.

    Args:
        version: the version of cuDNN; the table of problems also shows the oldest supported version.
    """
    yield from _introduction()
    yield "## GPUs\n"
    yield from _gpus()
    yield "\n## Problems and GPUs\n"
    for number in (version, MINIMUM_CUDNN):
        yield f"cuDNN {version_text(number)}:\n"
        yield from _problems(number)
        yield ""
    yield "## Pairs of options\n"
    yield (
        f"With cuDNN {version_text(version)}. The diagonal shows each option alone. In an empty cell the options exclude each "
        "other. Random problems indicate that three or more options run if every pair of them does "
        "(tests/graph/test_planned_problems.py).\n"
    )
    for backward in (False, True):
        yield f"{'Gradients' if backward else 'Forward'}:\n"
        yield from _pairs(version, backward=backward)
        yield ""
    yield "## Score and mask functions\n"
    yield (
        f"Supported operations with cuDNN {version_text(version)}; `python tools/support_table.py measure --operations` plans "
        "each of them.\n"
    )
    yield from _operations(version)
    yield ""
    yield "## Rules\n"
    yield from _rules()
    yield "\n## Known bugs\n"
    yield from _bugs()


def _introduction() -> Iterator[str]:
    yield "# Supported problems\n"
    yield "<!-- Written by `python tools/support_table.py page`; a test compares. -->\n"
    yield (
        "Look up here which problems your GPU and your cuDNN version can run, before you choose a shape, an option or a GPU. "
        f"You need cuDNN {version_text(MINIMUM_CUDNN)} or newer, and a GPU of compute capability {MINIMUM_CAPABILITY / 10} or "
        'newer; on other GPUs, and for what these tables do not support, pass [`engine="cupy"`](engines.md).\n'
    )
    yield (
        "- To check one call, use {func}`~cupy_sdpa.explain`. It returns every reason against the call, and the versions and "
        'GPUs that would run it. It needs no GPU: `explain(..., gpu="h200", cudnn="9.19")`.\n'
        "- To see the rows for your machine, run `python -m cupy_sdpa support` ([command line](command_line.md)).\n"
        "- To compare these tables with the installed cuDNN, run `python tools/support_table.py measure`; it needs no GPU.\n"
    )
    yield (
        "Results were verified on Hopper GPUs (H100, H200) only. For the other GPUs the tables show what cuDNN plans for "
        'their descriptions. "Unverified" marks known doubts: such a call runs if cuDNN can plan it. '
        "`python -m cupy_sdpa check` verifies the results on a GPU.\n"
    )


def _gpus() -> Iterator[str]:
    yield (
        "The tables depend on the compute capability alone. `plan`, `explain(gpu=)` and `store.build` plan for these GPUs by "
        "name; *read* descriptions come from a device, *constructed* ones from published properties. `python -m cupy_sdpa info "
        "--describe > card.json` describes another GPU, which is then named by the path of the file.\n"
    )
    yield "| compute capability | GPUs |"
    yield "|---|---|"
    for gpu in gpus.REPRESENTATIVES:
        capability = gpus.capability_of(gpu)
        same = [f"`{name}` ({gpus.origin(name)})" for name in gpus.NAMES if gpus.capability_of(name) == capability]
        yield _row([f"{capability / 10}", ", ".join(same)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(columns: Iterable[str]) -> Iterator[str]:
    """Yield a header with an empty first cell."""
    columns = list(columns)
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"


def _problems(version: int) -> Iterator[str]:
    yield from _header(f"{gpus.capability_of(gpu) / 10} {gpu.upper()}" for gpu in gpus.REPRESENTATIVES)
    for title, problem in PROBES.items():
        yield _row([title, *(_support_on(problem, version, gpus.capability_of(gpu)) for gpu in gpus.REPRESENTATIVES)])


def _support_on(problem: Problem, version: int, capability: int) -> str:
    if reasons := why_not(problem, version, capability):
        return f"no: {', '.join(dict.fromkeys(reason.rule for reason in reasons))}"
    if doubts := unverified_rules(problem, version, capability):
        return f"unverified: {', '.join(dict.fromkeys(name for name, _ in doubts))}"
    return "yes"


def _pairs(version: int, *, backward: bool) -> Iterator[str]:
    names = names_of_options(backward=backward)
    yield from _header(names)
    for first in names:
        yield _row([first, *(_gpus_of(pair(first, second, backward=backward), version) for second in names)])


def _operations(version: int) -> Iterator[str]:
    problems = operations()
    yield from _header(("forward", "gradients"))
    for title in OPERATIONS:
        cells = [_gpus_of(problems[f"{direction}, {title}"], version) for direction in ("forward", "gradients")]
        yield _row([title.replace("|", "\\|"), *cells])


def _gpus_of(problem: Problem | None, version: int) -> str:
    """Return the GPUs that run a problem: ``yes`` for all, ``no`` for none."""
    if problem is None:
        return ""
    supported = [gpu.upper() for gpu in gpus.REPRESENTATIVES if not why_not(problem, version, gpus.capability_of(gpu))]
    return "yes" if len(supported) == len(gpus.REPRESENTATIVES) else ", ".join(supported) or "no"


def _rules() -> Iterator[str]:
    yield "| rule | | raises | source |"
    yield "|---|---|---|---|"
    for rule in RULES:
        raises = f"`{rule.error.__name__}`" if rule.refuses else "nothing: unverified"
        yield _row([rule.name, rule.summary, raises, _link(rule.link)])


def _bugs() -> Iterator[str]:
    yield "| bug | cuDNN | compute capability | condition | effect | action | source |"
    yield "|---|---|---|---|---|---|---|"
    for bug in BUGS:
        action = ", ".join(GUARDS[guard] for guard in sorted(bug.guards)) or f"refusal: {bug.remedy}"
        yield _row([bug.name, _versions(bug), _capabilities(bug), bug.when, bug.effect, action, _link(bug.link)])


def _versions(bug: Bug) -> str:
    return f"{version_text(bug.first)} to {'newest' if bug.last == NOT_FIXED else version_text(bug.last)}"


def _capabilities(bug: Bug) -> str:
    return f"{bug.capabilities.start / 10} to {(bug.capabilities.stop - 1) / 10}"


def _link(link: str) -> str:
    if not link:
        return "measured"
    return f"<{link}>" if link.startswith("https://") else "[cuDNN](cudnn.md)"


def main(words: Sequence[str] | None = None) -> int:
    """Run the tool."""
    parser = argparse.ArgumentParser(description="The support table against cuDNN, and as a page of the documentation.")
    parser.add_argument("what", choices=("page", "measure"))
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--pairs", action="store_true", help="measure every pair of options")
    which.add_argument("--operations", action="store_true", help="measure every operation of score functions")
    parser.add_argument("--cudnn", metavar="FILE", help="the libcudnn.so.9 to measure (default: the installed one)")
    arguments = parser.parse_args(words)
    if arguments.what == "page":
        print("\n".join(page(RELEASES[-1])))
        return 0
    problems = pairs() if arguments.pairs else operations() if arguments.operations else PROBES
    try:
        version, findings = measure(
            problems, arguments.cudnn, lambda done, count: print(f"\r{done} of {count}", end="", file=sys.stderr, flush=True)
        )
    except CudnnError as error:
        print(error, file=sys.stderr)
        return 2
    print(file=sys.stderr)
    wrong = [finding for finding in findings if not finding.agree]
    for finding in wrong:
        expected = ", ".join(finding.rules) or "it runs"
        print(f"{finding.probe} on {finding.gpu}: table: {expected}; cuDNN: {finding.measured}")
    print(f"{len(findings)} problems with cuDNN {version_text(version)}: {len(wrong)} differ from the table")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
