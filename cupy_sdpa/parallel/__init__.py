"""Attention over several GPUs: every member of a group holds a part of each sequence (context parallelism)."""

from .context import ContextParallel, context_parallel
from .groups.group import Group, GroupError
from .groups.launch import Environment, connect, environment, run_on_gpus
from .groups.loopback import Loopback, run_threads
from .groups.mpi import MpiGroup
from .groups.nccl import NcclGroup
from .planning.report import ParallelReport

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
