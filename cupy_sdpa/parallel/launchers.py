"""How processes and threads become members of a group: the environment of mpirun and torchrun, and threads of a process."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ..extend import cupy_runtime
from .group import GroupError
from .loopback import run_threads
from .nccl import DEFAULT_TIMEOUT, CupyCommunicator, NcclGroup

#: The variables of each launcher: rank, number of processes, rank on the host.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "MPICH, Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "Slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}
#: The port of rank 0 if the launcher names none; with torchrun, whose own store uses MASTER_PORT, the next port.
DEFAULT_PORT = 13334


class Environment(NamedTuple):
    """Hold the settings of a process that its launcher passes in environment variables; :func:`environment` returns it.

    Attributes:
        launcher: the launcher, ``"torchrun"``, ``"Open MPI"``, ``"MPICH, Intel MPI"`` or ``"Slurm"``.
        rank: the rank of this process.
        size: the number of processes.
        local_rank: its rank among the processes of this host, which is the number of its GPU.
        address, port: where rank 0 listens.

    >>> from cupy_sdpa.parallel import environment
    >>> variables = {"SLURM_PROCID": "2", "SLURM_NTASKS": "8", "SLURM_LOCALID": "2"}
    >>> environment(variables).launcher, environment(variables).rank, environment(variables).port
    ('Slurm', 2, 13334)
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables that torchrun, mpirun (Open MPI, MPICH, Intel MPI) or srun sets.

    ``CUPY_SDPA_PORT`` overrides the port; ``MASTER_ADDR`` names the host of rank 0 for every launcher.

    Args:
        variables: the environment. Default None: this process's.

    Returns:
        The settings of this process.

    Raises:
        RuntimeError: no launcher is found.
        ValueError: a variable is not a number, or the rank is not below the number of processes.

    >>> environment({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})
    Environment(launcher='torchrun', rank=1, size=4, local_rank=1, address='node0', port=29501)
    """
    variables = os.environ if variables is None else variables
    for launcher, names in _LAUNCHERS.items():
        if names[0] not in variables or names[1] not in variables:
            continue
        given = {name: variables[name] for name in (*names, "MASTER_PORT", "CUPY_SDPA_PORT") if name in variables}
        for name, value in given.items():
            if not value.isdecimal():
                raise ValueError(f"the environment variable {name} is {value!r}; it must be a number")
        numbers = {name: int(value) for name, value in given.items()}
        rank, size = numbers[names[0]], numbers[names[1]]
        if rank >= size:
            raise ValueError(f"the environment variable {names[0]} is {rank} and {names[1]} is {size}; the rank must be lower")
        port = numbers.get("CUPY_SDPA_PORT", numbers["MASTER_PORT"] + 1 if "MASTER_PORT" in numbers else DEFAULT_PORT)
        address = variables.get("MASTER_ADDR", "127.0.0.1")
        return Environment(launcher, rank, size, numbers.get(names[2], rank), address, port)
    raise RuntimeError(
        "no launcher is found in the environment: start the processes with mpirun -n 8 python script.py, or torchrun "
        "--nproc-per-node 8 script.py; or use run_on_gpus() in one process"
    )


def connect(timeout: float = DEFAULT_TIMEOUT, variables: Mapping[str, str] | None = None) -> NcclGroup:
    """Connect the processes that mpirun, torchrun or srun started, one for each GPU, and return their group; collective.

    Makes the GPU of the local rank the current device. Rank 0 sends NCCL's id to the other processes over TCP, as PyTorch and
    cupyx.distributed do: use it in trusted networks only.

    Args:
        timeout: the seconds after which an exchange or the connection counts as failed. Default 300.
        variables: the environment. Default None: this process's.

    Returns:
        The group, an :class:`NcclGroup`; pass it to :func:`context_parallel`.

    Raises:
        RuntimeError: no launcher is found, CuPy is not installed, or there is no GPU.
        ValueError: a variable is not a number, or the rank is not below the number of processes.
        GroupError: not all processes connect in time.

    Without a launcher:

    >>> from cupy_sdpa.parallel import connect
    >>> try:
    ...     connect(variables={})
    ... except RuntimeError as error:
    ...     print(str(error).partition(":")[0])
    no launcher is found in the environment
    """
    own = environment(variables)
    cupy = cupy_runtime.cupy()
    from cupy.cuda import nccl

    cupy.cuda.Device(own.local_rank % cupy.cuda.runtime.getDeviceCount()).use()
    identifier = nccl.get_unique_id() if own.rank == 0 else b""
    identifier = share(own, _encoded(identifier), timeout)
    return NcclGroup(CupyCommunicator(nccl.NcclCommunicator(own.size, _decoded(identifier, nccl), own.rank)), timeout)


def _encoded(identifier: Any) -> bytes:
    """NCCL's id as bytes; CuPy before version 14 has a tuple of signed characters."""
    return bytes(identifier) if isinstance(identifier, bytes) else bytes(x % 256 for x in identifier)


