"""Exact evaluation of graphs: in float64, only the results are rounded."""

import itertools

import numpy as np

from cupy_sdpa.core.numpy_engine.interpreter import evaluate
from cupy_sdpa.core.problem.arrays import CU_SEQLENS, KEY_ARRAYS, LENGTHS, QUERY_ARRAYS, ROW_STATS
from cupy_sdpa.core.programs.executor import call_of_problem


def evaluated(call, graph_of):
    """The results of a call, from the exact evaluation of the graphs of its launches.

    The results are NaN before, so that missing writes show.
    """
    run = call_of_problem(call)
    run.create_inputs()
    run.create_results()
    for name in run.results:
        run.arrays[name].fill(np.nan)
    for step, arguments in run.bound(np.full(run.program.memory_bytes, 0xFF, np.uint8)):
        if step.attend is None:
            step.function(*arguments)
            continue
        problem = step.attend.of
        if problem.trivial:
            continue
        for spec in problem.results:
            if spec not in problem.ds_reductions:  # a sum starts from the zeros that a step has written
                poison(problem, arguments, spec.name)
        evaluate(graph_of(step.attend.problem), arguments, call.scalars, exact=True)
    return {name: run.arrays[name] for name in run.results}


def poison(problem, arrays, name):
    """Write NaN where the evaluation must write a result: everywhere, or within the sequences."""
    array = arrays[name]
    if not problem.ragged or name not in QUERY_ARRAYS + KEY_ARRAYS:
        array.fill(np.nan)
        return
    side = name in KEY_ARRAYS
    if problem.packed:  # (D, H, T); (H, T) for row statistics
        rows = np.moveaxis(array, -1, 0)
        for begin, end in itertools.pairwise(arrays[CU_SEQLENS[side]]):
            rows[begin:end] = np.nan
    else:  # (D, H, S, B); (S, H, B) for row statistics
        rows = array if name in ROW_STATS else np.moveaxis(array, 2, 0)
        for entry, length in enumerate(arrays[LENGTHS[side]]):
            rows[:length, ..., entry] = np.nan
