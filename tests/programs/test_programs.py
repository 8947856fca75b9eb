"""Programs: static checks of every program, memory that temporaries share, and the host work of repeated calls."""

import sys
from pathlib import Path

import numpy as np
import pytest
from engines import numbers

import cupy_sdpa
from cupy_sdpa import BlockMask, attention, attention_backward, attention_jvp, shared_prefix_attention
from cupy_sdpa.programs import run
from cupy_sdpa.programs.program import Builder
from cupy_sdpa.programs.steps import Constant

FEATURES = (
    {"block_mask"}, {"jvp"}, {"block_mask", "jvp"}, {"block_mask", "score_mod"}, {"block_mask", "deterministic"},
    {"seq_lens_kv"}, {"packed"}, {"bucket"}, {"bias"}, {"score_mod"}, {"paged"}, {"paged", "shared_prefix"},
)  # fmt: skip
PACKAGE = str(Path(cupy_sdpa.__file__).parent)


def programs_of(engine, features, number, monkeypatch):
    """The calls of programs that a random problem makes."""
    made = []
    own = run.ProgramCall.run

    def kept(call, memory=None):
        made.append(call)
        return own(call, memory)

    monkeypatch.setattr(run.ProgramCall, "run", kept)
    engine.agrees(engine.draw(features, number), refused=True)
    return made


@pytest.mark.parametrize("number", numbers(12, quick=4))
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(sorted(features)))
def test_static_checks(features, number, engine, monkeypatch):
    """Temporaries are written before they are read, in memory of their own; views stay inside; inputs are not written."""
    for call in programs_of(engine, features, number, monkeypatch):
        program = call.program
        written, last = set(), {view.storage.name: n for n, step in enumerate(program.steps) for view in step.views()}
        results = {name for name, x in call.arrays.items() if name in call.result_names}
        for n, step in enumerate(program.steps):
            writes = {view.storage.name for view in step.writes}
            for view in step.views():
                name, (begin, end) = view.storage.name, view.bounds
                assert name in {*program.temporaries, *program.constants, *program.fills, *call.arrays}
                if name in program.temporaries and view.size:
                    assert name in written or name in writes, f"{step.name} reads {name} before it is written"
                    assert 0 <= begin <= end <= program.temporaries[name].size
                    for other in written - {name}:
                        if other in program.temporaries and last[other] >= n:
                            a, b = program.temporaries[name], program.temporaries[other]
                            assert a.begin + a.size <= b.begin or b.begin + b.size <= a.begin, f"{name} and {other}"
                elif name in call.arrays and view.size:
                    whole = call.arrays[name]
                    first, after = type(view).of(name, whole).bounds
                    assert first <= begin <= end <= after, f"{step.name} leaves {name}"
            assert writes <= program.temporaries.keys() | results, f"{step.name} writes {writes}"
            written |= writes


@pytest.mark.parametrize("number", numbers(12, quick=4))
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(sorted(features)))
def test_results_do_not_depend_on_the_memory(features, number, monkeypatch):
    """The same bits whatever the memory of the temporaries contained before."""
    from engines import Engine

    own = run.ProgramCall.run

    def twice(call, memory=None):
        call.create_inputs()
        call.create_results()
        found = []
        for byte in (0xFF, 0x00):  # NaN, and 0
            for name in call.result_names:
                call.arrays[name].fill(np.nan)
            call.execute(None, np.full(call.program.memory_bytes, byte, np.uint8))
            found.append([call.arrays[name].tobytes() for name in call.result_names])
        assert found[0] == found[1]
        return own(call, memory)

    monkeypatch.setattr(run.ProgramCall, "run", twice)
    engine = Engine("numpy", np)
    engine.agrees(engine.draw(features, number))


def test_temporaries_share_memory():
    """Two that are not in use at the same time have one place; two that are have two."""
    builder = Builder(None)
    x, y, z = (builder.temporary((100,), np.float32) for _ in range(3))
    builder.fill(x, 1)
    builder.copy(y, x)
    builder.copy(z, y)
    places = builder.build().temporaries
    a, b, c = (places[view.storage.name] for view in (x, y, z))
    assert a.begin == c.begin != b.begin


def test_a_constant_is_one_storage():
    """A constant that several steps read is uploaded once."""
    builder, constant = Builder(None), Constant(np.arange(4))
    assert builder.constant(constant) == builder.constant(constant) != builder.constant(Constant(np.arange(4)))


def functions_entered(call):
    """How many functions of the package a call enters."""
    count = 0

    def entered(frame, event, _):
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(PACKAGE)

    sys.setprofile(entered)
    try:
        call()
    finally:
        sys.setprofile(None)
    return count


TABLE = np.random.default_rng(1).random((3, 3, 1, 1)) < 0.7


def composed_calls(engine):
    """Calls of several steps, by name; each takes arrays."""
    mask = BlockMask.from_blocks(TABLE, 300, 300)

    def gradients(q, k, v, options):
        out, stats = attention(q, k, v, return_stats=True, **options)
        return lambda: attention_backward(out, q, k, v, out, stats, **options)

    def arrays():
        return [engine.normal([1, n], 16, heads, 300, 1) for n, heads in enumerate((2, 1, 1))]

    def pages(sq, **options):
        q = engine.normal(1, 64, 4, sq, 2)
        k, v = (engine.normal(n, 64, 2, 16, 60) for n in (2, 3))
        table = np.asfortranarray(np.stack([[0, 1, 2, 3, *range(4, 30)], [0, 1, 2, 3, *range(30, 56)]], axis=1).astype("i4"))
        given = {"page_table": engine.put(table), "seq_lens_kv": engine.put(np.array([400, 300], "i4")), **options}
        return (q, k, v), given

    def on_pages(call, *others, sq=1, **options):
        arrays, given = pages(sq, **options)
        return lambda: call(*arrays, *others, **given)

    return {
        "split keys": lambda: on_pages(attention, sq=3, causal="bottom_right"),
        "shared prefix": lambda: on_pages(shared_prefix_attention, 64),
        "shared prefix of several queries": lambda: on_pages(shared_prefix_attention, 64, sq=3, causal="bottom_right"),
        "block mask": lambda: (lambda x: lambda: attention(*x, block_mask=mask))(arrays()),
        "gradients with a block mask": lambda: gradients(*arrays(), {"block_mask": mask}),
        "derivative": lambda: (lambda x: lambda: attention_jvp(*x, *x))(arrays()),
        "derivative with a block mask": lambda: (lambda x: lambda: attention_jvp(*x, *x, block_mask=mask))(arrays()),
    }


#: The functions that a call on other addresses may enter; the goal is 400 for all of them.
OTHER_ADDRESSES = {
    "split keys": 400, "shared prefix": 400, "shared prefix of several queries": 400,
    "block mask": 400, "gradients with a block mask": 450, "derivative": 600, "derivative with a block mask": 1300,
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_ADDRESSES)
def test_host_work_of_repeated_calls(name, fake):
    """A call on the same addresses enters at most 15 functions of the package; on other addresses nothing is parsed."""
    from engines import Engine

    make = composed_calls(Engine("fake", fake))[name]
    call = make()
    for _ in range(10):
        call()
    assert functions_entered(call) <= 15
    other = make()
    assert functions_entered(other) <= OTHER_ADDRESSES[name]
    fake.cuda.Device().synchronize()  # the plans are destroyed next
