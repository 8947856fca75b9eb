"""The functions of the zoo as named problems, with the arrays that they capture."""

import contextlib
import inspect
import math
from dataclasses import dataclass, field

import numpy as np
from planner import library_version, plan_problem
from tolerance import FACTOR, assert_close

from cupy_sdpa import alibi_slopes, attention, attention_backward, reference, zoo
from cupy_sdpa.core.cudnn.library import library
from cupy_sdpa.core.cudnn_engine.plan import PlanInfo
from cupy_sdpa.core.graph.emit import Emitter
from cupy_sdpa.core.graph.nodes import GraphBuilder, Tensor, row_major
from cupy_sdpa.core.numpy_engine.interpreter import evaluate
from cupy_sdpa.core.problem.subproblems import subproblems
from cupy_sdpa.core.score_fn.expression import AXES, Writer
from cupy_sdpa.core.score_fn.tracer import trace
from cupy_sdpa.core.support import gpus
from cupy_sdpa.core.support.why_not import why_not

#: The sizes of the problems: (D, Hq, Hkv, Sq, Skv, B).
D, HQ, HKV, S, B = 32, 4, 2, 70, 2


@dataclass(frozen=True)
class Functions:
    """A score function, a mask function, or both; ``tensors`` creates the captured arrays from (rng, Hq, Sq, Skv, B)."""

    name: str
    score_mod: object = None
    mask_mod: object = None
    tensors: object = field(default=lambda rng, h, q, kv, b: {})
    slope: object = None  # its derivative, where finite differences are too inaccurate

    def __str__(self):
        return self.name

    def options(self, xp=np, h=HQ, q=S, kv=S, b=B):
        """The options of a call."""
        arrays = self.tensors(np.random.default_rng([1, *self.name.encode()]), h, q, kv, b)
        given = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        given["tensors"] = {name: xp.asarray(array) for name, array in arrays.items()}
        return {name: value for name, value in given.items() if value}


def _documents(rng, length, batch=None):
    lengths = (length,) if batch is None else (batch, length)
    return np.sort(rng.integers(0, 4, lengths), axis=-1).astype(np.int32)


def _tree(rng, q, kv, b):
    """The descendants of a key are a range of numbers; key 0 has all of them."""
    first = np.sort(rng.integers(0, q, (b, kv)), axis=1) * (np.arange(kv) > 0)
    last = np.where(np.arange(kv) > 0, first + rng.integers(0, q, (b, kv)), q)
    numbers = {"tree_number": rng.permuted(np.tile(np.arange(q), (b, 1)), axis=1), "tree_first": first, "tree_last": last}
    return {name: x.astype(np.int32) for name, x in numbers.items()}


def _float(array):
    return np.asarray(array, np.float32)


