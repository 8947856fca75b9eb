"""PyTorch's context parallelism in the processes of ``python -m benchmarks parallel --pytorch``.

It is measured with cuDNN's attention and both ways to move keys and values; the faster one counts, in each pass. The work of
causal masks is balanced over the GPUs. Import this module before a call loads our cuDNN, so that PyTorch loads its own.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.nn.attention import SDPBackend, sdpa_kernel

from cupy_sdpa.cli.console import one_line

from .device import as_torch, free_memory
from .parallel import PASSES, Engine, Peer, Problem, Watched, arrays, timed

#: PyTorch's ways to move keys and values.
ROTATIONS = ("allgather", "alltoall")
#: Seconds after which a collective operation of PyTorch fails.
TIMEOUT = 120


def measure(engine: Engine, problem: Problem, expected: Any) -> Peer:
    """Measure a problem; every process calls this function. No error of PyTorch ends the run.

    Args:
        engine: the processes.
        problem: the problem; a window is not supported.
        expected: the output on one GPU, as a numpy array.
    """
    if problem.options not in ({}, {"causal": True}):
        return Peer({}, "PyTorch's context parallelism only supports causal masks, and no mask")
    ms: dict[str, float] = {}
    error = 0.0
    used, failed = dict.fromkeys((*PASSES, "both"), ""), []
    for rotation in ROTATIONS:
        for repeated in (False, True) if problem.heads != problem.key_heads else (False,):
            way = f"{rotation}{', key/value heads repeated beforehand' * repeated}"
            try:
                found, difference = _measured(engine, problem, rotation, repeated=repeated, expected=expected)
            except Exception as reason:  # a version, or a problem, that it does not support
                failed.append(f"{way} does not run: {type(reason).__name__}: {one_line(str(reason))[:150]}")
                continue
            finally:
                free_memory()
            error = max(error, difference)
            for name, one in found.items():
                if name not in ms or one < ms[name]:
                    ms[name], used[name] = one, way
            break
    if not ms:
        return Peer({}, "; ".join(failed))
    return Peer(ms, "; ".join([*(f"{name}: {used[name]}" for name in ms), *failed]), error)


@functools.cache
def _mesh(size: int) -> Any:
    """Return the processes as a mesh of PyTorch."""
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    device = torch.device("cuda", local)
    torch.distributed.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT), device_id=device)
    atexit.register(torch.distributed.destroy_process_group)
    return torch.distributed.init_device_mesh("cuda", (size,))


def _measured(
    engine: Engine, problem: Problem, rotation: str, *, repeated: bool, expected: Any
) -> tuple[dict[str, float], float]:
    """Return the milliseconds of each pass, and the largest relative difference of the output."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._context_parallel import _attention as internal

    mesh, causal, group = _mesh(engine.members), bool(problem.options), problem.heads // problem.key_heads
    whole = arrays(engine.xp, problem, problem.length * engine.members)
    q, k, v, dout = buffers = [as_torch(x).contiguous() for x in whole]
    del whole
    if repeated:
        k, v = buffers[1:3] = [x.repeat_interleave(group, dim=1) for x in (k, v)]
    internal.set_rotate_method(rotation)
    internal._cp_options.enable_load_balance = causal  # without a causal mask the load is equal, and PyTorch raises
    options = {"is_causal": causal} | ({"enable_gqa": True} if group > 1 and not repeated else {})
    context = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers={*buffers})
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), context:  # the buffers are now this member's part
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(*leaves, **options)  # the context has replaced it

        out = forward()
        passes: dict[str, Callable[[], Any]] = {
            "forward": forward,
            "backward": lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True),
        }
        passes["backward"]()
        (gathered,) = internal.context_parallel_unshard(mesh, [out.detach()], [2])
        difference = gathered.float().permute(3, 1, 2, 0).cpu().numpy() - expected
        watched = Watched(engine.group)
        ms = {name: timed(engine, watched, call, problem.calls) for name, call in passes.items()}
    return {**ms, "both": sum(ms.values())}, float(abs(difference).max() / abs(expected).max())
