"""Graphs evaluated exactly: in float64, with nothing rounded but the results."""

import numpy as np

from cupy_sdpa.interpreter import evaluate


def evaluated(call, graph_of):
    """The results of a call with the graphs that a function makes of its launches, evaluated exactly."""
    for launch in call._launches():
        given = launch.posed
        stage = launch._staged(given)
        for spec in launch.problem.results:  # what is not written shows, except where nothing is to be written
            if not launch.problem.ragged and not launch.problem.sums:
                stage.arrays[spec.name].fill(np.nan)
        evaluate(graph_of(given), stage.arrays, call.scalars, exact=True)
        stage.finish()
        call.arrays = launch.arrays | call.arrays
    return {spec.name: call.arrays[spec.name] for spec in call.problem.results}
