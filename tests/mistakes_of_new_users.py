"""Mistakes that a new user makes who knows another library: the axes, the offsets, the pages, and what an array must be."""

# mypy: ignore-errors
# (most mistakes are type errors)

import numpy as np
from mistakes import causal, output, row

from cupy_sdpa import attention, attention_backward, attention_vjp, page_table_from_lists


def longer(x, *axes):
    """q with 6 and keys with 9 positions, with their axes in another order, in C order."""
    arrays = (x.s, *[x.normal(8, 4, 9, 3)] * 2)
    return [np.ascontiguousarray(a.transpose(axes)) for a in arrays]


def pages(table=None, keys=(5, 8, 1), **options):
    """A call with pages of 4 keys."""
    return lambda x: attention(
        x.q,
        x.pages_k,
        x.pages_v,
        page_table=x.table if table is None else np.int32(table),
        seq_lens_kv=np.int32(keys),
        **options,
    )


def gathered(x, allowed):
    """The output of the dense keys and values of the pages."""
    k, v = (a[:, :, :, x.table].reshape(*a.shape[:2], 8, 3, order="F") for a in (x.pages_k, x.pages_v))
    return output(x.q, k, v, allowed=allowed & (np.arange(8)[:, None] < x.lengths)[:, None, None])


def changed_in_place(x):
    """A pullback after q has changed."""
    q = x.s.copy(order="F")
    out, pullback = attention_vjp(q, x.s, x.s)
    q *= 3
    return pullback(out)


def swapped(*order):
    """A backward pass whose arrays are in another order."""

    def make(x):
        out, stats = attention(*x.qkv, return_stats=True)
        given = {"dout": x.dout, "q": x.q, "k": x.k, "v": x.v, "out": out, "stats": stats}
        return attention_backward(*(given[name] for name in order))

    return make


AXES = [
    row("attention", "(B, S, H, D) without layout=, and more keys than queries", lambda x: attention(*longer(x, 3, 2, 1, 0)), ValueError,
        "axes are (batch 3, seq 6, heads 4, head_dim 8), pass layout='bshd'"),
    row("attention", "(B, H, S, D) without layout=, and more keys than queries", lambda x: attention(*longer(x, 3, 1, 2, 0)), ValueError,
        "axes are (batch 3, heads 4, seq 6, head_dim 8), pass layout='bhsd'", "if they are (head_dim, heads, seq, batch), copy it"),
    row("attention", "own axes and layout='bshd', and more keys than queries",
        lambda x: attention(x.s, *[x.normal(8, 4, 9, 3)] * 2, layout="bshd"), ValueError, "omit layout for arrays (head_dim, heads, seq, batch)"),
    row("attention", "a result in C order", lambda x: attention(x.s, x.s, x.s, out=np.empty(x.s.shape, "f4")), ValueError,
        "out has a stride", "allocate it with order='F': results are not written through a copy"),
    row("attention", "statistics in C order", lambda x: attention(x.s, x.s, x.s, stats=np.empty((6, 4, 3), "f4")), ValueError,
        "stats has strides", "allocate it with order='F'"),
    row("attention_backward", "a gradient in C order", lambda x: attention_backward(
        x.s, x.s, x.s, x.s, *attention(x.s, x.s, x.s, return_stats=True), dq=np.empty(x.s.shape, "f4")), ValueError,
        "dq has a stride", "allocate it with order='F': results are not written through a copy"),
    row("attention", "a block mask, and a result in C order", lambda x: attention(x.s, x.s, x.s, out=np.empty(x.s.shape, "f4"),
        mask_mod=lambda b, h, i, j: (i * j) % 3 != 1), ValueError, "out has a stride", "allocate it with order='F'"),
    row("attention", "keys without a batch axis", lambda x: attention(x.q, x.k[..., 0], x.v[..., 0]), ValueError,
        "k has 3 dimensions (8, 2, 7)", "as q (8, 4, 6, 3) has"),
    row("attention", "a q without a batch axis", lambda x: attention(x.q[..., 0], x.k, x.v), ValueError, "q has 3 axes and k has 4",
        "pass q with a batch axis, or k without it"),
    *[row("attention", f"{axes} without layout= and without a batch axis", lambda x, order=order: attention(
        *[np.ascontiguousarray(x.s[..., 0].transpose(order))] * 3), ValueError, f"axes are ({axes}), pass layout={layout!r}")
      for axes, order, layout in (("seq 6, heads 4, head_dim 8", (2, 1, 0), "bshd"), ("heads 4, seq 6, head_dim 8", (1, 2, 0), "bhsd"))],
    row("attention", "x.T of (B, H, S, D), and more keys than queries", lambda x: attention(*[a.T for a in longer(x, 3, 1, 2, 0)]),
        ValueError, "6 must be a multiple of 9", "Heads and seq may be exchanged", "layout='bhsd'", "x.transpose(3, 1, 2, 0)"),
    row("attention", "sinks (1, Hq, 1, 1)", lambda x: attention(*[x.s.T] * 3, layout="bshd", sinks=np.zeros((1, 4, 1, 1), "f4")), ValueError,
        "sinks has shape (1, 4, 1, 1); it must be (4,)"),
    row("attention", "a mask of integers", lambda x: attention(x.s, x.s, x.s, mask=np.ones((6, 6, 1, 1), "i4")), TypeError,
        "mask is int32", "True where the query attends"),
    row("attention", "np.tril of (Sq, Skv) as the mask", lambda x: attention(x.s, x.s, x.s, mask=np.tril(np.ones((6, 6), bool))),
        ValueError, "mask has shape (6, 6)", "(B, Hq, Sq, Skv)", "mask.T"),
]  # fmt: skip

