"""Problems for groups of CuPy arrays: on GPUs, and on the fake CuPy."""

import numpy as np
from parallel_cases import Problem

import cupy_sdpa
from cupy_sdpa.parallel import context_parallel
from cupy_sdpa.problem.tensor_spec import numpy_dtype

#: The options of each case, for 8 query and 4 key/value heads.
CASES = {
    "full": {},
    "causal": {"causal": True},
    "causal, bottom right": {"causal": "bottom_right"},
    "window": {"window": (50, 0)},
    "sinks": {"causal": True, "sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
    "softcap": {"causal": True, "softcap": 5.0},
    "ALiBi": {"causal": True, "alibi_slopes": cupy_sdpa.alibi_slopes(8)},
    "mask function": {"mask_mod": lambda b, h, q_idx, kv_idx: (q_idx // 64) >= (kv_idx // 64)},
    "score function": {"causal": True, "score_mod": lambda score, b, h, q_idx, kv_idx: score + (kv_idx - q_idx) * 0.01},
}
PACKED = {
    "packed, full": {},
    "packed, causal": {"causal": True},
    "packed, window": {"causal": True, "window": (40, 0)},
    "packed, sinks": {"causal": True, "sinks": np.linspace(-1, 1, 8, dtype=np.float32)},
}
LENGTHS = (256, 64, 0, 192)
SMALL_LENGTHS = (24, 5, 0, 17)


def problem_of(name, dtype, small=False):
    """Random arrays, and the options as numpy arrays."""
    rng, lengths = np.random.default_rng(0), SMALL_LENGTHS if small else LENGTHS
    batch = () if name in PACKED else (2,)
    length = sum(lengths) if name in PACKED else 50 if small else 512
    shapes = (64, 8, length, *batch), (64, 4, length, *batch), (64, 4, length, *batch), (64, 8, length, *batch)
    arrays = (np.asfortranarray(rng.standard_normal(shape, np.float32).astype(numpy_dtype(dtype))) for shape in shapes)
    options = dict(CASES.get(name) or PACKED.get(name) or {})
    if name in PACKED:
        options |= {f"cu_seqlens_{side}": np.cumsum([0, *lengths], dtype=np.int32) for side in ("q", "kv")}
    return Problem(*arrays, options, packed=name in PACKED)


def on_device(cupy, options):
    """The options with arrays on the GPU, except the offsets of packed sequences."""
    return {
        name: cupy.asarray(x) if isinstance(x, np.ndarray) and not name.startswith("cu_seqlens") else x
        for name, x in options.items()
    }


def results_of(cupy, problem, method):
    """A function of a member that returns whole results of both passes as numpy arrays, after several repeats."""

    def member(own):
        try:
            return results(context_parallel(own, method=method))
        finally:
            cupy_sdpa.get_plan_cache().clear()  # of this thread

    def results(cp):
        options = on_device(cupy, problem.options)
        starts = problem.options.get("cu_seqlens_q")
        rows = {"cu_seqlens": starts} if problem.packed else {"seqlen": problem.q.shape[2]}
        shards = {"cu_seqlens": starts}
        q, k, v, dout = (cp.shard(cupy.asarray(x), **shards) for x in (problem.q, problem.k, problem.v, problem.dout))
        for repeat in range(4):
            if repeat == 1:  # arrays changed in place change the results
                q *= 2
            elif repeat == 2:
                q /= 2
            out, stats = cp.attention(q, k, v, return_stats=True, **problem.lengths, **options)
            gradients = cp.attention_backward(dout, q, k, v, out, stats, **problem.lengths, **options)
        whole = [cp.unshard(out, **rows), cp.unshard(stats, axis=1 if problem.packed else 0, **rows)]
        found = [cupy.asnumpy(x) for x in (*whole, *(cp.unshard(x, **rows) for x in gradients))]
        cp.check()
        return found

    return member


def longest(problem):
    """The maximum lengths of packed sequences."""
    length = int(np.diff(problem.options["cu_seqlens_q"]).max())
    return {"max_seqlen_q": length, "max_seqlen_kv": length}


def results_of_one_gpu(cupy, problem):
    """Both passes on one GPU."""
    options = on_device(cupy, problem.options)
    if problem.packed:
        starts = {name: cupy.asarray(problem.options[name]) for name in ("cu_seqlens_q", "cu_seqlens_kv")}
        options |= starts | longest(problem)
    q, k, v, dout = (cupy.asarray(x) for x in (problem.q, problem.k, problem.v, problem.dout))
    out, stats = cupy_sdpa.attention(q, k, v, return_stats=True, **options)
    return [cupy.asnumpy(x) for x in (out, stats, *cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options))]


def exact(problem):
    """Both passes in float64 on the CPU."""
    options = dict(problem.options)
    if problem.packed:
        options |= longest(problem)
    q, k, v, dout = (x.astype(np.float64) for x in (problem.q, problem.k, problem.v, problem.dout))
    shape = problem.q.shape[1:] if problem.packed else (q.shape[2], q.shape[1], q.shape[3])
    out, stats = cupy_sdpa.attention(q, k, v, stats=np.empty(shape, order="F"), **options)
    return out, stats, *cupy_sdpa.attention_backward(dout, q, k, v, out, stats, **options)


def assert_as_exact_as_one_gpu(results, alone, truth):
    """The error of every member is at most twice that of one GPU, plus the rounding of partial results."""
    for found in results:
        for name, got, other, wanted in zip(("out", "stats", "dq", "dk", "dv"), found, alone, truth, strict=True):
            got, other = got.astype(np.float64), other.astype(np.float64)
            assert np.isfinite(got).all(), name
            epsilon = 2**-8 if found[0].dtype.name == "bfloat16" else 2**-11
            floor = 1e-5 if name == "stats" else epsilon * np.abs(wanted).max()
            error, allowed = np.abs(got - wanted).max(), 2 * np.abs(other - wanted).max() + floor
            assert error <= allowed, f"{name}: {error} > {allowed}"
