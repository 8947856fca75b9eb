"""Mistakes in calls of attention, of its gradients and of merge, in what describes a call, and in score functions."""

# mypy: ignore-errors
# (most mistakes are type errors)

import math

import fake_libraries
import numpy as np
from mistakes import causal, output, read_only, row

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    Unsupported,
    attention,
    attention_backward,
    attention_vjp,
    explain,
    merge,
    problem,
    shared_prefix_attention,
    widen,
    zoo,
)


def passing(**options):
    """A call with options."""
    return lambda x: attention(*x.qkv, **options)


def dense_of(*_, **options):
    """The output of the dense arrays of a row."""
    return lambda x: output(*x.qkv, **options)


def c_order(x, *axes):
    """A dense array with its axes in another order, in C order."""
    return x.xp.ascontiguousarray(x.s.transpose(axes))


def twice(x):
    """An array with each batch item twice."""
    return np.asfortranarray(np.concatenate([x, x], axis=-1))


#: Options of other libraries, and what the message recommends.
OTHER_NAMES = {
    "bottom_right_diagonal": "causal='bottom_right'", "return_max_logit": "return_stats='max_sumexp'", "qkv_layer": "three arrays",
    "query_layer": "by position", "inference_params": "KVCache", "pad_between_seqs": "cu_seqlens_with_gaps",
    "custom_mask": "pass mask=", "bottom_right": "causal='bottom_right'", "fast_zero_fill": "remove it",
    "is_causal": "causal=True", "use_causal_mask": "causal=True", "causal_mask": "causal='bottom_right'",
    "attn_mask": "unchanged with a layout in C order, else attn_mask.T", "attention_mask": "seq_lens_kv=", "key_padding_mask": "seq_lens_kv=",
    "attn_bias": "bias=", "core_attention_bias": "bias=", "position_bias": "bias=", "qk_bias": "bias=",
    "softmax_scale": "scale=", "sm_scale": "scale=", "attn_scale": "scale=", "scaling": "scale=",
    "logits_soft_cap": "softcap=", "attn_logit_softcapping": "softcap=", "logit_cap": "softcap=",
    "dropout": "dropout_p= and seed=", "attention_dropout": "dropout_p= and seed=", "dropout_seed": "seed=",
    "enable_gqa": "fewer heads", "num_kv_heads": "fewer heads", "num_heads": "axis 1",
    "return_lse": "return_stats=True", "return_attn_probs": "return_stats=True", "need_weights": "nnlib",
    "output_attentions": "nnlib", "return_softmax_lse": "return_stats=True",
    "block_table": "page_table=", "block_tables": "page_table=", "cache_seqlens": "seq_lens_kv=",
    "paged_kv_indices": "page_table=", "kv_indices": "page_table=", "paged_kv_indptr": "page_table=",
    "cu_seqlens": "cu_seqlens_q=", "cu_seqlens_k": "cu_seqlens_kv=", "qo_indptr": "cu_seqlens_q=",
    "kv_indptr": "cu_seqlens_kv=", "seqused_k": "seq_lens_kv=", "seqused_q": "seq_lens_q=", "kv_len": "seq_lens_kv=",
    "cu_seqlens_q_padded": "seq_lens_q=", "cu_seqlens_kv_padded": "seq_lens_kv=", "leftpad_k": "mask=",
    "max_seqlen": "max_seqlen_q=", "max_seqlen_k": "max_seqlen_kv=", "max_s": "max_seqlen_q=",
    "window_size": "window=", "sliding_window": "(n - 1, 0)", "window_left": "window=", "local_window_size": "window=",
    "attn_mask_type": "causal=", "mask_type": "causal=", "segment_ids": "cu_seqlens_q=", "q_segment_ids": "cu_seqlens_q=",
    "learnable_sink": "sinks=", "s_aux": "sinks=", "softmax_offset": "sinks=", "softmax_type": "sinks=",
    "qkv_format": "layout=", "tensor_layout": "layout=", "kv_layout": "layout=", "input_layout": "layout=",
    "query": "by position", "key": "by position", "value": "by position", "qkv": "by position",
    "training": "dropout_p=", "is_training": "dropout_p=", "implementation": "remove", "backend": "remove",
    "pos_encoding_mode": "rotary", "rotary_cos": "rotary", "rope_theta": "rotary", "k_cache": "KVCache",
    "past_key_value": "KVCache", "precision": "compute_dtype=", "dtype": "compute_dtype=",
    "score_fn": "score_mod=", "mask_fn": "mask_mod=", "head_mask": "out * head_mask", "bias_type": "score_mod=",
    "dropout_rng": "seed=", "kv_seq_len": "seq_lens_kv=", "seq_lens": "seq_lens_q= and seq_lens_kv=", "lse": "return_stats=True",
    "context_lens": "seq_lens_kv=", "scale_factor": "scale=", "mask_value": "-inf", "paged_kv_cache": "KVCache",
    "soft_cap": "softcap=",
    "q_descale": "fp8", "k_descale": "fp8", "v_descale": "fp8", "k_scale": "fp8", "v_scale": "fp8",
    "block_sparse_tensors": "block_mask=", "aux_tensors": "tensors=", "pack_gqa": "remove", "head_first": "layout=",
}  # fmt: skip

