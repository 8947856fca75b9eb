"""Compare the support table with the plans of the real cuDNN, for a GPU of each compute capability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..problem.problem import Problem
from ..problem.subproblems import subproblems
from ..support import gpus
from ..support.known_bugs import BUGS
from ..support.rules import RULES
from ..support.why_not import why_not
from .planner import Planner, load_target

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
        rules: the rules and bugs that refuse the problem.
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
        probes: the problems by title, for example :data:`.problems.PROBES`.
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
    with Planner(2, cudnn) as planner:
        jobs = [(subproblem[title], load_target(gpu)) for title, gpu in pairs]
        for index, plan in planner.plan_all(jobs, None):
            title, gpu = pairs[index]
            rules = tuple(reason.rule for reason in why_not(probes[title], planner.version, gpus.capability(gpu)))
            if isinstance(plan, str):
                agree, measured = bool(rules) or (title, gpu) in EXCEPTIONS, " ".join(plan.split())
            else:
                agree, measured = set(rules) <= _PLANNED, f"engine {plan.engine}"
            findings[index] = Finding(title, gpu, rules, measured, agree)
            if progress:
                progress(len(findings), len(jobs))
        return planner.version, [findings[index] for index in range(len(pairs))]
