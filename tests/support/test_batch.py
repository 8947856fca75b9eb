"""What the report on a call states about the bits of a sequence and the rest of the batch."""

import numpy as np
import pytest

from cupy_sdpa import explain

PAGES = {"page_table": np.zeros((2, 3), np.int32), "seq_lens_kv": np.full(3, 30, np.int32)}
#: The shapes of q and k, the options, and words of the reason; no word if the bits do not depend on the batch.
CALLS = {
    "two queries": ((16, 4, 2, 3), (16, 2, 40, 3), {}, ""),
    "causal": ((16, 4, 20, 3), (16, 2, 40, 3), {"causal": True, "return_stats": True}, ""),
    "one query": ((16, 4, 1, 3), (16, 2, 40, 3), {}, "pass deterministic=True"),
    "one deterministic query": ((16, 4, 1, 3), (16, 2, 40, 3), {"deterministic": True}, ""),
    "gradients": ((16, 4, 20, 3), (16, 2, 40, 3), {"backward": True}, "dq is a sum"),
    "deterministic gradients": ((16, 4, 20, 3), (16, 2, 40, 3), {"backward": True, "deterministic": True}, ""),
    "a limit": ((16, 4, 20, 3), (16, 2, 40, 3), {"max_workspace": 1 << 30}, "max_workspace"),
    "dropout": ((16, 4, 20, 3), (16, 2, 40, 3), {"dropout_p": 0.1, "seed": 1}, "place in the batch"),
    "pages": ((16, 4, 2, 3), (16, 2, 16, 6), PAGES, "pass num_splits=1, or another number that is the same in all batches"),
    "split pages": ((16, 4, 2, 3), (16, 2, 16, 6), PAGES | {"num_splits": 2}, ""),
    "pages with slopes": ((16, 4, 2, 3), (16, 2, 16, 6), PAGES | {"alibi_slopes": np.ones(4, np.float32)}, "gather the pages"),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_rest_of_the_batch(name, engine):
    """The reason and the remedy; numpy computes every head of every sequence by itself."""
    q_shape, k_shape, options, words = CALLS[name]
    q, k = engine.normal(0, *q_shape), engine.normal(1, *k_shape)
    report = explain(q, k, k, **{key: engine.put(x) for key, x in options.items()})
    if words and (engine.on_cudnn or name == "dropout"):
        assert words in report.batch_dependence
        assert f"may depend on the rest of the batch: {report.batch_dependence}" in str(report)
    else:
        assert report.batch_dependence == ""
        assert "bits of a sequence do not depend on the rest of the batch" in str(report)
