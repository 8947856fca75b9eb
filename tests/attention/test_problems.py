"""Attention and its gradients on every engine: random problems of each option, and problems at the limits of kernels.

Each problem is called repeatedly on the same memory, with NaN in the padding, in the gaps and in the results; see
:meth:`engines.Engine.agrees`.
"""

import itertools

import pytest
from engines import Engine, every_engine, numbers, one_in

from cupy_sdpa.check import Case
from cupy_sdpa.check.functions import DTYPES, SCORES

OPTIONS = (
    "scale", "causal", "window", "mask", "bias", "seq_lens_q", "seq_lens_kv", "packed", "alibi_slopes", "softcap", "sinks",
    "dropout", "stats", "deterministic", "return_dbias", "return_dsinks", "preallocated", "max_workspace",
)  # fmt: skip
SINKS = {"sinks": "normal"}
#: An array with a gradient together with every other option, including rows that it masks.
BIAS = {"bias": ("kq11", "float16", "inf_rows"), "return_dbias": True}


@every_engine
@pytest.mark.parametrize("number", numbers(8, quick=1, sweep=4))
@pytest.mark.parametrize("name", OPTIONS)
def test_random_problems(name, number, engine):
    """A random problem of every option, alone and with up to three others, has the results of the definition."""
    engine.agrees(engine.draw({name}, number), refused=True)


def packed(kind_q="some_zero", kind_kv="random", before=0, after=0, excess=0, dtype="int32", **options):
    """The options of packed sequences."""
    return {"options": {"packed": (kind_q, kind_kv, before, after, excess, dtype), **options}}


def agrees(engine, case):
    """Run a problem that cuDNN may not support. numpy reads the offsets, and raises for sequences beyond the maximum length."""
    if case.packed and not engine.on_cudnn:
        case = case.with_(options={**case.options, "packed": tuple(case.packed._replace(excess=0))})
    engine.agrees(case, refused=True)


