"""Random problems for groups of threads, and what every member must compute, from the reference in float64."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

import cupy_sdpa
from cupy_sdpa import reference, zoo
from cupy_sdpa.parallel import Loopback, context_parallel, run_threads

METHODS = ("ring", "all_gather", "all_to_all")


@dataclass
class Problem:
    """Whole sequences, the options of one GPU, and how the reference expresses them.

    ``reference`` replaces options that the reference does not have: functions, and dropout from a seed.
    """

    q: Any
    k: Any
    v: Any
    dout: Any
    options: dict = field(default_factory=dict)
    reference: dict = field(default_factory=dict)
    packed: bool = False

    @property
    def lengths(self):
        """The arguments that name the lengths of whole sequences."""
        return {} if self.packed else {"seqlen_q": self.q.shape[2], "seqlen_kv": self.k.shape[2]}

    def expected(self):
        """The output, log-sum-exp and gradients, and the gradient of sinks if there are any."""
        drop = ("score_mod", "mask_mod", "tensors", "seed", "offset", "max_seqlen_q", "max_seqlen_kv")
        options = {name: value for name, value in self.options.items() if name not in drop} | self.reference
        if "bias" in self.options and "bias" in self.reference:
            options["bias"] = self.options["bias"] + self.reference["bias"]
        if "mask" in self.options and "mask" in self.reference:
            options["mask"] = self.options["mask"] & self.reference["mask"]
        out, stats = reference.attention(self.q, self.k, self.v, **options)
        sinks = {"return_dsinks": True} if options.get("sinks") is not None else {}
        return out, stats, *reference.attention_backward(self.dout, self.q, self.k, self.v, **options, **sinks)


def normal(rng, *shape):
    return np.asfortranarray(rng.standard_normal(shape))


def dense(rng, size, *, equal=None, heads=None, batch=None, lengths=None):
    """Random dense arrays; lengths are small as often as large."""
    equal = rng.random() < 0.6 if equal is None else equal
    sq = int(rng.choice([0, 1, 2, int(rng.integers(1, 40))], p=[0.03, 0.08, 0.09, 0.8]))
    skv = sq if equal else int(rng.choice([0, 1, 2, int(rng.integers(1, 40))], p=[0.03, 0.08, 0.09, 0.8]))
    sq, skv = lengths or (sq, skv)
    hkv, group = heads or (int(rng.integers(1, 4)), int(rng.integers(1, 3)))
    b = batch or int(rng.integers(1, 3))
    d, dv = (int(x) for x in rng.integers(1, 5, 2))
    shapes = (d, hkv * group, sq, b), (d, hkv, skv, b), (dv, hkv, skv, b), (dv, hkv * group, sq, b)
    return Problem(*(normal(rng, *shape) for shape in shapes))


def packed(rng, size, *, equal=None, heads=None, longest=12):
    """Random packed sequences, some empty."""
    equal = rng.random() < 0.6 if equal is None else equal
    count = int(rng.integers(1, 5))
    lens_q = rng.integers(0, longest, count)
    lens_kv = lens_q if equal else rng.integers(0, longest, count)
    hkv, group = heads or (int(rng.integers(1, 3)), int(rng.integers(1, 3)))
    d, dv = (int(x) for x in rng.integers(1, 5, 2))
    tq, tkv = int(lens_q.sum()), int(lens_kv.sum())
    shapes = (d, hkv * group, tq), (d, hkv, tkv), (dv, hkv, tkv), (dv, hkv * group, tq)
    starts = {f"cu_seqlens_{side}": np.cumsum([0, *of], dtype=np.int32) for side, of in (("q", lens_q), ("kv", lens_kv))}
    return Problem(*(normal(rng, *shape) for shape in shapes), dict(starts), packed=True)


def add_band(rng, problem, kind):
    """A causal mask or a window."""
    corner = str(rng.choice(["top_left", "bottom_right"]))
    if kind == "causal":
        problem.options["causal"] = corner if rng.random() < 0.8 else True
    elif kind == "window":
        sides = [int(rng.integers(0, 12)), int(rng.integers(0, 6))]
        if rng.random() < 0.3:
            sides[int(rng.integers(2))] = None
        problem.options["window"] = (*sides, corner)
    elif kind == "causal window":
        problem.options |= {"causal": corner, "window": (int(rng.integers(0, 10)), None, corner)}


def shape_of_scores(problem):
    """``(Skv, Sq, Hq, B)``; for packed sequences the maximum lengths."""
    if problem.packed:
        longest = [int(np.diff(problem.options[f"cu_seqlens_{side}"]).max(initial=0)) for side in ("kv", "q")]
        return (*longest, problem.q.shape[1], len(problem.options["cu_seqlens_q"]) - 1)
    return problem.k.shape[2], problem.q.shape[2], problem.q.shape[1], problem.q.shape[3]


def some_axes(rng, shape):
    """A shape in which some axes have length 1."""
    return tuple(n if rng.random() < 0.6 else 1 for n in shape)


def add_option(rng, problem, name):
    """One option with random values."""
    shape = shape_of_scores(problem)
    heads = problem.q.shape[1]
    if name == "sinks":
        problem.options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    elif name == "alibi":
        problem.options["alibi_slopes"] = cupy_sdpa.alibi_slopes(heads)
    elif name == "softcap":
        if "score_mod" not in problem.options:  # the reference adds the function after the softcap, the call before
            problem.options["softcap"] = 1.5
    elif name == "scale":
        problem.options["scale"] = 0.3
    elif name == "bias":
        problem.options["bias"] = normal(rng, *some_axes(rng, shape))
    elif name == "mask":
        problem.options["mask"] = np.asfortranarray(rng.random(some_axes(rng, shape)) < 0.7)
    elif name == "lengths":
        for side, most in (("q", shape[1]), ("kv", shape[0])):
            if rng.random() < 0.8:
                problem.options[f"seq_lens_{side}"] = rng.integers(0, most + 1, shape[3]).astype(np.int32)
    elif name == "score function":
        table = normal(rng, *shape[1::-1])  # by query and key
        per_head = normal(rng, shape[2], shape[3])
        problem.options.pop("softcap", None)
        problem.options |= {"score_mod": table_mod, "tensors": {"table": table, "per_head": per_head}}
        # np.minimum(q_idx, 3 kv_idx) / 8 + table[q_idx, kv_idx] + per_head[h, b]
        i, j = np.arange(shape[1])[None, :], np.arange(shape[0])[:, None]
        added = (np.minimum(i, 3 * j) / 8 + table.T)[:, :, None, None] + per_head[None, None]
        problem.reference["bias"] = np.asfortranarray(added)
    elif name == "mask function":
        ids = np.sort(rng.integers(0, 3, shape[1] if shape[1] == shape[0] else 0)).astype(np.int32)
        if ids.size and not problem.packed:
            tensors = problem.options.get("tensors", {})
            problem.options |= {"mask_mod": document, "tensors": {**tensors, "ids_q": ids, "ids_kv": ids}}
            problem.reference["mask"] = np.asfortranarray((ids[:, None] == ids)[:, :, None, None])
        else:
            problem.options["mask_mod"] = every_third
            i, j = np.arange(shape[1])[None, :], np.arange(shape[0])[:, None]
            problem.reference["mask"] = np.asfortranarray(((i + j) % 3 != 0)[:, :, None, None])
    elif name == "dropout":
        problem.options |= {"dropout_p": 0.25, "seed": 7, "offset": 8}
        hkv = problem.k.shape[1]
        q, k = (np.ones((1, h, n, shape[3]), np.float32, order="F") for h, n in ((heads, shape[1]), (hkv, shape[0])))
        problem.reference["dropout_mask"] = cupy_sdpa.dropout_mask(q, k, dropout_p=0.25, seed=7, offset=8)
    else:
        raise ValueError(name)


def table_mod(score, b, h, q_idx, kv_idx, table, per_head):
    return score + np.minimum(q_idx, 3 * kv_idx) / 8 + table[q_idx, kv_idx] + per_head[h, b]


def document(b, h, q_idx, kv_idx, ids_q, ids_kv):
    return ids_q[q_idx] == ids_kv[kv_idx]


def every_third(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 3 != 0


def run(problem, size, method, *, repeats=1, max_delay=0.0, seed=0, loopback=Loopback, timeout=20.0, check=True):
    """The results of all members put together: out, log-sum-exp, and gradients; and the group."""
    group = loopback(size, timeout=timeout, max_delay=max_delay, seed=seed)

    def member(own):
        cp = context_parallel(own, method=method, check=check)
        starts = {side: problem.options.get(f"cu_seqlens_{side}") for side in ("q", "kv")}
        q, dout = (cp.shard(x, cu_seqlens=starts["q"]) for x in (problem.q, problem.dout))
        k, v = (cp.shard(x, cu_seqlens=starts["kv"]) for x in (problem.k, problem.v))
        sinks = {"return_dsinks": True} if problem.options.get("sinks") is not None else {}
        for _ in range(repeats):
            out, stats = cp.attention(q, k, v, return_stats=True, **problem.lengths, **problem.options)
            got = cp.attention_backward(dout, q, k, v, out, stats, **problem.lengths, **problem.options, **sinks)
        rows, columns = {"cu_seqlens": starts["q"]}, {"cu_seqlens": starts["kv"]}
        if not problem.packed:
            rows, columns = {"seqlen": problem.q.shape[2]}, {"seqlen": problem.k.shape[2]}
        whole = [
            cp.unshard(out, **rows),
            cp.unshard(stats, axis=1 if problem.packed else 0, **rows),
            cp.unshard(got[0], **rows),
        ]
        return *whole, *(cp.unshard(x, **columns) for x in got[1:3]), *got[3:]

    return run_threads(group.members, member), group


def assert_equal(results, expected, tolerance=1e-12):
    """Every member must have the expected results, relative to the largest element."""
    for found in results:
        assert len(found) == len(expected)
        for name, got, wanted in zip(("out", "stats", "dq", "dk", "dv", "dsinks"), found, expected, strict=False):
            assert got.shape == wanted.shape, name
            limit = 1e-6 if name == "dsinks" else tolerance
            both = np.isneginf(wanted)
            assert (np.isneginf(got) == both).all(), name
            error = np.abs(np.where(both, 0, got) - np.where(both, 0, wanted)).max(initial=0)
            assert error <= limit * max(1.0, np.abs(wanted[~both]).max(initial=0)), f"{name}: {error}"


__all__ = ["METHODS", "Problem", "add_band", "add_option", "assert_equal", "dense", "packed", "run", "zoo"]
