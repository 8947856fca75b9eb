"""Planned is not computed: cuDNN plans some graphs without one of their steps, and reports no error.

A serialized plan contains the machine code of a kernel and lists what the kernel is passed. Every array and option of a graph
must be passed to the kernel, or change its code. This is necessary, not sufficient: docs/contributing.md has the rule for new
kinds of graphs.
"""

import dataclasses
import functools
import re

import numpy as np
import pytest
from planner import kernels_of, library_version

import cupy_sdpa
from cupy_sdpa import jvp_problems
from cupy_sdpa.cli.support_problems import PROBES, problem_of_sizes
from cupy_sdpa.core.graph.attention_backward import backward
from cupy_sdpa.core.graph.attention_forward import forward
from cupy_sdpa.core.graph.nodes import Pointwise, Tensor, row_major
from cupy_sdpa.core.options.table import Settings
from cupy_sdpa.core.problem.problem import Problem, writes_dq_directly
from cupy_sdpa.core.problem.subproblems import subproblems
from cupy_sdpa.core.problem.tensor_spec import dense_spec
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.why_not import guards, why_not

pytestmark = pytest.mark.cudnn

#: Patterns of tensors that the compiled kernel is not passed, and which other kernel of the plan uses them. These kernels are
#: parts of cuDNN and not serialized. Their results were compared on GPUs.
EXEMPT = {
    "cu_seqlens_kv × .*": "one before it computes the addresses of the keys of each sequence",
}
#: The same for gradients.
EXEMPT_GRADIENTS = EXEMPT | {
    "out|1−p": "one before it computes D = (1 − p) rowsum(dO ∘ O)",
    "sinks|dsinks": "one before it computes the gradient of the sinks, from rowsum(dO ∘ O) and the log-sum-exp",
    "ΣdQ": "before Hopper, dQ is added up in cuDNN's own workspace",
    "dq": "one after it rounds the sum",
    "dk|dv": "one after it adds up the heads of a group",
    r"dbias|dt\d+": "one after it adds up dS",
}
#: What is neither passed nor confirmed by a GPU. These kernels of Blackwell split the keys; another one, which is not serialized,
#: merges the parts, and must write the largest magnitude. Blackwell is unverified in the support table.
UNCONFIRMED = {"b200": {"forward, FP8, bfloat16 output": {"amax_out"}, "forward, FP8, one query": {"amax_out"}}}
#: Options that no graph for a GPU has: one raises, the number of chunks is read into ``split``, and each launch has one bias.
WITHOUT_GRAPHS = {"bias_repeats", "dropout_mask", "num_splits"}


def _captured(**options):
    """The problem of a score function that reads two arrays."""
    arrays = {"t": np.ones((64, 64), np.float32, order="F"), "gain": np.ones(8, np.float32)}
    return problem_of_sizes(
        64, sq=64, skv=64, score_mod=lambda s, b, h, i, j, t, gain: s * gain[h] + t[i, j], tensors=arrays, **options
    )


def _problems():
    """A problem of each kind of graph, by name: the support table's, and more."""
    shape, small = (64, 8, 64, 2), functools.partial(problem_of_sizes, 64, sq=64, skv=64)
    dump = dense_spec("rng_dump", "float32", (64, 64, 8, 2))
    whole = PROBES | {
        "forward, dropout mask as a result": dataclasses.replace(small(dropout_p=0.1, seed=0), rng_dump=dump),
        "forward, captured arrays": _captured(),
        "gradients, captured arrays and their gradients": _captured(backward=True, return_dtensors=True),
        "gradients, negative scale": small(backward=True, scale=-1.0),
        "gradients, limited workspace": small(backward=True, max_workspace=1 << 30),
    }
    derivative = jvp_problems(shape, shape, shape, dtype="bfloat16", causal=True, softcap=30.0)
    whole |= {f"derivative, pass {number}": problem for number, problem in enumerate(derivative)}
    return {
        f"{name}, launch {number}" if number else name: launch
        for name, problem in whole.items()
        for number, launch in enumerate(subproblems(problem))
    }


PROBLEMS = _problems()
SHORT = ("forward, sinks, window", "gradients, ALiBi, softcap, dropout")


def options_of(problem):
    """The optional arrays and the settings that a problem has, and the problem without each."""
    for field in dataclasses.fields(Problem):
        if field.init and field.default not in (dataclasses.MISSING, getattr(problem, field.name)) and field.name != "settings":
            yield field.name, dataclasses.replace(problem, **{field.name: field.default})
    for name, default in Settings._field_defaults.items():
        if getattr(problem.settings, name) != default:
            yield name, dataclasses.replace(problem, settings=problem.settings._replace(**{name: default}))


