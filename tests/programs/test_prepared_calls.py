"""Prepared calls of random problems: the same bits as those of plain calls, and the same refusals."""

import dataclasses

import numpy as np
import pytest
from engines import numbers

from cupy_sdpa import Unsupported, attention, attention_backward, fp8, prepare
from cupy_sdpa.check.calls import CaseRunner
from cupy_sdpa.check.draw import OPTIONS

#: Options of ``check`` that are other functions than those that are prepared.
OTHERS = {"cache", "jvp", "merge", "parallel", "shared_prefix", "weight_sums"}
FEATURES = (
    (), {"block_mask"}, {"block_mask", "compute_dtype"}, {"compute_dtype"}, {"fp8"}, {"seq_lens_kv"}, {"packed"}, {"paged"},
    {"bucket"}, {"bias"}, {"score_mod"}, {"mask_mod"}, {"dropout"}, {"sinks"}, {"layout"}, {"stats"},
)  # fmt: skip


def outcome(runner, memory, forward, backward):
    """The bits of the results of both passes by name, or the refusal."""
    runner.load(memory, 0)
    options, views = runner.options(memory, 0), memory.views
    try:
        results = runner.forward(forward, memory, options, 0)
        if runner.case.backward:
            q, k, v = (views[name] for name in "qkv")
            dout = results["out"].copy("K")  # dense, as a prepared call expects it
            dout[...] = views["dout"]
            arrays = dout, q, k, v, results["out"], results["stats"]
            results |= runner.gradients_by_name(backward(*arrays, **options, **runner.backward_options))
    except Unsupported as error:
        return str(error)
    if runner.xp is not np and not runner.case.options.get("deterministic"):
        results.pop("dq", None)  # a GPU accumulates it in an arbitrary order
    return {name: (x if isinstance(x, np.ndarray) else x.get()).tobytes("F") for name, x in results.items()}


def prepared(*arrays, **options):
    """The results of a forward call that is prepared for its arrays, and called twice: the second writes into an array."""
    call = prepare(*arrays, **options)
    results = call(*arrays)
    out = results[0] if isinstance(results, tuple) else results
    if isinstance(out, fp8.Fp8Array):
        return call(*arrays)
    own = out.copy("K")
    own.fill(np.nan)
    again = call(*arrays, out=own)
    assert (again[0] if isinstance(again, tuple) else again) is own
    return again


def prepared_backward(*arrays, **options):
    """The results of a backward call that is prepared for its arrays."""
    return prepare(*arrays[1:4], backward=True, **options)(*arrays)


@pytest.mark.parametrize("number", numbers(6, quick=1, sweep=4))
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(sorted(features)) or "any")
def test_prepared_calls_have_the_bits_of_plain_calls(features, number, engine):
    """Random problems of every feature that can be prepared."""
    case = engine.draw(features, number, others=OPTIONS.keys() - OTHERS)
    if engine.name == "cupy" and case.sq == 1:  # the kernel that splits the keys of a single query adds in an arbitrary order
        case = dataclasses.replace(case, options=case.options | {"deterministic": True})
    runner = CaseRunner(case)
    memory = runner.allocate()
    plain = outcome(runner, memory, attention, attention_backward)
    assert outcome(runner, memory, prepared, prepared_backward) == plain, runner.case
