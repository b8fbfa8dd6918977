"""The last token that each row sampled, on the device: steps that are planned before it is known read it there."""

import numpy as np
import torch
from torch import Tensor

from quire.kv_store.upload import uploaded


class Latest:
    """One token per row."""

    def __init__(self, max_num_seqs: int, device: torch.device) -> None:
        self._tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)

    def put(self, rows: np.ndarray, tokens: Tensor) -> None:
        """tokens int64 (len(rows),); -1 becomes 0, as nothing may come of it, but it is looked up."""
        self._tokens.index_copy_(0, uploaded(rows.astype(np.int64), tokens.device), tokens.clamp(min=0))

    def fill(self, token_ids: Tensor, missing: tuple[np.ndarray, np.ndarray]) -> None:
        """Write into token ids what the host does not know: see `Rows.missing`."""
        indices, rows = missing
        if len(rows):
            tokens = self._tokens.index_select(0, uploaded(rows, token_ids.device))
            token_ids.index_copy_(0, uploaded(indices, token_ids.device), tokens)