ZOO = [
    Functions("softcap", zoo.softcap(2.0)),
    Functions("alibi", zoo.alibi, None, lambda rng, h, q, kv, b: {"slopes": alibi_slopes(h)}),
    Functions("alibi_causal", zoo.alibi, zoo.causal, lambda rng, h, q, kv, b: {"slopes": alibi_slopes(h)}),
    Functions("relative_position", zoo.relative_position),
    Functions("temperature", zoo.temperature, None, lambda rng, h, q, kv, b: {"temperature": _float(rng.random(h) + 0.5)}),
    Functions("length_scaled", zoo.length_scaled(0.4)),
    Functions("causal", None, zoo.causal),
    Functions("sliding_window", None, zoo.sliding_window(15)),
    Functions("nearby", None, zoo.nearby(9)),
    Functions("prefix_lm", None, zoo.prefix_lm, lambda rng, h, q, kv, b: {"prefix": rng.integers(0, kv, b).astype(np.int32)}),
    Functions("document", None, zoo.document, lambda rng, h, q, kv, b: {"document_id": _documents(rng, q, b)}),
    Functions("causal_document", None, zoo.causal_document, lambda rng, h, q, kv, b: {"document_id": _documents(rng, q)}),
    Functions(
        "document_softcap", zoo.softcap(2.0), zoo.document, lambda rng, h, q, kv, b: {"document_id": _documents(rng, q, b)}
    ),
    Functions("dilated", None, zoo.dilated(30, 3)),
    Functions("chunked", None, zoo.chunked(16)),
    Functions("fixed", None, zoo.fixed(8, 2)),
    Functions("strided", None, zoo.strided(9)),
    Functions("natten", None, zoo.natten(7, 10, 3, 2)),
    Functions("image_window", None, zoo.image_window(10, 2)),
    Functions("with_global", None, zoo.with_global(5, 3)),
    Functions("streaming", None, zoo.streaming(12, 4)),
    Functions("permuted", None, zoo.permuted, lambda rng, h, q, kv, b: {"order": rng.permutation(q).astype(np.int32)}),
    Functions("valid_keys", None, zoo.valid_keys, lambda rng, h, q, kv, b: {"valid": rng.random((b, kv)) < 0.7}),
    Functions("images", None, zoo.images, lambda rng, h, q, kv, b: {"image": _documents(rng, q, b) - 1}),
    Functions("tree", None, zoo.tree, lambda rng, h, q, kv, b: _tree(rng, q, kv, b)),
    Functions("dilated_length_scaled", zoo.length_scaled(-0.2), zoo.dilated(90, 2)),
]


def _of(function):
    return lambda score, b, h, q_idx, kv_idx: function(score)


def _erf(score):
    if isinstance(score, np.ndarray):
        return np.vectorize(math.erf)(score)
    return score.__array_ufunc__(_Named("erf"), "__call__", score)  # calls it like SciPy's erf


class _Named:
    def __init__(self, name):
        self.__name__ = name


#: Every operation on a score whose derivative is compared.
OPERATIONS = [
    Functions(name, _of(function))
    for name, function in {
        "sin": np.sin, "cos": lambda s: np.cos(2 * s), "tan": lambda s: np.tan(0.1 * s), "exp": lambda s: np.exp(0.5 * s),
        "exp2": lambda s: np.exp2(0.5 * s), "expm1": lambda s: np.expm1(0.3 * s), "log": lambda s: np.log(s * s + 1),
        "log1p": lambda s: np.log1p(abs(s)), "log2": lambda s: np.log2(s * s + 1), "log10": lambda s: np.log10(s * s + 1),
        "sqrt": lambda s: np.sqrt(s * s + 0.5), "rsqrt": lambda s: (s * s + 0.5) ** -0.5,
        "reciprocal": lambda s: np.reciprocal(s * s + 1), "inverse": lambda s: 2.0 / (s * s + 1),
        "power": lambda s: (s * s + 1) ** 1.3,
        "base": lambda s: 1.5**s, "cube": lambda s: 0.1 * s**3, "maximum": lambda s: np.maximum(s, 0.2),
        "minimum": lambda s: np.minimum(0.2, s),
        "both": lambda s: np.maximum(s, -0.5 * s), "sign": lambda s: s + np.sign(s), "floor": lambda s: s + np.floor(s),
        "ceil": lambda s: s - np.ceil(s), "round": lambda s: s + np.round(s), "trunc": lambda s: s - np.trunc(s),
        "arctan": lambda s: np.arctan(2 * s), "remainder": lambda s: s % 1.5, "divide": lambda s: s // 0.75 + s,
        "where": lambda s: np.where(s > 0, s, 0.3 * s),
        "either": lambda s: np.where((s > 1) | (s < -1), 2 * s, s),
        "neither": lambda s: np.where(~((s > 1) ^ (s < 0.5)), 2 * s, s),
        "sigmoid": lambda s: 3 / (1 + np.exp(-s)), "gelu": lambda s: 0.5 * s * (1 + _erf(s / 2**0.5)),
        "softplus": lambda s: np.logaddexp(s, 0.5),
        "sinh": lambda s: np.sinh(0.4 * s), "cosh": lambda s: np.cosh(0.4 * s), "hypot": lambda s: np.hypot(s, 1.5),
        "hypot_of": lambda s: np.hypot(1.5, s), "modulus": lambda s: s + 0.05 * (5.0 % (s * s + 1)), "negative": lambda s: -s,
        "lesser": lambda s: np.minimum(s, 0.5 * s),
        "power_of": lambda s: (s * s + 1) ** (0.3 * s), "logaddexp": lambda s: np.logaddexp(0.5, s),
        "squares": lambda s: np.where(s > 0, s * s, 0.0),
        "clipped": lambda s: np.clip(s, -0.7, 1.1), "softsign": lambda s: s / (1 + abs(s)), "quadratic": lambda s: s + 0.3 * s * s,
        "bits": lambda s: s * (s > 0) + (s > 1), "constant": lambda s: 0.5, "itself": lambda s: s, "less": lambda s: 1 - s,
    }.items()
]  # fmt: skip

