"""Attention written with loops over batch entries, heads and queries, in float64: a reference that shares no code."""

import numpy as np


def softmax_attention(q, k, v, allowed, bias, tau, softcap=None, sinks=None):
    """Output and log-sum-exp of float64 arrays (B, H, S, D).

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Skv, D), (B, Hkv, Skv, Dv).
        allowed, bias: (B, Hq, Sq, Skv).
        tau: the scale.
        softcap: a number, or None.
        sinks: (Hq,), or None.
    """
    b, hq, sq, _ = q.shape
    out, rows = np.zeros((b, hq, sq, v.shape[3])), np.full((b, hq, sq), -np.inf)
    for n, h in np.ndindex(b, hq):
        g = h // (hq // k.shape[1])
        for i in range(sq):
            scores = [tau * (q[n, h, i] @ key) for key in k[n, g]]
            scores = [softcap * np.tanh(s / softcap) for s in scores] if softcap else scores
            scores = [s + x for s, x in zip(scores, bias[n, h, i], strict=True)]
            kept = [j for j in range(k.shape[2]) if allowed[n, h, i, j]]
            tops = [scores[j] for j in kept] + ([] if sinks is None else [sinks[h]])
            if tops:
                top = max(tops)
                weights = {j: np.exp(scores[j] - top) for j in kept}
                total = sum(weights.values()) + (0 if sinks is None else np.exp(sinks[h] - top))
                out[n, h, i] = sum((w * v[n, g, j] for j, w in weights.items()), np.zeros(v.shape[3])) / total
                rows[n, h, i] = top + np.log(total)
    return out, rows
