"""Arrays that functions read at computed indices: both passes, on every engine; ranges, refusals, memory and plans."""

import numpy as np
import pytest

from cupy_sdpa import (
    Unsupported,
    attention,
    attention_backward,
    attention_jvp,
    attention_vjp,
    block_mask,
    explain,
    prepare,
    problem,
    weight_sums,
    zoo,
)
from cupy_sdpa.check.functions import MASKS, SCORES
from engines import every_engine

D, H, SQ, SKV, B = 8, 4, 21, 18, 2
TABLES = [name for name, function in SCORES.items() if function.is_computed]
MASK_TABLES = [name for name, function in MASKS.items() if function.is_computed]


def near(score, b, h, q_idx, kv_idx, table):
    """An index that numpy limits."""
    return score + table[h, np.clip(q_idx - kv_idx, -4, 4) + 4]


def by_segment(score, b, h, q_idx, kv_idx, table, segment):
    """An index that is computed from elements of another array, and a negative one."""
    return score * table[b, segment[b, q_idx] - segment[b, kv_idx] - 1, -1 - h // 2]


def case_of_table(engine, name, **options):
    dtype = "float32" if engine.name != "numpy" else "float64"
    return engine.case(
        b=B, hq=H, hkv=2, sq=SQ, skv=SKV, d=D, dv=D, backward=True, options={"score_mod": (name, dtype), **options}
    )


@every_engine
@pytest.mark.parametrize("name", TABLES)
def test_both_passes(name, engine):
    """The output and all gradients agree with the reference, which reads with numpy's indices."""
    engine.agrees(case_of_table(engine, name, causal="top_left", return_dtensors=True), refused=True)


@pytest.mark.parametrize("name", MASK_TABLES)
def test_masks(name, engine):
    """Masks also read at computed indices."""
    engine.agrees(engine.case(b=B, hq=H, hkv=2, sq=70, skv=60, d=D, dv=D, options={"mask_mod": (name, "bool")}), refused=True)
