"""What each row of a runner asked of sampling, kept from the step that opened it."""

import numpy as np

from quire.core.step import Late, Opens
from quire.kernels.contract import Draws, History
from quire.sampling.lists import TokenLists

_COLUMNS: dict[str, type[np.generic]] = {
    "seeds": np.uint64,
    "sample_indices": np.int32,
    "temperatures": np.float32,
    "top_ps": np.float32,
    "top_ks": np.int32,
    "min_ps": np.float32,
    "num_logprobs": np.int32,
    "num_prompt_logprobs": np.int32,
    "prompt_lens": np.int32,
    "min_lens": np.int32,
    "presence_penalties": np.float32,
    "frequency_penalties": np.float32,
    "repetition_penalties": np.float32,
}
_NO_HISTORY = History(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
_SMALLEST = np.finfo(np.float32).tiny


class SamplingColumns:
    """One array per parameter, one entry per row, which means nothing before the row was opened."""

    def __init__(self, num_rows: int, vocab_size: int) -> None:
        self._columns = {name: np.zeros(num_rows, kind) for name, kind in _COLUMNS.items()}
        self.lists = TokenLists(num_rows, vocab_size)

    def __getitem__(self, name: str) -> np.ndarray:
        """The column of that name, for all rows."""
        return self._columns[name]

    def open(self, opens: Opens) -> None:
        """Remember what the opened rows ask for, and nothing else about them."""
        if not len(opens):
            return
        for name, column in self._columns.items():
            column[opens.rows] = getattr(opens, name)
        repetition = self._columns["repetition_penalties"]
        np.maximum(repetition, _SMALLEST, out=repetition)  # 0, which a small float64 may have become, divides badly
        self.lists.open(opens)

    def draws(self, rows: np.ndarray, positions: np.ndarray, tokens: np.ndarray, late: Late) -> Draws:
        """For logits of `rows`, whose tokens will stand at `positions` of `tokens` (all rows, positions).

        Late masks of other rows are left out.
        """
        column = {name: values[rows] for name, values in self._columns.items()}
        return Draws(
            seeds=column["seeds"],
            sample_indices=column["sample_indices"],
            positions=positions,
            temperatures=column["temperatures"],
            top_ps=column["top_ps"],
            top_ks=column["top_ks"],
            min_ps=column["min_ps"],
            presence_penalties=column["presence_penalties"],
            frequency_penalties=column["frequency_penalties"],
            repetition_penalties=column["repetition_penalties"],
            masks=self.lists.masks(rows, late),
            edits=self.lists.edits(rows, positions, column["min_lens"], tokens),
            history=_history(rows, positions, column, tokens),
        )


def _history(rows: np.ndarray, stops: np.ndarray, column: dict[str, np.ndarray], tokens: np.ndarray) -> History:
    """The tokens before `stops` in the rows with penalties."""
    counts_prompt = column["repetition_penalties"] != 1
    counts_output = (column["presence_penalties"] != 0) | (column["frequency_penalties"] != 0)
    asking = np.flatnonzero(counts_prompt | counts_output)
    if not len(asking):
        return _NO_HISTORY
    prompts = column["prompt_lens"][asking].astype(np.int64)
    starts = np.where(counts_prompt[asking], 0, prompts)
    lengths = np.maximum(stops[asking] - starts, 0)
    ends = np.cumsum(lengths)
    positions = np.arange(lengths.sum()) + np.repeat(starts - (ends - lengths), lengths)
    indices = np.repeat(asking, lengths)
    return History(indices, tokens[rows[indices], positions].astype(np.int64), positions >= np.repeat(prompts, lengths))
