"""The table of repeated calls: each public function and feature has a row. And how a call ran.

A row is a problem of ``check``, or arrays and a function of them. :func:`calls_of` makes its calls again and again.
"""

import contextlib
import copy
import gc
import sys
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import cupy_sdpa
from cupy_sdpa import (
    BlockMask,
    Rope,
    apply_rope,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    fp8,
    layout,
    nnlib,
    tree_depths,
    tree_mask,
    widen,
    zoo,
)
from cupy_sdpa.check.calls import CaseRunner

PACKAGE = str(Path(cupy_sdpa.__file__).parent)
CHECK = str(Path(PACKAGE, "check"))
#: Calls with the same addresses until a CUDA graph is launched: at the third a call is captured, and a call that allocates
#: much memory is counted from the second on.
OFTEN = 5
#: The most functions of the package that a call runs if it launches a CUDA graph. Executing a plan runs about 30, parsing a
#: call hundreds.
REPLAY = 14

#: Rows that are problems of ``check``: sizes and options. Each has other copies, memory, and kernels before or after the plan.
CASES: dict[str, dict[str, Any]] = {
    "plain": {"sq": 20, "skv": 24, "hq": 4, "hkv": 2, "options": {"causal": "top_left"}},
    "lengths": {"sq": 40, "skv": 48, "b": 2, "options": {"seq_lens_q": "random", "seq_lens_kv": "some_zero"}},
    "packed": {"sq": 19, "skv": 16, "hq": 4, "hkv": 2, "b": 3, "options": {"packed": ("some_zero", "random", 0, 3, 0, "int32")}},
    "mask": {"sq": 20, "skv": 20, "b": 2, "options": {"mask": ("k11b", "random")}},
    "bias": {"sq": 20, "skv": 20, "hq": 2, "options": {"bias": ("11hb", "float16", "normal"), "return_dbias": True}},
    "shared biases": {
        "sq": 20, "skv": 20, "hq": 2, "b": 6, "options": {"bias": ("kqhb", "float16", "normal"), "bias_repeats": 2, "return_dbias": True},
    },
    "sinks": {"sq": 20, "skv": 20, "hq": 2, "options": {"sinks": "normal", "alibi_slopes": "usual", "return_dsinks": True}},
    "functions": {
        "sq": 20, "skv": 20, "hq": 2, "b": 2,
        "options": {"score_mod": ("bias_bk", "float32"), "mask_mod": ("chunks", "float32"), "return_dtensors": True},
    },
    "parts": {"sq": 20, "skv": 20, "backward": False, "options": {"stats": "max_sumexp"}},
    "large copies": {
        "d": 64, "sq": 40, "skv": 48, "hq": 4, "hkv": 4, "b": 2,
        "options": {"seq_lens_q": "random", "seq_lens_kv": "random", "dropout": (0.25, "array", 3, 1)},
    },
    "bucket": {"sq": 40, "skv": 48, "b": 2, "options": {"bucket": 32, "seq_lens_kv": "some_zero"}},
    "packed bucket": {"sq": 19, "skv": 16, "b": 3, "options": {"packed": ("some_zero", "random", 0, 3, 0, "int32"), "bucket": 32}},
    "strides": {"sq": 20, "skv": 24, "b": 2, "layouts": {"q": "dshb", "k": "dshb+s", "v": "dhsb+h"}, "options": {"softcap": 2.0}},
    "block mask": {"sq": 300, "skv": 300, "options": {"block_mask": ("segments", "kq11")}},
    "block mask of heads": {"sq": 140, "skv": 140, "hq": 2, "options": {"block_mask": ("blocks", "kqh1")}},
    "derivative": {"sq": 20, "skv": 24, "backward": False, "options": {"jvp": "qkv", "stats": True}},
    "scales of heads": {"sq": 20, "skv": 24, "hq": 4, "hkv": 2, "b": 2, "options": {"head_scales": "zero", "return_dscale": True}},
    "dstats": {"sq": 20, "skv": 24, "hq": 4, "hkv": 2, "b": 2, "options": {"dstats": True, "seq_lens_q": "some_zero"}},
    "derivative with a block mask": {
        "sq": 300, "skv": 300, "backward": False, "options": {"jvp": "qk", "block_mask": ("segments", "kq11")},
    },
    "pages": {
        "sq": 1, "skv": 64, "hq": 4, "hkv": 2, "b": 3, "backward": False,
        "options": {"paged": (16, "heads", "random", 0, "mixed", False, False), "stats": True},
    },
    "split pages": {
        "sq": 3, "skv": 64, "hq": 4, "hkv": 2, "b": 3, "backward": False,
        "options": {"paged": (16, "pages", "random", 4, "mixed", False, False), "causal": "bottom_right"},
    },
    "shared prefix": {
        "sq": 2, "skv": 64, "hq": 4, "hkv": 2, "b": 3, "backward": False,
        "options": {"paged": (16, "heads", "random", 0, "mixed", False, False), "shared_prefix": 2, "causal": "bottom_right"},
    },
    "weight sums": {"sq": 20, "skv": 24, "hq": 4, "hkv": 2, "backward": False, "options": {"weight_sums": "key heads"}},
    "entropy": {"sq": 20, "skv": 24, "hq": 4, "hkv": 2, "backward": False, "options": {"weight_entropy": True, "sinks": "normal"}},
}  # fmt: skip

