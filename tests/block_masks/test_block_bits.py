"""Block masks in the kernel, cuDNN's on Blackwell: the graph on numpy, the operation in a stand-in for cuDNN, and its plans."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from planner import library_version, plan_problem
from test_block_sparse import NAMES, dense_attention

from cupy_sdpa import BlockMask, attention, attention_vjp, block_mask, explain, zoo
from cupy_sdpa._cudnn.library import library
from cupy_sdpa.calls.arguments import read_forward
from cupy_sdpa.plans.plan import PlanInfo
from cupy_sdpa.sparse.entries import Sizes
from cupy_sdpa.sparse.native import native_of, native_problem
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not


def triangle(blocks, skv=None, sq=None):
    """A mask of some blocks, and of the causal mask within them."""
    attends = {"mask_mod": lambda b, h, i, j: i >= j}
    return BlockMask.from_blocks(
        blocks & np.tri(*blocks.shape[:2], dtype=bool).T.reshape(*blocks.shape[:2], 1, 1), sq, skv, **attends
    )


def with_diagonal(listed):
    """Blocks with those of the diagonal."""
    return listed | np.eye(*listed.shape[:2], dtype=bool).reshape(*listed.shape[:2], 1, 1)


class Draw:
    """A random call with bits of blocks; every query attends to a key."""

    def __init__(self, seed, dtype="float64"):
        rng = self.rng = np.random.default_rng(seed)
        pick = lambda *choices: choices[int(rng.integers(len(choices)))]  # noqa: E731
        hkv, batch = pick(1, 2), pick(1, 2)
        hq = hkv * pick(1, 2)
        sq = pick(2, 3, 100, 128, 129, 300, 1100)
        skv = pick(1, 2, 128, 130, 1030, sq, sq)
        d, dv = pick(8, 16), pick(8, 16)
        shapes = (d, hq, sq), (d, hkv, skv), (dv, hkv, skv), (dv, hq, sq)
        self.q, self.k, self.v, self.dout = (np.asfortranarray(rng.standard_normal((*s, batch)).astype(dtype)) for s in shapes)
        blocks = (-(-skv // 128), -(-sq // 128), pick(1, hq), pick(1, batch))
        listed = rng.random(blocks) < 0.4
        listed[int(rng.integers(blocks[0]))] |= rng.random() < 0.8
        self.kind = pick("blocks", "causal", "function")
        if self.kind == "causal":
            self.mask = triangle(with_diagonal(listed), skv, sq)
        elif self.kind == "function":
            window = int(rng.integers(0, 200))
            self.mask = block_mask(lambda b, h, i, j: ((i - j) <= window) & ((i - j) % 3 == 0) & (i >= j), sq, skv)
        else:
            self.mask = BlockMask.from_blocks(listed, sq, skv)
        self.sizes = Sizes(hq, hkv, batch)
        self.options = {"scale": pick(None, 0.3, -0.2)}
        if pick(True, False):
            self.options["softcap"] = 2.0
        self.sinks = pick(None, rng.standard_normal(hq).astype("f4"))

    @property
    def arrays(self):
        """The inputs of the forward pass."""
        return self.q, self.k, self.v


def expected_of(draw):
    """The output and the log-sum-exp in float64."""
    q, k, v, dout = (x.astype("f8") for x in (draw.q, draw.k, draw.v, draw.dout))
    scale, cap = draw.options["scale"] or len(q) ** -0.5, draw.options.get("softcap")
    added = 0.0
    if cap:
        of = np.arange(q.shape[1]) // (q.shape[1] // k.shape[1])
        scores = scale * np.einsum("dhib,dhjb->jihb", q, k[:, of])
        added = cap * np.tanh(scores / cap) - scores
    return dense_attention(q, k, v, dout, draw.mask.to_dense(), scale, added, draw.sinks)


@pytest.mark.parametrize("seed", range(40))
def test_the_graph_on_numpy(seed):
    """The interpreter computes the graph from the bits; those of blocks beyond the last one are not read."""
    draw = Draw(seed)
    native = native_of(draw.mask)
    if native is None:
        assert not draw.mask.to_dense().any(axis=0).all()
        return
    bits = native.of(draw.sizes).copy(order="F")
    beyond = -len(draw.mask.kinds) % 8
    bits[-1] |= np.uint8(0xFF << (8 - beyond) & 0xFF)
    options = {**draw.options, **native.options} | ({} if draw.sinks is None else {"sinks": draw.sinks})
    call = read_forward(*draw.arrays, options, return_stats=True, block_bits=bits)
    for got, expected in zip(call.run(), expected_of(draw), strict=False):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_a_wrong_bit_changes_the_result():
    """One block more than the mask has is found."""
    draw = Draw(0)
    native = native_of(draw.mask)
    bits = native.of(draw.sizes).copy(order="F")
    call = read_forward(*draw.arrays, draw.options | native.options, block_bits=bits)
    right = call.run()[0].copy()
    bits[0] = np.where(bits[0] == 1, 2, 1)
    assert abs(call.run()[0] - right).max() > 1e-3


@pytest.fixture
def blackwell(fake, monkeypatch):
    """The fake CuPy as a Blackwell GPU with cuDNN 9.28."""
    monkeypatch.setattr(fake.cuda.Device, "compute_capability", "100", raising=False)
    monkeypatch.setattr(library(), "version", 92800)
    return fake


@pytest.mark.parametrize("seed", range(16))
def test_on_the_fake_blackwell(seed, blackwell):
    """The forward pass is one execution of cuDNN; results in arrays full of NaN, repeated until the call is captured."""
    draw = Draw(100 + seed, "float16")
    q, k, v = (blackwell.asarray(x) for x in draw.arrays)
    options = {**draw.options, "block_mask": draw.mask}
    options |= {} if draw.sinks is None else {"sinks": blackwell.asarray(draw.sinks)}
    expected = expected_of(draw)
    for number in range(5):
        out = blackwell.asarray(np.full(expected[0].shape, np.nan, np.float16, order="F"))
        before = len(library().executions)
        got = attention(q, k, v, return_stats=True, out=out if number % 2 else None, **options)
        assert number % 2 == 0 or got[0] is out
        if draw.kind == "blocks" and number < 2:
            assert len(library().executions) - before == 1
        for name, x, y in zip(NAMES, got, expected, strict=False):
            np.testing.assert_allclose(x.get(), y, atol=2e-2, rtol=2e-2, err_msg=name)


def test_gradients_on_the_fake_blackwell(blackwell):
    """They are computed by the calls of other GPUs."""
    mask = BlockMask.from_blocks(np.array([[True, False, True], [True, True, False], [False, False, True]]))
    rng = np.random.default_rng(0)
    q, k, v, dout = (np.asfortranarray(rng.standard_normal((16, 1, 384, 1)).astype("f2")) for _ in range(4))
    expected = dense_attention(*(x.astype("f8") for x in (q, k, v, dout)), mask.to_dense(), 0.25, 0.0, None)
    out, pullback = attention_vjp(*(blackwell.asarray(x) for x in (q, k, v)), block_mask=mask)
    for x, y in zip((out, *pullback(blackwell.asarray(dout))), (expected[0], *expected[2:]), strict=True):
        np.testing.assert_allclose(x.get(), y, atol=2e-2, rtol=2e-2)


def masks():
    """A mask in this form by name: what the call takes for its partial blocks."""
    listed = with_diagonal(np.random.default_rng(0).random((8, 8, 1, 1)) < 0.4)
    heads = with_diagonal(np.random.default_rng(0).random((8, 8, 4, 1)) < 0.4)
    return {
        "full blocks": (BlockMask.from_blocks(listed), {}),
        "heads": (BlockMask.from_blocks(heads), {}),
        "lengths": (BlockMask.from_blocks(listed, 1000, 901), {}),
        "causal": (triangle(listed, 901, 1000), {"causal": True}),
        "window": (block_mask(zoo.dilated(200, 2), 1024, 1024), {"mask_mod"}),
        "function": (block_mask(zoo.checkered, 1024, 1024), {"mask_mod"}),
    }


OPTIONS = {
    "stats": {"return_stats": True},
    "softcap": {"softcap": 5.0},
    "sinks": {"sinks": np.zeros(4, np.float32)},
    "negative scale": {"scale": -1.0, "return_stats": True},
    "positions": {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)},
    "arrays": {"score_mod": lambda s, b, h, i, j, x: s + x[h, i] * j, "tensors": {"x": np.zeros((4, 1024), np.float32)}},
}


def problem_of(name, *, d=64, dv=64, dtype=np.float16, return_stats=False, **options):
    """The problem of a mask and of options."""
    mask, _ = masks()[name]
    q, k, v = (np.empty((n, h, s, 2), dtype, order="F") for n, h, s in ((d, 4, mask.sq), (d, 2, mask.skv), (dv, 2, mask.skv)))
    if "tensors" in options:
        options["tensors"] = {"x": options["tensors"]["x"][:, : mask.sq].copy(order="F")}
    return native_problem((q, k, v), mask, Sizes(4, 2, 2), options, return_stats=return_stats)


@pytest.mark.parametrize("name", masks())
def test_partial_blocks_become_a_mask_of_the_call(name):
    """Bits alone, or with the causal mask, or with the function."""
    mask, options = masks()[name]
    native = native_of(mask)
    assert native.options == options if isinstance(options, dict) else set(native.options) == options
    assert native.bits.shape == (1, 8, mask.heads, 1)


def test_masks_without_this_form():
    """Partial blocks of arrays, and masks in which a query attends to no key."""
    table = np.random.default_rng(0).random((256, 256)) < 0.9
    assert native_of(block_mask(lambda b, h, i, j, table: table[i, j], 256, 256, tensors={"table": table})) is None
    assert native_of(BlockMask.from_blocks(np.array([[True, False], [True, False]]))) is None
    assert native_of(BlockMask.from_blocks(np.array([[True, True], [True, False]]))) is not None
    assert native_of(block_mask(lambda b, h, i, j: (j < 130) & (i != 200), 256, 256)) is None
    assert native_of(triangle(np.ones((2, 2), bool))) is not None
    assert native_of(BlockMask.from_blocks(np.ones((2, 2), bool), mask_mod=lambda b, h, i, j: i >= j)) is not None


@pytest.mark.cudnn
@pytest.mark.parametrize("gpu", ["b200", "h200", "rtx5090"])
@pytest.mark.parametrize("name", masks())
def test_it_is_planned_for_blackwell_alone(name, gpu, planned, planner):
    """With every option; other GPUs are refused by the support table and by cuDNN."""
    for option, given in OPTIONS.items():
        problem = problem_of(name, **given)
        plan = planned(plan_problem, problem, gpu)
        reasons = why_not(problem, planner.call(library_version), gpus.capability(gpu))
        assert isinstance(plan, PlanInfo) == (not reasons) == (gpu == "b200"), f"{option}: {plan}"


@pytest.mark.in_turn(3)
@pytest.mark.cudnn
@pytest.mark.parametrize(("d", "dv"), [(8, 8), (64, 128), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_head_dims_are_planned_as_the_table_says(d, dv, planner):
    """Compiled, because the kernels of larger head dims do not compile."""
    for dtype in (np.float16, ml_dtypes.bfloat16):
        problem = problem_of("causal", d=d, dv=dv, dtype=dtype, return_stats=True)
        plan = planner.call(plan_problem, problem, "b200")
        assert isinstance(plan, PlanInfo) == (not why_not(problem, planner.call(library_version), 100)), plan


@pytest.mark.cudnn
def test_reports_name_the_method():
    """For a Blackwell GPU with cuDNN 9.26 or newer; elsewhere, and for gradients, other calls."""
    mask, _ = masks()["causal"]
    q, k = (np.zeros((64, 4, n, 1), np.float16, order="F") for n in (1000, 901))
    native = "computed by a kernel that skips blocks"
    for options, used in (
        ({"gpu": "b200"}, True), ({"gpu": "b200", "cudnn": "9.25"}, False), ({"gpu": "h200"}, False), ({}, False),
        ({"gpu": "b200", "backward": True}, False),
    ):  # fmt: skip
        report = explain(q, k, k, block_mask=mask, **options)
        assert report
        assert (native in str(report)) == used
    assert any("planned, and not run" in text for text in explain(q, k, k, block_mask=mask, gpu="b200").unverified)


def test_bits_of_another_shape_are_refused():
    """The message names both shapes."""
    x = np.zeros((8, 2, 300, 1), np.float32, order="F")
    with pytest.raises(ValueError, match=r"block_bits has shape \(1, 2, 2, 1\); it must be \(1, 3, 2, 1\)"):
        read_forward(x, x, x, {}, block_bits=np.zeros((1, 2, 2, 1), np.uint8))
    problem = read_forward(x, x, x, {}, block_bits=np.zeros((1, 3, 2, 1), np.uint8)).problem
    assert "a block mask in the kernel" in str(problem)
    assert dataclasses.replace(problem, block_bits=None) != problem
