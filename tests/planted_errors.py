"""Faults that worker processes of the self-test import: softcap crashes, a window hangs, causal results are wrong."""

import os
import signal
import time

import cupy_sdpa

real = cupy_sdpa.attention


def attention(*arrays, **options):
    """The real function with faults."""
    if options.get("softcap"):
        os.kill(os.getpid(), signal.SIGKILL)
    if options.get("window"):
        time.sleep(1000)
    results = real(*arrays, **options)
    if options.get("causal"):
        results[0][0, 0] += 1
    return results


cupy_sdpa.attention = attention
