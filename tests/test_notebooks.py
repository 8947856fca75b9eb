"""The helpers of the notebooks run on CuPy arrays, too: cuDNN can read the arrays that they pass."""

import sys
from pathlib import Path

import numpy as np
import pytest

import cupy_sdpa

FOLDER = Path(__file__).parents[1] / "notebooks"


class LikeCupys(np.ndarray):
    """Integer indexing gives C order, as in CuPy; numpy puts the axis of the index first."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return np.ascontiguousarray(found).view(LikeCupys) if isinstance(found, np.ndarray) else found


@pytest.fixture
def recall(monkeypatch):
    """The model of the notebooks in 16 bits, on such arrays."""
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
    """Plain arrays of the same memory, in a layout that cuDNN can read."""
    plain = [x.view(np.ndarray) for x in arrays]
    report = cupy_sdpa.explain(*plain[:3], gpu="h200", cudnn="9.19", **options)
    assert report, report.reasons
    for x in plain:
        assert x.strides[0] == x.itemsize
    return plain


def test_the_arrays_of_the_model_can_be_read(recall, monkeypatch):
    """q, k, v and the gradient of the output, and the weights that are drawn."""

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
