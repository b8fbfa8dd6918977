"""What each row of a runner asked of sampling, kept from the step that opened it."""

import numpy as np

from quire.core.step import Late, Opens
from quire.kernels.contract import Draws


class SamplingColumns:
    """One array per parameter, one entry per row. Rows that were never opened are greedy."""

    def __init__(self, num_rows: int) -> None:
        self._seeds = np.zeros(num_rows, np.uint64)
        self._sample_indices = np.zeros(num_rows, np.int32)
        self._temperatures = np.zeros(num_rows, np.float32)
        self._top_ps = np.ones(num_rows, np.float32)
        self._top_ks = np.zeros(num_rows, np.int32)
        self._min_ps = np.zeros(num_rows, np.float32)
        self.num_logprobs = np.full(num_rows, -1, np.int32)

    def open(self, opens: Opens) -> None:
        """Remember what the opened rows ask for."""
        rows = opens.rows
        self._seeds[rows] = opens.seeds
        self._sample_indices[rows] = opens.sample_indices
        self._temperatures[rows] = opens.temperatures
        self._top_ps[rows] = opens.top_ps
        self._top_ks[rows] = opens.top_ks
        self._min_ps[rows] = opens.min_ps
        self.num_logprobs[rows] = opens.num_logprobs

    def draws(self, rows: np.ndarray, positions: np.ndarray, late: Late) -> Draws:
        """For logits of `rows`, whose tokens will stand at `positions`. Masks of other rows are left out."""
        order = np.full(len(self._seeds), -1, np.int64)
        order[rows] = np.arange(len(rows))
        masked = order[late.rows]
        sampled = masked >= 0
        return Draws(
            self._seeds[rows],
            self._sample_indices[rows],
            positions,
            self._temperatures[rows],
            self._top_ps[rows],
            self._top_ks[rows],
            self._min_ps[rows],
            masked[sampled],
            late.masks[sampled],
        )
