"""Block masks in the kernel, cuDNN's on Blackwell: the graph on numpy, calls on a stand-in for cuDNN, and plans."""

import ml_dtypes
import numpy as np
import pytest
from engines import Engine
from planner import library_version, plan_problem

from cupy_sdpa import BlockMask, attention, attention_backward, attention_vjp, block_mask, explain, zoo
from cupy_sdpa.boundary.arguments import read_forward
from cupy_sdpa.cudnn.library import library
from cupy_sdpa.programs.executor import compiled
from cupy_sdpa.support import gpus
from cupy_sdpa.support.why_not import why_not

NATIVE = "computed by a kernel that skips blocks"


@pytest.mark.parametrize("seed", range(6))
def test_the_graph_on_numpy(seed):
    """The interpreter computes the graph from the bits; those of blocks beyond the last one are not read."""
    rng = np.random.default_rng(seed)
    sq, skv, hq = 300, (130, 300, 1100)[seed % 3], 2
    listed = rng.random((-(-skv // 128), 3, hq, 1)) < 0.6
    listed[0] = True
    bits = np.packbits(listed, axis=0, bitorder="little").copy(order="F")
    bits[-1] |= np.uint8(0xFF << len(listed) % 8 & 0xFF) if len(listed) % 8 else np.uint8(0)
    q, k, v = (np.asfortranarray(rng.standard_normal((8, n, s, 1))) for n, s in ((hq, sq), (1, skv), (1, skv)))
    options = {"causal": True, "softcap": 2.0} if seed % 2 else {"sinks": rng.standard_normal(hq).astype("f4")}
    dense = np.repeat(np.repeat(listed, 128, 0), 128, 1)[:skv, :sq]
    expected = attention(q, k, v, return_stats=True, mask=np.asfortranarray(dense), **options)
    call = read_forward(q, k, v, options, return_stats=True, block_bits=bits)
    assert "a block mask in the kernel" in str(call.problem)
    for x, y in zip(compiled(call).run(), expected, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)
    with pytest.raises(ValueError, match=r"block_bits has shape \(1, 2, 2, 1\); it must be"):
        read_forward(q, k, v, options, block_bits=np.zeros((1, 2, 2, 1), np.uint8))


@pytest.fixture
def blackwell(request, fake, monkeypatch):
    """The fake CuPy as a GPU with a compute capability and a version of cuDNN: Blackwell and 9.28 by default."""
    capability, version = getattr(request, "param", ("100", 92800))
    monkeypatch.setattr(fake.cuda.Device, "compute_capability", capability)
    monkeypatch.setattr(library(), "version", version)
    return Engine("fake", fake)


def triangle(listed, *lengths):
    """Listed blocks up to the diagonal, and the causal mask within them."""
    return BlockMask.from_blocks(listed & np.tri(*listed.shape, dtype=bool).T, *lengths, mask_mod=lambda b, h, i, j: i >= j)


LISTED = (np.random.default_rng(0).random((5, 5)) < 0.4) | np.eye(5, dtype=bool)
HEADS = (np.random.default_rng(0).random((5, 5, 4, 1)) < 0.4) | np.eye(5, dtype=bool)[:, :, None, None]
TABLE = np.random.default_rng(0).random((256, 256)) < 0.9
#: Masks, and what the problem of the call has for their partial blocks; None for masks without this form, such as those of
#: arrays, and those in which a query attends to no key.
MASKS = {
    "full blocks": (lambda: BlockMask.from_blocks(LISTED), "no mask"),
    "heads": (lambda: BlockMask.from_blocks(HEADS), "no mask"),
    "lengths": (lambda: BlockMask.from_blocks(LISTED, 600, 530), "no mask"),
    "causal": (lambda: triangle(LISTED, 530, 600), "causal from the top left"),
    "window": (lambda: block_mask(zoo.dilated(200, 2), 640, 640), "a mask function"),
    "function": (lambda: block_mask(zoo.checkered, 640, 640), "a mask function"),
    "within blocks": (lambda: BlockMask.from_blocks(LISTED, mask_mod=lambda b, h, i, j: (i + j) % 2 == 0), None),
    "array": (lambda: block_mask(lambda b, h, i, j, t: t[i, j], 256, 256, tensors={"t": TABLE}), None),
    "a block of queries": (lambda: BlockMask.from_blocks(np.array([[1, 0, 0], [0, 0, 1], [1, 0, 0]], bool)), None),
    "one query": (lambda: block_mask(lambda b, h, i, j: (j % 130 < 100) & (i != 200), 256, 256), None),
}  # fmt: skip


def problem_of(engine, name, *, d=64, dv=64, dtype=np.float16, **options):
    """The problem of the call with a mask, and its report."""
    mask = MASKS[name][0]()
    shapes = (d, 4, mask.sq, 2), (d, 2, mask.skv, 2), (dv, 2, mask.skv, 2)
    q, k, v = (engine.xp.empty(shape, dtype, order="F") for shape in shapes)
    if "tensors" in options:
        options["tensors"] = {"x": engine.put(np.zeros((4, mask.sq), np.float32))}
    report = explain(q, k, v, block_mask=mask, **engine.put(options))
    return report.problem, report


@pytest.mark.parametrize("name", MASKS)
def test_partial_blocks_become_a_mask_of_the_call(name, blackwell):
    """Bits alone, or with the causal mask, or with the function; the report says that nothing was run on such a GPU."""
    problem, report = problem_of(blackwell, name)
    words = MASKS[name][1]
    assert (NATIVE in report.blocks) == (words is not None), report
    if words is not None:
        assert words in str(problem)
        assert "a block mask in the kernel" in str(problem)
        assert any("planned, and not run" in text for text in report.unverified)
        assert problem.block_bits.shape == (1, 5, 4, 2)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "causal")) for name in MASKS])