#: A function whose derivative is infinite at 0, the value of the scores in the padding.
STEEP = Functions("steep", _of(lambda s: abs(s) ** 0.5), slope=lambda s: np.sign(s) / (2 * np.sqrt(np.abs(s))))
OPERATIONS.append(STEEP)


def _table(*axes):
    """Return a function that creates the array ``x`` with some of the axes b, h, q, k."""

    def tensors(rng, h, q, kv, b):
        sizes = {"b": b, "h": h, "q": q, "k": kv, "2": 2}
        return {"x": _float(0.5 + rng.random([sizes[axis] for axis in axes]))}

    return tensors


#: Functions with captured arrays whose gradients are compared: the zoo's functions, and more ways to index an array.
LEARNED = [functions for functions in ZOO if functions.name in {"alibi_causal", "temperature"}]
LEARNED += [
    Functions(name, function, None, _table(*axes))
    for name, axes, function in (
        ("added_before", "hqk", lambda s, b, h, i, j, x: 3 * np.tanh((s + x[h, i, j]) / 3)),
        ("added_behind", "bhqk", lambda s, b, h, i, j, x: 3 * np.tanh(s / 3) + x[b, h, i, j]),
        ("bias", "hqk", lambda s, b, h, i, j, x: s + x[h, i, j]),
        ("slope", "h", lambda s, b, h, i, j, x: s + x[h] * (j - i)),
        ("key_bias", "bk", lambda s, b, h, i, j, x: s + x[b, j]),
        ("logarithmic", "h2", lambda s, b, h, i, j, x: s - x[h, 0] * np.log(1 + x[h, 1] * abs(i - j))),
        ("gated", "bhq", lambda s, b, h, i, j, x: s * x[b, h, i]),
        ("pairs", "bq", lambda s, b, h, i, j, x: s + x[b, i] * x[b, j]),
        ("places", "2", lambda s, b, h, i, j, x: s * x[0] + x[1] * abs(i - j) * 0.05),
        ("number", "", lambda s, b, h, i, j, x: s * x),
        ("power", "h", lambda s, b, h, i, j, x: (s * s + 1) ** x[h]),
        ("chosen", "hk", lambda s, b, h, i, j, x: np.where(s > 0, s * x[h, j], s - x[h, j])),
    )
]  # fmt: skip


def _whole(*axes):
    """Return a function that creates int32 arrays x and y along an axis: positive and negative, none 0, products below 2**31."""

    def tensors(rng, h, q, kv, b):
        sizes = {"b": b, "h": h, "q": q, "k": kv}
        shape = [sizes[axis] for axis in axes]
        x, y = (rng.integers(1, 46340, shape) * rng.choice([-1, 1], shape) for _ in range(2))
        return {"x": x.astype(np.int32), "y": y.astype(np.int32)}

    return tensors


def _large(rng, h, q, kv, b):
    """Consecutive integers that float32 cannot distinguish."""
    return {"x": (2**30 + rng.permutation(q)).astype(np.int32), "y": (2**30 + rng.permutation(kv)).astype(np.int32)}