NAMES = [
    row("attention", f"the option {name} of another library", passing(**{name: 1}), TypeError, name, remedy)
    for name, remedy in OTHER_NAMES.items()
]

ARGUMENTS = [
    row("attention", "a misspelled option", passing(casual=True), TypeError, "did you mean causal"),
    row("attention", "k is None, as in self-attention of Keras", lambda x: attention(x.q, None, x.v), TypeError, "k is None"),
    row("attention", "a masked array", lambda x: attention(np.ma.array(x.q), x.k, x.v), TypeError, "MaskedArray",
        "pass q.data", "mask=", "True where a masked array has False"),
    row("attention", "the cache instead of its keys", lambda x: attention(x.q, cache(x), cache(x)), TypeError, "KVCache", "cache.view("),
    row("attention", "keys without a call", lambda x: attention(x.q, cache(x).keys, x.v), TypeError, "k is a method", "call it"),
    row("attention", "a problem instead of q", lambda x: attention(a_problem(), x.k, x.v), TypeError, "q is", "Problem"),
    row("attention", "numbers of the other byte order", lambda x: attention(*(a.astype(">f4") for a in x.qkv)),
        lambda x: output(*x.qkv)),
    row("attention", "slopes of the other byte order in tensors", lambda x: attention(x.q, x.k, x.v, score_mod=zoo.alibi,
        tensors={"slopes": np.float32([0.1, 0.2, 0.3, 0.4]).astype(">f4")}), lambda x: output(*x.qkv,
        bias=-abs(np.arange(7)[:, None] - np.arange(6))[:, :, None, None] * np.float64([0.1, 0.2, 0.3, 0.4])[:, None])),
    row("attention", "one array of the other byte order", lambda x: attention(x.q, x.k.astype(">f4"), x.v), dense_of()),
    row("attention", "a head dim of 0", lambda x: attention(x.q[:0], x.k[:0], x.v), ValueError, "head dim 0"),
    row("attention", "heads reversed by a negative stride",
        lambda x: attention(x.q[:, ::-1], x.k[:, ::-1], x.v[:, ::-1]), ValueError, "negative", "asfortranarray"),
    row("attention", "heads reversed by a negative stride, which layout= confirms",
        lambda x: attention(x.q[:, ::-1], x.k[:, ::-1], x.v[:, ::-1], layout="dhsb"), lambda x: output(*x.qkv)[:, ::-1]),
    row("attention", "a read-only q", lambda x: attention(read_only(x.q), x.k, x.v), dense_of()),
    row("attention", "dimensions of a single sequence", lambda x: attention(*(a[..., 0] for a in x.qkv)),
        lambda x: output(*x.qkv)[..., 0]),
    row("attention", "two axes (D, S)", lambda x: attention(*(a[:, 0, :, 0] for a in x.qkv)), ValueError, "2 dimensions",
        "q[:, None, :, None]"),
    row("attention", "five axes, heads in groups", lambda x: attention(x.q[..., None], x.k, x.v), ValueError, "5 dimensions",
        "reshape"),
    row("attention", "keys of PyTorch and q of numpy", lambda x: with_torch(x, "k"), TypeError, "of numpy and k of PyTorch"),
    row("attention", "an odd head dim on a GPU", lambda x: attention(*(a[:7] for a in x.qkv)), Unsupported, "head_dim", "7",
        engine="fake"),
]  # fmt: skip

LAYOUTS = [
    row("attention", "C order that is meant", lambda x: attention(*(np.ascontiguousarray(a) for a in x.qkv), layout="dhsb"),
        dense_of()),
    row("attention", "the arrays transposed, and layout= also", lambda x: attention(*x.qkv, layout="bshd"), ValueError, "bshd"),
    row("attention", "a layout in capitals", passing(layout="BSHD"), ValueError, "'BSHD'", "'bshd'"),
    row("attention", "'thd' without offsets", lambda x: attention(x.pq.T, x.pk.T, x.pv.T, layout="thd"), ValueError,
        "cu_seqlens_q"),
    row("attention", "packed arrays with 'bshd'", lambda x: attention(x.pq.T, x.pk.T, x.pv.T, **x.packed, layout="bshd"),
        ValueError, "3 axes", "layout='thd'"),
]  # fmt: skip

