"""Sampling metadata for tests, from plain lists, and masks from sets of allowed tokens."""

import numpy as np
import torch

from quire.kernels.sampling_contract import History, LogitEdits, Masks, SamplingMetadata


def draws(num_rows, *, seeds=0, sample_indices=0, positions=0, temperatures=1.0, top_ps=1.0, top_ks=0, min_ps=0.0,
          presence=0.0, frequency=0.0, repetition=1.0, masked=(), masks=None, edits=(), history=()):  # fmt: skip
    """Sampling metadata. Each argument is one value for all rows, or one per row.

    edits: (row, token, value). history: (row, token, whether it is an output token).
    """

    def column(value, dtype):
        return np.broadcast_to(np.asarray(value, dtype), (num_rows,)).copy()

    def table(entries, dtypes):
        columns = zip(*entries, strict=True) if len(entries) else ([], [], [])
        return [np.array(values, dtype) for values, dtype in zip(columns, dtypes, strict=True)]

    return SamplingMetadata(
        column(seeds, np.uint64),
        column(sample_indices, np.int32),
        column(positions, np.int32),
        column(temperatures, np.float32),
        column(top_ps, np.float32),
        column(top_ks, np.int32),
        column(min_ps, np.float32),
        column(presence, np.float32),
        column(frequency, np.float32),
        column(repetition, np.float32),
        Masks(np.array(masked, np.int64), np.zeros((0, 0), np.uint32) if masks is None else masks),
        LogitEdits(*table(edits, (np.int64, np.int64, np.float32))),
        History(*table(history, (np.int64, np.int64, np.bool_))),
    )


def mask(allowed, vocab_size):
    """Bitmask rows (len(allowed), words) from sets of allowed tokens, one bit at a time."""
    rows = [[0] * -(-vocab_size // 32) for _ in allowed]
    for row, tokens in zip(rows, allowed, strict=True):
        for token in tokens:
            row[token // 32] |= 1 << token % 32
    return np.array(rows, np.uint32)


def normal(num_rows, vocab_size, seed=0, deviation=2.0):
    """Normally distributed logits."""
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * deviation


def random_draws(num_rows, seed, **more):
    """Rows with all combinations of parameters."""
    dice = np.random.default_rng(seed)
    columns = {
        "seeds": dice.integers(0, 2**64, num_rows, dtype=np.uint64),
        "positions": dice.integers(0, 2**31, num_rows),
        "sample_indices": dice.integers(0, 128, num_rows),
        "temperatures": dice.choice([0, 0.3, 1, 2.5, 1e-20], num_rows),
        "top_ps": dice.choice([1, 0.95, 0.5, 0.07, 1e-6, 1 - 2**-24], num_rows),
        "top_ks": dice.choice([-1, 0, 1, 3, 50, 700], num_rows),
        "min_ps": dice.choice([0, 0, 0.03, 0.4, 1], num_rows),
    }
    return draws(num_rows, **columns, **more)
