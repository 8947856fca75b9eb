"""Every option, array and gradient is taken by every call, or the call says why not.

A new row of the tables fails here until each call takes it, or lists it in :data:`EXCLUDED` with what the error says.
"""

import dataclasses
import functools
import inspect
from unittest import mock

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    fp8,
    prepare,
    shared_prefix_attention,
    weight_entropy,
    weight_sums,
    widen,
)
from cupy_sdpa.check.calls import CaseRunner
from cupy_sdpa.check.case import GRADIENTS as CHECKED
from cupy_sdpa.check.case import Case
from cupy_sdpa.check.draw import draw
from cupy_sdpa.check.weight_options import ROWS
from cupy_sdpa.core.options import table
from cupy_sdpa.core.problem.arrays import ARRAYS, GRADIENTS, OPTION_ARRAYS, REQUESTS
from cupy_sdpa.core.problem.problem import Problem
from cupy_sdpa.parallel import ContextParallel, Loopback, run_threads

D, HQ, HKV, S, B = 16, 4, 2, 140, 4
RNG = np.random.default_rng(5)
Q, K, V, DOUT = (np.asfortranarray(RNG.standard_normal((D, heads, S, B)).astype(np.float32)) for heads in (HQ, HKV, HKV, HQ))
TABLE = np.asfortranarray(np.arange(2 * B, dtype=np.int32).reshape(2, B))
PAGES = [x.reshape((D, HKV, S // 2, 2 * B), order="F") for x in (K, V)]
BLOCKS = BlockMask.from_blocks(np.array([[True, True], [False, True]])[:, :, None, None], S, S)
LENGTHS = np.array([S, 17, 60, S], np.int32)

#: The options: the keyword-only parameters of ``attention`` that are no results.
OPTIONS = {
    name for name, parameter in inspect.signature(attention).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("return_stats", "deterministic", "out", "stats")
}  # fmt: skip
#: A value of each option, and the options that it needs.
VALUES = {
    "scale": {"scale": 0.1},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "seq_lens_q": {"seq_lens_q": LENGTHS},
    "seq_lens_kv": {"seq_lens_kv": LENGTHS},
    "page_table": {"page_table": TABLE, "seq_lens_kv": LENGTHS},
    "cu_seqlens_q": {"cu_seqlens_q": np.array([0, 40, S], np.int32), "cu_seqlens_kv": np.array([0, 40, S], np.int32),
                     "max_seqlen_q": 100, "max_seqlen_kv": 100},
    "score_mod": {"score_mod": lambda score, b, h, q_idx, kv_idx: score * 0.5 + kv_idx * 0.01},
    "mask_mod": {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx % 3 != 1},
    "tensors": {"score_mod": lambda score, b, h, q_idx, kv_idx, slopes: score * slopes[h],
                "tensors": {"slopes": np.linspace(0.5, 2, HQ, dtype=np.float32)}},
    "block_mask": {"block_mask": BLOCKS},
    "dropout_p": {"dropout_p": 0.5, "seed": 3, "offset": 1},
    "dropout_mask": {"dropout_p": 0.5, "dropout_mask": np.asfortranarray(RNG.random((S, S, HQ, B)) < 0.5)},
    "num_splits": {"page_table": TABLE, "seq_lens_kv": LENGTHS, "num_splits": 2},
    "batch_invariant": {"batch_invariant": True},
    "max_workspace": {"max_workspace": 1 << 24},
    "bucket": {"bucket": 64},
    "layout": {"layout": "bshd"},
    "compute_dtype": {"compute_dtype": "bfloat16"},
    "engine": {"engine": "numpy"},
}  # fmt: skip
#: The problem of these values, whose options that change weights have their simplest values of ``check``.
CASE = Case("cpu", "float32", D, D, HQ, HKV, S, S, B)
VALUES |= {
    name: {name: row.simplest if row.array is None else row.array(CASE, RNG, row.simplest)} for name, row in ROWS.items()
}
VALUES["bias_repeats"] = {
    "bias": np.asfortranarray(RNG.standard_normal((S, S, HQ, B // 2)).astype(np.float32)),
    "bias_repeats": 2,
}
#: The options that occur with others, and those without an effect on results of the CPU engine.
WITH = {"cu_seqlens_kv": "cu_seqlens_q", "max_seqlen_q": "cu_seqlens_q", "max_seqlen_kv": "cu_seqlens_q", "seed": "dropout_p",
        "offset": "dropout_p"}  # fmt: skip
WITHOUT_EFFECT = {"num_splits", "batch_invariant", "max_workspace", "bucket", "layout", "engine"}


def arrays_of(options):
    """q, k, v and the gradient of the output in the form that the options need."""
    if "page_table" in options:
        return Q, *PAGES, DOUT
    if "cu_seqlens_q" in options:
        return tuple(np.asfortranarray(x[..., 0]) for x in (Q, K, V, DOUT))
    if "layout" in options:
        return tuple(np.ascontiguousarray(x.transpose(3, 2, 1, 0)) for x in (Q, K, V, DOUT))
    return Q, K, V, DOUT


def forward(**options):
    return attention(*arrays_of(options)[:3], **options)


def backward(**options):
    q, k, v, dout = arrays_of(options)
    out, stats = attention(q, k, v, return_stats=True, **options)
    return attention_backward(dout, q, k, v, out, stats, **options)


def of_stats(**options):
    """The gradients of the log-sum-exp alone, and with the gradients of the output."""
    q, k, v, dout = arrays_of(options)
    (out, stats), pullback = attention_vjp(q, k, v, return_stats=True, **options)
    dstats = np.where(np.isneginf(stats), np.nan, stats / 9).astype(stats.dtype, order="K")
    results = attention_backward(None, q, k, v, out, stats, dstats=dstats, **options)
    return *results, *pullback(dout, dstats)


def pullback(**options):
    q, k, v, dout = arrays_of(options)
    return attention_vjp(q, k, v, **options)[1](dout)


def derivative(**options):
    q, k, v, _ = arrays_of(options)
    return attention_jvp(q, k, v, q, k, v, **options)


def prepared(**options):
    q, k, v, _ = arrays_of(options)
    return prepare(q, k, v, **options)(q, k, v)


def entropy(**options):
    if "tensors" in options:  # of a mask function, because score functions are excluded
        options = options | {"mask_mod": lambda b, h, q_idx, kv_idx, slopes: (slopes[h] > 1) | (kv_idx > 9), "score_mod": None}
    return weight_entropy(*arrays_of(options)[:2], **options)


def sums(**options):
    return weight_sums(*arrays_of(options)[:2], **options)


def by_blocks(**options):
    return attention(*arrays_of(options)[:3], **{"block_mask": BLOCKS, **options})


def in_fp8(**options):
    q, k, v, _ = arrays_of(options)
    layout = options.get("layout")
    center = not {"page_table", "dropout_p"} & options.keys()
    return attention(*fp8.quantize_qkv(q, k, v, center=center, layout=layout), **options).dequantize("float32")


def in_half(**options):
    return attention(*arrays_of(options)[:3], **{"compute_dtype": "float16", **options})


def in_a_group(**options):
    (member,) = Loopback(1).members
    return ContextParallel(member).attention(*arrays_of(options)[:3], **options)


CALLS = {
    "attention": forward, "attention_backward": backward, "attention_vjp": pullback, "gradients of stats": of_stats, "attention_jvp": derivative,
    "prepare": prepared, "weight_sums": sums, "weight_entropy": entropy, "block masks": by_blocks, "FP8": in_fp8,
    "compute_dtype": in_half, "groups": in_a_group,
}  # fmt: skip
#: The options that a call does not take, and a part of what its error says.
EXCLUDED = {
    **{(call, option): "page_table" for call in ("attention_backward", "attention_vjp", "gradients of stats", "attention_jvp", "groups")
       for option in ("page_table", "num_splits")},
    **{(call, option): words for call in ("weight_sums", "weight_entropy") for option, words in {
        "bias": "score", "bias_repeats": "bias", "dropout_p": "before dropout", "dropout_mask": "before dropout",
        "num_splits": "omit it",
        "batch_invariant": "its own call", "layout": "(head_dim, heads, seq, batch)", "compute_dtype": ".astype",
    }.items()},
    **{("weight_entropy", option): "only if scores are scale * q k" for option in ("alibi_slopes", "score_mod", "softcap")},
    ("block masks", "cu_seqlens_q"): "140 queries",
    ("block masks", "num_splits"): "mask",
    ("FP8", "batch_invariant"): "factors",
    ("FP8", "bias_repeats"): "amax_out",
    ("FP8", "compute_dtype"): "compute_dtype",
    ("FP8", "engine"): "engine",
    ("groups", "batch_invariant"): "not measured",
    ("groups", "bucket"): "same lengths",
}  # fmt: skip


@functools.cache
def results_of(call, option=None):
    """The results of a call with an option, as one list of arrays."""
    returned = CALLS[call](**({} if option is None else VALUES[option]))
    return [*returned] if isinstance(returned, tuple) else [returned]


def test_every_option_has_a_value():
    """The lists of this module contain every option."""
    assert {*VALUES, *WITH} == OPTIONS
    assert all(other in VALUES[first] for other, first in WITH.items())


@pytest.mark.parametrize("option", VALUES)
@pytest.mark.parametrize("call", CALLS)
def test_every_call_takes_every_option(call, option):
    """Or raises an error that says why not. No call ignores an option that changes the results."""
    if (words := EXCLUDED.get((call, option))) is not None:
        with pytest.raises((TypeError, ValueError, Unsupported)) as raised:
            CALLS[call](**VALUES[option])
        assert words in str(raised.value)
        return
    results = results_of(call, option)
    assert all(np.isfinite(np.asarray(x, np.float64)).all() for x in results)
    if option not in WITHOUT_EFFECT and (call, option) != ("block masks", "block_mask"):
        assert any(x.shape != y.shape or not np.array_equal(x, y) for x, y in zip(results, results_of(call), strict=True))


#: The calls that take a scale for each head.
OF_SCALES = {
    "attention", "attention_backward", "attention_vjp", "gradients of stats", "prepare", "block masks", "compute_dtype", "explain",
    "problem",
}  # fmt: skip


@pytest.mark.parametrize("name", sorted({*CALLS, "explain", "problem", "shared_prefix_attention", "jvp_problems"}))
def test_a_scale_for_each_head(name):
    """A call takes one, or says what to do instead."""
    call, scales = CALLS.get(name) or FUNCTIONS[name], np.linspace(0.1, 0.5, HQ, dtype=np.float32)
    if name in OF_SCALES:
        call(scale=scales)
        return
    with pytest.raises(TypeError, match=r"scale is .*\(Hq,\).*scale=1"):
        call(scale=scales)


#: The options of dense arrays that change weights or results.
DENSE = [name for name in VALUES if name not in WITHOUT_EFFECT and name not in ("page_table", "cu_seqlens_q", "compute_dtype")]


@pytest.mark.parametrize("option", DENSE)
def test_groups_compute_every_option(option):
    """The parts of two members compute what one device computes, with every option.

    With sinks, without which a number that is added to all scores of a head has no effect.
    """
    options = VALUES["sinks"] | VALUES[option]

    def member(own):
        group = ContextParallel(own, method="ring")
        return group.unshard(group.attention(*map(group.shard, (Q, K, V)), **options), seqlen=S)

    for out in run_threads(Loopback(2, timeout=60).members, member):
        np.testing.assert_allclose(out, forward(**options), atol=1e-5)


#: The functions that split a call into parts, and calls of them.
OF_PARTS = {
    "groups": in_a_group,
    "weight_sums": sums,
    "weight_sums_problems": lambda **options: cupy_sdpa.weight_sums_problems(*arrays_of(options)[:2], **options),
}


@pytest.mark.parametrize("option", ["mask", "alibi_slopes", "softcap", "max_workspace"])
@pytest.mark.parametrize("name", OF_PARTS)
def test_calls_of_parts_refuse_an_option_without_a_rule(name, option):
    """An option whose row does not say what the parts of a call get raises Unsupported, and is not dropped."""
    OF_PARTS[name](**VALUES[option])
    with mock.patch.dict(table.OPTIONS, {option: dataclasses.replace(table.OPTIONS[option], parts="")}):
        with pytest.raises(Unsupported, match=rf"{option}.*omit it"):
            OF_PARTS[name](**VALUES[option])
        OF_PARTS[name]()


#: With these values the output is the weights.
IDENTITY = np.zeros((S, HKV, S, B), np.float32, order="F")
IDENTITY[np.arange(S), :, np.arange(S)] = 1


@pytest.mark.parametrize("option", [name for name in DENSE if ("weight_sums", name) not in EXCLUDED])
def test_sums_are_sums_of_the_weights_with_every_option(option):
    """The sums of the weights over the queries are those of ``weight_sums``, with sinks as in groups."""
    options = VALUES["sinks"] | VALUES[option]
    weights = attention(Q, K, IDENTITY, **options)
    np.testing.assert_allclose(weight_sums(Q, K, **options), weights.sum(axis=2), atol=1e-4)


@pytest.mark.parametrize("option", [name for name in DENSE if ("weight_entropy", name) not in EXCLUDED and name != "tensors"])
def test_entropies_are_those_of_the_weights_with_every_option(option):
    """An option that changes scores in another way than by a mask must be refused: the mean score is that of q and k."""
    weights = attention(Q, K, IDENTITY, **VALUES[option]).astype(np.float64)
    p = np.concatenate([weights, 1 - weights.sum(axis=0, keepdims=True)])  # a sink is a key
    expected = -(p * np.log(np.where(p > 1e-9, p, 1))).sum(axis=0).transpose(1, 0, 2)
    np.testing.assert_allclose(weight_entropy(Q, K, **VALUES[option]), expected, atol=1e-4)


@pytest.mark.parametrize("option", [name for name in DENSE if ("attention_jvp", name) not in EXCLUDED])
def test_derivatives_are_differences_with_every_option(option):
    """The derivative in a direction is the difference quotient in float64."""
    options = VALUES[option] | ({"sinks": VALUES["sinks"]["sinks"]} if option != "block_mask" else {})
    q, k, v, dq = (x.astype(np.float64, order="F") for x in (Q, K, V, DOUT))
    step = 1e-5
    _, derivative = attention_jvp(q, k, v, dq, 0 * k, v, **options)
    above, below = (attention(q + x * dq, k, v + x * v, **options) for x in (step, -step))
    np.testing.assert_allclose(derivative, (above - below) / (2 * step), atol=1e-6)


def test_type_checkers_read_the_options_of_the_signature():
    """``Options``, which the annotations of the functions name, has the same options in the same order."""
    for function in (attention, attention_backward, attention_vjp, attention_jvp):
        declared = inspect.unwrap(function).__globals__["Options"].__annotations__
        shown = inspect.signature(function).parameters
        assert [name for name in declared if name in shown] == [name for name in shown if name in OPTIONS]
    assert {*declared} == OPTIONS


def after_a_prefix(**options):
    """A shared prefix of no keys: the keys are pages in every call."""
    layout = "layout" in options
    q = arrays_of(options)[0] if "cu_seqlens_q" not in options else Q
    pages = [np.ascontiguousarray(x.transpose(3, 2, 1, 0)) for x in PAGES] if layout else PAGES
    return shared_prefix_attention(
        q, *pages, 0, **{"page_table": TABLE.T if layout else TABLE, "seq_lens_kv": LENGTHS} | options
    )


def described(function, count=3):
    """A call of a function that describes calls of arrays."""
    return lambda **options: function(*arrays_of(options)[:count], **options)


def widened(**options):
    q, k, v, _ = arrays_of(options)
    return widen(q, k, v, q, **options)


#: The public functions that take options of calls.
FUNCTIONS = {
    **{name: CALLS[name] for name in ("attention", "attention_backward", "attention_vjp", "attention_jvp", "prepare", "weight_sums", "weight_entropy")},
    "explain": described(cupy_sdpa.explain), "supported": described(cupy_sdpa.supported), "problem": described(cupy_sdpa.problem),
    "jvp_problems": described(functools.partial(cupy_sdpa.jvp_problems, deterministic=True)),
    "weight_sums_problems": described(cupy_sdpa.weight_sums_problems, 2),
    "shared_prefix_attention": after_a_prefix, "widen": widened,
    "fp8.attention": lambda **options: fp8.attention(
        *(fp8.quantize(x, layout=options.get("layout")) for x in arrays_of(options)[:3]), **options
    ),
}  # fmt: skip
#: The options that select the form of a derivative, which is all that ``widen`` reads.
SELECTING = {"deterministic", "score_mod", "tensors", "dropout_p", "seed", "cu_seqlens_q", *WITH}


def public(name):
    """A public function by its name."""
    found = cupy_sdpa
    for part in name.split("."):
        found = getattr(found, part)
    return found


def test_every_function_with_options_is_listed():
    """All public functions whose signature shows options of calls, except those that name them themselves."""
    found = set()
    for prefix, module in {"": cupy_sdpa, "fp8.": fp8}.items():
        for name in module.__all__:
            value = getattr(module, name)
            if inspect.isfunction(value) and {"causal", "softcap", "options"} & inspect.signature(value).parameters.keys():
                found.add(prefix + name)
    assert found - {"dropout_mask", "block_mask", "explain_function"} == FUNCTIONS.keys()


@pytest.mark.parametrize("option", [*VALUES, *WITH])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_signatures_show_the_options_that_are_taken(name, option):
    """A call takes every option that its signature shows; for any other option it raises an error that names it."""
    options = VALUES[WITH.get(option, option)]
    if option in inspect.signature(public(name)).parameters:
        FUNCTIONS[name](**options)
    elif name == "widen" and option not in ("page_table", "num_splits"):
        form = FUNCTIONS[name](**options).form
        selecting = {name: value for name, value in options.items() if name in SELECTING}
        x = arrays_of(options)
        assert form == widen(*x[:3], x[0], **selecting).form
    else:
        with pytest.raises((TypeError, ValueError, Unsupported), match="|".join(options)):
            FUNCTIONS[name](**options)


def test_check_draws_every_option():
    """The random problems of the self-test pass every option to a call, except those that only select what computes it."""
    drawn = set()
    for number in range(400):
        case = draw(0, number, "cpu")
        runner = CaseRunner(case)
        memory = runner.allocate()
        runner.load(memory, 0)
        drawn |= {name for name, value in runner.options(memory, 0).items() if value is not None}
    assert OPTIONS - drawn == {"batch_invariant", "compute_dtype", "engine"}


def test_every_array_has_a_row():
    """Every array of a problem, and every option that is an array, is in the table of arrays; gradients belong to one of them.

    The gradient of the log-sum-exp becomes rows of dout, so no problem has it.
    """
    of_problem = {field.name for field in dataclasses.fields(Problem) if "TensorSpec" in str(field.type)}
    assert {*ARRAYS} == of_problem - {"captured", "dcaptured"} | {"dstats"}
    assert {*OPTION_ARRAYS} <= OPTIONS
    assert all(row.of in ARRAYS and row.name == f"d{row.of}" for row in GRADIENTS)


def test_check_draws_every_gradient():
    """The self-test requests each gradient."""
    assert {*CHECKED} == {*REQUESTS}


#: The functions whose flags request gradients.
REQUESTING = (attention_backward, attention_vjp, prepare, cupy_sdpa.explain, cupy_sdpa.supported, cupy_sdpa.problem)


@pytest.mark.parametrize("function", REQUESTING, ids=lambda function: function.__name__)
def test_every_gradient_can_be_requested(function):
    """The flags are the table's, in its order, and are False by default."""
    parameters = inspect.signature(function).parameters
    assert [name for name in parameters if name.startswith("return_d")] == [*REQUESTS]
    assert all(parameters[name].default is False for name in REQUESTS)


def test_groups_refuse_gradients_of_the_log_sum_exp():
    """Both functions say so."""
    (member,) = Loopback(1).members
    group = ContextParallel(member)
    out, stats = group.attention(Q, K, V, return_stats=True)
    with pytest.raises(Unsupported, match=r"dstats.*one GPU"):
        group.attention_backward(DOUT, Q, K, V, out, stats, dstats=stats)
    with pytest.raises(Unsupported, match=r"return_stats.*one GPU"):
        group.attention_vjp(Q, K, V, return_stats=True)


def test_groups_refuse_gradients_that_are_sums_over_members():
    """They return the gradient of the sinks only, and say so."""
    (member,) = Loopback(1).members
    group = ContextParallel(member)
    out, stats = group.attention(Q, K, V, return_stats=True)
    for request in {*REQUESTS} - {"return_dsinks"}:
        with pytest.raises(Unsupported, match=request):
            group.attention_backward(DOUT, Q, K, V, out, stats, **{request: True})
        with pytest.raises(Unsupported, match=request):
            group.attention_vjp(Q, K, V, **{request: True})