MASKS = [
    row("attention", "0 and 1 in an integer mask", passing(mask=np.ones((7, 6, 4, 3), int)), TypeError, "int64", ".astype("),
    row("attention", "a Boolean bias", passing(bias=np.ones((7, 6, 4, 3), bool)), TypeError, "bias is bool", "mask="),
    row("attention", "True as the mask", passing(mask=True), TypeError, "mask is a bool", "numpy.asarray"),
    row("attention", "PyTorch's mask (Sq, Skv)", passing(mask=np.ones((6, 7), bool)), ValueError, "mask.T[..., None, None]"),
    row("attention", "a bias for half of the batch, such as that of another batch", lambda x: attention(*map(twice, x.qkv),
        bias=x.normal(7, 6, 4, 2)), ValueError, "bias", "(7, 6, 4, 2)", "6", "bias_repeats=3"),
    row("attention", "bias_repeats of another batch", passing(bias=np.zeros((7, 6, 4, 2), "f4"), bias_repeats=2), ValueError,
        "bias", "(7, 6, 4, 2)", "bias_repeats is 2", "a batch of 4", "a batch of 3"),
    row("attention", "the number of biases as bias_repeats", lambda x: attention(*map(twice, x.qkv), bias=x.normal(7, 6, 4, 2),
        bias_repeats=2), ValueError, "bias_repeats is 2", "a batch of 4", "a batch of 6", "bias_repeats=3"),
    row("attention", "bias_repeats, and the bias is forgotten", passing(bias_repeats=3), ValueError, "bias_repeats is 3", "bias is None"),
    row("attention", "bias_repeats of a bias for all items", passing(bias=np.full((7, 6, 1, 1), 0.25, "f4", order="F"), bias_repeats=3),
        dense_of(bias=0.25)),
    row("attention", "a fraction as bias_repeats", passing(bias=np.zeros((7, 6, 4, 2), "f4"), bias_repeats=1.5), ValueError,
        "bias_repeats is 1.5"),
    row("attention_backward", "the gradient of shared biases, and bias_repeats is forgotten", lambda x: attention_backward(
        *map(twice, (x.dout, *x.qkv, *attention(*x.qkv, return_stats=True))), bias=x.normal(7, 6, 4, 2), return_dbias=True), ValueError,
        "(7, 6, 4, 2)", "bias_repeats=3"),
    row("attention", "a bias in float64 for float32 arrays", passing(bias=np.full((7, 1, 1, 1), 0.25)), dense_of(bias=0.25)),
    row("attention", "a mask as causal=", passing(causal=np.ones((7, 6, 1, 1), bool)), ValueError, "causal", "'bottom_right'"),
    row("attention", "causal=None, as wrappers pass it", passing(causal=None, window=(2, 0)), lambda x: attention(*x.qkv, window=(2, 0))),
    row("attention", "causal=1", passing(causal=1), dense_of(allowed=causal(6, 7))),
    row("attention", "causal=np.True_", passing(causal=np.True_), dense_of(allowed=causal(6, 7))),
    row("attention", "flash-attn's -1 for no bound", passing(window=(-1, 0)), ValueError, "(-1, 0)", "None for no bound"),
    row("attention", "two diagonals", passing(window=(3, 0, "bottom_right"), causal=True), ValueError, "different diagonals"),
]  # fmt: skip

NUMBERS = [
    row("attention", "an array of one element for the scale", passing(scale=np.ones(1, "f4")), ValueError, "scale has shape (1,)", "(4,)",
        "(Hq,)"),
    row("attention", "an array without axes for the scale", passing(scale=np.array(2, "f4")), ValueError,
        "scale has shape ()", "float(scale)"),
    row("attention", "scales in float64", passing(scale=np.ones(4)), TypeError, "scale is float64", "float32"),
    row("attention", "a list of scales", passing(scale=[1.0] * 4), TypeError, "scale is a list", "(Hq,)"),
    row("attention", "a text for the scale", passing(scale="auto"), TypeError, "scale is a str", "number"),
    row("attention", "scale=True", passing(scale=True), TypeError, "scale is a bool"),
    row("attention", "flash-attn's softcap=0 for none", passing(softcap=0.0), ValueError, "softcap is 0.0", "None"),
    row("attention", "softcap=True", passing(softcap=True), TypeError, "softcap is a bool"),
    row("attention", "dropout without a seed", passing(dropout_p=0.1), ValueError, "dropout_p is 0.1", "seed"),
    row("attention", "dropout in percent", passing(dropout_p=10, seed=0), ValueError, "dropout_p is 10", "below 1"),
    row("attention", "an array for the dropout rate", passing(dropout_p=np.array([0.1]), seed=0), TypeError, "number"),
    row("attention", "a seed without dropout, as in evaluation", passing(seed=3), dense_of()),
    row("attention", "a random generator as the seed", passing(dropout_p=0.5, seed=np.random.default_rng(0)), TypeError, "seed"),
    row("attention", "a float seed", passing(dropout_p=0.5, seed=1.0), TypeError, "seed is 1.0", "integer"),
    row("attention", "a dropout mask and a seed", passing(dropout_p=0.5, seed=1, dropout_mask=np.ones((7, 6, 4, 3), bool)),
        ValueError, "one of them"),
    row("attention", "a text for the workspace", passing(max_workspace="1GB"), ValueError, "number of bytes"),
    row("attention", "FP8 without gradients", passing(compute_dtype="float8_e4m3fn"), ValueError, "fp8", "attention_vjp"),
    row("attention", "deterministic=1", passing(deterministic=1), TypeError, "deterministic is 1", "True or False"),
    row("attention", "batch_invariant=1", passing(batch_invariant=1), TypeError, "batch_invariant is 1", "True or False"),
    row("attention", "an invariant call with dropout", passing(batch_invariant=True, dropout_p=0.5, seed=1), Unsupported,
        "batch_invariant is True", "omit dropout_p"),
    row("attention", "an invariant call of one query", lambda x: attention(x.q[:, :, :1], x.k, x.v, batch_invariant=True),
        Unsupported, "batch_invariant is True", "deterministic=True", engine="fake"),
    row("attention", "alibi_slopes=True", passing(alibi_slopes=True), TypeError, "alibi_slopes is a bool", "cupy_sdpa.alibi_slopes"),
    row("attention", "the function instead of slopes", passing(alibi_slopes=cupy_sdpa.alibi_slopes), TypeError, "function",
        "call it"),
]  # fmt: skip

