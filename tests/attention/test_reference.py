"""The reference is tested: its gradients against finite differences, and what it reads.

tests/graph/test_graphs.py compares its results with the oracle of ``check`` on random problems.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from engines import one_in

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
TWO_AND_NONE = {"cu_seqlens_q": (0, 3, 3, 5), "cu_seqlens_kv": (0, 2, 6, 6), "shape": (3, 2, 2, 1, 3, 4, 3)}
CASES = {
    "plain": {},
    "one_of_everything": {"shape": (1, 1, 1, 1, 1, 1, 1), "sinks": True},
    "gqa": {"shape": (3, 2, 4, 2, 3, 4, 2)},
    "window": {"window": (1, 0)},
    "lengths_of_nothing": {"seq_lens_q": (0, 3), "seq_lens_kv": (4, 0)},
    "softcap": {"softcap": 0.7, "scale": 1.0},
    "softcap_negative_scale": {"softcap": 0.7, "scale": -1.3},
    "alibi": {"alibi": True},
    "alibi_lengths_bottom_right": {"alibi": True, "causal": "bottom_right", "seq_lens_q": (3, 2), "seq_lens_kv": (2, 4)},
    "bias": {"bias": "kqhb"},
    "bias_of_keys": {"bias": "k"},
    "bias_of_queries": {"bias": "q", "sinks": True},
    "bias_of_one": {"bias": "", "sinks": True},
    "mask": {"mask": "kqhb"},
    "sinks_alone_for_some": {"sinks": True, "window": (0, 0, "bottom_right"), "shape": (3, 2, 2, 1, 4, 2, 2)},
    "dropout": {"dropout": 0.4},
    "dropout_with_sinks": {"dropout": 0.4, "sinks": True},
    "everything_lengths": {**EVERYTHING, "window": (2, 1, "bottom_right"), "seq_lens_q": (4, 2), "seq_lens_kv": (3, 5)},
    "everything_broadcast": {**EVERYTHING, "causal": "bottom_right", "bias": "k", "mask": "qb", "seq_lens_kv": (1, 5)},
    "packed_empty_sequences": TWO_AND_NONE,
    "packed_bottom_right_alibi": {**TWO_AND_NONE, "causal": "bottom_right", "alibi": True, "cu_seqlens_kv": (0, 2, 3, 7)},
    "packed_bias_of_keys": {**TWO_AND_NONE, "bias": "kb", "sinks": True},
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


@pytest.mark.parametrize("name", one_in(3, CASES))
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