#: Blocks that are attended to.
TABLE = np.array([[True, False, True], [True, True, False], [False, True, True]])
#: The shapes of q, k, v and dout of most other rows.
QKV = {"q": (16, 4, 20, 2), "k": (16, 2, 24, 2), "v": (16, 2, 24, 2), "dout": (16, 4, 20, 2)}
FLOAT32 = {name: (shape, np.float32) for name, shape in QKV.items()}
#: Two sets of lengths of two sequences.
LENGTHS = tuple(np.array(x, np.int32) for x in ([20, 3], [7, 24]))


def by_pullback(x, **options):
    """The output and the gradients of the arrays q, k, v and dout, by :func:`attention_vjp`."""
    out, pullback = attention_vjp(x["q"], x["k"], x["v"], **options)
    x.held.append(pullback)
    return out, *pullback(x["dout"])


def of_stats(x, **options):
    """The gradients of the log-sum-exp, alone and with the gradients of the output."""
    (out, stats), pullback = attention_vjp(x["q"], x["k"], x["v"], return_stats=True, causal=True, **options)
    doubled = 2 * stats
    x.held += [pullback, doubled]  # a captured graph reads it again
    return out, *pullback(x["dout"], doubled), *pullback(None, stats)


def both_passes(x, **options):
    """The output, the log-sum-exp and the gradients, by two functions."""
    out, stats = attention(x["q"], x["k"], x["v"], return_stats=True, **options)
    return out, stats, *attention_backward(x["dout"], x["q"], x["k"], x["v"], out, stats, **options)


def in_layout(x, default=None, **options):
    """Both passes of arrays in C order; the layout may be the default."""
    options = {"layout": "bshd", "causal": True, **options}
    with layout.default(default) if default else contextlib.nullcontext():
        return both_passes(x, **options)


def of_nnlib(x, **options):
    """Both passes of NNlib's functions, with a bias and lengths."""
    mask = nnlib.make_padding_mask(x["lengths"], 24)
    y, pullback = nnlib.dot_product_attention_vjp(x["q"], x["k"], x["v"], x["bias"], mask=mask, nheads=2, **options)
    x.held += mask, pullback
    return y, *pullback(x["dout"])


def of_arrays(x, of=True, **options):
    """Both passes of a function that reads rows of two arrays, and the gradients of some of them."""
    options = {
        "score_mod": lambda s, b, h, i, j, x, y: s * x[h] + y[3, j] + y[1, j],
        "tensors": {name: x[name] for name in "xy"},
        **options,
    }
    out, stats = attention(x["q"], x["k"], x["v"], return_stats=True, **options)
    *gradients, of_tensors = attention_backward(x["dout"], x["q"], x["k"], x["v"], out, stats, return_dtensors=of, **options)
    assert {*of_tensors} == ({*"xy"} if of is True else {*of})
    return out, stats, *gradients, *(of_tensors[name] for name in sorted(of_tensors))