LENGTHS = [
    row("attention", "lengths in a list of floats", passing(seq_lens_kv=[7.0, 4, 1]), TypeError,
        "seq_lens_kv is a list of float64", "integers"),
    row("attention", "lengths of more than 32 bits", passing(seq_lens_kv=[2**32 + 7, 4, 1]), ValueError, "4294967303",
        "32 bits"),
    row("attention", "a padding mask as lengths", passing(seq_lens_kv=np.ones((3, 7), bool)), TypeError, "number of True",
        "mask="),
    row("attention", "offsets of the queries alone", lambda x: attention(x.pq, x.pk, x.pv, cu_seqlens_q=x.starts), ValueError,
        "cu_seqlens_kv is None"),
    row("attention", "offsets without the longest length",
        lambda x: attention(x.pq, x.pk, x.pv, cu_seqlens_q=x.starts, cu_seqlens_kv=x.starts), ValueError, "max_seqlen_q is None"),
    row("attention", "offsets in float", lambda x: attention(x.pq, x.pk, x.pv, **{**x.packed, "cu_seqlens_q": np.zeros(4)}),
        TypeError, "float64", "int32"),
    row("attention", "a longest length that is too small",
        lambda x: attention(x.pq, x.pk, x.pv, **{**x.packed, "max_seqlen_kv": 5}), ValueError, "sequence of 6", "is 5"),
    row("attention", "the longest length as an array",
        lambda x: attention(x.pq, x.pk, x.pv, **{**x.packed, "max_seqlen_q": np.array([6])}), ValueError, "max_seqlen_q"),
    row("attention", "the longest length of dense arrays", passing(max_seqlen_q=6), ValueError, "max_seqlen_q is 6", "seq_lens_q are None"),
    row("attention", "a longest length beyond the queries", passing(max_seqlen_q=7, seq_lens_q=np.int32([6, 2, 0])), ValueError, "max_seqlen_q is 7",
        "Sq is 6"),
    row("attention", "other numbers of sequences",
        lambda x: attention(x.pq, x.pk, x.pv, **{**x.packed, "cu_seqlens_kv": x.integers(0, 5, 11)}), ValueError, "(B + 1,)"),
    row("attention", "pages without lengths", lambda x: attention(x.q, x.pages_k, x.pages_v, page_table=x.table), ValueError,
        "seq_lens_kv is None"),
    row("attention", "a page table in a list, with a layout in C order", lambda x: attention(
        x.q.T, x.pages_k.T, x.pages_v.T, layout="bshd", **{**x.paged, "page_table": x.table.T.tolist()}),
        lambda x: attention(x.q, x.pages_k, x.pages_v, **x.paged).T),
    row("attention", "a page table with rows of several lengths", lambda x: attention(
        x.q, x.pages_k, x.pages_v, **{**x.paged, "page_table": [[3, 0, 5], [1]]}), ValueError, "several lengths", "rectangular"),
    row("attention", "pages with a longest length", lambda x: attention(x.q, x.pages_k, x.pages_v, **x.paged, max_seqlen_kv=8),
        ValueError, "max_seqlen_kv is 8"),
    row("attention", "pages and a bucket", lambda x: attention(x.q, x.pages_k, x.pages_v, **x.paged, bucket=8), ValueError,
        "omit bucket"),
    row("attention", "num_splits without pages", passing(num_splits=2), ValueError, "num_splits is 2", "omit"),
]  # fmt: skip


def over_slopes(x, calls=0):
    """The output in the array whose first elements are the slopes of a function, after other calls with another output."""
    memory = np.zeros(16 * 4 * 6 * 3, np.float32)
    out = memory.reshape((16, 4, 6, 3), order="F")
    for result in (*[out.copy("K")] * calls, out):
        attention(*x.qkv, score_mod=zoo.alibi, tensors={"slopes": memory[:4]}, out=result)


RESULTS = [
    row("attention", "slopes in the memory of out", over_slopes, ValueError, "out overlaps tensors['slopes']", "separate"),
    row("attention", "a read-only out", lambda x: attention(*x.qkv, out=read_only(x.dout)), ValueError, "read-only"),
    row("attention", "an out that is broadcast", lambda x: attention(*x.qkv, out=np.lib.stride_tricks.as_strided(
        np.empty((16, 4, 6, 1), "f4", order="F"), (16, 4, 6, 3), (4, 64, 256, 0))), ValueError, "out", "share memory"),
    row("attention", "out of the other byte order", lambda x: attention(*x.qkv, out=np.empty((16, 4, 6, 3), ">f4", order="F")),
        dense_of()),
    row("attention", "stats=True", lambda x: attention(*x.qkv, stats=True), TypeError, "stats is a bool", "return_stats="),
]  # fmt: skip

