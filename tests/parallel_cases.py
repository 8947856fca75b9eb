"""A problem for groups whose members are called by hand, what every member must get, and what a member does."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from cupy_sdpa import get_plan_cache, reference
from cupy_sdpa.parallel import context_parallel

METHODS = ("ring", "all_gather", "all_to_all")
#: The bytes of a message with the text of a call's shapes and options, which members compare once.
TEXT_BYTES = 4352


@dataclass
class Problem:
    """Whole sequences and options of one GPU, as numpy arrays; attention is causal.

    Args:
        heads: the numbers of query and key/value heads.
        length: the length of the sequences, or the lengths of packed sequences.
        dtype: the dtype of the arrays.
        d: the head dim.
        options: more options.
    """

    heads: tuple[int, int] = (4, 4)
    length: Any = 20
    dtype: Any = np.float64
    d: int = 4
    options: Any = None

    def __post_init__(self):
        rng, packed = np.random.default_rng(0), isinstance(self.length, tuple)
        rest = (sum(self.length),) if packed else (self.length, 1)
        shapes = ((self.d, heads, *rest) for heads in (self.heads[0], self.heads[1], self.heads[1], self.heads[0]))
        self.q, self.k, self.v, self.dout = (np.asfortranarray(rng.standard_normal(x).astype(self.dtype)) for x in shapes)
        self.starts = np.cumsum([0, *self.length], dtype=np.int32) if packed else None
        offsets = {"cu_seqlens_q": self.starts, "cu_seqlens_kv": self.starts} if packed else {}
        self.options = {"causal": True, **(self.options or {}), **offsets}

    def expected(self):
        """The output, the log-sum-exp and the gradients of one GPU in float64."""
        q, k, v, dout = (x.astype(np.float64) for x in (self.q, self.k, self.v, self.dout))
        return *reference.attention(q, k, v, **self.options), *reference.attention_backward(dout, q, k, v, **self.options)

    def member(self, method, put=np.asarray, *, calls=1, check=True):
        """A function of a member that makes both calls and returns the whole results as numpy arrays.

        Args:
            method: the method.
            put: makes an array of the engine from one of numpy.
            calls: how often both calls are made; the queries have the other sign in every other one.
            check: whether members compare their shapes and options.
        """
        host = put is np.asarray

        def member(own):
            try:
                return results(context_parallel(own, method=method, check=check))
            finally:
                if not host:
                    get_plan_cache().clear()  # of this thread

        def results(cp):
            options = {
                name: put(x) if isinstance(x, np.ndarray) and x is not self.starts else x for name, x in self.options.items()
            }
            offsets = {"cu_seqlens": self.starts}
            q, k, v, dout = (cp.shard(put(x), **offsets) for x in (self.q, self.k, self.v, self.dout))
            whole = {"seqlen": self.length} if self.starts is None else offsets
            lengths = {"seqlen_q": self.length, "seqlen_kv": self.length} if self.starts is None else {}
            for number in range(calls - 1, -1, -1):
                q *= 1 - 2 * (number % 2)
                out, stats = cp.attention(q, k, v, return_stats=True, **lengths, **options)
                found = cp.attention_backward(dout, q, k, v, out, stats, deterministic=True, **lengths, **options)
                q *= 1 - 2 * (number % 2)
            stats = cp.unshard(stats, axis=-3 if self.starts is None else -1, **whole)
            results = (cp.unshard(out, **whole), stats, *(cp.unshard(x, **whole) for x in found))
            results = [x if host else x.get() for x in results]
            cp.check()
            return results

        return member


def assert_close(found, expected, tolerance=1e-12):
    """Every member has the expected results, relative to the largest element."""
    for results in found:
        for name, got, wanted in zip(("out", "stats", "dq", "dk", "dv"), results, expected, strict=True):
            error = np.abs(got.astype(np.float64) - wanted).max(initial=0)
            assert error <= tolerance * max(1.0, np.abs(wanted).max(initial=0)), f"{name}: {error}"