def of_a_tree(x, **options):
    """Attention with a mask that is made of parents on the device."""
    x.held.append(tree_mask(x["parents"], x["k"], seq_lens_kv=x["lengths"]))
    return (attention(x["q"], x["k"], x["v"], seq_lens_kv=x["lengths"], **x.held[-1], **options),)


def rotated_in_a_tree(x):
    """A rotation by the positions in a tree of parents on the device."""
    x.held.append(tree_depths(x["parents"]))
    x.held.append(x["lengths"] + x.held[-1])
    return (apply_rope(x["q"], Rope(8), positions=x.held[-1]),)


def in_fp8(x, **options):
    """Attention in FP8, of arrays that are converted."""
    x.held += fp8.quantize_qkv(x["q"], x["k"], x["v"], rotate=True)
    out, stats = fp8.attention(*x.held, return_stats=True, **options)
    x.held.append(out)
    return out.data.view(np.uint8), stats


def of_fp8_keys(x, **options):
    """Attention to keys and values in FP8."""
    x.held += (fp8.quantize(x[name], rotate=name == "k") for name in "kv")
    return (attention(x["q"], *x.held, **options),)


def converted(x, **options):
    """The elements and the scale of an array in FP8."""
    x.held.append(fp8.quantize(x["q"], lengths=x["lengths"], **options))
    return x.held[0].data.view(np.uint8), x.held[0].scale


def merged(x):
    """Eleven results of parts of the keys, which are merged in two launches."""
    outs, stats = ([x[name][..., n] for n in range(11)] for name in ("outs", "stats"))
    return cupy_sdpa.merge(outs, stats, return_stats=True)


def gradients_of_parts(x):
    """The gradients of eleven results of parts of the keys, in two launches."""
    outs, stats = ([x[name][..., n] for n in range(11)] for name in ("outs", "stats"))
    douts, of_stats = cupy_sdpa.merge_backward(outs, stats, x["dout"], x["dstats"])
    return *douts, *of_stats


def without_keys(x, **options):
    """Attention to no keys: the rows attend to their sink."""
    return attention(x["q"], x["k"], x["k"], seq_lens_q=x["lengths"], sinks=x["sinks"], return_stats="max_sumexp", **options)


def widened(x, **options):
    """A derivative of arrays that are converted before."""
    given = {"dq": x["q"], "dv": x["v"]}
    x.held.append(widen(x["q"], x["k"], x["v"], **given, **options))
    return attention_jvp(x["q"], x["k"], x["v"], widened=x.held[0], **options)