FUNCTIONS = [
    row("attention", "the indices before the score", passing(score_mod=lambda b, h, i, j, score: score * 2), TypeError,
        "b, h, i, j, score", "by position"),
    row("attention", "an array as mask_mod", passing(mask_mod=np.ones((7, 6), bool)), TypeError, "mask_mod is a", "mask="),
    row("attention", "a block mask as mask_mod", passing(mask_mod=cupy_sdpa.BlockMask.from_blocks(np.ones((1, 1), bool), 6, 7)),
        TypeError, "mask_mod is a BlockMask", "block_mask="),
    row("attention", "a score function that returns a condition", passing(score_mod=lambda s, b, h, i, j: i >= j), TypeError,
        "condition", "mask_mod"),
    row("attention", "a mask function that returns a number", passing(mask_mod=lambda b, h, i, j: (i >= j) * 1), TypeError,
        "condition", "q_idx >= kv_idx"),
    row("attention", "a mask function without return", passing(mask_mod=lambda b, h, i, j: None), TypeError,
        "mask_mod returned None", "return"),
    row("attention", "a score function without return", passing(score_mod=lambda s, b, h, i, j: None), TypeError,
        "score_mod returned None", "return"),
    row("attention", "`and` in a mask function", passing(mask_mod=lambda b, h, i, j: i >= j and i < 3), TypeError, "&"),
    row("attention", "the math module in a score function", passing(score_mod=lambda s, b, h, i, j: math.exp(s)), TypeError,
        "np.exp"),
    row("attention", "a method of tensors", passing(score_mod=lambda s, b, h, i, j: s.sigmoid()), AttributeError,
        "scipy.special.expit"),
    row("attention", "torch.where in a score function", lambda x: library_in_function(x), TypeError, "np.where"),
    row("attention", "an array of the closure", lambda x: attention(*x.qkv, mask_mod=lambda b, h, i, j: np.arange(6)[i] >= j),
        TypeError, "tensors="),
    row("attention", "tensors that no function takes", passing(mask_mod=zoo.causal, tensors={"a": np.ones(4)}), ValueError,
        "tensors has a", "no function takes"),
    row("attention", "tensors without a function", passing(tensors={"a": np.ones(4)}), ValueError, "neither score_mod nor"),
    row("attention", "tensors in a list", passing(score_mod=zoo.alibi, tensors=[np.ones(4)]), TypeError, "tensors is a list",
        "mapping"),
    row("attention", "a tensor that is a list", passing(score_mod=zoo.alibi, tensors={"slopes": [1, 1, 1, 1]}), TypeError,
        "tensors['slopes'] is a list", "asarray"),
    row("attention", "a tensor of another length", passing(score_mod=zoo.alibi, tensors={"slopes": np.ones(2)}), IndexError,
        "2", "4"),
    row("attention", "a table by a computed index", passing(score_mod=lambda s, b, h, i, j, t: s + t[i - j], tensors={
        "t": np.ones(9)}), IndexError, "tensors['t'] (9,)", "computed value along axis 0", "bias=table[index]", "zoo.table_bias"),
    row("attention", "a document id for each batch item read without b",
        passing(mask_mod=zoo.causal_document, tensors={"document_id": np.zeros((3, 6), "i4")}), IndexError, "document_id", "needs 2"),
    row("attention", "a method of an array in a score function", passing(score_mod=lambda s, b, h, i, j, t: s + t.sum(), tensors={
        "t": np.ones(4)}), AttributeError, "tensors['t']", "no attribute 'sum'", "t[kv_idx]", "before the call"),
    row("attention", "a score function that writes to an array", passing(
        score_mod=lambda s, b, h, i, j, t: t.__setitem__(0, 1), tensors={"t": np.ones(4)}), TypeError, "tensors['t']", "read-only"),
    row("attention", "a power of an array in a score function", passing(score_mod=lambda s, b, h, i, j, t: s + t**2, tensors={
        "t": np.ones(4)}), TypeError, "tensors['t']", "index it, such as t[kv_idx]"),
    row("attention", "a score function that writes to the score", passing(score_mod=lambda s, b, h, i, j: s.__setitem__(0, 1)),
        TypeError, "cannot be indexed"),
    row("attention", "a score divided by 0", passing(score_mod=lambda s, b, h, i, j: s / 0), ZeroDivisionError, "constant 0",
        "np.inf"),
    row("attention", "an integer that is no float", passing(score_mod=lambda s, b, h, i, j: s + 10**400), OverflowError, "401 digits",
        "np.inf"),
    row("attention", "complex tensors", passing(score_mod=zoo.alibi, tensors={"slopes": np.ones(4, complex)}), TypeError,
        "complex128", ".astype("),
    row("attention", "a tensor named like an index", passing(mask_mod=zoo.causal, tensors={"h": np.ones(4)}), ValueError, "'h'",
        "rename"),
    row("attention", "integers of 64 bits in a tensor on a GPU", lambda x: attention(x.s, x.s, x.s, mask_mod=zoo.causal_document,
        tensors={"document_id": x.xp.zeros(6, "i8")}), TypeError, "int64", "int32", engine="fake"),
    row("attention", "a constant instead of the score, and a softcap",
        passing(score_mod=lambda s, b, h, i, j: np.where(i >= j, 1.0, -np.inf), softcap=5.0),
        lambda x: output(x.q * 0, x.k, x.v, allowed=causal(6, 7))),
    row("attention", "a dense array as block_mask", passing(block_mask=np.ones((7, 6), bool)), TypeError, "block_mask is a numpy.ndarray",
        "mask="),
    row("attention", "a function as block_mask", passing(block_mask=zoo.causal), TypeError, "block_mask", "cupy_sdpa.block_mask("),
    row("attention", "a block mask and causal", passing(block_mask=cupy_sdpa.block_mask(zoo.nearby(9), 6, 7), causal=True),
        dense_of(allowed=causal(6, 7))),
    row("attention", "a block mask with q and k swapped", passing(block_mask=cupy_sdpa.block_mask(zoo.causal, 7, 6)), ValueError,
        "7", "6"),
]  # fmt: skip