OFFSETS = [
    row("attention", "lengths as offsets of both sides", lambda x: attention(x.pq, x.pk, x.pv, cu_seqlens_q=[5, 6], cu_seqlens_kv=[5, 6],
        max_seqlen_q=6, max_seqlen_kv=6), ValueError, "cu_seqlens_q is [5, 6]", "these are lengths", "[0, 5, 11]"),
    row("attention", "lengths of the keys as offsets", lambda x: attention(x.pq, x.pk, x.pv, cu_seqlens_q=[0, 11], cu_seqlens_kv=[5, 6],
        max_seqlen_q=11, max_seqlen_kv=6), ValueError, "cu_seqlens_kv is [5, 6]", "these are lengths", "[0, 5, 11]"),
    row("attention", "the length of the only sequence as offsets", lambda x: attention(x.pq, x.pk, x.pv, cu_seqlens_q=[11],
        cu_seqlens_kv=[11], max_seqlen_q=11, max_seqlen_kv=11), ValueError, "these are lengths", "[0, 11]"),
    row("attention", "positions before the first sequence and after the last one, whose offsets add up to the total", lambda x: attention(
        x.pq, x.pk, x.pv, cu_seqlens_q=[3, 8], cu_seqlens_kv=[3, 8], max_seqlen_q=5, max_seqlen_kv=5)[:, :, 3:8],
        lambda x: output(*(a[:, :, 3:8, None] for a in (x.pq, x.pk, x.pv)))[..., 0]),
    row("attention", "lengths and offsets of sequences with gaps", lambda x: attention(x.pq, x.pk, x.pv, **x.packed,
        seq_lens_q=x.lengths), ValueError, "both passed", "cu_seqlens_with_gaps"),
]  # fmt: skip