def graphs_of(problem, avoided):
    """The graph of a problem with these guards, and by the name of each option the graphs without it.

    There is no such graph without an option that another one needs, such as query lengths with key lengths. Without some
    options dQ is computed by another method: then there are two.
    """

    def graph(one, like):
        return backward(one, writes_dq_directly(like), avoided) if one.backward else forward(one, avoided)

    own, others = graph(problem, problem), {}
    for name, rest in options_of(problem):
        others[name] = set()
        try:
            if not rest.trivial:
                others[name] = {graph(rest, like) for like in (problem, rest)} - {own}
        except (AssertionError, AttributeError, LookupError, TypeError):
            continue
    return own, others


def tensors_of(graph):
    """The names of a graph's arrays and by-value arguments, and of its constant scalars."""
    tensors = [tensor for tensor in graph.tensors if tensor.role != "virtual"]
    constants = {tensor.name for tensor in tensors if tensor.value is not None}
    return {tensor.name for tensor in tensors} - constants, constants


def dropped(compiled, graph, others):
    """The arrays, scalars and options of a graph that its compiled kernel ignores; None if cuDNN has no plan for the graph."""
    kernels = compiled(graph)
    if isinstance(kernels, str):
        return None
    arrays, constants = tensors_of(graph)
    exempt = EXEMPT_GRADIENTS if "dout" in arrays else EXEMPT
    missing = {name for name in (arrays | constants) - kernels.passed if not re.fullmatch("|".join(exempt), name)}
    same = set()
    for option, found in others.items():
        for other in found:
            own = (arrays | constants).difference(*tensors_of(other))
            if own & arrays and not own & missing:
                continue
            other_kernels = compiled(other)
            if isinstance(other_kernels, str) or other_kernels.digest == kernels.digest:
                same.add(option)
            else:
                missing -= own
    return missing | same


@pytest.fixture
def kernels(planner):
    """The kernels of a graph for a described GPU; a graph is compiled once."""
    return lambda gpu: functools.cache(lambda graph: planner.call(kernels_of, graph, gpu))


def check(names, gpu, planner, kernels):
    """No problem that the support table allows has an array or an option that its compiled kernel ignores."""
    version, compiled, found = planner.call(library_version), kernels(gpu), {}
    for name in names:
        problem, capability = PROBLEMS[name], gpus.capability_of(gpu)
        if not why_not(problem, version, capability):
            found[name] = dropped(compiled, *graphs_of(problem, guards(problem, version, capability)))
    assert sum(ignored == set() for ignored in found.values()) > len(names) // 2
    assert {name: ignored for name, ignored in found.items() if ignored} == UNCONFIRMED.get(gpu, {})


def test_kernels_read_every_array_and_depend_on_every_option(planner, kernels):
    """Both passes with many options, on the H200."""
    check(SHORT, "h200", planner, kernels)


@pytest.mark.sweep
@pytest.mark.parametrize("gpu", gpus.REPRESENTATIVES)
def test_kernels_of_every_kind_of_graph(gpu, planner, kernels):
    """Every problem of the support table and more, for every described GPU."""
    check(PROBLEMS, gpu, planner, kernels)


def test_every_option_is_in_a_problem():
    """Each optional array of a problem and each setting is in a problem here, and each exemption is a tensor of a graph."""
    optional = {field.name for field in dataclasses.fields(Problem) if field.init and field.default is not dataclasses.MISSING}
    have = {name for problem in PROBLEMS.values() for name, _ in options_of(problem)}
    assert (optional | {*Settings._fields}) - {"settings"} - have == WITHOUT_GRAPHS
    names = set().union(*(graphs_of(problem, frozenset())[0].tensors for problem in PROBLEMS.values()))
    for pattern in EXEMPT_GRADIENTS:
        for one in pattern.split("|"):
            assert any(re.fullmatch(one, tensor.name) for tensor in names), one


def less_a_gradient(graph):
    """The graph of gradients with ``rowsum(dO ∘ O) − dL``: a gradient dL of the log-sum-exp, which cuDNN plans."""
    (rows,) = (node.out for node in graph.nodes if node.out.name == "Σ")
    gradient = Tensor("dL", rows.shape, "float32", "input", row_major(rows.shape))
    less = Pointwise("Σ − dL", dataclasses.replace(rows, name="Σ−dL"), "sub", rows, gradient)
    nodes = []
    for node in graph.nodes:
        reads = isinstance(node, Pointwise) and node.x is rows
        nodes.append(dataclasses.replace(node, x=less.out) if reads else node)
        nodes += [less] if node.out is rows else []
    return dataclasses.replace(graph, nodes=tuple(nodes))


def test_a_dropped_array_is_found(kernels):
    """cuDNN plans the gradients with a term that its kernel ignores: the check names the array."""
    graph = backward(cupy_sdpa.problem(*[(64, 2, 64, 1)] * 3, dtype="float16", backward=True))
    planted = less_a_gradient(graph)
    assert "dL" in {tensor.name for tensor in planted.by_role("input")}
    assert dropped(kernels("h200"), graph, {}) == set()
    assert dropped(kernels("h200"), planted, {}) == {"dL"}
    assert dropped(kernels("h200"), planted, {"gradient": {graph}}) == {"dL", "gradient"}