def a_problem():
    """A problem of shapes."""
    return problem((64, 2, 6, 1), (64, 2, 6, 1), (64, 2, 6, 1), dtype="float16")


def cache(x, **options):
    """An empty cache with three sequences."""
    return cupy_sdpa.KVCache(8, 2, pages=6, batch=3, page_size=4, head_dim_v=16, dtype="float32", numpy=True, **options)


def with_torch(x, name):
    """One of the arrays is a tensor of PyTorch."""
    with fake_libraries.installed() as libraries:
        arrays = {key: getattr(x, key) for key in "qkv"}
        return attention(**{**arrays, name: libraries.torch(arrays[name])})


def library_in_function(x):
    """A score function calls ``where`` of a library on traced values."""

    def where(*arguments):
        return arguments[0].__torch_function__(where, (), arguments)  # as PyTorch does

    return attention(*x.qkv, score_mod=lambda s, b, h, i, j: where(i >= j, s, 0.0))


def with_offsets(x, *starts):
    """Packed sequences with these offsets."""
    starts = x.integers(*starts)
    options = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts, "max_seqlen_q": 11, "max_seqlen_kv": 11}
    return attention(x.pq, x.pk, x.pv, **options)


def options(engine="numpy", **rows):
    """Rows of calls with one option: a list of (value, error, words) for each name."""
    return [
        row("attention", f"{name}={value!r:.60}", lambda x, n=name, v=value: attention(*x.qkv, **{n: v}), error, *words, engine=engine)
        for name, values in rows.items()
        for value, error, *words in values
    ]  # fmt: skip


OPTIONS = options(
    scale=[(value, ValueError, "finite in float32") for value in (math.inf, 1e39, -(10**400))],
    softcap=[(10**400, ValueError, "finite in float32"), (np.ones(1), TypeError, "softcap is a numpy.ndarray")],
    causal=[("bottom", ValueError, "causal is 'bottom'")],
    window=[
        ("all", TypeError, "window is 'all'"), ((1,), TypeError, "window is (1,)"),
        ((1, 0, "top_right"), ValueError, "its third entry must be"), ((1, 1, np.ones(3)), ValueError, "its third entry must be"),
    ],
    dropout_mask=[(np.ones((7, 6, 1, 3), bool), ValueError, "dropout_p is 0")],
    return_stats=[(np.ones(3), ValueError, "return_stats is array")],
    bucket=[(np.ones(3), TypeError, "bucket is array")],
    stats=[(np.zeros((6, 4, 3), order="F"), TypeError, "stats is float64; it must be float32")],
)  # fmt: skip
OPTIONS += [
    row("attention", f"the option {name} of another library", lambda x, n=name: attention(*x.qkv, **{n: 1}), TypeError, name, remedy)
    for name, remedy in {
        "alibi": "cupy_sdpa.alibi_slopes", "dropout_rate": "dropout_p=", "p_dropout": "dropout_p=",
        "generate_stats": "return_stats=True", "key_value_seq_lengths": "seq_lens_kv=", "query_seq_lengths": "seq_lens_q=",
        "seq_len_kv": "seq_lens_kv=", "seq_len_q": "seq_lens_q=",
    }.items()
]  # fmt: skip
OPTIONS += [
    row("attention", "an array of no dimensions", lambda x: attention(x.q[0, 0, 0, 0, ...], x.k, x.v), ValueError, "q has 0 dimensions"),
    row("attention", "no heads of keys", lambda x: attention(x.q, x.k[:, :0], x.v[:, :0]), ValueError, "q has 4 heads and k, v have 0"),
    row("attention", "a Boolean seed", lambda x: attention(*x.qkv, dropout_p=0.5, seed=True), TypeError, "seed is True"),
    row("attention", "an offset of 65 bits", lambda x: attention(*x.qkv, dropout_p=0.5, seed=1, offset=1 << 63), ValueError,
        "offset is 9", "64-bit integer"),
    row("attention", "a dropout mask of one head", lambda x: attention(*x.qkv, dropout_p=0.5, dropout_mask=np.ones((7, 6, 1, 3), bool)),
        ValueError, "dropout_mask has shape (7, 6, 1, 3)", "(7, 6, 4, 3)"),
    row("attention", "a bias and a bucket of packed sequences",
        lambda x: attention(x.pq, x.pk, x.pv, **x.packed, bias=np.zeros((6, 6, 1, 1), "f4"), bucket=8), ValueError, "round max_seqlen_q"),
    row("attention", "a tensor whose name is a number", lambda x: attention(*x.qkv, score_mod=max, tensors={1: x.q}), TypeError,
        "tensors has the key 1"),
    row("problem", "shapes of one axis", lambda x: cupy_sdpa.problem((8,), (8,), (8,), dtype="float16"), ValueError, "(8,)", "it needs 4"),
    row("explain", "a number as the version", lambda x: explain(cupy_sdpa.problem(x.s, x.s, x.s), gpu="h200", cudnn=9.19), TypeError,
        "9.19 is not a string"),
    row("explain", "a number as the GPU", lambda x: explain(cupy_sdpa.problem(x.s, x.s, x.s), gpu=3), TypeError, "gpu is 3",
        "string"),
    *(row("explain", f"a problem and {name}", lambda x, n=name, v=value: explain(
        cupy_sdpa.problem(x.s, x.s, x.s), **{n: v}, gpu="H200", cudnn="9.19"), TypeError, f"a problem is given, and {name}")
      for name, value in (("backward", True), ("k", np.ones(1)))),
    row("explain", "q passed twice", lambda x: explain(x.s, x.s, x.s, q=x.s), TypeError, "multiple values for argument 'q'"),
    row("widen", "a mask by position", lambda x: widen(x.s, x.s, x.s, np.ones((6, 6, 1, 1), bool)), TypeError, "dq is bool", "mask="),
]  # fmt: skip