#: The most functions of the package that an exchange of NCCL enters, however many messages it has.
OF_NCCL = 4
#: Blocks on and below the diagonal.
CAUSAL_BLOCKS = BlockMask.from_blocks(np.tri(2, dtype=bool).T, 140, 140)
#: Rows that are functions of arrays: the shapes of random arrays, or a shape and a dtype, or two sets of values; and the function,
#: which takes further options.
FUNCTIONS = {
    "attention_vjp": (QKV, by_pullback),
    "attention_vjp, no batch axis": ({name: shape[:3] for name, shape in QKV.items()}, by_pullback),
    "attention_vjp, layout": (
        {name: shape[::-1] for name, shape in QKV.items()}, lambda x, **options: by_pullback(x, layout="bshd", **options),
    ),
    "no batch axis": ({name: shape[:3] for name, shape in QKV.items()}, lambda x, **options: both_passes(x, causal=True, **options)),
    "layout": ({name: shape[::-1] for name, shape in {**QKV, "q": QKV["k"], "dout": QKV["k"]}.items()}, in_layout),
    "compute_dtype": (FLOAT32, lambda x, **options: by_pullback(x, **{"compute_dtype": "float16", **options})),
    "layout and compute_dtype": (
        {name: (shape[::-1], np.float32) for name, shape in {**QKV, "q": QKV["k"], "dout": QKV["k"]}.items()},
        lambda x, **options: in_layout(x, **{"compute_dtype": "float16", **options}),
    ),
    "block mask and compute_dtype": (
        dict.fromkeys(QKV, ((16, 1, 140, 1), np.float32)),
        lambda x, **options: both_passes(x, **{"compute_dtype": "float16", "block_mask": CAUSAL_BLOCKS, **options}),
    ),
    "derivative and compute_dtype": (
        FLOAT32, lambda x, **options: attention_jvp(x["q"], x["k"], x["v"], x["dout"], compute_dtype="float16", **options),
    ),
    "gradients of the log-sum-exp": (QKV, of_stats),
    "FP8 and its gradients": (QKV, lambda x, **options: by_pullback(x, compute_dtype="float8_e4m3fn", **options)),
    "FP8": ({name: (32, *shape[1:]) for name, shape in QKV.items()}, in_fp8),
    "FP8 keys": (QKV, of_fp8_keys),
    "conversion to FP8": ({"q": QKV["q"], "lengths": tuple(np.minimum(x, 20) for x in LENGTHS)}, converted),
    "merge": ({"outs": ((16, 4, 20, 2, 11), np.float32), "stats": ((20, 4, 2, 11), np.float32)}, merged),
    "gradients of merge": (
        {"outs": ((16, 4, 20, 2, 11), np.float32), "stats": ((20, 4, 2, 11), np.float32), "dout": ((16, 4, 20, 2), np.float32),
         "dstats": ((20, 4, 2), np.float32)},
        gradients_of_parts,
    ),
    "NNlib": (
        {"q": (32, 20, 2), "k": (32, 24, 2), "v": (32, 24, 2), "dout": (32, 20, 2), "bias": (24, 20, 2), "lengths": LENGTHS}, of_nnlib,
    ),
    "arrays of functions": ({**QKV, "x": ((4,), np.float32), "y": ((5, 24), np.float32)}, of_arrays),
    "functions of every call": (QKV, lambda x, cap=3.0, **options: by_pullback(x, score_mod=zoo.softcap(cap), **options)),
    "widen": (QKV, widened),
    "tree": (
        {"q": (16, 4, 4, 2), "k": (16, 2, 24, 2), "v": (16, 2, 24, 2), "lengths": LENGTHS,
         "parents": tuple(np.asfortranarray(x, np.int32) for x in ([[-1, -1], [0, 0], [0, -1], [2, 1]], [[-1, -1], [-1, 0], [1, 1], [1, 2]]))},
        of_a_tree,
    ),
    "rotation": ({"q": QKV["q"], "lengths": LENGTHS}, lambda x: (apply_rope(x["q"], Rope(8), seq_lens_kv=x["lengths"]),)),
    "rotation of a tree": (
        {"q": (16, 4, 4, 2), "lengths": LENGTHS, "parents": tuple(np.asfortranarray(x, np.int32) for x in ([[-1, -1], [0, 0], [0, -1], [2, 1]],) * 2)},
        rotated_in_a_tree,
    ),
    "dropout_mask": (QKV, lambda x, **options: (cupy_sdpa.dropout_mask(x["q"], x["k"], dropout_p=0.5, seed=1, **options),)),
    "no keys": ({"q": QKV["q"], "k": (16, 2, 0, 2), "sinks": ((4,), np.float32), "lengths": tuple(np.minimum(x, 20) for x in LENGTHS)}, without_keys),
}  # fmt: skip
ROWS = [*CASES, *FUNCTIONS]
#: The rows with calls that are parsed every time.
PARSED = {"merge", "gradients of merge", "widen", "tree", "rotation", "rotation of a tree", "dropout_mask", "no keys"}


