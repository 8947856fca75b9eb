"""A group of mpi4py."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..extend import cupy_runtime
from .group import Failing, Transfer

#: The seconds for which a member waits for an exchange.
DEFAULT_TIMEOUT = 300.0
#: The number of tags that every MPI has.
_TAGS = 32768


class MpiGroup(Failing):
    """Connect the processes of an mpi4py communicator as a group.

    MPI is not ordered with CUDA streams: every exchange of CuPy arrays waits for the current stream. NCCL is faster on GPUs.

    Args:
        communicator: a communicator of mpi4py, such as ``MPI.COMM_WORLD``.
        cuda_aware: whether MPI reads and writes the GPU's memory itself; otherwise arrays are copied to the host. Default
            False.
        timeout: the seconds for which a member waits for an exchange. Default 300.

    Attributes:
        rank: the rank of this member.
        size: P, the number of members.

    >>> from cupy_sdpa.parallel import MpiGroup
    >>> class World:  # stands for mpi4py.MPI.COMM_WORLD in one process
    ...     def Get_rank(self): return 0
    ...     def Get_size(self): return 1
    >>> group = MpiGroup(World(), timeout=60)
    >>> group.rank, group.size, group.timeout
    (0, 1, 60)
    """

    def __init__(self, communicator: Any, *, cuda_aware: bool = False, timeout: float = DEFAULT_TIMEOUT) -> None:
        self._communicator, self._cuda_aware, self.timeout = communicator, cuda_aware, timeout
        self.rank, self.size = int(communicator.Get_rank()), int(communicator.Get_size())

    def exchange(self, sends: Sequence[Transfer], receives: Sequence[Transfer], label: str) -> None:
        """Send and receive arrays; see :class:`~cupy_sdpa.parallel.group.Exchanger`.

        Args:
            sends, receives: pairs of a dense array uint8 ``(bytes,)`` and the rank of the other member.
            label: what is exchanged, for messages; the same for all members.

        Raises:
            GroupError: the exchange did not end in time, or an earlier one did not.
        """
        self.check()
        arrays = [x.array for x in (*sends, *receives)]
        on_gpu = any(cupy_runtime.is_array(x) for x in arrays)
        staged = on_gpu and not self._cuda_aware
        if on_gpu:
            cupy_runtime.cupy().cuda.get_current_stream().synchronize()
        tag = zlib.crc32(label.encode()) % _TAGS
        buffers = [np.empty(x.array.shape, x.array.dtype) if staged else x.array for x in receives]
        requests = [
            self._communicator.Irecv(buffer, source=x.peer, tag=tag) for buffer, x in zip(buffers, receives, strict=True)
        ]
        contents = [x.array.get() if staged else x.array for x in sends]
        requests += [self._communicator.Isend(array, dest=x.peer, tag=tag) for array, x in zip(contents, sends, strict=True)]
        self._wait(requests, label)
        if staged:
            for x, buffer in zip(receives, buffers, strict=True):
                x.array.set(buffer)

    def _wait(self, requests: Sequence[Any], label: str) -> None:
        deadline, pending = time.monotonic() + self.timeout, list(requests)
        while pending:
            pending = [request for request in pending if not request.Test()]
            if pending and time.monotonic() > deadline:
                for request in pending:
                    request.Cancel()
                self._failure = (
                    f"member {self.rank} waited {self.timeout:g} s for {label!r}: another member ended, failed, or called with "
                    "different shapes or options"
                )
                self.check()
            if pending:
                time.sleep(0)
