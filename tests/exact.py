"""Graphs evaluated exactly: in float64, with nothing rounded but the results."""

import numpy as np

from cupy_sdpa.interpreter import evaluate


def evaluated(call, graph):
    """The results of a call with its graph, or another one, evaluated exactly."""
    stage = call._staged(call.posed)
    for spec in call.problem.results:  # what is not written shows, except where nothing is to be written
        if not call.problem.ragged and not call.problem.dbias:
            stage.arrays[spec.name].fill(np.nan)
    evaluate(graph, stage.arrays, call.scalars, exact=True)
    stage.finish()
    return {spec.name: call.arrays[spec.name] for spec in call.problem.results}
