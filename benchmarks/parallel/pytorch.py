"""PyTorch's context parallelism in the processes of the benchmark."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from cupy_sdpa.device import cupy_runtime

from .measure import Engine, arrays, calls_of, one_device, timed
from .model import Problem

#: PyTorch's names of the ways to move keys and values, by the names of our methods.
ROTATIONS = {"ring": "alltoall", "all_gather": "allgather"}
#: The backends of its attention that support context parallelism; the first one that runs is timed.
BACKENDS = ("CUDNN_ATTENTION", "FLASH_ATTENTION")
#: Seconds after which a collective operation of PyTorch fails.
TIMEOUT = 120


def is_available(engine: Engine) -> bool:
    """Whether PyTorch is installed, and there is one process for each GPU."""
    return engine.group is not None and importlib.util.find_spec("torch") is not None


def supports(problem: Problem) -> bool:
    """Whether it supports the options of a problem: a causal mask or none."""
    return problem.options in ({}, {"causal": True})


@functools.cache
def _mesh(size: int) -> Any:
    """The processes of the benchmark as a mesh of PyTorch; collective."""
    import torch
    import torch.distributed as dist

    device = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=TIMEOUT), device_id=torch.device("cuda", device))
    return dist.init_device_mesh("cuda", (size,))


def rows(engine: Engine, problem: Problem, methods: Sequence[str]) -> Iterator[tuple[str, str, float, float, str]]:
    """Time both passes with every rotation; collective.

    Yields:
        The method, the pass, milliseconds, the error of the output against one GPU, and the backend, or why none runs.
    """
    expected = one_device(engine, problem, problem.length * engine.members)["forward"][0]
    for method in (x for x in methods if x in ROTATIONS):
        failures = []
        for backend in BACKENDS:
            for repeated in (False, True) if problem.heads != problem.key_heads else (False,):
                name = f"{backend}{', repeated heads' if repeated else ''}"
                try:
                    found = _measured(engine, problem, ROTATIONS[method], backend, repeated, expected)
                except Exception as error:  # the next backend may run
                    failures.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:120]}")
                    continue
                finally:
                    _free()
                for direction, (ms, difference) in found.items():
                    yield method, direction, ms, difference, name
                break
            else:
                continue
            break
        else:
            yield method, "", 0.0, 0.0, "; ".join(failures)


def _measured(
    engine: Engine, problem: Problem, rotation: str, backend: str, repeated: bool, expected: Any
) -> dict[str, tuple[float, float]]:
    """The milliseconds of both passes, and the error of the output."""
    import torch
    from torch.distributed.tensor.experimental import _attention, context_parallel
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh, causal = _mesh(engine.members), bool(problem.options)
    group = problem.heads // problem.key_heads
    whole = arrays(engine.xp, problem, problem.length * engine.members)
    q, k, v, dout = (torch.from_dlpack(x).permute(3, 1, 2, 0).contiguous() for x in whole)
    del whole
    if repeated:
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = causal  # its zigzag order is for causal masks only
    buffers = [q, k, v, dout]
    context = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers=set(buffers))
    grouped = {} if repeated or group == 1 else {"enable_gqa": True}
    with sdpa_kernel(getattr(SDPBackend, backend)), context:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]

        def forward() -> Any:
            return torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal, **grouped)  # the patched one

        out = forward()

        def backward() -> Any:
            return torch.autograd.grad(out, leaves, dout, retain_graph=True)

        def both() -> Any:
            return torch.autograd.grad(forward(), leaves, dout)

        backward()
        (found,) = _attention.context_parallel_unshard(mesh, [out.detach()], [2])
        wanted = expected.astype("float32")
        error = float(abs(found.float().permute(3, 1, 2, 0).cpu().numpy() - wanted).max() / abs(wanted).max())
        barrier, count = engine.barrier(), calls_of(problem)
        passes: dict[str, Callable[[], Any]] = {"forward": forward, "backward": backward, "both": both}
        return {name: (timed(engine, barrier, run, count), error) for name, run in passes.items()}


def _free() -> None:
    """Return unused memory to the GPU."""
    import torch

    with contextlib.suppress(Exception):
        torch.cuda.empty_cache()
    cupy_runtime.cupy().get_default_memory_pool().free_all_blocks()
