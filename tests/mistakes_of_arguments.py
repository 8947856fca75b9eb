"""Arrays of a wrong shape, dtype or type: the rows of every public function, generated from a table of its arguments."""

# mypy: ignore-errors
# (most mistakes are type errors)

import functools

import numpy as np
from mistakes import row

import cupy_sdpa
from cupy_sdpa import (
    KVCache,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    explain,
    fp8,
    merge,
    prepare,
    weight_sums,
    widen,
)

#: The letters of axes and their lengths; "A" are all pages.
LENGTHS = {"D": 8, "V": 16, "H": 4, "h": 2, "S": 6, "K": 7, "B": 3, "P": 2, "p": 4, "A": 6}
#: An array of another dtype for each kind of argument, and what the message says that it must be.
DTYPES = {"float": ("int32", ""), "float32": ("int32", "float32"), "int32": ("float64", "int32"), "bool": ("float32", "bool")}
#: The arguments of public functions: name, axes, kind, and the axes whose length is compared, by default all.
Q, K, V = {"q": ("DHSB", "float", "DB")}, {"k": ("DhKB", "float", "DKB")}, {"v": ("VhKB", "float", "hKB")}
QKV = {**Q, **K, **V}
SCORES = {"mask": ("KSHB", "bool"), "bias": ("KSHB", "float"), "sinks": ("H", "float32"), "alibi_slopes": ("H", "float32")}
SEQUENCES = {"seq_lens_q": ("B", "int32"), "seq_lens_kv": ("B", "int32")}
RESULTS = {"out": ("VHSB", "float"), "stats": ("SHB", "float32")}
GRADIENTS = {"dq": ("DHSB", "float"), "dk": ("DhKB", "float"), "dv": ("VhKB", "float")}
STATS_GRADIENT = {"dstats": ("SHB", "float32")}


def gradients(x, arrays, changed):
    """The gradients of a call."""
    options = {name: changed.get(name, arrays[name]) for name in ("q", "k", "v")}
    out, stats = attention(x.q, x.k, x.v, return_stats=True)
    return attention_backward(**{"dout": x.dout, **options, "out": out, "stats": stats, **changed})


def with_arrays(function, *names, **more):
    """A call with q, k and v, other arguments of these names, and the changed one."""

    def call(x, arrays, changed):
        given = {name: arrays[name] for name in names}
        return function(**{"q": x.q, "k": x.k, "v": x.v, **given, **more, **changed})

    return call


def of_pages(function, *prefix):
    """A call with pages."""

    def call(x, arrays, changed):
        given = {"k": x.pages_k, "v": x.pages_v, **x.paged, **changed}
        return function(x.q, given.pop("k"), given.pop("v"), *prefix, **given)

    return call


def merged(x, arrays, changed):
    """A merge of two outputs."""
    lists = {name: [arrays[name], changed.get(name, arrays[name])] for name in ("outs", "stats")}
    return merge(lists["outs"], lists["stats"], **{name: a for name, a in changed.items() if name not in lists})


def gradients_of_parts(x, arrays, changed):
    """The gradients of a merge of two outputs."""
    lists = {name: [arrays[name], changed.get(name, arrays[name])] for name in ("outs", "stats")}
    given = {"dout": x.dout, **{name: a for name, a in changed.items() if name not in lists}}
    return cupy_sdpa.merge_backward(lists["outs"], lists["stats"], **given)


def pulled(x, arrays, changed):
    """The gradients of a pullback."""
    return attention_vjp(x.q, x.k, x.v, return_stats=True)[1](**{"dout": x.dout, **changed})


