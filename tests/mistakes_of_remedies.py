"""Mistakes whose message must name the cause: options of other libraries, operators of masks, other sequences, and rotations."""

# mypy: ignore-errors
# (most mistakes are type errors)

import numpy as np
from mistakes import row

import cupy_sdpa
from cupy_sdpa import KVCache, Rope, apply_rope, attention, nnlib, zoo


def cached(x):
    """A cache of two sequences, and their queries."""
    cache = KVCache(8, 4, pages=4, batch=2, page_size=8, dtype="float32", numpy=True)
    new = np.ones((8, 4, 3, 2), np.float32, order="F")
    cache.append(new, new)
    return cache, x.s[..., :2]


def one_of_two(x):
    """The queries of one sequence, and the keys of two."""
    cache, q = cached(x)
    return attention(q[..., :1], **cache.view())


def one_row(x):
    """A page table of one page for each of two sequences in the other order."""
    cache, q = cached(x)
    return attention(q, **cache.view() | {"page_table": np.array([[0], [1]], np.int32)})


def cache_of(tokens):
    """The keys in a cache of numpy arrays, whose dtype is not passed."""
    cache = KVCache(8, 4, pages=3, batch=3, page_size=8, numpy=True)
    cache.append(tokens, tokens)
    return cache.keys()[:, :, :6, cache.table[0]]


def problem_with(**lengths):
    """Whether a problem with the lengths is the one of shapes of the lengths."""
    shapes = [(8, 4, 6, 3)] * 3
    wanted = cupy_sdpa.problem(*shapes, dtype="float16", **dict.fromkeys(lengths, (3,)))
    return np.bool_(wanted == cupy_sdpa.problem(*shapes, dtype="float16", **lengths))


def blocks():
    """A block mask."""
    return cupy_sdpa.block_mask(zoo.causal, 6, 6)


def causal():
    """A mask of NNlib's functions."""
    return nnlib.make_causal_mask(np.zeros((1, 6)))


#: Operators and attributes of arrays that masks do not have.
OPERATORS = {
    "mask | mask": (lambda mask: mask | mask, TypeError),
    "mask | array": (lambda mask: mask | np.ones((6, 6), bool), TypeError),
    "mask ^ mask": (lambda mask: mask ^ mask, TypeError),
    "mask[0]": (lambda mask: mask[0], TypeError),
    "list(mask)": (list, TypeError),
    "numpy.logical_or(mask, array)": (lambda mask: np.logical_or(mask, np.ones((6, 6), bool)), TypeError),
    "numpy.logical_or(array, mask)": (lambda mask: np.logical_or(np.ones((6, 6), bool), mask), TypeError),
    "mask.T": (lambda mask: mask.T, AttributeError),
    "mask.astype": (lambda mask: mask.astype(bool), AttributeError),
}
#: Those that only masks of NNlib's functions have.
OF_BLOCKS = {
    "mask & mask": (lambda mask: mask & mask, TypeError),
    "~mask": (lambda mask: ~mask, TypeError),
    "array & mask": (lambda mask: np.ones((6, 6, 1, 1), bool) & mask, TypeError),
}

#: Parameters with other names: the call, the name, and the fix.
RENAMED = [
    *[("KVCache.append", lambda x, name=name: cached(x)[0].append(x.s, x.s, **{name: [1, 1]}), name, "seq_lens_q=")
      for name in ("counts", "seq_lens", "lengths")],
    ("KVCache.begin_step", lambda x: cached(x)[0].begin_step(counts=[1, 1]), "counts", "seq_lens_q="),
    *[("KVCache.view", lambda x, name=name: cached(x)[0].view(**{name: [1, 1]}), name, "seq_lens_q=") for name in ("counts", "seq_lens")],
    *[("apply_rope", lambda x, name=name: apply_rope(x.q, Rope(8), **{name: x.lengths}), name, now)
      for name, now in (("seq_lens", "seq_lens_q="), ("counts", "seq_lens_q="), ("cu_seqlens", "cu_seqlens_q="), ("end", "seq_lens_kv="))],
    ("attention", lambda x: attention(*x.qkv, counts=[1, 2, 3]), "counts", "seq_lens_q="),
    ("attention", lambda x: attention(*x.qkv, alpha=True), "alpha", "nnlib.dot_product_attention"),
    *[(name, lambda x, name=name, count=count: getattr(cupy_sdpa, name)(*[(8, 4, 6, 3)] * count, dtype="float16", seq_lens=True), "seq_lens", "seq_lens_kv=")
      for name, count in (("problem", 3), ("jvp_problems", 3), ("weight_sums_problems", 2))],
]  # fmt: skip


