"""examples/antibody.py: a pretrained model from a package index gives what its authors publish, and what a dense float64 run gives."""

import functools
import importlib.util

import numpy as np
import pytest

from cupy_sdpa import attention, reference
from examples.antibody import MASK, infill, log_probabilities, read_weights, tokens_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("sapiens") is None, reason="pip install --no-deps sapiens==1.0.1")
#: The example of the package's description, with the residues that it fills in.
MASKED = (
    "**QLV*SGVEVKKPGASVKVSCKASGYTFTNYYMYWVRQAPGQGLEWMGGINPSNGGTNFNEKFKNRVTLTTDSSTTTAYMELKSLQFDDTAVYYCARRDYRFDMGFDYWGQGTTVTVSS"
)
PUBLISHED = "QV" + MASKED[2:5] + "Q" + MASKED[6:]
#: Scores of the residues A, C, D and E at its first five positions, from the same description.
SCORES = [
    (0.003272, 0.004147, 0.004011, 0.004590), (0.012038, 0.003854, 0.006803, 0.008174), (0.003384, 0.003895, 0.003726, 0.004068),
    (0.004612, 0.005325, 0.004443, 0.004641), (0.005519, 0.003664, 0.003555, 0.005269),
]  # fmt: skip
OTHER = "QVKLQESGAELARPGASVKLSCKASGYTF*NYWMQWVKQRPGQGLDWIGAIYPG*GNTRYTHKFKGKATLTADKSSSTAYMQLSSLASEDSGVYYCARGEGNYAWFAYWGQ"


def dense(q, k, v, **lengths):
    """The definition in float64."""
    return reference.attention(q, k, v, **lengths)[0]


def test_the_published_residues_and_scores(engine):
    """Scores are probabilities among the residues and the special tokens."""
    weights = engine.put(read_weights())
    attend = functools.partial(attention, compute_dtype="float16") if engine.on_cudnn else attention
    assert infill(weights, [MASKED, OTHER], attend, engine.xp)[0] == PUBLISHED
    tokens, lengths = engine.put(tokens_of([OTHER, MASKED]))
    scores = np.exp(engine.get(log_probabilities(weights, tokens, lengths, attend, engine.xp)))[4:8, 1:6, 1].T
    np.testing.assert_allclose(scores, SCORES, atol=2e-4 if engine.on_cudnn else 2e-6)


def test_the_residues_of_a_dense_float64_run():
    """Of both chains, with padding; every second residue is masked."""
    for chain in ("vh", "vl"):
        weights = read_weights(chain)
        sequences = ["".join("*" if i % 2 else x for i, x in enumerate(one)) for one in (PUBLISHED, OTHER.replace("*", "A"))]
        tokens, lengths = tokens_of(sequences)
        ours = log_probabilities(weights, tokens, lengths)
        wanted = log_probabilities({name: x.astype(np.float64) for name, x in weights.items()}, tokens, lengths, dense)
        for b, n in enumerate(lengths):
            np.testing.assert_allclose(ours[:, :n, b], wanted[:, :n, b], atol=1e-4)
            assert (ours[4:MASK, :n, b].argmax(axis=0) == wanted[4:MASK, :n, b].argmax(axis=0)).all()
