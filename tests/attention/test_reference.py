"""The reference is tested: its results against scalars in plain Python, its gradients against finite differences."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupy_sdpa import reference


@dataclass
class Given:
    """A problem: the arrays with gradients, by name, and the other arguments of the reference."""

    arrays: dict[str, np.ndarray]
    dout: np.ndarray
    options: dict[str, Any] = field(default_factory=dict)

    def forward(self, **moved):
        """out, stats, max and sum_exp, with some of the arrays replaced."""
        return reference.attention(**{**self.arrays, **moved}, **self.options, max_sumexp=True)

    def gradients(self):
        """The gradient of each array, by name."""
        asked = {f"return_d{name}": name in self.arrays for name in ("bias", "sinks")}
        found = reference.attention_backward(self.dout, **self.arrays, **self.options, **asked)
        return dict(zip(self.arrays, found, strict=True))

    def differences(self, name):
        """The gradient of an array by central differences of the loss sum(out * dout), per element."""
        found = np.zeros(self.arrays[name].shape)
        for place in np.ndindex(found.shape):
            losses = []
            for step in (1e-5, -1e-5):
                moved = self.arrays[name].copy()
                moved[place] += step
                losses.append((self.forward(**{name: moved})[0] * self.dout).sum())
            found[place] = (losses[0] - losses[1]) / 2e-5
        return found


def given(
    shape=(3, 2, 2, 1, 3, 4, 2), *, alibi=False, bias=None, mask=None, sinks=False, dropout=None, dropout_axes=None, **options
):
    """A random problem of shape ``(D, Dv, Hq, Hkv, Sq, Skv, B)``; a bias or mask is given by its axes, of ``"kqhb"``."""
    d, dv, hq, hkv, sq, skv, b = shape
    rng = np.random.default_rng([11, *repr((shape, bias, mask, options)).encode()])
    axes = dict(zip("kqhb", (skv, sq, hq, b), strict=True))

    def over(letters):
        return tuple(axes[letter] if letter in letters else 1 for letter in "kqhb")

    for name in ("seq_lens_q", "seq_lens_kv", "cu_seqlens_q", "cu_seqlens_kv"):
        if name in options:
            options[name] = np.array(options[name], np.int32)
    if "cu_seqlens_q" in options:  # one position more than the sequences have
        total_q, total_kv = int(options["cu_seqlens_q"][-1]) + 1, int(options["cu_seqlens_kv"][-1]) + 1
        shapes = {"q": (d, hq, total_q), "k": (d, hkv, total_kv), "v": (dv, hkv, total_kv)}
    else:
        shapes = {"q": (d, hq, sq, b), "k": (d, hkv, skv, b), "v": (dv, hkv, skv, b)}
    if bias is not None:
        shapes["bias"] = over(bias)
    if sinks:
        shapes["sinks"] = (hq,)
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    if alibi:
        options["alibi_slopes"] = rng.uniform(0.1, 1, hq)
    if mask is not None:
        options["mask"] = rng.random(over(mask)) < 0.6
    if dropout is not None:
        options["dropout_p"] = dropout
        options["dropout_mask"] = rng.random(over(dropout_axes or "kqhb")) >= dropout
    return Given(arrays, rng.standard_normal((dv, *shapes["q"][1:])), options)


EVERYTHING = {
    "shape": (3, 2, 4, 2, 4, 5, 2),
    "scale": 0.9,
    "softcap": 1.5,
    "alibi": True,
    "bias": "kqhb",
    "mask": "kqhb",
    "sinks": True,
    "dropout": 0.3,
}
DENSE = {
    "plain": {},
    "one_of_everything": {"shape": (1, 1, 1, 1, 1, 1, 1), "sinks": True},
    "gqa": {"shape": (3, 2, 4, 2, 3, 4, 2)},
    "causal": {"causal": True},
    "bottom_right_no_key_for_some": {"shape": (3, 2, 2, 1, 4, 3, 2), "causal": "bottom_right"},
    "window": {"window": (1, 0)},
    "lengths": {"seq_lens_q": (3, 2), "seq_lens_kv": (2, 4)},
    "lengths_of_nothing": {"seq_lens_q": (0, 3), "seq_lens_kv": (4, 0)},
    "softcap": {"softcap": 0.7, "scale": 1.0},
    "softcap_negative_scale": {"softcap": 0.7, "scale": -1.3},
    "alibi": {"alibi": True},
    "alibi_causal": {"alibi": True, "causal": True},
    "alibi_bottom_right": {"alibi": True, "causal": "bottom_right"},
    "alibi_window_bottom_right": {"alibi": True, "window": (1, 2, "bottom_right")},
    "alibi_lengths": {"alibi": True, "seq_lens_q": (3, 2), "seq_lens_kv": (2, 4)},
    "alibi_lengths_bottom_right": {"alibi": True, "causal": "bottom_right", "seq_lens_q": (3, 2), "seq_lens_kv": (2, 4)},
    "bias": {"bias": "kqhb"},
    "bias_of_keys": {"bias": "k"},
    "bias_of_queries": {"bias": "q", "sinks": True},
    "bias_of_keys_and_queries": {"bias": "kq"},
    "bias_of_heads": {"bias": "kqh"},
    "bias_of_batch": {"bias": "kb"},
    "bias_of_one": {"bias": "", "sinks": True},
    "bias_causal_lengths": {"bias": "kqh", "causal": True, "seq_lens_q": (3, 1), "seq_lens_kv": (2, 4)},
    "mask": {"mask": "kqhb"},
    "mask_of_keys": {"mask": "kb"},
    "mask_of_queries": {"mask": "qh"},
    "mask_causal": {"mask": "kq", "causal": True},
    "sinks": {"sinks": True},
    "sinks_alone_for_some": {"sinks": True, "window": (0, 0, "bottom_right"), "shape": (3, 2, 2, 1, 4, 2, 2)},
    "sinks_lengths": {"sinks": True, "seq_lens_q": (3, 1), "seq_lens_kv": (0, 4)},
    "dropout": {"dropout": 0.4},
    "dropout_of_nothing": {"dropout": 0.0},
    "dropout_with_sinks": {"dropout": 0.4, "sinks": True},
    "everything_window": {**EVERYTHING, "window": (2, 1)},
    "everything_causal": {**EVERYTHING, "causal": True},
    "everything_lengths": {**EVERYTHING, "window": (2, 1, "bottom_right"), "seq_lens_q": (4, 2), "seq_lens_kv": (3, 5)},
    "everything_broadcast": {**EVERYTHING, "causal": "bottom_right", "bias": "k", "mask": "qb", "seq_lens_kv": (1, 5)},
}
TWO_AND_NONE = {"cu_seqlens_q": (0, 3, 3, 5), "cu_seqlens_kv": (0, 2, 6, 6), "shape": (3, 2, 2, 1, 3, 4, 3)}
PACKED = {
    "packed": {"cu_seqlens_q": (0, 3, 4), "cu_seqlens_kv": (0, 2, 6)},
    "packed_empty_sequences": TWO_AND_NONE,
    "packed_causal": {**TWO_AND_NONE, "causal": True, "cu_seqlens_kv": (0, 2, 3, 7)},
    "packed_bottom_right_alibi": {**TWO_AND_NONE, "causal": "bottom_right", "alibi": True, "cu_seqlens_kv": (0, 2, 3, 7)},
    "packed_sinks": {**TWO_AND_NONE, "sinks": True},
    "packed_bias": {**TWO_AND_NONE, "bias": "kqhb", "sinks": True},
    "packed_bias_of_keys": {**TWO_AND_NONE, "bias": "kb", "sinks": True},
    "packed_bias_of_queries": {**TWO_AND_NONE, "bias": "qh", "sinks": True},
    "packed_bias_of_all": {**TWO_AND_NONE, "bias": "kq", "cu_seqlens_kv": (0, 2, 3, 7)},
    "packed_everything": {**EVERYTHING, **TWO_AND_NONE, "window": (2, 1, "bottom_right"), "cu_seqlens_kv": (0, 4, 5, 7)},
    "packed_everything_broadcast": {
        **EVERYTHING,
        **TWO_AND_NONE,
        "mask": "k",
        "bias": "h",
        "dropout_axes": "kq",
        "cu_seqlens_kv": (0, 2, 3, 7),
    },
}
CASES = DENSE | PACKED


def by_hand(problem, i, h, b):
    """out, stats, max and sum_exp of one query in Python scalars, from the definitions of the options."""
    q, k, v = (problem.arrays[name] for name in "qkv")
    (d, hq, sq, _), (dv, hkv, skv, _) = q.shape, v.shape
    g, options = h * hkv // hq, problem.options
    sq, skv = (int(options[name][b]) if name in options else n for name, n in (("seq_lens_q", sq), ("seq_lens_kv", skv)))
    if i >= sq:
        return [0.0] * dv, -math.inf, -math.inf, 0.0
    causal, window = options.get("causal", False), options.get("window", (None, None))
    position = i + skv - sq if "bottom_right" in (causal, *window) else i

    def of(array, j):
        return array[tuple(at if n > 1 else 0 for at, n in zip((j, i, h, b), array.shape, strict=True))]

    score, kept = {}, {}
    for j in range(skv):
        if causal and j > position:
            continue
        if window[0] is not None and position - j > window[0]:
            continue
        if window[1] is not None and j - position > window[1]:
            continue
        if "mask" in options and not of(options["mask"], j):
            continue
        s = sum(q[e, h, i, b] * k[e, g, j, b] for e in range(d)) * options.get("scale", d**-0.5)
        if "softcap" in options:
            s = options["softcap"] * math.tanh(s / options["softcap"])
        if "alibi_slopes" in options:
            s -= options["alibi_slopes"][h] * abs(position - j)
        if "bias" in problem.arrays:
            s += of(problem.arrays["bias"], j)
        score[j] = s
        kept[j] = "dropout_mask" not in options or of(options["dropout_mask"], j)
    sink = [problem.arrays["sinks"][h]] if "sinks" in problem.arrays else []
    if not score and not sink:
        return [0.0] * dv, -math.inf, -math.inf, 0.0
    m = max([*score.values(), *sink])
    total = sum(math.exp(s - m) for s in [*score.values(), *sink])
    weight = {j: kept[j] * math.exp(s - m) / total / (1 - options.get("dropout_p", 0)) for j, s in score.items()}
    return [sum(weight[j] * v[e, g, j, b] for j in score) for e in range(dv)], m + math.log(total), m, total


@pytest.mark.parametrize("name", DENSE)
def test_every_query_matches_scalar_code(name):
    """Output, log-sum-exp, maximum and sum; options are applied in the documented order."""
    problem = given(**DENSE[name])
    out, *rows = problem.forward()
    assert out.dtype == np.float64
    assert all(row.dtype == np.float64 for row in rows)
    for i, h, b in np.ndindex(rows[0].shape):
        want, *numbers = by_hand(problem, i, h, b)
        np.testing.assert_allclose(out[:, h, i, b], want, rtol=0, atol=1e-14)
        np.testing.assert_allclose([row[i, h, b] for row in rows], numbers, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", CASES)
def test_the_gradients_are_finite_differences(name):
    """A change of any element of any array changes the loss as its gradient predicts."""
    problem = given(**CASES[name])
    for which, gradient in problem.gradients().items():
        assert gradient.dtype == np.float64
        assert gradient.shape == problem.arrays[which].shape
        np.testing.assert_allclose(gradient, problem.differences(which), rtol=1e-7, atol=1e-8, err_msg=which)


def test_finite_differences_detect_an_error():
    """An error of 1e-4 in one element of any gradient, and a missing factor."""
    problem = given(**DENSE["everything_lengths"])
    uncapped = Given(problem.arrays, problem.dout, problem.options | {"softcap": 1e9})
    for which, gradient in problem.gradients().items():
        differences = problem.differences(which)
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        gradient[place] *= 1.0001
        for wrong in (gradient, uncapped.gradients()[which]):
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                np.testing.assert_allclose(wrong, differences, rtol=1e-7, atol=1e-8)


def padded(problem):
    """The packed problem as a dense one with lengths, and a function that packs its arrays."""
    options = dict(problem.options)
    cu_q, cu_kv = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_kv")
    options |= {"seq_lens_q": np.diff(cu_q), "seq_lens_kv": np.diff(cu_kv)}

    def pad(x, cu):
        longer = np.zeros((*x.shape[:2], 4, len(cu) - 1))[:, :, : max(np.diff(cu))]
        for b in range(len(cu) - 1):
            longer[:, :, : cu[b + 1] - cu[b], b] = x[:, :, cu[b] : cu[b + 1]]
        return longer

    def pack(x, cu, rest):
        parts = [x[..., : cu[b + 1] - cu[b], b] for b in range(len(cu) - 1)]
        return np.concatenate([*parts, np.full((*x.shape[:-2], 1), rest)], axis=-1)

    arrays = {name: pad(x, cu_q if name == "q" else cu_kv) if name in "qkv" else x for name, x in problem.arrays.items()}
    return Given(arrays, pad(problem.dout, cu_q), options), lambda x, of_q, rest=0.0: pack(x, cu_q if of_q else cu_kv, rest)


@pytest.mark.parametrize("name", PACKED)
def test_packed_sequences_match_a_padded_batch(name):
    """Forward and backward; the position after the last sequence gives 0, and -inf for the log-sum-exp."""
    problem = given(**PACKED[name])
    dense, pack = padded(problem)
    out, *rows = dense.forward()
    wanted = [pack(out, True)]
    wanted += [pack(row.swapaxes(0, 1), True, rest) for row, rest in zip(rows, (-np.inf, -np.inf, 0.0), strict=True)]
    for actual, want in zip(problem.forward(), wanted, strict=True):
        np.testing.assert_allclose(actual, want, rtol=0, atol=1e-14)
    wanted = dense.gradients()
    for which, gradient in problem.gradients().items():
        want = pack(wanted[which], which == "q") if which in "qkv" else wanted[which]
        np.testing.assert_allclose(gradient, want, rtol=0, atol=1e-14, err_msg=which)


def test_packed_sequences_are_independent():
    """Also with a bias, of which each uses the first keys and queries."""
    problem = given(**PACKED["packed_bias_of_all"])
    q, k, v, bias = problem.arrays.values()
    out, stats = reference.attention(q, k, v, bias=bias, **problem.options)
    alone, alone_stats = reference.attention(q[:, :, :3, None], k[:, :, :2, None], v[:, :, :2, None], bias=bias[:2])
    np.testing.assert_array_equal(out[:, :, :3], alone[..., 0])
    np.testing.assert_array_equal(stats[:, :3], alone_stats[..., 0].T)


@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_fully_masked_rows(sinks):
    """A query without keys attends to its sink; in the padding it does not."""
    mask = np.ones((1, 3, 1, 1), bool)
    mask[0, 1] = False
    problem = given((3, 2, 2, 1, 3, 4, 1), sinks=sinks, seq_lens_q=(2,))
    problem.options["mask"] = mask
    out, stats, m, total = problem.forward()
    assert not out[:, :, 1:].any()
    alone = problem.arrays["sinks"] if sinks else np.full(2, -np.inf)
    np.testing.assert_array_equal(stats[1, :, 0], alone)
    np.testing.assert_array_equal(m[1, :, 0], alone)
    np.testing.assert_array_equal(total[1], float(sinks))
    np.testing.assert_array_equal([stats[2], m[2], total[2]], [np.full((2, 1), x) for x in (-np.inf, -np.inf, 0)])
    assert not problem.gradients()["q"][:, :, 1:].any()


def test_a_sink_is_a_key_whose_value_is_zero():
    """Forward and backward: a key with that score and value 0."""
    problem = given((3, 2, 1, 1, 3, 4, 1), sinks=True)
    q, k, v, sinks = problem.arrays.values()
    longer = [np.concatenate([x, np.zeros((len(x), 1, 1, 1))], axis=2) for x in (k, v)]
    bias = np.zeros((5, 1, 1, 1))
    bias[4] = sinks
    for actual, want in zip(problem.forward(), reference.attention(q, *longer, bias=bias, max_sumexp=True), strict=True):
        np.testing.assert_allclose(actual, want, rtol=0, atol=1e-14)
    dq, dk, dv, dbias = reference.attention_backward(problem.dout, q, *longer, bias=bias, return_dbias=True)
    wanted = {"q": dq, "k": dk[:, :, :4], "v": dv[:, :, :4], "sinks": dbias[4, 0, 0]}
    for which, gradient in problem.gradients().items():
        np.testing.assert_allclose(gradient, wanted[which], rtol=0, atol=1e-14, err_msg=which)


KEY, QUERY = np.arange(4).reshape(4, 1, 1, 1), np.arange(3).reshape(1, 3, 1, 1)
SLOPES = np.array([0.5, 0.25])
SAME = {
    "huge_softcap": ({"softcap": 1e9}, {}),
    "flat_alibi": ({"alibi_slopes": np.zeros(2)}, {}),
    "alibi_as_bias": (
        {"alibi_slopes": SLOPES, "causal": "bottom_right"},
        {"bias": -SLOPES.reshape(1, 1, 2, 1) * np.abs(QUERY + 1 - KEY), "causal": "bottom_right"},
    ),
    "zero_bias": ({"bias": np.zeros((1, 1, 1, 1))}, {}),
    "bias_of_minus_infinity": ({"bias": np.where(KEY < 2, 0.0, -np.inf)}, {"seq_lens_kv": np.array([2, 2])}),
    "mask_of_true": ({"mask": np.ones((4, 3, 2, 2), bool)}, {}),
    "mask_as_causal": ({"mask": KEY <= QUERY}, {"causal": True}),
    "mask_as_lengths": ({"mask": np.less(KEY, [2, 3])}, {"seq_lens_kv": np.array([2, 3])}),
    "sinks_of_minus_infinity": ({"sinks": np.full(2, -np.inf)}, {}),
    "dropout_of_nothing": ({"dropout_p": 0.0, "dropout_mask": np.ones((4, 3, 2, 2), bool)}, {}),
}


@pytest.mark.parametrize("name", SAME)
def test_equivalent_options_give_equal_results(name):
    """Forward and backward."""
    one, other = SAME[name]
    problem = given()
    arrays, options = list(problem.arrays.values()), {"max_sumexp": True}
    for actual, want in zip(
        reference.attention(*arrays, **options, **one), reference.attention(*arrays, **options, **other), strict=True
    ):
        np.testing.assert_allclose(actual, want, rtol=0, atol=1e-14)
    arrays.insert(0, problem.dout)
    for actual, want in zip(
        reference.attention_backward(*arrays, **one), reference.attention_backward(*arrays, **other), strict=True
    ):
        np.testing.assert_allclose(actual, want, rtol=0, atol=1e-14)


def test_dropout_that_keeps_everything_scales():
    """Output and gradients are scaled by 1 / (1 - p); dropout of everything gives 0; statistics are unchanged."""
    problem = given()
    out, *rows = problem.forward()
    for kept, factor in ((True, 4.0), (False, 0.0)):
        dropped = Given(problem.arrays, problem.dout, {"dropout_p": 0.75, "dropout_mask": np.full((4, 3, 2, 2), kept)})
        scaled, *same = dropped.forward()
        np.testing.assert_allclose(scaled, factor * out, rtol=1e-14)
        np.testing.assert_array_equal(same, rows)
        for which, gradient in dropped.gradients().items():
            np.testing.assert_allclose(gradient, factor * problem.gradients()[which], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf], ids=str)
def test_masked_elements_are_not_read(what):
    """The padding, and keys that the mask hides from all queries: of the arrays and the bias."""
    clean = given(bias="kqhb", sinks=True, dropout=0.3, seq_lens_q=(3, 2), seq_lens_kv=(2, 4))
    clean.options["mask"] = KEY != 1
    arrays = {name: x.copy() for name, x in clean.arrays.items()}
    dirty = Given(arrays, clean.dout.copy(), clean.options)
    for x in (arrays["q"], dirty.dout):
        x[:, :, 2:, 1] = what
    for x in (arrays["k"], arrays["v"]):
        x[:, :, 2:, 0] = what
        x[:, :, 1] = what
    arrays["bias"][2:, :, :, 0] = arrays["bias"][1] = arrays["bias"][:, 2:, :, 1] = what
    for actual, want in zip(dirty.forward(), clean.forward(), strict=True):
        np.testing.assert_array_equal(actual, want)
    for which, gradient in clean.gradients().items():
        np.testing.assert_array_equal(dirty.gradients()[which], gradient, err_msg=which)
