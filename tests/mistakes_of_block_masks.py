"""Mistakes with block masks, their fields and functions, and with directional derivatives."""

# mypy: ignore-errors
# (most mistakes are type errors)

import numpy as np
from mistakes import row

from cupy_sdpa import (
    BlockMask,
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    block_mask,
    weight_sums,
    zoo,
)
from cupy_sdpa.composed import widen


def of_blocks(x, *groups):
    """A block mask of all pairs for the arrays (8, 4, 6, 3)."""
    return BlockMask.from_blocks(np.ones((1, 1, *groups), bool), 6, 6)


def call(**options):
    """A call with a block mask."""
    return lambda x: attention(x.s, x.s, x.s, **{"block_mask": of_blocks(x), **options})


def dq_over_tensors(x):
    """Gradients with a block mask, and dq in the memory of a captured array."""
    memory = np.zeros_like(x.s)
    options = {
        "block_mask": of_blocks(x), "tensors": {"t": memory[:6, 0, 0, 0]}, "score_mod": lambda s, b, h, i, j, t: s + t[j],
    }  # fmt: skip
    out, stats = attention(x.s, x.s, x.s, return_stats=True, **options)
    return attention_backward(x.s, x.s, x.s, x.s, out, stats, dq=memory, **options)


def fields(**changes):
    """A mask of FlexAttention's fields, of which some are changed."""
    own = {"kv_num_blocks": np.array([[[1, 1]]]), "kv_indices": np.array([[[[0, 1], [1, 0]]]])}
    return lambda x: BlockMask.from_kv_blocks(**own | changes)


def branches(b, h, q_idx, kv_idx):
    """A mask function with a branch."""
    return q_idx >= kv_idx if kv_idx < 4 else False


MASKS = [
    row("block_mask", f"block={block!r}", lambda x, block=block: block_mask(zoo.causal, 10, 10, block=block), error, *words)
    for block, error, *words in (
        (96, ValueError, "block is 96; sizes must be multiples of 128, or divide it: choose 128"),
        ((128, 0), ValueError, "block is (128, 0)"), (64.0, TypeError, "block is 64.0; it must be a number"),
    )
] + [
    row("BlockMask.from_blocks", "a block size of 96", lambda x: BlockMask.from_blocks(np.ones((1, 1), bool), block=96), ValueError,
        "choose 128"),
    row("BlockMask.from_blocks", "full blocks of another shape", lambda x: BlockMask.from_blocks(
        np.ones((3, 3), bool), full=np.ones((2, 3), bool)), ValueError, "full has shape (2, 3) and blocks (3, 3)"),
    row("block_mask", "a branch on an index", lambda x: block_mask(branches, 256, 256), TypeError, "called with arrays of indices",
        "np.where(condition, a, b)"),
    row("block_mask", "FlexAttention's keywords alone", lambda x: block_mask(zoo.causal, B=None, H=None, Q_LEN=6, KV_LEN=7),
        TypeError, "is block_mask(mask_mod, Q_LEN, KV_LEN, heads=H, batch=B)"),
    row("BlockMask.from_kv_blocks", "a negative number of blocks", fields(kv_num_blocks=np.array([[[-1, 1]]])), ValueError,
        "numbers from -1 to 1; there are 2 key blocks"),
    row("BlockMask.from_kv_blocks", "float indices alone", fields(kv_indices=np.zeros((1, 1, 2, 2))), ValueError,
        "kv_indices float64"),
    row("BlockMask.from_kv_blocks", "full indices without full numbers", fields(full_kv_indices=np.zeros((1, 1, 2, 2), int)),
        ValueError, "only full_kv_indices is passed"),
    row("zoo.dilated", "a step of 0", lambda x: zoo.dilated(5, 0), ValueError, "step is 0"),
    row("zoo.block_sparse", "every 0th block", lambda x: zoo.block_sparse(2, 0), ValueError, "every is 0"),
    row("zoo.strided", "a negative stride", lambda x: zoo.strided(-1), ValueError, "size is -1"),
    row("zoo.natten", "a window of even size", lambda x: zoo.natten(7, 8, 4), ValueError, "size is 4"),
    row("zoo.natten", "a dilated window larger than the image", lambda x: zoo.natten(7, 8, 3, 3), ValueError,
        "is 9; it must be at most 7"),
    row("attention", "a block mask for another batch", call(block_mask=BlockMask.from_blocks(np.ones((1, 1, 1, 2), bool), 6, 6)),
        ValueError, "1 heads and 2 batch entries; q has 4 and 3"),
    row("attention", "a block mask and two other masks", call(mask=np.ones((6, 1, 1, 1), bool), mask_mod=zoo.causal), ValueError,
        "mask, mask_mod and block_mask are passed", "create block_mask with the condition of mask_mod"),
    row("attention", "a block mask and an unknown option", call(caussal=True), TypeError, "did you mean causal"),
    row("attention", "a block mask for fewer keys, and lengths", call(block_mask=BlockMask.from_blocks(np.ones((1, 1), bool), 6, 5),
        seq_lens_kv=np.full(3, 4, "i4")), ValueError, "is for 6 queries and 5 keys; q has 6 queries and k 6 keys"),
    row("attention", "a block mask for shorter packed sequences", lambda x: attention(*[x.s[..., 0]] * 3, cu_seqlens_q=np.array(
        [0, 6], "i4"), cu_seqlens_kv=np.array([0, 6], "i4"), max_seqlen_q=6, max_seqlen_kv=7, block_mask=of_blocks(x)), ValueError,
        "max_seqlen_q is 6 and max_seqlen_kv 7"),
    row("weight_sums", "an array as a block mask", lambda x: weight_sums(x.s, x.s, block_mask=np.ones(3)), TypeError,
        "block_mask is a numpy.ndarray"),
    row("attention", "a block mask and a score function that masks", call(
        score_mod=lambda s, b, h, i, j: np.where(i > j, s, -np.inf)), ValueError, "score_mod masks keys"),
    row("attention", "a block mask and arrays without a function", call(tensors={"x": np.ones(2)}), ValueError, "tensors has x"),
    row("attention", "a block mask and out of another shape", call(out=np.ones((8, 4, 5, 3), "f4")), ValueError, "out has shape"),
    row("attention", "a block mask and out over an array of a score function", lambda x: call(out=(t := np.zeros_like(x.s)), tensors={
        "t": t[:6, 0, 0, 0]}, score_mod=lambda s, b, h, i, j, t: s + t[j])(x), ValueError, "out overlaps tensors['t']"),
    row("attention_backward", "a block mask and dq over an array of a score function", dq_over_tensors, ValueError,
        "dq overlaps tensors['t']"),
    row("attention", "a block mask and out of another dtype", call(out=np.ones((8, 4, 6, 3), order="F")), TypeError, "out is float64"),
    row("attention_vjp", "the gradient of no bias with a block mask", lambda x: attention_vjp(x.s, x.s, x.s, block_mask=of_blocks(
        x), return_dbias=True), ValueError, "return_dbias is True and bias is None"),
]  # fmt: skip


