"""The reference is tested: its results against scalars in plain Python, its gradients against finite differences.

tests/graph/test_graphs.py compares it with the oracle of ``check`` on random problems.
"""

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
    "alibi_bottom_right": {"alibi": True, "causal": "bottom_right"},
    "alibi_window_bottom_right": {"alibi": True, "window": (1, 2, "bottom_right")},
    "alibi_lengths_bottom_right": {"alibi": True, "causal": "bottom_right", "seq_lens_q": (3, 2), "seq_lens_kv": (2, 4)},
    "bias": {"bias": "kqhb"},
    "bias_of_keys": {"bias": "k"},
    "bias_of_queries": {"bias": "q", "sinks": True},
    "bias_of_keys_and_batch": {"bias": "kb"},
    "bias_of_one": {"bias": "", "sinks": True},
    "bias_causal_lengths": {"bias": "kqh", "causal": True, "seq_lens_q": (3, 1), "seq_lens_kv": (2, 4)},
    "mask": {"mask": "kqhb"},
    "mask_of_keys": {"mask": "kb"},
    "mask_of_queries": {"mask": "qh"},
    "sinks_alone_for_some": {"sinks": True, "window": (0, 0, "bottom_right"), "shape": (3, 2, 2, 1, 4, 2, 2)},
    "sinks_lengths": {"sinks": True, "seq_lens_q": (3, 1), "seq_lens_kv": (0, 4)},
    "dropout": {"dropout": 0.4},
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


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (n % 4 > 0)) for n, name in enumerate(CASES)])
def test_the_gradients_are_finite_differences(name):
    """A change of any element of any array changes the loss as its gradient predicts."""
    problem = given(**CASES[name])
    for which, gradient in problem.gradients().items():
        assert gradient.dtype == np.float64
        assert gradient.shape == problem.arrays[which].shape
        np.testing.assert_allclose(gradient, problem.differences(which), rtol=1e-7, atol=1e-8, err_msg=which)


def test_finite_differences_detect_an_error():
    """An error of 1e-4 in one element of any gradient, and a missing factor."""
    problem = given(**{**EVERYTHING, "shape": (2, 2, 2, 1, 2, 3, 1)})
    uncapped = Given(problem.arrays, problem.dout, problem.options | {"softcap": 1e9})
    for which, gradient in problem.gradients().items():
        differences = problem.differences(which)
        place = np.unravel_index(np.abs(gradient).argmax(), gradient.shape)
        gradient[place] *= 1.0001
        for wrong in (gradient, uncapped.gradients()[which]):
            with pytest.raises(AssertionError, match="Not equal to tolerance"):
                np.testing.assert_allclose(wrong, differences, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("what", [np.nan, np.inf, -np.inf], ids=str)
def test_masked_elements_are_not_read(what):
    """The padding, and keys that the mask hides from all queries: of the arrays and the bias."""
    clean = given(bias="kqhb", sinks=True, dropout=0.3, seq_lens_q=(3, 2), seq_lens_kv=(2, 4))
    clean.options["mask"] = np.arange(4).reshape(4, 1, 1, 1) != 1
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


def test_published_numbers():
    """NNlib.jl's own test of dot_product_attention: q = k = v = reshape(1:12, 4, 3, 1) / 12 with two heads."""
    x = np.arange(1, 13).reshape((2, 2, 3, 1), order="F") / 12
    published = [
        0.429754, 0.513087, 0.613791, 0.697125, 0.46431, 0.547644, 0.647876, 0.73121, 0.49773, 0.581064, 0.680455, 0.763788,
    ]  # fmt: skip
    np.testing.assert_allclose(reference.attention(x, x, x)[0].ravel(order="F"), published, atol=1e-5)
