"""Exact evaluation of graphs: in float64, only the results are rounded."""

import itertools

import numpy as np

from cupy_sdpa.graph.interpreter import evaluate
from cupy_sdpa.problem.problem import CU_SEQLENS, KEY_ARRAYS, LENGTHS, QUERY_ARRAYS, ROW_STATS
from cupy_sdpa.staging.stage import allocate_results


def evaluated(call, graph_of):
    """The results of a call, from the exact evaluation of the graphs of its subproblems.

    The results are NaN before, so that missing writes show.
    """
    call.create_inputs()
    for launch in call.subcalls():
        allocate_results(launch.problem, launch.arrays)
        for spec in launch.problem.results:
            launch.arrays[spec.name].fill(np.nan)
        stage = launch.stage()
        for spec in launch.problem.results:
            if spec not in launch.problem.ds_reductions:  # a sum starts from the zeros that staging has written
                poison(launch.problem, stage.arrays, spec.name)
        evaluate(graph_of(launch.engine_problem), stage.arrays, call.scalars, exact=True)
        stage.finish()
        call.arrays = launch.arrays | call.arrays
    return {spec.name: call.arrays[spec.name] for spec in call.problem.results}


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
