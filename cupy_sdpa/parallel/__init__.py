"""Attention over several GPUs: every member of a group holds a part of each sequence (context parallelism)."""

from .context import ContextParallel, context_parallel
from .group import Group, GroupError
from .group_report import ParallelReport
from .launchers import Environment, connect, environment, run_on_gpus
from .loopback import Loopback, run_threads
from .mpi import MpiGroup
from .nccl import NcclGroup

__all__ = [
    "ContextParallel",
    "Environment",
    "Group",
    "GroupError",
    "Loopback",
    "MpiGroup",
    "NcclGroup",
    "ParallelReport",
    "connect",
    "context_parallel",
    "environment",
    "run_on_gpus",
    "run_threads",
]


def __dir__() -> list[str]:
    """Return the public names."""
    return __all__
