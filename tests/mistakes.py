"""What the tables of mistakes are made of: a row, arrays for it, and the reference to compare with."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from cupy_sdpa import reference, store


class Row(NamedTuple):
    """A mistake and what the user gets.

    Attributes:
        callable: the public function or method.
        mistake: what the user did, a short sentence.
        make: makes the mistake with the arrays of an engine.
        outcome: the type of the exception; or a function of the arrays that returns the right result in float64.
        words: parts of the message: the values that do not match, and the fix. Only their :func:`facts` are compared.
        engine: "numpy" or "fake", the fake CuPy.
    """

    callable: str
    mistake: str
    make: Callable[["Arrays"], Any]
    outcome: Any
    words: tuple[str, ...]
    engine: str = "numpy"

    def __str__(self):
        return f"{self.callable}: {self.mistake}"


def row(name, mistake, make, outcome, *words, engine="numpy"):
    """A row; see :class:`Row`."""
    return Row(name, mistake, make, outcome, words, engine)


#: What a message names: a text in quotes, a shape, a name or code, a number, and the subject and object of "is", "has" or
#: "overlaps".
_FACTS = re.compile(r"""
    '[^']*' | \([^()]*\d[^()]*\) | [\w.=\[\]()+*'-]*[\d_=\[(][\w.=\[\]()+*'-]* | \w+\.\w[\w.]*
    | \w+ (?=[ ](?:is|has|overlaps|requires)[ ]) | (?<=[ ]overlaps[ ])\w+ | (?<=[ ]is[ ])[A-Zb]\w+ | (?<=[ ]is[ ]an[ ])\w+
    | (?<=[ ]is[ ]a[ ])[\w.]+ | (?<=[ ]of[ ])[A-Z]\w+
""", re.VERBOSE)  # fmt: skip


def facts(words):
    """The values, names and code in parts of a message, whose other words may change; single words are compared whole.

    >>> facts(["out has shape (4, 2); it must be (8, 2)", "order='F'", "no more than that"])
    ['out', '(4, 2)', '(8, 2)', "order='F'"]
    """
    found = [fact for text in words for fact in ([text] if " " not in text else _FACTS.findall(text))]
    return found or list(words)


def read_only(array):
    """A copy that cannot be written to."""
    copy = array.copy(order="F")
    copy.flags.writeable = False
    return copy


def read_from(text):
    """The problems of a file with a text."""

    def make(x):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "problems.jsonl")
            path.write_text(text, encoding="utf-8")
            return store.read_problems(path)

    return make


class Arrays:
    """Random arrays whose axes all have different lengths, so that a wrong order of axes is a wrong shape.

    Args:
        xp: numpy or the fake CuPy.
        dtype: the dtype of q, k and v.

    Attributes:
        q, k, v, dout: dense arrays with D 8, Dv 16, Hq 4, Hkv 2, Sq 6, Skv 7 and B 3.
        s: an array (8, 4, 6, 3) for attention with itself.
        pq, pk, pv, starts: packed arrays of the lengths 5, 0 and 6, and their offsets.
        pages_k, pages_v, table, lengths: pages of 4 keys for the three sequences, with 5, 8 and 1 keys.
    """

    D, DV, HQ, HKV, SQ, SKV, B = 8, 16, 4, 2, 6, 7, 3

    def __init__(self, xp, dtype):
        rng = np.random.default_rng(0)
        self.xp, self.dtype = xp, np.dtype(dtype)

        def normal(*shape):
            return xp.asarray(np.asfortranarray(rng.standard_normal(shape).astype(dtype)))

        def integers(*values):
            return xp.asarray(np.array(values, np.int32))

        self.normal, self.integers = normal, integers
        self.q, self.dout = normal(8, 4, 6, 3), normal(16, 4, 6, 3)
        self.k, self.v, self.s = normal(8, 2, 7, 3), normal(16, 2, 7, 3), normal(8, 4, 6, 3)
        self.pq, self.pk, self.pv, self.starts = normal(8, 4, 11), normal(8, 2, 11), normal(16, 2, 11), integers(0, 5, 5, 11)
        self.packed = {"cu_seqlens_q": self.starts, "cu_seqlens_kv": self.starts, "max_seqlen_q": 6, "max_seqlen_kv": 6}
        self.pages_k, self.pages_v = normal(8, 2, 4, 6), normal(16, 2, 4, 6)
        self.table, self.lengths = xp.asarray(np.array([[3, 0, 5], [1, 4, 0]], np.int32)), integers(5, 8, 1)
        self.paged = {"page_table": self.table, "seq_lens_kv": self.lengths}

    @property
    def qkv(self):
        """q, k and v."""
        return self.q, self.k, self.v


def host(x):
    """An array on the host in float64; the arrays in a tuple, a list or a dictionary."""
    if isinstance(x, (tuple, list)):
        return [host(part) for part in x]
    if isinstance(x, dict):
        return [host(x[name]) for name in sorted(x)]
    x = x.get() if hasattr(x, "get") else x
    return np.asarray(x.astype(np.float32) if getattr(x, "dtype", None) == ml_dtypes.bfloat16 else x, np.float64)


def with_masks(function, *arrays, allowed, bias=None, sinks=None, **options):
    """A function of the reference, with a mask and a bias that broadcast to (Skv, Sq, Hq, B)."""
    *arrays, q, k, v = (host(x) for x in arrays)
    options |= {} if sinks is None else {"sinks": host(sinks)}
    options |= {} if bias is None else {"bias": np.broadcast_to(bias, (k.shape[2], *q.shape[2:0:-1], q.shape[3]))}
    mask = np.broadcast_to(allowed, (k.shape[2], *q.shape[2:0:-1], q.shape[3]))
    return function(*arrays, q, k, v, mask=mask, **options)


def output(q, k, v, allowed=True, **options):
    """The output in float64; ``allowed`` broadcasts to the weights, True where a query attends to a key."""
    return with_masks(reference.attention, q, k, v, allowed=allowed, **options)[0]


def gradients(dout, q, k, v, allowed=True, **options):
    """The gradients of q, k and v in float64."""
    return with_masks(reference.attention_backward, dout, q, k, v, allowed=allowed, **options)


def causal(queries, keys, shift=0):
    """True where key j <= query i + shift, (Skv, Sq, 1, 1)."""
    return (np.arange(keys)[:, None] <= np.arange(queries) + shift)[:, :, None, None]
