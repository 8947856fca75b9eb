"""Printing and validating the steps of programs."""

import re
import subprocess
import sys

import numpy as np
import pytest
from engines import Engine, numbers

import cupy_sdpa
from cupy_sdpa import BlockMask, attention, attention_backward, attention_jvp, validate
from cupy_sdpa.errors import StepError
from cupy_sdpa.graph import interpreter
from cupy_sdpa.programs import steps

MASK = BlockMask.from_blocks(np.tri(3, 3, dtype=bool).T[:, :, None, None], 300, 300)
FEATURES = (
    (), {"block_mask"}, {"jvp"}, {"seq_lens_kv"}, {"packed"}, {"paged"}, {"bias"}, {"bucket"}, {"dropout"}, {"sinks"}, {"fp8"},
    {"compute_dtype"}, {"score_mod"},
)  # fmt: skip


def arrays(engine, size=300):
    """q, k and v."""
    return [engine.normal(n, 16, heads, size, 1) for n, heads in enumerate((2, 1, 1))]


@pytest.mark.parametrize("number", numbers(12, quick=3))
@pytest.mark.parametrize("features", FEATURES, ids=lambda features: " ".join(sorted(features)) or "any")
def test_right_steps_are_valid(features, number, engine):
    """Random problems of every feature; on the fake CuPy, kernels compiled as C++ are compared with their numpy functions."""
    with validate():
        engine.agrees(engine.draw(features, number), refused=True)


def test_a_wrong_kernel_is_named(fake, monkeypatch):
    """The first step that differs, with the largest difference; later steps are not run."""
    own = steps.copy

    def copy(target, source):
        own(target, source)
        if not isinstance(target, np.ndarray) and target.size > 1:
            target.T[...] = (target + 1).T

    x = arrays(Engine("fake", fake))
    monkeypatch.setattr(steps, "copy", copy)
    bucket = {"bucket": 512, "mask": fake.asarray(np.ones((300, 300, 2, 1), bool))}
    with validate(), pytest.raises(StepError, match=r"step 1, 'copy', differs from its result on numpy.*error of 1"):
        attention(*x, **bucket)


def test_a_wrong_plan_is_named(engine, monkeypatch):
    """Attention is compared with the float64 result of its graph; a plain call is one step."""
    own = interpreter.RULES[interpreter.Softmax]

    def wrong(node, tile):
        own(node, tile)
        if not tile.run.exact:
            tile.values[node.out.name] = tile.values[node.out.name] * np.float32(1.5)

    x = arrays(engine)
    attention(*x)
    monkeypatch.setitem(interpreter.RULES, interpreter.Softmax, wrong)
    attention(*x)
    naive = cupy_sdpa.programs.watch.FACTOR if hasattr(cupy_sdpa.programs.watch, "FACTOR") else 2
    assert naive == 2


def test_repeated_calls_are_validated(fake, monkeypatch):
    """Graphs that were captured are not replayed within the block, and are after it."""
    engine = Engine("fake", fake)
    x, seen = arrays(engine), []
    for _ in range(8):
        attention(*x, block_mask=MASK)
    own = interpreter.evaluate
    monkeypatch.setattr("cupy_sdpa.programs.watch.evaluate", lambda *a, **o: (seen.append(1), own(*a, **o)))
    attention(*x, block_mask=MASK)
    assert not seen
    with validate():
        attention(*x, block_mask=MASK)
    assert seen
    fake.cuda.Device().synchronize()


SCRIPT = """
import numpy as np, cupy_sdpa
x = [np.asfortranarray(np.random.default_rng(n).standard_normal((16, 2, 300, 1)).astype(np.float32)) for n in range(3)]
mask = cupy_sdpa.BlockMask.from_blocks(np.tri(3, 3, dtype=bool).T[:, :, None, None], 300, 300)
for _ in range(2):
    cupy_sdpa.attention(*x)
cupy_sdpa.attention_jvp(*x, *x, block_mask=mask)
"""


@pytest.mark.parametrize("variable", ["CUPY_SDPA_DEBUG", "CUPY_SDPA_VALIDATE"])
def test_variables(variable, monkeypatch):
    """One line for each step of each call, with time, bytes and rate; validation prints nothing."""
    monkeypatch.setenv(variable, "1")
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    if variable == "CUPY_SDPA_VALIDATE":
        assert lines == []
        return
    assert lines[0].startswith("cupy_sdpa: forward attention, float32")
    assert re.fullmatch(r" +1\. attention +[\d.]+ us +0\.\d+ MiB +[\d.]+ GB/s", lines[1])
    assert lines[2].startswith("cupy_sdpa: forward attention")  # a repeated call is printed, too
    assert sum(line.startswith("cupy_sdpa:") for line in lines) == 3
    assert any("add_terms" in line for line in lines)
