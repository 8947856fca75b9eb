"""The problem that the engine runs for a caller's problem: lengths, dtypes and layouts in the form that the engine supports.

It depends on the problem alone, so plans can be built before there are arrays. The copies are made by the steps of
core/programs/engine_form.py.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..problem.arrays import has_score_axes
from ..problem.bucket import Rounding
from ..problem.problem import Problem
from ..problem.split import split_of, split_problem, with_whole_tiles
from ..problem.subproblems import subproblems
from ..problem.tensor_spec import TensorSpec, dense_spec
from ..problem.varlen import round_up_totals
from .padding import copy_reason, has_padding, masked_inputs

if TYPE_CHECKING:
    from ..problem.slices import Slice


def engine_problem(problem: Problem, bucket: Rounding | None, on_gpu: bool) -> Problem:
    """Return the problem that the engine runs: with lengths rounded up to the bucket, and the layouts of copies it needs."""
    if problem.trivial:
        return problem
    return _engine_problem(bucket(problem) if bucket else problem, on_gpu)


@functools.lru_cache(maxsize=4096)  # saves 30 to 45 us of every parsed call
def _engine_problem(problem: Problem, on_gpu: bool) -> Problem:
    if on_gpu and problem.paged:
        split = split_of(problem)
        problem = split_problem(problem, split) if split else with_whole_tiles(problem)
    if "merged-sinks" in staging_guards_of(problem, on_gpu):
        problem = without_sinks(problem)
    if problem.captured:
        problem = replace(problem, captured=tuple(_captured_spec(problem, spec, on_gpu) for spec in problem.captured))
    if not on_gpu:
        return problem
    if has_padding(problem) and not copy_reason(problem):
        problem = replace(problem, settings=problem.settings._replace(padded=True))
    specs: dict[str, Any] = {}
    for name in masked_inputs(problem):
        spec = getattr(problem, name)
        specs[name] = dense_spec(name, spec.dtype, spec.shape)
    guards = staging_guards_of(problem, on_gpu)
    specs |= _bias_and_mask_specs(problem, guards)
    specs |= _gradient_specs(problem)
    if "dense-queries" in guards:
        specs["q"] = dense_spec("q", problem.q.dtype, problem.q.shape)
    if "dense-gradients" in guards:
        specs |= {
            spec.name: dense_spec(spec.name, spec.dtype, spec.shape) for spec in (problem.dq, problem.dk, problem.dv) if spec
        }
    if "two-rows" in guards:
        # As in validation: with two queries only the backward pass may be deterministic.
        exact = problem.backward and problem.deterministic
        specs["settings"] = problem.settings._replace(max_seqlen_q=2, deterministic=exact)
        if dump := problem.rng_dump:
            specs["rng_dump"] = dense_spec("rng_dump", dump.dtype, (dump.shape[0], 2, *dump.shape[2:]))
    problem = replace(problem, **specs) if specs else problem
    return round_up_totals(problem) if problem.packed else problem


def staging_guards_of(problem: Problem, on_gpu: bool) -> frozenset[str]:
    """The guards of known bugs that decide about copies and launches; none on numpy, which loads no tables of cuDNN."""
    if not on_gpu:
        return frozenset()
    from .why_not import staging_guards

    return staging_guards(problem)


def may_mask_rows(problem: Problem) -> bool:
    """True if the backward pass may have rows that are masked by a bias, a score function, or as padding with sinks."""
    return problem.backward and (problem.bias is not None or problem.dsinks is not None or problem.has_score_mod)


def slices_of(problem: Problem, on_gpu: bool) -> tuple[Slice, ...]:
    """Return the slices that a problem of the engine is computed in, which may be sliced again; empty if it is not sliced."""
    is_too_large = "slices" in staging_guards_of(problem, on_gpu)
    if not is_too_large and (problem.bias is None or problem.bias.shape[3] == 1):
        return ()
    from ..problem.slices import bias_slices, slices_of_gradients

    return bias_slices(problem) or (slices_of_gradients(problem) if is_too_large else ())


def launched_problems(problem: Problem) -> tuple[Problem, ...]:
    """Return the problems of all launches that compute a problem of the engine on a GPU, each once."""
    if parts := slices_of(problem, on_gpu=True):
        from ..problem.slices import launches

        of_parts = (launched_problems(part) for part in launches(problem, parts))
        return tuple(dict.fromkeys(launch for launched in of_parts for launch in launched))
    return subproblems(problem)


def without_sinks(problem: Problem) -> Problem:
    """Return a forward problem without sinks, with a dense output and log-sum-exp that the sinks are merged into."""
    _, _, hq, _, sq, _, batch = problem.sizes
    out = dense_spec("out", problem.out.dtype, problem.out.shape)
    return replace(problem, sinks=None, out=out, stats=dense_spec("stats", "float32", (sq, hq, batch)))


def _captured_spec(problem: Problem, spec: TensorSpec, on_gpu: bool) -> TensorSpec:
    """Return the form of a captured array: on the GPU it is dense, and float16 instead of bool."""
    dtype = "float16" if on_gpu and spec.dtype == "bool" else spec.dtype
    keys, queries, _, batch = spec.shape
    *_, sq, skv, _ = problem.sizes
    if on_gpu and sq == 1 and keys == 1 and dtype in ("float16", "bfloat16"):
        dtype = "float32"  # the kernel for one query reads 4 bytes at a time (9.19 and 9.28: a misaligned address)
    # Without a key or a query axis cuDNN confuses the elements of the other axes, as it does for a bias.
    expanded = on_gpu and (keys, queries) == (1, 1) and (batch > 1 or max(spec.shape) == 1)
    shape = (skv if expanded else keys, *spec.shape[1:])
    same = (dtype, shape) == (spec.dtype, spec.shape) and (not on_gpu or (spec.dense and spec.alignment >= 16))
    return spec if same else dense_spec(spec.name, dtype, shape)


def _bias_and_mask_specs(problem: Problem, guards: frozenset[str]) -> dict[str, TensorSpec]:
    specs = {}
    *_, sq, skv, _ = problem.sizes
    for spec in (problem.bias, problem.mask):
        if spec and (spec is problem.mask or spec.shape[:2] == (1, 1)):
            # cuDNN crashes if it reads bool arrays, and confuses the elements of an array without a key or a query axis.
            dtype = "float16" if spec is problem.mask else spec.dtype
            dtype = "float32" if (sq, skv) == (1, 1) else dtype  # as in _captured_spec
            keys = skv if spec.shape[1] == 1 else spec.shape[0]
            specs[spec.name] = dense_spec(spec.name, dtype, (keys, *spec.shape[1:]))
    if problem.bias and "finite-bias" in guards:
        specs["bias"] = dense_spec("bias", "float32", specs.get("bias", problem.bias).shape)
    return specs


def _gradient_specs(problem: Problem) -> dict[str, Any]:
    """Return the gradients of bias and captured arrays: of q's dtype, summed over heads and batch only, because
    cuDNN's results are wrong otherwise.
    """
    *_, sq, skv, _ = problem.sizes
    reductions = [spec for spec in problem.ds_reductions if has_score_axes(spec.name)]
    specs: dict[str, Any] = {spec.name: dense_spec(spec.name, problem.dtype, (skv, sq, *spec.shape[2:])) for spec in reductions}
    if problem.dcaptured:
        specs["dcaptured"] = tuple(specs.pop(spec.name) for spec in problem.dcaptured)
    return specs