def changes_of(engine, name):
    """Options of other calls on the arrays of a row, which are made in turn with it."""
    masks = [BlockMask.from_blocks(np.roll(TABLE, n, axis=0), 300, 300) for n in range(2)]
    bias = engine.normal(9, 300, 300, 1, 1, dtype=np.float16)
    return {
        "plain": [
            {"causal": "bottom_right"}, {"causal": False}, {"window": (3, 0)}, {"softcap": 2.0}, {"scale": 0.3}, {"bucket": 64},
            {"engine": "cupy" if engine.on_cudnn else "numpy"}, {"engine": None}, {"score_mod": zoo.softcap(2.0)},
            {"score_mod": zoo.softcap(3.0)}, {"score_mod": zoo.softcap(0.5)}, {"sinks": engine.put(np.ones(4, np.float32))},
        ],
        "lengths": [{"causal": True}, {"window": (9, 9)}],
        "mask": [{"mask": None}, {"causal": True}],
        "functions": [{"softcap": 2.0}, {"mask_mod": zoo.sliding_window(3)}, {"mask_mod": zoo.sliding_window(9)}],
        "block mask": [
            {"block_mask": None}, {"causal": True}, {"window": (9, 0)}, *({"block_mask": mask} for mask in masks),
            *({"block_mask": mask, "bias": bias} for mask in masks), {"block_mask": None, "bias": bias},
            {"block_mask": masks[0], "deterministic": True},
        ],
        "derivative with a block mask": [{"block_mask": None}, *({"block_mask": mask} for mask in masks)],
        "layout": [{"layout": "bhsd"}, {"layout": None, "default": "bhsd"}, {"layout": None, "default": "bshd"}],
        "compute_dtype": [
            *({"compute_dtype": x} for x in ("bfloat16", np.float16, np.dtype("float16"))), *([] if engine.on_cudnn else [{"compute_dtype": None}]),
        ],
        "layout and compute_dtype": [{"layout": "bhsd"}, {"layout": None, "default": "bhsd"}],
        "block mask and compute_dtype": [{"block_mask": None}, {"compute_dtype": "bfloat16"}],
        "derivative and compute_dtype": [{"causal": True}],
        "functions of every call": [{"cap": 2.0}, {"cap": 0.5}, {"cap": 3}],
        "arrays of functions": [{"of": "x"}, {"of": "y"}, {"of": ("y", "x")}],
        "NNlib": [], "scales of heads": [{"causal": True}], "gradients of merge": [], "rotation": [], "rotation of a tree": [], "merge": [], "dropout_mask": [{"bucket": 32}], "conversion to FP8": [{"rotate": True}],
    }.get(name, [{"scale": 0.3}])  # fmt: skip


class Runner(CaseRunner):
    """The calls of a case, of which some options may be changed."""

    changes: ClassVar[dict[str, Any]] = {}

    def options(self, memory, index):
        """The options of the forward call."""
        return super().options(memory, index) | self.changes


class Calls:
    """All passes of a row of :data:`CASES`, on memory of their own.

    Args:
        engine: the engine.
        name: the row.
        preallocated: whether the results are the caller's arrays. Default True.
        options: further options of the case.
    """

    def __init__(self, engine, name, *, preallocated=True, **options):
        values = {"d": 16, "backward": True, **CASES[name]}
        values["dv"] = values["d"]
        options = {**values.pop("options"), **options}
        if preallocated and not {"weight_sums", "weight_entropy"} & options.keys():
            options["preallocated"] = True
        self.engine, self.runner = engine, Runner(engine.case(**values, options=options))
        self.passes = 1 + self.runner.case.backward
        self.memory = self.runner.allocate()
        self.load(0)

    @property
    def arrays(self):
        """The arrays of the inputs and of the caller's results, by name."""
        return self.memory.views

    def load(self, index):
        """Copy one of two sets of values into the inputs, and NaN into the results."""
        self.index = index
        self.runner.load(self.memory, index)

    def elsewhere(self):
        """The same calls on other memory, with the same values."""
        other = copy.copy(self)
        other.memory = self.runner.allocate()
        other.load(self.index)
        return other

    def launch(self, **changes):
        """The results by name, without synchronization, of calls of which some options are changed."""
        self.runner.changes = changes
        results = self.runner.call(self.memory, self.index)
        return results | {name: self.arrays[name] for name in results if name in self.arrays}

    def run(self, index=None, **changes):
        """The contents of the results for a set of values, by default the present one, after NaN was written to them."""
        self.load(self.index if index is None else index)
        return self.host(self.launch(**changes))

    def host(self, results):
        """Results as numpy arrays."""
        return {name: self.engine.get(x).copy("K") for name, x in results.items() if x is not None}


