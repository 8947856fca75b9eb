"""The derivative of attention in a direction, in float64 numpy with whole matrices: the independent reference of the tests."""

import numpy as np

from cupy_sdpa import reference


def jvp(arrays, tangents, *, cu_seqlens_q=None, cu_seqlens_kv=None, **options):
    """The output and its derivative, by differentiating each step of the forward pass.

    ``dS = scale (dQ Kᵀ + Q dKᵀ)``, times ``1 - tanh²`` of a softcap; ``dP = P ∘ (dS - Σ P ∘ dS)``; ``dO = (dP ∘ R) V + (P ∘ R) dV``.

    Args:
        arrays: q, k and v, ``(D, H, S, B)`` or packed ``(D, H, T)``.
        tangents: dq, dk and dv; None is 0.
        cu_seqlens_q, cu_seqlens_kv, options: as for :func:`cupy_sdpa.reference.attention`.
    """
    q, k, v = (x.astype(np.float64) for x in arrays)
    dq, dk, dv = (np.zeros(x.shape) if dx is None else dx.astype(np.float64) for x, dx in zip(arrays, tangents, strict=True))
    out, dout = np.zeros((2, v.shape[0], *q.shape[1:]))
    if cu_seqlens_q is None:
        _dense((q, k, v), (dq, dk, dv), out, dout, **options)
        return out, dout
    mask = {name: options.pop(name) for name in ("bias", "mask", "dropout_mask") if options.get(name) is not None}
    for b, (i, j) in enumerate(zip(cu_seqlens_q[:-1], cu_seqlens_kv[:-1], strict=True)):
        rows, keys = slice(i, cu_seqlens_q[b + 1]), slice(j, cu_seqlens_kv[b + 1])
        sq, skv = rows.stop - i, keys.stop - j
        own = {name: x[:skv, :sq, :, b if x.shape[3] > 1 else 0, None] for name, x in mask.items()}
        parts = [x[:, :, side, None] for x, side in ((q, rows), (k, keys), (v, keys), (dq, rows), (dk, keys), (dv, keys))]
        _dense(parts[:3], parts[3:], out[:, :, rows, None], dout[:, :, rows, None], **own, **options)
    return out, dout


def _dense(arrays, tangents, out, dout, *, scale=None, softcap=None, sinks=None, dropout_p=0.0, dropout_mask=None, **options):
    (q, k, v), (dq, dk, dv) = arrays, tangents
    tau = 1 / np.sqrt(q.shape[0]) if scale is None else scale
    lengths = options.get("seq_lens_q")
    for b, h in np.ndindex(q.shape[3], q.shape[1]):
        g = h // (q.shape[1] // k.shape[1])
        s = reference.scores(q, k, h, b, scale=scale, softcap=softcap, **options)
        inside = np.arange(s.shape[0]) < (s.shape[0] if lengths is None else lengths[b])
        sink = np.where(inside, -np.inf if sinks is None else float(sinks[h]), -np.inf)[:, None]
        attends = s > -np.inf
        # NaN of the padding, and of keys to which no query attends
        q1, dq1 = (np.where(attends.any(1), x[:, h, :, b], 0) for x in (q, dq))
        k1, dk1, v1, dv1 = (np.where(attends.any(0), x[:, g, :, b], 0) for x in (k, dk, v, dv))
        ds = tau * (dq1.T @ k1 + q1.T @ dk1)
        if softcap is not None:
            ds *= 1 - np.tanh(tau * (q1.T @ k1) / softcap) ** 2
        top = np.maximum(s.max(1, keepdims=True, initial=-np.inf), sink)
        top[np.isneginf(top)] = 0
        weights = np.exp(s - top)
        total = weights.sum(1, keepdims=True) + np.exp(sink - top)
        p = weights / np.where(total == 0, 1, total)
        dp = p * (ds - (p * ds).sum(1, keepdims=True))
        keep = np.ones(s.shape)
        if dropout_mask is not None:
            kept = dropout_mask[..., h if dropout_mask.shape[2] > 1 else 0, b if dropout_mask.shape[3] > 1 else 0]
            keep = np.broadcast_to(kept.T, s.shape) / (1 - dropout_p)
        out[:, h, :, b] = v1 @ (p * keep).T
        dout[:, h, :, b] = v1 @ (dp * keep).T + dv1 @ (p * keep).T
