"""Attention from the papers, in float64 numpy, row by row and with nothing clever: the independent judge of the tests.

It shares no code with the graph, the patterns or the engines, and imports numpy only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray


def attention(
    q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, scale: float | None = None, **mask: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    r"""Scaled dot-product attention and its log-sum-exp.

    .. math:: o_i = \sum_j \frac{e^{s_{ij} - m_i}}{\ell_i} v_j, \quad s_{ij} = \tau\, q_i \cdot k_j, \quad
              m_i = \max_j s_{ij}, \quad \ell_i = \sum_j e^{s_{ij} - m_i}, \quad L_i = m_i + \log \ell_i

    Vaswani et al. 2017, equation 1; FlashAttention-2 (Dao 2023), section 3.1, for :math:`L`.

    Args:
        q: ``(D, Hq, Sq, B)``.
        k: ``(D, Hkv, Skv, B)``.
        v: ``(Dv, Hkv, Skv, B)``.
        scale: :math:`\tau`; default 1/sqrt(D).
        mask: which keys a query sees, as for :func:`visible`.

    Returns:
        out ``(Dv, Hq, Sq, B)`` and stats ``(Sq, Hq, B)``, float64. A query that sees no key gives 0 and -inf.

    >>> q = np.ones((8, 1, 2, 1)); v = np.arange(2.0).reshape(1, 1, 2, 1)
    >>> out, stats = attention(q, q, v, causal=True)
    >>> out.ravel()
    array([0. , 0.5])
    """
    d, query_heads, queries, batch = q.shape
    dv, key_heads, keys, _ = v.shape
    tau = 1 / math.sqrt(d) if scale is None else scale
    out = np.zeros((dv, query_heads, queries, batch))
    stats = np.full((queries, query_heads, batch), -np.inf)
    for b in range(batch):
        seen_by = [visible(i, b, queries, keys, **mask) for i in range(queries)]
        for h in range(query_heads):
            g = h // (query_heads // key_heads)  # the key/value head that this query head belongs to
            for i in range(queries):
                seen = seen_by[i]
                if not seen.any():
                    continue
                s = tau * (q[:, h, i, b].astype(np.float64) @ k[:, g, seen, b].astype(np.float64))
                m = s.max()
                e = np.exp(s - m)
                out[:, h, i, b] = v[:, g, seen, b].astype(np.float64) @ e / e.sum()
                stats[i, h, b] = m + np.log(e.sum())
    return out, stats


def visible(
    i: int,
    b: int,
    queries: int,
    keys: int,
    *,
    causal: bool | str = False,
    window: tuple[Any, ...] | None = None,
    seq_lens_q: NDArray[Any] | None = None,
    seq_lens_kv: NDArray[Any] | None = None,
) -> NDArray[np.bool_]:
    """Of every key whether query i of batch entry b sees it, key by key, in the words of the options.

    Args:
        i, b: the query.
        queries, keys: how many there are in the arrays.
        causal, window, seq_lens_q, seq_lens_kv: as for :func:`cupy_sdpa.attention`.

    >>> visible(1, 0, 3, 5, causal="bottom_right").tolist()
    [True, True, True, True, False]
    >>> visible(2, 0, 3, 5, window=(1, 0), seq_lens_kv=np.array([2])).tolist()
    [False, True, False, False, False]
    """
    own_queries = queries if seq_lens_q is None else int(seq_lens_q[b])
    own_keys = keys if seq_lens_kv is None else int(seq_lens_kv[b])
    left, right, *corner = window or (None, None)
    bottom_right = causal == "bottom_right" or corner == ["bottom_right"]
    diagonal = i + own_keys - own_queries if bottom_right else i
    j = np.arange(keys)
    seen: NDArray[np.bool_] = (j < own_keys) & (i < own_queries)
    if causal:
        seen &= j <= diagonal
    if left is not None:
        seen &= j >= diagonal - left
    if right is not None:
        seen &= j <= diagonal + right
    return seen


def attention_backward(
    dout: NDArray[Any], q: NDArray[Any], k: NDArray[Any], v: NDArray[Any], *, scale: float | None = None, **mask: Any
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    r"""The gradients of :func:`attention` by the chain rule, row by row, through the Jacobian of the softmax.

    .. math:: dv_j \mathrel{+}= p_{ij}\, do_i, \quad dp_{ij} = do_i \cdot v_j, \quad
              ds_{ij} = p_{ij} \Bigl(dp_{ij} - \sum_l p_{il}\, dp_{il}\Bigr), \quad
              dq_i = \tau \sum_j ds_{ij} k_j, \quad dk_j \mathrel{+}= \tau\, ds_{ij}\, q_i

    Dao 2023, "FlashAttention-2", section 2.2. It needs neither the output nor the log-sum-exp of the forward pass.

    Args:
        dout: the gradient of the output, ``(Dv, Hq, Sq, B)``.
        q, k, v, scale, mask: as for :func:`attention`.

    Returns:
        dq ``(D, Hq, Sq, B)``, dk ``(D, Hkv, Skv, B)``, dv ``(Dv, Hkv, Skv, B)``, float64; those of k and v are summed over
        the query heads of a group.

    >>> x = np.ones((8, 1, 2, 1))
    >>> dq, dk, dv = attention_backward(x, x, x, x)
    >>> float(abs(dq).max()), dv.ravel()[0]
    (0.0, np.float64(1.0))
    """
    d, query_heads, queries, batch = q.shape
    _, key_heads, keys, _ = k.shape
    tau = 1 / math.sqrt(d) if scale is None else scale
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    for b in range(batch):
        seen_by = [visible(i, b, queries, keys, **mask) for i in range(queries)]
        for h in range(query_heads):
            g = h // (query_heads // key_heads)
            for i in range(queries):
                seen = seen_by[i]
                if not seen.any():
                    continue
                kh, vh = k[:, g, seen, b].astype(np.float64), v[:, g, seen, b].astype(np.float64)
                qi, doi = q[:, h, i, b].astype(np.float64), dout[:, h, i, b].astype(np.float64)
                s = tau * (qi @ kh)
                p = np.exp(s - s.max())
                p /= p.sum()
                dp = doi @ vh
                ds = p * (dp - (p * dp).sum())
                dq[:, h, i, b] = tau * (kh @ ds)
                dk[:, g, seen, b] += tau * np.outer(qi, ds)
                dv[:, g, seen, b] += np.outer(doi, p)
    return dq, dk, dv