def backward(x, change=lambda name, array: array, **options):
    """The gradients of arrays (8, 4, 6, 3), with ``change(name, array)`` instead of every array."""
    given = {name: x.normal(8, 4, 6, 3) for name in ("dout", "q", "k", "v")}
    given["out"], given["stats"] = attention(*(given[name] for name in "qkv"), return_stats=True)
    given |= {"dq": x.xp.zeros_like(x.s), "dv": x.xp.zeros_like(x.s)}
    return attention_backward(**{name: change(name, array) for name, array in given.items()}, **options)


def of_backward(mistake, name, made, error, *words, engine="numpy", **options):
    """A row of a call with one changed array."""

    def make(x):
        return backward(x, lambda of, array: made(x, array) if of == name else array, **options)

    return row("attention_backward", mistake, make, error, *words, engine=engine)


GRADIENTS = [
    of_backward("out of another shape", "out", lambda x, a: a[:4], ValueError, "out has shape (4, 4, 6, 3)", "(8, 4, 6, 3)"),
    of_backward("statistics of fewer rows", "stats", lambda x, a: a[:5], ValueError, "stats has shape (5, 4, 3)"),
    of_backward("k of another head dim", "k", lambda x, a: a[:4], ValueError, "head dims", "8 and 4"),
    of_backward("a negative workspace", "", None, ValueError, "max_workspace is -1", "bytes", max_workspace=-1),
    of_backward("a scale of NaN", "", None, ValueError, "scale is nan", scale=math.nan),
    of_backward("deterministic='x'", "", None, TypeError, "deterministic is 'x'; it must be True or False", deterministic="x"),
    of_backward("gradients that add in varying order", "", None, Unsupported, "batch_invariant is True", "deterministic=True",
                engine="fake", batch_invariant=True),
    of_backward("dout in C order", "dout", lambda x, a: x.xp.ascontiguousarray(a), ValueError, "dout", "contiguous", engine="fake"),
    of_backward("statistics in C order", "stats", lambda x, a: x.xp.ascontiguousarray(a), ValueError, "stats has strides", engine="fake"),
    of_backward("out of numpy", "out", lambda x, a: a.get(), TypeError, "out is a numpy array", engine="fake"),
    row("attention_vjp", "stats", lambda x: attention_vjp(x.s, x.s, x.s, stats=x.q), TypeError, "attention_vjp does not take stats"),
]  # fmt: skip


def score(mistake, function, error, *words, tensors=None):
    """A row of a call with a score function."""
    return row("attention", mistake, lambda x: attention(*x.qkv, score_mod=function, tensors=tensors), error, *words)