#: Public functions: a call with one changed argument, and the arguments.
FUNCTIONS = {
    "attention": (with_arrays(attention, return_stats=True), {**QKV, **SCORES, **SEQUENCES, **RESULTS}),
    "attention_vjp": (with_arrays(attention_vjp), {**QKV, **SCORES, **SEQUENCES}),
    "Pullback": (pulled, {"dout": ("VHSB", "float"), **STATS_GRADIENT, **GRADIENTS}),
    "attention_backward": (
        gradients, {"dout": ("VHSB", "float"), **QKV, **RESULTS, **STATS_GRADIENT, **GRADIENTS, **SCORES, **SEQUENCES},
    ),
    "attention_jvp": (
        with_arrays(attention_jvp, "dq"),
        {**QKV, **GRADIENTS, **SCORES, **SEQUENCES, **RESULTS, **STATS_GRADIENT, "dout": ("VHSB", "float")},
    ),
    "widen": (with_arrays(widen, "dq"), {**QKV, **GRADIENTS, **SCORES, **SEQUENCES}),
    "prepare": (with_arrays(prepare), {**QKV, **SCORES, **SEQUENCES}),
    "explain": (with_arrays(explain), {**QKV, **SCORES, **SEQUENCES, **RESULTS}),
    "weight_sums": (
        lambda x, arrays, changed: weight_sums(**{"q": x.q, "k": x.k, **changed}),
        {**Q, "k": ("DhKB", "float", "DB"), **{name: SCORES[name] for name in ("mask", "sinks", "alibi_slopes")}, **SEQUENCES},
    ),
    "dropout_mask": (
        lambda x, arrays, changed: cupy_sdpa.dropout_mask(**{"q": x.q, "k": x.k, "dropout_p": 0.5, "seed": 1, **changed}),
        {**Q, "k": ("DhKB", "float", "DB")},
    ),
    "merge": (
        merged, {"outs": ("VHSB", "float"), "stats": ("SHB", "float32"), "out": ("VHSB", "float"), "sinks": ("H", "float32")},
    ),
    "merge_backward": (
        gradients_of_parts, {"outs": ("VHSB", "float"), "stats": ("SHB", "float32"), "dout": ("VHSB", "float"), **STATS_GRADIENT,
                             "sinks": ("H", "float32")},
    ),
    "shared_prefix_attention": (
        of_pages(cupy_sdpa.shared_prefix_attention, 0),
        {"k": ("DhpA", "float", "DpA"), "v": ("VhpA", "float", "hpA"), "page_table": ("PB", "int32", "B"), "seq_lens_kv": ("B", "int32")},
    ),
    "fp8.quantize": (
        lambda x, arrays, changed: fp8.quantize(**{"x": x.q, "lengths": arrays["lengths"], **changed}),
        {"x": ("DHSB", "float", ""), "lengths": ("B", "int32")},
    ),
    "KVCache.append": (
        lambda x, arrays, changed: KVCache(8, 2, head_dim_v=16, pages=9, batch=3, page_size=4, dtype="float32", numpy=True).append(
            **{"k": x.k, "v": x.v, **changed}), {**K, **V},
    ),
}  # fmt: skip


def array_of(x, axes, kind, dtype=None):
    """An array with these axes that is valid for its kind of argument."""
    shape = tuple(LENGTHS[axis] for axis in axes)
    made = x.normal(*shape) if kind == "float" else x.xp.asarray(np.ones(shape, kind, order="F"))
    return made if dtype is None else made.astype(dtype)


def changed(function, name, change):
    """Makes a call of a function with one changed argument; the others are valid."""

    def make(x):
        call, arguments = FUNCTIONS[function]
        arrays = {other: array_of(x, *kind[:2]) for other, kind in arguments.items()}
        return call(x, arrays, {name: change(x, arrays[name])})

    return make


def longer(axis, x, array):
    """The array with one more element along an axis."""
    return x.xp.asarray(np.asfortranarray(np.concatenate([array, array.take([0], axis)], axis)))


def rows_of(function, name, axes, kind, compared=None):
    """The rows of an argument: another length of each axis, another dtype, and no array."""
    for place, axis in enumerate(axes):
        if axis in (axes if compared is None else compared):
            length = LENGTHS[axis]
            yield row(function, f"{name} with {length + 1} elements along axis {place}", changed(
                function, name, functools.partial(longer, place)), ValueError, str(length + 1), str(length))  # fmt: skip
    dtype, needed = DTYPES[kind]
    yield row(
        function, f"{name} in {dtype}", changed(function, name, lambda x, array: array.astype(dtype)), TypeError, dtype, needed
    )
    yield row(function, f"text as {name}", changed(function, name, lambda x, array: "text"), TypeError, name.removesuffix("s"))


ROWS = [
    made
    for function, (_, arguments) in FUNCTIONS.items()
    for name, kind in arguments.items()
    for made in rows_of(function, name, *kind)
]
