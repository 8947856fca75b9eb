"""The graphs, evaluated exactly on numpy, agree with the reference and with check's oracle: three independent computations.

In float64 only the results are rounded, so that an error in the last digits shows.
"""

import numpy as np
import pytest
from engines import numbers, one_in
from exact import evaluated

from cupy_sdpa import explain, reference
from cupy_sdpa.check.combine import is_valid, with_required
from cupy_sdpa.check.data import build, call_options
from cupy_sdpa.check.draw import draw_options
from cupy_sdpa.check.oracle import Inputs, Results
from cupy_sdpa.check.sampler import Sampler
from cupy_sdpa.core.boundary import arguments
from cupy_sdpa.core.graph.attention_backward import backward
from cupy_sdpa.core.graph.attention_forward import forward

OPTIONS = (
    "scale", "causal", "window", "mask", "bias", "seq_lens_q", "seq_lens_kv", "packed", "alibi_slopes", "softcap", "sinks",
    "dropout", "stats", "score_mod", "mask_mod", "return_dbias", "return_dsinks",
)  # fmt: skip
#: Guards against bugs of cuDNN, which change no result.
GUARDS = [(), ("keys", "queries"), ("keys",), ("queries",)]
#: Options that the reference does not have.
NOT_IN_REFERENCE = {"max_seqlen_q", "max_seqlen_kv", "score_mod", "mask_mod", "tensors"}


def drawn(number, *names):
    """A random case in float64 of some options, by default of any, whose dropout mask is given."""
    sampler = Sampler(np.random.default_rng(number), "cpu")
    case = draw_options(sampler.extended({*names}, OPTIONS, 0 if names else sampler.integer(6)), number, "cpu")
    sizes = {name: max(1, getattr(case, name)) for name in ("d", "dv", "hq", "hkv", "sq", "skv", "b")}
    options = {**case.options}
    if case.dropout:
        options["dropout"] = tuple(case.dropout._replace(source="mask"))
    if "bias" in options:
        options |= {"bias": (options["bias"][0], "float64", options["bias"][2]), "return_dbias": True}
    if "sinks" in options:
        options["return_dsinks"] = True
    return case.with_(dtype="float64", layouts={}, backward=True, options=options, **sizes)


def computed(case):
    """The arrays and options of a call, and its true results."""
    data = build(case, 0)
    options = call_options(case, data.arrays, data.tensors, 0)
    if case.dropout:
        options |= {"dropout_p": case.dropout.p, "dropout_mask": data.keep}
    return [data.arrays[name] for name in ("dout", "q", "k", "v")], options, Results(Inputs(data))


def close(got, truth, rtol, atol, name):
    """Assert that a result is close, relative to the largest magnitude."""
    largest = np.abs(truth, where=np.isfinite(truth), out=np.zeros_like(truth)).max(initial=1)
    np.testing.assert_allclose(got, truth, rtol=rtol, atol=atol * largest, err_msg=name)


def unaltered(options):
    """The options themselves."""
    return options


def forward_agrees(case, altered=unaltered):
    """Assert that the results are the true ones; ``altered`` options are passed to the graph only, to inject a fault."""
    (_, *arrays), options, truth = computed(case)
    stats = case.options.get("stats", False)
    got = evaluated(arguments.read_forward(*arrays, altered(options), return_stats=stats), forward)
    names = ("out", *((("stats", "max", "sum_exp") if stats == "max_sumexp" else ("stats",)) if stats else ()))
    assert set(got) == set(names)
    known = {name: value for name, value in options.items() if name not in NOT_IN_REFERENCE}
    others = reference.attention(*arrays, **known, max_sumexp=True) if len(known) + 2 >= len(options) else None
    for name, other in zip(names, others or names, strict=False):
        close(got[name], truth.values[name], 1e-12, 1e-12, name)
        if not {"score_mod", "mask_mod"} & case.options.keys():
            close(other, truth.values[name], 1e-12, 1e-12, f"{name} of the reference")


