"""A process with one GPU whose group fails: ``python parallel_member.py MODE``, with the environment of a launcher.

Rank 0 calls; rank 1 does what the mode says. Rank 0 prints the GroupError or ValueError that it gets, and the seconds until then.
"""

import os
import signal
import sys
import time

import cupy
import numpy as np

from cupy_sdpa.parallel import GroupError, connect, context_parallel

#: The limit of an exchange in seconds.
TIMEOUT = 3.0


def main(mode):
    group = connect(timeout=30.0)
    group.timeout = TIMEOUT
    cp = context_parallel(group, method="ring")
    x = cupy.ones((64, 4, 256, 1), np.float16, order="F")
    cp.attention(x, x, x, causal=True)  # the group works
    cupy.cuda.Device().synchronize()
    if group.rank == 1:
        if mode == "ends":
            return
        if mode == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "does not call":
            time.sleep(3 * TIMEOUT)
            return
        x = x[:, :, :128]  # "calls with another shape"
    began = time.monotonic()
    try:
        for _ in range(3):
            cp.attention(x, x, x, causal="bottom_right" if mode == "calls with another shape" else True)
            cupy.cuda.Device().synchronize()  # returns when the exchange is aborted
            group.check()
    except (GroupError, ValueError) as error:
        print(f"{time.monotonic() - began:.1f} {type(error).__name__}: {error}", flush=True)
    os._exit(0)  # no destructor may wait for the other process


if __name__ == "__main__":
    main(sys.argv[1])