#: Problems as users have them; the default is two query heads per key/value head, head dim 64 and 96 queries and keys.
COMMON = {
    "plain": {},
    "causal, grouped heads, head dim 128": {"d": 128, "dv": 128, "hq": 8, "options": {"causal": "top_left"}},
    "one head of keys": {"hq": 8, "hkv": 1},
    "head dims of MLA": {"d": 192, "dv": 128, "sq": 130, "skv": 130, "options": {"causal": "top_left"}},
    "head dim 256": {"d": 256, "dv": 256, "b": 1, "options": {"causal": "top_left"}},
    "odd head dims": {"d": 72, "dv": 40, "sq": 65, "skv": 127, "options": {"causal": "top_left"}},
    "head dim 8": {"d": 8, "dv": 8, "sq": 40, "skv": 40},
    "few queries": {"sq": 64, "skv": 333},
    "more queries than keys": {"sq": 300, "skv": 100, "options": {"causal": "top_left"}},
    "lengths beside a tile": {"sq": 127, "skv": 129},
    "71 heads": {"hq": 71, "hkv": 1, "sq": 33, "skv": 33, "b": 1},
    "slopes of keys on both sides, from the bottom right": {
        "sq": 5, "skv": 90, "options": {"alibi_slopes": "random", "window": (None, None, "bottom_right")}
    },
    "one query": {"d": 128, "dv": 128, "hq": 8, "sq": 1, "skv": 500, "options": {"causal": "bottom_right"}},
    "one key": {"sq": 5, "skv": 1},
    "one of everything": {"hq": 1, "hkv": 1, "sq": 1, "skv": 1, "b": 1},
    "a negative scale of odd lengths": {"sq": 100, "skv": 130, "options": {"scale": -0.1, "causal": "top_left"}},
    "a negative scale and many queries": {"d": 128, "dv": 128, "sq": 300, "skv": 300, "b": 1, "options": {"scale": -0.1}},
    "the scale 0": {"options": {"scale": 0.0, "causal": "top_left"}},
    "bottom right, fewer keys": {"sq": 150, "skv": 100, "options": {"causal": "bottom_right"}},
    "a window of one key": {"options": {"window": (0, 0)}},
    "a window after the diagonal": {"sq": 90, "skv": 120, "options": {"window": (None, 11)}},
    "a window beyond the keys": {"sq": 200, "skv": 64, "options": {"window": (16, None), "causal": "top_left"}},
    "a window from the bottom right": {"sq": 100, "skv": 180, "options": {"window": (40, 10, "bottom_right")}},
    "lengths": {"b": 3, "options": {"seq_lens_q": "some_zero", "seq_lens_kv": "random", "causal": "bottom_right"}},
    "lengths of a batch of one": {"b": 1, "options": {"seq_lens_q": "random", "seq_lens_kv": "random", "causal": "top_left"}},
    "lengths, slopes and a window": {
        "b": 3, "options": {"seq_lens_q": "random", "seq_lens_kv": "random", "alibi_slopes": "usual", "window": (20, 5, "bottom_right")},
    },
    "slopes from the bottom right": {"sq": 100, "skv": 140, "options": {"alibi_slopes": "usual", "causal": "bottom_right"}},
    "slopes, softcap and a bias": {"options": {"alibi_slopes": "usual", "softcap": 2.0, "bias": ("kqhb", "bfloat16", "normal")}},
    "a mask, a bias and causal": {"options": {"mask": ("k11b", "rows"), "causal": "top_left", **BIAS}},
    "sinks with fewer keys": {"sq": 150, "skv": 90, "options": {**SINKS, "causal": "bottom_right", "return_dsinks": True}},
    "sinks of entries without keys": {"b": 3, "options": {**SINKS, "seq_lens_q": "full", "seq_lens_kv": "some_zero"}},
    "sinks of one query of each entry": {"sq": 1, "b": 3, "options": {**SINKS, "seq_lens_q": "some_zero", "seq_lens_kv": "some_zero"}},
    "sinks without keys": {"skv": 0, "options": {**SINKS, "stats": "max_sumexp"}, "backward": False},
    "gradients of sinks without keys": {"skv": 0, "options": {**SINKS, "seq_lens_q": "random", "return_dsinks": True}},
    "gradients without queries": {"sq": 0},
    "maximum and sum": {"backward": False, "options": {"stats": "max_sumexp", "causal": "top_left", "softcap": 3.0}},
    "dropout, lengths and sinks": {"options": {"dropout": (0.25, "seed", 7, 3), "seq_lens_kv": "random", **SINKS}},
    "dropout of an array, deterministic": {"options": {"dropout": (0.5, "array", 7, 0), "deterministic": True}},
    "arrays of a fused projection": {"hq": 4, "hkv": 4, "layouts": dict.fromkeys("qkv", "qkv")},
    "every second head and position": {"layouts": {"q": "dhsb*h", "k": "dhsb*s", "v": "dshb", "dout": "dhsb*b"}},
    "packed": packed(),
    "packed from the bottom right": packed(causal="bottom_right", alibi_slopes="usual", softcap=2.0),
    "packed, a first offset and a tail": packed(before=16, after=29, dtype="int64", window=(30, 10, "bottom_right")),
    "packed beyond the maximum": packed("full", "full", 4, 7, 3),
    "packed, one sequence": {"b": 1, **packed("random", "random")},
    "packed with sinks and a bias": packed(**SINKS, bias=("kqh1", "float32", "normal")),
    "packed without keys": packed("random", "zero", 2, 3, **SINKS),
    "packed with dropout": packed("random", "random", dropout=(0.25, "seed", 3, 0)),
    "packed, deterministic, strided": {"layouts": {"q": "dhs*h", "dq": "dhs*s"}, **packed(preallocated=True, deterministic=True)},
}  # fmt: skip


@pytest.mark.parametrize("name", one_in(9, COMMON))
def test_common_problems(name, engine):
    """Both passes of typical shapes and options."""
    sizes = {"d": 64, "dv": 64, "hq": 4, "hkv": 2, "sq": 96, "skv": 96, "b": 2, "backward": True, **COMMON[name]}
    if engine.name == "cupy":
        sizes["dtype"] = ("float16", "bfloat16")[len(name) % 2]
    agrees(engine, engine.case(**sizes))


AXES = ["".join(axes) for axes in itertools.product("k1", "q1", "h1", "b1")]


@pytest.mark.parametrize("axes", one_in(4, AXES))
@pytest.mark.parametrize("name", ["bias", "mask"])
def test_broadcast_axes(name, axes, engine):
    """A bias and a mask of every broadcast shape, and the gradient of the bias."""
    options = {"mask": (axes, "random")} if name == "mask" else {"bias": (axes, "float16", "normal"), "return_dbias": True}
    engine.agrees(engine.case(d=16, dv=16, sq=20, skv=24, hq=4, hkv=2, b=3, backward=True, options=options))


@pytest.mark.parametrize("name", one_in(5, sorted(SCORES)))
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_the_gradient_of_a_bias_beside_a_function(name, softcap, engine):
    """And the gradients of the arrays that the function reads: each is a sum in the same launch, or in its own launch."""
    function = SCORES[name]
    dtype = DTYPES[function.kind][0] if function.tensors else ""
    options = {"bias": ("kqhb", "float16", "normal"), "return_dbias": True, "score_mod": (name, dtype)}
    if function.tensors and "float" in dtype:
        options["return_dtensors"] = True
    case = engine.case(d=64, dv=64, sq=40, skv=64, hq=2, hkv=1, b=2, backward=True, options=options)
    agrees(engine, case if softcap is None else case.with_(options={**options, "softcap": softcap}))


