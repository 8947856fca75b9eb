"""Shrink a saved picture of each notebook for the gallery, into docs/_static/notebooks: ``python tools/thumbnails.py``.

Run it after ``tools/notebooks.py`` has saved new outputs; a test compares the digest that each thumbnail stores. Needs Pillow,
which matplotlib installs. Notebooks without a picture have a drawing of their own in the gallery, docs/notebooks.md.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "_static" / "notebooks"
#: The largest width and height in pixels: twice what the gallery shows.
SIZE = (360, 240)
#: The notebooks that have pictures, and which of their pictures the gallery shows.
SHOWN = {
    "03_a_training_step": 0, "04_masks_and_scores": 0, "05_speed": 0, "06_generation": 0, "08_derivatives": 1,
    "09_several_gpus": 0, "11_cache_eviction": 1, "12_relative_positions": 1, "13_one_step_generation": 0,
    "14_tree_of_drafts": 0, "15_pair_bias": 0,
}  # fmt: skip


def pictures(name: str) -> list[bytes]:
    """Return the PNG files among the saved outputs of a notebook."""
    book = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8"))
    data = [output.get("data", {}) for cell in book["cells"] for output in cell.get("outputs", [])]
    return [base64.b64decode("".join(part["image/png"])) for part in data if "image/png" in part]


def digest(name: str) -> str:
    """Return the digest of the picture that a thumbnail shows."""
    return hashlib.sha256(pictures(name)[SHOWN[name]]).hexdigest()


def main() -> None:
    """Write all thumbnails, each with the digest of its picture as metadata."""
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, number in SHOWN.items():
        image = Image.open(io.BytesIO(pictures(name)[number])).convert("RGBA")
        image.thumbnail(SIZE, Image.Resampling.LANCZOS)
        info = PngInfo()
        info.add_text("source", digest(name))
        colors = image.quantize(64, method=Image.Quantize.FASTOCTREE)  # the method that keeps transparency
        colors.save(FOLDER / f"{name}.png", optimize=True, pnginfo=info)


if __name__ == "__main__":
    main()