def _decoded(identifier: bytes, nccl: Any) -> Any:
    """Return the inverse of :func:`_encoded`."""
    if isinstance(nccl.get_unique_id(), bytes):
        return identifier
    return tuple(x - 256 if x > 127 else x for x in identifier)


def share(own: Environment, content: bytes, timeout: float) -> bytes:
    """Send the bytes of rank 0 to all other processes over TCP; returns them on every process.

    Raises:
        GroupError: not all processes connect in time.
    """
    deadline, missing = time.monotonic() + timeout, set(range(1, own.size))
    if own.rank == 0 and missing:
        with socket.create_server((own.address, own.port), backlog=own.size) as server:
            while missing and (left := deadline - time.monotonic()) > 0:
                server.settimeout(left)
                with (
                    contextlib.suppress(OSError, ValueError),
                    server.accept()[0] as connection,
                    connection.makefile("rwb") as file,
                ):
                    connection.settimeout(max(deadline - time.monotonic(), 0.1))
                    rank = int(file.readline())
                    file.write(content)
                    file.flush()
                    missing.discard(rank)
    while own.rank and (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(OSError), socket.create_connection((own.address, own.port), min(left, 5.0)) as connection:
            connection.settimeout(left)
            connection.sendall(b"%d\n" % own.rank)
            if found := connection.makefile("rb").read():  # up to the end of the connection
                return found
        time.sleep(0.05)
    if own.rank or missing:
        reason = "are all processes running, and is the port free? CUPY_SDPA_PORT selects another one"
        if not own.rank:
            reason = f"missing are the ranks {', '.join(map(str, sorted(missing)))}"
        where = f"rank {own.rank} of {own.size} is not connected through {own.address}:{own.port}"
        raise GroupError(f"after {timeout:g} s {where}: {reason}")
    return content


def run_on_gpus(
    function: Callable[[Any], Any], devices: int | Sequence[int] | None = None, *, timeout: float = DEFAULT_TIMEOUT
) -> list[Any]:
    """Call a function in one thread for each GPU of this process, with its member of an NCCL group.

    Args:
        function: called with the member, an :class:`NcclGroup`. The GPU is the current device of the thread.
        devices: the number of GPUs, or their numbers. Default None: all.
        timeout: the seconds after which an exchange counts as failed. Default 300.

    Returns:
        The results, in the order of the devices.

    Raises:
        RuntimeError: CuPy is not installed, or there is no GPU.
        GroupError: an exchange failed or did not end in time.
        Exception: the exception of the member that failed first. The others are aborted.

    Without a GPU, :func:`run_threads` calls the same function:

    >>> import numpy as np
    >>> from cupy_sdpa.parallel import Loopback, context_parallel, run_threads
    >>> def member(group):  # with GPUs: run_on_gpus(member)
    ...     cp = context_parallel(group)
    ...     q = cp.shard(np.ones((8, 1, 8, 1), np.float32, order="F"))
    ...     return cp.attention(q, q, q, causal=True).shape
    >>> run_threads(Loopback(2).members, member)
    [(8, 1, 4, 1), (8, 1, 4, 1)]
    """
    cupy = cupy_runtime.cupy()
    from cupy.cuda import nccl

    count = cupy.cuda.runtime.getDeviceCount() if devices is None else devices
    numbers = list(range(count)) if isinstance(count, int) else list(count)
    meeting = threading.Barrier(len(numbers))
    members = [NcclGroup(CupyCommunicator(x), timeout, meeting) for x in nccl.NcclCommunicator.initAll(numbers)]

    def work(member: NcclGroup) -> Any:
        with cupy.cuda.Device(numbers[member.rank]):
            result = function(member)
            cupy.cuda.Device().synchronize()
            member.check()
            return result

    return run_threads(members, work)
