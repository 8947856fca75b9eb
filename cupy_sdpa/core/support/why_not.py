"""Queries on the tables: why a problem cannot run, which bugs are avoided, and what is unverified on a GPU.

:func:`why_not` checks a problem against every rule (:mod:`.rules`) and every bug without a guard (:mod:`.known_bugs`). An empty
result means that no reason is known; cuDNN may still fail to plan it. :func:`guards` and :func:`staging_guards` return the
guards that a problem needs.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from ..errors import Unsupported
from ..problem.problem import Problem
from ..version import RELEASES, version_text
from .known_bugs import BUGS, GUARDS, STAGING_GUARDS, Bug
from .rules import RULES, Rule

#: One compute capability of each GPU generation, and the name of the generation.
GENERATIONS = {80: "Ampere", 86: "Ampere", 89: "Ada", 90: "Hopper", 100: "Blackwell", 120: "GeForce Blackwell"}
#: The compute capabilities on which this package was run.
VERIFIED = frozenset({90})
#: The environment variable that disables rules and bugs: their names, separated by commas.
GUARDS_OFF = "CUPY_SDPA_GUARDS_OFF"


class Reason(NamedTuple):
    """Why a problem cannot run.

    Attributes:
        rule: the name of the rule or of the bug.
        error: the class of the exception that a call raises.
        text: the values and the fix.
        lift: the cuDNN versions and GPUs that run the problem; empty if nothing runs it.
    """

    rule: str
    error: type[Exception]
    text: str
    lift: str = ""

    def __str__(self) -> str:
        return f"{self.text}. It would run {self.lift}" if self.lift else self.text


def why_not(problem: Problem, cudnn: int, capability: int) -> list[Reason]:
    """Return every known reason why cuDNN cannot run a problem, with this version (9.19.0 is 91900) on this GPU (9.0 is 90)."""
    return [reason._replace(lift=_lift(reason, problem, cudnn, capability)) for reason in _reasons(problem, cudnn, capability)]


def _reasons(problem: Problem, cudnn: int, capability: int) -> list[Reason]:
    table: tuple[Rule | Bug, ...] = (*RULES, *BUGS)
    rows = [row for row in table if row.refuses and row.name not in disabled_names()]
    return [Reason(row.name, row.error, text) for row in rows for text in row.violations(problem, cudnn, capability)]


def _lift(reason: Reason, problem: Problem, cudnn: int, capability: int) -> str:
    """Return the cuDNN releases and the GPUs that have no reason against the problem; empty if all have one."""
    if reason.error is not Unsupported:
        return ""

    def lifts(version: int, gpu: int) -> bool:
        return not _reasons(problem, version, gpu)

    newer = [v for v in RELEASES if v > cudnn and lifts(v, capability)]
    older = [v for v in RELEASES if v < cudnn and lifts(v, capability)]
    versions = [f"with cuDNN {version_text(v)}" for v in (newer[:1] or older[-1:])]
    gpus = list(dict.fromkeys(name for gpu, name in GENERATIONS.items() if gpu != capability and lifts(cudnn, gpu)))
    return ", or ".join([*versions, *([f"on {', '.join(gpus)}"] if gpus else [])])


@functools.cache
def disabled_names() -> frozenset[str]:
    """Return the rules and bugs that :data:`GUARDS_OFF` disables; the variable is read once.

    Raises:
        ValueError: a name is unknown, or names a rule that protects memory.
    """
    names = frozenset(filter(None, os.environ.get(GUARDS_OFF, "").replace(" ", "").split(",")))
    allowed = {bug.name for bug in BUGS} | {rule.name for rule in RULES if rule.error is Unsupported}
    if unknown := names - allowed:
        raise ValueError(f"{GUARDS_OFF} names {', '.join(sorted(unknown))}; it can turn off {', '.join(sorted(allowed))}")
    return names


def _bugs_of(problem: Problem, cudnn: int, capability: int) -> list[Bug]:
    """Return the bugs that affect a problem and are not disabled."""
    disabled = disabled_names()
    return [bug for bug in BUGS if bug.name not in disabled and bug.affects(problem, cudnn, capability)]


def guards(problem: Problem, cudnn: int, capability: int) -> frozenset[str]:
    """Return the keys of :data:`~.known_bugs.GUARDS` that avoid the bugs affecting a problem."""
    return frozenset().union(*(bug.guards for bug in _bugs_of(problem, cudnn, capability)))


_STAGING_BUGS = tuple(bug for bug in BUGS if bug.guards & STAGING_GUARDS)


def staging_guards(problem: Problem) -> frozenset[str]:
    """Return the guards that change a problem's arrays: the guards in :data:`~.known_bugs.STAGING_GUARDS` that it needs."""
    disabled = disabled_names()
    bugs = (bug for bug in _STAGING_BUGS if bug.name not in disabled and bug.condition(problem))
    return frozenset().union(*(bug.guards for bug in bugs))


def workarounds(problem: Problem, cudnn: int, capability: int) -> tuple[str, ...]:
    """Describe every bug that affects a problem and that guards avoid, one line each."""
    return tuple(
        f"{bug.name} ({bug.when}: {bug.effect}): {', '.join(GUARDS[guard] for guard in sorted(bug.guards))}"
        for bug in _bugs_of(problem, cudnn, capability)
        if bug.guards
    )


def unverified_rules(problem: Problem, cudnn: int, capability: int) -> list[tuple[str, str]]:
    """Return the name and message of every violated rule that raises no error."""
    rules = [rule for rule in RULES if not rule.refuses and rule.name not in disabled_names()]
    return [(rule.name, text) for rule in rules for text in rule.violations(problem, cudnn, capability)]


def unverified(problem: Problem, cudnn: int, capability: int) -> tuple[str, ...]:
    """Return the features of a problem that were never run on such a GPU. A call runs there if cuDNN can plan it."""
    messages = [text for _, text in unverified_rules(problem, cudnn, capability)]
    if capability not in VERIFIED:
        messages.append(f"this package was not run on compute capability {capability / 10}")
    return tuple(messages)
