"""A version of cuDNN: what it supports, which one this process has loaded, and what is missing to run on a GPU."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..cudnn.deviceless import load_driver_or_stub, read_description
from ..cudnn.library import OVERRIDE, library
from ..cudnn.nvrtc import nvrtc
from ..errors import CudnnError
from ..problem.problem import Problem
from ..version import MINIMUM_CUDNN, RELEASES, version_number, version_text
from . import gpus
from .known_bugs import BUGS, GUARDS
from .rules import MINIMUM_CAPABILITY, RULES
from .why_not import unverified_rules, why_not


class Cudnn:
    """A version of cuDNN, and what it supports. Only static methods load cuDNN.

    Args:
        version: the version, such as ``"9.19"``. Default None: the newest known one.

    Raises:
        ValueError: there is no such version, or it is too old.

    >>> Cudnn("9.19").version, Cudnn.GPUS[-1]
    ('9.19.0', 'rtx5090')
    """

    #: The names of the described GPUs.
    GPUS = gpus.NAMES

    def __init__(self, version: str | None = None) -> None:
        self._number = RELEASES[-1] if version is None else version_number(version)

    @property
    def version(self) -> str:
        """The version as text."""
        return version_text(self._number)

    @staticmethod
    def installed() -> InstalledCudnn:
        """Return the cuDNN of this process, which is loaded on first use.

        Raises:
            CudnnError: cuDNN is not found; the message lists every place searched.
        """
        return InstalledCudnn()

    @staticmethod
    def obstacles(capability: int | None, install: str) -> Iterator[str]:
        """Yield why the installed cuDNN cannot run here, with fixes: it is missing or too old, or the GPU is too old.

        ``capability`` is the GPU's compute capability, or None if unknown; ``install`` is the command that installs cuDNN.
        """
        try:
            version = library().version
        except CudnnError as error:
            yield f"cuDNN is not found: {error.summary if OVERRIDE in os.environ else install}"
        else:
            if version < MINIMUM_CUDNN:
                yield f"cuDNN is {version_text(version)}, {version_text(MINIMUM_CUDNN)} or newer is required: {install}"
        if capability is not None and capability < MINIMUM_CAPABILITY:
            yield f"the GPU has compute capability {capability / 10}, {MINIMUM_CAPABILITY / 10} or newer is required"

    @staticmethod
    @functools.cache
    def planning_version() -> int:
        """Load the driver or a stub of it, then cuDNN, and return cuDNN's version; for a process that does not use a GPU.

        Raises:
            CudnnError: this machine cannot plan; the message lists what is missing.
        """
        load_driver_or_stub()
        return library().version

    def support_table(self, problems: Mapping[str, Problem]) -> dict[str, Any]:
        """Return the support table as data, with verdicts on ``problems`` by name. docs/command_line.md lists the keys."""
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


class InstalledCudnn(Cudnn):
    """The cuDNN of this process.

    Attributes:
        path: the path of cuDNN's library.
        cuda: the CUDA version that cuDNN was built with; 12090 is 12.9.
        found_by: how the library was found.
        nvrtc: the NVRTC that cuDNN uses.
    """

    def __init__(self) -> None:
        cudnn = library()
        self._number, self.path = cudnn.version, cudnn.path
        self.cuda, self.found_by, self.nvrtc = cudnn.cudart_version, cudnn.found_via, nvrtc()

    def describe_gpu(self) -> str:
        """Return cuDNN's description of the current GPU as JSON. Create a CUDA context if there is none.

        Raises:
            CudnnError: there is no GPU.
        """
        return read_description()