def _masks(**masks):
    return [Functions(name, None, mask) for name, mask in masks.items()]


#: Integer arithmetic; the expected values are numpy's int64 arithmetic on whole arrays. No value exceeds 32 bits, for up to 200
#: queries and keys; most exceed the 24 bits that float32 represents.
INTEGERS = [
    *_masks(
        remainder=lambda b, h, i, j: (i * 10_000_019 + j) % 3 == 0,
        quotient=lambda b, h, i, j: (i * 10_000_019 + j) // 9973 % 2 == 0,
        negative_remainder=lambda b, h, i, j: (j - i) * 10_000_019 % 7 < 4,
        negative_quotient=lambda b, h, i, j: (j - i) * 10_000_019 // 7 % 2 == 0,
        remainder_of_negative=lambda b, h, i, j: (i * 10_000_019 - j) % -7 < -3,
        quotient_by_negative=lambda b, h, i, j: (i * 10_000_019 - j) // -7 % 2 == 0,
        constant_first=lambda b, h, i, j: (2_000_000_011 // (i + 1) + 2_000_000_033 % (j + 1)) % 2 == 0,
        constant_large=lambda b, h, i, j: i + 2_000_000_000 < j + 2_000_000_001,
        condition=lambda b, h, i, j: ((i > j) * (i + 16_777_216) + (i <= j) * 16_777_217) % 2 == 0,
        choice=lambda b, h, i, j: np.where(i > j, i + 16_777_216, 16_777_217) % 2 == 0,
        sign=lambda b, h, i, j: np.sign(i - j) * (16_777_216 + j) % 4 < 2,
        square=lambda b, h, i, j: (i * 200 - j) ** 2 % 5 < 3,
        unary=lambda b, h, i, j: abs(j * 10_000_019 - i) % 2 == -(i * 10_000_019) % 2,
        floored=lambda b, h, i, j: np.floor(i * 10_000_019) % 2 == np.ceil(j) % 2,
        bounds=lambda b, h, i, j: np.clip(16_777_216 + i - j, 16_777_216, 16_777_219) % 2 == 0,
    ),
    *(
        Functions(name, None, mask, tensors)
        for name, tensors, mask in (
            ("arrays_quotient", _whole("b", "q"), lambda b, h, i, j, x, y: x[b, i] * 46_339 // y[b, j] % 2 == 0),
            ("arrays_remainder", _whole("h", "k"), lambda b, h, i, j, x, y: x[h, i] * 46_339 % y[h, j] % 3 > 0),
            ("arrays_product", _whole("q"), lambda b, h, i, j, x, y: x[i] * y[j] % 1000 < 400),
            ("arrays_equal", _large, lambda b, h, i, j, x, y: x[i] >= y[j]),
            ("arrays_extremes", _large, lambda b, h, i, j, x, y: np.minimum(x[i], y[j]) + i >= np.maximum(x[i], y[j])),
            ("arrays_choice", _large, lambda b, h, i, j, x, y: np.where(i > j, x[i], y[j]) % 2 == 0),
            ("arrays_unary", _large, lambda b, h, i, j, x, y: abs(-x[i]) - y[j] > -3),
        )
    ),
    Functions("score", lambda s, b, h, i, j: s + (i * 10_000_019 + j) % 7 * 0.25),
    Functions("score_chosen", lambda s, b, h, i, j: np.where((i * 10_000_019 - j) % 2 == 0, s, 0.5 * s)),
]


def drawn(number):
    """A random score function. Its values are finite and moderate wherever the score is."""
    rng = np.random.default_rng(number)
    expression = _expression(lambda choices: choices[rng.integers(len(choices))], 3)

    def score_mod(score, b, h, q_idx, kv_idx, gain, weight, table):
        places = {"s": score, "gain": gain[h], "weight": weight[b, kv_idx], "table": table[h, q_idx, kv_idx]}
        places |= {"i": q_idx / 16.0, "j": kv_idx / 16.0, "distance": (q_idx - kv_idx) * 0.1}
        return expression(places)

    def tensors(rng, h, q, kv, b):
        return {"gain": _float(rng.random(h)), "weight": _float(rng.random((b, kv))), "table": _float(rng.random((h, q, kv)))}

    return Functions("drawn", score_mod, None, tensors)


_ONE = {
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "rounded": lambda x: np.sqrt(1 + x * x),
    "log": lambda x: np.log(1 + x * x),
    "bell": lambda x: np.exp(-x * x),
    "abs": abs,
    "negative": lambda x: -x,
    "sign": lambda x: x / (1 + abs(x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "floor": np.floor,
    "clip": lambda x: np.clip(x, -0.7, 1.1),
    "softplus": lambda x: np.logaddexp(x, 0.0),
}
_TWO = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * np.tanh(y), "div": lambda x,
    y: x / (1 + y * y),
    "max": np.maximum, "min": np.minimum, "power": lambda x, y: (1 + abs(x)) ** np.tanh(y), "hypot": lambda x,
    y: np.sqrt(x * x + y * y + 0.1),
}  # fmt: skip


def _expression(pick, depth):
    if depth == 0 or pick((False, False, False, True)):
        name = pick(("s", "s", "s", "s", "gain", "weight", "table", "i", "j", "distance", 0.3, 1.7, 2))
        return lambda places: places.get(name, name)
    parts = [_expression(pick, depth - 1) for _ in range(4)]
    kind = pick(("two", "two", "one", "where"))
    if kind == "one":
        function = _ONE[pick(tuple(_ONE))]
        return lambda places: function(_value(places, parts[0]))
    if kind == "two":
        both = _TWO[pick(tuple(_TWO))]
        return lambda places: both(_value(places, parts[0]), parts[1](places))
    joined = pick(("less", "and", "or", "not"))

    def condition(places):
        one = _value(places, parts[2]) > parts[3](places)
        other = places["i"] >= places["j"]
        return {"less": one, "and": one & other, "or": one | other, "not": ~one}[joined]

    return lambda places: np.where(condition(places), parts[0](places), parts[1](places))


def _value(places, part):
    """The value of a part; a constant, which is not traced, plus 0 times the score."""
    x = part(places)
    return x + 0 * places["s"] if isinstance(x, (int, float)) else x


def places(h, q, kv, b):
    """``b, h, q_idx, kv_idx`` as arrays that broadcast to (B, Hq, Sq, Skv)."""
    return np.ix_(np.arange(b), np.arange(h), np.arange(q), np.arange(kv))


def dense_scores(q, k, scale, options):
    """A function from scaled scores (B, Hq, Sq, Skv) to modified scores, the mask, and the scaled scores, in float64.

    The score function and the mask function of the options are called with whole arrays.
    """
    (_, h, sq, b), (_, hkv, skv, _) = q.shape, k.shape
    k = np.repeat(k, h // hkv, axis=1)
    scaled = scale * np.einsum("dhqb,dhkb->bhqk", q.astype(np.float64), k.astype(np.float64))
    where, tensors = places(h, sq, skv, b), options.get("tensors", {})
    tensors = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in tensors.items()}

    def called(function, *arguments):
        names = inspect.signature(function).parameters
        return function(*arguments, *where, **{name: tensors[name] for name in tensors if name in names})

    def modified(scores):
        score_mod = options.get("score_mod")
        return scores if score_mod is None else np.broadcast_to(called(score_mod, scores), scores.shape)

    mask_mod = options.get("mask_mod")
    seen = np.ones(scaled.shape, bool) if mask_mod is None else np.broadcast_to(called(mask_mod), scaled.shape)
    return modified, seen, scaled


def dense_attention(q, k, v, dout, scale, options, slope=None, step=1e-6):
    """(out, stats, dq, dk, dv) in float64, from the whole matrix of scores.

    The derivative of the score function is ``slope``, or central differences.
    """
    modified, seen, scaled = dense_scores(q, k, scale, options)
    with np.errstate(all="ignore"):
        slope = slope(scaled) if slope else (modified(scaled + step) - modified(scaled - step)) / (2 * step)
        e, _, top, total = reference.exponentials(
            np.where(seen, modified(scaled), -np.inf), np.full(scaled.shape[:-1], -np.inf)
        )
        p, stats = e / np.where(total == 0, 1, total)[..., None], top + np.log(total)
    group, dout = q.shape[1] // k.shape[1], dout.transpose(3, 1, 2, 0).astype(np.float64)
    q, k, v = (np.repeat(x, n, axis=1).transpose(3, 1, 2, 0).astype(np.float64) for x, n in ((q, 1), (k, group), (v, group)))
    slope = np.where((p > 0) & np.isfinite(slope), slope, 0)
    dq, dk, dv, *_ = reference.gradients(p, dout, q, k, v, scale=scale, slope=slope)
    out, dq, dk, dv = (x.transpose(3, 1, 2, 0) for x in (reference.output(p, v), dq, dk, dv))
    dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    return out, stats.transpose(2, 1, 0), dq, dk, dv


def arrays(dtype="float64", s=S, d=D, seed=3):
    """Random q, k, v and dout."""
    rng = np.random.default_rng(seed)
    shapes = ((d, HQ, s, B), (d, HKV, s, B), (d, HKV, s, B), (d, HQ, s, B))
    return [np.asfortranarray(rng.standard_normal(shape).astype(dtype)) for shape in shapes]


def agrees(functions, s=S, d=D, softcap=None, put=np.asarray, dtype="float64", tolerance=1e-9):
    """Assert that both passes of a function agree with dense arrays and finite differences.

    The softcap is applied after the function. ``put`` makes arrays of an engine. The gradients are compared with 10 000 times
    1e-9, or with the tolerance of the output.
    """
    host = arrays(dtype, s, d)
    options = functions.options(q=s, kv=s)
    dense = options | {"score_mod": _capped(functions.score_mod, softcap)} if softcap else options
    wanted = dense_attention(*host, d**-0.5, dense, functions.slope)
    q, k, v, dout = map(put, host)
    options = functions.options(Put(put), q=s, kv=s) | {"softcap": softcap}
    found = attention(q, k, v, return_stats=True, **options)
    found += tuple(attention_backward(dout, q, k, v, *found, **options))
    for number, (a, b) in enumerate(zip(map(_exact, found), wanted, strict=True)):
        rough = max(tolerance, (1e-6 if number == 1 else 1e-4) * (number > 0))
        np.testing.assert_allclose(
            a, b, rtol=rough, atol=max(tolerance, 0.1 * rough) * max(np.abs(b[np.isfinite(b)]).max(initial=0), 1e-3)
        )
    hidden = np.isneginf(wanted[1])
    assert not any(_exact(x).swapaxes(1, 2)[:, hidden].any() for x in (found[0], found[2])), "fully masked rows are not 0"


def _exact(x):
    return np.asarray(x.get() if hasattr(x, "get") else x).astype(np.float64)


class Put:
    """An array module of which only ``asarray`` is used."""

    def __init__(self, put):
        self.asarray = put


def _capped(score_mod, softcap):
    """A score function and the softcap after it; masked scores stay masked."""

    def capped(*arguments, **tensors):
        score = np.asarray(score_mod(*arguments, **tensors), np.float64)
        finite = np.where(np.isneginf(score), 0.0, score)
        return np.where(np.isneginf(score), -np.inf, softcap * np.tanh(finite / softcap))

    capped.__signature__ = inspect.signature(score_mod)
    return capped


def evaluated(function, *x, dtype="float64", derivative=False):
    """Evaluate the expression of a function of one or two scores, or its derivative with respect to the first.

    The function takes one or two traced values, the second one of which is an element of a captured array.
    """
    shape = (1, 1, 1, len(x[0]))
    places = dict(zip(AXES, shape, strict=True))
    given = {"y": np.asarray(x[1], dtype)} if len(x) == 2 else {}
    if given:
        done = trace(lambda s, b, h, i, j, y: function(s, y[j]), None, given, places)
    else:
        done = trace(lambda s, b, h, i, j: function(s), None, {}, places)

    def tensor(name, role):
        return Tensor(name, shape, dtype, role, row_major(shape), (0, 1, 2, 3))

    g = GraphBuilder(dtype)
    score = g.pointwise("s", "identity", tensor("x", "input"), out="s")
    emitter = Emitter(g, Writer(done.expression.steps), score, {name: tensor("y", "input") for name in done.captured})
    root = emitter.derivative(done.expression.score) if derivative else done.expression.score
    g.pointwise("out", "identity", emitter(root), out=tensor("out", "output"))
    arrays = {"x": np.asarray(x[0], dtype).reshape(shape), "out": np.empty(shape, dtype)}
    arrays |= {name: array.reshape(shape) for name, array in given.items()}
    evaluate(g.graph(), arrays, done.numbers)
    return arrays["out"].ravel()


def poisoning(cupy):
    """Allocate memory full of NaN, so that reads of uninitialized memory show."""
    pool = cupy.cuda.MemoryPool()

    def allocate(size):
        memory = pool.malloc(size)
        memory.memset_async(255, size, cupy.cuda.get_current_stream())  # in order with the work that writes to it
        return memory

    return cupy.cuda.using_allocator(allocate)


def right_on_the_gpu(cupy, dtype, known, there, **asked):
    """Compare both passes, and additional gradients, with numpy in float64 and in the dtype.

    ``known`` and ``there`` are the options with numpy and CuPy arrays; ``asked`` are additional gradients.
    """
    rounded = arrays(dtype, 200, 64, seed=7)

    def computed(q, k, v, dout, options):
        out, stats = attention(q, k, v, return_stats=True, **options)
        *gradients, last = attention_backward(dout, q, k, v, out, stats, **options, **asked)
        return [out, *gradients, *(last.values() if isinstance(last, dict) else [last])]

    double = [x.astype(np.float64) for x in rounded]
    exact = computed(*double, known)
    moved = double[0].copy(order="K")
    moved *= 1 + 2.0**-21 * np.random.default_rng(8).uniform(-1, 1, moved.shape)
    near = computed(moved, *double[1:], known)  # the scores are sums in float32
    naive = computed(*rounded, known)
    with poisoning(cupy):
        got = computed(*map(cupy.asarray, rounded), there)
    for number, (a, truth, other, close) in enumerate(zip(got, exact, naive, near, strict=True)):
        # dS is rounded before the products and sums
        floor = np.sqrt(200) * 2.0**-8 * np.abs(truth).max() * (0.1 if number < 4 else 1.0)
        floor += FACTOR * np.abs(close - truth).max()
        assert_close(cupy.asnumpy(a), truth, other, floor)


def has_plan(call, asked, gpu, allowed=("query-numbers",)):
    """Assert that a problem has a plan on a GPU, which is returned, or cannot run for a reason that is allowed (None: any).

    ``call`` plans in a child process.
    """
    reasons = {reason.rule for reason in why_not(asked, call(library_version), gpus.capability_of(gpu))}
    assert allowed is None or reasons <= {*allowed}
    plan = call(plan_problem, asked, gpu)
    assert isinstance(plan, PlanInfo) == (not reasons), plan
    return None if reasons else plan


def parts_have_plans(call, asked, gpu):
    """Assert :func:`has_plan` of every launch of a problem."""
    for part in subproblems(asked):
        has_plan(call, part, gpu)


#: GPUs of every generation, the H200 first.
GPUS = sorted(gpus.REPRESENTATIVES, key=lambda gpu: gpu != "h200")


@contextlib.contextmanager
def refused():
    """The fake cuDNN has no engine for further plans."""
    configs, library().configs = library().configs, ()
    try:
        yield
    finally:
        library().configs = configs