def derived(**changes):
    """A derivative of the arrays (8, 4, 6, 3) with some arguments changed."""
    return lambda x: attention_jvp(**{"q": x.s, "k": x.s, "v": x.s, "dq": x.s, **changes})


def wrong_stats(make):
    """A derivative with a wrong array for the log-sum-exp."""
    return lambda x: attention_jvp(x.s, x.s, x.s, dv=x.s, stats=make(x.xp))


JVP = [
    row("attention_jvp", mistake, make, error, *words)
    for mistake, make, error, *words in (
        ("k of another head dim", derived(k=np.zeros((4, 4, 6, 3), "f4", "F")), ValueError, "the head dims", "8 and 4"),
        ("a list as a tangent", derived(dv=[1.0]), TypeError, "dv is a list; attention takes numpy and CuPy arrays"),
        ("num_splits", derived(num_splits=2), ValueError, "num_splits is 2"),
        ("batch_invariant=1", derived(batch_invariant=1), TypeError, "batch_invariant is 1; it must be True or False"),
        ("deterministic=1", derived(deterministic=1), TypeError, "deterministic is 1; it must be True or False"),
        ("a number as the wide arrays", derived(dq=None, widened=3), TypeError, "widened is an int"),
        ("the derivative in the memory of q", lambda x: attention_jvp(x.s, x.s, x.s, x.s, dout=x.s), ValueError,
         "dout overlaps q"),
    )
] + [
    row("attention_jvp", f"stats: {mistake}", wrong_stats(make), error, *words, engine=engine)
    for engine in ("numpy", "fake")
    for mistake, make, error, *words in (
        ("another length", lambda xp: xp.zeros((5, 4, 3), np.float32, order="F"), ValueError, "stats has shape (5, 4, 3)"),
        ("C order", lambda xp: xp.zeros((6, 4, 3), np.float32), ValueError, "stats has strides", "allocate it with order='F'"),
        ("integers", lambda xp: xp.zeros((6, 4, 3), np.int32, order="F"), TypeError, "stats is int32"),
        ("a list", lambda xp: [0.0], TypeError, "stats is a list"),
    )
] + [
    row("attention_jvp", "a tangent on the host", lambda x: attention_jvp(x.s, x.s, x.s, x.s.get()), TypeError, "arrays are mixed",
        engine="fake"),
    row("attention_jvp", "float32 on the GPU", lambda x: attention_jvp(*[x.s.astype("f4")] * 4), TypeError, "float32", engine="fake"),
    row("attention_jvp", "head dims that are too large", lambda x: attention_jvp(*[x.normal(136, 1, 4, 1)] * 6), Unsupported,
        "head dims 136 and 136 needs", "Use head dims with D + Dv, 2 D and 2 Dv up to 256 on Hopper", engine="fake"),
    row("composed.widen", "a softcap in the second call alone", lambda x: attention_jvp(x.s, x.s, x.s, softcap=1.0, widened=widen(
        x.s, x.s, x.s, x.s)), ValueError, "widened is for"),
]  # fmt: skip

ROWS = [*MASKS, *JVP]