PAGES = [
    row("attention", "causal=True with pages", pages(causal=True), ValueError, "causal is True", "Sq is 6", "up to 8 keys",
        "'bottom_right'", "'top_left'"),
    *[row("attention", f"causal={value!r} with pages", pages(causal=value), ValueError, f"causal is {value}", "'bottom_right'")
      for value in (1, np.True_)],
    row("attention", "causal='top_left' with pages", pages(causal="top_left"), lambda x: gathered(x, causal(6, 8))),
    row("attention", "a page twice, because the lengths are those of the table", pages([[3, 1, 5], [3, 4, 0]], (8, 8, 8)), ValueError,
        "page_table lists a page twice in sequence 0", "[3, 3]", "8 keys in pages of 4", "seq_lens_kv"),
    row("attention", "a page twice, in a window that hides it", pages([[3, 0, 5], [3, 0, 5]], (8, 8, 8), window=(0, 0, "bottom_right")),
        lambda x: output(x.q, *(a[:, :, [n % 4 for n in range(2, 8)]][..., [3, 0, 5]] for a in (x.pages_k, x.pages_v)),
                         allowed=np.eye(6, dtype=bool)[:, :, None, None])),
    row("attention", "one query of each sequence as packed queries", lambda x: attention(
        x.q[:, :, 0].T, x.pages_k.T, x.pages_v.T, layout="thd", page_table=x.table.T, seq_lens_kv=x.lengths), ValueError,
        "q has 3 dimensions (3, 4, 8)", "q[:, None] and layout='bshd'"),
    row("attention", "pages (pages, page size, Hkv, D) without layout=", lambda x: attention(
        x.q, *(np.ascontiguousarray(a.transpose(3, 2, 1, 0)) for a in (x.pages_k, x.pages_v)), **x.paged), ValueError, "k has shape (6, 4, 2, 8)",
        "pass layout='bshd'"),
    row("attention", "a length in place of lengths", lambda x: attention(*x.qkv, seq_lens_kv=5), TypeError, "seq_lens_kv is an int",
        "numpy.full(B, 5, 'int32')"),
    row("attention", "entries of -1 in the length", pages([[3, 0, 5], [-1, 4, -1]], (8, 8, 1)), ValueError, "entries from -1 to 3",
        "sequence 0, which has 8 keys, so 2 pages of 4"),
    row("page_table_from_lists", "-1 after the pages of a list", lambda x: page_table_from_lists(
        [0, 2, 4], [1, 3, 2, -1], [3, 4], page_size=4), ValueError, "indices contains -1", "indptr"),
    row("attention", "lists of pages of another page size", lambda x: attention(x.q, x.pages_k, x.pages_v, **dict(zip(
        ("page_table", "seq_lens_kv"), page_table_from_lists([0, 2, 3, 4], [1, 3, 2, 0], [3, 4, 5], page_size=8), strict=True))),
        ValueError, "seq_lens_kv has lengths from 4 to 11", "0 to 8"),
    row("attention", "shorter lists of pages of another page size", lambda x: attention(x.q, x.pages_k, x.pages_v, **dict(zip(
        ("page_table", "seq_lens_kv"), page_table_from_lists([0, 2, 3, 4], [1, 3, 2, 0], [1, 5, 6], page_size=6), strict=True))),
        ValueError, "entries from -1 to 2 in sequence 1, which has 5 keys"),
]  # fmt: skip

ARRAYS = [
    row("Pullback", "q changed in place", changed_in_place, ValueError, "of another call", "changed in place", "q.copy(order='F')"),
    row("attention_backward", "the order q, k, v, out, dout, stats", swapped("q", "k", "v", "out", "dout", "stats"), ValueError,
        "in another order; pass (dout, q, k, v, out, stats)", "dout (8, 4, 6, 3)"),
    row("attention_backward", "the order q, k, v, out, dout, stats, with a layout", lambda x: attention_backward(
        *(a.T for a in (*x.qkv, x.dout, x.dout, attention(*x.qkv, return_stats=True)[1])), layout="bshd"), ValueError, "in another order",
        "dout (3, 6, 4, 8)"),
    row("attention_backward", "C order without layout=", lambda x: attention_backward(*[np.ascontiguousarray(x.s.T)] * 5,
        np.zeros((3, 4, 6), "f4")), ValueError, "q has shape (3, 6, 4, 8) in C order"),
    row("attention_backward", "a dout of other positions", lambda x: attention_backward(
        x.dout[:, :, :5], *x.qkv, *attention(*x.qkv, return_stats=True)), ValueError, "dout has shape (16, 4, 5, 3)"),
    *[row("attention", f"the option {name}", lambda x, name=name: attention(*x.qkv, **{name: 16}), TypeError, f"no option {name}", remedy)
      for name, remedy in {"logits_dtype": "softmax are float32", "page_size": "axis 2 of k and v", "block_size": "cupy_sdpa.block_mask"}.items()],
]  # fmt: skip


ROWS = AXES + OFFSETS + PAGES + ARRAYS
