"""A transformer's attention layer with its sequence shared out among several GPUs, forward and backward.

One process for each GPU, started by one of

    mpirun -n 8 python examples/context_parallel.py
    torchrun --nproc-per-node 8 examples/context_parallel.py
    srun --ntasks-per-node 8 python examples/context_parallel.py

one process with a thread for each GPU, or threads with numpy arrays:

    python examples/context_parallel.py --threads 8
    python examples/context_parallel.py --cpu 4 --length 256

Every member holds its part of the tokens, applies rotary embeddings at its positions, and calls attention. The results are
compared with one device, and the time of a step is printed.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

import cupy_sdpa
from cupy_sdpa.parallel import Loopback, connect, context_parallel, run_on_gpus, run_threads

HEADS, KEY_HEADS, HEAD_DIM = 32, 8, 128


def rotated(xp: Any, x: Any, positions: Any) -> Any:
    """Rotary position embedding of ``(head_dim, heads, seq, batch)`` at the given positions."""
    half = x.shape[0] // 2
    angles = positions[None, :] / 10000.0 ** (xp.arange(half) / half)[:, None]
    cos, sin = (f(angles).astype(x.dtype)[:, None, :, None] for f in (xp.cos, xp.sin))
    return xp.asfortranarray(xp.concatenate([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin]))


def layer(xp: Any, group: Any, length: int, heads: tuple[int, int, int]) -> str:
    """One step of a member; returns what it did in words."""
    hq, hkv, d = heads
    cp = context_parallel(group)
    numbers = np.random.default_rng(0)  # the same arrays for all members, which a real program would load in parts
    whole = [numbers.standard_normal((d, h, length, 1), np.float32) for h in (hq, hkv, hkv, hq)]
    dtype = np.float32 if xp is np else np.float16
    q, k, v, dout = (cp.shard(xp.asarray(x.astype(dtype), order="F")) for x in whole)
    positions = xp.asarray(cp.position_ids(length))
    q, k = rotated(xp, q, positions), rotated(xp, k, positions)
    lengths = {"seqlen_q": length, "seqlen_kv": length}

    def step() -> Any:
        out, stats = cp.attention(q, k, v, causal=True, return_stats=True, **lengths)
        return out, cp.attention_backward(dout, q, k, v, out, stats, causal=True, **lengths)

    out, (dq, dk, dv) = step()
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        step()
        if xp is not np:
            xp.cuda.Device().synchronize()
        cp.check()  # results are valid only if no member failed
        seconds.append(time.perf_counter() - begin)
    found = [cp.unshard(x, seqlen=length) for x in (out, dq, dk, dv)]
    text = f"member {cp.rank} of {cp.size}: {min(seconds) * 1e3:.1f} ms for a step of {length} positions"
    if cp.rank == 0:
        every = xp.arange(length)
        q, k, v, dout = (xp.asarray(x.astype(dtype), order="F") for x in whole)
        q, k = rotated(xp, q, every), rotated(xp, k, every)
        out, pullback = cupy_sdpa.attention_vjp(q, k, v, causal=True)
        pairs = zip(found, (out, *pullback(dout)), strict=True)
        error = max(float(abs(a.astype(np.float32) - b.astype(np.float32)).max()) for a, b in pairs)
        text = f"{cp.explain(*(cp.shard(x) for x in (q, k, v)), causal=True, **lengths)}\n{text}, error {error:.1e}"
    return text


def main() -> None:
    """Choose how the members are started, and run the layer."""
    parser = argparse.ArgumentParser(description="Attention over several GPUs.")
    parser.add_argument("--length", type=int, default=8192, help="positions of the whole sequence; default 8192")
    parser.add_argument("--threads", type=int, metavar="N", help="one process with threads for N GPUs")
    parser.add_argument("--cpu", type=int, metavar="N", help="N threads with numpy arrays")
    given = parser.parse_args()
    if given.cpu:
        print(*run_threads(Loopback(given.cpu).members, lambda own: layer(np, own, given.length, (8, 8, 16))), sep="\n")
        return
    try:
        import cupy

        group = None if given.threads else connect()
    except (ImportError, RuntimeError) as error:
        parser.error(f"{error} (--cpu 4 needs no GPU and no launcher)")
    heads = HEADS, KEY_HEADS, HEAD_DIM
    if given.threads:
        print(*run_on_gpus(lambda own: layer(cupy, own, given.length, heads), given.threads), sep="\n")
    else:
        print(layer(cupy, group, given.length, heads))


if __name__ == "__main__":
    main()
