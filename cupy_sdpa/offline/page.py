"""The page docs/support.md, generated from the support table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..problem.problem import Problem
from ..support import gpus
from ..support.known_bugs import BUGS, GUARDS, NOT_FIXED, Bug
from ..support.rules import MINIMUM_CAPABILITY, RULES
from ..support.why_not import unverified_rules, why_not
from ..version import MINIMUM_CUDNN, version_text
from .problems import OPERATIONS, PROBES, names_of_options, operations, pair


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
    yield f"Supported operations with cuDNN {version_text(version)}; `support --measure --operations` plans each of them.\n"
    yield from _operations(version)
    yield ""
    yield "## Rules\n"
    yield from _rules()
    yield "\n## Known bugs\n"
    yield from _bugs()


def _introduction() -> Iterator[str]:
    yield "# Supported problems\n"
    yield "<!-- Written by `python -m cupy_sdpa support --markdown`; a test compares. -->\n"
    yield (
        f"Requirements: cuDNN {version_text(MINIMUM_CUDNN)} or newer, and a GPU of compute capability "
        f"{MINIMUM_CAPABILITY / 10} or newer. `explain()` checks a single call and returns the reasons against it, with the "
        "versions and GPUs that would run it. `python -m cupy_sdpa support --measure` compares these tables with the installed "
        "cuDNN and needs no GPU.\n"
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
        capability = gpus.capability(gpu)
        same = [f"`{name}` ({gpus.origin(name)})" for name in gpus.NAMES if gpus.capability(name) == capability]
        yield _row([f"{capability / 10}", ", ".join(same)])


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _header(columns: Iterable[str]) -> Iterator[str]:
    """A header with an empty first cell."""
    columns = list(columns)
    yield f"| | {' | '.join(columns)} |"
    yield "|---" * (len(columns) + 1) + "|"


def _problems(version: int) -> Iterator[str]:
    yield from _header(f"{gpus.capability(gpu) / 10} {gpu.upper()}" for gpu in gpus.REPRESENTATIVES)
    for title, problem in PROBES.items():
        yield _row([title, *(_support_on(problem, version, gpus.capability(gpu)) for gpu in gpus.REPRESENTATIVES)])


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
    """The GPUs that run a problem: ``yes`` for all, ``no`` for none."""
    if problem is None:
        return ""
    supported = [gpu.upper() for gpu in gpus.REPRESENTATIVES if not why_not(problem, version, gpus.capability(gpu))]
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
