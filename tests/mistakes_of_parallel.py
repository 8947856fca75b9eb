"""Mistakes with groups that depend on arrays of a GPU, on packed sequences and on the number of members."""

# mypy: ignore-errors
# (most mistakes are type errors)

import numpy as np
from mistakes import row

from cupy_sdpa import Unsupported
from cupy_sdpa.parallel import Loopback, context_parallel


def first(size=2, **options):
    """The first member of a group."""
    return context_parallel(Loopback(size).members[0], **options)


def ones(heads, keys):
    """q, k and v of a member."""
    return [np.ones((4, n, 8, 1), order="F") for n in (heads, keys, keys)]


def packed(x, starts, **options):
    """The report of a call with packed sequences."""
    own = x.pq[:, :, :4].copy(order="F")
    return first().explain(own, own, own, cu_seqlens_q=starts, cu_seqlens_kv=starts, **options)


EXPLAIN, SHARD = "parallel.ContextParallel.explain", "parallel.ContextParallel.shard"
ROWS = [
    row(EXPLAIN, "dropout on a GPU", lambda x: first().explain(x.s, x.s, x.s, dropout_p=0.25, seed=1), Unsupported,
        "no input for the place of the call", engine="fake"),
    row(EXPLAIN, "offsets on the GPU", lambda x: packed(x, x.integers(0, 8)), TypeError, "pass a numpy array", engine="fake"),
    row(EXPLAIN, "a sequence longer than the maximum", lambda x: packed(x, np.array([0, 8]), max_seqlen_q=7), ValueError,
        "cu_seqlens_q has a sequence of 8; max_seqlen_q is 7"),
    row(EXPLAIN, "heads that the members cannot share", lambda x: first(3).explain(x.s, x.s, x.s, method="all_to_all"), Unsupported,
        "4 query heads cannot be shared out equally among 3 members", "use method='ring'"),
    row(EXPLAIN, "heads of parts of groups", lambda x: first(3).explain(*ones(6, 2), method="all_to_all"), Unsupported,
        "do not belong to whole groups"),
    row(EXPLAIN, "lengths and a diagonal of the end", lambda x: first().explain(
        *ones(2, 2), seq_lens_kv=np.array([3], np.int32), causal="bottom_right", method="ring"), Unsupported,
        "bottom-right diagonal", "use method='all_to_all'"),
    row(EXPLAIN, "keys of other heads", lambda x: first().explain(x.s, x.s[:, :3], x.s), ValueError, "numbers of heads"),
    row(EXPLAIN, "fewer values than keys", lambda x: first().explain(x.s, x.s, x.s[:, :, :5]), ValueError, "12 positions"),
    row(EXPLAIN, "a length of other queries", lambda x: first().explain(x.s, x.s, x.s, seqlen_q=16), ValueError, "holds 8"),
    row(EXPLAIN, "a corner that does not exist", lambda x: first().explain(x.s, x.s, x.s, causal="left"), ValueError, "causal"),
    *[row(EXPLAIN, f"{length!r} as a length", lambda x, length=length: first().explain(x.s, x.s, x.s, seqlen_q=length), ValueError,
        f"seqlen_q is {length!r}; it must be an integer") for length in (3.5, -8, True, "8")],
    *[row(SHARD, f"the offsets {starts}", lambda x, starts=starts: first().shard(x.pq, cu_seqlens=np.array(starts)), kind, words)
      for starts, kind, words in (
          ([0, 4, 9], ValueError, "11 positions along axis 2; cu_seqlens has 9"),
          ([0, 4, 13], ValueError, "11 positions along axis 2; cu_seqlens has 13"),
          ([0, 6, 4, 11], ValueError, "begin with 0 and must not decrease"),
          ([0.0, 11.0], TypeError, "cu_seqlens is float64"),
          ([], TypeError, "(B + 1,)"))],
    row("parallel.ContextParallel.position_ids", "offsets that decrease", lambda x: first().position_ids(
        cu_seqlens=np.array([0, 6, 4])), ValueError, "begin with 0 and must not decrease"),
]  # fmt: skip
