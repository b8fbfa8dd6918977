"""Log probabilities of tokens, their ranks, and the most likely tokens of rows of logits."""

import torch
from torch import Tensor


def logprobs(logits: Tensor, tokens: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values of `tokens`, ranks of the first of them, ids and values of the k most likely: see the contract."""
    values = logits.float().log_softmax(-1)
    own = values.gather(1, tokens.to(values.device))
    ranks = (values > own[:, :1]).sum(-1) + 1
    ids = _most_likely(values, k)
    return own, ranks.int(), ids.int(), values.gather(1, ids)


def _most_likely(values: Tensor, k: int) -> Tensor:
    """Ids (num_rows, k) of the largest float32 values, falling; equals in the order of their ids.

    topk says nothing about the order of equals, so it is given integers of which no two are equal: the bits of
    a float, those below 0 turned over, rank as the float does.
    """
    bits = (values + 0.0).view(torch.int32).long()  # + 0.0 makes -0.0 the 0.0 that it is equal to
    ranks = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(values.shape[1], device=values.device)
    keys = (ranks << 32) + (2**32 - 1 - ids)
    return keys.topk(k).indices