ROWS = [
    *[row(name, f"the parameter {old}", call, TypeError, old, new) for name, call, old, new in RENAMED],
    row("KVCache", "numpy tokens in a cache without a dtype", lambda x: cache_of(x.s), lambda x: x.s),
    row("problem", "lengths without their shape", lambda x: problem_with(seq_lens_kv=True), lambda x: np.True_),
    row("problem", "lengths of queries without their shape", lambda x: problem_with(seq_lens_q=True), lambda x: np.True_),
    row("attention", "the queries of one of two sequences", one_of_two, ValueError, "with 1 sequences", "seq_lens_kv have 2"),
    row("attention", "a page table in the other order", one_row, ValueError, "(2, 1)", "2 sequences", "page_table.T"),
    row("attention", "the option math_mode", lambda x: attention(*x.qkv, math_mode=0), TypeError, "math_mode", "remove it"),
    row("attention", "the option fdrop", lambda x: attention(*x.qkv, fdrop=lambda a: a), TypeError, "fdrop", "dropout_p=",
        "nnlib.dot_product_attention"),
    row("attention", "the option nheads", lambda x: attention(*x.qkv, nheads=4), TypeError, "nheads", "axis 1",
        "nnlib.dot_product_attention"),
    *[row("block_mask", f"the operator {name}", lambda x, call=call: call(blocks()), error, "a BlockMask is not an array", "to_dense()")
      for name, (call, error) in (OPERATORS | OF_BLOCKS).items()],
    *[row("nnlib.make_causal_mask", f"the operator {name}", lambda x, call=call: call(causal()), error, "is not an array", ".array")
      for name, (call, error) in OPERATORS.items()],
    row("attention", "a block mask as mask=", lambda x: attention(x.s, x.s, x.s, mask=blocks()), TypeError, "mask is a BlockMask",
        "block_mask=", "to_dense()"),
    row("attention", "a mask of NNlib's functions", lambda x: attention(x.s, x.s, x.s, mask=causal()), TypeError, "mask is a", ".array"),
    row("apply_rope", "a head dim of 1", lambda x: apply_rope(x.s[:1], Rope(2)), ValueError, "rope.dim is 2", "the head dim is 1", "2 channels"),
    row("Rope", "frequencies of text", lambda x: Rope(4, frequencies=["1", "2"]), TypeError, "['1', '2']", "2 numbers"),
    row("attention", "an out of other queries, without a batch axis", lambda x: attention(*[x.s[..., 0]] * 3, out=np.zeros((8, 4, 5), "f4")),
        ValueError, "out has shape (8, 4, 5); it must be (8, 4, 6), (Dv, Hq, Sq)"),
    row("attention", "a mask of other queries, without a batch axis", lambda x: attention(*[x.s[..., 0]] * 3, mask=np.ones((6, 5, 4), bool)),
        ValueError, "mask has shape (6, 5, 4); it must have the 3 axes (6, 6, 4), (Skv, Sq, Hq)"),
    row("attention", "an out of other queries, with a layout and without a batch axis", lambda x: attention(
        *[np.ones((6, 4, 8))] * 3, layout="bshd", out=np.zeros((5, 4, 8))), ValueError,
        "out has shape (5, 4, 8); it must be (6, 4, 8), (Sq, Hq, Dv)", "[layout='bshd']"),
]  # fmt: skip
