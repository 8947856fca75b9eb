"""Attention over several GPUs: every member of a group holds a part of each sequence (context parallelism)."""

from .context import ContextParallel, context_parallel
from .groups.group import Group, GroupError
from .groups.loopback import Loopback, run_threads
from .report import ParallelReport

__all__ = ["ContextParallel", "Group", "GroupError", "Loopback", "ParallelReport", "context_parallel", "run_threads"]
