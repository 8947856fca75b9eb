"""The support table: every rule has a case on each side of it, and its message says what to do."""

import numpy as np
import pytest

from cupy_sdpa.problem import dense_strides, problem
from cupy_sdpa.support import RULES, why_not
from cupy_sdpa.version import MINIMUM_CUDNN


def asked(d=64, dv=None, hq=4, hkv=4, sq=16, skv=16, b=2, dtype="bfloat16", itemsize=2, strides=None, alignment=16, **outputs):
    """A problem of dense arrays, but for q's strides and alignment where given."""
    shapes = (d, hq, sq, b), (d, hkv, skv, b), (dv or d, hkv, skv, b)
    q, k, v = ((dtype, shape, dense_strides(shape, itemsize), 16) for shape in shapes)
    q = (dtype, q[1], strides or q[2], alignment)
    return problem(q, k, v, outputs.get("out"), outputs.get("stats"))


#: rule: (a problem that breaks it, cuDNN version, capability, what the message says), (one that just keeps it, version, capability)
SIDES = {
    "cudnn-version": ((asked(), 91801, 90, r"9\.18\.1 is loaded, 9\.19\.0 .*pip install"), (asked(), 91900, 90)),
    "gpu-generation": ((asked(), 91900, 75, r"7\.5, 8\.0 \(Ampere\)"), (asked(), 91900, 80)),
    "dtype": ((asked(dtype="float32", itemsize=4), 91900, 90, r"float32; .* q\.astype"), (asked(dtype="float16"), 91900, 90)),
    "head-dim": ((asked(d=60), 91900, 90, r"head_dim of q and k is 60; .*pad axis 0 with 4 zeros"), (asked(d=72, dv=8), 91900, 90)),
    "contiguous-head-dim": (
        (asked(strides=(256, 2, 32768, 1048576)), 91900, 90, r"q has a stride of 256 bytes .*cupy\.asfortranarray\(q\)"),
        (asked(strides=(2, 128 * 16, 128, 8192)), 91900, 90),
    ),
    "negative-stride": ((asked(strides=(2, 128, -512, 8192)), 91900, 90, r"none below 0"), (asked(strides=(2, 128, 512, 0)), 91900, 90)),
    "stride-alignment": (
        (asked(strides=(2, 130, 1024, 65536)), 91900, 90, r"130 is not a multiple of 16"),
        (asked(strides=(2, 144, 1024, 65536)), 91900, 90),
    ),
    "memory-alignment": ((asked(alignment=8), 91900, 90, r"multiple of 8 bytes, .* need 16"), (asked(alignment=16), 91900, 90)),
    "dense-stats": (
        (asked(stats=("float32", (16, 4, 2), (32, 8, 4), 16)), 91900, 90, r"stats has strides \(32, 8, 4\) bytes"),
        (asked(stats=("float32", (16, 4, 2), (4, 64, 256), 16)), 91900, 90),
    ),
    "grid": ((asked(b=65536, sq=1, skv=1), 91900, 90, r"65536 batch; .*65535"), (asked(b=65535, sq=1, skv=1), 91900, 90)),
    "decode-blackwell": ((asked(sq=1), 92500, 100, r"silently wrong with cuDNN 9\.25\.0"), (asked(sq=1), 92401, 100)),
}  # fmt: skip


def test_every_rule_has_both_sides():
    """A rule without a case here is a rule that nobody would miss."""
    assert set(SIDES) == {rule.name for rule in RULES}


@pytest.mark.parametrize("rule", SIDES)
def test_a_rule_refuses_what_breaks_it(rule):
    """The rule is the one that speaks, with the values and the remedy."""
    problem, cudnn, capability, words = SIDES[rule][0]
    reasons = [reason for reason in why_not(problem, cudnn, capability) if reason.rule == rule]
    assert reasons
    with pytest.raises(next(r.error for r in RULES if r.name == rule), match=words):
        raise reasons[0].error(reasons[0].text)


@pytest.mark.parametrize("rule", SIDES)
def test_nothing_speaks_against_what_keeps_it(rule):
    """Just on the other side of the gate the problem passes every rule."""
    assert why_not(*SIDES[rule][1]) == []


@pytest.mark.parametrize(
    ("cudnn", "capability", "refused"),
    [
        (91900, 100, True),
        (92400, 103, True),
        (92401, 100, False),
        (92500, 110, True),
        (92501, 100, False),
        (91900, 90, False),
        (91900, 120, False),
    ],
)
def test_decoding_on_blackwell_is_refused_where_it_is_wrong(cudnn, capability, refused):
    """One query is refused for exactly the versions and GPUs on which it is silently wrong."""
    assert bool(why_not(asked(sq=1), cudnn, capability)) is refused
    assert not why_not(asked(sq=2), cudnn, capability)


def test_axes_of_length_one_have_no_stride():
    """What numpy, CuPy and DLPack put as the stride of an axis of length 1 makes no difference: one problem, one plan."""
    odd = asked(b=1, strides=(2, 128, 512, 7))
    assert odd is not None
    assert odd == asked(b=1)
    assert hash(odd) == hash(asked(b=1))
    assert why_not(odd, MINIMUM_CUDNN, 90) == []
    view = np.empty((64, 4, 16, 1), np.float16, order="F")[:, 1:2]
    whole = asked(hq=1, hkv=1, b=1, dtype="float16", strides=view.strides)
    assert why_not(whole, MINIMUM_CUDNN, 90) == []


def test_every_reason_is_told_at_once():
    """A problem that breaks several rules hears of all of them."""
    reasons = why_not(asked(d=60, dtype="float32", itemsize=4, alignment=4), 91801, 75)
    assert {"cudnn-version", "gpu-generation", "dtype", "head-dim", "memory-alignment"} <= {reason.rule for reason in reasons}
