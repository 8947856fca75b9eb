"""What the notebooks share runs on CuPy's arrays too: what it hands over can be read by cuDNN."""

import sys
from pathlib import Path

import numpy as np
import pytest

import cupy_sdpa

FOLDER = Path(__file__).parents[1] / "notebooks"


class LikeCupys(np.ndarray):
    """Indexed with an array it is in C order, as CuPy's are; numpy puts the axis of the index first."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return np.ascontiguousarray(found).view(LikeCupys) if isinstance(found, np.ndarray) else found


@pytest.fixture
def recall(monkeypatch):
    """The model of the notebooks, in 16 bits, on such arrays."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("here", "recall"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import recall as module

    made = module.initial
    monkeypatch.setattr(module, "dtype", np.dtype(np.float16))
    monkeypatch.setattr(module, "initial", lambda seed=0: {name: w.view(LikeCupys) for name, w in made(seed).items()})
    yield module
    for name in ("here", "recall"):
        sys.modules.pop(name, None)


def readable(*arrays, **options):
    """Plain arrays of the same memory, which cuDNN can read."""
    plain = [x.view(np.ndarray) for x in arrays]
    report = cupy_sdpa.explain(*plain[:3], gpu="h200", cudnn="9.19", **options)
    assert report, report.reasons
    for x in plain:
        assert x.strides[0] == x.itemsize
    return plain


def test_what_the_model_hands_over_can_be_read(recall, monkeypatch):
    """q, k, v and the gradient of the output; the weights that are drawn, too."""

    def vjp(*arrays):
        out, pullback = cupy_sdpa.attention_vjp(*readable(*arrays))

        def readable_pullback(dout):
            assert dout.flags.f_contiguous
            return pullback(dout.view(np.ndarray))

        return out, readable_pullback

    scores = recall.dot_product_attention_scores
    monkeypatch.setattr(recall, "attention_vjp", vjp)
    monkeypatch.setattr(recall, "dot_product_attention_scores", lambda q, k: scores(*readable(q, k, k)[:2]))
    weights, _ = recall.train(2)
    looked = recall.attention_map(weights, *recall.questions(np.random.default_rng(1)))
    assert looked.shape == (recall.PAIRS, 1, recall.HEADS, recall.BATCH)