def test_results(name, blackwell):
    """Calls in the kernel, repeated until they are captured, and gradients, which the calls of other GPUs compute."""
    mask, options = MASKS[name][0](), {"softcap": 2.0, "scale": -0.2} if len(name) % 2 else {}
    shapes = (16, 4, mask.sq, 1), (16, 2, mask.skv, 1), (8, 2, mask.skv, 1), (8, 4, mask.sq, 1)
    arrays = [blackwell.normal(seed, *shape) for seed, shape in enumerate(shapes)]
    q, k, v, dout = (blackwell.get(x).astype(np.float64, order="F") for x in arrays)
    want, pullback = attention_vjp(q, k, v, mask=mask.to_dense(), **options)
    out = blackwell.nan(*want.shape)
    for number in range(5):
        stats = attention(*arrays[:3], block_mask=mask, out=out, return_stats=True, **options)[1]
        if number in (0, 4):
            np.testing.assert_allclose(blackwell.get(out), want, atol=2e-2)
    results = attention_backward(arrays[3], *arrays[:3], out, stats, block_mask=mask, **options)
    for x, y in zip(blackwell.get(results), pullback(dout), strict=True):
        np.testing.assert_allclose(x, y, atol=4e-2 * max(1, abs(y).max()))


@pytest.mark.parametrize("blackwell", [("100", 92500), ("90", 92800), ("120", 92800)], ids=str, indirect=True)
def test_other_gpus_and_versions(blackwell):
    """They compute the mask by other calls; so do gradients."""
    assert NATIVE not in problem_of(blackwell, "causal")[1].blocks
    assert NATIVE not in problem_of(blackwell, "causal", backward=True)[1].blocks


OPTIONS = [
    {"return_stats": True}, {"softcap": 5.0}, {"sinks": np.zeros(4, np.float32)}, {"scale": -1.0, "return_stats": True},
    {"score_mod": lambda s, b, h, i, j: s + 0.1 * (i - j)}, {"score_mod": lambda s, b, h, i, j, x: s + x[h, i] * j, "tensors": {}},
]  # fmt: skip


@pytest.mark.cudnn
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["b200", "h200", "rtx5090"])
@pytest.mark.parametrize("name", [name for name, (_, words) in MASKS.items() if words])
def test_it_is_planned_for_blackwell_alone(name, gpu, blackwell, planned, planner):
    """With every option; other GPUs are refused by the support table and by cuDNN."""
    for number, options in enumerate(OPTIONS):
        if gpu == "b200" or number == list(MASKS).index(name):
            problem, _ = problem_of(blackwell, name, **options)
            plan = planned(plan_problem, problem, gpu)
            reasons = why_not(problem, planner.call(library_version), gpus.capability(gpu))
            assert (not isinstance(plan, str)) == (not reasons) == (gpu == "b200"), f"{options}: {plan}"


@pytest.mark.cudnn
@pytest.mark.sweep
@pytest.mark.parametrize(("d", "dv"), [(192, 128), (192, 192), (8, 8), (128, 128), (256, 256)])
def test_head_dims_are_planned_as_the_table_says(d, dv, blackwell, planner):
    """Compiled, because the kernels of larger head dims do not compile."""
    dtype = np.float16 if dv == 192 else ml_dtypes.bfloat16
    mask = MASKS["causal"][0]()
    call = read_forward(
        *(np.empty((n, h, s, 2), dtype, order="F") for n, h, s in ((d, 4, mask.sq), (d, 2, mask.skv), (dv, 2, mask.skv))),
        {"causal": True}, return_stats=True, block_bits=np.zeros((1, 5, 4, 2), np.uint8, order="F"),
    )  # fmt: skip
    plan = planner.call(plan_problem, call.problem, "b200")
    assert (not isinstance(plan, str)) == (not why_not(call.problem, planner.call(library_version), 100)), plan