SCORES = [
    score("a method of numpy's arrays", lambda s, b, h, i, j: s.tanh(), AttributeError, "write np.tanh(x) instead of x.tanh()"),
    score("an attribute of numpy's arrays", lambda s, b, h, i, j: s.shape, AttributeError, "no attribute 'shape'"),
    score("out= of a function of numpy", lambda s, b, h, i, j: np.add(s, 1, out=s), TypeError, "np.add", "the keywords out"),
    score("np.where of a condition alone", lambda s, b, h, i, j: np.where(s > 0), TypeError, "write np.where(condition, a, b)"),
    score("a score function of one parameter", lambda s: s, TypeError, "f(score, b, h, q_idx, kv_idx, **tensors) -> score"),
    score("a tensor of another name", lambda s, b, h, i, j, w: s, TypeError, "tensors has x", "'w'", tensors={"x": np.ones(1)}),
    score("a tensor named like the score", lambda s, b, h, i, j, **t: s, ValueError, "tensors has 's'", tensors={"s": np.ones(1)}),
    score("an error of the function itself", lambda s, b, h, i, j: len(3), TypeError, "object of type 'int' has no len()"),
    score("a score // 0", lambda s, b, h, i, j: s // 0, ZeroDivisionError, "by"),
    score("a score % 0.0", lambda s, b, h, i, j: s % 0.0, ZeroDivisionError, "by"),
]  # fmt: skip


def merged(mistake, make, error, *words, engine="numpy"):
    """A row of a call with an output (8, 2, 3, 1) and its statistics, of zeros."""

    def call(x):
        return make(x.xp.zeros((8, 2, 3, 1), "f4", order="F"), x.xp.zeros((3, 2, 1), "f4", order="F"))

    return row("merge", mistake, call, error, *words, engine=engine)


MERGE = [
    merged("statistics in a list", lambda o, s: merge([o], [[0.0]]), TypeError, "stats[0] is a list"),
    merged("packed statistics of another order", lambda o, s: merge([o[..., 0]], [s[..., 0]]), ValueError, "(3, 2)", "(2, 3)"),
    merged("float64 statistics of float32 outputs", lambda o, s: merge([o], [s.astype("f8")]), TypeError, "float64", "astype('float32')"),
    merged("sinks in float16", lambda o, s: merge([o], [s], sinks=np.zeros(2, "f2")), TypeError, "sinks is float16", "float32"),
    merged("out of another shape", lambda o, s: merge([o], [s], out=o[:4]), ValueError, "out has shape (4, 2, 3, 1)", "(8, 2, 3, 1)"),
    merged("out of another dtype", lambda o, s: merge([o], [s], out=o.astype("f2")), TypeError, "out is float16", "float32", "pass a new array"),
    merged("an out over the sinks", lambda o, s: merge([o + 0], [s], out=o, sinks=o[:2, 0, 0, 0]), ValueError, "out overlaps sinks"),
    merged("an out whose elements share memory", lambda o, s: merge([o, o], [s, s], out=np.lib.stride_tricks.as_strided(
        np.zeros(8, "f4"), o.shape, (4, 0, 0, 0))), ValueError, "elements share memory"),
    merged("float64 on a GPU", lambda o, s: merge([o.astype("f8")], [s]), TypeError, "float64", "float16, bfloat16, float32", engine="fake"),
]  # fmt: skip


def block_call(x, name, made, layout=None):
    """Both passes with a mask of blocks; one of the arrays is ``made(array)``."""
    change = lambda of, array: made(array) if of == name else array  # noqa: E731
    mask = BlockMask.from_blocks(np.array([[1, 0], [1, 1]], bool), 130, 130)
    q, k, v, dout = (x.normal(16, 4, 130, 1) for _ in range(4))
    sinks = change("sinks", x.xp.zeros(4, "f4"))
    options = {"block_mask": mask, "sinks": sinks} | ({"layout": layout} if layout else {})
    out, stats = attention(q, k, v, return_stats=True, **options)
    given = {name: change(name, array) for name, array in {"dout": dout, "out": out, "stats": stats}.items()}
    return attention_backward(
        given["dout"], q, k, v, given["out"], given["stats"], dq=change("dq", x.xp.zeros_like(q)), **options
    )


def gapped(array):
    """The array with another fastest axis."""
    return array.transpose(1, 0, 2, 3).copy(order="F").transpose(1, 0, 2, 3)


BLOCKS = [
    row("attention_backward", f"a block mask and {mistake}", lambda x, n=name, m=made: block_call(x, n, m), error, *words)
    for mistake, name, made, error, *words in (
        ("int32 sinks", "sinks", lambda a: a.astype("i4"), TypeError, "sinks is int32; it must be float32"),
        ("one sink", "sinks", lambda a: a[:1], ValueError, "sinks has shape (1,); it must be (4,)"),
        ("float64 statistics", "stats", lambda a: a.astype("f8"), TypeError, "stats is float64; it must be float32"),
        ("a dout in float64", "dout", lambda a: a.astype("f8"), TypeError, "dout is float64"),
        ("statistics of one head", "stats", lambda a: a[:, :1], ValueError, "stats has shape (130, 1, 1); it must be (130, 4, 1)"),
        ("no dout", "dout", lambda a: None, TypeError, "dout is None"),
        *((f"{name} with another order of axes", name, gapped, ValueError, f"{name} has a stride of") for name in ("dout", "out", "dq")),
    )
]  # fmt: skip
BLOCKS += [
]  # fmt: skip


def prefixed(x, **change):
    """A shared prefix of one page of two sequences."""
    given = {"page_table": x.xp.asarray(np.array([[0, 0], [1, 2]], "i4", order="F")), "seq_lens_kv": x.integers(5, 8)}
    q = x.q[..., :2]
    results = {name: value(q, x.pages_k) for name, value in change.items() if callable(value)}
    return shared_prefix_attention(q, x.pages_k, x.normal(8, 2, 4, 6), 4, **{**given, **change, **results})


PREFIXES = [
    row("shared_prefix_attention", mistake, lambda x, c=change: prefixed(x, **c(x)), error, *words)
    for mistake, change, error, *words in (
        ("one length for two sequences", lambda x: {"seq_lens_kv": x.integers(5)}, ValueError, "seq_lens_kv has shape (1,)", "(2,)"),
        ("lengths in two axes", lambda x: {"seq_lens_kv": x.integers(5, 8).reshape(2, 1)}, ValueError, "seq_lens_kv has shape (2, 1)"),
        ("lengths in a list", lambda x: {"seq_lens_kv": [5.0, 8]}, TypeError, "seq_lens_kv is a list"),
        ("an invariant call", lambda x: {"batch_invariant": True}, ValueError, "batch_invariant is passed", "cupy_sdpa.attention"),
        ("the queries as out", lambda x: {"out": lambda q, k: q}, ValueError, "out overlaps q"),
    )
]  # fmt: skip

OF_ATTENTION = [*OPTIONS, *GRADIENTS, *SCORES, *MERGE, *BLOCKS, *PREFIXES]


ROWS = [*NAMES, *ARGUMENTS, *LAYOUTS, *MASKS, *NUMBERS, *LENGTHS, *RESULTS, *FUNCTIONS]
ROWS += OF_ATTENTION
