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
    "mask.T": (lambda mask: mask.T, AttributeError),
    "mask.astype": (lambda mask: mask.astype(bool), AttributeError),
}
#: Those that only masks of NNlib's functions have.
OF_BLOCKS = {
    "mask & mask": (lambda mask: mask & mask, TypeError),
    "~mask": (lambda mask: ~mask, TypeError),
    "numpy.logical_or(mask, mask)": (lambda mask: np.logical_or(mask, mask), TypeError),
    "array & mask": (lambda mask: np.ones((6, 6, 1, 1), bool) & mask, TypeError),
}

ROWS = [
    row("attention", "a page table in the other order", one_row, ValueError, "(2, 1)", "2 sequences", "page_table.T"),
    row("attention", "the option math_mode", lambda x: attention(*x.qkv, math_mode=0), TypeError, "math_mode", "remove it"),
    row("attention", "the option fdrop", lambda x: attention(*x.qkv, fdrop=lambda a: a), TypeError, "fdrop", "dropout_p=",
        "nnlib.dot_product_attention"),
    row("attention", "the option nheads", lambda x: attention(*x.qkv, nheads=4), TypeError, "nheads", "axis 1",
        "nnlib.dot_product_attention"),
    *[row("block_mask", f"the operator {name}", lambda x, call=call: call(blocks()), error, "a BlockMask is not an array", "to_dense()")
      for name, (call, error) in (OPERATORS | OF_BLOCKS).items()],
    *[row("nnlib.make_causal_mask", f"the operator {name}", lambda x, call=call: call(causal()), error, "is not an array", ".array")
      for name, (call, error) in OPERATORS.items() if name != "mask | array"],
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
