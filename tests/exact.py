"""Graphs evaluated exactly: in float64, with nothing rounded but the results."""

import itertools

import numpy as np

from cupy_sdpa.calls.staging import allocate_results
from cupy_sdpa.graph.interpreter import evaluate
from cupy_sdpa.problem.problem import CU_SEQLENS, KEY_ARRAYS, LENGTHS, QUERY_ARRAYS, ROW_STATS


def evaluated(call, graph_of):
    """The results of a call with the graphs that a function makes of its launches, evaluated exactly.

    Results are NaN before: what nobody writes shows.
    """
    call.create_inputs()
    for launch in call.subcalls():
        allocate_results(launch.problem, launch.arrays, on_gpu=False)
        for spec in launch.problem.results:
            launch.arrays[spec.name].fill(np.nan)
        stage = launch.stage()
        for spec in launch.problem.results:
            if spec not in launch.problem.ds_reductions:  # a sum begins with the zeros that the stage has written
                poison(launch.problem, stage.arrays, spec.name)
        evaluate(graph_of(launch.engine_problem), stage.arrays, call.scalars, exact=True)
        stage.finish()
        call.arrays = launch.arrays | call.arrays
    return {spec.name: call.arrays[spec.name] for spec in call.problem.results}


def poison(problem, arrays, name):
    """NaN where the evaluation must write a result: everywhere, or within the sequences."""
    array = arrays[name]
    if not problem.ragged or name not in QUERY_ARRAYS + KEY_ARRAYS:
        array.fill(np.nan)
        return
    side = name in KEY_ARRAYS
    if problem.packed:  # (D, H, T), and (H, T) of a number per row
        rows = np.moveaxis(array, -1, 0)
        for begin, end in itertools.pairwise(arrays[CU_SEQLENS[side]]):
            rows[begin:end] = np.nan
    else:  # (D, H, S, B), and (S, H, B)
        rows = array if name in ROW_STATS else np.moveaxis(array, 2, 0)
        for entry, length in enumerate(arrays[LENGTHS[side]]):
            rows[:length, ..., entry] = np.nan