@pytest.mark.parametrize("keys", [1, 24])
@pytest.mark.parametrize(
    ("axes", "dtype"), [("1qhb", "float16"), ("1q11", "float32"), ("11h1", "bfloat16"), ("kq11", "float16")]
)
def test_rows_that_attend_only_to_their_sink(axes, dtype, keys, engine):
    """A bias of -inf masks whole rows: output 0, the sink as log-sum-exp, and gradients of 0."""
    options = {"bias": (axes, dtype, "inf_rows"), "return_dsinks": True, **SINKS}
    engine.agrees(engine.case(d=16, dv=16, sq=20, skv=keys, hq=4, hkv=2, b=3, backward=True, options=options))


#: Problems with results that were wrong once; random problems have found them.
FOUND = {
    "softcap and a bias of the smallest number": Case(
        sq=1, backward=True, options={"bias": ("1111", "float16", "min_rows"), "softcap": 2.0}, seed=2069
    ),
    "softcap and a bias that masks a row": Case(
        d=96, dv=96, hq=3, hkv=3, sq=1, skv=4, b=3, backward=True, seed=4210,
        options={"bias": ("1111", "float16", "min"), "softcap": 50.0, "return_dbias": True},
    ),
    "packed sequences and a strided dq": Case(
        d=16, sq=9, backward=True, layouts={"dq": "dhs*s"}, seed=2119,
        options={"packed": ("random", "random", 0, 0, 3, "int32"), "preallocated": True},
    ),
    "packed sequences and narrow values": Case(
        d=256, dv=72, sq=1, skv=1, backward=True, seed=3999, options={"packed": ("full", "full", 0, 0, 0, "int32")}
    ),
    "a deterministic query and a mask of heads and keys": Case(
        hq=2, sq=1, skv=1, seed=26, options={"mask_mod": ("checkered", ""), "deterministic": True}
    ),
    "a bias of the batch and one key": Case(d=16, dv=16, hq=4, hkv=2, sq=20, skv=1, b=3, options={"bias": ("111b", "float16", "normal")}),
    "a block mask of values without a head dim": Case(
        d=1, dv=0, hq=2, sq=1, skv=1, options={"block_mask": ("prefix", "kqh1")}, seed=78
    ),
    "one query of each packed sequence, and none": Case(
        d=64, dv=64, hq=8, sq=1, skv=48, b=2, backward=True, layouts={"dout": "dsh-s+h"}, seed=6,
        options={
            "packed": ("some_zero", "random", 0, 5, 0, "int64"), "sinks": "normal", "stats": "max_sumexp", "return_dsinks": True
        },
    ),
    "one key of each sequence in FP8, and none": Case(
        d=32, dv=24, hq=16, hkv=2, sq=5, skv=1, b=3, seed=5,
        options={"causal": "top_left", "seq_lens_q": "one", "seq_lens_kv": "random", "fp8": "float8_e4m3fn"},
    ),
    "a choice by positions beyond a tile": Case(
        d=64, dv=64, sq=200, skv=333, backward=True, options={"score_mod": ("later", "")}
    ),
    "padded values without a head dim": Case(dv=0, sq=1, backward=True, options={"seq_lens_q": "zero"}, seed=50),
    "paged values without a head dim": Case(
        d=8, dv=0, skv=16, options={"paged": (8, "heads", "random", 0, "large", False, False)}
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FOUND)
def test_problems_that_were_wrong(name, engine):
    """The results are right, or cuDNN does not support the problem."""
    agrees(engine, FOUND[name].with_(engine="gpu" if engine.on_cudnn else "cpu", dtype=str(engine.dtype)))


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"causal": "top_left"}], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sequences(dtype, options, cupy):
    """Many tiles in both directions: 2000 queries and 3000 keys."""
    engine = Engine("cupy", cupy)
    engine.agrees(engine.case(dtype=dtype, d=128, dv=128, hq=2, sq=2000, skv=3000, backward=True, options=options))


@every_engine
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("number", numbers(12, quick=2, sweep=6))
def test_sequences_alone(number, backward, engine):
    """The bits of a sequence do not depend on the rest of the batch, where the report on the call states it."""
    names = ["seq_lens_kv", "bias", "mask", "causal", "sinks", "softcap", "alibi_slopes", "window"]
    wanted = {names[number % len(names)], names[(3 * number + 1) % len(names)]}
    case = engine.draw(wanted, number, most=0)
    options = case.options | {"deterministic": True}
    engine.agrees(case.with_(b=3, layouts={}, backward=backward, options=options), refused=True)
