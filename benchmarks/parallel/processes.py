"""One process for each GPU: started by this module, or by torchrun, mpirun or srun."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cupy_sdpa.device import cupy_runtime
from cupy_sdpa.parallel.groups.channel import Channel, Message

#: The bytes in which a process sends its results to the others.
_RESULT_BYTES = 1 << 16


def start(words: Sequence[str], count: int, variables: Mapping[str, str] = os.environ) -> int:
    """Run the benchmark in one process for each GPU; returns the exit status of the first process that fails, or 0."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as another:
        port, pytorch_port = (x.getsockname()[1] for x in (server, another))
    command = [sys.executable, "-m", "benchmarks", "parallel", *words]
    numbers = {"WORLD_SIZE": str(count), "CUPY_SDPA_PORT": str(port)}
    numbers |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(pytorch_port)}
    started = [
        subprocess.Popen(command, env={**variables, **numbers, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]
    try:
        for process in started:
            if status := process.wait():
                return status
    finally:
        for process in started:
            process.terminate()
    return 0


def gathered(group: Any, result: Any) -> list[Any]:
    """The results of all processes, in the order of the ranks; that of this process is the same object."""
    content = np.zeros(_RESULT_BYTES, np.uint8)
    text = np.frombuffer(pickle.dumps(result), np.uint8)
    content[: text.size] = text
    own = Message.of([cupy_runtime.cupy().asarray(content)])
    specs = [[(content.shape, content.dtype)]] * group.size
    messages = Channel(group).gather(own, specs, "results of the benchmark")
    found = [pickle.loads(message.arrays[0].get().tobytes()) for message in messages]
    return [*found[: group.rank], result, *found[group.rank + 1 :]]


class Barrier:
    """A barrier of processes, in place of :class:`threading.Barrier`."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def wait(self) -> None:
        """Wait for all processes."""
        gathered(self._group, None)

    def abort(self) -> None:
        """Nothing: a process that fails ends, and the others raise when they exchange messages."""
