"""Repeated calls with a block mask on the fake CuPy: looked up, captured and launched as one call."""

import gc
import weakref

import numpy as np
import pytest
from test_block_sparse import NAMES, dense_attention

from cupy_sdpa import BlockMask, attention, attention_backward, block_mask, get_plan_cache
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls.replay_cache import CAPTURE_AFTER
from cupy_sdpa.programs import block_masks, program
from cupy_sdpa.sparse.entries import Sizes
from cupy_sdpa.sparse.method import method_of

TABLE = np.array([[True, False, True], [True, True, False], [False, True, True]])
MASKS = {
    "packed": lambda: block_mask(lambda b, h, i, j: i // 100 == j // 100, 300, 300),
    "slices": lambda: block_mask(lambda b, h, i, j: (i >= j) | (j < 70), 300, 300),
    "blocks": lambda: BlockMask.from_blocks(TABLE, 300, 300, mask_mod=lambda b, h, i, j: (i + j) % 3 > 0),
    "heads": lambda: BlockMask.from_blocks(np.stack([TABLE, TABLE.T], axis=2)[..., None], 300, 300),
}
OPTIONS = ["", "sinks", "scores"]


class Calls:
    """Both passes with a mask, results full of NaN in arrays of the caller, and what the calls do."""

    def __init__(self, name, option, fake, monkeypatch=None):
        self.fake, self.mask, self.option = fake, MASKS[name](), option
        rng = np.random.default_rng(0)
        shapes = [(16, h, 300, 1) for h in (2, 1, 1, 2)]
        self.host = [np.asfortranarray(rng.standard_normal(shape).astype("f2")) for shape in shapes]
        self.rows = rng.standard_normal(300).astype("f4")
        self.sinks = rng.standard_normal(2).astype("f4")
        self.parsed, self.launched = [], []
        self.move()
        if monkeypatch is None:
            return
        for module, reader in ((program, "read_forward"), (program, "read_backward")):
            read = getattr(module, reader)
            monkeypatch.setattr(module, reader, lambda *x, read=read, **y: self.parsed.append(1) or read(*x, **y))
        launch = fake.cuda.runtime.graphLaunch
        monkeypatch.setattr(fake.cuda.runtime, "graphLaunch", lambda *x: self.launched.append(1) or launch(*x))

    def move(self):
        """Copy everything to new memory."""
        self.arrays = [self.fake.asarray(x) for x in self.host]
        self.options = {}
        if self.option == "sinks":
            self.options = {"sinks": self.fake.asarray(self.sinks)}
        if self.option == "scores":
            self.options = {"score_mod": lowered, "tensors": {"rows": self.fake.asarray(self.rows)}}
        shapes = [(16, 2, 300, 1), (300, 2, 1), *(x.shape for x in self.host[:3])]
        dtypes = ["f2", "f4", "f2", "f2", "f2"]
        self.results = [self.fake.asarray(np.full(s, np.nan, d, order="F")) for s, d in zip(shapes, dtypes, strict=True)]

    def run(self):
        """Run both passes; returns the numbers of parsed calls, of launches of graphs, and of executions of cuDNN."""
        executions = getattr(library(), "executions", [])  # of the stand-in for cuDNN
        before = len(executions)
        self.parsed.clear()
        self.launched.clear()
        for x in self.results:
            x[...] = np.nan
        (q, k, v, dout), (out, stats, dq, dk, dv) = self.arrays, self.results
        attention(q, k, v, out=out, stats=stats, return_stats=True, block_mask=self.mask, **self.options)
        attention_backward(dout, q, k, v, out, stats, dq=dq, dk=dk, dv=dv, block_mask=self.mask, **self.options)
        self.check()
        return len(self.parsed), len(self.launched), len(executions) - before

    def check(self):
        """Compare the results with the dense reference."""
        i, j = np.arange(300)[:, None, None], np.arange(300)[:, None, None, None]
        added = self.rows[i] * (j - i) / 300 if self.option == "scores" else 0.0
        sinks = self.sinks if self.option == "sinks" else None
        wide = [x.get().astype("f8") for x in self.arrays]
        expected = dense_attention(*wide, self.mask.to_dense(), 0.25, added, sinks)
        for name, x, y in zip(NAMES, self.results, expected, strict=True):
            np.testing.assert_allclose(x.get(), y, atol=2e-2 * max(1, abs(y[np.isfinite(y)]).max()), err_msg=name)


def lowered(score, b, h, q_idx, kv_idx, rows):
    """A score function of positions and of an array."""
    return score + rows[q_idx] * (kv_idx - q_idx) / 300


@pytest.fixture
def calls(request, fake, monkeypatch):
    """Calls with a mask and an option."""
    name, option = request.param
    return Calls(name, option, fake, monkeypatch)


every = pytest.mark.parametrize("calls", [(m, o) for m in MASKS for o in OPTIONS], ids=str, indirect=True)


@every
def test_a_repeated_call_is_one_graph(calls):
    """Nothing is parsed, and cuDNN is not called; inputs that changed in place are read."""
    for _ in range(CAPTURE_AFTER + 2):
        calls.run()
    for _ in range(2):
        for x in (*calls.arrays, *calls.options.get("tensors", {}).values()):
            x *= 0.5
        calls.rows *= 0.5 if calls.option == "scores" else 1
        assert calls.run() == (0, 2, 0)
    assert get_plan_cache().recordings == 2


@every
def test_calls_on_other_arrays_are_not_parsed(calls):
    """Also if they are never captured; the first call parses every part once."""
    first = calls.run()[0]
    assert first >= 2
    for _ in range(3):
        calls.move()
        assert calls.run()[:2] == (0, 0)


@pytest.mark.gpu
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
def test_repeated_calls_on_the_gpu(name, option, cupy):
    """Captured calls, inputs that change in place, and calls on other arrays."""
    calls, before = Calls(name, option, cupy), get_plan_cache().recordings
    for number in range(2 * CAPTURE_AFTER + 2):
        if number == CAPTURE_AFTER + 2:
            assert get_plan_cache().recordings == before + 2
            calls.move()
        for x in calls.arrays:
            x *= 0.9
        calls.run()


@pytest.mark.parametrize("name", MASKS)
def test_new_results_are_captured(name, fake, monkeypatch):
    """Results that the calls create, whose memory CuPy's pool returns."""
    calls = Calls(name, "", fake, monkeypatch)
    q, k, v, dout = calls.arrays
    for _ in range(CAPTURE_AFTER + 3):
        calls.parsed.clear()
        calls.launched.clear()
        out, stats = attention(q, k, v, return_stats=True, block_mask=calls.mask)
        calls.results = [out, stats, *attention_backward(dout, q, k, v, out, stats, block_mask=calls.mask)]
        calls.check()
        del out, stats
    assert not calls.parsed


def test_a_mask_is_freed(fake, monkeypatch):
    """Cached calls and captured graphs do not keep it."""
    for name in MASKS:
        calls = Calls(name, "", fake, monkeypatch)
        for _ in range(CAPTURE_AFTER + 2):
            calls.run()
        mask = weakref.ref(calls.mask)
        calls.mask = None
        gc.collect()
        assert mask() is None, name


def test_masks_at_the_same_address_are_different(fake, monkeypatch):
    """A mask that is created after another one was deleted has calls of its own."""
    calls = Calls("blocks", "", fake, monkeypatch)
    for n in range(4):
        calls.mask = None
        gc.collect()
        calls.mask = BlockMask.from_blocks(np.roll(TABLE, n, axis=0), 300, 300)
        for _ in range(CAPTURE_AFTER + 1):
            calls.run()


def test_results_that_overlap_inputs_are_refused_in_repeated_calls(fake, monkeypatch):
    """New addresses of results are compared with all arrays."""
    calls = Calls("packed", "", fake, monkeypatch)
    for _ in range(CAPTURE_AFTER + 2):
        calls.run()
    q, k, v, _ = calls.arrays
    with pytest.raises(ValueError, match="out overlaps q"):
        attention(q, k, v, out=q, stats=calls.results[1], return_stats=True, block_mask=calls.mask)


def test_heads_in_turn_share_memory(fake, monkeypatch):
    """Copies of heads that are computed one after the other are in the same memory, whose size is bounded."""
    from cupy_sdpa.programs.run import ProgramCall as ComposedCall

    needed = []
    run = ComposedCall.run
    monkeypatch.setattr(ComposedCall, "run", lambda self, *x: (run(self, *x), needed.append(self.launched.memory_bytes))[0])
    rng = np.random.default_rng(0)
    q, k, v, dout = (fake.asarray(rng.standard_normal((16, 4, 300, 1)).astype("f2"), order="F") for _ in range(4))
    results = []
    for limit in (1 << 31, 1):
        monkeypatch.setattr(block_masks, "MAX_COPIES", limit)
        mask = BlockMask.from_blocks(TABLE, 300, 300)
        assert method_of(mask, Sizes(4, 4, 1)).name == "blocks"
        out, stats = attention(q, k, v, return_stats=True, block_mask=mask)
        results.append([x.get() for x in attention_backward(dout, q, k, v, out, stats, block_mask=mask)])
    assert needed[3] < 0.5 * needed[1]
    for x, y in zip(*results, strict=True):
        np.testing.assert_allclose(x, y, atol=2e-3)
