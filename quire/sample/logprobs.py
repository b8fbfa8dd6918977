"""Log probabilities of sampled tokens and of their most likely alternatives."""

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Logprobs


def report(logits: Tensor, tokens: Tensor, num_logprobs: np.ndarray) -> Logprobs | None:
    """For each row of logits (num_rows, vocab_size): the token sampled from it, then the most likely ones.

    Natural logarithms of the softmax of the raw logits, in float32. num_logprobs (num_rows,) is how many
    alternatives a row wants; -1 wants no report. Where nothing is reported (columns that a row did not
    ask for, rows that did not ask, tokens of -1) ids are -1, values -inf and ranks 0.
    None when no row asks.
    """
    asking = np.flatnonzero(num_logprobs >= 0)
    if not len(asking):
        return None
    width = 1 + min(int(num_logprobs.max()), logits.shape[-1])
    ids = np.full((len(num_logprobs), width), -1, np.int32)
    values = np.full((len(num_logprobs), width), -np.inf, np.float32)
    ranks = np.zeros(len(num_logprobs), np.int32)
    asking = asking[tokens.cpu().numpy()[asking] >= 0]

    rows = torch.from_numpy(asking).to(logits.device)
    logprobs = logits[rows].float().log_softmax(-1)
    chosen = tokens[rows].unsqueeze(1)
    own = logprobs.gather(1, chosen)
    best = logprobs.topk(width - 1)
    ids[asking] = torch.cat((chosen, best.indices), 1).cpu().numpy()
    values[asking] = torch.cat((own, best.values), 1).cpu().numpy()
    ranks[asking] = ((logprobs > own).sum(-1) + 1).cpu().numpy()
    unwanted = np.arange(width) > num_logprobs[:, None]
    ids[unwanted] = -1
    values[unwanted] = -np.inf
    return Logprobs(ids, values, ranks)
