"""Return the support table as data: what a cuDNN version runs on each described GPU, the rules and the known bugs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..problem.problem import Problem
from ..version import MINIMUM_CUDNN, RELEASES, version_number, version_text
from . import gpus
from .known_bugs import BUGS, GUARDS
from .rules import RULES
from .why_not import unverified_rules, why_not


class SupportTable:
    """The support table of one cuDNN version.

    Args:
        cudnn: the version, such as ``"9.19"``. Default None: the newest known one.

    Attributes:
        version: the version as text.

    Raises:
        ValueError: there is no such version, or it is too old.

    >>> SupportTable("9.19").version, SupportTable.GPUS[-1]
    ('9.19.0', 'rtx5090')
    """

    #: The names of the described GPUs.
    GPUS = gpus.NAMES

    def __init__(self, cudnn: str | None = None) -> None:
        self._number = RELEASES[-1] if cudnn is None else version_number(cudnn)
        self.version = version_text(self._number)

    def as_data(self, problems: Mapping[str, Problem]) -> dict[str, Any]:
        """Return the table as plain data, with verdicts on ``problems``, given by name. docs/command_line.md lists the keys."""
        return {
            "cudnn": self.version, "minimum_cudnn": version_text(MINIMUM_CUDNN),
            "gpus": [
                {"name": name, "compute_capability": gpus.capability_of(name) / 10, "origin": gpus.origin(name)}
                for name in self.GPUS
            ],
            "problems": [
                {"name": name, "gpus": {gpu: self._verdict(problem, gpu) for gpu in gpus.REPRESENTATIVES}}
                for name, problem in problems.items()
            ],
            "rules": [
                {"name": rule.name, "summary": rule.summary, "refuses": rule.refuses, "error": rule.error.__name__}
                for rule in RULES
            ],
            "bugs": [
                {
                    "name": bug.name, "when": bug.when, "effect": bug.effect, "guards": sorted(bug.guards),
                    "workarounds": [GUARDS[guard] for guard in sorted(bug.guards)], "remedy": bug.remedy,
                }
                for bug in BUGS
            ],
        }  # fmt: skip

    def _verdict(self, problem: Problem, gpu: str) -> dict[str, Any]:
        """Return whether a GPU runs a problem, and the names of the rules by which it cannot run or is unverified."""
        capability = gpus.capability_of(gpu)
        reasons = why_not(problem, self._number, capability)
        rules = [reason.rule for reason in reasons] or [name for name, _ in unverified_rules(problem, self._number, capability)]
        return {"runs": not reasons, "rules": tuple(dict.fromkeys(rules))}
