"""Paged attention as a loop over queries."""

import numpy as np


def naive(q, k, v, start, scale, window=0, softcap=0.0):
    """q (queries, heads, dim) of positions from `start`; k, v (keys, KV heads, their dim). One product at a time."""
    out = np.zeros((*q.shape[:2], v.shape[2]))
    shared = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        for head in range(q.shape[1]):
            seen = slice(max(0, start + i + 1 - window) if window else 0, start + i + 1)
            keys = k[seen, head // shared].astype(np.float64)
            scores = keys @ q[i, head].astype(np.float64) * scale
            if softcap:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            out[i, head] = weights @ v[seen, head // shared].astype(np.float64) / weights.sum()
    return out.reshape(q.shape[0], -1)
