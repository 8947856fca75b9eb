"""The model of the notebook on a training step runs on CuPy arrays, too: cuDNN can read the arrays that it passes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import cupy_sdpa
from cupy_sdpa.nnlib import dot_product_attention_scores

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"


class LikeCupys(np.ndarray):
    """Integer indexing gives C order, as in CuPy; numpy puts the axis of the index first."""

    def __getitem__(self, index):
        found = super().__getitem__(index)
        return np.ascontiguousarray(found).view(LikeCupys) if isinstance(found, np.ndarray) else found


def cells(name):
    """The code cells of a notebook: the source and the tags."""
    book = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    for cell in book["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"]), cell["metadata"].get("tags", [])


@pytest.fixture
def model():
    """The names that the cells of the model define, in 16 bits."""
    names = {
        "np": np, "xp": np, "dtype": np.dtype(np.float16), "attention_vjp": cupy_sdpa.attention_vjp,
        "dot_product_attention_scores": dot_product_attention_scores,
    }  # fmt: skip
    for source, tags in cells("03_a_training_step"):
        if "model" in tags:
            exec(source, names)
    made = names["initial"]
    names["initial"] = lambda seed=0: {name: w.view(LikeCupys) for name, w in made(seed).items()}
    return names


def readable(*arrays, **options):
    """Plain arrays of the same memory, in a layout that cuDNN can read."""
    plain = [x.view(np.ndarray) for x in arrays]
    report = cupy_sdpa.explain(*plain[:3], gpu="h200", cudnn="9.19", **options)
    assert report, report.reasons
    for x in plain:
        assert x.strides[0] == x.itemsize
    return plain


def test_the_arrays_of_the_model_can_be_read(model):
    """q, k, v and the gradient of the output, and the weights that are drawn."""

    def vjp(*arrays):
        out, pullback = cupy_sdpa.attention_vjp(*readable(*arrays))

        def readable_pullback(dout):
            assert dout.flags.f_contiguous
            return pullback(dout.view(np.ndarray))

        return out, readable_pullback

    scores = model["dot_product_attention_scores"]
    model["attention_vjp"] = vjp
    model["dot_product_attention_scores"] = lambda q, k: scores(*readable(q, k, k)[:2])
    found = SimpleNamespace(**model)
    weights, _ = found.train(2)
    looked = found.attention_map(weights, *found.questions(np.random.default_rng(1)))
    assert looked.shape == (found.PAIRS, 1, found.HEADS, found.BATCH)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebooks_need_no_local_files(path):
    """Every notebook imports installed packages only, begins with a title, and has saved outputs without errors."""
    book = json.loads(path.read_text(encoding="utf-8"))
    assert "".join(book["cells"][0]["source"]).startswith("# ")
    for cell in book["cells"]:
        assert not any(output["output_type"] == "error" for output in cell.get("outputs", []))
    for source, _ in cells(path.stem):
        assert not re.search(r"(from|import) (here|recall|generate)\b", source)
    assert any(cell.get("outputs") for cell in book["cells"])