def backward_agrees(case, direct=False, guards=(), altered=unaltered):
    """Assert that every gradient is the true one; arguments as for :func:`forward_agrees` and the graph."""
    (dout, *arrays), options, truth = computed(case)
    if truth.nondifferentiable:
        return
    asked = {name: True for name in ("return_dbias", "return_dsinks") if name in case.options}
    out, stats = (np.asfortranarray(truth.values[name]) for name in ("out", "stats"))
    call = arguments.read_backward(*arrays, altered(options), dout=dout, out=out, stats=stats, **asked)
    got = evaluated(call, lambda given: backward(given, direct, frozenset(guards)))
    assert set(got) == {"dq", "dk", "dv", *(name.removeprefix("return_") for name in asked)}
    others = dict.fromkeys(got)
    if not {"score_mod", "mask_mod"} & case.options.keys():
        known = {name: value for name, value in options.items() if name not in NOT_IN_REFERENCE}
        others = dict(zip(got, reference.attention_backward(dout, *arrays, **known, **asked), strict=True))
    for name, gradient in got.items():
        rough = 1e-4 if "score_mod" in options else 1e-9  # the oracle differentiates numerically
        close(gradient, truth.values[name], 1e-6 if name == "dsinks" else 0, rough, name)
        if others[name] is not None:
            close(others[name], truth.values[name], 1e-10, 1e-11, f"{name} of the reference")


@pytest.mark.parametrize("name", one_in(4, OPTIONS))
def test_every_pair_of_options(name):
    """Both passes of two options together."""
    for number, other in enumerate(OPTIONS[: OPTIONS.index(name) + 1]):
        if is_valid(with_required({name, other})):
            case = drawn(number, name, other)
            forward_agrees(case)
            backward_agrees(case, number % 2 == 0, GUARDS[number // 2 % 4])


@pytest.mark.parametrize("number", numbers(660, quick=20, sweep=60))
def test_any_combination_of_options(number):
    """Both passes, every method to compute gradients, and any guards."""
    forward_agrees(drawn(number))
    backward_agrees(drawn(number), number % 2 == 0, GUARDS[number // 2 % 4])


#: Options whose absence must be detected, and their replacements; arrays with a gradient are replaced by zeros.
LOSSES = {
    "softcap": {"softcap": None},
    "scale": {"scale": None},
    "causal": {"causal": False},
    "window": {"window": None},
    "mask": {"mask": None},
    "bias": {"bias": np.zeros_like},
    "alibi_slopes": {"alibi_slopes": None},
    "sinks": {"sinks": np.zeros_like},
    "dropout": {"dropout_mask": None, "dropout_p": 0.0},
    "seq_lens_q": {"seq_lens_q": None},
    "seq_lens_kv": {"seq_lens_kv": None},
    "packed": {"cu_seqlens_kv": lambda begins: np.minimum(begins, max(begins[-1] - 1, 0))},
}


@pytest.mark.parametrize("agrees", [forward_agrees, backward_agrees], ids=["forward", "backward"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_lost_option_is_detected(name, agrees):
    """A graph that ignores an option, or a key of packed sequences, differs from the definition in some random case."""

    def altered(options):
        return options | {key: value(options[key]) if callable(value) else value for key, value in LOSSES[name].items()}

    def shows(number):
        try:
            agrees(drawn(number, name), altered=altered)
        except AssertionError:
            return True
        return False

    assert any(map(shows, range(40)))


@pytest.mark.parametrize(("choice", "compared"), [
    (lambda s, b, h, i, j: np.where(i >= j, s, -1.0), True), (lambda s, b, h, i, j: np.where(j + 5 > i, s, 0.5), True),
    (lambda s, b, h, i, j: 2 * np.where(i >= j, s, -1.0), True), (lambda s, b, h, i, j: np.where(j > i + 3, 0.5, s), False),
    (lambda s, b, h, i, j: np.where(i >= j, s, 0.5 * s), False), (lambda s, b, h, i, j: np.where((i + j) % 3 == 0, s, -1.0), False),
])  # fmt: skip
def test_a_choice_by_positions_is_not_a_band_to_cudnn(choice, compared):
    """cuDNN skips tiles where it recognizes a band, whatever number is chosen there: a comparison in between prevents it."""
    q = np.zeros((8, 1, 4, 1), np.float32, order="F")
    assert (" ≠ 0 float32" in str(explain(q, q, q, score_mod=choice))) == compared