class Arrays(dict):
    """Arrays by name, and what the caller of a captured call must keep: objects whose memory the graph uses."""

    held = ()


class FunctionCalls(Calls):
    """The calls of a row of :data:`FUNCTIONS`, whose results are created."""

    def __init__(self, engine, name, **options):
        self.engine, (self.kinds, self.function), self.given = engine, FUNCTIONS[name], options
        self.passes, self.in_c_order = 1 + ("dout" in self.kinds), "layout" in name
        self.memory = Arrays({name: engine.put(x) for name, x in self.values(0).items()})
        self.index = 0

    @property
    def arrays(self):
        """The arrays by name."""
        return self.memory

    def values(self, index):
        """A set of values by name."""
        values = {}
        for number, (name, kind) in enumerate(self.kinds.items()):
            if isinstance(kind[0], np.ndarray):
                values[name] = kind[index].copy("K")  # the arrays of numpy are this memory
                continue
            shape, dtype = kind if isinstance(kind[0], tuple) else (kind, self.engine.dtype)
            x = np.random.default_rng([index, number]).standard_normal(shape).astype(dtype)
            values[name] = x if self.in_c_order else np.asfortranarray(x)
        return values

    def load(self, index):
        """Copy one of two sets of values into the arrays."""
        self.index = index
        for name, x in self.values(index).items():
            self.memory[name][...] = self.engine.put(x)

    def elsewhere(self):
        """The same calls on other memory, with the same values."""
        other = copy.copy(self)
        other.memory = Arrays({name: self.engine.put(x) for name, x in self.values(self.index).items()})
        return other

    def launch(self, **changes):
        """The results by number, without synchronization."""
        self.memory.held = []
        results = self.function(self.memory, **self.given, **changes)
        return {str(n): x for n, x in enumerate(results if isinstance(results, tuple) else (results,))}


def calls_of(engine, name, **options):
    """The calls of a row."""
    return Calls(engine, name, **options) if name in CASES else FunctionCalls(engine, name)


def equal(engine, got, want, where=""):
    """Assert that results have equal bits and no NaN; sums that a GPU adds in any order are close."""
    assert got.keys() == want.keys()
    for name, x in got.items():
        assert x.dtype.kind != "f" or not np.isnan(x).any(), f"{name} contains NaN {where}"
        if engine.name == "cupy":
            np.testing.assert_allclose(x.astype("f4"), want[name].astype("f4"), atol=2e-2, rtol=2e-2, err_msg=f"{name} {where}")
        else:
            np.testing.assert_array_equal(x, want[name], err_msg=f"{name} {where}")


def functions_run(call, *arguments, **options):
    """The number of the package's Python functions that a call runs."""
    count = 0

    def note(frame, event, _):
        nonlocal count
        name = frame.f_code.co_filename
        count += event == "call" and name.startswith(PACKAGE) and not name.startswith(CHECK)

    before = sys.getprofile()
    gc.disable()  # the finalizers of other tests' objects would be counted
    sys.setprofile(note)
    try:
        call(*arguments, **options)
    finally:
        sys.setprofile(before)
        gc.enable()
    assert count, "the profiler saw no function, not even the public one"
    return count


def arguments_read(call):
    """How often the public calls of a function read each array and the options, by the number of the call and the name."""
    number, depth, read = 0, 0, Counter()

    def note(frame, event, _):
        nonlocal number, depth
        file = frame.f_code.co_filename
        if not file.startswith(PACKAGE) or file.startswith(CHECK):
            return
        if event == "return":
            depth -= 1
        elif event == "call":
            number += not depth
            depth += 1
            name = frame.f_code.co_name
            if name == "read_array" and type(frame.f_locals["array"]).__name__ != "View":
                read[number, frame.f_locals["name"]] += 1
            elif name == "read_settings":
                read[number, "options"] += 1

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert all((n, "options") in read for n, _ in read), "the profiler did not see the functions that read"
    return read
